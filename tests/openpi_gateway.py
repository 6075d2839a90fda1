"""Runs the gateway for robots as a program, and installs the package that robots have, ``openpi-client``.

``package`` is a folder with that package alone, which this process can import; ``environment`` has all that it needs, with a
numpy below 2. Both are made once a run by pip, and tests are skipped where it finds no index.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.daemon_process import PATIENCE, ROOT, end_group, has_ended, wait_until
from tests.run_folder import only_one
from tests.written_log import WrittenLog

_PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
CLIENT = "openpi-client==0.1.2"
_SERVED_ON = re.compile(r"(?:robots|models) are served on \S+:(\d+)")


def package(version: str = CLIENT) -> Path:
    """Returns a folder with the package of that version and nothing else."""
    return installed(version, version)


def installed(name: str, *packages: str) -> Path:
    """Returns a folder with these packages and nothing else, without what they depend on. It is made once a run."""
    with only_one(name) as folder:
        if not (folder / "ready").exists():
            _installed(*_PIP, "install", "--no-deps", "--no-compile", "--target", folder / "site", *packages)
            (folder / "ready").touch()
    return folder / "site"


def environment() -> Path:
    """Returns the interpreter of an environment for robots. It finds the client of this checkout, built for this one."""
    return made("openpi", CLIENT, "numpy<2", "gymnasium>=1,<2")


def jax_of_openpi() -> Path:
    """Returns the interpreter of an environment with the JAX and the numpy that openpi pins."""
    return made("openpi-jax", "jax==0.5.3", "jaxlib==0.5.3", "numpy==1.26.4", "absl-py", "flatbuffers<26")


def made(name: str, *packages: str) -> Path:
    """Returns the interpreter of an environment with packages and the client of this checkout. It is made once a run."""
    with only_one(name) as folder:
        python = folder / "venv" / "bin" / "python"
        if not (folder / "ready").exists():
            _installed(sys.executable, "-m", "venv", "--clear", "--without-pip", folder / "venv")
            _installed(*_PIP, "--python", python, "install", "--no-compile", *packages)
            (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
            (site / "checkout.pth").write_text(f"{ROOT / 'client'}\n")
            (folder / "ready").touch()
    return python


def _installed(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[-1]} cannot be installed: {(done.stderr or done.stdout).strip()[-300:]}")


def packed(value: Any) -> Any:
    """Returns an array as openpi-client packs it, and any other value as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": list(value.shape)}


def observation(**values: Any) -> bytes:
    return bytes(msgpack.packb({name: packed(value) for name, value in values.items()}))


def actions(answer: bytes | str) -> dict[str, Any]:
    """Reads an answer, which has to be no error."""
    assert isinstance(answer, bytes), answer
    found = msgpack.unpackb(answer)
    for name, value in found.items():
        if b"__ndarray__" in (value if isinstance(value, dict) else ()):
            found[name] = np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"])
    return dict(found)


class GatewayProcess:
    """Runs the program of a gateway (``module``) on a free port of this host. Use as a context manager."""

    def __init__(
        self,
        server: str | Path,
        *arguments: str,
        python: str | Path = sys.executable,
        module: str = "tensord_client.openpi",
    ) -> None:
        self._command = [python, "-m", module, "--address", "127.0.0.1:0", "--server", server, *arguments]
        self._log = WrittenLog()
        #: Variables besides this process's own.
        self.variables: dict[str, str] = {}
        self.port = 0

    @property
    def log(self) -> str:
        return self._log.text

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> GatewayProcess:
        self.start()
        wait_until(lambda: _SERVED_ON.search(self.log) or has_ended(self._process), "the gateway to serve")
        found = _SERVED_ON.search(self.log)
        if found is None:
            self.stop()
            raise AssertionError(self.log)
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it, and does not wait until it serves."""
        self._process = subprocess.Popen(
            [str(word) for word in self._command],
            env=os.environ | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )

    def wait_ended(self) -> None:
        """Waits until it has ended by itself."""
        wait_until(lambda: has_ended(self._process), "the gateway to end")

    def stop(self) -> int:
        """Sends SIGTERM unless it has ended, and waits for its end; returns its exit status."""
        try:
            return end_group(self._process, signal.SIGTERM)
        finally:
            self._log.close()


def ran(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs the program to its end."""
    command = [sys.executable, "-m", "tensord_client.openpi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)

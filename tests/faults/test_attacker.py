"""One attacker with every trick, beside clients that behave: it costs nobody but itself anything, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests import repositories
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until
from tests.faults.attacker import MANY, SIZE
from tests.faults.load import CheckedLoad

#: Of the attacker and the honest clients together: all are on one host.
_QUOTA = 64
#: All values of the key ``regions.access``.
ACCESS = ("guarded", "snapshot")


class HonestRegion:
    """A client that uses a region of its own as input and output until the ``with`` block ends."""

    def __init__(self, daemon: DaemonProcess, prefix: str) -> None:
        self._url, self._name = daemon.url, f"{prefix}-honest"
        self.path = Path("/dev/shm", self._name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.errors: list[str] = []

    def __enter__(self) -> HonestRegion:
        self.path.write_bytes(bytes(2 * SIZE))
        with httpclient.InferenceServerClient(self._url, network_timeout=PATIENCE) as client:
            client.register_system_shared_memory(self._name, "/" + self._name, 2 * SIZE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        with httpclient.InferenceServerClient(self._url, network_timeout=PATIENCE) as client:
            client.unregister_system_shared_memory(self._name)
        self.path.unlink()

    def _run(self) -> None:
        given = httpclient.InferInput("x", [SIZE // 4], "FP32")
        given.set_shared_memory(self._name, SIZE)
        wanted = httpclient.InferRequestedOutput("y")
        wanted.set_shared_memory(self._name, SIZE, offset=SIZE)
        memory = np.memmap(self.path, np.float32, "r+", shape=(2, SIZE // 4))
        with httpclient.InferenceServerClient(
            self._url, connection_timeout=PATIENCE, network_timeout=PATIENCE
        ) as client:
            while not self._stop.wait(0.01):
                memory[0] = self.answers
                try:
                    client.infer("echo_fp32", [given], outputs=[wanted])
                    assert (memory[1] == self.answers).all(), "a wrong answer"
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                self.answers += 1


def story(folder: Path, access: str, fill: bool) -> dict[str, Any]:
    """Runs the attacker beside clients that behave; returns what was seen. ``fill``: /dev/shm is a small one of our own."""
    repository = repositories.echo_models(folder / "repository", ["BOOL", "FP32"])
    repositories.scale_model(repository)
    prefix = f"tensord-test-{uuid.uuid4().hex}"
    options = {"regions": {"access": access, "max_owner_count": _QUOTA}, "workers": {"device": "cpu", "pin": False}}
    foreign = Path("/dev/shm", f"{prefix}-foreign")
    foreign.write_bytes(bytes(4096))
    if os.geteuid() == 0:
        os.chmod(foreign, 0o600)
        os.chown(foreign, 12345, 12345)
    (folder / "daemon").mkdir()
    before = set(os.listdir("/dev/shm"))
    with DaemonProcess(folder / "daemon", [repository], options) as daemon:
        daemon.wait_ready()
        workers = daemon.workers
        (worker,) = workers
        with CheckedLoad(daemon, 3) as load, HonestRegion(daemon, prefix) as honest:
            fds, maps = worker.num_fds(), len(worker.memory_maps(grouped=False))
            command = [sys.executable, "-m", "tests.faults.attacker", daemon.url, prefix, "fill" if fill else "no"]
            keys = [f"/{foreign.name}"] if os.geteuid() == 0 else []
            done = subprocess.run([*command, *keys], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            last, answers = honest.answers, load.answers
            wait_until(lambda: honest.answers > last and load.answers > answers, "the others to go on", daemon)
            # A batch may be under way: the segments of its lane come and go, clients' objects must be gone.
            wait_until(
                lambda: all(
                    prefix not in e.path or e.path == str(honest.path) for e in worker.memory_maps(grouped=False)
                ),
                "the attacker's mappings to be gone",
                daemon,
            )
            left = {"fds": worker.num_fds() - fds, "maps": len(worker.memory_maps(grouped=False)) - maps}
            with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client:
                listed = [entry["name"] for entry in client.get_system_shared_memory_status()]
        return {
            "messages": json.loads(done.stdout),
            "honest": [honest.answers, honest.errors],
            "load": [load.answers, load.wrong, load.errors],
            "left": left,
            "listed": listed == [honest.path.name],
            "same_worker": [found.pid for found in daemon.workers] == [worker.pid],
            "objects": sorted(set(os.listdir("/dev/shm")) - before) if fill else [],
            "prefix": prefix,
            "foreign": foreign.unlink(),
        }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, leaves_nothing: None) -> tuple[dict[str, Any], bool]:
    """Runs the story for each way of access, in one process. Returns what was seen, and whether /dev/shm was filled."""
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm || exit 77; exec "$@"'
    folder = tmp_path_factory.mktemp("attacker")
    arguments = [sys.executable, "-m", "tests.faults.test_attacker", str(folder)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *arguments, "fill"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    filled = not (done.returncode == 77 or "unshare failed" in done.stderr or "Operation not permitted" in done.stderr)
    if not filled:
        # A mount namespace of our own is not allowed here: everything but the full /dev/shm.
        done = subprocess.run([*arguments, "no"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), filled


@pytest.mark.parametrize("access", ACCESS)
def test_an_attacker_with_every_trick(told: tuple[dict[str, Any], bool], access: str) -> None:
    """
    1. An attacker truncates, punches, rewrites, unlinks and re-creates its objects while requests use them; registers what is
       somebody else's or no memory; tries offsets and sizes of every kind; fills /dev/shm under a sparse region; registers
       thousands. 2. Four clients work meanwhile, one with a region of its own.
    Result: the others get right answers only, no worker dies, what the attacker must not have is refused in words that tell
    nothing, quotas hold, and nothing is left of it.
    """
    reports, filled = told
    report = reports[access]
    assert report["honest"][1] == []
    assert report["load"][1:] == [0, []]
    assert report["same_worker"]
    assert report["listed"]
    assert report["objects"] == []
    assert report["left"]["fds"] <= 10, report["left"]
    assert report["left"]["maps"] <= 32, report["left"]
    _check_refusals(report["messages"], report["prefix"], filled, access)


def _check_refusals(messages: dict[str, list[str]], prefix: str, filled: bool, access: str) -> None:
    flood = messages.pop("flood")
    # The honest client's is one of them.
    assert len(flood) == MANY - (_QUOTA - 1)
    assert all(
        f"{_QUOTA} regions are registered by this client's user or host, at most {_QUOTA}" in text for text in flood
    )
    names = [trick for trick in messages if trick.startswith("name ")]
    assert len(names) == 12 + (os.geteuid() == 0)
    ranges = [trick for trick in messages if trick.startswith("range ")]
    # A snapshot need not start on a page.
    assert len(ranges) == 8 - (access == "snapshot")
    assert len([trick for trick in messages if trick.startswith("slice ")]) == 14
    assert messages.get("truncated")
    assert messages.get("rewritten")
    assert ("full" in messages) is filled
    for trick, texts in messages.items():
        key = trick.removeprefix("name ")
        for text in texts:
            assert "Traceback" not in text, trick
            # A path is told to whoever named it, nothing else of the host.
            told = text.replace(key, "") if trick.startswith("name ") else text
            for secret in ("/dev/shm", "/proc/", "memfd", str(ROOT)):
                assert secret not in told, (trick, text)


if __name__ == "__main__":
    stories = {}
    for each in ACCESS:
        own = Path(sys.argv[1], each)
        own.mkdir()
        stories[each] = story(own, each, sys.argv[2] == "fill")
    print(json.dumps(stories))

"""``tensord check`` by root runs as the user of the installed service, and leaves in its cache what the service's start needs."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.daemon import service_user
from tests import repositories
from tests.daemon_process import ROOT

SHOWN = """LoadState=loaded
User={user}
Group={group}
SupplementaryGroups=4 5
WorkingDirectory=!{folder}
CacheDirectory=tensord:link other
CacheDirectoryMode=0700
ProtectHome={home}
Environment=TENSORD_LOG_VERBOSE=1 "TENSORD_SERVER_NAME=two words"
"""


def test_what_systemd_shows() -> None:
    assert service_user.parsed(
        SHOWN.format(user="tensord", group="tensord", folder="/var/lib/tensord", home="yes")
    ) == service_user.Service(
        "tensord",
        "tensord",
        ("4", "5"),
        "/var/lib/tensord",
        "/var/cache/tensord",
        0o700,
        {"TENSORD_LOG_VERBOSE": "1", "TENSORD_SERVER_NAME": "two words"},
        without_homes=True,
    )
    assert service_user.parsed("LoadState=not-found\nUser=\n") is None
    assert service_user.parsed("LoadState=loaded\nUser=\n") == service_user.Service("root")
    assert service_user.parsed("") is None


@pytest.fixture
def place() -> Iterator[Path]:
    """Yields a folder that other users may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def python() -> str:
    """Returns a Python that other users can run: this one, or the system's with the libraries of this one."""
    for found in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [found, "-c", "import tensord, click"], cwd=ROOT, env=environment(), check=False, user="nobody"
            )
            if done.returncode == 0:
                return found
    pytest.skip("other users can use no Python that has the libraries")


def environment() -> dict[str, str]:
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
    return ours | {"PYTHONPATH": os.pathsep.join([str(ROOT), *libraries])}


def check(python: str, programs: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the command in the folder ``programs``, which is the first where programs are found."""
    variables = environment() | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [python, "-m", "tensord", "check", *map(str, words)]
    return subprocess.run(command, cwd=programs, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_checks_as_the_service(place: Path, python: str) -> None:
    """It is in the unit's working directory, and whatever is written is that user's."""
    user = pwd.getpwnam("nobody")
    repositories.scale_model(place / "served" / "models")
    caches, programs = place / "cache", place / "bin"
    programs.mkdir()
    caches.mkdir(mode=0o700)
    os.chown(caches, user.pw_uid, user.pw_gid)
    configuration = place / "tensord.toml"
    configuration.write_text(
        f'[repository]\npaths = ["models"]\n[workers]\ndevice = "cpu"\npin = false\n'
        f'[executables]\ncache_directory = "{caches}"\n'
    )
    fake = programs / "systemctl"
    # The cache of this test is not systemd's.
    shown = SHOWN.format(user="nobody", group=user.pw_gid, folder=place / "served", home="read-only").replace(
        "tensord:link other", ""
    )
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{shown}END\n")
    fake.chmod(0o755)
    done = check(python, programs, "../tensord.toml")
    assert (done.returncode, done.stdout) == (0, "scale: version 1\nconfiguration: good; models: 1 good, 0 bad\n")
    assert f"as user nobody, in {place / 'served'}" in done.stderr.splitlines()
    made = list(caches.iterdir())
    assert made
    assert {path.stat().st_uid for path in made} == {user.pw_uid}

    # A file that the service may not read is refused as the service would refuse it.
    configuration.chmod(0o600)
    done = check(python, programs, "../tensord.toml")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"tensord: {programs / '../tensord.toml'}: cannot be read: Permission denied",
    )
    done = check(python, programs, "--user=root", "--read-only", "../tensord.toml")
    # Relative paths begin where root is now.
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"tensord: model repository '{programs / 'models'}': No such file or directory",
    )
    done = check(python, programs, "--user=no-such-user", "../tensord.toml")
    assert (done.returncode, done.stderr) == (2, "tensord: there is no user or group 'no-such-user' on this host\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_only_root_becomes_somebody_else(python: str) -> None:
    command = [python, "-m", "tensord", "check", "--user=root", "--model-repository=."]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, user="nobody"
    )
    assert (done.returncode, done.stderr) == (2, "tensord: --user=root: only root can run as another user\n")

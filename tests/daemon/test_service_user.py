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
from textwrap import dedent

import pytest

from tensord.daemon import service_user
from tests import repositories
from tests.daemon_process import ROOT

UNIT = """[Unit]
StartLimitBurst=10
[Service]
Type=notify
ExecStart=/bin/false \\
    --config x
# Restart=no
User={user}
ProtectSystem=strict
WorkingDirectory={folder}
TimeoutStopSec=45
SystemCallFilter=@system-service
"""
DROP_IN = """
[Service]
Restart = always
NoNewPrivileges = yes
Environment=TENSORD_LOG_VERBOSE=1 "TENSORD_SERVER_NAME=two words"
SystemCallFilter=~@privileged
[Install]
WantedBy=multi-user.target
"""


def test_what_a_unit_says_of_its_sandbox() -> None:
    assert service_user.settings(UNIT.format(user="tensord", folder="/var/lib/tensord") + DROP_IN) == [
        "User=tensord",
        "ProtectSystem=strict",
        "WorkingDirectory=/var/lib/tensord",
        "SystemCallFilter=@system-service",
        "NoNewPrivileges=yes",
        'Environment=TENSORD_LOG_VERBOSE=1 "TENSORD_SERVER_NAME=two words"',
        "SystemCallFilter=~@privileged",
    ]


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
    """systemd is asked to run the check with what the unit says (tests/systemd has a real one); another user's is run here."""
    user = pwd.getpwnam("nobody")
    served, caches, programs = place / "served", place / "cache", place / "bin"
    repositories.scale_model(served / "models")
    programs.mkdir()
    caches.mkdir(mode=0o700)
    os.chown(caches, user.pw_uid, user.pw_gid)
    configuration = place / "tensord.toml"
    configuration.write_text(
        f'[repository]\npaths = ["models"]\n[workers]\ndevice = "cpu"\npin = false\n'
        f'[executables]\ncache_directory = "{caches}"\n'
    )
    unit, drop_in = place / "tensord.service", place / "more.conf"
    unit.write_text(UNIT.format(user="nobody", folder=served))
    drop_in.write_text(DROP_IN)
    shown = f"LoadState=loaded\nUser=nobody\nWorkingDirectory=!{served}\nFragmentPath={unit}\nDropInPaths={drop_in}\n"
    write_program(programs / "systemctl", f"cat <<'END'\n{shown}END\n")
    # It says how it was called, and runs the program as nobody.
    write_program(
        programs / "systemd-run",
        f"""
        while [ "$1" != -- ]; do
            printf '%s\\n' "$1"
            case "$1" in --setenv=*) export "${{1#--setenv=}}" ;; esac
            shift
        done
        shift 2
        cd {served} && exec setpriv --reuid {user.pw_uid} --regid {user.pw_gid} --clear-groups {python} "$@"
        """,
    )
    done = check(python, programs, "../tensord.toml")
    printed = done.stdout.splitlines()
    assert (done.returncode, printed[-2:]) == (0, ["scale: version 1", "configuration: good; models: 1 good, 0 bad"])
    assert f"as user nobody, in {served}" in done.stderr.splitlines()
    properties = [line.removeprefix("--property=") for line in printed if line.startswith("--property=")]
    assert properties == [
        *service_user.settings(unit.read_text()),
        *service_user.settings(DROP_IN),
        "RuntimeDirectoryPreserve=yes",
    ]
    made = list(caches.iterdir())
    assert made
    assert {path.stat().st_uid for path in made} == {user.pw_uid}

    # A model that cannot be served.
    model = served / "models" / "scale" / "1" / "model.py"
    source = model.read_text()
    model.write_text("def create(path, config, device): raise ValueError('broken')\n")
    done = check(python, programs, "../tensord.toml")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "configuration: good; models: 0 good, 1 bad")
    model.write_text(source)

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
    write_program(programs / "systemd-run", "exit 203\n")
    done = check(python, programs, "../tensord.toml")
    assert done.returncode == 2
    assert f"tensord: tensord.service cannot use {python} (status=203/EXEC): install" in done.stderr
    write_program(programs / "systemd-run", "echo Failed to start transient service unit >&2; exit 1\n")
    done = check(python, programs, "../tensord.toml")
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (
        2,
        [
            "Failed to start transient service unit",
            "tensord: the check as tensord.service did not come to its end; what is written above, or the journal, says why",
        ],
    )
    drop_in.unlink()
    done = check(python, programs, "../tensord.toml")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"tensord: '{drop_in}', of which systemd says that it is a file of tensord.service, can"
    )
    write_program(programs / "systemctl", "exit 1\n")
    done = check(python, programs, "--user=no-such-user", "../tensord.toml")
    assert (done.returncode, done.stderr) == (2, "tensord: there is no user or group 'no-such-user' on this host\n")
    done = check(python, programs, "--user=nobody", "../tensord.toml")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"as user nobody, in {programs}")


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{dedent(script)}")
    path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_only_root_becomes_somebody_else(python: str) -> None:
    command = [python, "-m", "tensord", "check", "--user=root", "--model-repository=."]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, user="nobody"
    )
    assert (done.returncode, done.stderr) == (2, "tensord: --user=root: only root can run as another user\n")

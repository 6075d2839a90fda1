"""The service files, by systemd's own judgement where it is installed."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensord_client import gateway, openpi

from tensord.config.options import Grpc, Http
from tests.daemon_process import DaemonProcess

FOLDER = Path(__file__).parent.parent.parent / "systemd"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_analyze_verify(tmp_path: Path) -> None:
    """The programs and users of an installation are not here, so the copies name some that are; nothing else is changed."""
    names = ("tensord.service", "tensord.socket", "tensord-grpc.socket", "tensord-openpi.service")
    for name in names:
        text = (
            (FOLDER / name)
            .read_text()
            .replace("/opt/tensord/venv/bin/tensorctl", "/bin/true")
            .replace("/opt/tensord/venv/bin/tensord", "/bin/true")
            .replace("/opt/tensord/openpi/bin/python", "/bin/true")
        )
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "tensord" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["tensord", "tensord-openpi"])
def test_exposure(unit: str) -> None:
    """systemd's sum of what the sandbox leaves open: 9.6 without any, and what was measured to work is below 2.5."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(FOLDER / f"{unit}.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "offline" in done.stderr:
        pytest.skip("this systemd-analyze has no --offline")
    found = re.search(rf"exposure level for {unit}.service: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) < 2.5


def test_what_was_measured_stands() -> None:
    lines = (FOLDER / "tensord.service").read_text().splitlines()
    for directive in ("Type=notify", "KillMode=mixed", "WatchdogSec=20", "OOMPolicy=continue", "RemoveIPC=no"):
        assert directive in lines
    assert not [line for line in lines if line.startswith(("MemoryDenyWriteExecute", "DynamicUser", "PrivateDevices"))]


def test_a_reload_can_fail(tmp_path: Path) -> None:
    """The unit asks the daemon, which refuses a wrong file; the command is in this installation, too."""
    unit = (FOLDER / "tensord.service").read_text()
    (command,) = re.findall(r"^ExecReload=/opt/tensord/venv/bin/(.+)$", unit, re.MULTILINE)
    environment = {**os.environ, "RUNTIME_DIRECTORY": str(tmp_path)}
    program, *arguments = command.split()
    installed = Path(sys.executable).with_name(program)

    def reload() -> subprocess.CompletedProcess[str]:
        return subprocess.run([installed, *arguments], env=environment, capture_output=True, text=True, check=False)

    (tmp_path / "models").mkdir()
    with DaemonProcess(tmp_path, [tmp_path / "models"], environment={"RUNTIME_DIRECTORY": str(tmp_path)}) as daemon:
        done = reload()
        assert (done.returncode, done.stderr) == (0, "")
        daemon.config.write_text("[http]\nprot = 1\n")
        done = reload()
        assert done.returncode == 1
        assert f"{daemon.config}: unknown key http.prot; did you mean http.port?" in done.stderr
        assert daemon.get("/v2/health/ready")[0] == 200


def test_the_folder_of_the_configuration_is_made_alike() -> None:
    """systemd warns at each start of one whose mode differs."""
    mode = re.search(r"^ConfigurationDirectoryMode=(\d+)$", (FOLDER / "tensord.service").read_text(), re.MULTILINE)
    assert mode is not None
    assert f"d /etc/tensord {mode[1]} root tensord -" in (FOLDER / "tensord.tmpfiles").read_text().splitlines()


def test_models_are_roots_and_read() -> None:
    """Whoever can write to them runs code as the service's user."""
    (line,) = re.findall(r"^d (/var/lib/tensord/models) .*$", (FOLDER / "tensord.tmpfiles").read_text(), re.MULTILINE)
    assert f"d {line} 0750 root tensord -" in (FOLDER / "tensord.tmpfiles").read_text().splitlines()
    assert f"ReadOnlyPaths=-{line}" in (FOLDER / "tensord.service").read_text().splitlines()


def test_the_sockets_say_their_protocols() -> None:
    """Both are passed to the one service, which tells them by their names; the addresses are those of the defaults."""
    for name, protocol, options in (("tensord.socket", "http", Http()), ("tensord-grpc.socket", "grpc", Grpc())):
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(FOLDER / name)
        assert unit["Socket"]["FileDescriptorName"] == protocol
        assert unit["Socket"].get("Service", "tensord.service") == "tensord.service"
        assert unit["Socket"]["ListenStream"] == f"{options.address[0]}:{options.port}"


def test_the_gateway_s_unit_uses_flags_and_times_that_it_has() -> None:
    unit = (FOLDER / "tensord-openpi.service").read_text()
    (command,) = re.findall(
        r"^ExecStart=/opt/tensord/openpi/bin/python -m tensord_client.openpi (.+)$", unit, re.MULTILINE
    )
    options, defaults = (gateway.options("m", openpi.__doc__, openpi.FLAGS, given) for given in (command.split(), []))
    assert options.address == defaults.address
    for key, needed in (("TimeoutStartSec", options.wait), ("TimeoutStopSec", options.stop_timeout)):
        (allowed,) = re.findall(rf"^{key}=(\d+)$", unit, re.MULTILINE)
        assert int(allowed) > needed
    assert "Type=notify" in unit.splitlines()


@pytest.mark.parametrize(
    ("tool", "file"), [("systemd-sysusers", "tensord.sysusers"), ("systemd-tmpfiles", "tensord.tmpfiles")]
)
def test_snippets(tool: str, file: str, tmp_path: Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "etc").mkdir()
    if tool == "systemd-sysusers":
        command = [tool, f"--root={tmp_path}", str(FOLDER / file)]
    else:
        (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\ntensord:x:990:990::/:/bin/false\n")
        (tmp_path / "etc" / "group").write_text("root:x:0:\ntensord:x:990:\n")
        command = [tool, f"--root={tmp_path}", "--create", str(FOLDER / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if tool == "systemd-tmpfiles":
        assert (tmp_path / "var/lib/tensord/models").stat().st_mode & 0o777 == 0o750
    else:
        assert "tensord" in (tmp_path / "etc" / "passwd").read_text()

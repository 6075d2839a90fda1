"""Tests where the operator's socket is, and who may have left one there."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tensord.config.options import SupervisorOptions
from tensord.daemon.operator.control_socket import ControlSocket
from tensord.shm.errors import InvalidArgument


def opened(path: Path) -> ControlSocket:
    commands: Any = None  # nothing is asked
    return ControlSocket(SupervisorOptions(control_socket=str(path)), {}, commands)


async def test_a_killed_predecessors_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    control = opened(path)
    await control.open()
    assert path.stat().st_mode & 0o777 == 0o600
    other = opened(path)
    with pytest.raises(InvalidArgument, match="Address already in use"):
        await other.open()
    control.close()
    control.close()
    assert not path.exists()


async def test_a_users_further_daemon_has_its_number_in_the_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the first has gone there is room again."""
    commands: Any = None
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    path = tmp_path / "tensord" / "control.sock"
    caplog.set_level("INFO")
    first, second, third = (ControlSocket(SupervisorOptions(), environment, commands) for _ in range(3))
    await first.open()
    assert (first.path, path.stat().st_mode & 0o777) == (path, 0o600)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path.with_name("control-1.sock")))
    await second.open()
    assert second.path == path.with_name(f"control-{os.getpid()}.sock")
    assert sorted(path.parent.iterdir()) == sorted([path, second.path])
    assert f"tensorctl finds this one with --socket {second.path}" in caplog.text
    second.close()
    assert path.exists()
    first.close()
    assert not path.exists()
    await third.open()
    assert third.path == path
    third.close()


@pytest.mark.parametrize("name", ["file", "folder/x", "x" * 200])
async def test_places_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InvalidArgument, match=r"supervisor\.control_socket"):
        await opened(tmp_path / name).open()
    assert (tmp_path / "file").read_text() == "precious"

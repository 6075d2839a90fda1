"""Where the operator's socket is, and who may have left one there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from config.options import Supervisor
from daemon.control_socket import ControlSocket
from shm.errors import InvalidArgument


def opened(path: Path) -> ControlSocket:
    operations: Any = None  # nothing is asked
    return ControlSocket(Supervisor(control_socket=str(path)), {}, operations, dict)


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


@pytest.mark.parametrize("name", ["file", "folder/x", "x" * 200])
async def test_places_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InvalidArgument, match=r"supervisor\.control_socket"):
        await opened(tmp_path / name).open()
    assert (tmp_path / "file").read_text() == "precious"

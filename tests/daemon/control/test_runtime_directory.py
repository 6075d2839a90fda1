"""Tests where daemons have their sockets by default, and where tensorctl looks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensord.daemon.control import runtime_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces /tmp, where the user's own daemon may have its folder."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(runtime_directory, "TEMPORARY", tmp_path / "tmp")
    return tmp_path / "tmp" / f"tensord-{os.geteuid()}"


def test_of_a_service() -> None:
    assert runtime_directory.of_service({}) is None
    assert runtime_directory.of_service({"RUNTIME_DIRECTORY": "/run/tensord:/run/other"}) == Path("/run/tensord")


def test_the_users_own_is_made_once_and_searched_first(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert tmp_path / "tensord" not in runtime_directory.searched(environment)
    for _ in range(2):
        assert runtime_directory.own(environment) == tmp_path / "tensord"
    assert (tmp_path / "tensord").stat().st_mode & 0o777 == 0o700
    found = runtime_directory.searched(environment)
    assert (found[0], found[-1]) == (tmp_path / "tensord", runtime_directory.SERVICE)
    assert runtime_directory.searched(environment | {"RUNTIME_DIRECTORY": "/run/other"}) == [Path("/run/other"), *found]


def test_one_that_others_can_write_into_is_not_used(tmp_path: Path, temporary: Path) -> None:
    """Somebody could answer there in the daemon's place."""
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    runtime_directory.own(environment).chmod(0o770)
    assert runtime_directory.own(environment) == temporary
    temporary.chmod(0o750)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        runtime_directory.own(environment)
    assert tmp_path / "tensord" not in runtime_directory.searched(environment)


def test_a_link_is_not_used(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "tensord").symlink_to(tmp_path / "elsewhere")
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime_directory.own(environment) == temporary
    assert tmp_path / "tensord" not in runtime_directory.searched(environment)


def test_without_the_variable_or_its_folder(temporary: Path) -> None:
    assert runtime_directory.own({}) == temporary
    assert runtime_directory.own({"XDG_RUNTIME_DIR": "/nowhere"}) == temporary
    assert runtime_directory.searched({}) == [temporary, runtime_directory.SERVICE]


def test_sockets_of_further_daemons(tmp_path: Path) -> None:
    for name in ("control-12.sock", "control-x.sock", "clients.sock", runtime_directory.further("control.sock", 3)):
        (tmp_path / name).touch()
    found = [path.name for path in runtime_directory.sockets(tmp_path, "control.sock")]
    assert found == ["control.sock", "control-12.sock", "control-3.sock"]

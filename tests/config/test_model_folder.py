"""What lies in a model's folder: what is passed over, what a walk sees, and what is opened."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from tensord.config import model_folder

#: What others leave beside ``model.jaxexport``.
LEFT_OVER = (
    "._model.jaxexport",
    ".#model.jaxexport",
    "#model.jaxexport#",
    "model.jaxexport~",
    ".model.jaxexport.swp",
    ".nfs00000000004a1b2c",
    ".DS_Store",
    "__pycache__",
)


def test_what_others_leave_beside_a_program_does_not_matter(tmp_path: Path) -> None:
    for name in ("model.jaxexport", *LEFT_OVER):
        (tmp_path / name).write_bytes(b"x")
    assert [name for name, _ in model_folder.walk(tmp_path)] == ["/", "model.jaxexport"]
    assert model_folder.programs(tmp_path) == [tmp_path / "model.jaxexport"]
    for name in ("model.py", "1", ".hidden", "_private", "a.swp", "x~y"):
        assert not model_folder.is_passed_over(name)


def test_a_walk_sees_each_folder_once_and_says_what_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "file").write_bytes(b"12")
    (tmp_path / "a").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    found = dict(model_folder.walk(tmp_path))
    assert list(found) == ["/", "a", "fifo", "b/", "b/file", "b/c/", "b/c/up/"]
    assert [name for name, status in found.items() if status is None] == ["a"]
    status = found["b/file"]
    assert status is not None
    assert status.st_size == 2
    with pytest.raises(FileNotFoundError):
        list(model_folder.walk(tmp_path / "none"))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A FIFO to which nobody writes holds nobody up, and no descriptor is left."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "file").write_bytes(b"content")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        before = os.listdir("/proc/self/fd")
        for name in ("fifo", "link", "socket", "/dev/null", "none", "."):
            with pytest.raises(OSError), open(tmp_path / name, "rb", opener=model_folder.regular):
                pass
        assert os.listdir("/proc/self/fd") == before
    with open(tmp_path / "file", "rb", opener=model_folder.regular) as file:
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        assert file.read() == b"content"

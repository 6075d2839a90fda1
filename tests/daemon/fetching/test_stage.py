"""The stage of a fetch, over a folder of this host: what it keeps, what it refuses, and how it takes a model's place."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tensord.config.options import Options
from tensord.daemon import fetch as fetching
from tensord.daemon.fetch import RECORD, SUMS, File, Source, swap
from tensord.daemon.fetch import fetch as fetch_model
from tensord.daemon.models import repository
from tensord.shm.errors import InvalidArgument, NotFound, Unavailable

LIMIT = 1 << 30


def code(byte_size: int, letter: str = "x") -> bytes:
    """Returns a model.py of that size."""
    return b"def create(path, config, device): ...\n#".ljust(byte_size, letter.encode())


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Writes a model to be fetched, with several files, one of them empty."""
    return written(tmp_path / "elsewhere" / "m", {"1/model.py": code(1000), "1/empty": b"", "config.pbtxt": b"#"})


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def fetch(url: object, folder: Path, sha256: str = "", limit: int = LIMIT) -> str:
    """Fetches a model without loading it. Returns what is said of it."""
    return fetch_model(str(url), folder, Options(), [], sha256, limit, 60.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECORD
    }


def test_a_folder_comes_whole(there: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    assert fetch(there, folder).startswith(f"m: version 1 is in {folder}, ")
    assert contents(folder) == contents(there)
    assert os.listdir(tmp_path / "models") == ["m"]
    assert fetch(there, folder) == f"m: it is as at {there} already"
    (there / "1" / "more").write_bytes(b"")
    assert fetch(there, folder).startswith(f"m: version 1 is in {folder}, ")
    assert contents(folder) == contents(there)


def test_an_empty_folder_comes_along(there: Path, tmp_path: Path) -> None:
    """An ensemble's version is one."""
    (there / "1" / "7").mkdir()
    fetch(there, tmp_path / "models" / "m")
    assert (tmp_path / "models" / "m" / "1" / "7").is_dir()


def test_a_file_is_no_model(there: Path) -> None:
    with pytest.raises(InvalidArgument, match="it is a file, and no archive"):
        Source(str(there / "config.pbtxt")).files()


def test_a_model_that_was_fetched_is_fetched_from_there(there: Path, tmp_path: Path) -> None:
    """The record of where it came from stays behind."""
    fetch(there, tmp_path / "one" / "m")
    fetch(tmp_path / "one" / "m", tmp_path / "two" / "m")
    assert contents(tmp_path / "two" / "m") == contents(there)
    assert str(tmp_path / "one").encode() in (tmp_path / "two" / "m" / RECORD).read_bytes()


class Killed(BaseException):
    """Ends a fetch wherever it is."""


def begin(there: Path, folder: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches a few files and half of another one, and ends like a fetch that is killed."""
    with monkeypatch.context() as patched:
        names = downloads(patched)
        download = Source.download

        def killed(self: Source, wanted: Sequence[File], places: Sequence[Path], stage: Path, limit: int) -> None:
            download(self, wanted, places, stage, limit)
            if len(names) > files:
                places[0].unlink()
                (stage / "part.x").mkdir()
                (stage / "part.x" / "0").write_bytes(b"half")
                raise Killed

        patched.setattr(Source, "download", killed)
        with pytest.raises(Killed):
            fetch(there, folder)


def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the files that are fetched from now on."""
    found: list[str] = []
    download = Source.download

    def recorded(self: Source, files: Sequence[File], places: Sequence[Path], stage: Path, limit: int) -> None:
        found.extend(file.name for file in files)
        download(self, files, places, stage, limit)

    monkeypatch.setattr(Source, "download", recorded)
    return found


def test_goes_on_where_it_was(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that came whole are not fetched again; what came by half is."""
    begin(there, tmp_path / "models" / "m", 1, monkeypatch)
    assert repository.scan([tmp_path / "models"]) == {}
    names = downloads(monkeypatch)
    fetch(there, tmp_path / "models" / "m")
    assert names == ["1/model.py", "config.pbtxt"]
    assert contents(tmp_path / "models" / "m") == contents(there)


def test_what_has_changed_comes_anew(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays of files that are gone or others by now, nor an empty folder that would be a version."""
    written(there, {"0/old": b"o" * 400})
    begin(there, tmp_path / "models" / "m", 3, monkeypatch)
    (there / "0" / "old").unlink()
    (there / "0").rmdir()
    written(there, {"1/model.py": code(700, "z")})
    os.utime(there / "1" / "model.py", (1, 1))
    names = downloads(monkeypatch)
    fetch(there, tmp_path / "models" / "m")
    assert names == ["1/model.py", "config.pbtxt"]
    assert contents(tmp_path / "models" / "m") == contents(there)
    assert not (tmp_path / "models" / "m" / "0").exists()


def test_another_url_begins_anew(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(there, tmp_path / "models" / "m", 2, monkeypatch)
    other = written(tmp_path / "other" / "m", {"1/model.py": code(1000, "w")})
    fetch(other, tmp_path / "models" / "m")
    assert contents(tmp_path / "models" / "m") == contents(other)


def test_one_that_changes_meanwhile_is_refused(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Source.download

    def changing(self: Source, files: Sequence[File], places: Sequence[Path], stage: Path, limit: int) -> None:
        download(self, files, places, stage, limit)
        os.utime(there / "config.pbtxt", (1, 1))

    monkeypatch.setattr(Source, "download", changing)
    with pytest.raises(Unavailable, match="it has changed while it was fetched"):
        fetch(there, tmp_path / "m")


def test_where_there_are_no_links(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is here whole is moved into the staged model."""

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    fetch(there, tmp_path / "models" / "m")
    assert contents(tmp_path / "models" / "m") == contents(there)


@pytest.mark.parametrize("exchange", [True, False])
def test_takes_the_place_of_what_is_served(
    there: Path, tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that cannot exchange two folders takes two renames."""
    if not exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    folder = written(tmp_path / "models" / "m", {"1/model.py": b"former", "1/gone": b""})
    before = os.stat(folder).st_ino
    fetch(there, folder)
    assert os.stat(folder).st_ino != before
    assert contents(folder) == contents(there)
    assert os.listdir(tmp_path / "models") == ["m"]


def test_takes_the_place_of_a_link(there: Path, tmp_path: Path) -> None:
    release = written(tmp_path / "releases" / "7", {"1/model.py": b"former"})
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m").symlink_to(release)
    fetch(there, tmp_path / "models" / "m")
    assert contents(tmp_path / "models" / "m") == contents(there)
    assert contents(release) == {"1/model.py": b"former"}


def test_a_file_system_that_flushes_no_folders(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is in its place by then, and the fetch has succeeded."""
    fsync = os.fsync

    def refused(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    assert fetch(there, tmp_path / "models" / "m").startswith("m: version 1 is in")
    assert os.listdir(tmp_path / "models") == ["m"]
    assert capsys.readouterr().err == f"'{tmp_path}/models' cannot be flushed to disk: Invalid argument\n"


def test_a_swap_that_is_ended_leaves_nothing_to_go_on_with(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage then holds the former model, whose files are not taken for beginnings of the new one's."""
    folder = written(tmp_path / "models" / "m", {"1/model.py": code(500, "f")})

    def ended(model: Path, at: Path) -> None:
        swap(model, at)
        raise Killed

    monkeypatch.setattr(fetching, "swap", ended)
    with pytest.raises(Killed):
        fetch(there, folder)
    assert contents(tmp_path / "models" / ".m.fetch" / "m") == {"1/model.py": code(500, "f")}
    monkeypatch.undo()
    written(there, {"1/model.py": code(900, "n")})
    fetch(there, folder)
    assert contents(folder) == contents(there)


def test_two_at_a_time(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(model: Path, at: Path) -> None:
        with pytest.raises(InvalidArgument, match="model 'm' is being fetched by another process"):
            fetch(there, tmp_path / "m")
        swap(model, at)

    monkeypatch.setattr(fetching, "swap", meanwhile)
    fetch(there, tmp_path / "m")
    assert contents(tmp_path / "m") == contents(there)


def listed(folder: Path, names: Sequence[str]) -> str:
    """Writes the list of checksums of these files; returns its own."""
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  ./{name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines))
    return hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()


def test_checksums(there: Path, tmp_path: Path) -> None:
    names = ["1/model.py", "1/empty", "config.pbtxt"]
    fetch(there, tmp_path / "models" / "m", listed(there, names))
    assert SUMS in contents(tmp_path / "models" / "m")
    with pytest.raises(InvalidArgument, match=f"'{SUMS}' has the SHA-256 [0-9a-f]+; it should have 000000"):
        fetch(there, tmp_path / "other" / "m", "0" * 64)
    listed(there, names[:2])
    with pytest.raises(InvalidArgument, match=r"'config\.pbtxt' is not in SHA256SUMS"):
        fetch(there, tmp_path / "other" / "m")
    (there / "gone").write_bytes(b"")
    listed(there, [*names, "gone"])
    (there / "gone").unlink()
    with pytest.raises(InvalidArgument, match="'gone' is in SHA256SUMS, but not there"):
        fetch(there, tmp_path / "other" / "m")
    listed(there, names)
    (there / "1" / "model.py").write_bytes(code(1000, "t"))
    with pytest.raises(InvalidArgument, match=r"'1/model\.py' has the SHA-256 [0-9a-f]+; it should have"):
        fetch(there, tmp_path / "other" / "m")
    assert os.listdir(tmp_path / "other" / ".m.fetch") == ["lock"], "what is wrong is not gone on with"
    assert not (tmp_path / "other" / "m").exists()


def test_the_checksum_of_an_archive(there: Path, tmp_path: Path) -> None:
    """An archive's checksum is compared before anything is unpacked, and the error has both checksums."""
    archive = Path(shutil.make_archive(str(tmp_path / "m"), "tar", there))
    with pytest.raises(InvalidArgument, match=r"'m\.tar' has the SHA-256 [0-9a-f]+; it should have 000000"):
        fetch(archive, tmp_path / "models" / "m", "0" * 64)
    assert os.listdir(tmp_path / "models" / ".m.fetch") == ["lock"], "what is wrong is not gone on with"
    fetch(archive, tmp_path / "models" / "m", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert contents(tmp_path / "models" / "m") == contents(there)


def test_a_checksum_for_a_folder_without_a_list(there: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--sha256 of a folder is that of its SHA256SUMS, which it does not have"):
        fetch(there, tmp_path / "m", "0" * 64)


def test_bounds(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="the model has 1001 bytes; --max-byte-size is 1000"):
        fetch(there, tmp_path / "m", limit=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 7}))
    with pytest.raises(InvalidArgument, match=rf"1001 bytes are to come; '{tmp_path}' has room for 7"):
        fetch(there, tmp_path / "m")


def test_no_name_for_a_model(there: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'\.m' cannot be a model's name"):
        fetch(there, tmp_path / ".m")


@pytest.mark.parametrize("name", ["nowhere", "empty", "left_out"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    """A folder may also hold only what no model needs, such as what Python has compiled."""
    (tmp_path / "empty").mkdir()
    written(tmp_path / "left_out", {"__pycache__/model.cpython-311.pyc": b"", "._model.py": b""})
    with pytest.raises(NotFound, match="there is no such folder, or no file of a model is in it"):
        fetch(tmp_path / name, tmp_path / "models" / "m")

"""Archives of models: what is taken for the model, and what is refused."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from tensord.daemon import fetch as archive
from tensord.daemon.fetch import is_left_out, unpack
from tensord.shm.errors import InvalidArgument

FILES = {"m/1/model.py": b"model", "m/config.pbtxt": b"config"}
LIMIT = 1 << 20


def tar(path: Path, files: dict[str, bytes], **fields: object) -> Path:
    """Writes a tar file; ``fields`` are of each member's head."""
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            opened.addfile(member, io.BytesIO(content))
    return path


def zipped(path: Path, files: dict[str, bytes], mode: int = 0o644) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            opened.writestr(member, content)
    return path


@pytest.mark.parametrize("name", ["m.tar", "m.tar.gz", "m.tgz", "m.zip"])
@pytest.mark.parametrize("inside", ["m/", ""])
def test_the_model_or_a_folder_with_it(tmp_path: Path, name: str, inside: str) -> None:
    files = {inside + path.removeprefix("m/"): content for path, content in FILES.items()}
    made = (zipped if name.endswith("zip") else tar)(tmp_path / name, files)
    unpack(made, name, tmp_path / "model", LIMIT)
    assert (tmp_path / "model" / "1" / "model.py").read_bytes() == b"model"
    assert (tmp_path / "model" / "config.pbtxt").read_bytes() == b"config"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda path: tar(path / "m.tar", {"../out": b""}), "'../out' is no path in a model's folder"),
        (
            lambda path: tar(path / "m.tar", {"x": b""}, type=tarfile.SYMTYPE, linkname="/etc"),
            "linkname '/etc' not found",
        ),
        (lambda path: tar(path / "m.tar", {"x": b""}, type=tarfile.FIFOTYPE), "'x' of 'm.tar' is neither"),
        (lambda path: zipped(path / "m.zip", {"../out": b""}), "'../out' is no path in a model's folder"),
        (lambda path: zipped(path / "m.zip", {"x": b"/etc"}, stat.S_IFLNK | 0o777), "'x' of 'm.zip' is neither"),
        (
            lambda path: tar(path / "m.tar", {"1/x": b"x" * (LIMIT + 1)}),
            f"bytes up to '1/x'; --max-byte-size is {LIMIT}",
        ),
        (lambda path: zipped(path / "m.zip", {"1/x": b"x" * (LIMIT + 1)}), f"--max-byte-size is {LIMIT}"),
        (lambda path: (path / "m.tar").write_bytes(b"no archive") and path / "m.tar", "cannot be unpacked"),
        (lambda path: (path / "m.zip").write_bytes(b"no archive") and path / "m.zip", "cannot be unpacked"),
    ],
)
def test_refused(tmp_path: Path, made: object, words: str) -> None:
    packed = made(tmp_path)  # type: ignore[operator]
    with pytest.raises(InvalidArgument) as error:
        unpack(packed, packed.name, tmp_path / "model", LIMIT)
    assert words in error.value.message
    assert not (tmp_path / "out").exists()


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 1)
    with pytest.raises(InvalidArgument, match="has more than 1 files"):
        unpack(tar(tmp_path / "m.tar", FILES), "m.tar", tmp_path / "model", LIMIT)


def test_a_link_is_written_as_what_it_leads_to(tmp_path: Path) -> None:
    """1. A hard link and a symbolic one to a file of the archive. 2. Two that lead to each other."""
    with tarfile.open(tmp_path / "m.tar", "w") as opened:
        member = tarfile.TarInfo("1/model.py")
        member.size, member.mode = 5, 0o4755
        opened.addfile(member, io.BytesIO(b"model"))
        for name, kind, target in (("1/hard", tarfile.LNKTYPE, "1/model.py"), ("1/soft", tarfile.SYMTYPE, "model.py")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            opened.addfile(link)
    unpack(tmp_path / "m.tar", "m.tar", tmp_path / "model", LIMIT)
    for name in ("model.py", "hard", "soft"):
        path = tmp_path / "model" / "1" / name
        assert (path.read_bytes(), path.is_symlink(), stat.S_IMODE(path.stat().st_mode) & 0o7000) == (
            b"model",
            False,
            0,
        )
    assert (tmp_path / "model" / "1" / "model.py").stat().st_mode & 0o100
    circle = tar(tmp_path / "c.tar", {"1/x": b""}, type=tarfile.SYMTYPE, linkname="x")
    with pytest.raises(InvalidArgument, match="cannot be unpacked"):
        unpack(circle, "c.tar", tmp_path / "circle", LIMIT)


@pytest.mark.parametrize("name", ["m.tar", "m.zip"])
def test_what_other_programs_leave_is_no_part_of_it(tmp_path: Path, name: str) -> None:
    """A Mac's archive has a ._m beside m, and one in each folder."""
    files = {"._m": b"", "m/._config.pbtxt": b"", "m/1/._model.py": b"", "m/1/__pycache__/x.pyc": b"", **FILES}
    made = (zipped if name.endswith("zip") else tar)(tmp_path / name, files)
    unpack(made, name, tmp_path / "model", LIMIT)
    there = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*")}
    assert there == {"1", "1/model.py", "config.pbtxt"}


@pytest.mark.parametrize("name", ["..", "../x", "a//b", "/a", "a/../b", "a\\b", "a\0"])
def test_no_path(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is no path in a model's folder"):
        is_left_out(name.split("/"))
    assert not is_left_out(["1", "model.py"])


def test_half_an_archive(tmp_path: Path) -> None:
    whole = tar(tmp_path / "m.tar.gz", {"1/model.py": bytes(range(256)) * 1000})
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(InvalidArgument, match="cannot be unpacked"):
        unpack(whole, "m.tar.gz", tmp_path / "model", LIMIT)

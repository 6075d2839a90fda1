"""Archives of models: what is taken for the model, and what is refused."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from tensord.daemon.fetching.archive import unpack
from tensord.daemon.models import repository
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
        (lambda path: tar(path / "m.tar", {"../out": b""}), "outside"),
        (lambda path: tar(path / "m.tar", {"x": b""}, type=tarfile.SYMTYPE, linkname="/etc"), "absolute path"),
        (lambda path: tar(path / "m.tar", {"x": b""}, type=tarfile.FIFOTYPE), "special file"),
        (lambda path: zipped(path / "m.zip", {"../out": b""}), "'../out' is no path in a model's folder"),
        (lambda path: zipped(path / "m.zip", {"x": b"/etc"}, stat.S_IFLNK | 0o777), "'x' is a link"),
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
    archive = made(tmp_path)  # type: ignore[operator]
    with pytest.raises(InvalidArgument) as error:
        unpack(archive, archive.name, tmp_path / "model", LIMIT)
    assert words in error.value.message
    assert not (tmp_path / "out").exists()


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "MAX_ENTRIES", 1)
    with pytest.raises(InvalidArgument, match="has more than 1 files"):
        unpack(tar(tmp_path / "m.tar", FILES), "m.tar", tmp_path / "model", LIMIT)


def test_half_an_archive(tmp_path: Path) -> None:
    whole = tar(tmp_path / "m.tar.gz", {"1/model.py": bytes(range(256)) * 1000})
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(InvalidArgument, match="cannot be unpacked"):
        unpack(whole, "m.tar.gz", tmp_path / "model", LIMIT)

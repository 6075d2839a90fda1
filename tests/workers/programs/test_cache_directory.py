"""Tests that files which another user of the host has put where our compiled code lies are never read."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import resource
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.programs.cache_directory import CacheDirectory

NAME = "a.executable"
OTHER = "b.program"
MAGIC = b"tensord-executable-4\r\n"
#: Nobody's number: only root can give it files.
STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def directory(tmp_path: Path) -> CacheDirectory:
    return CacheDirectory(tmp_path / "cache")


def sealed(secret: bytes, name: str, content: bytes) -> bytes:
    """Returns a file of the cache as the module's docstring describes it."""
    return MAGIC + hmac.digest(secret, name.encode() + b"\0" + content, hashlib.sha256) + content


def files(directory: CacheDirectory) -> set[str]:
    return {path.name for path in directory.path.iterdir()}


def test_round_trip(directory: CacheDirectory) -> None:
    assert directory.read(NAME) is None
    directory.write(NAME, b"first")
    directory.write(NAME, b"second")
    assert directory.read(NAME) == b"second"
    secret = (directory.path / "secret").read_bytes()
    assert len(secret) == 32
    assert (directory.path / NAME).read_bytes() == sealed(secret, NAME, b"second")
    assert files(directory) == {NAME, "secret"}
    assert {stat.S_IMODE((directory.path / name).stat().st_mode) for name in files(directory)} == {0o600}
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    # Another process of ours finds it.
    assert CacheDirectory(directory.path).read(NAME) == b"second"


@given(content=st.binary(max_size=300), data=st.data())
def test_any_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    directory = CacheDirectory(tmp_path_factory.getbasetemp() / "any-byte")
    directory.write(NAME, content)
    whole = bytearray((directory.path / NAME).read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    (directory.path / NAME).write_bytes(whole)
    assert directory.read(NAME) is None
    assert not (directory.path / NAME).exists()


def _another_secret(path: Path) -> None:
    path.write_bytes(sealed(bytes(32), NAME, b"code"))


def _only_a_digest(path: Path) -> None:
    path.write_bytes(MAGIC + hashlib.sha256(b"code").digest() + b"code")


def _another_name(path: Path) -> None:
    os.rename(path.with_name(OTHER), path)


def _a_link(path: Path) -> None:
    os.rename(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _open_to_others(path: Path) -> None:
    path.chmod(0o620)


def _of_another_user(path: Path) -> None:
    os.chown(path, STRANGER, -1)


BAD = {
    "another secret": (_another_secret, "ValueError: the entry is damaged, or was not written here"),
    "only a digest": (_only_a_digest, "ValueError: the entry is damaged, or was not written here"),
    "another name": (_another_name, "ValueError: the entry is damaged, or was not written here"),
    "a link": (_a_link, "ValueError: it cannot be opened: Too many levels of symbolic links"),
    "a pipe": (_a_pipe, "ValueError: it is no regular file"),
    "open to others": (_open_to_others, r"ValueError: it is open to others (mode 0620)"),
    "of another user": (_of_another_user, f"ValueError: it belongs to another user (uid {STRANGER})"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_nobody_may_run(directory: CacheDirectory, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Removed, said, and made anew."""
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    directory.write(NAME, b"code")
    directory.write(OTHER, b"code")
    spoil, words = BAD[kind]
    spoil(directory.path / NAME)
    with caplog.at_level(logging.WARNING):
        assert directory.read(NAME) is None
    assert f"removing cached executable {NAME}: {words}" in caplog.text
    assert not os.path.lexists(directory.path / NAME)
    directory.write(NAME, b"new")
    assert directory.read(NAME) == b"new"


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702, 0o720])
def test_a_directory_that_was_open_to_others(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that lies there counts, not even what was ours; but other things than ours stay."""
    directory = CacheDirectory(tmp_path / "cache")
    directory.write(NAME, b"code")
    (directory.path / "notes.txt").write_text("mine")
    secret = (directory.path / "secret").read_bytes()
    directory.path.chmod(mode)
    # One that runs does not use it any more, and says so.
    with caplog.at_level(logging.WARNING):
        assert directory.read(NAME) is None
        with pytest.raises(PermissionError, match="is open to others"):
            directory.write(NAME, b"code")
        assert (
            f"executables are not cached: directory {directory.path} is open to others (mode {mode:04o})" in caplog.text
        )
        # The next one takes it over.
        again = CacheDirectory(directory.path)
    assert f"cache directory {directory.path} was open to others (mode {mode:04o})" in caplog.text
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert files(directory) == {"notes.txt"}
    assert again.read(NAME) is None
    again.write(NAME, b"new")
    assert (directory.path / "secret").read_bytes() != secret
    assert directory.read(NAME) == b"new"


def test_a_directory_that_others_could_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a directory, as systemd makes one, is accepted and closed to others: nobody else has written there."""
    directory = CacheDirectory(tmp_path / "cache")
    directory.write(NAME, b"code")
    directory.path.chmod(0o755)
    assert CacheDirectory(directory.path).read(NAME) == b"code"
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert caplog.text == ""


@as_root
def test_another_users_directory(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    os.chown(place, STRANGER, -1)
    with pytest.raises(PermissionError, match=rf"directory {place} belongs to another user \(uid {STRANGER}\)"):
        CacheDirectory(place)
    with pytest.raises(PermissionError, match="others could exchange what is in directory"):
        CacheDirectory(place / "below")


@pytest.mark.parametrize(("mode", "safe"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)])
def test_a_directory_above(tmp_path: Path, mode: int, safe: bool) -> None:
    """A user who can rename our directory can replace it; a sticky one, such as /tmp, keeps names to their owners."""
    above = tmp_path / "above"
    (above / "middle").mkdir(parents=True)
    above.chmod(mode)
    if safe:
        CacheDirectory(above / "middle" / "cache").write(NAME, b"code")
        return
    with pytest.raises(PermissionError, match=rf"exchange what is in directory {above} \(uid \d+, mode {mode:04o}\)"):
        CacheDirectory(above / "middle" / "cache")
    assert list((above / "middle").iterdir()) == []


def test_a_directory_above_that_is_opened_later(directory: CacheDirectory) -> None:
    directory.write(NAME, b"code")
    directory.path.parent.chmod(0o777)
    assert directory.read(NAME) is None
    with pytest.raises(PermissionError, match="others could exchange"):
        directory.write(NAME, b"code")


def test_folders_on_the_way_are_made_for_us_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        CacheDirectory(tmp_path / "a" / "b" / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_link_to_a_directory(tmp_path: Path) -> None:
    """A link is accepted, as where a home lies on another disk."""
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    directory = CacheDirectory(tmp_path / "link" / "cache")
    assert directory.path == tmp_path / "real" / "cache"
    directory.write(NAME, b"code")
    # A link in the place of the directory itself, made while we run, is another thing.
    directory.path.rename(tmp_path / "moved")
    directory.path.symlink_to(tmp_path / "moved")
    assert directory.read(NAME) is None


def test_the_root_is_no_cache() -> None:
    with pytest.raises(PermissionError, match="the root directory cannot be a cache"):
        CacheDirectory(Path("/"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"short"),
        lambda path: path.chmod(0o640),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        pytest.param(lambda path: os.chown(path, STRANGER, -1), marks=as_root),
    ],
    ids=["short", "readable", "link", "of another user"],
)
def test_a_secret_that_may_be_known(
    directory: CacheDirectory, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Entries that it sealed do not count any more."""
    directory.write(NAME, b"code")
    spoil(directory.path / "secret")
    with caplog.at_level(logging.WARNING):
        assert directory.read(NAME) is None
    assert "removing cached executable secret" in caplog.text
    assert len((directory.path / "secret").read_bytes()) == 32
    directory.write(NAME, b"new")
    assert directory.read(NAME) == b"new"


def test_many_make_the_secret_at_once(directory: CacheDirectory) -> None:
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        CacheDirectory(directory.path).write(f"{number}.executable", b"code")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [directory.read(f"{number}.executable") for number in range(8)] == [b"code"] * 8
    assert len(files(directory)) == 9


def test_what_a_killed_process_left_goes(directory: CacheDirectory) -> None:
    for name, age in (("new-old", 7200), ("new-young", 0)):
        (directory.path / name).write_bytes(b"half")
        os.utime(directory.path / name, (time.time() - age,) * 2)
    CacheDirectory(directory.path)
    assert files(directory) == {"new-young"}


def test_a_directory_that_is_taken_away_is_made_again(directory: CacheDirectory) -> None:
    directory.path.rmdir()
    assert directory.read(NAME) is None
    directory.write(NAME, b"code")
    assert directory.read(NAME) == b"code"


def test_no_descriptors(directory: CacheDirectory, caplog: pytest.LogCaptureFixture) -> None:
    """A reason of this moment costs a file nothing."""
    directory.write(NAME, b"code")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused + 1, hard))
    try:
        with caplog.at_level(logging.WARNING):
            assert directory.read(NAME) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in caplog.text
    assert directory.read(NAME) == b"code"

"""Client regions: what may be opened, what may be mapped, what a range may be."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm import regions
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable
from tensord.shm.regions import Region, check_range, open_object
from tests.open_files import no_descriptors_left

SHM = Path("/dev/shm")


@pytest.fixture(params=["posix_ipc", "os.open"], autouse=True, scope="module")
def opener(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the test with both ways to open shared memory: posix_ipc, and the file where it is not installed."""
    if request.param == "posix_ipc":
        pytest.importorskip("posix_ipc", reason="posix_ipc is not installed: it has no wheel for this Python")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "posix_ipc", None)
        yield


@pytest.fixture
def key() -> Iterator[str]:
    name = f"tensord-test-{uuid.uuid4().hex}"
    yield name
    (SHM / name).unlink(missing_ok=True)


def make(key: str, byte_size: int) -> None:
    with (SHM / key).open("wb") as file:
        file.truncate(byte_size)


def test_a_region_reads_and_writes_the_clients_object(key: str) -> None:
    make(key, 3 * 4096)
    region = Region("r", open_object("r", "/" + key), 4096, 8192)
    region.view(8, 4)[:] = b"here"
    assert (SHM / key).read_bytes()[4096 + 8 : 4096 + 12] == b"here"
    (SHM / key).unlink()
    assert bytes(region.view(8, 4)) == b"here"
    for content in (b"more", memoryview(b"more")):
        region.write(8192 - 4, content)
        assert region.read(8192 - 4, 4) == b"more"
    for offset in (8192 - 3, -1, 8192):
        with pytest.raises(InvalidArgument, match="'r'"):
            region.write(offset, b"much")
    region.close()
    region.close()


@pytest.mark.parametrize("key", ["", "/", "///", "sem.x", "/sem.x"])
def test_keys_that_are_nobodys(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"cannot register shared memory region 'r' - invalid shm key '{key}'"):
        open_object("r", key)


@pytest.mark.parametrize("key", ["a/b", "../x", "/../x", ".", "..", "x\0y", "é", "a" * 300, "/dev/null"])
def test_keys_that_name_no_object(key: str) -> None:
    """Refused before anything is opened, and answered as if it were not there."""
    with pytest.raises(Internal) as raised:
        open_object("r", key)
    assert raised.value.message == f"Unable to open shared memory region: '{key}'"


def test_an_object_that_is_not_there(key: str) -> None:
    with pytest.raises(Internal, match=f"Unable to open shared memory region: '/{key}'"):
        open_object("r", "/" + key)


def test_only_regular_files_of_ours(key: str) -> None:
    """FIFO, directory, symbolic link, somebody else's file: each refused, no descriptor left, and nothing blocks."""
    before = set(os.listdir("/proc/self/fd"))
    path = SHM / key
    os.mkfifo(path)
    with pytest.raises(ServingError):
        open_object("r", key)
    path.unlink()
    path.mkdir()
    with pytest.raises(ServingError):
        open_object("r", key)
    path.rmdir()
    path.symlink_to("/etc/passwd")
    with pytest.raises(ServingError):
        open_object("r", key)
    path.unlink()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_an_object_is_not_inherited(key: str) -> None:
    make(key, 4096)
    fd = open_object("r", key)
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    os.close(fd)


def test_no_descriptor_is_left(key: str) -> None:
    make(key, 4096)
    with no_descriptors_left(), pytest.raises(Unavailable, match="no file can be opened for shared memory region 'r'"):
        open_object("r", key)


@pytest.mark.parametrize(
    ("offset", "byte_size"), [(0, 0), (0, -1), (-4096, 4096), (0, 8193), (4096, 4097), (2**63, 1), (100, 100)]
)
def test_ranges_that_cannot_be_mapped(key: str, offset: int, byte_size: int) -> None:
    make(key, 8192)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r'"):
        Region("r", open_object("r", key), offset, byte_size)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_sparse_object_is_not_filled_by_registering_it(key: str) -> None:
    make(key, 1 << 40)
    region = Region("r", open_object("r", key), 0, 1 << 40)
    assert (SHM / key).stat().st_blocks == 0
    region.close()


@given(st.integers(-(2**65), 2**65), st.integers(-(2**65), 2**65), st.integers(1, 2**40))
def test_the_range_check_is_exact(offset: int, byte_size: int, limit: int) -> None:
    inside = 0 <= offset < limit and byte_size >= 0 and offset + byte_size <= limit
    if inside:
        check_range(offset, byte_size, limit, "r")
    else:
        with pytest.raises(InvalidArgument, match="'r'"):
            check_range(offset, byte_size, limit, "r")


def test_an_object_cut_down_while_it_is_registered_is_a_bad_request(key: str) -> None:
    """Whenever it happens: between the look at its size and its mapping, too."""
    make(key, 8192)
    # A process of its own: a thread would hardly ever run in between.
    program = f"import os\nwhile True: os.truncate({str(SHM / key)!r}, 4096); os.truncate({str(SHM / key)!r}, 8192)"
    cutting = subprocess.Popen([sys.executable, "-c", program])
    mapped = refused = 0
    try:
        while mapped < 500 or refused < 500:
            try:
                Region("r", open_object("r", key), 0, 8192).close()
                mapped += 1
            except InvalidArgument:
                refused += 1
    finally:
        cutting.kill()
        cutting.wait()

"""Tests what the supervisor asks about parameters: made from any source, checked before anything changes, gone with the model."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import posix_ipc
import pytest

from tensord.config import model_config
from tensord.config.options import RegionsOptions
from tensord.shm.arrays import Array
from tensord.shm.control_records import Load, Loaded, Unload, Unloaded
from tensord.shm.errors import InvalidArgument, NotFound, ServingError, Unsupported
from tensord.shm.operations import (
    CommitParameters,
    DropParameters,
    FileSource,
    LeavesSource,
    MakeParameters,
    MemorySource,
    ParameterSource,
    RegionSource,
    RegisterSystemRegion,
    ServeLoaded,
    StageParameters,
    UnregisterRegion,
)
from tensord.workers import parameter_pushes
from tensord.workers.parameters import layout, sealed_memory
from tensord.workers.parameters.sealed_memory import PIECE, SealedMemory
from tests.repositories import write_model
from tests.workers.parameters.made_sets import layout_bytes, sealed, sealed_bytes, unaligned
from tests.workers.parameters.pushing import PushingLoop, numbered, value, write_numbered
from tests.workers.worker_loop import OPTIONS, PATIENCE_SECONDS

BATCHES = "max_batch_size: 8"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[PushingLoop]:
    worker = PushingLoop()
    worker.load(write_numbered(tmp_path, "m", BATCHES))
    yield worker
    worker.close()


class Memory:
    """A client's POSIX shared memory, registered with the worker."""

    def __init__(self, loop: PushingLoop, content: bytes, name: str = "region") -> None:
        self.key = f"/setworker-{os.getpid()}-{name}"
        memory = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX, size=len(content))
        self.fd = memory.fd
        os.pwrite(self.fd, content, 0)
        self._loop, self.name = loop, name
        loop.call(RegisterSystemRegion(name, self.key, 0, len(content)))

    def close(self) -> None:
        self._loop.call(UnregisterRegion("system", self.name))
        os.close(self.fd)
        posix_ipc.unlink_shared_memory(self.key)


@pytest.fixture
def registered(loop: PushingLoop) -> Iterator[Callable[..., Memory]]:
    made: list[Memory] = []

    def register(content: bytes, name: str = "region") -> Memory:
        made.append(Memory(loop, content, name))
        return made[-1]

    yield register
    for memory in made:
        memory.close()


def content(fd: int) -> dict[str, Array]:
    """Returns the leaves in memory that the worker has made, checks that it is sealed, and closes it."""
    try:
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        return {name: np.array(leaf) for name, leaf in layout.read(SealedMemory(fd).view, "these").items()}
    finally:
        os.close(fd)


def same(found: dict[str, Array], number: float) -> bool:
    wanted = numbered(number)
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def use(loop: PushingLoop, made: int, number: int = 1, set: str = "main") -> float:
    """Stages and commits parameters that were made. Returns the value of an answer."""
    loop.commit(loop.stage("m", made, number, set))
    return value(loop.ask_value("m", set=set))


# --------------------------------------------------------------------------------------------------------------- making


@pytest.mark.parametrize("name", ["p.safetensors", "p.npz", "p.msgpack", "checkpoint/_METADATA"])
def test_what_is_no_file_holds_nobody_up(loop: PushingLoop, tmp_path: Path, name: str) -> None:
    """
    1. A client names a FIFO to which nobody writes, or a folder with one in it.
    Result: the push is refused, and the next one is carried out.
    """
    path = tmp_path / "m" / "1" / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(InvalidArgument, match="no regular file") as raised:
        loop.make("m", FileSource(name.partition("/")[0]))
    assert str(tmp_path) not in raised.value.message
    loop.push("m", numbered(2), 1)
    assert value(loop.ask_value("m")) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../other/1/p.npz", "is no path inside the model's folder"),
        ("/etc/passwd", "is no path inside the model's folder"),
        ("", "is no path inside the model's folder"),
        ("1/../../m/1/model.py", "is no path inside the model's folder"),
        ("missing.npz", "there is no 'missing.npz' in the model's folder"),
        ("x" * 256, f"there is no '{'x' * 256}' in the model's folder"),
        ("link.npz", "'link.npz' leads out of the model's folder"),
        ("model.py", "model.py is none of .safetensors, .npz and .msgpack"),
        ("damaged.npz", "damaged.npz is damaged"),
        ("large.npz", "file 'large.npz' of parameters for set 'main' of model 'm' would have 8589934592 bytes"),
    ],
)
def test_files_that_are_none(loop: PushingLoop, tmp_path: Path, path: str, message: str) -> None:
    np.savez(tmp_path / "outside.npz", **numbered(3))  # type: ignore[arg-type]
    (tmp_path / "m" / "link.npz").symlink_to(tmp_path / "outside.npz")
    (tmp_path / "m" / "damaged.npz").write_bytes(b"PK not really")
    with open(tmp_path / "m" / "large.npz", "wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ServingError) as raised:
        loop.make("m", FileSource(path))
    assert message in raised.value.message
    assert str(tmp_path) not in raised.value.message


@pytest.mark.parametrize("access", ["guarded", "snapshot"])
def test_of_a_region(tmp_path: Path, access: Any) -> None:
    options = msgspec.structs.replace(OPTIONS, regions=RegionsOptions(access=access))
    loop = PushingLoop(options)
    memory = None
    try:
        loop.load(write_numbered(tmp_path, "m", BATCHES))
        given = layout_bytes(numbered(4))
        memory = Memory(loop, b"x" * 100 + given + b"rest")
        source = RegionSource("region", 100, len(given))
        crc = f"crc32:{zlib.crc32(given):08X}"
        made = loop.make("m", source, checksum=crc)
        # Whatever the client writes by now.
        os.pwrite(memory.fd, b"\xff" * 200, 0)
        assert use(loop, made) == 4
        with pytest.raises(InvalidArgument, match="its header would have"):
            loop.make("m", source, checksum=crc)
        os.pwrite(memory.fd, given[:-1] + b"\xff", 100)
        with pytest.raises(InvalidArgument, match=r"their crc32 is [0-9a-f]{8}, "):
            loop.make("m", source, checksum=crc)
        with pytest.raises(InvalidArgument, match="Invalid offset"):
            loop.make("m", RegionSource("region", 100, 1 << 20))
        with pytest.raises(NotFound, match="Unable to find shared memory region: 'other'"):
            loop.make("m", RegionSource("other"))
        assert loop.worker._regions.leases() == {"system": 0, "cuda": 0}
    finally:
        if memory is not None:
            memory.close()
        loop.close()


def test_a_region_that_shrinks_is_refused(loop: PushingLoop, registered: Callable[..., Memory]) -> None:
    loop.push("m", numbered(1), 1)
    memory = registered(layout_bytes(numbered(4)) + bytes(1 << 20))
    os.ftruncate(memory.fd, 0)
    with pytest.raises(InvalidArgument, match=r"lost its memory|could be read"):
        loop.make("m", RegionSource("region"))
    assert value(loop.ask_value("m")) == 1


@pytest.mark.parametrize("again", [False, True])
def test_a_region_that_shrinks_in_the_middle_of_a_push_is_refused(
    loop: PushingLoop, registered: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, again: bool, tmp_path: Path
) -> None:
    """Into new memory or into memory that is filled again: the worker lives, and the region's rest is thrown away."""
    loop.load(write_numbered(tmp_path, "large", BATCHES, width=4 * PIECE))
    loop.push("large", numbered(1, 4 * PIECE), 1)
    memory = registered(layout_bytes(numbered(4, 4 * PIECE)))
    if again:
        os.close(loop.make("large", RegionSource("region")))
    cut = threading.Event()
    copyto, pwrite = np.copyto, os.pwrite

    def shrink(byte_size: int) -> None:
        if not cut.is_set() and byte_size >= PIECE:
            os.ftruncate(memory.fd, 5000)
            cut.set()

    def copying(target: Array, source: Array) -> None:
        shrink(len(target))
        copyto(target, source)

    def writing(fd: int, content: memoryview, at: int) -> int:
        assert not again
        return pwrite(fd, content, at)

    monkeypatch.setattr(np, "copyto", copying)
    monkeypatch.setattr(os, "pwrite", writing)
    with pytest.raises(InvalidArgument, match="lost its memory"):
        loop.make("large", RegionSource("region"))
    assert cut.is_set()
    monkeypatch.undo()
    assert loop.worker._regions.leases() == {"system": 0, "cuda": 0}
    assert value(loop.ask_value("large")) == 1


def test_a_region_larger_than_a_piece(loop: PushingLoop, registered: Callable[..., Memory], tmp_path: Path) -> None:
    """Whole, and with the spaces behind its header by which its leaves are aligned."""
    loop.load(write_numbered(tmp_path, "large", BATCHES, width=10 << 18))
    large = {**numbered(1, 10 << 18), "w": np.random.default_rng(1).random(5 << 18, np.float32)}
    given = layout_bytes(large)
    length = int.from_bytes(given[:8], "little")
    odd = (length + 5).to_bytes(8, "little") + given[8 : 8 + length] + b" " * 5 + given[8 + length :]
    registered(odd)
    made = loop.make("large", RegionSource("region", 0, len(odd)), checksum=f"crc32:{zlib.crc32(odd):08x}")
    assert os.fstat(made).st_size == len(odd) + 59
    found = content(made)
    assert all(np.array_equal(found[name], large[name]) for name in large)


def test_a_learner_s_pushes_fill_the_same_memory_and_none_is_left_when_it_has_ended(
    loop: PushingLoop, registered: Callable[..., Memory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences and arrays keep the memory of their set; what was rolled back to is of its set, too."""
    for module in (parameter_pushes, sealed_memory):
        monkeypatch.setattr(module, "KEPT_NS", 3 * 10**8)
    width = 1 << 19
    loop.load(write_numbered(tmp_path, "large", BATCHES, width=width))
    memory = registered(layout_bytes(numbered(0, width)))
    before = len(os.listdir("/proc/self/fd"))
    seen: dict[int, int] = {}
    for number in range(1, 13):
        os.pwrite(memory.fd, layout_bytes(numbered(number, width)), 0)
        made = loop.make("large", RegionSource("region"))
        seen[os.fstat(made).st_ino] = number
        loop.push("large", made, number)
        assert value(loop.ask_value("large")) == number
        if number % 4 == 0:
            loop.commit(loop.stage("large", -1, number - 1))
            assert value(loop.ask_value("large")) == number - 1
    assert len(seen) <= 4
    deadline = time.monotonic() + PATIENCE_SECONDS
    # In use, and the version before.
    while len(os.listdir("/proc/self/fd")) > before + 2:
        assert time.monotonic() < deadline
        loop.worker.iterate()
    assert value(loop.ask_value("large")) == 11


def test_a_client_that_writes_meanwhile_cannot_change_what_was_checked(
    loop: PushingLoop, registered: Callable[..., Memory]
) -> None:
    """The set is right or refused: no byte is read twice."""
    good, bad = layout_bytes(numbered(4)), b"\xff" * len(layout_bytes(numbered(4)))
    memory = registered(good)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            os.pwrite(memory.fd, bad, 0)
            os.pwrite(memory.fd, good, 0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(1, 100):
            with contextlib.suppress(InvalidArgument):
                made = loop.make("m", RegionSource("region"))
                before = os.pread(made, 1 << 16, 0)
                with contextlib.suppress(InvalidArgument):
                    loop.commit(loop.stage("m", os.dup(made), number))
                assert os.pread(made, 1 << 16, 0) == before
                os.close(made)
    finally:
        stop.set()
        writer.join()


def spacious(*, header: object, byte_size: int, seals: int = SEALS) -> int:
    """Returns a descriptor of memory that has a header and, as no page is taken for it, any number of bytes behind it."""
    text = json.dumps(header).encode()
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, len(text).to_bytes(8, "little") + text)
    os.truncate(fd, 8 + len(text) + byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


HUGE = 1 << 30
OTHER = {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}


@pytest.mark.parametrize("way", ["staged", "sealed", "unsealed"])
@pytest.mark.parametrize(
    ("header", "message"),
    [
        (0, "its header is not that of safetensors' layout"),
        ({}, "its leaves end at byte"),
        ({"other": OTHER}, "model 'm' has no leaf 'other'"),
        ({"w": OTHER}, f"leaf 'w' is UINT8[{HUGE}], model 'm' has FP32[4]"),
        ({"__metadata__": {"": "x" * (2 << 20)}}, "its header would have"),
        ({str(number): 0 for number in range(1000)}, "model 'm' has no leaf '0'"),
    ],
)
def test_nothing_is_filled_for_what_its_header_refuses(
    loop: PushingLoop, monkeypatch: pytest.MonkeyPatch, way: str, header: object, message: str
) -> None:
    """A client announces a gigabyte and sends a header: neither its memory nor a copy of it takes any page more."""
    fd = spacious(header=header, byte_size=HUGE, seals=0 if way == "unsealed" else SEALS)
    blocks = os.fstat(fd).st_blocks
    monkeypatch.setattr(sealed_memory.MemoryPool, "sealed", None)
    operation: MakeParameters | StageParameters = StageParameters(1, "m", 1, "main", 1)
    if way != "staged":
        operation = MakeParameters("m", 1, MemorySource(os.fstat(fd).st_size), checksum="crc32:00000000")
    reply, _ = loop.reply(loop.ask_for(operation, os.dup(fd)))
    assert (reply.code, message in reply.message) == (InvalidArgument.code, True), reply
    assert os.fstat(fd).st_blocks == blocks
    os.close(fd)


def test_of_memory_that_may_still_change(loop: PushingLoop) -> None:
    given = layout_bytes(numbered(6))
    made = loop.make("m", MemorySource(len(given)), sealed_bytes(given, 0))
    assert use(loop, made) == 6
    with pytest.raises(InvalidArgument, match="their memory has 3 bytes, 4 were announced"):
        loop.make("m", MemorySource(4), sealed_bytes(b"abc", 0))
    with pytest.raises(InvalidArgument, match="came without their memory"):
        loop.make("m", MemorySource(4))
    with pytest.raises(InvalidArgument, match="checksum 'md5' is neither crc32 nor sha256"):
        loop.make("m", MemorySource(len(given)), sealed(numbered(6)), checksum="md5:00")


# -------------------------------------------------------------------------------------------------------------- staging


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"w": numbered(1)["w"]}, "number 2 of set 'main': leaf 'deep.0.v' of model 'm' is missing"),
        ({**numbered(1), "more": np.zeros(1)}, "number 2 of set 'main': model 'm' has no leaf 'more'"),
        (
            {**numbered(1), "w": np.zeros((4, 1), np.float32)},
            "number 2 of set 'main': leaf 'w' is FP32[4, 1], model 'm' has FP32[4]",
        ),
        ({**numbered(1), "w": np.zeros(4)}, "number 2 of set 'main': leaf 'w' is FP64[4], model 'm' has FP32[4]"),
        ({**numbered(1), "w": np.zeros(4, np.int32)}, "leaf 'w' is INT32[4], model 'm' has FP32[4]"),
        (
            {**numbered(1), "w": np.array([0, 1, np.nan, 2], np.float32)},
            "leaf 'w' has a value that is not finite, at [2]",
        ),
        ({**numbered(1), "w": np.array([0, 1, 2, -np.inf], np.float32)}, "has a value that is not finite, at [3]"),
    ],
)
def test_a_set_that_does_not_fit_changes_nothing(loop: PushingLoop, leaves: dict[str, Array], message: str) -> None:
    loop.push("m", numbered(1), 1)
    with pytest.raises(InvalidArgument) as raised:
        loop.stage("m", leaves, 2, check_finite=True)
    assert message in raised.value.message
    with pytest.raises(NotFound):
        loop.commit(loop.pushes)
    assert value(loop.ask_value("m")) == 1


def test_what_is_not_finite_is_used_unless_that_is_checked(loop: PushingLoop) -> None:
    loop.push("m", {**numbered(1), "deep.0.v": numbered(np.inf)["w"], "w": numbered(np.inf)["w"]}, 1)
    assert value(loop.ask_value("m")) == np.inf


@pytest.mark.parametrize("cut", [0, 4, 60, 100])
def test_truncated_memory_is_refused(loop: PushingLoop, cut: int) -> None:
    given = layout_bytes(numbered(2))
    with pytest.raises(InvalidArgument):
        loop.stage("m", sealed_bytes(given[:cut]), 1)
    with pytest.raises(InvalidArgument, match="not sealed"):
        loop.stage("m", sealed_bytes(given, fcntl.F_SEAL_SHRINK), 1)
    assert value(loop.ask_value("m")) == 0


def test_models_without_parameters(loop: PushingLoop, tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "python",
        """
        class TritonPythonModel:
            def execute(self, requests):
                return []
        """,
        'name: "python" backend: "python" output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }',
    )
    write_model(
        tmp_path,
        "empty",
        """
        inputs, outputs = {"x": "FP32[2]"}, {"y": "FP32[2]"}

        def create(path, config, device):
            return (lambda parameters, inputs: {"y": inputs["x"]}), {"scale": 3.0}
        """,
    )
    loop.load(tmp_path / "python")
    loop.load(tmp_path / "empty")
    with pytest.raises(Unsupported, match="model 'python' is a Triton Python model, which has no parameters"):
        loop.stage("python", numbered(1), 1)
    with pytest.raises(Unsupported, match="model 'empty' has no parameters that are arrays"):
        loop.stage("empty", numbered(1), 1)
    with pytest.raises(NotFound, match="'other' version 1 is not found"):
        loop.stage("other", numbered(1), 1)
    # What an unload has taken along is dropped.
    loop.call(DropParameters("m", 2, "a"))


def test_64_bit_leaves_are_taken_as_the_model_has_them(tmp_path: Path) -> None:
    """Without JAX's 64-bit mode they have half as many bits on the device: both widths are taken."""
    with contextlib.closing(PushingLoop()) as loop:
        write_model(
            tmp_path,
            "m",
            """
            import numpy as np

            inputs, outputs = {"x": "FP32[8]"}, {"y": "FP32[8]"}

            def create(path, config, device):
                return (lambda parameters, inputs: {"y": inputs["x"] + parameters["w"]}), {"w": np.zeros(8)}
            """,
        )
        loop.load(tmp_path / "m")
        for number, dtype in enumerate((np.float64, np.float32), 1):
            loop.push("m", {"w": np.full(8, number, dtype)}, number)
            assert value(loop.ask_value_of("m")) == number


# ---------------------------------------------------------------------------------------------------- a version's life


def record_of(path: Path) -> Load:
    config = model_config.parse_pbtxt((path / "config.pbtxt").read_text(), path.name)
    return Load(path.name, 1, str(path), str(path / "1"), config.SerializeToString())


def test_a_version_is_held_until_its_sets_are_restored(tmp_path: Path) -> None:
    with contextlib.closing(PushingLoop()) as loop:
        path = write_numbered(tmp_path, "m", BATCHES)
        loop.tell(record_of(path))
        assert loop.hear(Loaded).reason == ""
        assert loop.ask_value("m").message == "Request for unknown model: 'm' is not found"
        with pytest.raises(NotFound):
            loop.push("m", numbered(7), 7)
        loop.push("m", numbered(7), 7, held=True)
        loop.push("m", numbered(9), 9, "a", held=True)
        assert loop.ask_value("m").code
        loop.call(ServeLoaded("m", 1))
        assert [value(loop.ask_value("m", set=name)) for name in ("main", "a")] == [7, 9]
        # A second time it means nothing.
        loop.call(ServeLoaded("m", 1))
        assert value(loop.ask_value("m")) == 7
        loop.tell(record_of(path))
        loop.hear(Loaded)
        assert value(loop.ask_value("m")) == 7
        loop.tell(Unload("m", 1))
        loop.hear(Unloaded)
        assert not loop.worker._models.held
        loop.call(ServeLoaded("m", 1))
        assert loop.ask_value("m").code


@pytest.mark.parametrize("at", ["staging", "commit"])
def test_a_push_is_in_force_where_it_was_answered_for_whatever_is_loaded_beside(
    loop: PushingLoop, tmp_path: Path, at: str
) -> None:
    """
    1. A version is loaded again, but not served yet, before a push is staged, or between that and its commit.
    2. Another load of the version comes, and fails. Result: what goes on serving has the push.
    """
    path = tmp_path / "m"
    push = loop.stage("m", numbered(5), 1) if at == "commit" else 0
    loop.tell(record_of(path))
    assert loop.hear(Loaded).reason == ""
    loop.commit(push or loop.stage("m", numbered(5), 1))
    assert value(loop.ask_value("m")) == 5
    (path / "1" / "model.py").write_text("no model")
    loop.tell(record_of(path))
    assert loop.hear(Loaded).reason
    loop.call(ServeLoaded("m", 1))
    assert value(loop.ask_value("m")) == 5


def test_what_was_staged_goes_with_its_model(loop: PushingLoop) -> None:
    push = loop.stage("m", numbered(1), 1)
    loop.tell(Unload("m", 1))
    loop.hear(Unloaded)
    loop.commit(push)
    call = loop.ask_for(StageParameters(99, "m", 1, "main", 1), sealed(numbered(1)))
    assert loop.reply(call)[0].code == "NOT_FOUND"


def test_a_push_that_is_aborted_or_whose_model_goes_while_it_is_staged(loop: PushingLoop) -> None:
    for turn in range(20):
        call = loop.ask_for(StageParameters(100 + turn, "m", 1, "main", 1), sealed(numbered(1)))
        other = loop.ask_for(CommitParameters(500), -1) if turn % 2 else 0
        loop.worker.iterate()
        replies = {}
        for _ in range(2 if other else 1):
            reply, _fds = loop.reply_any()
            replies[reply.call_id] = reply
        assert not replies[call].code
        assert not other or replies[other].code == "NOT_FOUND"
        loop.abort(100 + turn)
    assert value(loop.ask_value("m")) == 0


def sources() -> list[ParameterSource]:
    return [FileSource("x"), RegionSource("x"), MemorySource(1), LeavesSource({})]


@pytest.mark.parametrize("source", sources(), ids=lambda source: type(source).__name__)
def test_no_descriptor_is_left_open(loop: PushingLoop, source: ParameterSource) -> None:
    loop.push("m", numbered(1), 1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        # Its content is looked at when it is staged.
        with contextlib.suppress(ServingError):
            os.close(loop.make("m", source, sealed_bytes(b"ab")))
        with pytest.raises(ServingError):
            loop.stage("m", sealed_bytes(b"abc"), 3)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("where", ["file", "region", "memory"])
def test_tensors_are_aligned_whoever_wrote_them(
    loop: PushingLoop, tmp_path: Path, registered: Callable[..., Memory], where: str
) -> None:
    """Other writers of the layout align nothing: XLA uses what is made of it where it lies all the same, and copies no more."""
    fd = unaligned(numbered(3, 1 << 12))
    given = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    checksum = f"sha256:{hashlib.sha256(given).hexdigest()}"
    assert (8 + int.from_bytes(given[:8], "little")) % 64
    write_numbered(tmp_path, "large", "max_batch_size: 8", width=1 << 12)
    loop.load(tmp_path / "large")
    if where == "file":
        (tmp_path / "large" / "1" / "p.safetensors").write_bytes(given)
        made = loop.make("large", FileSource("p.safetensors"), checksum=checksum)
    elif where == "region":
        registered(b"x" * 20 + given + b"rest")
        made = loop.make("large", RegionSource("region", 20, len(given)), checksum=checksum)
    else:
        made = loop.make("large", MemorySource(len(given)), sealed_bytes(given, 0), checksum=checksum)
    assert all(np.array_equal(content(os.dup(made))[name], array) for name, array in numbered(3, 1 << 12).items())
    loop.push("large", made, 1, "a")
    version = next(each for each in loop.worker._models if each.name == "large")
    assert version.sets is not None
    assert version.sets.find("a").placed_byte_size == 0
    assert value(loop.ask_value("large", set="a")) == 3

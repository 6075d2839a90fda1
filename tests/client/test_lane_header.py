"""The headers for C and C++: examples are compiled without a warning, and asked for answers of a real daemon.

What they read of records is held to msgspec's structs, and what is malformed is read under the sanitizers.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensord.shm import channel, messages, prepared
from tensord.shm.messages import (
    AnswerRecord,
    PrepareAnswer,
    PreparedAnswer,
    PreparedTensor,
    RegionSlice,
    Release,
    RequestRecord,
    Slice,
    ToSubmitter,
    ToWorker,
    TraceContext,
)
from tensord.shm.record import decoder, encoder
from tests.client.conftest import clients_socket
from tests.daemon_process import ROOT, DaemonProcess

_CLIENT = ROOT / "client"
_RECORDS = Path(__file__).parent / "records.c"
_STRICT = ("-O2", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def compiled(folder: Path, source: Path, compiler: str, *flags: str) -> str:
    target = folder / source.stem
    command = [compiler, *flags, *_STRICT, f"-I{_CLIENT / 'include'}", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=300)
    return str(target)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_headers_describe_the_edition_that_the_daemon_speaks() -> None:
    records = (ROOT / "shm/common/include/tensord_wire.h").read_text()
    for name, value in (
        ("TENSORD_WIRE", messages.WIRE_VERSION),
        ("TENSORD_MAX_DATAGRAM", channel.MAX_DATAGRAM),
        ("TENSORD_MAX_NUMBERS", prepared.MAX_NUMBERS),
        ("TENSORD_TIMING", messages.TIMING),
    ):
        assert re.search(rf"#define {name} {value}\b", records)
    assert f'["V", {messages.WIRE_VERSION}]' in records


@pytest.mark.parametrize(("compiler", "flag", "suffix"), [("cc", "-std=c11", "c"), ("c++", "-std=c++17", "cpp")])
def test_it_is_a_header_for_both_languages(tmp_path: Path, compiler: str, flag: str, suffix: str) -> None:
    source = tmp_path / f"alone.{suffix}"
    source.write_text("#include <tensord_lane.h>\n#include <tensord_lane.h>\nint main(void) { return 0; }\n")
    compiled(tmp_path, source, compiler, flag, "-Wpedantic")


def test_the_example_in_c(tmp_path: Path, daemon: DaemonProcess) -> None:
    program = compiled(tmp_path, _CLIENT / "examples/lane.c", "cc", "-std=c11")
    done = run(program, clients_socket(daemon.folder), "3000")
    assert done.returncode == 0, done.stderr
    assert "OUTPUT0[0] = 1000\n" in done.stdout
    assert "OUTPUT1[0] = 998\n" in done.stdout
    assert re.search(r"INVALID_ARGUMENT: .*INPUT1", done.stdout)
    assert "3000 calls, the median took" in done.stdout
    nobody = run(program, str(tmp_path / "nobody.sock"))
    assert nobody.returncode == 1
    assert "no tensord serves at" in nobody.stderr


@pytest.mark.release("a compiler of C++ takes longest; test_the_example_in_c compiles the same header")
def test_the_node_for_ros2(tmp_path: Path, daemon: DaemonProcess) -> None:
    """Against a stand-in of rclcpp: images with padded rows, one of another kind among them."""
    source = _CLIENT / "examples/ros2_node.cpp"
    program = compiled(tmp_path, source, "c++", "-std=c++17", f"-I{ROOT / 'tests/client/ros2'}")
    parameters = {"socket": clients_socket(daemon.folder), "model": "brightness", "height": 6, "width": 8, "images": 5}
    done = run(program, "--ros-args", *[f"{name}:={value}" for name, value in parameters.items()])
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split("\n") if line] == [1.0, 2.0, 4.0, 5.0]
    assert "warn an image of another kind" in done.stderr
    other = run(program, *[f"{name}:={value}" for name, value in (parameters | {"model": "nowhere"}).items()])
    assert other.returncode == 1
    assert "nowhere" in other.stderr


_LATE = """
#include <tensord_lane.h>

int main(void) {
    static tensord_answer answer;
    unsigned char got[4096];
    int ends[2];
    uint64_t id, late;
    static tensord_lane at, *lane = &at;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends))
        return 1;
    lane->fd = ends[0];
    while (!tensord_send(lane, 0, NULL, 0, 0, &id))
        ;
    /* There is room for one more, and for no cancellation behind it. */
    recv(ends[1], got, sizeof got, 0);
    if (tensord_call(lane, 0, NULL, 0, 1, &answer) != TENSORD_TIMEOUT)
        return 2;
    late = lane->next_id;
    if (tensord_send(lane, 0, NULL, 0, 0, &id) != TENSORD_BUSY)
        return 3;
    while (recv(ends[1], got, sizeof got, MSG_DONTWAIT) > 0)
        ;
    if (tensord_send(lane, 0, NULL, 0, 0, &id) || tensord_send(lane, 0, NULL, 0, 0, &id))
        return 4;
    for (const char *expected = "Xqq"; *expected; expected++) {
        ssize_t size = recv(ends[1], got, sizeof got, MSG_DONTWAIT);
        tensord__reader from = tensord__read_from(got + 1, size > 0 ? (size_t)size - 1 : 0);
        tensord__take_array(&from);
        tensord__take_array(&from);
        tensord__text tag = tensord__take_text(&from);
        if (from.bad || *tag.at != *expected || (*expected == 'X' && tensord__take_uint(&from) != late))
            return 5;
    }
    return 0;
}
"""


def test_a_call_that_is_late_is_cancelled_also_where_the_worker_took_nothing_then(tmp_path: Path) -> None:
    source = tmp_path / "late.c"
    source.write_text(_LATE)
    assert run(compiled(tmp_path, source, "cc", "-std=c11")).returncode == 0


# ----------------------------------------------------------------------------------------- what is read of records

Read = Callable[[str, bytes], str]
_NUMBERS = st.integers(0, (1 << 63) - 1) | st.integers(0, 300)
_NAMES = st.text(max_size=40)
_LEASES = st.tuples(_NUMBERS, _NUMBERS, _NUMBERS)
_TO_WORKER = st.lists(
    st.builds(Release, st.lists(_LEASES, max_size=20).map(tuple))
    | st.builds(TraceContext, _NUMBERS, st.text(max_size=32), st.text(max_size=16))
    | st.builds(
        RequestRecord,
        *(_NUMBERS, _NUMBERS),
        st.lists(st.binary(max_size=300) | st.builds(Slice, _NUMBERS, _NUMBERS, _NUMBERS), max_size=18).map(tuple),
        *(_NAMES, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS),
        _NUMBERS | st.text(max_size=messages.MAX_SEQUENCE_ID),
        *(st.booleans(), st.booleans(), _NUMBERS, _NUMBERS, _NAMES, _NAMES),
    ),
    max_size=18,
)
_TENSORS = st.lists(
    st.builds(
        PreparedTensor,
        *(_NAMES, _NAMES),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=16).map(tuple),
        st.none() | st.builds(RegionSlice, _NAMES, _NUMBERS, _NUMBERS),
    ),
    max_size=20,
).map(tuple)
_PREPARED = st.builds(
    PreparedAnswer,
    _NUMBERS,
    _TENSORS,
    st.dictionaries(_NAMES, st.booleans() | _NUMBERS | st.floats() | _NAMES),
    st.booleans(),
)


@functools.cache
def in_process() -> Read:
    """Returns what reads as ``read`` does, in this process: where it was built to be fuzzed it is beside its source."""
    if not (library := _RECORDS.with_suffix(".so")).exists():
        library = Path(os.environ["PYTEST_TENSORD_RUN"], f"records-{os.getpid()}.so")
        built_library(library, "cc")
    read_records = ctypes.CDLL(str(library)).read_records
    read_records.argtypes, read_records.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_void_p
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)

    def ask(kind: str, content: bytes) -> str:
        said = read_records(ord(kind), content, len(content))
        try:
            return ctypes.string_at(said).decode()
        finally:
            free(said)

    return ask


def built_library(target: Path, compiler: str, *flags: str) -> None:
    """Compiles what reads records as a library for ``in_process``."""
    command = [compiler, *flags, "-std=c11", "-shared", "-fPIC", f"-I{_CLIENT / 'include'}", str(_RECORDS)]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=300)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    """Has a program in C read a datagram to a worker ("w") or a client ("a"); returns what it says, "-" where it refuses it."""
    program = compiled(tmp_path_factory.mktemp("records"), _RECORDS, "cc", "-std=c11")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(kind: str, datagram: bytes) -> str:
            process.stdin.write(kind.encode() + struct.pack("I", len(datagram)) + datagram)
            process.stdin.flush()
            line = process.stdout.readline().decode()
            assert line.endswith("\n"), "the program has ended"
            return line.strip()

        yield ask
        process.stdin.close()
        assert process.wait() == 0


def _hex(content: bytes | str) -> str:
    return (content.encode() if isinstance(content, str) else content).hex() + "."


def _request(record: RequestRecord) -> str:
    said: list[Any] = [record.request_id, record.prepared, record.deadline_ns, record.received_ns, record.priority]
    said += [record.timeout_us, record.sequence_id, int(record.sequence_start), int(record.sequence_end), record.trace]
    said += [record.strikes, _hex(record.client_id), _hex(record.replace_key), _hex(record.parameter_set)]
    said[6] = record.sequence_id if isinstance(record.sequence_id, int) else _hex(record.sequence_id)
    for each in record.contents:
        said.append(f"{each.segment},{each.offset},{each.byte_size}" if isinstance(each, Slice) else _hex(each))
    return " ".join(["q", *map(str, said)]) + ";"


def requests_read_alike(read: Read, content: bytes) -> None:
    """Asserts that records to a worker which the header reads are read as msgspec reads them. What it refuses is msgspec's."""
    said = read("w", content)
    if said == "-":
        return
    try:
        meant = decoder(ToWorker).decode(content)
    except msgspec.ValidationError as error:
        assert "of length <=" in str(error)  # lengths are looked at where the text is used
        return
    assert said == "".join([_request(each) for each in meant if isinstance(each, RequestRecord)])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=_TO_WORKER, data=st.data())
def test_records_to_a_worker_are_read_as_msgspec_reads_them(
    read: Read, records: list[Any], data: st.DataObject
) -> None:
    content = encoder.encode(records)
    assert read("w", content) == "".join([_request(each) for each in records if isinstance(each, RequestRecord)])
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    mutated = bytes(changed[: data.draw(st.sampled_from([len(changed), len(changed) // 2]))])
    requests_read_alike(read, mutated)


def _cut(text: str, most: int) -> str:
    """Returns what a C program sees of a text for which it has room for ``most`` bytes."""
    return text.encode()[:most].partition(b"\0")[0].hex() + "."


def _answer(record: AnswerRecord, prepared: PreparedAnswer) -> str:
    said: list[Any] = [
        "c",
        record.request_id,
        int(prepared.final),
        prepared.version,
        "-" if record.lease is None else "l",
    ]
    said += [*(record.timing or (0, 0, 0)), _cut(record.code, 31), _cut(record.message, 511)]
    contents = iter(record.contents)
    for each in prepared.outputs:
        said += [_hex(each.name), _hex(each.datatype), *each.shape]
        content = next(contents) if each.region is None else b""
        said.append("placed" if each.region is not None else _hex(content) if isinstance(content, bytes) else content)
    return " ".join(map(str, said))


def answers_read_alike(read: Read, content: bytes) -> None:
    """Asserts that answers in a datagram's records, up to the first that the header refuses, are read as msgspec reads them."""
    *answers, end = read("a", b"\x01" + content).split(";")
    try:
        records = decoder(ToSubmitter).decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return  # what came before the malformed record was read
    known: dict[int, PreparedAnswer] = {}
    meant = []
    for record in records:
        if isinstance(record, PrepareAnswer):
            known[record.number] = record.prepared
        elif isinstance(record, AnswerRecord):
            number = record.prepared
            prepared = number if isinstance(number, PreparedAnswer) else known.get(number)
            if prepared is None or len([each for each in prepared.outputs if each.region is None]) != len(
                record.contents
            ):
                break
            meant.append(_answer(record, prepared))
    assert answers == meant[: len(answers)]
    assert end in ("", "-")
    assert end == "-" or len(answers) == len(meant)


def test_parts_of_a_record_in_any_order(read: Read) -> None:
    """Parts may have no bytes, and a datagram between parts is refused; what was received is freed once."""
    answer = AnswerRecord(7, PreparedAnswer(), (), None, "", "")
    content = encoder.encode([answer])

    def received(*datagrams: bytes) -> str:
        return read("p", b"".join(len(each).to_bytes(2, "big") + each for each in datagrams))

    said = _answer(answer, PreparedAnswer()) + ";"
    assert received(b"\2" + content[:3], b"\3" + content[3:]) == said
    assert received(b"\2", b"\2", b"\2" + content, b"\3", b"\1" + content) == said * 2
    for between in (b"\1" + content, b"\1", b"\4" + content):
        assert received(b"\2" + content[:3], between, b"\3" + content[3:]) == "-"


def json_read_alike(read: Read, content: bytes) -> None:
    """Asserts that the header finds in a JSON object of the daemon's what Python's json finds there."""
    lane, new, end = map(int, read("j", content).split())
    try:
        # Of two members with one name the header takes the first one, and names are as the daemon writes them.
        pairs = json.loads(content.decode(), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    except (ValueError, RecursionError):
        return
    if not isinstance(pairs, dict) or b"\\" in content or content.count(b"{") + content.count(b"[") > 60:
        return
    assert not content[end:].strip(b" \n\t\r")
    assert (new == 1) == (pairs.get("new") is True)
    found = pairs.get("lane", -1)
    if type(found) is int and abs(found) < 1 << 63:
        assert lane == found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["lane", "new", "lanes", ""]),
        st.recursive(
            st.none() | st.booleans() | _NUMBERS | st.floats(allow_nan=False) | _NAMES,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_json_of_the_daemon_is_read_as_python_reads_it(read: Read, value: Any) -> None:
    for indent in (None, 1):
        content = json.dumps(value, indent=indent, ensure_ascii=False).encode()
        json_read_alike(read, content)
        json_read_alike(read, content[: len(content) // 2])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prepared_answer=_PREPARED,
    contents=st.lists(st.binary(max_size=50), min_size=20, max_size=20),
    lease=st.none() | _LEASES,
    timing=st.none() | _LEASES,
    is_numbered=st.booleans(),
    data=st.data(),
)
def test_answers_are_read_as_msgspec_means_them(
    read: Read,
    prepared_answer: PreparedAnswer,
    contents: list[bytes],
    lease: Any,
    timing: Any,
    is_numbered: bool,
    data: st.DataObject,
) -> None:
    inside = tuple(contents[: len([each for each in prepared_answer.outputs if each.region is None])])
    meaning = 5 if is_numbered else prepared_answer
    answer = AnswerRecord(7, meaning, inside, lease, "NOT_FOUND", "a sentence", None, timing)
    records = [PrepareAnswer(5, prepared_answer), answer] if is_numbered else [answer]
    datagram = b"\x01" + encoder.encode(records)
    assert read("a", datagram) == _answer(answer, prepared_answer) + ";"
    changed = bytearray(datagram[1:])
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    answers_read_alike(read, bytes(changed))
    answers_read_alike(read, datagram[1 : data.draw(st.integers(1, len(datagram)))])
    read("a", b"\x01\x91\x92\xa2S")

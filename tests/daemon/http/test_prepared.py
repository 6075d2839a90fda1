"""Tests that a looked-up request is what reading it alone gives, and that both readers of the JSON decide alike."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensord.daemon.http import request_codec, request_head
from tensord.daemon.http.decoded_request import BinaryPart, DecodedRequest
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.prepared import ParsedRequest, PreparedKind, PreparedRequests
from tensord.daemon.http.request_head import UnusualText
from tensord.shm.common.scheduling import Scheduling
from tensord.shm.errors import ServingError
from tensord.shm.messages import PreparedRequest, RegionSlice
from tensord.shm.prepared import Numbers
from tests.generated import examples

PLAIN: dict[str, Any] = {"name": "x", "datatype": "UINT8", "shape": [4], "parameters": {"binary_data_size": 4}}
REGION: dict[str, Any] = {
    "name": "r",
    "datatype": "UINT8",
    "shape": [4],
    "parameters": {"shared_memory_region": "region", "shared_memory_byte_size": 4},
}
VALUED: dict[str, Any] = {"name": "v", "datatype": "INT8", "shape": [2], "data": [1, 2]}
OUTPUTS = [{"name": name, "parameters": {"binary_data": True}} for name in ("y", "z")]


def head(**fields: Any) -> InferHead:
    return InferHead(
        **{"model": "echo", "version": 0, "content_length": 14, "json_size": 10, "keep_alive": True, **fields}
    )


def text(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": inputs, **fields}).encode()


# --------------------------------------------------------------------------------------------------------- any texts

SCALARS = st.sampled_from(
    [*(None, True, False, 0, 1, 4, -1, 2**63, 2**64, 10**30, 1.0, 4.0, 1.5, "", "x", "4", "ä", "\ud800"), [], {}, [1], {"a": 1}]
)  # fmt: skip
KEYS = st.sampled_from(
    [
        *("binary_data_size", "binary_data", "classification", "shared_memory_region", "shared_memory_offset"),
        *("shared_memory_byte_size", "binary_data_output", "sequence_id", "priority", "x", "triton_x", "", "ä"),
    ]
)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "binary_data_size": st.sampled_from([4, 4, 2, 0]),
        "binary_data": st.booleans(),
        "shared_memory_region": st.just("r"),
        "shared_memory_byte_size": st.sampled_from([0, 4]),
        "sequence_id": st.sampled_from([1, "1", True, 1.0]),
        "x": st.sampled_from([1, True, 1.0, 0, -0.0, 0.0, "1"]),
    },
)
PARAMETERS = LIKELY | LIKELY | st.dictionaries(KEYS, SCALARS, max_size=3) | SCALARS
DATA = (
    st.sampled_from([[1, 2], [2, 1], [[1, 2]], [1], ["a", "b"], [1.0, 2.0], [1, 300], "AQI=", "", [True, False]])
    | SCALARS
)
SHAPES = st.sampled_from([[2], [2], [1, 2], [4], [], [0], [2.0], [True], [-1], ["2"], [10**30], [0, 2**63]]) | SCALARS


def entries(extra: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"name": st.sampled_from(["x", "x", "y", "", "ä", 1])}, optional={"parameters": PARAMETERS, **extra}
    )


INPUT = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y"]),
        "shape": st.sampled_from([[2], [2], [1, 2], [4]]),
        "datatype": st.sampled_from(["UINT8", "INT8", "FP32", "BYTES"]),
    },
    optional={"parameters": LIKELY, "data": DATA},
) | entries({"shape": SHAPES, "datatype": st.sampled_from(["UINT8", "INT8", "FP16", "none", 1]), "data": DATA})
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(INPUT, max_size=3) | SCALARS},
    optional={
        "id": st.sampled_from(["", "a", "b", "ä", 1, None, "\ud800"]),
        "outputs": st.lists(entries({}), max_size=2) | SCALARS,
        "parameters": PARAMETERS,
        "unknown": SCALARS,
    },
)


def written(value: Any, ascii_only: bool, reverse: bool) -> bytes:
    """Writes a value as JSON text, in one of several ways."""
    if reverse and isinstance(value, dict):
        value = dict(reversed(value.items()))
    return json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def good(source: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draws a valid input whose tensor comes from that source."""
    common = {
        "name": st.sampled_from(["x", "y", "\u00e4"]),
        "shape": st.sampled_from([[4], [2, 2], [1, 4]]),
        "datatype": st.sampled_from(["UINT8", "INT8"]),
    }
    if source == "data":
        values = st.lists(st.sampled_from([1, 2, 100]), min_size=4, max_size=4)
        return st.fixed_dictionaries({**common, "data": values | values.map(lambda each: [each])})
    parameters = {
        "part": {"binary_data_size": st.just(4)},
        "region": {"shared_memory_region": st.just("r"), "shared_memory_byte_size": st.sampled_from([0, 4])},
    }[source]
    return st.fixed_dictionaries(
        {**common, "parameters": st.fixed_dictionaries(parameters, optional={"unknown": SCALARS})}
    )


GOOD = st.fixed_dictionaries(
    {
        "inputs": st.sampled_from([["part"], ["part", "data"], ["data"], ["part", "region"], ["region"]]).flatmap(
            lambda sources: st.tuples(*map(good, sources)).map(list)
        )
    },
    optional={
        "id": st.sampled_from(["", "a", "b", "\u00e4"]),
        "outputs": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["y", "z"])},
                optional={"parameters": st.fixed_dictionaries({}, optional={"binary_data": st.booleans()})},
            ),
            max_size=2,
        ),
        "parameters": st.fixed_dictionaries(
            {},
            optional={
                "x": st.sampled_from([1, True, 1.0, 0, -0.0, 0.0, "1"]),
                "sequence_id": st.sampled_from([1, "1"]),
            },
        ),
        "unknown": SCALARS,
    },
)
TEXTS = (
    st.builds(written, GOOD, st.booleans(), st.booleans())
    | st.builds(written, REQUESTS, st.booleans(), st.booleans())
    | st.builds(
        lambda said, at, size, put: said[: at % len(said)] + put + said[at % len(said) + size :],
        st.builds(written, GOOD, st.just(True), st.just(False)),
        st.integers(0, 1000),
        st.integers(0, 2),
        st.sampled_from([b"", b",", b'"', b"{", b"]", b"0", b"1e2", b"NaN", b"\0", b"\\", b"\xff", b'"id":"b",']),
    )
)  # fmt: skip


def outcome(read: Any) -> Any:
    """Calls a reader; returns what it reads or its error, and "" where the quick reader does not understand the text."""
    try:
        found = read()
    except ServingError as error:
        return type(error), error.message
    except UnusualText:
        return ""
    if isinstance(found, ParsedRequest):
        asked, model = found.prepared.asked, found.prepared.record
        return (found.id, found.scheduling, found.sources, model, asked.binary, asked.all_binary)
    return found


@settings(max_examples=examples(600), deadline=None)
@example(b'{"inputs":[],"x":"\xff"}', 0)
@example(b'{"inputs":[],"x":1e2000}', 0)
@example(b'{"inputs":[{"name":"x","shape":[1],"datatype":"UINT8","parameters":{"binary_data_size":1,"x":1e999}}]}', 1)
@given(TEXTS, st.sampled_from([0, 4, 4, 8]))
def test_both_readers_decide_alike(said: bytes, tail_size: int) -> None:
    quick = outcome(lambda: request_codec.decode_head(request_head.quick(said), None, tail_size, "m"))
    exact = outcome(lambda: request_codec.decode_head(request_head.exact(said), None, tail_size, "m"))
    if quick == "":
        return  # it is the exact one that decides
    if isinstance(quick, DecodedRequest):
        assert isinstance(exact, DecodedRequest)
        assert msgspec.to_builtins(quick, enc_hook=repr) == msgspec.to_builtins(exact, enc_hook=repr)
        assert repr(quick) == repr(exact)
    else:
        assert quick == exact


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sampled_from([0, 4, 4, 8]), st.sampled_from([0, 0, 0, 1])), max_size=6))
def test_whatever_came_before_a_request_says_what_it_says(asked: list[tuple[bytes, int, int]]) -> None:
    """Each twice and more, among others, to two models."""
    forms = PreparedRequests()
    for said, tail_size, model in [*asked, *asked, *asked]:
        meaning = head(model=f"m{model}")

        def alone(said: bytes = said, tail_size: int = tail_size, meaning: InferHead = meaning) -> ParsedRequest:
            return PreparedRequests().prepare(meaning, request_codec.decode(said, tail_size, meaning.model))

        def found(said: bytes = said, tail_size: int = tail_size, meaning: InferHead = meaning) -> ParsedRequest:
            return forms.read(meaning, said, tail_size)

        expected, got = outcome(alone), outcome(found)
        # Numbers that are equal and not the same are not taken for each other.
        assert repr(got) == repr(expected)


# ------------------------------------------------------------------------------------------------- what a form is


def test_requests_that_mean_the_same_are_one_form() -> None:
    """Ids, values, the order of keys, spaces and other headers make no difference."""
    forms = PreparedRequests()
    first = forms.read(head(), text(PLAIN, VALUED, outputs=OUTPUTS), 4).prepared
    others = [
        (text(PLAIN, VALUED, outputs=OUTPUTS, id="me"), head()),
        (text(PLAIN, {**VALUED, "data": [3, 4]}, outputs=OUTPUTS), head()),
        (text(dict(reversed(PLAIN.items())), VALUED, outputs=OUTPUTS), head()),
        (text(PLAIN, VALUED, outputs=OUTPUTS).replace(b" ", b""), head(json_size=9)),
        (text(PLAIN, VALUED, outputs=OUTPUTS, model_name="m"), head(content_length=99)),
        (text(PLAIN, VALUED, outputs=OUTPUTS, parameters={"priority": 3, "timeout": 9}), head()),
        (text(PLAIN, VALUED, outputs=OUTPUTS, parameters={"sequence_id": 7, "sequence_start": True}), head()),
        (text(PLAIN, VALUED, outputs=OUTPUTS, parameters={"sequence_end": True, "sequence_id": "7"}), head()),
    ]
    for said, meaning in others:
        assert forms.read(meaning, said, 4).prepared is first


def test_ids_of_sequences_priorities_timeouts_and_sets_are_each_request_s_own() -> None:
    """They differ from one request to the next, and no number is assigned for that; in texts that came before as well."""
    forms, lane = PreparedRequests(), Numbers[PreparedRequest]()
    for _ in range(3):
        for number in range(100):
            parameters = {
                "sequence_id": number if number % 2 else f"s{number}",
                "sequence_start": number % 3 == 0,
                "sequence_end": number % 5 == 0,
                "priority": number % 7,
                "timeout": number * 11,
                "tensord_replace": f"camera {number}",
                "parameter_set": f"customer-{number}",
                "x": 1,
            }
            request = forms.read(head(), text(PLAIN, parameters=parameters), 4)
            request.prepared.on_lane(lane)
            wanted = [
                parameters[name]
                for name in (
                    *("priority", "timeout", "sequence_id", "sequence_start", "sequence_end"),
                    *("tensord_replace", "parameter_set"),
                )
            ]
            assert list(request.scheduling) == wanted
            assert request.prepared.record.parameters == {"x": 1}
    assert lane.assigned == 1


@pytest.mark.parametrize(
    ("inputs", "fields", "meaning", "tail_size"),
    [
        ([PLAIN], {}, {"version": 2}, 4),
        ([PLAIN], {}, {"model": "other"}, 4),
        ([PLAIN], {}, {"forwarded": {"a": "b"}}, 4),
        ([{**PLAIN, "shape": [2, 2]}], {}, {}, 4),
        ([{**PLAIN, "datatype": "INT8"}], {}, {}, 4),
        ([{**PLAIN, "name": "y"}], {}, {}, 4),
        ([{**PLAIN, "parameters": {"binary_data_size": 5}}], {}, {}, 5),
        ([PLAIN, REGION], {}, {}, 4),
        ([PLAIN], {"outputs": OUTPUTS}, {}, 4),
        ([PLAIN], {"parameters": {"x": 1}}, {}, 4),
        ([PLAIN], {"parameters": {"x": True}}, {}, 4),
        ([PLAIN], {"parameters": {"x": 1.0}}, {}, 4),
    ],
)
def test_what_says_anything_else_is_another_form(
    inputs: list[Any], fields: Any, meaning: dict[str, Any], tail_size: int
) -> None:
    forms = PreparedRequests()
    known = [
        forms.read(head(), text(PLAIN), 4).prepared,
        *(forms.read(head(), text(PLAIN, parameters={"x": x}), 4).prepared for x in (2, "1", 0)),
    ]
    form = forms.read(head(**meaning), text(*inputs, **fields), tail_size).prepared
    assert form not in known
    assert form.record != known[0].record or form.tail_size != known[0].tail_size or fields


def test_a_form_says_all_that_the_request_does() -> None:
    fields: dict[str, Any] = {
        "id": "me",
        "parameters": {"a": 1, "b": "of the body", "sequence_id": 7, "sequence_end": True, "priority": 3, "timeout": 9},
    }
    request = PreparedRequests().read(head(version=5, forwarded={"b": "of the head"}), text(PLAIN, REGION, **fields), 4)
    whole = request.prepared.record
    assert (request.id, whole.version) == ("me", 5)
    assert request.scheduling == Scheduling(3, 9, 7, sequence_end=True)
    assert whole.parameters == {"a": 1, "b": "of the head"}
    assert request.sources == [BinaryPart(0, 4), RegionSlice("region", 0, 4)]


def test_a_form_has_a_number_once_it_came_twice() -> None:
    """Shapes and parameters that never repeat are told with their requests, and take no number from those that do."""
    forms, lane = PreparedRequests(), Numbers[PreparedRequest]()
    repeated = forms.read(head(), text(PLAIN), 4).prepared
    assert repeated.on_lane(lane) is None
    number = forms.read(head(), text(PLAIN, id="again"), 4).prepared.on_lane(lane)
    assert number is not None
    for count in range(5000):
        once = forms.read(head(), text(PLAIN, parameters={"request": count}), 4).prepared
        assert once.on_lane(lane) is None
        assert forms.read(head(), text(PLAIN), 4).prepared.on_lane(lane) is number
    assert (lane.assigned, lane.evicted) == (1, 0)
    assert len(lane._once) <= 1024


def test_sizes_of_strings_are_no_part_of_what_workers_are_told() -> None:
    forms, lane = PreparedRequests(), Numbers[PreparedRequest]()
    told = set()
    for size in range(4, 60):
        entry = {"name": "s", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}}
        told.add(forms.read(head(), text(entry), size).prepared.on_lane(lane))
    assert len(told) == 2  # nothing for the first
    assert lane.assigned == 1


def test_tensors_of_a_small_body_are_taken_out_of_it() -> None:
    def form(*inputs: dict[str, Any], tail_size: int, inline: int = 8) -> PreparedKind:
        return PreparedRequests(inline_byte_size=inline).read(head(), text(*inputs), tail_size).prepared

    both = form(PLAIN, REGION, {**PLAIN, "name": "x2"}, tail_size=8)
    assert both.unpack is not None
    assert both.unpack(b"JSON12345678", 4) == (b"1234", b"5678")
    nothing = form(REGION, tail_size=0)
    assert nothing.unpack is not None
    assert nothing.unpack(b"JSON", 4) == ()
    assert form(PLAIN, VALUED, tail_size=4).unpack is None
    assert form(PLAIN, tail_size=4, inline=3).unpack is None

"""Messages as no client writes them: whatever is remembered of others, each means what protobuf reads in it.

1. A message is made of few words, so that many are alike: fields and map entries in any order, again and again, keys behind their
   values, unknown fields, numbers packed, split and one by one.
2. It goes to a front that has met those before it, by either of its ways.
3. The request is that of the message which protobuf writes after it has read this one, to a front that has met none.

TENSORD_SPELLED_MESSAGES=N makes N of them instead of eight hundred (50000: the promise); TENSORD_SPELLED_SEED another series.
"""

from __future__ import annotations

import ast
import os
import random
from typing import Any

import pytest

from tensord.daemon.grpc.response_codec import varint
from tensord.shm.messages import RequestRecord
from tests.daemon.grpc.requests import Infer, field
from tests.daemon.grpc.test_prepared_messages import Front, meaning
from tests.daemon.grpc.test_request_codec import reader
from tests.records import whole_request

COUNT = int(os.environ.get("TENSORD_SPELLED_MESSAGES", "800"))
SEED = int(os.environ.get("TENSORD_SPELLED_SEED", "1"))
#: Messages that one front meets.
_A_FRONT = 250
_KEYS = (b"sequence_id", b"sequence_start", b"sequence_end", b"priority", b"p", b"")
_VALUES = (b"\x08\x00", b"\x08\x01", b"\x10\x00", b"\x10\x05", b"\x1a\x01s", b"\x29" + bytes(8), b"\x98\x01\x07", b"")
_UNKNOWN = (b"\x98\x01\x07", b"\x9a\x01\x02ab", b"\x9d\x01abcd", b"\x99\x01abcdefgh")

pytestmark = pytest.mark.timeout(120 + COUNT // 50)


class Speller:
    """Writes messages."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def message(self) -> bytes:
        dice = self._dice
        fields = [field(0x0A, b"m")]
        if dice.random() < 0.1:
            fields.append(field(0x0A, dice.choice((b"m", b"nope"))))
        if dice.random() < 0.3:
            fields.append(field(0x1A, dice.choice((b"a", b"bb"))))
        fields += [field(0x22, self._parameter()) for _ in range(dice.choice((0, 0, 1, 1, 2, 2, 3)))]
        inputs = dice.choice((1, 1, 1, 2))
        fields += [field(0x2A, self._input(b"xz"[number : number + 1])) for number in range(inputs)]
        if dice.random() < 0.2:
            fields.append(field(0x32, field(0x0A, b"y")))
        if dice.random() < 0.1:
            fields.append(dice.choice(_UNKNOWN))
        if dice.random() < 0.1:
            fields.append(dice.choice(fields))
        if dice.random() < 0.5:
            dice.shuffle(fields)
        raws = [field(0x3A, bytes([dice.randrange(256)] * 2)) for _ in range(inputs if dice.random() < 0.95 else 1)]
        if dice.random() < 0.8:
            return b"".join(fields + raws)
        at = dice.randrange(len(fields) + 1)
        return b"".join(fields[:at] + raws + fields[at:])

    def _parameter(self) -> bytes:
        dice = self._dice
        pieces = [field(0x0A, dice.choice(_KEYS)), field(0x12, dice.choice(_VALUES))]
        if dice.random() < 0.1:
            pieces.append(dice.choice((field(0x0A, dice.choice(_KEYS)), field(0x12, dice.choice(_VALUES)))))
        if dice.random() < 0.05:
            pieces.append(dice.choice(_UNKNOWN))
        if dice.random() < 0.05:
            pieces.pop(dice.randrange(len(pieces)))
        if dice.random() < 0.4:
            dice.shuffle(pieces)
        return b"".join(pieces)

    def _input(self, name: bytes) -> bytes:
        dice = self._dice
        pieces = [field(0x0A, name), field(0x12, b"UINT8"), *self._shape()]
        if dice.random() < 0.1:
            pieces.append(field(0x22, self._parameter()))
        if dice.random() < 0.05:
            pieces.append(field(0x2A, dice.choice((b"", b"\x20\x01\x20\x02", b"\x22\x02\x01\x02"))))
        if dice.random() < 0.3:
            dice.shuffle(pieces)
        return b"".join(pieces)

    def _shape(self) -> list[bytes]:
        """Writes the dimensions 1 and 2 in one of several encodings."""
        return self._dice.choice(
            (
                [field(0x1A, b"\1\2")],
                [b"\x18\x01", b"\x18\x02"],
                [field(0x1A, b"\1"), b"\x18\x02"],
                [field(0x1A, b"\x81\x00\2")],
            )
        )


def said(met: Any) -> Any:
    """Reduces a result to what must agree: of a refusal only its type and the request, as its first mistake may differ."""
    if len(met) == 3:
        return met[0].__name__, met[2]
    model, version, client_id, inputs, outputs, parameters, scheduling, state = met
    return (
        model,
        version,
        client_id,
        inputs,
        outputs,
        sorted(ast.literal_eval(parameters).items()),
        tuple(scheduling),
        state,
    )


def formed(front: Front, content: bytes) -> Any:
    """Returns what a message is taken for without being read, or None if it is not known."""
    found = front.formed(content)
    if found is None:
        return None
    form, client_id, raws, scheduling = found
    assert form.numbered is not None
    own = RequestRecord.scheduled(scheduling, 1, 0, raws, client_id.decode(), 0, 0)  # type: ignore[arg-type]
    whole = whole_request(form.numbered.prepared, own)
    inputs = [
        (tensor.name, tensor.datatype, tensor.shape, tensor.place if isinstance(tensor.place, bytes) else None)
        for tensor in whole.inputs
    ]
    state = front.messages._table.find(whole.model, whole.version)
    return said(
        (whole.model, whole.version, whole.client_id, inputs, whole.outputs, repr(whole.parameters), scheduling, state)
    )


def test_each_means_what_protobuf_reads() -> None:
    speller = Speller(SEED)
    front, of_forms, requests = Front(), 0, 0
    for number in range(COUNT):
        if number % _A_FRONT == 0:
            front = Front()
        content = speller.message()
        read = Infer.FromString(content)
        read.DiscardUnknownFields()
        expected = said(meaning(reader(), read.SerializeToString()))
        requests += len(expected) > 2
        found = formed(front, content)
        if found is not None:
            of_forms += 1
            assert found == expected, content
        assert said(meaning(front.messages, content)) == expected, content
    # It was about something.
    assert of_forms > COUNT // 50
    assert requests > COUNT // 4


def test_a_start_that_is_taken_back_in_another_spelling() -> None:
    """``sequence_start`` twice: true, and then false with its value before its key."""
    start = field(0x22, field(0x0A, b"sequence_start") + field(0x12, b"\x08\x01"))
    no_start = field(0x22, field(0x12, b"\x08\x00") + field(0x0A, b"sequence_start"))
    of_sequence = field(0x22, field(0x0A, b"sequence_id") + field(0x12, b"\x10\x05"))
    shape = field(0x1A, varint(1) + varint(2))
    rest = field(0x0A, b"m") + field(0x2A, field(0x0A, b"x") + field(0x12, b"UINT8") + shape) + field(0x3A, b"ab")
    front = Front()
    for _ in range(3):
        content = of_sequence + start + no_start + rest
        assert formed(front, content) is None
        assert meaning(front.messages, content)[6] == (0, 0, 5, False, False, "", "")
    assert meaning(front.messages, of_sequence + start + rest)[6] == (0, 0, 5, True, False, "", "")

"""Records that are put together are what the encoder makes of each."""

from __future__ import annotations

import numpy as np
import pytest

from tensord.shm.messages import AnswerRecord, ToSubmitter
from tensord.shm.record import decoder
from tensord.workers.requests.answer_plan import AnswerRows, answer_pieces


@pytest.mark.parametrize("number", [0, 127, 128, 1023])
@pytest.mark.parametrize("sizes", [(), (4,), (1, 0, 8), (300, 70_000)])
def test_each_record_is_read_as_its_own(number: int, sizes: tuple[int, ...]) -> None:
    ids = [1, 200, (1 << 32) + 5, (1 << 64) - 1]
    rows = AnswerRows(number, sizes)
    contents = np.random.default_rng(7).integers(0, 256, (4, sum(sizes)), np.uint8)
    rows.name([7])
    rows.name(ids)
    records = rows.records(contents)
    for row, record, request_id in zip(contents, records, ids, strict=True):
        cut = np.split(row, np.cumsum(sizes)[:-1]) if sizes else []
        expected = AnswerRecord(request_id, number, tuple(part.tobytes() for part in cut))
        assert decoder(ToSubmitter).decode(b"\x91" + record) == [expected]


@pytest.mark.parametrize("number", [0, 127, 128, 1023])
@pytest.mark.parametrize("sizes", [(), (4,), (0,), (1, 0, 8), (8, 0), (0, 0, 3), (300, 70_000)])
@pytest.mark.parametrize("request_id", [1, 200, (1 << 32) + 5, (1 << 64) - 1])
def test_pieces_around_outputs(number: int, sizes: tuple[int, ...], request_id: int) -> None:
    contents = tuple(np.random.default_rng(7).integers(0, 256, size, np.uint8).tobytes() for size in sizes)
    head, at, behind = answer_pieces(number, sizes)
    record = head[:at] + request_id.to_bytes(8) + head[at + 8 :]
    for content, follows in zip(contents, behind, strict=True):
        record += content + follows
    assert decoder(ToSubmitter).decode(b"\x91" + record) == [AnswerRecord(request_id, number, contents)]

"""Answers that are encoded together are what msgspec makes of each."""

from __future__ import annotations

import numpy as np
import pytest

from tensord.shm.messages import AnswerRecord, ToSubmitter
from tensord.shm.record import decoder
from tensord.workers.requests import preparation


@pytest.mark.parametrize("part", ["C", "Python"])
@pytest.mark.parametrize("number", [0, 127, 128, 1023])
@pytest.mark.parametrize("sizes", [(), (4,), (0,), (1, 0, 8), (8, 0), (300, 70_000)])
def test_each_record_is_read_as_its_own(
    part: str, number: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if part == "Python":
        monkeypatch.setattr(preparation, "available", False)
    ids = [1, 200, (1 << 32) + 5, (1 << 64) - 1]
    contents = np.random.default_rng(7).integers(0, 256, (4, sum(sizes)), np.uint8)
    for chosen, rows in ((ids, contents), (ids[:1], contents[0].tobytes())):
        records = preparation.answers(number, chosen, sizes, rows)
        for row, record, request_id in zip(contents, records, chosen, strict=False):
            cut = np.split(row, np.cumsum(sizes)[:-1]) if sizes else []
            expected = AnswerRecord(request_id, number, tuple(part.tobytes() for part in cut))
            assert decoder(ToSubmitter).decode(b"\x91" + record) == [expected]
    for wrong in (contents[:3], bytes(4 * sum(sizes) + 1)):
        if sizes and len(bytes(wrong)) != 4 * sum(sizes):
            with pytest.raises(ValueError, match="4 answers"):
                preparation.answers(number, ids, sizes, wrong)

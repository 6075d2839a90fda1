from __future__ import annotations

import os

import pytest

from tensord.daemon.control import open_files
from tensord.shm import descriptors
from tests.open_files import no_descriptors_left


async def test_what_lacked_a_descriptor_is_done_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "AGAIN_SECONDS", 0.0)
    told: list[Exception] = []
    tries = 0

    async def attempt() -> int:
        nonlocal tries
        tries += 1
        with descriptors.needed("a test"):
            if tries < 3:
                with no_descriptors_left():
                    return os.memfd_create("x")
            return os.memfd_create("x")

    os.close(await open_files.awaited(attempt, told.append))
    assert tries == 3
    assert len(told) == 1
    assert descriptors.lacked(told[0])


async def test_what_fails_otherwise_is_not_tried_again() -> None:
    async def attempt() -> None:
        os.close(-1)

    with pytest.raises(OSError, match="Bad file descriptor"):
        await open_files.awaited(attempt)

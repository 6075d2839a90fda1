from __future__ import annotations

import os
import resource

import pytest

from tensord.shm import descriptors
from tensord.shm.errors import Unavailable
from tests.open_files import no_descriptors_left


def test_without_one_left_what_was_wanted_is_named_with_the_limit() -> None:
    with no_descriptors_left(), pytest.raises(Unavailable) as refused, descriptors.needed("a test"):
        os.memfd_create("x")
    assert refused.value.message.startswith(
        "no file can be opened for a test: the server has as many files open as it may, "
    )


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(FileNotFoundError), descriptors.needed("a test"):
        os.open("/nobody-has-this", os.O_RDONLY)


@pytest.mark.parametrize(("limit", "last"), [(256, 191), (1024, 767), (20000, 19743)])
def test_the_reserve_is_a_quarter_and_at_most_256(monkeypatch: pytest.MonkeyPatch, limit: int, last: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    descriptors.check_reserve(last, "a region")
    with pytest.raises(
        Unavailable, match=rf"a region: {last + 1} files are open .*, {last + 1} are allowed .*\(.* is {limit}\)"
    ):
        descriptors.check_reserve(last + 1, "a region")

"""Headers as parameters: which, under what name, and which are refused."""

from __future__ import annotations

import pytest

from tensord.daemon.front.forwarding import Forwarding
from tensord.shm.errors import InvalidArgument


def test_what_matches_by_the_name_it_was_sent_with() -> None:
    forwarding = Forwarding("(x-fwd-.*)")
    headers = [
        (b"Host", b"h"),
        (b"X-FWD-A", b"1"),
        (b"x-fwd-b", "ä".encode()),
        (b"x-fwd-c", b"\xff"),
        (b"x-fwd-b", b"2"),
        (b"x-fwd-d", b" \t a  b\t "),
        (b"x-fwd-e", b" "),
    ]
    expected = {"X-FWD-A": "1", "x-fwd-b": "2", "x-fwd-c": "ÿ", "x-fwd-d": "a  b", "x-fwd-e": ""}
    assert forwarding.parameters(headers) == expected
    assert forwarding.parameters([]) == {}


@pytest.mark.parametrize("name", ["timeout", "priority", "sequence_id", "headers", "triton_x", "binary_data_output"])
def test_reserved_names(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Forwarding(".*").parameters([(name.encode(), b"1")])
    assert caught.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert Forwarding("x-.*").parameters([(name.encode(), b"1")]) == {}


def test_names_are_remembered_within_a_bound() -> None:
    forwarding = Forwarding("x")
    for number in range(5000):
        assert forwarding.wants(b"x%d" % number)
        assert not forwarding.wants(b"y%d" % number)
    assert forwarding.wants.cache_info().currsize <= 1024

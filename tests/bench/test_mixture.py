from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.mixture import Exchange, mixed, small


def test_an_answer_is_right_only_with_the_right_values() -> None:
    exchange = Exchange(b"", b"\1\2\3\4")
    exchange.check(b"HTTP/1.1 200 OK\r\n\r\n{}\1\2\3\4")
    exchange.check(bytearray(b"a gRPC message\1\2\3\4"))
    with pytest.raises(AssertionError, match="wrong answer"):
        exchange.check(b"HTTP/1.1 200 OK\r\n\r\n{}\1\2\3\5")
    with pytest.raises(AssertionError, match="503 Service"):
        exchange.check(b"HTTP/1.1 503 Service Unavailable\r\n\r\n\1\2\3\4")


def test_json_is_compared_by_its_elements() -> None:
    exchange = Exchange(b"", None, [1.0, 2.0])
    exchange.check(b'HTTP/1.1 200 OK\r\n\r\n{"outputs":[{"data":[1.0,2.0]}]}')
    with pytest.raises(AssertionError, match="wrong answer"):
        exchange.check(b'HTTP/1.1 200 OK\r\n\r\n{"outputs":[{"data":[1.0,3.0]}]}')


def test_where_an_error_is_right_an_answer_is_wrong() -> None:
    exchange = Exchange(b"", None)
    exchange.check(b"HTTP/1.1 400 Bad Request\r\n\r\n{}")
    with pytest.raises(AssertionError, match="200 OK"):
        exchange.check(b"HTTP/1.1 200 OK\r\n\r\n{}")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_differ(protocol: str) -> None:
    values = np.zeros(16, np.float32)
    made = list(itertools.islice(mixed(protocol, "region", values), 300))
    usual = [exchange.request for exchange in made if exchange.values != values.tobytes() and not exchange.is_error]
    assert len(set(usual)) == len(usual)
    assert any(exchange.is_error for exchange in made)
    assert any(exchange.values == values.tobytes() for exchange in made)
    assert len({len(exchange.request) for exchange in itertools.islice(small(protocol), 100)}) > 3

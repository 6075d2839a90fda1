"""What of each limit one of several fronts gets."""

from __future__ import annotations

import pytest

from tensord.config.options import Grpc, Http, Options, Requests
from tensord.daemon.processes.front_limits import of_one

MIB = 1 << 20


def test_one_front_has_everything() -> None:
    options = Options()
    assert of_one(options, "http") is options
    assert of_one(options, "grpc") is options


@pytest.mark.parametrize(
    ("processes", "in_flight", "collected"), [(2, 500, 128 * MIB), (3, 334, -(-256 * MIB // 3)), (64, 16, 64 * MIB)]
)
def test_http(processes: int, in_flight: int, collected: int) -> None:
    """A part is rounded up, and never less than the largest request needs."""
    options = Options(http=Http(processes=processes), requests=Requests(max_in_flight=1000))
    one = of_one(options, "http")
    assert (one.requests.max_in_flight, one.http.max_collected_byte_size) == (in_flight, collected)
    assert of_one(options, "grpc") is options


def test_grpc() -> None:
    one = of_one(Options(grpc=Grpc(processes=4, max_receiving_byte_size=1 << 30)), "grpc")
    assert (one.requests.max_in_flight, one.grpc.max_receiving_byte_size) == (2048, 256 * MIB)


def test_a_limit_below_the_largest_request_stays() -> None:
    """The operator has chosen it so."""
    options = Options(http=Http(processes=8, max_collected_byte_size=MIB), requests=Requests(max_in_flight=1))
    one = of_one(options, "http")
    assert (one.requests.max_in_flight, one.http.max_collected_byte_size) == (1, MIB)

"""Which targets are inference requests, and what they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.infer_route import InferRoute, InferRoutes, parse
from tensord.shm.errors import InvalidArgument, NotFound


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (b"/v2/models/m/infer", InferRoute("m", 0)),
        (b"/v2/models/m/versions/3/infer", InferRoute("m", 3)),
        (b"/v2/models/m/versions/007/infer", InferRoute("m", 7)),
        (b"/v2/models/m/infer?a=/b", InferRoute("m", 0)),
        (b"http://host:1/v2/models/m/infer", InferRoute("m", 0)),
        (b"HTTPS://host/v2/models/m/infer?x", InferRoute("m", 0)),
        (b"/v2/models/a.b-c_d%20%2F/infer", InferRoute("a.b-c_d %2F", 0)),
        (b"/v2/models/%ff/infer", InferRoute("\ufffd", 0)),
        (b"/v2/models/versions/infer", InferRoute("versions", 0)),
        (b"/v2/models//infer", None),
        (b"/v2/models/m/infer/", None),
        (b"/v2/models/m/infers", None),
        (b"/v2/models/m/versions//infer", None),
        (b"/v2/models/m/versions/x/infer", None),
        (b"/v2/models/m/versions/-1/infer", None),
        (b"/v2/models/m/generate", None),
        (b"v2/models/m/infer", None),
        (b"/x?/v2/models/m/infer", None),
        (b"", None),
    ],
)
def test_targets(target: bytes, route: InferRoute | None) -> None:
    assert parse(target) == route


@pytest.mark.parametrize(
    ("version", "error"),
    [(b"0", NotFound), (b"00", NotFound), (b"9223372036854775808", InvalidArgument), (b"9" * 5000, InvalidArgument)],
)
def test_versions_that_are_none(version: bytes, error: type[Exception]) -> None:
    route = parse(b"/v2/models/m/versions/" + version + b"/infer")
    assert route is not None
    assert (route.model, type(route.error)) == ("m", error)


@given(st.binary())
def test_any_target_is_parsed(target: bytes) -> None:
    parse(target)
    parse(b"/v2/models/" + target + b"/infer")


def test_targets_are_remembered_and_bounded() -> None:
    routes = InferRoutes()
    first = routes.find(b"/v2/models/m/infer")
    assert routes.find(b"/v2/models/m/infer") is first
    for number in range(3000):
        assert routes.find(b"/v2/models/%d/infer" % number) == InferRoute(str(number), 0)
        assert routes.find(b"/%d" % number) is None
    assert len(routes._known) <= 1024

"""One table for every call of every protocol, and what a restricted call needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tritonclient.grpc import service_pb2

from tensord.config.options import Options
from tensord.config.restrictions import GROUPS, parse
from tensord.daemon.control.channel import ControlCalls, ControlChannel
from tensord.daemon.front.access import CALLS, Access, Restricted, Rule
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.status import grpc_status, http_status
from tensord.daemon.http.routes import Endpoint, Routes
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.channel import Channel, pair
from tensord.shm.control_records import ToFront
from tensord.shm.record import decoder


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    """Yields endpoints whose supervisor never answers."""
    ours, theirs = pair()
    connection = ControlChannel(Channel(ours, decoder(ToFront)), lambda *_: None, lambda: None)
    yield Endpoints(ModelStates(), ControlCalls(connection.send), Options())
    connection.close()
    theirs.close()


RESTRICTIONS = parse(["model-repository,shared-memory:Admin-Key=sesame"])


def test_every_http_endpoint_is_in_the_table(endpoints: Endpoints) -> None:
    routes = Routes(endpoints, Access({}, "http"))
    assert {call for _, _, _, call in routes.table()} <= CALLS.keys()


def test_an_endpoint_that_is_not_cannot_be_served(endpoints: Endpoints) -> None:
    class Forgetful(Routes):
        def table(self) -> list[Endpoint]:
            return [*super().table(), ("GET", "/v2/new", self.live, "Forgotten")]

    with pytest.raises(KeyError):
        Forgetful(endpoints, Access({}, "http")).application()


def test_every_call_of_the_grpc_service_is_in_the_table() -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert set(methods) <= CALLS.keys()


def test_every_group_has_calls_and_every_call_a_known_group() -> None:
    assert set(CALLS.values()) == set(GROUPS)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"x")],
        [(b"admin-key", b"")],
        [(b"admin-key", b"sesam")],
        [(b"admin-key", b"Sesame")],
        [(b"admin-key", b"x"), (b"admin-key", b"sesame")],
        [(b"other", b"sesame")],
    ],
)
def test_without_the_key(headers: list[tuple[bytes, bytes]]) -> None:
    rule = Access(RESTRICTIONS, "http").rule("RepositoryIndex")
    assert isinstance(rule, Rule)
    with pytest.raises(Restricted) as caught:
        rule.check(headers)
    assert caught.value.message == "This API is restricted, expecting header 'admin-key'"
    assert (http_status(caught.value), grpc_status(caught.value)) == (403, "UNAVAILABLE")


def test_with_the_key() -> None:
    access = Access(RESTRICTIONS, "http")
    for call in ("RepositoryIndex", "RepositoryModelLoad", "CudaSharedMemoryStatus"):
        rule = access.rule(call)
        assert rule is not None
        rule.check([(b"host", b"x"), (b"admin-key", b"sesame")])
        assert "sesame" not in repr(rule)
    assert access.rule("ModelInfer") is None
    assert access.rule("ServerLive") is None


def test_grpc_has_its_own_sentence_and_header() -> None:
    rule = Access(RESTRICTIONS, "grpc").rule("SystemSharedMemoryStatus")
    assert rule is not None
    rule.check([(b"triton-grpc-protocol-admin-key", b"sesame")])
    with pytest.raises(Restricted) as caught:
        rule.check([(b"admin-key", b"sesame")])
    assert caught.value.message == "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"

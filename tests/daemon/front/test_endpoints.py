"""The answers both protocols give: what makes a server ready, and what is refused before the supervisor is asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.config.options import Options
from tensord.daemon.control.channel import ControlCalls, ControlChannel
from tensord.daemon.front.endpoints import MAX_FILES, MAX_FILES_BYTE_SIZE, Endpoints
from tensord.daemon.front.peer import ConnectionEnd
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.channel import Channel, pair
from tensord.shm.control_records import ModelState, Readiness, ToFront
from tensord.shm.errors import InvalidArgument, NotFound
from tensord.shm.operations import ANONYMOUS, Operation, Peer, RegisterSystemRegion, Settle
from tensord.shm.record import decoder


@pytest.fixture
def connection() -> Iterator[ControlChannel]:
    """Yields a control channel without a supervisor: whoever asks it would wait for ever."""
    ours, theirs = pair()
    connection = ControlChannel(Channel(ours, decoder(ToFront)), lambda *_: None, lambda: None)
    yield connection
    connection.close()
    theirs.close()


class Settled(ControlCalls):
    """Stands for the supervisor and answers once all fronts act upon what it sent."""

    def __init__(self, connection: ControlChannel) -> None:
        super().__init__(connection.send)
        self.asked = 0

    async def ask(self, operation: Operation, peer: Peer = ANONYMOUS, process: int = -1) -> bytes:
        if operation != Settle():
            return await super().ask(operation, peer, process)
        self.asked += 1
        return b""


def endpoints(connection: ControlChannel, *states: ModelState) -> Endpoints:
    table = ModelStates()
    for state in states:
        table.update(state)
    return Endpoints(table, Settled(connection), Options())


@pytest.mark.parametrize(
    ("readiness", "words"),
    [
        (Readiness(), "the server is starting"),
        (Readiness(True, 2), ""),
        (Readiness(True, 2, 1, ("m",)), ""),
        (Readiness(False, 2, 1, ("m",)), "1 of 2 models are not served: m"),
        (Readiness(False, 30, 22, ("a", "b")), "22 of 30 models are not served: a, b and 20 more"),
    ],
)
async def test_readiness(connection: ControlChannel, readiness: Readiness, words: str) -> None:
    table = ModelStates()
    table.judge(readiness)
    asked = Endpoints(table, Settled(connection), Options())
    assert await asked.unreadiness() == words
    asked.stopping = True
    assert await asked.unreadiness() == "the server is stopping"


async def test_what_is_said_of_a_model_holds_for_every_front(connection: ControlChannel) -> None:
    """The others are asked once after each change, and never where there is nothing to tell."""
    table, supervisor = ModelStates(), Settled(connection)
    asked = Endpoints(table, supervisor, Options())
    assert not await asked.model_is_ready("m", 0)
    with pytest.raises(NotFound):
        await asked.model_config("m", 0)
    assert supervisor.asked == 0
    for change in (1, 2):
        table.update(ModelState("m", 1, "READY", workers=(change,), metadata=b'{"name":"m"}', config=b"{}"))
        table.judge(Readiness(True, 1))
        assert not await asked.unreadiness()
        assert supervisor.asked == change
        assert await asked.model_is_ready("m", 1)
        assert await asked.model_metadata("m", 0) == {"name": "m", "versions": ["1"]}
        assert await asked.model_config("m", 0) == b"{}"
        assert supervisor.asked == change


@pytest.mark.parametrize(("version", "versions"), [(0, ["1", "3"]), (1, ["1"]), (3, ["3"])])
async def test_metadata_lists_every_version_that_serves_or_the_one_asked_for(
    connection: ControlChannel, version: int, versions: list[str]
) -> None:
    states = [ModelState("m", n, "READY", workers=(1,), metadata=b'{"name":"m","platform":"p"}') for n in (1, 3)]
    assert await endpoints(connection, *states).model_metadata("m", version) == {
        "name": "m",
        "versions": versions,
        "platform": "p",
    }


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"config": 1}, "load parameter 'config' should be a string with a JSON object"),
        ({"x": ""}, "unrecognized load parameter 'x'."),
        ({"config": "{}", "file:1/model.py": "text"}, "load parameter 'file:1/model.py' should be the bytes of a file"),
    ],
)
async def test_load_parameters_that_are_refused(
    connection: ControlChannel, parameters: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await endpoints(connection).load("m", parameters)
    assert caught.value.message == text


@pytest.mark.parametrize("numbers", [(1 << 63, 1), (0, 1 << 63)])
async def test_region_numbers_that_are_refused(connection: ControlChannel, numbers: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r': offset"):
        await endpoints(connection).register(RegisterSystemRegion("r", "/k", *numbers), -1, ConnectionEnd())


async def test_files_are_bounded(connection: ControlChannel) -> None:
    for files in ({f"file:1/{n}": b"" for n in range(MAX_FILES + 1)}, {"file:1/x": bytes(MAX_FILES_BYTE_SIZE + 1)}):
        with pytest.raises(InvalidArgument, match=f"{len(files)} files of .* at most {MAX_FILES} of"):
            await endpoints(connection).load("m", {"config": "{}", **files})

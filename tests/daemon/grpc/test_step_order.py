"""Steps of one connection that are not sent: whom they wait for, and what becomes of those behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc.unary_infer import Sequence, StepOrder, sequence_of


class Call:
    """A step that can be sent, unless the test makes it fail or wait for memory."""

    def __init__(self, order: StepOrder, sequence: Sequence | None, told: list[str], name: str) -> None:
        self._order, self.sequence, self._told, self._name = order, sequence, told, name
        self.fails = self.waits_for_room = self.begins = False

    def resume(self) -> None:
        self._told.append(self._name)
        if not self.waits_for_room:
            self._order.leave(self, not self.fails)

    def miss(self, sequence: Sequence) -> None:
        assert sequence == self.sequence
        self._told.append(f"not {self._name}")
        self._order.leave(self, False)


class Scene:
    """The steps of a connection."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.order = StepOrder(self.loop)
        self.told: list[str] = []

    def call(self, name: str, sequence_id: int | str | None = 1) -> Call:
        return Call(self.order, None if sequence_id is None else ("m", sequence_id), self.told, name)

    def large(self, name: str, sequence_id: int | str | None = 1) -> Call:
        call = self.call(name, sequence_id)
        self.order.unsent[call] = False
        return call

    def small(self, name: str, sequence_id: int | str | None = 1) -> tuple[Call, bool]:
        call = self.call(name, sequence_id)
        return call, self.order.waits(call)

    def turn(self) -> list[str]:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        told, self.told[:] = self.told[:], []
        return told


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.loop.close()


def test_those_behind_go_on_in_their_order(scene: Scene) -> None:
    first = scene.large("first")
    assert [scene.small(name)[1] for name in "ab"] == [True, True]
    assert not scene.small("of another sequence", 2)[1]
    assert not scene.small("of none", None)[1]
    assert scene.turn() == []
    scene.order.leave(first, True)
    # Who comes before they were told to go on is behind them.
    assert scene.small("c")[1]
    assert scene.turn() == ["a", "b", "c"]
    assert not scene.order.unsent


def test_a_large_one_keeps_the_place_at_which_it_began(scene: Scene) -> None:
    first, second = scene.large("first"), scene.large("second")
    assert scene.small("third")[1]
    # The second one is whole before the first one.
    assert scene.order.waits(second)
    assert not scene.order.waits(first)
    scene.order.leave(first, True)
    assert scene.turn() == ["second", "third"]


def test_one_that_waits_for_room_holds_up_those_behind_it(scene: Scene) -> None:
    first = scene.large("first")
    second = scene.small("second")[0]
    second.waits_for_room = True
    scene.small("third")
    scene.order.leave(first, True)
    assert scene.turn() == ["second"]
    assert scene.turn() == []
    scene.order.leave(second, True)
    assert scene.turn() == ["third"]


def test_whoever_would_miss_a_step_does_not_run(scene: Scene) -> None:
    first, other = scene.large("first"), scene.large("other", 2)
    second = scene.small("second")[0]
    scene.small("third")
    scene.small("other's", 2)
    scene.order.leave(first, False)
    scene.order.leave(other, True)
    assert scene.turn() == ["not second", "not third", "other's"]
    scene.order.leave(second, False)
    # What comes later is not behind it.
    scene.order.unsent[first] = False
    assert scene.small("fourth")[1]
    scene.order.leave(first, True)
    assert scene.turn() == ["fourth"]


def test_a_start_is_behind_nobody_who_did_not_run(scene: Scene) -> None:
    """A START behind a cancelled step begins the sequence anew: the START runs, and so do the steps behind it."""
    first = scene.large("first")
    scene.small("second")
    scene.small("start")[0].begins = True
    scene.small("fourth")
    scene.order.leave(first, False)
    assert scene.turn() == ["not second", "start", "fourth"]
    assert not scene.order.unsent


def test_a_start_waits_for_those_before_one_that_did_not_run(scene: Scene) -> None:
    first, second = scene.large("first"), scene.large("second")
    third = scene.small("third")[0]
    third.begins = third.fails = True
    scene.small("fourth")
    scene.order.leave(second, False)
    assert scene.turn() == []
    scene.order.leave(first, True)
    assert scene.turn() == ["third", "not fourth"]


def test_one_that_is_sent_as_another_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusing a step frees room, with which an earlier step is sent: the steps behind that earlier one are sent as well."""
    first = scene.large("first", 2)
    assert scene.small("behind first", 2)[1]
    cancelled, refused = scene.large("cancelled"), scene.large("refused")
    miss = refused.miss

    def gives_room(sequence: Sequence) -> None:
        miss(sequence)
        scene.order.leave(first, True)

    monkeypatch.setattr(refused, "miss", gives_room, raising=False)
    scene.order.leave(cancelled, False)
    assert scene.turn() == ["not refused"]
    assert scene.turn() == ["behind first"]


def test_one_that_fails_when_it_is_its_turn(scene: Scene) -> None:
    first = scene.large("first")
    scene.small("second")[0].fails = True
    scene.small("third")
    scene.order.leave(first, True)
    assert scene.turn() == ["second", "not third"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_whoever_is_behind_one_that_fails_does_not_run_though_an_earlier_one_is_still_to_be_sent(
    scene: Scene, is_whole: bool
) -> None:
    """Nor does one that is still arriving, or that is whole just before those behind are told."""
    first, second, third = scene.large("first"), scene.large("second"), scene.large("third")
    other = scene.large("other", 2)
    scene.small("fourth")
    scene.order.leave(second, False)
    assert not is_whole or scene.order.waits(third)
    assert scene.turn() == ["not third", "not fourth"]
    # What comes later is behind the first one alone.
    assert scene.small("fifth")[1]
    scene.order.leave(first, True)
    assert scene.turn() == ["fifth"]
    scene.order.leave(third, False)
    scene.order.leave(other, True)
    assert not scene.order.unsent


@given(st.data())
def test_what_the_beginning_of_a_message_says(data: st.DataObject) -> None:
    """Wherever it is cut: the sequence, or that it is not known; never another one."""
    request = service_pb2.ModelInferRequest(model_name=data.draw(st.text(max_size=5)), id="x")
    sequence_id = data.draw(st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=5))
    if isinstance(sequence_id, str):
        request.parameters["sequence_id"].string_param = sequence_id
    elif sequence_id is not None:
        request.parameters["sequence_id"].int64_param = sequence_id
    request.parameters["sequence_start"].bool_param = True
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    head = request.SerializeToString()
    request.raw_input_contents.append(bytes(100))
    whole = request.SerializeToString()
    if isinstance(sequence_id, int):
        sequence_id %= 1 << 64
    expected = (request.model_name, sequence_id) if sequence_id else None
    assert sequence_of(whole) == sequence_of(bytearray(head)) == expected
    cut = data.draw(st.integers(0, len(head)))
    assert sequence_of(whole[:cut]) in (None, expected)


@given(st.binary(max_size=200))
def test_no_bytes_are_too_odd(content: bytes) -> None:
    sequence_of(content)

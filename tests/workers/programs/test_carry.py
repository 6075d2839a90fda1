"""State on the device: who begins, who goes on, who is left as they were; and that many together are as each alone."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.arrays import Array
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable
from tensord.workers.devices.late_tensor import RegionTensor
from tensord.workers.models.execution import Execution
from tensord.workers.models.execution import run as run_model
from tensord.workers.models.jax_model import JaxModel, JittedInstance
from tensord.workers.processor.processor import Processor
from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.programs.carry import StateLost, check_state_size, rows_argument
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.sequence import Controls, Slot
from tensord.workers.tensors.buckets import Buckets
from tensord.workers.tensors.signature import Signature, StateSpec
from tests.workers.made_requests import request_of
from tests.workers.programs.test_executables import of

SLOTS = 64
#: Of the sum of each sequence: where it begins.
FIRST = np.array([100, 200], np.float32)


class Ask(NamedTuple):
    """One request of a sequence."""

    slot: int
    x: Any
    start: bool = False


def summing(parameters: Any, inputs: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any]:
    """Computes the sum of a sequence's inputs, and their number."""
    total, count = state["sum"] + inputs["x"], state["count"] + 1
    return {"y": total * parameters, "n": count}, {"sum": total, "count": count}


def spec(name: str, datatype: str, dims: tuple[int, ...], output: str = "") -> StateSpec:
    dtype = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[datatype]
    return StateSpec(name, datatype, np.dtype(dtype), dims, dims, (None,) * len(dims), output=output or name)


STATES = (spec("sum", "FP32", (2,)), spec("count", "INT32", (1,)))


def stateful(
    apply: Any = summing,
    described: Signature | None = None,
    states: tuple[StateSpec, ...] = STATES,
    slots: int = SLOTS,
    initial: dict[str, Array] | None = None,
    batch: tuple[int, ...] = (1, 4, 64),
    instances: int = 1,
    cache: ExecutableCache | None = None,
    single_thread: SingleThreadDevice | None = None,
) -> JaxModel:
    described = described or of({"x": "FP32[2]"}, {"y": "FP32[2]", "n": "INT32[1]"}, batch[-1])
    described = replace(described, states=states, slots=slots)
    buckets = Buckets(described, batch if described.batches else (1,), {})
    first = {"sum": FIRST} if initial is None else initial
    executables = Executables(
        described,
        buckets,
        apply,
        placed_sets(described, np.float32(1)),
        cache or ExecutableCache(None),
        b"",
        4,
        Processor(single_thread),
        first,
    )
    model = JaxModel(1, described, buckets, executables, instances)
    executables.warm(LoadProgress("m", 1))
    return model


def requests_of(asks: Sequence[Ask], lead: bool = True) -> list[Request]:
    made: list[Request] = []
    for ask in asks:
        array = np.full((1, 2) if lead else (2,), ask.x, np.float32)
        request = request_of({"x": array}, 1, ((2,),), version="a version")
        request.slot, request.controls = Slot(ask.slot, 0), Controls(1000 + ask.slot, ask.start, False)
        made.append(request)
    return made


def run(model: JaxModel | JittedInstance, *asks: Ask, lead: bool = True) -> list[Any]:
    execution = Execution(requests_of(asks, lead), 0)
    model.execute(execution)
    return execution.results


def answers(results: list[Any]) -> list[list[float]]:
    return [result["y"].ravel().tolist() for result in results]


@pytest.fixture(scope="module")
def model() -> JaxModel:
    return stateful()


def test_a_sequence_begins_goes_on_and_begins_again(model: JaxModel) -> None:
    assert answers(run(model, Ask(3, 1, True))) == [[101, 201]]
    assert answers(run(model, Ask(3, 2))) == [[103, 203]]
    assert answers(run(model, Ask(5, 7, True), Ask(3, 3))) == [[107, 207], [106, 206]]
    (again,) = run(model, Ask(3, 1, True))
    assert (again["y"].tolist(), again["n"].tolist()) == ([[101, 201]], [[1]])
    assert answers(run(model, Ask(5, 1))) == [[108, 208]]


def test_together_as_alone(model: JaxModel) -> None:
    """Random batches over all slots against sequences that run one by one in another carry: bit for bit."""
    chance = random.Random(7)
    alone = stateful(apply=model.executables.apply)
    live: set[int] = set()
    for _ in range(60):
        slots = chance.sample(range(SLOTS), chance.choice((1, 3, 17, 64)))
        asks = [Ask(slot, chance.random() * 3 - 1, slot not in live or chance.random() < 0.1) for slot in slots]
        live.update(slots)
        together = run(model, *asks)
        for ask, result in zip(asks, together, strict=True):
            (single,) = run(alone, ask)
            assert result["y"].tobytes() == single["y"].tobytes()
            assert result["n"].tobytes() == single["n"].tobytes()


def test_a_cell_of_a_network_together_as_alone() -> None:
    """Arithmetic that a compiler may round in more than one way, each operation on one row: two alone, and among sixty-four."""

    def cell(parameters: Any, inputs: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any]:
        gate = jax.nn.sigmoid(inputs["x"] * 1.7 + state["sum"] * 0.3)
        total = gate * state["sum"] + (1 - gate) * jnp.tanh(inputs["x"] * 2.1 - state["sum"] * 0.7)
        return {"y": total * 0.9 + gate, "n": state["count"]}, {"sum": total, "count": state["count"] + 1}

    few, many = stateful(cell, initial={}), stateful(cell, initial={})
    for step in range(20):
        asks = [Ask(slot, np.sin(slot + step) * 2, step == 0) for slot in range(64)]
        among = answers(run(many, *asks))
        assert [answers(run(few, ask))[0] for ask in asks[:2]] == among[:2]


def test_nothing_is_compiled_as_sequences_come_and_go(model: JaxModel, caplog: pytest.LogCaptureFixture) -> None:
    before = repr(model.executables)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles(True):
        for step in range(200):
            run(model, *[Ask((step * 7 + i) % SLOTS, step, (step + i) % 3 == 0) for i in range(step % 5 + 1)])
    assert repr(model.executables) == before
    assert not [record for record in caplog.records if "ompiling" in record.getMessage()]


def test_the_carry_is_handed_on_and_not_copied(model: JaxModel) -> None:
    """XLA:CPU takes donations too: what the rows cost does not grow with the slots. Answers would be the same without."""
    run(model, Ask(0, 1, True))
    first = carried(model)
    where = first.unsafe_buffer_pointer()
    run(model, Ask(1, 1, True))
    assert first.is_deleted()
    assert carried(model).unsafe_buffer_pointer() == where


def carried(model: JaxModel) -> jax.Array:
    assert model._carry is not None
    assert model._carry._arrays is not None
    return model._carry._arrays["sum"]


def test_a_run_is_given_to_the_device_before_the_one_before_it_was_read() -> None:
    model = stateful()
    carry = model._carry
    assert carry is not None
    outputs = []
    for step in range(5):
        requests = requests_of([Ask(2, 1, step == 0)])
        executable = model.find(requests)
        assert executable is not None
        inputs, _ = executable.gather(requests)
        program = functools.partial(executable.call, executable.parameters())
        rows = rows_argument(model._signature, 1, [(2, step == 0)])
        outputs.append(carry.run(program, {name: array.copy() for name, array in inputs.items()}, rows, dict))
    assert [np.asarray(each["y"]).ravel()[0] for each in outputs] == [101, 102, 103, 104, 105]


def test_nan_is_no_failure_and_stays_with_its_sequence(model: JaxModel) -> None:
    run(model, Ask(0, 1, True), Ask(1, 1, True))
    run(model, Ask(0, np.nan), Ask(1, 1))
    first, second = answers(run(model, Ask(0, 1), Ask(1, 1)))
    assert np.isnan(first).all()
    assert second == [103, 203]


def test_without_a_batch_dimension() -> None:
    described = of({"x": "FP32[2]"}, {"y": "FP32[2]", "n": "INT32[1]"}, 0)
    model = stateful(described=described, slots=3)
    assert answers(run(model, Ask(2, 1, True), lead=False)) == [[101, 201]]
    assert answers(run(model, Ask(0, 5, True), lead=False)) == [[105, 205]]
    assert answers(run(model, Ask(2, 1), lead=False)) == [[102, 202]]


def test_64_bit_state_survives() -> None:
    def counting(_: Any, inputs: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any]:
        return {"y": inputs["x"]}, {"n": state["n"] + 1}

    described = of({"x": "FP32[2]"}, {"y": "FP32[2]", "n": "INT64[1]"}, 2)
    first = {"n": np.array([2**40])}
    model = stateful(counting, described, (spec("n", "INT64", (1,)),), 2, first, (1, 2))
    # The state is an output as well, so clients see it.
    assert run(model, Ask(0, 0, True), Ask(1, 0, True))[1]["n"].tolist() == [[2**40 + 1]]
    assert run(model, Ask(1, 0))[0]["n"].tolist() == [[2**40 + 2]]


def test_state_goes_in_under_one_name_and_comes_out_under_another() -> None:
    def apply(_: Any, inputs: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any]:
        return {"y": inputs["x"]}, {"n": state["before"] + 1}

    described = of({"x": "FP32[2]"}, {"y": "FP32[2]", "n": "INT32[1]"}, 2)
    model = stateful(apply, described, (spec("before", "INT32", (1,), "n"),), 2, {}, (1, 2))
    run(model, Ask(0, 0, True))
    assert run(model, Ask(0, 0))[0]["n"].tolist() == [[2]]


def test_instances_have_carries_of_their_own() -> None:
    shared = stateful(instances=2)
    instances = [JittedInstance(shared, Processor()), JittedInstance(shared, Processor())]
    assert [answers(run(each, Ask(0, x, True))) for each, x in zip(instances, (1, 2), strict=True)] == [
        [[101, 201]],
        [[102, 202]],
    ]
    assert [answers(run(each, Ask(0, 1))) for each in instances] == [[[102, 202]], [[103, 203]]]


@pytest.mark.parametrize(("flops", "single"), [(10**9, True), (1, False)])
def test_all_programs_are_where_the_carry_is(flops: int, single: bool) -> None:
    """On the single-thread device, or none of them: by the largest."""
    model = stateful(single_thread=SingleThreadDevice(flops))
    placed = {executable.placement.device is not None for executable in model.executables.made.values()}
    assert placed == {single}
    assert answers(run(model, Ask(1, 1, True))) == [[101, 201]]
    assert answers(run(model, *[Ask(slot, 1, slot != 1) for slot in range(64)]))[1] == [102, 202]


# --------------------------------------------------------------------------------------------------------------- failures


class Fuse:
    """A model that fails on a negative input, after the device has the carry."""

    def __call__(self, parameters: Any, inputs: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any]:
        x = jax.pure_callback(self._blow, jax.ShapeDtypeStruct(inputs["x"].shape, inputs["x"].dtype), inputs["x"])
        return summing(parameters, {"x": x}, state)

    @staticmethod
    def _blow(x: Any) -> Any:
        if (np.asarray(x) < 0).any():
            raise ValueError("negative")
        return x


@pytest.fixture
def fuse(caplog: pytest.LogCaptureFixture) -> JaxModel:
    caplog.set_level(logging.CRITICAL)
    return stateful(Fuse(), batch=(1, 2, 4))


def test_a_failure_takes_the_state_of_all_and_the_model_lives(fuse: JaxModel) -> None:
    run(fuse, Ask(0, 1, True), Ask(1, 1, True))
    with pytest.raises(StateLost) as caught:
        run(fuse, Ask(0, -1), Ask(1, 1))
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert answers(run(fuse, Ask(0, 1, True))) == [[101, 201]]


def test_each_request_of_the_batch_is_told_and_none_runs_again(fuse: JaxModel) -> None:
    run(fuse, Ask(0, 1, True), Ask(1, 1, True))
    execution = Execution(requests_of([Ask(0, -1), Ask(1, 1)]), 0)
    run_model(fuse, execution)
    assert execution.lost
    assert [result.message for result in execution.results if isinstance(result, Unavailable)] == [
        f"sequence {number} of model 'm' was lost after an execution error; start it again with the START flag"
        for number in (1000, 1001)
    ]


def test_a_request_that_cannot_be_gathered_fails_alone(model: JaxModel) -> None:
    """Before the device has the carry: the others of its batch run, and every sequence goes on from where it was."""
    run(model, Ask(0, 1, True), Ask(1, 1, True))
    requests = requests_of([Ask(0, 1), Ask(1, 1)])
    late = RegionTensor(cast(Any, _Gone()), 0, np.dtype(np.float32), (1, 2))
    requests[0]._arrays = {"x": cast(Array, late)}
    execution = Execution(requests, 0)
    run_model(model, execution)
    failed, good = execution.results
    assert isinstance(failed, ServingError)
    assert failed.message == "its region is gone"
    assert not execution.lost
    assert good["y"].tolist() == [[102, 202]]  # type: ignore[index,call-overload]
    assert answers(run(model, Ask(0, 1), Ask(1, 1))) == [[102, 202], [103, 203]]


class _Gone:
    """A region that its client has truncated."""

    def read_into(self, *_: Any) -> None:
        raise InvalidArgument("its region is gone")


def test_correct_where_nothing_is_donated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A device that takes no donations computes the same; there a failure leaves the state as it was."""
    caplog.set_level(logging.CRITICAL)
    jit = jax.jit
    monkeypatch.setattr("tensord.workers.programs.lowering.jax.jit", lambda function, donate_argnums=(): jit(function))
    model = stateful(Fuse(), batch=(1, 2))
    monkeypatch.undo()
    run(model, Ask(0, 1, True), Ask(1, 1, True))
    with pytest.raises((StateLost, jax.errors.JaxRuntimeError)) as caught:
        run(model, Ask(0, -1))
    lost = isinstance(caught.value, StateLost)
    assert answers(run(model, Ask(1, 1, lost))) == [[101, 201] if lost else [102, 202]]


# ------------------------------------------------------------------------------------------------------------- at loading


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda p, i, s: {"y": i["x"], "n": s["count"]}, r"apply returned dict, a pair \(outputs, state\) is expected"),
        (lambda p, i, s: ({"y": i["x"], "n": s["count"]}, [1]), "apply returned list as its state"),
        (lambda p, i, s: ({"y": i["x"]}, {"sum": s["sum"]}), "state 'count' is declared but not computed"),
        (
            lambda p, i, s: ({"y": i["x"]}, {**s, "sum": s["sum"][:, :1]}),
            r"state 'sum' is computed as FP32\[1, 1\], declared as FP32\[1, 2\]",
        ),
        (
            lambda p, i, s: ({"y": i["x"]}, {**s, "count": s["count"] * 0.5}),
            r"state 'count' is computed as FP32\[1, 1\], declared as INT32\[1, 1\]",
        ),
        (
            lambda p, i, s: ({"y": i["x"]}, {**s, "more": s["sum"]}),
            "apply returned state 'more', which is not declared",
        ),
        (lambda p, i, s: ({"y": i["x"]}, s), "output 'n' is declared but not computed"),
    ],
)
def test_what_does_not_fit_is_found_at_loading(returned: Any, words: str) -> None:
    with pytest.raises(Internal, match=words):
        stateful(returned, batch=(1,))


def test_so_much_state_is_refused() -> None:
    described = replace(of({"x": "FP32[2]"}, {"y": "FP32[2]"}, 2), states=STATES, slots=1000)
    check_state_size(described, 2, 2 * 1001 * 12)
    with pytest.raises(
        InvalidArgument, match=r"the state of 2000 sequences has 24024 bytes, .*max_state_byte_size allows 24023"
    ):
        check_state_size(described, 2, 24023)

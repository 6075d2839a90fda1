"""Ensembles as graphs: which steps start when, what is answered, what is let go; with random graphs beside a plain evaluation."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.scheduling.ensemble_graph import EnsembleGraph, EnsembleStep
from tensord.workers.scheduling.ensemble_run import EnsembleRun, StepStart
from tensord.workers.scheduling.sequence import Controls
from tests.invariants import check_invariants


def step(takes: str, gives: str, streams: bool = False) -> EnsembleStep:
    """Returns a step. ``takes``, ``gives``: names of inputs and outputs, which are the tensors' names, too."""
    return EnsembleStep("m", 0, {name: name for name in takes.split()}, {name: name for name in gives.split()}, streams)


def run(graph: EnsembleGraph, wanted: str = "") -> EnsembleRun[str]:
    return EnsembleRun(graph, graph.needed(wanted.split()))


def starts(instructions: list[Any]) -> list[tuple[int, int]]:
    return [(each.step, each.iteration) for each in instructions if isinstance(each, StepStart)]


def answers(instructions: list[Any]) -> list[dict[str, Any]]:
    return [each for each in instructions if isinstance(each, dict)]


DIAMOND = EnsembleGraph(["a"], ["d", "c"], [step("a", "b"), step("a", "c"), step("b c", "d")])


def test_a_tensor_that_is_not_there_is_not_passed_on() -> None:
    graph = EnsembleGraph(["a", "hint"], ["b"], [step("a hint", "b")])
    (only,) = run(graph).begun({"a": "A"})
    assert isinstance(only, StepStart)
    assert only.inputs == {"a": "A"}


def test_what_an_answer_says_of_its_sequence_holds_for_all_that_comes_of_it() -> None:
    graph = EnsembleGraph(
        ["a"], ["d", "e", "f"], [step("a", "b", True), step("a", "c"), step("b c", "d"), step("d", "e"), step("c", "f")]
    )
    going = run(graph)
    first, second = going.begun({"a": "A"})
    assert isinstance(first, StepStart)
    assert isinstance(second, StepStart)
    assert first.controls is second.controls is None
    (plain,) = going.responded(second, {"c": "C"})
    assert isinstance(plain, StepStart)
    assert plain.controls is None, "of the client's sequence"
    going.responded(plain, {"f": "F"})
    for number in range(2):
        said = Controls(number + 7, True, False)
        (third,) = going.responded(first, {"b": f"B{number}"}, said)
        assert isinstance(third, StepStart)
        assert third.controls == said
        (fourth,) = going.responded(third, {"d": "D"})
        assert isinstance(fourth, StepStart)
        assert fourth.controls == said, "its model has said nothing else"
        check_invariants(going)
        assert answers(going.responded(fourth, {"e": "E"})) == [{"d": "D", "e": "E", "f": "F"}]
        for each in (third, fourth):
            going.ended(each)
    for each in (first, second, plain):
        going.ended(each)
    assert going._controls == {}
    assert not going.stuck


def test_a_step_without_an_answer_leaves_the_run_stuck() -> None:
    going = run(DIAMOND, "c")
    (only,) = going.begun({"a": "A"})
    assert isinstance(only, StepStart)
    going.ended(only)
    assert going.running == 0
    assert going.stuck


#: What a request brings, and what a first step makes of it, is the same for all answers of the step that streams.
STREAM = EnsembleGraph(["a"], ["d"], [step("a", "s", streams=True), step("a", "k"), step("s k", "d")], most=2)


def test_each_answer_of_a_streaming_step_goes_its_way() -> None:
    going = run(STREAM)
    streaming, constant = going.begun({"a": "A"})
    assert isinstance(streaming, StepStart)
    assert isinstance(constant, StepStart)
    assert going.responded(streaming, {"s": "S0"}) == []
    after = going.responded(constant, {"k": "K"})
    going.ended(constant)
    assert starts(after) == [(2, 0)]
    more = [*after, *going.responded(streaming, {"s": "S1"})]
    assert going.full(0)
    assert starts(more) == [(2, 0), (2, 1)]
    assert isinstance(more[0], StepStart)
    assert isinstance(more[1], StepStart)
    # They leave in the order of the stream, whichever is ready first.
    assert answers(going.responded(more[1], {"d": "D1"})) == []
    going.ended(more[1])
    assert going.full(0)
    assert answers(going.responded(more[0], {"d": "D0"})) == [{"d": "D0"}, {"d": "D1"}]
    going.ended(more[0])
    assert not going.full(0)
    going.ended(streaming)
    assert going.running == 0
    assert not going.stuck
    assert {tensor for tensor, _ in going._values} == {"k"}


def test_no_answer_at_all_of_a_stream_is_none() -> None:
    going = run(STREAM)
    streaming, constant = going.begun({"a": "A"})
    assert isinstance(streaming, StepStart)
    assert isinstance(constant, StepStart)
    going.responded(constant, {"k": "K"})
    going.ended(constant)
    going.ended(streaming)
    assert not going.stuck


@st.composite
def graphs(draw: st.DrawFn) -> EnsembleGraph:
    known = ["in0", "in1"]
    steps: list[EnsembleStep] = []
    for number in range(draw(st.integers(1, 8))):
        taken = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        made = [f"t{number}_{i}" for i in range(draw(st.integers(1, 2)))]
        steps.append(
            EnsembleStep(
                "m", 0, dict.fromkeys(taken, "") | {name: name for name in taken}, {name: name for name in made}
            )
        )
        known += made
    outputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
    return EnsembleGraph(["in0", "in1"], outputs, draw(st.permutations(steps)))


@given(graphs(), st.randoms(use_true_random=False))
def test_any_graph_in_any_order_gives_what_evaluating_it_does(graph: EnsembleGraph, chance: Any) -> None:
    expected = {"in0": "in0", "in1": "in1"}
    for number in graph.in_order():
        taken = graph.steps[number].inputs.values()
        for name in graph.steps[number].outputs:
            expected[name] = f"{name}({','.join(expected[tensor] for tensor in taken)})"
    going: EnsembleRun[str] = EnsembleRun(graph, graph.needed(()))
    waiting = going.begun({"in0": "in0", "in1": "in1"})
    answered: list[dict[str, str]] = []
    begun: list[int] = []
    while waiting:
        each = waiting.pop(chance.randrange(len(waiting)))
        if isinstance(each, dict):
            answered.append(each)
            continue
        begun.append(each.step)
        made = {name: f"{name}({','.join(each.inputs.values())})" for name in graph.steps[each.step].outputs}
        waiting += going.responded(each, made)
        going.ended(each)
        check_invariants(going)
    assert answered == [{name: expected[name] for name in graph.outputs}]
    assert len(begun) == len(set(begun))
    assert going.running == 0
    assert going._values == {}

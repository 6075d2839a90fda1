"""Host models that call others while they work on a request, and what an answer of one may be.

What one calls follows from its input: one model, two at once, one behind the other, an ensemble, a decoupled model, all of its
responses or some, another one that calls, and one that calls the first: a circle, which is refused.

    p, r ─▶ a, b, e, d, and q ─▶ a          p ─▶ q ─▶ p: refused

Its answer tells, besides ``y``, which is as of the other models, when it made each call, and what that has brought.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord import models
from tests.simulation import ensembles, streamed

if TYPE_CHECKING:
    from tests.simulation.clients import Ask, Clients

MODELS = ("p", "q", "r")
SOURCE = """
import numpy as np
from tests.simulation.callers import called

host = True
inputs = {{"x": "INT64[n]"}}
outputs = {{"y": "INT64[n]", "calls": "INT64[m]"}}

def create(path, config, device):
    def apply(params, inputs):
        x, made = inputs["x"], called(config["name"], inputs["x"])
        return {{"y": x * 1000000000 + {files} * 10000 + int(params["k"]), "calls": np.array(made, np.int64)}}
    return apply, {{"k": np.int32(0)}}
"""
#: The factor of the part of a caller's input that says what a called caller is to do; the rest is the number of the ask.
_DEEP = 1_000_000
#: These parts: call ``a``; call the first caller, so that the calls make a circle; call nobody.
_CHAIN, _CIRCLE, _END = _DEEP, 2 * _DEEP, 3 * _DEEP
_WAITS_FOR_ITSELF = "waits for itself (p -> q -> p)"
#: The error message of a call to a model that no worker serves; the group is the model's name.
_MISSING = re.compile(r"[Mm]odel '([a-z]+)' (?:is not ready\.(?! Other workers)|cannot be served now: )")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The calls that a caller makes for one input."""

    #: The models that it calls, each with its input.
    calls: tuple[tuple[str, int], ...]
    #: True: the caller makes all calls before it waits for an answer.
    together: bool = False
    #: True: the caller cancels its first call at once, and accepts an answer or Cancelled.
    withdraws: bool = False


def plan(name: str, x: int) -> Plan:
    """Returns what the caller of that name calls for an input."""
    number, deep = x % _DEEP, x - x % _DEEP
    if deep:
        return Plan({_CHAIN: (("a", number),), _CIRCLE: (("p", number + _END),), _END: ()}[deep])
    match number % 9:
        case 0:
            return Plan((("a", number),))
        case 1:
            return Plan((("a", number), ("b", number)), together=True)
        case 2 | 3:
            return Plan(((streamed.MODEL, number),))
        case 4:
            return Plan((("b", number) if name == "q" else ("q", number + _CHAIN),))
        case 5:
            return Plan((("b", number) if name == "q" else ("q", number + (_CIRCLE if name == "p" else _CHAIN)),))
        case 6:
            return Plan(((ensembles.MODEL, number),))
        case 7:
            return Plan((("b", number), ("a", number)))
        case _:
            return Plan((("a", number), ("b", number)), together=True, withdraws=True)


def needed(name: str, x: int) -> tuple[str, ...]:
    """Returns the models that have to be there for an answer of a caller, itself among them."""
    found = [name]
    for model, given in plan(name, x).calls:
        found += (
            (*ensembles.STEPS, model)
            if model == ensembles.MODEL
            else needed(model, given)
            if model in MODELS
            else (model,)
        )
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------- the models'


def called(name: str, x: Any) -> list[int]:
    """Makes the calls of a caller. Returns for each when it was made, and what it has brought."""
    planned, made = plan(name, int(x[0])), list[int]()
    begun = []
    for model, given in planned.calls:
        inputs = {"x": np.full(len(x), given, np.int64)}
        now_ns = time.monotonic_ns()
        if model == streamed.MODEL:
            made += (now_ns, *_responses(given, len(x), models.stream(model, inputs)))
        elif planned.together:
            begun.append((model, now_ns, models.begin(model, inputs)))
        else:
            made += (now_ns, *_values(model, models.call(model, inputs), len(x)))
    if planned.withdraws:
        begun[0][2].cancel()
    for number, (model, now_ns, call) in enumerate(begun):
        try:
            made += (now_ns, *_values(model, call.result(), len(x)))
        except models.Cancelled:
            if not planned.withdraws or number:
                raise
            made += (now_ns, -1)
    return made


def _responses(x: int, size: int, stream: Any) -> list[int]:
    """Takes the responses of a stream. Returns their number, and the value of each."""
    values = list[int]()
    for number, response in enumerate(stream):
        if response["at"].tolist() != [number]:
            raise AssertionError(f"response {response['at']} comes where {number} is next")
        values += _values(streamed.MODEL, response, size)
        if streamed.leaves(x, number + 1):
            stream.close()
            break
    return [len(values), *values]


def _values(model: str, outputs: Any, size: int) -> list[int]:
    names = ("first", "y") if model == ensembles.MODEL else ("y",)
    for name in names:
        if len(outputs[name]) != size or (outputs[name] != outputs[name][0]).any():
            raise AssertionError(f"output '{name}' of '{model}' is no answer to {size} equal values: {outputs[name]}")
    values = [int(outputs[name][0]) for name in names]
    return [*values, *outputs["calls"].tolist()] if model in MODELS else values


# -------------------------------------------------------------------------------------------------------------- the judge's


def judge(clients: Clients, ask: Ask, outputs: Sequence[Any], of_x: int, of_files: int) -> None:
    """Judges an answer of a caller: its own value, and that of each model on the way, since it was called."""
    said = iter(outputs[1].tolist())
    _judge(clients, ask, ask.model, ask.input, int(outputs[0][0]), said, of_x, of_files)
    if left := list(said):
        clients.scheduler.defect(f"{ask} got more than its calls have brought: {left}")


def _judge(
    clients: Clients, ask: Ask, name: str, x: int, value: int, said: Iterator[int], of_x: int, of_files: int
) -> None:
    def judge_made(model: str, given: int, since_ns: int, value: int) -> tuple[int, int]:
        # As if it had been asked by itself, when the call was made.
        by_itself = dataclasses.replace(ask, model=model, begun_ns=since_ns, x=given)
        made, rest = divmod(value, of_x)
        files, push = divmod(rest, of_files)
        clients.judge_made(by_itself, model, made, files, push)
        return files, push

    judge_made(name, x, ask.begun_ns, value)
    planned = plan(name, x)
    for number, (model, given) in enumerate(planned.calls):
        since_ns, first = next(said), next(said)
        if given > _CIRCLE and not _may_be_two(clients):
            clients.scheduler.defect(f"{ask} is answered, and goes in a circle")
        if model == streamed.MODEL:
            wanted = given % 7 + 1 if given % 11 == 0 else streamed.count(given)
            if first != wanted or (streamed.fails(given) and given % 11):
                clients.scheduler.defect(f"{ask} is answered with {first} responses of '{model}'")
            made = {judge_made(model, given, since_ns, next(said)) for _ in range(first)}
            if len(made) > 1:
                clients.scheduler.defect(f"{ask} is answered with responses of '{model}' by {made}")
        elif model == ensembles.MODEL:
            values = ensembles.steps_of([first], [next(said)], of_x)
            for step, each in zip(ensembles.STEPS, values, strict=True):
                judge_made(step, given, since_ns, each)
        elif model in MODELS:
            _judge(clients, dataclasses.replace(ask, begun_ns=since_ns), model, given, first, said, of_x, of_files)
        elif first >= 0 or not planned.withdraws or number:
            judge_made(model, given, since_ns, first)


def _may_be_two(clients: Clients) -> bool:
    """Returns whether two loads of the first caller may work at a time: a circle that the one begins may end in the other."""
    return any(each.kind == "load" and each.begun_ns for each in clients.history.changes["p"])


def why_error(clients: Clients, ask: Ask, message: str) -> str:
    """Returns why a request of a caller may end with that error; "": its calls say no such thing."""
    x, calls = ask.input, plan(ask.model, ask.input).calls
    models_of = [model for model, _ in calls]
    if ask.model == "p" and calls[0][1] > _CIRCLE and _WAITS_FOR_ITSELF in message:
        return "it goes in a circle"
    if ask.model == "p" and models_of == ["q"] and "'q' waits for itself (p -> q)" in message and _may_be_two(clients):
        return "it waits for one that waits for it, at another load"
    missing = _MISSING.search(message)
    if missing is not None and missing[1] in needed(ask.model, x)[1:]:
        causes = missing[1], *ensembles.ALL.get(missing[1], ())
        if any(clients.history.was_given_up(model, ask.begun_ns) for model in causes):
            return "workers have died of the load of what it calls"
    if message == streamed.FAILED and streamed.MODEL in models_of and streamed.fails(x) and x % 11:
        return "the decoupled model fails behind its last response"
    return ""

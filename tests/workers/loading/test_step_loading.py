"""Tests that mistakes in a stepped model are found and named when it is loaded."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tensord.config.model_config import empty, parse_pbtxt
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unsupported
from tensord.shm.status_page import StatusPage
from tensord.workers.imports import import_system
from tensord.workers.loading.loader import Loader
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tensord.workers.threads.inbox import Inbox
from tests.repositories import write_model
from tests.workers.loading.targets import target

MODEL = """
    import jax.numpy as jnp, numpy as np

    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[2]"}
    buckets = {"n": (2, 4)}
    slots = 4
    max_steps = 10

    def create(path, config, device):
        def init(params, slots):
            return {"a": jnp.zeros((slots, 2)), "n": [jnp.zeros(slots, jnp.int32)]}

        def insert(params, carry, slot, inputs):
            a = carry["a"].at[slot].set(inputs["x"].sum() * params["w"])
            return {"a": a, "n": [carry["n"][0].at[slot].set(inputs["n"])]}, {"y": a[slot]}

        def step(params, carry, active):
            a = carry["a"] * 2
            return {"a": a, "n": carry["n"]}, {"y": a}, active, ~active

        return (init, insert, step), {"w": np.ones(2, np.float32)}
"""


def load(
    tmp_path: Path, source: str, config: str = "", state: int = 1 << 20, cache: ExecutableCache | None = None
) -> LoadedModel:
    import_system.prepare()
    folder = write_model(tmp_path, "m", source)
    message = parse_pbtxt(config, "m") if config else empty("m")
    message.name = "m"
    inbox, page = Inbox(), StatusPage.create()
    try:
        given = target(state=state)
        loader = Loader(dataclasses.replace(given, cache=cache or given.cache), inbox, page)
        made = loader.load(Load("m", 1, str(folder.parent), str(folder), message.SerializeToString()))
        made.imports.forget()
        return made
    finally:
        inbox.close()
        page.close()


def test_a_good_one(tmp_path: Path) -> None:
    made = load(tmp_path, MODEL)
    assert made.streams
    assert not made.repeatable
    assert made.stepped is not None
    assert (made.stepped.rules.slots, made.stepped.rules.inserts_per_step, made.stepped.gather) == (4, 4, "")
    assert set(made.stepped.executables.inserts) == {((2,),), ((4,),)}
    assert made.stepped.key({"x": np.zeros(3, np.float32)}) == ((4,),)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (("slots = 4", ""), InvalidArgument, "max_steps of model.py is for stepped models, which also say slots = 64"),
        (("slots = 4", "slots = 0"), InvalidArgument, "slots of model.py is 0, a number between 1 and 4096 is expected"),
        (("max_steps = 10", ""), InvalidArgument, "max_steps of model.py is missing"),
        (("max_steps = 10", "max_steps = 'x'"), InvalidArgument, "max_steps of model.py is 'x', a number between 1"),
        (("max_steps", "insert_rows = 5; max_steps"), InvalidArgument, "insert_rows of model.py is 5, a number between 1 and 4"),
        (("max_steps", "gather = 'sum'; max_steps"), InvalidArgument, "gather of model.py is 'sum', 'concat' is all there is"),
        (("max_steps", "step_slots = (5,); max_steps"), InvalidArgument, "step_slots of model.py is (5,)"),
        (("max_steps", "host = True; max_steps"), Unsupported, "slots are for functions that are compiled"),
        (("max_steps", "max_batch_size = 3; max_steps"), InvalidArgument, "max_batch_size is 3; a stepped model has slots"),
        (("buckets = {", "sizes = {"), InvalidArgument, "input 'x' has axis 'n' and no buckets for it"),
        (("buckets = {", "bucket = {"), InvalidArgument, "'bucket' of model.py means nothing; did you mean 'buckets'"),
        (("[n]", "[-1]"), InvalidArgument, "which no input has"),
        (('"x": "FP32[n]"', '"x": "FP32[n]", "n": "FP32[1]"'), InvalidArgument, "'n' names an input and an axis"),
        (("FP32[2]", "FP32[-1]"), InvalidArgument, "output 'y' has dims [-1]"),
        (("FP32[2]", "BYTES[2]"), Unsupported, "BYTES of 'y' cannot be jitted"),
        (("(init, insert, step),", "init,"), InvalidArgument, "create() must return ((init, insert, step), params)"),
        (("init(params, slots)", "init(params)"), InvalidArgument, "init of create() takes (params), it is called with"),
        (("slot, inputs)", "slot)"), InvalidArgument, "it is called with (params, carry, slot, inputs)"),
        (("carry, active)", "carry)"), InvalidArgument, "it is called with (params, carry, active)"),
        (("jnp.zeros((slots, 2))", "jnp.zeros((3, 2))"), Internal, "carry['a'] as FP32[3, 2], its first dimension must be"),
        (('[carry["n"][0].at[slot].set(inputs["n"])]', "[]"), Internal, "than init made without carry['n'][0]"),
        (('"n": carry["n"]}', '"n": [carry["n"][0] * 1.5]}'), Internal, "carry['n'][0] as FP32[4], init made it as INT32[4]"),
        (('{"y": a[slot]}', '{"y": a}'), Internal, "insert returned output 'y' as FP32[4, 2], FP32[2] is expected"),
        (('{"y": a[slot]}', '{"z": a[slot]}'), Internal, "insert returned output 'z', which is not declared"),
        (('{"y": a}, active', '{"y": a[0]}, active'), Internal, "step returned output 'y' as FP32[2], FP32[4, 2] is expected"),
        (('{"y": a}, active', "{}, active"), Internal, "step returned no output 'y', which is declared"),
        (('{"y": a}, active', "[a], active"), Internal, "step returned list as its outputs, a dict of arrays is expected"),
        (("active, ~active", "active"), Internal, "step returned 3 things, (carry, outputs, emit, finished) is expected"),
        (("active, ~active", "active, 0"), Internal, "step returned 'finished' as INT32[], BOOL[4] is expected"),
        (("a = carry[\"a\"] * 2", "a = carry[\"a\"] @ np.ones((3, 3))"), Internal, "TypeError"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, change: tuple[str, str], error: type[ServingError], words: str) -> None:
    assert change[0] in MODEL
    with pytest.raises(error) as raised:
        load(tmp_path, MODEL.replace(*change))
    assert words in raised.value.message
    assert "model 'm'" in raised.value.message or error is Internal


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("sequence_batching { }", "a stepped model has no sequences"),
        ("instance_group { count: 2 }", "a stepped model has one instance"),
        ("response_cache { enable: true }", "Response Cache does not currently support model m with 'decoupled'"),
    ],
)
def test_what_a_configuration_may_not_ask_for(tmp_path: Path, config: str, words: str) -> None:
    with pytest.raises(ServingError, match=words):
        load(tmp_path, MODEL, config)


def test_the_carry_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as raised:
        load(tmp_path, MODEL, state=50)
    # 4 slots of 2 FP32 and an INT32, and whether each is in use.
    assert raised.value.message == (
        "model 'm': the carry of 4 slots has 52 bytes, executables.max_state_byte_size allows 50"
    )


SAMPLE = """
    model_warmup {
      name: "first" count: 3 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ DIM ] random_data: true } }
    }
"""


def noting(tmp_path: Path, why: str = "") -> str:
    """Returns the model's source with an insertion that notes its calls in a file.

    It fails with ``why``, if given, when its input is more than zeros.
    """
    return MODEL.replace(
        "def init(params, slots):",
        f"""import jax

        def note(sum):
            with open({str(tmp_path / "calls")!r}, "a") as file:
                file.write("x")
            if {why!r} and sum > 0:
                raise ValueError({why!r})
            return sum

        def init(params, slots):""",
    ).replace('inputs["x"].sum()', 'jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), inputs["x"].sum())')


def test_samples_are_run_as_requests_that_have_a_slot(tmp_path: Path) -> None:
    made = load(tmp_path / "without", noting(tmp_path))
    assert made.stepped is not None
    before = len((tmp_path / "calls").read_text()) if (tmp_path / "calls").exists() else 0
    (tmp_path / "calls").write_text("")
    load(tmp_path / "with", noting(tmp_path), SAMPLE.replace("DIM", "3"))
    assert len((tmp_path / "calls").read_text()) == before + 3


@pytest.mark.parametrize(
    ("dim", "why", "words"),
    [
        (
            "5",
            "",
            "warmup sample 'first' failed: model 'm': axis 'n' of the request has size 5, the largest of its buckets is 4",
        ),
        ("3", "secret", "warmup sample 'first' failed: model 'm' version 1 failed with"),
    ],
)
def test_a_sample_that_fails_fails_the_load(tmp_path: Path, dim: str, why: str, words: str) -> None:
    with pytest.raises(ServingError) as caught:
        load(tmp_path, noting(tmp_path, why), SAMPLE.replace("DIM", dim))
    assert words in caught.value.message
    assert "secret" not in caught.value.message


def test_closed_over_arrays_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The programs are init, one step, and an insert for each bucket."""
    source = MODEL.replace('a = carry["a"] * 2', 'a = carry["a"] * jnp.sum(large)').replace(
        "def init", "large = np.ones(1 << 19, np.float32)\n\n        def init"
    )
    load(tmp_path, source)
    said = [record.message for record in caplog.records if "constants" in record.message]
    assert [" has 2097152 bytes of arrays" in each and "each of its 4 programs" in each for each in said] == [True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("a = carry[\"a\"] * 2", "a = carry[\"a\"] * np.random.rand()"), "(model.py, line 19, in step), as with numpy.random"),
        (("jnp.zeros((slots, 2))", "jnp.ones((slots, 2)) * np.random.rand()"), "(model.py, line 12, in init), as with numpy.ran"),
        (("inputs[\"x\"].sum() *", ""), "no output depends on its input 'x': use it, or do not declare it"),
    ],
)  # fmt: skip
def test_what_is_told_of_functions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: tuple[str, str], words: str
) -> None:
    load(tmp_path, MODEL)
    assert caplog.records == []
    for _ in range(2):
        load(tmp_path, MODEL.replace(*change))
        (record,) = caplog.records
        assert words in record.message
        caplog.clear()


def test_values_of_a_trace_that_are_left_outside(tmp_path: Path) -> None:
    for change in ("", "kept.append(a) or"):
        source = MODEL.replace('{"y": a}, active', f'{change} {{"y": a}}, active').replace(
            "def init", "kept = []\n        def init"
        )
        made = load(tmp_path, source)
        assert made.stepped is not None
        assert made.stepped.executables.leaks() is bool(change)


_INSERT = 'a = carry["a"].at[slot].set(inputs["x"].sum() * params["w"])'
_ROWS = (_INSERT, 'a = carry["a"].at[slot].set(inputs["x"].sum(1, keepdims=True) * params["w"])')
_STEP = 'a = carry["a"] * 2'
_NEXT = '{"y": a}, active, ~active'
_TWO = ("slots = 4", "slots = 4; insert_rows = 2")
_SEED = ("slots = 4", 'slots = 4\n    request = {"seed": "INT32"}')

#: Changes of a stepped model by which its requests affect each other, and the cause that the error names.
MIXED: dict[str, tuple[list[tuple[str, str]], str]] = {
    "step": ([(_STEP, 'a = carry["a"] - carry["a"].mean(0)'), ("~active", "~active & active")], "the other rows"),
    "insert": ([(_INSERT, f"{_INSERT}; a = a.at[(slot + 1) % 4].set(a[slot])"), (_NEXT, '{"y": a}, active, a[:, 0] > 99')],
               "the other rows"),
    "finished": ([(_NEXT, '{"y": a}, active, jnp.broadcast_to(active.sum() > 2, 4)')], "the number of rows"),
    "emits": ([(_NEXT, '{"y": a}, active & (active.sum() > 1), ~active')], "the number of rows"),
    "state": ([(_STEP, 'a = jnp.cumsum(carry["a"], 0)'), (_NEXT, '{"y": a}, active, ~active & active')], "the other rows"),
    "slot": ([(_STEP, 'a = carry["a"] + jnp.arange(4.0)[:, None]')], "its place"),
    "draws": ([(_STEP, "import jax; a = carry['a'] + jax.random.normal(jax.random.key(0), (4, 2))")], "its place"),
    "number": ([(_STEP, 'a = carry["a"] / active.sum()')], "the number of rows"),
    "insert_rows": ([_TWO, (_INSERT, _ROWS[1].replace("inputs", "inputs['x'].mean() + inputs"))], "the other rows"),
}  # fmt: skip
APART: dict[str, list[tuple[str, str]]] = {
    "plain": [],
    "goes_on": [("active, ~active", "active, jnp.abs(a).sum(1) > 9")],
    "one_slot": [("slots = 4", "slots = 1"), (_STEP, 'a = carry["a"] - carry["a"].mean(0)')],
    "rows": [_TWO, _ROWS],
    "several_steps": [("slots = 4", "slots = 4; step_slots = (1, 3)"), ('{"y": a}, active', '{"y": a[: len(active)]}, active')],
    "large": [(_STEP, 'a = jnp.exp(carry["a"] - carry["a"].max()); a = a / a.sum(1, keepdims=True)')],
    "seed": [_SEED, ("slot, inputs)", "slot, inputs, request)"),
             ("import jax.numpy", "import jax, jax.numpy"),
             (_INSERT, f'{_INSERT}; key = jax.random.key(request["seed"][0]); a = a.at[slot].add(jax.random.normal(key, (2,)))')],
    # It counts in a loop whose end depends on the state: it is not run.
    "loops": [(_STEP, "import jax; a = jax.lax.while_loop(lambda a: a.sum() > 99, lambda a: a - 1, carry['a'][::-1])")],
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_requests_that_do_not_affect_each_other(tmp_path: Path, name: str) -> None:
    load(tmp_path, changed(APART[name]))


@pytest.mark.parametrize("name", MIXED)
def test_requests_that_affect_each_other_are_refused(tmp_path: Path, name: str) -> None:
    changes, on = MIXED[name]
    with pytest.raises(Internal) as raised:
        load(tmp_path, changed(changes))
    assert re.match(rf"model 'm': a row of output 'y' depends on {on}", raised.value.message)
    draws = (
        "it draws random numbers with a key that depends on no input (model.py, line 19, in step)"
        in raised.value.message
    )
    assert draws == (name == "draws")
    meant = " (axis 0 is the slots). slots = 1 in model.py says that it is meant"
    assert raised.value.message.endswith(meant) == (not draws)


def changed(changes: Sequence[tuple[str, str]]) -> str:
    source = MODEL
    for before, after in changes:
        assert before in source, before
        source = source.replace(before, after)
    return source


def test_what_is_known_of_requests_is_kept_with_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    find = SteppedModel.find_fault
    monkeypatch.setattr(SteppedModel, "find_fault", lambda *given: found.append(find(*given)))
    cached = ExecutableCache(cache_directory(str(tmp_path / "cache")))
    for source in (MODEL, MODEL, MODEL.replace("* 2", "* 3")):
        load(tmp_path, source, cache=cached)
    assert found == [None, None]

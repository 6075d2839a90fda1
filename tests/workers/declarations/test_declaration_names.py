"""Tests that a misspelt declaration is told from a model's own names, which are refused never."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from tensord.config.model_config import empty, parse_pbtxt
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.declaration_names import _EXAMPLES, check_names

WORKERS = Path(__file__).parents[3] / "workers"
#: Names that the worker reads of a module and that no model.py declares: functions and classes, and what an artifact has.
NO_DECLARATIONS = {"create", "TritonPythonModel", "source", "vjp_order", "__file__", "__all__"}


def check(folder: Path, source: str, config: str = "") -> None:
    module, file = ModuleType("model"), folder / "model.py"
    file.write_text(source)
    module.__file__ = str(file)
    exec(source, module.__dict__)
    check_names(parse_pbtxt(config, "m") if config else empty("m"), module)


@pytest.mark.parametrize(
    ("source", "name", "meant"),
    [
        ("max_batchsize = 8", "max_batchsize", "max_batch_size"),
        ("inputs = {}\nmax_bacth_size, batch_buckets = 8, (1, 8)", "max_bacth_size", "max_batch_size"),
        ("input = {'x': 'FP32[4]', 'y': 'INT8[n]'}", "input", "inputs"),
        ("ouputs = ('FP32[4]', 'FP32[1]')\noutput = {'y': 'FP32[4]'}", "output", "outputs"),
        ("bucket = {'n': (4, 8)}", "bucket", "buckets"),
        ("batch_bucket = [1, 8]", "batch_bucket", "batch_buckets"),
        ("states = {'h': 'FP32[8]'}", "states", "state"),
        ("requests = {'seed': 'INT64'}", "requests", "request"),
        ("slot = 4\ndef insert(params, carry, slot, inputs):\n    return carry, slot", "slot", "slots"),
        ("max_step = 4", "max_step", "max_steps"),
        ("device = 2", "device", "devices"),
        ("hosts = True", "hosts", "host"),
        ("strict_parameter = True", "strict_parameter", "strict_parameters"),
        ("batch_input = {'rows': ('SEGMENT_IDS', 'INT32', 'x')}", "batch_input", "batch_inputs"),
        ("rows_may_mx = True", "rows_may_mx", "rows_may_mix"),
        ("memory_polcy = 'on_demand'", "memory_polcy", "memory_policy"),
    ],
)
def test_misspelt(tmp_path: Path, source: str, name: str, meant: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"'{name}' of model.py means nothing; did you mean '{meant}', as in {meant} = "
    ):
        check(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        "def inputs_of(x):\n    return x",
        "def input(x):\n    return x",
        "buckets_by_size = {4: (4, 8)}",
        "import string as states",
        "from os import sep as gathers",
        "import struct as requests",
        "input = 'tokens'",
        "output = ['logits', 'FP32']",
        "batch_size = 8",
        "MAX_BATCH_SIZE = 8",
        "_max_batchsize = 8",
        "slot = 4\ndef f():\n    return slot",
        "slot = 4\ndef f():\n    def g():\n        return [slot for _ in range(3)]\n    return g",
        "slot = 4\nsizes = [slot] * 2",
        "__all__ = ['slot']\nslot = 4",
        "max_batchsize = 8\nmax_batch_size = max_batchsize",
        "max_batchsize = 8\nmax_batch_size = 4",
        "device = None",
        "device = 'cpu'",
        "state = {'h': 'FP32[8]'}\nstates = {'h': 'FP32[8]'}",
        "hosts = ['a', 'b']",
        "host_name = 'a'",
        "stats = {'mean': 1.5}",
        "request_count = 0",
        "class Slot:\n    slot = 4",
    ],
)
def test_names_of_the_models_own(tmp_path: Path, source: str) -> None:
    check(tmp_path, source)


@pytest.mark.parametrize(
    ("source", "config"),
    [
        ("input = {'x': 'FP32[4]'}", "input { name: 'x' data_type: TYPE_FP32 dims: 4 }"),
        ("max_batchsize = 8", "max_batch_size: 8"),
        ("bucket = {'n': (4, 8)}", "parameters { key: 'buckets.n' value { string_value: '4,8' } }"),
        ("device = 2", "parameters { key: 'devices' value { string_value: '2' } }"),
    ],
)
def test_what_the_configuration_says_is_not_missed(tmp_path: Path, source: str, config: str) -> None:
    with pytest.raises(InvalidArgument):
        check(tmp_path, source)
    check(tmp_path, source, config)


def test_every_declaration_that_the_worker_reads_is_known() -> None:
    read = {
        name.value
        for path in WORKERS.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for module, name in itertools.pairwise(call.args)
        if isinstance(module, ast.Name) and module.id == "module"
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
    }
    assert read - NO_DECLARATIONS == _EXAMPLES.keys()


def test_a_module_without_a_text(tmp_path: Path) -> None:
    module = ModuleType("program")
    module.__dict__.update(slot=4)
    check_names(empty("m"), module)

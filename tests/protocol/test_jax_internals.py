"""Each interface of JAX that is not public made missing in turn: models answer as ever, and the log says once what is so without.

As a later JAX would have it: the interface is taken away in every process, as soon as its module is imported.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensord.workers.jax_internals.interfaces import INTERFACES
from tests.daemon_process import DaemonProcess
from tests.repositories import write_model

#: Interface -> the module after which something is done, and what, where looking for it is not enough.
TRIED = {
    "jaxlib's calls of posix_memalign and free": (
        "tensord.workers.native._native",
        "module.redirect_allocations = lambda folder: False",
    ),
    "serialized_buffer_assignment_proto of XLA's get_compiled_memory_stats": (
        "tensord.workers.programs.plain_program",
        "module._leaves_only_outputs = lambda assignment: None.lacks",
    ),
}
LOOKED_FOR = {interface.name for interface in INTERFACES if interface.look is not None}
#: Only a process with a GPU has it (``tests/workers/programs/test_gpu_programs.py``).
OF_GPUS = {interface.name for interface in INTERFACES if "jax_cuda12_plugin" in interface.name}
CUT = """
import importlib.abc
import importlib.util
import sys


class Cut(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            {statement}

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Cut())
"""
LACK = """
            def lacks():
                raise AttributeError("it has moved")

            for found in [each for each in module.INTERFACES if each.name in {names!r}]:
                object.__setattr__(found, "look", lacks)
"""
_ALONE = pytest.mark.release("one alone; an ordinary run lacks all of them")
COUNT = 40_000
MODEL = f"""
import jax.numpy as jnp

inputs = {{"x": "FP32[{COUNT}]"}}
outputs = {{"y": "FP32[{COUNT}]"}}


def create(path, config, device):
    def apply(params, inputs):
        # A factorisation is a call of LAPACK.
        square = jnp.eye(2, dtype=jnp.float32) * (4 + 0 * inputs["x"][0])
        return {{"y": inputs["x"] * jnp.linalg.cholesky(square)[0, 0] + 1}}

    return apply, {{}}
"""


def test_every_interface_is_made_missing() -> None:
    assert {interface.name for interface in INTERFACES} == LOOKED_FOR | set(TRIED) | OF_GPUS


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param([name], id=name) for name in sorted(TRIED)),
        pytest.param(sorted(LOOKED_FOR), id="all"),
        *(pytest.param([name], id=name, marks=_ALONE) for name in sorted(LOOKED_FOR)),
    ],
)
@pytest.mark.cpu_workers("interfaces that a worker on a CPU uses")
def test_answers_without_it(names: list[str], tmp_path: Path) -> None:
    interfaces = "tensord.workers.jax_internals.interfaces"
    module, statement = TRIED.get(names[0], (interfaces, LACK.format(names=names).strip()))
    (tmp_path / "sitecustomize.py").write_text(CUT.format(module=module, statement=statement))
    write_model(tmp_path / "models", "large", MODEL)
    (tmp_path / "cache").mkdir(mode=0o700)
    for start in ("first", "second"):
        folder = tmp_path / start
        folder.mkdir()
        options = {"executables": {"cache_directory": str(tmp_path / "cache")}, "workers": {"cpu": 1}}
        environment = {"PYTHONPATH": str(tmp_path)}
        with DaemonProcess(folder, [tmp_path / "models"], options, environment=environment) as daemon:
            given = {"name": "x", "datatype": "FP32", "shape": [COUNT], "data": [float(i) for i in range(COUNT)]}
            for _ in range(3):
                status, answer = daemon.infer("large", [given])
                assert status == 200, answer
                # No difference of so long lists is worth showing.
                right = answer["outputs"][0]["data"] == [2.0 * i + 1 for i in range(COUNT)]
                assert right
            said = re.findall(r"this JAX lacks interfaces that are not public: (.*)\n", daemon.log)
            lacking = [each for each in INTERFACES if each.name in names and each.name not in TRIED]
            sentence = "; ".join(f"{each.without} ({each.name}: it has moved)" for each in lacking)
            assert said == ([sentence] if sentence else [])

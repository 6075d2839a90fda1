"""Finds misspelt declarations in a model.py, such as ``max_batchsize``, ``input`` or ``bucket``, which would have no effect.

Most variables of a model.py are its author's own. One counts as a misspelt declaration only if its name is nearly that of a
declaration that model.py and config.pbtxt lack, if its value has that declaration's type, and if model.py does not read it.
"""

from __future__ import annotations

import difflib
import inspect
import symtable
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument

#: How much of a name must be that of a declaration, as difflib counts it; of ``batch_size`` and ``max_batch_size`` it is 0.83.
_NEAR = 0.85
#: Every declaration that the worker reads of a model.py, which a test compares -> an example of its value.
_EXAMPLES: Mapping[str, Any] = {
    "inputs": {"x": "FP32[4]"}, "outputs": {"y": "FP32[4]"}, "state": {"h": "FP32[8]"}, "request": {"seed": "INT64"},
    "max_batch_size": 32, "batch_buckets": (1, 8, 32), "buckets": {"length": (32, 128)}, "ragged": ("x",),
    "batch_inputs": {"rows": ("SEGMENT_IDS", "INT32", "x")}, "batch_outputs": {"y": "x"},
    "slots": 64, "max_steps": 1024, "inserts_per_step": 4, "step_slots": (4, 64), "insert_rows": 8, "gather": "concat",
    "devices": 4, "memory_policy": "on_demand", "batch_sets": True, "resident_sets": 64,
    "host": True, "response_cache": True, "strict_parameters": True, "rows_may_mix": True,
    "derivatives": True,
}  # fmt: skip


def flag(model: str, module: ModuleType, name: str) -> bool:
    """Returns the variable called ``name`` of model.py, or False if there is none. Raises InvalidArgument if it is no bool."""
    given = getattr(module, name, False)
    if type(given) is not bool:
        raise InvalidArgument(f"model '{model}': {name} of model.py is {given!r}, True or False is expected")
    return given


def check_names(config: ModelConfig, module: ModuleType) -> None:
    """Raises InvalidArgument if a variable of model.py seems to be a declaration whose name is misspelt."""
    fields = {{"input": "inputs", "output": "outputs"}.get(field.name, field.name) for field, _ in config.ListFields()}
    configured = {key.partition(".")[0] for key in config.parameters} | fields
    missing = sorted(_EXAMPLES.keys() - vars(module).keys() - configured)
    for name, value in vars(module).items():
        if name in _EXAMPLES or name.startswith("_") or not isinstance(value, (int, str, tuple, list, Mapping)):
            continue
        near = difflib.get_close_matches(name, missing, cutoff=_NEAR)
        kind = tuple if isinstance(value, (tuple, list)) else type(value)
        meant = next((each for each in near if type(_EXAMPLES[each]) is kind), None)
        if meant is not None and not _is_used(module, name):
            raise InvalidArgument(
                f"model '{config.name}': '{name}' of model.py means nothing; did you mean '{meant}', as in {meant} = "
                f"{_EXAMPLES[meant]!r}? A name of the model's own is read somewhere in model.py, or begins with '_'"
            )


def _is_used(module: ModuleType, name: str) -> bool:
    def reads(table: symtable.SymbolTable) -> bool:
        symbol = table.lookup(name) if name in table.get_identifiers() else None
        here = symbol is not None and symbol.is_global() and symbol.is_referenced()
        return here or any(map(reads, table.get_children()))

    try:
        table = symtable.symtable(inspect.getsource(module), "model.py", "exec")
        return table.lookup(name).is_imported() or name in getattr(module, "__all__", ()) or reads(table)
    except (OSError, TypeError, SyntaxError, KeyError):
        return True

"""Loads a model as a worker does: the module from its file, traced with 64-bit types on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import jax
import numpy as np

ROOT = Path(__file__).parent.parent.parent


def load(folder: str) -> tuple[ModuleType, Callable[..., dict[str, np.ndarray]]]:
    """Returns the module of ``<folder>/1/model.py``, and a function that takes and returns numpy arrays by name."""
    version = ROOT / folder / "1"
    spec = importlib.util.spec_from_file_location(f"model_{Path(folder).name}", version / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    apply, params = module.create(version, {}, jax.devices()[0])
    function = apply if getattr(module, "host", False) else jax.jit(apply)

    def call(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with jax.enable_x64(True):
            return {name: np.asarray(value) for name, value in function(params, dict(inputs)).items()}

    return module, call

"""Defines the rows: what is asked, by how many processes, with how many requests in flight in each, and the right answers."""

from __future__ import annotations

import random
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load. ``varies``: ids, values and, where the model allows it, shapes differ from request to request."""

    name: str
    model: str
    processes: int = 1
    in_flight: int = 1
    varies: bool = False

    @property
    def byte_sizes(self) -> tuple[int, int]:
        """Returns the largest sizes in bytes of all inputs of a request together, and of all its outputs."""
        return {"addsub": (1024, 1024), "identity": (4 * _FLOATS, 4 * _FLOATS), "policy": (96 * 96 * 3 + 128, 128)}[
            self.model
        ]

    def inputs(self, chance: random.Random) -> Tensors:
        """Makes the inputs of a request."""
        match self.model:
            case "addsub":
                rows = chance.randrange(1, 9) if self.varies else 1
                return {name: np.full((rows, 16), chance.randrange(1000), np.float32) for name in ("INPUT0", "INPUT1")}
            case "identity":
                count = _FLOATS - (1024 * chance.randrange(4) if self.varies else 0)
                values = np.arange(count, dtype=np.float32)
                values[0] = chance.randrange(1000)
                return {"INPUT0": values}
        image = np.full((96, 96, 3), chance.randrange(256), np.uint8)
        return {"image": image, "state": np.full(32, chance.randrange(1000), np.float32)}

    def outputs(self, inputs: Tensors) -> Tensors:
        """Computes the right outputs for the inputs."""
        match self.model:
            case "addsub":
                a, b = inputs["INPUT0"], inputs["INPUT1"]
                return {"OUTPUT0": a + b, "OUTPUT1": a - b}
            case "identity":
                return {"OUTPUT0": inputs["INPUT0"]}
        return {"actions": inputs["state"] + np.float32(inputs["image"].max())}

    def jitted(self) -> Any:
        """Returns the model's function, jitted, to be called in this process."""
        import jax

        (path,) = Path(__file__).parents[1].glob(f"**/models/{self.model}/1/model.py")
        apply, parameters = runpy.run_path(str(path))["create"](None, None, None)
        return jax.jit(lambda **inputs: apply(parameters, inputs))


#: The number of 32-bit floats in 16 MiB.
_FLOATS = 4 << 20
_BASE = (
    Row("small-c1", "addsub"),
    Row("small-p16", "addsub", processes=16),
    Row("16MiB-c1", "identity"),
    Row("flight-64", "addsub", in_flight=64),
    Row("simulators-64", "policy", processes=64),
)
ROWS = {
    row.name: row
    for base in _BASE
    for row in (base, Row(f"{base.name}-vary", base.model, base.processes, base.in_flight, True))
}

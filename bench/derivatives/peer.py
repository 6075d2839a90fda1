"""Serves one of the functions with ``tesseract-core``, and asks it with ``tesseract-jax``. The peer's own Python runs this.

    python -m bench.derivatives.peer serve PORT MODEL    as fast as it goes: without an access log, each product jitted once
    python -m bench.derivatives.peer ask URL             for each line, a number of calls: prints the gradient and their seconds

To the server this file is the Tesseract.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

MODELS = Path(__file__).parent / "models"


def function(name: str) -> tuple[Any, Any]:
    """Returns a model's function of one row, and a row."""
    module = runpy.run_path(str(MODELS / name / "1" / "model.py"))
    apply, params = module["create"](None, None, None)
    row = np.linspace(-1, 1, module["SIZE"], dtype=np.float32)
    return (lambda x: apply(params, {"x": x[None]})["y"][0]), row


def seconds(call: Any, count: int) -> list[float]:
    """Returns the seconds that each of ``count`` calls took."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begun)
    return taken


def serve(port: str, model: str) -> None:
    """Serves until it is ended."""
    import uvicorn

    # It writes files for each request.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ |= {"TESSERACT_API_PATH": __file__, "TESSERACT_OUTPUT_PATH": folder, "MODEL": model}
        uvicorn.run("tesseract_core.runtime.app_http:app", port=int(port), access_log=False, log_level="warning")


def ask(url: str) -> None:
    """Asks until standard input ends."""
    from tesseract_core import Tesseract
    from tesseract_jax import apply_tesseract

    served, row, ready = Tesseract.from_url(url), function("energy")[1], False
    while not ready:
        time.sleep(0.1)
        with contextlib.suppress(Exception):
            ready = bool(served.health())
    gradient = jax.jit(jax.grad(lambda x: apply_tesseract(served, {"x": x})["y"].sum()))
    for line in sys.stdin:
        print(json.dumps([gradient(row).tolist(), seconds(lambda: gradient(row), int(line))]), flush=True)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
elif "MODEL" in os.environ:
    from pydantic import BaseModel
    from tesseract_core.runtime import Array, Differentiable, Float32

    class InputSchema(BaseModel):
        """A row."""

        x: Differentiable[Array[(None,), Float32]]

    class OutputSchema(BaseModel):
        """The outputs of the function."""

        y: Differentiable[Array[..., Float32]]

    _of, _row = function(os.environ["MODEL"])
    _value, _pull = jax.jit(_of), jax.jit(lambda x, cotangent: jax.vjp(_of, x)[1](cotangent)[0])

    def apply(inputs: InputSchema) -> OutputSchema:
        """Computes the function."""
        return OutputSchema(y=np.asarray(_value(inputs.x)))

    def vector_jacobian_product(inputs: InputSchema, vjp_inputs: set, vjp_outputs: set, cotangent_vector: dict) -> dict:
        """Computes the one product."""
        return {"x": np.asarray(_pull(inputs.x, cotangent_vector["y"]))}

    def abstract_eval(abstract_inputs: Any) -> dict:
        """Says the output's shape."""
        return {"y": {"shape": jax.eval_shape(_of, _row).shape, "dtype": "float32"}}

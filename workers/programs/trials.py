"""Compares the programs of a loaded model with the model's own function, on generated requests (``check --deep``)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import ServingError
from tensord.workers.jax_internals.wide import precision
from tensord.workers.programs.executable import Wanted, arguments_of
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.row_probe import DEVICE_ROUNDING, beyond, distances, generated, nudged
from tensord.workers.programs.row_reading import read
from tensord.workers.programs.weight import work_of


def trials(
    executables: Executables, ask: Callable[[dict[str, Array], int], Mapping[str, Array]]
) -> Iterator[dict[str, str | float]]:
    """Runs each compiled program of a model on generated inputs. Yields one dictionary of measurements for each program.

    The keys are bucket, device, program, memory_kib, mflop, ms and difference. difference names an output that differs from the
    output of the model's own function by more than rounding. difference is "" if no such output was found.
    ``ask(inputs, rows)`` runs the model on ``rows`` rows of inputs. A program is skipped if ``ask`` raises ServingError.
    """
    several = executables.several
    for wanted, executable in executables.made.items():
        smaller = [each.rows for each in executables.made if each.shapes == wanted.shapes and each.rows < wanted.rows]
        # What runs on several devices may only be divided among them if it is whole.
        rows = max(smaller, default=0) + 1 if several is None else wanted.rows
        inputs = generated(arguments_of(executables.signature, Wanted(rows, wanted.shapes)), 0)
        devices = several.devices if several is not None else [executable.placement.device or jax.local_devices()[0]]
        took = list[float]()
        try:
            while len(took) < 5 and sum(took) < 1:  # the shortest one counts
                began = time.perf_counter()
                made = ask(dict(inputs), rows)
                took.append(time.perf_counter() - began)
        except ServingError:  # inputs that nobody would send say nothing about a model
            continue
        yield {
            "bucket": str(wanted),
            "device": ", ".join(map(str, devices)),
            "program": "compiled" if wanted in executables.compiled else "cached",
            "memory_kib": round((executable.memory_needed or 0) / 1024, 1),
            "mflop": round(max(work_of(executable.program)[0], 0) / 1e6, 3),
            "ms": round(min(took) * 1e3, 3),
            "difference": _difference(executables, inputs, made),
        }


def _difference(executables: Executables, inputs: Mapping[str, Array], made: Mapping[str, Array]) -> str:
    if executables.signature.states or executables.sets.stack is not None:
        return ""
    parameters, remote = executables.sets.main.on(0), executables.device.remote
    with precision(executables.signature.wide), np.errstate(all="ignore"):
        traced = jax.jit(executables.apply).trace(parameters, dict(inputs))
        alone = functools.partial(traced.lower().compile(), parameters)
        rounding = max(read(traced.jaxpr.jaxpr).rounding, DEVICE_ROUNDING if remote else 0.0)
        right, near = alone(dict(inputs)), alone({name: nudged(each, rounding) for name, each in inputs.items()})
    # Integers may be far apart where the numbers that they follow from are close.
    for name in [name for name, array in made.items() if array.dtype.kind not in "biu" or not rounding]:
        given, want, other = (np.ravel(each[name]) for each in (made, right, near))
        if beyond(given, want, want, [other], rounding)[0].any():
            at = distances(given, want).argmax()
            return f"output '{name}' has {given[at]:.6g} where the function alone gives {want[at]:.6g}"
    return ""

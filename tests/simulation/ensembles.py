"""An ensemble of two models, one behind the other, whose answers are cached; and what an answer of it may be."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation import streamed

#: The ensemble, and the models of its steps. It is loaded once, and comes and goes with them.
MODEL, STEPS = "e", ("a", "b")
#: All ensembles, with the models of their steps.
ALL = {MODEL: STEPS, streamed.FLOW: streamed.STEPS}
CONFIG = """
platform: "ensemble"
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "first" data_type: TYPE_INT64 dims: -1 }
output { name: "y" data_type: TYPE_INT64 dims: -1 }
response_cache { enable: true }
ensemble_scheduling {
  step {
    model_name: "a"
    model_version: -1
    input_map { key: "x" value: "x" }
    output_map { key: "y" value: "first" }
  }
  step {
    model_name: "b"
    model_version: -1
    input_map { key: "x" value: "first" }
    output_map { key: "y" value: "y" }
  }
}
"""


def steps_of(first: Sequence[int], last: Sequence[int], of_x: int) -> tuple[int, int]:
    """Returns what each step has made, as if its input had been that of the ensemble.

    The second step's input is the first step's output, which leaves the 64 bits. ``of_x``: what a model multiplies its input by.
    """
    one, two = int(first[0]), int(last[0])
    rest = (two - one * of_x) % (1 << 64)
    return one, one // of_x * of_x + rest

"""A decoupled model, and what it answers: several responses to a request, and to some an error behind them.

An ensemble with this model answers with as many, each of which has gone through another model by itself.
"""

from __future__ import annotations

from tensord.workers.requests.response_sender import NOT_COMPLETED

#: The model; the ensemble, and the models of its steps; a Triton model that answers from threads; and all that answer so.
MODEL, FLOW, LATER = "d", "f", "g"
STEPS = (MODEL, "a")
SEVERAL = (MODEL, FLOW, LATER)
#: How many responses a request gets, by its input.
_COUNTS = (1, 3, 0, 20, 40, 8)
_FAILS = 5
#: Of some inputs there is no end: their clients leave.
_ENDLESS, _NO_END = 11, 1 << 30
#: What the model says where it fails; and the daemon, where a request wants one response and there are none or several, or where
#: it is asked in a way for models with one.
FAILED, NOT_ONE, REFUSED = "the model fails", "exactly 1 response", "support models with decoupled transaction policy"
#: ``y`` of a response: as of the other models. ``at``: which of the responses it is.
SOURCE = f"""
import numpy as np
from tensord.models import InvalidArgument

host = True
inputs = {{{{"x": "INT64[n]"}}}}
outputs = {{{{"y": "INT64[n]", "at": "INT64[1]"}}}}

def create(path, config, device):
    def apply(params, inputs):
        x = inputs["x"]
        for at in range({_COUNTS}[x[0] % {len(_COUNTS)}] if x[0] % {_ENDLESS} else {_NO_END}):
            yield {{{{"y": x * 1000000000 + {{files}} * 10000 + int(params["k"]), "at": np.array([at])}}}}
        if x[0] % {_FAILS} == 0:
            raise InvalidArgument("{FAILED}")
    return apply, {{{{"k": np.int32(0)}}}}
"""
#: Mostly answers from a thread, which goes on when the function has returned, and may ask another model meanwhile, or end without
#: having said so.
LATER_SOURCE = f"""
import numpy as np
import triton_python_backend_utils as pb_utils
from tests.simulation.worker_threads import begin

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if x[0] % 4:
                begin(self.answer, request.get_response_sender(), x)
            else:
                self.answer(request.get_response_sender(), x)

    def answer(self, sender, x):
        for at in range({_COUNTS}[x[0] % {len(_COUNTS)}] if x[0] % {_ENDLESS} else {_NO_END}):
            if sender.is_cancelled():
                break
            if x[0] % 7 == at % 7:
                asked = pb_utils.InferenceRequest(
                    model_name="a", inputs=[pb_utils.Tensor("x", x)], requested_output_names=["y"]
                ).exec()
                if not asked.has_error() and (asked.output_tensors()[0].as_numpy() // 1000000000 != x).any():
                    raise AssertionError("a model that is called answers something else")
            y = pb_utils.Tensor("y", x * 1000000000 + {{files}} * 10000)
            sender.send(pb_utils.InferenceResponse([y, pb_utils.Tensor("at", np.array([at]))]))
        if x[0] % {_FAILS} == 0:
            if x[0] % 2:
                return
            error = pb_utils.InferenceResponse(error=pb_utils.TritonError("{FAILED}"))
            sender.send(error, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LATER_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "y" data_type: TYPE_INT64 dims: -1 }
output { name: "at" data_type: TYPE_INT64 dims: 1 }
"""
#: It works on few responses of its first step at a time.
FLOW_CONFIG = """
platform: "ensemble"
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "first" data_type: TYPE_INT64 dims: -1 }
output { name: "y" data_type: TYPE_INT64 dims: -1 }
output { name: "at" data_type: TYPE_INT64 dims: 1 }
ensemble_scheduling {
  max_inflight_requests: 3
  step {
    model_name: "d"
    model_version: -1
    input_map { key: "x" value: "x" }
    output_map { key: "y" value: "first" }
    output_map { key: "at" value: "at" }
  }
  step {
    model_name: "a"
    model_version: -1
    input_map { key: "x" value: "first" }
    output_map { key: "y" value: "y" }
  }
}
"""


def count(x: int) -> int:
    """Returns how many responses a request with that input gets, before its end or its error."""
    return _COUNTS[x % len(_COUNTS)] if x % _ENDLESS else _NO_END


def is_one(model: str, x: int) -> bool:
    """Returns whether a request with that input gets one response that says itself that it is the last."""
    return model == FLOW and count(x) == 1 and not fails(x)


def leaves(x: int, got: int) -> bool:
    """Returns whether the client of a request with that input leaves after so many responses."""
    return x % _ENDLESS == 0 and got > x % 7


def fails(x: int) -> bool:
    return x % _FAILS == 0


def why_error(message: str, x: int, got: int, single: bool) -> str:
    """Returns why a request with that input may end with an error, after ``got`` responses; "": the model says no such thing.

    ``single``: it wants one response.
    """
    if single and NOT_ONE in message and (count(x) > 1 or not (count(x) or fails(x))):
        return "it has another number of responses"
    whole = count(x) < 2 if single else got == count(x)
    return (
        "the model fails behind its last response"
        if message.endswith((FAILED, NOT_COMPLETED)) and fails(x) and whole
        else ""
    )

"""A Triton Python model that has its requests run again and again until they are done, in batches; and what it answers.

Its state is kept by the ids of the sequences that its requests are, and begins with START: a request that is run again under
another id, with another input, or by another load of the model finds none, and the model fails.
"""

from __future__ import annotations

MODEL = "i"
#: How many rounds a request takes, by its input; some go round until their clients leave.
_COUNTS = (1, 2, 3, 7)
_ENDLESS, _NO_END = 9, 1 << 30
#: ``y``: the input, the rounds, how often START came, the files.
SOURCE = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.states = {{{{}}}}

    def answer(self, request):
        x, start = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0] for name in ("x", "START"))
        who = request.correlation_id()
        if start:
            self.states[who] = [int(x), 0, 0]
        state = self.states[who]
        state[1], state[2] = state[1] + 1, state[2] + int(start)
        if state[0] != x:
            raise AssertionError(f"the state of {{{{state[0]}}}} is that of {{{{x}}}}")
        if state[1] < ({_COUNTS}[x % {len(_COUNTS)}] if x % {_ENDLESS} else {_NO_END}):
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        del self.states[who]
        y = np.array([[x, *state[1:], {{files}}]], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])

    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: 1 }
output { name: "y" data_type: TYPE_INT64 dims: 4 }
sequence_batching {
  iterative_sequence: true
  max_sequence_idle_microseconds: 100000000
  oldest { max_candidate_sequences: 3 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } }
}
"""


def count(x: int) -> int:
    """Returns how many rounds a request with that input takes."""
    return _COUNTS[x % len(_COUNTS)] if x % _ENDLESS else _NO_END


def with_end(x: int) -> int:
    """Returns that input, or another one if a request with it has no end."""
    return x if x % _ENDLESS else x + 1


def leaves(x: int, rounds: int) -> bool:
    """Returns whether the client of a request with that input leaves, which has been run so often."""
    return x % _ENDLESS == 0 and rounds > x % 5


def why_not(x: int, values: list[int]) -> str:
    """Returns what is wrong with an answer; "": nothing."""
    wanted = [x, count(x), 1]
    return "" if values[:3] == wanted else f"it is {values[:3]} in place of {wanted}"

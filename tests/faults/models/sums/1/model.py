"""Declares a Triton Python model that returns the sum of a sequence so far.

Where a sequence has no state it begins at 0, so that a lost sum shows as a wrong answer and not as an error.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            who = request.correlation_id()
            before = 0 if inputs["START"].flat[0] else self.sums.get(who, 0)
            self.sums[who] = before + inputs["x"].flat[0]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("sum", np.array([[self.sums[who]]], np.int32))]))
            if inputs["END"].flat[0]:
                del self.sums[who]
        return answers

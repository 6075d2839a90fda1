"""Returns the mean of all readings of a sensor so far: the worker keeps the model's state on its device for each sequence."""

inputs = {"reading": "FP32[3]"}
outputs = {"mean": "FP32[3]"}
max_batch_size = 16
# What is kept of each sequence between its requests. A sequence begins with zeros, or with what create() returns for it.
state = {"sum": "FP32[3]", "count": "INT32[1]"}


def create(path, config, device):
    def apply(params, inputs, state):
        # A row for each sequence that has a request in this batch; START has put it back to the beginning.
        total = state["sum"] + inputs["reading"]
        count = state["count"] + 1
        return {"mean": total / count}, {"sum": total, "count": count}

    return apply, None

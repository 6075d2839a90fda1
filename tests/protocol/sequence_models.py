"""Writes models whose answers show what they know of a sequence: the sum of its requests' values, and its controls."""

from __future__ import annotations

from pathlib import Path

from tests.repositories import answering, applying, write_model

#: ``y``: the sum of the sequence so far, by its correlation id. ``seen``: START, END, READY, and how many requests were together.
#: A step with parameter ``until`` waits for that file.
PYTHON = answering(
    """
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    told = [inputs[name].reshape(-1)[0].item() for name in ("START", "END", "READY")]
    x, who = inputs["x"].reshape(-1)[0], request.correlation_id()
    if x == -1000:
        time.sleep(0.2)
    until = json.loads(request.parameters() or "{}").get("until")
    while until is not None and not pathlib.Path(until).exists():
        time.sleep(0.01)
    if x == -2000:
        raise ValueError("minus two thousand")
    self.sums[who] = x + (0 if told[0] == 1 else self.sums.get(who, 0))
    parameters = {
        "told": json.dumps(told),
        "corrid": str(inputs["CORRID"].reshape(-1)[0]) if "CORRID" in inputs else "",
        "flags": request.flags(),
        "together": self.together,
        "instance": self.instance,
    }
    return response(parameters, y=np.full(inputs["x"].shape, self.sums[who], np.int32))
    """,
    more="""
    def initialize(self, args):
        self.instance = args["model_instance_name"]
        self.sums = {}

    def execute(self, requests):
        self.together = len(requests)
        return [self.answer(request) for request in requests]
    """,
)
#: The same sum in a host model, which keeps its state by the id it is told.
HOST = """
    import numpy as np

    inputs = {"x": "INT32[1]"}
    outputs = {"y": "INT32[1]"}
    max_batch_size = 4
    host = True


    def create(path, config, device):
        sums = {}

        def apply(params, inputs):
            for i, who in enumerate(inputs["CORRID"][:, 0].tolist()):
                begins = inputs["START"][i, 0] == 1
                sums[who] = inputs["x"][i, 0] + (0 if begins else sums.get(who, 0))
            return {"y": np.array([[sums[who]] for who in inputs["CORRID"][:, 0].tolist()], np.int32)}

        return apply, None
"""
#: A jitted model is told of its sequences; it answers what it is told: x, and the controls in the digits above it.
JAX = applying(
    """
    told = 1000 * inputs["START"] + 100 * inputs["END"] + 10 * inputs["READY"]
    return {"y": inputs["x"] + told.astype(jnp.int32)}
    """,
    "x INT32[n]",
    "y INT32[n]",
    more='max_batch_size = 4\nbuckets = {"n": (1, 2)}',
)

#: A request goes round as often as its ``x`` says; ``y`` tells how often it was told START, and how many were together at most.
ITERATIVE = answering(
    """
    x, start = (request.inputs()[i].as_numpy().reshape(-1)[0] for i in (0, 1))
    who = request.correlation_id()
    rounds = self.rounds[who] = self.rounds.get(who, 0) + 1
    self.starts[who] = self.starts.get(who, 0) + int(start == 1)
    if rounds < x:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None if x < 1000 else response()
    del self.rounds[who]
    return response(y=np.array([[10 * rounds + self.starts.pop(who)]], np.int32))
    """,
    more="rounds, starts = {}, {}",
)
FLAGS = """
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
"""
TENSORS = """
    input { name: "x" data_type: TYPE_INT32 dims: 1 }
    output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""
MINUTE = 60_000_000


def checked_sums(dim: str, first: str) -> str:
    """Returns the source of a JAX model that keeps sums on the device, element by element.

    A negative x fails where the device has the state already.
    ``dim``: the dimension of x, y and the sum.  ``first``: the Python expression of the sum at a sequence's start.
    """
    return f"""
    import jax
    import numpy as np

    inputs = {{"x": "FP32[{dim}]"}}
    outputs = {{"y": "FP32[{dim}]"}}
    max_batch_size = 8
    state = {{"sum": "FP32[{dim}]"}}

    def check(x):
        if (np.asarray(x) < 0).any():
            raise ValueError("negative")
        return x

    def create(path, config, device):
        def apply(params, inputs, state):
            x = jax.pure_callback(check, jax.ShapeDtypeStruct(inputs["x"].shape, inputs["x"].dtype), inputs["x"])
            total = state["sum"] + x
            return {{"y": total}}, {{"sum": total}}

        return apply, None, {{"sum": {first}}}
    """


def corrid(datatype: str) -> str:
    """Formats a control that gives the model the correlation id."""
    return f'control_input {{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype} }} }}'


def python_model(
    repository: Path, name: str, sequences: str, rows: int = 0, idle_us: int = MINUTE, more: str = ""
) -> None:
    """Writes a Triton Python model; ``sequences``: the fields of sequence_batching besides the flags."""
    config = f"""
        max_batch_size: {rows} {TENSORS} {more}
        sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {FLAGS} {sequences} }}
    """
    write_model(repository, name, PYTHON, config)


def all_models(repository: Path) -> None:
    """Writes one model of each kind."""
    python_model(repository, "single", corrid("UINT64"))
    python_model(repository, "direct", "direct { }" + corrid("INT64"), rows=4)
    python_model(repository, "oldest", "oldest { max_candidate_sequences: 8 }" + corrid("INT32"), rows=4)
    python_model(repository, "texts", "oldest { max_candidate_sequences: 8 }" + corrid("STRING"), rows=4)
    python_model(repository, "quiet", "", idle_us=100_000)
    python_model(repository, "pair", "oldest { max_candidate_sequences: 1 }", more="instance_group { count: 2 }")
    python_model(
        repository, "patient", "direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 1.0 }", rows=2
    )
    rounds = f"max_batch_size: 4 {TENSORS} sequence_batching {{ %s {FLAGS} oldest {{ max_candidate_sequences: 8 }} }}"
    write_model(repository, "rounds", ITERATIVE, rounds % "iterative_sequence: true")
    write_model(repository, "no_rounds", ITERATIVE, rounds % "")
    sequences = f"sequence_batching {{ max_sequence_idle_microseconds: {MINUTE} {FLAGS} %s }}"
    write_model(repository, "host", HOST, sequences % ("oldest { max_candidate_sequences: 8 }" + corrid("UINT32")))
    write_model(repository, "jax", JAX, sequences % "oldest { max_candidate_sequences: 8 }")
    write_model(repository, "jax_direct", JAX, (sequences % "direct { }") + "instance_group { count: 2 }")

"""Writes model repositories for tests: models of little arithmetic whose answers depend on the request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent, indent

#: Datatypes a jax model may have.
NUMERIC = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
)


def write_model(repository: Path, name: str, source: str, config: str = "", version: int = 1) -> Path:
    """Writes ``<repository>/<name>/<version>/model.py`` and, unless empty, ``config.pbtxt``; returns the version's folder."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(dedent(source))
    if config:
        (repository / name / "config.pbtxt").write_text(dedent(config))
    return folder


def of_x(y: str, x: str = "FP32[4]", to: str = "", more: str = "", params: str = "{}") -> str:
    """Returns a model.py with output ``y``, an expression of input ``x`` and ``params``.

    ``to``: the type of ``y`` if not that of ``x``. ``more``: what stands before ``create``.
    """
    return (
        f'inputs, outputs = {{"x": "{x}"}}, {{"y": "{to or x}"}}\n{more}\n\ndef create(path, config, device):\n'
        f'    return (lambda params, inputs: {{"y": (lambda x: {y})(inputs["x"])}}), {params}\n'
    )


def applying(
    body: str, inputs: str, outputs: str, more: str = "", params: str = "{}", arguments: str = "params, inputs"
) -> str:
    """Returns a model.py whose function has this body; it may use ``jax``, ``jnp`` and ``np``.

    ``inputs``, ``outputs``: name and type of each, such as ``"x FP32[4], n INT32[1]"``. ``more``: what stands before
    ``create``. ``params``: the expression of the parameters. ``arguments``: those of the function.
    """

    def types(told: str) -> str:
        return ", ".join(f'"{name}": "{kind}"' for name, kind in re.findall(r"(\S+) (\w+\[[^]]*\])", told))

    return (
        f"import jax, jax.numpy as jnp, numpy as np\ninputs, outputs = {{{types(inputs)}}}, {{{types(outputs)}}}\n{more}\n"
        f"def create(path, config, device):\n    def apply({arguments}):\n{indent(dedent(body), 8 * ' ')}\n"
        f"    return apply, {params}\n"
    )


def answering(answer: str, more: str = "") -> str:
    """Returns a Triton Python model's model.py, which answers each request with what the body ``answer`` returns.

    The body has ``self`` and ``request``, and functions: ``given(request, name)`` returns an input's array, and
    ``response(y=array)`` makes a response, if need be with ``parameters``. ``more``: the model's other methods and attributes.
    """
    head = """
        import json, pathlib, time
        import numpy as np
        import triton_python_backend_utils as pb_utils

        def given(request, name="x"):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        def response(parameters=None, **outputs):
            tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
            return pb_utils.InferenceResponse(tensors, parameters=parameters)

        class TritonPythonModel:
            def execute(self, requests):
                return [self.answer(request) for request in requests]

            def answer(self, request):
    """
    return dedent(head) + indent(dedent(answer), 8 * " ") + "\n" + indent(dedent(more), 4 * " ")


def tensors(kind: str, told: Sequence[str]) -> str:
    """Formats tensors of a configuration, each said by name, datatype and dims, such as ``"x FP32 4"``.

    ``kind``: input or output. A tensor that ends in ``?`` is optional.
    """
    lines: list[str] = []
    for name, datatype, *dims in map(str.split, told):
        optional = "optional: true" if dims[-1:] == ["?"] else ""
        listed = ", ".join(dim for dim in dims if dim != "?")
        lines.append(f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {listed} ] {optional} }}\n')
    return "".join(lines)


def fields(inputs: str, outputs: str, more: str = "") -> str:
    """Formats a Triton Python model's configuration.

    ``inputs``, ``outputs``: tensors as ``tensors`` takes them, such as ``"x FP32 4, n INT32 1"``. ``more``: further fields.
    """
    return f'backend: "python"\n{tensors("input", inputs.split(","))}{tensors("output", outputs.split(","))}{more}\n'


def echo_models(repository: Path, datatypes: Sequence[str] = NUMERIC) -> Path:
    """Writes ``echo_<datatype>`` for each datatype, and one for BYTES: output y is input x, of any length."""
    for datatype in datatypes:
        write_model(
            repository,
            f"echo_{datatype.lower()}",
            f"""
            inputs = {{"x": "{datatype}[n]"}}
            outputs = {{"y": "{datatype}[n]"}}

            def create(path, config, device):
                return (lambda params, inputs: {{"y": inputs["x"]}}), {{}}
            """,
        )
    write_model(
        repository,
        "echo_bytes",
        of_x("x", "BYTES[n]", more="host = True"),
    )
    return repository


def scale_model(repository: Path, name: str = "scale", factor: float = 3.0, version: int = 1) -> Path:
    """Writes a model of ``y = factor * x + 1`` on FP32[4], batched up to 8; the factor is a parameter."""
    write_model(
        repository,
        name,
        f"""
        import numpy as np

        inputs = {{"x": "FP32[4]"}}
        outputs = {{"y": "FP32[4]"}}
        max_batch_size = 8

        def create(path, config, device):
            def apply(params, inputs):
                return {{"y": params["factor"] * inputs["x"] + 1}}
            return apply, {{"factor": np.float32({factor})}}
        """,
        version=version,
    )
    return repository


def total_model(repository: Path) -> Path:
    """Writes ``total``, a model that keeps the sum of its inputs x for each sequence; returns its folder."""
    source = """
        inputs = {"x": "FP32[1]"}
        outputs = {"sum": "FP32[1]"}
        state = {"sum": "FP32[1]"}

        def create(path, config, device):
            def apply(params, inputs, state):
                sum = state["sum"] + inputs["x"]
                return {"sum": sum}, {"sum": sum}

            return apply, {}
        """
    batching = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 8 } }"
    return write_model(repository, "total", source, f"max_batch_size: 4 {batching}").parent


def deadly_model(repository: Path, name: str = "deadly") -> Path:
    """Writes a host model that kills its worker when its input is negative, as a segmentation fault would."""
    write_model(
        repository,
        name,
        """
        import os, signal

        inputs = {"x": "INT32[1]"}
        outputs = {"y": "INT32[1]"}
        host = True

        def create(path, config, device):
            def apply(params, inputs):
                if inputs["x"][0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return {"y": inputs["x"] * 2}
            return apply, None
        """,
    )
    return repository


def faulty_models(repository: Path) -> Path:
    """Writes models that raise, return the wrong shape or datatype, or do not load."""
    declared = """
        inputs = {"x": "FP32[2]"}
        outputs = {"y": "FP32[2]"}
        host = True
    """
    for name, body in {
        "raises": "raise ValueError('secret detail')",
        "wrong_shape": "return {'y': inputs['x'][:1]}",
        "wrong_datatype": "return {'y': inputs['x'].astype('float64')}",
        "missing_output": "return {}",
    }.items():
        write_model(
            repository,
            name,
            declared
            + f"""
        def create(path, config, device):
            def apply(params, inputs):
                {body}
            return apply, None
        """,
        )
    write_model(
        repository,
        "does_not_load",
        declared + "\n        def create(path, config, device):\n            raise OSError('no')\n",
    )
    return repository


def sleepy_model(repository: Path, name: str = "sleepy") -> Path:
    """Writes a Triton Python model that sleeps as long as a request says.

    It touches the file of parameter ``began`` first, and afterwards waits for the file of parameter ``until``.
    """
    source = answering("""
        told = json.loads(request.parameters() or "{}")
        if "began" in told:
            pathlib.Path(told["began"]).touch()
        delay = given(request, "DELAY_MS")
        time.sleep(float(delay[0]) / 1000)
        while "until" in told and not pathlib.Path(told["until"]).exists():
            time.sleep(0.01)
        return response(OUTPUT=delay)
    """)
    write_model(
        repository,
        name,
        source,
        fields("DELAY_MS INT32 1", "OUTPUT INT32 1", f'name: "{name}"'),
    )
    return repository


def ensemble(
    repository: Path,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    steps: Sequence[tuple[str, dict[str, str], dict[str, str]]],
    max_batch_size: int = 0,
    more: str = "",
) -> Path:
    """Writes an ensemble; returns its folder.

    ``inputs``, ``outputs``: name, datatype and dims, such as ``"x FP32 4"``. A step: model, input -> tensor, output -> tensor.
    """

    def maps(field: str, told: dict[str, str]) -> str:
        return " ".join(f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in told.items())

    listed = "\n".join(
        f'step {{ model_name: "{model.partition(":")[0]}" model_version: {model.partition(":")[2] or -1} '
        f"{maps('input_map', taken)} {maps('output_map', given)} }}"
        for model, taken, given in steps
    )
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: {max_batch_size}\n{tensors("input", inputs)}{tensors("output", outputs)}'
        f"ensemble_scheduling {{ {listed} }}\n{more}\n"
    )
    return folder

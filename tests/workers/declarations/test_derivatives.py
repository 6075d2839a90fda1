"""The derivatives that a load makes: what is refused, what is left out, and that they are the function's own."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

from tensord import testing
from tensord.shm.arrays import DTYPES
from tensord.shm.common.derivatives import lacks
from tests import run_folder
from tests.generated import examples
from tests.repositories import write_model


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())


@pytest.mark.parametrize(
    ("more", "config", "why"),
    [
        ("host = True", "", "a host model is not compiled"),
        ("slots, max_steps = 4, 2", "", "a stepped model answers in steps"),
        ("", "sequence_batching { }", "a model with sequences or state"),
        ("ragged = ('x',)", "", "ragged inputs and batch inputs"),
        ("rows_may_mix = True", "", "rows that mix have derivatives by each other"),
        ("batch_sets = True", "", "batch_sets"),
        ("inputs = {'x': 'INT32[2]'}", "", "no input has a floating datatype"),
        ("outputs = {'x': 'INT32[2]'}", "", "no output has a floating datatype"),
        ("", 'input { name: "x" optional: true }', "input 'x' may be left out"),
        (
            "inputs = {'x': 'FP32[2]', 'cotangent.x': 'FP32[2]'}",
            "",
            "the name 'cotangent.x' begins as those of tensors",
        ),
        (
            "inputs = {'x': 'FP32[2]', 'tangent2': {'a': 'FP32[2]'}}",
            "",
            "the name 'tangent2.a' begins as those of tens",
        ),
        (
            "outputs = {'x': 'FP32[2]', 'gradient.n': 'INT32[1]'}",
            "",
            "the name 'gradient.n' begins as those of tensors",
        ),
        ("derivatives = 3", "", "derivatives of model.py is 3"),
        (
            "",
            'parameters { key: "derivatives" value { string_value: "all" } }',
            "parameter 'derivatives' is 'all'",
        ),
    ],
)
def test_a_load_says_why_not(tmp_path: Path, more: str, config: str, why: str) -> None:
    source = f"""
    inputs, outputs, max_batch_size, derivatives = {{"x": "FP32[2]"}}, {{"x": "FP32[2]"}}, 4, True
    {more}

    def create(path, config, device):
        return (lambda params, inputs, *more: inputs), {{}}
    """
    write_model(tmp_path, "m", source, config)
    with pytest.raises(testing.ServingError, match=why.replace("(", r"\(")):
        testing.load(tmp_path / "m").close()


def test_a_triton_python_model_has_none(tmp_path: Path) -> None:
    config = """
    backend: "python"
    input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
    parameters { key: "derivatives" value { string_value: "1" } }
    """
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            return []
    """
    write_model(tmp_path, "m", source, config)
    with pytest.raises(testing.ServingError, match="a Triton Python model is no function of JAX"):
        testing.load(tmp_path / "m").close()


def test_a_generator_has_none(tmp_path: Path) -> None:
    """Only what create() returns shows that it is one: it is refused then, with its samples."""
    source = """
    inputs, outputs, derivatives = {"x": "FP32[2]"}, {"y": "FP32[2]"}, True

    def create(path, config, device):
        def apply(params, inputs):
            yield {"y": inputs["x"]}
        return apply, {}
    """
    sample = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }'
    write_model(tmp_path, "m", source, f"model_warmup {{ name: 'pull_back' {sample} }}")
    with pytest.raises(testing.ServingError, match="derivatives is for jitted functions, a generator is none"):
        testing.load(tmp_path / "m").close()


def test_a_load_that_fails_for_its_derivatives_leaves_no_instances(tmp_path: Path) -> None:
    source = """
    inputs, outputs, derivatives = {"x": "FP32[2]"}, {"y": "FP32[2]"}, True

    def create(path, config, device):
        return (lambda params, inputs: {"y": inputs["x"]}), {}
    """
    # The last of the derivatives is refused, when the instances of the model and of all others are there.
    sample = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }'
    config = f"instance_group {{ count: 2 }} model_warmup {{ name: 'parameter_gradient' {sample} }}"
    write_model(tmp_path, "m", source, config)
    before = {*threading.enumerate()}
    with pytest.raises(
        testing.ServingError, match="model 'm' has no parameter_gradient: it has no floating parameters"
    ):
        testing.load(tmp_path / "m").close()
    for thread in {*threading.enumerate()} - before:
        thread.join(100)
        assert not thread.is_alive(), thread


def test_what_a_function_lacks_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop has no reverse, a custom rule of one kind is one, and the log says which; with neither, the load fails."""
    write_model(
        tmp_path,
        "loops",
        """
        import jax
        inputs, outputs, derivatives = {"x": "FP32[]"}, {"y": "FP32[]"}, True

        def create(path, config, device):
            def apply(params, inputs):
                return {"y": jax.lax.while_loop(lambda y: y < 100, lambda y: 2 * y + 1, inputs["x"])}
            return apply, {}
        """,
    )
    write_model(
        tmp_path,
        "ruled",
        """
        import jax
        inputs, outputs, max_batch_size, derivatives = {"x": "FP32[1]"}, {"y": "FP32[1]"}, 2, True

        @jax.custom_vjp
        def f(x):
            return x * x

        f.defvjp(lambda x: (f(x), x), lambda x, ct: (7 * ct * x,))

        def create(path, config, device):
            return (lambda params, inputs: {"y": f(inputs["x"])}), {}
        """,
    )
    write_model(
        tmp_path,
        "none",
        """
        import jax, jax.numpy as jnp, numpy as np
        inputs, outputs, derivatives = {"x": "FP32[]"}, {"y": "FP32[]"}, True

        def create(path, config, device):
            like = jax.ShapeDtypeStruct((), np.float32)
            return (lambda params, inputs: {"y": jax.pure_callback(lambda x: x, like, inputs["x"])}), {}
        """,
    )
    with caplog.at_level(logging.WARNING), testing.load(tmp_path / "loops") as model:
        assert (
            "model 'loops': it has no pull_back: ValueError: Reverse-mode differentiation does not work" in caplog.text
        )
        assert model.push_forward({"x": 3.0}, {"x": 1.0})["y"] == 32
        assert not model.has_derivative("value_and_gradient")
    with testing.load(tmp_path / "ruled") as model:
        assert "model 'ruled': it has no push_forward: TypeError: can't apply forward-mode" in caplog.text
        assert model.pull_back({"x": [[3.0]]}, {"y": [[1.0]]})["x"] == 21
    with pytest.raises(
        testing.ServingError, match=r"derivatives is declared, and it has no pull_back: .*; it has no push"
    ):
        testing.load(tmp_path / "none").close()


def test_a_kind_that_no_model_has_names_those_that_there_are() -> None:
    assert lacks("m", "hessian", {}) == (
        "model 'm' has no hessian: the kinds of derivatives are pull_back, push_forward, value_and_gradient, parameter_gradient"
    )
    assert lacks("m.pull_back.push_forward", "pull_back", {}).endswith("a model has at most 2 orders of derivatives")
    for model, kind in (("m.pull_back", "parameter_gradient"), ("m.parameter_gradient", "pull_back")):
        assert ": gradients by the parameters are of models alone" in lacks(model, kind, {})


def test_a_gradient_by_parameters_that_has_no_reverse_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is traced at the load with one row, although its rows are an axis without a bucket."""
    write_model(
        tmp_path,
        "m",
        """
        import jax, numpy as np
        inputs, outputs, derivatives, max_batch_size = {"x": "FP32[n]"}, {"y": "FP32[n]"}, True, 4
        buckets = {"n": (2, 4)}

        def create(path, config, device):
            def apply(params, inputs):
                grown = jax.lax.while_loop(lambda w: w < 100, lambda w: 2 * w, params["w"])
                return {"y": grown * inputs["x"]}
            return apply, {"w": np.float32(3), "types": (np.float32, np.dtype("f4"), jax.numpy.float32)}
        """,
    )
    with caplog.at_level(logging.WARNING), testing.load(tmp_path / "m") as model:
        assert "model 'm': it has no parameter_gradient: ValueError: Reverse-mode differentiation" in caplog.text
        assert not model.has_derivative("parameter_gradient")
        x = np.ones((2, 2), np.float32)
        assert (model.pull_back({"x": x}, {"y": x})["x"] == 192).all()


def test_what_fails_when_it_is_compiled_is_said(tmp_path: Path) -> None:
    """Without a bucket nothing is traced at the load, so the error is a request's: it has JAX's sentence, without paths."""
    write_model(
        tmp_path,
        "m",
        """
        import jax
        inputs, outputs, derivatives = {"x": "FP32[-1]", "z": "FP32[-1]"}, {"y": "FP32[-1]", "w": "FP32[-1]"}, True

        @jax.custom_vjp
        def ruled(x):
            return x * x

        ruled.defvjp(lambda x: (ruled(x), x), lambda x, ct: (ct[: 1 if len(ct) == 2 else None],))

        def create(path, config, device):
            def apply(params, inputs):
                looped = jax.lax.while_loop(lambda z: z.sum() < 100, lambda z: 2 * z + 1, inputs["z"])
                return {"y": ruled(inputs["x"]), "w": looped if len(inputs["x"]) == 3 else inputs["z"]}
            return apply, {}
        """,
    )
    with testing.load(tmp_path / "m") as model:
        for size, why in (
            (2, r"Custom VJP bwd rule .*float32\[1\]"),
            (3, "Reverse-mode differentiation does not work"),
        ):
            x = np.ones(size, np.float32)
            with pytest.raises(
                testing.ServingError, match=f"'m.pull_back' cannot be compiled for these shapes: ValueError: .*{why}"
            ) as caught:
                model.pull_back({"x": x, "z": x}, {"y": x, "w": x})
            assert str(tmp_path) not in str(caught.value)


#: A model whose pull-back of a row depends on the other rows' cotangents.
MIXING = """
import jax
inputs, outputs, max_batch_size, derivatives = {{"x": "FP32[{size}]"}}, {{"y": "FP32[{size}]"}}, 4, True

@jax.custom_vjp
def f(x):
    return x * x

f.defvjp(lambda x: (f(x), x), lambda x, ct: (2 * x * ct.mean(0),))

def create(path, config, device):
    return (lambda params, inputs: {{"y": f(inputs["x"])}}), {{}}
"""


def test_a_sample_for_one_row_finds_a_rule_that_mixes_rows_at_the_load(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "m",
        MIXING.format(size=2),
        """
        model_warmup { name: "pull_back"
          inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 random_data: true } }
          inputs { key: "cotangent.y" value { data_type: TYPE_FP32 dims: 2 random_data: true } } }
        """,
    )
    with pytest.raises(testing.ServingError, match=r"model 'm.pull_back': a row of output 'cotangent.x' depends on"):
        testing.load(tmp_path / "m").close()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_rule_that_mixes_rows_is_found_where_no_bucket_says_the_shape(tmp_path: Path, rows: int) -> None:
    write_model(
        tmp_path,
        "m",
        MIXING.format(size=-1),
    )
    x = np.ones((rows, 3), np.float32)
    with testing.load(tmp_path / "m") as model:
        for given in (x, x[:1, :2]):
            with pytest.raises(
                testing.ServingError, match=r"model 'm.pull_back': a row of output 'cotangent.x' depends"
            ):
                model.pull_back({"x": given}, {"y": given})
        assert model({"x": x})["y"].shape == (rows, 3)


def test_programs_are_compiled_when_they_are_needed_or_by_a_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample = """
    model_warmup { name: "pull_back" batch_size: 2
      inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 random_data: true } }
      inputs { key: "cotangent.y" value { data_type: TYPE_FP32 dims: 3 random_data: true } } }
    """
    source = """
    inputs, outputs, max_batch_size, derivatives = {"x": "FP32[3]"}, {"y": "FP32[3]"}, 4, True

    def create(path, config, device):
        return (lambda params, inputs: {"y": inputs["x"] ** 3}), {}
    """
    write_model(tmp_path, "m", source, sample)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with caplog.at_level(logging.INFO), testing.load(tmp_path / "m") as model:
        assert (model.pull_back({"x": x}, {"y": x})["x"] == 3 * x**3).all()
        assert "compiling" not in caplog.text
        for _ in range(2):
            model.push_forward({"x": x}, {"x": x})
        assert caplog.text.count("compiling model 'm.push_forward'") == 1


@pytest.mark.parametrize(
    ("derivatives", "apply", "sample"),
    [
        ("False", "inputs['x']", "value_and_gradient"),
        ("1", "inputs['x']", "value_and_gradient.of two elements"),
        ("1", "inputs['x']", "pull_back.push_forward"),
        ("1", "jax.lax.fori_loop(0, inputs['n'], lambda _, x: 2 * x, inputs['x'])", "pull_back"),
    ],
)
def test_a_sample_of_a_derivative_that_a_model_lacks_is_refused(
    tmp_path: Path, derivatives: str, apply: str, sample: str
) -> None:
    source = f"""
    import jax
    inputs, outputs, derivatives = {{"x": "FP32[2]", "n": "INT32[]"}}, {{"y": "FP32[2]"}}, {derivatives}

    def create(path, config, device):
        return (lambda params, inputs: {{"y": {apply}}}), {{}}
    """
    inputs = """
    inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }
    inputs { key: "n" value { data_type: TYPE_INT32 dims: [] zero_data: true } }
    inputs { key: "cotangent.y" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }
    """
    write_model(tmp_path, "m", source, f"model_warmup {{ name: '{sample}' {inputs} }}")
    model, _, kind = f"m.{sample.partition('.of')[0]}".rpartition(".")
    with pytest.raises(testing.ServingError, match=f"model_warmup '.*': model '{model}' has no {kind}: "):
        testing.load(tmp_path / "m").close()


def test_properties_of_a_request(tmp_path: Path) -> None:
    """What the server adds to a request is given to the function under its derivatives, too, also where rows are an axis."""
    write_model(
        tmp_path,
        "m",
        """
        import numpy as np
        inputs, outputs, derivatives = {"x": "FP32[3]"}, {"y": "FP32[3]"}, True
        max_batch_size, request = 4, {"times": ("FP32", 1.0)}

        def create(path, config, device):
            def apply(params, inputs, request):
                return {"y": params["w"] * inputs["x"] * request["times"]}
            return apply, {"w": np.float32(3)}
        """,
    )
    x = np.ones((2, 3), np.float32)
    with testing.load(tmp_path / "m") as model:
        for times in (1.0, 5.0):
            own: Any = {"parameters": {"times": times}}
            assert (model.pull_back({"x": x}, {"y": x}, **own)["x"] == 3 * times).all()
            by_w = model.derivative("parameter_gradient")({"x": x, "cotangent.y": x}, **own)
            assert by_w["w"] == 6 * times
        rows = np.ones((5, 3), np.float32)
        with pytest.raises(testing.ServingError, match="5 rows are given, max_batch_size of the model is 4"):
            model.derivative("parameter_gradient")({"x": rows, "cotangent.y": rows})


def test_sizes_that_vary(tmp_path: Path) -> None:
    """An axis with buckets is padded in cotangents as in inputs; a cotangent of another size than its output is refused."""
    write_model(
        tmp_path,
        "m",
        """
        inputs, outputs, derivatives = {"x": "FP32[n]", "s": "FP32[-1]"}, {"y": "FP32[n]", "z": "FP32[-1]"}, True
        max_batch_size, buckets = 4, {"n": (4, 8)}

        def create(path, config, device):
            def apply(params, inputs):
                return {"y": inputs["x"] ** 2, "z": 3 * inputs["s"]}
            return apply, {}
        """,
    )
    x, s = np.arange(3, dtype=np.float32)[None], np.ones((1, 2), np.float32)
    with testing.load(tmp_path / "m") as model:
        found = model.pull_back({"x": x, "s": s}, {"y": x, "z": s})
        np.testing.assert_array_equal(found["x"], 2 * x * x)
        np.testing.assert_array_equal(found["s"], 3 * s)
        with pytest.raises(
            testing.ServingError, match=r"the cotangent of output 'z' has shape \[1, 3\], the output has \[1, 2\]"
        ):
            model.pull_back({"x": x, "s": s}, {"y": x, "z": np.ones((1, 3), np.float32)})


def test_an_exported_program_has_those_that_it_carries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def apply(params: Any, inputs: Any) -> Any:
        return {"y": params["w"] * jnp.sin(inputs["x"])}

    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 3"), np.float32)
    program = export.export(jax.jit(apply))({"w": jax.ShapeDtypeStruct((), np.float32)}, {"x": x})
    config = 'parameters { key: "derivatives" value { string_value: "true" } }'
    for order in (0, 3):
        folder = tmp_path / f"order_{order}" / "1"
        folder.mkdir(parents=True)
        (folder / "model.jaxexport").write_bytes(program.serialize(vjp_order=order))
        np.savez(folder / "params.npz", w=np.float32(2))
    with testing.load(tmp_path / "order_0") as model:
        assert not model.has_derivative("pull_back")
    (tmp_path / "order_0/config.pbtxt").write_text(config)
    with pytest.raises(
        testing.ServingError,
        match=r"'derivatives' is 1, model.jaxexport carries 0 orders of them: export it again with tensord export --deriv",
    ):
        testing.load(tmp_path / "order_0").close()
    given = np.ones((2, 3), np.float32)
    with caplog.at_level(logging.WARNING), testing.load(tmp_path / "order_3") as model:
        assert not caplog.text
        assert not model.has_derivative("push_forward")
        assert not model.derivative("pull_back").has_derivative("push_forward")
        np.testing.assert_allclose(model.pull_back({"x": given}, {"y": given})["x"], 2 * np.cos(given), rtol=1e-6)
        second = model.derivative("pull_back").pull_back({"x": given, "cotangent.y": given}, {"cotangent.x": given})
        np.testing.assert_allclose(second["x"], -2 * np.sin(given), rtol=1e-6)
    # It is served as before where it can have none.
    (tmp_path / "order_3/config.pbtxt").write_text('parameters { key: "rows_may_mix" value { string_value: "true" } }')
    with testing.load(tmp_path / "order_3") as model:
        assert not model.has_derivative("pull_back")


#: Functions of one array and constants, which keep its shape, and whether they have a reverse. "custom" has nothing else.
STEPS = {
    "tanh": ("jnp.tanh(x)", True),
    "square": ("x * x", True),
    "constant": ("x * jnp.asarray([[1.5, -2.0, 0.5]], x.dtype)", True),
    "parameter": ("x * params['w'].astype(x.dtype)", True),
    "stop": ("x + jax.lax.stop_gradient(x * x)", True),
    "index": ("x * n.astype(x.dtype)", True),
    "where": ("jnp.where(x > 0, x, 2 * x)", True),
    "scan": ("jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 3)[0]", True),
    "while": ("jax.lax.fori_loop(0, 2 + 0 * n.ravel()[0], lambda _, c: c * jnp.asarray(1.25, c.dtype), x)", False),
    "relu": ("jax.nn.relu(x)", True),
    "checkpoint": ("jax.checkpoint(jnp.cos)(x)", True),
    "custom": ("doubled(x)", True),
}
SOURCE = """
    import jax, jax.numpy as jnp, numpy as np
    inputs, outputs, derivatives = {{"x": "{datatype}[3]", "n": "INT32[1]"}}, {{"y": "{datatype}[3]", "n": "INT32[1]"}}, True
    max_batch_size = {rows}

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, x > 0), lambda positive, g: (jnp.where(positive, g, -g),))

    def function(params, inputs):
        x, n = inputs["x"], inputs["n"]
        {lines}
        return {{"y": x, "n": n + 1}}

    def create(path, config, device):
        return function, {{"w": np.float32(0.75), "name": "w"}}
"""


@settings(max_examples=examples(20))
@given(
    steps=st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=4),
    datatype=st.sampled_from(["FP32", "BF16", "FP16", "FP64"]),
    rows=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 1000),
)
def test_derivatives_are_those_of_the_function(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], datatype: str, rows: int, seed: int
) -> None:
    folder, lines = tmp_path_factory.mktemp("generated"), [f"x = {STEPS[step][0]}" for step in steps]
    if not rows:
        lines = ["x, n = x[None], n[None]", *lines, "x, n = x[0], n[0]"]
    source = SOURCE.format(datatype=datatype, rows=rows, lines="\n        ".join(lines))
    write_model(folder, "m", source)
    names: dict[str, Any] = {}
    exec((folder / "m/1/model.py").read_text(), names)
    params, random = {"w": np.float32(0.75)}, np.random.default_rng(seed)
    shape = (rows, 3) if rows else (3,)
    x, d, ct = (random.normal(size=shape).astype(DTYPES[datatype]) for _ in range(3))
    n = random.integers(1, 4, (rows, 1) if rows else 1).astype(np.int32)
    reverse, forward = all(STEPS[step][1] for step in steps), "custom" not in steps
    if not (reverse or forward):
        with pytest.raises(testing.ServingError, match="Reverse-mode differentiation does not work"):
            testing.load(folder / "m").close()
        return
    with testing.load(folder / "m") as model, jax.enable_x64(datatype == "FP64"):
        # Arguments as in a worker: XLA would fold constants into each other.
        def pushed(params: Any, n: Any, x: Any, d: Any) -> Any:
            return jax.jvp(lambda x: names["function"](params, {"x": x, "n": n})["y"], (x,), (d,))[1]

        def pulled(params: Any, n: Any, x: Any, ct: Any) -> Any:
            return jax.vjp(lambda x: names["function"](params, {"x": x, "n": n})["y"], x)[1](ct)[0]

        def same(got: Any, wanted: Any, exact: bool) -> None:
            got, wanted = np.asarray(got), np.asarray(wanted)
            assert got.dtype == wanted.dtype
            assert got.shape == wanted.shape
            if exact:
                np.testing.assert_array_equal(got, wanted)
            rounding = float(jnp.finfo(wanted.dtype).eps)
            scale = np.abs(wanted[np.isfinite(wanted)].astype(np.float64)).max(initial=1e-3)
            np.testing.assert_allclose(
                got.astype(np.float64), wanted.astype(np.float64), rtol=64 * rounding, atol=64 * rounding * scale
            )

        inputs = {"x": x, "n": n}
        assert (model.has_derivative("pull_back"), model.has_derivative("push_forward")) == (reverse, forward)
        if forward:
            same(model.push_forward(inputs, {"x": d})["y"], jax.jit(pushed)(params, n, x, d), bool(rows))
        if reverse:
            wanted = jax.jit(pulled)(params, n, x, ct)
            same(model.pull_back(inputs, {"y": ct})["x"], wanted, bool(rows))

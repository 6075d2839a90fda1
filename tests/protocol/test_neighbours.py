"""What a model changes of its process: its own is its own, and its neighbours, loaded before or after it, answer as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests import prepared
from tests.daemon_process import DaemonProcess
from tests.repositories import write_model

DECLARED = """
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
"""
#: Fails wherever a rank or a datatype may not be promoted, and gives an infinity on the way.
PLAIN = (
    "import jax.numpy as jnp\n"
    + DECLARED
    + """
def create(path, config, device):
    def apply(params, inputs):
        ones = jnp.ones((1, 4), jnp.int32) * inputs["x"]
        return {"y": ones[0] + jnp.where(inputs["x"] > 0, 0.0, 1 / jnp.zeros(4))}
    return apply, {}
"""
)
#: Warns at each request, and imports what nobody has imported.
HOST = (
    (
        DECLARED
        + """
host = True
def create(path, config, device):
    import colorsys
    def apply(params, inputs):
        import warnings
        warnings.warn("as ever")
        return {"y": inputs["x"]}
    return apply, None
"""
    )
    .replace("colorsys", "sndhdr_is_gone")
    .replace("import sndhdr_is_gone", "import colorsys")
)
#: What is added to 1 is only seen with 64 bits.
DOUBLE = """
import jax.numpy as jnp
def create(path, config, device):
    def apply(params, inputs):
        small = inputs["x"].astype("float64") + params["small"]
        return {"y": ((small - 1) * 1e12).round().astype("float32")}
    return apply, {"small": jnp.float64(1e-12)}
"""
GOOD = """
def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"]}), {}
"""
TRITON = """
import jax
import jax.numpy as jnp
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        jax.config.update("jax_enable_x64", True)
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", self.wide(r))]) for r in requests]
    def wide(self, request):
        x = jnp.asarray(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()).astype("float64") + 1e-12
        return ((x - 1) * 1e12).round().astype("float32").__array__()
"""
IO = """
backend: "python"
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
"""


def setting(text: str) -> str:
    return f"import jax\njax.config.update({text})\n" + DECLARED


#: name -> model.py, the configuration, what the log says.
LOUD = {
    "b_double": (
        setting('"jax_enable_x64", True') + DOUBLE,
        "",
        "model 'b_double' sets jax_enable_x64 = True, which holds",
    ),
    "c_rank": (
        setting('"jax_numpy_rank_promotion", "raise"') + GOOD,
        "",
        "'c_rank' sets jax_numpy_rank_promotion = 'raise'",
    ),
    "d_dtype": (
        setting('"jax_numpy_dtype_promotion", "strict"') + GOOD,
        "",
        "'d_dtype' sets jax_numpy_dtype_promotion",
    ),
    "e_nans": (setting('"jax_debug_nans", True') + GOOD, "", "'e_nans' sets jax_debug_nans = True"),
    "f_no_jit": (setting('"jax_disable_jit", True') + GOOD, "", "'f_no_jit' sets jax_disable_jit = True"),
    "g_warnings": ("import warnings\nwarnings.simplefilter('error')\n" + DECLARED + GOOD, "", "warnings were errors"),
    "h_path": ("import sys\nsys.path.clear()\n" + DECLARED + GOOD, "", "sys.path lacked "),
    "i_triton": (TRITON, IO, "'i_triton' sets jax_enable_x64 = True"),
    "j_other_way": (
        "import threading\nimport jax\nwider = lambda: jax.config.update('jax_enable_x64', True)\n"
        "thread = threading.Thread(target=wider)\nthread.start()\nthread.join()\n" + DECLARED + GOOD,
        "",
        "jax_enable_x64 was True instead of False",
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The loud ones are loaded between quiet ones."""
    repository = tmp_path_factory.mktemp("repository")
    for name, (source, config, _) in LOUD.items():
        write_model(repository, name, source, config)
    for name in ("a", "z"):
        write_model(repository, f"{name}_plain", PLAIN)
        write_model(repository, f"{name}_host", HOST)
    return repository


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    options = {"executables": {"cache_directory": str(tmp_path_factory.mktemp("cache"))}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        running.wait_log("ready: ")
        yield running


def test_all_are_served_and_each_has_its_own(daemon: DaemonProcess) -> None:
    client = httpclient.InferenceServerClient(daemon.url)
    given = httpclient.InferInput("x", (4,), "FP32")
    given.set_data_from_numpy(np.ones(4, np.float32))
    index = client.get_model_repository_index()
    assert [entry for entry in index if entry["state"] != "READY"] == []
    for _ in range(2):
        got = {entry["name"]: client.infer(entry["name"], [given]).as_numpy("y").tolist() for entry in index}
        assert got == {entry["name"]: [1.0] * 4 for entry in index}
    client.close()
    assert [said for _, _, said in LOUD.values() if said not in daemon.log] == []


def test_a_check_says_the_same(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And loads them into one process, in the daemon's order: what the second one finds there the first one has left."""
    monkeypatch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", str(tmp_path / "cache"))
    shared = tmp_path / "shared"
    first = "import builtins\nbuiltins.somebody_was_here = True\nprint('the first one')\n"
    write_model(shared, "first", first + DECLARED + GOOD)
    second = (
        "import builtins\nprint('the second one')\nassert not hasattr(builtins, 'somebody_was_here'), 'not alone'\n"
    )
    write_model(shared, "second", second + DECLARED + GOOD)
    write_model(shared, "third", "import os\nos._exit(3)\n" + DECLARED + GOOD)
    write_model(shared, "fourth", DECLARED + GOOD)
    done = prepared.run(["tensord", "check", f"--model-repository={repository}", "--device=cpu"])
    assert (done.returncode, f"models: {len(LOUD) + 4} good, 0 bad" in done.stdout) == (0, True), done.stderr
    done = prepared.run(["tensord", "check", f"--model-repository={shared}", "--device=cpu"])
    assert "models: 2 good, 2 bad" in done.stdout
    assert "second: version 1: AssertionError: not alone" in done.stderr
    assert "third: version 1: its process exited with status 3 while loading it" in done.stderr

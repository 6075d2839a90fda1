"""Tests that a model may change its process: neighbours that are loaded before or after it answer as ever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests import prepared
from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.repositories import fields, write_model

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
IO = fields("x FP32 4", "y FP32 4")


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
    """Writes models that change their process between models that do not, in the order of loading."""
    repository = tmp_path_factory.mktemp("repository")
    for name, (source, config, _) in LOUD.items():
        write_model(repository, name, source, config)
    for name in ("a", "z"):
        write_model(repository, f"{name}_plain", PLAIN)
        write_model(repository, f"{name}_host", HOST)
    return repository


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    options = {"executables": {"cache_directory": str(tmp_path_factory.mktemp("cache"))}}
    return daemon_of(repository, options)


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
    """The check loads both models into one process in the daemon's order, so the second finds what the first left."""
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


#: Runs the code that its requests bring; a Triton model does so in a coroutine, one by one.
RUNS = """
import json
import numpy as np
inputs, outputs, host = {"code": "BYTES[1]"}, {"said": "BYTES[1]"}, True
def create(path, config, device):
    def apply(params, inputs):
        scope = {}
        exec(inputs["code"][0].decode(), scope)
        return {"said": np.array([json.dumps(scope["said"])], np.object_)}
    return apply, None
"""
COROUTINE = """
import json
import jax
import jax.numpy as jnp
import numpy as np
import triton_python_backend_utils as pb
class TritonPythonModel:
    def initialize(self, args):
        jax.config.update("jax_enable_x64", True)
    def is_ready(self):
        return str(jnp.ones(2, "float64").dtype) == "float64"
    async def execute(self, requests):
        for request in requests:
            scope = {"jnp": jnp}
            exec(pb.get_input_tensor_by_name(request, "code").as_numpy()[0].decode(), scope)
            answer = pb.Tensor("said", np.array([json.dumps(scope["said"])], np.object_))
            sender = request.get_response_sender()
            sender.send(pb.InferenceResponse([answer]), pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COROUTINE_FIELDS = fields("code STRING 1", "said STRING 1", "model_transaction_policy { decoupled: true }")
STATE = """
import sys, threading, warnings
import jax
found = []
thread = threading.Thread(target=lambda: found.append(jax.config.values["jax_enable_x64"]))
thread.start()
thread.join()
said = [found[0], sorted(str(entry[2]) for entry in warnings.filters if entry[0] == "error"), len(sys.path) > 2]
"""
CHANGES = {
    "jax": "import jax, threading\nthread = threading.Thread(target=jax.config.update, args=('jax_enable_x64', True))\n"
    "thread.start()\nthread.join()\nsaid = 0",
    "warnings": "import warnings\nwarnings.simplefilter('error')\nsaid = 0",
    "path": "import sys\nsys.path.clear()\nsaid = 0",
}


def test_what_is_changed_at_a_request_is_put_back_after_it(leaves_nothing: None, tmp_path: Path) -> None:
    """Before it is answered, and named in the log once for each version; also what a coroutine changes."""
    models = tmp_path / "models"
    names = {"by_host": "jax", "by_host_too": "warnings", "other": ""}
    for name in names:
        write_model(models, name, RUNS)
    write_model(models, "by_coroutine", COROUTINE, COROUTINE_FIELDS)
    with DaemonProcess(tmp_path, [models]) as running:

        def run(model: str, code: str) -> object:
            status, answer = running.request(
                "POST", f"/v2/models/{model}/generate", json.dumps({"code": code}).encode()
            )
            assert status == 200, answer
            return json.loads(json.loads(answer)["said"])

        before = run("other", STATE)
        assert before == [False, before[1], True]  # type: ignore[index]
        for _ in range(2):
            for model in ("by_host", "by_host_too", "by_coroutine"):
                for code in CHANGES.values():
                    run(model, code)
                    if model == "by_coroutine":
                        # Its response has left before its coroutine ends.
                        wait_until(lambda: run("other", STATE) == before, "what it was", running)
                    else:
                        assert run("other", STATE) == before
        told = [line for line in running.log.splitlines() if "it is put back" in line]
        assert len(told) == 3
        assert "model 'by_host' or one that ran beside it, at a request, changed what all models" in told[0]
        assert "jax_enable_x64 was True instead of False" in told[0]
        # What may stay is looked at once.
        run("by_host", "import sys, warnings\nsys.path.append('/nowhere')\nwarnings.simplefilter('ignore')\nsaid = 0")
        assert run("other", "import sys\nsaid = '/nowhere' in sys.path") is True


def test_coroutines_and_readiness_have_their_models_settings(leaves_nothing: None, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "by_coroutine", COROUTINE, COROUTINE_FIELDS)
    with DaemonProcess(tmp_path, [tmp_path / "models"]) as running:
        body = json.dumps({"code": "said = str(jnp.ones(2, 'float64').dtype)"}).encode()
        status, answer = running.request("POST", "/v2/models/by_coroutine/generate", body)
        assert (status, json.loads(json.loads(answer)["said"])) == (200, "float64")
        assert running.get("/v2/models/by_coroutine/ready")[0] == 200

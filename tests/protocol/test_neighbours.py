"""Tests that a model may change its process: neighbours that are loaded before or after it answer as ever."""

from __future__ import annotations

import json
import os
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


REFUSED = "RuntimeError: jax_enable_x64 = True, in a thread or a callback of a model, would hold for all models"
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
        REFUSED,
    ),
    "k_no_context": (setting('"jax_random_seed_offset", 7') + GOOD, "", "jax_random_seed_offset was 7 instead of 0"),
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


#: Is traced while the other one's code runs: each opens a FIFO where it waits for the other.
TRACED = (
    DECLARED
    + """
import jax.numpy as jnp
def create(path, config, device):
    met = []
    def apply(params, inputs):
        if not met:
            met.append(open(path.parents[2] / "is_traced", "w").close())
            open(path.parents[2] / "has_changed").close()
        return {"y": inputs["x"] + jnp.zeros(4) + jnp.sin(1 / jnp.arange(1, 5))}
    return apply, {}
"""
)
CHANGING = (
    DECLARED
    + """
import threading
import jax
changed = ("jax_enable_x64", True)
def change(x):
    try:
        jax.config.update(*changed)
        return x
    except RuntimeError:
        return x + 1
def create(path, config, device):
    found = []
    open(path.parents[2] / "is_traced").close()
    for target, arguments in ((lambda: found.append(change(0)), ()), (jax.config.update, changed)):
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        thread.join()
    open(path.parents[2] / "has_changed", "w").close()
    def apply(params, inputs):
        x = jax.pure_callback(change, jax.ShapeDtypeStruct((4,), "float32"), inputs["x"])
        return {"y": x + found[0]}
    return apply, {}
"""
)


def test_what_is_set_for_all_while_a_neighbour_is_traced(leaves_nothing: None, tmp_path: Path) -> None:
    """In a callback of a compiled function and in threads: refused with an error, and the neighbour is loaded as ever."""
    models = tmp_path / "models"
    write_model(models, "a_traced", TRACED)
    write_model(models, "b_changing", CHANGING)
    for name in ("is_traced", "has_changed"):
        os.mkfifo(tmp_path / name)
    with DaemonProcess(tmp_path, [models], {"repository": {"strict_readiness": False}}) as running:
        given = [{"name": "x", "shape": [4], "datatype": "FP32", "data": [0.0] * 4}]
        status, answer = running.infer("a_traced", given)
        assert status == 200, answer
        np.testing.assert_allclose(answer["outputs"][0]["data"], np.sin(1 / np.arange(1, 5)), rtol=1e-6)
        assert running.infer("b_changing", given)[1]["outputs"][0]["data"] == [2.0] * 4
        running.wait_log(REFUSED)


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
import sys, warnings
import jax
found = jax.config.values["jax_random_seed_offset"]
said = [found, sorted(str(entry[2]) for entry in warnings.filters if entry[0] == "error"), len(sys.path) > 2]
"""
CHANGES = {
    "jax": "import jax\njax.config.update('jax_random_seed_offset', 7)\nsaid = 0",
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
        assert before == [0, before[1], True]  # type: ignore[index]
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
        assert "jax_random_seed_offset was 7 instead of 0" in told[0]
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

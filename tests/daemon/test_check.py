"""``tensord check`` says of a model what a worker would: a table of broken and odd ones, and the daemon beside it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import prepared, run_folder
from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import ensemble, of_x, scale_model, write_model

DECLARED = """
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
"""
GOOD = """
def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"]}), {}
"""
TRITON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
IO = """
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
"""


def applies(body: str, declared: str = DECLARED) -> str:
    """Returns the source of a model whose function returns ``body``."""
    return (
        declared
        + f"""
def create(path, config, device):
    import jax.numpy as jnp
    return (lambda params, inputs: {body}), {{}}
"""
    )


#: name -> model.py, config.pbtxt, words of the reason. "": the model is good.
MODELS: dict[str, tuple[str, str, str]] = {
    "plain": (DECLARED + GOOD, "", ""),
    "batched": (DECLARED + "max_batch_size = 4\n" + GOOD, "", ""),
    "triton": (TRITON, f'backend: "python" {IO}', ""),
    "syntax_error": (DECLARED + "def create(:\n", "", "is not valid Python, line 4: "),
    "syntax_error_with_a_backend": (
        DECLARED + "def create(:\n",
        'backend: "jax"',
        "SyntaxError: invalid syntax (model.py, line 4)",
    ),
    "neither": (DECLARED, "", "defines neither create() nor class TritonPythonModel"),
    "no_create": (DECLARED, 'backend: "jax"', "no function create"),
    "create_is_no_function": (DECLARED + "create = 1\n", "", "no function create"),
    "no_class": (GOOD, f'backend: "python" {IO}', "no class TritonPythonModel"),
    "no_execute": ("class TritonPythonModel:\n    pass\n", f'backend: "python" {IO}', "has no function execute"),
    "initialize_raises": (
        TRITON + "    def initialize(self, args):\n        raise ValueError('no weights')\n",
        f'backend: "python" {IO}',
        "ValueError: no weights",
    ),
    "asks_for_others": (
        TRITON
        + "    def initialize(self, args):\n        assert pb_utils.is_model_ready('asks_for_others') in (True, False)\n",
        f'backend: "python" {IO}',
        "",
    ),
    "loads_others": (
        TRITON + "    def initialize(self, args):\n        pb_utils.load_model('plain')\n",
        f'backend: "python" {IO}',
        "explicit model load / unload is not allowed",
    ),
    "create_returns_one": (
        DECLARED + "def create(path, config, device):\n    return 1\n",
        "",
        "must return a function",
    ),
    "create_raises": (DECLARED + "def create(path, config, device):\n    raise OSError('no')\n", "", "OSError: no"),
    "create_takes_nothing": (
        DECLARED + "def create():\n    return 1\n",
        "",
        "create() takes (), it is called with (path, config, device)",
    ),
    "create_takes_a_path": (
        DECLARED + "def create(path):\n    return 1\n",
        "",
        "create() takes (path), it is called with (path, config, device)",
    ),
    "a_list": (applies('{"y": [inputs["x"][0]] * 4}'), "", "output 'y' is a list, an array is expected"),
    "no_batch": (
        applies('{"y": inputs["x"][0]}', DECLARED + "max_batch_size = 2\n"),
        "",
        "the model has max_batch_size, so the batch is the first dimension of every tensor",
    ),
    "numpy_names": (
        applies("inputs", "inputs = {'x': 'float32[4]'}\noutputs = inputs\n"),
        "",
        "did you mean 'FP32[4]'?",
    ),
    "lower_case": (
        applies("inputs", "inputs = {'x': 'fp16'}\noutputs = inputs\n"),
        "",
        "did you mean 'FP16[4]', or 'FP16[]'",
    ),
    "a_file_beside": (
        DECLARED + "def create(path, config, device):\n    return open('model.py').read()\n",
        "",
        "'model.py' lies in the version's folder, which create() gets: path / 'model.py'",
    ),
    "import_error": ("import a_library_that_nobody_has\n" + DECLARED + GOOD, "", "a_library_that_nobody_has"),
    "name_error": (DECLARED + "undefined\n" + GOOD, "", "undefined"),
    "raises_at_import": (DECLARED + GOOD + "raise RuntimeError('at import')\n", "", "RuntimeError: at import"),
    "leaves_at_import": (DECLARED + GOOD + "import sys; sys.exit(3)\n", "", "SystemExit: 3"),
    "exits_at_import": (DECLARED + GOOD + "import os; os._exit(0)\n", "", "exited with status 0 while loading it"),
    "crashes_at_import": (
        DECLARED + GOOD + "import ctypes; ctypes.string_at(0)\n",
        "",
        "was killed by SIGSEGV while loading it",
    ),
    "is_killed": (
        DECLARED + GOOD + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
        "",
        "was killed by SIGKILL while loading it",
    ),
    "ends_its_group": (
        DECLARED + GOOD + "import os, signal; os.killpg(0, signal.SIGTERM)\n",
        "",
        "was killed by SIGTERM while loading it",
    ),
    "other_output": (applies('{"z": inputs["x"]}'), "", "output 'y' is declared but not computed"),
    "no_dict": (applies('inputs["x"]'), "", "apply returned an array, a dict of arrays is expected: {'y': ...}"),
    "other_shape": (applies('{"y": inputs["x"][:2]}'), "", "is computed as FP32[2], declared as FP32[4]"),
    "other_datatype": (
        applies('{"y": inputs["x"].astype("int32")}'),
        "",
        "is computed as INT32[4], declared as FP32[4]",
    ),
    "other_input": (
        applies('{"y": inputs["z"]}'),
        "",
        "apply failed with KeyError('z'); the inputs of the model are: 'x'",
    ),
    "no_inputs": (
        applies('{"y": inputs["x"]}', 'outputs = {"y": "FP32[4]"}\n'),
        "",
        "the inputs of the model are: none",
    ),
    "buckets_without_a_batch": (
        DECLARED + "batch_buckets = (1, 2)\n" + GOOD,
        "",
        "batch_buckets are given, but max_batch_size is 0: it has no batch dimension",
    ),
    "configured_buckets_without_a_batch": (
        DECLARED + GOOD,
        'parameters { key: "batch_buckets" value { string_value: "1,2" } }',
        "batch_buckets are given, but max_batch_size is 0: it has no batch dimension",
    ),
    "no_such_datatype": (DECLARED.replace("FP32[4]", "FLOAT[4]", 1) + GOOD, "", "FLOAT"),
    "declares_nothing": (GOOD, "", "no outputs are declared, neither in model.py, as in outputs = "),
    "other_than_configured": (DECLARED + GOOD, IO.replace("dims: [4]", "dims: [5]", 1), "x"),
    "unknown_field": (DECLARED + GOOD, "nonsense: 1", "line 1, column 1"),
    "not_text": (DECLARED + GOOD, "input [", "line"),
    "another_name": (DECLARED + GOOD, 'name: "somebody"', "somebody"),
    "unknown_backend": (DECLARED + GOOD, 'backend: "tensorrt"', "tensorrt"),
    "chooses_none": (DECLARED + GOOD, "version_policy { specific { versions: [7] } }", "no version is available"),
}


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the tests' compiled programs away from the user's own cache."""
    monkeypatch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())


def tensord_check(*arguments: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """Runs ``tensord check``; returns its status, the good models with their versions, and the bad ones with the reason."""
    done = prepared.run(["tensord", "check", *arguments])
    assert "Traceback" not in done.stderr, done.stderr
    good, bad = (
        {k: v for k, _, v in (line.partition(": ") for line in out.splitlines())} for out in (done.stdout, done.stderr)
    )
    counts = good.pop("configuration")
    assert counts == f"good; models: {len(good)} good, {len(bad)} bad"
    return done.returncode, good, bad


#: One for every way in which that may end, and one for each stage of a load.
CHECKED = (
    *(
        "plain",
        "batched",
        "triton",
        "syntax_error",
        "neither",
        "initialize_raises",
        "loads_others",
        "create_raises",
        "leaves_at_import",
    ),
    *(
        "exits_at_import",
        "crashes_at_import",
        "is_killed",
        "ends_its_group",
        "other_shape",
        "unknown_field",
        "chooses_none",
    ),
)


def test_models_of_the_table(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    """The daemon says the same of all of them, and serves those that are good and no other."""
    for name in CHECKED:
        write_model(tmp_path / "models", name, *MODELS[name][:2])
    (tmp_path / "models" / "empty_version" / "1").mkdir(parents=True)
    (tmp_path / "models" / "named_versions" / "v1").mkdir(parents=True)
    (tmp_path / "models" / "named_versions" / "config.pbtxt").write_text('backend: "jax"')
    for folder in ("models", "others"):
        write_model(tmp_path / folder, "twice", DECLARED + GOOD)
    write_model(tmp_path / "models", "and_a_name", DECLARED + GOOD)
    (tmp_path / "models" / "and_a_name" / "v2").mkdir()
    paths = [f"--model-repository={tmp_path / folder}" for folder in ("models", "others")]
    status, good, bad = tensord_check(*paths, "--device=cpu")
    assert status == 1
    expected = {name: words for name, (_, _, words) in MODELS.items() if words} | {
        "empty_version": "version 1 has no model.py",
        "named_versions": "it has no version folder, which is a whole number from 1 ('v1': none)",
        "twice": "model appears in two or more repositories",
    }
    assert bad.keys() == expected.keys() - (MODELS.keys() - set(CHECKED))
    assert {name: reason for name, reason in bad.items() if expected[name] not in reason} == {}
    assert good == dict.fromkeys({"plain", "batched", "triton", "and_a_name"}, "version 1")
    good["asks_for_others"] = "version 1"

    for name in MODELS.keys() - set(CHECKED):
        write_model(tmp_path / "models", name, *MODELS[name][:2])
    # Those that end their process are tested where they do so; here they would only make everybody wait.
    for name in ("exits_at_import", "crashes_at_import", "is_killed", "ends_its_group"):
        (tmp_path / "models" / name).rename(tmp_path / name)
        del expected[name]
    daemon = start_daemon(tmp_path / "models", tmp_path / "others")
    daemon.wait_log("ready: ")
    index = json.loads(daemon.request("POST", "/v2/repository/index", b"")[1])
    assert {entry["name"] for entry in index if entry["state"] == "READY"} == good.keys()
    reasons = {entry["name"]: entry["reason"] for entry in index if entry.get("reason")}
    assert reasons.keys() == expected.keys()
    assert {name: reason for name, reason in reasons.items() if expected[name] not in reason} == {}


def test_models_that_have_others_loaded(tmp_path: Path) -> None:
    """The check takes their load requests for done, and checks the named models by themselves."""
    host = "from tensord import models\n" + DECLARED + "host = True\n"
    host += "def create(path, config, device):\n    models.load_model('plain')\n"
    host += "    return (lambda params, inputs: {'y': inputs['x'] * len(str(models.is_ready('plain')))}), None\n"
    write_model(tmp_path, "host", host)
    write_model(tmp_path, "triton", *MODELS["loads_others"][:2])
    # A sample that calls another model cannot be tried.
    sample = "model_warmup { name: 's' inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }"
    called = host.replace(
        "inputs['x'] * len(str(models.is_ready('plain')))", "models.call('plain', {'x': inputs['x']})['y']"
    )
    write_model(tmp_path, "calls", called, sample)
    status, good, bad = tensord_check(f"--model-repository={tmp_path}", "--model-control-mode=explicit", "--device=cpu")
    assert (status, good) == (1, dict.fromkeys(("host", "triton"), "version 1"))
    assert "model 'plain' is not asked while another one is only tried" in bad["calls"]


def test_values_of_a_trace_that_are_left_outside(tmp_path: Path) -> None:
    write_model(tmp_path, "leaks", "kept = []\n" + applies("kept.append(inputs['x'] * 2) or {'y': inputs['x']}"))
    write_model(tmp_path, "plain", DECLARED + GOOD)
    status, good, bad = tensord_check(f"--model-repository={tmp_path}", "--device=cpu")
    assert (status, good) == (1, {"plain": "version 1"})
    assert bad["leaks"].startswith(
        "version 1: model 'leaks': a value of one trace of the function is kept outside of it"
    )


def test_what_is_no_reason_to_refuse_a_model_is_told(tmp_path: Path) -> None:
    """Whatever the log's format is."""
    write_model(tmp_path, "vain", applies("{'y': jnp.ones(4)}"))
    done = prepared.run(["tensord", "check", f"--model-repository={tmp_path}", "--device=cpu", "--log-format=json"])
    assert (done.returncode, done.stdout.splitlines()[:2]) == (
        0,
        ["vain: version 1", "    model 'vain': no output depends on its input 'x': use it, or do not declare it"],
    )


def test_one_that_never_ends(tmp_path: Path) -> None:
    """Its time is bounded, each version has its own, and what it started ends with it.

    A process has to begin with the model in that time, and another one to have tried the good model. Where a machine is too busy
    for that, they get more of it.
    """
    child = tmp_path / "child"
    write_model(
        tmp_path / "models",
        "endless",
        DECLARED
        + GOOD
        + f"""
import pathlib, subprocess, time
pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
while True:
    time.sleep(1)
""",
    )
    scale_model(tmp_path / "models")
    command = [f"--model-repository={tmp_path / 'models'}", "--device=cpu"]
    for seconds in (5, 20, 100):
        status, good, bad = tensord_check(*command, "--timeout", str(seconds))
        assert (status, bad["endless"]) == (1, f"version 1: it was not loaded within {seconds} s")
        if good and child.exists():
            break
    assert (good, bad.keys()) == ({"scale": "version 1"}, {"endless"})
    pid = int(child.read_text())
    wait_until(lambda: not psutil.pid_exists(pid), "the end of what the model started")


def test_which_version(tmp_path: Path) -> None:
    config = "version_policy { all {} }"
    write_model(tmp_path, "m", DECLARED + GOOD, config)
    write_model(tmp_path, "m", DECLARED + GOOD + "raise OSError('new')", config, version=2)
    write_model(tmp_path, "m", DECLARED + GOOD + "import os; os.abort()", config, version=3)
    write_model(tmp_path, "m", DECLARED + GOOD, config, version=4)
    reasons = "version 2: OSError: new"
    _, _, bad = tensord_check(f"--model-repository={tmp_path}", "--device=cpu")
    assert bad["m"].startswith(reasons)
    assert bad["m"].endswith("version 3: its process was killed by SIGABRT while loading it")


def test_what_is_without_effect(tmp_path: Path) -> None:
    """It stands below the model's line, with the good ones and with the bad ones."""
    config = 'instance_group { profile: "p" }'
    write_model(tmp_path, "bad", DECLARED, config)
    write_model(tmp_path, "good", DECLARED + GOOD, config)
    write_model(tmp_path, "plain", DECLARED + GOOD)
    done = prepared.run(["tensord", "check", f"--model-repository={tmp_path}", "--read-only"])
    sentence = "    instance_group.profile is without effect: there are no TensorRT profiles"
    assert done.stdout.splitlines()[:3] == ["good: version 1", sentence, "plain: version 1"]
    assert done.stderr.splitlines()[0].startswith("bad: ")
    assert "defines neither" in done.stderr


def deep(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return prepared.run(["tensord", "check", f"--model-repository={repository}", "--device=cpu", "--deep", *words])


def test_each_bucket_is_asked(tmp_path: Path) -> None:
    """A second check finds all programs in the cache. What is not compiled is only loaded."""
    scale_model(tmp_path / "models")
    write_model(tmp_path / "models", "host", DECLARED + "host = True\n" + GOOD)
    buckets = 'max_batch_size = 2\nbuckets = {"n": (4, 8)}\n'
    source = of_x("x.astype('bfloat16').sum(-1).astype('float32')", "FP32[n,3]", "FP32[n]", buckets)
    write_model(tmp_path / "models", "named", source)
    for program in ("compiled", "cached"):
        done = deep(tmp_path / "models", f"--cache-directory={tmp_path / 'cache'}")
        assert (done.returncode, done.stderr) == (0, "")
        host, host_taken, named, _, head, *rows, scale, scale_taken, _, _, _, _, _, summary = done.stdout.splitlines()
        assert (host, named, scale) == tuple(f"{name}: version 1" for name in ("host", "named", "scale"))
        assert re.fullmatch(r"    host 1: [\d.]+ s to load, 0 B of parameters, 0 B of programs", host_taken)
        assert re.fullmatch(r"    scale 1: [\d.]+ s to load, 4 B of parameters, [\d.]+ KiB of programs", scale_taken)
        assert head.split() == ["bucket", "device", "program", "memory_kib", "mflop", "ms"]
        asked = [f"{rows} rows of [{n}, 3]" for n in (4, 8) for rows in (1, 2)]
        for row, bucket in zip(rows, asked, strict=True):
            assert re.fullmatch(rf"{re.escape(bucket)}  \S+ +{program} +[\d.]+ +[\d.]+ +[\d.]+ *#*", row)
        assert max(row.count("#") for row in rows) == 24
        assert summary == "configuration: good; models: 3 good, 0 bad"


@pytest.mark.parametrize(
    ("y", "x"), [("x * numpy.random.random()", "FP32[4]"), ("x + time.time_ns() % 9999", "INT32[4]")]
)
def test_answers_that_differ_from_the_function(tmp_path: Path, y: str, x: str) -> None:
    """Such a function becomes another one each time that it is compiled."""
    write_model(tmp_path, "odd", of_x(y, x, more="import numpy, time"))
    done = deep(tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "configuration: good; models: 0 good, 1 bad")
    reason = r"odd: version 1: 1 rows of \[4\]: output 'y' has \S+ where the function alone gives \S+\n"
    warning = (
        r" +model 'odd': its function is another one each time that it is traced \(model\.py, line \d+, in \S+\), .+\n"
    )
    assert re.fullmatch(reason + warning, done.stderr), done.stderr
    assert done.stdout.count("1 rows of [4]") == 1


def test_a_request_that_fails(tmp_path: Path) -> None:
    """Its inputs may be such that nobody would send, as of this function, which takes zeros alone."""
    more = "import jax\ndef f(x):\n    assert not x.any()\n    return x"
    write_model(tmp_path, "m", of_x("jax.pure_callback(f, x, x)", more=more))
    done = deep(tmp_path)
    assert (done.returncode, done.stderr, "bucket" in done.stdout) == (0, "", False)


@pytest.mark.parametrize("arguments", [["--read-only"], ["--verbose"]])
def test_reading_alone_and_showing_more(tmp_path: Path, arguments: list[str]) -> None:
    write_model(tmp_path, "m", DECLARED + GOOD + "print('I was imported')\nraise OSError('no')\n")
    done = prepared.run(["tensord", "check", f"--model-repository={tmp_path}", "--device=cpu", *arguments])
    if arguments == ["--read-only"]:
        assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, "m: version 1", "")
    else:
        assert done.returncode == 1
        assert "    I was imported\n" in done.stderr
        assert "    Traceback" in done.stderr


def test_ensembles_beside_their_models(tmp_path: Path) -> None:
    """A check names the faulty part: a model, a connection, the ensemble itself, or that it cannot be one program."""
    scale_model(tmp_path)
    host = 'inputs = {"x": "FP32[4]"}\noutputs = {"y": "FP32[4]"}\nhost = True\n'
    write_model(
        tmp_path, "host", host + "def create(path, config, device):\n    return lambda params, inputs: inputs, None\n"
    )
    write_model(tmp_path, "raises", *MODELS["create_raises"][:2])
    once, fused = ("scale", {"x": "x"}, {"y": "y"}), 'parameters { key: "tensord_fuse" value { string_value: "true" } }'
    inputs, outputs = ["x FP32 4"], ["y FP32 4"]
    ensemble(tmp_path, "good", inputs, outputs, [once], 8)
    ensemble(tmp_path, "outer", inputs, outputs, [("good", {"x": "x"}, {"y": "y"})], 8)
    ensemble(tmp_path, "fused", inputs, outputs, [once], 8, fused)
    ensemble(tmp_path, "too_large", inputs, outputs, [once], 9)
    ensemble(tmp_path, "unknown", inputs, outputs, [("nobody", {"x": "x"}, {"y": "y"})], 8)
    ensemble(tmp_path, "other_type", ["x FP64 4"], outputs, [once], 8)
    ensemble(tmp_path, "broken", inputs, outputs, [("raises", {"x": "x"}, {"y": "y"})], 8)
    ensemble(tmp_path, "itself", inputs, outputs, [("itself", {"x": "x"}, {"y": "y"})], 8)
    ensemble(tmp_path, "rang", inputs, outputs, [("ring", {"x": "x"}, {"y": "y"})], 8)
    ensemble(tmp_path, "ring", inputs, outputs, [("rang", {"x": "x"}, {"y": "y"})], 8)
    ensemble(tmp_path, "astray", inputs, outputs, [("ring", {"x": "x"}, {"y": "y"})], 8)
    write_model(tmp_path, "wrong", "", "max_batch_size: -1")
    ensemble(tmp_path, "unwell", inputs, outputs, [("wrong", {"x": "x"}, {"y": "y"})], 8)
    status, good, bad = tensord_check(f"--model-repository={tmp_path}", "--device=cpu")
    assert status == 1
    assert good == dict.fromkeys({"scale", "host", "good", "outer"}, "version 1")
    assert bad.pop("raises")
    assert bad.pop("broken").startswith("ensemble 'broken' depends on 'raises' which has no loaded version.")
    assert bad == {
        "fused": "ensemble 'fused' has the parameter tensord_fuse, which is no more: requests go through the programs of "
        "compiled models together without it; remove it",
        "too_large": "ensemble too_large allows maximum batch size 9, but it contains model scale which only allows maximum "
        "batch size to be 8",
        "unknown": "ensemble unknown contains models that are not available or ambiguous: nobody",
        "other_type": "in ensemble other_type, ensemble tensor x: inconsistent data type: TYPE_FP64 is inferred from model "
        "other_type while TYPE_FP32 is inferred from model scale",
        "itself": "circular dependency between ensembles: itself -> ... -> itself -> itself",
        "rang": "circular dependency between ensembles: rang -> ... -> ring -> rang",
        "ring": "circular dependency between ensembles: ring -> ... -> rang -> ring",
        "astray": "circular dependency between ensembles: ring -> ... -> rang -> ring",
        "wrong": "model 'wrong': max_batch_size is -1, it must not be negative",
        "unwell": "ensemble 'unwell' depends on 'wrong' which is not valid. Model 'wrong' failed with error: model 'wrong': "
        "max_batch_size is -1, it must not be negative",
    }

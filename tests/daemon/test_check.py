"""``tensord check`` says of a model what a worker would: a table of broken and odd ones, and the daemon beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.daemon_process import ROOT, DaemonProcess, wait_until
from tests.repositories import scale_model, write_model

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
    """A model whose apply returns that."""
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
    "syntax_error": (DECLARED + "def create(:\n", "", "is not valid Python, line 4"),
    "syntax_error_with_a_backend": (DECLARED + "def create(:\n", 'backend: "jax"', "SyntaxError"),
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
    "create_returns_one": (
        DECLARED + "def create(path, config, device):\n    return 1\n",
        "",
        "must return a function",
    ),
    "create_raises": (DECLARED + "def create(path, config, device):\n    raise OSError('no')\n", "", "OSError: no"),
    "create_takes_nothing": (DECLARED + "def create():\n    return 1\n", "", "TypeError"),
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
    "no_dict": (applies('inputs["x"]'), "", "apply returned"),
    "other_shape": (applies('{"y": inputs["x"][:2]}'), "", "is computed as FP32[2], declared as FP32[4]"),
    "other_datatype": (
        applies('{"y": inputs["x"].astype("int32")}'),
        "",
        "is computed as INT32[4], declared as FP32[4]",
    ),
    "other_input": (applies('{"y": inputs["z"]}'), "", "KeyError"),
    "no_such_datatype": (DECLARED.replace("FP32[4]", "FLOAT[4]", 1) + GOOD, "", "FLOAT"),
    "declares_nothing": (GOOD, "", "KeyError"),
    "other_than_configured": (DECLARED + GOOD, IO.replace("dims: [4]", "dims: [5]", 1), "x"),
    "unknown_field": (DECLARED + GOOD, "nonsense: 1", "line 1, column 1"),
    "not_text": (DECLARED + GOOD, "input [", "line"),
    "another_name": (DECLARED + GOOD, 'name: "somebody"', "somebody"),
    "unknown_backend": (DECLARED + GOOD, 'backend: "tensorrt"', "tensorrt"),
    "chooses_none": (DECLARED + GOOD, "version_policy { specific { versions: [7] } }", "no version is available"),
}


def tensord_check(*arguments: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """Exit status, the good models with their versions, the bad ones with the reason."""
    done = subprocess.run(
        [sys.executable, "-m", "tensord", "check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    good, bad = (
        {k: v for k, _, v in (line.partition(": ") for line in out.splitlines())} for out in (done.stdout, done.stderr)
    )
    counts = good.pop("configuration")
    assert counts == f"good; models: {len(good)} good, {len(bad)} bad"
    return done.returncode, good, bad


def test_every_model_of_the_table(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    """And the daemon serves those that are good, and no other."""
    for name, (source, config, _) in MODELS.items():
        write_model(tmp_path / "models", name, source, config)
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "empty_version" / "1").mkdir(parents=True)
    (tmp_path / "models" / "named_versions" / "v1").mkdir(parents=True)
    for folder in ("models", "others"):
        write_model(tmp_path / folder, "twice", DECLARED + GOOD)
    write_model(tmp_path / "models", "and_a_name", DECLARED + GOOD)
    (tmp_path / "models" / "and_a_name" / "v2").mkdir()
    paths = [f"--model-repository={tmp_path / folder}" for folder in ("models", "others")]
    status, good, bad = tensord_check(*paths, "--device=cpu")
    assert status == 1
    expected = {name: words for name, (_, _, words) in MODELS.items() if words} | {
        "empty": "it has no version folder",
        "empty_version": "version 1 has no model.py",
        "named_versions": "it has no version folder, which is a whole number from 1 ('v1': none)",
        "twice": "model appears in two or more repositories",
    }
    assert bad.keys() == expected.keys()
    assert {name: reason for name, reason in bad.items() if expected[name] not in reason} == {}
    assert good == dict.fromkeys(MODELS.keys() - expected.keys() | {"and_a_name"}, "version 1")

    # Those that end their process are tested where they do so; here they would only make everybody wait.
    for name in ("exits_at_import", "crashes_at_import", "is_killed", "ends_its_group"):
        (tmp_path / "models" / name).rename(tmp_path / name)
        del expected[name]
    daemon = start_daemon(tmp_path / "models", tmp_path / "others")
    daemon.wait_log("ready: ")
    index = json.loads(daemon.request("POST", "/v2/repository/index", b"")[1])
    assert {entry["name"] for entry in index if entry["state"] == "READY"} == good.keys()
    assert {entry["name"] for entry in index if entry.get("reason")} == expected.keys()


def test_one_that_never_ends(tmp_path: Path) -> None:
    """Its time is bounded, each version has its own, and what it started ends with it."""
    child = tmp_path / "child"
    write_model(
        tmp_path / "models",
        "endless",
        DECLARED
        + GOOD
        + f"""
import pathlib, subprocess
pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
while True:
    pass
""",
    )
    scale_model(tmp_path / "models")
    command = [f"--model-repository={tmp_path / 'models'}", "--device=cpu"]
    # Enough for a process to begin with the model, so that it is the model which is late.
    status, good, bad = tensord_check(*command, "--timeout", "20")
    assert (status, good) == (1, {"scale": "version 1"})
    assert bad == {"endless": "version 1: it was not loaded within 20 s"}
    pid = int(child.read_text())
    wait_until(lambda: not psutil.pid_exists(pid), "the end of what the model started")


def test_which_version(tmp_path: Path) -> None:
    config = "version_policy { all {} }"
    write_model(tmp_path, "m", DECLARED + GOOD, config)
    write_model(tmp_path, "m", DECLARED + GOOD + "raise OSError('new')", config, version=2)
    write_model(tmp_path, "m", DECLARED + GOOD + "import os; os.abort()", config, version=3)
    write_model(tmp_path, "m", DECLARED + GOOD, config, version=4)
    reasons = "version 2: Internal: OSError: new"
    _, _, bad = tensord_check(f"--model-repository={tmp_path}", "--device=cpu")
    assert bad["m"].startswith(reasons)
    assert bad["m"].endswith("version 3: its process was killed by SIGABRT while loading it")


@pytest.mark.parametrize("arguments", [["--read-only"], ["--verbose"]])
def test_reading_alone_and_showing_more(tmp_path: Path, arguments: list[str]) -> None:
    write_model(tmp_path, "m", DECLARED + GOOD + "print('I was imported')\nraise OSError('no')\n")
    done = subprocess.run(
        [sys.executable, "-m", "tensord", "check", f"--model-repository={tmp_path}", "--device=cpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if arguments == ["--read-only"]:
        assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, "m: version 1", "")
    else:
        assert done.returncode == 1
        assert "    I was imported\n" in done.stderr
        assert "    Traceback" in done.stderr

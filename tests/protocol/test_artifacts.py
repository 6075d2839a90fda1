"""Models without Python through the whole daemon: of ``tensord export``, of jax.export, of a lowering; and broken ones."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from tritonclient import http

from tests import prepared
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess
from tests.repositories import write_model

ROW = jax.ShapeDtypeStruct((2, 4), np.float32)
DIGITS = ROOT / "examples" / "models" / "digits"


def exported(model: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return prepared.run(["tensord", "export", str(model), str(folder), "--platforms", "cpu,cuda"])


def test_a_stepped_model_is_not_exported(tmp_path: Path) -> None:
    done = exported(ROOT / "examples" / "models" / "writer", tmp_path / "written")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "tensord: model 'writer': a stepped model is no program that is run once, it cannot be exported\n"
    )
    assert not (tmp_path / "written").exists()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "models"
    folder.mkdir()
    (folder / "digits").symlink_to(DIGITS)
    done = exported(DIGITS, folder / "exported")
    assert done.returncode == 0, done.stderr
    # Its function asks for the batch as a number, so there is a program for each size of it.
    written = [line.split()[0].removeprefix(str(folder)) for line in done.stdout.splitlines()]
    assert {
        "/exported/1/params.safetensors",
        "/exported/1/rows1.jaxexport",
        "/exported/config.pbtxt",
        "/exported/labels.txt",
    } <= set(written)
    for name in ("hlo", "broken", "served"):
        (folder / name / "1").mkdir(parents=True)
    text = jax.jit(lambda x, y: (x + y, x - y)).lower(ROW, ROW).as_text()
    (folder / "hlo" / "1" / "model.mlir").write_text(text)
    (folder / "broken" / "1" / "model.jaxexport").write_bytes(b"\0" * 100)
    spec = {"tokens": jax.ShapeDtypeStruct(export.symbolic_shape("b, length"), np.float32)}
    program = export.export(jax.jit(lambda inputs: {"sum": inputs["tokens"].sum(axis=1)}))(spec)
    (folder / "served" / "1" / "any-name.jaxexport").write_bytes(program.serialize())
    (folder / "served" / "config.pbtxt").write_text(
        'parameters { key: "buckets.length" value { string_value: "4,16" } }'
    )
    return folder


@pytest.fixture(scope="module")
def daemon(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    options = {"repository": {"exit_on_error": False}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: DaemonProcess) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(f"127.0.0.1:{daemon.port}", network_timeout=PATIENCE) as client:
        end = time.monotonic() + PATIENCE
        while not all(client.is_model_ready(name) for name in ("digits", "exported", "hlo", "served")):
            assert time.monotonic() < end
            time.sleep(0.1)
        yield client


def infer(client: http.InferenceServerClient, model: str, **arrays: Any) -> dict[str, Any]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(http.InferInput(name, list(array.shape), "FP32"))
        inputs[-1].set_data_from_numpy(array)
    answer = client.infer(model, inputs)
    return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def test_an_exported_model_answers_as_its_original(client: http.InferenceServerClient) -> None:
    ours, theirs = client.get_model_metadata("exported"), client.get_model_metadata("digits")
    assert (ours["inputs"], ours["outputs"]) == (theirs["inputs"], theirs["outputs"])
    name, shape = ours["inputs"][0]["name"], ours["inputs"][0]["shape"][1:]
    for rows in (1, 3, 8):
        given = {name: np.random.default_rng(rows).random((rows, *shape), np.float32)}
        original, found = infer(client, "digits", **given), infer(client, "exported", **given)
        assert original.keys() == found.keys()
        for output, array in original.items():
            np.testing.assert_allclose(found[output], array, rtol=1e-5)


def test_stablehlo(client: http.InferenceServerClient) -> None:
    x, y = np.full((2, 4), 5, np.float32), np.ones((2, 4), np.float32)
    found = infer(client, "hlo", input_0=x, input_1=y)
    assert found["output_0"][0, 0] == 6
    assert found["output_1"][0, 0] == 4


@pytest.mark.parametrize("length", [1, 4, 9, 16, 21])
def test_varying_sizes_are_padded_into_buckets(client: http.InferenceServerClient, length: int) -> None:
    tokens = np.arange(2 * length, dtype=np.float32).reshape(2, length)
    np.testing.assert_allclose(infer(client, "served", tokens=tokens)["sum"], tokens.sum(axis=1))


def test_a_broken_one_is_told_and_disturbs_nobody(client: http.InferenceServerClient) -> None:
    entry = next(entry for entry in client.get_model_repository_index() if entry["name"] == "broken")
    assert entry["state"] == "UNAVAILABLE"
    assert "model.jaxexport" in entry["reason"]


RAGGED = """
    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[n]"}
    max_batch_size = 2
    ragged = ("x",)
    batch_outputs = {"y": "x"}

    def create(path, config, device):
        return (lambda params, inputs: {"y": inputs["x"]}), None
"""


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    write_model(tmp_path, "ragged", RAGGED)
    for model, reason in (
        (
            ROOT / "examples" / "models" / "tokenizer",
            "only a JAX model with a function create(path, config, device) is exported",
        ),
        (tmp_path / "ragged", "model 'ragged': what is exported has no ragged inputs"),
    ):
        done = exported(model, tmp_path / "out")
        assert done.returncode == 1
        assert reason in done.stderr
        assert not (tmp_path / "out").exists()

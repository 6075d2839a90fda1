"""A model of each framework, served as its example writes it: it answers as the framework does by itself."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tensord import testing
from tests import run_folder
from tests.examples.models import ROOT

FOLDER = ROOT / "examples/frameworks"
PACKAGES = {
    "equinox_mlp": "equinox",
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "haiku_mlp": "haiku",
    "keras_mlp": "keras",
    "torchax_mlp": "torchax",
}


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
        yield


def test_all_are_here() -> None:
    assert {path.name for path in FOLDER.iterdir()} == PACKAGES.keys()


@pytest.mark.parametrize("name", PACKAGES)
def test_it_answers_as_by_itself(name: str) -> None:
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    apply, params = runpy.run_path(str(FOLDER / name / "1/model.py"))["create"](FOLDER / name / "1", {}, None)
    expected = np.asarray(apply(params, {"x": jnp.asarray(x)})["y"])
    with testing.load(FOLDER / name) as model:
        got = model({"x": x})["y"]
        assert model.outputs[0].shape == (-1, 3)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(got, axis=0).min() > 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_pytorch_exports(tmp_path: Path) -> None:
    """The export of docs/models.md serves without PyTorch."""
    torch, torchax = pytest.importorskip("torch"), pytest.importorskip("torchax.export")
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)).eval()
    program = torch.export.export(network, (torch.zeros(2, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    weights, exported = torchax.exported_program_to_stablehlo(program)
    folder = tmp_path / "mlp" / "1"
    folder.mkdir(parents=True)
    (folder / "model.jaxexport").write_bytes(exported.serialize())
    save_file({str(number): np.asarray(array) for number, array in enumerate(weights)}, folder / "params.safetensors")
    (tmp_path / "mlp" / "config.pbtxt").write_text(
        'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 8 } output { name: "y" data_type: TYPE_FP32 dims: 3 }'
    )
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    with testing.load(tmp_path / "mlp") as model:
        got = model({"x": x})["y"]
    np.testing.assert_allclose(got, network(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)

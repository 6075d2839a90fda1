"""Writes a first model to begin with, which can be served as it is (``tensord init``)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tensord.daemon.models.repository import NAME
from tensord.shm.errors import InvalidArgument

_MODEL = '''\
"""{name}: multiplies a row of four numbers with a matrix. Change what it takes, what it gives, and the function."""

import jax.numpy as jnp
import numpy as np

# Datatype and dims of one row. A dim that varies is -1, or a name with buckets: buckets = {{"length": (32, 128)}}.
inputs = {{"x": "FP32[4]"}}
outputs = {{"y": "FP32[2]"}}
# Requests that wait are run together, up to so many rows. 0: the model has no batch dimension.
max_batch_size = 32


def create(path, config, device):
    """The function to compile, and its parameters, which it gets back as they are on the device.

    ``path`` is this folder. tensord.models.load(path / "params.safetensors") reads parameters from a file.
    A model that draws has request = {{"seed": ("INT64", 0)}} above, and takes ``apply(params, inputs, request)``:
    tensord.models.keys(request["seed"]) makes a key for each row, for jax.vmap.
    """
    params = {{"w": np.ones((4, 2), np.float32)}}

    def apply(params, inputs):
        return {{"y": jnp.tanh(inputs["x"] @ params["w"])}}

    return apply, params
'''
_NEXT = """\
{file}

Serve it; after every change to its files it is loaded again:

    {program} serve --watch --model-repository={repository}

(If another daemon has the ports: add --http-port=8010 --grpc-port=8011 --metrics-port=8012, and write 8010 below.)

Ask it, from another terminal:

    curl localhost:8000/v2/models/{name}/infer -d \\
        '{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}}]}}'

Try it without serving it: each bucket is asked, and its answer compared with the function's own:

    {program} check --deep --model-repository={repository}

Measure it while it is served:

    {program} bench {name}
"""


def write(folder: Path) -> str:
    """Writes version 1 of an example model into ``folder``, which has the model's name. Returns instructions for the user.

    Raises InvalidArgument if no model can have that name, or if the folder is not empty.
    """
    folder = folder.absolute()
    if not NAME.fullmatch(folder.name):
        raise InvalidArgument(
            f"no model can be called '{folder.name}': a name has letters, digits and _.,+- and does not begin with . + or -"
        )
    if folder.exists() and any(folder.iterdir()):
        raise InvalidArgument(f"{folder} is not empty")
    file = folder / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(_MODEL.format(name=folder.name))
    return _NEXT.format(file=file, repository=folder.parent, name=folder.name, program=_program())


def _program() -> str:
    """Returns "tensord", or the path of the running executable ``tensord`` if a shell would not find it by its name."""
    here = Path(sys.argv[0])
    return "tensord" if shutil.which("tensord") == str(here.absolute()) or here.name != "tensord" else str(here)

"""README.md and docs/models.md, followed by somebody who has installed the wheel, in a folder with ``config.py`` and its like.

Each block of code of the two is either run as it stands or named here with the reason why it is not. The folder is a user's
own: it has the environment ``.venv``, a copy of the examples, and files with common names that end whoever imports them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import run_folder
from tests.daemon_process import ROOT, DaemonProcess
from tests.installation import Installation, client_made, made, needs_compiler, neighbours, ran

README, MODELS, CLIENT = ROOT / "README.md", ROOT / "docs" / "models.md", ROOT / "docs" / "client.md"
PAGES = (README, MODELS, CLIENT)
#: A line of each block that nobody can run here -> why.
NOT_RUN = {
    "supervisor: models, regions, processes": "a drawing",
    "make serve      #": "sets up a checkout; tests/examples has the example models",
    "curl localhost:8000/v2/models/digits": "asks the daemon of a checkout; tests/examples/test_clients.py does",
    "    config.pbtxt           optional": "shows a folder",
    "  config.pbtxt                 optional": "shows a folder",
    'outputs = {"scores": ("FP32[10]", "FP32[1]")}': "leaves the function's body to the reader",
    'parameters { key: "isolated" value': "is a line of a configuration; tests/protocol/test_isolated.py has it",
    "program = torch.export.export(": "needs PyTorch; tests/examples/test_frameworks.py has it where it is installed",
    "pip install tensord-client ": "asks an index; tests/client/test_package.py installs it",
    'output { name: "y" data_type: TYPE_FP32 dims: 3 }': "is of the program before it",
}

pytestmark = needs_compiler


class Block(NamedTuple):
    """A code block of a page."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fences = re.finditer(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Block(page, text.count("\n", 0, fence.start()) + 1, fence[1]) for fence in fences]


def block(page: Path, part: str) -> str:
    """Returns the one block of a page that contains ``part``."""
    (found,) = (each.text for each in blocks(page) if part in each.text)
    return found


#: A line of each that is run, by what runs it below.
SERVED = ('return apply, {"factor": 2.0}', ".venv/bin/tensord serve --model-repository models")
EXPORTED = ".venv/bin/tensord export examples/models/digits exported/digits"
FACTORY = 'params = {"factor": np.float32(2)}'
LAID_OUT = 'mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))'
BY_HAND = "from jax import export"
TRYING = 'with tensord.testing.load("models/digits") as model:'
BESIDE = "import labels  # digits/1/labels.py or digits/labels.py"
ASKED = '"temperature": ("FP32", 0.7),'
DRAWN = 'keys = tensord.models.keys(request["seed"])'
RAGGED = 'batch_inputs = {"rows": ("SEGMENT_IDS", "INT32", "x")}'
OPTIONAL = '{ name: "bias" data_type: TYPE_FP32 dims: [ 4 ] optional: true }'
#: Of the README, and of the client's page.
CALLED, ASKED_OF, AWAITED = (
    'print(digits({"image": images})',
    'logits = digits({"image": images})',
    "await asyncio.gather(",
)
RUN = (*SERVED, CALLED, ASKED_OF, AWAITED, EXPORTED, FACTORY, LAID_OUT, BY_HAND, TRYING)
RUN = (*RUN, BESIDE, ASKED, DRAWN, RAGGED, OPTIONAL)


class User:
    """A folder with an installation, whose commands a user runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installation = Installation(folder / ".venv")
        self.installation.install(made()[1])
        neighbours(folder)
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TENSORD_CONFIG")}
        self.environment = kept | {
            "JAX_PLATFORMS": "cpu",
            "TENSORD_WORKERS_DEVICE": "cpu",
            "TENSORD_EXECUTABLES_CACHE_DIRECTORY": run_folder.programs(),
        }

    def shell(self, command: str) -> str:
        """Runs a command as it is written in a document."""
        return ran("bash", "-ec", command, cwd=self.folder, environment=self.environment)

    def script(self, source: str, **environment: str) -> str:
        """Runs a Python program in the folder, so that it finds the modules there first; returns its output."""
        (self.folder / "script.py").write_text(source)
        python = self.installation.python
        return ran(python, "script.py", cwd=self.folder, environment=self.environment | environment)

    def model(self, name: str, source: str, **modules: str) -> Path:
        """Writes ``models/NAME/1`` with a model.py and other modules, by their names."""
        folder = self.folder / "models" / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(source)
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        return folder


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(tmp_path_factory.mktemp("user"))


def test_each_block_is_run_or_has_a_reason() -> None:
    for each in (each for page in PAGES for each in blocks(page)):
        found = [part for part in (*RUN, *NOT_RUN) if part in each.text]
        assert len(found) == 1, f"{each}: {found}; run it in this file, or say there why not:\n{each.text}"
    every = "".join(each.text for page in PAGES for each in blocks(page))
    assert not [part for part in (*RUN, *NOT_RUN) if part not in every]


def test_the_client(user: User, tmp_path: Path) -> None:
    """The client's wheel by itself gives the same results from a daemon and, without a server, from the models' folder."""
    user.installation.install(client_made()[1])
    shutil.copytree(ROOT / "examples/models/digits", tmp_path / "models" / "digits")
    images = "import numpy as np\nimages = np.random.default_rng(0).random((3, 64), np.float32)\n"
    with DaemonProcess(tmp_path, [tmp_path / "models"]) as daemon:
        for address in (f"127.0.0.1:{daemon.port}", str(tmp_path / "models")):
            texts = (
                block(README, CALLED),
                block(CLIENT, ASKED_OF) + "print(logits.argmax(axis=1))\n",
                block(CLIENT, AWAITED),
            )
            # One process for all three, as each imports JAX and loads the model; none has a name of another one's.
            source = images + "".join(f"exec({text!r}, {{'images': images}})\n" for text in texts)
            called, asked, awaited = user.script(source, TENSORD=address).splitlines()
            assert re.fullmatch(r"\[\d \d \d\]", called)
            assert called == asked == awaited.replace(",", "")


def test_the_readmes_own_model(user: User) -> None:
    """Written down, served and asked; the same without a server, in a script."""
    (name,) = re.findall(r"`(models/double/.*?)`", README.read_text())
    file = user.folder / name
    file.parent.mkdir(parents=True)
    file.write_text(block(README, SERVED[0]))
    command = block(README, SERVED[1]).strip()
    daemon = DaemonProcess(user.folder, [])
    # Ports of the tests' own come behind what the page says.
    daemon.program = ["bash", "-c", f'shift; exec {command} "$@"', "bash"]
    daemon.cwd, daemon.environment = user.folder, daemon.environment | {"JAX_PLATFORMS": "cpu"}
    with daemon:
        daemon.wait_ready()
        status, answer = daemon.infer(
            "double", [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
        )
        assert (status, answer["outputs"][0]["data"]) == (200, [2, 4, 6, 8])
    (expression,) = re.findall(r"`(tensord\.testing\.load\(.*?\}\))`", README.read_text())
    script = f"import tensord.testing\nif __name__ == '__main__':\n    print({expression}['y'].tolist())\n"
    assert json.loads(user.script(script)) == [[2, 4, 6, 8]]


def test_init_check_and_export(user: User) -> None:
    (command,) = re.findall(r"`(\.venv/bin/tensord init .*?)`", README.read_text())
    user.shell(command.replace("models/mine", "begun/mine"))
    user.shell(".venv/bin/tensord check --model-repository begun")
    user.shell(block(README, EXPORTED))
    assert (user.folder / "exported" / "digits" / "1").is_dir()
    script = """
import json
import numpy as np
import tensord.testing

if __name__ == "__main__":
    images = np.random.default_rng(1).random((3, 64), np.float32)
    found = []
    for folder in ("examples/models/digits", "exported/digits"):
        with tensord.testing.load(folder) as model:
            found.append(model({"image": images})["logits"])
    print(json.dumps(bool(np.allclose(*found, rtol=1e-4, atol=1e-5))))
"""
    assert json.loads(user.script(script)) is True


def test_models_to_copy(user: User) -> None:
    """The page's models are whole, or become so by what the page says beside them."""
    user.model("factory", block(MODELS, FACTORY))
    user.model("ragged_mean", block(MODELS, RAGGED))
    declared = 'inputs = {"x": "FP32[2]"}\noutputs = {"y": "FP32[2]"}\nmax_batch_size = 8\n'
    user.model("asked", declared + block(MODELS, ASKED))
    user.model("drawn", block(MODELS, DRAWN))
    layers = "def mlp(x):\n    return 2 * x\n"
    source = "def create(path, config, device):\n    assert labels.NAMES == ('a', 'b')\n"
    source += '    return (lambda params, inputs: {"y": mlp(inputs["x"])}), {}\n'
    user.model("beside", declared + block(MODELS, BESIDE) + source, labels="NAMES = 'a', 'b'\n", layers=layers)
    (optional,) = re.findall(r"""`(inputs\["x"\] \+ .*? else inputs\["x"\])`""", MODELS.read_text())
    source = 'outputs = {"y": "FP32[4]"}\nmax_batch_size = 8\n\ndef create(path, config, device):\n'
    source += f'    return (lambda params, inputs: {{"y": {optional}}}), {{}}\n'
    (user.model("biased", source).parent / "config.pbtxt").write_text(block(MODELS, OPTIONAL))
    script = """
import json
import tensord.testing

if __name__ == "__main__":
    found = {}
    with tensord.testing.load("models/biased") as model:
        x = {"x": [[1, 2, 3, 4]]}
        found["biased"] = [model(given)["y"].tolist() for given in (x, {**x, "bias": [[1, 1, 1, 1]]})]
    for name, given, more in (
        ("factory", [[1, 2, 3, 4]], {}),
        ("ragged_mean", [[1, 2, 6]], {}),
        ("asked", [[7, 14]], {"parameters": {"seed": 1, "priority": 0}}),
        ("drawn", [[0, 0, 0, 0], [1, 1, 1, 1]], {"parameters": {"seed": 7}}),
        ("beside", [[1, 2]], {}),
    ):
        with tensord.testing.load(f"models/{name}") as model:
            found[name] = {key: array.tolist() for key, array in model({"x": given}, **more).items()}
    print(json.dumps(found))
"""
    found = json.loads(user.script(script))
    assert found["biased"] == [[[1, 2, 3, 4]], [[2, 3, 4, 5]]]
    assert found["factory"] == {"y": [[2, 4, 6, 8]]}
    assert found["ragged_mean"] == {"mean": [[3]], "centred": [[-2, -1, 3]]}
    assert found["asked"]["y"][0] == pytest.approx([10, 20], rel=1e-6)
    assert len(set(found["drawn"]["y"][0])) == 4
    assert found["drawn"]["y"][1] == pytest.approx([1 + x for x in found["drawn"]["y"][0]], abs=1e-5)
    assert found["beside"] == {"y": [[2, 4]]}


def test_a_program_by_hand(user: User) -> None:
    """``models/encoder`` as the page writes it, and by ``tensord.models.export``."""
    before = """
import json
from pathlib import Path

import jax
import numpy as np
import tensord.models
import tensord.testing


def f(params, inputs):
    return {"y": inputs["x"] * params["w"]}


params_like = {"w": jax.ShapeDtypeStruct((4,), np.float32)}
Path("models/encoder/1").mkdir(parents=True)
np.savez("models/encoder/1/params.npz", w=np.full(4, 3, np.float32))
if __name__ == "__main__":
"""
    after = """
found = []
(call,) = ("CALL",)
folder, function, parameters = "models/exported", f, {"w": np.full(4, 3, np.float32)}
exec(call)
for name in ("encoder", "exported"):
    with tensord.testing.load(f"models/{name}") as model:
        found.append(model({"x": [[1, 2, 3, 4]]})["y"].tolist())
print(json.dumps(found))
"""
    (call,) = re.findall(r"`(tensord\.models\.export\(.*?\))`", " ".join(MODELS.read_text().split()))
    body = block(MODELS, BY_HAND) + after.replace('"CALL"', repr(call))
    script = before + "".join(f"    {line}\n" for line in body.splitlines())
    assert json.loads(user.script(script)) == [[[3, 6, 9, 12]]] * 2


def test_trying_a_model(user: User) -> None:
    shutil.copytree(user.folder / "examples" / "models" / "digits", user.folder / "models" / "digits")
    source = "".join(f"    {line}\n" for line in block(MODELS, TRYING).splitlines())
    script = "import numpy as np\n\nif __name__ == '__main__':\n    images = np.zeros((2, 64), np.float32)\n" + source
    printed = user.script(script + "    print(logits.shape)\n")
    (said,) = re.findall(r"print\(model\.inputs\)  # (.*)", source)
    assert printed.splitlines() == [said, "(2, 10)"]


def test_a_model_over_several_devices(user: User) -> None:
    folder = user.model("laid_out", block(MODELS, LAID_OUT))
    script = f"""
import json
import numpy as np
import tensord.testing
from safetensors.numpy import save_file

if __name__ == "__main__":
    save_file({{"w": np.eye(1024, dtype=np.float32)}}, {str(folder / "w.safetensors")!r})
    with tensord.testing.load("models/laid_out") as model:
        print(json.dumps(model({{"x": np.arange(1024, dtype=np.float32)[None]}})["y"][0].tolist()))
"""
    # What a worker with so many devices does by itself, a process that has JAX says before.
    assert json.loads(user.script(script, JAX_NUM_CPU_DEVICES="4")) == [float(number) for number in range(1024)]

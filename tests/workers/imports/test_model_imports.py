"""A model's imports are its own: served by a real daemon, from a repository named by a relative path."""

from __future__ import annotations

import builtins
import json
import os
import py_compile
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from tensord.workers.imports.model_imports import BytecodeLoader, SourceLoader
from tests.daemon_process import ROOT, DaemonOf, DaemonProcess, wait_until
from tests.repositories import applying, fields, write_model

#: Each statement of ``checks`` leaves what it found in ``found``. The helper modules say whose they are.
PYTHON = """
    import json, threading, asyncio
    import numpy as np
    import triton_python_backend_utils as pb_utils

    def collect(found):
{checks}

    class TritonPythonModel:
        def initialize(self, args):
            assert args["model_repository"].startswith("/")
            self.at_load = dict()
            collect(self.at_load)

        def execute(self, requests):
            found, in_thread, in_loop = dict(), dict(), dict()
            collect(found)
            thread = threading.Thread(target=collect, args=(in_thread,))
            thread.start()
            thread.join()

            async def coroutine():
                await asyncio.sleep(0)
                collect(in_loop)

            asyncio.run(coroutine())
            text = json.dumps([self.at_load, found, in_thread, in_loop, list(generated())])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text.encode()], np.object_))])]

    def generated():
        import helper
        yield helper.OWNER
        from . import helper as again
        yield again.OWNER
"""
CHECKS = """
    import helper
    found["absolute"] = helper.OWNER
    from helper import OWNER as name
    found["from"] = name
    from . import helper as relative
    found["relative"] = relative.OWNER
    found["same"] = relative is helper
    from .package.inner import value
    found["package"] = value()
    import package.inner as inner
    found["package again"] = inner.value()
    import package.inner
    found["package once more"] = package.inner.value()
    from package import inner as by_name
    found["submodule"] = by_name is inner
    import shared
    found["model folder"] = shared.OWNER
    import namespace.part
    found["namespace"] = namespace.part.OWNER
    from namespace import other
    found["namespace of both folders"] = other.OWNER
    import importlib
    found["import_module"] = importlib.import_module("helper") is helper
    found["import_module relative"] = importlib.import_module(".helper", __package__) is helper
    found["__import__"] = __import__("helper") is helper
    import config, shm
    found["common names"] = config.OWNER + shm.OWNER
    from config import OWNER as of_config
    import tokenize as own_tokenize
    found["as in the standard library"] = own_tokenize.OWNER
    import inspect, linecache
    found["the standard library is whole"] = bool(inspect.getsource(helper.Point))
    missing = []
    for absent in ("daemon", "workers", "nowhere", "other_helper", "helper.nowhere"):
        try:
            __import__(absent)
        except ModuleNotFoundError as error:
            missing.append(str(error))
        try:
            importlib.import_module(absent)
        except ModuleNotFoundError as error:
            missing.append(error.name)
    found["missing"] = missing
    import pickle, copy, typing, dataclasses, sys
    point = pickle.loads(pickle.dumps(helper.Point(2)))
    found["pickle"] = [type(point) is helper.Point, point.x]
    found["pickle of a plain name"] = type(pickle.loads(helper.PLAIN)) is helper.Point
    found["pickle in Python"] = type(pickle._loads(helper.PLAIN)) is helper.Point
    found["sys.modules"] = sys.modules[helper.Point.__module__] is helper
    found["get_type_hints"] = typing.get_type_hints(helper.Point)["next"] == typing.Optional[helper.Point]
    found["dataclass"] = dataclasses.asdict(helper.Point(1))["owner"]
    found["exec"] = eval("__import__('helper').OWNER") + eval("(lambda: __import__('helper').OWNER)()", {})
    import jax
    found["a folder named as an installed package"] = hasattr(jax, "jit")
"""
HELPER = """
    from __future__ import annotations
    import dataclasses, typing

    OWNER = "{owner}"
    #: As an environment wrote it where this file was imported as ``helper``.
    PLAIN = b"\\x80\\x04chelper\\nPoint\\n)\\x81."

    @dataclasses.dataclass
    class Point:
        x: int = 1
        next: typing.Optional[Point] = None
        owner: str = OWNER
"""


def write_owner(repository: Path, model: str, owner: str, version: int = 1) -> None:
    checks = "\n".join(" " * 8 + line for line in dedent(CHECKS).strip().splitlines())
    folder = write_model(
        repository,
        model,
        PYTHON.format(checks=checks),
        fields("x INT32 1", "y STRING 1"),
        version,
    )
    files = {
        folder / "helper.py": dedent(HELPER.format(owner=owner)),
        folder / "package" / "__init__.py": "from . import inner\n",
        folder
        / "package"
        / "inner.py": "from ..helper import OWNER\ndef value():\n    import helper\n    return helper.OWNER\n",
        folder / "namespace" / "part.py": f"OWNER = {owner!r}\n",
        folder.parent / "namespace" / "other.py": f"OWNER = {owner!r}\n",
        folder.parent / "shared.py": f"OWNER = {owner!r}\n",
        folder / "config.py": f"OWNER = {owner!r}\n",
        folder / "shm.py": f"OWNER = {owner!r}\n",
        folder / "tokenize.py": f"OWNER = {owner!r}\n",
        folder / "jax" / "weights.txt": "no module\n",
        folder / f"{model}_only.py": "",
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def expected(owner: str) -> list[Any]:
    missing: list[str] = []
    for name in ("daemon", "workers", "nowhere", "other_helper", "helper.nowhere"):
        why = "; 'helper' is not a package" if name.startswith("helper") else ""
        missing += [f"No module named {name!r}{why}", name]
    once = {
        "absolute": owner,
        "from": owner,
        "relative": owner,
        "same": True,
        "package": owner,
        "package again": owner,
        "package once more": owner,
        "submodule": True,
        "model folder": owner,
        "namespace": owner,
        "namespace of both folders": owner,
        "import_module": True,
        "import_module relative": True,
        "__import__": True,
        "common names": owner * 2,
        "as in the standard library": owner,
        "the standard library is whole": True,
        "missing": missing,
        "pickle": [True, 2],
        "pickle of a plain name": True,
        "pickle in Python": True,
        "sys.modules": True,
        "get_type_hints": True,
        "dataclass": owner,
        "exec": owner * 2,
        "a folder named as an installed package": True,
    }
    return [once, once, once, once, [owner, owner]]


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("imports")
    repository = folder / "models"
    write_owner(repository, "a", "a")
    write_owner(repository, "b", "b")
    relative = Path(os.path.relpath(repository, ROOT))
    return daemon_of(relative, {"repository": {"control_mode": "explicit", "load": ["*"]}}, folder=folder)


def ask(daemon: DaemonProcess, model: str) -> Any:
    status, answer = daemon.infer(model, [{"name": "x", "datatype": "INT32", "shape": [1], "data": [0]}])
    assert status == 200, answer
    return json.loads(answer["outputs"][0]["data"][0])


def load(daemon: DaemonProcess, model: str) -> None:
    assert daemon.request("POST", f"/v2/repository/models/{model}/load", b"{}") == (200, b"")


def test_two_models_with_the_same_names(daemon: DaemonProcess) -> None:
    for model in ("a", "b", "a"):
        for found, wanted in zip(ask(daemon, model), expected(model), strict=True):
            assert found == wanted


def test_an_edited_helper_and_a_new_version(daemon: DaemonProcess) -> None:
    repository = daemon.folder / "models"
    write_owner(repository, "edited", "a")
    load(daemon, "edited")
    assert ask(daemon, "edited") == expected("a")
    for version, owner in ((1, "c"), (2, "d"), (2, "e")):
        write_owner(repository, "edited", owner, version)
        load(daemon, "edited")
        assert ask(daemon, "edited") == expected(owner)


JAX = """
    inputs = {{"x": "INT32[n]"}}
    outputs = {{"y": "INT32[n]"}}
    {kind}

    def create(path, config, device):
        def apply(params, inputs):
            import config
            from .helper import scaled
            return {{"y": scaled(inputs["x"]) + config.OFFSET}}
        return apply, None
"""


@pytest.mark.parametrize("kind", ["buckets = {'n': (1, 2)}", "pass", "host = True"])
def test_imports_inside_apply(daemon: DaemonProcess, kind: str) -> None:
    """Whenever it is traced: at load, or when a request has a new shape."""
    for factor in (2, 3):
        folder = write_model(daemon.folder / "models", "traced", JAX.format(kind=kind))
        (folder / "helper.py").write_text(f"def scaled(x):\n    return x * {factor}\n")
        (folder / "config.py").write_text("OFFSET = 1\n")
        load(daemon, "traced")
        for values in ([5], [5, 6, 7]):
            asked = {"name": "x", "datatype": "INT32", "shape": [len(values)], "data": values}
            status, answer = daemon.infer("traced", [asked])
            assert (status, answer["outputs"][0]["data"]) == (200, [value * factor + 1 for value in values])


WATCH = applying(
    """
    gc.collect()
    names = [value.__name__ for value in gc.get_objects() if type(value) is types.ModuleType]
    return {"y": np.array([sum("leaver" in name for name in names)], np.int32)}
    """,
    "x INT32[1]",
    "y INT32[1]",
    more="import gc, types\nhost = True",
)
LEAVER = """
    import helper, pickle
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            pickle.loads(b"\\x80\\x04chelper\\nPoint\\n)\\x81.")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""
TENSORS = "".join(
    f"{kind} [ {{ name: '{name}' data_type: TYPE_INT32 dims: [ -1 ] }} ]\n"
    for kind, name in (("input", "x"), ("output", "y"))
)


@pytest.mark.parametrize("source", [JAX.format(kind="pass"), JAX.format(kind="host = True"), LEAVER])
def test_an_unloaded_model_lets_its_modules_go(daemon: DaemonProcess, source: str) -> None:
    repository = daemon.folder / "models"
    write_model(repository, "watch", WATCH)
    load(daemon, "watch")
    folder = write_model(repository, "leaver", source, TENSORS)
    (folder / "helper.py").write_text("class Point: pass\ndef scaled(x):\n    return x\n")
    (folder / "config.py").write_text("OFFSET = 0\n")
    one = [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]
    for _ in range(2):
        load(daemon, "leaver")
        assert daemon.infer("leaver", one)[0] == 200
        assert daemon.infer("watch", one)[1]["outputs"][0]["data"][0] >= 3
        assert daemon.request("POST", "/v2/repository/models/leaver/unload", b"{}")[0] == 200
        wait_until(lambda: daemon.infer("watch", one)[1]["outputs"][0]["data"] == [0], "the modules to go", daemon)


STARTER = """
    import concurrent.futures, json, multiprocessing, subprocess, tempfile
    import joblib
    import numpy as np
    import triton_python_backend_utils as pb_utils
    import helper

    def double(x):
        return 2 * x

    class TritonPythonModel:
        def execute(self, requests):
            found = []
            for method in ("spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                    found += [pool.submit(helper.triple, 2).result(), pool.submit(double, 2).result()]
                    found.append(pool.submit(helper.Point).result().owner())
                with context.Pool(1) as pool:
                    found += pool.map(helper.triple, [3])
                process = context.Process(target=helper.wait)
                process.start()
                process.terminate()
                process.join()
                found.append(process.exitcode)
            # Its own folder lies in /dev/shm, and stays there where a worker is ended without Python's exit.
            with tempfile.TemporaryDirectory() as scratch:
                tripled = joblib.Parallel(2, temp_folder=scratch)(joblib.delayed(helper.triple)(number) for number in (4, 5))
                joblib.externals.loky.get_reusable_executor().shutdown(wait=True)
            found += tripled
            process = subprocess.Popen(["sleep", "inf"])
            process.terminate()
            found.append(process.wait())
            text = json.dumps(found)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text.encode()], np.object_))])]
"""
STARTED = """
    import threading

    def triple(x):
        import factor
        return x * factor.FACTOR

    def wait():
        threading.Event().wait()

    class Point:
        def owner(self):
            from .factor import FACTOR
            return FACTOR
"""


def test_processes_that_a_model_starts(daemon: DaemonProcess) -> None:
    repository = daemon.folder / "models"
    tensors = TENSORS.replace("'y' data_type: TYPE_INT32", "'y' data_type: TYPE_STRING")
    folder = write_model(repository, "starter", STARTER, tensors)
    (folder / "helper.py").write_text(dedent(STARTED))
    (folder / "factor.py").write_text("FACTOR = 3\n")
    load(daemon, "starter")
    assert ask(daemon, "starter") == [6, 4, 3, 9, -15] * 2 + [12, 15, -15]


OWN: dict[str, Any] = {**vars(builtins), "answer": 42}


def loaded(loader: SourceLoader | BytecodeLoader) -> ModuleType:
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_source_is_compiled_anew_whatever_lies_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "helper.py"
    path.write_text("FOUND = answer + 1")
    py_compile.compile(str(path))
    status = path.stat()
    path.write_text("FOUND = answer + 2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = sorted(tmp_path.rglob("*.pyc"))
    module = loaded(SourceLoader(OWN, "x.helper", str(path)))
    assert (module.FOUND, module.__name__, module.__file__) == (44, "x.helper", str(path))
    assert sorted(tmp_path.rglob("*.pyc")) == before


def test_compiled_code_without_its_source(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("FOUND = answer")
    compiled = py_compile.compile(str(tmp_path / "helper.py"), str(tmp_path / "helper.pyc"))
    assert compiled is not None
    assert loaded(BytecodeLoader(OWN, "x.helper", compiled)).FOUND == 42

"""The import system is set up once in a process; a library that asks for a plain name gets the calling model's module."""

from __future__ import annotations

import builtins
import importlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensord.workers.imports import import_system
from tensord.workers.imports.import_system import LoadedModels
from tensord.workers.imports.model_imports import ModelImports, OwnModules, PlainName, PlainNames

NAME = "a_module_of_models"
MODEL = """
def call(library):
    return library()
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Callable[[str, str], ModelImports]]:
    """Makes a model whose module says whose it is."""
    import_system.prepare()
    made: list[ModelImports] = []

    def make(name: str, source: str) -> ModelImports:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.py").write_text(MODEL)
        if source:
            (folder / f"{NAME}.py").write_text(source)
        made.append(ModelImports.of_version(name, [folder]))
        return made[-1]

    yield make
    for each in made:
        each.forget()
    for found in [found for found in sys.modules if found.partition(".")[0] == NAME]:
        del sys.modules[found]


def call(imports: ModelImports, library: Callable[[], Any]) -> Any:
    """Calls a library's function from the model's code."""
    module = sys.modules.get(f"{imports.package}.model") or imports.run(Path(imports.folders[0], "model.py"))
    return module.call(library)


def test_each_model_finds_its_own(model: Callable[[str, str], ModelImports]) -> None:
    one, two, none = model("one", "OWNER = 1\nclass Net: pass"), model("two", "OWNER = 2"), model("none", "")
    owner = lambda: importlib.import_module(NAME).OWNER  # noqa: E731
    with pytest.raises(ModuleNotFoundError):
        owner()
    with pytest.raises(ModuleNotFoundError):
        call(none, owner)
    assert [call(one, owner), call(two, owner), call(one, owner)] == [1, 2, 1]
    net = call(one, lambda: pickle.loads(f"c{NAME}\nNet\n)\x81.".encode("latin-1")))
    assert type(net).__module__ == f"{one.package}.{NAME}"
    with pytest.raises(AttributeError, match="no model of that module asks"):
        call(none, owner)


def test_nobody_asks(model: Callable[[str, str], ModelImports]) -> None:
    """The name is known, but no model's code is on the stack, as in a thread of a library."""
    one = model("one", "OWNER = 1")
    assert call(one, lambda: importlib.import_module(NAME).OWNER) == 1
    found: list[object] = []

    def look() -> None:
        try:
            found.append(importlib.import_module(NAME).OWNER)
        except AttributeError as error:
            found.append(str(error))

    thread = threading.Thread(target=look)
    call(one, thread.start)
    thread.join()
    assert found == [f"module {NAME!r} is a model's, and no model of that module asks"]


def test_the_environment_comes_first(model: Callable[[str, str], ModelImports]) -> None:
    one = model("one", "OWNER = 1")
    assert call(one, lambda: importlib.import_module("json")).__name__ == "json"
    assert not [name for name, module in sys.modules.items() if type(module) is PlainName]


def test_it_is_told_once() -> None:
    import_system.prepare()
    before = importlib.import_module, list(sys.meta_path)
    import_system.prepare()
    assert (importlib.import_module, list(sys.meta_path)) == before
    assert [sys.meta_path.count(OwnModules), sys.meta_path.count(PlainNames)] == [1, 1]


def test_a_new_process_learns_of_the_models_that_are_loaded(tmp_path: Path) -> None:
    import_system.prepare()
    (tmp_path / "helper.py").write_text("OWNER = 'm'")
    imports = ModelImports.of_version("m", [tmp_path])
    told = pickle.dumps(LoadedModels())
    imports.forget()
    assert ModelImports.of(imports.package) is None
    assert isinstance(pickle.loads(told), LoadedModels)
    adopted = ModelImports.of(imports.package)
    assert adopted is not None
    try:
        assert importlib.import_module(f"{imports.package}.helper").OWNER == "m"
    finally:
        adopted.forget()
    assert imports.package.encode() not in pickle.dumps(LoadedModels())


def test_two_models_import_a_name_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without files of its own is looked for in the environment first; another model finds it there meanwhile."""
    import_system.prepare()
    models = []
    for owner in "ab":
        (tmp_path / owner / "a_folder_of_models").mkdir(parents=True)
        (tmp_path / owner / "a_folder_of_models/part.py").write_text(f"OWNER = {owner!r}")
        models.append(ModelImports.of_version(owner, [tmp_path / owner]))
    code = compile("import a_folder_of_models.part", "model.py", "exec")
    first, second = ({"__builtins__": model._builtins} for model in models)
    usual = builtins.__import__

    def slow(name: str, *arguments: Any, **more: Any) -> ModuleType:
        if name == "a_folder_of_models.part":
            monkeypatch.undo()
            exec(code, first)
        return usual(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", slow)
    try:
        exec(code, second)
        for owner, found in (("a", first), ("b", second)):
            exec("found = a_folder_of_models.part.OWNER", found)
            assert found["found"] == owner
    finally:
        for model in models:
            model.forget()
        for name in ("a_folder_of_models", "a_folder_of_models.part"):
            sys.modules.pop(name, None)

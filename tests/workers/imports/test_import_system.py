"""Tests how the import system is set up once in a process; test_model_imports tests what it does for models."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

from tensord.workers.imports import import_system
from tensord.workers.imports.import_system import LoadedModels
from tensord.workers.imports.model_imports import ModelImports, OwnModules, PlainNames


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

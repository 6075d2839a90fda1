"""Files of a model become modules that have its builtins; nothing compiled is trusted or left behind."""

from __future__ import annotations

import builtins
import os
import py_compile
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from tensord.workers.imports.own_code import BytecodeLoader, SourceLoader

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

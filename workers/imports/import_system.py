"""Changes Python's import system, once in a process, so that the code of each model imports the model's own modules.

sys.meta_path              gets the import hook ``OwnModules`` as its first item, and ``PlainNames`` as its last item
importlib.import_module    finds the own modules of a model when code of this model calls it
multiprocessing            a child process of the worker can import the modules of all loaded models
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import sys
from collections.abc import Callable
from types import ModuleType

from tensord.workers.imports.model_imports import ModelImports, OwnModules, PlainNames, importer_of
from tensord.workers.python_backend import interface


def prepare() -> None:
    """Patches Python's import system so that each model's code imports its own modules. Idempotent.

    The code can also import ``triton_python_backend_utils``.
    """
    sys.modules["triton_python_backend_utils"] = interface
    sys.modules["c_python_backend_utils"] = interface
    if OwnModules in sys.meta_path:
        return
    sys.meta_path.insert(0, OwnModules)
    sys.meta_path.append(PlainNames)
    importlib.import_module = _import_module_for(importlib.import_module)  # type: ignore[assignment]
    # Every process that is started inherits this, and unpickles it before what it is to run.
    multiprocessing.current_process()._config["tensord_models"] = LoadedModels()  # type: ignore[attr-defined]


def _import_module_for(usual: Callable[[str, str | None], ModuleType]) -> Callable[[str, str | None], ModuleType]:
    @functools.wraps(usual)
    def import_module(name: str, package: str | None = None) -> ModuleType:
        model = importer_of(sys._getframe(1).f_builtins)
        # A relative name begins with the full name of a package, which is unique.
        if model is None or name.startswith("."):
            return usual(name, package)
        # As an import statement of the model's code would.
        return model.import_(name, fromlist=("__name__",))

    return import_module


class LoadedModels:
    """Makes the modules of loaded models importable in a child process, which unpickles this object at its start."""

    # Pickled in the worker; unpickling it in the new process makes the models' packages there.
    def __reduce__(self) -> tuple[Callable[..., LoadedModels], tuple[tuple[tuple[str, tuple[str, ...]], ...]]]:
        loaded = [imports for imports in map(ModelImports.of, list(sys.modules)) if imports is not None]
        return _adopt, (tuple((imports.package, imports.folders) for imports in loaded),)


def _adopt(packages: tuple[tuple[str, tuple[str, ...]], ...]) -> LoadedModels:
    prepare()
    for package, folders in packages:
        ModelImports(package, folders)
    return LoadedModels()

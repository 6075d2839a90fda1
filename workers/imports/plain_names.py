"""Makes a model's modules importable by their short names, for libraries that import on behalf of the model that called them.

A pickle or a configuration says "helper.Net", and it is the library that imports ``helper``, whose code is no model's. Where the
environment has no such module, one stands in ``sys.modules`` that has nothing of its own: each time it is asked for something it
answers with the module of the model that asks, which is the next one up the stack. One name serves any number of models.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

#: Attributes that the import system asks a module for; any other is looked up in the asking model's module.
_OF_ITS_OWN = frozenset({"__class__", "__loader__", "__name__", "__package__", "__path__", "__spec__"})


class Importer(abc.ABC):
    """A model's imports, recognised by the builtins of its code."""

    @abc.abstractmethod
    def own_module(self, name: str) -> ModuleType | None:
        """Returns the model's module of a short name, or None."""

    @abc.abstractmethod
    def module(self, name: str) -> ModuleType:
        """Imports a module as ``importlib.import_module`` does where the model's code calls it."""


class PlainName(ModuleType):
    """Stands in ``sys.modules`` for all models' modules of a short name."""

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_ITS_OWN:
            return super().__getattribute__(name)
        asking = asking_model()
        module = None if asking is None else asking.own_module(self.__name__)
        if module is None:
            raise AttributeError(f"module {self.__name__!r} is a model's, and no model of that module asks")
        return getattr(module, name)


class PlainNames:
    """Finds and loads modules that stand for those of models; the last on ``sys.meta_path``, so the environment comes first."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        if package and not isinstance(sys.modules.get(package), PlainName):
            return None
        asking = asking_model()
        if asking is None or asking.own_module(name) is None:
            return None
        return ModuleSpec(name, PlainNames, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> PlainName:
        return PlainName(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Does nothing: such a module has no content of its own."""


def asking_model() -> Importer | None:
    """Returns the model whose code is nearest on the stack, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        asking = importer_of(frame.f_builtins)
        if asking is not None:
            return asking
        frame = frame.f_back  # type: ignore[assignment]
    return None


def importer_of(builtins: dict[str, Any]) -> Importer | None:
    """Returns the model whose code has these builtins, or None."""
    function = builtins.get("__import__")
    if type(function) is MethodType and isinstance(function.__self__, Importer):
        return function.__self__
    return None

"""Lets libraries import models' modules by their short names, on behalf of the model whose code called the library.

If a pickle or a configuration names "helper.Net", a library imports ``helper``, and the library's code is no model's. If the
environment has no such module a placeholder is put into ``sys.modules``: each access to an attribute of it goes to the module of
that name of the model whose code is nearest on the stack. So one name serves any number of models.
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
    """Imports modules for the code of one model, whose builtins refer to this object."""

    @abc.abstractmethod
    def own_module(self, name: str) -> ModuleType | None:
        """Imports the model's own module with this short name and returns it, or None if the model has no such module."""

    @abc.abstractmethod
    def module(self, name: str) -> ModuleType:
        """Imports a module by name as the model's code would: its own module, or else the environment's."""


class PlainName(ModuleType):
    """A placeholder in ``sys.modules`` for all models' modules with one short name.

    Its attributes are those of the module of the model whose code asks.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_ITS_OWN:
            return super().__getattribute__(name)
        asking = asking_model()
        module = None if asking is None else asking.own_module(self.__name__)
        if module is None:
            raise AttributeError(f"module {self.__name__!r} is a model's, and no model of that module asks")
        return getattr(module, name)


class PlainNames:
    """Finds and makes placeholders (``PlainName``); last on ``sys.meta_path``, so that the environment's modules come first."""

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
        """Does nothing: a placeholder module has no content of its own."""


def asking_model() -> Importer | None:
    """Returns the ``Importer`` of the model whose code is nearest on the call stack; None: no model's code is on it."""
    frame = sys._getframe(1)
    while frame is not None:
        asking = importer_of(frame.f_builtins)
        if asking is not None:
            return asking
        frame = frame.f_back  # type: ignore[assignment]
    return None


def importer_of(builtins: dict[str, Any]) -> Importer | None:
    """Returns the ``Importer`` of the model whose code has these builtins, or None if they are no model's."""
    function = builtins.get("__import__")
    if type(function) is MethodType and isinstance(function.__self__, Importer):
        return function.__self__
    return None

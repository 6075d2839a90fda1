"""Loaders for the files of a model: modules get the builtins of their model, and sources are always compiled anew.

Compiled copies are trusted by time stamp and size only, and would be written into a folder that is not ours: there are none.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any


class SourceLoader(SourceFileLoader):
    """Of a .py file."""

    def __init__(self, builtins: dict[str, Any], name: str, path: str) -> None:
        super().__init__(name, path)
        self._builtins = builtins

    def get_code(self, fullname: str) -> CodeType:
        """Raises OSError: it cannot be read.  SyntaxError."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)


class BytecodeLoader(SourcelessFileLoader):
    """Of a .pyc file whose source is not there."""

    def __init__(self, builtins: dict[str, Any], name: str, path: str) -> None:
        super().__init__(name, path)
        self._builtins = builtins

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)

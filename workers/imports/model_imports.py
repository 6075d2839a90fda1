"""Imports modules for a loaded model version's code. The model's own modules come before installed modules of the same name.

A model's modules are in ``sys.modules`` by these names, here for the seventh package in the process and a model ``digits``:

    tensord_model_7_digits            a package for the version's and the model's folder
    tensord_model_7_digits.model      model.py
    tensord_model_7_digits.labels     labels.py beside it; "import labels" and "from . import labels" both find it
    labels                            a placeholder for libraries that import by name, as an unpickler of "labels.Net" does

Import statements in a model's modules call the ``__import__`` in these modules' own builtins. ``sys.path`` is not changed.
No two models share these modules, nor do two versions of a model, or two loads of a version.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import re
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, MethodType, ModuleType
from typing import Any

from tensord.config import model_folder
from tensord.shm.errors import InvalidArgument
from tensord.workers.calls.caller import PORT, EndsLater, ModelPort

_NOT_A_NAME = re.compile(r"\W")
#: Attributes that the import system asks a module for; any other is looked up in the asking model's module.
_OF_ITS_OWN = frozenset({"__class__", "__loader__", "__name__", "__package__", "__path__", "__spec__"})


class SourceLoader(SourceFileLoader):
    """Loads a .py file of a model. The module gets the ``__builtins__`` of that model.

    Compiled copies (.pyc) are neither read nor written.
    """

    def __init__(self, builtins: dict[str, Any], name: str, path: str) -> None:
        super().__init__(name, path)
        self._builtins = builtins

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the source file of the module ``fullname``.

        Raises OSError: the file cannot be read. Raises SyntaxError: the file is not valid Python.
        """
        path = self.get_filename(fullname)
        # Python checks compiled copies by time stamp and size only, and they would lie in the model's folder.
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)


class BytecodeLoader(SourcelessFileLoader):
    """Loads a model's module from a .pyc file without a .py file. Imports in the module find the model's own modules."""

    def __init__(self, builtins: dict[str, Any], name: str, path: str) -> None:
        super().__init__(name, path)
        self._builtins = builtins

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)


class ModelImports:
    """Imports the modules of one loaded version, in a package of their own."""

    #: Numbers in packages' names. None is used twice in a process: remains of an unloaded model must not find another's code.
    _serials = itertools.count(1)

    def __init__(self, package: str, folders: Sequence[Path] | Sequence[str]) -> None:
        """Adds an empty package named ``package`` to ``sys.modules``. Its modules are searched in ``folders``, in this order."""
        self.package = package
        self.folders = tuple(str(folder) for folder in folders)
        self._prefix = f"{package}."
        self._port: ModelPort | None = None
        self._lock = threading.Lock()
        #: First part of an imported name -> whether it is the model's own, once that is known.
        self._is_own: dict[str, bool] = {}
        #: How many still run its code, and whether it is to be removed after that.
        self._holders = 0
        self._forgotten = False
        self._builtins = {**vars(builtins), "__import__": self.import_}
        self._finders: dict[str, FileFinder] = {}
        root = ModuleType(package)
        root.__path__ = list(self.folders)
        root.__package__ = package
        # ``of`` finds this object by it.
        root.__loader__ = self  # type: ignore[assignment]
        root.__spec__ = ModuleSpec(package, self, is_package=True)  # type: ignore[arg-type]
        root.__spec__.submodule_search_locations = list(self.folders)
        sys.modules[package] = root

    @classmethod
    def of_version(cls, model: str, folders: Sequence[Path]) -> ModelImports:
        """Makes a package with a new name for a version of ``model``, whose code lies in ``folders``."""
        return cls(f"tensord_model_{next(cls._serials)}_{_NOT_A_NAME.sub('_', model)}", folders)

    @staticmethod
    def of(package: str) -> ModelImports | None:
        """Returns the ``ModelImports`` of a package; None: the package is not loaded, or does not belong to a model."""
        module = sys.modules.get(package)
        imports = vars(module).get("__loader__") if type(module) is ModuleType else None
        return imports if isinstance(imports, ModelImports) else None

    @property
    def port(self) -> ModelPort:
        assert self._port is not None
        return self._port

    @property
    def processes(self) -> EndsLater | None:
        """Returns the object that ends all processes started by the model's code, or None if the code has started none."""
        return None if self._port is None else self._port.processes

    def join(self, port: ModelPort) -> None:
        """Sets the connection of the model's code to the worker. The code's builtins get it as ``__tensord_port__``."""
        self._port = self._builtins[PORT] = port

    def run(self, path: Path) -> ModuleType:
        """Runs the file ``path``, such as model.py, as a module of the model's package, and returns the module.

        Raises InvalidArgument: the file cannot be read. Any exception of the module's code is raised unchanged.
        """
        stem = path.stem.replace(".", "_")
        loader = SourceLoader(self._builtins, self._prefix + stem, str(path))
        try:
            open(path, "rb", opener=model_folder.regular).close()
        except OSError as error:
            raise InvalidArgument(f"{path.name} cannot be read: {error.strerror}") from error
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = sys.modules[loader.name] = module_from_spec(spec)
        loader.exec_module(module)
        setattr(sys.modules[self.package], stem, module)
        return module

    def hold(self) -> None:
        """Keeps the model's modules in ``sys.modules`` until ``release`` is called, even if ``forget`` is called before."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Undoes one call of ``hold``. Calls ``forget`` again if ``forget`` was called before and no ``hold`` is left."""
        with self._lock:
            self._holders -= 1
            forgotten = self._forgotten and not self._holders
        if forgotten:
            self.forget()

    def forget(self) -> None:
        """Removes the model's modules from ``sys.modules``, and ends the processes and metrics that the model's code made.

        While a caller of ``hold`` still uses the modules, this is put off until the last ``release``. May be called again.
        """
        with self._lock:
            self._forgotten = True
            if self._holders:
                return
        if self._port is not None:
            self._port.close()
        for name in list(sys.modules):
            if name == self.package or name.startswith(self._prefix):
                sys.modules.pop(name, None)

    def import_(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """Imports a module for an import statement of the model's code.

        The arguments are those of ``builtins.__import__``. The model's own modules come before the modules of the environment.
        Raises ModuleNotFoundError: there is no such module. The error names the module as the model's code does.
        """
        # An empty list is how C code asks (PyImport_Import): a library's code that runs on behalf of the model, say an
        # unpickler. It means the environment's modules, and what is not there is found by the model's plain names.
        by_library = type(fromlist) is list and not fromlist
        try:
            if level or by_library:
                return builtins.__import__(name, globals, locals, fromlist, level)
            top = name.partition(".")[0]
            if self._is_own_module(top):
                return self._import_own(name, top, fromlist)
            return self._import_other(name, top, fromlist)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith(self._prefix):
                error.msg = error.msg.replace(self._prefix, "")
                error.name = error.name.removeprefix(self._prefix)
            raise

    def own_module(self, name: str) -> ModuleType | None:
        """Imports the module ``name``, such as "labels", of the model. Returns None if the model has no such module."""
        try:
            return builtins.__import__(self._prefix + name, fromlist=("__name__",))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self._prefix}{name}.".startswith(f"{error.name}."):
                raise
            return None

    def _is_own_module(self, top: str) -> bool:
        known = self._is_own.get(top)
        if known is not None:
            return known
        spec = self.find_spec(self._prefix + top, self.folders)
        # A folder without Python files of its own may be anything (data/, jax/): it is a package only if there is no other.
        if spec is None or not spec.has_location:
            return False
        self._is_own[top] = True
        return True

    def _import_own(self, name: str, top: str, fromlist: Sequence[str]) -> ModuleType:
        module = builtins.__import__(self._prefix + name, fromlist=fromlist)
        return module if fromlist else sys.modules[self._prefix + top]

    def _import_other(self, name: str, top: str, fromlist: Sequence[str]) -> ModuleType:
        try:
            if not isinstance(sys.modules.get(top), PlainName):
                module = builtins.__import__(name, fromlist=fromlist)
            # The import above makes a placeholder, too, and so may another model's thread meanwhile.
            if isinstance(sys.modules.get(top), PlainName):
                raise ModuleNotFoundError(f"No module named {name!r}", name=top)
        except ModuleNotFoundError as error:
            if error.name != top or self.find_spec(self._prefix + top, self.folders) is None:
                raise
        else:
            self._is_own[top] = False
            return module
        module = self._import_own(name, top, fromlist)
        self._is_own[top] = True
        return module

    def find_spec(self, name: str, path: Sequence[str]) -> ModuleSpec | None:
        """Finds a module of the model by its full name, which includes the package; None: there is no such module.

        ``path``: the folders to search.
        """
        portions: list[str] = []
        for folder in path:
            spec = self._finder(folder).find_spec(name)
            if spec is not None and spec.loader is not None:
                return spec
            if spec is not None:
                portions += spec.submodule_search_locations or ()
        if not portions:
            return None
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace

    def _finder(self, folder: str) -> FileFinder:
        finder = self._finders.get(folder)
        if finder is None:
            finder = self._finders[folder] = FileFinder(
                folder,
                (ExtensionFileLoader, EXTENSION_SUFFIXES),
                (functools.partial(SourceLoader, self._builtins), SOURCE_SUFFIXES),  # type: ignore[arg-type]
                (functools.partial(BytecodeLoader, self._builtins), BYTECODE_SUFFIXES),  # type: ignore[arg-type]
            )
        return finder

    def __repr__(self) -> str:
        return f"<ModelImports {self.package}>"


class OwnModules:
    """Finds the modules of models' own packages. It must be first on ``sys.meta_path``, before all other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        imports = ModelImports.of(name.partition(".")[0])
        return None if path is None or imports is None else imports.find_spec(name, path)


class PlainName(ModuleType):
    """A placeholder in ``sys.modules`` for a module name, such as ``labels``, that several models may use.

    Code that reads an attribute gets the attribute of its own model's module.
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
    """An import hook by which a library can import a module of the model whose code called the library.

    The library gives the name without the model's package, such as ``labels``, and gets a ``PlainName``: a placeholder with the
    attributes of the model's module. The hook must be last on ``sys.meta_path``.
    """

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
        """Does nothing: the import system calls this method to run the code of a new module, and ``module`` has no code."""


def asking_model() -> ModelImports | None:
    """Returns the ``ModelImports`` of the model whose code is nearest on the call stack; None: no model's code is on it."""
    frame = sys._getframe(1)
    while frame is not None:
        asking = importer_of(frame.f_builtins)
        if asking is not None:
            return asking
        frame = frame.f_back  # type: ignore[assignment]
    return None


def importer_of(builtins: dict[str, Any]) -> ModelImports | None:
    """Returns the ``ModelImports`` of the model whose code has these builtins; None: they are not a model's."""
    function = builtins.get("__import__")
    if type(function) is MethodType and isinstance(function.__self__, ModelImports):
        return function.__self__
    return None


def python_source(folder: Path) -> bytes:
    """Returns paths, sizes and contents of all Python files in a version's folder, for the keys of cached programs."""
    pieces: list[bytes] = []
    there = itertools.islice(model_folder.walk(folder), model_folder.MAX_ENTRIES)
    files = [Path(name) for name, status in there if status is not None and stat.S_ISREG(status.st_mode)]
    for path in sorted(path for path in files if path.suffix == ".py"):
        with open(folder / path, "rb", opener=model_folder.regular) as file:
            content = file.read()
        pieces.append(f"{path} {len(content)}\n".encode(errors="surrogateescape") + content)
    return b"".join(pieces)

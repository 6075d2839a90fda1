"""Reads the model repositories: names, versions, configurations. Imports no model's code and loads no model.

    <repository>/<model>/config.pbtxt          optional
    <repository>/<model>/<version>/model.py    version: a whole number from 1

A version's folder may hold exported programs in place of model.py. Call the functions that read folders off the event loop.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import errno
import hashlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensord.config import ensemble_checks, model_checks, model_config, model_fields, model_folder
from tensord.config.model_config import ModelConfig
from tensord.config.options import Options, Repository, Workers
from tensord.daemon.models import placement
from tensord.shm import descriptors
from tensord.shm.common.derivatives import of_model, original
from tensord.shm.control_records import Load
from tensord.shm.device_names import gpu_of, model_of
from tensord.shm.errors import FileTooLarge, InvalidArgument, NoDescriptor, ServingError, Unsupported

#: Names go into URLs, logs and cache keys; nothing in them may mean anything to a file system or a shell.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+-]{0,254}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
#: A larger file of a model is not read as code.
_MAX_CODE_BYTE_SIZE = 16 << 20
_MAX_NAMED = 5
#: The reason for a name that two repositories have, in Triton's words.
DUPLICATE = "model appears in two or more repositories"
#: Up to Python 3.11 the depth of a syntax tree is counted for all threads together, so that two at a time may both fail.
_parsing = threading.Lock()
_NONE_CHOSEN = "no version is available under its version policy"
_log = logging.getLogger(__name__)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a folder or a link to one. Raises OSError if the entry is unreadable."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def fingerprints(path: Path, config: bytes) -> tuple[str, str, list[str]]:
    """Computes two digests of the files in a model's folder, and lists dangling links.

    The first digest changes with any file and with ``config``, the serialised configuration. The second one does not depend
    on ``config`` or config.pbtxt. A file counts by its name, inode, size and time of modification.
    Raises OSError if the folder cannot be read.
    """
    all_of_it, rest, nowhere = hashlib.sha256(config), hashlib.sha256(), list[str]()
    for name, status in itertools.islice(model_folder.walk(path), model_folder.MAX_ENTRIES):
        if status is None:
            nowhere.append(name)
            continue
        identity: tuple[int, ...] = (status.st_dev, status.st_ino)
        # A folder's times are left out: Python's cache in it does not count.
        if not name.endswith("/"):
            identity += (status.st_size, status.st_mtime_ns)
        entry = f"{name}\0{identity}\0".encode(errors="surrogateescape")
        all_of_it.update(entry)
        if name != "config.pbtxt":
            rest.update(entry)
    return all_of_it.hexdigest(), rest.hexdigest(), nowhere


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model as it was read from its folder."""

    name: str
    path: Path
    #: Serialised ModelConfig as far as it is given, with name and backend.
    config: bytes = b""
    #: Every version folder, ascending.
    versions: tuple[int, ...] = ()
    #: The versions that the version policy chooses, ascending.
    chosen: tuple[int, ...] = ()
    #: A digest that changes when any file of the model does.
    fingerprint: str = ""
    #: A digest like ``fingerprint`` that does not change with the configuration.
    content: str = ""
    #: The reason why it cannot be polled, for the operator; "" when it can.
    error: str = ""
    #: True if the error is a feature that is not offered here, and not a mistake.
    unsupported: bool = False
    #: True if the error is that this process may open no more files, which says nothing of the model.
    lacking: bool = False
    #: The settings of its configuration that have no effect, and links to nowhere in its folder: a sentence each.
    without_effect: tuple[str, ...] = ()
    #: Folders in it that are no versions.
    others: tuple[str, ...] = ()
    #: The models of an ensemble's steps, a derivative's own among them, with the versions that they ask for, -1 the newest;
    #: empty: it is no ensemble.
    members: tuple[tuple[str, int], ...] = ()
    #: The devices of the workers that load it (``tensord.daemon.models.placement``); empty: every worker does.
    devices: tuple[str, ...] = ()
    #: The rate limiter's resources that its instances need, if there is one: name -> the worker that counts it where it
    #: is global, or None.
    resources: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Returns the reason why no version of the model can be loaded, or "" if one can."""
        return self.error or ("" if self.chosen else _NONE_CHOSEN if self.versions else _no_folder(self.others))

    def load(self, number: int) -> Load:
        """Makes the record that tells a worker to load a version of this model."""
        path = str(self.path / str(number))
        return Load(self.name, number, str(self.path), path, self.config, max(1, len(self.devices)), self.content)


def _no_folder(others: Sequence[str]) -> str:
    named = ", ".join(f"'{name}'" for name in others[:_MAX_NAMED])
    return f"it has no version folder, which is a whole number from 1{f' ({named}: none)' if named else ''}"


def placed(found: FoundModel, devices: Sequence[str], options: Options) -> FoundModel:
    """Returns a copy of a model with the devices on which it is loaded.

    ``devices``: the devices of all workers. Raises InvalidArgument if no worker can load the model.
    """
    config, limited = model_config.from_bytes(found.config), options.rate_limit.mode != "off"
    chosen = placement.place(config, devices, limited, options.workers.devices_per_worker)
    encoded = config.SerializeToString() if placement.say_kinds(config, devices) else found.config
    resources = placement.resources(config, chosen) if limited else {}
    return dataclasses.replace(found, devices=chosen, config=encoded, resources=resources)


def isolated_fraction(config: bytes, options: Workers) -> float:
    """Returns the fraction (0 to 1) of GPU memory for a worker of one model: from the model's ``config``, else ``options``."""
    return model_checks.isolated_fraction(model_config.from_bytes(config), options.isolated_memory_fraction)


def isolated(found: FoundModel, options: Workers) -> dict[str, float]:
    """Returns the devices of workers that run only the model ``found``, each with the worker's part (0 to 1) of GPU memory."""
    devices = [device for device in found.devices if model_of(device) == found.name]
    return dict.fromkeys(devices, isolated_fraction(found.config, options)) if devices else {}


def check_isolated(found: FoundModel, taken: Mapping[str, float], options: Workers) -> None:
    """Checks that a model can have workers that run no other model, if the model has the parameter ``isolated``.

    ``taken``: maps the device of each worker that runs only one model to the fraction (0 to 1) of GPU memory that it takes.
    Raises InvalidArgument if ``options.max_isolated`` other models have such workers, or if a GPU has too little memory left.
    """
    name, devices = found.name, isolated(found, options)
    others = {device: part for device, part in taken.items() if model_of(device) != name}
    count = len({model_of(device) for device in others})
    if devices and count >= options.max_isolated:
        raise InvalidArgument(
            f"model '{name}' is to have a worker to itself ({model_checks.ISOLATED}), and {count} models have one; at most "
            f"{options.max_isolated} may (workers.max_isolated)"
        )
    for device, part in devices.items():
        gpu = gpu_of(device)
        beside = sum(fraction for other, fraction in others.items() if gpu and gpu_of(other) == gpu)
        # Rounded, as these are sums of decimal fractions: 0.7 and three times 0.1 are 1.
        taken_before = round(options.gpu_memory_fraction + beside, 6)
        if gpu and (total := round(taken_before + part, 6)) > 1:
            raise InvalidArgument(
                f"model '{name}' is to have {part:g} of the memory of {gpu} to itself ({model_checks.ISOLATED_FRACTION}), and "
                f"{taken_before:g} of it are taken: {options.gpu_memory_fraction:g} by the workers that models share "
                f"(workers.gpu_memory_fraction), {round(beside, 6):g} by other isolated models; that would be {total:g}"
            )


def scan(repositories: Sequence[Path], known: Collection[str] = ()) -> dict[str, FoundModel]:
    """Reads the folder of every model in the repositories, and returns the models by name, sorted.

    A folder that holds neither a version nor config.pbtxt is left out, unless ``known`` contains its name.
    Raises InvalidArgument if a repository is not a readable folder.
    """
    found: dict[str, FoundModel] = {}
    for path in folders(repositories, known):
        model = poll(path)
        if path.name in found:
            model = dataclasses.replace(model, error=DUPLICATE, chosen=())
        found[path.name] = model
    return dict(sorted(found.items()))


def unreadable(repositories: Sequence[Path]) -> dict[Path, str]:
    """Returns the repositories that are not readable folders, each with the reason."""
    found: dict[Path, str] = {}
    for repository in repositories:
        try:
            os.scandir(os.path.join(repository, ".")).close()  # "." is found only where it may be searched, too
        except OSError as error:
            found[repository] = error.strerror or str(error)
    return found


def folders(repositories: Sequence[Path], known: Collection[str] = ()) -> list[Path]:
    """Returns the folders of the repositories that hold a model.

    ``known``: names of folders that are returned even if they hold no model.
    Raises InvalidArgument if a repository cannot be read.
    """
    return [path for path in _all_folders(repositories) if path.name in known or not no_model(path)]


def others(repositories: Sequence[Path]) -> dict[Path, str]:
    """Returns the folders that hold no model, each with the reason. Raises InvalidArgument if a repository is unreadable."""
    return {path: why for path in _all_folders(repositories) if (why := no_model(path))}


def no_model(path: Path) -> str:
    """Returns why a folder in a repository is not a model, or "" if it is one. A model with mistakes is still a model."""
    try:
        versions, others = _versions(path)
        if versions or os.path.lexists(path / "config.pbtxt"):
            return ""
    except OSError:
        return ""  # that is a mistake in a model
    return f"{_no_folder(others)}, and no config.pbtxt"


def _all_folders(repositories: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for repository in repositories:
        try:
            names = sorted(entry.name for entry in os.scandir(repository) if is_folder(entry))
        except OSError as error:
            raise InvalidArgument(f"model repository '{repository}': {error.strerror}") from None
        found += [
            repository / name for name in names if not name.startswith(".") and not model_folder.is_passed_over(name)
        ]
    return found


def find(repositories: Sequence[Path], name: str) -> FoundModel:
    """Reads the model ``name``. If no repository has it, or two have, the result has an empty path and an ``error``.

    Raises NoDescriptor if this process may open no more files.
    """
    reason = "it is in no repository"
    # Only a well-formed name may become part of a path.
    if NAME.fullmatch(name):
        places = []
        for folder in (path / name for path in repositories):
            try:
                places += [folder] if folder.is_dir() else []
            except OSError as error:  # from Python 3.14 on it is no folder
                reason += f"; repository '{folder.parent.name}' cannot be searched for it: {error.strerror}"
        if len(places) == 1:
            if (found := poll(places[0])).lacking:
                raise descriptors.none_left(f"model '{name}' cannot be read: the server")
            return found
        if places:
            return FoundModel(name, Path(), error=DUPLICATE)
    return FoundModel(name, Path(), error=reason)


def poll(path: Path) -> FoundModel:
    """Reads the model in the folder ``path``, without loading it. If the model is wrong, the result's ``error`` says why."""
    name = path.name
    try:
        if not NAME.fullmatch(name):
            raise InvalidArgument("its name may hold only letters, digits and _.,+- and must not begin with . + or -")
        if taken := taken_name(name):
            raise InvalidArgument(taken)
        text = _read(path / "config.pbtxt", model_config.MAX_BYTE_SIZE)
        config = model_config.parse_pbtxt(text.decode("utf-8-sig"), name) if text is not None else model_config.empty()
        return _found(path, config)
    except ServingError as error:
        return FoundModel(name, path, error=error.message, unsupported=isinstance(error, Unsupported))
    except (OSError, UnicodeDecodeError) as error:
        return FoundModel(name, path, error=f"cannot be read: {error}", lacking=descriptors.lacked(error))


def taken_name(name: str) -> str:
    """Returns an error text if ``name`` ends with a reserved suffix, such as ".pull_back". Otherwise returns ""."""
    kind = of_model(name)[1]
    return kind and f"its name must not end in .{kind}, as the names of models' derivatives do"


def readable_folders(paths: Sequence[Path]) -> list[Path]:
    """Returns the folder of each model in the repositories ``paths``. A repository that cannot be read is left out."""
    gone = unreadable(paths)
    return folders([path for path in paths if path not in gone])


def overridden(folder: Path, config: str) -> FoundModel:
    """Reads the folder of a model, with a configuration in JSON that a client sent in place of config.pbtxt.

    Raises InvalidArgument if the configuration or the folder is wrong, or if the configuration chooses no version.
    Raises Unsupported if the configuration asks for a feature that tensord lacks.
    Raises NoDescriptor if this process may open no more files.
    """
    try:
        with descriptors.needed(f"model '{folder.name}'"):
            found = _found(folder, model_config.parse_json(config, folder.name))
    except NoDescriptor:
        raise
    except ServingError as error:
        raise type(error)(given_error(folder.name, error.message)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = f"model '{folder.name}' cannot be read: {error}"
        raise InvalidArgument(given_error(folder.name, reason)) from None
    if not found.chosen:
        raise InvalidArgument(no_version_error(folder.name))
    return found


def _found(path: Path, config: ModelConfig) -> FoundModel:
    name = path.name
    versions, others = _versions(path)
    if config.name and config.name != name:
        raise InvalidArgument(f"its configuration is for '{config.name}', but its folder is '{name}'")
    config.name = name
    model_checks.check(config)
    chosen = _choose(config, versions)
    if not config.backend and chosen and not ensemble_checks.is_ensemble(config):
        config.backend = _guess_backend(path, config, chosen[-1])
    encoded = config.SerializeToString(deterministic=True)
    without_effect = tuple(model_fields.without_effect(config))
    fingerprint, content, nowhere = fingerprints(path, encoded)
    without_effect += tuple(f"'{name}' is a link to nowhere" for name in nowhere[:_MAX_NAMED])
    members = dict.fromkeys(
        (original(step.model_name)[0], step.model_version) for step in config.ensemble_scheduling.step
    )
    return FoundModel(
        name,
        path,
        encoded,
        versions,
        chosen,
        fingerprint,
        content,
        without_effect=without_effect,
        others=others,
        members=tuple(members),
    )


def _versions(path: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the version numbers among a model's subfolders, and the names of the rest. Leaves out names like __pycache__."""
    names = sorted(entry.name for entry in os.scandir(path) if is_folder(entry))
    others = [name for name in names if not _VERSION.fullmatch(name) and not model_folder.is_passed_over(name)]
    return tuple(sorted(int(name) for name in names if _VERSION.fullmatch(name))), tuple(others)


def _choose(config: ModelConfig, versions: tuple[int, ...]) -> tuple[int, ...]:
    """Returns those of ``versions`` that the version policy chooses."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return versions
        case "specific":
            return tuple(version for version in versions if version in policy.specific.versions)
        case "latest":
            return versions[-policy.latest.num_versions :]
        case _:
            return versions[-1:]


def _guess_backend(path: Path, config: ModelConfig, version: int) -> str:
    file = config.default_model_filename or "model.py"
    code = _read(path / str(version) / file, _MAX_CODE_BYTE_SIZE)
    if code is None:
        if model_folder.programs(path / str(version)):
            return "jax"
        raise InvalidArgument(
            f"it names no backend, and version {version} has no {file} to tell it from, nor a program"
        )
    try:
        with _parsing:
            tree = ast.parse(code)  # its first lines say how it is encoded
        names = set(_defined(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise InvalidArgument(f"{file} of version {version} is not valid Python{line}: {why}") from None
    if "TritonPythonModel" in names:
        return "python"
    if "create" in names:
        return "jax"
    raise InvalidArgument(
        f"it names no backend, and {file} of version {version} defines neither create() nor class TritonPythonModel"
    )


def _defined(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names += [alias.asname or alias.name for alias in aliases]
    return names


def _read(path: Path, limit: int) -> bytes | None:
    """Returns the content of a file, or None if there is no such file. Raises FileTooLarge if it exceeds ``limit`` bytes."""
    try:
        with open(path, "rb", opener=model_folder.regular) as file:
            content = file.read(limit + 1)
    except (FileNotFoundError, IsADirectoryError):
        return None
    if len(content) > limit:
        raise FileTooLarge(path.name, path.stat().st_size, limit)
    return content


class Repositories:
    """Holds the models of the repositories as they were read last."""

    def __init__(self) -> None:
        #: The models that the last scan found.
        self._found: dict[str, FoundModel] = {}
        #: Repositories that cannot be read, and may be so, with the reason. No model can have such a name.
        self.unreadable: dict[str, str] = {}
        #: Folders that are no models, as they were logged.
        self._others: dict[Path, str] = {}

    async def scan(self, options: Repository) -> dict[str, FoundModel]:
        """Reads the repositories that ``options`` names, and returns the models in them by name.

        If a repository cannot be read, raises InvalidArgument. If ``options.exit_on_error`` is False, logs an error instead,
        and the result contains the models that the previous scan found in this repository.
        """
        paths, kept = [Path(path) for path in options.paths], dict[str, FoundModel]()
        if options.exit_on_error is False:
            reasons = await asyncio.to_thread(unreadable, paths)
            self.unreadable = {}
            for path, reason in reasons.items():
                # Clients see only the folder's name and, of two with the same one, which it is.
                key = f"repository '{path.name}'"
                key += f" (number {paths.index(path) + 1} in repository.paths)" if key in self.unreadable else ""
                self.unreadable[key] = f"'{path}': {reason}"
                stay = {name: model for name, model in self._found.items() if model.path.parent == path}
                and_so = f"; {len(stay)} models of it stay as they are" if stay else ""
                _log.error("model repository '%s' cannot be read: %s%s; a reload looks again", path, reason, and_so)
                kept |= stay
            paths = [path for path in paths if path not in reasons]
        found = await asyncio.to_thread(scan, paths, self._found.keys())
        self._tell_others(await asyncio.to_thread(others, paths), found)
        self._found = dict(sorted({**kept, **found}.items()))
        return dict(self._found)

    def _tell_others(self, others: Mapping[Path, str], found: Mapping[str, FoundModel]) -> None:
        others = {path: why for path, why in others.items() if path.name not in found}
        for path, why in others.items():
            if self._others.get(path) != why:
                _log.warning("'%s' is no model: %s", path, why)
        self._others = dict(others)

    def __repr__(self) -> str:
        return f"<Repositories {len(self._found)} models, {len(self.unreadable)} cannot be read>"


# ---------------------------------------------------------------------------------------------------------------- errors


def load_error(name: str, failed: dict[int, str]) -> str:
    """Returns Triton's message for a load in which versions of a model failed. ``failed``: the reason by version number."""
    listed = "".join(f"version {n} is at UNAVAILABLE state: {reason};\n" for n, reason in sorted(failed.items()))
    return f"load failed for model '{name}': {listed}"


def placement_error(name: str, reason: str) -> str:
    """Returns Triton's message for a model that no worker can load."""
    return f"load failed for model '{name}': {reason}\n"


def no_version_error(name: str) -> str:
    """Returns Triton's message for a model whose version policy chooses no version."""
    return (
        f"load failed for model '{name}': "
        f"at least one version must be available under the version policy of model '{name}'\n"
    )


def poll_error(names: Iterable[str]) -> str:
    """Returns Triton's message for models that are missing from the repositories or cannot be read there."""
    return f"failed to load '{', '.join(names)}', failed to poll from model repository"


def given_error(name: str, reason: str) -> str:
    """Returns the error text for a client that has asked to load the model ``name`` with unusable configuration or files."""
    return f"failed to load '{name}': {reason}"

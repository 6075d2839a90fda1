"""Exports a model version with a model.py: reads it as the loader does, and writes a version without Python (``exporting``)."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import jax

from tensord.config import model_checks, model_config
from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unsupported
from tensord.workers.declarations.created import create, created
from tensord.workers.declarations.declaration import declare_tensors
from tensord.workers.declarations.device_choice import device_count
from tensord.workers.declarations.exporting import write
from tensord.workers.declarations.parameter_declarations import declare_sets
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.jax_internals.wide import precision
from tensord.workers.models.author_error import describe_exception
from tensord.workers.tensors.signature import Declared, signature


def export_version(load: Load, device: jax.Device, folder: Path, platforms: str) -> None:
    """Writes a model version that has a model.py as a new model into ``folder``: as a jax.export program, without Python code.

    Args:
      platforms: comma-separated, as jax.export names them; "": the platform of the device.

    Raises: ServingError: the version cannot be exported or written; the message says why in one sentence.
    """
    message = model_config.from_bytes(load.config)
    folders = (Path(load.version_path), Path(load.model_path))
    try:
        module = ModelImports.of_version(load.name, folders).run(
            folders[0] / (message.default_model_filename or "model.py")
        )
        if why := _unsupported(message, module):
            raise Unsupported(f"model '{load.name}': {why}")
        message.backend = "jax"
        axes = declare_tensors(message, module)
        if declare_sets(message, module) is not None:
            raise Unsupported(f"model '{load.name}': what is exported has one parameter set in a batch")
        for axis, sizes in getattr(module, "buckets", {}).items():
            message.parameters[f"buckets.{axis}"].string_value = sizes if sizes == "auto" else ",".join(map(str, sizes))
        if hasattr(module, "batch_buckets") and "batch_buckets" not in message.parameters:
            message.parameters["batch_buckets"].string_value = ",".join(map(str, module.batch_buckets))
        model_checks.check(message)
        described = signature(message, axes, {})
        with precision(described.wide):
            returned = create(load.name, module, folders[0], model_config.to_dict(message), device)
        apply, parameters, _ = created(module, described, returned, None)
        inputs = {spec.name: Declared(spec.datatype, spec.model_dims, spec.axes) for spec in described.inputs.values()}
        message.name = folder.name
        # What is written is version 1, and has no such file.
        message.ClearField("version_policy")
        message.ClearField("default_model_filename")
        chosen = [name.strip() for name in platforms.split(",")] if platforms else None
        write(folder, message, apply, parameters, inputs, chosen)
        _copy(message, folders[1], folder)
    except ServingError:
        raise
    except OSError as error:
        raise InvalidArgument(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    except Exception as error:
        raise Internal(f"model '{load.name}' cannot be exported: {describe_exception(error, folders)}") from error


def _unsupported(message: ModelConfig, module: ModuleType) -> str:
    """Returns why a model of this kind cannot be exported; "": it can. Raises InvalidArgument: its ``devices`` is malformed."""
    if not callable(getattr(module, "create", None)) or getattr(module, "host", False):
        return "only a JAX model with a function create(path, config, device) is exported"
    if hasattr(module, "slots"):
        return "a stepped model is no program that is run once, it cannot be exported"
    if getattr(module, "state", None) or getattr(module, "request", None) or message.HasField("sequence_batching"):
        return "a program has no state, and is told nothing of a request but its inputs"
    ragged = any(getattr(module, name, None) for name in ("ragged", "batch_inputs", "batch_outputs"))
    if ragged or any(tensor.allow_ragged_batch for tensor in message.input):
        return "what is exported has no ragged inputs"
    if device_count(message, module) > 1:
        return "what is exported runs on one device"
    return ""


def _copy(message: ModelConfig, source: Path, folder: Path) -> None:
    """Copies the files that the configuration names, label files and warmup data, from one model folder to another."""
    for name in {output.label_filename for output in message.output} - {""}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    if message.model_warmup and (source / "warmup").is_dir():
        shutil.copytree(source / "warmup", folder / "warmup", dirs_exist_ok=True, ignore_dangling_symlinks=True)

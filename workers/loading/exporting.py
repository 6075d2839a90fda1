"""Exports a JAX function, or a model that has a model.py, as a model that is served without Python code.

    <folder>/config.pbtxt                  tensors, max_batch_size, buckets
    <folder>/1/model.jaxexport             (parameters by name, inputs by name) -> outputs by name
    <folder>/1/params.safetensors          the parameters, if there are any

The program takes all batch sizes up to max_batch_size, and all sizes of input axes that vary: these sizes are symbols of
jax.export. If the function cannot be exported with a symbol for the batch size, and no input axis varies, several programs with
fixed batch sizes are exported instead of model.jaxexport: rows1.jaxexport, rows2.jaxexport, ...
``tensord.workers.declarations.artifact`` reads the folder.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from google.protobuf import text_format
from jax import export

from tensord.config import model_checks, model_config, model_folder
from tensord.config.model_config import ModelConfig
from tensord.protocol import model_config_pb2
from tensord.shm import datatypes
from tensord.shm.arrays import DTYPES, datatype_of
from tensord.shm.common.derivatives import KINDS, MAX_ORDER, PUSH_FORWARD
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unsupported
from tensord.workers.declarations.created import create, created, is_generator
from tensord.workers.declarations.declaration import declare_tensors, read_labels
from tensord.workers.declarations.derivatives import declared_order
from tensord.workers.declarations.placement_declarations import declare_sets, device_count
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.jax_internals.wide import precision
from tensord.workers.loading.parameters import array_names, parted
from tensord.workers.models.author_error import describe_exception
from tensord.workers.tensors.buckets import powers_of_two
from tensord.workers.tensors.signature import WIDE, Declared, parse_declaration, signature
from tensord.workers.tensors.tensor_trees import declarations, taking_trees

_BATCH = "batch"
_PARAMETERS = "params.safetensors"
_NO_CREATE = "only a JAX model with a function create(path, config, device) is exported"


def export_model(
    folder: str | Path,
    function: Callable[..., Any],
    parameters: Any,
    inputs: Any,
    max_batch_size: int = 0,
    buckets: Mapping[str, Sequence[int] | str] | None = None,
    platforms: Sequence[str] | None = None,
    derivatives: int = 0,
) -> Path:
    """Writes a model folder that is served without Python code, and returns the folder. Implements ``tensord.models.export``.

    Args:
      function: takes parameters and inputs (trees of arrays), and returns a tree of outputs.
      parameters: the parameters that are written to the folder.
      inputs: the declarations of the inputs, as in a model.py.
      max_batch_size: the most rows; 0: no batches.
      buckets: axis name -> sizes to compile, or "auto" for powers of two; None: there are none.
      platforms: the platforms to export for, as jax.export names them; None: the platform of this process.
      derivatives: for how many orders of derivatives, in reverse mode, the programs are exported; 0: for none.
    Raises InvalidArgument: an argument is malformed, the folder has a version 1 already, or the function cannot be exported.
    Raises OSError: the folder cannot be written.
    """
    if type(derivatives) is not int or not 0 <= derivatives <= MAX_ORDER:
        raise InvalidArgument(f"derivatives is {derivatives!r}; a number of orders from 0 to {MAX_ORDER} is expected")
    folder = Path(folder)
    config = model_config.empty(folder.name)
    config.max_batch_size = max_batch_size
    _keep_buckets(config, buckets or {})
    what = f"model '{folder.name}'"
    declared = {
        name: parse_declaration(f"input '{name}'", text) for name, text in declarations(what, inputs, "input").items()
    }
    wide = any(tensor.datatype in WIDE for tensor in declared.values())
    function = taking_trees(what, function, inputs, None)
    return write(folder, config, function, parameters, declared, platforms, derivatives, wide)


def write(
    folder: Path,
    config: ModelConfig,
    function: Callable[..., Mapping[str, Any]],
    parameters: Any,
    inputs: Mapping[str, Declared],
    platforms: Sequence[str] | None,
    derivatives: int,
    wide: bool,
) -> Path:
    """Writes ``folder`` as a model: config.pbtxt, exported programs, and parameters. Returns ``folder``.

    ``config``: the content of config.pbtxt. Inputs and outputs are added to ``config`` if ``config`` lists none.
    ``function``: takes parameters and a dict of inputs, and returns a dict of outputs. ``platforms``: names from jax.export,
    or None for the default back end's platform. ``derivatives``: how many orders of derivatives the exported programs have.
    ``wide``: True exports the programs with 64-bit types. False does so only if jax_enable_x64 is set.
    Raises InvalidArgument if the folder "1" in ``folder`` is not empty, or if ``function`` cannot be exported.
    """
    version = folder / "1"
    if version.exists() and any(version.iterdir()):
        raise InvalidArgument(f"{version} is not empty; export into another folder, or remove it")
    names = array_names(parameters)
    if len(set(names)) < len(names):
        raise InvalidArgument(
            f"two parameters would be called '{next(name for name in names if names.count(name) > 1)}'"
        )
    # Leaves that are no arrays become part of the programs.
    function, parameters = parted(function, parameters)
    leaves, structure = jax.tree.flatten(parameters)
    with precision(wide):
        # Written as the programs take them.
        arrays = {
            name: np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
            for name, leaf in zip(names, leaves, strict=True)
        }
        taken = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}

        def program(*given: Any) -> Any:
            own = given[0] if taken else {}
            return dict(function(jax.tree.unflatten(structure, [own[name] for name in names]), given[-1]))

        def exported(rows: int | str) -> export.Exported:
            specs = _specs(config, inputs, rows)
            return export.export(jax.jit(program), platforms=platforms)(*([taken, specs] if taken else [specs]))

        try:
            programs = _programs(config, inputs, exported)
            contents = {name: made.serialize(derivatives) for name, made in programs.items()}
        except InvalidArgument:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"the function of '{folder.name}' cannot be exported: {type(error).__name__}: {error}"
            ) from error
    _complete(config, inputs, next(iter(programs.values())))
    version.mkdir(parents=True, exist_ok=True)
    if arrays:
        from safetensors.numpy import save_file

        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, version / _PARAMETERS)
        # That library writes files for their maker alone; this one is served by somebody else, as far as the umask lets it.
        (version / _PARAMETERS).chmod(0o666 & ~_umask())
    for name, content in contents.items():
        (version / f"{name}{model_folder.EXPORTED}").write_bytes(content)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    return folder


def _umask() -> int:
    """Returns the process's umask without changing it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def _keep_buckets(config: ModelConfig, buckets: Mapping[str, Sequence[int] | str]) -> None:
    """Adds the sizes of named axes to ``config``, as far as it has none for them."""
    for axis, sizes in buckets.items():
        if (name := f"buckets.{axis}") not in config.parameters:
            config.parameters[name].string_value = sizes if isinstance(sizes, str) else ",".join(map(str, sizes))


def _programs(
    config: ModelConfig, inputs: Mapping[str, Declared], exported: Callable[[int | str], export.Exported]
) -> dict[str, export.Exported]:
    try:
        return {"model": exported(_BATCH)}
    except Exception:
        if not config.max_batch_size or any(-1 in tensor.dims for tensor in inputs.values()):
            raise
        most, mixes = config.max_batch_size, model_config.wants(config, model_checks.ROWS_MAY_MIX)
        sizes = model_checks.batch_buckets(config) or (range(1, most + 1) if mixes else powers_of_two(most))
        return {f"rows{rows}": exported(rows) for rows in sizes}


def _specs(config: ModelConfig, inputs: Mapping[str, Declared], rows: int | str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns each input's shape and dtype. The size of an axis that varies is a symbol.

    ``rows``: the batch size, or the name of a symbol for any batch size. Raises InvalidArgument: an input is BYTES.
    """
    limits = [f"{_BATCH} <= {config.max_batch_size}"] if config.max_batch_size else []
    named = {axis for tensor in inputs.values() for axis in tensor.axes if axis is not None}
    buckets = {axis: sizes for axis, sizes in model_checks.axis_buckets(config).items() if axis in named}
    # Those that are "auto" have no sizes, and no largest one.
    limits += [f"{axis} <= {sizes[-1]}" for axis, sizes in buckets.items() if sizes]
    scope, unnamed = export.SymbolicScope(limits), 0
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    for name, tensor in inputs.items():
        if tensor.datatype == "BYTES":
            raise InvalidArgument(f"input '{name}' is BYTES, which no compiled program can take")
        texts = [str(rows)] if config.max_batch_size else []
        for dim, axis in zip(tensor.dims, tensor.axes, strict=True):
            if dim == -1 and axis is None:
                axis, unnamed = f"size_{unnamed}", unnamed + 1
            texts.append(str(dim) if axis is None else axis)
        shape = export.symbolic_shape(",".join(texts), scope=scope)
        specs[name] = jax.ShapeDtypeStruct(shape, DTYPES[tensor.datatype])
    return specs


def _complete(config: ModelConfig, inputs: Mapping[str, Declared], exported: export.Exported) -> None:
    types = model_config_pb2.DataType
    if not config.input:
        for name, tensor in inputs.items():
            config.input.add(
                name=name, data_type=types.Value(datatypes.to_model_config(tensor.datatype)), dims=tensor.dims
            )
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    named = {output.name for output in config.output}
    for name, aval in sorted(outputs.items()):
        if (datatype := datatype_of(np.dtype(aval.dtype))) is None:
            raise InvalidArgument(f"output '{name}' is {aval.dtype}, which the protocol has no datatype for")
        dims = [dim if isinstance(dim, int) else -1 for dim in aval.shape[bool(config.max_batch_size) :]]
        if not named:
            config.output.add(name=name, data_type=types.Value(datatypes.to_model_config(datatype)), dims=dims)


def export_version(load: Load, device: jax.Device, folder: Path, platforms: str, derivatives: int) -> None:
    """Writes a version that has a model.py into ``folder`` as a new model. Raises ServingError if that fails.

    ``platforms``: comma-separated, as jax.export names them; "": the platform of the device. ``derivatives``: how many orders of
    derivatives the new model has.
    """
    config = model_config.from_bytes(load.config)
    folders = (Path(load.version_path), Path(load.model_path))
    try:
        path = folders[0] / (config.default_model_filename or "model.py")
        # An ensemble, or a program that was exported already.
        if not path.exists():
            raise Unsupported(f"model '{load.name}': {_NO_CREATE}")
        module = ModelImports.of_version(load.name, folders).run(path)
        if why := _unsupported(config, module):
            raise Unsupported(f"model '{load.name}': {why}")
        config.backend = "jax"
        axes = declare_tensors(config, module)
        if declare_sets(config, module) is not None:
            raise Unsupported(f"model '{load.name}': what is exported has one parameter set in a batch")
        _keep_buckets(config, getattr(module, "buckets", {}))
        if hasattr(module, "batch_buckets") and "batch_buckets" not in config.parameters:
            config.parameters["batch_buckets"].string_value = ",".join(map(str, module.batch_buckets))
        model_checks.check(config)
        described = signature(config, axes, read_labels(config, folders[1]))
        config.parameters["derivatives"].string_value = str(derivatives)
        declared_order(config, module, described)
        del config.parameters["derivatives"]
        with precision(described.wide):
            returned = create(load.name, module, folders[0], model_config.to_dict(config), device)
        if is_generator(returned):
            raise Unsupported(f"model '{load.name}': a generator is no program that is run once, it cannot be exported")
        apply, parameters, _ = created(module, described, returned, None)
        inputs = {spec.name: Declared(spec.datatype, spec.model_dims, spec.axes) for spec in described.inputs.values()}
        config.name = folder.name
        # What is written is version 1, and has no such file.
        config.ClearField("version_policy")
        config.ClearField("default_model_filename")
        # A sample of a derivative that the program does not carry would be refused where it is loaded.
        carried = [sample for sample in config.model_warmup if _carries(derivatives, sample.name)]
        config.ClearField("model_warmup")
        config.model_warmup.extend(carried)
        chosen = [name.strip() for name in platforms.split(",")] if platforms else None
        write(folder, config, apply, parameters, inputs, chosen, derivatives, described.wide)
        _copy(config, folders[1], folder)
    except ServingError:
        raise
    except OSError as error:
        raise InvalidArgument(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    except Exception as error:
        raise Internal(f"model '{load.name}' cannot be exported: {describe_exception(error, folders)}") from error


def _carries(derivatives: int, sample: str) -> bool:
    kinds = [*itertools.takewhile(KINDS.__contains__, sample.split("."))]
    return len(kinds) <= derivatives and PUSH_FORWARD not in kinds


def _unsupported(config: ModelConfig, module: ModuleType) -> str:
    """Returns why a model cannot be exported; "": it can."""
    if not callable(getattr(module, "create", None)) or getattr(module, "host", False):
        return _NO_CREATE
    if hasattr(module, "slots"):
        return "a stepped model is no program that is run once, it cannot be exported"
    if getattr(module, "state", None) or getattr(module, "request", None) or config.HasField("sequence_batching"):
        return "a program has no state, and is told nothing of a request but its inputs"
    ragged = any(getattr(module, name, None) for name in ("ragged", "batch_inputs", "batch_outputs"))
    if ragged or any(tensor.allow_ragged_batch for tensor in config.input):
        return "what is exported has no ragged inputs"
    if any(tensor.optional for tensor in config.input):
        return "what is exported takes all of its inputs, none is optional"
    if device_count(config, module) > 1:
        return "what is exported runs on one device"
    return ""


def _copy(config: ModelConfig, source: Path, folder: Path) -> None:
    """Copies label files and warmup data from one model folder to another."""
    for name in {output.label_filename for output in config.output} - {""}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    if config.model_warmup and (source / "warmup").is_dir():
        shutil.copytree(source / "warmup", folder / "warmup", dirs_exist_ok=True, ignore_dangling_symlinks=True)

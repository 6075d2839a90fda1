"""Makes and runs the samples of Triton's ``model_warmup`` before a version serves. Statistics do not count these runs.

inputs     for each input: zeros, random values, or a file of <model>/warmup/ with the bytes that a client would send
batch_size how many rows the sample has, if the model has a batch dimension; the ``dims`` of an input lack that dimension
count      how often the sample is run; 0 means once
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.config.model_folder import regular
from tensord.shm import datatypes
from tensord.shm.arrays import Array, array
from tensord.shm.common.derivatives import KINDS
from tensord.shm.datatypes import byte_size
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.workers.models.execution import Execution, RunnableModel, run
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.programs.run_errors import CheckDevice, works
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature, TensorSpec

#: All tensors of all samples together, which are there at a time.
MAX_BYTE_SIZE = 1 << 29
#: All runs of all samples together, for one instance.
MAX_COUNT = 10_000
#: The bytes that an element of BYTES counts: an object of Python and its place in the array.
_OBJECT_BYTE_SIZE = 64
#: Random values are the same at every start, so that what fails fails again.
_SEED = 0


class Sample:
    """One sample request of ``model_warmup``, which is run ``count`` times."""

    def __init__(self, name: str, arrays: dict[str, Array], rows: int, count: int) -> None:
        self.name = name
        self.rows = rows
        self.count = count
        self._arrays = arrays
        #: The bytes that its tensors take.
        self.byte_size = sum(map(_memory, arrays.values()))
        #: The key by which a jitted model finds its executable.
        self._key: Hashable = None

    def begin(self, begun: Callable[[Mapping[str, Array], int], dict[str, Array]]) -> None:
        """Adds the state of a new sequence to the inputs of this warmup sample.

        ``begun``: is called with the sample's inputs and number of rows, and returns the state's arrays by name.
        """
        self._arrays |= begun(self._arrays, self.rows)

    def run(self, model: RunnableModel, model_name: str, check: CheckDevice = works) -> Mapping[str, Array]:
        """Runs this sample request ``self.count`` times on ``model`` and returns the outputs of the last run.

        ``check``: raises an error if the device has failed. Raises InvalidArgument if the model fails.
        """
        for _ in range(self.count):
            execution = Execution([self.request(model_name)], time.monotonic_ns())
            run(model, execution, check)
            for result in execution.results:
                if isinstance(result, ServingError):
                    raise self.failed(result.message)
                made = result
        return made

    def run_jitted(
        self, model: JaxModel, runner: RunnableModel, model_name: str, check: CheckDevice = works
    ) -> Mapping[str, Array]:
        """Runs this sample request ``self.count`` times on ``runner`` and returns the outputs of the last run.

        ``runner``: ``model`` or an instance of ``model``. ``check``: raises an error if the device has failed. Compiles the
        request's program first if ``model`` lacks it. Raises errors of compiling unchanged, and InvalidArgument if a run fails.
        """
        self._key = model.key(self._arrays)
        wanted = model.wanted_by([self.request(model_name)])
        if model.executables.find(wanted) is None:
            model.executables.add(model.executables.compile(wanted))
        return self.run(runner, model_name, check)

    def run_stepped(self, model: SteppedModel, model_name: str) -> None:
        """Makes ``self.count`` requests of this sample. Inserts each request into slot 0 and runs one step.

        Raises InvalidArgument if the insertion or the step fails. Call it only during the load of the model, because it drops
        the state of all slots.
        """
        for _ in range(self.count):
            request = self.request(model_name)
            try:
                model.key(request.arrays)
                model.insert([request], [0]).read()
                model.step(0, frozenset()).read()
            except ServingError as error:
                raise self.failed(error.message) from None
            except BaseException as error:  # also sys.exit() in a callback of the model
                raise self.failed(model.describe(error.__cause__ or error)) from error
            finally:
                # Nobody's state: the first request begins with a new one.
                model.lost()

    def request(self, model_name: str) -> Request:
        """Makes a request of the sample, without submitter and model version."""
        # It waits in no queue, where whose a request is counts.
        version, submitter = cast(Any, None), cast(Any, SimpleNamespace(owner=None))
        prepared = PreparedRequest(model_name)
        own = RequestRecord(0, prepared)
        return Request(
            version, submitter, prepared, own, self._key, self.rows, self._arrays, {}, [], time.monotonic_ns()
        )

    def failed(self, reason: str) -> InvalidArgument:
        return InvalidArgument(f"{self.name} failed: {reason}")


def samples(
    config: ModelConfig, described: Signature, folder: Path, more: Mapping[str, Array] | None = None
) -> list[Sample]:
    """Makes the warmup samples of a model, without those that are named after one of its derivatives.

    ``folder``: the model's folder, with files in ``warmup/``. ``more``: a row of values for each input that the worker adds.
    Raises InvalidArgument: a sample does not fit the model or cannot be read, or the samples are too large or too many.
    """
    made: list[Sample] = []
    room = MAX_BYTE_SIZE
    # One that is named after a kind of derivative is that derivative's.
    settings = [setting for setting in config.model_warmup if setting.name.partition(".")[0] not in KINDS]
    count = sum(setting.count or 1 for setting in settings)
    if count > MAX_COUNT:
        raise InvalidArgument(
            f"model '{described.model}': the samples of model_warmup are to be run {count} times, at most {MAX_COUNT} are"
        )
    for setting in settings:
        made.append(_sample(setting, described, folder, room, more or {}))
        room -= made[-1].byte_size
    return made


def _sample(setting: Any, described: Signature, folder: Path, room: int, more: Mapping[str, Array]) -> Sample:
    what = f"model '{described.model}': model_warmup '{setting.name}'"
    rows = setting.batch_size or 1
    if described.batches and rows > described.max_batch_size:
        raise InvalidArgument(f"{what}: batch_size {rows}, max_batch_size is {described.max_batch_size}")
    missing = [name for name, spec in described.inputs.items() if not spec.optional and name not in setting.inputs]
    if missing:
        raise InvalidArgument(f"{what}: input '{missing[0]}' is missing")
    arrays: dict[str, Array] = {}
    for name in setting.inputs:
        spec = described.inputs.get(name)
        if spec is None:
            raise InvalidArgument(f"{what}: the model has no input '{name}'")
        lead = (rows,) if described.batches else ()
        arrays[name] = _tensor(f"{what}: input '{name}'", setting.inputs[name], spec, lead, folder, room)
        room -= _memory(arrays[name])
    # In the order of the model, as requests have them.
    arrays = {name: arrays[name] for name in described.inputs if name in arrays}
    arrays |= {name: array.repeat(rows, axis=0) if described.batches else array for name, array in more.items()}
    return Sample(f"warmup sample '{setting.name}'", arrays, rows if described.batches else 1, setting.count or 1)


def _tensor(what: str, given: Any, spec: TensorSpec, lead: tuple[int, ...], folder: Path, room: int) -> Array:
    datatype, dims = datatypes.from_model_config(data_type_name(given)), tuple(given.dims)
    if datatype != spec.datatype or not spec.fits(dims):
        raise InvalidArgument(f"{what} is {datatype}{list(dims)}, the model takes {spec.datatype}{list(spec.dims)}")
    shape = (*lead, *dims)
    size = byte_size(datatype, shape, what)
    size = _OBJECT_BYTE_SIZE * math.prod(shape) if size is None else size
    if size > room:
        raise _too_large(what, size)
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            made = _zeros(spec, shape)
        case "random_data":
            made = _random(spec, shape)
        case "input_data_file":
            made = array(_file(what, given.input_data_file, folder, room), datatype, shape, what)
        case _:
            raise InvalidArgument(f"{what} has none of zero_data, random_data and input_data_file")
    return made.reshape(lead + spec.to_model(dims)) if spec.reshaped else made


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    if spec.datatype != "BYTES":
        return np.zeros(shape, spec.dtype)
    return np.full(shape, b"", np.object_)


def _random(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    """Returns random values for the datatype of ``spec``: floats from 0 to 1, integers, booleans or characters."""
    chance = np.random.default_rng(_SEED)
    if spec.datatype == "BYTES":
        made = np.empty(shape, np.object_)
        made.ravel()[:] = [bytes((code,)) for code in chance.integers(32, 127, made.size).tolist()]
        return made
    if spec.datatype == "BOOL":
        return chance.integers(0, 2, shape).astype(np.bool_)
    if spec.dtype.kind in "iu":
        limits = np.iinfo(spec.dtype)
        return chance.integers(limits.min, limits.max, shape, spec.dtype, endpoint=True)
    return chance.random(shape).astype(spec.dtype)


def _file(what: str, name: str, folder: Path, room: int) -> bytes:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidArgument(f"{what}: input_data_file must be a file name, without folders")
    try:
        with open(folder / "warmup" / name, "rb", opener=regular) as file:
            content = file.read(room + 1)
    except OSError as error:
        raise InvalidArgument(f"{what}: file '{name}' cannot be read: {error.strerror}") from error
    if len(content) > room:
        raise _too_large(what, len(content))
    return content


def _too_large(what: str, byte_size: int) -> InvalidArgument:
    return InvalidArgument(f"{what}: {byte_size} bytes; all samples together may have {MAX_BYTE_SIZE}")


def _memory(array: Array) -> int:
    """Returns about how many bytes of memory an array takes, with the Python objects in it."""
    return array.size * _OBJECT_BYTE_SIZE if array.dtype == np.object_ else array.nbytes

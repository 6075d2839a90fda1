"""Passes properties of requests to JAX and host models whose model.py asks for them.

    request = {"seed": "INT64", "temperature": ("FP32", 0.7)}      for each a datatype, or a pair of datatype and default
    apply(params, inputs, request)                                 with state: apply(params, inputs, state, request)

``id``, ``priority``, ``timeout`` and ``sequence_*`` are fields of every request. Any other name is a parameter of the request.
The worker makes an input of each property, with one element for each row, under a name that clients cannot use. If model.py
says ``strict_parameters = True``, a request with a parameter that ``request`` does not name is refused.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tensord.config import header_pattern
from tensord.config.model_config import ModelConfig
from tensord.config.options import Options
from tensord.shm.arrays import DTYPES, Array
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import TELLING_PARAMETER, Parameter, PreparedRequest, RequestRecord, all_parameters
from tensord.workers.declarations.declaration_names import flag
from tensord.workers.tensors.signature import TensorSpec, meant_datatype

_log = logging.getLogger(__name__)
_PREFIX = "request."
#: How many unknown parameters of a version the log is told of, and how many characters of each: clients choose their names.
_MOST_TOLD, _MOST_NAMED = 8, 64
_KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "a text"}
#: Property that every request has -> how to read it, and its value where the client does not give it.
_OWN: Mapping[str, tuple[Callable[[RequestRecord], Parameter], Parameter]] = {
    "id": (lambda own: own.client_id, ""),
    "priority": (lambda own: own.priority, 0),
    "timeout": (lambda own: own.timeout_us, 0),
    "sequence_id": (lambda own: own.sequence_id, 0),
    "sequence_start": (lambda own: own.sequence_start, False),
    "sequence_end": (lambda own: own.sequence_end, False),
}


class _Asked(NamedTuple):
    name: str
    spec: TensorSpec
    #: None: each request must have it.
    default: Parameter | None


class RequestInputs:
    """Makes inputs for a model version from properties of its requests, such as id, priority and parameters."""

    def __init__(self, model: str, asked: list[_Asked], batches: bool) -> None:
        self._model = model
        self._asked = asked
        self._batches = batches
        #: The inputs by their names in the program.
        self.specs: dict[str, TensorSpec] = {each.spec.name: each.spec for each in asked}
        #: Arrays for a row that no request fills.
        self.nobody: dict[str, Array] = {each.spec.name: self._array(each, _zero(each.spec), 1) for each in asked}

    def arrays(self, prepared: PreparedRequest, record: RequestRecord, rows: int) -> dict[str, Array]:
        """Returns input arrays by name: one array for each property of a request that model.py asks for.

        ``prepared`` and ``record`` together are the request. ``rows``: how many rows the request has.
        Raises InvalidArgument: a property is missing, or has a wrong type or value.
        """
        return {each.spec.name: self._array(each, self._given(each, prepared, record), rows) for each in self._asked}

    def _given(self, asked: _Asked, prepared: PreparedRequest, own: RequestRecord) -> Parameter:
        if asked.name in _OWN:
            return _OWN[asked.name][0](own)
        given = all_parameters(prepared, own).get(asked.name, asked.default)
        if given is None:
            raise InvalidArgument(f"parameter '{asked.name}' is missing, model '{self._model}' needs it")
        return given

    def _array(self, asked: _Asked, given: Parameter, rows: int) -> Array:
        value = _element(f"model '{self._model}': {asked.name!r} of the request", asked.spec, given)
        return np.full((rows, 1) if self._batches else (1,), value, asked.spec.dtype)

    def telling(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls a model's ``apply`` with a dict of the request's properties as the last argument.

        The function gets the client's inputs and the properties, such as ``priority``, in one dict, which it does not change.
        """

        def of_inputs(parameters: Any, inputs: dict[str, Any], *state: Any) -> Any:
            own, request = self.parted(inputs)
            return apply(parameters, own, *state, request)

        return of_inputs

    def parted(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separates the client's inputs from inputs that the worker has made of a request's properties, such as the priority.

        Returns two dicts. The first has the client's inputs by name. The second has the other inputs by the name of the property.
        """
        names = {each.spec.name: each.name for each in self._asked}
        own = {name: array for name, array in inputs.items() if name not in names}
        return own, {name: inputs[key] for key, name in names.items()}

    def __repr__(self) -> str:
        return f"<RequestInputs {', '.join(each.name for each in self._asked)}>"


class KnownParameters:
    """Checks whether a model knows the parameters, such as ``temperature``, that a client sends with a request.

    If model.py sets ``strict_parameters``, a request with an unknown parameter is refused. Otherwise the parameter is logged.
    """

    def __init__(self, config: ModelConfig, module: ModuleType, options: Options) -> None:
        """Collects the request parameters that a model knows: those in ``request`` of model.py, and forwarded headers.

        Fronts forward the headers whose names match ``header_forward_pattern`` in ``options``.
        Raises InvalidArgument if ``strict_parameters`` in model.py is no bool.
        """
        self._model, self._names = config.name, [*map(str, getattr(module, "request", {}))]
        self._strict, self._told = flag(self._model, module, "strict_parameters"), set[str]()
        #: Headers that fronts forward are parameters of every model.
        patterns = (options.http.header_forward_pattern, options.grpc.header_forward_pattern)
        self._headers = [header_pattern.compiled(pattern) for pattern in patterns if pattern]

    def check(self, given: Iterable[str], label: str) -> None:
        """Logs the parameters in ``given`` that the model does not know, or refuses the request.

        ``given``: the names of a request's parameters. ``label``: the beginning of the error's text.
        Raises InvalidArgument if a parameter is unknown and ``strict_parameters`` is set.
        """
        for name in given:
            short = name[:_MOST_NAMED]
            told = short in self._told or (len(self._told) >= _MOST_TOLD and not self._strict)
            if told or name in (*self._names, TELLING_PARAMETER) or any(each.search(name) for each in self._headers):
                continue
            near = difflib.get_close_matches(short, self._names, 1)
            more = f"did you mean '{near[0]}'?" if near else f"it knows {', '.join(map(repr, self._names)) or 'none'}"
            said = f"parameter {short!r} of a request is unknown to model '{self._model}'; {more}"
            if self._strict:
                raise InvalidArgument(label + said)
            self._told.add(short)
            _log.warning("%s (request of model.py names them; strict_parameters = True refuses others)", said)


def request_inputs(config: ModelConfig, module: ModuleType) -> RequestInputs | None:
    """Reads from model.py which properties of a request, such as its id or a parameter, are passed to the model as inputs.

    Returns None if there are none. Raises InvalidArgument if the declaration is wrong, or if the model's answers are cached.
    """
    declared, host = getattr(module, "request", {}), bool(getattr(module, "host", False))
    model, batches = config.name, config.max_batch_size > 0
    if not isinstance(declared, Mapping):
        raise InvalidArgument(f"model '{model}': request of model.py must be a dict of names to datatypes")
    asked = [_asked(f"model '{model}': request '{name}'", str(name), each, host) for name, each in declared.items()]
    if not asked:
        return None
    if config.response_cache.enable:
        raise InvalidArgument(
            f"model '{model}': its answers depend on '{asked[0].name}' of a request, which the response cache does not look at"
        )
    return RequestInputs(model, asked, batches)


def _asked(what: str, name: str, declared: object, host: bool) -> _Asked:
    datatype, *rest = declared if isinstance(declared, tuple) else (declared,)
    if not isinstance(datatype, str) or datatype not in DTYPES or len(rest) > 1:
        meant = meant_datatype(datatype.partition("[")[0]) if isinstance(datatype, str) else None
        raise InvalidArgument(
            f"{what}: declared as {declared!r}; expected a datatype such as 'FP32', or a pair of it and a default"
            + (f"; did you mean '{meant}'?" if meant else "")
        )
    if datatype == "BYTES" and not host:
        raise InvalidArgument(f"{what}: BYTES cannot be given to a jitted function")
    spec = TensorSpec(_PREFIX + name, datatype, DTYPES[datatype], (1,), (1,), (None,))
    if name not in _OWN:
        default = rest[0] if rest else None
        if rest:
            _element(f"{what}: its default", spec, default)
        return _Asked(name, spec, default)
    if rest:
        raise InvalidArgument(f"{what}: it needs no default, every request has one")
    if name != "sequence_id" or datatype != "BYTES":
        _element(what, spec, _OWN[name][1])
    return _Asked(name, spec, None)


def _zero(spec: TensorSpec) -> Parameter:
    return "" if spec.datatype == "BYTES" else False if spec.datatype == "BOOL" else 0


def _element(what: str, spec: TensorSpec, given: Any) -> Any:
    kind = spec.dtype.kind
    if spec.datatype == "BYTES":
        if isinstance(given, str):
            return given.encode()
        if isinstance(given, bytes):  # a default, as the model gets it
            return given
        if spec.name == _PREFIX + "sequence_id" and type(given) is int:
            # 0 means no sequence.
            return str(given).encode() if given else b""
    elif spec.datatype == "BOOL":
        if isinstance(given, bool):
            return given
    elif type(given) is int and kind in "iu":
        limits = np.iinfo(spec.dtype)
        if limits.min <= given <= limits.max:
            return given
        raise InvalidArgument(f"{what} is {given}, {spec.datatype} goes from {limits.min} to {limits.max}")
    elif type(given) in (int, float) and kind not in "iu":
        with np.errstate(over="ignore"):
            made = np.asarray(float(given)).astype(spec.dtype)
        if math.isfinite(given) and not np.isfinite(made.astype(np.float64)):
            raise InvalidArgument(f"{what} is {given}, which {spec.datatype} cannot hold")
        return made
    raise InvalidArgument(f"{what} is {_KINDS.get(type(given), type(given).__name__)}, {spec.datatype} is expected")

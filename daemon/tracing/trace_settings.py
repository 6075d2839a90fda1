"""Stores trace settings for all models and for single models, and sends changed settings to fronts and workers.

If a model has no value of its own for a setting, the current value for all models applies. If there is no value for all models,
the value in the daemon's configuration applies. Clients cannot change where traces are written.
Source: Triton docs/protocol/extension_trace.md. Names of settings and error messages are those of a Triton server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tensord.config.options import TraceOptions
from tensord.shm.common.derivatives import check_not_derivative
from tensord.shm.control_records import TraceChanged, TraceCleared
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.shm.operations import ChangeTrace
from tensord.shm.trace_counters import SampleCounter, TraceBudget

LEVELS = {"TIMESTAMPS": 1, "TENSORS": 2}
FILE_REFUSED = "trace file location can not be updated through network protocol"
_UINT32, _INT32 = (1 << 32) - 1, (1 << 31) - 1
#: Setting -> field of ChangeTrace, least and largest value.
_NUMBERS = {
    "trace_rate": ("rate", 0, _UINT32),
    "trace_count": ("count", -1, _INT32),
    "log_frequency": ("log_frequency", 0, _UINT32),
}
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,40}")


def parse(model: str, settings: Mapping[str, Sequence[str]]) -> ChangeTrace:
    """Parses the trace settings that a client sent for ``model``: a list of values for each setting, such as ``trace_rate``.

    An empty list removes the model's own value of the setting. Unknown settings and unknown trace levels are ignored.
    Raises Unsupported if ``settings`` has a "trace_file". Raises InvalidArgument if a value is invalid.
    """
    if "trace_file" in settings:
        raise Unsupported(FILE_REFUSED)
    given: dict[str, int] = {}
    cleared: list[str] = []
    levels = settings.get("trace_level")
    if levels is not None:
        if not levels:
            cleared.append("level")
        elif "OFF" in levels and len(levels) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        elif known := [LEVELS.get(level, 0) for level in levels if level == "OFF" or level in LEVELS]:
            given["level"] = sum(set(known))
    for setting, (name, least, largest) in _NUMBERS.items():
        values = settings.get(setting)
        if values is None:
            continue
        if not values:
            cleared.append(name)
        elif len(values) > 1:
            raise InvalidArgument(f"expect only 1 value for '{setting}'")
        else:
            given[name] = _number(setting, values[0], least, largest)
    return ChangeTrace(model, cleared=tuple(cleared), **given)


def _number(setting: str, text: str, least: int, largest: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise InvalidArgument(f"Unable to parse '{setting}', got: {text}")
    value = int(text)
    if setting == "trace_count" and -_INT32 - 1 <= value < least:
        raise InvalidArgument(f"Unable to parse '{setting}'. Expecting value >= {least}, got:{text}")
    if not least <= value <= largest:
        raise InvalidArgument(f"Unable to parse '{setting}', value is out of range [ {least}, {largest} ], got: {text}")
    return value


@dataclass(frozen=True, slots=True)
class Values:
    """The values of the trace settings of one model or of all models. ``level`` is a bit mask: 1 timestamps, 2 tensors."""

    level: int
    rate: int
    count: int
    log_frequency: int

    def check(self, target: str) -> None:
        """Raises InvalidArgument if ``level`` is not 0, but ``rate`` is 0 or ``target``, a file or collector, is ""."""
        if not self.level:
            return
        if not self.rate:
            raise InvalidArgument("Attempting to set invalid trace setting :sample rate must be non-zero")
        if not target:
            raise InvalidArgument("Attempting to set invalid trace setting :trace file name is not given")


class _Scope:
    def __init__(self, values: Values, own: frozenset[str]) -> None:
        self._values = values
        #: Names of the values that are not inherited from the scope before.
        self.own = own
        #: The shared counter of traces left; None: there is no limit.
        self.budget = None if values.count < 0 else TraceBudget.create(values.count)
        #: The shared counter of requests; None: no request is sampled.
        self.turn: SampleCounter | None = None
        try:
            if values.level:
                self.turn = SampleCounter.create(values.rate)
        except OSError:
            self.close()
            raise

    @property
    def values(self) -> Values:
        if self.budget is None:
            return self._values
        return dataclasses.replace(self._values, count=self.budget.remaining())

    @property
    def fds(self) -> tuple[int, ...]:
        if self.turn is None:
            return ()
        return (self.turn.fd,) if self.budget is None else (self.turn.fd, self.budget.fd)

    def close(self) -> None:
        for counter in (self.turn, self.budget):
            if counter is not None:
                counter.close()


class TraceSettings:
    """Stores trace settings by model name. A setting under "" applies to every model that has no own value for this setting.

    ``known``: takes a model's name and returns whether this model is served. ``publish``: called as ``publish(record, *fds)``
    after a change, to send the record of the change to fronts and workers.
    """

    def __init__(self, options: TraceOptions, known: Callable[[str], bool], publish: Callable[..., None]) -> None:
        self._file = options.file
        self._target = options.file or options.otlp
        self._known = known
        self._publish = publish
        level = sum(LEVELS[name] for name in set(options.level))
        self._defaults = Values(level, options.rate, options.count, options.log_frequency)
        self._scopes = {"": _Scope(self._defaults, frozenset())}

    @property
    def on(self) -> bool:
        """Returns whether there is a file or a collector for traces."""
        return bool(self._target)

    def change(self, wanted: ChangeTrace) -> bytes:
        """Changes the trace settings of a model, or of all models if its name is "". Returns the model's settings as JSON.

        Raises InvalidArgument if the model is unknown, or if the settings do not fit together. Raises OSError if no counter can
        be made for lack of descriptors. In all these cases nothing is changed.
        """
        check_not_derivative(wanted.model)
        if wanted.model and not self._known(wanted.model):
            raise InvalidArgument(f"Request for unknown model : {wanted.model}")
        given = {name: value for name in Values.__slots__ if (value := getattr(wanted, name)) is not None}
        if given or wanted.cleared:
            self._apply(wanted.model, given, frozenset(wanted.cleared))
        scope = self._scopes.get(wanted.model, self._scopes[""])
        return msgspec.json.encode(self._described(scope.values))

    def _apply(self, model: str, given: Mapping[str, int], cleared: frozenset[str]) -> None:
        planned: dict[str, tuple[Values, frozenset[str]]] = {}
        planned[model] = self._planned(model, given, cleared, self._defaults if not model else self._scopes[""].values)
        if not model:
            # Models inherit what they have not set themselves.
            for other in self._scopes.keys() - {""}:
                planned[other] = self._planned(other, {}, frozenset(), planned[""][0])
        for values, _ in planned.values():
            values.check(self._target)
        made: dict[str, _Scope] = {}
        with contextlib.ExitStack() as undo:
            for name, (values, own) in planned.items():
                if own or not name:
                    made[name] = _Scope(values, own)
                    undo.callback(made[name].close)
            for scope in made.values():
                if scope.budget is not None:
                    scope.budget.remaining()  # which saying the change needs a descriptor for, too
            undo.pop_all()
        for name in planned:
            former = self._scopes.pop(name, None)
            if former is not None:
                former.close()
            if name in made:
                self._scopes[name] = made[name]
                self._publish(*self._record(name))
            else:
                self._publish(TraceCleared(name))

    def _planned(
        self, name: str, given: Mapping[str, int], cleared: frozenset[str], before: Values
    ) -> tuple[Values, frozenset[str]]:
        scope = self._scopes.get(name)
        own = ((scope.own if scope is not None else frozenset()) | given.keys()) - cleared
        kept = {} if scope is None else {key: getattr(scope.values, key) for key in own}
        return dataclasses.replace(
            before, **{**kept, **{key: value for key, value in given.items() if key in own}}
        ), own

    def _record(self, name: str) -> tuple[Any, ...]:
        scope = self._scopes[name]
        values = scope.values
        return TraceChanged(name, values.level, values.rate, values.log_frequency, self._file), *scope.fds

    def records(self) -> list[tuple[Any, ...]]:
        """Returns tuples (record, *fds) to be sent to a new front or worker. Together the tuples contain all trace settings."""
        return [self._record(name) for name in self._scopes]

    def _described(self, values: Values) -> dict[str, Any]:
        """Converts trace settings to a dict with the names and types of Triton's protocol."""
        return {
            "trace_level": [name for name, bit in LEVELS.items() if values.level & bit] or ["OFF"],
            "trace_rate": str(values.rate),
            "trace_count": str(values.count),
            "log_frequency": str(values.log_frequency),
            "trace_file": self._file,
            "trace_mode": "triton" if self._file or not self._target else "opentelemetry",
        }

    def close(self) -> None:
        """Closes all file descriptors of this object. Call it only once."""
        for scope in self._scopes.values():
            scope.close()

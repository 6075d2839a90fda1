"""Keeps a front's copy of the state of all models: the last ModelState of each version that the supervisor sent."""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec

from tensord.shm.common.derivatives import lacks, of_model, original
from tensord.shm.control_records import ModelGone, ModelState, Readiness
from tensord.shm.errors import UNKNOWN_MODEL, InvalidArgument, NotFound, Unavailable

_LIMIT = (1 << 63) - 1


class SequenceBatching(msgspec.Struct):
    """The settings of a model for sequences: after how many idle microseconds it forgets a sequence."""

    max_sequence_idle_microseconds: Annotated[int, msgspec.Meta(ge=0)] = 1_000_000


class BatchSettings(msgspec.Struct):
    """The settings of a model's configuration that fronts need.

    If ``max_batch_size`` is 0, tensors have no batch dimension.
    """

    max_batch_size: int = 0
    sequence_batching: SequenceBatching = msgspec.field(default_factory=SequenceBatching)


def configured(state: ModelState) -> BatchSettings:
    """Returns the batch settings from the configuration of a model."""
    return msgspec.json.decode(state.config or b"{}", type=BatchSettings, strict=False)


class ModelStates:
    """Keeps the state of every version of every model, and finds a state by model name and version number."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, ModelState]] = {}
        #: The newest version that serves, of models that have one: what most requests ask for.
        self._newest: dict[str, ModelState] = {}
        #: The readiness of the whole daemon.
        self.readiness = Readiness()
        #: Grows with every change, so that caches notice by one comparison.
        self.edition = 0

    def update(self, state: ModelState) -> None:
        """Stores ``state`` for a model version and for its derivatives, such as "M.pull_back" for the model "M"."""
        former = self._models.get(state.name, {}).get(state.version)
        self._models.setdefault(state.name, {})[state.version] = state
        for gone in () if former is None else former.derivatives:
            self._remove(gone.name, state.version)
        for each in state.derivatives:
            own = msgspec.structs.replace(
                state, name=each.name, metadata=each.metadata, config=each.config, derivatives=()
            )
            self._models.setdefault(each.name, {})[state.version] = own
            self._changed(each.name)
        self._changed(state.name)

    def remove(self, gone: ModelGone) -> None:
        """Removes the states of the version in ``gone`` and of its derivatives, such as "M.pull_back" for the model "M"."""
        state = self._remove(gone.name, gone.version)
        for each in () if state is None else state.derivatives:
            self._remove(each.name, gone.version)

    def _remove(self, name: str, version: int) -> ModelState | None:
        versions = self._models.get(name, {})
        state = versions.pop(version, None)
        if not versions:
            self._models.pop(name, None)
        self._changed(name)
        return state

    def judge(self, readiness: Readiness) -> None:
        """Stores whether the daemon is ready, as the supervisor has judged."""
        self.readiness = readiness
        self.edition += 1

    def _changed(self, name: str) -> None:
        self.edition += 1
        ready = self.ready_versions(name)
        if ready:
            self._newest[name] = self._models[name][ready[-1]]
        else:
            self._newest.pop(name, None)

    def find(self, name: str, version: int = 0) -> ModelState:
        """Returns the state of a model version that serves requests. ``version`` 0 means the newest version that serves.

        A version whose workers are being replaced still serves: requests for it wait.
        Raises Unavailable if the version does not serve now, but the daemon expects it to serve later.
        Raises NotFound if the daemon does not expect the version to serve, or if the model or the version is unknown.
        """
        if not version and name in self._newest:
            return self._newest[name]
        versions = self._models.get(name)
        if versions is None:
            model, kind = of_model(name)
            if original(name)[0] in self._models:
                why = lacks(model, kind, self.find(model, version).lacking)
                raise NotFound(f"{UNKNOWN_MODEL}'{name}' is not found: {why}")
            raise NotFound(f"{UNKNOWN_MODEL}'{name}' is not found")
        if version in versions and versions[version].state == "READY":
            return versions[version]
        # What is said of number 0 is said of all versions.
        asked = [state for number, state in sorted(versions.items()) if version in (0, number) or not number]
        of, why = f"'{name}'{f' version {version}' if version else ''}", "; ".join(filter(None, map(_why, asked)))
        if any(state.state == "LOADING" for state in asked):
            raise Unavailable(f"model {of} is being loaded")
        if any(state.awaited for state in asked):
            raise Unavailable(f"model {of} cannot be served now: {why}")
        missing = "is not found" if version else "has no available versions"
        raise NotFound(f"{UNKNOWN_MODEL}{of} {missing}{why and ': '}{why}")

    def expect(self, name: str, version: int = 0) -> ModelState:
        """Returns the state of a model version that serves or is being loaded.

        ``version`` 0 means the newest version that serves or, if none serves, the newest that is being loaded. While a model is
        being loaded, the state of a derivative that is not known yet is that of its model. Raises as ``find`` does if no such
        state is known.
        """
        versions = self._models.get(name, {})
        if version:
            state = versions.get(version)
        elif (state := self._newest.get(name)) is None:
            loading = [number for number, each in versions.items() if each.state == "LOADING"]
            state = versions[max(loading)] if loading else None
        if state is None and (model := original(name)[0]) != name:
            with contextlib.suppress(NotFound):  # a derivative is known once its model is loaded
                if (known := self.expect(model, version)).state == "LOADING":
                    return known
        return state if state is not None and state.state in ("READY", "LOADING") else self.find(name, version)

    def is_ready(self, name: str, version: int = 0) -> bool:
        """Returns whether a worker can answer requests for a model version now. ``version`` 0 means the newest that serves."""
        try:
            return bool(self.find(name, version).workers)
        except (NotFound, Unavailable):
            return False

    def ready_versions(self, name: str) -> list[int]:
        """Returns the numbers of the versions of a model that serve requests, ascending."""
        versions = self._models.get(name, {})
        return sorted(number for number, state in versions.items() if state.state == "READY")


def _why(state: ModelState) -> str:
    """Returns the reason why the version of ``state`` could not be loaded or cannot be served, or "" if there is none."""
    if not state.awaited and (state.state != "UNAVAILABLE" or state.reason == "unloaded"):
        return ""
    return f"version {state.version}: {state.reason}" if state.version else state.reason


def malformed_version(text: str) -> InvalidArgument:
    """Returns the error for a model version that is no int64, in Triton's words."""
    return InvalidArgument(
        f"failed to get model version from specified version string '{text[:64]}' (details: stol), "
        "version should be an integral value > 0"
    )


def parse_version(model: str, text: str) -> int:
    """Returns the version number in ``text``. The caller must have checked that ``text`` consists of digits.

    ``model``: the model's name, for error messages.
    Raises InvalidArgument if the number exceeds an int64 or ``text`` has over 40 digits. Raises NotFound if the number is 0.
    """
    number = int(text) if len(text) <= 40 else _LIMIT + 1
    if number > _LIMIT:
        raise malformed_version(text)
    if number == 0:
        raise NotFound(f"Request for unknown model: '{model}' version 0 is not found")
    return number

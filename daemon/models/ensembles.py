"""Decides which models are loaded before an ensemble that uses them, and when ensembles are unloaded or loaded again.

    an ensemble is loaded      its members (the models that it uses) are loaded first, unless they are loaded already
    a member is unloaded       the ensembles that use this member are unloaded too, until the member is loaded again
    a member is reloaded       the ensembles that use this member are loaded again after the member
    an ensemble is unloaded    its members stay loaded, unless the client asked to unload also those that only it used

Does no I/O. ``tensord.daemon.models.changes`` loads and unloads the models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tensord.config import ensemble_checks, model_config
from tensord.config.model_config import ModelConfig
from tensord.daemon.models import placement
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.models.versions import IndexState, ModelEntry, VersionEntry, named
from tensord.shm.common.derivatives import described, original
from tensord.shm.control_records import ModelGone, ModelState
from tensord.shm.device_names import model_of
from tensord.shm.errors import InvalidArgument


@dataclass(slots=True)
class _Built:
    """An ensemble as it was last loaded, with a digest of the files of each member at that time."""

    found: FoundModel
    #: The fingerprint that each member had then.
    fingerprints: dict[str, str]
    #: True if it was unloaded because a member was.
    down: bool = False


class Ensembles:
    """Knows which models each ensemble uses, and decides which ensembles must be unloaded or loaded again."""

    def __init__(self, models: Mapping[str, ModelEntry]) -> None:
        """Starts without ensembles. ``models``: all models by name, which this object only reads."""
        #: The loads of ensembles that wait for members, and of models that have others loaded.
        self.waits = LoadWaits()
        self._models = models
        #: The ensembles that were loaded and not unloaded by name since, whether they can be served now or not.
        self._built: dict[str, _Built] = {}

    def check(
        self, found: FoundModel, devices: Sequence[str], reasons: Mapping[str, str] = MappingProxyType({})
    ) -> FoundModel:
        """Checks that the members of an ensemble are loaded. Returns the ensemble with its full configuration and its devices.

        The fingerprint of the result changes whenever a member is replaced.
        ``devices``: the devices of all workers. ``reasons``: why members failed to load, by the name of the member.
        Raises InvalidArgument if a member is not loaded, or if no worker has all members.
        """
        for name, number in found.members:
            if self._ready(name, -1) is None:
                raise ensemble_checks.not_loaded(found.name, name, -1, reasons.get(name, ""))
            if self._ready(name, number) is None:
                raise ensemble_checks.not_loaded(found.name, name, number, "")
        encoded = ensemble_checks.completed(found.config, self._config).SerializeToString(deterministic=True)
        # The fingerprint changes when a member is replaced.
        parts = (found.fingerprint, *self._fingerprints(found).values())
        fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        places = self._devices(found)
        if any(
            (member := self._ready(*each)) and member.described and member.described.sticky for each in found.members
        ):
            # Its sequences have to stay where they began, which nobody else knows of it.
            places = (placement.choose(("model", found.name), places or tuple(devices)),)
        return dataclasses.replace(found, config=encoded, devices=places, fingerprint=fingerprint)

    def circle(self, name: str, member: str) -> bool:
        """Returns whether the model ``member`` is the ensemble ``name``, or uses it directly or through other ensembles."""
        return name == member or any(self.circle(name, each) for each, _ in self.members(member))

    def _config(self, name: str, number: int) -> ModelConfig:
        version = self._ready(original(name)[0], number)
        assert version is not None
        assert version.described is not None
        traits = version.described
        derivatives = {each.name: each.config for each in traits.derivatives}
        return model_config.parse_json(described(name, traits.config, derivatives, traits.lacking).decode(), name)

    def _devices(self, found: FoundModel) -> tuple[str, ...]:
        places = {name: self._ready(name, number) for name, number in found.members}
        named = {name: version.devices for name, version in places.items() if version is not None and version.devices}
        if not named:
            return ()  # all devices
        common = [
            device for device in next(iter(named.values())) if all(device in devices for devices in named.values())
        ]
        if not common:
            listed = ", ".join(f"'{name}' on {' and '.join(devices)}" for name, devices in named.items())
            alone = [name for name, devices in named.items() if any(map(model_of, devices))]
            what = (
                f"'{alone[0]}' is isolated, which no model of an ensemble with others can be"
                if alone
                else "those with the same parameter tensord_together are on one"
            )
            raise InvalidArgument(
                f"ensemble '{found.name}' needs its models in one worker, and no worker has all of them: {listed} ({what})"
            )
        return tuple(common)

    def add(self, found: FoundModel) -> None:
        """Stores an ensemble whose load begins."""
        self._built[found.name] = _Built(found, self._fingerprints(found))

    def expect(self, found: FoundModel) -> None:
        """Stores an ensemble whose load failed because it uses models that do not serve, to load it once these models serve.

        Does nothing if a version of the ensemble serves already, if all models that it uses serve, or if a client must ask for
        the load of a missing model.
        """
        if self._ready(found.name, -1) is None and self.awaits(found.members):
            self._built[found.name] = _Built(found, self._fingerprints(found), down=True)

    @property
    def names(self) -> Collection[str]:
        """Returns the names of the ensembles that are loaded, or are to be loaded once their members serve."""
        return self._built.keys()

    def drop(self, name: str) -> None:
        """Forgets the ensemble ``name``, so that it is not loaded again when its members change."""
        self._built.pop(name, None)

    def users(self, name: str) -> list[str]:
        """Returns the ensembles that use a model, directly or through others. An ensemble comes before those that it uses."""
        found: dict[str, None] = {}
        for user in self._direct(name):
            for each in (*self.users(user), user):
                found.setdefault(each)
        return list(found)

    def followers(self, name: str) -> list[str]:
        """Returns the ensembles that use the model ``name`` and can be loaded again once this model has been loaded.

        An ensemble is left out if it also uses a second model, and the second model's load waits for the load of ``name``.
        """
        stuck = {user for waiter in self.waits.waiters(name) for user in self.users(waiter)}
        return [user for user in self.users(name) if user not in stuck]

    def take_down(self, names: Iterable[str]) -> list[str]:
        """Marks ensembles to be loaded again once all members serve, and returns their names. The caller must unload them now.

        ``names``: ensembles of which a member is missing. Ensembles that are not served, or are being loaded, are left out.
        """
        gone = [name for name in names if self._ready(name, -1) is not None and not self._busy(name)]
        for name in gone:
            self._built[name].down = True
        return gone

    def lost(self) -> list[str]:
        """Returns the ensembles that the caller must unload because a model that they use does not serve.

        The result may also have ensembles that are already unloaded. The caller must unload these again to update their state.
        """
        broken = [name for name, built in self._built.items() if not self._whole(built.found)]
        gone = self.take_down(dict.fromkeys(each for name in broken for each in (*self.users(name), name)))
        for name in broken:
            built, versions = self._built[name], named(self._models, name, -1)
            awaited = any(version.awaited for version in versions)
            idle = versions and name not in gone and not self._busy(name)
            # One that was given up itself, because workers died of it, is tried again at its own time.
            built.down |= bool(idle) and any(version.awaited and not version.deaths for version in versions)
            if idle and (built.down or awaited) and awaited != bool(self.awaits(built.found.members)):
                built.down = True
                gone.append(name)
        return gone

    def awaits(self, members: Iterable[tuple[str, int]]) -> str:
        """Returns why an ensemble must wait for one of its models, such as "model 'm': it is being loaded".

        ``members``: the name and version of each model of the ensemble. Returns "" if all these models serve, or if a client
        must ask for the load of a missing model.
        """
        found = ""
        for member, number in members:
            why = self.awaits(self.members(member))
            if not why and self._ready(member, number) is None:
                versions = named(self._models, member, number)
                coming = [each for each in versions if each.awaited or each.state is IndexState.LOADING]
                if not coming:
                    return ""
                why = f"model '{member}': {coming[-1].given_up or 'it is being loaded'}"
            found = found or why
        return found

    def failed(self, found: FoundModel) -> None:
        """Notes that reloading the ensemble ``found`` failed. The next try comes after a model of this ensemble is loaded."""
        if found.name in self._built:
            self._built[found.name].down = not self._whole(found)

    def returned(self) -> list[FoundModel]:
        """Returns the ensembles to load again: those with a reloaded model, and those whose missing models all serve now."""
        found: list[FoundModel] = []
        for name, built in self._built.items():
            now = self._fingerprints(built.found)
            changed = any(now[member] not in ("", known) for member, known in built.fingerprints.items())
            busy = any(self._busy(each) for each in (name, *now))
            gone = built.down and self._ready(name, -1) is None
            if (gone or changed) and not busy and self._whole(built.found):
                built.down, built.fingerprints = False, now
                found.append(built.found)
        return found

    def only_used_by(self, name: str, kept: Collection[str]) -> list[str]:
        """Returns the models that only the ensemble ``name`` and the returned ensembles use. Leaves out the models in ``kept``.

        An ensemble comes before the models that it uses.
        """
        gone = [name]
        for each in gone:
            for member, _ in self.members(each):
                if member not in kept and member not in gone and set(self._direct(member)) <= set(gone):
                    gone.append(member)
        return gone[1:]

    def members(self, name: str) -> Iterable[tuple[str, int]]:
        """Returns the name and version of each model that a loaded ensemble uses. Version -1 means the newest."""
        return self._built[name].found.members if name in self._built else ()

    def _direct(self, name: str) -> list[str]:
        return [user for user, built in self._built.items() if name in dict(built.found.members)]

    def _whole(self, found: FoundModel) -> bool:
        return all(self._ready(name, number) is not None for name, number in found.members)

    def _ready(self, name: str, number: int) -> VersionEntry | None:
        ready = [version for version in named(self._models, name, number) if version.state is IndexState.READY]
        return ready[-1] if ready else None

    def _busy(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and (model.running is not None or bool(model.waiting))

    def _fingerprints(self, found: FoundModel) -> dict[str, str]:
        models = {name: self._models.get(name) for name, _ in found.members}
        return {name: f"{m.fingerprint} {m.repeated}" if m and m.fingerprint else "" for name, m in models.items()}

    def __repr__(self) -> str:
        return f"<Ensembles {', '.join(self._built)}>"


def check_found(name: str, members: Mapping[str, FoundModel]) -> None:
    """Raises InvalidArgument if a member of the ensemble ``name`` is in no repository, is in two, or has an invalid folder.

    ``members``: the models to check, by name. An empty path means that a model is in no repository or in two.
    """
    # A folder that is missing, or exists twice, has no path.
    if missing := [member for member, found in members.items() if found.path == Path()]:
        raise InvalidArgument(
            f"ensemble {name} contains models that are not available or ambiguous: {', '.join(missing)}"
        )
    for member, found in members.items():
        if found.error:
            raise InvalidArgument(
                f"ensemble '{name}' depends on '{member}' which is not valid. Model '{member}' failed with error: {found.error}"
            )


class LoadWaits:
    """Knows which loads wait for loads of other models. Refuses a wait by which a load would wait for itself."""

    def __init__(self) -> None:
        #: (model that waits, model it waits for) -> on how many workers.
        self._waits: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def waiting(self, model: str, other: str) -> Iterator[None]:
        """Notes, in a ``with`` block, that the load of ``model`` waits for the load of ``other``.

        If ``model`` is "", nothing is noted.
        Raises InvalidArgument if the load of ``other`` waits for the load of ``model``, directly or through other loads.
        """
        if not model:
            yield
            return
        way = self._way(other, model)
        if way:
            raise InvalidArgument(f"model '{model}' waits for itself: {' -> '.join((model, *way))}")
        self._waits[model, other] += 1
        try:
            yield
        finally:
            self._waits[model, other] -= 1
            self._waits += Counter()  # without those that are nought

    def waiters(self, name: str) -> set[str]:
        """Returns the models whose loads wait for the load of the model ``name``, directly or through other loads."""
        return {model for model, _ in self._waits if model != name and self._way(model, name)}

    def _way(self, start: str, end: str) -> list[str]:
        """Returns a chain of models from ``start`` to ``end`` in which each load waits for the next; []: there is no chain."""
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            for model, other in self._waits:
                if model == way[-1] and other not in seen:
                    seen.add(other)
                    ways.append([*way, other])
        return []

    def __repr__(self) -> str:
        return f"<LoadWaits {sorted(self._waits)}>"


class Coming:
    """Tells the fronts that an ensemble is LOADING while the models of the ensemble are being loaded."""

    def __init__(self, models: Mapping[str, ModelEntry], publish: Callable[[ModelState | ModelGone], None]) -> None:
        """Starts without ensembles. ``models``: all models by name, which this object only reads."""
        self._models = models
        self._publish = publish
        #: The waiting loads: an ensemble's name, and those of its versions that the fronts are told are LOADING.
        self._loads: list[tuple[str, tuple[int, ...]]] = []

    @contextlib.contextmanager
    def published(self, found: FoundModel) -> Iterator[None]:
        """Tells the fronts that the ensemble ``found`` is LOADING. The ``with`` block then loads the ensemble's models.

        If the block raises, tells the fronts the ensemble's state, or that the ensemble is gone if it is new, unless another load
        of the ensemble still waits.
        Tells the fronts nothing if a version of the ensemble serves, is being loaded or is being unloaded.
        """
        load, failed = (found.name, () if self._in_use(found.name) else found.chosen), True
        self._loads.append(load)
        for number in load[1]:
            self._publish(ModelState(found.name, number, "LOADING"))
        try:
            yield
            failed = False
        finally:
            self._loads.remove(load)
            for number in load[1] if failed else ():
                if (found.name, number) not in self._told():
                    # As it is by now: another load of it may have gone on meanwhile.
                    now = named(self._models, found.name, number)
                    self._publish(now[0].state_record() if now else ModelGone(found.name, number))

    def _in_use(self, name: str) -> bool:
        return any(version.in_use for version in named(self._models, name, -1))

    def _told(self) -> Collection[tuple[str, int]]:
        return dict.fromkeys((name, number) for name, numbers in self._loads for number in numbers)

    @property
    def names(self) -> set[str]:
        """Returns the names of the ensembles whose load waits for their members."""
        return {name for name, _ in self._loads}

    def states(self) -> list[ModelState]:
        """Returns a record with the state LOADING for each ensemble whose load waits for its members.

        Ensembles that another load has brought meanwhile are left out.
        """
        return [ModelState(name, number, "LOADING") for name, number in self._told() if not self._in_use(name)]

    def __repr__(self) -> str:
        return f"<Coming {', '.join(name for name, _ in self._loads)}>"

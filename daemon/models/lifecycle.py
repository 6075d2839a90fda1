"""Decides which workers load and unload which versions of models. Does no I/O.

The methods of ``Lifecycle`` return instructions, which ``tensord.daemon.models.changes`` carries out:

    a load begins                  every worker on the model's devices gets a Load record
    a worker serves the version    all front processes learn that this worker serves it
    all workers have answered      the workers unload the versions that the new version replaces, and the load ends

Loads and unloads of one model happen one after another. If an unload of the model, or a load of other files, is requested
while a load runs, the load is cancelled. Whoever waits for the cancelled load gets the outcome of the later load, or an error
if an unload was requested.

If the last worker that serves a version dies, requests for the version wait for the next worker. If two workers die while they
load this version and no other, no worker loads it for 5 s. Then one worker tries. Each further death doubles this, up to 300 s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tensord.config.options import Workers
from tensord.daemon.models.repository import FoundModel, isolated_fraction, load_error
from tensord.daemon.models.versions import (
    IndexState,
    ModelEntry,
    Operation,
    VersionEntry,
    awaits,
    check_given_up,
    has_members,
    member_given_up,
    named,
)
from tensord.shm.control_records import CancelLoad, Load, Loaded, ModelGone, ModelState, Unload
from tensord.shm.device_names import model_of

#: A version is given up until its next try when so many workers died while it alone was loading.
MAX_LOAD_DEATHS = 2
#: Seconds until the next try; twice as long after each further death.
FIRST_RETRY = 5.0
MAX_RETRY = 300.0
#: Why a load failed that an unload has overtaken.
UNLOADED = "it was unloaded before it was ready"


@dataclass(frozen=True, slots=True)
class Send:
    """Instruction to send a record to one worker. ``worker``: the number of the worker process."""

    worker: int
    record: Load | CancelLoad | Unload


@dataclass(frozen=True, slots=True)
class Publish:
    """Instruction to send the attribute ``state``, the new state of a model version, to every front process."""

    state: ModelState | ModelGone


@dataclass(frozen=True, slots=True)
class Forget:
    """Instruction to delete the parameter sets that clients have pushed to a model version.

    If ``outdated`` is true, keeps the sets to which clients have pushed since the last ``Outdate`` instruction for the version.
    """

    name: str
    version: int
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class Outdate:
    """Instruction that later loads of a model version must not use parameters that clients pushed before this instruction."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Instruction to call ``Lifecycle.retry`` after ``seconds``, for a version whose loading has killed workers."""

    name: str
    version: int
    seconds: float
    #: The version's deaths when this was decided; another number by then makes it void.
    deaths: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Says that a load or unload has ended. ``token``: the number of the load or unload. ``error``: why it failed, or ""."""

    token: int
    error: str = ""


Instruction = Send | Publish | Forget | Outdate | Retry | Settled


class Lifecycle:
    """State machine of all models. Each event is a method that returns instructions, which the caller must carry out in order.

    ``known``: the names of the models that are in the repositories now.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelEntry] = {}
        self.known: set[str] = set()
        #: The devices of workers by incarnation.
        self._workers: dict[int, str] = {}

    # ---------------------------------------------------------------------------------------------------- operations

    def load(self, found: FoundModel, token: int, again: bool = False) -> list[Instruction]:
        """Queues a load of the model versions ``found.chosen``. Returns the instructions that the caller must follow now.

        Once the load has ended, this method or a later method returns the instruction ``Settled`` with ``token``.
        ``again``: whether to load also versions that already serve from the same files.
        """
        model = self.models.setdefault(found.name, ModelEntry())
        return self._follow(found.name, model, Operation((token,), found, again=again))

    def unload(self, name: str, token: int, given_up: str = "") -> list[Instruction]:
        """Queues an unload of the model ``name``. Returns the instructions that the caller must carry out now.

        Once the unload has ended, this method or a later method returns the instruction ``Settled`` with ``token``. If there is
        no such model, this method returns ``Settled`` alone.
        ``given_up``: if the daemon will load the model again by itself, the reason why it cannot do so yet. Otherwise "".
        """
        if name not in self.models:
            return [Settled(token)]
        return self._follow(name, self.models[name], Operation((token,), None, given_up))

    def _follow(self, name: str, model: ModelEntry, later: Operation) -> list[Instruction]:
        # Callers that wait for a load that ``later`` makes pointless get its outcome or, if it is an unload, an error.
        overtaken: list[Operation] = []
        while model.waiting and model.waiting[-1].overtaken_by(later):
            overtaken.insert(0, model.waiting.pop())
        out: list[Instruction] = []
        running = model.running
        if running is not None and not model.waiting and running.overtaken_by(later) and self._loads(model):
            overtaken.insert(0, running)
            out += self._give_up(name, model, later.found)
        tokens = tuple(token for each in overtaken for token in each.tokens)
        if later.found is not None:
            later.tokens = (*tokens, *later.tokens)
        else:
            numbers = (number for each in overtaken if each.found for number in each.found.chosen)
            failed = dict.fromkeys(numbers, UNLOADED)
            out += [Settled(token, load_error(name, failed)) for token in tokens]
        model.waiting.append(later)
        return out + self._advance(name)

    @staticmethod
    def _loads(model: ModelEntry) -> bool:
        brought = [model.versions[number] for number in model.bringing]
        return any(v.loading or v.postponed or v.state is IndexState.LOADING for v in brought)

    def _give_up(self, name: str, model: ModelEntry, heir: FoundModel | None) -> list[Instruction]:
        # Without an outcome: versions that serve keep serving, and the next operation, which loads ``heir``, follows.
        out: list[Instruction] = []
        for number in model.bringing:
            version = model.versions[number]
            out += [Send(worker, CancelLoad(name, number)) for worker in sorted(version.loading)]
            version.postponed = set()
            if version.state is IndexState.LOADING:
                version.wanted, version.given_up, version.due = False, "", False
                # Its requests go on waiting if another load of it follows.
                if heir is None or number not in heir.chosen:
                    version.state, version.reason = IndexState.UNAVAILABLE, "unloaded"
                    out.append(Publish(version.state_record()))
        model.running, model.bringing, model.fingerprint = None, {}, ""
        return out

    def forget(self, name: str, present: Collection[int]) -> list[Instruction]:
        """Removes versions of the model ``name`` that ``present`` lacks. Returns instructions that the caller must carry out.

        ``present``: versions in the repository. Keeps versions that serve, or that a worker is loading or unloading.
        Returns [] while a load or unload of the model runs.
        """
        model = self.models.get(name)
        if model is None or model.running is not None:
            return []  # a load or unload under way will be followed by another look
        out = self._forget(name, model, present)
        if not model.versions:
            del self.models[name]
        return out

    def _forget(self, name: str, model: ModelEntry, present: Collection[int]) -> list[Instruction]:
        gone = [number for number, v in model.versions.items() if number not in present and not v.in_use]
        for number in gone:
            del model.versions[number]
        return [each for number in gone for each in (Publish(ModelGone(name, number)), Forget(name, number))]

    def _advance(self, name: str) -> list[Instruction]:
        model, out = self.models[name], list[Instruction]()
        while model.running is None and model.waiting:
            model.running = model.waiting.popleft()
            found = model.running.found
            if found is not None:
                out += self._begin_load(model, found, model.running.again)
            else:
                model.fingerprint = ""
                out += [i for n in sorted(model.versions) for i in self._retire(name, n, model.running.given_up)]
            out += self._finish(name, model)
        return out

    def _begin_load(self, model: ModelEntry, found: FoundModel, again: bool) -> list[Instruction]:
        unchanged = model.fingerprint == found.fingerprint
        model.repeated += unchanged and again
        model.chosen = found.chosen
        model.bringing = dict.fromkeys(found.chosen, "")
        out: list[Instruction] = []
        for number, version in model.versions.items():
            if version.given_up and number not in found.chosen:
                # There is no further try; what is served of it stays until something replaces it.
                version.wanted = version.state is IndexState.READY
                version.given_up, version.due, version.postponed = "", False, set()
                out.append(Publish(version.state_record()))
        out += self._forget(found.name, model, {*found.versions, *found.chosen})
        for number in found.chosen:
            load = found.load(number)
            version = model.versions.setdefault(number, VersionEntry(load))
            if version.state is IndexState.READY and unchanged and not again:
                continue
            version.outdated = version.state is IndexState.READY
            out.append(Outdate(found.name, number) if version.outdated else Forget(found.name, number))
            version.load, version.deaths, version.suspect, version.wanted = load, 0, False, True
            version.given_up, version.due = "", False
            if version.state is not IndexState.READY:
                version.state, version.reason = IndexState.LOADING, ""
                out.append(Publish(version.state_record()))
            version.number, version.postponed = version.number + 1, set()
            version.devices, version.members, version.resources = found.devices, found.members, found.resources
            # A version that was being unloaded is loaded again: each worker does one after the other.
            version.unloading -= self._homes(version)
            for worker in sorted(self._homes(version)):
                out += self._send_load(worker, version)
        model.fingerprint = found.fingerprint
        return out

    def _retire(self, name: str, number: int, given_up: str = "") -> list[Instruction]:
        """Cancels a version's postponed loads, and unloads the version if it serves. Returns the instructions to carry out.

        ``given_up``: if the daemon will load the version again by itself, the reason why it cannot do so yet. Otherwise "".
        """
        version = self.models[name].versions[number]
        was_awaited = bool(version.given_up)
        version.wanted, version.given_up = bool(given_up), given_up
        # Nobody awaits any more what was given up.
        version.reason = given_up or ("unloaded" if was_awaited else version.reason)
        version.postponed, version.due = set(), False
        forget, version.outdated = Forget(name, number), False
        if version.state is not IndexState.READY:
            return [Publish(version.state_record()), forget] if was_awaited or given_up else [forget]
        version.state, leaving, version.ready = IndexState.UNLOADING, version.ready, {}
        told = Publish(version.state_record())
        return [told, forget, *self._end(version, leaving), *self._unload_ended(version)]

    def _unload_ended(self, version: VersionEntry) -> list[Instruction]:
        if version.state is not IndexState.UNLOADING or version.unloading:
            return []
        version.state, version.described = IndexState.UNAVAILABLE, None
        version.reason = version.given_up or "unloaded"
        return [Publish(version.state_record())]

    def _finish(self, name: str, model: ModelEntry) -> list[Instruction]:
        """Ends the running load or unload of ``model`` if it waits for nothing more. Returns the instructions to carry out.

        Before a load ends, the versions that it has replaced are unloaded.
        """
        operation = model.running
        if operation is None:
            return []
        if operation.found is None:
            # A load that was given up may take a while to end.
            if any(version.unloading or version.loading for version in model.versions.values()):
                return []
            model.running = None
            return [Settled(token) for token in operation.tokens]
        out: list[Instruction] = []
        brought = [model.versions[number] for number in model.bringing]
        for version in brought:
            waits = version.state is IndexState.LOADING and not version.ready and version.postponed
            if waits and not awaits(self.models, version):
                version.postponed, version.given_up = set(), member_given_up(self.models, version)
                why = version.given_up or "a model that it is made of is not there any more"
                out += self._failed(version, why)
        # Without any worker the load waits for the first one: it cannot be said to have succeeded.
        if any(awaits(self.models, v) or (v.state is IndexState.LOADING and not v.ready) for v in brought):
            return out
        # The load also goes on while the version is served as it was, by workers that it is to leave.
        coming = [model.versions[number] for number, reason in model.bringing.items() if not reason]
        if any(v.ready and not v.ready.keys() & self._homes(v) for v in coming):
            return out
        failed = {number: reason for number, reason in model.bringing.items() if reason}
        if len(failed) < len(model.bringing):
            # Something new serves: what it replaces is unloaded, and the operation ends after that.
            out += self._retire_replaced(name, model)
        if any(version.state is IndexState.UNLOADING for version in model.versions.values()):
            return out
        model.running, model.bringing = None, {}
        if failed:
            model.fingerprint = ""
        error = load_error(name, failed) if failed else ""
        return [*out, *(Settled(token, error) for token in operation.tokens)]

    def _retire_replaced(self, name: str, model: ModelEntry) -> list[Instruction]:
        serving = [number for number, version in model.versions.items() if version.state is IndexState.READY]
        old = [number for number in serving if number not in model.chosen]
        if len(old) == len(serving):
            return []  # nothing replaces it
        return [instruction for number in old for instruction in self._retire(name, number)]

    # -------------------------------------------------------------------------------------------------------- workers

    def worker_joined(self, worker: int, device: str) -> list[Instruction]:
        """Adds a ready worker, and returns instructions to load models on its device. ``worker``: the number of the process."""
        self._workers[worker] = device
        wanted = [v for v in self._all if v.wanted and (v.due or not v.given_up) and v.belongs(device)]
        # Versions that may have killed a worker come last and alone.
        out = [i for version in sorted(wanted, key=lambda v: v.suspect) for i in self._send_load(worker, version)]
        return out + self._send_postponed(worker)

    def _homes(self, version: VersionEntry) -> set[int]:
        return {worker for worker, device in self._workers.items() if version.belongs(device)}

    def fill(self, name: str, number: int) -> list[Instruction]:
        """Returns instructions to load version ``number`` on each worker that should have the version and does not.

        Call it when a push has brought the parameters that these workers lacked.
        """
        version = self.version(name, number)
        if version is None or version.given_up:
            return []
        missing = self._homes(version) - version.ready.keys() - version.loading.keys() - version.postponed
        out, bringing = list[Instruction](), self.models[name].bringing
        if missing and number in bringing:
            bringing[number] = ""  # it has not failed yet
        if missing and version.state is not IndexState.READY:
            version.state, version.reason = IndexState.LOADING, ""
            out.append(Publish(version.state_record()))
        version.wanted = version.wanted or bool(missing)
        for worker in sorted(missing):
            out += self._send_load(worker, version)
        return out

    def retry(self, name: str, number: int, deaths: int) -> list[Instruction]:
        """Has one worker load a given-up version again. Returns the instructions for the caller to carry out, or an empty list.

        Call it with the values of a ``Retry``, ``Retry.seconds`` after the ``Retry`` was returned. ``number``: the version.
        ``deaths``: how many workers had died loading the version at that time. Does nothing if this number has changed since.
        If no worker is free for the load, the next worker that starts on one of the version's devices loads it.
        """
        version = self.version(name, number)
        if version is None or not version.given_up or version.deaths != deaths:
            return []
        # An idle worker is preferred; none where the version serves as it was before.
        free = sorted((self.loading_at(worker), worker) for worker in self._homes(version) - version.ready.keys())
        if not free:
            version.due = True
            return []
        return self._send_load(free[0][1], version)

    def worker_left(self, worker: int, how: str = "died", dismissed: bool = False) -> list[Instruction]:
        """Notes that a worker process has ended. Returns instructions that the caller must carry out.

        The worker's replacement loads the model versions that the worker was loading, unless too many workers died loading them.
        Args:
          worker: the number of the worker process.
          how: how the process ended, as the end of a sentence, such as "died".
          dismissed: whether the worker is stopped on purpose. If so, its end is not counted as a death.
        """
        self._workers.pop(worker, None)
        out: list[Instruction] = []
        loading = [version for version in self._all if worker in version.loading]
        for version in loading if not dismissed else ():
            version.suspect = True
            version.deaths += len(loading) == 1
        for version in self._all:
            out += self._left(version, worker, how)
        for name in list(self.models):
            out += self._after_answer(name)
        return out

    def _left(self, version: VersionEntry, worker: int, how: str) -> list[Instruction]:
        served = version.ready.pop(worker, None) is not None
        version.brought.pop(worker, None)
        owed = worker in version.loading or worker in version.postponed
        version.loading.pop(worker, None)
        for workers in (version.postponed, version.held, version.unloading):
            workers.discard(worker)
        out: list[Instruction] = [Publish(version.state_record())] if served else self._unload_ended(version)
        if owed and version.wanted and version.deaths >= MAX_LOAD_DEATHS:
            version.given_up = f"{version.deaths} worker processes died while loading it, the last one {how}"
            seconds = min(MAX_RETRY, FIRST_RETRY * 2 ** min(version.deaths - MAX_LOAD_DEATHS, 10))
            out += self._failed(version, version.given_up)
            out.append(Retry(version.load.name, version.load.version, seconds, version.deaths))
        elif version.given_up:
            # Requests do not wait for a try that may be minutes away. If this one was not blamed for its end, the next one tries.
            version.due |= owed
            out += self._failed(version, version.given_up) if served else []
        return out

    def loaded(self, worker: int, answer: Loaded) -> list[Instruction]:
        """Records a worker's report that it serves a version or failed to load it. Returns the instructions to carry out now.

        If the worker should not serve the version any more, an instruction tells the worker to unload the version.
        ``worker``: the number of the worker process.
        """
        version = self.version(answer.name, answer.version)
        if version is None or worker not in version.loading:
            return []
        load = version.loading[worker].pop(0)
        if version.loading[worker]:
            # This answers an earlier Load; the answer to a newer one is on its way.
            version.held |= set() if answer.reason else {worker}
            if answer.reason or worker not in version.ready:
                return []
            version.ready[worker], version.brought[worker], version.described = answer, load, answer
            return [Publish(version.state_record())]
        del version.loading[worker]
        held = version.held & {worker} - version.ready.keys()
        version.held.discard(worker)
        out = self._end(version, held if answer.reason else ())
        if answer.reason:
            awaited, version.given_up, version.due = version.awaited, "", False
            failed = self._failed(version, answer.reason)
            out += failed or [Publish(version.state_record())] * awaited
        elif version.wanted and not has_members(self.models, version, worker):
            # A model of the ensemble has left this worker meanwhile.
            out += self._leave(version, {worker})
        elif version.is_wanted(worker, self._workers[worker]):
            others: Collection[int] = ()
            if version.given_up:
                same = {each for each in version.ready if version.brought[each] == load}
                others = self._homes(version) - same - version.loading.keys() - {worker}
            model = self.models[answer.name]
            if version.given_up and model.bringing.get(answer.version) == version.given_up:
                model.bringing[answer.version] = ""  # it has not failed after all
            version.deaths, version.suspect, version.given_up, version.due = 0, False, "", False
            version.ready[worker], version.brought[worker] = answer, load
            version.unloading.discard(worker)
            version.described, version.served_devices = answer, version.devices
            version.state, version.reason = IndexState.READY, ""
            # An earlier load of it served on workers where this one does not belong.
            strays = version.ready.keys() - self._homes(version)
            out += self._forget_outdated(version)
            out += self._leave(version, strays)
            for other in sorted(others):
                out += self._send_load(other, version)
            if model.running is None:  # given up when the load that asked for it ended
                out += self._retire_replaced(answer.name, model)
        else:
            # The version was unloaded, given up or moved while this worker was still loading it, so that it was not served.
            out += self._end(version, {worker})
        return out + self._send_postponed(worker) + self._after_answer(answer.name)

    def unloaded(self, worker: int, name: str, number: int) -> list[Instruction]:
        """Records that worker process ``worker`` has unloaded a version. Returns the instructions to carry out now."""
        version = self.version(name, number)
        if version is None or worker not in version.unloading:
            return []
        version.unloading.discard(worker)
        return self._unload_ended(version) + self._after_answer(name)

    def _after_answer(self, name: str) -> list[Instruction]:
        out: list[Instruction] = []
        for version in self.models[name].versions.values():
            if (earlier := version.earlier) and not awaits(self.models, version):
                # It serves from the newer files elsewhere: one version does not answer in two ways.
                out += self._leave(version, earlier)
        return out + self._finish(name, self.models[name]) + self._advance(name)

    def _leave(self, version: VersionEntry, workers: Collection[int]) -> list[Instruction]:
        """Returns instructions to unload a version on ``workers``, and before that each ensemble that lacks it there."""
        version.ready = {worker: version.ready[worker] for worker in version.ready.keys() - workers}
        # An ensemble comes back with the model that it lacks.
        lacking = {worker for worker in workers if not has_members(self.models, version, worker)}
        version.postponed |= lacking & (self._homes(version) - version.loading.keys())
        out: list[Instruction] = [Publish(version.state_record())]
        if version.state is IndexState.READY and not (version.ready or awaits(self.models, version)):
            version.given_up, version.due = "a model that it is made of has left its last worker", True
            out = self._failed(version, version.given_up)
        for user in self._all:
            if lacking := {each for each in user.ready.keys() & workers if not has_members(self.models, user, each)}:
                out += self._leave(user, lacking)
        return [*out, *self._end(version, workers)]

    @staticmethod
    def _end(version: VersionEntry, workers: Collection[int]) -> list[Instruction]:
        """Returns instructions to unload a version on some workers. No unload of the model ends before these have done so."""
        version.unloading |= set(workers)
        return [Send(worker, Unload(version.load.name, version.load.version)) for worker in sorted(workers)]

    def _failed(self, version: VersionEntry, reason: str) -> list[Instruction]:
        model = self.models[version.load.name]
        if version.load.version in model.bringing:
            model.bringing[version.load.version] = reason
        if not version.wanted:
            return []  # unloaded, or given up, before this answer came
        if version.ready or awaits(self.models, version):
            # What serves goes on serving (also the former content of the same version); the last answer decides.
            return []
        version.wanted, version.described = bool(version.given_up), None
        version.state, version.reason = IndexState.UNAVAILABLE, reason
        return [*self._forget_outdated(version), Publish(version.state_record())]

    def _forget_outdated(self, version: VersionEntry) -> list[Instruction]:
        was, version.outdated = version.outdated, False
        return [Forget(version.load.name, version.load.version, outdated=True)] if was else []

    def _send_load(self, worker: int, version: VersionEntry) -> list[Instruction]:
        if (version.suspect and self.loading_at(worker)) or not has_members(self.models, version, worker):
            if worker not in version.loading:
                version.postponed.add(worker)
            return []
        version.due = False
        version.postponed.discard(worker)
        version.loading.setdefault(worker, []).append(version.number)
        return [Send(worker, version.load)]

    def is_postponed(self, worker: int, name: str, number: int) -> bool:
        """Returns whether a worker gets the load of version ``number`` (0: any) of a model once it has loaded others."""
        waits = any(worker in version.postponed for version in named(self.models, name, number or -1))
        return waits and self.loading_at(worker)

    def _send_postponed(self, worker: int) -> list[Instruction]:
        """Returns instructions to send a worker the postponed loads that it can run now. ``worker``: the process's number.

        The load of an ensemble is postponed until the worker serves the ensemble's models. The load of a version that may have
        killed a worker is postponed until the worker loads nothing else. A load fails if no worker can run it any more.
        """
        out: list[Instruction] = []
        while True:
            for version in self._all:
                if worker not in version.postponed or (version.suspect and self.loading_at(worker)):
                    continue
                if has_members(self.models, version, worker):
                    out += self._send_load(worker, version)
                elif not awaits(self.models, version):
                    out += self._after_answer(version.load.name)
                    if worker not in version.postponed:
                        break  # another ensemble may have waited for this one
            else:
                return out

    def stranded(self, usable: Collection[str], why: str = "") -> list[Instruction]:
        """Gives up each model version that can run on none of the devices in ``usable``. Returns instructions to carry out.

        A worker that starts later on a device of a given-up version loads the version.
        ``why``: the reason for error messages. If it is "", error messages say that no worker can use the version's devices.
        """
        out: list[Instruction] = []
        for name, model in list(self.models.items()):
            before = len(out), dict(model.bringing)
            for number, version in model.versions.items():
                if not version.wanted or any(version.belongs(device) for device in usable):
                    continue
                reason = why or f"no worker can use {', '.join(version.devices) or 'any device'} at present"
                if version.ready and not version.loading and model.bringing.get(number) == "":
                    # It is still served elsewhere as it was, but its replacement does not come.
                    model.bringing[number] = reason
                elif not (version.ready or version.loading or version.postponed or version.given_up):
                    version.given_up, version.due = reason, True
                    out += self._failed(version, reason)
            if (len(out), model.bringing) != before:
                out += self._after_answer(name)
        return out

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def _all(self) -> list[VersionEntry]:
        return [version for model in self.models.values() for version in model.versions.values()]

    def isolated(self, options: Workers) -> dict[str, float]:
        """Returns the fraction (0 to 1) of a GPU's memory for each worker that runs only one model, by the worker's device.

        For example, cuda:0#m is the device name of the worker that runs only the model m on GPU 0.
        A worker is listed until it has unloaded its model. ``options``: has the fraction for models that do not set one.
        """
        found: dict[str, float] = {}
        for version in self._all:
            there = [self._workers[worker] for worker in (*version.ready, *version.unloading)]
            for device in (*(version.devices if version.wanted else ()), *there):
                if model_of(device) == version.load.name:
                    found[device] = isolated_fraction(version.load.config, options)
        return found

    def index(
        self, refused: Mapping[str, str], waits: Mapping[tuple[str, int], float], ready: bool, detailed: bool
    ) -> list[dict[str, str | int]]:
        """Returns Triton's repository index, sorted: an entry (name, version, state, reason) for each version of each model.

        A model without versions has one entry with its name. If ``refused`` contains the model, this entry also has the state
        UNAVAILABLE and the reason.
        Args:
          refused: maps a model's name to the reason why the daemon has asked no worker to load the model.
          waits: maps the name and number of a model version to the seconds until the daemon tries again to load this version.
          ready: whether only versions in the state READY are listed.
          detailed: whether an entry also has the number of XLA programs, the bytes of parameters and programs, and the bytes of
            inputs, outputs and temporaries of the program that needs most.
        """
        found: list[dict[str, str | int]] = []
        models = self.models
        names = self.known | {name for name, model in models.items() if any(v.in_use for v in model.versions.values())}
        for name in sorted(names | refused.keys()):
            versions = models[name].versions if name in names and name in models else {}
            for number, version in sorted(versions.items()):
                if ready and version.state is not IndexState.READY:
                    continue
                entry: dict[str, str | int] = {"name": name, "version": str(number), "state": version.state.value}
                if version.reason:
                    planned = version.given_up and (name, number) in waits
                    again = f"; it is tried again in {waits[name, number]:.0f} s" if planned else ""
                    entry["reason"] = version.reason + again
                for each in version.state_record().derivatives:
                    found.append({**entry, "name": each.name})
                if detailed and version.described is not None:
                    footprint = version.described.footprint
                    entry["parameters"] = footprint.parameter_byte_size
                    entry["programs"] = footprint.programs
                    entry["program_bytes"] = footprint.program_byte_size
                    entry["largest_batch"] = footprint.batch_byte_size
                found.append(entry)
            if not versions and not ready:
                unserved = {"state": "UNAVAILABLE", "reason": refused[name]} if name in refused else {}
                found.append({"name": name, **unserved})
        return sorted(found, key=lambda entry: str(entry["name"]))

    def resources(self) -> dict[str, Mapping[str, str | None]]:
        """Returns the field ``resources`` of each ``FoundModel`` that is loaded and needs resources, by the model's name."""
        return {v.load.name: v.resources for v in self._all if v.resources and (v.wanted or v.in_use)}

    def reason(self, name: str, number: int) -> str:
        """Returns why the daemon has put off loading version ``number`` of a model until later, or "" if it has not."""
        version = self.version(name, number)
        return "" if version is None else version.given_up

    def check_given_up(self, worker: int, name: str, number: int) -> None:
        """Raises Unavailable, with the reason, if a worker does not get a model version before the daemon's next try to load it.

        ``worker``: the number of the worker process. ``number``: the version, or 0 for any.
        """
        check_given_up(self.models, name, number, self._workers.get(worker))

    def loading_at(self, worker: int) -> bool:
        """Returns whether a load has been sent to a worker and has not ended: it has not failed, nor does the worker serve it.

        ``worker``: the number of the worker process.
        """
        return any(worker in version.loading for version in self._all)

    def states(self) -> list[ModelState]:
        """Returns the records that tell a new front process the state of every version."""
        return [v.state_record() for model in self.models.values() for _, v in sorted(model.versions.items())]

    def is_ready(self, name: str, number: int = 0) -> bool:
        """Returns whether a version of a model is READY. ``number`` 0 means any version."""
        return any(version.state is IndexState.READY for version in named(self.models, name, number or -1))

    def folders(self, name: str) -> set[str]:
        """Returns the folders of those versions of a model that serve, should serve, or are being loaded or unloaded."""
        found = named(self.models, name, -1)
        return {v.load.model_path for v in found if v.wanted or v.ready or v.loading or v.unloading}

    def unchanged(self, found: FoundModel) -> bool:
        """Returns whether all chosen versions of ``found`` are READY and were loaded from the model's present files."""
        model = self.models.get(found.name)
        same = model is not None and model.fingerprint == found.fingerprint
        return same and all(self.is_ready(found.name, number) for number in found.chosen)

    def known_versions(self) -> dict[str, list[int]]:
        """Returns all version numbers by model name. A model that computes derivatives ("M.pull_back") has those that serve."""
        found: dict[str, list[int]] = {name: list(model.versions) for name, model in self.models.items()}
        for state in self.states():
            for each in state.derivatives:
                found.setdefault(each.name, []).append(state.version)
        return found

    def ready_models(self) -> dict[str, list[int]]:
        """Returns the numbers of the READY versions of each model that has any, by the name of the model."""
        found = {
            name: [n for n, v in sorted(model.versions.items()) if v.state is IndexState.READY]
            for name, model in sorted(self.models.items())
        }
        return {name: versions for name, versions in found.items() if versions}

    def version(self, name: str, number: int) -> VersionEntry | None:
        """Returns the entry of a model version, or None if there is none."""
        model = self.models.get(name)
        return None if model is None else model.versions.get(number)

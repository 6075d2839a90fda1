"""Asserts that the attributes of tables, queues and batchers agree with each other, between two operations of a test."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from functools import singledispatch
from typing import Any

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.versions import IndexState
from tensord.daemon.parameters.pushed_sets import PushedSets
from tensord.daemon.regions.region_record import RegionState
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.shm.response_order import ResponseOrder
from tensord.workers.requests.response_cache import ResponseCache
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.scheduling.dynamic_batcher import DynamicBatcher
from tensord.workers.scheduling.ensemble_run import EnsembleRun
from tensord.workers.scheduling.queue import RequestQueue
from tensord.workers.scheduling.sequence import Slot
from tensord.workers.scheduling.sequence_batcher import DirectBatcher, OldestBatcher, SequenceBatcher
from tensord.workers.scheduling.sequence_table import SequenceTable, Slots
from tensord.workers.scheduling.step_batcher import AHEAD, StepBatcher


@singledispatch
def check_invariants(thing: Any) -> None:
    """Asserts that the attributes of ``thing`` agree with each other."""
    raise TypeError(f"nothing is known of {thing!r}")


@check_invariants.register
def _pushed(sets: PushedSets) -> None:
    contents = [content for _, _, found in sets for content in (found.newest, found.former) if content is not None]
    assert sets.byte_size == sum(content.byte_size for content in contents if content.memory >= 0)
    assert sets.byte_size <= sets.limit
    assert all(found.newest.number <= found.highest for _, _, found in sets)


@check_invariants.register
def _lifecycle(lifecycle: Lifecycle) -> None:
    for model in lifecycle.models.values():
        assert model.running is not None or not model.waiting
        for version in model.versions.values():
            everywhere = [version.ready.keys(), version.loading.keys(), version.unloading, version.postponed]
            assert all(workers <= lifecycle._workers.keys() for workers in everywhere)
            assert version.wanted or not version.given_up
            assert version.given_up or not version.due
            assert not version.ready or version.state is IndexState.READY
            assert not version.unloading & version.ready.keys()
            assert not version.postponed & version.loading.keys()
            if version.state in (IndexState.READY, IndexState.LOADING):
                assert version.wanted


@check_invariants.register
def _regions(registry: RegionRegistry) -> None:
    present = {worker.incarnation for worker in registry._workers.ready()}
    for region in registry._regions.values():
        assert region.state is RegionState.REGISTERED
        assert (region.fd >= 0) is (region.kind == "system")
        assert region.holders <= present


@check_invariants.register
def _order(order: ResponseOrder) -> None:
    # Each answer that is stored waits for the answer to an earlier request.
    assert len(set(order._turns)) == len(order._turns)
    assert order._ready.keys() <= set(order._turns)
    assert not order._turns or order._turns[0] not in order._ready


@check_invariants.register
def _cache(cache: ResponseCache) -> None:
    assert cache.byte_size == sum(entry.byte_size for entry in cache._entries.values())
    assert cache.byte_size <= cache.max_byte_size


@check_invariants.register(Agenda)
def _agenda(agenda: Agenda[Any]) -> None:
    assert sorted(entry for entry in agenda._heap if entry[2] is not None) == sorted(agenda._due.values())
    assert all(entry[2] is part for part, entry in agenda._due.items())
    assert agenda.due_ns == min((entry[0] for entry in agenda._due.values()), default=NEVER)


@check_invariants.register(EnsembleRun)
def _run(run: EnsembleRun[Any]) -> None:
    assert run._values.keys() == run._left.keys() >= run._controls.keys()
    assert all(left > 0 for left in run._left.values())
    assert run.running >= sum(run._open.values())
    assert all(count > 0 for count in run._open.values())


@check_invariants.register(RequestQueue)
def _queue(queue: RequestQueue[Any]) -> None:
    requests = queue.requests()
    assert len(requests) == queue.size
    assert queue._order == sorted(queue._lines)
    assert all(line for number, line in queue._lines.items() if number)
    for number, line in queue._lines.items():
        for key, owners in line.items():
            assert owners
            for owner, waiting in owners.items():
                assert waiting
                assert all((each.line, each.key, each.owner) == (number, key, owner) for each in waiting.values())
                assert all(request.sequence == sequence for sequence, request in waiting.items())
    rows: dict[Hashable, int] = {}
    sizes = dict.fromkeys([0, *(number // 2 for number in queue._order)], 0)
    for request in requests:
        rows[request.key] = rows.get(request.key, 0) + request.rows
        sizes[request.line // 2] += 1
    keyed = [request for request in requests if request.replace_key or queue._rules.replaces]
    assert {request.replace_key: request for request in keyed} == queue._replaceable
    assert len(keyed) == len(queue._replaceable)
    assert rows == queue._rows
    assert sizes == queue._level_sizes
    assert queue._shares == collections.Counter(request.owner for request in requests)


@check_invariants.register(DynamicBatcher)
def _batcher(batcher: DynamicBatcher[Any]) -> None:
    check_invariants(batcher._queue)
    assert all(0 < limit <= batcher._rules.max_rows for limit in batcher._limits.values())
    if batcher.delays:
        batcher._look()
        assert batcher._due.keys() == {request.key for request in batcher._queue.requests()}
        for key, due_ns in batcher._due.items():
            waits_ns = 0 if batcher._ready_rows(key) else batcher._rules.delay_ns
            assert due_ns == batcher._queue.oldest_ns(key) + waits_ns


@check_invariants.register(StepBatcher)
def _steps(batcher: StepBatcher[Any]) -> None:
    # Each slot is free or has one request, and each request in a step has a slot.
    check_invariants(batcher._queue)
    numbers = [holder.number for holder in batcher._holders.values()]
    assert sorted(numbers + batcher._free) == list(range(batcher._rules.slots))
    assert all(holder.request is request and not holder.left for request, holder in batcher._holders.items())
    assert all(batcher._holders[holder.request] is holder and not holder.paused for holder in batcher._running.values())
    assert all(holder.steps < batcher._rules.max_steps for holder in batcher._running.values())
    assert not batcher._masked & batcher._running.keys()
    assert 0 <= batcher._on_their_way <= AHEAD
    assert 0 <= batcher._room <= batcher._rules.inserts_per_step


def check_slots(slots: Slots, taken: set[Slot]) -> None:
    """Asserts that the slots in use, ``taken``, and those given back are all that were ever used."""
    assert not taken & set(slots._freed)
    assert all(slot.instance < slots._instances for slot in taken)
    assert len(taken) + len(slots._freed) == slots._fresh <= slots.count
    assert slots.free == slots.count - len(taken)


@check_invariants.register(SequenceTable)
def _sequences(table: SequenceTable[Any]) -> None:
    everyone = list(table.sequences())
    assert len(set(everyone)) == len(everyone) == table.live
    assert sum(len(live.waiting) for live in everyone) == table._waiting <= table._rules.max_waiting + table.live
    assert all(live.slot == slot for slot, live in table._holders.items())
    check_slots(table._slots, set(table._holders))
    assert not table._backlog or not table.free_slots
    assert all(live.waiting and not live.begun and not live.running for live in table._backlog)
    for correlation_id, live in table._live.items():
        assert live.correlation_id == correlation_id
        assert not live.closed
        assert live in everyone
    assert all(live.closed or table._live.get(live.correlation_id) is live for live in everyone)
    for live in table._holders.values():
        idle = not live.waiting and not live.running
        assert idle == (live in table._idle)
        assert not (live.closed and idle)
        assert not (live.cancelled and live.waiting)
    assert len(table._idle) <= len(table._holders)
    assert list(table._idle.values()) == sorted(table._idle.values())
    for live in everyone:
        assert all(request.live is live and request.line >= 0 for request in live.waiting)


@check_invariants.register(DirectBatcher)
def _direct(batcher: DirectBatcher[Any]) -> None:
    # Sequences whose next request can run have different slots.
    assert all(live.ready for live in batcher._ready)
    assert len({live.slot for live in batcher._ready}) == len(batcher._ready) <= batcher._rules.slots


@check_invariants.register(OldestBatcher)
def _oldest(batcher: OldestBatcher[Any]) -> None:
    # Each sequence has at most one request in the queue.
    _batcher(batcher)
    requests = batcher._queue.requests()
    assert len({request.live for request in requests}) == len(requests)
    assert all(request.live.ready and request.live.waiting[0] is request for request in requests)


@check_invariants.register(SequenceBatcher)
def _sequence_batcher(batcher: SequenceBatcher[Any]) -> None:
    check_invariants(batcher.table)
    for strategy in batcher._strategies:
        check_invariants(strategy)

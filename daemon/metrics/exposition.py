"""Renders a snapshot as the text that Prometheus reads.

Names are Triton's where it has the metric; others begin with ``tensord_``.

Runs in a thread of its own; between two scrapes only the text of labels is cached. Source: Triton docs/user_guide/metrics.md; the
Prometheus exposition format 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics

from tensord import __version__
from tensord.daemon.metrics.family import Counters, Family, Gauges, Histograms, Unknowns, escaped
from tensord.daemon.metrics.own_metrics import OwnFamily
from tensord.daemon.metrics.snapshot import Exemplars, MetricsSnapshot
from tensord.daemon.models.versions import IndexState
from tensord.daemon.processes.gpu_watch import GpuState
from tensord.shm.control_records import Footprint
from tensord.shm.durations import PROTOCOLS, QUEUE
from tensord.shm.figures import FIRST_RESPONSE_MS, Counts
from tensord.shm.refusals import Refusal
from tensord.shm.slow_reasons import SlowReason

#: Patterns of histograms that are kept: three or four for each model version and protocol.
_MAX_HISTOGRAMS = 4096
_PAGE = os.sysconf("SC_PAGE_SIZE")
_EOF = b"# EOF\n"
#: Name and help of each histogram of durations, in the order of ``durations.KINDS``.
_DURATIONS = (
    ("tensord_request_duration_seconds", "Time from a request's arrival to its answer, of those answered well"),
    ("tensord_queue_duration_seconds", "Of that, waiting to run"),
    ("tensord_compute_duration_seconds", "Of that, running: gathering inputs, the model, placing outputs"),
    ("tensord_first_response_duration_seconds", "Time to the first response, of models with several"),
)
_MODEL = ("model", "version")

#: Triton's counters of a model: name, help, value. Durations are microseconds.
_COUNTERS: tuple[tuple[str, str, Callable[[Counts], int]], ...] = (
    ("nv_inference_request_success", "Successful inference requests, whatever their batch", lambda c: c.success),
    ("nv_inference_count", "Inferences: a request with a batch of n counts n", lambda c: c.inference),
    ("nv_inference_exec_count", "Executions of the model, each for one batch", lambda c: c.execution),
    (
        "nv_inference_request_duration_us",
        "Time from arrival to answer, of all successful requests together",
        lambda c: c.request_ns // 1000,
    ),
    ("nv_inference_queue_duration_us", "Of that, waiting in queues", lambda c: c.queue_ns // 1000),
    ("nv_inference_compute_input_duration_us", "Of that, gathering the inputs", lambda c: c.compute_input_ns // 1000),
    ("nv_inference_compute_infer_duration_us", "Of that, running the model", lambda c: c.compute_infer_ns // 1000),
    ("nv_inference_compute_output_duration_us", "Of that, placing the outputs", lambda c: c.compute_output_ns // 1000),
)
#: Triton's counters of models with a response cache.
_CACHE_COUNTERS: tuple[tuple[str, str, Callable[[Counts], int]], ...] = (
    ("nv_cache_num_hits_per_model", "Requests that the response cache answered", lambda c: c.cache_hit),
    ("nv_cache_num_misses_per_model", "Requests whose answers the response cache took", lambda c: c.cache_miss),
    ("nv_cache_hit_duration_per_model", "Time of those it answered, in microseconds", lambda c: c.cache_hit_ns // 1000),
    (
        "nv_cache_miss_duration_per_model",
        "Time of looking for those it did not know, and of keeping their answers, in microseconds",
        lambda c: c.cache_miss_ns // 1000,
    ),
)
#: The footprint of a version on each worker that serves it.
_FOOTPRINT: tuple[tuple[str, str, Callable[[Footprint], float]], ...] = (
    ("tensord_model_load_seconds", "Time of its last load, on the worker that was done last", lambda f: f.seconds),
    ("tensord_model_parameter_bytes", "Its parameters on the device, of each worker", lambda f: f.parameter_byte_size),
    ("tensord_model_programs", "Programs that were made when it was loaded", lambda f: f.programs),
    ("tensord_model_program_bytes", "Those programs, as they are kept", lambda f: f.program_byte_size),
    (
        "tensord_model_largest_batch_bytes",
        "Inputs, outputs and what lies between them of the program that takes most",
        lambda f: f.batch_byte_size,
    ),
)
#: Triton's gauges of a GPU.
_GPU: tuple[tuple[str, str, Callable[[GpuState], float | None]], ...] = (
    ("nv_gpu_utilization", "Part of the last moment in which the GPU worked, from 0 to 1", lambda g: g.utilization),
    ("nv_gpu_memory_total_bytes", "Memory of the GPU", lambda g: g.memory_total),
    ("nv_gpu_memory_used_bytes", "Of that, in use, by whomever", lambda g: g.memory_used),
    ("nv_gpu_power_usage", "Power that the GPU draws, in watts", lambda g: g.power_usage),
    ("nv_gpu_power_limit", "Power that it may draw, in watts", lambda g: g.power_limit),
)
_FAILURES: tuple[tuple[str, Callable[[Counts], int]], ...] = (
    ("REJECTED", lambda c: c.rejected + c.queue_full),
    ("CANCELED", lambda c: c.canceled),
    ("REPLACED", lambda c: c.replaced),
    ("BACKEND", lambda c: c.backend),
    ("OTHER", lambda c: c.other),
)


_INDEX_STATES = [state.value for state in IndexState]
#: The states of sequences, in the order of ``Total.sequences``.
_STATES = ("slot", "backlog")
_REFUSALS: tuple[tuple[Refusal, Callable[[Counts], int]], ...] = (
    (Refusal.QUEUE_FULL, lambda c: c.queue_full),
    (Refusal.QUEUE_TIMEOUT, lambda c: c.rejected),
    (Refusal.COMPILING, lambda c: c.compiling),
    (Refusal.ANSWER_ROOM, lambda c: c.answer_room),
)


def render(snapshot: MetricsSnapshot, accept: str) -> tuple[bytes, str]:
    """Returns the metrics as text, and its content type.

    Args:
      accept: the request's Accept header; the text is in the OpenMetrics format if it names that, else in Prometheus's own.
    """
    is_openmetrics = wants_openmetrics(accept)
    text = families(snapshot, is_openmetrics) + _durations(snapshot, is_openmetrics)
    if is_openmetrics:
        return text + _EOF, openmetrics.CONTENT_TYPE_LATEST
    return text, exposition.CONTENT_TYPE_PLAIN_0_0_4


def wants_openmetrics(accept: str) -> bool:
    """Returns whether a request asks for OpenMetrics by its header ``Accept``."""
    return "application/openmetrics-text" in {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}


def families(snapshot: MetricsSnapshot, is_openmetrics: bool) -> bytes:
    """Returns the text of all metrics except the histograms of durations."""
    return "".join([family.text(is_openmetrics) for family in _families(snapshot)]).encode()


def _durations(snapshot: MetricsSnapshot, exemplars: bool) -> bytes:
    """Returns the text of the histograms of durations; ``exemplars``: with an example request for buckets, as OpenMetrics allows.

    With many models this is most of a scrape's text.
    """
    found: list[str] = []
    bounds = (*map(str, snapshot.buckets), "+Inf")
    row = len(bounds) + 1
    zeros = (0,) * (row * len(_DURATIONS))
    known = _of_version(snapshot.exemplars) if exemplars else {}
    for kind, (name, text) in enumerate(_DURATIONS):
        described = f"# HELP {name} {text}\n# TYPE {name} histogram\n"
        # An alert reads it, and a rate needs a series that is there before the first request.
        silent = dict.fromkeys(PROTOCOLS, zeros) if kind == QUEUE else {}
        for total in snapshot.models:
            for protocol, counts in {**silent, **total.durations}.items():
                *counted, sum_ns = counts[kind * row : (kind + 1) * row]
                within = list(itertools.accumulate(counted))
                if not within[-1] and not silent:
                    continue
                pattern = _histogram(name, total.name, total.version, protocol, bounds)
                written = pattern % (*within, within[-1], sum_ns / 1e9)
                of = known.get((total.name, total.version, protocol))
                if of is not None:
                    lines = written.split("\n")
                    for number, count in enumerate(counted):
                        if count:
                            lines[number] += of.get((kind, number), "")
                    written = "\n".join(lines)
                found += (described, written)
                described = ""
    return "".join(found).encode()


@functools.lru_cache(_MAX_HISTOGRAMS)
def _histogram(name: str, model: str, version: int, protocol: str, bounds: tuple[str, ...]) -> str:
    """Returns a histogram's lines as a ``%`` pattern, to be filled with the count up to each bucket, the total and the sum.

    ``bounds``: the text of the upper bound of each bucket.
    """
    labels = f'model="{escaped(model)}",protocol="{protocol}",version="{version}"'.replace("%", "%%")
    lines = [f'{name}_bucket{{{labels},le="{bound}"}} %d' for bound in bounds]
    return "\n".join([*lines, f"{name}_count{{{labels}}} %d", f"{name}_sum{{{labels}}} %s", ""])


def _of_version(exemplars: Exemplars) -> dict[tuple[str, int, str], dict[tuple[int, int], str]]:
    """Returns the text of each exemplar, by (model, version, protocol) and then by (kind of duration, bucket)."""
    found: dict[tuple[str, int, str], dict[tuple[int, int], str]] = {}
    for (model, version, protocol, kind, bucket), (trace_id, seconds, at) in exemplars.items():
        text = f' # {{trace_id="{trace_id}"}} {seconds} {at:.3f}'
        found.setdefault((model, version, protocol), {})[kind, bucket] = text
    return found


def _families(snapshot: MetricsSnapshot) -> Iterator[Family]:
    yield from _readiness(snapshot)
    yield from _configuration(snapshot)
    yield from _models(snapshot)
    yield from _footprints(snapshot)
    yield from _regions(snapshot)
    yield from _workers(snapshot)
    yield from _clients(snapshot)
    yield from _parameters(snapshot)
    yield from _fronts(snapshot)
    yield from _gpus(snapshot)
    yield _memory(snapshot.processes)
    for own in snapshot.own:
        yield _own(own)
    yield Gauges("tensord_build_info", "Always 1", labels=["version"]).fill([((__version__,), 1)])


def _readiness(snapshot: MetricsSnapshot) -> Iterator[Family]:
    yield Gauges("tensord_ready", "Whether the daemon is ready, as /v2/health/ready says", snapshot.ready)
    served = Gauges("tensord_model_served", "Whether a version is served of a model that should be", labels=["model"])
    yield served.fill([((name,), served_now) for name, served_now in snapshot.wanted.items()])

    state = Gauges(
        "tensord_model_state",
        "1 for the state that a version is in, of the repository index's",
        labels=[*_MODEL, "state"],
    )
    rows = [
        ((name, str(version), each), each == now) for name, version, now in snapshot.states for each in _INDEX_STATES
    ]
    yield state.fill(rows)


def _configuration(snapshot: MetricsSnapshot) -> Iterator[Family]:
    yield Gauges(
        "tensord_config_last_reload_successful",
        "Whether the last reload of the configuration, or else the start, was successful",
        snapshot.reloaded,
    )
    yield Gauges(
        "tensord_config_last_reload_success_timestamp_seconds",
        "When the configuration was last read with success",
        snapshot.reloaded_at,
    )


def _models(snapshot: MetricsSnapshot) -> Iterator[Family]:
    models = [((total.name, str(total.version)), total) for total in snapshot.models]
    failure = Unknowns(
        "nv_inference_request_failure",
        "Failed inference requests: rejected by the queue, cancelled, replaced there, refused by the model, or otherwise",
        labels=[*_MODEL, "reason"],
    )
    yield failure.fill([((*labels, why), of(total.counts)) for labels, total in models for why, of in _FAILURES])
    refused = Counters(
        "tensord_model_refused_total", "Requests that a worker answered 503, by reason", labels=[*_MODEL, "reason"]
    )
    rows = [((*labels, why.value), of(total.counts)) for labels, total in models for why, of in _REFUSALS]
    yield refused.fill(rows)
    slow = Counters(
        "tensord_model_python_requests_total",
        "Requests that workers answered in Python and not in C, by reason",
        labels=[*_MODEL, "reason"],
    )
    rows = [
        ((*labels, why.label), total.counts.slow.get(why.label, 0)) for labels, total in models for why in SlowReason
    ]
    yield slow.fill(rows)
    cached = [(labels, total) for labels, total in models if total.cached]
    for counters, counted in ((_COUNTERS, models), (_CACHE_COUNTERS, cached)):
        for name, text, of in counters:
            family = Unknowns(name, text, labels=_MODEL)
            yield family.fill([(labels, of(total.counts)) for labels, total in counted])
    first = Histograms(
        "nv_inference_first_response_histogram_ms", "Time from arrival to the first response, of models with several"
    )
    for labels, total in models:
        if total.streams:
            counts = total.counts
            within = counts.first_within_0, counts.first_within_1, counts.first_within_2, counts.first_within_3
            bounds = [str(bound) for bound in FIRST_RESPONSE_MS]
            buckets = [*zip(bounds, within, strict=True), ("+Inf", counts.first)]
            first.observe(_MODEL, labels, buckets, counts.first_ns / 1e6)
    yield first
    pending = Gauges("nv_inference_pending_request_count", "Inference requests that wait in queues now", labels=_MODEL)
    yield pending.fill([(labels, total.pending) for labels, total in models])
    stateful = [(labels, total, total.sequences) for labels, total in models if total.sequences is not None]
    live = Gauges(
        "tensord_model_sequences", "Sequences that have a slot, or wait for one, now", labels=[*_MODEL, "state"]
    )
    rows = [((*labels, state), count) for labels, _, of in stateful for state, count in zip(_STATES, of, strict=True)]
    yield live.fill(rows)
    lost = Counters(
        "tensord_model_sequences_lost_total", "Sequences whose state went with an execution that failed", labels=_MODEL
    )
    yield lost.fill([(labels, total.counts.lost_sequences) for labels, total, _ in stateful])
    copied = Counters(
        "tensord_copied_bytes_total",
        "Bytes of tensors that workers have copied for requests, in and out",
        labels=_MODEL,
    )
    yield copied.fill([(labels, total.counts.copied_byte_size) for labels, total in models])
    busy = Counters(
        "tensord_model_busy_seconds_total",
        "Time of all runs of it, each once however many requests it was for; an ensemble's are its steps'",
        labels=_MODEL,
    )
    yield busy.fill([(labels, total.counts.busy_ns / 1e9) for labels, total in models])
    rows_of_nobody = Counters(
        "tensord_padded_rows_total", "Rows of batches that padded a bucket and belonged to no request", labels=_MODEL
    )
    yield rows_of_nobody.fill([(labels, total.counts.padded_rows) for labels, total in models])
    padded = Counters(
        "tensord_padded_elements_total", "Elements of inputs that padded buckets, in rows and in axes", labels=_MODEL
    )
    yield padded.fill([(labels, total.counts.padded_elements) for labels, total in models])


def _gpus(snapshot: MetricsSnapshot) -> Iterator[Family]:
    for name, text, of in _GPU:
        rows = [((gpu.uuid,), value) for gpu in snapshot.gpus if (value := of(gpu)) is not None]
        yield Gauges(name, text, labels=["gpu_uuid"]).fill(rows)
    energy = Unknowns("nv_energy_consumption", "Energy in joules since the driver was loaded", labels=["gpu_uuid"])
    yield energy.fill([((gpu.uuid,), gpu.energy) for gpu in snapshot.gpus if gpu.energy is not None])
    errors = Counters(
        "tensord_gpu_errors_total",
        "Errors of a GPU: XIDs of the driver, and memory errors",
        labels=["gpu_uuid", "kind"],
    )
    yield errors.fill(list(snapshot.gpu_errors.items()))


def _footprints(snapshot: MetricsSnapshot) -> Iterator[Family]:
    for name, text, of in _FOOTPRINT:
        rows = [((model, str(version)), of(taken)) for (model, version), taken in snapshot.footprints.items()]
        yield Gauges(name, text, labels=_MODEL).fill(rows)


def _regions(snapshot: MetricsSnapshot) -> Iterator[Family]:
    kinds = [((regions.kind,), regions) for regions in snapshot.regions]
    count = Gauges("tensord_regions", "Regions that clients have registered", labels=["kind"])
    yield count.fill([(kind, regions.count) for kind, regions in kinds])
    size = Gauges("tensord_region_bytes", "Bytes of registered regions", labels=["kind"])
    yield size.fill([(kind, regions.byte_size) for kind, regions in kinds])
    leases = Gauges("tensord_region_leases", "Tensors of requests in regions now", labels=["kind"])
    yield leases.fill([(kind, regions.leases) for kind, regions in kinds])
    yield Gauges("tensord_regions_max", "Regions that may be registered", snapshot.max_regions)
    yield Gauges("tensord_region_bytes_max", "Bytes that all regions together may have", snapshot.max_region_byte_size)


def _workers(snapshot: MetricsSnapshot) -> Iterator[Family]:
    workers = [((slot.name, slot.device), slot) for slot in snapshot.workers]
    labels = ("worker", "device")
    up = Gauges("tensord_worker_up", "Whether the worker's process is up", labels=labels)
    yield up.fill([(of, slot.up) for of, slot in workers])
    answered = Gauges(
        "tensord_worker_answered", "Whether it answered this scrape; if not, its last figures are shown", labels=labels
    )
    yield answered.fill([(of, slot.answered) for of, slot in workers])
    restarts = Counters("tensord_worker_restarts_total", "How often it died and was replaced", labels=labels)
    yield restarts.fill([(of, slot.restarts) for of, slot in workers])
    deaths = Counters(
        "tensord_process_deaths_total",
        "Processes that died and were to be replaced, by cause: memory, hung, version, the signal, or exit",
        labels=["process", "cause"],
    )
    yield deaths.fill(list(snapshot.deaths.items()))
    compiles = Counters("tensord_worker_compiles_total", "Programs that were compiled, or could not be", labels=labels)
    yield compiles.fill([(of, slot.compiles.count) for of, slot in workers])
    seconds = Counters("tensord_worker_compile_seconds_total", "Time of all compilations together", labels=labels)
    yield seconds.fill([(of, slot.compiles.ns / 1e9) for of, slot in workers])
    hits = Counters("tensord_worker_compile_cache_hits_total", "Programs that were found in the cache", labels=labels)
    yield hits.fill([(of, slot.compiles.cache_hits) for of, slot in workers])
    lost = Counters("tensord_worker_sequences_lost_total", "Sequences that had begun on it when it died", labels=labels)
    yield lost.fill([(of, slot.lost_sequences) for of, slot in workers])
    programs = Gauges(
        "tensord_worker_load_programs",
        "Of the model that it loads now: the programs that are made, and all that are to be",
        labels=(*labels, *_MODEL, "state"),
    )
    for of, at in [(of, slot.loading) for of, slot in workers]:
        if at is not None and at.total:
            model = (*of, at.name, str(at.version))
            programs.fill([((*model, "made"), at.number - 1), ((*model, "all"), at.total)])
    yield programs


def _parameters(snapshot: MetricsSnapshot) -> Iterator[Family]:
    pushed = snapshot.parameters
    labels = {key: (key[0], str(key[1])) for key in pushed.versions}
    sets = Gauges("tensord_parameter_sets", "Parameter sets that were pushed and are in force", labels=_MODEL)
    yield sets.fill([(labels[key], count) for key, (count, _) in pushed.versions.items()])
    number = Gauges(
        "tensord_parameter_version", "Number of the parameters of the set main; 0: the repository's", labels=_MODEL
    )
    yield number.fill([(labels[key], main) for key, (_, main) in pushed.versions.items()])
    yield Gauges(
        "tensord_parameter_kept_bytes",
        "Pushed parameters that are kept for workers that are replaced",
        pushed.byte_size,
    )
    moved = [
        ((total.name, str(total.version)), total) for total in snapshot.models if total.set_byte_size or total.misses
    ]
    size = Gauges(
        "tensord_parameter_device_bytes", "Parameter sets that lie on devices now, of all workers", labels=_MODEL
    )
    yield size.fill([(of, total.set_byte_size) for of, total in moved])
    evictions = Counters(
        "tensord_parameter_evictions_total", "Parameter sets that left a device to make room for others", labels=_MODEL
    )
    yield evictions.fill([(of, total.evictions) for of, total in moved])
    misses = Counters(
        "tensord_parameter_misses_total",
        "Runs whose parameter set had to be brought to the device first",
        labels=_MODEL,
    )
    yield misses.fill([(of, total.misses) for of, total in moved])
    outcomes = Counters(
        "tensord_parameter_changes_total",
        "Changes of parameter sets, by what came of them",
        labels=["model", "outcome"],
    )
    yield outcomes.fill(list(pushed.outcomes.items()))


def _clients(snapshot: MetricsSnapshot) -> Iterator[Family]:
    yield Gauges("tensord_clients", "Clients that are connected to the clients' socket now", snapshot.clients)
    yield Counters("tensord_client_lanes_refused_total", "Requests for lanes that were refused", snapshot.refused_lanes)
    workers = [((slot.name, slot.device), slot) for slot in snapshot.workers]
    labels = ("worker", "device")
    lanes = Gauges("tensord_client_lanes", "Lanes that clients have to the worker now", labels=labels)
    yield lanes.fill([(of, slot.lanes) for of, slot in workers])
    requests = Counters(
        "tensord_client_lane_requests_total", "Inference requests that came on clients' lanes", labels=labels
    )
    yield requests.fill([(of, slot.lane_requests) for of, slot in workers])
    answers = Counters(
        "tensord_client_lane_answers_total",
        "Final answers to requests on clients' lanes, by code; OK: good ones",
        labels=(*labels, "code"),
    )
    rows = [((*of, code), count) for of, slot in workers for code, count in slot.lane_answers.items()]
    yield answers.fill(rows)
    size = Gauges("tensord_client_segment_bytes", "Bytes of clients' segments that lanes have open now", labels=labels)
    yield size.fill([(of, slot.lane_byte_size) for of, slot in workers])


def _fronts(snapshot: MetricsSnapshot) -> Iterator[Family]:
    fronts = [((slot.name, slot.protocol), slot) for slot in snapshot.fronts]
    labels = ("front", "protocol")
    up = Gauges("tensord_front_up", "Whether the front's process is up", labels=labels)
    yield up.fill([(of, slot.up) for of, slot in fronts])
    connections = Gauges("tensord_front_connections", "Connections of clients now", labels=labels)
    yield connections.fill([(of, slot.connections) for of, slot in fronts])
    refused = Counters(
        "tensord_front_refused_total", "Requests that the front answered 503, by reason", labels=(*labels, "reason")
    )
    rows = [((*of, why.value), count) for of, slot in fronts for why, count in slot.refused.items()]
    yield refused.fill(rows)
    answers: collections.Counter[tuple[str, str]] = collections.Counter()
    for slot in snapshot.fronts:
        for code, count in slot.answers.items():
            answers[slot.protocol, code] += count
    requests = Counters(
        "tensord_front_requests_total",
        "Requests that fronts have answered, of any kind, by code of the protocol",
        labels=["protocol", "code"],
    )
    yield requests.fill(list(answers.items()))
    known = Gauges(
        "tensord_front_prepared_requests", "Prepared requests that have a number on the lanes now", labels=labels
    )
    yield known.fill([(of, slot.prepared_requests) for of, slot in fronts])
    numbered = Counters(
        "tensord_front_prepared_requests_numbered_total", "Prepared requests that were given a number", labels=labels
    )
    yield numbered.fill([(of, slot.prepared_numbered) for of, slot in fronts])
    evicted = Counters(
        "tensord_front_prepared_requests_evicted_total",
        "Prepared requests that were forgotten because others took their numbers",
        labels=labels,
    )
    yield evicted.fill([(of, slot.prepared_evicted) for of, slot in fronts])
    restarts = Counters("tensord_front_restarts_total", "How often it died and was replaced", labels=labels)
    yield restarts.fill([(of, slot.restarts) for of, slot in fronts])
    if snapshot.spans:
        spans = Counters(
            "tensord_trace_spans_total", "Spans for the collector of traces, by what became of them", labels=["outcome"]
        )
        yield spans.fill([((outcome,), count) for outcome, count in snapshot.spans.items()])
        dropped = Counters(
            "tensord_front_dropped_traces_total",
            "Traces that the front dropped because the supervisor did not take them",
            labels=labels,
        )
        yield dropped.fill([(of, slot.dropped_traces) for of, slot in fronts])


def _memory(processes: Mapping[str, int]) -> Family:
    family = Gauges(
        "tensord_process_resident_memory_bytes", "Resident memory, shared pages included", labels=["process"]
    )
    for name, pid in processes.items():
        with contextlib.suppress(OSError):  # it has just ended
            family.fill([((name,), int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE)])
    return family


def _own(own: OwnFamily) -> Family:
    """Returns the samples of a metric that models define (not tensord), with the names that the model chose."""
    histogram = Histograms(own.name, own.description) if own.kind == "histogram" else None
    family = histogram or (Unknowns if own.kind == "counter" else Gauges)(own.name, own.description)
    for labels, metric in own.metrics.items():
        names, values = [name for name, _ in labels], [value for _, value in labels]
        if histogram is None:
            family.add(names, values, metric.value)
        else:
            within = itertools.accumulate(metric.counts)
            # As Triton's library writes them: 1, and not 1.0; so dashboards find them.
            bounds = [f"{bound:.16g}" for bound in metric.buckets]
            buckets = zip((*bounds, "+Inf"), within, strict=True)
            histogram.observe(names, values, buckets, metric.value)
    return family

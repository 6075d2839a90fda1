"""Writes a ``MetricsSnapshot`` as text for Prometheus, in the Prometheus format or in OpenMetrics.

A metric has the name that Triton or a model's code gives it, or else a name that begins with ``tensord_``. Call ``render``
off the event loop. The library prometheus_client would write the same text, but far more slowly.
Source: Triton docs/user_guide/metrics.md; the Prometheus exposition format 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from tensord import __version__
from tensord.daemon.metrics.ledger import Total
from tensord.daemon.metrics.snapshot import Exemplar, MetricsSnapshot, WorkerSlot
from tensord.daemon.models.versions import IndexState
from tensord.shm.durations import PROTOCOLS, QUEUE
from tensord.shm.figures import FIRST_RESPONSE_MS, Counts, OwnMetrics, SlowReason
from tensord.shm.refusals import Refusal

#: Label texts that are kept from scrape to scrape: some twenty for each model version.
_MAX_LABELS = 1 << 15
#: Patterns of histograms that are kept: three or four for each model version and protocol.
_MAX_HISTOGRAMS = 4096
#: Integers below are written as they are; Go begins to use exponents there.
_EXPONENTS = 1_000_000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_EOF = b"# EOF\n"
#: Name and help of each histogram of durations, in the order of ``durations.KINDS``.
_DURATIONS = (
    ("tensord_request_duration_seconds", "Time from a request's arrival to its answer, of those answered well"),
    ("tensord_queue_duration_seconds", "Of that, waiting to run"),
    ("tensord_compute_duration_seconds", "Of that, running: gathering inputs, the model, placing outputs"),
    ("tensord_first_response_duration_seconds", "Time to the first response, of models with several"),
)
_MODEL, _WORKER, _FRONT = ("model", "version"), ("worker", "device"), ("front", "protocol")
_INDEX_STATES = [state.value for state in IndexState]


def _table(text: str) -> list[tuple[str, str, Callable[[Any], Any]]]:
    found = []
    for line in text.strip().splitlines():
        name, path, said = line.split(maxsplit=2)
        found.append((name, said, _reader(path, name.startswith("nv_"))))
    return found


def _reader(path: str, is_tritons: bool) -> Callable[[Any], Any]:
    read = operator.attrgetter(path)
    if not path.endswith(("_ns", ".ns")):
        return read
    return (lambda thing: read(thing) // 1000) if is_tritons else (lambda thing: read(thing) / 1e9)


_DAEMON = _table("""
tensord_ready ready Whether the daemon is ready, as /v2/health/ready says
tensord_config_last_reload_successful reloaded Whether the last reload of the configuration, or else the start, was successful
tensord_config_last_reload_success_timestamp_seconds reloaded_at When the configuration was last read with success
tensord_regions_max max_regions Regions that may be registered
tensord_region_bytes_max max_region_byte_size Bytes that all regions together may have
tensord_clients clients Clients that are connected to the clients' socket now
tensord_client_lanes_refused_total refused_lanes Requests for lanes that were refused
tensord_parameter_kept_bytes parameter_byte_size Pushed parameters that are kept for workers that are replaced
""")
_MODELS = _table("""
nv_inference_request_success counts.success Successful inference requests, whatever their batch
nv_inference_count counts.inference Inferences: a request with a batch of n counts n
nv_inference_exec_count counts.execution Executions of the model, each for one batch
nv_inference_request_duration_us counts.request_ns Time from arrival to answer, of all successful requests together
nv_inference_queue_duration_us counts.queue_ns Of that, waiting in queues
nv_inference_compute_input_duration_us counts.compute_input_ns Of that, gathering the inputs
nv_inference_compute_infer_duration_us counts.compute_infer_ns Of that, running the model
nv_inference_compute_output_duration_us counts.compute_output_ns Of that, placing the outputs
tensord_model_busy_seconds_total counts.busy_ns Time of all runs of it, each once however many requests it was for; \
an ensemble's are its steps'
tensord_copied_bytes_total counts.copied_byte_size Bytes of tensors that workers have copied for requests, in and out
tensord_padded_rows_total counts.padded_rows Rows of batches that padded a bucket and belonged to no request
tensord_padded_elements_total counts.padded_elements Elements of inputs that padded buckets, in rows and in axes
""")
#: The metrics of models with a response cache.
_CACHED = _table("""
nv_cache_num_hits_per_model counts.cache_hit Requests that the response cache answered
nv_cache_num_misses_per_model counts.cache_miss Requests whose answers the response cache took
nv_cache_hit_duration_per_model counts.cache_hit_ns Time of those it answered, in microseconds
nv_cache_miss_duration_per_model counts.cache_miss_ns Time of looking for those it did not know, and of keeping their answers, \
in microseconds
""")
#: The metrics of models with several parameter sets.
_MOVED = _table("""
tensord_parameter_device_bytes set_byte_size Parameter sets that lie on devices now, of all workers
tensord_parameter_evictions_total evictions Parameter sets that left a device to make room for others
tensord_parameter_misses_total misses Runs whose parameter set had to be brought to the device first
""")
#: The footprint of a version on each worker that serves it.
_FOOTPRINT = _table("""
tensord_model_load_seconds seconds Time of its last load, on the worker that was done last
tensord_model_parameter_bytes parameter_byte_size Its parameters on the device, of each worker
tensord_model_programs programs Programs that were made when it was loaded
tensord_model_program_bytes program_byte_size Those programs, as they are kept
tensord_model_largest_batch_bytes batch_byte_size Inputs, outputs and what lies between them of the program that takes most
""")
_REGIONS = _table("""
tensord_regions count Regions that clients have registered
tensord_region_bytes byte_size Bytes of registered regions
tensord_region_leases leases Tensors of requests in regions now
""")
_WORKERS = _table("""
tensord_worker_up up Whether the worker's process is up
tensord_worker_answered answered Whether it answered this scrape; if not, its last figures are shown
tensord_worker_restarts_total restarts How often it died and was replaced
tensord_worker_compiles_total compiles.count Programs that were compiled, or could not be
tensord_worker_compile_seconds_total compiles.ns Time of all compilations together
tensord_worker_compile_cache_hits_total compiles.cache_hits Programs that were found in the cache
tensord_worker_sequences_lost_total lost_sequences Sequences that had begun on it when it died
tensord_client_lanes lanes Lanes that clients have to the worker now
tensord_client_lane_requests_total lane_requests Inference requests that came on clients' lanes
tensord_client_segment_bytes lane_byte_size Bytes of clients' segments that lanes have open now
""")
_FRONTS = _table("""
tensord_front_up up Whether the front's process is up
tensord_front_connections counts.connections Connections of clients now
tensord_front_prepared_requests counts.prepared_requests Prepared requests that have a number on the lanes now
tensord_front_prepared_requests_numbered_total counts.prepared_numbered Prepared requests that were given a number
tensord_front_prepared_requests_evicted_total counts.prepared_evicted Prepared requests that were forgotten because others \
took their numbers
tensord_front_restarts_total restarts How often it died and was replaced
""")
#: Triton's gauges of a GPU.
_GPU = _table("""
nv_gpu_utilization utilization Part of the last moment in which the GPU worked, from 0 to 1
nv_gpu_memory_total_bytes memory_total Memory of the GPU
nv_gpu_memory_used_bytes memory_used Of that, in use, by whomever
nv_gpu_power_usage power_usage Power that the GPU draws, in watts
nv_gpu_power_limit power_limit Power that it may draw, in watts
""")
#: Name -> labels and help of each metric whose samples are no attributes of one thing.
_OTHERS = {
    name: (tuple(labels.split(",")), text)
    for name, labels, text in (
        line.split(maxsplit=2)
        for line in """
tensord_model_served model Whether a version is served of a model that should be
tensord_model_state model,version,state 1 for the state that a version is in, of the repository index's
tensord_parameter_sets model,version Parameter sets that were pushed and are in force
tensord_parameter_version model,version Number of the parameters of the set main; 0: the repository's
tensord_parameter_changes_total model,outcome Changes of parameter sets, by what came of them
nv_energy_consumption gpu_uuid Energy in joules since the driver was loaded
tensord_gpu_errors_total gpu_uuid,kind Errors of a GPU: XIDs of the driver, and memory errors
tensord_build_info version Always 1
nv_inference_request_failure model,version,reason Failed inference requests: rejected by the queue, cancelled, replaced there, \
refused by the model, or otherwise
tensord_model_refused_total model,version,reason Requests that a worker answered 503, by reason
tensord_model_python_requests_total model,version,reason Requests that workers answered in Python and not in C, by reason
nv_inference_pending_request_count model,version Inference requests that wait in queues now
tensord_model_sequences model,version,state Sequences that have a slot, or wait for one, now
tensord_model_sequences_lost_total model,version Sequences whose state went with an execution that failed
tensord_process_deaths_total process,cause Processes that died and were to be replaced, by cause: memory, hung, version, \
the signal, or exit
tensord_worker_load_programs worker,device,model,version,state Of the model that it loads now: the programs that are made, \
and all that are to be
tensord_client_lane_answers_total worker,device,code Final answers to requests on clients' lanes, by code; OK: good ones
tensord_front_refused_total front,protocol,reason Requests that the front answered 503, by reason
tensord_front_requests_total protocol,code Requests that fronts have answered, of any kind, by code of the protocol
tensord_trace_spans_total outcome Spans for the collector of traces, by what became of them
tensord_front_dropped_traces_total front,protocol Traces that the front dropped because the supervisor did not take them
tensord_process_resident_memory_bytes process Resident memory, shared pages included
""".strip().splitlines()
    )
}
_FAILURES: tuple[tuple[str, Callable[[Counts], int]], ...] = (
    ("REJECTED", lambda c: c.rejected + c.queue_full),
    ("CANCELED", lambda c: c.canceled),
    ("REPLACED", lambda c: c.replaced),
    ("BACKEND", lambda c: c.backend),
    ("OTHER", lambda c: c.other),
)
_REFUSALS: tuple[tuple[Refusal, Callable[[Counts], int]], ...] = (
    (Refusal.QUEUE_FULL, lambda c: c.queue_full),
    (Refusal.QUEUE_TIMEOUT, lambda c: c.rejected),
    (Refusal.COMPILING, lambda c: c.compiling),
    (Refusal.ANSWER_ROOM, lambda c: c.answer_room),
)


def render(snapshot: MetricsSnapshot, accept: str) -> tuple[bytes, str]:
    """Returns ``snapshot`` as text, and the content type of the text.

    ``accept``: the Accept header. The format is OpenMetrics if the header names OpenMetrics, and otherwise Prometheus.
    """
    is_openmetrics = wants_openmetrics(accept)
    text = families(snapshot, is_openmetrics) + _durations(snapshot, is_openmetrics)
    if is_openmetrics:
        return text + _EOF, openmetrics.CONTENT_TYPE_LATEST
    return text, exposition.CONTENT_TYPE_PLAIN_0_0_4


def wants_openmetrics(accept: str) -> bool:
    """Returns whether the Accept header of a request names the OpenMetrics format."""
    return "application/openmetrics-text" in {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}


def families(snapshot: MetricsSnapshot, is_openmetrics: bool) -> bytes:
    """Returns all metrics of ``snapshot``, except histograms of durations, in the text format of OpenMetrics or Prometheus."""
    return "".join([family.text(is_openmetrics) for family in _families(snapshot)]).encode()


def _durations(snapshot: MetricsSnapshot, exemplars: bool) -> bytes:
    """Returns the text of the histograms of durations. ``exemplars``: whether to add the exemplars in ``snapshot``."""
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
    labels = f'model="{escaped(model)}",protocol="{protocol}",version="{version}"'.replace("%", "%%")
    lines = [f'{name}_bucket{{{labels},le="{bound}"}} %d' for bound in bounds]
    return "\n".join([*lines, f"{name}_count{{{labels}}} %d", f"{name}_sum{{{labels}}} %s", ""])


def _of_version(exemplars: Iterable[Exemplar]) -> dict[tuple[str, int, str], dict[tuple[int, int], str]]:
    found: dict[tuple[str, int, str], dict[tuple[int, int], str]] = {}
    for (model, version, protocol, kind, bucket), (trace_id, seconds, at) in exemplars:
        text = f' # {{trace_id="{trace_id}"}} {seconds} {at:.3f}'
        found.setdefault((model, version, protocol), {})[kind, bucket] = text
    return found


def _families(snapshot: MetricsSnapshot) -> Iterator[Family]:
    models = [((total.name, str(total.version)), total) for total in snapshot.models]
    workers = [((slot.name, slot.device), slot) for slot in snapshot.workers]
    yield from _of_each("gauge", _DAEMON, (), [((), snapshot)])
    yield _other("tensord_model_served", [((name,), served) for name, served in snapshot.wanted.items()])
    states = [
        ((name, str(version), each), each == now) for name, version, now in snapshot.states for each in _INDEX_STATES
    ]
    yield _other("tensord_model_state", states)
    yield from _models(models)
    footprints = [((model, str(version)), taken) for (model, version), taken in snapshot.footprints.items()]
    yield from _of_each("gauge", _FOOTPRINT, _MODEL, footprints)
    yield from _of_each("gauge", _REGIONS, ["kind"], [((regions.kind,), regions) for regions in snapshot.regions])
    yield from _of_each("gauge", _WORKERS, _WORKER, workers)
    yield from _workers(snapshot, workers)
    pushed = [((model, str(version)), of) for (model, version), of in snapshot.parameter_sets.items()]
    yield _other("tensord_parameter_sets", [(labels, count) for labels, (count, _) in pushed])
    yield _other("tensord_parameter_version", [(labels, main) for labels, (_, main) in pushed])
    moved = [(labels, total) for labels, total in models if total.set_byte_size or total.misses]
    yield from _of_each("gauge", _MOVED, _MODEL, moved)
    yield _other("tensord_parameter_changes_total", snapshot.parameter_changes.items())
    yield from _fronts(snapshot)
    yield from _of_each("gauge", _GPU, ("gpu_uuid",), [((gpu.uuid,), gpu) for gpu in snapshot.gpus])
    energy = [((gpu.uuid,), gpu.energy) for gpu in snapshot.gpus if gpu.energy is not None]
    yield _other("nv_energy_consumption", energy, "unknown")
    yield _other("tensord_gpu_errors_total", snapshot.gpu_errors.items())
    yield _memory(snapshot.processes)
    for own in snapshot.own:
        yield _own(own)
    yield _other("tensord_build_info", [((__version__,), 1)])


def _of_each(
    kind: str,
    metrics: Iterable[tuple[str, str, Callable[[Any], Any]]],
    labels: Sequence[str],
    things: Collection[tuple[Sequence[str], Any]],
) -> Iterator[Family]:
    for name, text, of in metrics:
        family = Family(_kind(name, kind), name, text, labels)
        yield family.fill([(values, value) for values, thing in things if (value := of(thing)) is not None])


def _other(name: str, rows: Iterable[tuple[Sequence[str], float]], kind: str = "gauge") -> Family:
    """Returns the metric ``name`` of the table ``_OTHERS`` with its samples. ``rows``: as of ``Family.fill``."""
    labels, text = _OTHERS[name]
    return Family(_kind(name, kind), name, text, labels).fill(rows)


def _kind(name: str, otherwise: str) -> str:
    return "counter" if name.endswith("_total") else otherwise


def _models(models: Sequence[tuple[tuple[str, str], Total]]) -> Iterator[Family]:
    failed = [((*labels, why), of(total.counts)) for labels, total in models for why, of in _FAILURES]
    yield _other("nv_inference_request_failure", failed, "unknown")
    refused = [((*labels, why.value), of(total.counts)) for labels, total in models for why, of in _REFUSALS]
    yield _other("tensord_model_refused_total", refused)
    slow = [
        ((*labels, why.label), total.counts.slow.get(why.label, 0)) for labels, total in models for why in SlowReason
    ]
    yield _other("tensord_model_python_requests_total", slow)
    yield from _of_each("unknown", _MODELS, _MODEL, models)
    yield from _of_each("unknown", _CACHED, _MODEL, [(labels, total) for labels, total in models if total.cached])
    text = "Time from arrival to the first response, of models with several"
    first = Family("histogram", "nv_inference_first_response_histogram_ms", text)
    for labels, total in models:
        if total.streams:
            of = total.counts
            within = of.first_within_0, of.first_within_1, of.first_within_2, of.first_within_3, of.first
            buckets = zip((*map(str, FIRST_RESPONSE_MS), "+Inf"), within, strict=True)
            first.observe(_MODEL, labels, buckets, of.first_ns / 1e6)
    yield first
    yield _other("nv_inference_pending_request_count", [(labels, total.pending) for labels, total in models])
    stateful = [(labels, total.sequences, total.counts) for labels, total in models if total.sequences is not None]
    live = [
        ((*labels, state), count)
        for labels, sequences, _ in stateful
        for state, count in zip(("slot", "backlog"), sequences, strict=True)
    ]
    yield _other("tensord_model_sequences", live)
    yield _other(
        "tensord_model_sequences_lost_total", [(labels, counts.lost_sequences) for labels, _, counts in stateful]
    )


def _workers(snapshot: MetricsSnapshot, workers: Sequence[tuple[tuple[str, str], WorkerSlot]]) -> Iterator[Family]:
    yield _other("tensord_process_deaths_total", snapshot.deaths.items())
    programs = [
        ((*labels, at.name, str(at.version), state), count)
        for labels, slot in workers
        if (at := slot.loading) is not None and at.total
        for state, count in (("made", at.number - 1), ("all", at.total))
    ]
    yield _other("tensord_worker_load_programs", programs)
    answers = [((*labels, code), count) for labels, slot in workers for code, count in slot.lane_answers.items()]
    yield _other("tensord_client_lane_answers_total", answers)


def _fronts(snapshot: MetricsSnapshot) -> Iterator[Family]:
    fronts = [((slot.name, slot.protocol), slot) for slot in snapshot.fronts]
    yield from _of_each("gauge", _FRONTS, _FRONT, fronts)
    refused = [((*labels, why.value), count) for labels, slot in fronts for why, count in slot.counts.refused.items()]
    yield _other("tensord_front_refused_total", refused)
    answers: collections.Counter[tuple[str, str]] = collections.Counter()
    for slot in snapshot.fronts:
        for code, count in slot.counts.answers.items():
            answers[slot.protocol, code] += count
    yield _other("tensord_front_requests_total", answers.items())
    if snapshot.spans:
        yield _other("tensord_trace_spans_total", [((outcome,), count) for outcome, count in snapshot.spans.items()])
        yield _other(
            "tensord_front_dropped_traces_total", [(labels, slot.counts.dropped_traces) for labels, slot in fronts]
        )


def _memory(processes: Mapping[str, int]) -> Family:
    found: list[tuple[tuple[str], int]] = []
    for name, pid in processes.items():
        with contextlib.suppress(OSError):  # it has just ended
            found.append(((name,), int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE))
    return _other("tensord_process_resident_memory_bytes", found)


def _own(own: OwnMetrics) -> Family:
    """Returns the family of a metric that a model's own code defines."""
    family = Family("unknown" if own.kind == "counter" else own.kind, own.name, own.description)
    for metric in own.metrics:
        names, values = [name for name, _ in metric.labels], [value for _, value in metric.labels]
        if own.kind != "histogram":
            family.add(names, values, metric.value)
        else:
            within = itertools.accumulate(metric.counts)
            # As Triton's library writes them: 1, and not 1.0; so dashboards find them.
            bounds = [f"{bound:.16g}" for bound in metric.buckets]
            buckets = zip((*bounds, "+Inf"), within, strict=True)
            family.observe(names, values, buckets, metric.value)
    return family


class Family:
    """Holds the samples of one metric. ``lines`` has one line of text for each sample."""

    __slots__ = ("_help", "_labels", "kind", "lines", "name")

    def __init__(self, kind: str, name: str, text: str, labels: Sequence[str] = ()) -> None:
        """Creates a family without samples.

        Args:
          kind: the type in OpenMetrics. "unknown" is a counter whose name OpenMetrics does not allow, such as Triton's.
          name: the name of the samples. That of a counter ends with ``_total``.
          text: the help.
          labels: the names of the labels.
        """
        self.kind, self.name = kind, name
        self.lines: list[str] = []
        self._help = text.replace("\\", r"\\").replace("\n", r"\n")
        self._labels = tuple(labels)

    def fill(self, rows: Iterable[tuple[Sequence[str], float]]) -> Self:
        """Adds samples, and returns this family. ``rows``: for each sample, the values of its labels, and its value."""
        name, names, lines = self.name, self._labels, self.lines
        for values, value in rows:
            number = f"{value}.0" if type(value) is int and 0 <= value < _EXPONENTS else floatToGoString(value)
            lines.append(f"{name}{_labelled(names, tuple(values))} {number}\n")
        return self

    def add(self, names: Sequence[str], values: Sequence[str], value: float, suffix: str = "") -> None:
        """Adds the sample ``value``. ``values``: the values of the labels ``names``. ``suffix``: appended to ``self.name``."""
        self.lines.append(f"{self.name}{suffix}{_labelled(tuple(names), tuple(values))} {floatToGoString(value)}\n")

    def text(self, is_openmetrics: bool) -> str:
        """Returns the family in the text format of OpenMetrics or Prometheus. Returns "" if the family has no samples."""
        if not self.lines:
            return ""
        name, kind, said = self.name, self.kind, self._help
        if is_openmetrics:
            said = said.replace('"', r"\"")
            if kind == "counter":
                name = name.removesuffix("_total")
        elif kind == "unknown":
            # OpenMetrics knows no counters but those that end in _total; Triton's do not, and are unknown there.
            kind = "counter"
        return f"# HELP {name} {said}\n# TYPE {name} {kind}\n" + "".join(self.lines)

    def observe(
        self, names: Sequence[str], values: Sequence[str], buckets: Iterable[tuple[str, int]], total: float
    ) -> None:
        """Adds a histogram. ``values``: the values of the labels ``names``.

        Args:
          buckets: upper bounds in rising order, the last one "+Inf", each with the number of observations up to that bound.
          total: the sum of all observations.
        """
        within = 0
        for bound, within in buckets:
            self.add((*names, "le"), (*values, bound), within, "_bucket")
        self.add(names, values, within, "_count")
        self.add(names, values, total, "_sum")

    def __repr__(self) -> str:
        return f"<Family {self.kind} {self.name}: {len(self.lines)} samples>"


def escaped(label: str) -> str:
    """Returns the value of a label, escaped to stand between double quotes."""
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@functools.lru_cache(_MAX_LABELS)
def _labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Returns labels as they follow the name of a metric, such as ``{model="m",version="1"}``."""
    if not names:
        return ""
    listed = ",".join([f'{name}="{escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))])
    return f"{{{listed}}}"

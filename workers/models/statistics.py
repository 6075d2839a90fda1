"""Counts the requests, runs and responses of a model version, for metrics and for Triton's statistics extension."""

from __future__ import annotations

import enum
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensord.config.options import Metrics
from tensord.shm.arrays import Array
from tensord.shm.durations import FIRST_RESPONSE, QUEUE, REQUEST, Counted, Durations, total
from tensord.shm.errors import ServingError
from tensord.shm.figures import FIRST_RESPONSE_MS, Counts, SlowReason
from tensord.shm.refusals import Refusal
from tensord.workers.models.execution import Execution
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender, Sent

#: Names of the counters that are called alike here and in ``Counts``.
_COUNTED = (
    *("request_ns", "queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns"),
    *("copied_byte_size", "padded_rows", "padded_elements", "lost_sequences"),
)
#: Responses of a request that are counted by their number.
MAX_RESPONSES = 1024


@dataclass(slots=True)
class Duration:
    """The number of events of one kind, such as cache hits, and the nanoseconds that these events took together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def to_dict(self) -> dict[str, int]:
        """Returns the count and the nanoseconds as in Triton's statistics extension."""
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class ResponseStatistics:
    """Statistics of the n-th response to each request: one entry of ``response_stats`` in Triton's statistics extension."""

    #: The time from the response before it, or from when the request began to run.
    compute_infer: Duration = field(default_factory=Duration)
    #: Putting it into place.
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    #: It had no outputs, or was no response but the mark that none comes any more.
    empty_response: Duration = field(default_factory=Duration)
    #: Its request was given up before it came.
    cancel: Duration = field(default_factory=Duration)

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {name: getattr(self, name).to_dict() for name in self.__slots__}


class ResponsesByNumber:
    """Keeps one statistic of all requests' first responses, one of the second ones, and so on, ``MAX_RESPONSES`` at most."""

    def __init__(self) -> None:
        self._found: dict[int, ResponseStatistics] = {}
        #: The responses that were counted together: how many, and the ns from the response before each.
        self._counts, self._waited_ns = np.zeros((2, MAX_RESPONSES), np.int64)

    def of(self, number: int) -> ResponseStatistics | None:
        """Returns the statistics of all requests' responses at position ``number``, or None from ``MAX_RESPONSES`` on."""
        if number >= MAX_RESPONSES:
            return None
        return self._found.get(number) or self._found.setdefault(number, ResponseStatistics())

    def add(self, first: int, waited_ns: Array) -> None:
        """Counts several consecutive successful responses to one request, and adds up the waiting times before them.

        ``first``: the index of the first of these responses among all responses to the request. ``waited_ns`` is INT64[count]:
        the time between each of these responses and the response before it, in ns.
        """
        which = slice(first, first + len(waited_ns))
        self._counts[which] += 1
        self._waited_ns[which] += waited_ns[: max(0, MAX_RESPONSES - first)]

    def add_at_once(self, first: int, count: int, waited_ns: int) -> None:
        """Counts ``count`` responses to one request that were sent together. ``first``: the number of the first one, from 0.

        ``waited_ns``: the time between the request's previous response and response ``first``.
        """
        self._counts[first : first + count] += 1
        self._waited_ns[first : first + 1] += waited_ns

    def to_dict(self) -> dict[str, Any]:
        """Returns Triton's ``response_stats``, a dict by response index. Key "0" has the statistics of all first responses."""
        for number in np.flatnonzero(self._counts).tolist():
            counted = self.of(number)
            assert counted is not None
            count, ns = int(self._counts[number]), int(self._waited_ns[number])
            for duration in (counted.compute_infer, counted.success):
                duration.count += count
                duration.ns += ns
            counted.compute_output.count += count
        self._counts[:], self._waited_ns[:] = 0, 0
        return {str(number): counted.to_dict() for number, counted in sorted(self._found.items())}

    def __repr__(self) -> str:
        return f"<ResponsesByNumber {len(self._found)} numbers>"


class NativeRuns(NamedTuple):
    """Counts of requests that C code answered successfully."""

    answered: int
    rows: int
    #: How often the model was applied.
    runs: int
    request_ns: int
    queue_ns: int
    copied_byte_size: int
    #: Input, infer and output of each run, once for each of its requests.
    compute_ns: tuple[int, int, int]
    #: Batch size, how often the model was applied to such a batch, and input, infer and output of each run once.
    batches: list[tuple[int, int, int, int, int]]

    def part(self, share: int, whole: int) -> NativeRuns:
        """Converts the counts of an ensemble to the counts of one of its models.

        The model gets all requests and runs of the ensemble, and ``share / whole`` of its compute time.
        """
        took = self.compute_ns[1] * share // whole
        batches = [(size, count, 0, ns * share // whole, 0) for size, count, _, ns, _ in self.batches]
        return NativeRuns(self.answered, self.rows, self.runs, took, 0, 0, (0, took, 0), batches)


class Failure(enum.Enum):
    """The reasons why requests fail, as metrics name them."""

    #: It waited longer than it may.
    REJECTED = "REJECTED"
    #: Its client gave it up.
    CANCELED = "CANCELED"
    #: A newer one of its replace key came while it waited; not one of Triton's.
    REPLACED = "REPLACED"
    #: The model, or its executable.
    BACKEND = "BACKEND"
    #: It ran, and its answer could not be given: a client's region is gone, say.
    OTHER = "OTHER"


@dataclass(slots=True)
class BatchStatistics:
    """The runs of one model version with one batch size: how many, and the time that they took."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class VersionStatistics:
    """The statistics of one model version on one worker. Only the worker's loop may use them."""

    def __init__(self, name: str, version: int, buckets: Sequence[float] = Metrics().buckets) -> None:
        self._name = name
        self._version = version
        #: When what ``counts`` tells began.
        self.began_ns = time.monotonic_ns()
        #: The statistics of the load before this one, and what they came to once it was over.
        self._former: VersionStatistics | None = None
        self._inherited = Counts()
        self._inherited_durations: Counted = {}
        #: The durations of clients' requests; those that models make count above alone.
        self.durations = Durations(buckets)
        #: Requests that were answered well, and what all of them took together.
        self.success_count = 0
        self.request_ns = 0
        self.queue_ns = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0
        #: The answers that came from the response cache; and those that were computed and kept there, with the time that took.
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.fail = Duration()
        #: The failed requests by reason.
        self.failures: Counter[Failure] = Counter()
        #: Requests that got 503 for want of room: they are in no statistics, as in Triton, but in metrics.
        self.refused: Counter[Refusal] = Counter()
        #: The reason why no request is answered in C; None: some may be, and the others are counted by reason.
        self.slow: SlowReason | None = None
        self.slow_requests: Counter[SlowReason] = Counter()
        #: Sequences whose state went with a run that failed.
        self.lost_sequences = 0
        self.inference_count = 0
        self.execution_count = 0
        #: The time of the last inference in ms since 1970; 0: there was none.
        self.last_inference_ms = 0
        #: Bytes of tensors that the worker copied (docs/data-plane.md): not in Triton's answer, but in ours.
        self.copied_byte_size = 0
        #: The rows, and the elements of inputs, that programs took besides requests, because of their buckets.
        self.padded_rows = 0
        self.padded_elements = 0
        self._batches: dict[int, BatchStatistics] = {}
        #: Time to the first response, and how many came within each bound.
        self._first = Duration()
        self._first_within = [0] * len(FIRST_RESPONSE_MS)
        self.responses = ResponsesByNumber()

    def executed(self, execution: Execution, failed: Mapping[Request, Failure], now_ns: int) -> None:
        """Counts a run and its requests, but no request that a ``ResponseSender`` answers. ``now_ns``: when answers were sent.

        ``failed``: the requests that failed, with the reasons. If all requests of a run failed, the run is not counted.
        """
        began, gathered, computed = execution.began_ns, execution.gathered_ns, execution.computed_ns
        answered: Sequence[Request] = execution.requests
        if failed:
            for request in failed:
                self.fail.add(now_ns - request.arrived_ns)
            self.failures.update(failed.values())
            answered = [request for request in answered if request not in failed]
        good = len(answered)
        others = execution.rows_of_nobody
        if execution.streamed:
            others += sum([request.rows for request in execution.streamed])
        if not good:
            if execution.streamed:
                self.execution_count += 1
                self._count_batches(others, 1, gathered - began, computed - gathered, 0)
            return
        if good == 1:
            request = answered[0]
            rows, arrived_ns = request.rows, request.arrived_ns
            # One that arrived while this began has not waited.
            waited_ns = max(0, began - arrived_ns)
            if request.sink is None:
                self.durations.ran(request.submitter.protocol, now_ns - arrived_ns, waited_ns, now_ns - began)
        else:
            rows = sum([request.rows for request in answered])
            arrived = [request.arrived_ns for request in answered]
            arrived_ns = sum(arrived)
            waited_ns = good * began - (
                arrived_ns if max(arrived) <= began else sum([min(ns, began) for ns in arrived])
            )
            ran, took_ns = self.durations.ran, now_ns - began
            for request in answered:
                if request.sink is None:
                    since_ns = request.arrived_ns
                    ran(request.submitter.protocol, now_ns - since_ns, max(0, began - since_ns), took_ns)
        input_ns, infer_ns, output_ns, runs = gathered - began, computed - gathered, now_ns - computed, execution.runs
        self.success_count += good
        self.request_ns += good * now_ns - arrived_ns
        self.queue_ns += waited_ns
        # As in Triton every request of a batch waited for the whole batch.
        self.compute_input_ns += input_ns * good
        self.compute_infer_ns += infer_ns * good
        self.compute_output_ns += output_ns * good
        self.inference_count += rows
        self.execution_count += runs
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.copied_byte_size += execution.copied_byte_size
        if execution.padding is not None:
            self.padded(*execution.padding)
        self._count_batches(rows // runs + others, runs, input_ns, infer_ns, output_ns)

    def _count_batches(self, size: int, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        batch = self._batches.get(size)
        if batch is None:
            batch = self._batches[size] = BatchStatistics()
        batch.count += count
        batch.input_ns += input_ns
        batch.infer_ns += infer_ns
        batch.output_ns += output_ns

    def stepped(self, count: int, infer_ns: int) -> None:
        """Counts one step that a stepped model made for ``count`` requests in ``infer_ns`` ns."""
        self.execution_count += 1
        self._count_batches(count, 1, 0, infer_ns, 0)

    def responded(self, sender: ResponseSender, result: Sent, now_ns: int, placed_ns: int) -> None:
        """Counts one response to a request, or the end of the request's responses if ``result`` is None.

        ``now_ns``: the time just before the worker sent this response or end. ``placed_ns``: the time just after the sending.
        """
        number, waited_ns, output_ns = sender.count, max(0, now_ns - sender.last_ns), placed_ns - now_ns
        sender.last_ns = placed_ns
        if result is not None:
            sender.count += 1
            if number == 0:
                sender.failed = isinstance(result, ServingError)
                first_ns = now_ns - sender.request.arrived_ns
                self._first.add(first_ns)
                if sender.request.sink is None:
                    self.durations.add(sender.request.submitter.protocol, FIRST_RESPONSE, first_ns)
                for i, bound in enumerate(FIRST_RESPONSE_MS):
                    self._first_within[i] += first_ns <= bound * 1_000_000
        counted = self.responses.of(number)
        if counted is None:
            return
        if not result:
            counted.empty_response.add(waited_ns + output_ns)
            return
        counted.compute_infer.add(waited_ns)
        counted.compute_output.add(output_ns)
        (counted.fail if isinstance(result, ServingError) else counted.success).add(waited_ns + output_ns)

    def responded_more(self, sender: ResponseSender, count: int, now_ns: int) -> None:
        """Counts ``count`` successful responses that ``sender`` sent at ``now_ns``, all after the request's first response."""
        self.responses.add_at_once(sender.count, count, max(0, now_ns - sender.last_ns))
        sender.count += count
        sender.last_ns = now_ns

    def streamed(self, sender: ResponseSender, now_ns: int, failure: Failure | None) -> None:
        """Counts a request that a response sender has answered. ``failure``: why the request failed; None: it did not fail."""
        request = sender.request
        if failure is Failure.CANCELED and (counted := self.responses.of(sender.count)) is not None:
            counted.cancel.add(max(0, now_ns - sender.last_ns))
        if failure is not None:
            self.failed(now_ns - request.arrived_ns, failure)
            return
        lasted_ns, took_ns = now_ns - request.arrived_ns, now_ns - sender.began_ns
        waited_ns = max(0, sender.began_ns - request.arrived_ns)
        if request.sink is None:
            self.durations.ran(request.submitter.protocol, max(0, lasted_ns), waited_ns, max(0, took_ns))
        self.add(NativeRuns(1, request.rows, 0, lasted_ns, waited_ns, request.copied_byte_size, (0, took_ns, 0), []))

    def add(self, done: NativeRuns) -> None:
        """Adds the counts of successful requests, such as those that C code has answered."""
        self.success_count += done.answered
        self.request_ns += done.request_ns
        self.queue_ns += done.queue_ns
        input_ns, infer_ns, output_ns = done.compute_ns
        self.compute_input_ns += input_ns
        self.compute_infer_ns += infer_ns
        self.compute_output_ns += output_ns
        self.inference_count += done.rows
        self.execution_count += done.runs
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.copied_byte_size += done.copied_byte_size
        for size, count, input_ns, infer_ns, output_ns in done.batches:
            self._count_batches(size, count, input_ns, infer_ns, output_ns)

    def padded(self, rows: int, elements: int) -> None:
        """Counts ``rows`` rows of padding in batches and ``elements`` elements of padding in inputs."""
        self.padded_rows += rows
        self.padded_elements += elements

    def failed(self, lasted_ns: int, why: Failure = Failure.REJECTED) -> None:
        """Counts an accepted request that failed ``lasted_ns`` after its arrival, and counts the reason ``why``."""
        self.fail.add(lasted_ns)
        self.failures[why] += 1

    def found(self, request: Request, began_ns: int, now_ns: int) -> None:
        """Counts a request whose answer was in the response cache. ``began_ns``: when the cache was asked."""
        self.success_count += 1
        self.request_ns += now_ns - request.arrived_ns
        waited_ns = max(0, began_ns - request.arrived_ns)
        self.queue_ns += waited_ns
        if request.sink is None:
            self.durations.add(request.submitter.protocol, REQUEST, now_ns - request.arrived_ns)
            self.durations.add(request.submitter.protocol, QUEUE, waited_ns)
        self.cache_hit.add(now_ns - began_ns)

    def succeed(self, former: VersionStatistics) -> None:
        """Makes ``counts`` and ``all_durations`` include ``former``, the statistics of an earlier load of this version."""
        self._former, self.began_ns = former, former.began_ns

    def inherit(self) -> None:
        """Copies the final counts of the version's earlier load into this object. Call it when the earlier load has closed."""
        if self._former is not None:
            self._inherited_durations = self._former.all_durations()
            self._inherited, self._former = self._former.counts(), None

    @property
    def histograms(self) -> tuple[array[int], array[int]]:
        """Returns the counts of all duration histograms, one after another, and the upper bounds in ns, the same for each.

        C code adds to the counts.
        """
        return self.durations.counts, self.durations.bounds

    def all_durations(self) -> Counted:
        """Returns the duration histograms of the version since it was first loaded."""
        former = self._inherited_durations if self._former is None else self._former.all_durations()
        return total(former, self.durations.counted())

    def counts(self) -> Counts:
        """Returns the version's counts since it was first loaded, for metrics."""
        former = self._inherited if self._former is None else self._former.counts()
        slow = self.slow_requests if self.slow is None else {self.slow: self.success_count + self.fail.count}
        return former + Counts(
            success=self.success_count,
            **{why.name.lower(): self.failures[why] for why in Failure},
            inference=self.inference_count,
            execution=self.execution_count,
            **{name: getattr(self, name) for name in _COUNTED},
            cache_hit=self.cache_hit.count,
            cache_hit_ns=self.cache_hit.ns,
            cache_miss=self.cache_miss.count,
            cache_miss_ns=self.cache_miss.ns,
            **{why.value: self.refused[why] for why in (Refusal.QUEUE_FULL, Refusal.COMPILING, Refusal.ANSWER_ROOM)},
            first=self._first.count,
            first_ns=self._first.ns,
            **{f"first_within_{i}": count for i, count in enumerate(self._first_within)},
            busy_ns=sum([each.input_ns + each.infer_ns + each.output_ns for each in self._batches.values()]),
            slow={why.label: count for why, count in slow.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns this version's entry of ``model_stats`` of Triton's statistics extension."""
        good = self.success_count
        computed = good - self.cache_hit.count
        return {
            "name": self._name,
            "version": str(self._version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": _duration(good, self.request_ns),
                "fail": self.fail.to_dict(),
                "queue": _duration(good, self.queue_ns),
                "compute_input": _duration(computed, self.compute_input_ns),
                "compute_infer": _duration(computed, self.compute_infer_ns),
                "compute_output": _duration(computed, self.compute_output_ns),
                "cache_hit": self.cache_hit.to_dict(),
                "cache_miss": self.cache_miss.to_dict(),
            },
            "response_stats": self.responses.to_dict(),
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(batch.count, batch.input_ns),
                    "compute_infer": _duration(batch.count, batch.infer_ns),
                    "compute_output": _duration(batch.count, batch.output_ns),
                }
                for size, batch in sorted(self._batches.items())
            ],
            "memory_usage": [],
            "copied_byte_size": self.copied_byte_size,
            "padded_rows": self.padded_rows,
            "padded_elements": self.padded_elements,
        }

    def __repr__(self) -> str:
        return f"<VersionStatistics {self._name}:{self._version} {self.success_count} ok, {self.fail.count} failed>"


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}

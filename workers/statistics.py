"""What one model version did, counted from its requests themselves, in the shape of Triton's statistics extension.

A refused request counts nowhere. Source: Triton docs/protocol/extension_statistics.md.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shm.figures import Counts
from workers.models.execution import Execution
from workers.request import Request


class Failure(enum.Enum):
    """Why a request failed, as Triton's metrics tell it."""

    #: It waited longer than it may.
    REJECTED = "REJECTED"
    #: Its client gave it up.
    CANCELED = "CANCELED"
    #: The model, or its executable.
    BACKEND = "BACKEND"
    #: It ran, and its answer could not be given: a client's region is gone, say.
    OTHER = "OTHER"


class Duration:
    """How often and how long."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class BatchStatistics:
    """Executions of one batch size."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()


class ModelStatistics:
    """One per model version on one worker; belongs to the loop."""

    def __init__(self, name: str, version: int) -> None:
        self._name = name
        self._version = version
        #: When what ``counts`` tells began.
        self.began_ns = time.monotonic_ns()
        #: Of the load before this one, and what it came to once it was over.
        self._former: ModelStatistics | None = None
        self._inherited = Counts()
        self.success = Duration()
        self.fail = Duration()
        #: The same requests by reason.
        self.failures: Counter[Failure] = Counter()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        #: Bytes of tensors that the worker copied (docs/data-plane.md): not in Triton's answer, but in ours.
        self.copied_byte_size = 0
        self._batches: dict[int, BatchStatistics] = {}

    def executed(self, execution: Execution, failed: Mapping[Request, Failure], now_ns: int) -> None:
        """Counts a batch whose answers are placed (or wait for room); ``failed`` are its requests that got an error, and why."""
        began, gathered, computed = execution.began_ns, execution.gathered_ns, execution.computed_ns
        answered: Sequence[Request] = execution.requests
        if failed:
            for request in failed:
                self.fail.add(now_ns - request.arrived_ns)
            self.failures.update(failed.values())
            answered = [request for request in answered if request not in failed]
        good = len(answered)
        if not good:
            return
        rows = sum([request.rows for request in answered])
        arrived = [request.arrived_ns for request in answered]
        self.success.add(good * now_ns - sum(arrived), good)
        # One that arrived while this began has not waited.
        self.queue.add(
            good * began - sum(arrived if max(arrived) <= began else [min(ns, began) for ns in arrived]), good
        )
        runs = execution.runs
        # As in Triton every request of a batch waited for the whole batch.
        self.compute_input.add((gathered - began) * good, good)
        self.compute_infer.add((computed - gathered) * good, good)
        self.compute_output.add((now_ns - computed) * good, good)
        self.inference_count += rows
        self.execution_count += runs
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.copied_byte_size += execution.copied_byte_size
        size = rows // runs
        batch = self._batches.get(size)
        if batch is None:
            batch = self._batches[size] = BatchStatistics()
        batch.compute_input.add(gathered - began, runs)
        batch.compute_infer.add(computed - gathered, runs)
        batch.compute_output.add(now_ns - computed, runs)

    def copied(self, byte_size: int) -> None:
        """Counts what was copied for one request alone."""
        self.copied_byte_size += byte_size

    def failed(self, lasted_ns: int) -> None:
        """Counts a request that was queued and never ran: its time was up."""
        self.fail.add(lasted_ns)
        self.failures[Failure.REJECTED] += 1

    def succeed(self, former: ModelStatistics) -> None:
        """This load replaces another one, which finishes what it has: what is counted there counts here as well."""
        self._former, self.began_ns = former, former.began_ns

    def inherit(self) -> None:
        """The other one has ended."""
        if self._former is not None:
            self._inherited, self._former = self._former.counts(), None

    def counts(self) -> Counts:
        """What metrics show of it: since the first of the loads that replaced each other."""
        former = self._inherited if self._former is None else self._former.counts()
        return former + Counts(
            success=self.success.count,
            rejected=self.failures[Failure.REJECTED],
            canceled=self.failures[Failure.CANCELED],
            backend=self.failures[Failure.BACKEND],
            other=self.failures[Failure.OTHER],
            inference=self.inference_count,
            execution=self.execution_count,
            request_ns=self.success.ns,
            queue_ns=self.queue.ns,
            compute_input_ns=self.compute_input.ns,
            compute_infer_ns=self.compute_infer.ns,
            compute_output_ns=self.compute_output.ns,
            copied_byte_size=self.copied_byte_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """One entry of ``model_stats``."""
        never = Duration().to_dict()
        return {
            "name": self._name,
            "version": str(self._version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": self.success.to_dict(),
                "fail": self.fail.to_dict(),
                "queue": self.queue.to_dict(),
                "compute_input": self.compute_input.to_dict(),
                "compute_infer": self.compute_infer.to_dict(),
                "compute_output": self.compute_output.to_dict(),
                "cache_hit": never,
                "cache_miss": never,
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": batch.compute_input.to_dict(),
                    "compute_infer": batch.compute_infer.to_dict(),
                    "compute_output": batch.compute_output.to_dict(),
                }
                for size, batch in sorted(self._batches.items())
            ],
            "memory_usage": [],
            "copied_byte_size": self.copied_byte_size,
        }

    def __repr__(self) -> str:
        return f"<ModelStatistics {self._name}:{self._version} {self.success.count} ok, {self.fail.count} failed>"

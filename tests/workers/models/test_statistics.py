"""Counted from requests: each with its own wait, each batch once, refused and failed ones apart."""

from __future__ import annotations

from tensord.shm.figures import Counts
from tensord.workers.models.execution import Execution
from tensord.workers.models.statistics import Failure, VersionStatistics
from tests.workers.made_requests import request_of


def executed(rows: list[int]) -> Execution:
    requests = [request_of({}, count, received_ns=100) for count in rows]
    execution = Execution(requests, began_ns=300)
    execution.gathered_ns, execution.computed_ns = 310, 350
    return execution


def test_a_batch() -> None:
    statistics = VersionStatistics("m", 3)
    statistics.executed(executed([1, 2, 1]), {}, now_ns=370)
    found = statistics.to_dict()
    assert (found["name"], found["version"]) == ("m", "3")
    assert (found["inference_count"], found["execution_count"]) == (4, 1)
    assert found["last_inference"] > 1_600_000_000_000
    assert {key: (value["count"], value["ns"]) for key, value in found["inference_stats"].items()} == {
        "success": (3, 3 * 270),
        "fail": (0, 0),
        "queue": (3, 3 * 200),
        "compute_input": (3, 3 * 10),
        "compute_infer": (3, 3 * 40),
        "compute_output": (3, 3 * 20),
        "cache_hit": (0, 0),
        "cache_miss": (0, 0),
    }
    assert found["batch_stats"] == [
        {
            "batch_size": 4,
            "compute_input": {"count": 1, "ns": 10},
            "compute_infer": {"count": 1, "ns": 40},
            "compute_output": {"count": 1, "ns": 20},
        }
    ]


def test_a_batch_that_is_answered_in_part_by_senders_is_one() -> None:
    statistics = VersionStatistics("m", 1)
    execution = executed([1, 2])
    execution.streamed = [request_of({}, 4)]
    statistics.executed(execution, {}, now_ns=370)
    found = statistics.to_dict()
    assert (found["inference_count"], found["execution_count"]) == (3, 1)
    (batch,) = found["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]) == (7, {"count": 1, "ns": 40})


def test_failures_count_apart() -> None:
    statistics = VersionStatistics("m", 1)
    both, alone = executed([1, 1]), executed([1])
    statistics.executed(both, {both.requests[0]: Failure.CANCELED}, now_ns=370)
    statistics.executed(alone, dict.fromkeys(alone.requests, Failure.BACKEND), now_ns=370)
    statistics.failed(500)
    found = statistics.to_dict()
    assert (found["inference_count"], found["execution_count"]) == (1, 1)
    assert found["inference_stats"]["success"]["count"] == 1
    assert found["inference_stats"]["fail"] == {"count": 3, "ns": 270 + 270 + 500}
    counts = statistics.counts()
    assert (counts.rejected, counts.canceled, counts.backend, counts.other) == (1, 1, 1, 0)


def test_counts_say_what_the_statistics_say() -> None:
    statistics = VersionStatistics("m", 3)
    statistics.executed(executed([1, 2, 1]), {}, now_ns=370)
    statistics.copied_byte_size += 96
    assert statistics.counts() == Counts(
        success=3,
        inference=4,
        execution=1,
        request_ns=3 * 270,
        queue_ns=3 * 200,
        compute_input_ns=3 * 10,
        compute_infer_ns=3 * 40,
        compute_output_ns=3 * 20,
        copied_byte_size=96,
        busy_ns=70,
    )


def test_counts_go_on_where_a_load_replaces_another_one() -> None:
    """Requests that the former load finishes afterwards count too; statistics begin anew."""
    first, second, third = (VersionStatistics("m", 1) for _ in range(3))
    first.copied_byte_size += 1
    second.succeed(first)
    second.copied_byte_size += 10
    first.copied_byte_size += 2
    assert (second.counts().copied_byte_size, second.began_ns) == (13, first.began_ns)
    third.succeed(second)
    assert third.counts().copied_byte_size == 13
    first.copied_byte_size += 4
    second.inherit()
    second.copied_byte_size += 20
    assert third.counts().copied_byte_size == 37
    third.inherit()
    third.copied_byte_size += 100
    assert (third.counts().copied_byte_size, third.began_ns) == (137, first.began_ns)
    assert third.to_dict()["copied_byte_size"] == 100

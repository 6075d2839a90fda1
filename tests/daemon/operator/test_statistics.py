"""Statistics of several workers, added up."""

from __future__ import annotations

import json

from tensord.daemon.operator.operations import merge_statistics


def entry(name: str, version: str, n: int, last: int = 0, sizes: tuple[int, ...] = (1,)) -> dict[str, object]:
    counted = {"count": n, "ns": 10 * n}
    return {
        "name": name,
        "version": version,
        "last_inference": last,
        "inference_count": n,
        "execution_count": n,
        "inference_stats": {"success": counted, "fail": counted, "queue": counted},
        "response_stats": {},
        "batch_stats": [{"batch_size": size, "compute_infer": counted} for size in sizes],
        "memory_usage": [],
    }


def merged(*answers: list[dict[str, object]]) -> list[dict[str, object]]:
    out: list[dict[str, object]] = json.loads(
        merge_statistics(json.dumps({"model_stats": answer}).encode() for answer in answers)
    )["model_stats"]
    return out


def test_sums() -> None:
    (total,) = merged([entry("m", "1", 2, last=5, sizes=(1, 4))], [entry("m", "1", 3, last=9, sizes=(2, 4))])
    assert list(total) == list(entry("m", "1", 0))
    assert total["inference_stats"]["success"] == {"count": 5, "ns": 50}  # type: ignore[index]
    assert (total["last_inference"], total["inference_count"]) == (9, 5)
    assert total["batch_stats"] == [
        {"batch_size": 1, "compute_infer": {"count": 2, "ns": 20}},
        {"batch_size": 2, "compute_infer": {"count": 3, "ns": 30}},
        {"batch_size": 4, "compute_infer": {"count": 5, "ns": 50}},
    ]


def test_order_and_single_answers() -> None:
    answer = [entry("b", "10", 1), entry("b", "9", 1), entry("a", "1", 1)]
    assert [(one["name"], one["version"]) for one in merged(answer)] == [("a", "1"), ("b", "9"), ("b", "10")]
    assert merged([entry("a", "1", 7)]) == [entry("a", "1", 7)]
    assert merged() == []


def test_keys_that_one_worker_alone_knows() -> None:
    one, other = entry("m", "1", 1), entry("m", "1", 1)
    other["response_stats"] = {"0": {"success": {"count": 4, "ns": 4}}}
    (total,) = merged([one], [other])
    assert total["response_stats"] == {"0": {"success": {"count": 4, "ns": 4}}}

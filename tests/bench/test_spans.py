from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.spans import SPANS, run, spans, traces

#: As the daemon's traces have them, in microseconds.
HTTP = {
    "HTTP_RECV_START": 10,
    "HTTP_RECV_END": 11,
    "REQUEST_START": 13,
    "QUEUE_START": 17,
    "COMPUTE_START": 25,
    "COMPUTE_INPUT_END": 41,
    "COMPUTE_OUTPUT_START": 73,
    "COMPUTE_END": 137,
    "REQUEST_END": 265,
    "HTTP_SEND_START": 521,
    "HTTP_SEND_END": 1033,
}


def test_spans_follow_each_other_without_a_gap() -> None:
    found = spans({name: us * 1000 for name, us in HTTP.items()})
    assert list(found) == list(SPANS)
    assert list(found.values()) == [2**power for power in range(10)]
    grpc = {name.replace("HTTP_RECV", "GRPC_WAITREAD").replace("HTTP", "GRPC"): us * 1000 for name, us in HTTP.items()}
    assert spans(grpc) == found


def test_only_whole_traces_count(tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_text("")
    assert list(traces(file)) == []
    entries = [
        {"id": number, "timestamps": [{"name": name, "ns": us}]}
        for number, left_out in ((1, None), (2, "COMPUTE_END"), (3, None))
        for name, us in HTTP.items()
        if name != left_out
    ]
    file.write_text(json.dumps([{"id": 1, "model_name": "addsub"}, *entries]))
    assert list(traces(file)) == [HTTP, HTTP]


def test_a_client_is_charged_for_its_processor_time() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass\nprint('p50 latency: 7 usec')"
    used_us, said = run([sys.executable, "-c", work])
    assert used_us >= 190_000
    assert "p50 latency: 7" in said

"""The text: Triton's names and labels to the letter, types that Prometheus understands, both formats readable."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest, parser
from prometheus_client.openmetrics import exposition as openmetrics_text
from prometheus_client.openmetrics import parser as openmetrics

from tensord.daemon.control.shared_counters import FrontCounts
from tensord.daemon.metrics import exposition
from tensord.daemon.metrics.exposition import render
from tensord.daemon.metrics.ledger import Total
from tensord.daemon.metrics.snapshot import FrontSlot, MetricsSnapshot, RegionTotals, WorkerSlot
from tensord.daemon.processes.gpu_watch import GpuState
from tensord.shm.control_records import Footprint, Loading
from tensord.shm.figures import Compiles, Counts, MetricFigures, OwnMetrics
from tensord.shm.refusals import Refusal

COUNTS = Counts(
    *(10, 1, 2, 3, 4, 40, 20, 11_999, 22_000, 33_000, 44_000, 55_000, 1 << 40, 5, 6, 7, 8, 66_000, 9, 77_000),
    lost_sequences=3,
    replaced=12,
    busy_ns=7_500_000_000,
    slow={"large": 21},
)
#: Of two buckets: counts, and sums in ns, of each kind.
DURATIONS = {"lane": (1, 2, 3, 4_500_000_000, 6, 0, 0, 250, 0, 0, 6, 60_000_000_000, 1, 0, 0, 1000)}
FRONT = FrontCounts(5, 3, 8, 5, {Refusal.IN_FLIGHT: 9}, {"200": 40, "400": 2, "503": 0}, 6)
SNAPSHOT = MetricsSnapshot(
    False,
    {"m": True, "broken": False},
    [
        Total("m", 3, COUNTS, 7, True, sequences=(5, 4), durations=DURATIONS, evictions=5, misses=6, set_byte_size=300),
        Total('a "b"\n\\', 1, Counts(), 0),
    ],
    [
        WorkerSlot(
            "worker-0",
            "cpu:0",
            True,
            False,
            2,
            6,
            Loading("m", 4, 3, 16),
            8,
            9,
            4096,
            Compiles(3, 2_500_000_000, 11),
            {"OK": 7, "NOT_FOUND": 2},
        )
    ],
    [FrontSlot("http-0", "http", True, 1, FRONT)],
    [RegionTotals("system", 2, 8192, 3), RegionTotals("cuda", 0, 0, 0)],
    4096,
    1 << 44,
    {"supervisor": os.getpid(), "gone": 0},
    {("m", 3): Footprint(1.5, 16, 2, 1 << 30, 7_000, 4_096)},
    [GpuState("GPU-1", 0.5, 8, 7, 6.0, 5.0, 4.0), GpuState("GPU-2")],
    {("GPU-2", "xid"): 3},
    clients=5,
    refused_lanes=2,
    states=[("m", 3, "READY"), ("broken", 1, "UNAVAILABLE")],
    deaths={("worker-0", "memory"): 2, ("http-0", "SIGSEGV"): 1},
    reloaded=False,
    reloaded_at=1_800_000_000.5,
    buckets=[0.0005, 2.5],
    parameter_sets={("m", 3): (4, 17)},
    parameter_byte_size=8192,
    parameter_changes={("m", "pushed"): 17, ("m", "overtaken"): 1},
    exemplars=[
        (("m", 3, "lane", 0, 1), ("4bf92f3577b34da6a3ce929d0e0e4736", 0.75, 1_800_000_000.25)),
        # The workers have counted nothing there, or nothing yet.
        (("m", 3, "lane", 1, 2), ("11111111111111111111111111111111", 3.5, 1_800_000_000.25)),
        (("new", 1, "http", 0, 0), ("22222222222222222222222222222222", 0.0001, 1_800_000_000.25)),
    ],
    spans={"sent": 50, "failed": 5, "dropped": 2},
)
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


def text(accept: str = "") -> str:
    return render(SNAPSHOT, accept)[0].decode()


def test_tritons_names() -> None:
    lines = text().splitlines()
    for line in (
        'nv_inference_request_success{model="m",version="3"} 10.0',
        'nv_inference_request_failure{model="m",reason="REJECTED",version="3"} 6.0',
        'nv_inference_request_failure{model="m",reason="CANCELED",version="3"} 2.0',
        'nv_inference_request_failure{model="m",reason="BACKEND",version="3"} 3.0',
        'nv_inference_request_failure{model="m",reason="REPLACED",version="3"} 12.0',
        'nv_inference_request_failure{model="m",reason="OTHER",version="3"} 4.0',
        'nv_inference_count{model="m",version="3"} 40.0',
        'nv_inference_exec_count{model="m",version="3"} 20.0',
        'nv_inference_request_duration_us{model="m",version="3"} 11.0',
        'nv_inference_queue_duration_us{model="m",version="3"} 22.0',
        'nv_inference_compute_input_duration_us{model="m",version="3"} 33.0',
        'nv_inference_compute_infer_duration_us{model="m",version="3"} 44.0',
        'nv_inference_compute_output_duration_us{model="m",version="3"} 55.0',
        'nv_inference_pending_request_count{model="m",version="3"} 7.0',
        'nv_cache_num_hits_per_model{model="m",version="3"} 8.0',
        'nv_cache_num_misses_per_model{model="m",version="3"} 9.0',
        'nv_cache_hit_duration_per_model{model="m",version="3"} 66.0',
        'nv_cache_miss_duration_per_model{model="m",version="3"} 77.0',
    ):
        assert line in lines
    # A model without a response cache has no such lines.
    assert sum(line.startswith("nv_cache_") for line in lines) == 4
    counters = {line.split()[2] for line in lines if re.fullmatch("# TYPE nv_.* counter", line)}
    assert "# TYPE nv_inference_pending_request_count gauge" in lines
    gauges = {line.split()[2] for line in lines if re.fullmatch("# TYPE nv_.* gauge", line)}
    assert counters == {line.split("{")[0] for line in lines if line.startswith("nv_")} - gauges
    for line in (
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 8.0',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 7.0',
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 6.0',
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 5.0',
        'nv_energy_consumption{gpu_uuid="GPU-1"} 4.0',
    ):
        assert line in lines
    assert sum('gpu_uuid="GPU-2"' in line for line in lines) == 1
    assert "untyped" not in text()


def test_ours() -> None:
    lines = text().splitlines()
    for line in (
        'tensord_copied_bytes_total{model="m",version="3"} 1.099511627776e+12',
        "# TYPE tensord_copied_bytes_total counter",
        'tensord_regions{kind="system"} 2.0',
        'tensord_region_bytes{kind="system"} 8192.0',
        'tensord_region_leases{kind="system"} 3.0',
        'tensord_regions{kind="cuda"} 0.0',
        "tensord_regions_max 4096.0",
        "tensord_clients 5.0",
        "tensord_client_lanes_refused_total 2.0",
        'tensord_parameter_sets{model="m",version="3"} 4.0',
        'tensord_parameter_version{model="m",version="3"} 17.0',
        "tensord_parameter_kept_bytes 8192.0",
        'tensord_parameter_device_bytes{model="m",version="3"} 300.0',
        'tensord_parameter_evictions_total{model="m",version="3"} 5.0',
        'tensord_parameter_misses_total{model="m",version="3"} 6.0',
        'tensord_parameter_changes_total{model="m",outcome="pushed"} 17.0',
        'tensord_parameter_changes_total{model="m",outcome="overtaken"} 1.0',
        'tensord_client_lanes{device="cpu:0",worker="worker-0"} 8.0',
        'tensord_client_lane_requests_total{device="cpu:0",worker="worker-0"} 9.0',
        'tensord_client_lane_answers_total{code="OK",device="cpu:0",worker="worker-0"} 7.0',
        'tensord_client_lane_answers_total{code="NOT_FOUND",device="cpu:0",worker="worker-0"} 2.0',
        'tensord_client_segment_bytes{device="cpu:0",worker="worker-0"} 4096.0',
        "tensord_ready 0.0",
        'tensord_model_refused_total{model="m",reason="queue_full",version="3"} 5.0',
        'tensord_model_refused_total{model="m",reason="queue_timeout",version="3"} 1.0',
        'tensord_model_refused_total{model="m",reason="compiling",version="3"} 6.0',
        'tensord_model_refused_total{model="m",reason="answer_room",version="3"} 7.0',
        'tensord_model_python_requests_total{model="m",reason="large",version="3"} 21.0',
        'tensord_model_python_requests_total{model="m",reason="queue",version="3"} 0.0',
        'tensord_front_refused_total{front="http-0",protocol="http",reason="in_flight"} 9.0',
        'tensord_request_duration_seconds_bucket{model="m",protocol="lane",version="3",le="0.0005"} 1',
        'tensord_request_duration_seconds_bucket{model="m",protocol="lane",version="3",le="2.5"} 3',
        'tensord_request_duration_seconds_bucket{model="m",protocol="lane",version="3",le="+Inf"} 6',
        'tensord_request_duration_seconds_count{model="m",protocol="lane",version="3"} 6',
        'tensord_request_duration_seconds_sum{model="m",protocol="lane",version="3"} 4.5',
        'tensord_queue_duration_seconds_bucket{model="m",protocol="lane",version="3",le="0.0005"} 6',
        'tensord_compute_duration_seconds_sum{model="m",protocol="lane",version="3"} 60.0',
        'tensord_first_response_duration_seconds_count{model="m",protocol="lane",version="3"} 1',
        "# TYPE tensord_queue_duration_seconds histogram",
        'tensord_front_requests_total{code="200",protocol="http"} 40.0',
        'tensord_front_requests_total{code="400",protocol="http"} 2.0',
        'tensord_model_busy_seconds_total{model="m",version="3"} 7.5',
        'tensord_model_served{model="m"} 1.0',
        'tensord_model_state{model="m",state="READY",version="3"} 1.0',
        'tensord_model_state{model="m",state="LOADING",version="3"} 0.0',
        'tensord_model_state{model="broken",state="UNAVAILABLE",version="1"} 1.0',
        'tensord_process_deaths_total{cause="memory",process="worker-0"} 2.0',
        'tensord_process_deaths_total{cause="SIGSEGV",process="http-0"} 1.0',
        "tensord_config_last_reload_successful 0.0",
        "tensord_config_last_reload_success_timestamp_seconds 1.8000000005e+09",
        'tensord_worker_compiles_total{device="cpu:0",worker="worker-0"} 3.0',
        'tensord_worker_compile_seconds_total{device="cpu:0",worker="worker-0"} 2.5',
        'tensord_worker_compile_cache_hits_total{device="cpu:0",worker="worker-0"} 11.0',
        'tensord_model_served{model="broken"} 0.0',
        'tensord_worker_up{device="cpu:0",worker="worker-0"} 1.0',
        'tensord_worker_answered{device="cpu:0",worker="worker-0"} 0.0',
        'tensord_worker_load_programs{device="cpu:0",model="m",state="made",version="4",worker="worker-0"} 2.0',
        'tensord_worker_load_programs{device="cpu:0",model="m",state="all",version="4",worker="worker-0"} 16.0',
        'tensord_model_load_seconds{model="m",version="3"} 1.5',
        'tensord_model_programs{model="m",version="3"} 16.0',
        'tensord_model_parameter_bytes{model="m",version="3"} 1.073741824e+09',
        'tensord_model_program_bytes{model="m",version="3"} 7000.0',
        'tensord_model_largest_batch_bytes{model="m",version="3"} 4096.0',
        'tensord_worker_restarts_total{device="cpu:0",worker="worker-0"} 2.0',
        'tensord_worker_sequences_lost_total{device="cpu:0",worker="worker-0"} 6.0',
        'tensord_model_sequences{model="m",state="slot",version="3"} 5.0',
        'tensord_model_sequences{model="m",state="backlog",version="3"} 4.0',
        'tensord_model_sequences_lost_total{model="m",version="3"} 3.0',
        'tensord_front_up{front="http-0",protocol="http"} 1.0',
        'tensord_front_connections{front="http-0",protocol="http"} 5.0',
        'tensord_front_restarts_total{front="http-0",protocol="http"} 1.0',
        'tensord_front_prepared_requests{front="http-0",protocol="http"} 3.0',
        'tensord_front_prepared_requests_numbered_total{front="http-0",protocol="http"} 8.0',
        'tensord_front_prepared_requests_evicted_total{front="http-0",protocol="http"} 5.0',
        'tensord_trace_spans_total{outcome="sent"} 50.0',
        'tensord_trace_spans_total{outcome="failed"} 5.0',
        'tensord_trace_spans_total{outcome="dropped"} 2.0',
        'tensord_front_dropped_traces_total{front="http-0",protocol="http"} 6.0',
    ):
        assert line in lines
    # An alert reads it.
    assert 'tensord_front_requests_total{code="503",protocol="http"} 0.0' in lines
    # A model without sequences has no such lines.
    assert sum(line.startswith("tensord_model_sequences") for line in lines) == 3
    assert 'tensord_process_resident_memory_bytes{process="supervisor"}' in text()
    assert 'process="gone"' not in text()
    assert re.search(r'tensord_build_info\{version="[0-9.]+"\} 1\.0', text())


@pytest.mark.parametrize(
    ("accept", "read", "content_type"),
    [
        ("", parser.text_string_to_metric_families, "text/plain; version=0.0.4; charset=utf-8"),
        ("application/json", parser.text_string_to_metric_families, "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4", parser.text_string_to_metric_families, "text/plain; version=0.0.4; charset=utf-8"),
        (
            OPENMETRICS,
            openmetrics.text_string_to_metric_families,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
        # What the library's own negotiation cannot read.
        (
            "application/openmetrics-text;version=x",
            openmetrics.text_string_to_metric_families,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
def test_both_formats_say_the_same(accept: str, read: object, content_type: str) -> None:
    body, said = render(SNAPSHOT, accept)
    assert said == content_type
    assert callable(read)
    samples = {
        (s.name.removesuffix("_total"), *sorted(s.labels.items())): s.value
        for family in read(body.decode())
        for s in family.samples
    }
    assert samples["nv_inference_request_success", ("model", 'a "b"\n\\'), ("version", "1")] == 0
    assert samples["nv_inference_request_success", ("model", "m"), ("version", "3")] == 10
    assert samples["tensord_copied_bytes", ("model", "m"), ("version", "3")] == 1 << 40
    assert samples["tensord_region_bytes_max",] == 1 << 44


def test_bounds_of_models_own_histograms_are_written_as_tritons() -> None:
    """A whole number has no point, so that what selects a bucket by its text selects it here, too."""
    bounds = (0.1, 1.0, 2.5, 1000000.0, 1e16)
    own = OwnMetrics("m_rows", "Rows", "histogram", (), (MetricFigures((), 7.0, bounds, (1,) * 6),))
    shown = exposition.families(dataclasses.replace(SNAPSHOT, own=[own]), False).decode()
    assert re.findall(r'm_rows_bucket{le="(.*)"} ', shown) == ["0.1", "1", "2.5", "1000000", "1e+16", "+Inf"]


class Read:
    """A collector of the metrics that the library parses from our text."""

    def collect(self) -> Iterator[Metric]:
        yield from openmetrics.text_string_to_metric_families(exposition.families(SNAPSHOT, True).decode() + "# EOF\n")


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_what_is_written_is_what_the_library_writes(is_openmetrics: bool) -> None:
    """To the byte, from what the library has read there."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Read())  # type: ignore[arg-type]
    if is_openmetrics:
        whole = openmetrics_text.generate_latest(registry).removesuffix(b"# EOF\n")
    else:
        whole = generate_latest(registry).replace(b" untyped\n", b" counter\n")

    def steady(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if b"resident_memory_bytes{" not in line]

    assert steady(exposition.families(SNAPSHOT, is_openmetrics)) == steady(whole)
    assert len(steady(whole)) > 150


def test_a_name_without_samples_is_not_there() -> None:
    nothing = MetricsSnapshot(True, {}, [Total("m", 1, Counts(), 0)], [], [], [], 0, 0, {}, {}, [], {})
    shown = render(nothing, "")[0].decode()
    for name in ("nv_cache_num_hits_per_model", "nv_inference_first_response_histogram_ms", "tensord_model_sequences"):
        assert name not in shown
    described = set(re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE))
    assert described == {name for name in described if re.search(rf"^{name}[ {{_]", shown, re.MULTILINE)}


def test_exemplars() -> None:
    """In OpenMetrics alone, each in a bucket that has counted something, and as that format's own reader has them."""
    text, content_type = render(SNAPSHOT, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(text.decode())}
    found = {
        (sample.labels["protocol"], sample.labels["le"]): sample.exemplar
        for sample in families["tensord_request_duration_seconds"].samples
        if sample.exemplar is not None
    }
    assert list(found) == [("lane", "2.5")]
    exemplar = found["lane", "2.5"]
    assert exemplar.labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert (exemplar.value, float(exemplar.timestamp)) == (0.75, 1_800_000_000.25)
    assert text.count(b"trace_id") == 1
    assert b"trace_id" not in render(SNAPSHOT, "text/plain")[0]

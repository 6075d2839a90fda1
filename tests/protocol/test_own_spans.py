"""Tests what models' code adds to the traces of its requests, and that log lines and the access log have a trace's id."""

from __future__ import annotations

import json
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.collector import Collector
from tests.daemon_process import DaemonOf, DaemonProcess, wait_until

SAMPLED = "00-%s-00f067aa0ba902b7-01"
HOST = repositories.applying(
    """
    with tensord.models.span("look up", table="prices", rows=2, whole=True, text="x" * 1000, huge=1 << 70):
        with tensord.models.span("read"):
            pass
        logging.getLogger("prices").info("looked up")
    with tensord.models.span("check"):
        if inputs["x"][0] < 0:
            raise ValueError("negative")
    return {"y": inputs["x"]}
    """,
    "x FP32[2]",
    "y FP32[2]",
    more="import logging\nimport tensord.models\nhost = True",
)
PYTHON = repositories.answering("""
    import tensord.models
    with tensord.models.span("answer"):
        pb_utils.Logger.log_info("a python model's line")
        context = request.trace().get_context() or "none"
    return response(context=np.array([context], np.object_))
""")
MANY = repositories.applying(
    """
    for number in range(500):
        with tensord.models.span(f"part {number}", **{f"a{n}": n for n in range(40)}):
            pass
    return {"y": inputs["x"]}
    """,
    "x FP32[2]",
    "y FP32[2]",
    more="import tensord.models\nhost = True",
)
GENERATOR = repositories.applying(
    """
    with tensord.models.span("all"):
        for i in range(inputs["n"][0]):
            with tensord.models.span("one", i=i):
                yield {"y": np.array([i], np.int32)}
    """,
    "n INT32[1]",
    "y INT32[1]",
    more="import tensord.models\nhost = True",
)
#: A model whose span has attributes that no record can hold as they are: numpy scalars, and text with lone surrogates.
ODD = repositories.applying(
    """
    with tensord.models.span("odd \\ud800", loss=np.float64(0.5), n=np.int32(2), text="\\udfff", **{"k\\ud800": [1]}):
        pass
    return {"y": inputs["x"]}
    """,
    "x FP32[2]",
    "y FP32[2]",
    more="import tensord.models\nhost = True",
)
ECHO = repositories.of_x("x", "FP32[2]", more="host = True")
_CALLS = """
ask(x)
with tensord.models.span("outer"):
    ask(x)
    with tensord.models.span("inner"):
        ask(x)
    y = ask(x)
"""
ASKS = f"""
    import tensord.models

    inputs = {{"x": "FP32[2]"}}
    outputs = {{"y": "FP32[2]"}}
    host = True

    def ask(x):
        return tensord.models.call("host_echo", {{"x": x}})["y"]

    def create(path, config, device):
        def apply(params, inputs):
            x = inputs["x"]
{textwrap.indent(_CALLS, " " * 12)}
            return {{"y": y}}
        return apply, None
"""
PYTHON_ASKS = repositories.answering(f"""
    import tensord.models

    def ask(x):
        return pb_utils.InferenceRequest(
            model_name="host_echo", inputs=[x], requested_output_names=["y"], trace=request.trace()
        ).exec().output_tensors()[0]

    x = pb_utils.Tensor("x", given(request))
{textwrap.indent(_CALLS, " " * 4)}
    return pb_utils.InferenceResponse([y])
""")
KINDS = pytest.mark.parametrize("kind", [httpclient, grpcclient], ids=["http", "grpc"])


@pytest.fixture(scope="module")
def daemon(collector: Collector, daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("own")
    repositories.scale_model(folder / "models")
    for name, source, config in (
        ("host", HOST, ""),
        ("parts", PYTHON, repositories.fields("x FP32 2", "context STRING 1")),
        ("many", MANY, ""),
        ("tells", GENERATOR, ""),
        ("odd", ODD, ""),
        ("host_echo", ECHO, ""),
        ("asks", ASKS, ""),
        ("python_asks", PYTHON_ASKS, repositories.fields("x FP32 2", "y FP32 2")),
    ):
        repositories.write_model(folder / "models", name, source, config)
    repositories.ensemble(
        folder / "models", "around", ["x FP32 2"], ["y FP32 2"], [("host", {"x": "x"}, {"y": "y"})], 0
    )
    (folder / "daemon").mkdir()
    options: dict[str, dict[str, Any]] = {
        "trace": {"otlp": collector.url, "rate": 1000000},
        "log": {"access": 1, "format": "json"},
    }
    # Each of many tests waits for its spans.
    delay = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    return daemon_of(folder / "models", options, folder=folder / "daemon", environment=delay)


def infer(
    daemon: DaemonProcess, kind: Any, model: str, trace_id: str = "", values: tuple[float, ...] = (1.0, 2.0)
) -> Any:
    batch = model == "scale"
    x = kind.InferInput("x", [1, len(values)] if batch else [len(values)], "FP32")
    given = np.array(values, np.float32)
    x.set_data_from_numpy(given[None] if batch else given)
    headers = {"traceparent": SAMPLED % trace_id} if trace_id else None
    with kind.InferenceServerClient(daemon.url if kind is httpclient else daemon.grpc_url) as asking:
        return asking.infer(model, [x], headers=headers)


def lines(daemon: DaemonProcess, trace_id: str, count: int) -> list[dict[str, Any]]:
    """Waits for ``count`` log lines about a trace and returns them."""

    def found() -> list[dict[str, Any]]:
        objects = [json.loads(line) for line in daemon.log.splitlines() if trace_id in line and line.endswith("}")]
        return [line for line in objects if trace_id in (line.get("trace_id"), line.get("request", {}).get("trace_id"))]

    wait_until(lambda: len(found()) >= count, f"{count} lines about {trace_id}", daemon)
    assert len(found()) == count
    return found()


@KINDS
def test_spans_of_a_host_model(daemon: DaemonProcess, collector: Collector, kind: Any) -> None:
    trace_id = f"{1:031x}{int(kind is grpcclient):x}"
    infer(daemon, kind, "host")
    infer(daemon, kind, "host", trace_id)
    spans = collector.named(trace_id, 8)
    run, look = spans["compute"], spans["look up"]
    assert look.parent_span_id == spans["check"].parent_span_id == run.span_id
    assert spans["read"].parent_span_id == look.span_id
    assert run.start_time_unix_nano <= look.start_time_unix_nano <= spans["read"].start_time_unix_nano
    assert spans["read"].end_time_unix_nano <= look.end_time_unix_nano <= spans["check"].start_time_unix_nano
    said = {each.key: each.value for each in look.attributes}
    assert (said["table"].string_value, said["rows"].int_value, said["whole"].bool_value) == ("prices", 2, True)
    assert said["text"].string_value == "x" * 256
    assert said["huge"].string_value == str(1 << 70)
    assert {span.status.code for span in spans.values()} == {0}


def test_a_span_of_what_no_record_can_hold(daemon: DaemonProcess, collector: Collector) -> None:
    trace_id = f"{10:032x}"
    infer(daemon, httpclient, "odd", trace_id)
    span = collector.named(trace_id, 6)["odd ?"]
    said = {each.key: each.value for each in span.attributes}
    assert (said["loss"].double_value, said["n"].int_value) == (0.5, 2)
    assert (said["text"].string_value, said["k?"].string_value) == ("?", "[1]")


@KINDS
def test_an_exception_is_the_error_of_what_it_leaves(daemon: DaemonProcess, collector: Collector, kind: Any) -> None:
    trace_id = f"{2:031x}{int(kind is grpcclient):x}"
    with pytest.raises(InferenceServerException):
        infer(daemon, kind, "host", trace_id, (-1.0, 0.0))
    spans = {span.name: span for span in collector.of(trace_id, 8)}
    assert (spans["check"].status.code, spans["check"].status.message) == (2, "ValueError")
    assert spans["look up"].status.code == 0
    # The model's own line, the error's with its traceback, and the access log's.
    model, error, access = sorted(
        lines(daemon, trace_id, 3), key=lambda line: (line["process"] != "worker-0", line["time"])
    )
    assert model["message"] == "looked up"
    assert "ValueError" in error["traceback"]
    assert access["request"]["code"] == ("INTERNAL" if kind is grpcclient else "500")


def test_spans_of_a_triton_python_model_and_its_context(daemon: DaemonProcess, collector: Collector) -> None:
    trace_id = f"{3:032x}"
    assert infer(daemon, httpclient, "parts").as_numpy("context").tolist() == [b"none"]
    context = json.loads(infer(daemon, httpclient, "parts", trace_id).as_numpy("context")[0])
    spans = collector.named(trace_id, 6)
    assert context == {"traceparent": f"00-{trace_id}-{spans['infer parts'].span_id.hex()}-01"}
    assert spans["answer"].parent_span_id == spans["compute"].span_id
    assert {line["message"] for line in lines(daemon, trace_id, 2)} == {"a python model's line", "request"}


def test_spans_within_a_step_of_an_ensemble(daemon: DaemonProcess, collector: Collector) -> None:
    trace_id = f"{4:032x}"
    infer(daemon, httpclient, "around", trace_id)
    spans = {span.name: span for span in collector.of(trace_id, 11)}
    runs = {span.span_id: span.parent_span_id for span in collector.of(trace_id, 11) if span.name == "compute"}
    assert runs[spans["look up"].parent_span_id] == spans["infer host"].span_id
    assert {line["message"] for line in lines(daemon, trace_id, 2)} == {"looked up", "request"}


@pytest.mark.parametrize("name", ["asks", "python_asks"])
def test_calls_within_a_span_are_parts_of_it(daemon: DaemonProcess, collector: Collector, name: str) -> None:
    """One outside of any, two within a span, one within a span of that."""
    trace_id = f"{9:031x}{len(name) % 16:x}"
    infer(daemon, httpclient, name, trace_id)
    spans = collector.of(trace_id, 5 + 2 + 4 * 3)
    (own,) = (span for span in spans if span.name == f"infer {name}")
    outer, inner = (next(span for span in spans if span.name == each) for each in ("outer", "inner"))
    calls = sorted(
        (span for span in spans if span.name == "infer host_echo"), key=lambda span: span.start_time_unix_nano
    )
    assert [call.parent_span_id for call in calls] == [own.span_id, outer.span_id, inner.span_id, outer.span_id]


def test_spans_around_the_responses_of_a_generator(daemon: DaemonProcess, collector: Collector) -> None:
    """Two at a time, in one thread: each has its own."""
    ids = f"{7:032x}", f"{8:032x}"

    def ask(trace_id: str) -> None:
        body, headers = b'{"n": [3]}', {"traceparent": SAMPLED % trace_id}
        status, said = daemon.request("POST", "/v2/models/tells/generate_stream", body, headers)
        assert (status, said.count(b"data:")) == (200, 3)

    asking = [threading.Thread(target=ask, args=(trace_id,)) for trace_id in ids]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    for trace_id in ids:
        spans = collector.of(trace_id, 9)
        (whole,) = (span for span in spans if span.name == "all")
        parts = [span for span in spans if span.name == "one"]
        assert [each.attributes[0].value.int_value for each in parts] == [0, 1, 2]
        assert {each.parent_span_id for each in parts} == {whole.span_id}


def test_as_many_as_are_told(daemon: DaemonProcess, collector: Collector) -> None:
    trace_id = f"{5:032x}"
    infer(daemon, httpclient, "many", trace_id)
    spans = collector.named(trace_id, 5 + 128)
    assert "part 127" in spans
    assert len(spans["part 5"].attributes) == 16


@KINDS
def test_the_access_log_names_traces_alone_of_traced_requests(
    daemon: DaemonProcess, collector: Collector, kind: Any
) -> None:
    trace_id = f"{6:031x}{int(kind is grpcclient):x}"
    for _ in range(3):
        infer(daemon, kind, "scale", values=(1.0,) * 4)
    infer(daemon, kind, "scale", trace_id, (1.0,) * 4)
    infer(daemon, kind, "scale", values=(1.0,) * 4)
    (line,) = lines(daemon, trace_id, 1)
    assert line["request"]["model"] == "scale"
    known = [json.loads(each)["request"] for each in daemon.log.splitlines() if '"model": "scale"' in each]
    assert sum("trace_id" in request for request in known if request["protocol"] == line["request"]["protocol"]) == 1

"""Models that load others and keep metrics, on a daemon with two workers: both do what a model does, and it is one daemon's."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tensord import models
from tensord.daemon.models import placement
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol.calling_models import SCRIPT, SCRIPT_FIELDS, run
from tests.repositories import answering, ensemble, fields, of_x, scale_model, write_model
from tests.scrapes import Samples, scrape

#: Loads those that its configuration names, one after the other, when it is initialised.
LOADS = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb

    class TritonPythonModel:
        def initialize(self, args):
            for name in json.loads(args["model_config"])["parameters"]["loads"]["string_value"].split(","):
                if not pb.is_model_ready(name):
                    pb.load_model(name)

        def execute(self, requests):
            x = np.ones((1, 4), np.float32)
            asked = pb.InferenceRequest(model_name="scale", inputs=[pb.Tensor("x", x)], requested_output_names=["y"])
            said = asked.exec().output_tensors()[0].as_numpy()
            return [pb.InferenceResponse([pb.Tensor("y", said)]) for _ in requests]
"""
LOADS_FIELDS = """
    backend: "python"
    input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }} ]
    output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }} ]
    parameters {{ key: "loads" value {{ string_value: "{}" }} }}
"""
METRICS = answering(
    """
    x = given(request)
    self.counter.increment(len(x))
    self.gauge.set(len(x))
    self.histogram.observe(len(x))
    return response(y=np.array([self.counter.value()], np.float32))
    """,
    more="""
    def initialize(self, args):
        of, kinds = {"model": args["model_name"]}, pb_utils.MetricFamily
        self.families = [
            kinds("asked_rows", "Rows that were asked", kinds.COUNTER),
            kinds(name="last_rows", description="Rows that came last", kind=pb_utils.GAUGE),
            kinds("rows_of_a_request", "Rows by request", pb_utils.MetricKind.HISTOGRAM),
        ]
        counter, gauge, histogram = self.families
        self.counter, self.gauge = counter.Metric(labels=of), gauge.Metric()
        self.histogram = histogram.Metric(labels=of, buckets=[1, 2.5, 10])
    """,
)
METRICS_FIELDS = fields("x FP32 -1", "y FP32 1")
#: A host model that loads what it asks, and keeps metrics: in our words.
HOST = """
    import json
    import numpy as np
    from tensord import models

    inputs, outputs, host = {"code": "BYTES[1]"}, {"said": "BYTES[1]"}, True

    def create(path, config, device):
        if not models.is_ready("scale"):
            models.load_model("scale")
        asked = models.counter("host_asked", "Requests", {"model": config["name"]})
        last = models.gauge("host_last", "Rows of the last one")
        rows = models.histogram("host_rows", [1, 2.5], "Rows", {"model": config["name"]})

        def tried(call, *arguments):
            try:
                return call(*arguments)
            except models.ServingError as error:
                return f"{type(error).__name__}: {error}"

        def apply(params, inputs):
            scope = {**globals(), "asked": asked, "last": last, "rows": rows, "tried": tried}
            exec(inputs["code"][0].decode(), scope)
            return {"said": np.array([json.dumps(scope["said"])], np.object_)}

        return apply, None
"""
#: A model that comes as a file.
GIVEN = of_x("x + 7", more="host = True")

#: Models that one worker has; of these, each another one.
WORKERS = ("cpu:0", "cpu:1")
HOME = placement.choose(("model", "called"), WORKERS)
CALLERS = [
    next(
        name
        for name in (f"caller{number}" for number in range(100))
        if (placement.choose(("model", name), WORKERS) == HOME) is near
    )
    for near in (True, False)
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "script", SCRIPT, SCRIPT_FIELDS)
    write_model(folder, "host", HOST, SCRIPT_FIELDS.replace("python", "jax"))
    scale_model(folder)
    for name, loads in (
        ("outer", "middle"),
        ("middle", "scale"),
        ("self", "self"),
        ("ping", "pong"),
        ("pong", "ping"),
        ("member", "ring"),
    ):
        write_model(folder, name, LOADS, LOADS_FIELDS.format(loads))
    ensemble(folder, "ring", ["x FP32 4"], ["y FP32 1 4"], [("member", {"x": "x"}, {"y": "y"})])
    for name, (first, second) in {
        "apart": ("called", CALLERS[1]),
        "together": ("called_there", "caller_there"),
    }.items():
        steps = [(first, {"code": "code"}, {"said": "once"}), (second, {"code": "once"}, {"said": "said"})]
        ensemble(folder, name, ["code STRING 1"], ["said STRING 1"], steps)
    for name in ("metrics", "same"):
        write_model(folder, name, METRICS, METRICS_FIELDS)
    together = 'parameters { key: "tensord_together" value { string_value: "router" } }'
    for name, more in (
        ("called", ""),
        *((name, "") for name in CALLERS),
        ("called_there", together),
        ("caller_there", together),
    ):
        write_model(folder, name, SCRIPT, SCRIPT_FIELDS + "dynamic_batching { preserve_ordering: true }" + more)
    return folder


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, repository: Path) -> DaemonProcess:
    options = {"repository": {"control_mode": "explicit", "load": ["script", "metrics"]}, "workers": {"cpu": 2}}
    return daemon_of(repository, options)


# ------------------------------------------------------------------------------------------------------- calling


CALLED = """said = script("called", "said = 'here'")"""


@pytest.mark.cpu_workers("to which of two a name falls")
def test_a_model_that_another_worker_has_is_said_to_be_there(http: httpclient.InferenceServerClient) -> None:
    near, far = CALLERS
    for name in ("called", *CALLERS):
        http.load_model(name)
    assert run(http, near, CALLED) == "here"
    assert run(http, far, CALLED) == (
        "error Model called - Error when running inference: Failed for execute the inference request. Model 'called' is not "
        f"ready. Other workers have it, and calls stay in the worker of their caller, '{far}'; models with the same parameter "
        "tensord_together are on one worker, and a model that is isolated is on its own."
    )
    assert run(http, far, CALLED.replace("called", "nowhere")).endswith("Model 'nowhere' is not ready.")


def test_models_that_are_to_be_together_call_each_other(http: httpclient.InferenceServerClient) -> None:
    for name in ("called_there", "caller_there"):
        http.load_model(name)
    assert run(http, "caller_there", CALLED.replace("called", "called_there")) == "here"


@pytest.mark.cpu_workers("to which of two a name falls")
def test_an_ensemble_of_models_on_different_workers_is_refused(http: httpclient.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as caught:
        http.load_model("apart")
    far = next(worker for worker in WORKERS if worker != HOME)
    assert caught.value.message() == (
        "load failed for model 'apart': ensemble 'apart' needs its models in one worker, and no worker has all of them: "
        f"'called' on {HOME}, '{CALLERS[1]}' on {far} (those with the same parameter tensord_together are on one)\n"
    )
    http.unload_model("apart")
    http.load_model("together")
    assert http.is_model_ready("together")


# ------------------------------------------------------------------------------------------------------- loading


def test_a_model_loads_others_when_it_is_loaded(http: httpclient.InferenceServerClient) -> None:
    """A model loads another, which loads a third: each waits in the loader of both workers for the next."""
    http.load_model("outer")
    assert http.is_model_ready("middle")
    assert http.is_model_ready("scale")
    given = httpclient.InferInput("x", [4], "FP32")
    given.set_data_from_numpy(np.ones(4, np.float32))
    for _ in range(4):
        np.testing.assert_array_equal(http.infer("outer", [given]).as_numpy("y"), [[4, 4, 4, 4]])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("self", "model 'self' waits for itself: self -> self"),
        ("ping", "model 'pong' waits for itself: pong -> ping -> pong"),
        ("ring", "model 'member' waits for itself: member -> ring -> member"),
    ],
)
def test_a_load_that_waits_for_itself_fails(http: httpclient.InferenceServerClient, name: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        http.load_model(name)
    assert f"TritonModelException: Failed to load model: {text}" in caught.value.message()
    http.load_model("scale")


def test_a_model_loads_and_unloads_when_it_is_asked(
    http: httpclient.InferenceServerClient, daemon: DaemonProcess
) -> None:
    code = f"""
        model = {GIVEN!r}
        before = pb.is_model_ready("given"), pb.is_model_ready("script", "1"), pb.is_model_ready("script", "2")
        pb.load_model("given", config='{{"backend": "jax"}}', files={{"file:1/model.py": model.encode()}})
        between = pb.is_model_ready(model_name="given", model_version="1")
        answer = of(call("given", {{"x": np.zeros(4, np.float32)}}, ["y"]).exec())
        pb.unload_model("given", unload_dependents=True)
        said = before, between, answer
    """
    assert run(http, "script", code) == [[False, True, False], True, {"y": [7, 7, 7, 7]}]
    wait_until(lambda: not http.is_model_ready("given"), "the model to be gone", daemon)
    code = """
        def tried(call, *arguments):
            try:
                call(*arguments)
            except pb.TritonModelException as error:
                return str(error)
        said = [
            tried(pb.load_model, "nobody"), tried(pb.load_model, "given", "", ["f"]), tried(pb.is_model_ready, "script", "x"),
            tried(pb.load_model, "given", "", {"file:1/model.py": b""}), tried(pb.unload_model, "nobody"),
        ]
    """
    nobody, files, version, config, unloaded = run(http, "script", code)
    assert nobody.startswith("Failed to load model: failed to load 'nobody'")
    assert files == "failed to load model 'given', files should be a dictionary of file paths and file contents"
    assert version.startswith(
        "Failed to check model readiness: failed to get model version from specified version string 'x'"
    )
    assert "files are given without a 'config'" in config
    assert unloaded is None


def test_a_model_may_load_itself_anew_while_it_runs(http: httpclient.InferenceServerClient) -> None:
    code = """
        pb.load_model(self.name, config=json.dumps({
            "backend": "python", "max_batch_size": 0,
            "input": [{"name": "code", "data_type": "TYPE_STRING", "dims": [1]}],
            "output": [{"name": "said", "data_type": "TYPE_STRING", "dims": [1]}],
            "instance_group": [{"count": 2}],
        }))
        said = 1
    """
    assert run(http, "script", code) == 1
    assert http.get_model_config("script")["instance_group"][0]["count"] == 2


# ------------------------------------------------------------------------------------------------------- metrics


def ask(http: httpclient.InferenceServerClient, rows: int, model: str = "metrics") -> float:
    given = httpclient.InferInput("x", [rows], "FP32")
    given.set_data_from_numpy(np.ones(rows, np.float32))
    return float(http.infer(model, [given]).as_numpy("y")[0])


def shown(daemon: DaemonProcess) -> Samples:
    return scrape(daemon.metrics_url)


def test_metrics_of_a_model_are_the_daemons(http: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    """Counters of two workers are one number; gauges are two, by worker. What a worker had counted outlives it."""
    wait_until(lambda: len(shown(daemon).of("last_rows", "worker")) == 2, "both workers to have it", daemon)
    for rows in (1, 2, 3, 11, 1, 1, 1, 1):
        ask(http, rows)
    found = shown(daemon)
    assert found.value("asked_rows_total", model="metrics") == 21
    within = {le: found.value("rows_of_a_request_bucket", model="metrics", le=le) for le in ("1", "2.5", "10", "+Inf")}
    assert within == {"1": 5, "2.5": 6, "10": 7, "+Inf": 8}
    assert found.value("rows_of_a_request_sum", model="metrics") == 21
    os.kill(daemon.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: len(daemon.log.split("is up on")) > 3, "the worker to be replaced", daemon)
    ask(http, 2)
    assert shown(daemon).value("asked_rows_total", model="metrics") == 23


def test_one_family_may_be_of_several_models_and_goes_with_the_last(
    http: httpclient.InferenceServerClient, daemon: DaemonProcess
) -> None:
    http.load_model("same")
    ask(http, 4, "same")
    assert set(shown(daemon).of("asked_rows_total", "model")) == {"metrics", "same"}
    http.unload_model("same")
    wait_until(
        lambda: set(shown(daemon).of("asked_rows_total", "model")) == {"metrics"}, "its metrics to be gone", daemon
    )
    http.unload_model("metrics")
    wait_until(lambda: not shown(daemon).of("asked_rows_total", "model"), "all metrics to be gone", daemon)
    http.load_model("metrics")
    assert ask(http, 1) == 1


def test_what_is_wrong_with_a_metric_is_said(http: httpclient.InferenceServerClient) -> None:
    code = """
        def tried(call, *arguments, **more):
            try:
                return call(*arguments, **more) and None
            except pb.TritonModelException as error:
                return str(error)
        counter = pb.MetricFamily("tried_counter", "text", pb.MetricFamily.COUNTER)
        again = pb.MetricFamily("tried_counter", "another text", pb.MetricFamily.COUNTER)
        gauge = pb.MetricFamily("tried_gauge", "text", pb.MetricFamily.GAUGE)
        histogram = pb.MetricFamily("tried_histogram", "text", pb.MetricFamily.HISTOGRAM)
        one, same, other = counter.Metric({"a": "b"}), again.Metric(labels={"a": "b"}), gauge.Metric()
        seen = histogram.Metric(buckets=[1, 2])
        one.increment(2), same.increment(3), other.set(5), other.increment(-2.5)
        said = [
            [one.value(), same.value(), other.value()],
            tried(one.increment, -1), tried(one.set, 1), tried(seen.increment, 1), tried(seen.value), tried(other.observe, 1),
            tried(pb.MetricFamily, "tried_counter", "text", pb.MetricFamily.GAUGE),
            tried(pb.MetricFamily, "no name", "text", pb.MetricFamily.GAUGE),
            tried(pb.MetricFamily, "nv_mine", "text", pb.MetricFamily.GAUGE),
            tried(counter.Metric, labels=["a"]), tried(counter.Metric, labels={"a": 1}), tried(counter.Metric, buckets=[1]),
            tried(histogram.Metric), tried(histogram.Metric, buckets=[2, 1]), tried(histogram.Metric, buckets=[1, 3]),
        ]
        del counter
        said.append(tried(one.increment, 1))
        same.increment(1)
        said.append(same.value())
        [said.append(tried(gauge.Metric, labels={"n": str(i)})) for i in range(5000)]
        said = said[:17] + said[-1:]
        del again, gauge, histogram
    """
    values, *texts = run(http, "script", code)
    assert values == [5, 5, 2.5]
    assert texts == [
        "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
        "non-negative values.",
        "Failed to set metric value: Unsupported TRITONSERVER_MetricKind",
        "Failed to increment metric value: Unsupported TRITONSERVER_MetricKind",
        "Failed to get metric value: Unsupported TRITONSERVER_MetricKind",
        "Failed to observe metric value: Unsupported TRITONSERVER_MetricKind",
        "Error when creating MetricFamily: metric family 'tried_counter' is there as a counter, not as a gauge",
        "Error when creating MetricFamily: 'no name' cannot be the name of a metric",
        "Error when creating MetricFamily: metric 'nv_mine': names that begin with nv_ or tensord_ are the server's own",
        "Failed to create metric. Labels must be a dictionary.",
        "Error when creating Metric: metric 'tried_counter': label 'a' is of type int, str is expected",
        "Error when creating Metric: metric 'tried_counter' is a counter, which has no buckets",
        "Error when creating Metric: metric 'tried_histogram' is a histogram, which needs buckets",
        "Error when creating Metric: metric 'tried_histogram': buckets have to be finite and to grow: [2.0, 1.0]",
        "Error when creating Metric: metric 'tried_histogram' is there with other buckets: [1.0, 2.0], not [1.0, 3.0]",
        "Failed to increment metric value: Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
        "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been deleted.",
        6,
        "Error when creating Metric: there are 4096 metrics, at most 4096 are kept",
    ]


def test_what_a_request_has_made_is_gone_with_it(daemon: DaemonProcess) -> None:
    with urllib.request.urlopen(f"http://{daemon.metrics_url}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    assert "tried_" not in text
    assert "# TYPE asked_rows counter" in text


# ---------------------------------------------------------------------------------------------------- in our words


def test_a_host_model_loads_others(http: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    http.unload_model("scale")
    wait_until(lambda: not http.is_model_ready("scale"), "the model to be gone", daemon)
    http.load_model("host")
    assert http.is_model_ready("scale"), "create() has loaded it"
    code = f"""
models.load_model("given", config='{{"backend": "jax"}}', files={{"file:1/model.py": {GIVEN!r}.encode()}})
answer = models.call("given", {{"x": np.zeros(4, np.float32)}})["y"].tolist()
ready = models.is_ready("given"), models.is_ready("given", 1), models.is_ready("given", 2)
models.unload_model("given")
said = answer, ready, tried(models.load_model, "nobody"), tried(models.load_model, "x", "", {{str(i): b"" for i in range(257)}})
"""
    answer, ready, nobody, many = run(http, "host", code)
    assert (answer, ready) == ([7, 7, 7, 7], [True, True, False])
    assert nobody == "Internal: failed to load 'nobody', failed to poll from model repository"
    assert many == "InvalidArgument: 257 files of 0 bytes together are given, at most 256 of 134217728 are allowed"


def test_a_host_model_keeps_metrics(http: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    http.load_model("host")
    code = """
asked.increment()
asked.increment(2.5)
last.set(7)
last.increment(-3)
rows.observe(2)
same = models.counter("host_asked", "Another text", {"model": "host"})
said = [
    asked.value, same.value, last.value, tried(asked.increment, -1), tried(rows.observe, float("nan")),
    tried(models.gauge, "host_asked"), tried(models.counter, "nv_mine"), tried(models.histogram, "host_more", [2, 1]),
]
"""
    said = run(http, "host", code)
    assert said == [
        3.5,
        3.5,
        4,
        "InvalidArgument: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
        "InvalidArgument: a histogram cannot observe what is no number",
        "InvalidArgument: metric family 'host_asked' is there as a counter, not as a gauge",
        "InvalidArgument: metric 'nv_mine': names that begin with nv_ or tensord_ are the server's own",
        "InvalidArgument: metric 'host_more': buckets have to be finite and to grow: [2.0, 1.0]",
    ]
    found = shown(daemon)
    assert found.value("host_asked_total", model="host") == 3.5
    assert sorted(found.of("host_last", "worker").values()) == [0, 4]
    assert found.value("host_rows_bucket", model="host", le="2.5") == 1
    assert not found.of("host_more_bucket", "le"), "what could not be made is not there"
    http.unload_model("host")
    wait_until(lambda: not shown(daemon).of("host_asked_total", "model"), "its metrics to be gone", daemon)


def test_what_only_a_model_may_do() -> None:
    for call in (models.load_model, models.unload_model, models.is_ready):
        with pytest.raises(models.InvalidArgument, match="only by a model that is being loaded or served"):
            call("scale")
    with pytest.raises(models.InvalidArgument, match="it is no model that makes it"):
        models.counter("mine")

"""From files to a version that can run: what is completed, what is refused, and that no model sees another's code."""

from __future__ import annotations

import builtins
import gc
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import empty, parse_pbtxt
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unsupported
from tensord.shm.status_page import StatusPage
from tensord.workers.imports import import_system
from tensord.workers.loading.jax_loading import run_samples
from tensord.workers.loading.loader import Loader
from tensord.workers.models.execution import Execution
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.requests.result import Result
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.queue import QueuePolicy
from tensord.workers.threads.inbox import Inbox
from tests.repositories import answering, applying, fields, of_x, write_model
from tests.workers.loading.targets import target
from tests.workers.made_requests import request_of

Loading = Callable[..., LoadedModel]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Loading]:
    """Writes a model, loads it, and ends its instances after the test."""
    import_system.prepare()
    inbox, page = Inbox(), StatusPage.create()
    loader = Loader(target(), inbox, page)
    loaded: list[LoadedModel] = []

    def load_model(source: str, config: str = "", name: str = "m", version: int = 1) -> LoadedModel:
        folder = write_model(tmp_path, name, source, version=version)
        message = parse_pbtxt(config, name) if config else empty(name)
        message.name = name
        loaded.append(loader.load(Load(name, version, str(folder.parent), str(folder), message.SerializeToString())))
        return loaded[-1]

    yield load_model
    for model in loaded:
        model.imports.forget()
        for instance in model.instances:
            ended = threading.Event()
            instance.close(ended.set)
            while not ended.is_set() and instance._thread.is_alive():
                inbox.drain()
                ended.wait(0.01)
    inbox.close()
    page.close()


def run(model: LoadedModel, load: Loading, **arrays: Any) -> Result:
    """Runs one request in the model's first instance."""
    execution = Execution([request_of(arrays, version=model, submitter=SimpleNamespace(peer=1, owner=None))], 0)
    done = threading.Event()
    instance = model.instances[0]
    instance._inbox = _Direct()  # type: ignore[assignment]
    instance.run(execution, lambda _: done.set())
    assert done.wait(600)
    return execution.results[0]


class _Direct:
    """An inbox that calls functions at once."""

    def post(self, call: Callable[[], None], soon: bool = True) -> None:
        call()


JAX = """
    inputs = {"x": "FP32[s]"}
    outputs = {"y": "FP32[s]"}
    max_batch_size = 4
    buckets = {"s": (2, 8)}
    batch_buckets = (1, 3)

    def create(path, config, device):
        assert path.name == "1" and config["max_batch_size"] == 4 and device.platform == "cpu"
        return (lambda params, inputs: {"y": inputs["x"] * params["w"]}), {"w": 2.0}
"""


def test_what_others_leave_beside_a_model_is_not_read(load: Loading, tmp_path: Path) -> None:
    """Emacs' lock is a link to nowhere, and so may others be; what a Mac stores beside a file is no Python."""
    folder = write_model(tmp_path, "m", JAX)
    (folder / ".#model.py").symlink_to("somebody@host.1234:5678")
    (folder / "old.py").symlink_to("nowhere")
    (folder / "._model.py").write_bytes(b"\0\5\x16\7")
    os.mkfifo(folder / "fifo.py")
    assert load(JAX).jitted is not None


def test_jax_from_declarations_alone(load: Loading) -> None:
    model = load(JAX)
    assert model.jitted is not None
    assert repr(model.jitted.executables) == "<Executables 6 planned, 0 unexpected>"
    assert json.loads(model.metadata) == {
        "name": "m",
        "platform": "jax",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}],
    }
    config = json.loads(model.config)
    assert (config["backend"], config["max_batch_size"], config["input"][0]["data_type"]) == ("jax", 4, "TYPE_FP32")
    assert model.batch_rules == BatchRules(4)
    assert (model.repeatable, model.sticky, model.streams) == (True, False, False)


def test_config_pbtxt_comes_first(load: Loading) -> None:
    model = load(
        JAX,
        """
        max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
        parameters { key: "batch_buckets" value { string_value: "2" } }
        dynamic_batching {
          max_queue_delay_microseconds: 7 preferred_batch_size: [ 2 ]
          default_queue_policy { default_timeout_microseconds: 5 max_queue_size: 9 timeout_action: DELAY }
        }""",
    )
    assert model.jitted is not None
    assert repr(model.jitted.executables) == "<Executables 2 planned, 0 unexpected>"
    assert model.batch_rules == BatchRules(4, 7000, (2,))
    assert model.queue_rules.default_policy == QueuePolicy(9, 5000, delay=True)


HOST = of_x(
    "np.array([len(word) for word in x], np.int32)", "BYTES[n]", "INT32[n]", more="import numpy as np\nhost = True"
)


#: Each trace leaves a value in a list.
LEAKS = applying(
    """
    y = WITH inputs["x"].sum(1, keepdims=True)
    kept.append(y)
    return {"y": inputs["x"] + y}
    """,
    "x FP32[2]",
    "y FP32[2]",
    more="max_batch_size = 2\nkept = []",
)
DECOUPLED = "model_transaction_policy { decoupled: true }"
YIELDS = applying(
    """
    yield {"y": inputs["x"]}
    """,
    "x FP32[n]",
    "y FP32[n]",
    more="max_batch_size = 8\nHOST",
)


@pytest.mark.parametrize("host", ["", "host = True"])
@pytest.mark.parametrize("config", ["", DECOUPLED])
def test_a_generator_makes_a_model_decoupled(load: Loading, host: str, config: str) -> None:
    model = load(YIELDS.replace("HOST", host), config)
    assert (model.streams, model.jitted, len(model.instances)) == (True, None, 1)
    assert json.loads(model.config)["model_transaction_policy"] == {"decoupled": True}
    assert not model.batch_rules.joins


def test_host_model(load: Loading) -> None:
    model = load(HOST)
    assert model.jitted is None
    result = run(model, load, x=np.array([b"a", b"bbb"], np.object_))
    assert isinstance(result, dict)
    assert result["y"].tolist() == [1, 3]


TRITON = """
    import json
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
            config.add_output({"name": "y", "data_type": "TYPE_INT32", "dims": [1]})
            return config

        def initialize(self, args):
            self.args = args

        def execute(self, requests):
            x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
            if x[0] == 1:
                raise OSError("cannot read /etc/secret/file")
            if x[0] == 2:
                raise SystemExit(3)
            if x[0] == 3:
                return []
            if x[0] == 4:
                return ["text"]
            if x[0] == 5:
                return [pb_utils.InferenceResponse(error="plain text")]
            x += len(json.loads(self.args["model_config"])["input"])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x), pb_utils.Tensor("undeclared", x)])]
"""


def test_triton_model(load: Loading) -> None:
    model = load(TRITON)
    assert len(model.instances) == 1
    assert model.batch_rules == BatchRules(joins=False)
    result = run(model, load, x=np.array([7], np.int32))
    assert isinstance(result, dict)
    assert {name: value.tolist() for name, value in result.items()} == {"y": [8]}


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (1, "Failed to process the request(s) for model 'm_0', message: OSError: cannot read <path>"),
        (2, "SystemExit: 3"),
        (3, "execute() returned 0 responses, a list of 1 InferenceResponse is expected"),
        (4, "a list with str"),
        (5, "plain text"),
    ],
)
def test_triton_model_fails(load: Loading, x: int, words: str) -> None:
    model = load(TRITON)
    result = run(model, load, x=np.array([x], np.int32))
    assert isinstance(result, Internal)
    assert words in result.message
    assert isinstance(run(model, load, x=np.array([7], np.int32)), dict)


def test_instances(load: Loading) -> None:
    model = load(TRITON, 'backend: "python" instance_group { count: 2 } instance_group { name: "other" }')
    assert [instance._thread.name for instance in model.instances] == ["m_0_0", "m_0_1", "other_0"]


@pytest.mark.parametrize(
    ("source", "config", "kind", "words"),
    [
        ("x = 1", "", InvalidArgument, "create(path, config, device)"),
        ("x = 1", 'backend: "python"', InvalidArgument, "no class TritonPythonModel"),
        ("x = 1", 'backend: "onnxruntime"', InvalidArgument, "backend 'onnxruntime' is not supported"),
        ("def f(:", "", Internal, "SyntaxError"),
        ("raise SystemExit(1)", "", Internal, "SystemExit"),
        ("import no_such_module", "", Internal, "ModuleNotFoundError: No module named 'no_such_module'"),
        (JAX.replace("FP32[s]", "FP32[s", 1), "", InvalidArgument, "input 'x': declared as 'FP32[s'"),
        (JAX.replace("(2, 8)", "(8, 2)"), "", InvalidArgument, "buckets of axis 's'"),
        (JAX.replace("(1, 3)", "(1, 5)"), "", InvalidArgument, "batch_buckets"),
        (JAX.replace("(2, 8)", "range(1, 400)"), "", InvalidArgument, "executables"),
        (JAX.replace("max_batch_size = 4", "max_batch_size = 'x'"), "", InvalidArgument, "max_batch_size"),
        (JAX.replace('{"y": inputs["x"] * params["w"]}', "1 / 0"), "", Internal, "ZeroDivisionError"),
        (JAX.replace('"w": 2.0', '"w": object()'), "", Internal, "TypeError"),
        (JAX.replace(', {"w": 2.0}', ""), "", InvalidArgument, "must return a function and its parameters"),
        (JAX.replace('"y"', '"z"', 1), "", Internal, "'z' is declared but not computed"),
        (JAX.replace("max_batch_size", "max_batchsize", 1), "", InvalidArgument, "did you mean 'max_batch_size'"),
        (
            JAX.replace("params, inputs:", "x, w:")
            .replace('inputs["x"] * params["w"]', 'w["w"] * x["x"]')
            .replace("2.0", "__import__('numpy').float32(2)"),
            "",
            Internal,
            "('w'); the inputs of the model are: 'x'; it is called with (params, inputs), in this order (model.py, line 10",
        ),
        (
            JAX.replace("params, inputs:", "x, w:").replace('inputs["x"] * params["w"]', 'x["x"] * w["w"]'),
            "",
            Internal,
            "('x'); the inputs of the model are: 'x'; it is called with (params, inputs), in this order (model.py, line 10",
        ),
        (HOST.replace("host = True", ""), "", Unsupported, "declare 'host = True'"),
        (TRITON.replace("self.args = args", "raise RuntimeError('refusing')"), "", Internal, "RuntimeError: refusing"),
        (TRITON.replace("self.args = args", "raise SystemExit(1)"), "", Internal, "SystemExit"),
        (TRITON.replace("return config", "return None"), "", InvalidArgument, "auto_complete_config must return"),
        (TRITON, 'output { name: "y" label_filename: "gone.txt" }', InvalidArgument, "label file 'gone.txt'"),
        (HOST, DECOUPLED, InvalidArgument, "is decoupled: create() must return a generator function"),
        (
            YIELDS.replace("HOST", "").replace("def apply", "async def apply"),
            "",
            InvalidArgument,
            "returned an async function",
        ),
        (YIELDS.replace("HOST", ""), "sequence_batching { }", InvalidArgument, "and those have no sequences"),
        (
            YIELDS.replace("HOST", ""),
            "response_cache { enable: true }",
            InvalidArgument,
            "'decoupled' transaction policy",
        ),
    ],
)
def test_refused(load: Loading, source: str, config: str, kind: type[ServingError], words: str) -> None:
    before = set(sys.modules), list(sys.path)
    with pytest.raises(kind) as caught:
        load(source, config)
    assert words in caught.value.message
    assert "/tmp" not in caught.value.message
    assert not {name for name in set(sys.modules) - before[0] if name.startswith("tensord_model")}
    assert sys.path == before[1]


MIXING = applying(
    """
    x = inputs["x"]
    return {"y": x - x.mean(0)}
    """,
    "x FP32[4]",
    "y FP32[4]",
    more="max_batch_size = 5",
)


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ("rows_may_mix = True", ""),
        ("", 'parameters { key: "rows_may_mix" value { string_value: "true" } }'),
        ("rows_may_mix = True; batch_buckets = (1, 5)", ""),
    ],
)
def test_rows_may_mix_if_the_model_says_so(load: Loading, more: str, config: str) -> None:
    """Then requests share no batch, and each number of rows has a program of its own."""
    model = load(MIXING + more, config)
    assert model.batch_rules == BatchRules(5, joins=False)
    assert model.jitted is not None
    assert [rows for rows, _ in model.jitted.executables.made] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("more", "config", "words"),
    [
        ("rows_may_mix = 'often'", "", "rows_may_mix of model.py is 'often', True or False is expected"),
        ("rows_may_mix = True; max_batch_size = 1000", "", "its buckets need 1000 executables"),
        ("rows_may_mix = True", "sequence_batching { }", "requests of sequences and ragged inputs share batches"),
    ],
)
def test_what_rows_that_mix_exclude(load: Loading, more: str, config: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(MIXING + more, config)
    assert words in caught.value.message


def test_no_model_sees_another(load: Loading, tmp_path: Path) -> None:
    """Two models with modules of the same name beside them; globals of one; and no files are left in their folders."""
    source = """
        import labels
        inputs = {"x": "INT32[1]"}
        outputs = {"y": "INT32[1]"}
        host = True
        calls = []

        def create(path, config, device):
            def apply(params, inputs):
                calls.append(1)
                return {"y": inputs["x"] + labels.NUMBER + 1000 * len(calls)}
            return apply, None
    """
    for name, number in (("a", 1), ("b", 2)):
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        (folder / "labels.py").write_text(f"NUMBER = {number}\n")
    a, b = load(source, name="a"), load(source, name="b")
    assert "labels" not in sys.modules
    x = np.array([0], np.int32)
    for model, expected in ((a, 1001), (b, 1002), (a, 2001)):
        result = run(model, load, x=x)
        assert isinstance(result, dict)
        assert result["y"].tolist() == [expected]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "labels.py",
        "labels.py",
        "model.py",
        "model.py",
    ]


def test_a_changed_source_is_always_seen(load: Loading) -> None:
    """A change within the second and at the same size is seen, where compiled copies would count as current."""
    for number in "12345":
        model = load(HOST.replace("len(word)", f"{number} "))
        result = run(model, load, x=np.array([b"a"], np.object_))
        assert isinstance(result, dict)
        assert result["y"].tolist() == [int(number)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "jax.random.normal(jax.random.key(0), x.shape)",
            "its place in the batch: .+; it draws random numbers with a key that",
        ),
        ("np.random.rand()", "the number of rows in its batch: .+; its function is another one each time"),
        ("jax.random.normal(jax.random.key(0), x.shape) + x.mean(0)", "the other rows .+; probably by reduce_sum"),
    ],
)
def test_why_a_row_depends_on_its_place(load: Loading, more: str, words: str) -> None:
    with pytest.raises(Internal) as caught:
        load(MIXING.replace("x - x.mean(0)", f"x + {more}"))
    assert re.search(words, caught.value.message)
    assert ("rows_may_mix" in caught.value.message) == ("probably" in words)


def test_labels(load: Loading, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "labels.txt").write_text("cat\ndog\n")
    model = load(TRITON, 'output { name: "y" label_filename: "labels.txt" }')
    assert model.signature.outputs["y"].labels == ("cat", "dog")


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ("config.as_dict()['sequence_batching'] = {'state': [{}]}", "a Triton Python model keeps its own state"),
        (
            "config.as_dict()['model_repository_agents'] = {'agents': [{'name': 'checksum'}]}",
            "model_repository_agents.agents: no repository agents are run",
        ),
    ],
)
def test_what_is_not_offered_cannot_be_asked_for_by_the_model_itself(load: Loading, asks: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        load(
            f"""
            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(config):
                    {asks}
                    return config
            """
        )


def test_a_generator_has_no_ragged_inputs(load: Loading) -> None:
    source = applying(
        """
        yield {"y": inputs["x"]}
        """,
        "x FP32[n]",
        "y FP32[n]",
        more='max_batch_size = 2\nragged = ("x",)',
    )
    with pytest.raises(InvalidArgument, match="those have no ragged inputs: they run one request at a time"):
        load(source)


def test_the_largest_batch_is_bounded(load: Loading) -> None:
    source = of_x(
        "x[:, :1] + x[:, :1] * np.ones(4, np.float32)",
        "FP32[s]",
        "FP32[4]",
        more='import numpy as np\nmax_batch_size = MOST\nbuckets = {"s": (2, 4)}\nbatch_buckets = (1,)\nhost = False',
    )
    assert load(source.replace("MOST", str(1 << 15))).jitted is not None
    with pytest.raises(InvalidArgument) as caught:
        load(source.replace("MOST", str((1 << 15) + 1)))
    assert caught.value.message == (
        "model 'm': inputs and outputs of a batch of 32769 have 1048608 bytes, executables.max_batch_byte_size allows 1048576"
    )
    # What is not compiled takes what its requests bring.
    assert load(source.replace("MOST", str(1 << 30)).replace("host = False", "host = True")).instances
    assert load(source.replace("MOST", str(1 << 30)).replace("(2, 4)}", "(2, 4)} if False else {}")).jitted is not None


def test_kinds_of_instances(load: Loading) -> None:
    for kind in ("KIND_AUTO", "KIND_CPU", "KIND_MODEL"):
        assert load(TRITON, f"instance_group {{ kind: {kind} }}").instances
    with pytest.raises(
        InvalidArgument, match="instance group g of model m has kind KIND_GPU but no GPUs are available"
    ):
        load(TRITON, 'instance_group { name: "g" kind: KIND_GPU }')


WARM = (
    "model_warmup { name: 'w' count: 3 inputs { key: 'x' value { data_type: TYPE_FP32 dims: [ 5 ] zero_data: true } } }"
)


def test_a_python_model_is_warm_before_it_serves(load: Loading) -> None:
    model = load(
        answering(
            "return response(y=np.array([self.calls], np.float32))",
            more="""
            calls = 0

            def execute(self, requests):
                self.calls += len(requests)
                return [self.answer(request) for request in requests]
            """,
        ),
        """input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } """
        + WARM,
    )
    result = run(model, load, x=np.zeros(5, np.float32))
    assert isinstance(result, dict)
    assert result["y"].tolist() == [4]


def test_a_jitted_model_has_the_shape_of_its_warmup(load: Loading) -> None:
    model = load(
        of_x("x", "FP32[-1]"),
        WARM,
    )
    assert model.jitted is not None
    request = request_of({"x": np.zeros(5, np.float32)}, key=model.jitted.key({"x": np.zeros(5, np.float32)}))
    assert model.jitted.find([request]) is not None


def test_a_model_that_fails_its_warmup_does_not_serve(load: Loading) -> None:
    with pytest.raises(InvalidArgument, match=r"warmup sample 'w' failed: .*ValueError: too cold"):
        load(
            """
            class TritonPythonModel:
                def execute(self, requests):
                    raise ValueError("too cold")
            """,
            """input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
            output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } """
            + WARM,
        )


def test_a_load_that_fails_gives_its_arrays_back(load: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in reference cycles are freed too, without a garbage collection, and while somebody holds the error."""
    # pytest keeps what is logged.
    monkeypatch.setattr(logging.getLogger("tensord.workers.loading.loader"), "disabled", True)
    source = """
import builtins, weakref
import jax.numpy as jnp
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}

class Weights:
    def __init__(self):
        self.array, self.circle = jnp.ones(1000), self

def create(path, config, device):
    weights = Weights()
    builtins.weights_of_a_failed_load = weakref.ref(weights), weakref.ref(weights.array)
    def apply(params, inputs):
        return {"y": (inputs["x"] * weights.array[:4])[:HOW_MANY]}
    if HOW_MANY == 3:
        raise ValueError("no")
    return apply, {"weights": weights.array}
"""
    for how_many in ("2", "3"):
        gc.disable()
        try:
            with pytest.raises(ServingError) as caught:
                load(source.replace("HOW_MANY", how_many))
            kept: Any = vars(builtins).pop("weights_of_a_failed_load")
            assert [each() for each in kept] == [None, None], caught.value
        finally:
            gc.enable()


def test_instances_are_initialised_at_the_same_time_if_the_model_says_so(load: Loading) -> None:
    source = """
import threading
import triton_python_backend_utils as pb_utils
all_of_them = threading.Barrier(3)
class TritonPythonModel:
    def initialize(self, args):
        all_of_them.wait(60)
    def execute(self, requests):
        return []
"""
    model = load(source, THREE + 'parameters { key: "parallel_initialize" value { string_value: "true" } }')
    assert [instance._thread.name for instance in model.instances] == ["m_0_0", "m_0_1", "m_0_2"]


THREE = fields("x FP32 1", "y FP32 1", "instance_group { count: 3 }")
#: What a model does that has each instance in a process of its own elsewhere: its globals, and its locks, are for one at a time.
ONE_BY_ONE = """
import builtins, time
import triton_python_backend_utils as pb_utils
noted = builtins.noted_by_instances
class TritonPythonModel:
    def __init__(self):
        noted.append("begin")
    def initialize(self, args):
        time.sleep(0.02)
        noted.append(args["model_instance_name"])
        assert args["model_instance_name"] != FAILS
    def execute(self, requests):
        return []
    def finalize(self):
        noted.append("finalize")
        time.sleep(0.02)
        noted.append("finalized")
"""


def test_instances_are_initialised_and_finalized_one_after_the_other(
    load: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that was written for a process for each instance finds one of them at a time; after a failure no other is begun."""
    noted: list[str] = []
    monkeypatch.setattr(builtins, "noted_by_instances", noted, raising=False)
    model = load(ONE_BY_ONE.replace("FAILS", "None"), THREE)
    assert noted == ["begin", "m_0_0", "begin", "m_0_1", "begin", "m_0_2"]
    noted.clear()
    for instance in model.instances:
        instance.close(lambda: None)
    for instance in model.instances:
        instance._thread.join(60)
    assert noted == ["finalize", "finalized"] * 3
    noted.clear()
    with pytest.raises(Internal):
        load(ONE_BY_ONE.replace("FAILS", "'fails_0_1'"), THREE, name="fails")
    assert noted[:4] == ["begin", "fails_0_0", "begin", "fails_0_1"]
    assert "begin" not in noted[4:]


def test_instances_before_one_that_gets_no_thread_are_ended(load: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    ended, start = threading.Event(), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "m_0_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(builtins, "noted_by_instances", noted, raising=False)
    monkeypatch.setattr(builtins, "ended_instance", ended, raising=False)
    monkeypatch.setattr(threading.Thread, "start", refused)
    source = ONE_BY_ONE.replace("FAILS", "None").replace(
        '("finalized")', '("finalized")\n        builtins.ended_instance.set()'
    )
    with pytest.raises(Internal):
        load(source, THREE + 'parameters { key: "parallel_initialize" value { string_value: "true" } }')
    assert ended.wait(60)
    assert noted == ["begin", "m_0_0", "finalize", "finalized"]


def test_the_device_of_samples_is_closed_where_one_of_them_cannot_begin() -> None:
    closed: list[bool] = []
    device: Any = SimpleNamespace(close=lambda: closed.append(True))
    jitted: Any = SimpleNamespace(free_state=SimpleNamespace(begun={}))

    class Sample:
        def begin(self, begun: Any) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        run_samples(jitted, [Sample()], device, "m", lambda: None)  # type: ignore[list-item]
    assert closed == [True]


def weighing(y: str = "x @ weights", params: str = "{}", size: int = 1000) -> str:
    """Returns a model.py with output ``y``, and an array of ``size`` times ``size`` elements beside its function."""
    more = f"import numpy as np\nmax_batch_size = 2\nweights = np.ones(({size}, {size}), np.float32)"
    return of_x(y, f"FP32[{size}]", more=more, params=params)


def test_closed_over_arrays_are_named_with_what_they_cost(load: Loading, caplog: pytest.LogCaptureFixture) -> None:
    load(weighing())
    said = [record.message for record in caplog.records if "constants" in record.message]
    assert len(said) == 1
    assert said[0].startswith(
        "model 'm': its function has 4000000 bytes of arrays that are no parameters, and each of its 2 programs"
    )
    assert "about 8000000 bytes more. Return them from create() with the parameters" in said[0]
    caplog.clear()
    load(weighing('x @ params["w"]', '{"w": weights}'))
    load(weighing(params='{"rate": 0.5, "sizes": [1, 2]}', size=100))
    assert not any("constants" in record.message for record in caplog.records)


def test_parameters_that_are_no_arrays_are_named(load: Loading, caplog: pytest.LogCaptureFixture) -> None:
    load(weighing('x * params["deep"]["table"][7]', '{"deep": {"table": [0.5] * 2000}}'))
    said = [record.message for record in caplog.records if "constants" in record.message]
    assert len(said) == 1
    assert said[0].startswith(
        "model 'm': 2000 of its parameters are no arrays (16000 bytes, the first is 'deep.table.0', of type float)"
    )


def test_an_output_that_is_not_declared_is_named_once(load: Loading, caplog: pytest.LogCaptureFixture) -> None:
    load(JAX)
    load(JAX.replace('* params["w"]}', '* params["w"], "score": inputs["x"], "aux": inputs["x"]}'))
    said = [record.message for record in caplog.records if "no client gets" in record.message]
    assert said == [
        "model 'm': its function computes 'aux', 'score', which no client gets: outputs of model.py do not declare it"
    ]


def test_values_of_a_trace_that_are_left_outside(load: Loading) -> None:
    for source, leaks in (
        (JAX, False),
        (LEAKS.replace("WITH", "").replace("kept.append(y)", ""), False),
        (LEAKS.replace("WITH", ""), True),
        # What holds it is garbage: nothing can use it.
        (LEAKS.replace("WITH", "").replace("kept.append(y)", "ring = [y]; ring.append(ring)"), False),
        (JAX.replace("FP32[s]", "FP32[-1]").replace('buckets = {"s": (2, 8)}', ""), False),
    ):
        made = load(source)
        assert made.jitted is not None
        assert made.jitted.executables.leaks() is leaks


def test_what_changes_each_time_is_told_and_never_cached(load: Loading, caplog: pytest.LogCaptureFixture) -> None:
    """Nor are effects; and neither counts as pure: a client does not ask again where its worker has died."""
    random = JAX.replace('inputs["x"] *', '__import__("random").random() * inputs["x"] *')
    calls = JAX.replace('inputs["x"] *', 'io_callback(lambda x: x, inputs["x"], inputs["x"]) *').replace(
        "return (", "from jax.experimental import io_callback; return ("
    )
    assert load(JAX).pure
    with pytest.raises(Internal, match="depends on the number of rows"):
        load(random)
    assert "is traced (model.py, line" in caplog.records[-1].message
    random = random.replace("batch_buckets = (1, 3)", "batch_buckets = (4,)")
    for source, words in (
        (random, "is traced (model.py, line"),
        (calls, "it calls Python by io_callback (model.py, line"),
    ):
        caplog.clear()
        for _ in range(2):
            assert not load(source).pure
        assert [words in record.message for record in caplog.records] == [True, True]
        for _ in range(2):
            with pytest.raises(InvalidArgument) as raised:
                load(source, "response_cache { enable: true }")
            assert raised.value.message.startswith("model 'm': its answers are cached (response_cache), but it")
            assert words in raised.value.message


def test_a_value_of_a_trace_that_is_used_in_the_next(load: Loading) -> None:
    for use in ("kept[0]", "(kept[0] + inputs['x']).sum()"):
        with pytest.raises(
            Internal, match=r"a value of one trace of the function is kept outside of it.*model.py, line 10, in"
        ):
            load(LEAKS.replace("WITH", "").replace('inputs["x"] + y', f'inputs["x"] + {use}'))

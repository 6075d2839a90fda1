"""A daemon with GPU workers on a host without GPUs: driver and JAX's plugin are the tests' stand-ins, XLA:CPU computes.

What it shows is which process has which device, what is copied from where to where, and what happens when something fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.protocol.test_system_regions import ClientRegion, in_region, out_region
from tests.scrapes import scrape


@pytest.fixture
def stub(tmp_path: Path) -> CudaStub:
    folder = tmp_path / "cuda"
    folder.mkdir()
    return CudaStub(folder, devices=4, delay_us=200)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    repositories.scale_model(folder)
    return folder


Serve = Callable[..., DaemonProcess]


@pytest.fixture
def serve(stub: CudaStub, tmp_path: Path, repository: Path) -> Iterator[Serve]:
    """Yields a function that starts daemons on the stub's devices."""
    started: list[DaemonProcess] = []

    def serve(
        visible: str = "0", device: str = "cuda", environment: dict[str, str] | None = None, **sections: Any
    ) -> DaemonProcess:
        folder = tmp_path / f"daemon-{len(started)}"
        folder.mkdir()
        # A CPU worker would have small programs on another client of XLA; a GPU worker has one client.
        workers = {"device": device, "single_thread_flops": 0} | sections.pop("workers", {})
        environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": visible} | (environment or {})
        daemon = DaemonProcess(folder, [repository], {"workers": workers, **sections}, environment=environment)
        started.append(daemon)
        daemon.start()
        daemon.wait_ready()
        return daemon

    yield serve
    for daemon in started:
        daemon.stop()


def scaled(daemon: DaemonProcess, values: np.ndarray, **where: Any) -> np.ndarray:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE) as client:
        given = httpclient.InferInput("x", list(values.shape), "FP32")
        given.set_data_from_numpy(values)
        return client.infer("scale", [given], **where).as_numpy("y")


@pytest.mark.parametrize("by", ["index", "uuid"])
def test_each_worker_uses_the_gpu_that_it_was_given(stub: CudaStub, serve: Serve, by: str) -> None:
    """1. the daemon is shown GPUs 3 and 1 of four; 2. a client has memory on each; 3. its requests go where it lies.

    The driver opens memory of its own device only, and says where each process has allocated.
    """
    shown = [3, 1]
    visible = ",".join(str(device) if by == "index" else stub.uuid(device) for device in shown)
    daemon = serve(visible)
    daemon.wait_log(r"is up on cuda:\d", 2)
    pids = {int(index): int(pid) for pid, index in re.findall(r"\(process (\d+)\) is up on cuda:(\d)", daemon.log)}
    environment = os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": visible}
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    with CudaOwner(environment) as owner, httpclient.InferenceServerClient(daemon.url) as client:
        for index, device in enumerate(shown):
            handle = owner.create(f"g{index}", 4096, index)
            client.register_cuda_shared_memory(f"g{index}", handle, index, 4096)
            # Not aligned to 256, so that it is gathered in the worker's staging buffer.
            owner.put(f"g{index}", np.zeros(16, np.uint8), values + device)
            client.infer(
                "scale",
                [in_region("x", "FP32", (1, 4), f"g{index}", 16, 16)],
                outputs=[out_region("y", f"g{index}", 16, 512)],
            )
            assert np.array_equal(owner.get(f"g{index}", np.float32, (1, 4), 512), 3 * (values + device) + 1)
        assert {index: stub.devices_of(pid) for index, pid in pids.items()} == {0: {3}, 1: {1}}
        client.unregister_cuda_shared_memory()


def test_single_numbers(serve: Serve, repository: Path) -> None:
    """Without a batch dimension each request is answered with its own, also beside a tensor with dimensions."""
    repositories.write_model(
        repository,
        "single",
        """
        inputs = {"x": "FP32[]", "v": "FP32[4]"}
        outputs = {"y": "FP32[]", "w": "FP32[4]"}

        def create(path, config, device):
            return (lambda params, i: {"y": i["x"] * 2 + 1, "w": i["v"] * i["x"]}), {}
        """,
    )
    daemon = serve(repository={"control_mode": "explicit", "load": ["single"]})
    for number in range(12):
        given = [
            {"name": "x", "datatype": "FP32", "shape": [], "data": [number]},
            {"name": "v", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
        ]
        status, answer = daemon.infer("single", given)
        assert status == 200, answer
        assert [output["data"] for output in answer["outputs"]] == [
            [2 * number + 1],
            [number * n for n in (1, 2, 3, 4)],
        ]


def test_samples_and_requests_do_not_meet(stub: CudaStub, serve: Serve, repository: Path) -> None:
    """Requests are served while another model is loaded, whose samples run on the same GPU: each gets its own answer."""
    sample = """
        model_warmup [ {
          name: "again" batch_size: 1 count: 400
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
        } ]
    """
    repositories.write_model(
        repository,
        "warmed",
        repositories.of_x("x * 7", more="max_batch_size = 8"),
        sample,
    )
    daemon = serve(repository={"control_mode": "explicit", "load": ["scale"]})
    wrong: list[Any] = []
    asked = 0
    with (
        ThreadPoolExecutor(1) as pool,
        grpcclient.InferenceServerClient(daemon.grpc_url) as client,
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as loader,
    ):
        loading = pool.submit(loader.load_model, "warmed")
        given = grpcclient.InferInput("x", [1, 4], "FP32")
        while not loading.done() or asked < 20:
            values = np.full((1, 4), asked, np.float32)
            given.set_data_from_numpy(values)
            answer = client.infer("scale", [given]).as_numpy("y")
            asked += 1
            if not np.array_equal(answer, 3 * values + 1):
                wrong.append((asked, answer.tolist()))
        loading.result()
    assert (len(wrong), wrong[:1]) == (0, [])
    # What the samples were gathered in is given back: one buffer is left, the loop's.
    (pid,) = [worker.pid for worker in daemon.workers]
    wait_until(lambda: len(list(stub.folder.glob(f"{pid}-*"))) == 1, "the loader's buffer to go", daemon)


def test_gpus_without_a_plugin_are_said_and_models_run_on_the_cpu(serve: Serve) -> None:
    daemon = serve("0,1", device="auto", environment={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert "models run on the CPU: there are 2 GPUs, but JAX's plugin for CUDA is not installed" in daemon.log
    values = np.ones((1, 4), np.float32)
    assert np.array_equal(scaled(daemon, values), 3 * values + 1)
    assert "is up on cpu:0" in daemon.log


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_plugin_that_fails_stops_the_daemon_at_its_first_word(serve: Serve, device: str) -> None:
    """No death after the other: the next start would end as this one."""
    with pytest.raises(AssertionError, match="the daemon exited with 1") as raised:
        serve(device=device, environment={"CUDA_STUB_PLUGIN": "broken"})
    log = str(raised.value)
    assert len(re.findall("the plugin needs CUDA 13 or later, the driver has 12.8", log)) == 1
    assert "stopping: worker-0 cannot use its device, as it says itself" in log
    assert "Traceback" not in log


def echoed(daemon: DaemonProcess, values: np.ndarray) -> np.ndarray:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE) as client:
        given = httpclient.InferInput("x", list(values.shape), "FP32")
        given.set_data_from_numpy(values)
        return client.infer("echo_fp32", [given]).as_numpy("y")


def test_large_bodies_are_transfers_once_the_arenas_are_page_locked(
    stub: CudaStub, serve: Serve, repository: Path
) -> None:
    """1. the driver is slow to lock the first arena, and requests are served meanwhile; 2. from then on nothing is pageable."""
    repositories.echo_models(repository, ["FP32"])
    values = np.random.default_rng(0).random(200_000, np.float32)
    with stub.hold("cuMemHostRegister_v2"):
        daemon = serve()
        (pid,) = [worker.pid for worker in daemon.workers]
        assert np.array_equal(echoed(daemon, values), values)
        assert np.array_equal(echoed(daemon, values), values)
        assert stub.held
        before = stub.host(pid)
        assert (before.locked, before.locked_copied) == (0, 0)
        assert before.other_copied >= 4 * values.nbytes
    # Both of the lane's arenas, and the other front's.
    wait_until(lambda: stub.host(pid).locked >= 3 << 20, "the arenas to be locked", daemon)
    before = stub.host(pid)
    assert np.array_equal(echoed(daemon, values), values)
    after = stub.host(pid)
    assert after.locked_copied - before.locked_copied == 2 * values.nbytes
    assert after.other_copied == before.other_copied
    assert "page-locked" not in daemon.log
    assert after.violations == 0


THREE = repositories.applying(
    """
    x = inputs["x"]
    return {"y": 3 * x + 1, "up": x > 0, "sum": x.astype("float64").sum(axis=1, keepdims=True)}
    """,
    "x FP32[4]",
    "y FP32[4], up BOOL[4], sum FP64[1]",
    more="max_batch_size = 8",
)


_LARGE = """
    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[n]", "sum": "FP32[1]"}

    def create(path, config, device):
        return (lambda params, inputs: {"y": 2 * inputs["x"], "sum": inputs["x"][:1]}), None
"""


@pytest.mark.parametrize("count", [1, 3])
def test_instances_are_slots_of_a_pipeline(
    stub: CudaStub, serve: Serve, repository: Path, tmp_path: Path, count: int
) -> None:
    """Large tensors of several clients are copied one after the other with one instance, and overlap with several."""
    repositories.write_model(repository, "large", _LARGE, f"instance_group {{ count: {count} }}")
    daemon = serve(environment={"CUDA_STUB_DELAY_US": "20000"})
    (pid,) = [worker.pid for worker in daemon.workers]
    size = 1 << 20

    def ask(who: int) -> None:
        with (
            httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
            contextlib.closing(ClientRegion(client, 8 * size)) as region,
        ):
            for number in range(4):
                values = np.full(size // 4, 10 * who + number, np.float32)
                body = httpclient.InferInput("x", [values.size], "FP32")
                body.set_data_from_numpy(values)
                shm.set_shared_memory_region(region.handle, [values])
                given = in_region("x", "FP32", values.shape, region.name, size, 0)
                wanted = [out_region("y", region.name, size, 2 * size), httpclient.InferRequestedOutput("sum")]
                answer = client.infer("large", [body])
                assert np.array_equal(answer.as_numpy("y"), 2 * values)
                assert answer.as_numpy("sum").tolist() == values[:1].tolist()
                answer = client.infer("large", [given], outputs=wanted)
                made = shm.get_contents_as_numpy(region.handle, np.float32, values.shape, 2 * size)
                assert np.array_equal(made, 2 * values)
                assert answer.as_numpy("sum").tolist() == values[:1].tolist()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    found = stub.host(pid)
    assert (found.at_once > 1) == (count > 1)
    # One in, two out, and a wait for either way.
    assert found.queued == 3 * 4 * 8
    assert found.waited == 2 * 4 * 8
    assert found.violations == 0


def ask(daemon: DaemonProcess, model: str, values: list[float]) -> tuple[int, dict[str, Any]]:
    return daemon.infer(model, [{"name": "x", "shape": [len(values)], "datatype": "FP32", "data": values}])


_JITTED = """
    import jax
    import jax.numpy as jnp
    import numpy as np

    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[n]"}

    def look(x):
        if x[0] < 0:
            raise ValueError("negative")
        return x

    def create(path, config, device):
        def apply(params, inputs):
            x = inputs["x"]
            return {"y": jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}
        return apply, {}
"""
_PYTHON = repositories.answering("""
    if given(request)[0] < 0:
        raise ValueError("negative")
    return response(y=given(request))
""")
_CONFIG = repositories.fields("x FP32 -1", "y FP32 -1")


@pytest.mark.parametrize(("source", "config"), [(_JITTED, ""), (_PYTHON, _CONFIG)], ids=["jitted", "python"])
def test_after_an_error_of_a_model_the_device_is_asked(
    stub: CudaStub, serve: Serve, repository: Path, source: str, config: str
) -> None:
    """1. the model raises, at the call, while the GPU works: 500; 2. it raises because the GPU failed: 503, and a new worker."""
    repositories.write_model(repository, "looks", source, config)
    daemon = serve()
    assert ask(daemon, "looks", [1.0])[0] == 200
    (worker,) = daemon.workers
    status, answer = ask(daemon, "looks", [-1.0])
    assert (status, [one.pid for one in daemon.workers]) == (500, [worker.pid]), answer
    stub.fail("cuCtxSynchronize", 700)
    status, answer = ask(daemon, "looks", [-1.0])
    assert status == 503, answer
    assert "the GPU failed (CUDA_ERROR_ILLEGAL_ADDRESS)" in answer["error"]
    daemon.wait_log("the worker ends, to be replaced: the GPU failed")
    wait_until(lambda: ask(daemon, "looks", [2.0])[0] == 200, "the replacement to serve", daemon)


def test_a_device_without_memory_is_said_with_the_sizes(serve: Serve, repository: Path) -> None:
    """XLA itself refuses 2^47 bytes; the same model, and the worker, go on."""
    repositories.write_model(
        repository,
        "greedy",
        repositories.applying(
            """
            x = inputs["x"]
            count = 1 << (45 if x.shape[0] > 8 else 4)
            return {"y": jnp.sort(jax.lax.iota(jnp.float32, count) * x[0])[:2]}
            """,
            "x FP32[n]",
            "y FP32[2]",
        ),
    )
    daemon = serve()
    pids = [worker.pid for worker in daemon.workers]
    for _ in range(2):
        status, answer = ask(daemon, "greedy", [1.0] * 9)
        assert status == 503, answer
        assert (
            "model 'greedy': the device has no memory left for this request (1 rows, 36 bytes of inputs"
            in answer["error"]
        )
        assert "a program that needs 140737488355" in answer["error"]
        assert "Out of memory allocating 140737488355328 bytes" in answer["error"]
        assert ask(daemon, "greedy", [1.0] * 3)[0] == 200
    assert [worker.pid for worker in daemon.workers] == pids
    assert "Traceback" not in daemon.log


def test_inputs_that_find_no_memory_cost_their_request(stub: CudaStub, serve: Serve, repository: Path) -> None:
    """1. the GPU refuses a larger buffer: 503, with the bytes; 2. it has just enough: so much is taken; 3. all go on as ever."""
    repositories.echo_models(repository, ["FP32"])
    daemon = serve()
    pids = [worker.pid for worker in daemon.workers]
    small, large, larger = [np.arange(count, dtype=np.float32) for count in (8, 1 << 19, (1 << 19) + 8)]
    assert np.array_equal(echoed(daemon, small), small)
    stub.fail("cuMemAlloc_v2", 2)
    with pytest.raises(InferenceServerException, match="the GPU has no 2097152 bytes left for inputs") as raised:
        echoed(daemon, large)
    assert raised.value.status() == "503"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in raised.value.message()
    assert np.array_equal(echoed(daemon, small), small)
    stub.fail("cuMemAlloc_v2", 2)
    assert np.array_equal(echoed(daemon, larger), larger)
    assert stub.failed
    assert [worker.pid for worker in daemon.workers] == pids
    assert "Traceback" not in daemon.log


_SUMS = repositories.applying(
    """
    total = state["sum"] + inputs["x"]
    return {"y": total}, {"sum": total}
    """,
    "x FP32[1]",
    "y FP32[1]",
    more='max_batch_size = 4\nstate = {"sum": "FP32[1]"}',
    arguments="params, inputs, state",
)


def test_sequences_stay_on_the_gpus_of_their_model(stub: CudaStub, serve: Serve, repository: Path) -> None:
    """
    1. Two GPUs; the model is to be on the second one. Forty sequences live there, none is sent to the other worker.
    2. That worker is killed: all of them are lost, and those that start anew wait for its replacement.
    """
    config = """
        sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 64 } }
        instance_group { kind: KIND_GPU gpus: [ 1 ] }
    """
    repositories.write_model(repository, "sums", _SUMS, config)
    daemon = serve("0,1", requests={"worker_wait": PATIENCE})
    pids = {int(index): int(pid) for pid, index in re.findall(r"\(process (\d+)\) is up on cuda:(\d)", daemon.log)}

    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:

        def step(who: int, x: float, flags: str = "") -> float:
            given = grpcclient.InferInput("x", [1, 1], "FP32")
            given.set_data_from_numpy(np.full((1, 1), x, np.float32))
            controls = {"sequence_id": who, "sequence_start": "S" in flags, "sequence_end": "E" in flags}
            return float(client.infer("sums", [given], **controls).as_numpy("y")[0, 0])

        living = range(1, 41)
        assert [step(who, who, "S") for who in living] == list(living)
        assert [step(who, 100) for who in living] == [100 + who for who in living]
        index = client.get_model_repository_index(as_json=True)["models"]
        assert {(model["name"], model["state"]) for model in index} == {("scale", "READY"), ("sums", "READY")}
        os.kill(pids[1], signal.SIGKILL)
        daemon.wait_log("is gone with", 2)
        for who in living:
            with pytest.raises(
                InferenceServerException, match=f"sequence {who} of model 'sums' was lost when its worker died"
            ):
                step(who, 1)
        assert [step(who, 5, "S") for who in living] == [5.0] * len(living)
        assert [step(who, 6, "E") for who in living] == [11.0] * len(living)
    assert pids[0] in {worker.pid for worker in daemon.workers}
    assert not re.search(rf"{pids[0]} worker-0\] model 'sums' version 1 is ready", daemon.log)


def test_answers_are_given_again_by_a_gpu_worker(stub: CudaStub, serve: Serve, repository: Path) -> None:
    """From a body and from memory on the GPU; what was written to that meanwhile is another request."""
    source = repositories.of_x("2 * x + 1", "FP32[n]", more="response_cache = True")
    repositories.write_model(repository, "cached", source)
    daemon = serve(response_cache={"byte_size": 1 << 20})
    values = np.arange(64, dtype=np.float32)
    environment = os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    hits = []
    with CudaOwner(environment) as owner, httpclient.InferenceServerClient(daemon.url) as client:
        client.register_cuda_shared_memory("g", owner.create("g", 4096, 0), 0, 4096)

        def ask(given: Any, outputs: list[Any] | None = None) -> np.ndarray:
            answer = client.infer("cached", [given], outputs=outputs)
            (found,) = client.get_inference_statistics("cached")["model_stats"]
            hits.append(found["inference_stats"]["cache_hit"]["count"])
            return owner.get("g", np.float32, (64,), 2048) if outputs else answer.as_numpy("y")

        body = httpclient.InferInput("x", [64], "FP32")
        body.set_data_from_numpy(values)
        region, into = in_region("x", "FP32", (64,), "g", 256, 0), [out_region("y", "g", 256, 2048)]
        owner.put("g", values)
        for given, outputs in ((body, None), (body, None), (region, None), (region, into)):
            np.testing.assert_array_equal(ask(given, outputs), 2 * values + 1)
        assert hits == [0, 1, 2, 3]
        owner.put("g", values + 1)
        for outputs in (None, into):
            np.testing.assert_array_equal(ask(region, outputs), 2 * (values + 1) + 1)
        assert hits[4:] == [3, 4]
        client.unregister_cuda_shared_memory()


def test_ragged_inputs_from_bodies_and_from_the_gpu(stub: CudaStub, serve: Serve, repository: Path) -> None:
    """Requests of different lengths are laid one behind the other on the device, wherever each lies."""
    source = """
        import jax

        inputs = {"x": "FP32[n]"}
        outputs = {"sum": "FP32[1]", "twice": "FP32[n]"}
        max_batch_size = 8
        ragged = ("x",)
        buckets = {"n": (64, 512)}
        batch_inputs = {"rows": ("SEGMENT_IDS", "INT32", "x")}
        batch_outputs = {"twice": "x"}

        def create(path, config, device):
            def apply(params, inputs):
                sums = jax.ops.segment_sum(inputs["x"], inputs["rows"], max_batch_size)
                return {"sum": sums[:, None], "twice": 2 * inputs["x"]}
            return apply, None
    """
    repositories.write_model(repository, "ragged", source, "dynamic_batching { max_queue_delay_microseconds: 50000 }")
    daemon = serve()
    environment = os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    with CudaOwner(environment) as owner, grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.register_cuda_shared_memory("g", owner.create("g", 4096, 0), 0, 4096)
        on_device = np.arange(40, dtype=np.float32)
        owner.put("g", on_device)

        def ask(number: int) -> None:
            values = on_device if number % 3 == 0 else np.arange(1 + number, dtype=np.float32)
            given = grpcclient.InferInput("x", [1, values.size], "FP32")
            if number % 3 == 0:
                given.set_shared_memory("g", values.nbytes)
            else:
                given.set_data_from_numpy(values[None])
            answer = client.infer("ragged", [given])
            assert answer.as_numpy("sum").tolist() == [[values.sum()]]
            assert answer.as_numpy("twice").tolist() == [(2 * values).tolist()]

        with ThreadPoolExecutor(12) as pool:
            for _ in pool.map(ask, range(48)):
                pass
        (found,) = client.get_inference_statistics("ragged", as_json=True)["model_stats"]
        assert int(found["execution_count"]) < 48
        client.unregister_cuda_shared_memory()


def of_gpus(daemon: DaemonProcess, name: str) -> dict[str, float]:
    """Returns a metric's value for each GPU, by UUID."""
    return scrape(daemon.metrics_url).of(name, "gpu_uuid")


@pytest.mark.parametrize("room", [0, 1 << 18])
def test_all_page_locked_memory_is_bounded_together(stub: CudaStub, serve: Serve, room: int) -> None:
    """Buffers of batches are locked first, where the bound allows it; answers are the same without."""
    daemon = serve(workers={"pinned_byte_size": room})
    (pid,) = [worker.pid for worker in daemon.workers]
    values = np.ones((1, 4), np.float32)
    for _ in range(5):
        assert np.array_equal(scaled(daemon, values), 3 * values + 1)
    found = stub.host(pid)
    assert found.locked == room
    assert (found.other_copied == 0) == (room > 0)
    assert f"is not page-locked: {room} are, and workers.pinned_byte_size allows {room}" in daemon.log


def test_what_gpus_do_and_meet_is_shown(stub: CudaStub, serve: Serve) -> None:
    daemon = serve("0,1")
    wait_until(lambda: of_gpus(daemon, "nv_gpu_utilization"), "figures of the GPUs", daemon)
    first, second = stub.uuid(0), stub.uuid(1)
    others = [stub.uuid(number) for number in (2, 3)]
    found = of_gpus(daemon, "nv_gpu_utilization")
    assert (found[first], found[second]) == (0.25, 0.5)
    for name, value in (
        ("nv_gpu_memory_total_bytes", 80 << 30),
        ("nv_gpu_memory_used_bytes", 1 << 30),
        ("nv_gpu_power_usage", 123.5),
        ("nv_gpu_power_limit", 700),
    ):
        assert of_gpus(daemon, name) == dict.fromkeys([first, second, *others], value)
    # Those that do not say it have none.
    assert of_gpus(daemon, "nv_energy_consumption") == {first: 5.5}
    before = scrape(daemon.metrics_url).series("tensord_gpu_errors_total")
    stub.meets(1, 8, 79)
    wait_until(lambda: f"GPU {second} reports XID 79" in daemon.log, "the XID in the log", daemon)
    stub.meets(0, 2)
    wait_until(lambda: f"GPU {first} has met a memory error" in daemon.log, "the memory error in the log", daemon)
    errors = scrape(daemon.metrics_url)
    assert errors.value("tensord_gpu_errors_total", gpu_uuid=second, kind="xid") == 1
    assert errors.value("tensord_gpu_errors_total", gpu_uuid=first, kind="ecc") == 1
    # An alert has to see them grow.
    assert before.keys() == errors.series("tensord_gpu_errors_total").keys()
    assert set(before.values()) == {0}
    stub.lose(1)
    wait_until(lambda: second not in of_gpus(daemon, "nv_gpu_utilization"), "the lost one to be missing", daemon)
    assert of_gpus(daemon, "nv_gpu_utilization")[first] == 0.25

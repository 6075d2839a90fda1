"""Small programs run on the single-thread device, large ones and those that cannot where they always did; nobody sees which."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax._src.xla_bridge
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.config.options import Workers
from tensord.shm.arrays import address_of
from tensord.workers.jax_internals import interfaces
from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.processor import single_thread
from tensord.workers.processor.single_thread import SingleThreadDevice, choose, share
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tensord.workers.programs.gather_buffer import aligned
from tests import prepared
from tests.repositories import write_model
from tests.workers.made_requests import request_of
from tests.workers.programs.test_executables import model_of, run
from tests.workers.worker_process import WorkerProcess


def lowered(apply: Any, *shapes: tuple[int, ...]) -> jax.stages.Lowered:
    return jax.jit(apply).lower(*[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])


@pytest.mark.parametrize(
    ("apply", "shapes", "suits"),
    [
        (lambda x, y: x @ y, ((8, 64), (64, 64)), True),
        # 2 * 16 * 64 * 64 operations, and one row more.
        (lambda x, y: x @ y, ((16, 64), (64, 64)), True),
        (lambda x, y: x @ y, ((17, 64), (64, 64)), False),
        (lambda x: x + 1, ((1 << 16,),), True),
        # What is not counted, or not wholly.
        (lambda x: x, ((4,),), False),
        (lambda x: jax.lax.fori_loop(0, 1000, lambda _, y: y @ y, x), ((8, 8),), False),
        (lambda x: jnp.linalg.qr(x)[0], ((8, 8),), False),
        (lambda x: jax.pure_callback(np.sin, x, x), ((8, 8),), False),
    ],
)
def test_what_is_small(apply: Any, shapes: tuple[tuple[int, ...], ...], suits: bool) -> None:
    assert SingleThreadDevice(2 * 16 * 64 * 64).suits(lowered(apply, *shapes)) is suits


def test_much_memory_is_not_small() -> None:
    device = SingleThreadDevice(1 << 60)
    sums = [device.suits(lowered(lambda x, y: x + y, (size,), (size,))) for size in (1 << 18, 1 << 20)]
    assert sums == [True, False]


def test_the_environment_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "3"):
        if value is None:
            monkeypatch.delenv("PJRT_NPROC", raising=False)
        else:
            monkeypatch.setenv("PJRT_NPROC", value)
        before = dict(os.environ)
        assert SingleThreadDevice(1).device not in jax.devices()
        assert dict(os.environ) == before


def test_a_jax_without_such_a_function(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(jax._src.xla_bridge, "make_cpu_client")
    # As in a process that has none yet.
    monkeypatch.setattr(single_thread, "_opened", single_thread._opened.__wrapped__)
    monkeypatch.setattr(single_thread, "thread_count", lambda: 4)
    with caplog.at_level(logging.INFO, "tensord.workers.processor.single_thread"):
        assert choose(jax.devices()[0], 5) is None
    # The worker says it as it starts.
    assert not caplog.records
    (said,) = interfaces.missing()
    assert said.startswith("every program gets all threads (jax._src.xla_bridge.make_cpu_client: cannot import name")


def test_parameters_are_shared() -> None:
    device = SingleThreadDevice(1).device
    given = jax.device_put({"w": np.ones((100, 100), np.float32), "b": [np.float32(3), np.zeros((0, 2), np.float16)]})
    shared = share(given, device)
    for ours, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(shared), strict=True):
        assert theirs.devices() == {device}
        assert theirs.unsafe_buffer_pointer() == ours.unsafe_buffer_pointer()
        np.testing.assert_array_equal(ours, theirs)
    assert share(None, device) is None


def test_arrays_of_the_host_are_shared() -> None:
    device = SingleThreadDevice(1).device
    given = {"w": aligned((3, 5), np.dtype(np.float32))}
    given["w"][:] = 7
    shared = share(given, device)
    assert shared["w"].unsafe_buffer_pointer() == address_of(given["w"])
    del given
    assert (np.asarray(shared["w"]) == 7).all()


def test_what_would_be_copied_is_not_shared() -> None:
    device = SingleThreadDevice(1).device
    with pytest.raises(ValueError, match=r"a parameter of int4\[3\] would be copied"):
        share([jnp.ones(3, jnp.int4)], device)
    with pytest.raises(TypeError):
        share(jax.random.key(0), device)


def told(script: str, threads: int, *arguments: str) -> str:
    """Runs a script in a process whose XLA has so many threads; returns its output."""
    return prepared.run_script(script, *arguments, environment=os.environ | {"PJRT_NPROC": str(threads)}).strip()


def test_where_there_is_one() -> None:
    script = (
        "import jax\nfrom tensord.workers.processor.single_thread import choose\n"
        "print([choose(jax.devices()[0], flops) for flops in (5, 0)])\n"
    )
    assert told(script, 4) == "[<SingleThreadDevice up to 5 flops>, None]"
    assert told(script, 1) == "[None, None]"
    assert choose(SimpleNamespace(platform="gpu"), 5) is None  # type: ignore[arg-type]


def test_programs_are_cut_for_one_thread_whatever_is_in_the_cache_of_jax(tmp_path: Path) -> None:
    """In two starts, of which the second finds the programs of the first; both name the device they are for."""
    script = (
        "import sys\nfrom pathlib import Path\nimport jax, numpy as np\n"
        "from tensord.workers.loading.parameters import host_sets\n"
        "from tensord.workers.programs.cache_directory import CacheDirectory\n"
        "from tensord.workers.programs.executable_cache import use_persistent_cache\n"
        "from tensord.workers.programs.placement import Placement\n"
        "from tensord.workers.processor.single_thread import SingleThreadDevice, SmallPrograms\n"
        "from tensord.workers.tensors.signature import Signature\n"
        "use_persistent_cache(CacheDirectory(Path(sys.argv[1])))\n"
        "sets = host_sets('m', None)\n"
        "for place in (Placement(sets), SmallPrograms(Signature('m', {}, {}, 0), SingleThreadDevice(1), sets).open()):\n"
        "    given = jax.ShapeDtypeStruct((1 << 22,), np.dtype('f'), sharding=place.sharding)\n"
        "    program = place.compile(jax.jit(lambda x: x * 1.5).lower(given))\n"
        "    print('outer_dimension_partitions' in program.as_text())\n"
    )
    for _ in range(2):
        assert told(script, 4, str(tmp_path)).split() == ["True", "False"]
        assert len(list(tmp_path.glob("*.program"))) == 2


@pytest.mark.parametrize(
    ("options", "small"),
    [
        (Workers(threads=2), [False, True]),
        (Workers(threads=2, single_thread_flops=0), [False, False]),
        (Workers(threads=1), [False, False]),
    ],
)
def test_a_worker_and_its_second_start(tmp_path: Path, options: Workers, small: list[bool]) -> None:
    """It answers alike whichever thread computes, says in its cache what is for one, and compiles nothing the second time.

    Its environment is settled before a model's code runs.
    """
    repository, cache = tmp_path / "models", tmp_path / "cache"
    write_model(
        repository,
        "product",
        """
        import sys
        from pathlib import Path

        import numpy as np

        def note(event, arguments):
            if event in ("os.putenv", "os.unsetenv"):
                changes.write(f"{arguments}\\n")

        changes = Path(__file__).with_name("changes").open("a", buffering=1)
        sys.addaudithook(note)
        inputs = {"x": "FP32[512]"}
        outputs = {"y": "FP32[512]"}
        max_batch_size = 256
        batch_buckets = (1, 256)

        def create(path, config, device):
            return (lambda weights, inputs: {"y": inputs["x"] @ weights}), 3 * np.eye(512, dtype=np.float32)
        """,
    )
    files: list[dict[str, int]] = []
    for _ in range(2):
        with WorkerProcess(cache, workers=options) as worker:
            worker.serve(repository, "product")
            for rows in (1, 200):
                x = np.random.default_rng(rows).random((rows, 512), np.float32)
                np.testing.assert_array_equal(worker.infer("product", {"x": x})["y"], 3 * x)
            assert worker.stop() == 0
        (changes,) = repository.rglob("changes")
        assert changes.read_text() == ""
        files.append({path.name: path.stat().st_mtime_ns for path in cache.iterdir()})
    assert files[0] == files[1]
    entries = [CacheDirectory(cache).read(path.name) for path in cache.glob("*.executable")]
    assert sorted(pickle.loads(entry or b"")[0] for entry in entries) == small


WIDTH = 32
WEIGHTS = np.random.default_rng(0).random((WIDTH, WIDTH), np.float32)
#: Of a product with them, for so many rows.
ROW_FLOPS = 2 * WIDTH * WIDTH
FEW, MANY = 4, 16


def product(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["x"] @ parameters["w"]}


def products(apply: Any = product, parameters: Any = None, **more: Any) -> JaxModel:
    """Returns a model whose programs are small up to ``FEW`` rows."""
    more.setdefault("single_thread", SingleThreadDevice(FEW * ROW_FLOPS))
    shape = f"FP32[{WIDTH}]"
    parameters = {"w": WEIGHTS} if parameters is None else parameters
    return model_of(apply, {"x": shape}, {"y": shape}, MANY, (1, FEW, MANY), parameters=parameters, **more)


def placed(model: JaxModel) -> list[bool]:
    """Returns for each bucket whether it is on the single-thread device, by its record and by its outputs."""
    found = []
    for rows in (1, FEW, MANY):
        executable = model.executables.find(Wanted(rows, ((WIDTH,),)))
        assert executable is not None
        (device,) = executable.call(executable.parameters(), {"x": np.zeros((rows, WIDTH), np.float32)})["y"].devices()
        assert device == (executable.placement.device or jax.devices()[0])
        found.append(executable.placement.device is not None)
    return found


def check(model: JaxModel, factor: float = 1) -> None:
    """Checks that every bucket computes the right result."""
    for rows in (1, 3, FEW, MANY):
        x = np.random.default_rng(rows).random((rows, WIDTH), np.float32)
        (result,) = run(model, {"x": x}, rows=(rows,))
        np.testing.assert_allclose(result["y"], x @ WEIGHTS * factor, rtol=1e-5)


def test_small_and_large() -> None:
    model = products()
    assert placed(model) == [True, True, False]
    check(model)


def test_none_without_a_device_for_them() -> None:
    model = products(single_thread=None)
    assert placed(model) == [False, False, False]
    check(model)


def test_nothing_is_opened_for_large_programs() -> None:
    device = SingleThreadDevice(1)
    assert placed(products(single_thread=device)) == [False, False, False]
    assert "_opened" not in vars(device)


def test_the_parameters_are_there_once() -> None:
    model = products(parameters={"w": WEIGHTS, "more": [np.ones(5, np.float32)]})
    small, large = [model.executables.find(Wanted(rows, ((WIDTH,),))) for rows in (1, MANY)]
    assert small is not None
    assert large is not None
    pointers = [
        [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(executable.placement.parameters)]
        for executable in (small, large)
    ]
    assert pointers[0] == pointers[1]


def test_64_bit_parameters() -> None:
    def shift(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + parameters}

    device = SingleThreadDevice(1000)
    model = model_of(shift, {"x": "INT64[2]"}, {"y": "INT64[2]"}, parameters=np.int64(1), single_thread=device)
    single = model.executables.find(Wanted(1, ((2,),)))
    assert single is not None
    assert single.placement.device is device.device
    assert run(model, {"x": np.array([2**40 + 4, -(2**62)])})[0]["y"].tolist() == [2**40 + 5, 1 - 2**62]


def test_on_demand_as_well() -> None:
    device = SingleThreadDevice(100)
    model = model_of(
        lambda p, i: {"y": i["x"] + 1}, {"x": "FP32[n]"}, {"y": "FP32[n]"}, parameters={}, single_thread=device
    )
    for size in (100, 101):
        assert run(model, {"x": np.ones(size, np.float32)})[0]["y"].tolist() == [2.0] * size
    singles = [model.executables.find(Wanted(1, ((size,),))) for size in (100, 101)]
    found = [None if single is None else single.placement.device for single in singles]
    assert found == [device.device, None]


def test_what_a_function_holds_on_to() -> None:
    """Arrays that were put on the worker's device, and what was computed there."""
    held = jax.device_put(WEIGHTS, jax.devices()[0])

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": jax.jit(lambda x: x @ held)(inputs["x"]) * parameters}

    model = products(apply, np.float32(3), single_thread=SingleThreadDevice((ROW_FLOPS + WIDTH) * FEW))
    assert placed(model) == [True, True, False]
    check(model, 3)


def bound(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {"y": jax.lax.with_sharding_constraint(inputs["x"], where) @ parameters["w"]}


@pytest.mark.parametrize(
    ("apply", "parameters", "words"),
    [
        (bound, None, "ValueError: Received incompatible devices"),
        (product, {"w": WEIGHTS, "small": jnp.ones(3, jnp.int4)}, "a parameter of int4[3] would be copied"),
    ],
)
def test_a_version_that_cannot_be_there_serves_as_ever(
    apply: Any, parameters: Any, words: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Said once; and nothing is tried again at the second start."""
    folder = cache_directory(str(tmp_path / "cache"))
    for lines, counts in ((1, (0, 3)), (0, (3, 0))):
        caplog.clear()
        cache = ExecutableCache(folder)
        with caplog.at_level(logging.INFO, "tensord.workers.processor.single_thread"):
            model = products(apply, parameters, cache=cache)
        assert len(caplog.records) == lines
        assert not lines or ("its programs get all threads" in caplog.text and words in caplog.text)
        assert (cache.compiles.figures().cache_hits, cache.compiles.figures().count) == counts
        assert placed(model) == [False, False, False]
        check(model)


def test_a_second_start_finds_each_where_it_was(tmp_path: Path) -> None:
    folder = cache_directory(str(tmp_path / "cache"))

    def start(single_thread: SingleThreadDevice | None) -> tuple[tuple[int, int], list[bool]]:
        cache = ExecutableCache(folder)
        model = products(cache=cache, single_thread=single_thread)
        check(model)
        return (cache.compiles.figures().cache_hits, cache.compiles.figures().count), placed(model)

    assert start(SingleThreadDevice(FEW * ROW_FLOPS)) == ((0, 3), [True, True, False])
    assert start(SingleThreadDevice(FEW * ROW_FLOPS)) == ((3, 0), [True, True, False])
    # Another bound is another decision.
    assert start(SingleThreadDevice(ROW_FLOPS)) == ((0, 3), [True, False, False])
    assert start(None) == ((0, 3), [False, False, False])
    assert start(SingleThreadDevice(FEW * ROW_FLOPS)) == ((3, 0), [True, True, False])


def test_a_series_is_where_its_requests_are_when_they_are_alone() -> None:
    """Bit for bit: a sum over rows is added up in another order by several threads."""

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": (parameters["w"] * inputs["x"]).sum(0)}

    weights = np.random.default_rng(1).normal(size=(2000, 100)).astype(np.float32)
    for flops in (1 << 20, 1):
        model = model_of(
            apply,
            {"x": "FP32[100]"},
            {"y": "FP32[100]"},
            parameters={"w": weights},
            single_thread=SingleThreadDevice(flops),
        )
        single = model.executables.find(Wanted(1, ((100,),)))
        assert single is not None
        assert (single.placement.device is None) == (flops == 1)
        assert model.grouped is not None
        (program,) = model.grouped.compile(single, lengths=[2])
        given = [{"x": np.random.default_rng(i).random(100, np.float32)} for i in range(2)]
        together = Execution([request_of(one, key=model.key(one)) for one in given], 0, program)
        model.execute(together)
        for one, both in zip(given, together.results, strict=True):
            assert isinstance(both, dict)
            assert both["y"].tobytes() == run(model, one)[0]["y"].tobytes()

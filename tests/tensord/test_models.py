"""Random keys of requests' seeds: what each is made of, and that who shares a batch draws what it draws alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.models import keys
from tensord.shm.errors import InvalidArgument
from tests.repositories import write_model
from tests.workers.worker_process import WorkerProcess

#: Draws bits, which are the same whatever a program makes of them; exclusive or with an input of zeros.
MODEL = """
    import jax
    import jax.numpy as jnp
    import tensord.models

    inputs, outputs = {{"x": "UINT32[2]"}}, {{"y": "UINT32[2]"}}
    max_batch_size, batch_buckets = 8, (1, 8)
    request = {{"seed": "INT64"}}
    {more}

    def create(path, config, device):
        def draw(key, x):
            return x ^ jax.random.bits(key, (2,), jnp.uint32)

        def apply(params, inputs, request):
            seeds = request["seed"]
            return {{"y": jax.vmap(draw)({keys}, inputs["x"])}}

        return apply, None
    """
TYPED, RAW = "tensord.models.keys(seeds)", "tensord.models.keys(seeds, raw=True)"
OF_THE_FIRST = "jnp.broadcast_to(jax.random.key(seeds[0, 0]), (len(seeds),))"
RBG = 'jax.config.update("jax_default_prng_impl", "rbg")'
#: Five rows run when they are together, and none before: a delay of an hour.
TOGETHER = "dynamic_batching { preferred_batch_size: [ 5 ] max_queue_delay_microseconds: 3600000000 }"
#: Seed and rows of each request; two seeds differ in their upper 32 bits alone.
REQUESTS = ((7, 1), (-1, 2), (0, 1), ((1 << 40) + 7, 1))


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess() as made:
        yield made


def drawn(worker: WorkerProcess, model: str, *requests: tuple[int, int]) -> list[list[list[int]]]:
    """Sends the requests, then waits; returns the output of each."""
    numbers = [
        worker.submit(model, {"x": np.zeros((rows, 2), np.uint32)}, parameters={"seed": seed})
        for seed, rows in requests
    ]
    return [worker.arrays(worker.answer(number))["y"].tolist() for number in numbers]


@pytest.mark.parametrize(("made", "more"), [(TYPED, ""), (RAW, ""), (TYPED, RBG)], ids=["typed", "raw", "rbg"])
def test_requests_that_share_a_batch_draw_as_they_do_alone(
    worker: WorkerProcess, tmp_path: Path, made: str, more: str
) -> None:
    source = MODEL.format(keys=made, more=more)
    write_model(tmp_path, "alone", source)
    write_model(tmp_path, "together", source, TOGETHER)
    worker.serve(tmp_path, "alone", "together")
    alone = [drawn(worker, "alone", each)[0] for each in REQUESTS]
    assert drawn(worker, "together", *REQUESTS) == alone
    assert drawn(worker, "together", *reversed(REQUESTS)) == alone[::-1]
    assert len({tuple(rows[0]) for rows in alone}) == len(REQUESTS)
    # Rows of a request have its seed.
    assert alone[1][0] == alone[1][1]


def test_the_first_rows_seed_for_all_is_refused(worker: WorkerProcess, tmp_path: Path) -> None:
    """Everybody in a batch would draw what the first one asked for."""
    write_model(tmp_path, "first", MODEL.format(keys=OF_THE_FIRST, more=""), TOGETHER)
    assert "output 'y' depends on the other rows of its batch" in worker.load(tmp_path, "first").reason


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_a_key_is_what_jax_makes_of_its_seed(dtype: str) -> None:
    seeds = np.array([0, 7, -1, (1 << 40) + 7, -(1 << 63)]).astype(dtype)
    with jax.enable_x64(True):
        words = [jax.random.key_data(jax.random.key(seed, impl="threefry2x32")).tolist() for seed in seeds]
        given: list[Any] = [seeds, seeds[:, None], jnp.asarray(seeds), jnp.asarray(seeds)[:, None]]
        for each in (*map(keys, given), *map(jax.jit(keys), given)):
            assert each.shape == (5,)
            assert jax.random.key_data(each).tolist() == words
    # Also of numpy's 64 bits where JAX has 32.
    raw = keys(seeds, raw=True)
    assert (raw.dtype, raw.tolist()) == (np.uint32, words)


@pytest.mark.parametrize(
    ("seeds", "named"),
    [
        (np.zeros(2, np.float32), r"float32\[2\]"),
        (np.zeros(2, np.int16), r"int16\[2\]"),
        (np.zeros((2, 2), np.int32), r"int32\[2, 2\]"),
        (np.zeros((2, 1, 1), np.int32), r"int32\[2, 1, 1\]"),
        (np.int32(3), r"int32\[\]"),
        ([1, 2], r"list\[\]"),
    ],
)
def test_other_seeds_are_refused(seeds: object, named: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^the seeds are {named}; 32 or 64-bit integers of shape \[rows\] or"):
        keys(seeds)  # type: ignore[arg-type]


def test_the_module_needs_no_jax() -> None:
    subprocess.run([sys.executable, "-c", "import sys, tensord.models; assert 'jax' not in sys.modules"], check=True)

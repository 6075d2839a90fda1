"""Checks what XLA does on this host's GPU: with memory that is not its own, in small runs, and after errors.

python -m bench.gpu.xla_checks NAME       runs one check and prints JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu import checking
from bench.gpu.checking import MIB, timed, tried
from bench.gpu.driver_calls import (
    Owner,
    address_of,
    driver,
    good,
    make_stream,
    memory,
    name_of,
    open_context,
    open_handle,
)

FP32 = np.dtype(np.float32)
_SMALL = 1024
#: Two programs of XLA beside each other, as two workers on one GPU have them.
_BESIDE = """
import time, jax
x, f = jax.numpy.ones((2048, 2048)), jax.jit(lambda a: a @ a)
jax.block_until_ready(f(x))
began = time.perf_counter()
for _ in range(20):
    y = f(x)
jax.block_until_ready(y)
print(round(50 * (time.perf_counter() - began), 2))
"""


def _start(fraction: str = "0.1") -> tuple[Any, Any, Callable[..., Any]]:
    """Starts JAX; returns it, its GPU, and a function that makes an array from an address, an element type and a shape."""
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", fraction)
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    import jax

    from tensord.workers.devices import dlpack

    device = jax.devices("cuda")[0]
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    where = dlpack.device_of(device)

    def view(pointer: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        return jax.dlpack.from_dlpack(dlpack.DeviceView(pointer, np.dtype(dtype), shape, where))

    return jax, device, view


def views() -> dict[str, Any]:
    """Passes another process's memory to a program: in place or copied, at which alignments, of which datatypes, donated."""
    jax, device, view = _start()
    open_context()
    with Owner() as owner:
        pointer = open_handle(owner.make(4 * MIB)["handle"])
        x = view(pointer, FP32, (_SMALL,))
        found: dict[str, Any] = {
            "device": device.device_kind,
            "platform": device.client.platform_version,
            "in place": x.unsafe_buffer_pointer() == pointer,
            "values are right": bool((x == jax.numpy.arange(_SMALL)).all()),
        }
        twice = jax.jit(lambda a: a * 2).lower(jax.ShapeDtypeStruct((_SMALL,), FP32)).compile()

        def at(offset: int) -> bool:
            return float(jax.device_get(twice(view(pointer + offset, FP32, (_SMALL,))))[1]) == 2 + offset / 2

        found["right at an offset of"] = {offset: tried(lambda o=offset: at(o)) for offset in (256, 128, 64, 16, 4)}  # type: ignore[misc]
        with jax.enable_x64(True):
            found["datatypes"] = {
                np.dtype(kind).name: tried(lambda k=kind: str(view(pointer, k, (64,)).dtype))  # type: ignore[misc]
                for kind in (np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.int64, np.float64)
            }
        same = jax.jit(lambda a: a).lower(jax.ShapeDtypeStruct((_SMALL,), FP32)).compile()
        found["handed through, in place"] = jax.block_until_ready(same(x)).unsafe_buffer_pointer() == pointer

        def given_away() -> bool:
            into = view(pointer + 2 * MIB, FP32, (_SMALL,))
            made = jax.jit(lambda a, _: a * 3, donate_argnums=1, keep_unused=True)(x, into)
            return bool(jax.block_until_ready(made).unsafe_buffer_pointer() == pointer + 2 * MIB)

        found["given away, written to"] = tried(given_away)
        found["a view"] = timed(lambda: view(pointer, FP32, (_SMALL,)))
        found["its address"] = timed(x.unsafe_buffer_pointer)
        found["stream for ready events"] = tried(lambda: device.get_stream_for_external_ready_events() != 0)
    return found


def latency() -> dict[str, Any]:
    """Times a run with 4 KiB of input and output, with the copies in the orders that a worker may choose."""
    jax, _, view = _start()
    open_context()
    stream, byte_size = make_stream(), 4 * _SMALL
    page = memory(MIB, locked=True)
    source, target = address_of(page), address_of(page) + byte_size
    staging = int(good(driver.cuMemAlloc(MIB)))
    x = view(staging, FP32, (_SMALL,))
    compiled = jax.jit(lambda a: a * 2).lower(jax.ShapeDtypeStruct((_SMALL,), FP32)).compile()
    pageable = np.ones(_SMALL, np.float32)

    def wait() -> None:
        good(driver.cuStreamSynchronize(stream))

    def in_three_steps() -> None:
        good(driver.cuMemcpyHtoDAsync(staging, source, byte_size, stream))
        wait()
        made = jax.block_until_ready(compiled(x))
        good(driver.cuMemcpyDtoHAsync(target, made.unsafe_buffer_pointer(), byte_size, stream))
        wait()

    def out_on_our_stream() -> None:
        good(driver.cuMemcpyHtoDAsync(staging, source, byte_size, stream))
        wait()
        made = compiled(x)
        held = made.__dlpack__(stream=int(stream))
        good(driver.cuMemcpyDtoHAsync(target, made.unsafe_buffer_pointer(), byte_size, stream))
        wait()
        del held

    large = jax.jit(lambda a: a * 2).lower(jax.ShapeDtypeStruct((4 * MIB,), FP32)).compile()
    z = jax.numpy.ones(4 * MIB, np.float32)
    found: dict[str, Any] = {
        "call, not waited for": timed(lambda: compiled(x)),
        "call and wait": timed(lambda: jax.block_until_ready(compiled(x))),
        "call with an array of the host's, and back": timed(lambda: np.asarray(compiled(pageable))),
        "in, wait, run, wait, out, wait": timed(in_three_steps),
        "in, wait, run, out behind it on our stream, wait": tried(lambda: timed(out_on_our_stream)),
        "16 MiB, call and wait": timed(lambda: jax.block_until_ready(large(z)), 50),
        "16 MiB, an output as an array of the host's": timed(lambda: np.asarray(large(z)), 10),
    }
    np.frombuffer(page, np.float32, _SMALL)[:] = 21
    in_three_steps()
    found["values are right"] = float(np.frombuffer(page, np.float32, 1, byte_size)[0]) == 42
    return found


def graphs() -> dict[str, Any]:
    """Times a program of many kernels whose addresses change, with XLA's command buffers and without."""
    if os.environ.get("XLA_FLAGS"):
        return _graphs()
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    command = [sys.executable, "-m", __spec__.name, "graphs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    without = tried(lambda: json.loads(done.stdout.splitlines()[-1]))
    return {"with command buffers": _graphs(), "without": without}


def _graphs() -> dict[str, Any]:
    jax, _, view = _start()
    open_context()
    pointer = int(good(driver.cuMemAlloc(8 * MIB)))
    weights = [np.random.default_rng(seed).random((512, 512), np.float32) / 512 for seed in range(12)]

    def apply(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jax.numpy.tanh(x @ weight) + 1
        return x

    compiled = jax.jit(apply).lower(weights, jax.ShapeDtypeStruct((64, 512), FP32)).compile()
    placed, turn = jax.device_put(weights), iter(range(10**9))
    arguments = [view(pointer + i * MIB // 2, FP32, (64, 512)) for i in range(8)]
    return {
        "one address": timed(lambda: jax.block_until_ready(compiled(placed, arguments[0]))),
        "eight in turn": timed(lambda: jax.block_until_ready(compiled(placed, arguments[next(turn) % 8]))),
    }


def out_of_memory() -> dict[str, Any]:
    """Runs a program that needs too much memory; finds where it fails and whether programs run afterwards."""
    jax, _, _ = _start()
    open_context()
    found: dict[str, Any] = {}

    def much() -> str:
        made = jax.jit(lambda a: jax.numpy.broadcast_to(a, (1 << 45,)) + 1)(np.float32(1))
        jax.block_until_ready(made)
        return "no error"

    found["error"] = tried(much)
    found["context"] = name_of(driver.cuCtxSynchronize())
    found["afterwards"] = tried(lambda: float(np.asarray(jax.numpy.ones(4) + 1)[0]))
    return found


def illegal_address() -> dict[str, Any]:
    """Runs a program that reads an invalid address; finds whether the call, the wait or nothing fails, and what works then."""
    jax, _, view = _start()
    open_context()
    compiled = jax.jit(lambda a: a * 2).lower(jax.ShapeDtypeStruct((_SMALL,), FP32)).compile()
    x, found = view(0x7FDEAD000000, FP32, (_SMALL,)), dict[str, Any]()
    for attempt in ("first", "second"):
        began, called = time.perf_counter(), False
        try:
            made = compiled(x)
            called = True
            jax.block_until_ready(made)
            found[attempt] = "no error"
        except Exception as error:
            where = "when waited for" if called else "at the call"
            found[attempt] = f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        found[f"{attempt}, seconds"] = round(time.perf_counter() - began, 2)
    found["context"] = name_of(driver.cuCtxSynchronize())
    return found


def callbacks() -> dict[str, Any]:
    """Calls a Python function on the host from a program on the GPU, with JAX started as the worker starts it."""
    jax, _, _ = _start()
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    twice = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, shape, x))
    return {
        "values": tried(lambda: np.asarray(twice(np.ones(4, np.float32))).tolist()),
        "cpu": tried(lambda: str(jax.devices("cpu"))),
    }


def two_processes() -> dict[str, Any]:
    """Times a matrix product in milliseconds: in one process alone, and in two processes on the GPU at once."""
    environment = {"JAX_PLATFORMS": "cuda,cpu", **os.environ, "XLA_CLIENT_MEM_FRACTION": "0.3"}

    def beside(count: int) -> list[Any]:
        command = [sys.executable, "-c", _BESIDE]
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        said = [process.communicate(timeout=60) for process in running]
        return [out.strip() or err[-300:] for out, err in said]

    return {"alone": beside(1), "two": beside(2)}


#: By worth.
CHECKS: dict[str, checking.Check] = {
    check.__name__: check
    for check in (latency, views, illegal_address, out_of_memory, callbacks, graphs, two_processes)
}

if __name__ == "__main__":
    checking.main(CHECKS)

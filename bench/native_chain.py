"""Compiles, starts and checks the server in C (native_chain.c), which gets its answers besides inference from a tensord.

It serves ``addsub`` alone, to clients that send its two tensors as binary FP32[1, 16] and want both outputs that way.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient

from bench.bare_chain import counters, fetch, head_of
from bench.server import serving

MODEL = "addsub"
_SOURCE = Path(__file__).with_suffix(".c")
_INFER = f"/v2/models/{MODEL}/infer"
#: Besides inference, what perf_analyzer and ``bench.server`` ask.
_OTHERS = [
    "/v2",
    "/v2/health/ready",
    "/v2/models/stats",
    f"/v2/models/{MODEL}",
    f"/v2/models/{MODEL}/config",
    f"/v2/models/{MODEL}/ready",
    f"/v2/models/{MODEL}/stats",
]
#: ``COUNTER`` of native_chain.c.
_COUNTER = "#" * 20


def compiled(folder: Path) -> Path | None:
    """Compiles the program into ``folder`` and returns its path; None: there is no C compiler.

    Raises CalledProcessError: it does not compile.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    program = folder / "native_chain"
    command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", program, _SOURCE]
    subprocess.run(command, check=True)
    return program


def answers(upstream: str) -> bytes:
    """Returns the contents of the program's file of answers, which it fetches from the tensord at ``upstream``.

    Raises SystemExit: the tensord answers a request with an error.
    """
    body, json_size = httpclient.InferenceServerClient.generate_request_body(
        *_request(np.zeros((2, 1, 16), np.float32))
    )
    head, content = _fetched(upstream, "POST", _INFER, body, {"Inference-Header-Content-Length": str(json_size)})
    # The outputs are as large as the inputs.
    found = [_entry(f"POST {_INFER}", head + content[: json_size - len(body)])]
    for path in _OTHERS:
        head, content = _fetched(upstream, "GET", path, b"", {})
        found.append(_entry(f"GET {path}", head + content))
    return b"".join(found)


def _fetched(upstream: str, method: str, path: str, body: bytes, fields: dict[str, str]) -> tuple[bytes, bytes]:
    status, kept, content = fetch(upstream, method, path, body, fields)
    if status != 200:
        raise SystemExit(f"{upstream} answers {path} with {status}: {content[:300]!r}")
    if path.endswith("/stats"):
        content = _uncounted(content)
    return head_of(status, kept, len(content)), content


def _uncounted(content: bytes) -> bytes:
    """Returns the statistics of the one model with ``COUNTER`` in place of each count."""
    statistics = json.loads(content)
    statistics["model_stats"] = [one for one in statistics["model_stats"] if one["name"] == MODEL]
    for where, name in counters(statistics):
        where[name] = _COUNTER
    return json.dumps(statistics).replace(f'"{_COUNTER}"', _COUNTER).encode()


def _entry(request: str, answer: bytes) -> bytes:
    return f"{request} {len(answer)}\n".encode() + answer


def command(program: Path, port: int, spin_us: int, file: Path) -> list[str]:
    """Returns the command line that runs the program with a file of answers; port 0: any free port, which it prints."""
    return [str(program), "--port", str(port), "--spin-us", str(spin_us), "--answers", str(file)]


@contextlib.contextmanager
def chain(program: Path, upstream: str, address: str, spin_us: int, log: Path) -> Iterator[None]:
    """Runs the program at an address within the block; its answers are checked first."""
    file = program.with_name(f"answers-{spin_us}")
    file.write_bytes(answers(upstream))
    with serving(command(program, int(address.rpartition(":")[2]), spin_us, file), address, log):
        check(address)
        yield


def check(address: str) -> None:
    """Sends requests to ``addsub`` at an address. Raises SystemExit: an answer is wrong."""
    with httpclient.InferenceServerClient(address) as client:
        for seed in range(8):
            a, b = values = np.random.default_rng(seed).standard_normal((2, 1, 16)).astype(np.float32)
            inputs, outputs = _request(values)
            answer = client.infer(MODEL, inputs, outputs=outputs)
            for name, right in (("OUTPUT0", a + b), ("OUTPUT1", a - b)):
                if not np.array_equal(answer.as_numpy(name), right):
                    raise SystemExit(f"{address} answers {name}: {answer.as_numpy(name)}, it is {right}")


def _request(values: np.ndarray) -> tuple[list[httpclient.InferInput], list[httpclient.InferRequestedOutput]]:
    """Returns tritonclient's inputs for two tensors FP32[1, 16], given as FP32[2, 1, 16], and its outputs."""
    inputs = [httpclient.InferInput(f"INPUT{number}", [1, 16], "FP32") for number in (0, 1)]
    for tensor, value in zip(inputs, values, strict=True):
        tensor.set_data_from_numpy(value)
    return inputs, [httpclient.InferRequestedOutput(f"OUTPUT{number}") for number in (0, 1)]

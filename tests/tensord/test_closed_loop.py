"""``tensord bench``: the command as a user runs it, on a daemon that runs, and where something fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensord.closed_loop import closed_loop
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess
from tests.repositories import faulty_models, of_x, scale_model, write_model

PROTOCOLS = ("lane", "http", "grpc")


def bench(*words: str) -> tuple[int, str, str]:
    """Runs the command for two measurements; returns its status and outputs."""
    command = [sys.executable, "-m", "tensord", "bench", "--seconds=0.1", "--connections=1", "--connections=3", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    faulty_models(scale_model(folder / "models"))
    declared = 'inputs, outputs = {"x": "BYTES[n,m]"}, {"y": "BYTES[n,m]"}\nhost = True\n'
    create = 'def create(path, config, device):\n    return (lambda params, inputs: {"y": inputs["x"]}), None\n'
    write_model(folder / "models", "strings", declared + create)
    write_model(folder / "models", "brain", of_x("x * 2", "BF16[4]"))
    repository = {"paths": [str(folder / "models")], "strict_readiness": False, "exit_on_error": False}
    options: dict[str, Any] = {"clients": {"socket": str(folder / "clients.sock")}, "repository": repository}
    with DaemonProcess(folder, [folder / "models"], options) as daemon:
        yield daemon


def at(daemon: DaemonProcess, protocol: str) -> str:
    return (
        "--address=" + {"lane": str(daemon.folder), "http": daemon.url, "grpc": f"grpc://{daemon.grpc_url}"}[protocol]
    )


def test_a_loop_asks_until_the_time_is_over_and_at_least_once() -> None:
    asked: list[str] = []

    def ask() -> Any:
        asked.append("asked")
        return lambda: asked.append("compared")

    assert len(closed_loop(ask, 0)) == 1
    assert asked == ["asked", "compared"]
    assert 1 + len(closed_loop(ask, 0.01)) == len(asked) / 2 > 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("model", "size", "rows"), [("scale", 3, 3), ("strings", 5, 1), ("brain", 1, 1)])
def test_a_daemon_that_runs(daemon: DaemonProcess, protocol: str, model: str, size: int, rows: int) -> None:
    def inferences() -> int:
        _, answer = daemon.request("GET", f"/v2/models/{model}/stats")
        return int(json.loads(answer)["model_stats"][0]["inference_count"])

    before = inferences()
    status, said, errors = bench(at(daemon, protocol), f"--size={size}", model)
    assert (status, errors) == (0, "")
    head, *lines = map(str.split, said.splitlines())
    assert head == ["connections", "answers_per_s", "p50_us", "p99_us"]
    assert [line[0] for line in lines] == ["1", "3"]
    assert max(line[4].count("#") for line in lines) == 24
    for _, rate, p50, p99, *_ in lines:
        assert 0 < float(p50) <= float(p99)
        # Each connection's part of the rate is that of its whole loop, which takes this long at least.
        assert 0 < float(rate) * 0.1 < (inferences() - before) / rows


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["raises", "does_not_load", "absent"])
def test_a_request_that_fails_ends_it(daemon: DaemonProcess, protocol: str, model: str) -> None:
    status, said, errors = bench(at(daemon, protocol), model)
    assert (status, said, errors.count("\n")) == (1, "", 1), errors
    assert errors.startswith("tensord: ")
    assert f"'{model}'" in errors


def test_keys_of_restricted_calls_are_given_as_headers(tmp_path: Path) -> None:
    options = {
        "http": {"restricted_api": ["inference,metadata:key=open sesame"]},
        "grpc": {"restricted_protocol": ["inference,metadata:key=open sesame"]},
    }
    with DaemonProcess(tmp_path, [scale_model(tmp_path / "models")], options) as daemon:
        for protocol, name in (("http", "Key"), ("grpc", "triton-grpc-protocol-key")):
            assert bench(at(daemon, protocol), f"--header={name}: open sesame", "scale")[::2] == (0, "")
            assert "restricted" in bench(at(daemon, protocol), f"--header={name}:sesame", "scale")[2]
            assert (
                "--header is 'key', NAME:VALUE is expected" in bench(at(daemon, protocol), "--header=key", "scale")[2]
            )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/nowhere", "no tensord was found: /nowhere: No such file or directory"),
        ("localhost:1", "no server answers at http://127.0.0.1:1: Connection refused"),
        ("grpc://localhost:1", "Connection refused"),
    ],
)
def test_no_daemon_is_there(address: str, words: str) -> None:
    status, said, errors = bench(f"--address={address}", "scale")
    assert (status, said, words in errors, errors.count("\n")) == (1, "", True, 1), errors

"""The recipes of docs/shared-memory.md, run as they stand against a daemon with the example model they speak of."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import repositories
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import ROOT, DaemonOf, DaemonProcess, wait_until

EXAMPLES = ROOT / "examples" / "models"
DOCUMENT = ROOT / "docs" / "shared-memory.md"
#: What a program in C does with its region: writes the first tensor, and prints the second once the daemon has written it.
MAIN = """
#include <stdio.h>
int main(int argc, char **argv) {
    float *values = make_region(argv[1], 4096);
    if (argc < 2 || values == NULL || make_region(argv[1], 4096) != NULL)
        return 1;
    for (int i = 0; i < 4; i++)
        values[i] = (float)i;
    puts("made");
    fflush(stdout);
    getchar();
    for (int i = 0; i < 4; i++)
        printf("%.1f ", values[16 + i]);
    return 0;
}
"""


def recipe(heading: str) -> str:
    """Returns the first code block under a heading."""
    section = DOCUMENT.read_text().partition(f"# {heading}\n")[2]
    found = re.search(r"```\w*\n(.*?)```", section, re.DOTALL)
    assert found is not None, heading
    return found[1]


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, stub: CudaStub, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository, ["FP32"])
    shutil.copytree(EXAMPLES / "digits", repository / "digits")
    folder = tmp_path_factory.mktemp("daemon")
    options = {
        "regions": {"reclaim": "owner"},
        "clients": {"socket": str(folder / "clients.sock")},
        "supervisor": {"control_socket": str(folder / "control.sock")},
    }
    return daemon_of(repository, options, environment=stub.environment, folder=folder)


@pytest.fixture
def key() -> Iterator[str]:
    name = f"tensord-test-{uuid.uuid4().hex}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


def run(program: str, daemon: DaemonProcess, key: str, environment: dict[str, str] | None = None) -> list[float]:
    """Runs a recipe against the daemon; returns the numbers that it prints."""
    for there, here in {
        "localhost:8000": daemon.url,
        "127.0.0.1:8000": daemon.url,
        "my-input": key,
        "/run/tensord/clients.sock": str(daemon.folder / "clients.sock"),
    }.items():
        program = program.replace(there, here)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (environment or {}))
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


@pytest.fixture(scope="module")
def logits(daemon: DaemonProcess) -> list[float]:
    """Asks the model with the image of all recipes without shared memory; returns its answer."""
    image = {"name": "image", "datatype": "FP32", "shape": [1, 64], "data": [float(i % 17) for i in range(64)]}
    status, answer = daemon.infer("digits", [image])
    assert status == 200, answer
    return list(answer["outputs"][0]["data"])


def regions(daemon: DaemonProcess) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "tensord.daemon.ctl",
        "--socket",
        str(daemon.folder / "control.sock"),
        "--json",
        "regions",
    ]
    return list(json.loads(subprocess.check_output([*command, "list"], cwd=ROOT)))


@pytest.mark.parametrize("heading", ["tritonclient", "numpy and HTTP alone", "Sealed memory"])
def test_python(daemon: DaemonProcess, key: str, logits: list[float], heading: str) -> None:
    assert run(recipe(heading), daemon, key) == pytest.approx(logits, rel=1e-6)
    assert not Path("/dev/shm", key).exists()
    # Unregistered, or gone with the process that handed its memory over.
    wait_until(lambda: not regions(daemon), "no region to be left", daemon)


def test_c(daemon: DaemonProcess, key: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "region.c").write_text(recipe("C") + MAIN)
    subprocess.run(
        [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", tmp_path / "region", tmp_path / "region.c"],
        check=True,
    )
    with subprocess.Popen(
        [tmp_path / "region", f"/{key}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == "made\n"
        registration = f'{{"key": "/{key}", "byte_size": 4096}}'.encode()
        path = "/v2/systemsharedmemory/region/c"
        assert daemon.request("POST", f"{path}/register", registration)[0] == 200
        places = [
            {"shared_memory_region": "c", "shared_memory_byte_size": 16, "shared_memory_offset": offset}
            for offset in (0, 64)
        ]
        status, answer = daemon.infer(
            "echo_fp32",
            [{"name": "x", "datatype": "FP32", "shape": [4], "parameters": places[0]}],
            outputs=[{"name": "y", "parameters": places[1]}],
        )
        assert status == 200, answer
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.read().split() == ["0.0", "1.0", "2.0", "3.0"]
        assert daemon.request("POST", f"{path}/unregister", b"")[0] == 200


def test_gpu_memory(daemon: DaemonProcess, stub: CudaStub, key: str, logits: list[float]) -> None:
    assert run(recipe("CUDA regions"), daemon, key, stub.environment) == pytest.approx(logits, rel=1e-6)

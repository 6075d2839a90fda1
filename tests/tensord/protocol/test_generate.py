"""The stored descriptors are what the compiler makes of the protocol files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import ROOT
from tests.tensord.protocol.generate import MODULES, PROTOCOL, generated


def test_every_file_has_its_module() -> None:
    assert set(MODULES) == {str(path.relative_to(PROTOCOL)) for path in PROTOCOL.rglob("*.proto")}
    assert {path.name for path in PROTOCOL.rglob("*_pb2.py")} == {f"{module}.py" for module in MODULES.values()}


def test_the_descriptors_are_what_the_files_give() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which has the compiler, is not installed")
    for name, content in generated().items():
        if name.endswith(".binpb"):
            assert (PROTOCOL / name).read_bytes() == content, f"{name} is not what its .proto gives: make protocol"


def test_a_client_is_generated_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which has the compiler, is not installed")
    page = (ROOT / "docs" / "protocol.md").read_text().splitlines()
    (command,) = (line for line in page if line.startswith("python -m grpc_tools.protoc"))
    use = "from grpc_service_pb2_grpc import GRPCInferenceServiceStub"
    folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    for line in (command, f'python -c "{use}"'):
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

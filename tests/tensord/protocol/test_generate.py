"""The committed modules and stubs are what the compiler makes of the protocol files."""

from __future__ import annotations

import pytest

from tests.tensord.protocol.generate import MODULES, PROTOCOL, generated


def test_every_file_has_its_module() -> None:
    assert set(MODULES) == {str(path.relative_to(PROTOCOL)) for path in PROTOCOL.rglob("*.proto")}
    written = {path.name for path in PROTOCOL.rglob("*_pb2.py*") if path.suffix in (".py", ".pyi")}
    assert written == {f"{module}{suffix}" for module in MODULES.values() for suffix in (".py", ".pyi")}


def test_the_modules_are_what_the_files_give() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which has the compiler, is not installed")
    for name, text in generated().items():
        assert (PROTOCOL / name).read_text() == text, f"{name} is not what its .proto file gives: run `make protocol`"

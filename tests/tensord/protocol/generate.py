"""Compiles the protocol files: ``make protocol`` writes the modules and stubs in tensord/protocol/ that belong to them.

Only those parts of protoc's output are used that every version of it makes alike: the serialised descriptors, and the stubs. The
modules are stored; the stubs are only for mypy, and ``make lint`` writes them. The compiler comes with grpcio-tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTOCOL = Path(__file__).parents[3] / "tensord" / "protocol"
#: A file, by the name under which others import it -> its module. Files come before those that import them.
MODULES = {
    "model_config.proto": "model_config_pb2",
    "grpc_service.proto": "grpc_service_pb2",
    "grpc/health/v1/health.proto": "health_pb2",
    "grpc/reflection/v1/reflection.proto": "reflection_pb2",
    "grpc/reflection/v1alpha/reflection.proto": "reflection_v1alpha_pb2",
}
#: Of a literal of bytes.
_WIDTH = 112


def generated() -> dict[str, str]:
    """Returns the generated files: name -> text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        options = (f"-I{PROTOCOL}", f"--pyi_out={out}", f"--descriptor_set_out={out / 'descriptors'}")
        command = (sys.executable, "-m", "grpc_tools.protoc", *options, *MODULES)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"protoc failed:\n{done.stderr}")
        files = FileDescriptorSet.FromString((out / "descriptors").read_bytes()).file
        texts = {f"{MODULES[file.name]}.py": _module(file) for file in files}
        for name, module in MODULES.items():
            texts[f"{module}.pyi"] = _stub((out / name).with_name(f"{Path(name).stem}_pb2.pyi").read_text())
    return texts


def _module(file: FileDescriptorProto) -> str:
    """Returns the text of a module that defines the messages of a file, after those of the files that it imports."""
    imported = [MODULES[name] for name in file.dependency]
    lines = [
        f'"""The messages of {file.name}. Written by `make protocol`: change the .proto file, not this one."""',
        "",
        f"from tensord.protocol import {', '.join(sorted(('pool', *imported)))}",
        "",
        "pool.define(",
        *(f"    {part}" for part in _literals(_content(file))),
        "    globals(),",
        ")",
    ]
    return "\n".join(lines) + "\n"


def _content(file: FileDescriptorProto) -> bytes:
    """Serialises a descriptor, without the fields' JSON names, which follow from their names."""
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file.SerializeToString(deterministic=True)


def _literals(content: bytes) -> Iterator[str]:
    """Yields bytes as literals that fill a line each, with a comma behind the last."""
    start = 0
    while start < len(content):
        size = 1
        while size < len(content) - start and len(repr(content[start : start + size + 1])) <= _WIDTH:
            size += 1
        start += size
        yield repr(content[start - size : start]) + ("," if start == len(content) else "")


def _stub(text: str) -> str:
    """Adapts protoc's stub: imports from where our modules are, and types that mypy's strict mode accepts.

    Older compilers say ``bool`` where newer ones, rightly, let None in.
    """
    text = re.sub(r"^import (\w+_pb2) as", r"from tensord.protocol import \1 as", text, flags=re.MULTILINE)
    text = text.replace("from typing import ", "from typing import Any as _Any, ")
    text = text.replace("_Mapping]", "_Mapping[str, _Any]]")
    text = text.replace("**kwargs)", "**kwargs: _Any)")
    return text.replace(": bool = ...", ": _Optional[bool] = ...")


def main() -> None:
    """Writes the generated files, but none that is so already: others may be importing it."""
    for name, text in generated().items():
        path = PROTOCOL / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()

"""Compiles the protocol files: ``make protocol`` writes what belongs to them in tensord/protocol/: descriptors and stubs.

Only those parts of protoc's output are used that every version of it makes alike. The descriptors are stored; the stubs are only
for mypy, and ``make lint`` writes them. The compiler comes with grpcio-tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
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


def generated() -> dict[str, bytes]:
    """Returns the generated files: name -> content."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        options = (f"-I{PROTOCOL}", f"--pyi_out={out}", f"--descriptor_set_out={out / 'descriptors'}")
        command = (sys.executable, "-m", "grpc_tools.protoc", *options, *MODULES)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"protoc failed:\n{done.stderr}")
        files = FileDescriptorSet.FromString((out / "descriptors").read_bytes()).file
        found = {f"{MODULES[file.name].removesuffix('_pb2')}.binpb": _content(file) for file in files}
        for name, module in MODULES.items():
            stub = (out / name).with_name(f"{Path(name).stem}_pb2.pyi").read_text()
            found[f"{module}.pyi"] = _stub(stub).encode()
    return found


def _content(file: FileDescriptorProto) -> bytes:
    """Serialises a descriptor, without the fields' JSON names, which follow from their names."""
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file.SerializeToString(deterministic=True)


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
    for name, content in generated().items():
        path = PROTOCOL / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


if __name__ == "__main__":
    main()

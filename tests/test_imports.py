"""The rooms and the direction of imports (docs/architecture.md), held by walking every module's syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("config", "daemon", "shm", "tensord", "workers")

#: What a room of ours may import of ours.
OURS = {
    "shm": {"shm"},
    "config": {"config", "shm.datatypes", "shm.errors"},
    "daemon": {"daemon", "config", "shm"},
    # It only hands over, once it has looked whether what it hands over to is ours.
    "tensord": {"tensord", "daemon.cli", "daemon.ctl"},
    "workers": {"workers", "config", "shm"},
}
#: Libraries that only some files may import: they are heavy, or they are a border where foreign errors stop.
FENCED = {
    "jax": ("workers/",),
    "jaxlib": ("workers/",),
    "cuda": ("shm/cuda_regions.py",),
    "posix_ipc": ("shm/regions.py",),
    "starlette": ("daemon/http/",),
    "uvicorn": ("daemon/http/",),
    "httptools": ("daemon/http/",),
    "grpc": ("daemon/grpc/",),
    "grpc_health": ("daemon/grpc/",),
    "grpc_reflection": ("daemon/grpc/",),
    "hpack": ("daemon/grpc/",),
    "h11": ("daemon/metrics/exchange.py",),
    "prometheus_client": ("daemon/metrics/exposition.py",),
    "re2": ("config/header_pattern.py",),
    "numpy": ("shm/arrays.py", "workers/", "daemon/http/", "daemon/grpc/"),
}
#: Pure deciders: no device, no socket, no clock.
PURE = ("workers/scheduling/",)
IMPURE = {"jax", "socket", "select", "time", "asyncio", "threading", "os"}


def modules() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return found


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    where = str(path.relative_to(ROOT))
    room = where.split("/")[0]
    for name in imports(path):
        if name.split(".")[0] in ROOMS:
            assert any(inside(name, allowed) for allowed in OURS[room]), f"{where} imports {name}"
        fence = FENCED.get(name.split(".")[0])
        if fence is not None:
            assert where.startswith(fence), f"{where} imports {name}, which belongs in {fence}"
        if where.startswith(PURE):
            assert name.split(".")[0] not in IMPURE, f"{where} imports {name}"


def test_the_walk_sees_an_import(tmp_path: Path) -> None:
    """The fence can fail: it finds imports inside functions as well."""
    module = tmp_path / "m.py"
    module.write_text("def f():\n    import jax.numpy\n    from workers.worker import Worker\n")
    assert imports(module) == {"jax.numpy", "workers.worker"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert len(text.splitlines()) <= 600, f"{path} is longer than 600 lines: look for the second noun"

"""The rooms and the direction of imports (docs/architecture.md), held by walking every module's syntax tree."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("config", "daemon", "shm", "tensord", "workers")

#: What a room of ours may import of ours.
OURS = {
    "shm": {"shm"},
    "config": {"config", "shm.datatypes", "shm.errors", "shm.seldom", "tensord.protocol"},
    "daemon": {"daemon", "config", "shm", "tensord.protocol", "tensord.closed_loop"},
    # ``python -m tensord`` is the daemon's command; for authors of models it calls the worker's code, with what the daemon reads
    # of their folders.
    "tensord": {
        *(
            "tensord",
            "config",
            "shm.arrays",
            "shm.common",
            "shm.errors",
            "shm.messages",
            "daemon.cli",
            "daemon.processes.signals",
            "daemon.ctl",
        ),
        *(
            "daemon.models.repository",
            "workers.loading.exporting",
            "workers.models.model_version",
            "workers.local_worker",
        ),
        *(
            "workers.calls.asking",
            "workers.calls.own_metrics",
            "workers.calls.own_spans",
        ),
    },
    "workers": {"workers", "config", "shm", "tensord.parameter_files", "tensord.protocol"},
}
#: The rooms of the two large packages: each may use those that it names, which come before it in this table.
INSIDE = {
    "daemon.control": (),
    "daemon.tracing": (),
    "daemon.models": ("control",),
    "daemon.submit": ("control", "tracing"),
    "daemon.front": ("control", "tracing", "models", "submit"),
    "daemon.grpc": ("control", "tracing", "submit", "front"),
    "daemon.http": ("control", "tracing", "submit", "front"),
    "daemon.processes": ("control",),
    "daemon.parameters": ("control", "models", "processes"),
    "daemon.regions": ("control", "front"),
    "daemon.clients": ("control", "submit", "front", "parameters", "processes", "regions"),
    "daemon.operator": ("control", "tracing", "models", "parameters", "processes", "regions"),
    "daemon.metrics": ("control", "tracing", "models", "parameters", "processes", "regions", "clients", "operator"),
    # The commands and the supervisor. Fronts are other processes: it starts them and imports nothing of theirs.
    "daemon": (
        *("control", "tracing", "models", "parameters", "processes", "regions", "clients", "operator"),
        "metrics",
    ),
    "workers.scheduling": (),
    "workers.threads": (),
    "workers.jax_internals": (),
    "workers.native": (),
    "workers.tensors": ("scheduling",),
    "workers.devices": ("threads", "jax_internals"),
    "workers.regions": ("devices",),
    "workers.parameters": ("devices", "regions"),
    "workers.requests": ("scheduling", "native", "tensors", "devices", "regions"),
    "workers.calls": ("tensors", "requests"),
    "workers.python_backend": ("jax_internals", "requests", "calls"),
    "workers.imports": ("jax_internals", "calls", "python_backend"),
    "workers.programs": (
        *("scheduling", "threads", "jax_internals", "native", "tensors", "devices", "regions", "parameters"),
    ),
    "workers.processor": (
        *("threads", "jax_internals", "native", "tensors", "devices", "regions", "programs", "parameters"),
    ),
    "workers.gpu": ("jax_internals", "tensors", "devices", "regions", "programs", "parameters"),
    "workers.declarations": ("scheduling", "jax_internals", "tensors", "devices", "parameters", "programs"),
    "workers.models": (
        *("scheduling", "threads", "jax_internals", "native", "tensors", "devices", "regions", "requests"),
        *("calls", "python_backend", "imports", "programs", "declarations", "parameters"),
    ),
    "workers.loading": (
        *("scheduling", "threads", "jax_internals", "tensors", "devices", "calls", "imports", "programs"),
        *("processor", "gpu", "declarations", "models", "parameters"),
    ),
    "workers.dispatch": (
        *(
            "scheduling",
            "threads",
            "native",
            "tensors",
            "devices",
            "regions",
            "requests",
            "calls",
            "programs",
            "processor",
            "models",
            "parameters",
        ),
    ),
    "workers": (
        *("scheduling", "threads", "jax_internals", "native", "calls", "imports", "devices", "regions", "requests"),
        "programs",
        "parameters",
        *("processor", "models", "loading", "dispatch"),
    ),
}
#: Rooms that run arrays and know no requests, and what they may not name, not even for types.
ARRAYS = ("workers.tensors", "workers.parameters", "workers.programs", "workers.processor", "workers.gpu")
REQUESTS = ("workers.requests.request", "workers.models", "workers.dispatch")
#: Modules that name each other, directly or not, types included: whoever changes one has to read them all.
MOST_IN_A_CIRCLE = 12
#: Libraries that only some files may import: they are heavy, or they are a border where foreign errors stop.
FENCED = {
    "jax": ("workers/", "tensord/models.py", "tensord/parameter_files.py", "tensord/testing.py"),
    # What is not public is listed in the first; the others ask where it lies and which version it is.
    "jaxlib": (
        "workers/jax_internals/interfaces.py",
        "workers/processor/output_memory.py",
        "workers/programs/executable_cache.py",
    ),
    "cuda": ("shm/cuda_regions.py",),
    # It fetches models for a command; a daemon fetches nothing.
    "fsspec": ("daemon/fetch.py",),
    "aiohttp": ("daemon/fetch.py",),
    "posix_ipc": ("shm/regions.py",),
    "starlette": ("daemon/http/",),
    "httptools": ("daemon/http/", "daemon/metrics/scrape.py"),
    # Clients' libraries: tests and examples have them, whoever serves needs none.
    **dict.fromkeys(("grpc", "grpc_health", "grpc_reflection", "grpc_tools"), ()),
    # A command asks as clients do, where they are installed.
    **dict.fromkeys(("tensord_client", "tritonclient"), ("tensord/closed_loop.py",)),
    # What our ASGI server is compared with.
    "uvicorn": (),
    "hpack": ("daemon/grpc/",),
    "prometheus_client": ("daemon/metrics/exposition.py",),
    "pynvml": ("daemon/processes/gpu_watch.py",),
    "re2": ("config/header_pattern.py",),
    "numpy": (
        "shm/arrays.py",
        "shm/common/",
        "workers/",
        "daemon/http/",
        "daemon/grpc/",
        "tensord/closed_loop.py",
        "tensord/parameter_files.py",
        "tensord/testing.py",
    ),
}
#: Pure deciders: no device, no socket, no clock.
PURE = ("workers/scheduling/",)
IMPURE = {"jax", "socket", "select", "time", "asyncio", "threading", "os"}


def modules() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement: whether it is in a function, and whether only a type checker reads it."""

    node: ast.Import | ast.ImportFrom
    in_function: bool
    for_types: bool


@functools.cache
def read(text: str) -> tuple[str | None, list[Import]]:
    """Returns a module's docstring and its imports. The tree, a million objects of all modules, is not kept."""
    tree = ast.parse(text)
    return ast.get_docstring(tree), list(found_in(tree))


def found_in(node: ast.AST, in_function: bool = False, for_types: bool = False) -> Iterator[Import]:
    """Yields the imports within a statement. Expressions, which are most of a tree and have none, are not walked."""
    in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    is_check = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            for_types_here = for_types or (is_check and field == "body")
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                yield Import(each, in_function, for_types_here)
            else:
                yield from found_in(each, in_function, for_types_here)


def imports(path: Path, types: bool = True) -> set[str]:
    """Returns what a module imports, inside functions too; without ``types`` not what only a type checker reads."""
    found: set[str] = set()
    for each in read(path.read_text())[1]:
        if each.for_types and not types:
            continue
        if isinstance(each.node, ast.Import):
            found |= {within(alias.name) for alias in each.node.names}
        else:
            assert not each.node.level or path.parent == ROOT / "shm/common", f"{path}: relative import"
            found.add(module_of(each.node))
    return found


def module_of(node: ast.ImportFrom) -> str:
    """Returns the module that names are imported from. A relative import is of ``shm.common``, which the client has, too."""
    return f"shm.common.{node.module or ''}".rstrip(".") if node.level else within(str(node.module))


def within(name: str) -> str:
    """Removes ``tensord.`` from the names of our four packages; ``tensord.testing`` and foreign names stay."""
    rest = name.removeprefix("tensord.")
    return name if rest.partition(".")[0] not in ROOMS else rest


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("folder", ROOMS)
def test_arrows(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        goes_down(path)


def goes_down(path: Path) -> None:
    where = str(path.relative_to(ROOT))
    room = where.split("/")[0]
    for name in imports(path):
        # The package itself imports nothing, and says its version.
        if name != "tensord" and name.split(".")[0] in ROOMS:
            assert any(inside(name, allowed) for allowed in OURS[room]), f"{where} imports {name}"
        fence = FENCED.get(name.split(".")[0])
        if fence is not None:
            assert where.startswith(fence), f"{where} imports {name}, which belongs in {fence}"
        if inside(name, "jax._src") or inside(name, "jax.interpreters"):
            assert where == "workers/jax_internals/interfaces.py", f"{where} imports {name}, which is not public"
        if where.startswith(PURE):
            assert name.split(".")[0] not in IMPURE, f"{where} imports {name}"


def room_of(module: str) -> str:
    """Returns the package or subpackage that a module belongs to: ``daemon.http.server`` -> ``daemon.http``."""
    parts = module.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in INSIDE else parts[0]


def test_rooms_use_lower_ones_only() -> None:
    """Imports for type checkers alone may come from above: that is better than a second class that mirrors the first."""
    known = names()
    rooms = {
        name
        for name, path in known.items()
        if path.name == "__init__.py" and name.split(".")[0] in ("daemon", "workers")
    }
    assert rooms == set(INSIDE), "every room says in INSIDE what it uses"
    before: set[str] = set()
    for room, used in INSIDE.items():
        package = room.split(".")[0]
        lower = {f"{package}.{name}" for name in used}
        assert lower <= before, f"{room} names rooms that do not come before it"
        before.add(room)
        for module, path in known.items():
            if room_of(module) == room:
                used_here = {room_of(name) for name in imports(path, types=False) if name.split(".")[0] == package}
                assert used_here <= {room, *lower}, f"{module} uses {sorted(used_here - {room, *lower})}"


def test_programs_know_no_requests() -> None:
    for module, path in names().items():
        if module.startswith(ARRAYS):
            above = [name for name in imports(path) if any(inside(name, upper) for upper in REQUESTS)]
            assert above == [], f"{module} names {above}"


def test_the_walk_sees_an_import(tmp_path: Path) -> None:
    """The fence can fail: it finds imports inside functions as well."""
    module = tmp_path / "m.py"
    module.write_text("def f():\n    import jax.numpy\n    from tensord.workers.worker import Worker\n")
    assert imports(module) == {"jax.numpy", "workers.worker"}
    module.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n")
    assert imports(module) == {"typing", "b", "c"}
    assert imports(module, types=False) == {"typing", "c"}


def names() -> dict[str, Path]:
    """Returns our modules: name -> file."""
    found = {}
    for path in modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(text: str, known: Collection[str], types: bool = False) -> set[str]:
    """Returns the modules in ``known`` that one imports when it is imported; with ``types`` also those for a type checker."""
    found: set[str] = set()
    for each in read(text)[1]:
        if each.in_function or (each.for_types and not types):
            continue
        if isinstance(each.node, ast.Import):
            found |= {within(alias.name) for alias in each.node.names}
        else:
            module = module_of(each.node)
            # Of ours the modules rather than names in them.
            inside_it = {within(f"{module}.{alias.name}") for alias in each.node.names}
            found |= inside_it.intersection(known) or {module}
    return found.intersection(known)


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Returns the largest sets of modules that all import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph[module]
        reached[start] = seen
    return [
        {module} | {other for other in reached[module] if module in reached[other]}
        for module in graph
        if module in reached[module] and module == min({other for other in reached[module] if module in reached[other]})
    ]


def test_no_module_needs_itself() -> None:
    known = names()
    assert circles({name: arrows(path.read_text(), known) for name, path in known.items()}) == []


def test_few_modules_name_each_other() -> None:
    known = names()
    graph = {name: arrows(path.read_text(), known, types=True) for name, path in known.items()}
    assert [circle for circle in circles(graph) if len(circle) > MOST_IN_A_CIRCLE] == []


def test_no_module_of_the_client_needs_itself() -> None:
    """Not even for its types."""
    paths = [path for path in (ROOT / "client/tensord_client").iterdir() if path.suffix in (".py", ".pyi")]
    known = {f"tensord_client.{path.stem}": path for path in paths}
    graph = {name: arrows(path.read_text(), known, types=True) for name, path in known.items()}
    assert graph["tensord_client.lane"] >= {"tensord_client.lane_request", "tensord_client.native"}
    assert circles(graph) == []


def test_circles_are_found() -> None:
    source = (
        "from typing import TYPE_CHECKING\nimport a.b\nfrom a import c, d\nif TYPE_CHECKING:\n    from e import F\n"
    )
    source += "def f():\n    import g\n"
    known = ("a", "a.b", "a.c", "e", "g")
    assert arrows(source, known) == {"a.b", "a.c"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}, "e": set()}) == [{"b", "c"}, {"d"}]


def test_every_module_says_what_it_is() -> None:
    for path in modules():
        assert read(path.read_text())[0], f"{path} has no docstring"


@pytest.mark.parametrize("folder", [*ROOMS, "bench", "client", "deploy", "examples", "tests"])
def test_a_module_is_one_noun(folder: str) -> None:
    """Whoever finds a longer one looks for the second noun in it. Files of tests are lists, and may be longer."""
    paths = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
    # What an earlier build of the client has left is no module.
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in paths if "build" not in path.parts}
    assert {path: count for path, count in lines.items() if count > 700 and not path.name.startswith("test_")} == {}

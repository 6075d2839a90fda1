"""JAX's own cache in our directory: asked by JAX, sealed like the rest, and silent about what is stored as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensord.workers.programs.cache_directory import CacheDirectory
from tests import prepared

#: Compiles a program nobody planned, and one that is stored; says what JAX was answered and what came out.
SCRIPT = """
import json, sys
from pathlib import Path
import jax, jax.monitoring
import numpy as np
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executable_cache import use_persistent_cache
from tensord.workers.programs.placement import CompiledProgram, Placement
from tests.workers.parameters.made_sets import loaded

answered = []
jax.monitoring.register_event_listener(lambda event, **_: answered.append(event) if event.endswith("cache_hits") else None)
directory = CacheDirectory(Path(sys.argv[1]))
programs = use_persistent_cache(directory)
assert programs is not None
cache = ExecutableCache(directory, programs)
x = np.arange(4, dtype=np.float32)
unplanned = jax.jit(lambda x: x * 3 + 1).lower(x).compile()(x)
make = lambda: CompiledProgram(jax.jit(lambda x: x * 3 + 1).lower(x).compile(), Placement(loaded(None)))
planned = cache.make(cache.key(["planned"]), "planned", make).call
print(json.dumps({"answered": len(answered), "unplanned": unplanned.tolist(), "planned": planned(x).tolist()}))
"""


def run(folder: Path) -> dict[str, Any]:
    return dict(json.loads(prepared.run_script(SCRIPT, str(folder))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_second_start(folder: Path) -> None:
    """JAX is answered for what nobody planned, and never for what is stored whole: that must come from the compiler."""
    values = [1.0, 4.0, 7.0, 10.0]
    assert run(folder) == {"answered": 0, "unplanned": values, "planned": values}
    programs = {path.name for path in folder.glob("*.program")}
    assert len(programs) == 1
    assert run(folder) == {"answered": 1, "unplanned": values, "planned": values}
    assert {path.name for path in folder.glob("*.program")} == programs
    assert len(list(folder.glob("*.executable"))) == 1


def test_a_program_of_somebody_else_is_not_run(folder: Path) -> None:
    """Whole for JAX, and not sealed by us: removed, compiled again, kept again."""
    run(folder)
    (path,) = folder.glob("*.program")
    content = CacheDirectory(folder).read(path.name)
    assert content is not None
    path.write_bytes(content)
    assert run(folder)["answered"] == 0
    assert CacheDirectory(folder).read(path.name) is not None
    assert run(folder)["answered"] == 1

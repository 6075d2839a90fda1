"""Control groups of memory as three readers see them: sizes that are a part of the host, models that need more, kills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tensord.config import control_groups, layers
from tensord.config.control_groups import memory_groups
from tensord.config.layers import ConfigurationError, Setting
from tensord.config.options import Expert
from tensord.daemon.processes.process_slots import ProcessSlots
from tensord.shm.errors import Internal
from tensord.workers.devices import device_memory

MIB = 1 << 20
V2 = "0::/system.slice/tensord.service\n"
V1 = "5:cpu:/\n4:cpuset,memory:/system.slice/tensord.service\n0::/\n"
#: Names of a version's files, and of the page cache and its shared memory.
NAMES = {
    2: ("memory.max", "memory.current", "memory.events", "file", "shmem"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_cache", "total_shmem"),
}


class Tree:
    """A tree of control groups, and the process that is in one of them."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder / "cgroup"
        self._own = folder / "own"
        self._own.write_text({1: V1, 2: V2}[version])
        self.version = version

    def group(self, path: str) -> Path:
        return self.folder / ("memory" if self.version == 1 else "") / path

    def write(self, path: str, limit: str, used: int = 0, cache: int = 0, shared: int = 0, kills: int = 0) -> None:
        """Writes a group's files; sizes are MiB."""
        names, group = NAMES[self.version], self.group(path)
        group.mkdir(parents=True, exist_ok=True)
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{used * MIB}\n")
        (group / names[2]).write_text(f"oom 7\noom_kill {kills}\noom_group_kill 9\n")
        (group / "memory.stat").write_text(f"anon 1\n{names[3]} {cache * MIB}\n{names[4]} {shared * MIB}\n")


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def tree(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path, request.param)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_ROOT", made.folder)
    monkeypatch.setattr(control_groups, "host_byte_size", control_groups.host_byte_size.__wrapped__)
    return made


@pytest.fixture
def cpu() -> list[object]:
    return [SimpleNamespace(platform="cpu")]


class Kills:
    """Asks the slots of the daemon's processes whether a process that was killed lacked memory."""

    def __init__(self) -> None:
        self._slots = ProcessSlots(Expert(), lambda _: False, lambda _: False)

    def grew(self) -> bool:
        dead: Any = SimpleNamespace(killed_by_others=True)
        self._slots.look(dead)
        return bool(dead.out_of_memory)


def test_the_own_group_and_all_around_it_are_read(tree: Tree, cpu: list[object]) -> None:
    """A service's ``MemoryMax=`` is not in the root group of the host, and a slice may allow less than its service."""
    wanted = [tree.group(path) for path in ("system.slice/tensord.service", "system.slice", "")]
    assert [group.folder for group in memory_groups()][: len(wanted)] == wanted
    for path, limit in (("system.slice/tensord.service", 100), ("system.slice", 90), ("", 80)):
        tree.write(path, str(limit * MIB), used=50, cache=30, shared=10)
        assert control_groups.host_byte_size() == limit * MIB
        # The cache counts as free, but for memory that is shared.
        device_memory.check("m", "its parameters need", (limit - 30) * MIB, cpu)  # type: ignore[arg-type]
        with pytest.raises(Internal, match=f"need {(limit - 30) * MIB + 1} bytes .*, {(limit - 30) * MIB} are left"):
            device_memory.check("m", "its parameters need", (limit - 30) * MIB + 1, cpu)  # type: ignore[arg-type]


def test_a_container_sees_its_group_as_the_root(tree: Tree, cpu: list[object]) -> None:
    tree.write("", str(64 * MIB), used=60, kills=3)
    assert control_groups.host_byte_size() == 64 * MIB
    with pytest.raises(Internal, match="are left"):
        device_memory.check("m", "its parameters need", 5 * MIB, cpu)  # type: ignore[arg-type]
    kills = Kills()
    tree.write("", str(64 * MIB), kills=4)
    assert kills.grew()


def test_no_limit(tree: Tree) -> None:
    """Version 1 writes a number in its place."""
    tree.write("system.slice/tensord.service", "9223372036854771712" if tree.group("") != tree.folder else "max", 10)
    assert control_groups.host_byte_size() == psutil.virtual_memory().total
    left = memory_groups()[0].left
    assert left is None or left > 1 << 60


def test_the_innermost_group_that_counts_kills_tells_them_once(tree: Tree) -> None:
    for path in ("", "system.slice", "system.slice/tensord.service"):
        tree.write(path, "max", kills=4)
    kills = Kills()
    assert not kills.grew()
    for path in ("", "system.slice"):
        tree.write(path, "max", kills=9)
    assert not kills.grew()
    tree.write("system.slice/tensord.service", "max", kills=6)
    assert kills.grew()
    assert not kills.grew()


def test_a_host_without(tree: Tree) -> None:
    assert {group.limit for group in memory_groups()} == {group.left for group in memory_groups()} == {None}
    assert not Kills().grew()
    control_groups._OWN.unlink()
    assert [group.folder for group in memory_groups()] == [tree.folder, tree.folder / "memory"]


@pytest.mark.parametrize("content", [None, "", "oom_kill\n", "oom_kill many\n", "oom 3\n"])
def test_a_counter_that_says_nothing(tree: Tree, content: str | None) -> None:
    tree.write("", "max", kills=4)
    kills, file = Kills(), tree.group("") / NAMES[tree.version][2]
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert not kills.grew()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("host", "arena", "pinned"),
    [
        (2 * GIB, GIB, GIB),
        (128 * GIB, 2 * GIB, 8 * GIB),
        (512 * GIB, 8 * GIB, 32 * GIB),
        (4096 * GIB, 16 * GIB, 64 * GIB),
    ],
)
def test_parts_of_it(monkeypatch: pytest.MonkeyPatch, host: int, arena: int, pinned: int) -> None:
    monkeypatch.setattr(control_groups, "host_byte_size", lambda: host)
    options = layers.read().options
    assert (options.arenas.max_byte_size, options.workers.pinned_byte_size) == (arena, pinned)
    # Also where an operator says so, and as a text; a number is that number.
    given = [Setting("arenas.max_byte_size", "auto", "X", textual=True), Setting("workers.pinned_byte_size", 0, "Y")]
    options = layers.read(flags=given).options
    assert (options.arenas.max_byte_size, options.workers.pinned_byte_size) == (arena, 0)


def test_nothing_else_is_a_part_of_it() -> None:
    with pytest.raises(ConfigurationError, match=r"arenas\.byte_size"):
        layers.read(flags=[Setting("arenas.byte_size", "auto", "X")])

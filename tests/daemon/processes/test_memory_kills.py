"""Kills for want of memory are told by the control group's own counter, wherever that lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.daemon.processes.memory_kills import MemoryKills, _own_file

V2 = "0::/system.slice/tensord.service\n"
V1 = "5:cpu:/\n4:cpuset,memory:/system.slice/tensord.service\n0::/\n"


def counter(folder: Path, name: str, kills: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"low 0\nhigh 12\nmax 3\noom 7\noom_kill {kills}\noom_group_kill 9\n")
    return file


def test_each_kill_is_told_once(tmp_path: Path) -> None:
    kills = MemoryKills(counter(tmp_path, "memory.events", 4))
    assert not kills.grew()
    counter(tmp_path, "memory.events", 6)
    assert kills.grew()
    assert not kills.grew()


@pytest.mark.parametrize("content", [None, "", "oom_kill\n", "oom_kill many\n", "oom 3\n"])
def test_a_counter_that_says_nothing(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "memory.events"
    kills = MemoryKills(file)
    if content is not None:
        file.write_text(content)
    assert not kills.grew()
    assert not MemoryKills(None).grew()


@pytest.mark.parametrize(
    ("groups", "lies", "name"),
    [
        (V2, "system.slice/tensord.service", "memory.events"),
        # In a container, whose own group is the root that it sees.
        (V2, ".", "memory.events"),
        (V1, "memory/system.slice/tensord.service", "memory.oom_control"),
        (V1, "memory", "memory.oom_control"),
    ],
)
def test_where_it_lies(tmp_path: Path, groups: str, lies: str, name: str) -> None:
    file = counter(tmp_path / lies, name, 0)
    found = _own_file(groups, tmp_path)
    assert found is not None
    assert found.samefile(file)


def test_a_host_without(tmp_path: Path) -> None:
    assert _own_file(V2, tmp_path) is None
    assert _own_file("", tmp_path) is None
    MemoryKills.own().grew()  # whatever this host has

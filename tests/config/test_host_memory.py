"""Sizes that are a part of the host's memory, within what its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tensord.config import host_memory, layers
from tensord.config.layers import ConfigurationError, Setting

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes control groups without limits, with this process in the group ``a/b``; yields their root."""
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    real = host_memory._groups
    monkeypatch.setattr(host_memory, "_groups", lambda *_: real(tmp_path / "cgroup", tmp_path / "root"))
    host_memory.host_byte_size.cache_clear()
    yield tmp_path / "root"
    host_memory.host_byte_size.cache_clear()


def test_it_is_the_kernels_or_what_any_group_around_allows(groups: Path) -> None:
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert host_memory.host_byte_size() == psutil.virtual_memory().total
    for folder, allowed in ((groups / "a" / "b", 900 << 20), (groups / "a", 800 << 20), (groups, 700 << 20)):
        (folder / "memory.max").write_text(f"{allowed}\n")
        host_memory.host_byte_size.cache_clear()
        assert host_memory.host_byte_size() == allowed


def test_in_version_1_as_well(groups: Path) -> None:
    (groups.parent / "cgroup").write_text("3:cpu,cpuacct:/x\n4:memory:/c\n")
    (groups / "memory" / "c").mkdir(parents=True)
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (groups / "memory" / "c" / "memory.limit_in_bytes").write_text(f"{600 << 20}\n")
    assert host_memory.host_byte_size() == 600 << 20


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
    monkeypatch.setattr(host_memory, "host_byte_size", lambda: host)
    options = layers.load()
    assert (options.arenas.max_byte_size, options.workers.pinned_byte_size) == (arena, pinned)
    # Also where an operator says so, and as a text; a number is that number.
    given = [Setting("arenas.max_byte_size", "auto", "X", textual=True), Setting("workers.pinned_byte_size", 0, "Y")]
    options = layers.load(flags=given)
    assert (options.arenas.max_byte_size, options.workers.pinned_byte_size) == (arena, 0)


def test_nothing_else_is_a_part_of_it() -> None:
    with pytest.raises(ConfigurationError, match=r"arenas\.byte_size"):
        layers.load(flags=[Setting("arenas.byte_size", "auto", "X")])

"""Sizes that are a part of the host's memory; ``test_control_groups`` tests how much that is."""

from __future__ import annotations

import pytest

from tensord.config import control_groups, layers
from tensord.config.layers import ConfigurationError, Setting

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
    options = layers.load()
    assert (options.arenas.max_byte_size, options.workers.pinned_byte_size) == (arena, pinned)
    # Also where an operator says so, and as a text; a number is that number.
    given = [Setting("arenas.max_byte_size", "auto", "X", textual=True), Setting("workers.pinned_byte_size", 0, "Y")]
    options = layers.load(flags=given)
    assert (options.arenas.max_byte_size, options.workers.pinned_byte_size) == (arena, 0)


def test_nothing_else_is_a_part_of_it() -> None:
    with pytest.raises(ConfigurationError, match=r"arenas\.byte_size"):
        layers.load(flags=[Setting("arenas.byte_size", "auto", "X")])

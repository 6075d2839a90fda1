"""Sets how many examples the generated tests try."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Returns how many of ``count`` are tried: all with ``--hypothesis-profile=search``, two fifths in ordinary runs."""
    return max(1, count * settings.default.max_examples // 100)

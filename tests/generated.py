"""Sets how many examples the generated tests try, and how often tests repeat what shows little more each time."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Returns how many of ``count`` are tried: all with ``--hypothesis-profile=search``, two fifths in ordinary runs."""
    return max(1, count * settings.default.max_examples // 100)


def times(release: int, ordinary: int) -> int:
    """Returns how often a test repeats something: ``release`` times with ``--hypothesis-profile=search``, else ``ordinary``."""
    return release if settings.default.max_examples >= 100 else ordinary

"""Clients that take their memory away: what a driver makes of pages that are gone only hardware can show."""

from __future__ import annotations

from tests.faults.test_hostile_regions import (  # noqa: F401
    test_a_truncated_input,
    test_a_truncated_output,
    test_truncated_and_grown_all_the_time,
)

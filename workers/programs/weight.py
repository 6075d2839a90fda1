"""Estimates a compiled program's work before it runs, in relation to the cost of a call.

XLA knows a program's floating-point operations and the bytes that they read and write. For a loop it counts one iteration, and
for calls outside of XLA nothing, so a program with loops or such calls may take any time. No time is measured.
"""

from __future__ import annotations

import enum
import math
import re
from typing import NamedTuple

import jax

#: Operations whose cost XLA does not count, as the text of a program has them, compiled or only lowered.
_UNCOUNTED = re.compile(r" (while|custom-call)\(|stablehlo\.(while|custom_call)\b")
Program = jax.stages.Lowered | jax.stages.Compiled


class Weight(enum.IntEnum):
    """Class of a program by its work, compared with the cost of calling it (some ten microseconds)."""

    #: More than a call, or not known.
    HEAVY = 0
    #: About as much as a call.
    LIGHT = 1
    #: Much less than a call.
    TINY = 2


class Most(NamedTuple):
    """An upper bound on a program's work: its floating-point operations, and the bytes that it reads and writes."""

    flops: int
    byte_size: int


#: Floating-point operations in a sine or an exponential, which XLA counts apart.
_TRANSCENDENTAL = 16
#: One core does a few of either in a nanosecond.
_LIGHT = Most(1 << 18, 512 << 10)
_TINY = Most(1 << 14, 64 << 10)

#: Operations or bytes that programs may do in one iteration of the loop: about a millisecond of one core.
_ITERATION = 1 << 22


def work_of(program: Program) -> tuple[float, float]:
    """Returns a program's floating-point operations, and the bytes that it reads and writes; -1: unknown."""
    cost = program.cost_analysis() or {}
    flops = cost.get("flops", -1.0)
    if flops >= 0:
        flops += _TRANSCENDENTAL * cost.get("transcendentals", 0.0)
    return flops, cost.get("bytes accessed", -1.0)


def is_within(program: Program, most: Most, text: Program | None = None) -> bool:
    """Returns whether a program's work is known and at most ``most``.

    ``text``: the program that is searched for operations that XLA does not count; None: ``program``.
    """
    flops, byte_size = work_of(program)
    if not (0 <= flops <= most.flops and 0 <= byte_size <= most.byte_size):
        return False
    return not _UNCOUNTED.search((text or program).as_text() or "")


def share_of(program: Program) -> float:
    """Returns a program's work as a fraction of what may run in one iteration of the loop; infinite: above 1 or unknown."""
    share = sum(work_of(program)) / _ITERATION
    return share if share <= 1 and is_within(program, Most(_ITERATION, _ITERATION)) else math.inf


def weight_of(program: Program) -> Weight:
    """Returns the weight class of a program; HEAVY: more work than LIGHT, or unknown."""
    if not is_within(program, _LIGHT):
        return Weight.HEAVY
    flops, byte_size = work_of(program)
    return Weight.TINY if flops <= _TINY.flops and byte_size <= _TINY.byte_size else Weight.LIGHT

"""The work of a compiled program beside the cost of calling it, read from the program before it ever runs.

XLA tells of a program its floating-point operations and the bytes that its operations read and write. It counts one iteration of
a loop, and nothing of what is called outside of XLA: a program with either may take any time. No clock is asked, so a program
weighs the same on every host, on a busy one too.
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
    """A program's work, compared with the cost of a call (some ten microseconds)."""

    #: More than a call, or not known.
    HEAVY = 0
    #: About as much as a call.
    LIGHT = 1
    #: Much less than a call.
    TINY = 2


class Most(NamedTuple):
    """A bound of the work of a program."""

    flops: int
    byte_size: int


#: Floating-point operations in a sine or an exponential, which XLA counts apart.
_TRANSCENDENTAL = 16
#: One core does a few of either in a nanosecond.
_LIGHT = Most(1 << 18, 512 << 10)
_TINY = Most(1 << 14, 64 << 10)

#: Operations, or bytes, that the loop has programs do before it looks at anything else: about a millisecond of one core.
_ITERATION = 1 << 22


def work_of(program: Program) -> tuple[float, float]:
    """Returns the floating-point operations of a program and the bytes they read and write; -1: XLA does not tell."""
    cost = program.cost_analysis() or {}
    flops = cost.get("flops", -1.0)
    if flops >= 0:
        flops += _TRANSCENDENTAL * cost.get("transcendentals", 0.0)
    return flops, cost.get("bytes accessed", -1.0)


def is_within(program: Program, most: Most, text: Program | None = None) -> bool:
    """Whether a program has no more to do than that. One whose cost is not known, or not wholly, has more.

    ``text``: where it is looked for what is not counted, if not in the program.
    """
    flops, byte_size = work_of(program)
    if not (0 <= flops <= most.flops and 0 <= byte_size <= most.byte_size):
        return False
    return not _UNCOUNTED.search((text or program).as_text() or "")


def share_of(program: Program) -> float:
    """Returns what a program has to do as a part of one iteration of the loop; infinite: more than that, or not known."""
    share = sum(work_of(program)) / _ITERATION
    return share if share <= 1 and is_within(program, Most(_ITERATION, _ITERATION)) else math.inf


def weight_of(program: Program) -> Weight:
    """Returns the weight of a program. One whose cost XLA does not tell is heavy."""
    if not is_within(program, _LIGHT):
        return Weight.HEAVY
    flops, byte_size = work_of(program)
    return Weight.TINY if flops <= _TINY.flops and byte_size <= _TINY.byte_size else Weight.LIGHT

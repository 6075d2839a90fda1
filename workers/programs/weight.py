"""Estimates how much work a program does in one call, compared with what the call itself costs.

XLA counts a program's floating-point operations, and the bytes that it reads and writes. The work counts as unknown if the
program has while loops or custom calls.
"""

from __future__ import annotations

import enum
import re

import jax

#: Operations whose cost XLA does not count, as the text of a program has them, compiled or only lowered.
_UNCOUNTED = re.compile(r" (while|custom-call)\(|stablehlo\.(while|custom_call)\b")
Program = jax.stages.Lowered | jax.stages.Compiled


class Weight(enum.IntEnum):
    """The size of a program's work, compared with the cost of calling the program, which is some ten microseconds."""

    #: More than a call, or not known.
    HEAVY = 0
    #: About as much as a call.
    LIGHT = 1
    #: Much less than a call.
    TINY = 2


#: Floating-point operations in a sine or an exponential, which XLA counts apart.
_TRANSCENDENTAL = 16
#: One core does a few of either in a nanosecond.
_LIGHT = (1 << 18, 512 << 10)
_TINY = (1 << 14, 64 << 10)

#: Operations or bytes that programs may do in one iteration of the loop: about a millisecond of one core.
ITERATION = 1 << 22


def work_of(program: Program) -> tuple[float, float]:
    """Returns a program's floating-point operations and its bytes read and written. Each number is -1 if XLA cannot tell it."""
    cost = program.cost_analysis() or {}
    flops = cost.get("flops", -1.0)
    if flops >= 0:
        flops += _TRANSCENDENTAL * cost.get("transcendentals", 0.0)
    return flops, cost.get("bytes accessed", -1.0)


def is_within(program: Program, most: tuple[float, float], text: Program | None = None) -> bool:
    """Returns whether a program does no more work than ``most``, a pair (floating-point operations, bytes read and written).

    Returns False if the work is unknown. For example, it is unknown if the program has while loops or custom calls.
    ``text``: the program before its compilation, which is searched for loops and custom calls; None: ``program`` is searched.
    """
    known = all(0 <= own <= bound for own, bound in zip(work_of(program), most, strict=True))
    return known and not _UNCOUNTED.search((text or program).as_text() or "")


def weight_of(program: Program) -> Weight:
    """Estimates how much work a program does, compared with the cost of calling it. Returns HEAVY if the work is unknown."""
    if not is_within(program, _LIGHT):
        return Weight.HEAVY
    return Weight.TINY if is_within(program, _TINY) else Weight.LIGHT

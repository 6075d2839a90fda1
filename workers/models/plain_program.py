"""Programs that only compute: no value in them decides what is read, written or run.

The memory an output is written to may be a client's, who can change it at any moment, and XLA uses such memory for intermediate
results as well. In a plain program that makes wrong numbers, the client's own. In any other it could make a wrong index, or upset
a sort that trusts its data to hold still.
"""

from __future__ import annotations

import re
from typing import Any

#: XLA's names. None of them takes an index, a count or a condition from a tensor; what they call is part of the program's text.
_PLAIN = frozenset(
    re.findall(
        r"\S+",
        """
        abs add and atan2 bitcast bitcast-convert broadcast call cbrt ceil clamp compare complex concatenate constant
        convert convolution copy cosine count-leading-zeros divide dot erf exponential exponential-minus-one floor fusion
        get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or pad
        parameter popcnt power real reduce reduce-precision reduce-window remainder reshape reverse round-nearest-afz
        round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine slice sqrt subtract
        tan tanh transpose tuple xor
        """,
    )
)
#: A name, the type of its result, what it does. Every indented line is one.
_INSTRUCTION = re.compile(r" +(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(")


def is_plain(compiled: Any) -> bool:
    """Of a ``jax.stages.Compiled``. One whose text cannot be had, or read, is not."""
    try:
        text = compiled.as_text()
    except Exception:  # it is not made for every back end
        return False
    found = [_INSTRUCTION.match(line) for line in (text or "").split("\n") if line.startswith(" ")]
    return bool(found) and all(one is not None and one[1] in _PLAIN for one in found)

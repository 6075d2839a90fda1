"""A decoupled model, and what it answers: several responses to a request, and to some an error behind them."""

from __future__ import annotations

MODEL = "d"
#: How many responses a request gets, by its input.
_COUNTS = (1, 3, 0, 20, 40, 8)
_FAILS = 5
#: Of some inputs there is no end: their clients leave.
_ENDLESS, _NO_END = 11, 1 << 30
#: What the model says where it fails; and the daemon, where a request wants one response and there are none or several, or where
#: it is asked in a way for models with one.
FAILED, NOT_ONE, REFUSED = "the model fails", "exactly 1 response", "support models with decoupled transaction policy"
#: ``y`` of a response: as of the other models. ``at``: which of the responses it is.
SOURCE = f"""
import numpy as np
from tensord.models import InvalidArgument

host = True
inputs = {{{{"x": "INT64[n]"}}}}
outputs = {{{{"y": "INT64[n]", "at": "INT64[1]"}}}}

def create(path, config, device):
    def apply(params, inputs):
        x = inputs["x"]
        for at in range({_COUNTS}[x[0] % {len(_COUNTS)}] if x[0] % {_ENDLESS} else {_NO_END}):
            yield {{{{"y": x * 1000000000 + {{files}} * 10000 + int(params["k"]), "at": np.array([at])}}}}
        if x[0] % {_FAILS} == 0:
            raise InvalidArgument("{FAILED}")
    return apply, {{{{"k": np.int32(0)}}}}
"""


def count(x: int) -> int:
    """Returns how many responses a request with that input gets, before its end or its error."""
    return _COUNTS[x % len(_COUNTS)] if x % _ENDLESS else _NO_END


def leaves(x: int, got: int) -> bool:
    """Returns whether the client of a request with that input leaves after so many responses."""
    return x % _ENDLESS == 0 and got > x % 7


def fails(x: int) -> bool:
    return x % _FAILS == 0


def why_error(message: str, x: int, got: int, single: bool) -> str:
    """Returns why a request with that input may end with an error, after ``got`` responses; "": the model says no such thing.

    ``single``: it wants one response.
    """
    if single and NOT_ONE in message and (count(x) > 1 or not (count(x) or fails(x))):
        return "it has another number of responses"
    whole = count(x) < 2 if single else got == count(x)
    return "the model fails behind its last response" if message == FAILED and fails(x) and whole else ""

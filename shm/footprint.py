"""What a loaded model version takes on one worker, as it was when it was loaded. A pure value."""

from __future__ import annotations

import msgspec


class Footprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a model that is not compiled, only the time is known."""

    #: From its files to its last program, run once.
    seconds: float = 0.0
    #: Programs that were made, and how many of them had to be compiled; the others came from the cache.
    programs: int = 0
    compiled: int = 0
    #: Of the parameters on the device.
    parameter_byte_size: int = 0
    #: Of all programs, as they are kept.
    program_byte_size: int = 0
    #: Inputs, outputs and what lies between them, of the program that takes most; and what that is for.
    batch_byte_size: int = 0
    largest: str = ""
    #: Floating-point operations of one run of it; -1: the back end does not say.
    flops: float = -1.0

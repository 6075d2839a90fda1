"""Counts, decodes and encodes the elements of BYTES tensors, in C if the C extension was built, else in Python.

The C functions block all other Python threads. To decode or encode millions of elements, call them for a few thousand elements
at a time. This module does not import numpy.
"""

from __future__ import annotations

from tensord.shm.common import strings
from tensord.shm.extensions import check

try:
    from tensord.shm import _strings

    check(_strings)
except ImportError:  # not built, or not from these sources
    count, decode, encode = strings.count, strings.decode, strings.encode
else:
    count, decode, encode = _strings.count, _strings.decode, _strings.encode

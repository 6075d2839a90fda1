"""Counts, decodes and encodes the elements of BYTES tensors: in C where that could be built, else in Python. No numpy here.

Millions of elements take a second in Python. Who decodes or encodes so many calls ``decode`` and ``encode`` for a few thousand at
a time, because in C no other thread of Python runs meanwhile.
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

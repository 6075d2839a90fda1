"""Builds the client's C extension, which setup.cfg cannot declare.

If the extension cannot be compiled, the package installs without it, and the client sends requests over HTTP.
"""

import zlib
from pathlib import Path

from setuptools import Extension, setup

#: The sources of the part in C, those that ``tensord_client.native.SOURCES`` names, in the same order.
_NAMES = ("_exchange.c", "_lane.c", "_lane.h", "_repeated.c", "_spin.c", "common/include/tensord_wire.h")
_SOURCES = [f"tensord_client/{name}" for name in _NAMES]
_CHECKSUM = 0
for _source in _SOURCES:
    _CHECKSUM = zlib.crc32((Path(__file__).parent / _source).read_bytes(), _CHECKSUM)

setup(
    ext_modules=[
        Extension(
            "tensord_client._lane",
            [name for name in _SOURCES if name.endswith(".c")],
            depends=[name for name in _SOURCES if name.endswith(".h")],
            # Whoever imports it sees whether it is of the source beside it.
            define_macros=[("SOURCE", f"{_CHECKSUM}L")],
            py_limited_api=True,
            optional=True,
            extra_compile_args=["-Os", "-fno-plt", "-g0", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra"],
        )
    ]
)

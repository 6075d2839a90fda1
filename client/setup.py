"""Builds the client's optional part in C, which setup.cfg cannot declare.

If it cannot be compiled the package installs without it.
"""

import zlib
from pathlib import Path

from setuptools import Extension, setup

_SOURCE = "tensord_client/_exchange.c"

setup(
    ext_modules=[
        Extension(
            "tensord_client._exchange",
            [_SOURCE],
            # Whoever imports it sees whether it is of the source beside it.
            define_macros=[("SOURCE", f"{zlib.crc32((Path(__file__).parent / _SOURCE).read_bytes())}L")],
            py_limited_api=True,
            optional=True,
            extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra"],
        )
    ]
)

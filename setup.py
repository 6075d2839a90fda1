"""The one thing setup.cfg cannot say: the C extensions. Everything else is in setup.cfg."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))  # where an isolated build does not look


def extension(room: str, name: str, *others: str) -> Extension:
    """Describes ``tensord.ROOM.NAME``, made of NAME.c and others; where it cannot be compiled the package still installs.

    ``others``: paths relative to the room's folder.
    """
    from tensord.shm.extensions import sources

    names = (f"{name}.c", *others)
    files = [os.path.normpath(f"tensord/{room}/{file}") for file in names]
    return Extension(
        f"tensord.{room.replace('/', '.')}.{name}",
        [file for file in files if file.endswith(".c")],
        depends=[file for file in files if file.endswith(".h")],
        # Whoever imports it sees whether it is of the sources beside it.
        define_macros=[("SOURCES", f'"{sources(_HERE / "tensord" / room, names)}"')],
        py_limited_api=True,
        optional=True,
        extra_compile_args=["-O2", "-g0", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra"],
    )


# Without the guard a client's region is never mapped, without the others requests take longer.
setup(
    ext_modules=[
        extension("shm", "_guard", "_python.h"),
        extension("shm", "_strings", "_python.h"),
        extension("daemon/grpc", "_hpack", "../../shm/_python.h"),
        extension("daemon/grpc", "_walk", "../../shm/_python.h"),
        extension(
            "workers/native",
            "_native",
            "_arrivals.c",
            "_fast_path.c",
            "_lanes.c",
            "_native.h",
            "../../shm/_python.h",
            "../../shm/common/include/tensord_wire.h",
            "_output_memory.c",
            "_plans.c",
            "_runs.c",
            "_sequences.c",
        ),
    ]
)

"""The one thing setup.cfg cannot say: the C extensions. Everything else is in setup.cfg."""

import sys
from pathlib import Path

from setuptools import Extension, setup

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))  # where an isolated build does not look


def extension(room: str, name: str, *others: str) -> Extension:
    """Describes ``tensord.ROOM.NAME``, made of NAME.c and others; where it cannot be compiled the package still installs."""
    from tensord.shm.extensions import sources

    files = [f"tensord/{room}/{file}" for file in (f"{name}.c", *others)]
    return Extension(
        f"tensord.{room.replace('/', '.')}.{name}",
        [file for file in files if file.endswith(".c")],
        depends=[file for file in files if file.endswith(".h")],
        # Whoever imports it sees whether it is of the sources beside it.
        define_macros=[("SOURCES", f'"{sources([_HERE / file for file in files])}"')],
        py_limited_api=True,
        optional=True,
        extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra"],
    )


# Without the guard a client's region is never mapped, without the others requests take longer.
setup(
    ext_modules=[
        extension("shm", "_guard"),
        extension("daemon/grpc", "_hpack"),
        extension("daemon/grpc", "_walk"),
        extension(
            "workers/native",
            "_native",
            "_arrivals.c",
            "_fast_path.c",
            "_lanes.c",
            "_native.h",
            "_output_memory.c",
            "_plans.c",
            "_records.c",
            "_runs.c",
            "_sequences.c",
            "_single_runs.c",
        ),
    ]
)

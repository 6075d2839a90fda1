"""The one thing setup.cfg cannot say: the C extensions. Everything else is in setup.cfg."""

import sys
from pathlib import Path

from setuptools import Extension, setup

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))  # where an isolated build does not look


def extension(room: str, name: str, *headers: str) -> Extension:
    """``tensord/ROOM/NAME.c`` as ``tensord.ROOM.NAME``; where it cannot be compiled the package still installs."""
    from tensord.shm.extensions import sources

    files = [f"tensord/{room}/{file}" for file in (f"{name}.c", *headers)]
    return Extension(
        f"tensord.{room.replace('/', '.')}.{name}",
        files[:1],
        depends=files[1:],
        # Whoever imports it sees whether it is of the sources beside it.
        define_macros=[("SOURCES", f'"{sources([_HERE / file for file in files])}"')],
        py_limited_api=True,
        optional=True,
        extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra"],
    )


# Without the guard a client's region is never mapped, without the others large tensors and small requests take longer.
setup(
    ext_modules=[
        extension("shm", "_guard"),
        extension("daemon/grpc", "_hpack"),
        extension("daemon/grpc", "_walk"),
        extension("workers/native", "_large_copy"),
        extension("workers/native", "_output_memory"),
        extension(
            "workers/native",
            "_fast_path",
            "_arrivals.h",
            "_lanes.h",
            "_lone_runs.h",
            "_plans.h",
            "_records.h",
            "_runs.h",
            "_spin.h",
            "_sequences.h",
        ),
    ]
)

"""The one thing setup.cfg cannot say: the C extensions. Everything else is in setup.cfg."""

from setuptools import Extension, setup


def extension(room: str, name: str, *headers: str) -> Extension:
    """``ROOM/NAME.c`` as ``ROOM.NAME``; where it cannot be compiled the package still installs."""
    return Extension(
        f"{room.replace('/', '.')}.{name}",
        [f"{room}/{name}.c"],
        depends=[f"{room}/{header}" for header in headers],
        py_limited_api=True,
        optional=True,
        extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra"],
    )


# Without the guard a client's region is never mapped, without the others large tensors and small requests take longer.
setup(
    ext_modules=[
        extension("shm", "_guard"),
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
        ),
    ]
)

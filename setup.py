"""The one thing setup.cfg cannot say: the C extension. Everything else is in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Optional: without a compiler the package still installs, and a truncated client region costs its worker.
        Extension(
            "shm._guard",
            ["shm/_guard.c"],
            py_limited_api=True,
            optional=True,
            extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra"],
        )
    ]
)

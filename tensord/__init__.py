"""tensord serves JAX models to programs on the same machine.

Programs and models import ``tensord.testing``, ``tensord.models`` and ``__version__``. The server's own packages are beside them
(``tensord.config``, ``tensord.daemon``, ``tensord.shm``, ``tensord.workers``): they change without notice. Importing this
package imports none of them.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """Computes ``__version__``, the installed distribution's, when it is first asked for: every process imports this package."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib.metadata

    try:
        return importlib.metadata.version("tensord")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"

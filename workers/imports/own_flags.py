"""Makes changes of JAX's configuration by a model's code apply to that model only.

A model's code may call ``jax.config.update(name, value)``. If JAX has a context manager with the setting's name, such as
``jax.debug_nans`` for "jax_debug_nans", ``value`` applies only to code of this model, each time the worker runs or traces this
code. Otherwise ``value`` applies to the whole process, and ``process_state`` may undo the change later.

Where the worker does not run a model's code, such as in a thread that this code has started, a setting with a context manager
cannot be changed: all models would have it. In a process that is not only a worker's it applies to the process, as in JAX itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

_log = logging.getLogger(__name__)
_WIDE = "jax_enable_x64"
#: ``own``: the flags and the open contexts of the model whose code this thread runs.
_thread = threading.local()


class WholeProcess:
    """Counts in ``updates`` how often a setting of JAX was changed for the whole process, not for one model."""

    updates = 0


class OwnFlags:
    """The settings of JAX's configuration that the code of one model version has made. They apply to that version only."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._values: dict[str, Any] = {}

    @property
    def wide(self) -> bool:
        """True if the model's code has enabled 64-bit types (jax_enable_x64)."""
        return bool(self._values.get(_WIDE, False))

    @contextlib.contextmanager
    def code(self) -> Iterator[None]:
        """Applies the model's JAX settings while the ``with`` block runs the model's code.

        If the code changes a JAX setting, the change also applies in later ``with`` blocks of this object.
        """
        former = getattr(_thread, "own", None)
        with contextlib.ExitStack() as stack:
            # Another instance's thread may add one meanwhile.
            for name, value in [*self._values.items()]:
                stack.enter_context(context_of(name)(value))
            _thread.own = self, stack
            try:
                yield
            finally:
                _thread.own = former

    def applied(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of the model so that it runs with the JAX settings that the model's code has made, or makes in it.

        Except that types have 64 bits exactly if they have where the wrapped function is called.
        """

        @functools.wraps(function)
        def apply(*arguments: Any) -> Any:
            # The signature of the model decides, and has: its code may switch 64 bits on for a while only, as it is imported.
            wide = jax.config.values[_WIDE]
            with self.code(), jax.enable_x64(wide):
                return function(*arguments)

        return apply

    def take(self, name: str, value: Any, stack: contextlib.ExitStack) -> None:
        """Sets the JAX setting ``name`` to ``value`` in the calling thread, for the code of this model only.

        The value is in effect until ``stack`` is closed. Each later block ``with self.code()`` sets it again. Does nothing if
        the setting has this value already.
        """
        if jax.config.values.get(name) != value:
            stack.enter_context(context_of(name)(value))
            _log.warning("model '%s' sets %s = %r, which holds for this model alone", self._model, name, value)
            self._values[name] = value

    def __repr__(self) -> str:
        return f"<OwnFlags of {self._model!r}: {self._values}>"


def prepare(shared: bool) -> None:
    """Patches ``jax.config.update`` so that a setting made by a model's code applies to that model only. Idempotent.

    ``shared``: True if code that belongs to no model may change settings for the whole process. False: it may change only
    settings without a context manager, and ``update`` raises RuntimeError for others.
    """
    usual = jax.config.update
    if hasattr(usual, "__wrapped__"):
        return

    @functools.wraps(usual)
    def update(name: str, val: Any) -> None:
        own, has_context = getattr(_thread, "own", None), context_of(name) is not None
        if own is not None and has_context:
            flags, stack = own
            flags.take(name, val, stack)
        elif shared or not has_context:
            WholeProcess.updates += 1
            usual(name, val)  # type: ignore[no-untyped-call]
        elif jax.config.values.get(name) != val:
            raise RuntimeError(
                f"{name} = {val!r}, in a thread or a callback of a model, would hold for all models of this process; use "
                f"'with jax.{name.removeprefix('jax_')}({val!r}):' there, or jax.config.update where model.py is imported"
            )

    jax.config.update = update  # type: ignore[method-assign]


def context_of(name: str) -> Any:
    """Returns JAX's context manager for a setting of its configuration, which has the same name; None: there is none."""
    return getattr(jax, name.removeprefix("jax_"), None) if name.startswith("jax_") else None

"""Implements ``tensord.models.span``, with which a model's code adds a span to the traces of the requests it works on.

    with span("tokenize"): ...

If none of these requests is traced, ``span`` records nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from types import TracebackType

from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Parameter
from tensord.workers.calls.caller import current
from tensord.workers.requests.result import checked_parameter
from tensord.workers.requests.timeline import Span, trace_id_of

#: Characters of a name and of an attribute, and attributes of a span, that are told.
_MAX_TEXT, _MAX_ATTRIBUTES = 256, 16
#: The innermost open span of this context; None: there is none.
_open: ContextVar[Span | None] = ContextVar("span", default=None)
_NOTHING = nullcontext()


def span(name: str, attributes: Mapping[str, Parameter]) -> AbstractContextManager[None]:
    """Returns a context manager whose block is a span in the traces of the requests that the running code works on.

    Implements ``tensord.models.span``. ``name`` and ``attributes`` describe the span.
    """
    requests = () if (found := current()) is None else found.requests
    timelines = [request.timeline for request in requests if request.timeline is not None]
    if not timelines:
        return _NOTHING
    told = {_text(key): _told(attributes[key]) for key in [*attributes][:_MAX_ATTRIBUTES]}
    made = Span(_text(name), told, timelines[0].within(innermost()))
    # One object for all: the code has run once.
    taken = [timeline.open(made) for timeline in timelines]
    return _OpenSpan(made) if any(taken) else _NOTHING


def innermost() -> Span | None:
    """Returns the innermost open span of the current context; None: no span is open."""
    return _open.get()


def trace_id() -> str:
    """Returns the ids of the traces of the requests that the running code works on, comma-separated; "": none is traced."""
    found = current()
    return "" if found is None else trace_id_of(request.timeline for request in found.requests)


class _OpenSpan:
    def __init__(self, made: Span) -> None:
        self._span = made

    def __enter__(self) -> None:
        _open.set(self._span)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span.end(error)
        # Not reset by a token: a generator may leave the block in another context.
        _open.set(self._span.parent)


def _told(value: object) -> Parameter:
    with suppress(InvalidArgument):
        if not isinstance(value, str):
            return checked_parameter("", value)
    return _text(value)


def _text(value: object) -> str:
    return str(value)[:_MAX_TEXT].encode(errors="replace").decode()

"""What a Triton Python-backend model fails with: part of ``triton_python_backend_utils`` (see ``interface``)."""

from __future__ import annotations


class TritonModelException(Exception):
    """What a model may raise to fail a whole batch."""


class TritonError:
    """An error of one response, with one of Triton's codes."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str = "", code: str = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code

    def __str__(self) -> str:
        return self._message

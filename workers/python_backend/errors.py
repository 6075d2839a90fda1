"""Errors of Triton Python-backend models: part of ``triton_python_backend_utils`` (see ``interface``)."""

from __future__ import annotations

import enum


class TritonModelException(Exception):
    """An exception that models raise and catch. If ``execute`` raises it, all requests of the batch fail."""


class ErrorCode(enum.Enum):
    """Triton's error codes, by name and number."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __int__(self) -> int:
        return self.value

    __index__ = __int__

    @classmethod
    def of(cls, code: str) -> ErrorCode:
        """Returns Triton's code for the code of a ``ServingError``, such as "NOT_FOUND"."""
        if code == "DEADLINE_EXCEEDED":  # Triton has no code for it
            return cls.CANCELLED
        return cls.INVALID_ARG if code == "INVALID_ARGUMENT" else cls[code]

    @property
    def serving_code(self) -> str:
        """The code of the ``ServingError`` that corresponds to this code."""
        return "INVALID_ARGUMENT" if self is ErrorCode.INVALID_ARG else self.name


class TritonError:
    """An error of one response, with one of Triton's codes."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str = "", code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Makes an error. Raises ValueError: ``code`` is not an ``ErrorCode``."""
        self._message = message
        self._code = ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message

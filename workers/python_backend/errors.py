"""Errors of Triton Python-backend models: part of ``triton_python_backend_utils`` (see ``interface``)."""

from __future__ import annotations

import enum

from tensord.shm.errors import ServingError


class TritonModelException(Exception):
    """Fails a whole batch, where a model raises it."""


class Saying:
    """A context in which a ServingError becomes a TritonModelException that begins with given words.

    It is a class because an error that a generator raises in place of another one keeps all frames between alive until the next
    garbage collection (Python 3.12 and newer), and with them what the model has let go of.
    """

    __slots__ = ("_begins",)

    def __init__(self, begins: str) -> None:
        self._begins = begins

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ServingError):
            raise TritonModelException(f"{self._begins}: {error.message}") from None


class ErrorCode(enum.Enum):
    """Error codes with Triton's names and numbers."""

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
        """Converts the code of a ``tensord.shm.errors.ServingError``."""
        if code == "DEADLINE_EXCEEDED":  # Triton has no code for it
            return cls.CANCELLED
        return cls.INVALID_ARG if code == "INVALID_ARGUMENT" else cls[code]

    @property
    def serving_code(self) -> str:
        """The code of a ``tensord.shm.errors.ServingError``."""
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
        """Makes an error. Raises ValueError: no such code."""
        self._message = message
        self._code = ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message

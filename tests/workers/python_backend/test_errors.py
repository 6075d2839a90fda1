"""Errors of Triton Python models: the codes are those of our own family."""

from __future__ import annotations

import pytest

from tensord.shm.errors import ServingError, from_code
from tensord.workers.python_backend.errors import ErrorCode, TritonError


def test_an_error_without_a_code_is_internal() -> None:
    error = TritonError("x")
    assert (error.message(), error.code(), str(error)) == ("x", TritonError.INTERNAL, "x")


@pytest.mark.parametrize("name", [name for name in vars(TritonError) if name.isupper()])
def test_codes(name: str) -> None:
    error = TritonError("no", getattr(TritonError, name))
    code = error.code()
    found = from_code(code.serving_code, error.message())
    assert isinstance(found, ServingError)
    assert (ErrorCode.of(found.code), found.message) == (code, "no")
    assert TritonError("no", int(code)).code() is code  # type: ignore[arg-type]

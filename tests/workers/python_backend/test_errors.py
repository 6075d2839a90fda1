"""Errors of Triton Python models: the codes are those of our own family."""

from __future__ import annotations

import pytest

from shm.errors import ServingError, from_code
from workers.python_backend.errors import TritonError


def test_an_error_without_a_code_is_internal() -> None:
    error = TritonError("x")
    assert (error.message(), error.code(), str(error)) == ("x", "INTERNAL", "x")


@pytest.mark.parametrize("name", [name for name in vars(TritonError) if name.isupper()])
def test_codes(name: str) -> None:
    error = TritonError("no", getattr(TritonError, name))
    found = from_code(error.code(), error.message())
    assert isinstance(found, ServingError)
    assert (found.code, found.message) == (error.code(), "no")

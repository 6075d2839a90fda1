"""The one error table, against what was recorded of a real server."""

from __future__ import annotations

import pytest

from tensord.daemon.front.status import grpc_status, http_status
from tensord.shm import errors
from tensord.shm.errors import ServingError


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        ("INVALID_ARGUMENT", 400, "INVALID_ARGUMENT"),
        ("NOT_FOUND", 404, "NOT_FOUND"),
        ("ALREADY_EXISTS", 400, "ALREADY_EXISTS"),
        ("UNAVAILABLE", 503, "UNAVAILABLE"),
        ("UNSUPPORTED", 501, "UNIMPLEMENTED"),
        ("REPLACED", 409, "ABORTED"),
        ("CANCELLED", 400, "CANCELLED"),
        ("DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED"),
        ("INTERNAL", 500, "INTERNAL"),
        ("UNKNOWN", 400, "UNKNOWN"),
    ],
)
def test_statuses(code: str, http: int, grpc: str) -> None:
    for error in (code, errors.from_code(code, "text")):
        assert (http_status(error), grpc_status(error)) == (http, grpc)


def test_every_error_of_the_family_has_one() -> None:
    for kind in ServingError.__subclasses__():
        assert http_status(kind("text"))

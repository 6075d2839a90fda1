"""The family crosses a border as code and text."""

from __future__ import annotations

from tensord.shm.errors import Internal, NotFound, ServingError, Unknown, from_code


def test_every_code_comes_back_as_its_class() -> None:
    for kind in ServingError.__subclasses__():
        again = from_code(kind.code, "why")
        assert type(again) is kind
        assert (again.message, str(again)) == ("why", "why")
    assert {NotFound.code, Internal.code} <= {kind.code for kind in ServingError.__subclasses__()}
    assert type(from_code("MARTIAN", "?")) is Unknown

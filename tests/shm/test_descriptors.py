from __future__ import annotations

import errno
import os
import re
import resource

import msgspec
import pytest

from tensord.shm import descriptors
from tensord.shm.control_records import Reply
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.record import decoder
from tests.open_files import no_descriptors_left


def test_without_one_left_what_was_wanted_is_named_with_the_limit() -> None:
    with no_descriptors_left(), pytest.raises(Unavailable) as refused, descriptors.needed("a test"):
        os.memfd_create("x")
    assert refused.value.message.startswith(
        "no file can be opened for a test: the server has as many files open as it may, "
    )


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(FileNotFoundError), descriptors.needed("a test"):
        os.open("/nobody-has-this", os.O_RDONLY)


@pytest.mark.parametrize(("limit", "last"), [(256, 191), (1024, 767), (20000, 19743)])
def test_the_reserve_is_a_quarter_and_at_most_256(monkeypatch: pytest.MonkeyPatch, limit: int, last: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    descriptors.check_reserve(last, "a region")
    with pytest.raises(
        Unavailable, match=rf"a region: {last + 1} files are open .*, {last + 1} are allowed .*\(.* is {limit}\)"
    ):
        descriptors.check_reserve(last + 1, "a region")


def test_what_an_error_came_of_is_found_without_its_text() -> None:
    def raised(first: Exception) -> Exception:
        try:
            try:
                raise first
            except Exception as error:
                raise InvalidArgument("a sentence about a model") from (
                    None if error.args[1:] == ("hidden",) else error
                )
        except InvalidArgument as error:
            return error

    assert descriptors.lacked(descriptors.none_left("the server"))
    for number in (errno.EMFILE, errno.ENFILE):
        assert descriptors.lacked(raised(OSError(number, "in whatever language")))
        assert descriptors.lacked(raised(OSError(number, "hidden")))
    assert descriptors.lacked(ImportError(f"x.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"))
    assert not descriptors.lacked(raised(OSError(errno.ENOENT, os.strerror(errno.EMFILE))))
    assert not descriptors.lacked(Unavailable("the model's own server has as many files open as it may"))


def test_it_crosses_processes() -> None:
    for error, lacked in (
        (descriptors.none_left("a worker"), True),
        (Unavailable("as many files open as it may"), False),
    ):
        again = decoder(Reply).decode(msgspec.msgpack.encode([Reply.refusing(7, error)]))[0]
        with pytest.raises(Unavailable, match=re.escape(error.message)) as raised:
            again.check()
        assert descriptors.lacked(raised.value) is lacked
    Reply(7).check()

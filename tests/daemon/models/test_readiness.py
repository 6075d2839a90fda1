"""Tests what is published of the daemon's readiness, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tensord.daemon.models.readiness import ReadinessCheck, ServedBefore, Standing
from tensord.shm.control_records import Loading, Readiness


def test_how_far_loads_are_while_something_is_not_served() -> None:
    published: list[Readiness] = []
    standings = [Standing("a", (1,), "", False), Standing("b", (), "loading", False)]
    check = ReadinessCheck(lambda: standings, published.append)
    check.check(strict=True)
    assert published == []
    check.begin(["a", "b"], [])
    for at in (Loading("b", 1), Loading("b", 1), Loading("b", 1, 2, 4, 1), None):
        check.loads(7, at)
        check.check(strict=True)
    assert [one.sentence() for one in published] == [
        "1 of 2 models are not served: b (loading b)",
        "1 of 2 models are not served: b (compiling b 2/4, 0 from the cache)",
        "1 of 2 models are not served: b",
    ]
    standings[1] = Standing("b", (1,), "", False)
    # Loaded once more while everything is served: nobody waits for that.
    check.loads(7, Loading("b", 1))
    check.check(strict=True)
    assert check.readiness == published[-1] == Readiness(True, 2, 0, ())


SERVED = Standing("m", (1,), "", False)
BEHIND = Standing("m", (1,), "version 2: OSError: no", True)
LOADING = Standing("m", (), "loading", False)
REPLACED = Standing("m", (), "its workers are being replaced", False)
FAILED = Standing("m", (), "version 1: OSError: no", True)
STRANDED = Standing("m", (), "no worker can use cuda:1 at present", True, stranded=True)
OTHER = Standing("other", (1,), "", False)


@pytest.mark.parametrize(
    ("before", "now", "strict", "lenient"),
    [
        # Wanted at the start, never served.
        ([LOADING], [LOADING, OTHER], False, False),
        ([LOADING], [REPLACED, OTHER], False, False),
        ([LOADING], [FAILED, OTHER], False, True),
        ([LOADING], [STRANDED, OTHER], True, True),
        ([LOADING], [SERVED, OTHER], True, True),
        ([LOADING], [BEHIND, OTHER], True, True),
        ([LOADING], [OTHER], True, True),
        # Wanted at the start, and served before.
        ([LOADING, SERVED], [LOADING, OTHER], True, True),
        ([LOADING, SERVED], [REPLACED], True, True),
        ([LOADING, SERVED], [FAILED, OTHER], True, True),
        ([LOADING, SERVED], [STRANDED, OTHER], True, True),
        ([LOADING, SERVED], [STRANDED], False, False),
        # New since.
        ([None], [LOADING, OTHER], True, True),
        ([None], [FAILED, OTHER], True, True),
        ([None], [FAILED], True, True),
        ([LOADING, None], [FAILED, OTHER], True, True),
        # Nothing is wanted.
        ([None], [], True, True),
    ],
)
def test_states(before: list[Standing | None], now: list[Standing], strict: bool, lenient: bool) -> None:
    """The table of docs/operations.md. ``before``: what was known of the model at the start and since; ``now``: all there is."""
    for demanded, ready in ((True, strict), (False, lenient)):
        standings: list[Standing] = []
        check = ReadinessCheck(lambda: standings, lambda _: None)  # noqa: B023
        for number, one in enumerate(before):
            standings[:] = [OTHER] if one is None else [one, OTHER]
            if not number:
                check.begin([each.name for each in standings], [])
            check.check(demanded)
        standings[:] = now
        check.check(demanded)
        assert check.readiness.ready == ready


def test_required_names_alone_count() -> None:
    """Whenever they come, and until each has served; a reload may name others."""
    standings = [LOADING, OTHER]
    check = ReadinessCheck(lambda: standings, lambda _: None)

    def ready() -> bool:
        check.check(strict=True)
        return check.readiness.ready

    check.begin(["m", "other"], ["other"])
    assert ready()
    check.begin(["m", "other"], ["late"])
    standings.append(Standing("late", (), "it is required, and nobody has asked for it", False))
    assert not ready()
    assert check.readiness.names == ("late", "m")
    standings[-1] = Standing("late", (1,), "", False)
    assert ready()
    standings[-1] = Standing("late", (), "loading", False)
    assert ready()
    check.begin(["m", "other"], [])
    assert not ready()
    assert check.readiness.names[0] == "m"


async def all_written() -> None:
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_the_last_names_are_there_after_a_crash_and_not_after_an_orderly_end(tmp_path: Path) -> None:
    assert not ServedBefore(tmp_path).names
    first = ServedBefore(tmp_path)
    for names in ({"a"}, {"a", "b"}, {"a", "b"}, {"b", "\u00e9"}):
        first.note(names)
    await all_written()
    assert [path.name for path in tmp_path.iterdir()] == ["served.json"]
    assert ServedBefore(tmp_path).names == {"b", "\u00e9"}
    first.forget()
    first.forget()
    assert not ServedBefore(tmp_path).names
    assert not list(tmp_path.iterdir())


async def test_what_cannot_be_kept_is_not(tmp_path: Path) -> None:
    """No folder, one that cannot be written, a file that holds something else: then all that is wanted counts, as always."""
    for folder in (None, tmp_path / "missing"):
        nowhere = ServedBefore(folder)
        nowhere.note({"a"})
        nowhere.forget()
    await all_written()
    (tmp_path / "served.json").write_text("[")
    assert not ServedBefore(tmp_path).names
    (tmp_path / "served.json").write_text("7")
    assert not ServedBefore(tmp_path).names

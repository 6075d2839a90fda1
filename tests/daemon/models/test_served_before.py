"""What a daemon leaves for the one that follows it after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tensord.daemon.models.readiness import ServedBefore


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

"""Tests what a look at the repositories asks for, after another."""

from __future__ import annotations

from pathlib import Path

from tensord.daemon.models.polling import Changes
from tensord.daemon.models.repository import FoundModel


def found(**models: str) -> dict[str, FoundModel]:
    """Returns models by name; each value is a fingerprint, or "!" and the reason why the model cannot be polled."""
    return {
        name: FoundModel(name, Path(name), error=text)
        if text.startswith("!")
        else FoundModel(name, Path(name), chosen=(1,), fingerprint=text)
        for name, text in models.items()
    }


def look(changes: Changes, **models: str) -> tuple[list[str], list[str]]:
    changed, gone = changes.look(found(**models))
    return [model.name for model in changed], gone


def test_nothing_changes() -> None:
    changes = Changes(found(a="1", b="!broken"))
    for _ in range(3):
        assert look(changes, a="1", b="!broken") == ([], [])


def test_a_change_that_stays() -> None:
    changes = Changes(found(a="1", b="1"))
    assert look(changes, a="2", b="1") == ([], [])
    assert look(changes, a="2", b="1") == (["a"], [])
    assert look(changes, a="2", b="1") == ([], [])


def test_what_is_being_written_waits() -> None:
    changes = Changes({})
    assert look(changes, new="!has no version") == ([], [])
    assert look(changes, new="1") == ([], [])
    assert look(changes, new="2") == ([], [])
    assert look(changes, new="2") == (["new"], [])


def test_a_mistake_is_tried_once() -> None:
    changes = Changes(found(a="1"))
    assert look(changes, a="!bad") == ([], [])
    assert look(changes, a="!bad") == (["a"], [])
    assert look(changes, a="!bad") == ([], [])
    assert look(changes, a="1") == ([], [])
    assert look(changes, a="1") == (["a"], [])


def test_gone_and_back() -> None:
    changes = Changes(found(a="1", b="1"))
    assert look(changes, b="1") == ([], [])
    assert look(changes, a="1", b="1") == ([], [])
    assert look(changes, a="1", b="1") == ([], [])
    assert look(changes) == ([], [])
    assert look(changes) == ([], ["a", "b"])
    assert look(changes) == ([], [])
    assert look(changes, a="1") == ([], [])
    assert look(changes, a="1") == (["a"], [])

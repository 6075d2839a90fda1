"""Triton's sentences for loads that failed."""

from __future__ import annotations

from tensord.daemon.models import load_errors


def test_versions_that_failed_are_listed_ascending() -> None:
    assert load_errors.load_error("m", {3: "it is broken", 1: "no memory"}) == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: no memory;\n"
        "version 3 is at UNAVAILABLE state: it is broken;\n"
    )


def test_nothing_to_load() -> None:
    assert load_errors.no_version_error("m") == (
        "load failed for model 'm': at least one version must be available under the version policy of model 'm'\n"
    )
    assert load_errors.poll_error(["a", "b"]) == "failed to load 'a, b', failed to poll from model repository"

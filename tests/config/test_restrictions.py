"""Restricted groups: every spelling gives the groups or a sentence, and no sentence tells the key's value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config import layers
from tensord.config.layers import ConfigurationError, Setting
from tensord.config.restrictions import GROUPS, Restriction, parse, without_values


@pytest.mark.parametrize(
    ("entries", "groups"),
    [
        ([], {}),
        (["health:Key=v"], {"health": Restriction("key", "v")}),
        (["trace,logging:k=a=b:c,d"], dict.fromkeys(["trace", "logging"], Restriction("k", "a=b:c,d"))),
        (["health:k=1", "metadata:l=2"], {"health": Restriction("k", "1"), "metadata": Restriction("l", "2")}),
        # As a comma-separated variable gives it.
        (["trace", "logging:k=v"], dict.fromkeys(["trace", "logging"], Restriction("k", "v"))),
    ],
)
def test_good(entries: list[str], groups: dict[str, Restriction]) -> None:
    assert parse(entries) == groups


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["health"], "expected GROUP"),
        (["health:k"], "expected GROUP.*given 'health:k'"),
        (["health:k="], "expected GROUP"),
        (["health:=secret"], "expected GROUP.*given 'health:=...'"),
        (["health:a b=secret"], "expected GROUP"),
        (["infer:k=secret"], "unknown group 'infer'; there are health, metadata, inference"),
        (["health,:k=secret"], "unknown group ''"),
        (["health:k=secret", "health:l=secret"], "group 'health' is restricted twice"),
    ],
)
def test_bad(entries: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse(entries)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"http\.restricted_api: "):
        layers.merge([Setting("http.restricted_api", entries, "x")])


def test_a_variable() -> None:
    options = layers.read(environment={"TENSORD_HTTP_RESTRICTED_API": "trace,logging:k=v"}).options
    assert parse(options.http.restricted_api).keys() == {"trace", "logging"}


def test_the_value_is_not_shown() -> None:
    assert "sesame" not in repr(parse(["health:k=sesame"]))
    entries = ["health,trace:k=sesame", "logging:key=open=:sesame\nsesame", "metadata"]
    assert without_values(entries) == ("health,trace:k=...", "logging:key=...", "metadata")


@given(st.lists(st.text(max_size=12) | st.sampled_from(GROUPS) | st.just("health:k=v"), max_size=4))
def test_any_entries(entries: list[str]) -> None:
    try:
        assert parse(entries).keys() <= set(GROUPS)
    except ValueError as error:
        assert str(error)

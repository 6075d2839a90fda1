"""Users and groups by name and by number."""

from __future__ import annotations

import pytest

from tensord.config.accounts import group_id, user_id
from tensord.config.layers import ConfigurationError, Setting, merge


def test_names_and_numbers() -> None:
    assert (user_id("root"), user_id("1234"), group_id("root"), group_id("77")) == (0, 1234, 0, 77)
    with pytest.raises(KeyError):
        user_id("no-such-user")


@pytest.mark.parametrize(("key", "kind"), [("owners", "user"), ("snapshot_owners", "user"), ("groups", "group")])
def test_a_name_that_is_none_is_found_at_the_start(key: str, kind: str) -> None:
    merge([Setting(f"regions.{key}", ["root", "4711"], "file")])
    with pytest.raises(
        ConfigurationError, match=rf"regions\.{key}: expected a {kind} of this host, given 'nobody-here'"
    ):
        merge([Setting(f"regions.{key}", ["nobody-here"], "file")])

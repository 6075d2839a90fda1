"""Looks up users and groups as an operator writes them: a name of this host, or a number."""

from __future__ import annotations

import grp
import pwd


def user_id(text: str) -> int:
    """Returns the id of a user of this host, given as a name or a number. Raises KeyError: no user has that name."""
    return int(text) if text.isascii() and text.isdigit() else pwd.getpwnam(text).pw_uid


def group_id(text: str) -> int:
    """Returns the id of a group of this host, given as a name or a number. Raises KeyError: no group has that name."""
    return int(text) if text.isascii() and text.isdigit() else grp.getgrnam(text).gr_gid

"""Looks up users and groups as an operator writes them: a name of this host, or a number."""

from __future__ import annotations

import grp
import pwd


def user_id(user: str) -> int:
    """Returns the id of a user of this host. ``user`` is a name or a number.

    Raises KeyError if no user has this name.
    """
    return int(user) if user.isascii() and user.isdigit() else pwd.getpwnam(user).pw_uid


def group_id(group: str) -> int:
    """Returns the id of a group of this host. ``group`` is a name or a number.

    Raises KeyError if no group has this name.
    """
    return int(group) if group.isascii() and group.isdigit() else grp.getgrnam(group).gr_gid

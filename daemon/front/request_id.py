"""Ids for requests whose clients give none, where the operator wants that (``requests.make_ids``).

Source: the published schema of Triton's requests, "If not provided, the server generates one" (a real Triton does not).
"""

from __future__ import annotations

import uuid


def made() -> str:
    """One that no other request has. All are equally long."""
    return str(uuid.uuid4())

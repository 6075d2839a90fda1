"""What comes of loads and unloads: futures, by the tokens that the lifecycle has of them. Belongs to the supervisor's loop."""

from __future__ import annotations

import asyncio
import itertools


class Outcomes:
    """Those that somebody waits for. An outcome is why it failed, or ""."""

    def __init__(self) -> None:
        #: A number for an operation, never given twice.
        self.token = itertools.count(1).__next__
        self._waiting: dict[int, asyncio.Future[str]] = {}
        #: name -> what comes, or came, of its last load.
        self._loads: dict[str, asyncio.Future[str]] = {}

    def expect(self, load: str = "") -> tuple[int, asyncio.Future[str]]:
        """A new operation's token and outcome. ``load``: the model that it loads."""
        token = self.token()
        outcome = self._waiting[token] = asyncio.get_running_loop().create_future()
        if load:
            self._loads[load] = outcome
        return token, outcome

    def coming(self, name: str) -> asyncio.Future[str] | None:
        """Of the load of a model that is under way, if one is."""
        outcome = self._loads.get(name)
        return None if outcome is None or outcome.done() else outcome

    def settle(self, token: int, error: str) -> None:
        """An operation is over."""
        outcome = self._waiting.pop(token, None)
        if outcome is not None and not outcome.done():
            outcome.set_result(error)

    def __repr__(self) -> str:
        return f"<Outcomes {len(self._waiting)} to come>"

"""Ensembles that wait for their members: fronts are told that they are being loaded, so that their requests wait as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tensord.daemon.models.repository import FoundModel
from tensord.daemon.models.versions import Model
from tensord.shm.control_records import ModelGone, ModelState


class Coming:
    """Tells fronts which ensembles wait for their members. One per daemon."""

    def __init__(self, publish: Callable[[ModelState | ModelGone], None]) -> None:
        self._publish = publish
        #: By name and version, with how many loads they wait in.
        self._waiting: dict[tuple[str, int], int] = {}

    @contextlib.contextmanager
    def told(self, found: FoundModel, known: Model | None) -> Iterator[None]:
        """While its members are brought. ``known``: what the lifecycle has of it. The load that follows says the rest."""
        serves = known is not None and any(version.in_use for version in known.versions.values())
        versions = [(found.name, number) for number in (() if serves else found.chosen)]
        for each in versions:
            self._waiting[each] = self._waiting.get(each, 0) + 1
            self._publish(ModelState(*each, "LOADING"))
        try:
            yield
        except BaseException:
            for each in versions:
                version = None if known is None else known.versions.get(each[1])
                self._publish(ModelGone(*each) if version is None else version.told(each[1]))
            raise
        finally:
            for each in versions:
                self._waiting[each] -= 1
                if not self._waiting[each]:
                    del self._waiting[each]

    def states(self) -> list[ModelState]:
        """What a new front must know."""
        return [ModelState(name, number, "LOADING") for name, number in self._waiting]

    def __repr__(self) -> str:
        return f"<Coming {', '.join(name for name, _ in self._waiting)}>"

"""Configurations that clients gave with a load.

They are in force for later plain loads, until the model's files change or it is unloaded.
"""

from __future__ import annotations

from tensord.daemon.models.repository import FoundModel


class Overrides:
    """One per daemon. Only what was loaded with success is kept."""

    def __init__(self) -> None:
        #: name -> (fingerprint of the files it was given for, configuration in JSON).
        self._kept: dict[str, tuple[str, str]] = {}

    def of(self, found: FoundModel) -> str:
        """The configuration that was given for these very files, if it is in force; else ""."""
        fingerprint, given = self._kept.get(found.name, ("", ""))
        return given if fingerprint == found.fingerprint else ""

    def keep(self, found: FoundModel, given: str) -> None:
        """That load succeeded. ``given``: ""; nothing was, so what was given before is over."""
        if given:
            self._kept[found.name] = (found.fingerprint, given)
        else:
            self.drop(found.name)

    def drop(self, name: str) -> None:
        """The model is gone, or another one; a name without any is no error."""
        self._kept.pop(name, None)

    def __repr__(self) -> str:
        return f"<Overrides of {sorted(self._kept)}>"

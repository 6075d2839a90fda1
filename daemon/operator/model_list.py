"""The models that should be served, as the log, the service manager and ``tensorctl status`` show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensord.daemon.models.changes import Models

#: The line comes after every load: of many models the first, by name, are enough.
_MAX_NAMED = 8


def summary(models: Models, devices: Iterable[str]) -> str:
    """One line that begins with whether the daemon is ready, as ``/v2/health/ready`` answers."""
    # A version whose worker has died is READY as well, until another one has it.
    books = models.lifecycle.models
    found = {
        name: [n for n in numbers if books[name].versions[n].ready]
        for name, numbers in models.lifecycle.ready_models().items()
    }
    served = {name: numbers for name, numbers in found.items() if numbers}
    named = [f"{name} {'+'.join(map(str, versions))}" for name, versions in served.items()]
    more = [f"{len(named) - _MAX_NAMED} more"] if len(named) > _MAX_NAMED else []
    listed = ", ".join([*named[:_MAX_NAMED], *more]) or "none"
    ready, missing = "ready" if models.readiness.ready else "not ready", models.readiness.sentence()
    line = f"{ready}: {len(served)} models ({listed}) on {', '.join(devices) or 'no worker'}"
    return f"{line}; {missing}" if missing else line


def of_models(models: Models) -> dict[str, Any]:
    """Whether the daemon is ready, and of each wanted model that is not all served which versions are, and why not the rest."""
    readiness = models.readiness
    return {
        "ready": readiness.ready,
        "models": {"wanted": readiness.wanted, "served": readiness.wanted - readiness.unserved},
        "not_served": [
            {"name": model.name, "served": list(model.served), "reason": model.reason}
            for model in models.standings()
            if model.reason
        ],
    }

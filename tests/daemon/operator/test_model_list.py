"""The line that the log gets says what is new, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensord.daemon.models.readiness import Standing
from tensord.daemon.operator.listings import ServedModels


def test_each_change_is_said_once() -> None:
    standings: list[Standing] = [Standing("a", (1,), "", False), Standing("b", (), "OSError: no", True)]
    models: Any = SimpleNamespace(standings=lambda: standings, readiness=SimpleNamespace(ready=False, draining=False))
    served = ServedModels(models)
    served.change()
    assert served.change() == ""
    # A new one loads: that is no news before it is served, or cannot be.
    standings.append(Standing("c", (), "loading", False))
    assert served.change() == ""
    standings[2] = Standing("c", (1,), "", False)
    assert served.change() == "not ready: 2 of 3 models are served; served now: c"
    standings[2] = Standing("c", (), "its workers are being replaced", False)
    standings.append(Standing("d", (), "SyntaxError", True))
    assert served.change() == "not ready: 1 of 4 models are served; not served now: c, d"
    # One that was served, and loads again, is one that is still not served.
    standings[2] = Standing("c", (), "loading", False)
    assert served.change() == ""
    models.readiness.ready = True
    assert served.change() == "ready: 1 of 4 models are served"
    del standings[2:]
    assert served.change() == "ready: 1 of 2 models are served; gone: c, d"
    standings += [Standing(f"m{number}", (1,), "", False) for number in range(10)]
    assert served.change() == ("ready: 11 of 12 models are served; served now: m0, m1, m2, m3, m4, m5, m6, m7, 2 more")
    models.readiness.ready, models.readiness.draining = False, True
    assert served.change() == "not ready: the server is draining, 11 of 12 models are served"

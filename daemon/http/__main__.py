"""Runs the HTTP front process: ``python -m tensord.daemon.http``, which only the supervisor starts."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Until the front serves: what is imported stays, and looking at it again and again is a tenth of the time (measured).
    gc.disable()
    from tensord.daemon.front import process
    from tensord.daemon.http.server import HttpFront

    process.main("tensord.daemon.http", "The HTTP front. Started by the supervisor only.", HttpFront)

"""``python -m daemon.http``: the HTTP front, started by the supervisor with its control channel and listening socket."""

from __future__ import annotations

from daemon.front import process
from daemon.http.server import HttpFront

if __name__ == "__main__":
    process.main("daemon.http", "The HTTP front. Started by the supervisor only.", HttpFront)

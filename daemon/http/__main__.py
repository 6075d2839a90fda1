"""``python -m daemon.http``: the HTTP front, started by the supervisor with its control channel and listening socket."""

from __future__ import annotations

import argparse
import signal
import socket

import uvloop

from daemon.http.server import HttpFront
from shm.parent import die_with_parent


def main() -> None:
    """Runs until the supervisor says stop."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="daemon.http", description="The HTTP front. Started by the supervisor only.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    arguments = parser.parse_args()
    # The supervisor decides; a terminal's Ctrl-C or a service manager's signal reaches it as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def run() -> None:
        control, listener = socket.socket(fileno=arguments.control_fd), socket.socket(fileno=arguments.listen_fd)
        await HttpFront(control, listener).run()

    uvloop.run(run())


if __name__ == "__main__":
    main()

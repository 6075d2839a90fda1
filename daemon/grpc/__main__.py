"""``python -m daemon.grpc``: the gRPC front, started by the supervisor with its control channel and listening socket."""

from __future__ import annotations

import argparse
import signal
import socket

import uvloop

from daemon.grpc.server import GrpcFront
from shm.parent import die_with_parent


def main() -> None:
    """Runs until the supervisor says stop."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="daemon.grpc", description="The gRPC front. Started by the supervisor only.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    arguments = parser.parse_args()
    # The supervisor decides; a terminal's Ctrl-C or a service manager's signal reaches it as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def run() -> None:
        control, listener = socket.socket(fileno=arguments.control_fd), socket.socket(fileno=arguments.listen_fd)
        await GrpcFront(control, listener).run()

    uvloop.run(run())


if __name__ == "__main__":
    main()

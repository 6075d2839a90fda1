"""``python -m daemon.grpc``: the gRPC front, started by the supervisor with its control channel and listening socket."""

from __future__ import annotations

from daemon.front import process
from daemon.grpc.server import GrpcFront

if __name__ == "__main__":
    process.main("daemon.grpc", "The gRPC front. Started by the supervisor only.", GrpcFront)

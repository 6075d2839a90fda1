"""Finds a daemon that tensord.sbatch started: the one on the caller's own node, over a lane, else another one over HTTP.

    client = find_tensord.connect()
    logits = client.model("digits")({"image": images})["logits"]

It needs only tensord-client. Run as a program it prints the client that it found.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import tensord_client

_PAUSE = 0.5


def connect(folder: str | os.PathLike[str] = "", *, wait: float = 60.0) -> tensord_client.Client:
    """Connects to a daemon: the one on this node, else one of the others.

    Args:
      folder: the folder with the daemons' addresses; "": ``$ADDRESSES``, else ``~/.tensord/addresses``.
      wait: seconds to wait for a daemon that is ready.

    Raises: tensord_client.Unavailable: there is no such daemon, with what was tried.
    """
    addresses = Path(folder or os.environ.get("ADDRESSES") or Path.home() / ".tensord" / "addresses")
    own = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    # Tasks of an array are spread over the daemons.
    task = int(os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("SLURM_PROCID") or os.getpid())
    until = time.monotonic() + wait
    while True:
        tried = [f"no daemon has an address in {addresses}"]
        nodes = sorted(name for name in _names(addresses) if not name.startswith(".") and name != own)
        others = nodes[task % len(nodes) :] + nodes[: task % len(nodes)] if nodes else []
        for node in [own, *others]:
            try:
                address, sockets = (addresses / node).read_text().splitlines()
            except (OSError, ValueError):
                continue  # it has none, or it is going
            try:
                return tensord_client.connect(sockets if node == own else address)
            except tensord_client.Unavailable as error:
                tried.append(error.message)
        if time.monotonic() > until:
            raise tensord_client.Unavailable("; ".join(tried[1:] or tried))
        time.sleep(_PAUSE)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    print(connect())

"""The table of all attacks: name -> function."""

from __future__ import annotations

import argparse

from bench.attackers import grpc, http, lanes, memory

ATTACKS = grpc.ATTACKS | http.ATTACKS | memory.ATTACKS | lanes.ATTACKS


def named(parser: argparse.ArgumentParser, names: str) -> list[str]:
    """Splits the names of attacks in a command line. It ends the program where there is no such attack."""
    found = [name for name in names.split(",") if name]
    for name in found:
        if name not in ATTACKS:
            parser.error(f"no attack '{name}', there are {', '.join(ATTACKS)}")
    return found

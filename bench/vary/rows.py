"""Defines the rows: what each one sends, over how many connections."""

from __future__ import annotations

from dataclasses import dataclass

from bench.vary.pools import KINDS

_CONNECTIONS = (4, 16)
#: Rows that have more of them besides.
_MANY = {("http", "all"): (64, 256, 3000), ("stream", "rnn"): (64,)}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load, a row of the table."""

    protocol: str
    kind: str
    connections: int

    @property
    def name(self) -> str:
        """Returns the name that ``--rows`` uses."""
        return f"vary-{self.protocol}-{self.kind}-c{self.connections}"

    @property
    def renews(self) -> bool:
        """Returns whether each request has a connection of its own."""
        return self.kind == "new"


ROWS = {
    row.name: row
    for protocol, kinds in KINDS.items()
    for kind in kinds
    for connections in (*_CONNECTIONS, *_MANY.get((protocol, kind), ()))
    for row in (Row(protocol, kind, connections),)
}

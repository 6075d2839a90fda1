"""The deliberate differences from Triton: the table in docs/protocol.md, which is the only list of exceptions.

The first cell of a row names what the row is about, each in backquotes: ids of recorded cases, globs of ids, or a rule
``status A → B`` or ``status A → B: TEXT``, which excuses that change of status wherever the error text is TEXT (a glob).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
_HEADING = "## Differences from Triton"
_RULE = re.compile(r"status (\d{3}) → (\d{3})(?:: (.*))?")
#: How the replayer words a wrong status; a case of several steps puts "step N: " before it.
_STATUS = re.compile(r"(?:step \d+: )?(?:#\d+ )?status: got (\d{3}) want (\d{3}); body (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rule:
    """A change of status that is excused for every case."""

    name: str
    triton: str
    tensord: str
    #: Glob of the error text.
    text: str

    def excuses(self, difference: str) -> bool:
        """Whether a line of the replayer is this change of status and no more."""
        found = _STATUS.fullmatch(difference)
        if found is None or (found[1], found[2]) != (self.tensord, self.triton):
            return False
        # The replayer cuts long texts, so the end is open.
        return fnmatchcase(found[3], f'{{"error":"{self.text}*')


@dataclass(frozen=True, slots=True)
class Differences:
    """The table, read."""

    #: Ids and globs of ids.
    cases: tuple[str, ...]
    rules: tuple[Rule, ...]

    def of_case(self, name: str) -> list[str]:
        """The entries that excuse a case as a whole."""
        return [entry for entry in self.cases if fnmatchcase(name, entry)]


@cache
def read(document: Path = DOCUMENT) -> Differences:
    """Reads the table.

    Raises: ValueError: there is no such heading, or a row names nothing in backquotes or gives no reason.
    """
    _, found, section = document.read_text(encoding="utf-8").partition(f"{_HEADING}\n")
    if not found:
        raise ValueError(f"{document.name} has no section {_HEADING!r}")
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    cases: list[str] = []
    rules: list[Rule] = []
    for row in rows[2:]:
        # A bar inside a cell is written \| in Markdown.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        names = re.findall(r"`([^`]+)`", cells[0])
        if len(cells) != 4 or not names or not all(cells):
            raise ValueError(f"{document.name}: a difference is `cases`, Triton, tensord, why; this row is not: {row}")
        for name in names:
            if rule := _RULE.fullmatch(name):
                rules.append(Rule(name, rule[1], rule[2], rule[3] or "*"))
            else:
                cases.append(name)
    return Differences(tuple(cases), tuple(rules))

"""Reads the deliberate differences from Triton: the table in docs/protocol.md, which is the only list of exceptions.

The first cell of a row names what the row is about, each in backquotes: ids of recorded cases, globs of ids, or a rule. A rule
``status A → B`` or ``status A → B: TEXT`` excuses that change of status wherever the error text is TEXT (a glob); ``code A → B:
TEXT`` does so for gRPC's codes, and ``text A → B`` excuses that change of an error's text (globs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
_HEADING = "## Differences from Triton"
_STATUS_RULE = re.compile(r"status (\d{3}) → (\d{3})(?:: (.*))?")
_CODE_RULE = re.compile(r"code ([A-Z_]+) → ([A-Z_]+): (.*)")
_TEXT_RULE = re.compile(r"text (.*) → (.*)")
_BODY_RULE = re.compile(r"empty body → (\{.*\})")
#: What the replayer puts before a difference: in a case of several steps, of several answers, in a body that is an error's.
_PLACE = re.compile(r"(step \d+: )?(#\d+ )?(body)?")


@dataclass(frozen=True, slots=True)
class Rule:
    """A difference that is excused for every case."""

    name: str
    #: Glob of the replayer's line.
    line: str

    def excuses(self, difference: str) -> bool:
        """Returns whether a line of the replayer is this difference and no other."""
        return fnmatchcase(_PLACE.sub("", difference, count=1), self.line)


def rule(name: str) -> Rule | None:
    """Returns the rule that a name in the first cell stands for; None: it is an id, or a glob of ids."""
    if status := _STATUS_RULE.fullmatch(name):
        triton, tensord, text = status.groups(default="")
        # The replayer cuts long texts, so the end is open.
        return Rule(name, f'status: got {tensord} want {triton}; body {{"error":"{text}*')
    if code := _CODE_RULE.fullmatch(name):
        triton, tensord, text = code.groups()
        return Rule(name, f"code: got {tensord} ({text}*) want {triton}")
    if text_rule := _TEXT_RULE.fullmatch(name):
        return Rule(name, f"*: got {text_rule[2]}\n*want {text_rule[1]}")
    if body := _BODY_RULE.fullmatch(name):
        return Rule(name, f": got {body[1]} want null")
    if name.startswith("added /"):
        return Rule(name, f"{name.removeprefix('added ')}: unexpected *")
    return None


@dataclass(frozen=True, slots=True)
class Differences:
    """The table of differences, parsed."""

    #: Ids and globs of ids.
    cases: tuple[str, ...]
    rules: tuple[Rule, ...]

    def of_case(self, name: str) -> list[str]:
        """Returns the entries that excuse a case as a whole."""
        return [entry for entry in self.cases if fnmatchcase(name, entry)]


@cache
def read(document: Path = DOCUMENT) -> Differences:
    """Reads the table of differences.

    Raises: ValueError: there is no such heading, or a row names nothing in backquotes or gives no reason.
    """
    _, heading, section = document.read_text(encoding="utf-8").partition(f"{_HEADING}\n")
    if not heading:
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
            if found := rule(name):
                rules.append(found)
            else:
                cases.append(name)
    return Differences(tuple(cases), tuple(rules))

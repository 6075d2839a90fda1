"""A family of metrics as text: the samples of one name, written once as lines that both formats share.

    Gauge(name, text, labels=...) ─▶ fill(rows) ─▶ lines ─▶ text(format): HELP, TYPE, lines

prometheus_client has objects for each sample and for each of its labels; with a hundred models they were most of what a scrape
took. What it writes, and what is written here, is the same to the byte. Source: the Prometheus exposition format 0.0.4 and
OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import ClassVar, Self

from prometheus_client.utils import floatToGoString

#: Label texts that are kept from scrape to scrape: some twenty for each model version.
_MAX_LABELS = 1 << 15
#: Integers below are written as they are; Go begins to use exponents there.
_EXPONENTS = 1_000_000


class Family:
    """Base class of families; ``lines`` has one for each sample."""

    __slots__ = ("_help", "_labels", "lines", "name")

    #: The type that OpenMetrics names for the family.
    kind: ClassVar[str]

    def __init__(self, name: str, text: str, value: float | None = None, labels: Sequence[str] = ()) -> None:
        """
        Args:
          name: of its samples; a counter's ends in ``_total``.
          text: says what it is.
          value: of its only sample, where it has no labels.
          labels: names of the labels of each sample.
        """
        self.name = name
        self.lines: list[str] = []
        self._help = text.replace("\\", r"\\").replace("\n", r"\n")
        self._labels = tuple(labels)
        if value is not None:
            self.fill([((), value)])

    def fill(self, rows: Iterable[tuple[Sequence[str], float]]) -> Self:
        """Adds samples, each as the values of its labels and its own. Returns the family."""
        name, names, lines = self.name, self._labels, self.lines
        for values, value in rows:
            number = f"{value}.0" if type(value) is int and 0 <= value < _EXPONENTS else floatToGoString(value)
            lines.append(f"{name}{_labelled(names, tuple(values))} {number}\n")
        return self

    def add(self, names: Sequence[str], values: Sequence[str], value: float, suffix: str = "") -> None:
        """Adds a sample that has labels of its own. ``suffix``: follows the family's name."""
        self.lines.append(f"{self.name}{suffix}{_labelled(tuple(names), tuple(values))} {floatToGoString(value)}\n")

    def text(self, is_openmetrics: bool) -> str:
        """Returns the family as text; "": it has no samples, and a name alone would say that there is something to see."""
        if not self.lines:
            return ""
        name, kind, said = self.name, self.kind, self._help
        if is_openmetrics:
            said = said.replace('"', r"\"")
            if kind == "counter":
                name = name.removesuffix("_total")
        elif kind == "unknown":
            # OpenMetrics knows no counters but those that end in _total; Triton's do not, and are unknown there.
            kind = "counter"
        return f"# HELP {name} {said}\n# TYPE {name} {kind}\n" + "".join(self.lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self.lines)} samples>"


class Gauge(Family):
    """A family of values that go up and down."""

    __slots__ = ()
    kind = "gauge"


class Counter(Family):
    """A family of values that only grow, with a name that ends in ``_total``."""

    __slots__ = ()
    kind = "counter"


class Unknown(Family):
    """A family of counters with names that OpenMetrics does not allow for counters."""

    __slots__ = ()
    kind = "unknown"


class Histogram(Family):
    """A family of histograms."""

    __slots__ = ()
    kind = "histogram"

    def observe(
        self, names: Sequence[str], values: Sequence[str], buckets: Iterable[tuple[str, int]], total: float
    ) -> None:
        """Adds a histogram. ``buckets``: upper bounds, the last "+Inf", each with all that is within; ``total``: the sum."""
        within = 0
        for bound, within in buckets:
            self.add((*names, "le"), (*values, bound), within, "_bucket")
        self.add(names, values, within, "_count")
        self.add(names, values, total, "_sum")


def escaped(label: str) -> str:
    """Returns the value of a label as it stands between quotes."""
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@lru_cache(_MAX_LABELS)
def _labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Returns labels as they stand behind a name, in the order of their names."""
    if not names:
        return ""
    listed = ",".join([f'{name}="{escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))])
    return f"{{{listed}}}"

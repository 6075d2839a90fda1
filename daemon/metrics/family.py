"""A family of metrics as text: the samples of one name, as lines that are the same in the Prometheus and OpenMetrics formats.

    Gauges(name, text, labels=...) ─▶ fill(rows) ─▶ lines ─▶ text(format): HELP, TYPE, lines

prometheus_client creates objects for each sample and each of its labels; with a hundred models that was most of a scrape's time.
The text is the same to the byte. Source: the Prometheus exposition format 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Self

from prometheus_client.utils import floatToGoString

#: Label texts that are kept from scrape to scrape: some twenty for each model version.
_MAX_LABELS = 1 << 15
#: Integers below are written as they are; Go begins to use exponents there.
_EXPONENTS = 1_000_000


class Family:
    """Holds the samples of a metric: ``lines`` has one line of text for each."""

    __slots__ = ("_help", "_labels", "kind", "lines", "name")

    def __init__(self, kind: str, name: str, text: str, value: float | None = None, labels: Sequence[str] = ()) -> None:
        """Creates a family, with one sample if ``value`` is given.

        Args:
          kind: the type that OpenMetrics names for it.
          name: the name of its samples; a counter's must end in ``_total``.
          text: the help text that describes the metric.
          value: the value of its only sample, where it has no labels; None: no sample yet.
          labels: the names of the labels of each sample.
        """
        self.kind, self.name = kind, name
        self.lines: list[str] = []
        self._help = text.replace("\\", r"\\").replace("\n", r"\n")
        self._labels = tuple(labels)
        if value is not None:
            self.fill([((), value)])

    def fill(self, rows: Iterable[tuple[Sequence[str], float]]) -> Self:
        """Adds samples, each given as the values of its labels and its own value. Returns the family."""
        name, names, lines = self.name, self._labels, self.lines
        for values, value in rows:
            number = f"{value}.0" if type(value) is int and 0 <= value < _EXPONENTS else floatToGoString(value)
            lines.append(f"{name}{_labelled(names, tuple(values))} {number}\n")
        return self

    def add(self, names: Sequence[str], values: Sequence[str], value: float, suffix: str = "") -> None:
        """Adds a sample whose label names are not the family's but ``names``. ``suffix``: appended to the family's name."""
        self.lines.append(f"{self.name}{suffix}{_labelled(tuple(names), tuple(values))} {floatToGoString(value)}\n")

    def text(self, is_openmetrics: bool) -> str:
        """Returns the family as text; "" if it has no samples, because a name without samples would promise some.

        ``is_openmetrics``: in the OpenMetrics format, else in Prometheus's own.
        """
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

    def observe(
        self, names: Sequence[str], values: Sequence[str], buckets: Iterable[tuple[str, int]], total: float
    ) -> None:
        """Adds a histogram with these labels (``names`` and ``values``).

        Args:
          buckets: upper bounds in rising order, the last one "+Inf", each with the number of values that are at most that large.
          total: the sum of all values.
        """
        within = 0
        for bound, within in buckets:
            self.add((*names, "le"), (*values, bound), within, "_bucket")
        self.add(names, values, within, "_count")
        self.add(names, values, total, "_sum")

    def __repr__(self) -> str:
        return f"<Family {self.kind} {self.name}: {len(self.lines)} samples>"


#: Metrics whose values go up and down; whose values only grow, with names that end in ``_total``; those that grow and have names
#: that OpenMetrics does not allow for them, such as Triton's; and histograms.
Gauges = functools.partial(Family, "gauge")
Counters = functools.partial(Family, "counter")
Unknowns = functools.partial(Family, "unknown")
Histograms = functools.partial(Family, "histogram")


def escaped(label: str) -> str:
    """Returns the value of a label, escaped to stand between double quotes."""
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@functools.lru_cache(_MAX_LABELS)
def _labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Returns labels as they follow a sample's name, such as ``{model="m",version="1"}``, sorted by name; "" without labels."""
    if not names:
        return ""
    listed = ",".join([f'{name}="{escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))])
    return f"{{{listed}}}"

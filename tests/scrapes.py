"""Reads metrics with Prometheus' own parser."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.daemon_process import PATIENCE


class Samples:
    """The values of one scrape."""

    def __init__(self, text: str) -> None:
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # That reader gives every counter the suffix, also those that have none in the text.
                name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
                self._values[name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """Returns the value of the one sample with these labels and no others."""
        return self._values[name, frozenset(labels.items())]

    def of(self, name: str, label: str) -> dict[str, float]:
        """Returns the samples of a metric: value of that label -> the sum of its samples."""
        found: dict[str, float] = {}
        for labels, value in self.series(name).items():
            found[dict(labels)[label]] = found.get(dict(labels)[label], 0) + value
        return found

    def series(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Returns the samples of a metric: labels -> value."""
        return {labels: value for (found, labels), value in self._values.items() if found == name}

    def model(self, name: str, model: str, version: int = 1, **labels: str) -> float:
        """Returns the value of a model's metric."""
        return self.value(name, model=model, version=str(version), **labels)


def scrape(address: str) -> Samples:
    """Scrapes HOST:PORT and returns its samples."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        return Samples(answer.read().decode())

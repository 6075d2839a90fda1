"""The alert rules and the board in deploy/: each metric and label they name exists, and promtool agrees where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tensord.daemon.metrics.exposition import render
from tensord.shm.durations import KINDS
from tests.daemon.metrics.test_exposition import SNAPSHOT
from tests.daemon_process import ROOT

DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool")
_NAME = re.compile(r"\b(?:tensord|nv)_[a-z_0-9]+\b")
_LABELS = re.compile(r"\b(?:by|on) \(([^)]*)\)")
#: Those of Prometheus itself, and of every histogram's buckets.
_OTHERS = {"job", "instance", "le"}


def expressions() -> Iterator[str]:
    """Yields every PromQL expression of the rules and of the board."""
    rules = (DEPLOY / "rules.yml").read_text()
    for folded, plain in re.findall(r"^ +expr: (?:\|\n((?:^ {10,}.*\n)+)|(.*)$)", rules, re.MULTILINE):
        yield folded or plain
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return found


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Returns the names that a scrape may have, with their labels, from a snapshot that has everything."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render(SNAPSHOT, "")[0].decode()):
        for sample in family.samples:
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            found.setdefault(name, set()).update(sample.labels)
    return found


def test_there_are_expressions() -> None:
    found = list(expressions())
    alerts = (DEPLOY / "rules.yml").read_text().count("- alert:")
    targets = sum(len(panel.get("targets", ())) for panel in panels())
    assert len(found) == alerts + targets + 3


def test_each_metric_exists(exposed: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = _NAME.findall(expression)
        assert names or expression.startswith("up{"), expression
        labels = set()
        for name in names:
            assert name in exposed, f"{name} in {expression}"
            labels |= exposed[name]
        for listed in _LABELS.findall(expression):
            assert set(listed.replace(" ", "").split(",")) <= labels | _OTHERS, expression
        for matched in re.findall(r"[{,]\s*([a-z_]+)(?:=~|!=|=)", expression):
            assert matched in labels | _OTHERS, f"{matched} in {expression}"


def test_descriptions_name_metrics_that_exist(exposed: dict[str, set[str]]) -> None:
    for name in _NAME.findall((DEPLOY / "rules.yml").read_text()):
        assert name in exposed or any(other.startswith(f"{name}_") for other in exposed), name


def test_every_histogram_is_on_the_board() -> None:
    text = (DEPLOY / "grafana.json").read_text()
    assert all(f"tensord_{kind}_duration_seconds_bucket" in text for kind in KINDS)


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in panels()
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "words",
    [("check", "rules", "rules.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")],
)
def test_promtool(words: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_reads_a_scrape() -> None:
    """It finds nothing but what Triton's names have to be, and a name that says its unit before its kind."""
    assert PROMTOOL is not None
    text = render(SNAPSHOT, "")[0]
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
    found = (done.stdout + done.stderr).decode().splitlines()
    assert [line for line in found if not line.startswith("nv_")] == []

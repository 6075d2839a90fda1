"""The alert rules and the board in deploy/: each metric and label they name exists, and promtool agrees where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tensord.daemon.metrics.exposition import render
from tensord.shm.durations import KINDS
from tests import repositories
from tests.daemon.metrics.test_exposition import SNAPSHOT
from tests.daemon_process import ROOT, DaemonProcess, wait_until
from tests.scrapes import scrape

DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool")
_NAME = re.compile(r"\b(?:tensord|nv)_[a-z_0-9]+\b")
_SELECTOR = re.compile(r"\b(tensord_\w+)(\{[^}]*\})?")
_LABELS = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_BODY = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
#: Those of Prometheus itself, and of every histogram's buckets.
_OTHERS = {"job", "instance", "le"}


def expressions() -> Iterator[str]:
    """Yields every PromQL expression of the rules and of the board."""
    yield from rules()
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def rules() -> list[str]:
    """Returns the PromQL expressions of the rules."""
    text = (DEPLOY / "rules.yml").read_text()
    found = re.findall(r"^ +expr: (?:\|\n((?:^ {10,}.*\n)+)|(.*)$)", text, re.MULTILINE)
    return [folded or plain for folded, plain in found]


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


def test_what_a_rule_reads_is_there_before_it_happens(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """
    1. A daemon is scraped once it is ready. 2. Requests are answered well, and badly; a worker and a front are killed.
    Result: what a rule names is there at first, counters at 0, and nothing new is there later: it would have no increase.
    """
    daemon = start_daemon(repositories.scale_model(tmp_path / "models"))
    daemon.wait_ready()
    # No GPU is here; those of tests/protocol/test_gpu_workers.py are asked the same.
    read = [found for rule in rules() for found in _SELECTOR.findall(rule) if "gpu" not in found[0]]
    assert len(read) > len(rules())

    def series() -> dict[str, dict[frozenset[tuple[str, str]], float]]:
        samples = scrape(daemon.metrics_url)
        return {name: samples.series(name) for name, _ in read}

    before = series()
    for name, matchers in read:
        wanted = {label: values.split("|") for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers)}
        for label, values in wanted.items():
            assert {*values} <= {dict(labels)[label] for labels in before[name]}, f"{name}{matchers}"
        chosen = {
            labels: value
            for labels, value in before[name].items()
            if all(dict(labels)[label] in values for label, values in wanted.items())
        }
        assert chosen, name
        # Of all requests some were answered: the test has waited for the daemon to be ready.
        if name.endswith(("_total", "_bucket")) and (name, matchers) != ("tensord_front_requests_total", ""):
            assert set(chosen.values()) == {0}, f"{name}{matchers}"
    for body in (_BODY, [{**_BODY[0], "shape": [1, 5]}]):
        daemon.infer("scale", body)
    for child, name in ((daemon.workers[0], "worker-0"), (daemon.fronts[0], "http-0")):
        child.kill()
        daemon.wait_log(rf"{name} \(process \d+\) is up", 2)
    wait_until(lambda: daemon.infer("scale", _BODY)[0] == 200, "an answer", daemon)
    after = series()
    assert sum(after["tensord_process_deaths_total"].values()) == 2
    assert {name: after[name].keys() - before[name].keys() for name in after} == {name: set() for name in after}


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

"""docs/fleet.md: the metrics, folders and keys that it names are there."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from tensord.config.layers import known_keys
from tensord.daemon.metrics.exposition import render
from tests.daemon.metrics.test_exposition import SNAPSHOT
from tests.daemon_process import ROOT

PAGE = (ROOT / "docs/fleet.md").read_text()


def test_metrics_exist() -> None:
    families = text_string_to_metric_families(render(SNAPSHOT, "")[0].decode())
    exposed = {sample.name for family in families for sample in family.samples} | {"tensord_queue_duration_seconds"}
    named = set(re.findall(r"`((?:tensord|nv)_\w+)", PAGE))
    assert named
    assert named <= exposed


def test_files_exist() -> None:
    named = set(re.findall(r"`((?:deploy|tests|bench)/[\w./-]+)`", PAGE))
    assert "deploy/kubernetes" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_keys_exist() -> None:
    sections = {key.partition(".")[0] for key in known_keys()}
    named = {key for key in re.findall(r"`(\w+\.\w+)", PAGE) if key.partition(".")[0] in sections}
    assert named
    assert named <= set(known_keys())

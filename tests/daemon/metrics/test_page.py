"""The page for browsers: complete without JavaScript, and nothing that a client has named is markup in it."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from typing import Any

from tensord.daemon.metrics import page

EVIL = "<script>alert('x')</script>\"&"


def status(**changes: Any) -> dict[str, Any]:
    worker = {"name": "worker-0", "pid": 7, "ready": True, "device": "cpu:0", "state": "idle", "deaths": 0}
    executing = {"model": EVIL, "version": 3, "seconds": 1.25}
    found = {
        "server_name": "tensord",
        "phase": "serving",
        "ready": True,
        "http": ["http://127.0.0.1:8000"],
        "grpc": [],
        "models": {"wanted": 2, "served": 1},
        "errors": [
            {
                "time": "2026-11-26T05:00:00.000+00:00",
                "front": "http-0",
                "protocol": "http",
                "code": "400",
                "model": "good",
                "id": "7",
                "client": "uid 1000",
                "error": "no " + EVIL,
                "trace_id": "",
            }
        ],
        "standings": [
            {"name": "good", "served": [1, 2], "reason": ""},
            {"name": EVIL, "served": [], "reason": "it " + EVIL},
        ],
        "workers": [worker | {"oldest_execution": executing}],
        "fronts": [{"name": "http-0", "pid": 8, "ready": True, "connections": 3}],
        "regions": {"uid 1000": {"count": 2, "byte_size": 4096}},
        "clients": {"owners": {"uid 1000": {"connections": 1, "lanes": 2}}},
        "parameters": {"versions": [{"model": "good", "version": 1, "number": 17, "sets": 3}]},
    }
    return found | changes


def rows(text: str) -> list[list[str]]:
    found = re.findall(r"<tr>(.*?)</tr>", text)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in found if "<td" in row]


def test_what_it_says() -> None:
    text = page.render(status()).decode()
    assert "1 of 2 models are served on http://127.0.0.1:8000" in text
    found = rows(text)
    assert ["good", "1, 2", ""] in found
    assert [EVIL, "", "it " + EVIL] in found
    assert ["uid 1000", "2 count, 4096 byte size"] in found
    assert ["good", "1", "17", "3"] in found
    # What a window of 500 pixels shows: when, and the sentence.
    assert ["2026-11-26 05:00:00", "400", "no " + EVIL, "good", "http-0", "7", "uid 1000", ""] in found
    assert '<td class="when">2026-11-26 05:00:00</td>' in text
    (front,) = (row for row in found if row[0] == "http-0")
    (worker,) = (row for row in found if row[0] == "worker-0")
    assert front[:3] == ["http-0", "8", "yes"]
    assert worker[-2:] == [f"{EVIL} 3, 1.2 s", ""]
    assert EVIL not in text
    assert '<span class="bad">not ready</span>' in page.render(status(ready=False)).decode()


def test_only_its_own_script_may_run() -> None:
    text, policy = page.render(status()).decode(), dict(page.HEADERS)["Content-Security-Policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)
    assert not re.search(r"""\son\w+=|style=["']""", text)


def test_tables_are_bounded() -> None:
    many = [{"name": f"m{number}", "served": [1], "reason": ""} for number in range(2000)]
    text = page.render(status(standings=many)).decode()
    assert "<p>1500 more</p>" in text
    assert len(rows(text)) < 520
    assert "<h2>Regions</h2>" in text
    assert "Regions" not in page.render(status(regions={})).decode()

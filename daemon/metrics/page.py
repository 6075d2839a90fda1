"""Renders the status page for browsers: models (why one is not served), processes, recent errors, clients, latencies over time.

Without JavaScript the page is complete and reloads itself every few seconds. With JavaScript the tables are exchanged in place,
and the histograms of ``/metrics`` are drawn. Nothing is loaded from elsewhere: the Content-Security-Policy forbids it.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/html; charset=utf-8"
#: Rows of a table; what is beyond is counted.
_MAX_ROWS = 500
_PROCESSES = (
    *("name", "pid", "ready", "device", "state", "connections", "lanes", "memory_mib", "threads", "uptime_s", "deaths"),
    *("oldest_execution", "oldest_load"),
)
#: The columns of the table of errors; a narrow window shows the first ones.
_ERRORS = ("time", "code", "error", "model", "front", "id", "client", "trace_id")
#: The classes of columns: a time stays in one line, and a sentence gets room where the table is wider than the window.
_CLASSES = {"time (UTC)": ' class="when"', "error": ' class="said"'}
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em auto; max-width: 80em; padding: 0 1em }
body { color: #222; background: #fff }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin: 1.6em 0 .3em }
table { border-collapse: collapse } th { font-weight: 600; color: #555 }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #ddd; vertical-align: top }
main { overflow-x: auto } .when { white-space: nowrap } .said { min-width: 16em }
.bad { color: #b00020 } .good { color: #16702f } svg { background: #f6f6f6; border: 1px solid #ddd }
#plots { display: flex; flex-wrap: wrap; gap: 1em } figure { margin: 0 } figcaption { font-size: .9em }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } th, td { border-color: #444 } th { color: #aaa }
  svg { background: #222; border-color: #444 } .bad { color: #ff8a80 } .good { color: #7bd88f } }
"""
_SCRIPT = """
"use strict";
const BUCKET = /^tensord_request_duration_seconds_bucket\\{(.*)\\} (\\S+)/gm;
const seen = new Map(), drawn = new Map();
function counts(text) {
  const models = new Map();
  for (const [, labels, count] of text.matchAll(BUCKET)) {
    const of = Object.fromEntries([...labels.matchAll(/(\\w+)="([^"]*)"/g)].map(m => [m[1], m[2]]));
    const key = of.model + " " + of.version;
    if (!models.has(key)) models.set(key, new Map());
    const bounds = models.get(key), le = of.le === "+Inf" ? Infinity : Number(of.le);
    bounds.set(le, (bounds.get(le) || 0) + Number(count));
  }
  return models;
}
function quantile(now, before, q) {
  const bounds = [...now.keys()].sort((a, b) => a - b);
  const more = bounds.map(le => now.get(le) - (before.get(le) || 0)), all = more[more.length - 1];
  if (!(all > 0)) return [null, 0];
  const at = more.findIndex(count => count >= q * all), low = at ? bounds[at - 1] : 0, below = at ? more[at - 1] : 0;
  const high = bounds[at] === Infinity ? low : bounds[at];
  return [low + (high - low) * (q * all - below) / Math.max(1, more[at] - below), all];
}
function line(values, top, colour) {
  const points = values.map((v, i) => v === null ? null : `${i * 4},${90 - 80 * v / top}`).filter(p => p);
  return `<polyline fill="none" stroke="${colour}" stroke-width="1.5" points="${points.join(" ")}"/>`;
}
function ms(v) { return v === null ? "-" : (1000 * v).toPrecision(3) + " ms"; }
function draw(key, history, rate) {
  let figure = drawn.get(key);
  if (!figure) {
    figure = document.createElement("figure");
    figure.append(document.createElement("figcaption"), document.createElement("div"));
    document.getElementById("plots").append(figure);
    drawn.set(key, figure);
  }
  const last = history[history.length - 1], top = Math.max(1e-9, ...history.flat().filter(v => v !== null));
  figure.firstChild.textContent = `${key}: p50 ${ms(last[0])}, p99 ${ms(last[1])}, ${rate.toFixed(1)} answers/s`;
  figure.lastChild.innerHTML = '<svg width="364" height="92" role="img" aria-label="latency">' +
    line(history.map(h => h[0]), top, "#2a6fdb") + line(history.map(h => h[1]), top, "#d9822b") + "</svg>";
}
let before = null, asked = 0;
async function look() {
  try {
    const [metrics, page] = await Promise.all([fetch("/metrics"), fetch("/")]);
    const now = performance.now(), found = counts(await metrics.text());
    const fresh = new DOMParser().parseFromString(await page.text(), "text/html");
    for (const id of ["summary", "tables"]) document.getElementById(id).replaceWith(fresh.getElementById(id));
    for (const [key, bounds] of found) {
      const former = before && before.get(key) || new Map();
      if (!before) continue;
      const [p50, n] = quantile(bounds, former, 0.5), [p99] = quantile(bounds, former, 0.99);
      const history = seen.get(key) || [];
      if (!n && !history.length) continue;
      history.push([p50, p99]);
      seen.set(key, history.slice(-90));
      draw(key, seen.get(key), n * 1000 / (now - asked));
    }
    before = found; asked = now;
    document.getElementById("gone").textContent = "";
  } catch (error) {
    document.getElementById("gone").textContent = "The daemon does not answer.";
  }
  setTimeout(look, 2000);
}
look();
"""


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


#: Header fields of the page: only what stands in it may run, and only this port may be asked.
HEADERS = (
    ("Content-Type", CONTENT_TYPE),
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        f"default-src 'none'; script-src {_digest(_SCRIPT)}; style-src {_digest(_STYLE)}; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
)


def render(status: Mapping[str, Any]) -> bytes:
    """Returns the status page of the daemon as HTML.

    ``status``: the fields that ``tensorctl status`` shows and two more fields. The field "standings" has the readiness of each
    model. The field "errors" has the latest errors that clients got, newest first.
    """
    name, ready = str(status["server_name"]), bool(status["ready"])
    models, urls = status["models"], [*status["http"], *status["grpc"]]
    parameters = [[of["model"], of["version"], of["number"], of["sets"]] for of in status["parameters"]["versions"]]
    parts = [
        "<!doctype html>\n",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>',
        '<meta name="viewport" content="width=device-width">',
        '<noscript><meta http-equiv="refresh" content="5"></noscript>',
        f"<style>{_STYLE}</style></head><body>",
        f'<h1>{html.escape(name)}</h1><p id="gone" class="bad"></p>',
        f'<p id="summary"><span class="{"good" if ready else "bad"}">{"ready" if ready else "not ready"}</span>, ',
        f"{html.escape(str(status['phase']))}, {models['served']} of {models['wanted']} models are served on ",
        f"{html.escape(' and '.join(urls))}</p>",
        '<div id="plots"></div>',
        '<noscript><p>Latencies are drawn with JavaScript; their numbers are in <a href="/metrics">/metrics</a>.</p></noscript>',
        '<main id="tables">',
        _table(
            "Models", ("name", "served versions", "what is not served, and why"), map(_standing, status["standings"])
        ),
        _table(
            "Processes",
            [column.replace("mib", "MiB").replace("_", " ") for column in _PROCESSES],
            [[row.get(key) for key in _PROCESSES] for row in [*status["fronts"], *status["workers"]]],
        ),
        _table(
            "Recent errors",
            [column.replace("time", "time (UTC)").replace("_", " ") for column in _ERRORS],
            [[_short(row, key) for key in _ERRORS] for row in status["errors"]],
        ),
        _table("Regions", ("owner", "what it has"), _owners(status["regions"])),
        _table("Clients on lanes", ("user", "what it has"), _owners(status["clients"]["owners"])),
        _table("Parameter sets that were pushed", ("model", "version", "number of main", "sets"), parameters),
        f"</main><script>{_SCRIPT}</script></body></html>\n",
    ]
    return "".join(parts).encode()


def _standing(model: Mapping[str, Any]) -> Sequence[Any]:
    return [model["name"], model["served"], model["reason"]]


def _short(error: Mapping[str, Any], key: str) -> Any:
    """Returns the field ``key`` of an error. The field "time" is cut to seconds."""
    value = error.get(key) or ""
    return value[:19].replace("T", " ") if key == "time" else value


def _owners(found: Mapping[str, Mapping[str, Any]]) -> list[Sequence[Any]]:
    return [
        (owner, ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items()))
        for owner, counts in found.items()
    ]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns an HTML table below its title, or "" if there are no rows."""
    found = list(rows)
    if not found:
        return ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    opened = [f"<td{_CLASSES.get(column, '')}>" for column in columns]
    body = "".join(
        "<tr>"
        + "".join(f"{td}{html.escape(_shown(cell))}</td>" for td, cell in zip(opened, row, strict=True))
        + "</tr>"
        for row in found[:_MAX_ROWS]
    )
    more = f"<p>{len(found) - _MAX_ROWS} more</p>" if len(found) > _MAX_ROWS else ""
    return f"<h2>{title}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _shown(value: Any) -> str:
    if value is None or type(value) is bool:
        return "yes" if value else ""
    if isinstance(value, Mapping):
        return f"{value['model']} {value['version']}, {value['seconds']:.1f} s"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

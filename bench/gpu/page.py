"""Formats the report as a Markdown page: the targets beside what was measured, then each part. It reads and writes no files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Target:
    """One target that a GPU host has to reach, a row of the page's first table."""

    what: str
    #: Of what ``serve`` found. Raises KeyError, TypeError: that was not measured.
    value: Callable[[Mapping[str, Any]], float]
    limit: float
    unit: str
    #: Whether more is better.
    least: bool = False

    def line(self, found: Mapping[str, Any]) -> str:
        """Formats the table's row: target, limit, measured value, reached or not."""
        wanted = f"{'>=' if self.least else '<='} {self.limit:g} {self.unit}"
        try:
            value = self.value(found)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return f"| {self.what} | {wanted} | not measured | |"
        reached = value >= self.limit if self.least else value <= self.limit
        return f"| {self.what} | {wanted} | {value:.4g} {self.unit} | {'yes' if reached else '**no**'} |"


def _batch(found: Mapping[str, Any]) -> float:
    """Returns the microseconds that the worker took for the largest batch. Raises ValueError: none had 32 rows."""
    batches = found["in the worker, of a batch of mlp, on cuda"]
    of = batches[max(batches, key=int)]
    if int(max(batches, key=int)) < 32:
        raise ValueError("there was no such batch")
    return float(sum(of[part] for part in ("compute_input", "compute_infer", "compute_output")))


TARGETS = (
    Target(
        "small-http-c1, above the CPU worker's",
        lambda found: found["small-http-c1 on cuda"]["p50_us"] - found["small-http-c1 on cpu"]["p50_us"],
        60,
        "us",
    ),
    Target("32 small requests together, in the worker", _batch, 300, "us"),
    Target("16 MiB system region, one client", lambda found: found["16MiB-http-system-c1 on cuda"]["p50_us"], 700, "us"),
    Target("16 MiB system region, four clients", lambda found: found["16MiB-http-system-c4 on cuda"]["rate"], 2500, "/s", True),
    Target("16 MiB CUDA region, by gRPC", lambda found: found["16MiB-grpc-cuda-c1 on cuda"]["p50_us"], 200, "us"),
    Target(
        "mlp-grpc-c32, of the CPU worker's",
        lambda found: found["mlp-grpc-c32 on cuda"]["rate"] / found["mlp-grpc-c32 on cpu"]["rate"],
        3,
        "x",
        True,
    ),
    Target("kill -9 under four clients", lambda found: found["kill -9 under four clients"]["clients"]["errors"], 0, "errors"),
)  # fmt: skip


def markdown(report: Mapping[str, Any]) -> str:
    """Formats the whole page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    host, served = report.get("host", {}), report.get("serve", {})
    yield "## On a GPU"
    yield ""
    packages = ", ".join(f"{name} {version}" for name, version in host.get("packages", {}).items())
    cards = "; ".join(host.get("cards", "").splitlines()) or f"{len(host.get('gpus', []))} GPUs"
    yield f"{host.get('date', '')}. {cards}. {host.get('cores', '')} cores of {host.get('processor', '')},"
    yield f"Linux {host.get('kernel', '')}, Python {host.get('python', '')}; {packages}; commit {host.get('commit', '')}."
    yield "By `python -m bench.gpu`."
    yield ""
    yield "| to be reached | wanted | found | |"
    yield "| --- | --- | --- | --- |"
    yield from (target.line(served) for target in TARGETS)
    for part in ("serve", "driver", "xla", "tests"):
        if part in report:
            yield ""
            yield f"### {part}"
            yield ""
            yield "| | |"
            yield "| --- | --- |"
            yield from (f"| {name} | {_cell(content)} |" for name, content in _rows(report[part]))


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields name and value of each figure; names of nested objects are joined by ": "."""
    for name, content in found.items():
        if (
            isinstance(content, Mapping)
            and "batches" not in content
            and not any(str(key).endswith("_us") for key in content)
        ):
            yield from ((f"{name}: {key}", value) for key, value in _rows(content) if key != "seconds")
        else:
            yield name, content


def _cell(content: Any) -> str:
    if isinstance(content, Mapping) and "p50_us" in content:
        more = [f"{content[key]:g} {unit}" for key, unit in (("GB_s", "GB/s"), ("rate", "/s")) if key in content]
        errors = [f"{content['errors']} errors"] if content.get("errors") else []
        return ", ".join([f"p50 {content['p50_us']:g} us", f"p99 {content.get('p99_us', 0):g} us", *more, *errors])
    if isinstance(content, Mapping) and "batches" in content:
        parts = [f"{part.removeprefix('compute_')} {us:g} us" for part, us in content.items() if part != "batches"]
        return f"{content['batches']} batches: {', '.join(parts)}"
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    if text.startswith("Traceback"):
        text = text.rstrip().rpartition("\n")[2]
    return " ".join(text.split())[:_LONGEST].replace("|", "\\|")

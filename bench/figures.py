"""Formats the figures of a side-by-side run, as ``python -m bench --json`` writes them: a Markdown table and a picture."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

#: Row -> times the peer's rate at least, part of its median latency at most; 0: not asked for.
ASKED = {
    "small-http-c1": (1.7, 0.6),
    "small-http-c4": (3.0, 0.35),
    "small-http-c16": (4.0, 0.3),
    "small-http-shm-c16": (3.5, 0.0),
    "small-grpc-c1": (1.2, 0.85),
    "small-grpc-c16": (1.6, 0.85),
    "small-grpc-stream-c4": (3.0, 0.0),
    "1MiB-http-c1": (2.5, 0.0),
    "1MiB-grpc-c1": (1.7, 0.0),
    "16MiB-http-c1": (3.0, 0.0),
    "16MiB-grpc-c1": (2.0, 0.0),
    "16MiB-http-shm-c1": (3.0, 0.33),
    "16MiB-http-shm-c4": (3.0, 0.33),
    "mlp-http-c32": (2.5, 0.0),
    "mlp-grpc-c32": (2.0, 0.0),
    "rnn-http-c16": (3.0, 0.0),
    "rnn-stream-c16": (3.0, 0.0),
    "rnn-stream-c64": (4.0, 0.0),
}


def markdown(figures: Path) -> str:
    """Formats a line for each row that was measured; a ratio that meets what was asked for is bold."""
    lines = ["| row | ours/s | peer/s | rate x | asked for | ours p50 us | peer p50 us | p50 x | asked for |"]
    lines.append("| --- " * 9 + "|")
    for name, row in json.loads(figures.read_text()).items():
        if "rate_ratio" not in row:
            continue
        rate, p50 = ASKED.get(name, (0.0, 0.0))
        lines.append(
            f"| {name} | {_median(row['ours'], 'infer_per_s'):.0f} | {_median(row['peer'], 'infer_per_s'):.0f} "
            f"| {_marked(row['rate_ratio'], rate, row['rate_ratio'] >= rate)} | {f'>= {rate:g}' if rate else ''} "
            f"| {_median(row['ours'], 'p50_us'):.0f} | {_median(row['peer'], 'p50_us'):.0f} "
            f"| {_marked(row['p50_ratio'], p50, row['p50_ratio'] <= p50)} | {f'<= {p50:g}' if p50 else ''} |"
        )
    return "\n".join(lines) + "\n"


def _median(rounds: list[dict[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


def _marked(ratio: float, asked: float, met: bool) -> str:
    return f"**{ratio:.2f}**" if asked and met else f"{ratio:.2f}"


def ratios(figures: Path, picture: Path) -> None:
    """Reads compare.py's figures and draws them into an SVG or PNG, as the suffix of ``picture`` says."""
    # Only who draws needs the library.
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tensord"
    from matplotlib import pyplot

    rows = {name: row for name, row in json.loads(figures.read_text()).items() if "rate_ratio" in row}
    names = list(reversed(rows))
    drawn, (rate, latency) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 0.4 * len(rows) + 1.2))
    for axes, key, title in (
        (rate, "rate_ratio", "rate, times Triton's (more is better)"),
        (latency, "p50_ratio", "median latency, part of Triton's (less is better)"),
    ):
        values = [rows[name][key] for name in names]
        bars = axes.barh(names, values, color="#3465a4")
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1, color="#555753", linewidth=1, linestyle=":")
        axes.set_xlim(0, max(1.2, *values) * 1.15)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    drawn.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)

"""Draws the figures of a side-by-side run: each row's rate and median latency relative to the peer's.

python -m bench.plot FIGURES.json PICTURE.svg        FIGURES.json as ``python -m bench --peer DIR --json`` writes it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


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


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ratios(Path(sys.argv[1]), Path(sys.argv[2]))

"""Measures an exported model (a program without Python) beside the model that it was exported from: its answers and its speed.

python -m bench.artifact [--rounds N] [--seconds N]        examples/models/minilm, and what ``tensord export`` writes of it

Both are loaded into this process with the worker's own code (``tensord.testing``) and get the same requests in turn. Printed
are the largest difference between their answers, and the time of the exported one divided by the time of the original: medians
over the rounds, of wall time and of processor time, which a busy machine changes less. A round of the last row computes 90
Gflop. A row that has taken ``--seconds`` ends with the rounds it has, and says how many. Exit status 1: a difference above 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tensord.testing

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "minilm"
#: Of the embeddings, whose length is 1.
MOST = 1e-5
#: Texts, and tokens of each: a sentence alone, a few paragraphs, a full batch of sentences.
REQUESTS = ((1, 20), (8, 128), (32, 32))
_WORDS = 30_000


def request(texts: int, tokens: int) -> dict[str, np.ndarray]:
    """Returns one request: random token ids for so many texts, of which every second one ends in a quarter of padding."""
    ids = np.random.default_rng(texts).integers(1000, _WORDS, (texts, tokens))
    mask = np.ones_like(ids)
    mask[1::2, tokens * 3 // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def took(call: Callable[[], Any]) -> tuple[float, float]:
    """Calls a function and returns the seconds that it took: wall time, and processor time of the whole process."""
    began, began_here = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - began_here


def ratios(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, seconds: float) -> tuple[float, float, int]:
    """Measures both functions in turn and returns the median ratios ours/theirs of wall and processor time, and how many rounds.

    Which of them is first alternates. After ``seconds`` no further round begins, but at least two are measured.
    """
    found: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    for number in range(rounds):
        if number > 1 and time.perf_counter() >= end:
            break
        if number % 2:
            other, own = took(theirs), took(ours)
        else:
            own, other = took(ours), took(theirs)
        found.append((own[0] / other[0], own[1] / other[1]))
    wall, processor = (statistics.median(column) for column in zip(*found, strict=True))
    return wall, processor, len(found)


def main() -> int:
    """Exports the model, loads it and the original, and compares them."""
    parser = argparse.ArgumentParser(
        prog="bench.artifact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row")
    arguments = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "minilm"
        subprocess.run([sys.executable, "-m", "tensord", "export", str(MODEL), str(exported)], cwd=ROOT, check=True)
        with tensord.testing.load(exported) as artifact, tensord.testing.load(MODEL) as model:
            for texts, tokens in REQUESTS:
                given = request(texts, tokens)
                made, expected = artifact(given)["embedding"], model(given)["embedding"]
                worst = max(worst, difference := float(np.abs(made - expected).max()))
                wall, processor, rounds = ratios(
                    lambda: artifact(given),  # noqa: B023
                    lambda: model(given),  # noqa: B023
                    arguments.rounds,
                    arguments.seconds,
                )
                row = f"minilm-artifact {texts} x {tokens}"
                said = f"difference {difference:.1e}, wall {wall:.3f}, processor {processor:.3f}, {rounds} rounds"
                print(f"{row:25} {said}", flush=True)
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())

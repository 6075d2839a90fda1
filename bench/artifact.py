"""A program without Python beside the model that it was exported from: the same answers, and as fast.

python -m bench.artifact [--rounds N] [--seconds N]        examples/models/minilm, and what ``tensord export`` writes of it

Both are loaded into this process by a worker's own parts (``tensord.testing``) and asked in turn, the same requests. Given are
the largest difference of their answers, and how long the exported one takes in parts of the other: medians over the rounds, of
wall time, and of processor time, which a busy machine changes less. A round of the last row computes 90 Gflop. A row that has
taken ``--seconds`` ends with the rounds it has, which it says. Exit status 1: a difference above 1e-5.
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
    """Ids that differ, the last quarter of each second text padding."""
    ids = np.random.default_rng(texts).integers(1000, _WORDS, (texts, tokens))
    mask = np.ones_like(ids)
    mask[1::2, tokens * 3 // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def took(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds: wall, and processor of the whole process."""
    began, began_here = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - began_here


def ratios(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, seconds: float) -> tuple[float, float, int]:
    """Of ours to theirs, medians of the ratios of each round: wall, and processor; and of how many rounds.

    Who is first takes turns. After ``seconds`` no round begins, but there are two of them at least.
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
    """Exports, loads, compares."""
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

"""The writer of the examples writes the same whoever else it writes for, and what it writes looks like its text."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from examples import train_writer
from tests.daemon_process import DaemonOf, DaemonProcess
from tests.examples.models import ROOT

pytestmark = pytest.mark.xdist_group("examples")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    sections: dict[str, dict[str, Any]] = {"repository": {"control_mode": "explicit", "load": ["writer"]}}
    return daemon_of(ROOT / "examples" / "models", sections, folder=tmp_path_factory.mktemp("writer"))


def write(daemon: DaemonProcess, text: str, **fields: Any) -> str:
    body = {"prompt": list(text.encode()), "count": 20, **fields}
    status, content = daemon.request("POST", "/v2/models/writer/generate", json.dumps(body).encode())
    assert status == 200, content
    written = json.loads(content)["character"]
    return bytes(written if isinstance(written, list) else [written]).decode()


def test_alone_and_among_64_bit_for_bit(daemon: DaemonProcess) -> None:
    asked = [
        ("def " * (1 + number % 9) + f"name_{number}(", {"seed": number, "temperature": number % 3 / 2})
        for number in range(64)
    ]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda each: write(daemon, each[0], **each[1]), asked))
    batches = json.loads(daemon.get("/v2/models/writer/stats")[1])["model_stats"][0]["batch_stats"]
    assert max(each["batch_size"] for each in batches) > 8
    for number in range(0, 64, 9):
        assert write(daemon, asked[number][0], **asked[number][1]) == together[number]
    assert len(set(together)) > 32


def test_it_writes_words(daemon: DaemonProcess) -> None:
    """Most words that it writes are words of the text it was trained on."""
    known = set(re.findall(r"[a-z]+", " ".join(train_writer.documents()).lower()))
    written = write(daemon, "Return the ", count=240, temperature=0.3).lower()
    words = re.findall(r"[a-z]+", written)[:-1]
    assert len(words) > 20
    assert len([word for word in words if word in known]) > 0.8 * len(words)


def test_beyond_its_window_it_goes_on(daemon: DaemonProcess) -> None:
    written = write(daemon, "x" * 250, count=200, temperature=1.0, seed=3)
    assert written
    assert set(written) <= {"\n", *map(chr, range(32, 127))}


@pytest.mark.parametrize("text", ["", "ä\x00"])
def test_any_text_may_begin(daemon: DaemonProcess, text: str) -> None:
    assert len(write(daemon, text, count=20, temperature=0.0)) <= 20


def test_what_it_must_not_be_asked(daemon: DaemonProcess) -> None:
    body = json.dumps({"prompt": [65] * 257}).encode()
    status, content = daemon.request("POST", "/v2/models/writer/generate_stream", body)
    assert (
        status,
        "axis 'length' of the request has size 257, the largest of its buckets is 256" in content.decode(),
    ) == (400, True)


@pytest.mark.release("the model that is served was trained before")
def test_training_learns() -> None:
    """A few steps of it, from the beginning."""
    text = train_writer.splits()["held_out"]
    params = train_writer.initial(np.random.default_rng(0))
    first = second = jax.tree.map(np.zeros_like, params)
    step = train_writer.make_step()
    batch = text[: 4 * 66].reshape(4, 66)
    values = []
    for count in range(1, 7):
        params, first, second, value = step(params, first, second, float(count), train_writer.share(count, 100), batch)
        values.append(float(value))
    assert values[0] > values[-1]
    assert values[0] == pytest.approx(np.log(len(train_writer.MODEL["CHARACTERS"]) + 1), abs=0.01)

"""Constants that C and Python both have are the same ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tensord.config.options import MAX_BUCKETS
from tensord.shm import channel, durations, messages, operations, prepared, status_page
from tensord.shm.common.scheduling import PARAMETERS, SET_PARAMETER
from tensord.workers.native.extensions import available
from tensord.workers.requests import timeline

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")
if available:
    from tensord.workers.native import _native


def test_constants_of_records() -> None:
    assert _native.MAX_DATAGRAM == channel.MAX_DATAGRAM
    assert _native.MAX_FDS == channel.MAX_FDS
    assert (_native.TIMING, _native.TIMESTAMPS) == (messages.TIMING, timeline.TIMESTAMPS)
    assert bytes([_native.INLINE_KIND]) == channel._WHOLE
    assert _native.MAX_NUMBERS == prepared.MAX_NUMBERS
    assert PARAMETERS["sequence_id"].most == _native.MAX_SEQUENCE_ID
    assert (PARAMETERS[SET_PARAMETER].most, operations.MAIN_SET) == (_native.MAX_SET_NAME, _native.MAIN_SET)


def test_sizes_of_the_histograms_of_durations() -> None:
    assert (len(durations.PROTOCOLS), len(durations.KINDS)) == (_native.PROTOCOLS, _native.DURATION_KINDS)
    assert durations.KINDS[:3] == ("request", "queue", "compute")
    assert _native.MAX_BUCKETS == MAX_BUCKETS


def test_words_of_the_status_page() -> None:
    page = status_page.StatusPage.create()
    words = page.memory.cast("Q")
    page.begin(0, [(1, 2)], 3, 9)
    page.set_state(status_page.WorkerState.EXECUTING, 7)
    page.beat(8)
    slot = page.word(0)
    assert words[_native.PAGE_STATE] == status_page.WorkerState.EXECUTING
    assert (words[_native.PAGE_SINCE], words[_native.PAGE_BEAT]) == (7, 8)
    assert words[slot : slot + 3].tolist() == [1, 1, 2]
    assert (words[slot + _native.SLOT_MODEL], words[slot + _native.SLOT_SINCE]) == (3, 9)
    assert _native.MAX_ROWS <= status_page.IDS_PER_SLOT
    words.release()
    page.close()


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse(Path(_native.__file__).parent.joinpath("_native.pyi").read_text())
    named = {
        each.target.id for each in stub.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    named |= {each.name for each in stub.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    assert named == {name for name in vars(_native) if not name.startswith("__")}

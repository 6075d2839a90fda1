"""The ways that requests take are written down, and shown as they were."""

from __future__ import annotations

import re

import pytest

from bench.route import (
    Entered,
    Row,
    Way,
    asked,
    bursts,
    documented,
    first_sentence,
    mapped,
    recorded,
    route_files,
    shown,
    through,
    until_sent,
)
from tests.daemon_process import ROOT

ARCHITECTURE = ROOT / "docs" / "architecture.md"


def way(*files: str) -> Way:
    """Returns recorded calls in these files, one after the other; "-" stands for a send."""
    return Way(
        [
            Entered(number, 1, "send" if file == "-" else "call", file, f"function{number}")
            for number, file in enumerate(files)
        ]
    )


def test_a_file_that_is_entered_again_is_a_return() -> None:
    assert way("a", "a", "b", "a", "b", "c").figures == (6, 3, 2)
    assert Way(()).figures == (0, 0, 0)


def test_what_comes_behind_the_last_send_is_not_the_requests() -> None:
    assert until_sent(way("a", "-", "b", "-", "c")) == Way([*way("a", "-", "b").calls[::2]])
    assert until_sent(way("a", "b")).figures == (2, 2, 0)


def test_a_pause_ends_an_iteration() -> None:
    calls = [Entered(at, 1, "call", "a", "f") for at in (0, 1000, 1_000_000_000, 1_000_000_500)]
    assert [len(each.calls) for each in bursts(Way(calls))] == [2, 2]


@pytest.fixture(scope="module")
def tried(leaves_nothing: None) -> dict[str, list[Row]]:
    """Asks for each row that docs/architecture.md has, and for one of a known kind; returns all tries."""
    names = dict.fromkeys([*documented(ARCHITECTURE.read_text()), "http-first", "http-known"])
    with recorded(ROOT, list(names)) as client:
        return {name: asked(client, name) for name in names}


def test_a_request_is_followed_through_front_and_worker(tried: dict[str, list[Row]]) -> None:
    first, known = shown(tried["http-first"]), shown(tried["http-known"])
    assert "daemon/http/connection.py" in first.front.files
    assert {file.split("/")[0] for file in first.worker.files} == {"shm", "workers"}
    for file in (*first.front.files, *first.worker.files):
        assert (ROOT / file).is_file()
    assert 0 < known.front.figures[0] < first.front.figures[0]
    assert known.worker.figures[0] < first.worker.figures[0]
    told = through(first).splitlines()
    assert told[0] == f"http-first, front: {', '.join(map(str, first.front.figures))}"
    assert sum(line.startswith("  back in ") for line in told) == first.front.figures[2] + first.worker.figures[2]


def test_a_map_is_read_as_it_is_written() -> None:
    row = Row(
        "http-first", way("shm/arena.py", "daemon/http/server.py", "shm/arena.py"), way("shm/lane.py", "shm/arena.py")
    )
    files = ["shm/arena.py", "daemon/http/server.py", "shm/lane.py"]
    # Another try meets a timer, and a third one is cut in two.
    tries = [Row("http-first", way(*files[:1]), way()), row, Row("http-first", row.front, way(*files, "shm/timer.py"))]
    text = mapped(tries, ROOT)
    assert text.count("\n") == 1 + len(files)
    assert documented(f"# Shape\n{text}\n## Words\n1. `shm/no.py`\n### Row (`none`)\n1. `x`") == {
        "http-first": {file: first_sentence(ROOT / file) for file in files}
    }


def test_routes_of_the_architecture_are_those_that_requests_take(tried: dict[str, list[Row]]) -> None:
    """Every file that all requests of a row enter is listed, and none that no request enters (some may meet a timer).

    Each is described by the first sentence of its docstring.

    ``python -m bench.route --map ROW`` writes a section anew.
    """
    routes = documented(ARCHITECTURE.read_text())
    assert routes
    for name, files in routes.items():
        entered = [set(route_files(row)) for row in tried[name]]
        assert set.intersection(*entered) - set(files) == set(), name
        assert set(files) - set.union(*entered) == set(), name
        assert files == {file: first_sentence(ROOT / file) for file in files}


def test_files_in_the_architectures_tables_of_ways_exist() -> None:
    ways = ARCHITECTURE.read_text().partition("## One request, one direction")[2].partition("## Lanes and arenas")[0]
    rows = re.findall(r"^\| .* \| (.*) \|$", ways, re.MULTILINE)
    # Two functions are named as well.
    files = {name for row in rows for name in re.findall(r"`([a-z_/.]+)`", row)} - {"take", "answers"}
    assert len(files) > 20
    for file in files:
        named = file if "." in file else f"{file}.py"
        assert any((ROOT / room / named).is_file() for room in ("daemon/http", "daemon", "workers")), file


def test_figures_of_both_count_a_file_once() -> None:
    row = Row("http-first", way("shm/a.py", "daemon/b.py", "shm/a.py"), way("workers/c.py", "shm/a.py"))
    assert row.line().split() == ["http-first", "3", "2", "1", "2", "2", "0", "5", "3", "1"]

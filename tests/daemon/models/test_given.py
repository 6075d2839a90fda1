"""Files that clients give: written where nobody else can write, read by no name that leaves the folder, and gone afterwards."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensord.daemon.models.given import GivenModels, Overrides
from tensord.daemon.models.repository import FoundModel
from tensord.shm.errors import InvalidArgument


@pytest.fixture
def given() -> Iterator[GivenModels]:
    made = GivenModels()
    yield made
    made.close()


def test_files_are_kept_until_they_are_dropped(given: GivenModels) -> None:
    first = given.keep("m", {"1/model.py": b"one", "1/data/words.txt": b"", "labels.txt": b"a"})
    second = given.keep("m", {"2/model.py": b"two"})
    assert (first.name, second.name) == ("m", "m")
    assert (first / "1" / "model.py").read_bytes() == b"one"
    assert (first / "1" / "data" / "words.txt").exists()
    root = first.parent.parent
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    given.drop(first)
    given.drop(first)
    assert [folder.name for folder in root.iterdir()] == [second.parent.name]
    given.close()
    assert not root.exists()


def test_files_lie_where_no_cleaner_comes(tmp_path: Path) -> None:
    """In the folder of the service's data, where a daemon that crashed has left some, and another one is at work."""
    place = tmp_path / "state"
    place.mkdir()
    (place / "tensord-models-left" / "1" / "m").mkdir(parents=True)
    (place / "notes").touch()
    given = GivenModels(place)
    assert [each.name for each in place.iterdir()] == ["notes"]
    folder = given.keep("m", {"1/model.py": b"one"})
    assert folder.is_relative_to(place)
    # As systemd-tmpfiles asks whether it may age a folder.
    cleaner = os.open(folder.parent.parent, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)
    GivenModels(place).close()
    assert (folder / "1" / "model.py").read_bytes() == b"one"
    given.close()
    given.close()
    assert [each.name for each in place.iterdir()] == ["notes"]


def test_first_loads_at_the_same_moment_share_a_folder(tmp_path: Path) -> None:
    """A second temporary folder would take the first one, and the files in it, along."""
    for _ in range(20):
        given, together = GivenModels(tmp_path), threading.Barrier(4)

        def keep(given: GivenModels = given, together: threading.Barrier = together) -> Path:
            together.wait()
            return given.keep("m", {"1/model.py": b"one"})

        with ThreadPoolExecutor(4) as threads:
            kept = [each.result() for each in [threads.submit(keep) for _ in range(4)]]
        assert len({folder.parent.parent for folder in kept}) == 1
        assert [(folder / "1" / "model.py").read_bytes() for folder in kept] == 4 * [b"one"]
        given.close()


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "..", "../x", "1/../../x", "/../x", "1//model.py", "1/", "1/.hidden", "1/a\0b", "1/a b", "1/é"),
        *("1\\model.py", "/".join("abcdefghi"), "1/" + "x" * 256),
    ],
)
def test_paths_that_are_none(given: GivenModels, path: str) -> None:
    with pytest.raises(InvalidArgument, match="no path of a file in a model"):
        given.keep("m", {"1/model.py": b"", path: b"x"})


def test_a_file_cannot_be_a_folder_too(given: GivenModels) -> None:
    folder = given.keep("m", {"1/model.py": b""})
    for files in ({"1": b"", "1/model.py": b""}, {"1/data/words/a": b"", "/1/data": b""}):
        with pytest.raises(InvalidArgument, match=r"is given as a file, and '.*' beneath it"):
            given.keep("m", files)
    assert list(folder.parent.parent.iterdir()) == [folder.parent]


def test_a_slash_before_a_path_means_the_models_folder(given: GivenModels) -> None:
    folder = given.keep("m", {"/1/model.py": b"one", "//labels.txt": b"a"})
    assert (folder / "1" / "model.py").read_bytes() == b"one"
    assert (folder / "labels.txt").read_bytes() == b"a"
    with pytest.raises(InvalidArgument, match=r"file '1/model\.py' is given twice"):
        given.keep("m", {"/1/model.py": b"one", "1/model.py": b"two"})


def test_until_the_files_change_or_the_model_is_gone() -> None:
    overrides = Overrides()
    m = FoundModel("m", Path("m"), fingerprint="1")
    assert overrides.of(m) == ""
    overrides.keep(m, '{"max_batch_size": 2}')
    assert overrides.of(m) == '{"max_batch_size": 2}'
    assert overrides.of(FoundModel("m", Path("m"), fingerprint="2")) == ""
    assert overrides.of(FoundModel("n", Path("n"), fingerprint="1")) == ""
    # A plain load without one ends it.
    overrides.keep(m, "")
    assert overrides.of(m) == ""
    overrides.keep(m, "{}")
    overrides.drop("m")
    overrides.drop("m")
    assert overrides.of(m) == ""

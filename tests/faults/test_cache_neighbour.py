"""Story: another user of the host gets at the directory of compiled code, and nothing of his is ever run.

1. A daemon has filled its cache; its operator opens the directory to everybody by mistake.
2. A neighbour, another user, puts code of his in the place of every entry, sealed with a secret that he has put there as well.
3. The daemon starts: with the directory still open, or after the operator has closed it again. It serves right answers, the
   neighbour's code has not run, the log says what was found, and the cache is whole again: the next start finds everything.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import repositories
from tests.daemon_process import DaemonProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

NEIGHBOUR = 54321
MAGIC = b"tensord-executable-4\r\n"


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def place(filled: Path) -> Iterator[Path]:
    """Yields a folder that the other user can enter, with the cache in it; pytest's own folders are closed to him."""
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(filled, Path(folder, "cache"))
        (Path(folder) / "his").mkdir()
        os.chown(Path(folder) / "his", NEIGHBOUR, NEIGHBOUR)
        yield Path(folder)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the cache of a daemon that has served."""
    place = tmp_path_factory.mktemp("filled")
    assert "cache directory" not in served(place, place / "first")
    return place / "cache"


def served(place: Path, folder: Path) -> str:
    """Starts a daemon on the cache, asks it, stops it; its log."""
    folder.mkdir()
    repository = repositories.scale_model(folder / "models")
    with DaemonProcess(folder, [repository], {"executables": {"cache_directory": str(place / "cache")}}) as daemon:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
        status, answer = daemon.infer("scale", [tensor])
        assert (status, answer["outputs"][0]["data"]) == (200, [7.0] * 4)
        daemon.stop()
        return daemon.log


def as_neighbour(script: str, place: Path) -> None:
    subprocess.run(["/bin/sh", "-euc", script], cwd=place, user=NEIGHBOUR, group=NEIGHBOUR, extra_groups=[], check=True)


def entries(place: Path) -> dict[str, tuple[int, int]]:
    """Returns owner and time of change of every file of the cache."""
    return {path.name: ((found := path.lstat()).st_uid, found.st_mtime_ns) for path in (place / "cache").iterdir()}


def attack(place: Path, mark: Path) -> None:
    """Does what the other user can do if he may write into the directory."""
    secret = bytes(range(32))
    (place / "his" / "secret").write_bytes(secret)
    for name in entries(place):
        if name == "secret":
            continue
        content = pickle.dumps(Code(mark))
        seal = hmac.digest(secret, name.encode() + b"\0" + content, hashlib.sha256)
        (place / "his" / name).write_bytes(MAGIC + seal + content)
    for path in (place / "his").iterdir():
        os.chown(path, NEIGHBOUR, NEIGHBOUR)
        path.chmod(0o644)
    as_neighbour(
        "umask 022; for file in his/*; do rm -f cache/${file#his/}; cp $file cache/; done; chmod 600 cache/secret",
        place,
    )


@pytest.mark.parametrize("closed_again", [False, True])
def test_a_neighbours_code(place: Path, tmp_path: Path, closed_again: bool) -> None:
    mark = place / "mark"
    names = set(entries(place))
    assert any(name.endswith(".executable") for name in names)

    (place / "cache").chmod(0o777)
    attack(place, mark)
    assert {owner for owner, _ in entries(place).values()} == {NEIGHBOUR}
    if closed_again:
        (place / "cache").chmod(0o700)
    second = served(place, tmp_path / "second")
    assert not mark.exists()
    if closed_again:
        assert f"ValueError: it belongs to another user (uid {NEIGHBOUR})" in second
    else:
        assert f"cache directory {place / 'cache'} was open to others (mode 0777)" in second
    assert stat.S_IMODE((place / "cache").stat().st_mode) == 0o700

    made = entries(place)
    assert set(made) == names
    assert {owner for owner, _ in made.values()} == {0}
    assert "cache directory" not in served(place, tmp_path / "third")
    assert entries(place) == made
    assert not mark.exists()


def test_the_attack_would_work(place: Path) -> None:
    """On who reads without asking whose it is: otherwise the story above says nothing."""
    (place / "cache").chmod(0o777)
    attack(place, place / "mark")
    path = next((place / "cache").glob("*.executable"))
    assert pickle.loads(path.read_bytes()[len(MAGIC) + 32 :]) == 0
    assert (place / "mark").exists()


def test_a_directory_that_a_neighbour_can_exchange(place: Path, tmp_path: Path) -> None:
    """It is not used at all; the daemon serves, and compiles at each start."""
    shutil.copytree(place / "cache", place / "cache.of.neighbour")
    place.chmod(0o777)
    made = entries(place)
    log = served(place, tmp_path / "second")
    assert f"others could exchange what is in directory {place} (uid 0, mode 0777)" in log
    assert entries(place) == made

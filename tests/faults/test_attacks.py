"""Every attack of the benchmark, for a moment each, beside ordinary clients of both protocols who must not notice.

1. A daemon serves; an ordinary client of each protocol asks and compares, all the time.
2. Attackers of a kind come, several at once, do their worst for a moment, and go.
3. No ordinary request failed or was answered wrongly, descriptors and the places of requests are given back, and nothing that an
   attacker did was answered with a traceback.
4. A body as large as may be finds its room.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.attack import largest_is_answered
from bench.attackers.catalogue import ATTACKS
from bench.bystander import bystanders
from bench.footprint import footprints
from tests import prepared
from tests.daemon_process import ROOT, DaemonProcess, nothing_left_behind, wait_until
from tests.generated import times

#: Each goes on until it has done something, too.
_SECONDS = times(10, 2) / 10
_AT_ONCE = 9
#: Of connections that come and go meanwhile, such as the ordinary clients' own.
_MORE_DESCRIPTORS = 8


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    # Large segments that are free are closed at once, so that descriptors are back where they were.
    options = {
        "arenas": {"byte_size": 32 << 20, "keep_byte_size": 0},
        "repository": {"control_mode": "explicit", "load": ["addsub", "identity", "slow", "pushed", "strings"]},
        # Twenty clients hold as much as they may, and few of them all that their user may.
        "clients": {
            "socket": str(folder / "clients.sock"),
            "response_byte_size": 32 << 20,
            "max_owner_response_byte_size": 64 << 20,
        },
    }
    models = [ROOT / "bench" / "models", ROOT / "bench" / "attackers" / "models"]
    with nothing_left_behind(), DaemonProcess(folder, models, options) as daemon:
        with bystanders(_addresses(daemon)):
            assert largest_is_answered(daemon.url)
        yield daemon


def _addresses(daemon: DaemonProcess) -> dict[str, str]:
    return {"http": daemon.url, "grpc": daemon.grpc_url, "lane": str(daemon.folder / "clients.sock")}


def _batches() -> list[list[str]]:
    names = list(ATTACKS)
    return [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]


@pytest.mark.parametrize("names", _batches(), ids=lambda names: names[0] + "-to-" + names[-1])
def test_others_do_not_notice(daemon: DaemonProcess, names: list[str]) -> None:
    before = footprints(daemon.pid)
    with bystanders(_addresses(daemon)) as seen:
        for counts in _attack(daemon, names):
            assert sum(counts.values()) > 0, "the attack did nothing"
    for protocol, client in seen.items():
        assert client["answers"] > 0, protocol
        assert client["failures"] == {}, protocol

    def given_back() -> bool:
        now = footprints(daemon.pid)
        return all(now[name].descriptors <= held.descriptors + _MORE_DESCRIPTORS for name, held in before.items())

    wait_until(given_back, "descriptors to be given back", daemon)
    assert largest_is_answered(daemon.url)
    assert "Traceback" not in daemon.log


def _attack(daemon: DaemonProcess, names: list[str]) -> list[dict[str, int]]:
    """Runs the attacks together; returns what each counted."""
    where = [daemon.url, daemon.grpc_url, str(_SECONDS), str(daemon.folder / "clients.sock")]
    done = prepared.run(["tests.faults.attackers_together", *where, *names])
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_the_log_is_short(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Attacks do not flood the log: their counts are written, one line a minute."""
    lines = daemon.log.splitlines()
    assert len(lines) < 200, "\n".join(lines[:50])

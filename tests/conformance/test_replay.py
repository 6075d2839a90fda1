"""Recorded requests against real daemons: every answer is the recorded one, or a difference that docs/protocol.md lists.

One daemon for each profile, with the flags and the models of the recordings' profiles.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import corpus, differences, published
from tests.daemon_process import PATIENCE, DaemonProcess

#: How often a case is replayed whose steps must fall into moments of some ten milliseconds, which a busy machine may not give.
TRIES = 3
#: Groups whose answers depend on what came before, through whichever front.
SHARED = ("schedule", "cache_warmup", "sequence")

pytestmark = pytest.mark.skipif(
    corpus.FOLDER is None, reason="no recordings: ../shared/conformance is absent and TENSORD_CONFORMANCE is not set"
)


class Replay:
    """Replays cases against daemons, which are started when a case first needs them."""

    def __init__(
        self, folders: pytest.TempPathFactory, running: contextlib.ExitStack, fronts: int = 1, workers: int = 1
    ) -> None:
        """Sets the daemons' options. ``fronts``: how many each protocol has."""
        self._folders = folders
        self._running = running
        self._options: dict[str, dict[str, Any]] = {
            # The recorded server compressed whatever a client accepts; here that is the operator's choice.
            "http": {"response_compression": "low", "processes": fronts},
            "grpc": {"processes": fronts},
            "workers": {"cpu": workers},
        }
        #: Profile -> the replayer, at its daemon.
        self._runners: dict[str, Any] = {}
        #: Cases that were replayed -> lines that no rule excuses.
        self.outcomes: dict[str, list[str]] = {}
        self.rules_used: set[str] = set()
        #: Inference requests that were answered with 200, and the answers.
        self.inferences: list[tuple[corpus.Step, corpus.Step]] = []

    def differences(self, case: corpus.Case) -> list[str]:
        """Replays a case. Returns how its answers differ, without differences that a rule of docs/protocol.md excuses."""
        profile = case.get("profile", "main")
        if profile not in self._runners:
            self._runners[profile] = self._start(profile)
        tries = TRIES if any(step.get("op") == "sleep" for step in corpus.replayer().steps_of(case)) else 1
        for _ in range(tries):
            left = self._replay(case, self._runners[profile])
            if not left:
                break
        self.outcomes[case["id"]] = left
        return left

    def _replay(self, case: corpus.Case, runner: Any) -> list[str]:
        replayer = corpus.replayer()
        with _alone_on_shared_memory() if corpus.touches_shared_memory(case) else contextlib.nullcontext():
            answers = runner.run(case)
        steps = replayer.steps_of(case)
        self.inferences += [pair for pair in zip(steps, answers, strict=True) if corpus.is_inference(*pair)]
        found = replayer.check_case(case, answers)
        left = []
        for line in found:
            rule = next((rule for rule in differences.read().rules if rule.excuses(line)), None)
            if rule is None:
                left.append(line)
            else:
                self.rules_used.add(rule.name)
        return left

    def _start(self, profile: str) -> Any:
        assert corpus.FOLDER is not None
        folder, models = self._folders.mktemp(profile), corpus.FOLDER / "models"
        daemon = DaemonProcess(folder, [models], self._options, corpus.arguments(profile), ready=False)
        self._running.enter_context(daemon)
        daemon.wait_log(r"supervisor\W+(not )?ready: ")
        runner = corpus.replayer().Runner(daemon.url, daemon.grpc_url, daemon.metrics_url)
        self._running.callback(runner.grpc.chan.close)
        return runner


@contextlib.contextmanager
def _alone_on_shared_memory() -> Iterator[None]:
    """Allows one replay at a time on a machine, because the recorded cases use fixed names in /dev/shm."""
    lock = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, f"another replay holds /dev/shm for longer than {PATIENCE} s"
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


@pytest.fixture(scope="module")
def replay(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with contextlib.ExitStack() as running:
        yield Replay(tmp_path_factory, running)


@pytest.fixture(scope="module")
def two_fronts(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with contextlib.ExitStack() as running:
        yield Replay(tmp_path_factory, running, fronts=2)


@pytest.fixture(scope="module")
def two_workers(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with contextlib.ExitStack() as running:
        yield Replay(tmp_path_factory, running, fronts=2, workers=2)


#: They say that the host has no GPU.
WITHOUT_GPUS = {
    "cfg_autocfg",
    "api_ModelConfig_autocfg",
    "shm_cuda_register_ok_shape",
    "shm_grpc_CudaSharedMemoryRegister_byte_size_name_raw_handle",
}


def recorded() -> list[Any]:
    """Returns every case as a parameter of a test."""
    mark = pytest.mark.cpu_workers("it was recorded without GPUs")
    return [pytest.param(case, marks=[mark] if case["id"] in WITHOUT_GPUS else []) for case in corpus.cases()]


def named(case: corpus.Case) -> str:
    return f"{case['group']}-{case['id']}"


@pytest.mark.parametrize("case", recorded(), ids=named)
def test_recorded_case(case: corpus.Case, replay: Replay) -> None:
    judge(case, replay)


@pytest.mark.parametrize("case", [case for case in corpus.cases() if case["group"] in SHARED], ids=named)
def test_recorded_case_with_two_fronts(case: corpus.Case, two_fronts: Replay) -> None:
    """Requests that one front has queued, kept or begun are known to the other."""
    judge(case, two_fronts)


@pytest.mark.parametrize("case", [case for case in corpus.cases() if case["group"] == "sequence"], ids=named)
def test_recorded_sequence_with_two_workers(case: corpus.Case, two_workers: Replay) -> None:
    """Wherever a sequence is, its requests find it."""
    judge(case, two_workers)


def judge(case: corpus.Case, replay: Replay) -> None:
    """Replays a case, and fails if its answers differ from the recorded ones and docs/protocol.md does not say so."""
    name = case["id"]
    found = replay.differences(case)
    listed = differences.read().of_case(name)
    if listed:
        assert found or name not in listed, f"{name} is answered as Triton does: delete it from docs/protocol.md"
        return
    # A quirk is an accident of the recorded server: either answer will do.
    if found and "quirk" not in case:
        pytest.fail(f"{name}:\n" + "\n".join(found), pytrace=False)


def test_every_listed_difference_is_one(replay: Replay) -> None:
    """Globs and rules: nothing is excused that does not happen. Judged when every case was replayed."""
    replayable = {case["id"] for case in corpus.cases()}
    if replay.outcomes.keys() != replayable:
        pytest.skip("only some of the cases were replayed")
    table = differences.read()
    differing = {name for name, found in replay.outcomes.items() if found}
    excused = {entry for name in differing for entry in table.of_case(name)}
    # Entries about recordings that are not here cannot be judged.
    judged = {entry for name in replayable for entry in table.of_case(name)}
    assert judged - excused == set(), "docs/protocol.md lists differences that are none"
    assert {rule.name for rule in table.rules} - replay.rules_used == set(), "docs/protocol.md has rules without use"


def test_accepted_requests_and_their_answers_fit_the_published_schemas(replay: Replay) -> None:
    if not published.validators():
        pytest.skip("no schemas: ../shared/seeds is absent")
    if not replay.inferences:
        pytest.skip("no inference was replayed")
    for step, answer in replay.inferences:
        document = json.loads(answer["body"])
        assert published.violations(published.TRITON_RESPONSE, document) == set(), document
        request = corpus.json_part(step)
        for schema in (published.TRITON_REQUEST, published.KSERVE_REQUEST):
            assert request is None or published.violations(schema, request) == set(), request

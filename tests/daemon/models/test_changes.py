"""Operations on models without processes: what is read again, what stays in force."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.config import model_config
from tensord.config.options import Options, Repository
from tensord.daemon.models import lifecycle, repository
from tensord.daemon.models.changes import Models
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.control_records import Load, Loaded, ModelGone, ModelState, Readiness, Unload
from tensord.shm.errors import Internal, InvalidArgument, NotFound, Unavailable, Unsupported
from tensord.shm.operations import LoadModel
from tensord.shm.record import Record
from tests.daemon.fake_daemon import write_model

SOURCE = b"def create(path, config, device): ...\n"


class ObedientWorker:
    """Answers every record at once."""

    name = "worker-0"

    def __init__(self) -> None:
        self.models: Models | None = None
        self.loads: list[Load] = []
        #: Why it loads nothing.
        self.reason = ""

    def send(self, record: Record, *fds: int) -> None:
        assert self.models is not None
        loop = asyncio.get_running_loop()
        if isinstance(record, Load):
            self.loads.append(record)
            config = model_config.to_json(model_config.from_bytes(record.config))
            loop.call_soon(
                self.models.loaded, 1, Loaded(record.name, record.version, reason=self.reason, config=config)
            )
        elif isinstance(record, Unload):
            loop.call_soon(self.models.unloaded, 1, record.name, record.version)


def supervisor(workers: dict[int, ObedientWorker], publish: Callable[[Any], None]) -> Any:
    """Returns the parts of a supervisor that the models use."""
    pool = SimpleNamespace(by_incarnation=workers, devices=["cpu:0"])
    parameters = SimpleNamespace(forget=lambda name, version, outdated: None, outdate=lambda name, version: None)
    return SimpleNamespace(workers=pool, parameters=parameters, model_changed=publish, isolate=lambda wanted: None)


def serving(folder: Path) -> tuple[Models, ObedientWorker, list[Readiness]]:
    published: list[Readiness] = []

    def publish(record: ModelState | ModelGone | Readiness) -> None:
        if isinstance(record, Readiness):
            published.append(record)

    worker = ObedientWorker()
    options = Options(repository=Repository(paths=(str(folder),), control_mode="explicit"))
    models = Models(options, supervisor({1: worker}, publish))
    worker.models = models
    models.worker_joined(1, "cpu:0")
    return models, worker, published


def failing(*_: Any) -> None:
    """Stands for a function that opens a file while this process may open no more."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def take(states: ModelStates, record: ModelState | ModelGone | Readiness) -> None:
    """Does with a record what a front does."""
    if isinstance(record, ModelState):
        states.update(record)
    elif isinstance(record, ModelGone):
        states.remove(record)


def batch(worker: ObedientWorker) -> int:
    """Returns the ``max_batch_size`` of the worker's last load."""
    return int(model_config.from_bytes(worker.loads[-1].config).max_batch_size)


async def test_an_override_stays_until_the_files_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every load that is asked for is done, and one that finds nothing changed says so."""
    caplog.set_level("INFO")
    model = write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    await models.load(LoadModel("m", config='{"max_batch_size": 4}'))
    assert batch(worker) == 4
    assert "loaded again" not in caplog.text
    await models.load(LoadModel("m"))
    assert (batch(worker), len(worker.loads)) == (4, 2)
    said = "model 'm': its files are those that it was loaded from; it is loaded again"
    assert caplog.text.count(said) == 1
    os.utime(model / "1" / "model.py", (1, 1))
    await models.load(LoadModel("m"))
    assert (batch(worker), len(worker.loads)) == (0, 3)
    assert caplog.text.count(said) == 1
    await models.load(LoadModel("m"))
    assert len(worker.loads) == 4


async def test_an_override_goes_with_its_model(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    await models.load(LoadModel("m", config='{"max_batch_size": 4}'))
    models.unload("m")
    await models.load(LoadModel("m"))
    assert batch(worker) == 0


@pytest.mark.parametrize("unloaded", [False, True])
async def test_an_override_outlives_a_lack_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: bool
) -> None:
    """The options are read again while no file of the model can be opened. It may be unloaded then."""
    write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    await models.load(LoadModel("m", config='{"max_batch_size": 4}'))
    options = Repository(paths=(str(tmp_path),), control_mode="explicit", load=("*",))
    with monkeypatch.context() as lacking:
        lacking.setattr(repository, "_read", failing)
        (outcome,) = models.begin(await models.scan(options), options)
    if unloaded:
        models.unload("m")
    assert await outcome == (lifecycle.UNLOADED if unloaded else "")
    assert models.lifecycle.is_ready("m") != unloaded
    await models.load(LoadModel("m"))
    assert batch(worker) == (0 if unloaded else 4)


async def test_an_overridden_model_that_is_unloaded_while_it_is_read_stays_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    await models.load(LoadModel("m", config='{"max_batch_size": 4}'))
    options = Repository(paths=(str(tmp_path),), control_mode="explicit", load=("*",))
    (outcome,) = models.begin(await models.scan(options), options)
    models.unload("m")
    assert await outcome == lifecycle.UNLOADED
    assert (models.lifecycle.is_ready("m"), len(worker.loads)) == (False, 1)


async def test_an_override_that_failed_is_forgotten_and_leaves_the_former_in_force(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    await models.load(LoadModel("m", config='{"max_batch_size": 4}'))
    worker.reason = "it does not fit"
    for config, sentence in (
        ('{"max_batch_size": 5}', "it does not fit"),
        ('{"max_batch_size": -5}', "max_batch_size is -5"),
        ('{"version_policy": {"specific": {"versions": [7]}}}', "at least one version must be available"),
    ):
        with pytest.raises(InvalidArgument, match=sentence):
            await models.load(LoadModel("m", config=config))
    worker.reason = ""
    await models.load(LoadModel("m"))
    assert batch(worker) == 4


async def test_an_override_stands_in_the_place_of_a_configuration_that_is_wrong(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config='model_repository_agents { agents { name: "a" } }')
    models, worker, _ = serving(tmp_path)
    with pytest.raises(Unsupported, match=r"failed to load 'm': model 'm': model_repository_agents.agents: no "):
        await models.load(LoadModel("m"))
    await models.load(LoadModel("m", config='{"max_batch_size": 4}'))
    assert batch(worker) == 4


async def test_what_has_no_effect_is_told_once_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path, "m", config='model_metrics { } metric_tags { key: "a" value: "b" }')
    models, _, _ = serving(tmp_path)

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    await models.load(LoadModel("m"))
    expected = [
        "model 'm': metric_tags is without effect: metrics are labelled with model and version only",
        "model 'm': model_metrics is without effect: a model's metrics are the same for all models",
    ]
    assert warnings() == expected
    await models.load(LoadModel("m"))
    assert warnings() == expected
    os.utime(model / "1" / "model.py", (1, 1))
    await models.load(LoadModel("m"))
    assert warnings() == 2 * expected


async def test_refusals(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    for name in ("", ".", "..", "a/b", "/etc", "nope"):
        for config in ("", "{}"):
            with pytest.raises(Internal, match="failed to poll from model repository"):
                await models.load(LoadModel(name, config=config))
        with pytest.raises(InvalidArgument, match="files are given without a 'config'"):
            await models.load(LoadModel(name, files={"1/model.py": SOURCE}))
        if name != "nope":
            with pytest.raises(InvalidArgument, match="no model can have that name"):
                await models.load(LoadModel(name, config="{}", files={"1/model.py": SOURCE}))
    for path in ("../../x/model.py", "1/../../x", "1//x"):
        with pytest.raises(InvalidArgument, match="no path of a file in a model"):
            await models.load(LoadModel("m", config="{}", files={path: SOURCE}))
    assert not worker.loads


async def settled(models: Models) -> None:
    """Waits until the threads that remove folders have ended."""
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_given_files_are_the_model_until_the_next_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    models, worker, _ = serving(tmp_path)
    files = {"2/model.py": SOURCE, "4/model.py": SOURCE}
    await models.load(LoadModel("m", config='{"version_policy": {"all": {}}}', files=files))
    given = Path(worker.loads[0].model_path)
    assert [load.version for load in worker.loads] == [2, 4]
    assert (given.name, (given / "4" / "model.py").read_bytes()) == ("m", SOURCE)
    assert [entry["version"] for entry in await models.index(True)] == ["2", "4"]
    await models.load(LoadModel("m"))
    assert Path(worker.loads[2].model_path) == tmp_path / "m"
    await settled(models)
    assert not given.exists()
    models.close()


async def test_given_files_go_with_their_model(tmp_path: Path) -> None:
    """A name that is in no repository, replaced by a second gift, refused a third, and unloaded."""
    models, worker, _ = serving(tmp_path)
    for _ in range(2):
        await models.load(LoadModel("late", config="{}", files={"1/model.py": SOURCE}))
    first, second = (Path(load.model_path) for load in worker.loads)
    with pytest.raises(InvalidArgument, match='no field named "no"'):
        await models.load(LoadModel("late", config='{"no": 1}', files={"1/model.py": SOURCE}))
    with pytest.raises(Internal):
        await models.load(LoadModel("late"))
    assert second.exists()
    models.unload("late")
    while models.lifecycle.folders("late"):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await settled(models)
    assert [first.exists(), second.exists()] == [False, False]
    assert list(second.parent.parent.iterdir()) == []
    models.close()
    assert not second.parent.parent.exists()


async def test_a_refused_model_heals(tmp_path: Path) -> None:
    """Fronts learn of a name that cannot be served, and that it can be after all; the index says why."""
    model = write_model(tmp_path, "m", config="nonsense: 1")
    models, _, published = serving(tmp_path)
    options = Repository(paths=(str(tmp_path),))
    (outcome,) = [await future for future in models.begin(await models.scan(options), options)]
    assert "nonsense" in outcome
    told, readiness = models.states()
    assert readiness == Readiness(False, 1, 1, ("m",))
    assert isinstance(told, ModelState)
    assert (told.name, told.version, told.state, "nonsense" in told.reason) == ("m", 0, "UNAVAILABLE", True)
    assert published == [readiness]
    (standing,) = models.standings()
    assert "nonsense" in standing.reason
    assert await models.index(False) == [{"name": "m", "state": "UNAVAILABLE", "reason": standing.reason}]
    assert await models.index(True) == []
    (model / "config.pbtxt").unlink()
    outcomes = models.begin(await models.scan(options), options)
    assert [await future for future in outcomes] == [""]
    assert published[-1] == Readiness(True, 1)
    assert [state.version for state in models.states() if isinstance(state, ModelState)] == [1]
    assert [standing.reason for standing in models.standings()] == [""]


@pytest.mark.parametrize("end", ["read", "refused", "gone", "unloaded"])
async def test_a_new_model_that_cannot_be_read_for_want_of_descriptors_is_not_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """The daemon starts, and can open no file of a model for a while: fronts, also later ones, refuse requests for now."""

    folder = write_model(tmp_path, "m")
    published = list[Any]()
    worker, options = (
        ObedientWorker(),
        Options(repository=Repository(paths=(str(tmp_path),), control_mode="explicit", load=("*",))),
    )
    models = worker.models = Models(options, supervisor({1: worker}, published.append))
    models.worker_joined(1, "cpu:0")
    with monkeypatch.context() as lacking:
        lacking.setattr(repository, "_read", failing)
        (outcome,) = models.begin(await models.scan(options.repository), options.repository)
        await asyncio.sleep(0)
        for told in (published, models.states()):
            states = ModelStates()
            for record in told:
                take(states, record)
            with pytest.raises(Unavailable, match="cannot be served now: the model cannot be read: "):
                states.find("m")
        assert [each.get("state") for each in await models.index(ready=False)] == ["UNAVAILABLE"]
        assert [standing.reason for standing in models.standings()] == ["loading"]
        while "is loaded later" not in caplog.text:  # it was tried once more
            await asyncio.sleep(0.01)
    if end == "refused":
        (folder / "config.pbtxt").write_text("!")
    elif end == "gone":
        shutil.rmtree(folder)
    elif end == "unloaded":
        models.unload("m")
    await outcome
    assert len(worker.loads) == (end == "read")
    for told in (published, models.states()):
        states = ModelStates()
        for record in told:
            take(states, record)
        if end == "read":
            assert states.find("m").version == 1
        else:
            with pytest.raises(NotFound):
                states.find("m")


async def test_a_broken_edit_of_what_serves(tmp_path: Path) -> None:
    """The host stays ready, and whoever asks learns what is wrong."""
    model = write_model(tmp_path, "m")
    models, _, published = serving(tmp_path)
    options = Repository(paths=(str(tmp_path),))
    assert [await future for future in models.begin(await models.scan(options), options)] == [""]
    (model / "config.pbtxt").write_text("nonsense: 1")
    assert "nonsense" in await models.begin(await models.scan(options), options)[0]
    assert published[-1] == Readiness(True, 1)
    (standing,) = models.standings()
    assert (standing.served, "nonsense" in standing.reason) == ((1,), True)
    assert await models.index(False) == [{"name": "m", "version": "1", "state": "READY"}]


async def test_a_name_in_two_repositories(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_model(tmp_path / folder, "m")
    options = Repository(paths=(str(tmp_path / "one"), str(tmp_path / "two")), control_mode="explicit")
    models = Models(Options(repository=options), supervisor({}, lambda _: None))
    # As Triton lists it, whether anybody asked for it or not.
    entry = {"name": "m", "state": "UNAVAILABLE", "reason": "model appears in two or more repositories"}
    assert await models.index(False) == [entry]
    with pytest.raises(Internal, match="failed to poll"):
        await models.load(LoadModel("m"))
    assert await models.index(False) == [entry]
    assert models.readiness == Readiness()


async def test_what_a_client_misspells_is_not_counted(tmp_path: Path) -> None:
    write_model(tmp_path, "broken", config="nonsense: 1")
    models, _, published = serving(tmp_path)
    options = Repository(paths=(str(tmp_path),), control_mode="explicit")
    assert models.begin(await models.scan(options), options) == []
    assert await models.index(False) == [{"name": "broken"}]
    for name in ("nope", "broken"):
        with pytest.raises(Internal, match="failed to poll"):
            await models.load(LoadModel(name))
    assert published == [Readiness(True, 0)]
    (entry,) = await models.index(False)
    assert (entry["name"], entry["state"], "nonsense" in entry["reason"]) == ("broken", "UNAVAILABLE", True)


async def test_what_is_in_no_repository_any_more_is_not_counted(tmp_path: Path) -> None:
    """A model that could not be read, and one without a version, are taken away."""
    for control in ("none", "explicit"):
        broken = write_model(tmp_path, "broken", config="nonsense: 1")
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.pbtxt").touch()
        models, _, published = serving(tmp_path)
        options = Repository(paths=(str(tmp_path),), control_mode=control, load=("*",) if control == "explicit" else ())
        for outcome in models.begin(await models.scan(options), options):
            assert await outcome
        assert published[-1] == Readiness(False, 2, 2, ("broken", "empty"))
        shutil.rmtree(broken)
        shutil.rmtree(tmp_path / "empty")
        assert models.begin(await models.scan(options), options) == []
        assert published[-1] == Readiness(True, 0)
        assert await models.index(False) == []


async def test_a_listed_name_that_appears_later(tmp_path: Path) -> None:
    """A reload tries the names of an explicit list again that do not serve; a model that a client unloaded stays unloaded."""
    models, worker, published = serving(tmp_path)
    options = Repository(paths=(str(tmp_path),), control_mode="explicit", load=("late",))
    assert "in no repository" in await models.begin(await models.scan(options), options)[0]
    assert await models.index(False) == [{"name": "late", "state": "UNAVAILABLE", "reason": "it is in no repository"}]
    write_model(tmp_path, "late")
    assert await models.begin(await models.scan(options), options)[0] == ""
    assert published[-1] == Readiness(True, 1)
    models.unload("late")
    assert published[-1] == Readiness(True, 0)
    assert models.begin(await models.scan(options), options) == []
    assert len(worker.loads) == 1


async def test_the_list_of_a_reload_adds(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path, name)
    models, worker, _ = serving(tmp_path)
    for listed, loads in ((("a",), ["a"]), (("a", "b"), ["a", "b"]), (("b",), ["a", "b"])):
        options = Repository(paths=(str(tmp_path),), control_mode="explicit", load=listed)
        for future in models.begin(await models.scan(options), options):
            assert await future == ""
        assert [load.name for load in worker.loads] == loads
    assert [entry["state"] for entry in await models.index(False)] == ["READY", "READY"]


async def test_what_clients_gave_stays_when_a_reload_loads_everything(tmp_path: Path) -> None:
    for name in ("configured", "given"):
        write_model(tmp_path, name)
    models, worker, _ = serving(tmp_path)
    options = Repository(paths=(str(tmp_path),), control_mode="explicit", load=("*",))

    async def reload() -> list[str]:
        before = len(worker.loads)
        for outcome in models.begin(await models.scan(options), options):
            assert await outcome == ""
        return [load.name for load in worker.loads[before:]]

    assert await reload() == ["configured", "given"]
    await models.load(LoadModel("configured", config='{"max_batch_size": 4}'))
    await models.load(LoadModel("given", config='{"max_batch_size": 5}', files={"1/model.py": SOURCE}))
    assert await reload() == []
    # Files that changed are read, without what was given for the former ones.
    os.utime(tmp_path / "configured" / "1" / "model.py", (1, 1))
    assert (await reload(), batch(worker)) == (["configured"], 0)
    await models.load(LoadModel("given"))
    assert batch(worker) == 0
    models.close()


@pytest.mark.parametrize("control", ["none", "explicit"])
async def test_a_repository_that_cannot_be_read_keeps_its_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, control: str
) -> None:
    for folder, name in (("one", "a"), ("two", "b")):
        write_model(tmp_path / folder, name)
    models, worker, published = serving(tmp_path)
    paths = (str(tmp_path / "one"), str(tmp_path / "two"))
    load = ("*",) if control == "explicit" else ()
    options = Repository(paths=paths, control_mode=control, load=load, exit_on_error=False)

    async def served() -> list[str]:
        for outcome in models.begin(await models.scan(options), options):
            assert await outcome == ""
        return sorted(models.lifecycle.ready_models())

    assert await served() == ["a", "b"]
    (tmp_path / "two").rename(tmp_path / "away")
    assert await served() == ["a", "b"]
    assert "cannot be read: No such file or directory; 1 models of it stay as they are; a reload" in caplog.text
    assert published[-1].names == ("repository 'two'",)
    (tmp_path / "away").rename(tmp_path / "two")
    assert await served() == ["a", "b"]
    assert len(worker.loads) == 2
    # One that is no longer named goes.
    options = Repository(paths=paths[:1], control_mode=control, load=load, exit_on_error=False)
    assert await served() == (["a"] if control == "none" else ["a", "b"])


class DeadlyWorker(ObedientWorker):
    """Dies, as often as it is told, of the model whose name it is told; it is replaced at once."""

    def __init__(self) -> None:
        super().__init__()
        self.dies_of = ""

    def send(self, record: Record, *fds: int) -> None:
        if isinstance(record, Load) and record.name == self.dies_of:
            self.die()
        else:
            super().send(record)

    def die(self) -> None:
        assert self.models is not None
        loop = asyncio.get_running_loop()
        loop.call_soon(self.models.worker_left, 1, "was killed", ["cpu:0"])
        loop.call_soon(self.models.worker_joined, 1, "cpu:0")


_TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'


def made_of(folder: Path, name: str, member: str, last: str = "") -> None:
    """Writes an ensemble of one model, or of two, one behind the other."""
    tensors = ["x", "between", "y"] if last else ["x", "y"]
    step = "".join(
        f'step {{ model_name: "{each}" model_version: -1 input_map {{ key: "x" value: "{given}" }} '
        f'output_map {{ key: "y" value: "{made}" }} }}'
        for each, given, made in zip((member, last), tensors, tensors[1:], strict=False)
    )
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(f'platform: "ensemble" {_TENSORS} ensemble_scheduling {{ {step} }}')


async def loaded(folder: Path, name: str) -> tuple[Models, DeadlyWorker, ModelStates]:
    """Loads a model of those in a folder, which load when they are asked for; returns what a front knows of them, too."""
    table, worker = ModelStates(), DeadlyWorker()
    options = Options(repository=Repository(paths=(str(folder),), control_mode="explicit"))
    models = worker.models = Models(options, supervisor({1: worker}, lambda record: take(table, record)))
    models.worker_joined(1, "cpu:0")
    await models.load(LoadModel(name))
    return models, worker, table


@pytest.mark.parametrize("served", [False, True])
async def test_an_ensemble_of_a_model_that_is_given_up_says_so_and_comes_back_with_it(
    tmp_path: Path, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model kills workers as it is first loaded, or as a worker that has served it is replaced."""
    monkeypatch.setattr(lifecycle, "FIRST_RETRY", 0.02)
    write_model(tmp_path, "m", config=_TENSORS)
    made_of(tmp_path, "e", "m")
    made_of(tmp_path, "outer", "e")
    table, worker = ModelStates(), DeadlyWorker()
    options = Options(repository=Repository(paths=(str(tmp_path),)))
    models = worker.models = Models(options, supervisor({1: worker}, lambda record: take(table, record)))
    worker.dies_of = "" if served else "m"
    models.worker_joined(1, "cpu:0")
    loads = models.begin(await models.scan(options.repository), options.repository)
    failed = await asyncio.gather(*loads)
    assert all(map(bool, failed)) != served, failed
    if served:
        worker.dies_of = "m"
        worker.die()
        while not table._models["m"][1].awaited:
            await asyncio.sleep(0)
    for name in ("m", "e", "outer"):
        for version in (0, 1):
            with pytest.raises(Unavailable, match=f"model '{name}'.* cannot be served now: .*worker processes died"):
                table.find(name, version)
    worker.dies_of = ""
    while not table.ready_versions("outer"):
        await asyncio.sleep(0.01)
    assert [table.find(name).state for name in ("m", "e", "outer")] == ["READY"] * 3
    models.close()


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_an_ensemble_awaits_no_model_that_does_not_come(tmp_path: Path, fails: bool, served: bool) -> None:
    """The model was unloaded while it was given up, or loaded anew in vain: the ensemble is as unknown as the model."""
    write_model(tmp_path, "m", config=_TENSORS)
    made_of(tmp_path, "e", "m")
    write_model(tmp_path, "first")
    models, worker, table = await loaded(tmp_path, "e" if served else "first")
    worker.dies_of = "m"
    if served:
        worker.die()
    else:
        with pytest.raises(InvalidArgument, match="worker processes died"):
            await models.load(LoadModel("e"))
    while not table._models["m"][1].awaited:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        table.find("e")
    if fails:
        worker.dies_of, worker.reason = "", "its files are wrong"
        with pytest.raises(InvalidArgument):
            await models.load(LoadModel("m"))
    else:
        models.unload("m")
        await settled(models)
    for name in ("m", "e"):
        with pytest.raises(NotFound):
            table.find(name)
    models.close()


async def test_an_ensemble_that_workers_die_of_is_tried_again_as_any_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of it was unloaded and is loaded, and workers die, for want of memory, while they load the ensemble with it."""
    monkeypatch.setattr(lifecycle, "FIRST_RETRY", 0.02)
    write_model(tmp_path, "m", config=_TENSORS)
    made_of(tmp_path, "e", "m")
    models, worker, table = await loaded(tmp_path, "e")
    worker.dies_of = "e"
    models.unload("m")
    await models.load(LoadModel("m"))
    await asyncio.sleep(0)  # what follows upon the outcome
    with pytest.raises(Unavailable, match=r"model 'e' cannot be served now: .*worker processes died"):
        table.find("e")
    worker.dies_of = ""
    while not table.ready_versions("e"):
        await asyncio.sleep(0.01)
    models.close()


async def test_an_ensemble_awaits_a_model_as_soon_as_nothing_else_of_it_is_missing(tmp_path: Path) -> None:
    """1. One of its models is unloaded. 2. The other is given up: nobody brings both back. 3. The first is loaded again."""
    for name in ("m", "n"):
        write_model(tmp_path, name, config=_TENSORS)
    made_of(tmp_path, "e", "m", "n")
    models, worker, table = await loaded(tmp_path, "e")
    models.unload("n")
    worker.dies_of = "m"
    worker.die()
    while not table._models["m"][1].awaited:
        await asyncio.sleep(0)
    with pytest.raises(NotFound):
        table.find("e")
    await models.load(LoadModel("n"))
    with pytest.raises(
        Unavailable, match=r"model 'e' cannot be served now: version 1: model 'm': [0-9]+ worker processes"
    ):
        table.find("e")
    models.close()


class SlowWorker(ObedientWorker):
    """Loads nothing before ``go_on`` is called, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Record] = []
        self.goes_on = False

    def send(self, record: Record, *fds: int) -> None:
        if self.goes_on:
            super().send(record, *fds)
        else:
            self.held.append(record)

    def go_on(self) -> None:
        self.goes_on = True
        for record in self.held:
            super().send(record)


def with_slow_worker(folder: Path, repository: Repository | None = None) -> tuple[Models, SlowWorker]:
    """Writes a model ``m`` and an ensemble ``e`` of it. Returns models that are loaded by one slow worker."""
    write_model(folder, "m", config=_TENSORS)
    made_of(folder, "e", "m")
    worker = SlowWorker()
    options = Options(repository=repository or Repository(paths=(str(folder),), control_mode="explicit"))
    models = worker.models = Models(options, supervisor({1: worker}, lambda record: None))
    models.worker_joined(1, "cpu:0")
    return models, worker


@pytest.mark.parametrize("polls", [False, True])
async def test_an_ensemble_is_unloaded_while_its_load_waits_for_its_models(tmp_path: Path, polls: bool) -> None:
    """
    1. An ensemble's load waits for its model. 2. A client unloads it, or its folder goes. 3. The model is loaded.
    Result: the load fails, the ensemble is not served, and the daemon is ready without it.
    """
    repository = Repository(paths=(str(tmp_path),), control_mode="poll" if polls else "explicit")
    models, worker = with_slow_worker(tmp_path, repository)
    begun = models.begin(await models.scan(repository), repository)
    loads = begun or [asyncio.ensure_future(models.load(LoadModel(name))) for name in ("m", "e")]
    while not (worker.held and models._coming.states()):
        await asyncio.sleep(0.001)
    if polls:
        shutil.rmtree(tmp_path / "e")
        await models.follow(await models.scan(repository), [], ["e"])
    else:
        models.unload("e")
    worker.go_on()
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert [str(each) for each in outcomes if each] == [
        "load failed for model 'e': it was unloaded before it was ready\n"
    ]
    assert models.lifecycle.ready_models() == {"m": [1]}
    assert models.readiness.ready
    models.close()


@pytest.mark.parametrize("unloaded", [False, True])
@pytest.mark.parametrize("loads", ["e", "me"])
async def test_a_call_of_an_ensemble_waits_where_that_waits_for_its_models(
    tmp_path: Path, unloaded: bool, loads: str
) -> None:
    """A call waits until a worker was sent the ensemble's load, or that has failed, whoever else loads the model."""
    models, worker = with_slow_worker(tmp_path)
    begun = [asyncio.ensure_future(models.load(LoadModel(name))) for name in loads]
    while not (worker.held and models.ensembles.waits.waiters("m")):
        await asyncio.sleep(0.001)
    called = asyncio.ensure_future(models.sent(1, "e", 0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not called.done()
    if unloaded:
        models.unload("e")
    worker.go_on()
    for _ in range(20):
        await asyncio.sleep(0)
    assert called.done()
    assert (models.lifecycle.version("e", 1) is None) == unloaded
    await asyncio.gather(called, *begun, return_exceptions=True)
    models.close()


@pytest.mark.parametrize("slow", [False, True])
async def test_an_ensemble_that_went_with_its_model_is_loaded_by_name(tmp_path: Path, slow: bool) -> None:
    """1. A model is unloaded, and its ensemble with it, which may take time. 2. The ensemble is loaded: its model comes first."""
    models, worker = with_slow_worker(tmp_path)
    worker.goes_on = True
    await models.load(LoadModel("e"))
    worker.goes_on = not slow
    models.unload("m")
    load = asyncio.ensure_future(models.load(LoadModel("e")))
    while not models._coming.names:
        await asyncio.sleep(0)
    worker.go_on()
    await load
    assert models.lifecycle.ready_models() == {"m": [1], "e": [1]}
    models.close()


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("served", [False, True])
async def test_an_ensemble_that_is_in_no_repository_any_more_does_not_come_back(
    tmp_path: Path, served: bool, polls: bool
) -> None:
    """Its folder goes, while it is served or awaits its model; then the model is loaded anew, or for the first time."""
    model = write_model(tmp_path, "m", config=_TENSORS)
    made_of(tmp_path, "e", "m")
    worker = DeadlyWorker()
    repository = Repository(paths=(str(tmp_path),))
    models = worker.models = Models(Options(repository=repository), supervisor({1: worker}, lambda record: None))
    worker.dies_of = "" if served else "m"
    models.worker_joined(1, "cpu:0")
    failed = await asyncio.gather(*models.begin(await models.scan(repository), repository))
    assert all(map(bool, failed)) != served, failed
    shutil.rmtree(tmp_path / "e")
    worker.dies_of = ""
    for _ in range(2):
        os.utime(model / "1" / "model.py", (1, 1))
        found = await models.scan(repository)
        if polls:
            await models.follow(found, [found["m"]], ["e"])
        else:
            await asyncio.gather(*models.begin(found, repository))
        await asyncio.sleep(0.05)
        assert models.lifecycle.ready_models() == {"m": [1]}
    models.close()

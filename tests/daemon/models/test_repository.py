"""Tests what is found in repositories, good and bad; nothing an operator may have written there is an accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config import model_config
from tensord.config.options import Repository
from tensord.daemon.models import repository
from tensord.protocol import model_config_pb2
from tensord.shm.errors import InvalidArgument, NoDescriptor
from tests.daemon.fake_daemon import write_model
from tests.open_files import no_descriptors_left

PYTHON_MODEL = "import json\n\nclass TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def test_scan(tmp_path: Path) -> None:
    write_model(tmp_path, "b", 1, 2, 10)
    write_model(tmp_path, "a", 3, config='name: "a" backend: "python" max_batch_size: 4')
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "README").touch()
    (tmp_path / "b" / "01").mkdir()
    (tmp_path / "b" / "0").mkdir()
    (tmp_path / "b" / "assets").mkdir()
    found = repository.scan([tmp_path])
    assert list(found) == ["a", "b"]
    assert (found["b"].versions, found["b"].chosen, found["b"].error) == ((1, 2, 10), (10,), "")
    assert model_config.from_bytes(found["b"].config) == model_config_pb2.ModelConfig(name="b", backend="jax")
    assert model_config.from_bytes(found["a"].config).max_batch_size == 4


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("", (4,)),
        ("version_policy { latest { num_versions: 2 } }", (2, 4)),
        ("version_policy { all { } }", (1, 2, 4)),
        ("version_policy { specific { versions: [ 4, 1, 9 ] } }", (1, 4)),
    ],
)
def test_version_policies(tmp_path: Path, policy: str, chosen: tuple[int, ...]) -> None:
    assert repository.poll(write_model(tmp_path, "m", 1, 2, 4, config=policy)).chosen == chosen


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        (PYTHON_MODEL, "python"),
        ("from somewhere import Model as TritonPythonModel\n", "python"),
        ("def create(path, config, device): ...\n", "jax"),
        ("from somewhere import create\n", "jax"),
        ("create = print\n", "jax"),
    ],
)
def test_back_end_is_read_not_imported(tmp_path: Path, source: str, backend: str) -> None:
    model = write_model(tmp_path, "m")
    (model / "1" / "model.py").write_text(source + "\nraise SystemExit('imported')\n")
    assert model_config.from_bytes(repository.poll(model).config).backend == backend


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n", "defines neither create"),
        ("def create(:\n", "not valid Python, line 1"),
        ("\0", "not valid Python"),
        (None, "has no model.py"),
    ],
)
def test_a_model_that_says_nothing(tmp_path: Path, source: str | None, words: str) -> None:
    model = write_model(tmp_path, "m")
    file = model / "1" / "model.py"
    file.unlink() if source is None else file.write_text(source)
    assert words in repository.poll(model).error


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("no_such_field: 1", "line 1, column 1"),
        ('name: "other"', "its configuration is for 'other'"),
        ('backend: "onnxruntime"', "backend 'onnxruntime' is not supported"),
        ('platform: "ensemble"', "ensemble scheduling must be set for ensemble m whose platform"),
        ("parameters { key: '" + "x" * (1 << 20) + "' value { } }", "bytes, at most 1048576 are read"),
        ("\udcff", "cannot be read"),
    ],
)
def test_bad_configurations(tmp_path: Path, config: str, words: str) -> None:
    model = write_model(tmp_path, "m")
    (model / "config.pbtxt").write_bytes(config.encode(errors="surrogateescape"))
    found = repository.poll(model)
    assert words in found.error
    assert found.chosen == ()


def test_names_repositories_and_versions(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "m")
    write_model(tmp_path / "two", "m")
    write_model(tmp_path / "two", "has space")
    (tmp_path / "two" / "empty").mkdir()
    (tmp_path / "two" / "empty" / "config.pbtxt").touch()
    found = repository.scan([tmp_path / "one", tmp_path / "two"])
    assert found["m"].error == repository.DUPLICATE
    assert "its name may hold only" in found["has space"].error
    assert (found["empty"].error, found["empty"].chosen) == ("", ())
    with pytest.raises(InvalidArgument, match="No such file"):
        repository.scan([tmp_path / "three"])


def test_a_model_is_found_beside_a_repository_that_cannot_be_searched(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "m")
    paths = [tmp_path / ("x" * 300), tmp_path / "one"]
    assert (repository.find(paths, "m").chosen, repository.find(paths, "m").error) == ((1,), "")
    assert repository.find(paths, "other").error.startswith("it is in no repository")


async def test_repositories_of_one_name_that_cannot_be_read_are_told_apart(tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / folder / "models") for folder in ("one", "two"))
    repositories = repository.Repositories()
    assert await repositories.scan(Repository(paths=paths, exit_on_error=False)) == {}
    named = ["repository 'models'", "repository 'models' (number 2 in repository.paths)"]
    assert list(repositories.unreadable) == named


def test_what_is_the_same_but_for_the_configuration(tmp_path: Path) -> None:
    """It may change in any file and in what a client sends; every other file counts as a change of the content."""
    model = write_model(tmp_path, "m")

    def content(config: str) -> str:
        (model / "config.pbtxt").write_text(config)
        return repository.poll(model).content

    before = repository.poll(model).content
    assert content("") == content("max_batch_size: 4") == repository.overridden(model, "{}").content == before
    (model / "1" / "weights").write_text("1")
    assert content("") != before
    assert repository.poll(model).load(1).content == content("")


def test_fingerprints(tmp_path: Path) -> None:
    model = write_model(tmp_path, "m")
    before = repository.poll(model).fingerprint
    assert repository.poll(model).fingerprint == before
    (model / "labels.txt").write_text("a\n")
    changed = repository.poll(model).fingerprint
    assert changed != before
    os.utime(model / "1" / "model.py", (1, 1))
    assert repository.poll(model).fingerprint not in (before, changed)


@pytest.mark.parametrize("deep", ["", "1", "1/weights"])
def test_a_link_to_another_release_is_a_change(tmp_path: Path, deep: str) -> None:
    """The releases differ in nothing but what their files hold: names, sizes and times are the same."""
    for release, factor in (("one", "1"), ("two", "2")):
        folder = tmp_path / release / "m" / "1"
        (folder / "weights").mkdir(parents=True)
        (folder / "model.py").write_text(f"def create(path, config, device): return {factor}\n")
        (folder / "weights" / "w.npy").write_text(factor)
        for file in folder.rglob("*.*"):
            os.utime(file, (1, 1))
    model = tmp_path / "served" / "m"
    link = model / deep
    link.parent.mkdir(parents=True)
    if deep == "1/weights":
        (model / "1" / "model.py").write_text("def create(path, config, device): return 1\n")
    link.symlink_to(tmp_path / "one" / "m" / deep)
    before = repository.poll(model)
    assert (before.error, before.chosen) == ("", (1,))
    assert repository.poll(model).fingerprint == before.fingerprint
    link.unlink()
    link.symlink_to(tmp_path / "two" / "m" / deep)
    assert repository.poll(model).fingerprint != before.fingerprint


def test_links_in_a_circle_and_to_nowhere(tmp_path: Path) -> None:
    """A model beside them is read as ever; what changes behind a link that leads round is seen once."""
    model = write_model(tmp_path / "models", "m")
    plain = repository.poll(model).fingerprint
    (model / "1" / ".#model.py").symlink_to("somebody@host.1234:5678")
    (model / "1" / "round.py").symlink_to("round.py")
    (tmp_path / "models" / "round").symlink_to("round")
    (tmp_path / "models" / "nowhere").symlink_to(tmp_path / "gone")
    found = repository.scan([tmp_path / "models"])
    assert list(found) == ["m"]
    assert (found["m"].error, found["m"].fingerprint) == ("", plain)
    (model / "1" / "up").symlink_to(model)
    (model / "1" / "beside").symlink_to(tmp_path / "beside")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "back").symlink_to(model / "1")
    before = repository.poll(model)
    assert before.error == ""
    (tmp_path / "beside" / "weights").touch()
    assert repository.poll(model).fingerprint != before.fingerprint


def test_links_to_nowhere_are_told_and_what_editors_leave_is_not(tmp_path: Path) -> None:
    model = write_model(tmp_path, "m")
    before = repository.poll(model)
    for name in (".#model.py", "._model.py", "model.py~", ".model.py.swp"):
        (model / "1" / name).symlink_to("nowhere")
    (model / "1" / "old.py").symlink_to("nowhere")
    found = repository.poll(model)
    assert (found.error, found.fingerprint) == ("", before.fingerprint)
    assert found.without_effect == ("'1/old.py' is a link to nowhere",)


@pytest.mark.parametrize("name", ["config.pbtxt", "1/model.py"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path, "m")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert "no regular file" in repository.poll(model).error


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    """Other folders are not taken for models; a model that loses its versions stays one, and has a mistake."""
    write_model(tmp_path, "m")
    for name in ("@eaDir", "#recycle", "System Volume Information", "__MACOSX"):
        write_model(tmp_path, name)
        (tmp_path / "m" / name).mkdir()
    (tmp_path / "data" / "v1").mkdir(parents=True)
    before = repository.scan([tmp_path])
    assert list(before) == ["m"]
    (tmp_path / "m" / "@eaDir" / "thumbnail").touch()
    assert repository.scan([tmp_path]) == before
    reason = "it has no version folder, which is a whole number from 1 ('v1': none), and no config.pbtxt"
    assert repository.others([tmp_path]) == {tmp_path / "data": reason}
    (tmp_path / "m" / "1").rename(tmp_path / "data" / "1")
    assert list(repository.scan([tmp_path])) == ["data"]
    assert repository.scan([tmp_path], known={"m"})["m"].problem.startswith("it has no version folder")


def test_what_is_not_offered_is_told_from_what_is_wrong(tmp_path: Path) -> None:
    found = repository.poll(write_model(tmp_path, "m", config='model_repository_agents { agents { name: "a" } }'))
    assert found.error.startswith("model 'm': model_repository_agents.agents: ")
    assert (found.unsupported, found.chosen) == (True, ())
    assert not repository.poll(write_model(tmp_path, "n", config="nonsense: 1")).unsupported


def test_what_is_without_effect_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    found = repository.poll(write_model(tmp_path, "m", config="model_metrics { }"))
    assert found.error == ""
    assert found.without_effect == ("model_metrics is without effect: a model's metrics are the same for all models",)


def test_override(tmp_path: Path) -> None:
    found = repository.poll(write_model(tmp_path, "m", 1, 2))
    overridden = repository.overridden(found.path, '{"version_policy": {"all": {}}, "max_batch_size": 2}')
    assert overridden.chosen == (1, 2)
    assert overridden.fingerprint != found.fingerprint
    for bad in ("{", '{"name": "other"}', '{"backend": "x"}'):
        with pytest.raises(InvalidArgument):
            repository.overridden(found.path, bad)


@given(st.text(max_size=20))
def test_names_are_no_paths(name: str) -> None:
    if repository.NAME.fullmatch(name):
        assert Path("/r", name).parent == Path("/r")
        assert name not in (".", "..")
        assert name.isascii()


def test_names_of_derivatives_are_no_models(tmp_path: Path) -> None:
    for name in ("m.pull_back", "m.push_forward", "m.value_and_gradient", "m.parameter_gradient"):
        (tmp_path / name / "1").mkdir(parents=True)
        assert "its name must not end in ." in repository.poll(tmp_path / name).error


def test_a_folder_that_cannot_be_opened_now_says_nothing_of_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with no_descriptors_left():
        assert repository.poll(tmp_path / "m").lacking
        with pytest.raises(NoDescriptor, match="model 'm' cannot be read: the server has as many files open as it may"):
            repository.find([tmp_path], "m")
        with pytest.raises(NoDescriptor, match="as many files open as it may"):
            repository.overridden(tmp_path / "m", "{}")
    assert repository.find([tmp_path], "m").problem == ""

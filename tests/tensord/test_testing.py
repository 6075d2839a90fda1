"""Models without a server: what they answer, refuse and say is what their worker would."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensord_client

from tensord import testing
from tests import run_folder
from tests.repositories import applying, faulty_models, scale_model, write_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
        yield


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Iterator[testing.Model]:
    with testing.load(scale_model(tmp_path_factory.mktemp("models")) / "scale") as model:
        yield model


def test_answers_are_the_callers_own_arrays(scale: testing.Model) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = scale({"x": x})
    np.testing.assert_array_equal(got["y"], 3 * x + 1)
    got["y"][:] = 0
    np.testing.assert_array_equal(scale({"x": x})["y"], 3 * x + 1)
    assert scale.inputs == (testing.Tensor("x", "FP32", (-1, 4)),)
    assert scale.outputs == (testing.Tensor("y", "FP32", (-1, 4)),)
    assert scale.config["max_batch_size"] == 8


def test_calls_of_several_threads_share_batches(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "rows",
        """
        import numpy as np
        inputs, outputs, max_batch_size, host = {"x": "INT32[1]"}, {"rows": "INT32[1]"}, 8, True

        def create(path, config, device):
            return (lambda params, inputs: {"rows": np.full_like(inputs["x"], len(inputs["x"]))}), None
        """,
        "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 240000000 }",
    )
    with testing.load(tmp_path / "rows") as model, ThreadPoolExecutor(4) as threads:
        got = threads.map(lambda i: model({"x": [[i]]})["rows"], range(4))
        assert [int(rows) for rows in map(np.squeeze, got)] == [4] * 4


def test_what_a_model_raises_is_told_as_by_its_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Calmly to who asks, whole in the log."""
    faulty_models(tmp_path)
    with (
        testing.load(tmp_path / "raises") as model,
        pytest.raises(testing.ServingError, match=r"^model 'raises' version 1 failed with ValueError$"),
    ):
        model({"x": [1.0, 2.0]})
    assert "ValueError: secret detail" in caplog.text


def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "bad",
        "inputs, outputs = {'x': 'FP32[1]'}, {'y': 'FP32[1]'}\ndef create(path, config, device):\n    1 / 0\n",
    )
    for folder, text in ((tmp_path / "bad", "division by zero"), (tmp_path / "none", "it is in no repository")):
        with pytest.raises(testing.ServingError, match=text):
            testing.load(folder)


def test_which_version(tmp_path: Path) -> None:
    scale_model(tmp_path, factor=2.0)
    scale_model(tmp_path, factor=5.0, version=2)
    for version, factor in ((0, 5), (1, 2), (2, 5)):
        with testing.load(tmp_path / "scale", version) as model:
            assert model.version == (version or 2)
            assert model({"x": [[1.0] * 4]})["y"][0, 0] == factor + 1
    with pytest.raises(testing.NotFound, match="model 'scale' has no version 3, it has 1, 2"):
        testing.load(tmp_path / "scale", 3)


def test_a_wrong_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = scale_model(tmp_path) / "scale", tmp_path / "tensord.toml"
    config.write_text("[workers]\nthreads = 'many'\n")
    with pytest.raises(testing.InvalidArgument, match=r"tensord\.toml.* workers\.threads"):
        testing.load(model, config=config)
    monkeypatch.setenv("TENSORD_WORKERS_THREADS", "some")
    with (
        tensord_client.connect(str(tmp_path)) as client,
        pytest.raises(tensord_client.InvalidArgument, match="TENSORD_WORKERS_THREADS"),
    ):
        client.model("scale")


def test_a_generator_waits_for_who_takes_its_responses(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "count",
        applying(
            """
            for i in range(int(inputs["n"][0])):
                yield {"i": np.full(65536, i, np.int32)}
            if inputs["n"][0] == 3:
                raise ValueError("three is enough")
            """,
            "n INT32[1]",
            "i INT32[65536]",
            more="host = True",
        ),
    )
    with testing.load(tmp_path / "count") as model:
        assert [int(each["i"][0]) for each in model.stream({"n": [200]})] == [*range(200)]
        endless = model.stream({"n": [2**31 - 1]})
        assert [int(next(endless)["i"][0]) for _ in range(3)] == [0, 1, 2]
        endless.close()  # type: ignore[attr-defined]
        ends_badly = model.stream({"n": [3]})
        assert [int(next(ends_badly)["i"][0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(testing.ServingError, match="failed with ValueError"):
            next(ends_badly)


def test_an_ensemble_has_its_members_from_beside_it(tmp_path: Path) -> None:
    scale_model(tmp_path, factor=2.0)
    scale_model(tmp_path, "other", factor=4.0)
    folder = write_model(
        tmp_path,
        "both",
        "",
        """
        platform: "ensemble" max_batch_size: 8
        input { name: "a" data_type: TYPE_FP32 dims: 4 } output { name: "c" data_type: TYPE_FP32 dims: 4 }
        ensemble_scheduling {
          step { model_name: "scale" model_version: -1 input_map { key: "x" value: "a" } output_map { key: "y" value: "b" } }
          step { model_name: "other" model_version: 1 input_map { key: "x" value: "b" } output_map { key: "y" value: "c" } }
        }
        """,
    )
    with testing.load(folder.parent) as model:
        np.testing.assert_array_equal(model({"a": [[1.0] * 4]})["c"], [[13.0] * 4])


def test_closing(tmp_path: Path) -> None:
    """Callers that wait are answered, and later ones get an error."""
    write_model(
        tmp_path,
        "slow",
        applying(
            """
            pathlib.Path(path, "begun").touch()
            while not pathlib.Path(path, "go").exists():
                time.sleep(0.01)
            return {"y": inputs["x"]}
            """,
            "x INT32[1]",
            "y INT32[1]",
            more="import pathlib, time\nhost = True",
        ),
    )
    model = testing.load(tmp_path / "slow")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(model, {"x": [5]})
        while not (tmp_path / "slow/1/begun").exists():
            pass
        closing = threading.Thread(target=model.close)
        closing.start()
        (tmp_path / "slow/1/go").touch()
        assert waiting.result()["y"] == [5]
        closing.join()
    for _ in range(2):
        model.close()
        with pytest.raises(testing.Unavailable, match="the model was closed"):
            model({"x": [5]})


def test_a_model_that_nobody_asked_is_closed(tmp_path: Path) -> None:
    scale_model(tmp_path)
    before = {*threading.enumerate()}
    model = testing.load(tmp_path / "scale")
    model.close()
    assert {*threading.enumerate()} <= before, model


def test_a_process_that_closes_nothing_ends_well(tmp_path: Path) -> None:
    scale_model(tmp_path)
    source = f"from tensord import testing; print(testing.load({str(tmp_path / 'scale')!r})({{'x': [[1, 1, 1, 1]]}}))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("{'y': array([[4., 4., 4., 4.]], dtype=float32)}", "")


def test_loading_again_and_again_leaves_no_threads(tmp_path: Path) -> None:
    scale_model(tmp_path)
    counts = []
    for _ in range(8):
        with testing.load(tmp_path / "scale") as model:
            model({"x": [[1.0] * 4]})
        counts.append((psutil.Process().num_threads(), psutil.Process().num_fds()))
    # XLA may begin another thread of its own now and then; one for each load would be six.
    assert all(last - settled < 6 for settled, last in zip(counts[1], counts[-1], strict=True)), counts


@pytest.mark.parametrize("config", ["", 'parameters { key: "buckets.length" value { string_value: "auto" } }'])
def test_automatic_buckets(tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str) -> None:
    """Powers of two, each compiled when it is first asked for, and by whoever asks for that many or fewer used again."""
    write_model(
        tmp_path,
        "sums",
        f"""
        inputs = {{"x": "FP32[length]"}}
        outputs = {{"y": "FP32[length]", "sum": "FP32[1]"}}
        max_batch_size = 2
        {"" if config else 'buckets = {"length": "auto"}'}

        def create(path, config, device):
            return (lambda params, i: {{"y": 2 * i["x"], "sum": i["x"].sum(1, keepdims=True)}}), None
        """,
        f"max_batch_size: 2 {config}" if config else "",
    )
    with testing.load(tmp_path / "sums") as model, caplog.at_level("INFO"):
        for length in (5, 6, 7, 8, 1, 3, 4):
            got = model({"x": np.ones((1, length), np.float32)})
            np.testing.assert_array_equal(got["y"], np.full((1, length), 2, np.float32))
            assert got["sum"] == length
    compiled = [record.args[2] for record in caplog.records if record.msg.startswith("compiling model")]
    assert [str(wanted) for wanted in compiled] == ["1 rows of [8]", "1 rows of [1]", "1 rows of [4]"]

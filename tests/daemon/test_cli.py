"""The command line as an operator meets it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from jax import export

from tensord import testing
from tensord.config import layers, model_config
from tensord.config.layers import Setting
from tests import prepared
from tests.daemon.fake_daemon import ROOT, write_model
from tests.repositories import applying, of_x, scale_model
from tests.repositories import write_model as write_source

FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def tensord(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**prepared.early(os.environ), "PATH": "/usr/bin:/bin", **variables}
    return prepared.run(["tensord", *arguments], environment)


def test_version_and_help() -> None:
    assert tensord("--version").stdout.startswith("tensord ")
    assert "serve" in tensord("--help").stdout
    assert (
        "\n  check   Check a configuration FILE, and that the models in its repositories\n" in tensord("--help").stdout
    )
    text = tensord("serve", "--help").stdout
    for words in ("--config", "--model-repository=DIR", "--exit-on-error[=true|false|auto]", "[http.port:", "SIGHUP"):
        assert words in text


def test_the_defaults_are_a_configuration_file(tmp_path: Path) -> None:
    done = tensord("config")
    assert (done.returncode, done.stdout) == (0, (ROOT / "config" / "default.toml").read_text())
    (tmp_path / "all.toml").write_text(done.stdout)
    (tmp_path / "models").mkdir()
    done = tensord("check", str(tmp_path / "all.toml"), f"--model-repository={tmp_path / 'models'}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_configuration_says_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text('server_name = "it"\n[http]\nport = 1\naddress = ["::1", "unix:/x"]\n[grpc]\nport = 2\n')
    given = ["--config", str(file), "--grpc-port=4", "--log-info=false"]
    done = tensord("config", *given, TENSORD_HTTP_PORT="3")
    assert done.returncode == 0
    assert f'\nserver_name = "it"  # from {file}\n' in done.stdout
    assert f'\naddress = ["::1", "unix:/x"]  # from {file}\n' in done.stdout
    assert "\nport = 3  # from TENSORD_HTTP_PORT\n" in done.stdout
    assert "\nport = 4  # from --grpc-port\n" in done.stdout
    assert "\ninfo = false  # from --log-info\n" in done.stdout
    assert "\nport = 8002\n" in done.stdout
    (tmp_path / "again.toml").write_text(done.stdout)
    settings = [Setting("grpc.port", 4, ""), Setting("log.info", False, "")]
    wanted = layers.read(file, {"TENSORD_HTTP_PORT": "3"}, settings).options
    assert layers.read(tmp_path / "again.toml").options == wanted
    rows = tensord("config", "--short", *given, TENSORD_HTTP_PORT="3").stdout.splitlines()
    assert [row.split() for row in rows[:3]] == [
        ["key", "value", "source"],
        ["server_name", '"it"', str(file)],
        ["http.port", "3", "TENSORD_HTTP_PORT"],
    ]


def test_check_of_a_good_and_a_bad_repository(tmp_path: Path) -> None:
    for version in (1, 2):
        scale_model(tmp_path / "models", "good", version=version)
    file = tmp_path / "tensord.toml"
    file.write_text(f'[repository]\npaths = ["{tmp_path / "models"}"]\n')
    done = tensord("check", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "good: version 2\nconfiguration: good; models: 1 good, 0 bad\n"
    write_model(tmp_path / "models", "bad", config="nonsense: 1")
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "good" / "config.pbtxt").write_text("dynamic_batching { preserve_ordering: true }")
    done = tensord("check", str(file), "--model-control-mode=explicit", "--load-model=absent", TENSORD_WORKERS_CPU="2")
    assert done.returncode == 1
    assert "bad: config.pbtxt of model 'bad': line 1, column 1" in done.stderr
    assert f"'{tmp_path / 'models' / 'empty'}' is no model: it has no version folder" in done.stderr
    assert "absent: it is to be loaded at start, but it is in no repository" in done.stderr
    assert "1 good, 2 bad" in done.stdout
    assert re.search(r"\n    on cpu:\d alone of 2 workers: models on others cannot call it\n", done.stdout)


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("[http]\nprot = 1\n", [], "unknown key http.prot; did you mean http.port?"),
        ("[http]\nport = 'x'\n", [], "http.port: expected int, got str, given 'x'"),
        ("", ["--grpc-port=99999"], "--grpc-port: grpc.port: expected int <= 65535, given '99999'"),
        ("", ["--metrics-address=unix:/x"], "metrics.address: expected an address of TCP, given 'unix:/x'"),
        ("", [], "repository.paths: nothing to serve"),
        (
            "[trace]\notlp = 'localhost:4318'\n",
            [],
            "trace.otlp: expected http://... or https://..., given 'localhost:4318'",
        ),
        # An empty address would be every interface.
        ("", ["--http-address="], "http.address: expected an address or unix:PATH, given ''"),
        ("[metrics]\naddress = ''\n", [], "metrics.address: expected an address or unix:PATH, given ''"),
        ("[grpc]\naddress = '0.0.0.0:80'\n", [], "grpc.address: expected an address without a port, which is a key of"),
        ("[grpc]\nport = 8000\n", [], "grpc.port: 8000 on 127.0.0.1 is also http.port"),
        ("[metrics]\nagent_port = 8002\n", [], "metrics.agent_port: 8002 on 127.0.0.1 is also metrics.port"),
        (
            "[http]\naddress = 'unix:/s'\n[grpc]\naddress = 'unix:/s'\n",
            [],
            "grpc.address: unix:/s is also in http.address",
        ),
        ("", ["--http-port=99999"], "--http-port: http.port: expected int <= 65535, given '99999'"),
    ],
)
def test_a_bad_configuration(tmp_path: Path, command: str, text: str, arguments: list[str], words: str) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text(text)
    done = tensord(command, "--config", str(file), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("tensord: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_what_would_end_a_start_is_found_before(tmp_path: Path) -> None:
    """The check tells of all of it, and makes nothing; a start tells of the first, and no front dies of it again and again."""
    (tmp_path / "models").mkdir()
    models = f"--model-repository={tmp_path / 'models'}"
    no_folder = f"there is no folder '{tmp_path / 'no'}'"
    wrong = {
        f"--log-file={tmp_path}/no/log": f"log.file: '{tmp_path}/no/log' cannot be written: {no_folder}",
        f"--trace-file={tmp_path}": f"trace.file: '{tmp_path}' cannot be written: Is a directory",
        f"--http-address=unix:{tmp_path}/no/h": f"http.address: '{tmp_path}/no/h' cannot be made: {no_folder}",
        f"--control-socket={tmp_path}/no/c": f"supervisor.control_socket: '{tmp_path}/no/c' cannot be made: {no_folder}",
        "--grpc-address=no.such.host.invalid": "grpc.address: 'no.such.host.invalid': ",
        "--grpc-address=a..b": "grpc.address: 'a..b': it is no host name",
        # The service manager makes that folder.
        "--http-address=unix:/run/tensord-of-nobody/h": "",
    }
    key = f'[http]\nuse_tls = true\ncertificate = "{tmp_path}/no.pem"\nkey = "{tmp_path}/no.key"\n'
    (tmp_path / "tensord.toml").write_text(key)
    config = ["--config", str(tmp_path / "tensord.toml")]
    cannot = "http.certificate or http.key cannot be used: No such file or directory"
    done = tensord("check", *config, models, *wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tensord: {cannot}\n")
    lines = [line.removeprefix("tensord:").strip() for line in done.stderr.splitlines()]
    for sentence in filter(None, wrong.values()):
        assert [line for line in lines if line.startswith(sentence)], sentence
    assert len(lines) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "tensord.toml"]
    done = tensord("serve", *config, models, *FREE_PORTS, "--device=cpu")
    assert (done.returncode, done.stderr) == (2, f"tensord: {cannot}\n")
    # What is not served needs no certificate.
    assert tensord("check", *config, models, "--allow-http=false").returncode == 0


def test_variables(tmp_path: Path) -> None:
    done = tensord("check", TENSORD_HTTP_PORT="x")
    assert (done.returncode, done.stderr) == (
        2,
        "tensord: TENSORD_HTTP_PORT: http.port: expected int, got str, given 'x'\n",
    )
    file = tmp_path / "named.toml"
    file.write_text("x = 1\n")
    assert "unknown key x" in tensord("check", TENSORD_CONFIG=str(file)).stderr


def test_what_serve_cannot_do(tmp_path: Path) -> None:
    """Each is one sentence and a status; nothing was started."""
    (tmp_path / "models").mkdir()
    models = f"--model-repository={tmp_path / 'models'}"
    done = tensord("serve")
    assert done.returncode == 2
    assert "nothing to serve" in done.stderr
    keys = ("http.port", "grpc.port", "metrics.port", "metrics.agent_port")
    with contextlib.ExitStack() as stack:
        taken = {key: stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for key in keys}
        for asked in (keys, keys[2:3]):
            ports = {f"TENSORD_{key.replace('.', '_').upper()}": str(taken[key] if key in asked else 0) for key in keys}
            done = tensord("serve", models, "--device=cpu", **ports)
            assert done.returncode == 1
            # All of them at once, so that nobody has to start again for each.
            said = [f"{key}: cannot listen on 127.0.0.1:{taken[key]}: Address already in use\n" for key in asked]
            assert done.stderr.endswith("tensord: " + "         ".join(said))
            assert "Traceback" not in done.stderr
    done = tensord("serve", f"--model-repository={tmp_path / 'nowhere'}", *FREE_PORTS, "--device=cpu")
    assert done.returncode == 1
    assert "nowhere': No such file or directory" in done.stderr
    done = tensord("serve", models, "--device=cuda", *FREE_PORTS, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "no GPU is visible" in done.stderr


ENSEMBLE = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling {
  step { model_name: "m" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }
}
"""
RAGGED = of_x("x", "FP32[n]", more='max_batch_size = 2\nragged = ("x",)\nbatch_outputs = {"y": "x"}')


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("writer", "model 'writer': a stepped model is no program that is run once, it cannot be exported\n"),
        ("tokenizer", "only a JAX model with a function create(path, config, device) is exported"),
        ("ragged", "model 'ragged': what is exported has no ragged inputs"),
        ("optional", "model 'optional': what is exported takes all of its inputs, none is optional"),
        ("several", "model 'several': a generator is no program that is run once, it cannot be exported"),
        ("ensemble", "model 'ensemble': only a JAX model with a function create(path, config, device) is exported"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, model: str, reason: str) -> None:
    write_source(tmp_path, "ragged", RAGGED)
    write_source(tmp_path, "optional", of_x("x", "FP32[2]"))
    (tmp_path / "optional" / "config.pbtxt").write_text(
        'input { name: "x" data_type: TYPE_FP32 dims: 2 optional: true }'
    )
    write_source(tmp_path, "several", applying('yield {"y": inputs["x"]}', "x FP32[2]", "y FP32[2]"))
    (tmp_path / "ensemble" / "1").mkdir(parents=True)
    (tmp_path / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    folder = tmp_path / model if (tmp_path / model).exists() else ROOT / "examples" / "models" / model
    done = tensord("export", str(folder), str(tmp_path / "out"))
    assert (done.returncode, reason in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["FP64", "INT64"])
def test_an_output_of_64_bits_is_exported(tmp_path: Path, kind: str) -> None:
    dtype = {"FP64": "float64", "INT64": "int64"}[kind]
    write_source(tmp_path, "m", of_x(f"x.sum(keepdims=True).astype('{dtype}') + 2**40", "FP32[2]", f"{kind}[1]"))
    done = tensord("export", str(tmp_path / "m"), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    with testing.load(tmp_path / "out") as model:
        made = model({"x": np.ones(2, np.float32)})["y"]
    assert (made.dtype.name, made.tolist()) == (dtype, [2 + 2**40])


def test_automatic_buckets_are_exported(tmp_path: Path) -> None:
    """Buckets of config.pbtxt take precedence over buckets of model.py, in an export as in a served model."""
    more = 'max_batch_size, buckets = 4, {"n": "auto", "m": (2,)}'
    source = applying('return {"y": inputs["x"].sum(axis=(1, 2)), }', "x FP32[n,m]", "y FP32[]", more=more)
    write_source(tmp_path, "whole", source, 'parameters { key: "buckets.m" value { string_value: "4" } }')
    done = tensord("export", str(tmp_path / "whole"), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    config = model_config.parse_pbtxt((tmp_path / "out" / "config.pbtxt").read_text(), "out")
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "buckets.n": "auto",
        "buckets.m": "4",
    }
    with testing.load(tmp_path / "out") as model:
        assert model({"x": np.ones((2, 5, 3), np.float32)})["y"].tolist() == [15, 15]


def test_a_label_file_that_is_missing_leaves_nothing_written(tmp_path: Path) -> None:
    config = 'output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }'
    write_source(tmp_path, "m", of_x("x", "FP32[2]"), config)
    done = tensord("export", str(tmp_path / "m"), str(tmp_path / "out"))
    assert (done.returncode, "label file 'labels.txt' of output 'y' cannot be read" in done.stderr) == (1, True)
    assert not (tmp_path / "out").exists()
    (tmp_path / "m" / "labels.txt").write_text("a\nb\n")
    done = tensord("export", str(tmp_path / "m"), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "labels.txt").read_text() == "a\nb\n"


def test_derivatives_are_exported(tmp_path: Path) -> None:
    write_source(tmp_path, "whole", of_x("x", "INT32[2]"))
    done = tensord("export", "--derivatives=1", str(tmp_path / "whole"), str(tmp_path / "out"))
    assert "derivatives are for jitted functions of one request; no output has a floating datatype" in done.stderr
    model = ROOT / "examples/derivatives/models/pendulum"
    assert tensord("export", "--derivatives=1", str(model), str(tmp_path / "out")).returncode == 0
    program = export.deserialize(bytearray((tmp_path / "out/1/model.jaxexport").read_bytes()))
    assert program.has_vjp()
    assert not program.vjp().has_vjp()


@pytest.mark.parametrize(("orders", "kept"), [(0, ["own"]), (1, ["own", "pull_back"])])
def test_samples_of_derivatives_that_are_not_exported_are_left_out(
    tmp_path: Path, orders: int, kept: list[str]
) -> None:
    given = [
        f'model_warmup {{ name: "{name}" '
        + " ".join(
            f'inputs {{ key: "{tensor}" value {{ data_type: TYPE_FP32 dims: 2 zero_data: true }} }}' for tensor in taken
        )
        + " }"
        for name, taken in {
            "own": ["x"],
            "pull_back": ["x", "cotangent.y"],
            "push_forward": ["x", "tangent.x"],
        }.items()
    ]
    write_source(tmp_path, "m", of_x("x * 2", "FP32[2]", more="derivatives = True"), "\n".join(given))
    done = tensord("export", f"--derivatives={orders}", str(tmp_path / "m"), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "out" / "config.pbtxt").read_text()
    assert re.findall(r'model_warmup \{\n  name: "(\w+)"', written) == kept
    testing.load(tmp_path / "out").close()

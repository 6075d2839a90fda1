"""The four layers: who wins, and what an operator reads when a value is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensord.config import layers
from tensord.config.layers import ConfigurationError, Setting
from tensord.config.options import Options


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tensord.toml"
    path.write_text(text)
    return path


def test_the_reference_file_is_the_defaults_with_every_key() -> None:
    path = Path(layers.__file__).with_name("default.toml")
    settings = layers.read_file(path)
    assert [setting.key for setting in settings] == list(layers.known_keys())
    assert layers.merge(settings) == Options()
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if "=" in line and not line.startswith("#"):
            near = lines[max(0, i - 4) : i]
            assert any(other.startswith("#") for other in near) or line.startswith("enabled"), f"say what is {line}"


def test_later_layers_win(tmp_path: Path) -> None:
    file = toml(tmp_path, 'server_name = "a"\n[http]\nport = 1\naddress = "0.0.0.0"\n[log]\nverbose = 2\n')
    environment = {"TENSORD_HTTP_PORT": "2", "TENSORD_SERVER_NAME": "b", "OTHER": "x", "TENSORD_CONFIG": "x"}
    options = layers.read(file, environment, [Setting("http.port", "3", "--http-port", textual=True)]).options
    assert (options.http.port, options.http.address) == (3, ("0.0.0.0",))
    assert (options.server_name, options.log.verbose) == ("b", 2)
    assert options.arenas == Options().arenas


def test_what_models_are_loaded_from_and_compiled_into_is_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = layers.read(
        toml(tmp_path, '[repository]\npaths = ["models", "/b/../c"]\n[executables]\ncache_directory = "x"\n')
    ).options
    assert options.repository.paths == (f"{tmp_path}/models", "/c")
    assert options.executables.cache_directory == f"{tmp_path}/x"


def test_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No shell has seen what stands in a file or in a variable."""
    monkeypatch.setenv("HOME", "/home/me")
    text = '[repository]\npaths = ["~/models", "./~"]\n[http]\naddress = "unix:~/http.sock"\n[log]\nfile = "~/log"\n'
    options = layers.read(toml(tmp_path, text), {"TENSORD_EXECUTABLES_CACHE_DIRECTORY": "~"}).options
    assert options.repository.paths[0] == "/home/me/models"
    assert options.repository.paths[1].endswith("/~")
    assert options.http.address == ("unix:/home/me/http.sock",)
    assert (options.log.file, options.executables.cache_directory) == ("/home/me/log", "/home/me")
    unknown = (
        "expected a path, given '~nobody-has-this-name/x', and no home directory is known for '~nobody-has-this-name'"
    )
    with pytest.raises(ConfigurationError, match=f"TENSORD_TRACE_FILE: trace.file: {unknown}"):
        layers.read(None, {"TENSORD_TRACE_FILE": "~nobody-has-this-name/x"})


def test_text_becomes_what_the_key_wants() -> None:
    options = layers.read(
        environment={
            "TENSORD_REPOSITORY_PATHS": "/a, /b",
            "TENSORD_HTTP_ENABLED": "false",
            "TENSORD_ARENAS_WAIT": "2.5",
            "TENSORD_LOG_FORMAT": "json",
        }
    ).options
    assert options.repository.paths == ("/a", "/b")
    assert (options.http.enabled, options.arenas.wait, options.log.format) == (False, 2.5, "json")


@pytest.mark.parametrize(
    ("text", "addresses"),
    [('"0.0.0.0"', ("0.0.0.0",)), ('["127.0.0.1", "::1", "unix:/run/a,b"]', ("127.0.0.1", "::1", "unix:/run/a,b"))],
)
def test_addresses(tmp_path: Path, text: str, addresses: tuple[str, ...]) -> None:
    """A single one needs no brackets."""
    assert layers.read(toml(tmp_path, f"[http]\naddress = {text}")).options.http.address == addresses
    both = layers.read(environment={"TENSORD_GRPC_ADDRESS": "::1, unix:/run/g"}).options.grpc.address
    assert both == ("::1", "unix:/run/g")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[http]\nprot = 1", r"tensord.toml: unknown key http.prot; did you mean http.port\?"),
        ("[htp]\nport = 1", r"unknown section \[htp\]; did you mean \[?http"),
        ("serve_name = 'x'", "unknown key serve_name; did you mean server_name"),
        ("http = 3", r"http: expected a section \[http\], given 3"),
        ("[http]\nport = 'x'", "tensord.toml: http.port: expected int, got str, given 'x'"),
        ("[http]\nport = 70000", "http.port: expected int <= 65535, given 70000"),
        ("[http]\nport = true", "http.port: expected int, got bool, given True"),
        ("[http]\nport = {a = 1}", "http.port: expected int"),
        ("[log]\nformat = 'xml'", "log.format: expected default, ISO8601 or json, given 'xml'"),
        ("[repository]\npaths = [1]", r"repository.paths: expected str, got int - at \$\[0\], given \[1\]"),
        ("[repository]\npaths = ['']", "expected folders"),
        ("[repository]\nload = ['a']", "needs repository.control_mode"),
        ("[http]\naddress = []", "http.address: expected array of length >= 1, given \\[\\]"),
        ("[arenas]\nbyte_size = 2097152\nmax_byte_size = 1048576", "arenas.max_byte_size: expected at least"),
        ("[expert]\nrestart_delay = 20", "max_restart_delay: expected at least"),
        ('[workers]\ncores = ["0-x"]', "workers.cores: expected cores such as '0-3,8', at most 8191, given '0-x'"),
        ('[workers]\ncores = ["0", "1"]', r"one entry for each CPU worker \(workers.cpu = 1\), given 2"),
        (
            "[workers]\nper_gpu = 2\ndevices_per_worker = 4",
            r"workers.per_gpu: a GPU has 2 workers or a worker has several GPUs \(workers.devices_per_worker = 4\), not both",
        ),
        ('[workers]\npin = false\ncores = ["0"]', "workers.cores: needs workers.pin = true"),
        ("[http\n", "tensord.toml: .*line 1"),
    ],
)
def test_what_an_operator_reads(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layers.read(toml(tmp_path, text))


def test_errors_name_variables_flags_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"TENSORD_HTTP_PORT: http\.port: expected int.* given 'x'"):
        layers.read(environment={"TENSORD_HTTP_PORT": "x"})
    with pytest.raises(
        ConfigurationError, match=r"unknown variable TENSORD_HTTP_PROT; did you mean TENSORD_HTTP_PORT\?"
    ):
        layers.read(environment={"TENSORD_HTTP_PROT": "1"})
    with pytest.raises(ConfigurationError, match=r"--http-port: http\.port"):
        layers.read(flags=[Setting("http.port", "", "--http-port", textual=True)])
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        layers.read(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"binary\.toml"):
        layers.read(tmp_path / "binary.toml")


def test_changed_keys() -> None:
    old = Options()
    new = layers.merge([Setting("http.port", 1, "x"), Setting("server_name", "y", "x")])
    assert layers.changed_keys(old, new) == ["server_name", "http.port"]
    assert layers.changed_keys(old, old) == []


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.text(max_size=3))
)


@given(st.lists(st.tuples(st.sampled_from(sorted(layers.known_keys())), VALUES, st.booleans()), max_size=4))
@example([("regions.max_byte_size", 1 << 64, False)])
def test_any_values_give_options_or_a_sentence(values: list[tuple[str, Any, bool]]) -> None:
    """Accepted values survive the way to a child process unchanged."""
    try:
        options = layers.merge(Setting(key, value, "source", textual) for key, value, textual in values)
    except ConfigurationError as error:
        assert str(error)
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=Options) == options


@given(st.dictionaries(st.text(max_size=12), VALUES, max_size=3))
def test_any_names_are_refused_with_a_sentence(content: dict[str, Any]) -> None:
    settings = [Setting(key, value, "source") for key, value in content.items() if key not in layers.known_keys()]
    if settings:
        with pytest.raises(ConfigurationError, match="unknown key"):
            layers.merge(settings)


def kubernetes(service: str, host: str, ports: dict[str, int], protocol: str = "TCP") -> dict[str, str]:
    """Returns the variables that a kubelet sets in every container of the namespace (pkg/kubelet/envvars)."""
    name = service.upper().replace("-", "_")
    first = next(iter(ports.values()))
    made = {f"{name}_SERVICE_HOST": host, f"{name}_SERVICE_PORT": str(first)}
    made |= {f"{name}_SERVICE_PORT_{port.upper().replace('-', '_')}": str(number) for port, number in ports.items()}
    made[f"{name}_PORT"] = f"{protocol.lower()}://{host}:{first}"
    for number in ports.values():
        prefix = f"{name}_PORT_{number}_{protocol}"
        made[prefix] = f"{protocol.lower()}://{host}:{number}"
        made |= {f"{prefix}_PROTO": protocol.lower(), f"{prefix}_PORT": str(number), f"{prefix}_ADDR": host}
    return made


DOCKER = {
    "TENSORD_NAME": "/client/tensord",
    "TENSORD_ENV_PATH": "/usr/bin:/bin",
    "TENSORD_PORT": "tcp://172.17.0.5:8000",
    "TENSORD_PORT_8000_TCP": "tcp://172.17.0.5:8000",
    "TENSORD_PORT_8000_TCP_ADDR": "172.17.0.5",
}


@pytest.mark.parametrize(
    "variables",
    [
        kubernetes("tensord", "10.0.0.1", {"http": 8000, "grpc": 8001, "metrics": 8002}),
        kubernetes("tensord-http", "10.0.0.1", {"http": 8000}),
        kubernetes("tensord-config", "10.0.0.1", {"http": 8000}),
        kubernetes("tensord", "fd00::1", {"a-b": 53}, "UDP"),
        DOCKER,
    ],
    ids=["tensord", "a name whose port is a key of ours", "config", "udp", "docker"],
)
def test_services_are_passed_over(variables: dict[str, str]) -> None:
    assert layers.service_variables(variables) == set(variables)
    assert layers.read(environment=variables).options == layers.read().options
    mine = {"TENSORD_GRPC_PORT": "9001", "TENSORD_SERVER_NAME": "/a/b"}
    options = layers.read(environment=variables | mine).options
    assert (options.grpc.port, options.server_name, options.http.port) == (9001, "/a/b", 8000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TENSORD_PORT", "8000"),
        ("TENSORD_HTTP_PROT", "8000"),
        ("TENSORD_HTTP_PROT", "tcp://10.0.0.1:8000"),
        ("TENSORD_NAME", "here"),
        ("TENSORD_ENV_PATH", "x"),
        ("TENSORD_SERVICE", "x"),
        ("TENSORD_PORT_8000", "tcp://10.0.0.1:8000"),
    ],
)
def test_mistakes_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown variable {name}"):
        layers.read(environment={name: value})


@given(st.sampled_from(sorted(layers.known_keys())), st.text().filter(lambda text: "://" not in text))
def test_no_key_is_taken_for_a_service(key: str, value: str) -> None:
    assert layers.service_variables({layers.PREFIX + key.replace(".", "_").upper(): value}) == frozenset()


def test_one_line_however_many() -> None:
    foreign = layers.service_variables(kubernetes("tensord", "10.0.0.1", {str(port): port for port in range(1, 99)}))
    line = layers.ignored_sentence(foreign)
    assert "TENSORD_PORT," in line
    assert "\n" not in line
    assert len(line) < 200

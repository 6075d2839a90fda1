"""Variables of container platforms are told from an operator's, also from an operator's mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config import layers, service_links
from tensord.config.layers import ConfigurationError


def kubernetes(service: str, host: str, ports: dict[str, int], protocol: str = "TCP") -> dict[str, str]:
    """What a kubelet sets in every container of the namespace, as its source has it (pkg/kubelet/envvars)."""
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
    assert layers.load(environment=variables) == layers.load()
    mine = {"TENSORD_GRPC_PORT": "9001", "TENSORD_SERVER_NAME": "/a/b"}
    options = layers.load(environment=variables | mine)
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
        layers.load(environment={name: value})


@given(st.sampled_from(sorted(layers.known_keys())), st.text().filter(lambda text: "://" not in text))
def test_no_key_is_taken_for_a_service(key: str, value: str) -> None:
    assert layers.service_variables({layers.PREFIX + key.replace(".", "_").upper(): value}) == frozenset()


def test_one_line_however_many() -> None:
    foreign = layers.service_variables(kubernetes("tensord", "10.0.0.1", {str(port): port for port in range(1, 99)}))
    line = service_links.sentence(foreign)
    assert "TENSORD_PORT," in line
    assert "\n" not in line
    assert len(line) < 200

"""The documents in deploy/kubernetes: valid for Kubernetes and KServe, right about each other, and about a real daemon."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tensord.config.layers import read, read_environment
from tensord.daemon.metrics.exposition import render
from tests import kserve_package, repositories
from tests.daemon.metrics.test_exposition import SNAPSHOT
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess
from tests.deploy import manifests
from tests.deploy.hosts import free_ports
from tests.deploy.manifests import KUBERNETES, Document

#: The oldest in which sidecars begin first; the newest that is known is the other.
_OLDEST = "1.29"
#: Kinds of others, whose schemas are not Kubernetes'.
_EXTENSIONS = {"PodMonitor", "ScaledObject", "ClusterServingRuntime", "InferenceService"}
#: The configuration in the image.
_IMAGE = ROOT / "deploy/container/tensord.toml"

needs_kustomize = pytest.mark.skipif(manifests.KUSTOMIZE is None, reason="neither kustomize nor kubectl is installed")


def everything() -> list[Document]:
    return [document for path in manifests.files() for document in manifests.written(path)]


# ------------------------------------------------------------------------------------------------------------ valid


def validate(documents: list[Document]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents:
        if document["kind"] not in _EXTENSIONS:
            for version in (_OLDEST, kubernetes_validate.latest_version()):
                kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", manifests.files(), ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_a_file_is_valid(path: Path) -> None:
    validate(manifests.written(path))


@needs_kustomize
@pytest.mark.parametrize("folder", manifests.BUILT)
def test_what_is_built_is_valid(folder: str) -> None:
    documents = manifests.built(folder)
    validate(documents)
    for document in documents:
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == documents[0]["metadata"]["name"]


@pytest.mark.parametrize(("kind", "version"), [("ClusterServingRuntime", "v1alpha1"), ("InferenceService", "v1beta1")])
def test_kserve_knows_each_field(kind: str, version: str) -> None:
    document = manifests.found(everything(), kind)
    assert document["apiVersion"] == f"serving.kserve.io/{version}"
    assert kserve_package.strange_fields(document, f"{version.capitalize()}{kind}") == []
    wrong = document | {"spec": document["spec"] | {"predictors": 1}}
    assert kserve_package.strange_fields(wrong, f"{version.capitalize()}{kind}") == ["spec.predictors"]


def test_a_runtime_has_a_pod_of_kubernetes() -> None:
    runtime = manifests.found(everything(), "ClusterServingRuntime")["spec"]
    specification = {"containers": runtime["containers"], "volumes": runtime["volumes"]}
    validate([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": specification}])
    assert runtime["containers"][0]["name"] == "kserve-container"


# ------------------------------------------------------------------------------------------------ right about each other


@needs_kustomize
@pytest.mark.parametrize("folder", manifests.BUILT)
def test_images_are_pinned_and_nobody_is_root(folder: str) -> None:
    for document in manifests.built(folder):
        specification = manifests.pod(document)
        if specification is None:
            continue
        for container in manifests.containers(specification):
            assert re.fullmatch(r"\S+:[0-9][\w.-]*", container["image"])
        for specification, container in manifests.daemons([document]):
            assert specification["securityContext"]["runAsUser"] == 10001
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "hostNetwork" not in specification
            assert "hostIPC" not in specification


@needs_kustomize
@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/gpu"])
def test_selectors_find_the_pods(folder: str) -> None:
    documents = manifests.built(folder)
    deployment = manifests.found(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for _, container in manifests.daemons(documents) for port in container["ports"]}
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    for document in documents:
        match document["kind"]:
            case "Service":
                assert document["spec"]["selector"] == labels
                assert {port["targetPort"] for port in document["spec"]["ports"]} <= ports
            case "NetworkPolicy":
                assert document["spec"]["podSelector"]["matchLabels"] == labels
                assert {port["port"] for rule in document["spec"]["ingress"] for port in rule["ports"]} == ports
            case "PodDisruptionBudget" | "PodMonitor":
                assert document["spec"]["selector"]["matchLabels"] == labels
            case "ScaledObject":
                assert document["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
                assert deployment["spec"].get("replicas") is None


@needs_kustomize
def test_a_gpu_is_asked_for() -> None:
    (daemon,) = (container for _, container in manifests.daemons(manifests.built("overlays/gpu")))
    assert daemon["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert daemon["image"].endswith("-cuda13")
    assert {"name": "TENSORD_WORKERS_DEVICE", "value": "cuda"} in daemon["env"]


def test_volumes_are_there() -> None:
    for document in everything():
        if (specification := manifests.pod(document)) is not None:
            named = {volume["name"]: volume for volume in specification.get("volumes", ())}
            for container in manifests.containers(specification):
                for mount in container.get("volumeMounts", ()):
                    assert mount["name"] in named
                    if mount["mountPath"] == "/dev/shm":
                        assert named[mount["name"]]["emptyDir"]["medium"] == "Memory"


def of_image() -> Iterator[tuple[str, Document, Document]]:
    """Yields each container of our image, with its document's kind and its pod's specification; as kustomize builds them."""
    documents = [document for folder in manifests.BUILT for document in manifests.built(folder)] + everything()
    for document in documents:
        if (specification := manifests.pod(document)) is not None:
            for container in manifests.containers(specification):
                if container["image"].startswith("tensord"):
                    yield document["kind"], specification, container


@needs_kustomize
def test_who_gets_in_can_write_little_and_gets_no_more_rights() -> None:
    """Everything of the image but volumes is read-only, and so are models where they are served; only the step that needs rights
    has any, and no more than two."""
    ran = 0
    for kind, specification, container in of_image():
        security = container["securityContext"]
        is_root = security.get("runAsUser", specification.get("securityContext", security).get("runAsUser")) == 0
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["capabilities"].get("add", []) == (["CHOWN", "FOWNER"] if is_root else [])
        assert not is_root or container["command"][0] == "install"
        assert container["imagePullPolicy"] == "Always" or "@sha256:" in container["image"]
        if "command" in container:
            continue
        ran += 1
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in specification["volumes"]}
        if kind != "ClusterServingRuntime":  # where it is KServe's
            assert mounts["/var/lib/tensord/models"]["readOnly"] is True
        assert {"/tmp", "/run/tensord", "/var/cache/tensord"} <= {*mounts}
        # A folder on disk lacks the sticky bit, and in one without it no compiled code is used.
        assert volumes[mounts["/var/cache/tensord"]["name"]]["emptyDir"]["medium"] == "Memory"
        cache = next(
            each["value"] for each in container["env"] if each["name"] == "TENSORD_EXECUTABLES_CACHE_DIRECTORY"
        )
        assert Path(cache).parent == Path("/var/cache/tensord")
    assert ran >= 5


def test_no_variables_of_services_come_in() -> None:
    """Those of a service named tensord begin like the daemon's own. A runtime has no such field: its service has."""
    for document in everything():
        specification = manifests.pod(document)
        if document["kind"] == "ClusterServingRuntime":
            specification = manifests.found(everything(), "InferenceService")["spec"]["predictor"]
        assert specification is None or specification["enableServiceLinks"] is False


def policies(folder: str) -> Iterator[tuple[Document, Document]]:
    """Yields the pods of a folder's documents as (labels, specification), each with the NetworkPolicy that selects it."""
    documents = [
        document for path in sorted((KUBERNETES / folder).glob("*.yaml")) for document in manifests.written(path)
    ]
    for document in documents:
        if document["kind"] in ("Deployment", "DaemonSet", "Pod") and [*manifests.daemons([document])]:
            head = document if document["kind"] == "Pod" else document["spec"]["template"]
            (policy,) = (
                each
                for each in documents
                if each["kind"] == "NetworkPolicy"
                and each["spec"]["podSelector"]["matchLabels"].items() <= head["metadata"]["labels"].items()
            )
            yield document, policy["spec"]


@pytest.mark.parametrize(
    ("folder", "let_in"),
    [
        ("base", {"tensord-client": {"http", "grpc"}, "tensord-balancer": {"http", "grpc", "agent"}, "": {"metrics"}}),
        ("daemonset", {"": {"metrics"}}),
        ("sidecar", {}),
    ],
)
def test_only_who_needs_a_port_reaches_it(folder: str, let_in: dict[str, set[str]]) -> None:
    """A daemon in a container listens on all addresses: each has a policy. ``let_in``: ports by label; "": Prometheus'."""
    ((_, policy),) = policies(folder)
    assert policy["policyTypes"] == ["Ingress"]
    found: dict[str, set[str]] = {}
    for rule in policy["ingress"]:
        (peer,) = rule["from"]
        labels = [*peer.get("podSelector", {}).get("matchLabels", {"": ""})]
        if labels == [""]:
            assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
        found.setdefault(labels[0], set()).update(port["port"] for port in rule["ports"])
    assert found == let_in


def test_one_node_does_not_take_all_daemons() -> None:
    deployment = manifests.found(everything(), "Deployment")["spec"]["template"]
    (spread,) = deployment["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["maxSkew"]) == ("kubernetes.io/hostname", 1)
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "a cluster of one node has both"
    assert spread["labelSelector"]["matchLabels"] == deployment["metadata"]["labels"]


# --------------------------------------------------------------------------------------------- right about the daemon


def test_variables_are_keys() -> None:
    for _, container in manifests.daemons(everything()):
        read_environment({each["name"]: each["value"] for each in container.get("env", ())})


def test_ports_are_those_of_the_image() -> None:
    options = read(_IMAGE).options
    served = {"http": options.http.port, "grpc": options.grpc.port, "metrics": options.metrics.port}
    served["agent"] = options.metrics.agent_port
    for document in everything():
        if document["kind"] in ("Deployment", "DaemonSet"):
            for _, container in manifests.daemons([document]):
                for port in container["ports"]:
                    assert port["containerPort"] == served[port["name"]]
    assert {*options.http.address, *options.grpc.address, options.metrics.address} == {"0.0.0.0"}
    assert options.metrics.agent_port == 8003


def test_there_is_time_to_drain_and_to_stop() -> None:
    """preStop lasts for drain_time and until nothing is in flight, then the stop may take as long again."""
    options = read(_IMAGE).options.supervisor
    graces = []
    for document in everything():
        for specification, container in manifests.daemons([document]):
            prepared = "preStop" in container.get("lifecycle", {})
            drains = (options.drain_time + options.exit_timeout) if prepared else 0
            if document["kind"] == "ClusterServingRuntime":
                # A runtime has no such field: the service says it.
                specification = manifests.found(everything(), "InferenceService")["spec"]["predictor"]
            graces.append(specification["terminationGracePeriodSeconds"] - drains - options.exit_timeout)
    assert len(graces) == 4
    assert min(graces) >= 10


def test_waiting_requests_are_what_is_scaled_on() -> None:
    (trigger,) = manifests.found(everything(), "ScaledObject")["spec"]["triggers"]
    names = re.findall(r"\b(?:nv|tensord)_\w+", trigger["metadata"]["query"])
    exposed = {family.name for family in text_string_to_metric_families(render(SNAPSHOT, "")[0].decode())}
    assert names
    assert set(names) <= exposed


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Runs a daemon as KServe's runtime starts it, with its arguments and the image's configuration.

    Only folders and ports are replaced.
    """
    folder = tmp_path_factory.mktemp("kserve")
    repositories.scale_model(folder / "models")
    http, grpc, metrics, agent = free_ports(4)
    (container,) = (
        container for _, container in manifests.daemons([manifests.found(everything(), "ClusterServingRuntime")])
    )
    replaced = {"/mnt/models": str(folder / "models"), "=8080": f"={http}", "=9000": f"={grpc}"}
    arguments = " ".join(container["args"])
    for said, given in replaced.items():
        assert said in arguments
        arguments = arguments.replace(said, given)
    command, config, *flags = shlex.split(arguments)
    assert (command, config) == ("serve", "--config=/etc/tensord/tensord.toml")
    running = DaemonProcess(folder, [], {}, flags)
    running.write_config(
        tomllib.loads(_IMAGE.read_text())
        | {
            "metrics": {"port": metrics, "agent_port": agent},
            "clients": {"socket": str(folder / "clients.sock")},
            "executables": running.sections["executables"],
            "workers": {"device": "cpu"},
            "supervisor": {"control_socket": str(folder / "control.sock"), "drain_time": 1.0},
        }
    )
    running.served_on = r"serving http on http://0\.0\.0\.0:(\d+)"
    with running:
        running.port = http
        running.wait_ready()
        yield running


@needs_kustomize
def test_models_are_fetched_into_the_repository(leaves_nothing: None, tmp_path: Path) -> None:
    """With a folder of this host in the place of a bucket."""
    deployment = manifests.found(manifests.built("overlays/gpu"), "Deployment")["spec"]["template"]["spec"]
    (container,) = deployment["initContainers"]
    program, command, url, folder = container["command"]
    assert (program, command) == ("tensord", "fetch")
    assert url.startswith("s3://")
    assert str(Path(folder).parent) in read(_IMAGE).options.repository.paths
    (volume,) = (each for each in deployment["volumes"] if each["name"] == "models")
    assert set(volume) == {"name", "emptyDir"}
    repositories.scale_model(tmp_path / "bucket")
    (tmp_path / "models").mkdir()
    target = tmp_path / "models" / "scale"
    variables = {each["name"]: each["value"] for each in container["env"]}
    done = subprocess.run(
        [sys.executable, "-m", "tensord", command, str(tmp_path / "bucket" / "scale"), str(target)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (target / "1" / "model.py").exists()


def probes(container: Document) -> Iterator[tuple[str, str]]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if name in container:
            yield name, container[name]["httpGet"]["path"]


async def test_kserves_client_asks_it(daemon: DaemonProcess) -> None:
    url = f"http://127.0.0.1:{daemon.port}"
    async with kserve_package.InferenceRESTClient(kserve_package.RESTConfig(protocol="v2")) as client:
        assert await client.is_server_ready(url)
        assert await client.is_model_ready(url, "scale")
        tensor = kserve_package.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32), binary_data=True)
        answer = await client.infer(url, kserve_package.InferRequest("scale", [tensor]), model_name="scale")
    assert answer.outputs[0].as_numpy().tolist() == [[4, 7, 10, 13]]


def test_metrics_are_where_they_are_looked_for(daemon: DaemonProcess) -> None:
    (endpoint,) = manifests.found(everything(), "PodMonitor")["spec"]["podMetricsEndpoints"]
    annotations = manifests.found(everything(), "ClusterServingRuntime")["spec"]["annotations"]
    assert endpoint["path"] == annotations["prometheus.kserve.io/path"]
    assert annotations["prometheus.kserve.io/port"] == str(read(_IMAGE).options.metrics.port)
    port = daemon.metrics_url.rpartition(":")[2]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{endpoint['path']}", timeout=PATIENCE) as answer:
        assert b"nv_inference_pending_request_count" in answer.read()


def test_probes_and_the_drain(daemon: DaemonProcess) -> None:
    """All probes pass. What preStop runs succeeds, and then the daemon is alive and not ready, as every probe tells."""
    told = {probe for _, container in manifests.daemons(everything()) for probe in probes(container)}
    assert {name for name, _ in told} == {"startupProbe", "livenessProbe", "readinessProbe"}
    assert {daemon.get(path)[0] for _, path in told} == {200}
    commands = {
        tuple(container["lifecycle"]["preStop"]["exec"]["command"])
        for _, container in manifests.daemons(everything())
        if "lifecycle" in container
    }
    ((program, *words),) = commands
    assert program == "tensorctl"
    environment = os.environ | {"TENSORCTL_SOCKET": str(daemon.folder / "control.sock")}
    done = subprocess.run(
        [sys.executable, "-m", "tensord.daemon.ctl", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, path in told:
        assert daemon.get(path)[0] == (200 if path.endswith("/live") else 400), name
        assert name != "livenessProbe" or path.endswith("/live")

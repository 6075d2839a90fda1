"""The documents in deploy/kubernetes: as they are written, and as kustomize builds them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.daemon_process import ROOT

KUBERNETES = ROOT / "deploy/kubernetes"
#: What `kubectl apply --kustomize` is given.
BUILT = ("overlays/cpu", "overlays/gpu", "daemonset")
KUSTOMIZE = (
    ["kustomize", "build"]
    if shutil.which("kustomize")
    else ["kubectl", "kustomize"]
    if shutil.which("kubectl")
    else None
)

Document = dict[str, Any]


def files() -> list[Path]:
    """Returns every file of whole documents; kustomize alone reads the others, among them patches of overlays and components."""
    patches = {KUBERNETES / "components/fetch/deployment.yaml", *KUBERNETES.glob("overlays/*/*.yaml")}
    return [path for path in sorted(set(KUBERNETES.rglob("*.yaml")) - patches) if path.name != "kustomization.yaml"]


def written(path: Path) -> list[Document]:
    """Returns the documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@functools.cache
def built(folder: str) -> list[Document]:
    """Returns what kustomize makes of a folder."""
    assert KUSTOMIZE is not None
    done = subprocess.run([*KUSTOMIZE, str(KUBERNETES / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def found(documents: list[Document], kind: str) -> Document:
    """Returns the one document of a kind."""
    (document,) = (document for document in documents if document["kind"] == kind)
    return document


def pod(document: Document) -> Document | None:
    """Returns the pod's specification that a document has, if it has one."""
    match document["kind"]:
        case "Pod":
            return dict(document["spec"])
        case "Deployment" | "DaemonSet":
            return dict(document["spec"]["template"]["spec"])
        case "ClusterServingRuntime":
            return dict(document["spec"])
    return None


def containers(specification: Document) -> Iterator[Document]:
    """Iterates over a pod's containers, those that come first included."""
    yield from specification.get("initContainers", ())
    yield from specification["containers"]


def daemons(documents: list[Document]) -> Iterator[tuple[Document, Document]]:
    """Iterates over the containers that are daemons, each with its pod's specification: they run the image's own command."""
    for document in documents:
        if (specification := pod(document)) is not None:
            for container in containers(specification):
                if container["image"].partition(":")[0] == "tensord" and "command" not in container:
                    yield specification, container

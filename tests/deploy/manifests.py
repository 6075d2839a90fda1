"""Reads the documents of deploy/kubernetes: as they are written, and as kustomize builds them."""

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
    """Returns every file with whole documents, without those that only kustomize reads, such as patches."""
    patches = {KUBERNETES / "components/fetch/deployment.yaml", *KUBERNETES.glob("overlays/*/*.yaml")}
    return [path for path in sorted(set(KUBERNETES.rglob("*.yaml")) - patches) if path.name != "kustomization.yaml"]


def written(path: Path) -> list[Document]:
    """Returns the documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@functools.cache
def built(folder: str) -> list[Document]:
    """Returns the documents that kustomize builds from a folder."""
    assert KUSTOMIZE is not None
    done = subprocess.run([*KUSTOMIZE, str(KUBERNETES / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def found(documents: list[Document], kind: str) -> Document:
    """Returns the one document of a kind."""
    (document,) = (document for document in documents if document["kind"] == kind)
    return document


def pod(document: Document) -> Document | None:
    """Returns the specification of a document's pod, or None if it has none."""
    match document["kind"]:
        case "Pod":
            return dict(document["spec"])
        case "Deployment" | "DaemonSet":
            return dict(document["spec"]["template"]["spec"])
        case "ClusterServingRuntime":
            return dict(document["spec"])
    return None


def containers(specification: Document) -> Iterator[Document]:
    """Yields a pod's containers, its init containers first."""
    yield from specification.get("initContainers", ())
    yield from specification["containers"]


def daemons(documents: list[Document]) -> Iterator[tuple[Document, Document]]:
    """Yields the containers that run the image's own command, each with its pod's specification: the daemons."""
    for document in documents:
        if (specification := pod(document)) is not None:
            for container in containers(specification):
                if container["image"].partition(":")[0] == "tensord" and "command" not in container:
                    yield specification, container

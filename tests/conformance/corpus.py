"""Reads the recorded behaviour of a real Triton: its cases, and the servers that they were recorded with.

The recordings are no part of the repository. They lie beside it in ``../shared/conformance`` (beside the main checkout, for a
worktree), or where TENSORD_CONFORMANCE says; their README describes the format of a case.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]

#: Groups of cases, in the order of replay.
GROUPS = (
    "http_health",
    "http_metadata",
    "http_config",
    "http_paths",
    "http_bad_body",
    "http_request_fields",
    "http_json_values",
    "http_datatypes",
    "http_shapes",
    "http_params",
    "http_binary",
    "http_classification",
    "http_compression",
    "http_transport",
    "http_generate",
    "model_errors",
    "versions",
    "ensemble",
    "statistics",
    "schedule",
    "cache_warmup",
    "repository",
    "settings_log",
    "settings_trace",
    "shm_admin",
    "shm_infer",
    "grpc_api",
    "grpc_datatypes",
    "grpc_infer",
    "grpc_params",
    "grpc_classification",
    "grpc_stream",
    "schedule",
    "sequence",
    "profile_none",
    "profile_restricted",
)

Case = dict[str, Any]
#: A step of a case, or what came of it.
Step = dict[str, Any]


def _beside(name: str) -> Path | None:
    """Returns ``../shared/NAME`` of this checkout, or of the main checkout if this one is a worktree; None: there is none."""
    checkouts = [ROOT]
    link = ROOT / ".git"
    if link.is_file():  # "gitdir: MAIN/.git/worktrees/NAME"
        checkouts.append(Path(link.read_text().removeprefix("gitdir:").strip()).parents[2])
    found = (checkout.parent / "shared" / name for checkout in checkouts)
    return next((folder for folder in found if folder.is_dir()), None)


def conformance_folder() -> Path | None:
    """Returns the folder of the recordings, or None where they are absent."""
    named = os.environ.get("TENSORD_CONFORMANCE")
    return Path(named) if named else _beside("conformance")


def seeds_folder() -> Path | None:
    """Returns the folder of the published specifications, or None where they are absent."""
    return _beside("seeds")


FOLDER = conformance_folder()


@cache
def replayer() -> ModuleType:
    """Imports replay.py, which comes with the recordings, and returns the module."""
    assert FOLDER is not None
    specification = importlib.util.spec_from_file_location("replay", FOLDER / "replay.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@cache
def cases() -> tuple[Case, ...]:
    """Returns the cases of our groups; none where the recordings are absent."""
    if FOLDER is None:
        return ()
    found = []
    for group in GROUPS:
        lines = (FOLDER / "cases" / f"{group}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [json.loads(line) for line in lines if line.strip()]
    return tuple(found)


@cache
def profiles() -> dict[str, dict[str, Any]]:
    """Returns the flags and models of each profile's server."""
    assert FOLDER is not None
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "profiles.json").read_text())
    return found


def arguments(profile: str) -> list[str]:
    """Returns the command line of a profile's server."""
    wanted = profiles()[profile]
    given: list[list[str]] = []
    for word in wanted["flags"]:
        if word.startswith("--"):
            given.append([word])
        else:
            given[-1].append(word)
    given += [[f"--load-model={name}"] for name in wanted.get("load", ())]
    return [word for flag in given for word in flag]


def is_inference(step: Step, answer: Step) -> bool:
    """Returns whether a step is an inference over HTTP that succeeded."""
    return step.get("path", "").partition("?")[0].endswith("/infer") and answer.get("status") == 200


def json_part(step: Step) -> Any | None:
    """Returns the JSON of an inference request.

    Returns None if it has none (a raw request), is compressed, or has Triton's literal ``Inf``.
    """
    headers = {name.lower(): value for name, value in step.get("headers", {}).items()}
    body = base64.b64decode(step["body_b64"]) if "body_b64" in step else step.get("body", "").encode()
    size = int(headers.get("inference-header-content-length", len(body)))
    if not size or "content-encoding" in headers or re.search(rb"\bInf\b", body[:size]):
        return None
    return json.loads(body[:size])


def touches_shared_memory(case: Case) -> bool:
    """Returns whether a case makes files in /dev/shm."""
    steps = [*case.get("steps", [case]), *case.get("cleanup", [])]
    return any(step.get("op", "").startswith("shm_") for step in _steps(steps))


def _steps(steps: list[Step]) -> Iterator[Step]:
    """Yields the steps, and the steps inside of them that run in a thread beside others."""
    for step in steps:
        yield step
        for inner in ("step", "of"):
            if inner in step:
                yield step[inner]

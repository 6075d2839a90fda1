"""Fetches a model into a repository (``tensord fetch``): downloads it next to its folder, checks it, and swaps it in.

    source: what is there ─▶ stage: fill, complete ─▶ check: load it as a worker does ─▶ stage: swap

If it fails or is interrupted before the last step, the model that is served stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from tensord.config.options import Options
from tensord.daemon import check, tables
from tensord.daemon.fetching.source import Source
from tensord.daemon.fetching.stage import Plan, Stage
from tensord.daemon.models import repository
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.processes.devices import Device
from tensord.daemon.progress_bar import ProgressBar
from tensord.shm.errors import InvalidArgument

#: Seconds between two lines about the progress where there is no terminal.
_LINE_SECONDS = 10.0


def fetch(
    url: str,
    folder: Path,
    options: Options,
    devices: Sequence[Device],
    sha256: str,
    max_byte_size: int,
    timeout: float,
) -> str:
    """Fetches the model at ``url`` into ``folder``. Returns a sentence that says what was done. Progress goes to stderr.

    Args:
      devices: the devices of the workers, one of which loads the model to check it; empty: only its configuration and folders are
        read, and none of its code is run.
      sha256: the expected checksum of the archive, or of the folder's SHA256SUMS; "": unknown.
      max_byte_size: the most bytes of the model, and of its archive.
      timeout: seconds to load each version of the model for the check.

    Raises: ServingError: the model is not at ``url``, cannot be downloaded, is too large, or cannot be served; OSError: the model
      cannot be written.
    """
    source = Source(url)
    plan = Plan(source.shown, source.is_archive, source.files())
    with Stage(folder) as stage:
        if stage.holds(plan):
            stage.clear()
            return f"{folder.name}: it is as at {source.shown} already"
        whole = sum(max(0, file.byte_size) for file in plan.files)
        with _progress(folder.name, stage.path, whole):
            stage.fill(source, plan, max_byte_size)
        stage.complete(source, plan, sha256, max_byte_size)
        found = _verified(stage.model, folder.absolute().parent, options, devices, timeout)
        stage.swap()
    versions = ", ".join(map(str, found.chosen))
    return f"{folder.name}: version {versions} is in {folder}, {tables.scaled(whole, 1024, 'B')} from {source.shown}"


@contextlib.contextmanager
def _progress(name: str, folder: Path, whole: int) -> Iterator[None]:
    """Shows, while a block runs, how many bytes a folder has: as a bar on a terminal, otherwise in a line every ten seconds.

    Args:
      name: what the progress is labelled with.
      whole: how many bytes there will be.
    """
    ended = threading.Event()

    def show() -> None:
        if not sys.stderr.isatty():
            while not ended.wait(_LINE_SECONDS):
                there = tables.scaled(_byte_size(folder), 1024, "B")
                click.echo(f"{name}: {there} of {tables.scaled(whole, 1024, 'B')}", err=True)
            return
        with click.progressbar(length=whole, label=name, file=sys.stderr, show_eta=True) as bar:
            while not ended.wait(1):
                bar.update(_byte_size(folder) - bar.pos)

    shown = threading.Thread(target=show, name="progress")
    shown.start()
    try:
        yield
    finally:
        ended.set()
        shown.join()


def _byte_size(folder: Path) -> int:
    byte_size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # moved to its place meanwhile
                byte_size += os.stat(os.path.join(parent, name)).st_size
    return byte_size


def _verified(model: Path, beside: Path, options: Options, devices: Sequence[Device], timeout: float) -> FoundModel:
    """Checks a fetched model as ``tensord check`` does, an ensemble together with its members. Returns the model as it was found.

    Args:
      model: the folder that the model was downloaded to.
      beside: the repository that it will belong to; members are looked for there and in the configured repositories.
    Raises: InvalidArgument: the model cannot be served; its folder stays.
    """
    found = repository.poll(model)
    repositories = list(dict.fromkeys([beside, *(Path(path).absolute() for path in options.repository.paths)]))
    models = {found.name: found}
    waiting = [name for name, _ in found.members]
    while waiting:
        name = waiting.pop()
        if name not in models:
            models[name] = repository.find(repositories, name)
            waiting += [member for member, _ in models[name].members]
    reason = found.problem
    if devices and not reason:
        placed = check.placed(models.values(), devices, options)
        verdicts = check.check(placed, options, devices, timeout, ProgressBar())
        reason = next(verdict.reason for verdict in verdicts if verdict.model.name == found.name)
    if reason:
        raise InvalidArgument(
            f"model '{found.name}' as it was fetched cannot be served, and stays in {model}: {' '.join(reason.split())}"
        )
    return found

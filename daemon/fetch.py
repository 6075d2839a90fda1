"""``tensord fetch``: stages a model beside the repository, verifies it, and swaps it in.

    source: what is there ─▶ stage: fill, complete ─▶ check: load it as a worker does ─▶ stage: swap

Whatever ends it before the last step leaves what is served as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
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
      devices: those of which one loads it for a check; none: its configuration and folders are read, and no code is run.
      sha256: of the archive, or of the folder's SHA256SUMS; "": not known.
      max_byte_size: of the archive and of what is in it, each.
      timeout: seconds to load each version.

    Raises: ServingError: it is not there, does not come, is too large, or cannot be served.  OSError: it cannot be written.
    """
    source = Source(url)
    plan = Plan(source.shown, source.is_archive, source.files())
    with Stage(folder) as stage:
        if stage.holds(plan):
            stage.clear()
            return f"{folder.name}: it is as at {source.shown} already"
        whole = sum(max(0, file.byte_size) for file in plan.files)
        _follow(folder.name, stage.fill(source, plan, max_byte_size), whole)
        stage.complete(source, plan, sha256, max_byte_size)
        found = _verified(stage.model, folder.absolute().parent, options, devices, timeout)
        stage.swap()
    versions = ", ".join(map(str, found.chosen))
    return f"{folder.name}: version {versions} is in {folder}, {tables.scaled(whole, 1024, 'B')} from {source.shown}"


def _follow(name: str, progress: Iterable[int], whole: int) -> None:
    """Runs a fetch, with a bar on a terminal and a line now and then elsewhere."""
    if sys.stderr.isatty():
        with click.progressbar(length=whole, label=name, file=sys.stderr, show_eta=True) as bar:
            for there in progress:
                bar.update(there - bar.pos)
        return
    said = time.monotonic()
    for there in progress:
        if time.monotonic() - said >= _LINE_SECONDS:
            said = time.monotonic()
            click.echo(f"{name}: {tables.scaled(there, 1024, 'B')} of {tables.scaled(whole, 1024, 'B')}", err=True)


def _verified(model: Path, beside: Path, options: Options, devices: Sequence[Device], timeout: float) -> FoundModel:
    """Checks a staged model as ``tensord check`` does; an ensemble with its members that are in the repositories.

    Raises: InvalidArgument: it cannot be served. It stays in the stage.
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

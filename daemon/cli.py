"""The program ``tensord``: its commands ``serve``, ``check``, ``fetch``, ``init``, ``bench``, ``export``, ``man``, ``config``.

Exit status: 0: the command succeeded; 1: the command failed; 2: the configuration or the command line is wrong.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

import click

from tensord import __version__
from tensord.config import layers, log
from tensord.config.layers import ConfigurationError, Setting
from tensord.config.options import Options
from tensord.daemon import flags, tables
from tensord.daemon.processes import spawned
from tensord.daemon.processes.devices import MissingDevice, find_devices
from tensord.daemon.processes.signals import Signals
from tensord.shm import device_names, trace_file
from tensord.shm.errors import InvalidArgument, ServingError

_log = logging.getLogger(__name__)
#: A change to a model's files is acted upon when it has been there for one look.
_WATCH = (
    Setting("repository.control_mode", "poll", "--watch"),
    Setting("repository.poll_interval", 0.5, "--watch"),
    Setting("repository.exit_on_error", False, "--watch"),
)


class _Commands(tables.CommandGroup):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            _fail(str(error))


_config_file = click.option(
    "--config",
    type=click.Path(readable=False, path_type=Path),
    envvar=layers.CONFIG_VARIABLE,
    help="Configuration file (TOML).",
)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tensord", prog_name="tensord", message="%(prog)s %(version)s")
def main() -> None:
    """tensord serves JAX models over the Open Inference Protocol, with tensors in shared memory.

    Configuration values come from the defaults, the file (--config or TENSORD_CONFIG), environment variables (TENSORD_HTTP_PORT
    and so on) and flags; each of these overrides those named before it. `tensord config` prints every key with its value and what
    it means.
    """


@main.command(cls=flags.FlagCommand)
@_config_file
@click.option(
    "--watch", is_flag=True, help="For writing models: load one again within seconds of a change to its files."
)
@click.pass_context
def serve(ctx: click.Context, config: Path | None, watch: bool) -> None:
    """Serve models until SIGTERM or SIGINT. SIGHUP reads the configuration again; --watch loads changed models again."""
    signals = ctx.find_object(Signals)
    if signals is None:
        signals = Signals()
        signals.watch()
    given = [*flags.settings(ctx), *(_WATCH if watch else ())]
    configured = layers.read(config, os.environ, given)
    options = configured.options
    _require_repository(options)
    from tensord.daemon.operator import start_checks

    start_checks.check(options)
    try:
        if options.trace.file:
            trace_file.begin(options.trace.file)
    except OSError as error:
        _fail(f"trace.file: '{options.trace.file}' cannot be written: {error.strerror}")
    log.configure(options.log, "supervisor")
    if foreign := layers.service_variables(os.environ):
        _log.info("%s", layers.ignored_sentence(foreign))
    try:
        workers = spawned.spawn_workers(options.workers, os.environ)
    except MissingDevice as error:
        _fail(str(error), status=1)
    except OSError as error:
        _fail(f"cannot start: {error}", status=1)
    import asyncio

    from tensord.daemon.processes.listening import ListenError
    from tensord.daemon.supervisor import Supervisor

    supervisor = Supervisor(
        configured, lambda: layers.read(config, os.environ, given), os.environ, workers, signals=signals
    )

    async def run() -> int:
        try:
            return await supervisor.run()
        finally:
            signals.ignore()

    try:
        if signals.came is not None:
            _log.info("stopping: %s came while the daemon was started", signals.came.name)
            spawned.end(workers)
            sys.exit(0)
        status = asyncio.run(run())
    except (ListenError, InvalidArgument) as error:
        _fail(str(error), status=1)
    except OSError as error:
        _fail(f"cannot start: {error}", status=1)
    sys.exit(status)


@main.command(cls=flags.FlagCommand)
@_config_file
@click.option("--read-only", is_flag=True, help="Read configurations and folders; run no code of a model.")
@click.option("--deep", is_flag=True, help="Ask each bucket as well, compare its answer, show time and memory.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds for each version."
)
@click.option("--verbose", is_flag=True, help="Show what a bad model printed while it was loaded.")
@click.option(
    "--user",
    metavar="NAME",
    help="Run as this user.  [default, for root: the user of tensord.service, where it is installed]",
)
@click.argument("file", type=click.Path(readable=False, path_type=Path), required=False)
@click.pass_context
def check(
    ctx: click.Context,
    config: Path | None,
    read_only: bool,
    deep: bool,
    timeout: float,
    verbose: bool,
    user: str | None,
    file: Path | None,
) -> None:
    """Check a configuration FILE, and that the models in its repositories load, without serving anything.

    Each model is loaded and compiled as in a worker, on the first device that would serve the model. The models' code
    runs as the user who calls this command. If root calls this command without --user and tensord.service is installed,
    the models' code runs as the service's user, in the service's sandbox, and the service's cache keeps the compiled
    programs. With --deep, each model also answers a request for each of its buckets, except host, stepped and ragged
    models. With --read-only, no code of a model runs. Exit status 0: all good. 1: a model cannot be served. 2: the
    configuration is wrong.
    """
    from tensord.daemon import check as model_check
    from tensord.daemon import service_user
    from tensord.daemon.check import Verdict
    from tensord.daemon.models import repository
    from tensord.daemon.operator import start_checks

    read, asked_in = file or config, _checked_from(user)
    if asked_in is not None and read is not None:
        read = asked_in / read
    options = layers.read(read, os.environ, flags.settings(ctx)).options
    _require_repository(options)
    if wrong := start_checks.foreseen(options, as_service=asked_in is not None):
        _fail("\n         ".join(wrong))
    if sentence := start_checks.without_cache(options):
        click.echo(sentence, err=True)
    try:
        paths = [Path(path) for path in options.repository.paths]
        found, others = repository.scan(paths), repository.others(paths)
        devices = [] if read_only else find_devices(options.workers, os.environ)
    except (InvalidArgument, MissingDevice) as error:
        _fail(str(error))
    for path, why in others.items():
        click.echo(f"'{path}' is no model: {why}", err=True)
    models, bad = model_check.placed(found.values(), devices, options), 0
    unread = (Verdict(model, model.problem) for model in models)
    for verdict in unread if read_only else model_check.check(models, options, devices, timeout, deep):
        bad += bool(verdict.reason)
        versions = f"version {', '.join(map(str, verdict.model.chosen))}"
        # One line, whatever a model's exception says.
        click.echo(f"{verdict.model.name}: {' '.join((verdict.reason or versions).split())}", err=bool(verdict.reason))
        there = ", ".join(verdict.model.devices)
        if not verdict.reason and any(map(device_names.model_of, verdict.model.devices)):
            click.echo(
                f"    isolated, in a worker of its own ({there}): it cannot call other models, nor can they call it"
            )
        elif not verdict.reason and 0 < len(verdict.model.devices) < len(devices):
            click.echo(f"    on {there} alone of {len(devices)} workers: models on others cannot call it")
        for sentence in (*verdict.model.without_effect, *(each for one in verdict.outcomes for each in one.warnings)):
            click.echo(f"    {' '.join(sentence.split())}", err=bool(verdict.reason))
        for outcome in (each for each in verdict.outcomes if deep and each.config):
            taken = outcome.footprint
            sizes = [tables.scaled(size) for size in (taken.parameter_byte_size, taken.program_byte_size)]
            said = "{:.1f} s to load, {} of parameters, {} of programs".format(taken.seconds, *sizes)
            click.echo(f"    {outcome.name} {outcome.version}: {said}")
            if outcome.trials:
                tables.plot(("bucket", "device", "program", "memory_kib", "mflop", "ms"), outcome.trials, "ms")
        if verbose and verdict.reason:
            click.echo(textwrap.indent(verdict.printed, "    "), err=True, nl=False)
    missing = [name for name in options.repository.load if name != "*" and name not in found]
    for name in missing:
        click.echo(f"{name}: it is to be loaded at start, but it is in no repository", err=True)
    click.echo(f"configuration: good; models: {len(found) - bad} good, {bad + len(missing)} bad")
    sys.exit((1 if asked_in is None else service_user.BAD) if bad or missing else 0)


def _require_repository(options: Options) -> None:
    """Exits if the configuration names no model repository."""
    if not options.repository.paths:
        _fail(
            "repository.paths: nothing to serve; give --model-repository=DIR or a configuration file with [repository] paths"
        )


def _checked_from(name: str | None) -> Path | None:
    from tensord.daemon import service_user

    # In the process that runs in the service's sandbox: the folder in which root called ``check``.
    if (asked_in := os.environ.pop(service_user.INSIDE, None)) is not None:
        return Path(asked_in)
    if os.geteuid() != 0:
        if name is not None and name not in (str(os.geteuid()), os.environ.get("USER")):
            _fail(f"--user={name}: only root can run as another user")
        return None
    try:
        service = service_user.installed()
        if service is not None and name in (None, service.user):
            click.echo(f"as user {service.user}, in {service.folder or '/'}", err=True)
            sys.exit(service_user.check_inside(service, sys.argv[2:], os.environ))
        if name is not None:
            service_user.become(name)
            click.echo(f"as user {name}, in {os.getcwd()}", err=True)
    except service_user.Unusable as error:
        _fail(str(error))
    return None


@main.command(cls=flags.FlagCommand)
@_config_file
@click.option(
    "--sha256",
    metavar="HEX",
    callback=lambda _, __, value: _sha256(value),
    help="The checksum of the archive, or of the file SHA256SUMS in the folder.",
)
@click.option("--read-only", is_flag=True, help="Read the model's configuration and folders; run no code of it.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds to load each version."
)
@click.option(
    "--max-byte-size",
    type=click.IntRange(min=1),
    default=1 << 40,
    show_default=True,
    help="The most bytes of the model, and of its archive.",
)
@click.argument("url")
@click.argument("folder", type=click.Path(path_type=Path))
@click.pass_context
def fetch(
    ctx: click.Context,
    config: Path | None,
    sha256: str,
    read_only: bool,
    timeout: float,
    max_byte_size: int,
    url: str,
    folder: Path,
) -> None:
    """Bring the model at URL into FOLDER, whose name is the model's, such as models/digits.

    URL is a path, or begins with s3://, gs:// or hf://. A URL that ends in .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz or .zip
    names an archive, and may also begin with https:// or http://. Any other URL names a folder. The model is downloaded,
    and then checked as `tensord check` checks models. If the check succeeds, the model replaces FOLDER. With --read-only,
    the check runs no code of the model. After an interrupted fetch, the next fetch downloads only the remaining files. If
    FOLDER already holds the model at URL, nothing is done. Exit status 0: FOLDER holds the model. 1: FOLDER is unchanged.
    2: the configuration is wrong.
    """
    from tensord.daemon import fetch as fetching

    options = layers.read(config, os.environ, flags.settings(ctx)).options
    try:
        devices = [] if read_only else find_devices(options.workers, os.environ)
        click.echo(fetching.fetch(url, folder, options, devices, sha256, max_byte_size, timeout))
    except (ServingError, MissingDevice) as error:
        _fail(str(error), status=1)
    except OSError as error:
        _fail(f"'{error.filename or folder}': {error.strerror or error}", status=1)


def _sha256(value: str | None) -> str:
    if value is not None and not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise click.BadParameter(f"'{value}' has not 64 hexadecimal digits")
    return value or ""


@main.command("init")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def init_model(folder: Path) -> None:
    """Write an example model into FOLDER, which must be new or empty. If FOLDER is models/mine, the model is called mine."""
    from tensord.daemon import first_model

    try:
        click.echo(first_model.write(folder), nl=False)
    except InvalidArgument as error:
        _fail(str(error), status=1)
    except OSError as error:
        _fail(f"{error.filename} cannot be written: {error.strerror}", status=1)


@main.command()
@click.option("--address", default="", help="The daemon: HOST:PORT, grpc://HOST:PORT, a socket or its folder.")
@click.option(
    *("--connections", "counts"),
    type=click.IntRange(1, 1024),
    multiple=True,
    default=(1, 4, 16),
    show_default=True,
    help="How many clients ask at once, each on a connection of its own; may be repeated.",
)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Of each measurement.")
@click.option("--size", type=click.IntRange(min=1), default=1, show_default=True, help="Of batches and axes that vary.")
@click.option(
    "--header", multiple=True, metavar="NAME:VALUE", help="With each request over HTTP or gRPC; may be repeated."
)
@click.argument("model")
def bench(
    address: str, counts: tuple[int, ...], seconds: float, size: int, header: tuple[str, ...], model: str
) -> None:
    """Measure how many answers MODEL gives per second, and how long they take, by number of connections.

    Each connection sends a request, waits for the answer and sends the next one. All requests have the same random inputs:
    normal numbers, integers from 0 to 3, booleans, or digits as strings. Half of the requests took at most p50, and 99 %
    took at most p99. Without --address, tensord_client.connect() finds the daemon. The daemon must serve MODEL. All clients
    are threads of this process. This needs tensord-client, and tritonclient[grpc] for gRPC. Exit status 1: a request failed.
    """
    from tensord import closed_loop

    try:
        rows = [closed_loop.measured(address, model, count, seconds, size, header) for count in counts]
    except Exception as error:
        _fail(str(error), status=1)
    tables.plot(("connections", "answers_per_s", "p50_us", "p99_us"), rows, "answers_per_s")


@main.command("export")
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--platforms", default="", help="What it may run on, such as cpu,cuda; without it, what runs this.")
@click.option(
    "--derivatives", type=click.IntRange(0, 2), default=0, help="How many orders of derivatives it has, in reverse."
)
def export_model(model: Path, folder: Path, platforms: str, derivatives: int) -> None:
    """Write the newest version of the JAX model in the folder MODEL into FOLDER, as a model without Python files.

    The new model consists of a program of jax.export for the given platforms (the default is the one on which this runs) and a
    file of parameters. Any tensord can serve the new model, and any JAX can call its program. The program can be differentiated
    as often as --derivatives says. This command runs the model's code as the user who calls it.
    """
    from tensord.daemon import check as model_check
    from tensord.daemon.models import repository

    options = layers.read(None, os.environ).options
    try:
        found = repository.poll(model.absolute())
        model_check.export(found, options, find_devices(options.workers, os.environ)[0], folder, platforms, derivatives)
    except (InvalidArgument, MissingDevice) as error:
        _fail(str(error), status=1)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        click.echo(f"{path}  {path.stat().st_size} bytes")


@main.command("man")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def write_man_pages(folder: Path) -> None:
    """Write the manual pages of tensord, tensorctl and their commands into FOLDER, such as /usr/local/share/man/man1.

    This needs click-man (pip install 'tensord[man]').
    """
    from tensord.daemon import ctl

    try:
        from click_man import core
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is not installed (pip install 'tensord[man]')", status=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.1")}
        for name, command in (("tensord", main), ("tensorctl", ctl.main)):
            described = _described(command, click.Context(command, info_name=name))
            core.write_man_pages(name, described, version=__version__, target_dir=str(folder))
    except OSError as error:
        _fail(f"{error.filename} cannot be written: {error.strerror}", status=1)
    written = [path for path in folder.glob("*.1") if before.get(path) != path.stat().st_mtime_ns]
    click.echo(f"{len(written)} pages in {folder}")


def _described(command: click.Command, ctx: click.Context) -> click.Command:
    """Returns a copy of ``command`` with help texts from which click-man makes correct man pages."""
    described = copy.copy(command)
    described.params = command.get_params(ctx)
    # A line that begins with a dot or an apostrophe is a request to troff.
    described.help = re.sub("^(?=[.'])", r"\\&", inspect.cleandoc(command.help or ""), flags=re.MULTILINE)
    described.short_help = " ".join((command.help or "").strip().partition("\n\n")[0].split()).removesuffix(".")
    if isinstance(command, click.Group):
        assert isinstance(described, click.Group)
        described.commands = {
            name: _described(each, click.Context(each, ctx, info_name=name)) for name, each in command.commands.items()
        }
    return described


@main.command("config", cls=flags.FlagCommand)
@_config_file
@click.option("--short", is_flag=True, help="Only keys that something sets, as a table.")
@click.pass_context
def print_config(ctx: click.Context, config: Path | None, short: bool) -> None:
    """Print a configuration file with every key, its value and its meaning.

    A value that was set is followed by "# from" and its source: a configuration file, an environment variable or a flag. Any
    value without "# from" is the default. Your own file only needs the keys that differ from the defaults. With --short,
    print a table of only the keys that were set, with value and source.
    """
    configured = layers.read(config, os.environ, flags.settings(ctx))
    if short:
        rows = [
            {"key": key, "value": json.dumps(layers.shown_value_of(configured.options, key)), "source": source}
            for key, source in configured.sources.items()
        ]
        tables.show(("key", "value", "source"), rows)
    else:
        click.echo(layers.written(configured), nl=False)


def _fail(message: str, status: int = 2) -> NoReturn:
    click.echo(f"tensord: {message}", err=True)
    sys.exit(status)

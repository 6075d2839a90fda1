"""Checks whether the daemon can use the files, sockets, host names and packages that a configuration names."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tensord.config import log
from tensord.config.layers import ConfigurationError
from tensord.config.options import Options
from tensord.daemon.control.certificates import TlsError, tls_context
from tensord.daemon.processes import listening
from tensord.daemon.tracing import span_exporter

#: Where the service manager makes folders when it starts the service (RuntimeDirectory=, LogsDirectory= and so on).
_MADE_AT_START = ("/run/", "/var/run/", "/var/log/", "/var/lib/", "/var/cache/")


def check(options: Options) -> None:
    """Checks that the log file and the TLS files of enabled servers can be used. A missing log file is created.

    Raises ConfigurationError if the log file cannot be written, or if a TLS file cannot be used.
    """
    try:
        log.check_writable(options.log)
    except OSError as error:
        raise ConfigurationError(str(error.strerror)) from None
    for sentence in _unusable_certificates(options):
        raise ConfigurationError(sentence)


def foreseen(options: Options, as_service: bool) -> list[str]:
    """Returns a sentence for each problem on this host that would make the daemon's start fail. Ports are not checked.

    ``as_service``: whether this process runs in the service's sandbox. If ``as_service`` is False, a missing folder in /run,
    /var/run, /var/log, /var/lib or /var/cache is not reported.
    """
    made_at_start = () if as_service else _MADE_AT_START
    found = [*_unusable_certificates(options), *_unresolved_names(options)]
    for key, path in (("log.file", options.log.file), ("trace.file", options.trace.file)):
        if path and (reason := _unwritable(Path(path), made_at_start)):
            found.append(f"{key}: '{path}' cannot be written: {reason}")
    for key, path in _sockets(options):
        folder = Path(os.path.abspath(path)).parent
        if reason := _unwritable_folder(folder, made_at_start):
            found.append(f"{key}: '{path}' cannot be made: {reason}")
    if options.trace.otlp and not span_exporter.installed():
        found.append(span_exporter.NOT_INSTALLED)
    return found


def without_cache(options: Options) -> str:
    """Returns a warning if compiled programs cannot be stored in the cache directory, or "" if they can."""
    path = Path(options.executables.cache_directory).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not options.executables.cache_directory or not (reason := _unwritable_folder(there, ())):
        return ""
    return f"executables.cache_directory: '{path}': {reason}: each start compiles all models"


def _unusable_certificates(options: Options) -> Iterator[str]:
    for served in (options.http, options.grpc):
        try:
            if served.enabled:
                tls_context(served)
        except TlsError as error:
            yield str(error)


def _unresolved_names(options: Options) -> Iterator[str]:
    """Yields a sentence for each configured address whose host name cannot be resolved."""
    for section, served in (("http", options.http), ("grpc", options.grpc), ("metrics", options.metrics)):
        addresses = (served.address,) if isinstance(served.address, str) else served.address
        for address in addresses if served.enabled else ():
            if address.startswith("unix:"):
                continue
            try:
                listening.resolved(address.strip("[]"), served.port)
            except listening.ListenError as error:
                yield f"{section}.address: '{address}': {error}"


def _sockets(options: Options) -> Iterator[tuple[str, str]]:
    """Yields the name of the option, such as "http.address", and the path of the socket, for each configured Unix socket."""
    for section, served in (("http", options.http), ("grpc", options.grpc)):
        for address in served.address if served.enabled else ():
            if address.startswith("unix:"):
                yield f"{section}.address", address.removeprefix("unix:").removeprefix("//")
    if options.clients.socket:
        yield "clients.socket", options.clients.socket
    if options.supervisor.control_socket:
        yield "supervisor.control_socket", options.supervisor.control_socket


def _unwritable(path: Path, made_at_start: tuple[str, ...]) -> str:
    if path.is_dir():
        return "Is a directory"
    if not path.exists():
        return _unwritable_folder(path.absolute().parent, made_at_start)
    return "" if os.access(path, os.W_OK) else _denial(path)


def _unwritable_folder(folder: Path, made_at_start: tuple[str, ...]) -> str:
    if not folder.exists() and f"{folder}/".startswith(made_at_start):
        return ""
    if not folder.is_dir():
        return f"there is no folder '{folder}'"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"folder '{folder}': {_denial(folder)}"


def _denial(path: Path) -> str:
    """Returns why an existing path cannot be written: "Read-only file system" or "Permission denied"."""
    return os.strerror(errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES)

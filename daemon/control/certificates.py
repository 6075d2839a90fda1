"""Creates TLS contexts from the operator's PEM files, and reads these files again when they change.

a front starts ─▶ TLS context ─▶ connections ─▶ every second: have the files changed? ─▶ new TLS context for later connections
"""

from __future__ import annotations

import logging
import os
import ssl

from tensord.config.options import Grpc, Http

_log = logging.getLogger(__name__)


class TlsError(Exception):
    """Raised if a PEM file for TLS cannot be used. The message names the option that names the file."""


def tls_context(options: Http | Grpc) -> ssl.SSLContext | None:
    """Creates a TLS context from the operator's PEM files, or returns None if TLS is off.

    If ``mutual_tls`` is on, clients must have a certificate, too. The context offers one protocol by ALPN: HTTP/1.1 for HTTP,
    HTTP/2 for gRPC. Raises TlsError if a file cannot be used.
    """
    if not options.use_tls and not options.mutual_tls:
        return None
    section, protocol = ("http", "http/1.1") if isinstance(options, Http) else ("grpc", "h2")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.set_alpn_protocols([protocol])
    try:
        tls.load_cert_chain(options.certificate, options.key)
    except OSError as error:
        raise TlsError(f"{section}.certificate or {section}.key cannot be used: {error.strerror or error}") from None
    if options.mutual_tls:
        try:
            tls.load_verify_locations(options.root_certificate)
        except OSError as error:
            raise TlsError(f"{section}.root_certificate cannot be used: {error.strerror or error}") from None
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls


class Certificates:
    """Holds the TLS context of one front process, and replaces it when the PEM files have changed."""

    def __init__(self, options: Http | Grpc) -> None:
        """Reads the PEM files that the options name. Raises TlsError if a file cannot be used."""
        self._options = options
        self._seen = self._stamps()
        #: The TLS context of new connections; None: they are plain text.
        self.context = tls_context(options)

    def look(self) -> None:
        """Makes a new TLS context for later connections if the PEM files have changed. If that fails, keeps the old context."""
        if self.context is None or (stamps := self._stamps()) == self._seen:
            return
        self._seen = stamps
        try:
            self.context = tls_context(self._options)
        except TlsError as error:
            _log.error("changed certificates are not used, the former ones stay in force: %s", error)
        else:
            _log.info("certificates have changed: new connections get those that are there now")

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        options = self._options
        return [_stamp(path) for path in (options.certificate, options.key, options.root_certificate)]

    def __repr__(self) -> str:
        return f"<Certificates {self._options.certificate or 'none'}>"


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Returns a file's inode, size and time of modification; None: ``os.stat`` has failed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

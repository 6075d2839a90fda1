"""TLS from the operator's PEM files, which are read again when they change.

a front opens ─▶ context ─▶ connections ─▶ every second: have the files changed? ─▶ another context for later connections
"""

from __future__ import annotations

import logging
import os
import ssl

from tensord.config.options import Grpc, Http

_log = logging.getLogger(__name__)


class TlsError(Exception):
    """Tells the operator which file is wrong."""


def tls_context(options: Http | Grpc) -> ssl.SSLContext | None:
    """Makes TLS from PEM files: the protocol by ALPN, and clients' certificates where they are asked for.

    None: plain text. Raises TlsError.
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
    """Holds the TLS context of one front."""

    def __init__(self, options: Http | Grpc) -> None:
        """Reads the files. Raises TlsError."""
        self._options = options
        self._seen = self._stamps()
        #: The TLS context of new connections; None: they are plain text.
        self.context = tls_context(options)

    def look(self) -> None:
        """Reads the files again where any has changed; what cannot be used is logged, and the former context stays."""
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
    """Returns what tells a file from what it was; a link is followed. None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

"""TLS of the gRPC port: certificates from PEM files, HTTP/2 agreed by ALPN, clients' certificates where they are asked for."""

from __future__ import annotations

import ssl

from tensord.config.options import Grpc


class TlsError(Exception):
    """A sentence for the operator: which file is wrong."""


def context(options: Grpc) -> ssl.SSLContext | None:
    """None: plain text. Raises TlsError."""
    if not options.use_tls and not options.mutual_tls:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.set_alpn_protocols(["h2"])
    try:
        tls.load_cert_chain(options.certificate, options.key)
    except OSError as error:
        raise TlsError(f"grpc.certificate or grpc.key cannot be used: {error.strerror or error}") from None
    if options.mutual_tls:
        try:
            tls.load_verify_locations(options.root_certificate)
        except OSError as error:
            raise TlsError(f"grpc.root_certificate cannot be used: {error.strerror or error}") from None
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls

"""The TLS context of a server, made before the model is loaded, as files may be wrong."""

import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of a server's TLS, PEM.

    Attributes:
      certfile: the certificate, and those between it and the root; may hold the key, too.
      keyfile: its key.
      ca_certs: roots that clients' certificates are checked against.
      requires_client_certificate: refuse clients without one.
      ciphers: OpenSSL's list for TLS 1.2; None: its default.
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    requires_client_certificate: bool = False
    ciphers: str | None = None


def make_ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server: TLS 1.2 and later.

    Raises: ValueError naming the flag whose file or value cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> str:
        # Otherwise OpenSSL asks on the terminal, and a service would wait there for ever.
        raise ValueError("the key is encrypted; decrypt it with `openssl pkey` first")

    try:
        context.load_cert_chain(files.certfile, files.keyfile, no_password)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--ssl-certfile {files.certfile} and --ssl-keyfile {files.keyfile} cannot be used: "
            f"{error}"
        ) from None
    try:
        if files.ca_certs is not None:
            context.load_verify_locations(files.ca_certs)
    except OSError as error:
        raise ValueError(f"--ssl-ca-certs {files.ca_certs} cannot be used: {error}") from None
    if files.requires_client_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
    elif files.ca_certs is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
    if files.ciphers is not None:
        try:
            context.set_ciphers(files.ciphers)
        except ssl.SSLError as error:
            raise ValueError(f"--ssl-ciphers {files.ciphers!r}: {error}") from None
    return context

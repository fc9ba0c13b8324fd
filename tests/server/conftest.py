"""Keeps what one test does to logging from the next; a certificate for those who need one."""

import logging
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from paged.server.tls import TlsFiles


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("paged")
    before = (list(root.handlers), root.level, own.level)
    yield
    root.handlers[:], root_level, own_level = before
    root.setLevel(root_level)
    own.setLevel(own_level)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("missing tool: openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = TlsFiles(certfile=str(folder / "cert.pem"), keyfile=str(folder / "key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", files.keyfile, "-out", files.certfile]
    subprocess.run(command, check=True, capture_output=True)
    return files

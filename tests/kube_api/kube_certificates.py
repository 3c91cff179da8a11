"""A certificate authority for one test, made with openssl."""

import ssl
import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Keeps its certificate in ``ca``, and all it signs beside it in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ca = directory / "ca.pem"
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
                      "-subj", "/CN=kubernetes", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip

    def issue(self, file: str, subject: str, extension: str) -> tuple[Path, Path]:
        """Sign a certificate of this subject: /O=.../CN=...; its file and that of its key."""
        (self._directory / f"{file}.ext").write_text(f"{extension}\n", encoding="utf-8")
        self._openssl("req", *_NEW_KEY, "-keyout", f"{file}.key", "-out", f"{file}.csr", "-subj", subject)
        self._openssl("x509", "-req", "-in", f"{file}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-days", "2", "-extfile", f"{file}.ext", "-out", f"{file}.pem")  # fmt: skip
        return self._directory / f"{file}.pem", self._directory / f"{file}.key"

    def server_context(self) -> ssl.SSLContext:
        """For a server on loopback that accepts clients with a certificate of this authority and such without."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue("server", "/CN=kube-api", "subjectAltName=IP:127.0.0.1,DNS:localhost"))
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)

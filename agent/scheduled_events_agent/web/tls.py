"""TLS settings of the web server: the file of ``agent.web_config``, in the format of Prometheus' exporters.

Invariant: while a file cannot be used, the settings of the one before it stay in force.
"""

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.policy.web_config import TlsServerConfig, WebConfig, named_files, parse_web_config

_MAX_FILE_BYTES = 1024 * 1024
# The files are looked at this often at most.
_POLL_SECONDS = 1.0


class TlsError(AgentError):
    """The file cannot be used; one line for each thing wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="web_config")


class Tls:
    """The TLS that the file asks for now: certificates are renewed under a running agent. For any thread."""

    def __init__(self, path: Path, on_error: Callable[[str], None]) -> None:
        """``on_error`` is called with the reason when the file is rejected, and with "" when it is good again.

        Raises TlsError.
        """
        self._path = path
        self._on_error = on_error
        self._lock = threading.Lock()
        self.failure = ""
        """Why the file as it is now was rejected; "" if it is in force."""
        config, self._context = _read(path)
        self._files = (path, *map(Path, named_files(path, config).values()))
        self._fingerprints = _fingerprints(self._files)
        self._looked_at = time.monotonic()

    def context(self) -> ssl.SSLContext:
        """The context for the next connection. Reads files that have changed again, at most once a second."""
        # While another client waits for a slow disk, this one uses the context from before.
        if time.monotonic() - self._looked_at >= _POLL_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._reload_if_changed()
                self._looked_at = time.monotonic()
            finally:
                self._lock.release()
        return self._context

    def _reload_if_changed(self) -> None:
        stamps = _fingerprints(self._files)
        if stamps == self._fingerprints and not self.failure:
            return
        self._fingerprints = stamps
        try:
            config, self._context = _read(self._path)
        except TlsError as error:
            failure = str(error)
        else:
            failure = ""
            self._files = (self._path, *map(Path, named_files(self._path, config).values()))
        if failure != self.failure:
            self.failure = failure
            self._on_error(failure)


def load_web_config(path: Path) -> WebConfig:
    """The file's settings, when all that it names can be used. Raises TlsError."""
    return _read(path)[0]


class _FileError(Exception):
    """Something of ``tls_server_config`` cannot be used; ``key`` says what, "" for the whole."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = f"tls_server_config.{key}" if key else "tls_server_config"


def _read(path: Path) -> tuple[WebConfig, ssl.SSLContext]:
    try:
        text = host.read_small_file(path, _MAX_FILE_BYTES)
    except host.HostError as error:
        raise TlsError(str(error)) from error
    parsed = parse_web_config(text, str(path))
    if parsed.value is None:
        raise TlsError("\n".join(map(str, parsed.problems)))
    files = {key: Path(file) for key, file in named_files(path, parsed.value).items()}
    try:
        return parsed.value, _context(parsed.value.tls_server_config, files)
    except _FileError as error:
        raise TlsError(str(parsed.problem(error.key, str(error)))) from error


def _context(tls: TlsServerConfig, files: dict[str, Path]) -> ssl.SSLContext:
    asks = tls.client_auth_type != "NoClientCert"
    if asks != ("client_ca_file" in files):
        missing = "client_ca_file" if asks else "client_auth_type"
        raise _FileError("", f"client_auth_type and client_ca_file go together: {missing} is missing")
    for key, file in files.items():
        try:
            # The library would not say which file it cannot read, and would wait for a named pipe.
            host.read_small_file(file, _MAX_FILE_BYTES)
        except host.HostError as error:
            raise _FileError(key, str(error)) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}[tls.min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    certificate = files["cert_file"]
    key_file = files["key_file"]
    try:
        # Without the password, the library would ask a terminal for it.
        context.load_cert_chain(certificate, key_file, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        if "MISMATCH" in str(getattr(error, "reason", "")):
            raise _FileError("key_file", f"{key_file} is not the key of {certificate}") from error
        expected = f"a certificate in {certificate} and its key, without a password, in {key_file}, both as PEM"
        raise _FileError("cert_file", f"expected {expected}; {_reason(error)}") from error
    if asks:
        try:
            context.load_verify_locations(files["client_ca_file"])
        except (ssl.SSLError, OSError) as error:
            text = f"expected certificates as PEM in {files['client_ca_file']}; {_reason(error)}"
            raise _FileError("client_ca_file", text) from error
        is_required = tls.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    return context


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f"found: {str(reason).replace('_', ' ').lower()}" if reason else f"found: {error}"


def _fingerprints(files: tuple[Path, ...]) -> tuple[object, ...]:
    """The stamps of the files, which differ after a change."""
    stamps: list[object] = []
    for file in files:
        try:
            facts = file.stat()
            stamps.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
        except OSError as error:
            stamps.append(error.errno)
    return tuple(stamps)

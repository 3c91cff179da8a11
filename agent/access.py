"""Who may ask the web server, and how: TLS, client certificates and passwords.

Owns the file that ``agent.web_config`` names, which is written as for Prometheus' own exporters, and what follows
from it. Knows no page and no socket of its own. The one invariant: what a file asks for is in force as a whole or
not at all; a file that cannot be used leaves the one before it in force, never less than that.
"""

import base64
import binascii
import hmac
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from agent import AgentError
from agent.typed_yaml import Parsed, parse

if TYPE_CHECKING:
    import ssl

_MAX_FILE_BYTES = 1024 * 1024
# The salt's last letter holds two bits; with any other one the library refuses to check.
_HASH = re.compile(r"\$2[aby]\$(?P<cost>[0-9]{2})\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
# Each step doubles the time of one check; at 14 it is about a second.
_MAX_COST = 14
# All that the algorithm looks at.
_MAX_PASSWORD_BYTES = 72
# After a wrong password nobody's is checked for this many times as long as the check took: guessing costs a fifth
# of a processor at most.
_REST = 4.0
_MAX_REST_SECONDS = 2.0
# Addresses whose first password is being checked, or waits for that.
_MAX_WAITING = 4

ClientAuthType = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]

# Keys of the convention that mean nothing here.
_FOREIGN = (
    "http_server_config", "rate_limit", "tls_server_config.cert", "tls_server_config.key",
    "tls_server_config.client_ca", "tls_server_config.client_allowed_sans", "tls_server_config.max_version",
    "tls_server_config.cipher_suites", "tls_server_config.prefer_server_cipher_suites",
    "tls_server_config.curve_preferences",
)  # fmt: skip


class TlsServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS; relative paths begin where the file itself is."""

    cert_file: str
    key_file: str
    client_auth_type: ClientAuthType = "NoClientCert"
    client_ca_file: str | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class WebConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    basic_auth_users: Annotated[dict[str, str], Meta(extra={"kind": "secret"})] = {}
    """User names and the bcrypt hashes of their passwords."""


class AccessError(AgentError):
    """The file cannot be used; one line for each thing wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="web_config")


class TooManyError(AgentError):
    """Others are being asked for their passwords just now."""


@dataclass(frozen=True)
class _InForce:
    """What one good reading of the file and of those that it names has given."""

    tls: "ssl.SSLContext | None"
    passwords: "_Passwords | None"
    files: tuple[Path, ...]


class Access:
    """What the file asks for, now: certificates are renewed under a running agent. For any thread."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        """``tell`` hears why the file was refused, and "" when it is good again. Raises AccessError."""
        self._path = path
        self._tell = tell
        self._stamps: tuple[object, ...] = ()
        self.refused = ""
        """Why the file as it is now was refused; "" if it is in force."""
        self._in_force = _read(path)

    @property
    def tls(self) -> "ssl.SSLContext | None":
        """What a connection is to be wrapped in."""
        return self._in_force.tls

    def admits(self, authorization: str, address: str) -> bool:
        """Whether the header, "" without one, has a right name and password, or none is asked for.

        Blocks while passwords are checked, which is done one at a time. Raises TooManyError.
        """
        passwords = self._in_force.passwords
        return passwords is None or passwords.admit(authorization, address)

    def look(self) -> None:
        """Read the files again if they have changed. For one thread; blocks as long as the disk does."""
        stamps = _stamps(self._in_force.files)
        if stamps == self._stamps and not self.refused:
            return
        try:
            fresh = _read(self._path)
        except AccessError as error:
            refused = str(error)
        except Exception as error:  # noqa: BLE001 - whatever is in a file, the one before it is still good
            refused = f"{self._path}: a bug in the agent: {error!r}"
        else:
            # Of files that were not looked at before the reading, a change meanwhile would be missed.
            self._stamps = stamps if fresh.files == self._in_force.files else ()
            self._in_force, refused = _with_what_is_known(fresh, self._in_force), ""
        if refused != self.refused:
            self.refused = refused
            self._tell(refused)


def load_web_config(path: Path) -> WebConfig:
    """The file's settings, when all that it names can be used. Raises AccessError."""
    return _parse(path)[0]


def doubts(config: WebConfig, *, is_open: bool) -> Iterator[str]:
    """What is hardly meant; ``is_open``: others than this machine can reach the pages."""
    if not is_open:
        return
    tls = config.tls_server_config
    if tls is None and config.basic_auth_users:
        yield "passwords would travel as everybody on the way can read them: add tls_server_config"
    if not config.basic_auth_users and (tls is None or tls.client_auth_type != "RequireAndVerifyClientCert"):
        yield "whoever reaches the pages may read them: add basic_auth_users, or ask for client certificates"


def _read(path: Path) -> _InForce:
    config, context = _parse(path)
    passwords = _Passwords(config.basic_auth_users) if config.basic_auth_users else None
    return _InForce(tls=context, passwords=passwords, files=(path, *named_files(path, config).values()))


def _with_what_is_known(fresh: _InForce, old: _InForce) -> _InForce:
    """Whose password was right stays known if none has changed: others may be guessing just now."""
    is_same = fresh.passwords and old.passwords and fresh.passwords.hashes == old.passwords.hashes
    return replace(fresh, passwords=old.passwords) if is_same else fresh


def _parse(path: Path) -> "tuple[WebConfig, ssl.SSLContext | None]":
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no path at all
        raise AccessError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise AccessError(f"{path}: expected at most {_MAX_FILE_BYTES // 1024} KiB; it is larger")
    parsed = parse(text, WebConfig, str(path))
    problems = {(problem.line, problem.path): problem for problem in parsed.problems}
    for key in _FOREIGN:
        if key in parsed.lines:
            # In place of "unknown key", which is told of the mapping around it.
            around = parsed.problem(key.rpartition(".")[0], "")
            problem = parsed.problem(key, "this part of the convention is not known here: remove it")
            problems.pop((problem.line, around.path), None)
            problems[problem.line, key] = problem
    if not problems and parsed.value == WebConfig():
        # Most likely it is just being written; taken at its word, it would open all doors for a moment.
        way_out = "remove agent.web_config if the pages are to be open"
        raise AccessError(f"{path}: expected tls_server_config or basic_auth_users, got neither: {way_out}")
    if not problems and parsed.value is not None:
        context: list[ssl.SSLContext] = []
        found = parsed.gather(_faults(parsed, parsed.value, path, context))
        if not found:
            return parsed.value, context[0] if context else None
        problems = {(problem.line, problem.path): problem for problem in found}
    lines = sorted(problems.values(), key=lambda problem: problem.line)
    raise AccessError("\n".join(map(str, lines)))


def _faults(
    parsed: Parsed[WebConfig], config: WebConfig, path: Path, context: "list[ssl.SSLContext]"
) -> Iterator[tuple[str, str]]:
    """What makes the file unusable though its shape is right; without any, ``context`` has the one for TLS."""
    for name, text in config.basic_auth_users.items():
        # Neither a name with a colon nor the hash itself is repeated: both may be a password in the wrong place.
        where = f"basic_auth_users.{name}" if f"basic_auth_users.{name}" in parsed.lines else "basic_auth_users"
        match = _HASH.fullmatch(text)
        if ":" in name:
            yield "basic_auth_users", "a user name cannot have a colon in it"
        elif match is None:
            yield where, 'expected a bcrypt hash ("htpasswd -nBC 10 NAME" makes one); got something else'
        elif not 4 <= int(match["cost"]) <= _MAX_COST:
            yield (
                where,
                f"expected a cost of 4 to {_MAX_COST}, for each check doubles with it; got {match['cost']}",
            )
    if config.basic_auth_users:
        try:
            import bcrypt  # noqa: F401, PLC0415 - most agents ask for no password
        except ImportError as error:
            way_out = "ask for client certificates instead, or have a proxy ask for passwords"
            yield "basic_auth_users", f"bcrypt, which checks passwords, cannot be loaded ({error}): {way_out}"
    tls = config.tls_server_config
    if tls is None:
        return
    asks = tls.client_auth_type != "NoClientCert"
    if asks != (tls.client_ca_file is not None):
        missing = "client_ca_file" if asks else "client_auth_type"
        yield "tls_server_config", f"client_auth_type and client_ca_file go together: {missing} is missing"
        return
    is_readable = True
    for key, file in named_files(path, config).items():
        try:
            file.open("rb").close()
        except (OSError, ValueError) as error:  # ValueError: no path at all
            is_readable = False
            reason = getattr(error, "strerror", None) or error
            yield f"tls_server_config.{key}", f"{file} cannot be read: {reason}"
    if is_readable:
        try:
            context.append(_context(tls, named_files(path, config)))
        except _TlsError as error:
            yield f"tls_server_config.{error.key}", str(error)


class _TlsError(Exception):
    """A file is not what TLS needs; ``key`` says which."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def named_files(path: Path, config: WebConfig) -> dict[str, Path]:
    """The files that the file names, by their keys."""
    tls = config.tls_server_config
    if tls is None:
        return {}
    names = {"cert_file": tls.cert_file, "key_file": tls.key_file, "client_ca_file": tls.client_ca_file}
    return {key: path.parent / name for key, name in names.items() if name is not None}


def _context(tls: TlsServerConfig, files: dict[str, Path]) -> "ssl.SSLContext":
    import ssl  # noqa: PLC0415 - most agents speak plain HTTP

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}[tls.min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # Without the password, the library would ask a terminal for it.
        context.load_cert_chain(files["cert_file"], files["key_file"], password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        if "MISMATCH" in str(getattr(error, "reason", "")):
            raise _TlsError("key_file", f"{files['key_file']} is not the key of {files['cert_file']}") from error
        text = f"expected a certificate in {files['cert_file']} and its key, without a password, in "
        raise _TlsError("cert_file", f"{text}{files['key_file']}, both as PEM; {_reason(error)}") from error
    if "client_ca_file" in files:
        file = files["client_ca_file"]
        try:
            context.load_verify_locations(file)
        except (ssl.SSLError, OSError) as error:
            text = f"expected certificates as PEM in {file}; {_reason(error)}"
            raise _TlsError("client_ca_file", text) from error
        is_required = tls.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    return context


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f"found: {str(reason).replace('_', ' ').lower()}" if reason else f"found: {error}"


def _stamps(files: tuple[Path, ...]) -> tuple[object, ...]:
    """What changes when a file does."""
    stamps: list[object] = []
    for file in files:
        try:
            facts = file.stat()
            stamps.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
        except OSError as error:
            stamps.append(error.errno)
    return tuple(stamps)


class _Passwords:
    """Checks names and passwords, dearly the first time and cheaply when the same comes again."""

    def __init__(self, users: dict[str, str]) -> None:
        self.hashes = {name: text.encode() for name, text in users.items()}
        # Of a name that nobody has, a hash is checked all the same, so that the time does not tell names.
        self._decoy = max(self.hashes.values(), key=lambda text: text[4:6])
        self._key = os.urandom(32)
        self._known: dict[str, bytes] = {}
        self._checking = threading.Lock()
        self._waiting: set[str] = set()
        self._door = threading.Lock()

    def admit(self, authorization: str, address: str) -> bool:
        name, password = _credentials(authorization)
        if name is None:
            return False
        seal = hmac.digest(self._key, b"%b\0%b" % (name.encode(), password), "sha256")
        known = self._known.get(name)
        if known is not None and hmac.compare_digest(known, seal):
            return True
        with self._door:
            if address in self._waiting or len(self._waiting) >= _MAX_WAITING:
                raise TooManyError("other passwords are being checked; try again in a few seconds", kind="busy")
            self._waiting.add(address)
        try:
            with self._checking:
                return self._check(name, password, seal)
        finally:
            with self._door:
                self._waiting.discard(address)

    def _check(self, name: str, password: bytes, seal: bytes) -> bool:
        import bcrypt  # noqa: PLC0415 - most agents ask for no password

        began = time.monotonic()
        try:
            is_right = bcrypt.checkpw(password[:_MAX_PASSWORD_BYTES], self.hashes.get(name, self._decoy))
        except ValueError:  # a password with a NUL in it
            is_right = False
        if is_right and name in self.hashes:
            self._known[name] = seal
            return True
        time.sleep(min(_MAX_REST_SECONDS, _REST * (time.monotonic() - began)))
        return False


def _credentials(authorization: str) -> tuple[str | None, bytes]:
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None, b""
    try:
        name, colon, password = base64.b64decode(text.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else (None, b"")
    except (binascii.Error, ValueError):
        return None, b""

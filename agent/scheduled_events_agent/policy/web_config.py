"""The file of ``agent.web_config``, in the format of Prometheus' exporters: its types and errors."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.policy.typed_yaml import Parsed, parse

ClientAuthType = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]

# The format has them; the agent does not use them.
_OTHER_KEYS = (
    "basic_auth_users", "cert", "cipher_suites", "client_allowed_sans", "client_ca", "curve_preferences",
    "http_server_config", "key", "max_version", "prefer_server_cipher_suites", "rate_limit",
)  # fmt: skip
_NO_PASSWORDS = (
    "the agent checks no passwords: ask for client certificates (client_auth_type: RequireAndVerifyClientCert), "
    "or have a reverse proxy ask for passwords"
)


class TlsServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS; relative paths begin where the file itself is."""

    cert_file: str
    key_file: str
    client_auth_type: ClientAuthType = "NoClientCert"
    client_ca_file: str | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class WebConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: TlsServerConfig


def parse_web_config(text: bytes, name: str) -> Parsed[WebConfig]:
    """Parse the file; ``name`` is how its problems call it."""
    parsed = parse(text, WebConfig, name, shown_keys=_OTHER_KEYS)
    if "basic_auth_users" in parsed.places:
        return replace(parsed, value=None, problems=(parsed.problem("basic_auth_users", _NO_PASSWORDS),))
    return parsed


def warnings(config: WebConfig, *, is_open: bool) -> Iterator[str]:
    """Warnings about what is probably a mistake. ``is_open``: other machines can reach the pages."""
    if is_open and config.tls_server_config.client_auth_type != "RequireAndVerifyClientCert":
        yield "every client that reaches the pages may read them: ask for client certificates"


def named_files(path: PurePath, config: WebConfig) -> dict[str, PurePath]:
    """The files that the file names, by their keys."""
    tls = config.tls_server_config
    names = {"cert_file": tls.cert_file, "key_file": tls.key_file, "client_ca_file": tls.client_ca_file}
    return {key: path.parent / name for key, name in names.items() if name is not None}

"""Where the cluster's API server is, and who asks it: a kubeconfig, or the service account of a pod.

Invariant: no program is started and no proxy used, whatever a kubeconfig says; a key that this would need, or that
would weaken TLS, is an error that names it.
"""

import base64
import binascii
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
import msgspec

from scheduled_events_agent import AgentError, host

T = TypeVar("T")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token and the certificate of the API server's authority."""

_MAX_FILE_BYTES = 1 << 20
_NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# In a certificate a common name is its object identifier, the kind of text, the length, and the text.
_COMMON_NAME = re.compile(rb"\x06\x03\x55\x04\x03[\x0c\x13](.)system:node:([a-z0-9.-]+)", re.DOTALL)
_COMMON_NAME_PREFIX = len("system:node:")

Source = Path | bytes
"""A file, which is read for each request, as a kubelet replaces it; or what it would hold."""


class AccountError(AgentError):
    """The account cannot be used as it is; the message names the key and says what to use instead."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="config")


@dataclass(frozen=True, repr=False)
class Account:
    """An API server, and the credentials for it."""

    origin: str
    """Where this is from, for people."""
    server: str
    """https://HOST[:PORT][/PATH]"""
    authority: Source | None
    """Certificates that the server's is checked with; None: the system's."""
    tls_server_name: str | None = None
    token: Source | None = None
    certificate: Source | None = None
    key: Source | None = None
    kubeconfig: Path | None = None
    content: bytes = b""
    """What the kubeconfig has said; its credentials may be replaced in place."""

    def current(self) -> "Account":
        """The account as its kubeconfig has it now. Raises HostError or AccountError."""
        if self.kubeconfig is None or host.read_small_file(self.kubeconfig, _MAX_FILE_BYTES) == self.content:
            return self
        return _load_kubeconfig(self.kubeconfig)

    def read_token(self) -> str:
        """The token as it is now, "" if there is none. Raises HostError."""
        return "" if self.token is None else _read(self.token).decode("ascii", "replace").strip()

    def ssl_context(self) -> ssl.SSLContext:
        """For TLS with the certificates as they are now. Raises HostError or AccountError."""
        sources = (self.authority, self.certificate, self.key)
        return _ssl_context(*[None if one is None else _read(one) for one in sources])


class NodeName(NamedTuple):
    """The name of a node, and where it is from."""

    name: str
    origin: str


def find_account(kubeconfig: str | None, environ: Mapping[str, str], mounted: Path = SERVICE_ACCOUNT) -> Account:
    """The first account that is there: the named kubeconfig, $KUBECONFIG, the credential, the pod's own.

    Reads all its files once. Raises AccountError.
    """
    credential = Path(environ.get("CREDENTIALS_DIRECTORY", ""), "kubeconfig")
    if kubeconfig:
        account = _load_kubeconfig(Path(kubeconfig))
    elif listed := environ.get("KUBECONFIG"):
        separator = ";" if ";" in listed else ":"
        if not os.path.exists(listed) and separator in listed:  # noqa: PTH110 - raises nothing
            raise AccountError(f"$KUBECONFIG: expected one file; got {listed}: name one with --kubeconfig")
        account = _load_kubeconfig(Path(listed))
    elif credential.is_absolute() and os.path.lexists(credential):  # a link that leads nowhere is an error
        account = _load_kubeconfig(credential)
    elif address := environ.get("KUBERNETES_SERVICE_HOST"):
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        place = f"[{address}]" if ":" in address else address
        account = Account(
            "the pod's service account",
            f"https://{place}:{port}",
            authority=mounted / "ca.crt",
            token=mounted / "token",
        )
    else:
        where = credential if credential.is_absolute() else "$CREDENTIALS_DIRECTORY/kubeconfig"
        raise AccountError(
            f"there is no account for the cluster: give --kubeconfig FILE, set KUBECONFIG, or put one at {where}"
        )
    try:
        account.read_token()
        account.ssl_context()
    except host.HostError as error:
        raise AccountError(f"{account.origin}: {error}") from None
    return account


def agent_environ() -> Mapping[str, str]:
    """The environment of an agent that looks for an account, with the credentials that its hooks get."""
    from scheduled_events_agent.host import processes  # noqa: PLC0415  # psutil, which a drain does not need

    credentials = processes.base_environment(None).get("CREDENTIALS_DIRECTORY", "")
    return {**os.environ, "CREDENTIALS_DIRECTORY": credentials}


def find_node(account: Account, given: str | None, environ: Mapping[str, str], host_name: str) -> NodeName:
    """The node's name: given, $KUBERNETES_NODE, in the token, in the certificate, else the host's name.

    Raises AccountError if that cannot be the name of a node.
    """
    found = _first_node_name(account, given, environ, host_name)
    if not _NODE_NAME.fullmatch(found.name):
        raise AccountError(f'"{found.name}" ({found.origin}) is not the name of a node: give it with --node')
    return found


def _first_node_name(account: Account, given: str | None, environ: Mapping[str, str], host_name: str) -> NodeName:
    if given:
        return NodeName(given, "--node")
    if name := environ.get("KUBERNETES_NODE"):
        return NodeName(name, "$KUBERNETES_NODE")
    if name := _node_of_token(account.read_token()):
        return NodeName(name, "the service account's token")
    if account.certificate is not None and (name := _node_of_certificate(_read(account.certificate))):
        return NodeName(name, "the client certificate")
    return NodeName(host_name.lower(), "the host name")


class _Named(msgspec.Struct):
    name: str = ""


class _Place(msgspec.Struct):
    node: _Named = msgspec.field(default_factory=_Named)


class _Claims(msgspec.Struct):
    place: _Place = msgspec.field(default_factory=_Place, name="kubernetes.io")


_CLAIMS = msgspec.json.Decoder(_Claims)


def _node_of_token(token: str) -> str:
    """The node in the claims of a service account's token, "" if it names none."""
    parts = token.split(".")
    if len(parts) != 3:
        return ""
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return _CLAIMS.decode(payload).place.node.name
    except (ValueError, msgspec.MsgspecError):
        return ""


def _node_of_certificate(pem: bytes) -> str:
    """The node whose kubelet has this certificate, "" if it is none of a kubelet.

    The standard library gives no subject of a certificate in a file. The name only chooses the node to ask for.
    """
    begin = pem.find(b"-----BEGIN CERTIFICATE-----")
    end = pem.find(b"-----END CERTIFICATE-----", begin)
    if begin < 0 or end < 0:
        return ""
    try:
        der = base64.b64decode(b"".join(pem[begin:end].splitlines()[1:]))
    except binascii.Error:
        return ""
    for match in _COMMON_NAME.finditer(der):
        length = match[1][0] - _COMMON_NAME_PREFIX
        if 0 < length <= len(match[2]):
            return match[2][:length].decode("ascii")
    return ""


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""


class _User(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: Any = None
    auth_provider: Any = None
    username: str = ""
    password: str = ""
    as_: str = msgspec.field(default="", name="as")


class _Context(msgspec.Struct):
    cluster: str
    user: str


class _Kubeconfig(msgspec.Struct):
    current_context: Annotated[str, msgspec.Meta(min_length=1)] = msgspec.field(name="current-context")
    # Entries that are not used may be incomplete.
    contexts: list[dict[str, Any]] = []
    clusters: list[dict[str, Any]] = []
    users: list[dict[str, Any]] = []


# What a user may not have, and what to use instead.
_REFUSED_OF_USER = {
    "exec": "no program is started for it; use a token, a tokenFile or a client certificate",
    "auth-provider": "use a token, a tokenFile or a client certificate",
    "username": "use a token, a tokenFile or a client certificate",
    "password": "use a token, a tokenFile or a client certificate",
    "as": "give the account itself the role",
}


def _load_kubeconfig(file: Path) -> Account:
    """The account of the file's current context. Raises AccountError."""
    from scheduled_events_agent.policy import yaml_nodes  # noqa: PLC0415  # 20 ms, which a pod does not need

    try:
        content = host.read_trusted_file(file, _MAX_FILE_BYTES)  # it says which file is sent to which server
        root = yaml_nodes.compose(content)
        config = msgspec.convert(_value_of(root), _Kubeconfig, strict=False)
    except host.HostError as error:
        raise AccountError(str(error)) from None
    except yaml_nodes.YamlSyntaxError as error:
        raise AccountError(f"{file}:{error.place.line}: {error}") from None
    except msgspec.ValidationError as error:
        raise AccountError(f"{file}: not a kubeconfig: {error}") from None
    context = _named(file, "context", config.current_context, config.contexts, _Context)
    cluster = _named(file, "cluster", context.cluster, config.clusters, _Cluster)
    user = _named(file, "user", context.user, config.users, _User)
    _refuse(file, cluster, user)
    try:
        return Account(
            origin=str(file),
            server=cluster.server.rstrip("/"),
            authority=_source(file, cluster.certificate_authority, cluster.certificate_authority_data),
            tls_server_name=cluster.tls_server_name or None,
            token=_source(file, user.token_file) or user.token.encode() or None,
            certificate=_source(file, user.client_certificate, user.client_certificate_data),
            key=_source(file, user.client_key, user.client_key_data),
            kubeconfig=file,
            content=content,
        )
    except binascii.Error:
        raise AccountError(f"{file}: a key that ends with -data is not base64") from None


def _value_of(node: Any) -> Any:
    """The plain value of a YAML node: its texts stay texts, and a key without a value is none."""
    if node.id == "mapping":
        values = {key.value: _value_of(value) for key, value in node.value}
        return {key: value for key, value in values.items() if value is not None}
    if node.id == "sequence":
        return [_value_of(value) for value in node.value]
    return None if node.tag.endswith(":null") else node.value


def _named(file: Path, key: str, name: str, entries: list[dict[str, Any]], type_: type[T]) -> T:
    """The entry with this name. Raises AccountError."""
    for entry in entries:
        if entry.get("name") == name:
            try:
                return msgspec.convert(entry.get(key, {}), type_, strict=False)
            except msgspec.ValidationError as error:
                raise AccountError(f'{file}: {key} "{name}": {error}') from None
    raise AccountError(f'{file}: {key}s: there is none with the name "{name}"')


def _refuse(file: Path, cluster: _Cluster, user: _User) -> None:
    """Raises AccountError for what is not used, rather than to go on without it."""
    if not _is_server(cluster.server):
        shown = re.sub("//[^/]*@", "//...@", cluster.server)
        raise AccountError(f'{file}: server: expected https://HOST:PORT; got "{shown}"')
    if cluster.insecure_skip_tls_verify:
        raise AccountError(f"{file}: insecure-skip-tls-verify: name the cluster's certificate-authority instead")
    if cluster.proxy_url:
        raise AccountError(f"{file}: proxy-url: no proxy is used; name a server that can be reached directly")
    for key, instead in _REFUSED_OF_USER.items():
        if getattr(user, {"as": "as_"}.get(key, key.replace("-", "_"))):
            raise AccountError(f"{file}: {key}: {instead}")
    if bool(user.client_certificate or user.client_certificate_data) != bool(
        user.client_key or user.client_key_data
    ):
        raise AccountError(f"{file}: client-certificate and client-key: expected both or neither")
    if not (user.token or user.token_file or user.client_certificate or user.client_certificate_data):
        raise AccountError(f"{file}: the user has no credentials: expected a token or a client certificate")


def _is_server(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    is_plain = not (url.userinfo or url.query or url.fragment)
    return url.scheme == "https" and bool(url.host) and is_plain and (url.port is None or 0 < url.port < 65536)


def _source(kubeconfig: Path, name: str, data: str = "") -> Source | None:
    """What a kubeconfig names: data count first, as for kubectl. A relative path is relative to the kubeconfig."""
    if data:
        return base64.b64decode(data, validate=True)
    return kubeconfig.absolute().parent / name if name else None


def _read(source: Source) -> bytes:
    return source if isinstance(source, bytes) else host.read_small_file(source, _MAX_FILE_BYTES)


@lru_cache(maxsize=1)  # until one of the files has another content
def _ssl_context(authority: bytes | None, certificate: bytes | None, key: bytes | None) -> ssl.SSLContext:
    # An authority may be named in comments of any encoding.
    texts = None if authority is None else authority.decode("ascii", "ignore")
    try:
        if texts is not None and "-----BEGIN CERTIFICATE-----" not in texts:  # else the system's would count
            raise ssl.SSLError
        context = ssl.create_default_context(cadata=texts)
    except ssl.SSLError:
        raise AccountError("certificate-authority: no certificates in PEM form") from None
    # As Go does: an authority need not be a root, nor have all that Python demands from 3.13 on.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["http/1.1"])
    if certificate is not None and key is not None:
        try:
            with host.private_file(certificate + b"\n" + key) as file:
                context.load_cert_chain(file)
        except ssl.SSLError:
            text = "client-certificate and client-key: not a certificate and its key in PEM form"
            raise AccountError(text) from None
        except OSError as error:
            raise AccountError(f"client-certificate and client-key: {error}") from None
    return context

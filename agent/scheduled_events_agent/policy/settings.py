"""Types of the policy file, as frozen values."""

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from scheduled_events_agent.imds.document import ApiVersionSetting
from scheduled_events_agent.imds.endpoint import ip_address_of
from scheduled_events_agent.policy.rules import (
    ONE_OR_MANY,
    SECRET,
    Duration,
    Hook,
    HookName,
    MaintenanceWindow,
    Name,
    Rule,
    When,
    matches_glob,
)

# Azure's emulator has the account's name in the path.
_TABLE = (
    r"(?P<account>(https://[A-Za-z0-9][A-Za-z0-9.-]*|http://(localhost|127\.[0-9.]+|\[::1\]))"
    r"(:(?P<port>[0-9]{1,5}))?(/[a-z0-9]{3,24})?)/(?P<name>[A-Za-z][A-Za-z0-9]{2,62})"
)

# Azure's names of an account's other services.
_NO_TABLES = r"(?i)\.(blob|dfs|file|queue|web)\."

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
Mode = Literal["act", "observe"]
NotificationKind = Literal[
    "seen", "preparing", "prepared", "approval_needed", "held", "approved", "started", "recovered",
    "recovery_failed", "hook_missing", "vm_unknown",
]  # fmt: skip
_DEFAULT_KINDS: tuple[NotificationKind, ...] = (
    "seen", "approval_needed", "held", "started", "recovered", "recovery_failed", "hook_missing", "vm_unknown",
)  # fmt: skip
# It would open an incident at PagerDuty, and call people for nothing.
_NOT_FOR_PAGERDUTY: NotificationKind = "seen"
_PAGERDUTY_KINDS = tuple(kind for kind in _DEFAULT_KINDS if kind != _NOT_FOR_PAGERDUTY)
OWN_NAME = "scheduled-events-agent"
"""The name of the agent's own program, as hooks call it."""
ROOT_STARTER = "run-as-root"
"""The name of the program by which hooks of the strict set-up run as root."""
KUBERNETES_FORMAT = "kubernetes"
NOTIFICATION_FORMATS = ("cloudevents", "slack", "teams", "pagerduty", KUBERNETES_FORMAT)


class VmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names of this VM in Resources."""

    name: Annotated[
        str | None, Meta(description="This VM's name in Resources. Default: asked of the metadata service.")
    ] = None
    aliases: Annotated[
        tuple[str, ...], Meta(description="Further names by which Resources may call this VM.")
    ] = ()


class ImdsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata service and how to talk to it."""

    endpoint: Annotated[str, Meta(description="http://ADDRESS[:PORT], or auto: from DHCP option 245.")] = (
        "http://169.254.169.254"
    )
    api_version: Annotated[
        ApiVersionSetting,
        Meta(
            description="auto: 2024-07-09 if a rule names SpotRebalanceRecommendation and the service knows it, "
            "else 2020-07-01."
        ),
    ] = "auto"
    poll_interval: Annotated[
        Duration,
        # A Spot VM may be gone 30 s after its notice, so more than a minute makes no sense.
        Meta(ge=0.25, le=60, description="Time between two requests."),
    ] = 1.0
    request_timeout: Annotated[
        Duration, Meta(gt=0, description="Time limit of a whole request, answer included.")
    ] = 10.0
    first_request_timeout: Annotated[
        Duration, Meta(gt=0, description="Time limit of the first request after a start.")
    ] = 120.0


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the log, which goes to standard error."""

    level: Annotated[LogLevel, Meta(description="Least severe messages to write.")] = "info"
    format: Annotated[
        LogFormat, Meta(description="auto: console on a terminal, sentences in systemd's journal, JSON elsewhere.")
    ] = "auto"


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent itself."""

    mode: Annotated[
        Mode, Meta(description="observe: decide and report, but run no hooks and approve nothing.")
    ] = "act"
    state_dir: Annotated[
        str | None,
        Meta(description="Directory of the state file, on a local disk. Default: the system's place for it."),
    ] = None
    reserve: Annotated[Duration, Meta(description="Prepare hooks must end this long before NotBefore.")] = 5.0
    healthy_within: Annotated[
        Duration, Meta(description="/healthz answers 503 when no poll has succeeded for this long.")
    ] = 180.0
    log: Annotated[LogSettings, Meta(description="Logging.")] = LogSettings()
    listen: Annotated[
        str, Meta(description="ADDRESS:PORT of the pages, such as /metrics and /readyz, or off.")
    ] = "127.0.0.1:9769"
    listen_names: Annotated[
        tuple[str, ...],
        Meta(description="Further names of the pages, for browsers and proxies on this machine."),
    ] = ()
    web_config: Annotated[
        str | None,
        Meta(description="File with TLS settings for the pages, as Prometheus' exporters have it."),
    ] = None
    show_hook_output: Annotated[bool, Meta(description="Whether the pages show the ends of hooks' output.")] = (
        False
    )


class SecretFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text that is kept in a file of its own, and read whenever it is needed."""

    file: Annotated[str, Meta(description="Absolute path of a file that holds the text.")]


class NotifyTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service that is notified of events by HTTP."""

    name: Annotated[Name, Meta(description="Name for logs and metrics.")]
    to: Annotated[
        str | SecretFile,
        Meta(description="URL to post to, or the file that holds it; required unless format is kubernetes."),
    ] = ""
    format: Annotated[
        str,
        Meta(
            description="cloudevents, slack, teams, pagerduty, kubernetes (events about this node), or the "
            "absolute path of a template."
        ),
    ] = "cloudevents"
    on: Annotated[
        tuple[NotificationKind, ...] | None,
        Meta(
            description=f"Kinds to send. Default: {', '.join(_DEFAULT_KINDS)}; with format pagerduty "
            f"all of these but {_NOT_FOR_PAGERDUTY}; with format kubernetes all kinds.",
            extra=ONE_OR_MANY,
        ),
    ] = None
    when: Annotated[When, Meta(description="Which events; the same conditions as in rules.")] = When()
    headers: Annotated[dict[str, str | SecretFile], Meta(description="Additional headers.")] = {}
    timeout: Annotated[
        Duration, Meta(gt=0, le=120, description="Time limit of a whole exchange, answer included.")
    ] = 10.0
    proxy: Annotated[
        str | None,
        Meta(description="http://HOST:PORT, or environment: as HTTPS_PROXY and NO_PROXY say. Default: none."),
    ] = None
    ca_file: Annotated[
        str | None, Meta(description="Absolute path of the certificates to trust. Default: those of the system.")
    ] = None

    @property
    def kinds(self) -> tuple[NotificationKind, ...]:
        """The kinds of notifications to send."""
        if self.on is not None:
            return self.on
        if self.format == KUBERNETES_FORMAT:
            return get_args(NotificationKind)
        return _PAGERDUTY_KINDS if self.format == "pagerduty" else _DEFAULT_KINDS


class FleetCredential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sign in to the table, if not with the only identity of this VM. One of the two keys is given."""

    client_id: Annotated[
        str | None, Meta(description="Client id of the identity to use, if this VM has several.")
    ] = None
    sas_file: Annotated[
        str | None,
        Meta(description="Absolute path of the file of a shared access signature."),
    ] = None


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The VMs that act together, and where they coordinate: a table or Leases. One of the two keys is given."""

    group: Annotated[
        str | None,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$",
            description="Letters, digits, . _ -; the same on all VMs. Default: the scale set's name.",
        ),
    ] = None
    table: Annotated[str | None, Meta(description="URL of the table in Azure Table Storage.")] = None
    leases: Annotated[
        str | None,
        Meta(
            description='Namespace of the Leases in a Kubernetes cluster; "": that of this pod. Instead of table.',
        ),
    ] = None
    credential: Annotated[
        Literal["managed-identity"] | FleetCredential,
        Meta(description="For table: the identity of this VM, or the keys below.", extra=SECRET),
    ] = "managed-identity"
    proxy: Annotated[
        str | None,
        Meta(
            description="For table: http://HOST:PORT, or environment: as HTTPS_PROXY and NO_PROXY say. "
            "Default: none."
        ),
    ] = None
    max_events: Annotated[
        int | None,
        Meta(
            ge=1,
            le=100,
            description="How many events of the group are prepared for at the same time. Default: no limit.",
        ),
    ] = None
    members: Annotated[
        tuple[str, ...],
        Meta(
            description="Globs of the VMs that run the agent: of those in Resources, all-ready waits for these.",
            extra=ONE_OR_MANY,
        ),
    ] = ("*",)
    on_unavailable: Annotated[
        Literal["wait", "begin"],
        Meta(description="Whether to wait for a slot, to begin and to approve, while the store cannot be used."),
    ] = "wait"

    def members_error(self, names: Iterable[str]) -> str:
        """Why ``members`` cannot be right on the VM that has these ``names``; "" if it can."""
        names = tuple(names)
        if not names or any(matches_glob(name, self.members) for name in names):
            return ""
        return f"members does not match this VM, {names[0]}: all VMs are waited for"

    def members_for(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which VMs are waited for, on the VM that has these ``names``."""
        return ("*",) if self.members_error(names) else self.members


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this machine, a node of a Kubernetes cluster, reports."""

    node: Annotated[
        str | None,
        Meta(
            pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
            description="This machine's node. Default: as the command kubernetes drain finds it.",
        ),
    ] = None
    kubeconfig: Annotated[
        str | None,
        Meta(description="Absolute path of the kubeconfig. Default: as the command kubernetes drain finds it."),
    ] = None
    condition: Annotated[bool, Meta(description="Whether the node has the condition ScheduledEvent.")] = True
    lifecycle_conditions: Annotated[
        bool, Meta(description="Whether it also has MaintenancePlanned and MaintenanceInProgress.")
    ] = False
    events: Annotated[
        bool,
        Meta(description="Whether notify gets a target kubernetes with format kubernetes, unless it has one."),
    ] = True


DEFAULT_RULES = (
    Rule(name="user-initiated", when=When(source=("User",)), approve="immediately"),
    Rule(name="short-freeze", when=When(type=("Freeze",), duration_below=9.0), approve="immediately"),
)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole policy file."""

    vm: Annotated[VmSettings, Meta(description="The names of this VM in Resources.")] = VmSettings()
    imds: Annotated[ImdsSettings, Meta(description="The metadata service.")] = ImdsSettings()
    agent: Annotated[AgentSettings, Meta(description="The agent itself.")] = AgentSettings()
    rules: Annotated[
        tuple[Rule, ...], Meta(description="The first rule that matches applies to an event; none: only observe.")
    ] = DEFAULT_RULES
    hooks: Annotated[dict[Name, Hook], Meta(description="The programs that rules name.")] = {}
    on_clear: Annotated[
        tuple[HookName, ...],
        Meta(description="Hooks to run when the agent starts and nothing is pending for this VM."),
    ] = ()
    maintenance_windows: Annotated[
        dict[Name, MaintenanceWindow], Meta(description="Named times of the week for early maintenance.")
    ] = {}
    notify: Annotated[
        tuple[NotifyTarget, ...], Meta(description="Services that are notified of events by HTTP.", extra=SECRET)
    ] = ()
    fleet: Annotated[FleetSettings | None, Meta(description="The VMs that act together.")] = None
    kubernetes: Annotated[
        KubernetesSettings | None, Meta(description="What this node of a Kubernetes cluster reports.")
    ] = None

    @property
    def recover_hooks(self) -> tuple[str, ...]:
        """The recover hooks of all rules, each once."""
        return tuple(dict.fromkeys(hook for rule in self.rules for hook in rule.recover))

    @property
    def has_node_events(self) -> bool:
        """Whether a target of notifications is the node's events."""
        return any(target.format == KUBERNETES_FORMAT for target in self.notify)

    @property
    def lacks_event_target(self) -> bool:
        """Whether ``kubernetes.events`` asks for a target of notifications that ``notify`` does not have."""
        is_wanted = self.kubernetes is not None and self.kubernetes.events
        return is_wanted and not self.has_node_events

    @property
    def uses_kubernetes(self) -> bool:
        """Whether the agent itself reports to a Kubernetes cluster."""
        return self.kubernetes is not None or self.has_node_events


def is_drain_command(hook: Hook) -> bool:
    """Whether the hook is the agent's own ``kubernetes drain`` or ``uncordon``."""
    run = hook.run or ()
    return run[1:2] == ("kubernetes",) and re.split(r"[/\\]", run[0])[-1] in (OWN_NAME, f"{OWN_NAME}.exe")


def is_started_as_root(hook: Hook) -> bool:
    """Whether the hook is ``run-as-root``, by which systemd runs a program as root."""
    run = hook.run or ("",)
    return PurePosixPath(run[0]).name == ROOT_STARTER


class TableAddress(NamedTuple):
    """Address and name of a table."""

    account_url: str
    name: str


def parse_table(text: str) -> TableAddress | None:
    """The parts of a table's URL; None if it is none. Plain http goes to this machine only."""
    match = re.fullmatch(_TABLE, text)
    if match is None or not 0 < int(match["port"] or 443) < 65536 or match["name"].lower() == "tables":
        return None
    if re.search(_NO_TABLES, match["account"]):
        return None
    return TableAddress(match["account"], match["name"])


def files_of_target(target: NotifyTarget) -> Iterator[tuple[str, str]]:
    """The files that a target names, by their keys."""
    if isinstance(target.to, SecretFile):
        yield "to.file", target.to.file
    for name, value in target.headers.items():
        if isinstance(value, SecretFile):
            yield f"headers.{name}.file", value.file
    if target.format not in NOTIFICATION_FORMATS:
        yield "format", target.format
    if target.ca_file is not None:
        yield "ca_file", target.ca_file


def is_absolute_path(text: str) -> bool:
    """Whether it is an absolute path of Linux or of Windows: a policy may be checked on another system."""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def is_foreign_path(text: str) -> bool:
    """Whether it is an absolute path of the other system only."""
    return is_absolute_path(text) and not PurePath(text).is_absolute()


def is_open(listen: str) -> bool:
    """Whether others than this machine may reach the pages."""
    address = listen.rpartition(":")[0]
    if listen == "off" or address in ("127.0.0.1", "localhost"):
        return False
    ip = ip_address_of(address)
    return ip is None or not ip.is_loopback

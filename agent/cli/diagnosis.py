"""What ``doctor`` makes of what it has seen: values in, findings out, and how findings are shown.

Decides the verdicts, and knows why each thing matters. Does no I/O and reads no clock. The one invariant: a
finding that is not ok says what to do.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from agent import __version__
from agent.cli.terminal import Style, Terminal
from agent.events import Document, DocumentError, parse_document
from agent.host.surroundings import Approver, OwnService
from agent.imds import Answer, ImdsError, ImdsErrorKind, parse_identity
from agent.settings import BUILT_IN_NAME, VmSettings
from agent.status import Status

Verdict = Literal["ok", "warning", "failure"]

_STYLES: dict[Verdict, Style] = {"ok": "green", "warning": "yellow", "failure": "red"}
# What only something between us and the service writes into an answer.
_OF_PROXIES = ("via", "x-cache", "x-squid-error", "proxy-agent", "proxy-connection", "proxy-authenticate")
_SKEW_WARNING_SECONDS = 2.0
_SKEW_FAILURE_SECONDS = 30.0
_BUSY_POLL_SECONDS = 0.5
_LAZY_POLL_SECONDS = 10.0
_NEWEST_VERSION = "2020-07-01"
_FULL_BYTES = 16 * 1024**2
_TIGHT_BYTES = 200 * 1024**2
_MOST_SHOWN = 5

_AWAY = (
    "run this on the VM itself: a container may have no route to the service; on the VM, look for a firewall or a "
    "route that takes what goes there"
)
_ADVICE: dict[ImdsErrorKind, str] = {
    "timeout": _AWAY,
    "refused": _AWAY,
    "unreachable": _AWAY,
    "gone": "the service is being updated: run this again in two minutes",
    "server_error": "run this again in a minute; if it stays, restart the VM or ask Azure's support",
    "not_found": "look at imds.endpoint: this is not the metadata service of a VM",
}
AS_AGENT = "run this as root, or as the agent's account"
_START = "start it: systemctl start scheduled-events-agent, or scheduled-events-agent service start on Windows"
_UNMASK = "to run it: systemctl unmask scheduled-events-agent, then systemctl enable --now scheduled-events-agent"
_RELOAD = (
    "have it read again: systemctl reload scheduled-events-agent, or scheduled-events-agent service reload on "
    "Windows; status says whether it was taken"
)
_SOMETHING_ELSE = "look at imds.endpoint, and at what else answers there: a proxy, a portal, another service"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check has found."""

    check: str
    verdict: Verdict
    finding: str
    advice: str = ""
    """What to do; empty if there is nothing to be done."""


class Page(NamedTuple):
    """How the agent that runs answers at /status."""

    version: str
    """As the answer's Server header tells it."""
    status: Status | None
    """None if it cannot be read: of another version, or not for all."""
    late_seconds: float = 0.0
    """The time limit if no answer came in time; else 0."""


def ok(check: str, finding: str) -> Finding:
    """All is well."""
    return Finding(check=check, verdict="ok", finding=finding)


def warning(check: str, finding: str, advice: str) -> Finding:
    """The agent works, but perhaps not as intended; or something could not be checked."""
    return Finding(check=check, verdict="warning", finding=finding, advice=advice)


def failure(check: str, finding: str, advice: str) -> Finding:
    """The agent cannot do its work, or something undoes it."""
    return Finding(check=check, verdict="failure", finding=finding, advice=advice)


def in_words(findings: Iterable[Finding], terminal: Terminal) -> Iterator[str]:
    """The lines to show, each as soon as there is a finding, the last of them a summary."""
    width, counts = len("endpoint"), dict.fromkeys(_STYLES, 0)  # no check has a longer name
    for finding in findings:
        counts[finding.verdict] += 1
        lead = f"{finding.verdict:7}  {finding.check:{width}}  "
        first, *more = terminal.line(f"{lead}{finding.finding}", indent=len(lead))
        yield terminal.paint(finding.verdict, _STYLES[finding.verdict]) + first[len(finding.verdict) :]
        yield from more
        if finding.advice:
            yield from terminal.line(f"{'':{len(lead)}}-> {finding.advice}", indent=len(lead) + 3)
    yield f"{counts['ok']} ok, {count(counts['warning'], 'warning')}, {count(counts['failure'], 'failure')}"


def count(number: int, noun: str) -> str:
    """Such as ``2 hooks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- the metadata service


def judge_no_answer(check: str, error: ImdsError) -> Finding:
    """Of a request that failed."""
    return failure(check, str(error), _ADVICE.get(error.kind, _SOMETHING_ELSE))


def judge_first_answer(instance: Answer) -> Finding | None:
    """Why there is no point in asking for more; None if there is."""
    if stranger_in(instance) and (instance.status != 200 or _is_page(instance)):
        return judge_directness([instance], ())
    if instance.fault is None:
        return None
    if instance.status == 429:
        return judge_rate(1.0, 2, is_refused=True)
    if instance.status == 400 and b"metadata header" in instance.body.lower():
        return failure(
            "direct",
            "the service did not see the header Metadata: true that was sent",
            "find what removes it on the way: a proxy, or a filter",
        )
    return judge_no_answer("endpoint", instance.fault)


def stranger_in(answer: Answer) -> str:
    """What shows that another program answered or changed the answer; "" if nothing does."""
    if 300 <= answer.status < 400 and answer.status != 304:
        return f"a redirect ({answer.status}) to {answer.headers.get('location', 'nowhere')}"
    for name in _OF_PROXIES:
        if name in answer.headers:
            return f"the header {name}: {answer.headers[name]}"
    if _is_page(answer):
        return "a web page"
    return ""


def _is_page(answer: Answer) -> bool:
    """Whether it is for people to look at, as a proxy's page is."""
    return "html" in answer.headers.get("content-type", "").lower() or answer.body.lstrip()[:1] == b"<"


def judge_directness(answers: Iterable[Answer], proxy_variables: Sequence[str]) -> Finding:
    """Whether the answers come from the service itself. The variables are names only: values may be secret."""
    sign = next((sign for answer in answers if (sign := stranger_in(answer))), "")
    if sign:
        return failure(
            "direct",
            f"something other than the metadata service has answered, or changed the answer: {sign}",
            "keep what goes to the endpoint away from proxies, transparent ones too: it has to leave directly",
        )
    ignored = f"; that this environment has {', '.join(proxy_variables)} does no harm: the agent ignores that"
    return ok("direct", f"no sign of a proxy{ignored if proxy_variables else ''}")


def judge_version(document: Answer, api_version: str) -> Finding:
    """Whether the service knows the version, by its answer to it.

    (Not by /metadata/versions: that lists those of the instance's data, and scheduled events have their own.)
    """
    if document.status == 400 and document.fault is not None:
        return failure(
            "version",
            str(document.fault),
            "set imds.api_version to another version, or remove the key",
        )
    newer = "" if api_version >= _NEWEST_VERSION else f"; {_NEWEST_VERSION} would tell more about each event"
    return ok("version", f"{api_version} is known to the service{newer}")


def judge_document(answer: Answer, names: Sequence[str], host_name: str) -> Finding:
    """What the document holds, and whether Resources call this VM by one of ``names``."""
    if answer.fault is not None:
        return judge_no_answer("events", answer.fault)
    if not answer.body:
        return warning(
            "events",
            "the service is still switching scheduled events on for this VM: its answer is empty",
            "run this again in five minutes",
        )
    try:
        document = parse_document(answer.body)
    except DocumentError as error:
        return failure("events", str(error), _SOMETHING_ELSE)
    return _judge_resources(document, names, host_name)


def _judge_resources(document: Document, names: Sequence[str], host_name: str) -> Finding:
    events = document.events
    if not events:
        return ok("events", "none is pending, so it is not known yet what Resources call this VM")
    mine = sum(event.affects(names) in ("self", "shared") for event in events)
    if mine:
        return ok("events", f"{count(len(events), 'event')} pending, Resources of {mine} name this VM")
    others = sorted({resource for event in events for resource in event.resources})
    if host_name.casefold() in (name.casefold().lstrip("_") for name in others):
        return warning(
            "events",
            f"{count(len(events), 'event')} pending, none for {' or '.join(names) or 'this VM'}, but Resources "
            f"name {host_name}, which is this machine's host name",
            f"if that is this VM, add {host_name} to vm.aliases in the policy",
        )
    shown = ", ".join(others[:_MOST_SHOWN]) + (", ..." if len(others) > _MOST_SHOWN else "")
    return ok("events", f"{count(len(events), 'event')} pending, for other VMs only: {shown or 'none is named'}")


def names_of(vm: VmSettings, instance: Answer) -> tuple[str, ...]:
    """By which names Resources may call this VM, the first from the policy or from the service."""
    identity = parse_identity(instance.body)
    said = identity.name if identity is not None else ""
    return tuple(filter(None, (vm.name or said, *vm.aliases)))


def judge_name(vm: VmSettings, instance: Answer) -> Finding:
    """Whether it is known who this VM is."""
    identity = parse_identity(instance.body)
    said = identity.name if identity is not None else ""
    if not vm.name and not said:
        return failure(
            "name",
            "the service does not tell this VM's name",
            "set vm.name in the policy to what Resources call this VM: without a name nothing is approved",
        )
    if vm.name and said and vm.name.casefold().lstrip("_") != said.casefold().lstrip("_"):
        return warning(
            "name",
            f"the policy calls this VM {vm.name}, the service {said}",
            "remove vm.name from the policy, unless Resources really call it so",
        )
    also = f", also known as {', '.join(vm.aliases)}" if vm.aliases else ""
    return ok("name", f"this VM is {vm.name or said}{also}")


def judge_clock(date: str | None, asked_at: datetime, answered_at: datetime) -> Finding:
    """This clock against the Date header, which tells whole seconds and is from between the two moments."""
    try:
        said = parsedate_to_datetime(date or "")
    except ValueError:
        return warning(
            "clock",
            "the service did not tell its time, so this clock cannot be compared",
            "check by other means that the clock is right: NotBefore is compared with it",
        )
    said = said if said.tzinfo is not None else said.replace(tzinfo=UTC)
    latest = said + timedelta(seconds=1)
    skew = (max(asked_at - latest, timedelta()) + min(answered_at - said, timedelta())).total_seconds()
    if abs(skew) < _SKEW_WARNING_SECONDS:
        return ok("clock", "as the service's, to the second or two")
    which = "ahead of" if skew > 0 else "behind"
    effect = "hooks get less time than there is" if skew > 0 else "hooks may still run when the event starts"
    found = failure if abs(skew) >= _SKEW_FAILURE_SECONDS else warning
    return found(
        "clock",
        f"{abs(skew):.0f} s {which} the service's: NotBefore is compared with it, so {effect}",
        "let chrony or systemd-timesyncd set the clock, on Windows w32tm; it must follow the host or NTP",
    )


def judge_rate(poll_interval: float, throttled: int, *, is_refused: bool) -> Finding:
    """Whether the requests of this VM stay below the limit of five a second. Seconds."""
    others = "find what else on this VM asks the metadata service so often: the limit is for all programs together"
    if is_refused:
        return failure("rate", "refused for too many requests (429), twice within two seconds", others)
    if throttled:
        return warning(
            "rate", "a request was refused for too many requests (429), and answered two seconds later", others
        )
    pace = f"the agent asks every {poll_interval:g} s"
    if poll_interval < _BUSY_POLL_SECONDS:
        return warning(
            "rate",
            f"{pace}, which leaves little of the five requests a second that the service answers to the whole VM",
            "set imds.poll_interval to 1s",
        )
    if poll_interval > _LAZY_POLL_SECONDS:
        return warning(
            "rate",
            f"{pace}, and a Spot VM may have no more than 10 s of notice",
            "set imds.poll_interval to 1s",
        )
    return ok("rate", f"{pace}; no request was refused for too many (429)")


# --- the agent


def judge_what_runs(
    status: Status, *, is_of_this_file: bool, changed_at: datetime | None, is_to_act: bool
) -> tuple[str, str] | None:
    """What of an agent that is well differs from the policy that was looked at, and what to do; None if nothing.

    ``changed_at``: when the file of that policy was last written.
    """
    policy = status.policy
    if not is_of_this_file and policy.file == BUILT_IN_NAME:
        return f"with the {policy.file}, as there was no policy file when it started", "restart it"
    if not is_of_this_file:
        return f"with the policy {policy.file}, and these checks looked at another", "name that one with --config"
    if changed_at is not None and changed_at > policy.read_at:
        read = f"as it was read at {policy.read_at:%Y-%m-%d %H:%M:%S}Z"
        return f"with the policy {read}; its file has changed since", _RELOAD
    if status.is_paused:
        return "and is paused: it watches, and does nothing", "let it go on: sc continue ScheduledEventsAgent"
    if status.mode == "observe" and is_to_act:
        return "and only observes: no hook runs and nothing is approved", "start it without --observe"
    return None


def judge_no_agent(state_dir: Path, service: OwnService | None) -> Finding:
    """Of a state directory that no agent uses."""
    if service is not None and service.is_running:
        return warning(
            "agent",
            f"the service runs (pid {service.pid}), but not with the state directory {state_dir}",
            "name with --config and --state-dir what the service is started with",
        )
    way_out = _UNMASK if service is not None and service.is_masked else _START
    return warning("agent", f"none runs with the state directory {state_dir}", way_out)


def judge_agent(pid: str, page: Page | None, doubt: tuple[str, str] | None) -> Finding:
    """Of the agent that runs. ``doubt``: how it differs from the policy file, and what to do."""
    runs = f"runs (pid {pid})"
    if page is None:
        return ok("agent", f"{runs}, its version is not known")
    if page.late_seconds:
        return warning(
            "agent",
            f"{runs}, and its page /status does not answer within {page.late_seconds:g} s: it may hang",
            "see whether it answers scheduled-events-agent status; if not, see its log, and restart it",
        )
    if page.version != __version__:
        return warning(
            "agent",
            f"{runs} in version {page.version}; {__version__} is installed",
            "restart it: systemctl restart scheduled-events-agent, or on Windows service stop and service start",
        )
    if page.status is not None and page.status.health != "ok":
        problems = "; ".join(page.status.health)
        return failure("agent", f"{runs} and is not healthy: {problems}", "see its log, and /status")
    runs = f"{runs}, version {page.version}"
    return warning("agent", f"{runs}, {doubt[0]}", doubt[1]) if doubt else ok("agent", runs)


def judge_service(service: OwnService | None, fault: str) -> Finding:
    """Whether the agent is a service that starts with the machine. ``fault``: why that is not known."""
    if fault:
        return warning(
            "service",
            fault,
            "check that what supervises the agent here starts it again: a container's runtime, another manager",
        )
    if service is None:
        return warning(
            "service",
            "the agent is not installed as a service: it is not started with the machine, nor restarted",
            "install the package, or use install-unit, or service install on Windows",
        )
    enabled = "masked" if service.is_masked else "enabled" if service.is_enabled else "not enabled"
    what = f"installed, {enabled}, {service.state}, runs as {service.account}"
    if not service.is_running:
        return failure("service", what, _UNMASK if service.is_masked else _START)
    if not service.is_enabled:
        way_out = "systemctl enable scheduled-events-agent; on Windows sc config ScheduledEventsAgent start= auto"
        way_out = _UNMASK if service.is_masked else way_out
        return warning("service", f"{what}: after a reboot there will be no agent", way_out)
    if service.is_stale:
        way_out = "systemctl daemon-reload, and restart it"
        return warning("service", f"{what}; its files have changed since", way_out)
    return ok("service", what)


# --- the machine


def judge_disk(place: str, temporary: str | None, kind: str | None, free_bytes: int) -> Finding:
    """Whether the state's disk survives, and has room. ``temporary``: the root of Azure's temporary disk."""
    elsewhere = "name a directory on the system's or a data disk with agent.state_dir"
    if temporary is not None:
        return failure(
            "disk", f"{place} is on Azure's temporary disk {temporary}, empty after a redeployment", elsewhere
        )
    if kind in ("tmpfs", "ramfs", "devtmpfs"):
        return failure("disk", f"{place} is in memory ({kind}), and gone after a reboot", elsewhere)
    free = f"{free_bytes / 1024**2:,.0f} MiB free"
    if free_bytes < _FULL_BYTES:
        return failure("disk", f"{place}: {free}", "make room: what cannot be written down is not done")
    if kind == "overlay":
        return warning(
            "disk",
            f"{place} is on an overlay, as of a container: gone with it",
            "mount a volume there, if the agent is to know after a restart what it had prepared",
        )
    if free_bytes < _TIGHT_BYTES:
        return warning("disk", f"{place}: {free}", "make room: what cannot be written down is not done")
    return ok("disk", f"{place} is on a disk that stays{f' ({kind})' if kind else ''}, {free}")


def judge_others(approvers: Iterable[Approver], *, is_acting: bool) -> Iterator[Finding]:
    """Other agents that approve events."""
    approvers = list(approvers)
    if not approvers:
        yield ok("others", "no other agent that approves events was found")
    for other in approvers:
        if other.life == "active" and is_acting:
            yield failure(
                "others",
                f"{other.name} approves events too, perhaps before the hooks have run ({other.where})",
                other.way_out,
            )
        elif other.life == "installed":
            what = f"{other.name} is there and does not run; it would approve events too ({other.where})"
            yield warning("others", what, f"remove it; if it is to run again: {other.way_out}")
        else:
            what = (
                "approves events too"
                if other.life == "active"
                else "runs, and may approve events too: its configuration decides that"
            )
            yield warning("others", f"{other.name} {what} ({other.where})", other.way_out)

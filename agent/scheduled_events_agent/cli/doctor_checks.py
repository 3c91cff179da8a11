"""The judgments of ``doctor``: observations in, findings out; and the text of findings.

Does no I/O and reads no clock.
Invariant: a warning or an error says what to do, and a check that was skipped says why.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from scheduled_events_agent import host
from scheduled_events_agent.cli.terminal import Cell, Style, Terminal
from scheduled_events_agent.hooks.preflight import FILE_SYSTEMS_IN_MEMORY
from scheduled_events_agent.host import disks
from scheduled_events_agent.host.conflicts import STOP_ONE, ActingAgent, Approver, OwnService
from scheduled_events_agent.http.errors import HttpErrorKind, clock_skew_seconds, parse_date
from scheduled_events_agent.imds.api_version import FallbackResult, not_available, reason_of
from scheduled_events_agent.imds.client import ImdsError, RawResponse
from scheduled_events_agent.imds.document import normalized_name, parse_document
from scheduled_events_agent.imds.guest_proxy import PAGE, Caller
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy.durations import format_time, plural
from scheduled_events_agent.policy.settings import VmSettings
from scheduled_events_agent.status import NotifiedTarget
from scheduled_events_agent.status.messages import clock_difference, clock_effect

CheckState = Literal["ok", "warning", "error", "skipped"]

_STYLES: dict[CheckState, Style] = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}
# Headers that only a proxy writes into an answer.
_OF_PROXIES = ("via", "x-cache", "x-squid-error", "proxy-agent", "proxy-connection", "proxy-authenticate")
_SKEW_WARNING_SECONDS = 2.0
_SKEW_FAILURE_SECONDS = 30.0
_LEAST_FREE_BYTES = 200 * 1024**2
_NO_BYTES = 1024**2
_MOST_SHOWN = 5

_AWAY = (
    "run this on the VM itself: a container may have no route to the service; on the VM, look for a firewall or a "
    "wrong route"
)
_SOMETHING_ELSE = "check imds.endpoint, and what else answers there: a proxy, a portal, another service"
_ADVICE: dict[HttpErrorKind, str] = {
    "timeout": _AWAY,
    "refused": _AWAY,
    "unreachable": _AWAY,
    "gone": "the service is being updated: run this again in two minutes",
    "server_error": "run this again in a minute; if it stays, restart the VM or ask Azure's support",
    "not_found": "check imds.endpoint: this is not the metadata service of a VM",
    "bad_request": (
        "remove imds.api_version from the policy; if the Metadata header was lost, find the proxy that removes it"
    ),
    "throttled": (
        "run this again; if it stays, find what else on this VM asks the metadata service so often: five requests "
        "a second are the limit for all programs together"
    ),
}
START = f"start it: {host.supervisor_commands().start}"
ENABLE = f"enable it: {host.supervisor_commands().enable}"
UNMASK = "to run it: systemctl unmask scheduled-events-agent && systemctl enable --now scheduled-events-agent"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    state: CheckState
    message: str
    hint: str = ""
    """What to do."""
    command: str = ""
    """The command line that does it, if one does; the hint has it, too.

    "" if the message names what to run, as it does of files that other accounts could change.
    """


def ok(check: str, message: str) -> Finding:
    """The check found no problem."""
    return Finding(check=check, state="ok", message=message)


def warning(check: str, message: str, hint: str, *, command: str = "") -> Finding:
    """The agent works, but perhaps not as intended; or something could not be checked."""
    return Finding(check=check, state="warning", message=message, hint=hint, command=command)


def failure(check: str, message: str, hint: str, *, command: str = "") -> Finding:
    """The agent cannot do its work, or another program interferes with it."""
    return Finding(check=check, state="error", message=message, hint=hint, command=command)


def skipped(check: str, message: str) -> Finding:
    """The check could not be made. ``message``: why."""
    return Finding(check=check, state="skipped", message=message)


def waiting(checks: Iterable[str], needed: str) -> Iterator[Finding]:
    """The checks cannot be made until the check ``needed`` is ok."""
    for check in checks:
        yield skipped(check, f"waits for the check {needed}")


def hidden(check: str, account: str) -> Finding:
    """The check needs rights that this account does not have."""
    return skipped(check, f"cannot be checked by {account}: run as root or administrator")


def format_findings(findings: Iterable[Finding], terminal: Terminal) -> Iterator[str]:
    """The lines to show, each as soon as there is a finding, the last of them a summary."""
    counts = dict.fromkeys(_STYLES, 0)

    def rows() -> Iterator[tuple[Cell, ...]]:
        for finding in findings:
            counts[finding.state] += 1
            yield Cell(finding.state, _STYLES[finding.state]), Cell(finding.check), Cell(finding.message)
            if finding.hint:
                yield Cell(""), Cell(""), Cell(f"-> {finding.hint}", indent=3)

    yield from terminal.table(rows(), widest=("skipped", "notifications"))
    warnings = plural(counts["warning"], "warning")
    errors = plural(counts["error"], "error")
    yield f"{counts['ok']} ok, {warnings}, {errors}, {counts['skipped']} skipped"


# --- the metadata service


def check_unreachable(check: str, error: ImdsError) -> Finding:
    """The findings of a request that failed."""
    hint = _advice_of_guest_proxy(error) if error.is_of_guest_proxy else ""
    return failure(check, str(error), hint or _ADVICE.get(error.kind, _SOMETHING_ELSE))


def _advice_of_guest_proxy(error: ImdsError) -> str:
    if error.kind == "denied" and error.status != 401:
        return f"{PAGE} has the rule for each set-up: try it in audit mode first"
    advice = f"run this again; if it stays: {host.guest_proxy_command()}"
    if error.kind == "refused":
        advice += "; in a container, use the host's network namespace"
    return advice


def check_denied_here(account: str, agent: Caller) -> Finding:
    """This command is denied what the agent, which runs as another account, may ask."""
    return warning(
        "endpoint",
        f"a proxy denies it to {account}, as which this command runs; the agent asks as {agent.user}, and its "
        "polls succeed",
        f"to have the rest checked, run this as {agent.user}, or allow {account} too ({PAGE})",
    )


def is_html(answer: RawResponse) -> bool:
    """Whether the answer is a web page, as from a proxy."""
    return "html" in answer.headers.get("content-type", "").lower() or answer.body.lstrip()[:1] == b"<"


def check_no_proxy(answers: Iterable[RawResponse]) -> Finding:
    """Whether the answers come from the service itself."""
    for answer in answers:
        signs = [f"the header {name}: {answer.headers[name]}" for name in _OF_PROXIES if name in answer.headers]
        if 300 <= answer.status < 400:
            signs = [f"a redirect ({answer.status}) to {answer.headers.get('location', 'nowhere')}"]
        if is_html(answer):
            signs.append("a web page")
        if signs:
            return failure(
                "proxy",
                f"something other than the metadata service has answered, or changed the answer: {signs[0]}",
                "exempt the endpoint from every proxy, also transparent ones",
            )
    return ok("proxy", "no sign of a proxy")


def check_guest_proxy(agent: Caller, paths: Sequence[str], evidence: str, *, is_denied: bool) -> Finding:
    """Whether Azure's Guest Proxy Agent is in front of the service, and the agent as its rules name it.

    ``evidence``: what shows that it is. ``is_denied``: whether a proxy has denied a request.
    """
    name = f"user {agent.user}, executable {agent.program}, process {agent.process_name}"
    rule = f"a rule names this agent as {name}, for the paths {', '.join(paths)}"
    if agent.user == "root":
        rule += "; that is every Python of root: only the strict set-up has a user of its own"
    if evidence:
        return ok("proxy", f"Azure's Guest Proxy Agent is there ({evidence}): {rule}")
    if is_denied:
        return warning(
            "proxy", f"a proxy denies requests, as Azure's Guest Proxy Agent does: {rule}", f"see {PAGE}"
        )
    return ok("proxy", f"no sign of a proxy; if Azure's Guest Proxy Agent comes: {rule}")


def check_version(best: FallbackResult[RawResponse]) -> Finding:
    """Whether the document comes in the newest api-version that the policy needs."""
    if best.content.status != 200:
        return skipped("version", "waits for the check events")
    if best.error is None:
        return ok("version", f"the document comes in api-version {best.version}")
    return warning(
        "version",
        f"{not_available(reason_of(best.error))}; the document comes in {best.version}",
        "register the feature Microsoft.Compute/SpotPlus for the subscription; without it rules for "
        "SpotRebalanceRecommendation match nothing",
    )


def check_document(answer: RawResponse, names: Sequence[str], host_name: str) -> Finding:
    """The pending events of the document, and whether Resources call this VM by one of ``names``."""
    if answer.error is not None:
        return check_unreachable("events", answer.error)
    if not answer.body:
        return warning(
            "events",
            "the service is still switching scheduled events on for this VM: its answer is empty",
            "run this again in five minutes",
        )
    try:
        events = parse_document(answer.body).events
    except DocumentError as error:
        return failure("events", str(error), _SOMETHING_ELSE)
    if not events:
        return ok("events", "no event is pending, so it is not known yet how Resources name this VM")
    pending = f"{plural(len(events), 'event')} pending"
    if mine := sum(event.affects(names) in ("self", "shared") for event in events):
        return ok("events", f"{pending}, Resources of {mine} name this VM")
    others = sorted({resource for event in events for resource in event.resources})
    if host_name.casefold() in (name.casefold().lstrip("_") for name in others):
        return warning(
            "events",
            f"{pending}, none for {' or '.join(names) or 'this VM'}, but Resources name {host_name}, which is "
            "this machine's host name",
            f"if that is this VM, add {host_name} to vm.aliases in the policy",
        )
    shown = ", ".join(others[:_MOST_SHOWN]) + (", ..." if len(others) > _MOST_SHOWN else "")
    return ok("events", f"{pending}, for other VMs only: {shown or 'none is named'}")


def check_vm_name(vm: VmSettings, reported: str) -> Finding:
    """Whether it is known who this VM is. ``reported``: its name according to the service, or ""."""
    if not vm.name and not reported:
        return failure(
            "vm-name",
            "the service does not know this VM's name",
            "set vm.name in the policy to the name in Resources: without a name nothing is approved",
        )
    if vm.name and reported and normalized_name(vm.name) != normalized_name(reported):
        return warning(
            "vm-name",
            f"the policy calls this VM {vm.name}, the service {reported}",
            "remove vm.name from the policy, unless Resources use that name",
        )
    also = f", also known as {', '.join(vm.aliases)}" if vm.aliases else ""
    return ok("vm-name", f"this VM is {vm.name or reported}{also}")


def check_clock(date: str | None, asked_at: datetime, answered_at: datetime) -> Finding:
    """Compare this clock with the Date header, which has whole seconds and was written between the two moments."""
    reported = parse_date(date or "")
    if reported is None:
        return warning(
            "clock",
            "the answer has no Date header, so this clock cannot be compared",
            "check the clock by other means: NotBefore is compared with it",
        )
    skew = clock_skew_seconds(reported, asked_at, answered_at)
    if abs(skew) < _SKEW_WARNING_SECONDS:
        return ok("clock", "within 2 seconds of Azure's")
    found = failure if abs(skew) >= _SKEW_FAILURE_SECONDS else warning
    return found(
        "clock",
        f"{clock_difference(skew)}: {clock_effect(skew)}",
        "synchronize the clock with chrony or systemd-timesyncd, on Windows with w32tm",
    )


# --- notifications


def check_notifications(
    names: Sequence[str],
    unusable: Sequence[tuple[str, str]],
    known_targets: Sequence[NotifiedTarget],
    test_command: Callable[[str], str],
    now: datetime,
) -> Iterator[Finding]:
    """Whether targets receive notifications. ``unusable``: names of targets, and why they cannot be used here.

    ``known_targets``: the targets in a running agent's status. ``test_command``: the command line that sends a
    target a test.
    """
    found = [*unusable]
    for target in known_targets:
        if target.failure:
            since = format_time(target.failure.since, now)
            found.append((target.name, f"has failed since {since}: {target.failure.reason}"))
        if target.lost_at:
            lost = f"{plural(target.lost, 'notification')} lost since {format_time(target.lost_at, now)}"
            found.append((target.name, f"{lost}: {target.lost_reason}"))
    for name, text in found:
        test = test_command(name)
        yield warning("notifications", f"{name}: {text}", f"correct it, and try it: {test}", command=test)
    if not found:
        well = f"{plural(len(names), 'target')}: nothing is known to be wrong"
        yield ok("notifications", well if names else "the policy names no service to notify")


# --- the machine


def check_service(service: OwnService | None, error: str, policy_problem: str = "") -> Finding:
    """Whether the agent is a service that starts with the machine.

    ``error``: why that is not known. ``policy_problem``: the first error of the policy.
    """
    if error:
        return warning(
            "service",
            error,
            "check that what supervises the agent here starts it again: a container's runtime, another manager",
        )
    if service is None:
        return warning(
            "service",
            "the agent is not installed as a service: it is not started with the machine, nor restarted",
            "install the package or the unit (docs/install-other.md), or service install on Windows",
        )
    enabled = "enabled" if service.is_enabled else "not enabled"
    if service.is_masked:
        enabled = "masked"
    what = f"installed, {enabled}, {service.state}, runs as {service.account}"
    if service.is_starting:
        return warning("service", what, "it is starting: run this again in half a minute")
    if not service.is_running:
        return _not_running(service, what, policy_problem)
    if not service.is_enabled:
        hint = UNMASK if service.is_masked else ENABLE
        text = f"{what}: after a reboot there will be no agent"
        return warning("service", text, hint, command=command_in(hint))
    if service.needs_daemon_reload:
        command = "systemctl daemon-reload"
        return warning(
            "service", f"{what}; its files have changed since", f"{command}, and restart it", command=command
        )
    return ok("service", what)


def command_in(hint: str) -> str:
    """The command line of a hint of the form ``what it does: command line``."""
    return hint.partition(": ")[2]


def _not_running(service: OwnService, what: str, policy_problem: str) -> Finding:
    """The finding about a service that does not run."""
    if service.is_masked:
        return failure("service", what, UNMASK, command=command_in(UNMASK))
    if service.failure is None:
        return failure("service", what, START, command=command_in(START))
    reason = service.failure.reason or policy_problem or f"{host.supervisor_commands().log} says why"
    if service.failure.is_retried:
        return failure("service", what, f"it failed: {reason}; correct that, then systemd starts it again")
    return failure("service", what, f"it failed: {reason}; correct that, then {START}", command=command_in(START))


def check_disk(
    place: str, temporary: str | None, kind: str | None, free_bytes: int, *, is_cleared: bool = False
) -> Finding:
    """Whether the state's disk survives, and has room. ``temporary``: the root of Azure's temporary disk.

    ``is_cleared``: whether the system clears the directory, as at a boot.
    """
    elsewhere = "name a directory on the system's or a data disk with agent.state_dir"
    if temporary is not None:
        return failure(
            "disk", f"{place} is on Azure's temporary disk {temporary}, empty after a redeployment", elsewhere
        )
    if kind in FILE_SYSTEMS_IN_MEMORY:
        return failure("disk", f"{place} is in memory ({kind}), and gone after a reboot", elsewhere)
    if kind is not None and disks.is_share(kind):
        return warning("disk", f"{place} is on a file share ({kind}), whose locks may fail", elsewhere)
    free = f"{free_bytes / 1024**2:,.0f} MiB free"
    if free_bytes < _NO_BYTES:
        return failure(
            "disk", f"{place} is full: {free}", "make room: an agent that cannot write acts on no event"
        )
    if free_bytes < _LEAST_FREE_BYTES:
        return warning("disk", f"{place}: {free}", "make room: the agent does nothing that it cannot store first")
    if is_cleared:
        return warning("disk", f"{place} is in a directory that the system clears, as at a reboot", elsewhere)
    if kind == "overlay":
        return warning(
            "disk",
            f"{place} is on the overlay of a container, and lost with it",
            "mount a volume there: after a restart the agent must know what it had prepared",
        )
    of_kind = f" ({kind})" if kind else ""
    return ok("disk", f"{place} is on a persistent disk{of_kind}, {free}")


def check_other_agents(
    approvers: Sequence[Approver], agents: Sequence[ActingAgent], *, is_acting: bool
) -> Iterator[Finding]:
    """Other programs that approve events, and other agents of this program."""
    if not approvers and not agents:
        yield ok("other-agents", "no other agent that approves events was found")
    for agent in agents:
        what = f"another agent acts on this machine, process {agent.pid}: {agent.command}"
        yield warning("other-agents", what, STOP_ONE)
    for other in approvers:
        if other.state == "active" and is_acting:
            what = f"{other.name} approves events too, perhaps before the hooks have run ({other.where})"
            yield failure("other-agents", what, other.hint)
            continue
        what = {
            "active": "approves events too",
            "maybe": "runs, and approves events too if its configuration says so",
            "installed": "is installed and does not run; it would approve events too",
        }[other.state]
        yield warning("other-agents", f"{other.name} {what} ({other.where})", other.hint)


def is_system(account: str) -> bool:
    """Whether it is root or LocalSystem."""
    return account.rpartition("\\")[2].casefold() in ("root", "localsystem", "system")

"""``notify test``: sends a test notification, and shows whether it arrives."""

import argparse
import socket
from datetime import UTC, datetime, timedelta

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import add_config_option
from scheduled_events_agent.cli.config import find_config, load_trusted_policy
from scheduled_events_agent.cli.terminal import print_json, printable
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.notifications import SAMPLE, Deliver, NotificationError, deliver
from scheduled_events_agent.policy.settings import KUBERNETES_FORMAT, NotifyTarget, Settings
from scheduled_events_agent.status import SCHEMA_VERSION


class TestedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a target."""

    name: str
    is_delivered: bool
    status: int | None
    """Of the answer, if delivered."""
    failure: str
    answer: str
    """Its beginning."""


class NotifyTest(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``notify test --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    targets: tuple[TestedTarget, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``notify``."""
    parser.description = (
        "Sends one test notification to each service that the policy file notifies, or to the one that is named, "
        "and prints its answer. At PagerDuty a second one resolves the incident. The agent need not run. Exit "
        "code 0: all have accepted it; 1: not all; 2: the policy is not valid or has no such target."
    )
    parser.add_argument("action", choices=("test",), metavar="test", help="the only action")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the target's name (default: all of them)")
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    settings = load_trusted_policy(find_config(arguments.config)).settings
    names = [target.name for target in settings.notify]
    if not names:
        raise AgentError("the policy names no service to notify: add one as notify", kind="usage")
    if arguments.name not in (None, *names):
        raise AgentError(f'no target is called "{arguments.name}"; known are: {", ".join(names)}', kind="usage")
    vm = settings.vm.name or clean_text(socket.gethostname())
    targets = [target for target in settings.notify if arguments.name in (None, target.name)]
    tested = tuple([_test(target, vm, _sender(target, settings)) for target in targets])
    if arguments.json:
        print_json(NotifyTest(at=datetime.now(UTC), targets=tested))
    else:
        print(*map(printable, map(_format_result, tested)), sep="\n")
    return 0 if all(one.is_delivered for one in tested) else 1


def _sender(target: NotifyTarget, settings: Settings) -> Deliver:
    if target.format != KUBERNETES_FORMAT:
        return deliver
    from scheduled_events_agent.kubernetes.events import EventSender  # noqa: PLC0415  # most policies have none

    return EventSender(settings.kubernetes).deliver


def _test(target: NotifyTarget, vm: str, send: Deliver) -> TestedTarget:
    now = datetime.now(UTC)
    event = replace(SAMPLE.event, resources=(vm,), not_before=now + timedelta(minutes=15))
    notification = replace(SAMPLE, id=f"test-{now.timestamp():.6f}", at=now, vm=vm, event=event)
    try:
        delivered = send(target, notification)
        if target.format == "pagerduty":  # end the incident that this has opened
            delivered = deliver(target, replace(notification, id=f"{notification.id}-end", kind="recovered"))
    except NotificationError as error:
        return TestedTarget(
            name=target.name, is_delivered=False, status=None, failure=str(error), answer=error.answer
        )
    return TestedTarget(
        name=target.name, is_delivered=True, status=delivered.status, failure="", answer=delivered.answer
    )


def _format_result(tested: TestedTarget) -> str:
    what = f"delivered, it answers {tested.status}" if tested.is_delivered else f"failed: {tested.failure}"
    answer = f": {tested.answer}" if tested.answer not in ("", "nothing") else ""
    return f"{tested.name}: {what}{answer}"

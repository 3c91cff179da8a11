"""``kubernetes drain`` and ``kubernetes uncordon``: hooks for a node of a Kubernetes cluster."""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import duration
from scheduled_events_agent.cli.terminal import print_json, printable
from scheduled_events_agent.kubernetes.account import find_account, find_node
from scheduled_events_agent.kubernetes.background import Background, InterruptedDrainError
from scheduled_events_agent.kubernetes.client import ApiError, Client
from scheduled_events_agent.kubernetes.condition_writer import ConditionWriter
from scheduled_events_agent.kubernetes.conditions import UNCORDONED, drain_begins, drain_ended
from scheduled_events_agent.kubernetes.drain import Drain, PodReport
from scheduled_events_agent.kubernetes.node import Cordoned, NodeClient
from scheduled_events_agent.kubernetes.node_status import NodeStatus, OtherMachineError
from scheduled_events_agent.policy.durations import plural
from scheduled_events_agent.status import SCHEMA_VERSION

_ENDS_THE_VM = ("Preempt", "Terminate")
_SPARE_SECONDS = 3.0  # before the agent ends this hook: to say what is left
_MANUAL_SECONDS = {"drain": 1800.0, "uncordon": 60.0}
_LAST_RESORT_SECONDS = 60.0
_MAX_NAMED = 10
# How long the end waits until the conditions are set; shorter after a signal, as the agent kills it soon.
_WRITE_SECONDS = 2.0
_WRITE_AFTER_SIGNAL_SECONDS = 0.5
_SIGNAL = "ended by a signal"


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``kubernetes drain --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    node: str
    cordoned: Cordoned | None
    """gone: the cluster has no such node. null: it could not be cordoned."""
    evicted: tuple[PodReport, ...]
    deleted: tuple[PodReport, ...]
    """Without asking their budgets."""
    stays: tuple[PodReport, ...]
    left: tuple[PodReport, ...]
    """They have to go, and are still there."""
    seconds: float


class UncordonResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``kubernetes uncordon --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    node: str
    is_uncordoned: bool
    """False: the node has no mark of this agent, or is gone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kubernetes``."""
    parser.description = (
        "Hooks for a node of a Kubernetes cluster. They need no policy file and no running agent. The account is "
        "that of --kubeconfig, $KUBECONFIG, $CREDENTIALS_DIRECTORY/kubeconfig, or the pod's service account. Exit "
        "code 0: done; 1: pods are left, or the cluster could not be asked; 2: usage, account, or another machine."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    drain = actions.add_parser(
        "drain",
        help="cordon the node, and evict its pods",
        description="Cordons the node of this machine, and evicts all pods but static and finished ones and those "
        "of DaemonSets. Disruption budgets are respected. Each pod has its own grace period, if there is time.",
    )
    uncordon = actions.add_parser(
        "uncordon",
        help="undo the cordon of drain",
        description="Uncordons the node of this machine if drain has cordoned it. A cordon of others stays.",
    )
    for action in (drain, uncordon):
        action.add_argument("--kubeconfig", metavar="FILE", help="the cluster and the account; see above")
        action.add_argument(
            "--node",
            metavar="NAME",
            help="this machine's node (default: $KUBERNETES_NODE, else what the token or the certificate names, "
            "else the host name)",
        )
        action.add_argument("--any-node", action="store_true", help="also if the node is not this machine")
        manually = "30m" if action is drain else "1m"
        action.add_argument(
            "--timeout",
            metavar="DURATION",
            type=_time_limit,
            help=f"end after it (default: 3 s before the agent ends the hook; run manually: {manually})",
        )
        action.add_argument(
            "--conditions",
            action="store_true",
            help="set the conditions DrainInProgress and Drained of the node (alpha in Kubernetes)",
        )
        action.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    drain.add_argument(
        "--bare-pods",
        choices=("leave", "evict"),
        help="pods without a controller, which none replaces (default: evict for Preempt and Terminate, which "
        "delete the VM; else leave: the kubelet starts them again)",
    )
    drain.add_argument(
        "--last-resort",
        metavar="DURATION",
        type=duration,
        help="so long before the end, delete what budgets keep: the VM goes anyway; 0s: never (default: half of "
        "the time, at most 60s, for Preempt and Terminate; else never)",
    )
    drain.set_defaults(handler=_drain)
    uncordon.set_defaults(handler=_uncordon)


def _time_limit(text: str) -> float:
    seconds = duration(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError("expected more than 0s")
    return seconds


def _drain(arguments: argparse.Namespace) -> int:
    begun_at = time.monotonic()
    seconds = _seconds(arguments, "drain")
    ends_vm = os.environ.get("SCHEDULED_EVENT_TYPE") in _ENDS_THE_VM
    last_resort = arguments.last_resort
    if last_resort is None:
        last_resort = min(seconds / 2, _LAST_RESORT_SECONDS) if ends_vm else 0.0
    background = _interruptible()
    client, node, status = _connect(arguments, background, begun_at + seconds)
    conditions = ConditionWriter(status, _printer(arguments), is_on=arguments.conditions)
    event_id = os.environ.get("SCHEDULED_EVENT_ID") or "by-hand"
    drain = Drain(
        client,
        background,
        node.name,
        deadline=begun_at + seconds,
        last_resort_seconds=last_resort,
        evicts_bare_pods=arguments.bare_pods == "evict" if arguments.bare_pods else ends_vm,
        on_line=_printer(arguments),
    )
    cordon = None
    failure = ""
    try:
        cordon = node.cordon_node(event_id)
        conditions.write(drain_begins(event_id))
        is_drained = drain.run(cordon)
        if is_drained and not node.is_cordoned():
            is_drained = False
            failure = "others have uncordoned it meanwhile"
    except OtherMachineError as error:
        raise AgentError(str(error), kind="usage") from None
    except ApiError as error:
        is_drained = False
        failure = str(error)
    except InterruptedDrainError:
        is_drained = False
        failure = _SIGNAL
    if cordon is not None:
        conditions.write(drain_ended(is_drained=is_drained, event_id=event_id))
        conditions.close(_WRITE_AFTER_SIGNAL_SECONDS if failure == _SIGNAL else _WRITE_SECONDS)
    if arguments.json:
        print_json(
            DrainResult(
                at=datetime.now(UTC),
                node=node.name,
                cordoned=cordon.whose if cordon else None,
                evicted=tuple(drain.evicted),
                deleted=tuple(drain.deleted),
                stays=tuple(drain.stays),
                left=tuple(drain.left),
                seconds=round(time.monotonic() - begun_at, 3),
            )
        )
    if is_drained:
        if not arguments.json:
            print(f"node {node.name}: drained in {time.monotonic() - begun_at:.1f} s")
        return 0
    _print_error(node.name, failure, drain.left)
    return 1


def _uncordon(arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + _seconds(arguments, "uncordon")
    _, node, _ = _connect(arguments, _interruptible(), deadline)
    failure = f"node {node.name} is not uncordoned"
    try:
        is_uncordoned = node.uncordon_node()
        failure = f"node {node.name}: its conditions are not set"
        if arguments.conditions:
            node.set_conditions(UNCORDONED)
    except InterruptedDrainError:
        raise AgentError(f"{failure}: {_SIGNAL}") from None
    except (ApiError, OtherMachineError) as error:
        raise AgentError(f"{failure}: {error}") from None
    if arguments.json:
        print_json(UncordonResult(at=datetime.now(UTC), node=node.name, is_uncordoned=is_uncordoned))
    return 0


def _interruptible() -> Background:
    """What the command waits for; SIGTERM and Ctrl-C end the wait."""
    background = Background()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: background.interrupt())
    return background


def _connect(
    arguments: argparse.Namespace, background: Background, deadline: float
) -> tuple[Client, NodeClient, NodeStatus]:
    account = find_account(arguments.kubeconfig, os.environ)
    name = find_node(account, arguments.node, os.environ, socket.gethostname())
    client = Client(account)
    boot_id = "" if arguments.any_node else host.kubelet_boot_id()
    node = NodeClient(
        client, background, name.name, boot_id=boot_id, deadline=deadline, on_line=_printer(arguments)
    )
    return client, node, NodeStatus(client, name.name, boot_id)


def _seconds(arguments: argparse.Namespace, action: str) -> float:
    """How long the command may take."""
    if arguments.timeout is not None:
        return float(arguments.timeout)
    limit = os.environ.get("SCHEDULED_EVENT_TIMEOUT_SECONDS", "")
    return max(1.0, float(limit) - _SPARE_SECONDS) if limit.isdecimal() else _MANUAL_SECONDS[action]


def _printer(arguments: argparse.Namespace) -> Callable[[str], None]:
    if arguments.json:
        return lambda _: None
    return lambda line: print(printable(line), flush=True)


def _print_error(node: str, failure: str, left: list[PodReport]) -> None:
    parts = [failure] if failure else []
    if left:
        named = ", ".join(f"{one.namespace}/{one.name} ({one.reason})" for one in left[:_MAX_NAMED])
        more = f", and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        parts.append(f"{plural(len(left), 'pod')} left: {named}{more}")
    text = printable("; ".join(parts) or "nothing is known of its pods")
    print(f"scheduled-events-agent: node {node} is not drained: {text}", file=sys.stderr)

"""The part of ``doctor`` about the Kubernetes cluster. Loaded only if the policy has to do with one."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli.doctor_checks import Finding, failure, ok, warning
from scheduled_events_agent.host import processes
from scheduled_events_agent.http.errors import clock_skew_seconds
from scheduled_events_agent.kubernetes.account import Account
from scheduled_events_agent.kubernetes.client import ApiError, Client
from scheduled_events_agent.kubernetes.node_status import NodeStatus, OtherMachineError
from scheduled_events_agent.kubernetes.own_node import find_own_account
from scheduled_events_agent.kubernetes.rights import Right, may, rights_to_drain, rights_to_report
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.settings import (
    KubernetesSettings,
    Settings,
    is_drain_command,
)

_CHECK = "kubernetes"
_MAX_SKEW_SECONDS = 2.0
_NAME_NODE = "name this machine's node with kubernetes.node or KUBERNETES_NODE"


def examine(settings: Settings, account: str | None) -> Iterator[Finding]:
    """What keeps the policy from using the cluster. ``account``: the service's, if it is not this one."""
    kubernetes = settings.kubernetes or KubernetesSettings()
    try:
        credentials, name = find_own_account(kubernetes)
        node = NodeStatus(Client(credentials), name.name, host.kubelet_boot_id())
    except AgentError as error:
        yield failure(_CHECK, str(error), "name a kubeconfig with kubernetes.kubeconfig, or correct it")
        return
    if problem := _access_error(credentials, account):
        yield failure(_CHECK, problem, "let the account of the service read it")
    asked_at = datetime.now(UTC)
    try:
        date = node.read().date
    except OtherMachineError as error:
        yield failure(_CHECK, str(error), _NAME_NODE)
        return
    except ApiError as error:
        yield _explain(error, node)
        if error.kind not in ("forbidden", "not_found"):
            return
        date = error.date
        is_found = False
    else:
        is_found = True
    missing = list(_missing_rights(settings, node))
    yield from missing
    skew = None if date is None else clock_skew_seconds(date, asked_at, datetime.now(UTC))
    if skew is not None and abs(skew) >= _MAX_SKEW_SECONDS:
        which = "ahead of" if skew > 0 else "behind"
        text = (
            f"this clock is {abs(skew):.0f} s {which} the API server's: the times that the cluster shows are wrong"
        )
        yield warning(_CHECK, text, "synchronize the clock, here or there")
    if is_found and all(one.state != "error" for one in missing):
        rights = "the rights it needs" if missing else "all rights"
        yield ok(
            _CHECK,
            f"{credentials.server} answers {credentials.origin}, which has {rights}; node {name.name} is this"
            f" machine ({name.origin})",
        )


def _access_error(credentials: Account, account: str | None) -> str | None:
    """Why the service's account cannot read the kubeconfig."""
    file = Path(credentials.origin)
    if account is None or not file.is_file():  # a pod's service account is no file
        return None
    try:
        return processes.find_access_error(file, "read", account)
    except (host.HostError, OSError) as error:
        return str(error)


def _explain(error: ApiError, node: NodeStatus) -> Finding:
    match error.kind:
        case "not_found":
            return failure(_CHECK, f"the cluster has no node {node.name}", _NAME_NODE)
        case "forbidden":
            return failure(_CHECK, f"node {node.name} cannot be read: {error}", "see the missing rights below")
    if error.status == 401:
        return failure(_CHECK, str(error), "give the agent a token or a certificate that the cluster knows")
    return failure(
        _CHECK, str(error), "check the server in the kubeconfig, and what is between it and this machine"
    )


def _missing_rights(settings: Settings, node: NodeStatus) -> Iterator[Finding]:
    asked: dict[Right, bool] = {}
    for right in _needed_rights(settings):
        known = right._replace(needed_by="")
        try:
            if known not in asked:
                asked[known] = may(node.client, right, node.name)
        except ApiError as error:
            yield warning(
                _CHECK, f"the account's rights cannot be asked for: {error}", "compare its role manually"
            )
            return
        if asked[known]:
            continue
        text = f"the account may not {right}, which {right.needed_by} needs"
        if right.is_optional:
            yield warning(_CHECK, text, "add it to its role, unless it is withheld on purpose")
        else:
            yield failure(_CHECK, text, "add it to its role")


def _uses_this_account(hook: Hook) -> bool:
    """Whether it drains the node as the account that is checked here, as far as its command line shows."""
    names_another = any(word.partition("=")[0] == "--kubeconfig" for word in hook.run or ())
    return is_drain_command(hook) and not names_another and "KUBECONFIG" not in hook.env


def _needed_rights(settings: Settings) -> Iterator[Right]:
    kubernetes = settings.kubernetes
    has_conditions = kubernetes is not None and (kubernetes.condition or kubernetes.lifecycle_conditions)
    yield from rights_to_report(has_conditions=has_conditions, has_events=settings.has_node_events)
    commands = [hook.run for hook in settings.hooks.values() if hook.run and _uses_this_account(hook)]
    if commands:
        yield from rights_to_drain(has_conditions=any("--conditions" in run for run in commands))

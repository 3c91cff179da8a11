"""Reads a node, and writes some of its conditions; those of others stay, as conditions merge by their type.

Invariant: the node is this machine, unless its kubelet has not said yet which boot this is.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, NamedTuple
from urllib.parse import quote

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.kubernetes.client import REQUEST_SECONDS, Client
from scheduled_events_agent.kubernetes.conditions import Condition, Conditions, NodeState, changes

MARK = "scheduled-events-agent/cordoned-for"
"""The annotation of a node that this agent has cordoned; its value is the event's id."""


class OtherMachineError(AgentError):
    """The node is another machine: nothing was changed."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}", kind="other_machine")
        self.what = what


class _Annotations(msgspec.Struct):
    mark: str | None = msgspec.field(default=None, name=MARK)


class _Metadata(msgspec.Struct):
    uid: str
    version: str = msgspec.field(name="resourceVersion")
    annotations: _Annotations = msgspec.field(default_factory=_Annotations)


class _Spec(msgspec.Struct):
    unschedulable: bool = False


class _NodeInfo(msgspec.Struct):
    boot_id: str = msgspec.field(default="", name="bootID")


class _Status(msgspec.Struct):
    conditions: tuple[Condition, ...] = ()
    info: _NodeInfo = msgspec.field(default_factory=_NodeInfo, name="nodeInfo")


class Node(msgspec.Struct):
    """A node, as far as the agent has to do with it."""

    kind: Literal["Node"]
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


NODE = msgspec.json.Decoder(Node)


class ObservedNode(NamedTuple):
    """A node as the API server has it."""

    uid: str
    version: str
    mark: str | None
    """For which event this agent has cordoned it; None: it has not."""
    is_unschedulable: bool
    conditions: Conditions
    date: datetime | None
    """The API server's time."""


def node_path(name: str) -> str:
    """Where the API server has the node."""
    return f"/api/v1/nodes/{quote(name, safe='')}"


class NodeStatus:
    """One node. ``boot_id``: that of this machine, "" for any machine. Its methods raise ApiError."""

    def __init__(self, client: Client, name: str, boot_id: str) -> None:
        self.name = name
        self.client = client
        self._boot_id = boot_id
        self._path = node_path(name)

    def read(self, seconds: float = REQUEST_SECONDS) -> ObservedNode:
        """Ask for the node. Raises OtherMachineError, too."""
        node, date = self.client.send("GET", self._path, NODE, seconds=seconds)
        reported = node.status.info.boot_id
        if reported and self._boot_id and reported != self._boot_id:
            what = f"node {self.name} is another machine (bootID {clean_text(reported)}, here {self._boot_id})"
            raise OtherMachineError(what, "name this machine's node")
        return _observed(node, date)

    def write(self, conditions: Iterable[Condition], seconds: float = REQUEST_SECONDS) -> ObservedNode:
        """Write these conditions; the node as it is then."""
        body = {"status": {"conditions": list(conditions)}}
        node, date = self.client.send(
            "PATCH", f"{self._path}/status", NODE, body=body, is_strategic=True, seconds=seconds
        )
        return _observed(node, date)

    def update(self, state: NodeState, seconds: float = REQUEST_SECONDS) -> None:
        """Write what the node's conditions lack of the state. ``seconds``: for each of the two requests."""
        if due := changes(self.read(seconds).conditions, state, datetime.now(UTC)):
            self.write(due, seconds)


def _observed(node: Node, date: datetime | None) -> ObservedNode:
    conditions = {one.type: one for one in node.status.conditions}
    of = node.metadata
    return ObservedNode(of.uid, of.version, of.annotations.mark, node.spec.unschedulable, conditions, date)

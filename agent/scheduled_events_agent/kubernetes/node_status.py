"""Reads a node's conditions and writes some of them; those of others stay, as conditions merge by their type.

Invariant: the node is this machine, unless its kubelet has not said yet which boot this is.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple
from urllib.parse import quote

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.kubernetes.client import REQUEST_SECONDS, Client
from scheduled_events_agent.kubernetes.conditions import Condition, Conditions


class OtherMachineError(AgentError):
    """The node is another machine: nothing was changed."""


class _Metadata(msgspec.Struct):
    uid: str


class _NodeInfo(msgspec.Struct):
    boot_id: str = msgspec.field(default="", name="bootID")


class _Status(msgspec.Struct):
    conditions: tuple[Condition, ...] = ()
    info: _NodeInfo = msgspec.field(default_factory=_NodeInfo, name="nodeInfo")


class _Node(msgspec.Struct):
    kind: Literal["Node"]
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


_NODE = msgspec.json.Decoder(_Node)


class ObservedNode(NamedTuple):
    """A node as the API server has it."""

    uid: str
    conditions: Conditions
    date: datetime | None
    """The API server's time."""


class NodeStatus:
    """One node. ``boot_id``: that of this machine, "" for any machine. Its methods raise ApiError."""

    def __init__(self, client: Client, name: str, boot_id: str) -> None:
        self.name = name
        self.client = client
        self._boot_id = boot_id
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"

    def read(self, seconds: float = REQUEST_SECONDS) -> ObservedNode:
        """Ask for the node. Raises OtherMachineError, too."""
        node, date = self.client.send("GET", self._path, _NODE, seconds=seconds)
        told = node.status.info.boot_id
        if told and self._boot_id and told != self._boot_id:
            text = f"node {self.name} is another machine (bootID {clean_text(told)}, here {self._boot_id})"
            raise OtherMachineError(f"{text}: name this machine's node", kind="other_machine")
        return _observed(node, date)

    def write(self, conditions: Iterable[Condition], seconds: float = REQUEST_SECONDS) -> ObservedNode:
        """Write these conditions; the node as it is then."""
        body = {"status": {"conditions": list(conditions)}}
        node, date = self.client.send(
            "PATCH", f"{self._path}/status", _NODE, body=body, is_strategic=True, seconds=seconds
        )
        return _observed(node, date)


def _observed(node: _Node, date: datetime | None) -> ObservedNode:
    return ObservedNode(node.metadata.uid, {one.type: one for one in node.status.conditions}, date)

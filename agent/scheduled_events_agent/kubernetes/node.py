"""The node of this machine: its cordon, and the mark that says whose cordon that is.

Invariant: cordon and mark change in one request, which holds only for the version of the node that was read. So
there is never one without the other, and a change that another makes meanwhile is seen.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.kubernetes.background import Background
from scheduled_events_agent.kubernetes.client import Answer, ApiError, Client
from scheduled_events_agent.kubernetes.conditions import NodeState, changes
from scheduled_events_agent.kubernetes.node_status import NodeStatus, OtherMachineError

MARK = "scheduled-events-agent/cordoned-for"
"""The annotation of a node that this agent has cordoned; its value is the event's id."""
BACKOFF_SECONDS = (1.0, 8.0)
"""The first pause after a request that was not answered, and the longest."""

_CONFLICTS = 5
_OTHER_MACHINE_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 2.0

T = TypeVar("T")
Cordoned = Literal["ours", "others", "gone"]
"""Whose the cordon is; gone: the cluster has no such node."""


class _Annotations(msgspec.Struct):
    mark: str | None = msgspec.field(default=None, name=MARK)


class _Metadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion")
    annotations: _Annotations = msgspec.field(default_factory=_Annotations)


class _Spec(msgspec.Struct):
    unschedulable: bool = False


class _NodeInfo(msgspec.Struct):
    boot_id: str = msgspec.field(default="", name="bootID")


class _Status(msgspec.Struct):
    info: _NodeInfo = msgspec.field(default_factory=_NodeInfo, name="nodeInfo")


class _Node(msgspec.Struct):
    kind: Literal["Node"]
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_NODE = msgspec.json.Decoder(_Node)


class Cordon(NamedTuple):
    """The cordon of a node after ``cordon_node``."""

    whose: Cordoned
    since: datetime | None
    """The API server's time after it: of the change, or of the answer that showed it."""


class NodeClient:
    """Changes one node. Its methods block until the API server has answered, or the deadline has come.

    ``boot_id``: that of this machine; "" changes the node whatever machine it is. ``on_line`` gets a line for each
    thing that people should know. Every method raises ApiError, OtherMachineError or InterruptedDrainError.
    """

    def __init__(
        self,
        client: Client,
        background: Background,
        name: str,
        *,
        boot_id: str,
        deadline: float,
        on_line: Callable[[str], None],
    ) -> None:
        """``deadline``: monotonic."""
        self.name = name
        self._client = client
        self._background = background
        self._boot_id = boot_id
        self._deadline = deadline
        self._on_line = on_line

    def cordon_node(self, event_id: str) -> Cordon:
        """Keep new pods away, and mark the node unless others have cordoned it."""
        for _ in range(_CONFLICTS):
            try:
                node, date = self._read()
                mark = node.metadata.annotations.mark
                if node.spec.unschedulable:
                    if mark is None:
                        self._on_line(f"node {self.name}: others have cordoned it: no mark, and it stays cordoned")
                        return Cordon("others", date)
                    self._on_line(f"node {self.name}: cordoned already, for event {clean_text(mark)}")
                    return Cordon("ours", date)
                _, date = self._patch(node, unschedulable=True, mark=event_id)
            except ApiError as error:
                if error.kind == "not_found":
                    self._on_line(f"node {self.name}: the cluster has none; what is bound to this name is evicted")
                    return Cordon("gone", error.date)
                if error.kind != "conflict":
                    raise
                last = error
                continue
            self._on_line(f"node {self.name}: cordoned for event {event_id}")
            return Cordon("ours", date)
        raise last

    def uncordon_node(self) -> bool:
        """Take cordon and mark away, if there is a mark; whether there was one."""
        for _ in range(_CONFLICTS):
            try:
                node, _ = self._read()
                if node.metadata.annotations.mark is None:
                    self._on_line(f"node {self.name}: has no mark of this agent: left as it is")
                    return False
                self._patch(node, unschedulable=None, mark=None)
            except ApiError as error:
                if error.kind == "not_found":
                    self._on_line(f"node {self.name}: the cluster has none: nothing to do")
                    return False
                if error.kind != "conflict":
                    raise
                last = error
                continue
            self._on_line(f"node {self.name}: uncordoned")
            return True
        raise last

    def set_conditions(self, state: NodeState) -> None:
        """Write what the node's conditions lack of the state, if the account may. A node that is gone has none."""
        status = NodeStatus(self._client, self.name, self._boot_id)
        try:
            found = self._ask(status.read).conditions
            if due := changes(found, state, datetime.now(UTC)):
                self._ask(lambda seconds: status.write(due, seconds))
        except ApiError as error:
            if error.kind in ("forbidden", "rejected"):
                self._on_line(f"node {self.name}: its conditions are not set: {error}")
            elif error.kind != "not_found":
                raise

    def _read(self) -> Answer[_Node]:
        """The node, when it is sure to be this machine: a kubelet tells the id of a new boot late."""
        give_up_at = time.monotonic() + _OTHER_MACHINE_SECONDS
        while True:
            answer = self._ask(lambda seconds: self._client.send("GET", self._path, _NODE, seconds=seconds))
            told = answer.value.status.info.boot_id
            if not told or not self._boot_id or told == self._boot_id:
                return answer
            if time.monotonic() + _LOOK_AGAIN_SECONDS > min(give_up_at, self._deadline):
                raise OtherMachineError(
                    f"node {self.name} is another machine (bootID {clean_text(told)}, here {self._boot_id}):"
                    " nothing was changed; name this machine's node with --node or KUBERNETES_NODE",
                    kind="other_machine",
                )
            self._background.sleep(_LOOK_AGAIN_SECONDS)

    def _patch(self, node: _Node, *, unschedulable: bool | None, mark: str | None) -> Answer[_Node]:
        metadata = {"resourceVersion": node.metadata.version, "annotations": {MARK: mark}}
        body: dict[str, Any] = {"metadata": metadata, "spec": {"unschedulable": unschedulable}}
        return self._ask(lambda seconds: self._client.send("PATCH", self._path, _NODE, body=body, seconds=seconds))

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{quote(self.name, safe='')}"

    def _ask(self, request: Callable[[float], T]) -> T:
        """Ask until there is an answer. Raises ApiError, at the deadline for want of one."""
        backoff = Backoff(*BACKOFF_SECONDS)
        said = ""
        while True:
            self._background.start(None, lambda: request(self._deadline - time.monotonic()))
            _, result = self._background.wait()
            if not isinstance(result, ApiError):
                answered: T = result
                return answered
            pause = backoff.next_delay(result.retry_after)
            if result.kind != "unavailable" or time.monotonic() + pause >= self._deadline:
                raise result
            if str(result) != said:
                said = str(result)
                self._on_line(f"node {self.name}: {said}; trying again")
            self._background.sleep(pause)

"""The node of this machine: its cordon, and the mark that says whose cordon that is.

Invariant: cordon and mark change in one request, which holds only for the version of the node that was read. So
there is never one without the other, and a change that another makes meanwhile is seen.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from queue import Empty
from typing import Any, Literal, NamedTuple, TypeVar

from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.kubernetes.background import Background, InterruptedDrainError
from scheduled_events_agent.kubernetes.client import BACKOFF_SECONDS, ApiError, Client
from scheduled_events_agent.kubernetes.conditions import NodeState
from scheduled_events_agent.kubernetes.node_status import (
    MARK,
    NODE,
    NodeStatus,
    ObservedNode,
    OtherMachineError,
    node_path,
)

_CONFLICT_SECONDS = (0.1, 8.0)
"""The first pause after a change that another has made meanwhile, and the longest."""
_OTHER_MACHINE_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 2.0
_LEAST_SECONDS = 0.5  # for an answer, also at the deadline
_ANSWER_AFTER_SIGNAL_SECONDS = 3.0  # the agent kills a hook 5 s after the signal

T = TypeVar("T")
Cordoned = Literal["ours", "others", "gone"]
"""Whose the cordon is; gone: the cluster has no such node."""


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
        self._status = NodeStatus(client, name, boot_id)
        self._deadline = deadline
        self._on_line = on_line

    def cordon_node(self, event_id: str) -> Cordon:
        """Keep new pods away, and mark the node unless others have cordoned it."""

        def cordon(node: ObservedNode) -> Cordon:
            if node.is_unschedulable and node.mark is None:
                self._on_line(f"node {self.name}: others have cordoned it: no mark, and it stays cordoned")
                return Cordon("others", node.date)
            if node.is_unschedulable:
                self._on_line(f"node {self.name}: cordoned already, for event {clean_text(node.mark)}")
                return Cordon("ours", node.date)
            date = self._patch(node, unschedulable=True, mark=event_id)
            self._on_line(f"node {self.name}: cordoned for event {event_id}")
            return Cordon("ours", date)

        try:
            return self._change(cordon)
        except ApiError as error:
            if error.kind != "not_found":
                raise
            self._on_line(f"node {self.name}: the cluster has none; what is bound to this name is evicted")
            return Cordon("gone", error.date)

    def uncordon_node(self) -> bool:
        """Take cordon and mark away, if there is a mark; whether there was one."""

        def uncordon(node: ObservedNode) -> bool:
            if node.mark is None:
                self._on_line(f"node {self.name}: has no mark of this agent: left as it is")
                return False
            self._patch(node, unschedulable=None, mark=None)
            self._on_line(f"node {self.name}: uncordoned")
            return True

        try:
            return self._change(uncordon)
        except ApiError as error:
            if error.kind != "not_found":
                raise
            self._on_line(f"node {self.name}: the cluster has none: nothing to do")
            return False

    def is_cordoned(self) -> bool:
        """Whether new pods are kept away. No pod comes to a node that is gone."""
        try:
            return self._read().is_unschedulable
        except ApiError as error:
            if error.kind != "not_found":
                raise
            return True

    def set_conditions(self, state: NodeState) -> None:
        """Write what the node's conditions lack of the state, if the account may. A node that is gone has none."""
        try:
            self._ask(lambda seconds: self._status.update(state, seconds))
        except ApiError as error:
            if error.kind in ("forbidden", "rejected"):
                self._on_line(f"node {self.name}: its conditions are not set: {error}")
            elif error.kind != "not_found":
                raise

    def _change(self, change: Callable[[ObservedNode], T]) -> T:
        """Read the node and change it, again if it has changed meanwhile."""
        backoff = Backoff(*_CONFLICT_SECONDS)
        while True:
            try:
                return change(self._read())
            except ApiError as error:
                pause = backoff.next_delay(error.retry_after)
                if error.kind != "conflict" or time.monotonic() + pause >= self._deadline:
                    raise
            self._background.sleep(pause)

    def _read(self) -> ObservedNode:
        """The node, when it is sure to be this machine: a kubelet reports the id of a new boot late."""
        give_up_at = time.monotonic() + _OTHER_MACHINE_SECONDS
        while True:
            try:
                return self._ask(self._status.read)
            except OtherMachineError as error:
                if time.monotonic() + _LOOK_AGAIN_SECONDS > min(give_up_at, self._deadline):
                    remedy = "nothing was changed; name this machine's node with --node or KUBERNETES_NODE"
                    raise OtherMachineError(error.what, remedy) from None
            self._background.sleep(_LOOK_AGAIN_SECONDS)

    def _patch(self, node: ObservedNode, *, unschedulable: bool | None, mark: str | None) -> datetime | None:
        """Change cordon and mark of this version of the node; the API server's time."""
        metadata = {"resourceVersion": node.version, "annotations": {MARK: mark}}
        body: dict[str, Any] = {"metadata": metadata, "spec": {"unschedulable": unschedulable}}
        path = node_path(self.name)
        try:
            return self._ask(
                lambda seconds: self._client.send("PATCH", path, NODE, body=body, seconds=seconds)
            ).date
        except InterruptedDrainError:
            # A cordon that is made after this command would outlast the uncordon that comes next.
            with suppress(Empty):
                self._background.wait(_ANSWER_AFTER_SIGNAL_SECONDS)
            raise

    def _ask(self, request: Callable[[float], T]) -> T:
        """Ask until there is an answer. Raises ApiError, at the deadline for want of one."""
        backoff = Backoff(*BACKOFF_SECONDS)
        said = ""
        while True:
            result = self._ask_once(request)
            if not isinstance(result, ApiError):
                return result
            pause = backoff.next_delay(result.retry_after)
            if result.kind != "unavailable" or time.monotonic() + pause >= self._deadline:
                raise result
            if str(result) != said:
                said = str(result)
                self._on_line(f"node {self.name}: {said}; trying again")
            self._background.sleep(pause)

    def _ask_once(self, request: Callable[[float], T]) -> T | ApiError:
        """The answer to one request, or its error; at the deadline also if a name is still being looked up."""
        begun_at = time.monotonic()
        seconds = max(self._deadline - begun_at, _LEAST_SECONDS)
        key = object()
        self._background.start(key, lambda: request(seconds))
        while True:
            try:
                answered, result = self._background.wait(begun_at + seconds - time.monotonic())
            except Empty:
                return ApiError("the API server: no whole answer in time", kind="unavailable", failure="timeout")
            if answered is key:  # else it is of an eviction that was under way when its pod had gone
                answer: T | ApiError = result
                return answer

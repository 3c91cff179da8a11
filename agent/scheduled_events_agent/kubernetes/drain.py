"""Evicts the pods of a node within the time there is, and says of each that is left why.

The main thread decides; it only ever waits for answers, so a signal ends it at once. Budgets are respected until
the last resort: the VM goes anyway. Invariant: a pod is named by its uid in every request, so that another one
of the same name is left alone; and its grace period is only ever shortened, where it does not fit.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from queue import Empty
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.kubernetes.background import Background
from scheduled_events_agent.kubernetes.client import BACKOFF_SECONDS, ApiError, Client
from scheduled_events_agent.kubernetes.node import Cordon
from scheduled_events_agent.kubernetes.pods import POD_LIST, Pod, PodList, pods_of, reason_to_stay

_MAX_UNDER_WAY = 5  # one that an admission webhook keeps waiting must not hold up the others
_LOOK_EVERY_SECONDS = 1.0
_PAGE = "100"
_SPARE_SECONDS = 2.0  # between the end of a pod's grace and the deadline
_BUDGET_PAUSE_SECONDS = (5.0, 30.0)  # whatever the API server asks for
_KEPT_PAUSE_SECONDS = 10.0
_LATE_BINDING_SECONDS = 3.0
"""The scheduler may have chosen the node before it was cordoned, and bind a pod to it so much later."""
_TWO_BUDGETS = "more than one PodDisruptionBudget"


class _Object(msgspec.Struct):
    """Any object; a page of a proxy is none."""

    kind: str


_OBJECT = msgspec.json.Decoder(_Object)


class PodReport(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, and why it is where it is."""

    namespace: str
    name: str
    reason: str


@dataclass
class _Leaving:
    """A pod that has to go."""

    pod: Pod
    state: Literal["kept", "asked", "ending"]
    """asked: a request about it is under way. ending: it is being deleted."""
    reason: str = "not asked yet"
    ask_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(*BACKOFF_SECONDS))
    is_denied: bool | None = None
    """Whether the first request about it was denied for want of a right; None before its answer."""


class Drain:
    """One drain of one node, for the main thread. After ``run``, or its exception, the lists say what was done."""

    def __init__(
        self,
        client: Client,
        background: Background,
        node: str,
        *,
        deadline: float,
        last_resort_seconds: float,
        evicts_bare_pods: bool,
        on_line: Callable[[str], None],
    ) -> None:
        """``deadline``: monotonic. ``last_resort_seconds`` before it, what budgets keep is deleted; 0: never."""
        self._client = client
        self._node = node
        self._deadline = deadline
        self._last_resort_at = deadline - last_resort_seconds if last_resort_seconds else float("inf")
        self._evicts_bare_pods = evicts_bare_pods
        self._on_line = on_line
        self._background = background
        self._leaving: dict[str, _Leaving] = {}
        self._staying: dict[str, PodReport] = {}
        self._cordoned_at: datetime | None = None
        self._under_way = 0
        self._paused_until = 0.0
        self._outage = Backoff(*BACKOFF_SECONDS)
        self._outage_text = ""
        self._list_error = ""
        self._list_backoff = Backoff(*BACKOFF_SECONDS)
        self._look_at = 0.0
        self._is_looking = False
        self._needs_list = True
        self._listed_at: float | None = None
        """When the last list that is whole and current was begun."""
        self._done_after = 0.0
        """Since when nothing may be left; a list that was begun later has to confirm it."""
        self._undeletable: set[str] = set()
        """Namespaces in which the account may not delete pods."""
        self._is_last_resort = False
        self.evicted: list[PodReport] = []
        self.deleted: list[PodReport] = []
        """Without asking their budgets."""

    @property
    def left(self) -> list[PodReport]:
        """What still has to go."""
        return [_report(one.pod, one.reason) for one in self._leaving.values()]

    @property
    def stays(self) -> list[PodReport]:
        """What need not go."""
        return list(self._staying.values())

    def run(self, cordon: Cordon) -> bool:
        """Evict until nothing is left that has to go, or the deadline has come; whether nothing is left.

        Raises ApiError if the account lacks a right without which nothing goes, or no list of pods came in time;
        InterruptedDrainError.
        """
        self._cordoned_at = cordon.since
        begun_at = time.monotonic()
        self._done_after = begun_at + min(_LATE_BINDING_SECONDS, (self._deadline - begun_at) / 2)
        while time.monotonic() < self._deadline:
            now = time.monotonic()
            if self._is_done():
                return True
            self._begin_last_resort(now)
            self._ask_about_pods(now)
            self._look(now)
            try:
                key, result = self._background.wait(max(0.0, self._next_time(now) - time.monotonic()))
            except Empty:
                continue
            self._on_answer(key, result)
        if not self._leaving and not self._is_done():
            why = self._outage_text or self._list_error or "it did not come in time"
            raise ApiError(f"no list of its pods shows that none is left: {why}", kind="unavailable")
        return not self._leaving

    def _is_done(self) -> bool:
        """Whether nothing is left, according to a list that is whole and current."""
        return not self._leaving and self._listed_at is not None and self._listed_at >= self._done_after

    def _next_time(self, now: float) -> float:
        """When to do something, though no answer has come."""
        times = [self._deadline]
        if not self._is_last_resort:
            times.append(self._last_resort_at)
        if not self._is_looking:
            times.append(max(self._look_at, self._paused_until))
        if self._under_way < _MAX_UNDER_WAY:
            times += [max(one.ask_at, self._paused_until) for one in self._leaving.values() if one.state == "kept"]
        return max(now, min(times))

    def _begin_last_resort(self, now: float) -> None:
        if self._is_last_resort or now < self._last_resort_at:
            return
        self._is_last_resort = True
        for one in self._leaving.values():
            one.ask_at = 0.0

    def _ask_about_pods(self, now: float) -> None:
        """Begin the evictions that are due, as many as may be under way."""
        if now < self._paused_until:
            return
        # First the one that waits longest: pods whose answers take their time must not hold up the others.
        for one in sorted(self._leaving.values(), key=lambda one: one.ask_at):
            if self._under_way >= _MAX_UNDER_WAY:
                return
            if one.state == "kept" and one.ask_at <= now:
                one.state = "asked"
                self._under_way += 1
                is_deletion = self._deletes(one.pod)
                self._background.start((one, is_deletion), partial(self._end_pod, one.pod, is_deletion))

    def _deletes(self, pod: Pod) -> bool:
        return self._is_last_resort and pod.namespace not in self._undeletable

    def _end_pod(self, pod: Pod, is_deletion: bool) -> int | None:
        """Ask for the end of a pod; the grace that it gets instead of its own, in seconds. On another thread."""
        left = self._deadline - time.monotonic()
        options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
        grace = None
        longest = max(1, int(left - _SPARE_SECONDS))  # 0 would be without SIGTERM
        if pod.grace_seconds > longest:
            grace = options["gracePeriodSeconds"] = longest
        path = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}"
        if is_deletion:
            body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
            self._client.send("DELETE", path, _OBJECT, body=body, seconds=left)
        else:
            metadata = {"namespace": pod.namespace, "name": pod.name}
            eviction = {
                "apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options,
            }  # fmt: skip
            self._client.send("POST", f"{path}/eviction", _OBJECT, body=eviction, seconds=left)
        return grace

    def _look(self, now: float) -> None:
        """See which pods are still there: whole and current if that is needed, else what the cache has."""
        if self._is_looking or now < max(self._look_at, self._paused_until):
            return
        self._is_looking = True
        has_to_confirm = not self._leaving and now >= self._done_after
        if self._needs_list or has_to_confirm:
            self._background.start(("list", now), self._list)
        else:
            self._background.start(("look", now), self._list_metadata)

    def _list(self) -> list[Pod]:
        """All pods of the node, page by page. On another thread."""
        pods: list[Pod] = []
        query = {"fieldSelector": f"spec.nodeName={self._node}", "limit": _PAGE}
        while True:
            page = self._send_list(query, is_metadata_only=False)
            pods += pods_of(page)
            if not page.page.next:
                return pods
            query["continue"] = page.page.next

    def _list_metadata(self) -> list[Pod]:
        """The pods of the node that are not finished, from the API server's cache. On another thread."""
        selector = f"spec.nodeName={self._node},status.phase!=Succeeded,status.phase!=Failed"
        page = self._send_list({"fieldSelector": selector, "resourceVersion": "0"}, is_metadata_only=True)
        return list(pods_of(page))

    def _send_list(self, query: Mapping[str, str], *, is_metadata_only: bool) -> PodList:
        left = self._deadline - time.monotonic()
        path = "/api/v1/pods"
        answer = self._client.send(
            "GET", path, POD_LIST, query=query, is_metadata_only=is_metadata_only, seconds=left
        )
        return answer.value

    def _on_answer(self, key: Any, result: Any) -> None:
        if not isinstance(result, ApiError):
            self._outage.reset()
            self._say_outage("")
        elif result.kind == "unauthorized":
            raise result
        elif result.is_outage and time.monotonic() >= self._paused_until:  # the others under way end like this one
            self._paused_until = time.monotonic() + self._outage.next_delay(result.retry_after)
            self._say_outage(str(result))
        what, detail = key
        if isinstance(what, _Leaving):
            self._under_way -= 1
            self._on_pod_answer(what, result, is_deletion=detail)
            self._check_rights()
        else:
            self._is_looking = False
            self._on_list(what, result, begun_at=detail)

    def _on_list(self, what: Literal["list", "look"], result: Any, *, begun_at: float) -> None:
        now = time.monotonic()
        if isinstance(result, ApiError):
            if result.kind == "forbidden" and self._listed_at is None:
                raise result  # later it is an API server that has just started, and knows no roles yet
            if not result.is_outage:
                self._look_at = now + self._list_backoff.next_delay(result.retry_after)
                if str(result) != self._list_error:
                    self._list_error = str(result)
                    self._on_line(f"the list of pods: {result}; trying again")
            return
        self._list_backoff.reset()
        self._list_error = ""
        if what == "list":
            self._needs_list = False
            self._sort(result)
            self._listed_at = begun_at
        else:
            self._compare(result)
        if self._needs_list:
            self._look_at = now
        elif self._leaving:
            self._look_at = now + _LOOK_EVERY_SECONDS
        else:
            self._look_at = max(now, self._done_after)

    def _sort(self, pods: list[Pod]) -> None:
        """Take over a list that is whole and current."""
        self._drop_gone({pod.uid for pod in pods if not pod.is_finished})
        staying: dict[str, PodReport] = {}
        for pod in pods:
            reason = self._reason_to_stay(pod)
            if reason is not None and pod.uid not in self._leaving:
                staying[pod.uid] = _report(pod, reason)
                if pod.uid not in self._staying:
                    self._on_line(f"{pod.full_name}: stays: {reason}")
            elif pod.uid not in self._leaving:
                self._leaving[pod.uid] = _Leaving(pod, "kept")
            if pod.is_deleting and pod.uid in self._leaving:
                self._note_ending(self._leaving[pod.uid])
        self._staying = staying

    def _compare(self, pods: list[Pod]) -> None:
        """Take over a list without specifications, which may be a little old."""
        there = {pod.uid for pod in pods}
        # That a pod is gone which was not being deleted is less likely than that the list is old.
        self._needs_list = any(one.state == "kept" and uid not in there for uid, one in self._leaving.items())
        self._drop_gone(there | {uid for uid, one in self._leaving.items() if one.state != "ending"})
        if not self._leaving:
            self._done_after = max(self._done_after, time.monotonic())
        for pod in pods:
            if one := self._leaving.get(pod.uid):
                if pod.is_deleting:
                    self._note_ending(one)
            elif pod.uid not in self._staying:
                reason = self._reason_to_stay(pod)
                if reason is None:
                    self._needs_list = True
                else:
                    self._staying[pod.uid] = _report(pod, reason)
                    self._on_line(f"{pod.full_name}: stays: {reason}")

    def _reason_to_stay(self, pod: Pod) -> str | None:
        return reason_to_stay(
            pod,
            cordoned_at=self._cordoned_at,
            is_later=self._listed_at is not None,
            evicts_bare_pods=self._evicts_bare_pods,
        )

    def _drop_gone(self, there: set[str]) -> None:
        for uid in [uid for uid in self._leaving if uid not in there]:
            self._on_line(f"{self._leaving.pop(uid).pod.full_name}: gone")

    def _note_ending(self, one: _Leaving) -> None:
        if one.state == "kept":
            one.state = "ending"
            one.reason = "is being deleted"
            self._on_line(f"{one.pod.full_name}: is being deleted already")

    def _on_pod_answer(self, one: _Leaving, result: Any, *, is_deletion: bool) -> None:
        if one.is_denied is None:
            one.is_denied = _lacks_right(result, "create")
        if not isinstance(result, ApiError):
            self._on_ending(one, result, is_deletion=is_deletion)
            return
        one.state = "kept"
        if one.pod.uid not in self._leaving:
            return
        if result.kind == "not_found" or (result.kind == "conflict" and "UID" in str(result)):
            one.state = "ending"
            one.reason = "gone, says the API server"  # the next list shows it
        elif result.cause("NamespaceTerminating"):
            one.state = "ending"
            one.reason = "is being deleted with its namespace"
            self._on_line(f"{one.pod.full_name}: goes with its namespace")
        elif result.is_outage:
            one.reason = str(result)
            one.ask_at = self._paused_until
        elif is_deletion and _lacks_right(result, "delete"):
            if one.pod.namespace not in self._undeletable:
                self._on_line(f"pods cannot be deleted without asking their budgets: {result}")
            self._undeletable.add(one.pod.namespace)
            one.ask_at = 0.0
        else:
            self._keep(one, result, is_deletion=is_deletion)

    def _on_ending(self, one: _Leaving, grace: int | None, *, is_deletion: bool) -> None:
        one.state = "ending"
        done = "deleted without asking its budgets" if is_deletion else "evicted"
        shorter = "" if grace is None else f", with {grace} s of grace instead of {one.pod.grace_seconds}"
        (self.deleted if is_deletion else self.evicted).append(_report(one.pod, f"{done}{shorter}"))
        one.reason = f"{done}, and still ending"
        self._on_line(f"{one.pod.full_name}: {done}{shorter}")

    def _keep(self, one: _Leaving, error: ApiError, *, is_deletion: bool) -> None:
        """Note why the pod cannot go yet, and when to ask again."""
        budget = error.cause("DisruptionBudget")
        if budget is not None:
            reason = budget.message or str(error)
            least, most = _BUDGET_PAUSE_SECONDS
            pause = min(most, max(least, error.retry_after or 0.0))
        elif error.kind in ("unavailable", "conflict") and _TWO_BUDGETS not in str(error):
            reason, pause = str(error), one.backoff.next_delay(error.retry_after)
        else:
            reason, pause = str(error), _KEPT_PAUSE_SECONDS
        if self._deletes(one.pod) and not is_deletion:
            pause = 0.0  # the last resort has begun meanwhile
        one.ask_at = time.monotonic() + pause
        if reason != one.reason:
            one.reason = reason
            self._on_line(f"{one.pod.full_name}: kept: {reason}")

    def _check_rights(self) -> None:
        """Raises ApiError if every eviction of the first round was denied for want of a right."""
        asked = [one for one in self._leaving.values() if one.state != "ending"]
        if not self.evicted and not self.deleted and asked and all(one.is_denied for one in asked):
            raise ApiError(asked[0].reason, kind="forbidden", status=403)

    def _say_outage(self, text: str) -> None:
        if text and text != self._outage_text:
            self._on_line(f"{text}; trying again")
        elif self._outage_text and not text:
            self._on_line("the API server answers again")
        self._outage_text = text


def _lacks_right(result: Any, verb: str) -> bool:
    """Whether authorization has denied this; an admission webhook denies with 403, too."""
    return isinstance(result, ApiError) and result.status == 403 and f"cannot {verb} resource" in str(result)


def _report(pod: Pod, reason: str) -> PodReport:
    return PodReport(namespace=pod.namespace, name=pod.name, reason=reason)

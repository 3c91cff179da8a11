"""Which pods of a node have to go before an event. Pure.

Source: kubernetes.io/docs/tasks/administer-cluster/safely-drain-node and the rules of kubectl drain.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

_LATE_AFTER = timedelta(seconds=10)
"""No scheduler is so late: a pod that was created so long after the cordon, and is here, tolerates it."""
_CORDON_TAINT = "node.kubernetes.io/unschedulable"
_FINISHED = ("Succeeded", "Failed")


class _Annotations(msgspec.Struct):
    mirror: str | None = msgspec.field(default=None, name="kubernetes.io/config.mirror")


class _Owner(msgspec.Struct):
    kind: str
    controller: bool = False


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    uid: str
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    annotations: _Annotations = msgspec.field(default_factory=_Annotations)
    owner_references: tuple[_Owner, ...] = ()


class _Toleration(msgspec.Struct):
    key: str = ""
    operator: str = ""
    effect: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    termination_grace_period_seconds: int = 30
    tolerations: tuple[_Toleration, ...] = ()


class _Status(msgspec.Struct):
    phase: str = ""


class _Item(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _Page(msgspec.Struct):
    next: str = msgspec.field(default="", name="continue")


class PodList(msgspec.Struct):
    """A page of pods, whole or their metadata only."""

    kind: str
    items: tuple[_Item, ...] | None
    """null: an API server writes it so if it has the metadata of no pod to list."""
    page: _Page = msgspec.field(default_factory=_Page, name="metadata")

    def __post_init__(self) -> None:
        if self.kind not in ("PodList", "PartialObjectMetadataList"):
            raise ValueError("not a list of pods")


POD_LIST = msgspec.json.Decoder(PodList)


class Pod(NamedTuple):
    """What a drain has to know of a pod."""

    namespace: str
    name: str
    uid: str
    created_at: datetime | None
    is_deleting: bool
    is_mirror: bool
    controller: str
    """The kind of its controller, "" if it has none."""
    grace_seconds: int
    is_finished: bool
    tolerates_cordon: bool

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def pods_of(page: PodList) -> Iterator[Pod]:
    """The pods of a page."""
    for item in page.items or ():
        of = item.metadata
        yield Pod(
            of.namespace,
            of.name,
            of.uid,
            of.creation_timestamp,
            is_deleting=of.deletion_timestamp is not None,
            is_mirror=of.annotations.mirror is not None,
            controller=next((owner.kind for owner in of.owner_references if owner.controller), ""),
            grace_seconds=item.spec.termination_grace_period_seconds,
            is_finished=item.status.phase in _FINISHED,
            tolerates_cordon=any(
                one.key in ("", _CORDON_TAINT) and one.operator == "Exists" and one.effect in ("", "NoSchedule")
                for one in item.spec.tolerations
            ),
        )


def reason_to_stay(
    pod: Pod, *, cordoned_at: datetime | None, is_later: bool, evicts_bare_pods: bool
) -> str | None:
    """Why the pod need not go; None if it has to.

    ``cordoned_at`` and the pod's own time are the API server's, so no clock of this machine counts. ``is_later``:
    an earlier list did not have the pod. Evicted pods that tolerate the cordon come back at once, again and again.
    Of the first list all have to go: API servers' clocks differ.
    """
    if pod.is_mirror:
        return "static pod"
    if pod.controller == "DaemonSet":
        return "of a DaemonSet"
    if pod.is_finished:
        return "finished"
    if is_later and cordoned_at and pod.created_at:
        is_back = pod.tolerates_cordon and pod.created_at >= cordoned_at
        if is_back or pod.created_at > cordoned_at + _LATE_AFTER:
            return "tolerates the cordon: created after it"
    if not pod.controller and not pod.is_deleting and not evicts_bare_pods:
        return "no controller: its kubelet starts it again"
    return None

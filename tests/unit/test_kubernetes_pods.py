"""Which pods of a node have to go before an event."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from scheduled_events_agent.kubernetes.pods import POD_LIST, pods_of, reason_to_stay

CORDONED_AT = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
JOB = {"ownerReferences": [{"kind": "Job", "controller": True}]}
TOLERATES = {"tolerations": [{"operator": "Exists"}]}
BACK = "tolerates the cordon: created after it"


def reason(
    metadata: dict[str, Any], spec: dict[str, Any] | None = None, *, after: float = -60, **options: bool
) -> str | None:
    """Why a pod stays that was created so many seconds after the cordon."""
    created_at = CORDONED_AT + timedelta(seconds=after)
    whole = {"name": "p", "namespace": "default", "uid": "1", "creationTimestamp": created_at, **metadata}
    item = {"metadata": whole, "spec": spec or {}, "status": {"phase": metadata.get("phase", "Running")}}
    page = POD_LIST.decode(msgspec.json.encode({"kind": "PodList", "items": [item]}))
    (pod,) = pods_of(page)
    settings = {"is_later": False, "evicts_bare_pods": False, **options}
    return reason_to_stay(pod, cordoned_at=CORDONED_AT, **settings)


def test_a_pod_with_a_controller_goes() -> None:
    assert reason(JOB) is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"annotations": {"kubernetes.io/config.mirror": ""}}, "static pod"),
        ({"ownerReferences": [{"kind": "DaemonSet", "controller": True}]}, "of a DaemonSet"),
        ({"ownerReferences": [{"kind": "DaemonSet"}]}, "no controller: its kubelet starts it again"),
        ({**JOB, "phase": "Succeeded"}, "finished"),
        ({**JOB, "phase": "Failed"}, "finished"),
        ({}, "no controller: its kubelet starts it again"),
        ({"deletionTimestamp": "2026-11-26T12:00:00Z"}, None),
    ],
)
def test_a_pod_may_stay_for_what_it_is(metadata: dict[str, Any], expected: str | None) -> None:
    assert reason(metadata) == expected


def test_a_pod_without_a_controller_goes_if_it_is_asked_for() -> None:
    assert reason({}, evicts_bare_pods=True) is None


@pytest.mark.parametrize(
    ("after", "is_later", "spec", "expected"),
    [
        (10, True, {}, None),
        (11, True, {}, BACK),
        (11, False, {}, None),  # another API server has created it, whose clock is ahead
        (11, False, TOLERATES, None),
        (1, True, TOLERATES, BACK),
        (0, True, TOLERATES, BACK),
        (-1, True, TOLERATES, None),
        (1, False, TOLERATES, None),
        (1, True, {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]}, BACK),
        (1, True, {"tolerations": [{"key": "other", "operator": "Exists"}]}, None),
        (1, True, {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}, None),
    ],
)
def test_a_pod_that_tolerates_the_cordon_does_not_go_again(
    after: float, spec: dict[str, Any], expected: str | None, *, is_later: bool
) -> None:
    assert reason(JOB, spec, after=after, is_later=is_later) == expected


def test_only_a_list_of_pods_is_one() -> None:
    with pytest.raises(msgspec.ValidationError, match="not a list of pods"):
        POD_LIST.decode(b'{"kind": "NodeList", "items": []}')

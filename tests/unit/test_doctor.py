"""What doctor makes of what it has seen."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from agent.cli.diagnosis import (
    Finding,
    failure,
    in_words,
    judge_clock,
    judge_directness,
    judge_disk,
    judge_document,
    judge_first_answer,
    judge_name,
    judge_others,
    judge_rate,
    judge_version,
    judge_what_runs,
    names_of,
    ok,
    warning,
)
from agent.cli.terminal import Terminal
from agent.host.surroundings import Approver, Life
from agent.imds import Answer, ImdsError
from agent.settings import BUILT_IN_NAME, VmSettings
from agent.status import PolicyInForce, Status, Vm

NOON = datetime(2026, 4, 11, 12, tzinfo=UTC)
STATUS = Status(
    at=NOON,
    version="0.1.0",
    started_at=NOON,
    vm=Vm(names=("vm-1",), vm_id="1"),
    mode="act",
    is_paused=False,
    ready=True,
    health="ok",
    policy=PolicyInForce(file="/p.yaml", read_at=NOON),
    rules=(),
    endpoint="auto",
    last_poll_at=NOON,
    poll_failure="",
    incarnation="1",
    running=(),
    pending=(),
)
SOMETHING_ELSE = "look at imds.endpoint, and at what else answers there: a proxy, a portal, another service"


def answer(status: int = 200, body: Any = b"", fault: ImdsError | None = None, **headers: str) -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status=status, headers=fields, body=content, fault=fault)


def instance(name: str) -> Answer:
    return answer(body={"compute": {"name": name, "vmId": "1"}})


def events(*resources: list[str]) -> Answer:
    listed = [{"EventId": str(number), "Resources": names} for number, names in enumerate(resources)]
    return answer(body={"DocumentIncarnation": 1, "Events": listed})


# --- the words

NOWHERE = Terminal(width=None, has_colors=False)
WINDOW = Terminal(width=40, has_colors=True)

FINDINGS = [
    ok("endpoint", "answers"),
    warning("clock", "late", "set it"),
    failure("a", "bad\x1b[2Jname", "mend it"),
]


def test_findings_are_an_aligned_list_with_what_to_do_below_each() -> None:
    assert list(in_words(FINDINGS, NOWHERE)) == [
        "ok       endpoint  answers",
        "warning  clock     late",
        "                   -> set it",
        r"failure  a         bad\x1b[2Jname",
        "                   -> mend it",
        "1 ok, 1 warning, 1 failure",
    ]


def test_only_the_verdict_is_coloured() -> None:
    lines = list(in_words(FINDINGS, WINDOW))
    assert lines[:2] == ["\x1b[32mok\x1b[0m       endpoint  answers", "\x1b[1;33mwarning\x1b[0m  clock     late"]


def test_in_a_window_findings_are_broken_to_fit_it() -> None:
    finding = warning("clock", "two words and a lot more of them", "set it, or have it set by somebody else")
    assert list(in_words([finding], WINDOW))[:-1] == [
        "\x1b[1;33mwarning\x1b[0m  clock     two words and a lot",
        "                   more of them",
        "                   -> set it, or have it",
        "                      set by somebody",
        "                      else",
    ]


# --- the metadata service


@pytest.mark.parametrize(
    ("found", "sign"),
    [
        (answer(via="1.1 proxy.example"), "the header via: 1.1 proxy.example"),
        (answer(x_cache="HIT from squid"), "the header x-cache: HIT from squid"),
        (answer(302, location="http://portal.example/"), "a redirect (302) to http://portal.example/"),
        (answer(301), "a redirect (301) to nowhere"),
        (answer(content_type="text/html; charset=utf-8"), "a web page"),
        (answer(body=b"\r\n <!DOCTYPE html>"), "a web page"),
    ],
)
def test_a_proxy_in_the_way_is_a_failure(found: Answer, sign: str) -> None:
    assert judge_directness([instance("vm"), found], ["http_proxy"]) == failure(
        "direct",
        f"something other than the metadata service has answered, or changed the answer: {sign}",
        "keep what goes to the endpoint away from proxies, transparent ones too: it has to leave directly",
    )


def test_a_proxy_of_the_environment_is_told_and_harmless() -> None:
    assert judge_directness([instance("vm")], []) == ok("direct", "no sign of a proxy")
    assert judge_directness([instance("vm")], ["HTTP_PROXY", "no_proxy"]) == ok(
        "direct",
        "no sign of a proxy; that this environment has HTTP_PROXY, no_proxy does no harm: the agent ignores that",
    )


def test_the_first_answer_is_the_last_if_nothing_can_be_learned_from_more() -> None:
    assert judge_first_answer(instance("vm")) is None
    assert judge_first_answer(answer(via="1.1 proxy", body={})) is None  # it passes on what the service says
    page = judge_first_answer(answer(content_type="text/html"))
    assert page is not None
    assert (page.check, page.verdict) == ("direct", "failure")
    no_header = {"error": "Bad request. Required metadata header not specified"}
    assert judge_first_answer(answer(400, no_header, ImdsError("400", kind="bad_request"))) == failure(
        "direct",
        "the service did not see the header Metadata: true that was sent",
        "find what removes it on the way: a proxy, or a filter",
    )
    assert judge_first_answer(answer(410, b"", ImdsError("GET: 410 Gone", kind="gone"))) == failure(
        "endpoint", "GET: 410 Gone", "the service is being updated: run this again in two minutes"
    )
    assert judge_first_answer(answer(429, b"", ImdsError("429", kind="throttled"))) == failure(
        "rate",
        "refused for too many requests (429), twice within two seconds",
        "find what else on this VM asks the metadata service so often: the limit is for all programs together",
    )


def test_the_version_is_known_if_the_service_takes_it() -> None:
    assert judge_version(answer(), "2020-07-01") == ok("version", "2020-07-01 is known to the service")
    assert judge_version(answer(), "2019-08-01") == ok(
        "version", "2019-08-01 is known to the service; 2020-07-01 would tell more about each event"
    )
    fault = ImdsError("GET /x: 400 Bad Request: api-version is invalid", kind="bad_request")
    assert judge_version(answer(400, b"", fault), "2017-03-01") == failure(
        "version", str(fault), "set imds.api_version to another version, or remove the key"
    )


@pytest.mark.parametrize(
    ("found", "finding"),
    [
        (events(), ok("events", "none is pending, so it is not known yet what Resources call this VM")),
        (events(["vm"], ["other"]), ok("events", "2 events pending, Resources of 1 name this VM")),
        (events(["other", "_VM"]), ok("events", "1 event pending, Resources of 1 name this VM")),
        (events(["b", "a"]), ok("events", "1 event pending, for other VMs only: a, b")),
        (events(list("gfedcba")), ok("events", "1 event pending, for other VMs only: a, b, c, d, e, ...")),
        (events([]), ok("events", "1 event pending, for other VMs only: none is named")),
        (
            events(["vm000001"]),
            warning(
                "events",
                "1 event pending, none for vm, but Resources name vm000001, which is this machine's host name",
                "if that is this VM, add vm000001 to vm.aliases in the policy",
            ),
        ),
        (
            answer(),
            warning(
                "events",
                "the service is still switching scheduled events on for this VM: its answer is empty",
                "run this again in five minutes",
            ),
        ),
        (
            answer(500, b"", ImdsError("GET: 500", kind="server_error")),
            failure(
                "events",
                "GET: 500",
                "run this again in a minute; if it stays, restart the VM or ask Azure's support",
            ),
        ),
    ],
)
def test_events_tell_whether_resources_know_this_vm_by_its_name(found: Answer, finding: Finding) -> None:
    assert judge_document(found, ("vm",), "vm000001") == finding


def test_what_is_no_document_is_a_failure() -> None:
    found = judge_document(answer(body=b"{]"), ("vm",), "")
    assert (found.check, found.verdict, found.advice) == ("events", "failure", SOMETHING_ELSE)


@pytest.mark.parametrize(
    ("vm", "said", "names", "finding"),
    [
        (VmSettings(), "vm_0", ("vm_0",), ok("name", "this VM is vm_0")),
        (
            VmSettings(name="_VM_0", aliases=("x",)),
            "vm_0",
            ("_VM_0", "x"),
            ok("name", "this VM is _VM_0, also known as x"),
        ),
        (VmSettings(name="vm_0"), "", ("vm_0",), ok("name", "this VM is vm_0")),
        (
            VmSettings(name="vm_0"),
            "vm_1",
            ("vm_0",),
            warning(
                "name",
                "the policy calls this VM vm_0, the service vm_1",
                "remove vm.name from the policy, unless Resources really call it so",
            ),
        ),
        (
            VmSettings(),
            "",
            (),
            failure(
                "name",
                "the service does not tell this VM's name",
                "set vm.name in the policy to what Resources call this VM: without a name nothing is approved",
            ),
        ),
    ],
)
def test_the_name_is_the_policys_else_the_services(
    vm: VmSettings, said: str, names: tuple[str, ...], finding: Finding
) -> None:
    assert names_of(vm, instance(said)) == names
    assert judge_name(vm, instance(said)) == finding


def clock(ahead: float, took: float = 0.1, says: str = "Sat, 11 Apr 2026 12:00:00 GMT") -> Finding:
    asked_at = NOON + timedelta(seconds=ahead)
    return judge_clock(says, asked_at, asked_at + timedelta(seconds=took))


@pytest.mark.parametrize("ahead", [-2.05, -0.1, 0, 0.9, 2.95])
def test_a_clock_within_two_seconds_is_right_for_the_service_tells_whole_ones(ahead: float) -> None:
    assert clock(ahead) == ok("clock", "as the service's, to the second or two")


def test_a_slow_answer_is_not_taken_for_a_wrong_clock() -> None:
    assert clock(-60, took=61).verdict == "ok"


ADVICE = "let chrony or systemd-timesyncd set the clock, on Windows w32tm; it must follow the host or NTP"


def test_a_wrong_clock_is_told_with_what_it_does_to_hooks() -> None:
    effects = {
        "ahead of": "hooks get less time than there is",
        "behind": "hooks may still run when the event starts",
    }
    words = {
        which: f"the service's: NotBefore is compared with it, so {effect}" for which, effect in effects.items()
    }
    assert clock(3.5) == warning("clock", f"2 s ahead of {words['ahead of']}", ADVICE)
    assert clock(-29) == warning("clock", f"29 s behind {words['behind']}", ADVICE)
    assert clock(31.5) == failure("clock", f"30 s ahead of {words['ahead of']}", ADVICE)
    assert clock(-3600) == failure("clock", f"3600 s behind {words['behind']}", ADVICE)


@pytest.mark.parametrize("says", ["", "yesterday", "Sat, 41 Apr 2026 12:00:00 GMT"])
def test_without_a_date_the_clock_cannot_be_judged(says: str) -> None:
    assert clock(3600, says=says) == warning(
        "clock",
        "the service did not tell its time, so this clock cannot be compared",
        "check by other means that the clock is right: NotBefore is compared with it",
    )


def test_the_pace_of_requests_is_judged_by_the_limit_and_by_the_shortest_notice() -> None:
    set_it = "set imds.poll_interval to 1s"
    assert judge_rate(1.0, 0, is_refused=False) == ok(
        "rate", "the agent asks every 1 s; no request was refused for too many (429)"
    )
    assert judge_rate(0.25, 0, is_refused=False) == warning(
        "rate",
        "the agent asks every 0.25 s, which leaves little of the five requests a second that the service answers "
        "to the whole VM",
        set_it,
    )
    assert judge_rate(60.0, 0, is_refused=False) == warning(
        "rate", "the agent asks every 60 s, and a Spot VM may have no more than 10 s of notice", set_it
    )
    assert judge_rate(1.0, 1, is_refused=False).verdict == "warning"
    assert judge_rate(1.0, 2, is_refused=True).verdict == "failure"


# --- the machine

ELSEWHERE = "name a directory on the system's or a data disk with agent.state_dir"
ROOM = "make room: what cannot be written down is not done"
MIB = 1024**2


@pytest.mark.parametrize(
    ("temporary", "kind", "free", "finding"),
    [
        (None, "ext4", 5000, ok("disk", "/s is on a disk that stays (ext4), 5,000 MiB free")),
        (None, None, 5000, ok("disk", "/s is on a disk that stays, 5,000 MiB free")),
        (
            "/mnt",
            "ext4",
            5000,
            failure("disk", "/s is on Azure's temporary disk /mnt, empty after a redeployment", ELSEWHERE),
        ),
        (None, "tmpfs", 5000, failure("disk", "/s is in memory (tmpfs), and gone after a reboot", ELSEWHERE)),
        (
            None,
            "overlay",
            5000,
            warning(
                "disk",
                "/s is on an overlay, as of a container: gone with it",
                "mount a volume there, if the agent is to know after a restart what it had prepared",
            ),
        ),
        (None, "ext4", 100, warning("disk", "/s: 100 MiB free", ROOM)),
        (None, "overlay", 15, failure("disk", "/s: 15 MiB free", ROOM)),
    ],
)
def test_the_states_disk_has_to_survive_a_redeployment_and_have_room(
    temporary: str | None, kind: str | None, free: int, finding: Finding
) -> None:
    assert judge_disk("/s", temporary, kind, free * MIB) == finding


@pytest.mark.parametrize(
    ("life", "is_acting", "verdict", "text"),
    [
        ("active", True, "failure", "X approves events too, perhaps before the hooks have run (here)"),
        ("active", False, "warning", "X approves events too (here)"),
        ("maybe", True, "warning", "X runs, and may approve events too: its configuration decides that (here)"),
        ("installed", True, "warning", "X is there and does not run; it would approve events too (here)"),
    ],
)
def test_another_agent_is_a_failure_only_if_both_would_act(
    life: Life, is_acting: bool, verdict: str, text: str
) -> None:
    (found,) = judge_others([Approver("X", "here", life, "stop it")], is_acting=is_acting)
    assert (found.verdict, found.finding) == (verdict, text)
    assert found.advice in ("stop it", "remove it; if it is to run again: stop it")


def test_no_other_agent_is_well() -> None:
    assert list(judge_others([], is_acting=True)) == [
        ok("others", "no other agent that approves events was found")
    ]


@pytest.mark.parametrize(
    ("fields", "is_of_this_file", "changed_after", "is_to_act", "doubt"),
    [
        ({}, True, -1, True, None),
        ({}, True, None, True, None),
        ({"mode": "observe"}, True, -1, False, None),
        ({}, False, -1, True, "with the policy /p.yaml, and these checks looked at another"),
        (
            {"policy": PolicyInForce(file=BUILT_IN_NAME, read_at=NOON)},
            False,
            -1,
            True,
            "with the built-in policy, as there was no policy file when it started",
        ),
        ({}, True, 1, True, "with the policy as it was read at 2026-04-11 12:00:00Z; its file has changed since"),
        ({"is_paused": True}, True, -1, True, "and is paused: it watches, and does nothing"),
        ({"mode": "observe"}, True, -1, True, "and only observes: no hook runs and nothing is approved"),
    ],
)
def test_an_agent_that_is_well_and_does_not_do_what_the_policy_says_is_doubted(
    fields: dict[str, Any], is_of_this_file: bool, changed_after: float | None, is_to_act: bool, doubt: str | None
) -> None:
    found = judge_what_runs(
        msgspec.structs.replace(STATUS, **fields),
        is_of_this_file=is_of_this_file,
        changed_at=None if changed_after is None else NOON + timedelta(seconds=changed_after),
        is_to_act=is_to_act,
    )
    assert (found[0] if found else None) == doubt
    assert found is None or found[1]

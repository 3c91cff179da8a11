"""Scenario files: what they may say, and what is said about mistakes in them."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from scheduled_events_agent.policy.durations import format_duration
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.simulator import (
    Simulator,
    SimulatorError,
    list_scenarios,
    load_scenario,
    parse_scenario,
    rename_vms,
)
from scheduled_events_agent.simulator.azure import Plan
from scheduled_events_agent.simulator.control import _ACTIONS as ACTIONS
from scheduled_events_agent.simulator.faults import Fault, FaultKind
from scheduled_events_agent.simulator.scenario import DEFAULT_SCENARIO, Scenario, Step

GUIDE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
LIVES = {
    "approved-by-others",
    "canceled",
    "days-ahead",
    "first-call",
    "freeze",
    "freeze-short-notice",
    "hardware-failure",
    "held-up",
    "incarnation-reset",
    "new-id-at-start",
    "outage",
    "platform-reboot",
    "rebalance-eviction",
    "rebalance-withdrawn",
    "shared",
    "spot-eviction",
    "spot-eviction-10s",
    "started-never-seen",
    "terminate-scale-set",
    "two-at-once",
    "user-reboot",
}


def problems_of(text: str) -> list[str]:
    with pytest.raises(SimulatorError) as caught:
        parse_scenario(text, "mine.yaml")
    assert caught.value.kind == "config"
    return str(caught.value).splitlines()


def test_every_kind_of_lifecycle_has_a_scenario_with_a_description() -> None:
    shipped = list_scenarios()
    assert set(shipped) == LIVES
    assert DEFAULT_SCENARIO in shipped
    assert all(shows.endswith(".") for shows in shipped.values())


@pytest.mark.parametrize("name", sorted(LIVES))
def test_every_shipped_scenario_can_be_read_and_does_something(name: str) -> None:
    assert load_scenario(name).timeline


def test_a_scenario_says_what_happens_when() -> None:
    scenario = parse_scenario(
        """
        vms: [web_0, web_1]
        others: [web_2]
        vm_ids: {web_0: 5c08b38e-4d57-4c23-ac45-aca61037f084}
        scale_set: web
        incarnation: 41
        timeline:
          - at: 2s
            event: {name: first, type: Freeze, vms: [web_0, web_2], notice: 1h30m, duration: 9s, lasts: null}
          - {at: 500ms, fault: {kind: status, status: 410, vms: web_1, on: poll, for: 70s}}
          - {at: 1m, cancel: first}
        """,
        "mine.yaml",
    )

    assert scenario == Scenario(
        vms=("web_0", "web_1"),
        others=("web_2",),
        vm_ids={"web_0": "5c08b38e-4d57-4c23-ac45-aca61037f084"},
        scale_set="web",
        incarnation=41,
        timeline=(
            Step(
                at=2.0,
                event=Plan(
                    name="first",
                    type="Freeze",
                    vms=("web_0", "web_2"),
                    notice_seconds=5400.0,
                    duration_seconds=9.0,
                    lasts_seconds=None,
                ),
            ),
            Step(at=0.5, fault=Fault(kind="status", status=410, vms=("web_1",), on="poll", seconds=70.0)),
            Step(at=60.0, cancel="first"),
        ),
    )


def test_unknown_names_in_a_scenario_are_reported_with_their_lines() -> None:
    assert problems_of(
        """vms: [vm-1, vm-1]
vm_ids: {vm-3: x}
timeline:
  - {at: 1s, event: {type: Reboot, name: a, vms: vm-2}}
  - {at: 2s, event: {type: Reboot, name: a}}
  - {at: 3s, cancel: b}
  - {at: 1s, start: a}
  - {at: 4s, fault: {kind: stall, vms: [vm-4]}}
"""
    ) == [
        "mine.yaml:1: vms: a VM is listed twice",
        'mine.yaml:2: vm_ids.vm-3: expected a VM of this scenario (vm-1); got "vm-3"',
        'mine.yaml:4: timeline[0].event.vms: expected a VM of this scenario (vm-1); got "vm-2"',
        'mine.yaml:5: timeline[1].event.name: "a" is used twice',
        'mine.yaml:6: timeline[2].cancel: expected the name of an event (a); got "b"',
        'mine.yaml:7: timeline[3].start: "a" is announced only later',
        'mine.yaml:8: timeline[4].fault.vms: expected a VM of this scenario (vm-1); got "vm-4"',
    ]


def test_names_are_checked_when_all_else_is_valid() -> None:
    wrong_kind = f'expected one of {", ".join(get_args(FaultKind))}; got "stal"'
    assert problems_of(
        """vms: [vm-1]
timeline:
  - {at: 1s, event: {type: Reboot, name: a, vms: vm-2}}
  - {at: 2s, event: {type: Reboot, name: b, notice: soon}}
  - {at: 1m, fault: {kind: stal}}
  - {at: 2m, cancel: b}
"""
    ) == [
        'mine.yaml:4: timeline[1].event.notice: expected a duration such as 9s, 5m, 1h30m or 2d; got "soon"',
        f'mine.yaml:5: timeline[2].fault.kind: {wrong_kind}; did you mean "stall"?',
    ]


def test_a_step_does_exactly_one_thing() -> None:
    choices = "event, approve, cancel, start, end, fault, clear_faults, reset_incarnation"
    assert problems_of(
        """timeline:
  - {at: 1s}
  - {at: 2s, clear_faults: true, reset_incarnation: 1}
"""
    ) == [
        f"mine.yaml:2: timeline[0]: expected exactly one of {choices}; got none",
        f"mine.yaml:3: timeline[1]: expected exactly one of {choices}; got clear_faults and reset_incarnation",
    ]


def test_an_unknown_key_is_reported_with_the_nearest_known_one() -> None:
    assert problems_of("timelime: []\n") == ['mine.yaml:1: unknown key "timelime"; did you mean "timeline"?']


def test_an_unknown_scenario_is_reported_with_the_nearest_known_one() -> None:
    with pytest.raises(SimulatorError) as caught:
        load_scenario("platform-rebot")
    assert str(caught.value) == (
        'no scenario is called "platform-rebot": perhaps "platform-reboot" is meant; '
        "a scenario of your own is given by its path, ending in .yaml"
    )


def test_a_scenario_of_ones_own_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("vms: [mine]\n", encoding="utf-8")
    assert load_scenario(str(path)) == Scenario(vms=("mine",))


def test_an_unreadable_scenario_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    with pytest.raises(SimulatorError) as caught:
        load_scenario(str(path))
    assert str(caught.value).startswith(f"scenario {path}: cannot be read: ")


def test_a_scenario_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("#" * (1024 * 1024 + 1))
    with pytest.raises(SimulatorError, match=r"^scenario .*large\.yaml: expected at most 1024 KiB; it is larger$"):
        load_scenario(str(path))


def test_the_first_vms_of_a_scenario_can_be_called_by_real_names() -> None:
    scenario = parse_scenario(
        """
        vms: [a, b]
        vm_ids: {a: "1"}
        timeline:
          - {at: 1s, event: {type: Reboot, vms: [b, a]}}
          - {at: 1s, fault: {kind: stall, vms: a}}
        """,
        "mine.yaml",
    )
    renamed = rename_vms(scenario, ("real",))

    assert renamed.vms == ("real", "b")
    assert renamed.vm_ids == {"real": "1"}
    assert renamed.timeline[0].event is not None
    assert renamed.timeline[0].event.vms == ("b", "real")
    assert renamed.timeline[1].fault is not None
    assert renamed.timeline[1].fault.vms == ("real",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("x", "y"), "--vm: the scenario has 1 VMs; got 2 names"),
    ],
)
def test_more_names_than_vms_are_rejected(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(SimulatorError) as caught:
        rename_vms(Scenario(vms=("a",)), names)
    assert str(caught.value) == message


def test_two_vms_cannot_get_the_same_name() -> None:
    with pytest.raises(SimulatorError, match=r"^two VMs have the same name$"):
        Simulator(scenario=rename_vms(Scenario(vms=("a", "b")), ("b",)))


def test_the_policy_and_the_scenario_in_the_guide_can_be_read() -> None:
    policy, sample = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert parse_settings(policy, "simulator.md").settings.imds.endpoint == "http://127.0.0.1:8169"
    assert [step.at for step in parse_scenario(sample, "simulator.md").timeline] == [2.0, 5.0, 60.0]


def test_the_guide_explains_every_key_and_every_kind_of_fault() -> None:
    keys = {
        name
        for struct in (Scenario, Step, Plan, Fault)
        for name in struct.__struct_encode_fields__
        if name != "at"
    }
    explained = {
        word
        for row in re.findall(r"^(?:\||-) (`.*?)(?: \||: )", GUIDE, re.MULTILINE)
        for word in re.findall(r"\w[\w-]*", row)
    }
    assert keys | set(get_args(FaultKind)) <= explained


def test_the_guide_states_the_defaults_of_the_types() -> None:
    _, _, rest = GUIDE.partition("\nAn event:\n")
    of_events, _, of_faults = rest.partition("\nA fault:\n")
    for text, struct in ((of_events, Plan), (of_faults, Fault)):
        told = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text, re.MULTILINE))
        for field in msgspec.structs.fields(struct):
            default = field.default
            if isinstance(default, float):
                default = format_duration(default)
            if default not in (None, (), msgspec.NODEFAULT):
                assert told[field.encode_name] == str(default).replace("True", "true").replace("False", "false")


def test_the_guide_lists_every_path_of_the_control_port() -> None:
    assert {path for path in ACTIONS if f"`{path}`" not in GUIDE and f"POST {path}`" not in GUIDE} == set()

"""Scenarios: timelines of events and faults for simulated VMs, read from YAML.

Has the grammar of scenario files, and the scenarios that ship with the agent.
Invariant: every name in a scenario that was read is known. So it can be played.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from scheduled_events_agent import host
from scheduled_events_agent.policy import typed_yaml
from scheduled_events_agent.policy.typed_yaml import Problem, nearest
from scheduled_events_agent.simulator.azure import Duration, Name, Plan, SimulatorError
from scheduled_events_agent.simulator.faults import Fault

DEFAULT_SCENARIO = "platform-reboot"
_MAX_FILE_BYTES = 1024 * 1024


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the timeline: a time and exactly one thing to do."""

    at: Duration
    event: Plan | None = None
    approve: Name | None = None
    """An operator approves the event of this name in the portal."""
    cancel: Name | None = None
    start: Name | None = None
    end: Name | None = None
    fault: Fault | None = None
    clear_faults: bool = False
    reset_incarnation: Annotated[int | None, Meta(ge=0)] = None

    def __post_init__(self) -> None:
        choices = [name for name in self.__struct_fields__ if name != "at"]
        values = {name: getattr(self, name) for name in choices}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"expected exactly one of {', '.join(choices)}; got {found}")

    @property
    def named(self) -> tuple[str, str] | None:
        """The action, and the name of the event that it is about, if there is one."""
        for action in ("approve", "cancel", "start", "end"):
            if name := getattr(self, action):
                return action, name
        return None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole scenario file."""

    vms: Annotated[tuple[Name, ...], Meta(min_length=1)] = ("vm-1",)
    others: tuple[Name, ...] = ()
    """Further VMs that events may name and that have no port."""
    vm_ids: dict[Name, str] = {}
    scale_set: str = ""
    incarnation: Annotated[int, Meta(ge=0)] = 1
    incarnation_step: Annotated[int, Meta(ge=1)] = 1
    timeline: tuple[Step, ...] = ()
    ends: Duration | None = None
    """When the scenario ends; by default, when everything is over."""


class ScenarioError(SimulatorError):
    """A scenario or a recording cannot be used; ``problems`` has each thing wrong with its file."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)), kind="config")
        self.problems = problems


def parse_scenario(text: str | bytes, name: str) -> Scenario:
    """Read a scenario; raises ScenarioError.

    Names are looked at when all else is right.
    """
    parsed = typed_yaml.parse(text, Scenario, name)
    problems = parsed.problems or parsed.to_problems(_mistakes(parsed.value or Scenario()))
    if problems or parsed.value is None:
        raise ScenarioError(problems)
    return parsed.value


def load_scenario(name: str) -> Scenario:
    """The scenario of a file, or the shipped one of that name."""
    path = Path(name)
    if path.suffix.lower() in (".yaml", ".yml") or len(path.parts) > 1:
        return parse_scenario(read_file(name, "scenario", _MAX_FILE_BYTES), name)
    names = tuple(list_scenarios())
    if name in names:
        text = (resources.files(__package__) / "scenarios" / f"{name}.yaml").read_text(encoding="utf-8")
        return parse_scenario(text, f"{name}.yaml")
    guess = nearest(name, names)
    hint = f'perhaps "{guess}" is meant' if guess else f"there are {', '.join(names)}"
    raise SimulatorError(
        f'no scenario is called "{name}": {hint}; a scenario of your own is given by its path, ending in .yaml',
        kind="usage",
    )


def read_file(name: str, what: str, max_bytes: int) -> bytes:
    """The content of a user's file; raises SimulatorError."""
    try:
        return host.read_small_file(Path(name), max_bytes)
    except host.HostError as error:
        raise SimulatorError(f"{what} {error}", kind="usage") from error


def list_scenarios() -> dict[str, str]:
    """Names of the shipped scenarios and what each shows: the comment in its first line."""
    found = {}
    for item in (resources.files(__package__) / "scenarios").iterdir():
        if item.name.endswith(".yaml"):
            first_line = item.read_text(encoding="utf-8").partition("\n")[0]
            found[item.name.removesuffix(".yaml")] = first_line.lstrip("# ").strip()
    return dict(sorted(found.items()))


def rename_vms(scenario: Scenario, names: tuple[str, ...]) -> Scenario:
    """A copy of the scenario in which its first VMs have other names, such as that of a real machine."""
    if len(names) > len(scenario.vms):
        count = len(scenario.vms)
        raise SimulatorError(f"--vm: the scenario has {count} VMs; got {len(names)} names", kind="usage")
    new = dict(zip(scenario.vms, names, strict=False))

    def renamed(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new.get(vm, vm) for vm in old)

    replace = msgspec.structs.replace
    steps = []
    for step in scenario.timeline:
        event = step.event and replace(step.event, vms=renamed(step.event.vms))
        fault = step.fault and replace(step.fault, vms=renamed(step.fault.vms))
        steps.append(replace(step, event=event, fault=fault))
    vm_ids = {new.get(vm, vm): vm_id for vm, vm_id in scenario.vm_ids.items()}
    return replace(scenario, vms=renamed(scenario.vms), vm_ids=vm_ids, timeline=tuple(steps))


def _mistakes(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Errors that the types alone do not find: path and message of each."""
    with_port = dict.fromkeys(scenario.vms)
    named = with_port | dict.fromkeys(scenario.others)
    if len(with_port) < len(scenario.vms):
        yield "vms", "a VM is listed twice"
    for vm in scenario.vm_ids:
        yield from _unknown(f"vm_ids.{vm}", [vm], with_port)
    announced: dict[str, float] = {}
    for index, step in enumerate(scenario.timeline):
        if step.event and step.event.name:
            if step.event.name in announced:
                yield f"timeline[{index}].event.name", f'"{step.event.name}" is used twice'
            announced[step.event.name] = step.at
    for index, step in enumerate(scenario.timeline):
        where = f"timeline[{index}]"
        if step.event:
            yield from _unknown(f"{where}.event.vms", step.event.vms, named)
        if step.fault:
            yield from _unknown(f"{where}.fault.vms", step.fault.vms, with_port)
        if step.named:
            action, name = step.named
            mistake = _why_not_named(name, step.at, announced)
            if mistake:
                yield f"{where}.{action}", mistake


def _unknown(path: str, vms: Iterable[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    for vm in vms:
        if vm not in known:
            yield path, f'expected a VM of this scenario ({_some(known)}); got "{vm}"'


def _why_not_named(name: str, at: float, announced: Mapping[str, float]) -> str:
    """Why a step cannot name this event; "" if it can. ``announced``: when each event is."""
    if name not in announced:
        return f'expected the name of an event ({_some(announced) or "none has a name"}); got "{name}"'
    return f'"{name}" is announced only later' if announced[name] > at else ""


def _some(names: Iterable[str]) -> str:
    """The first names of a list for people."""
    shown = list(islice(names, 21))
    return ", ".join([*shown[:20], "..."] if len(shown) > 20 else shown)

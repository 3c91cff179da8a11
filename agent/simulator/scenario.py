"""Scenarios: what happens to which VMs when, read from YAML.

Owns the grammar of scenario files and the ones that ship with the agent. Knows nothing of HTTP and keeps no
state. The one invariant: a scenario that has been read can be played, for every name in it is known.
"""

from collections.abc import Collection, Iterable, Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agent import typed_yaml
from agent.simulator.azure import EventType, SimulatorError, Source
from agent.simulator.faults import FaultKind, FaultScope

Duration = Annotated[
    float, Meta(description="A duration such as 9s, 5m, 1h30m or 2d.", extra={"kind": "duration"})
]
Name = Annotated[str, Meta(pattern=r"^\S{1,128}$", description="no blanks")]
_Names = Annotated[tuple[Name, ...], Meta(extra={"kind": "one-or-many"})]

DEFAULT_SCENARIO = "platform-reboot"
_MAX_FILE_BYTES = 1024 * 1024


class EventStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event is announced. Fields mean what they mean for ``Simulator.schedule``."""

    type: EventType
    name: Name | None = None
    """By which later steps speak of it."""
    id: str | None = None
    vms: _Names = ()
    source: Source = "Platform"
    notice: Duration | None = None
    duration: Duration | None = None
    description: str | None = None
    lasts: Duration | None = 10.0
    start_delay: Duration = 0.5
    starts_when_approved: bool = True
    all_must_approve: bool = False
    begins_started: bool = False
    shows_started: bool = True
    new_id_at_start: bool = False


class FaultStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"for_": "for"}):
    """The endpoint misbehaves. Fields mean what they mean for ``Simulator.fault``."""

    kind: FaultKind
    vms: _Names = ()
    """By default all."""
    on: FaultScope = "any"
    for_: Duration | None = None
    count: Annotated[int | None, Meta(ge=1)] = None
    status: Annotated[int, Meta(ge=100, le=599)] = 500
    delay: Duration = 1.0
    size_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 64 * 1024 * 1024
    takes_effect: bool = False


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the timeline: a time and exactly one thing to do."""

    at: Duration
    event: EventStep | None = None
    approve: Name | None = None
    """Somebody else approves the event of this name."""
    cancel: Name | None = None
    start: Name | None = None
    end: Name | None = None
    fault: FaultStep | None = None
    clear_faults: bool = False
    reset_incarnation: Annotated[int | None, Meta(ge=0)] = None

    def __post_init__(self) -> None:
        actions = [
            name
            for name in self.__struct_fields__
            if name != "at" and getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(actions) != 1:
            choices = ", ".join(name for name in self.__struct_fields__ if name != "at")
            found = " and ".join(actions) or "none"
            raise ValueError(f"expected exactly one of {choices}; got {found}")

    @property
    def named(self) -> tuple[str, str] | None:
        """The action and the name of the event it speaks of, if it does of one."""
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
    """By default, when everything is over."""


def parse_scenario(text: str | bytes, name: str) -> Scenario:
    """Read a scenario; raises SimulatorError (kind ``config``), a line for each thing that is wrong with it."""
    parsed = typed_yaml.parse(text, Scenario, name)
    problems = parsed.problems
    if parsed.draft is not None:
        wrong = {problem.path.partition(".")[0].partition("[")[0] for problem in problems}
        mistakes = parsed.gather(_mistakes(parsed.draft, wrong))
        problems = tuple(sorted((*problems, *mistakes), key=lambda problem: problem.line))
    if problems or parsed.value is None:
        raise SimulatorError("\n".join(map(str, problems)), kind="config")
    return parsed.value


def load_scenario(name: str) -> Scenario:
    """The scenario of a file, or the shipped one of that name."""
    shipped = resources.files(__package__) / "scenarios" / f"{name}.yaml"
    path = Path(name)
    try:
        if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
            if len(text) > _MAX_FILE_BYTES:
                raise SimulatorError(
                    f"{name}: expected at most {_MAX_FILE_BYTES // 1024} KiB; it is larger", kind="config"
                )
            return parse_scenario(text, name)
        if shipped.is_file():
            return parse_scenario(shipped.read_text(encoding="utf-8"), f"{name}.yaml")
    except (OSError, ValueError) as error:  # ValueError: no path at all
        reason = getattr(error, "strerror", None) or error
        raise SimulatorError(f"cannot read the scenario {name}: {reason}", kind="usage") from error
    names = tuple(list_scenarios())
    guess = typed_yaml.nearest(name, names)
    hint = f'perhaps "{guess}" is meant' if guess else f"there are {', '.join(names)}"
    raise SimulatorError(
        f'no scenario is called "{name}": {hint}; a file of your own is given by its path, ending in .yaml',
        kind="usage",
    )


def list_scenarios() -> dict[str, str]:
    """Names of the shipped scenarios and what each shows: the comment in its first line."""
    found = {}
    for item in (resources.files(__package__) / "scenarios").iterdir():
        if item.name.endswith(".yaml"):
            first_line = item.read_text(encoding="utf-8").partition("\n")[0]
            found[item.name.removesuffix(".yaml")] = first_line.lstrip("# ").strip()
    return dict(sorted(found.items()))


def rename_vms(scenario: Scenario, names: tuple[str, ...]) -> Scenario:
    """The same scenario with its first VMs called by other names, such as that of a real machine."""
    if len(names) > len(scenario.vms):
        count = len(scenario.vms)
        raise SimulatorError(f"--vm: the scenario has {count} VMs; got {len(names)} names", kind="usage")
    new = dict(zip(scenario.vms, names, strict=False))
    vms = tuple(new.get(vm, vm) for vm in scenario.vms)
    if len(set(vms)) < len(vms):
        raise SimulatorError(f"--vm: two VMs would be called the same: {', '.join(vms)}", kind="usage")

    def renamed(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new.get(vm, vm) for vm in old)

    replace = msgspec.structs.replace
    steps = []
    for step in scenario.timeline:
        event = step.event and replace(step.event, vms=renamed(step.event.vms))
        fault = step.fault and replace(step.fault, vms=renamed(step.fault.vms))
        steps.append(replace(step, event=event, fault=fault))
    vm_ids = {new.get(vm, vm): vm_id for vm, vm_id in scenario.vm_ids.items()}
    return replace(scenario, vms=vms, vm_ids=vm_ids, timeline=tuple(steps))


def _mistakes(scenario: Scenario, wrong: Collection[str]) -> Iterator[tuple[str, str]]:
    """What the types alone cannot tell: path and message of each.

    ``wrong``: the keys of which parts could not be read, "" if a key could not. Names may be missing because of
    that, so none is called unknown that may have stood there.
    """
    has_all_vms = not any(key in wrong for key in ("", "vms", "others"))
    has_all_events = not any(key in wrong for key in ("", "timeline"))
    with_port, named = set(scenario.vms), {*scenario.vms, *scenario.others}
    known_vms = _some(dict.fromkeys((*scenario.vms, *scenario.others)))
    first_at = {vm: index for index, vm in reversed(list(enumerate(scenario.vms)))}
    for index, vm in enumerate(scenario.vms):
        if first_at[vm] != index:
            yield f"vms[{index}]", f'"{vm}" is listed twice'
    for vm in scenario.vm_ids:
        if has_all_vms and vm not in with_port:
            yield f"vm_ids.{vm}", f'expected a VM of this scenario ({known_vms}); got "{vm}"'
    announced: dict[str, float] = {}
    for index, step in enumerate(scenario.timeline):
        if step.event and step.event.name:
            if step.event.name in announced:
                yield f"timeline[{index}].event.name", f'"{step.event.name}" is used twice'
            announced[step.event.name] = step.at
    names = _some(announced) or "none has a name"
    for index, step in enumerate(scenario.timeline):
        where = f"timeline[{index}]"
        for key, vms in (("event", step.event and step.event.vms), ("fault", step.fault and step.fault.vms)):
            for vm in vms or ():
                if has_all_vms and vm not in (with_port if key == "fault" else named):
                    yield f"{where}.{key}.vms", f'expected a VM of this scenario ({known_vms}); got "{vm}"'
        if step.named:
            action, name = step.named
            if name not in announced:
                if has_all_events:
                    yield f"{where}.{action}", f'expected the name of an event ({names}); got "{name}"'
            elif announced[name] > step.at:
                yield f"{where}.{action}", f'"{name}" is announced only later'


def _some(names: Iterable[str]) -> str:
    """The first names of a list for people."""
    shown = list(islice(names, 21))
    return ", ".join([*shown[:20], "..."] if len(shown) > 20 else shown)

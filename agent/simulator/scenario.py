"""Scenarios: what happens to which VMs when, read from YAML.

Owns the grammar of scenario files and the ones that ship with the agent. Knows nothing of HTTP and keeps no
state. Every name in a scenario that was read is known, so it can be played.
"""

from collections.abc import Collection, Iterable, Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agent import typed_yaml
from agent.simulator.azure import Duration, Name, Plan, SimulatorError
from agent.simulator.faults import Fault

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
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return parse_scenario(read_file(name, "scenario", _MAX_FILE_BYTES), name)
    names = tuple(list_scenarios())
    if name in names:
        text = (resources.files(__package__) / "scenarios" / f"{name}.yaml").read_text(encoding="utf-8")
        return parse_scenario(text, f"{name}.yaml")
    guess = typed_yaml.nearest(name, names)
    hint = f'perhaps "{guess}" is meant' if guess else f"there are {', '.join(names)}"
    raise SimulatorError(
        f'no scenario is called "{name}": {hint}; a file of your own is given by its path, ending in .yaml',
        kind="usage",
    )


def read_file(name: str, what: str, max_bytes: int) -> bytes:
    """The content of a user's file; raises SimulatorError."""
    try:
        with Path(name).open("rb") as file:
            text = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: no path at all
        reason = getattr(error, "strerror", None) or error
        raise SimulatorError(f"cannot read the {what} {name}: {reason}", kind="usage") from error
    if len(text) > max_bytes:
        raise SimulatorError(f"{name}: expected at most {max_bytes >> 10} KiB; it is larger", kind="config")
    return text


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

    ``wrong``: the keys of which parts could not be read, "" if a key could not. Their names are not known, so
    no name that may be one of them is called unknown.
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

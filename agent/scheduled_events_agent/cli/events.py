"""``events``: what Azure says now, and beside each event what the agent makes of it."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime

from scheduled_events_agent import host
from scheduled_events_agent.api_version import ask_best, versions_to_ask
from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.operator import find_agent
from scheduled_events_agent.cli.status import event_rows, head
from scheduled_events_agent.cli.terminal import FIRST_ANSWER_IS_SLOW, Row, Terminal, print_json, remark_if_slow
from scheduled_events_agent.events import ApiVersion, Document, parse_document
from scheduled_events_agent.imds import ImdsClient, connect
from scheduled_events_agent.settings import Settings, find_config, load_settings, state_dir_of
from scheduled_events_agent.spelling import plural
from scheduled_events_agent.status import CurrentEvent, CurrentEvents, ShownWorkflow, Vm
from scheduled_events_agent.status.messages import activity, as_shown
from scheduled_events_agent.store import Store, StoreError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``events``."""
    parser.description = (
        "Asks the metadata service for the document and shows its events; beside each, what the agent makes of it "
        "if its state file can be read."
    )
    parser.add_argument(
        "--vm", metavar="NAME", help="this VM's name in Resources (default: as the agent knows it)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_state_options(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    events = _look(arguments)
    if arguments.json:
        print_json(events)
    else:
        print(*_in_words(events, Terminal.of(sys.stdout)), sep="\n")
    return 0


def _look(arguments: argparse.Namespace) -> CurrentEvents:
    """Azure's document, and what the state file says of its events. Raises AgentError."""
    settings = load_settings(find_config(arguments.config, host.default_config_path()))
    state_dir = state_dir_of(settings, arguments.state_dir)
    has_agent = find_agent(state_dir) is not None
    document, client = fetch_document(settings, is_first=not has_agent)
    workflows: dict[str, ShownWorkflow] = {}
    known_name = vm_id = problem = ""
    try:
        with closing(Store.look_into(state_dir)) as store:
            known_name = store.load_fact("vm_name")
            vm_id = store.load_fact("vm_id")
            workflows = {w.event.key: as_shown(w) for w in store.load_workflows() if not w.is_over}
    except StoreError as error:
        problem = str(error)
    name = arguments.vm or settings.vm.name or known_name or client.fetch_identity().name
    names = tuple(filter(None, (name, *settings.vm.aliases)))
    return CurrentEvents(
        at=datetime.now(UTC),
        vm=Vm(names=names, vm_id=vm_id),
        incarnation=document.incarnation,
        agent_runs=has_agent,
        problem=problem,
        events=tuple(
            CurrentEvent(event=event, affects=event.affects(names), workflow=workflows.get(event.key))
            for event in document.events
        ),
    )


def fetch_document(settings: Settings, *, is_first: bool = True) -> tuple[Document, ImdsClient]:
    """What Azure says now, in the best api-version, and the client that has asked. Raises AgentError.

    ``is_first``: perhaps nothing has asked before on this VM. Then the answer may take minutes.
    """

    def fetch(version: ApiVersion, timeout: float | None) -> tuple[bytes, ImdsClient]:
        client = connect(settings.imds, version, may_switch_on=is_first, timeout=timeout)
        return client.fetch(), client

    with remark_if_slow(FIRST_ANSWER_IS_SLOW):
        body, client = ask_best(versions_to_ask(settings.imds.api_version, settings.rules), fetch).content
        return parse_document(body), client


def _in_words(seen: CurrentEvents, terminal: Terminal) -> Iterator[str]:
    events = plural(len(seen.events), "event") if seen.events else "no event"
    names = " or ".join(seen.vm.names) or "a VM whose name is not known"
    yield from terminal.line(
        f"{events} in document {seen.incarnation or '(no number)'}, seen from {names}", "bold"
    )
    if seen.problem and seen.events:
        yield from terminal.line(f"What the agent makes of them is not known: {seen.problem}", "dim")
    elif not seen.agent_runs:
        yield from terminal.line("No agent runs: the lines about it show what it wrote last", "red")
    for item in seen.events:
        yield ""
        yield from terminal.line(head(item.event, item.event.id, seen.at), "bold")
        yield from terminal.rows([*event_rows(item.event, item.affects), *_agent_rows(item, seen)])


def _agent_rows(item: CurrentEvent, seen: CurrentEvents) -> Iterator[Row]:
    workflow = item.workflow
    if workflow is not None:
        rule = f"rule {workflow.decision.rule}" if workflow.decision.rule else "no rule takes it"
        doing = activity(workflow, (), seen.at)
        yield Row("agent", f"{rule}; {doing}", "cyan" if seen.agent_runs else "")
    elif seen.vm.names and item.affects == "others":
        yield Row("agent", "only counts it: it names other VMs only")
    elif not seen.problem:
        yield Row("agent", "has not seen it (yet)" if seen.agent_runs else "had not seen it", "yellow")

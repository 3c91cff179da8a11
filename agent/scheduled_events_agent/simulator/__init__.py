"""A simulated Scheduled Events endpoint, for demos, users' tests and ours.

    azure.py       PURE   the lifecycle of events: plans and the time in, documents out
    protocol.py    PURE   the metadata service's answers: headers, api-versions, error bodies
    faults.py      PURE   faults that are simulated, and the request limit
    scenario.py           scenario files: YAML -> frozen values
    recording.py          recordings of real documents, and how they are played
    service.py     PURE   one set of VMs: events, answers and faults, moved by a scenario
    server.py      EDGE   one HTTP port per VM
    recorder.py    EDGE   asks a real endpoint and writes a recording
    simulation.py  SHELL  the service and its ports under one lock and one clock; waiting
    table.py       EDGE   a table in memory, for the agents of a fleet
    control.py     SHELL  a port with JSON and a page (control.html), to schedule events and faults manually
    testing.py     SHELL  a pytest plugin: a simulator and the real agent, for tests of policies and hooks

It shares no code with the agent's parser of the protocol. So each checks the other.
"""

from scheduled_events_agent.simulator.azure import LogEntry, Plan, SimulatedEvent, SimulatorError
from scheduled_events_agent.simulator.faults import Fault
from scheduled_events_agent.simulator.protocol import RequestRecord, VirtualMachine
from scheduled_events_agent.simulator.scenario import (
    Scenario,
    list_scenarios,
    load_scenario,
    parse_scenario,
    rename_vms,
)
from scheduled_events_agent.simulator.simulation import Simulator

__all__ = [
    "Fault",
    "LogEntry",
    "Plan",
    "RequestRecord",
    "Scenario",
    "SimulatedEvent",
    "Simulator",
    "SimulatorError",
    "VirtualMachine",
    "list_scenarios",
    "load_scenario",
    "parse_scenario",
    "rename_vms",
]

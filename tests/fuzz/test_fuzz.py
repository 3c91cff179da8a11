"""A few thousand of the million inputs, the same in every run; ``python tests/fuzz/fuzz.py`` gives the rest."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fuzz import Fault, fuzz, fuzz_target, main, shares_of
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import STORY_BREAK, THIS_PORT, corpus, make_input
from targets import TARGETS, Target, request_of, tls_file

from scheduled_events_agent import AgentError
from scheduled_events_agent.host.dhcp import parse_lease, parse_windows_options
from scheduled_events_agent.imds.document import parse_document
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.simulator import Simulator, SimulatorError, parse_scenario
from scheduled_events_agent.simulator.control import Control
from scheduled_events_agent.simulator.recording import parse_recording
from scheduled_events_agent.web.tls import load_web_config

ROOT = Path(__file__).parents[2]
INPUTS = int(os.environ.get("FUZZ_INPUTS", "6000"))
"""The inputs of all targets together."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_is_survived(target: str) -> None:
    report = fuzz_target(target, 0, shares_of(INPUTS)[target])
    assert [str(fault) for fault in report.faults] == []


@pytest.mark.parametrize("target", TARGETS)
def test_every_fuzz_seed_text_is_survived(target: str) -> None:
    for text in corpus(target):
        TARGETS[target].check(text)


@pytest.mark.hypothesis
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "web"])
def test_any_bytes_are_survived(target: str) -> None:
    @settings(database=None)
    @given(st.binary())
    def check(data: bytes) -> None:
        TARGETS[target].check(data)

    check()


def test_a_seed_makes_the_same_input_in_every_process() -> None:
    code = (
        "import inputs, zlib\n"
        "print([zlib.crc32(inputs.make_input(target, seed)) for target in inputs._SOURCES for seed in range(40)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0]


def test_the_fuzz_corpus_is_valid() -> None:
    warnings = [parse_settings(text, "f.yaml").warnings for text in corpus("policy")]
    # One example listens on all addresses, for the probe of a load balancer.
    assert {warning.path for found in warnings for warning in found} <= {"agent.listen"}
    assert len(warnings) > 2
    assert all(parse_scenario(text.decode(), "f.yaml").timeline for text in corpus("scenario"))
    assert all(parse_recording(text, "r.jsonl").documents for text in corpus("recording"))
    assert len(corpus("recording")) > 10
    assert parse_lease(corpus("lease")[1].decode()) == "168.63.129.16"
    assert parse_windows_options(corpus("registry")[0]) == "168.63.129.16"


@pytest.mark.parametrize(
    ("target", "least"),
    [("policy", 0.1), ("scenario", 0.1), ("document", 0.2), ("tls", 0.1), ("recording", 0.2), ("control", 0.2)],
)
def test_many_generated_inputs_are_accepted_and_not_only_rejected(target: str, least: float) -> None:
    count = 500
    read = 0
    for seed in range(count):
        data = make_input(target, seed)
        try:
            READERS[target](data)
        except AgentError:
            continue
        read += 1
    assert read >= count * least


def read_tls(data: bytes) -> None:
    file = tls_file()
    file.write_bytes(data)
    load_web_config(file)


def read_control(data: bytes) -> None:
    """Whether all that is asked for first is done."""
    with (
        closing(Simulator(("vm-1", "vm-2"), others=("vm-3",))) as simulator,
        closing(Control(simulator)) as control,
    ):
        first = data.replace(THIS_PORT, str(control.port).encode()).partition(STORY_BREAK)[0]
        answer = control.answer(request_of(first))
        if answer.status != 200:
            raise SimulatorError(answer.body.decode(), kind="refused")


READERS: dict[str, Callable[[bytes], object]] = {
    "policy": lambda data: parse_settings(data, "f.yaml"),
    "scenario": lambda data: parse_scenario(data.decode(errors="replace"), "f.yaml"),
    "document": parse_document,
    "tls": read_tls,
    "recording": lambda data: parse_recording(data, "r.jsonl"),
    "control": read_control,
}


def refuse_b(data: bytes) -> None:
    if data.count(b"b") % 2:
        raise ZeroDivisionError("there is a b")


def test_a_bug_is_reported_with_its_input_and_a_command_to_reproduce_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TARGETS, "lease", Target(refuse_b, 1))
    report = fuzz_target("lease", 0, 1000)
    assert 0 < len(report.faults) <= 10
    fault = report.faults[0]
    data = make_input("lease", fault.seed)
    assert data.count(b"b") % 2 == 1
    lines = str(fault).splitlines()
    assert lines[0].startswith(f"FAULT lease, seed {fault.seed}, {len(data)} bytes: {repr(data[:20])[:-1]}")
    assert lines[-1] == f"again: python tests/fuzz/fuzz.py --replay lease:{fault.seed}"
    assert "ZeroDivisionError: there is a b" in lines
    assert main(["--replay", f"lease:{fault.seed}"]) == 1
    assert "ZeroDivisionError: there is a b" in capsys.readouterr().err


def test_an_input_that_leaks_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytearray] = []
    monkeypatch.setitem(TARGETS, "lease", Target(lambda data: kept.append(bytearray(100_000 + len(data))), 1))
    (fault,) = fuzz_target("lease", 0, 2000).faults
    assert fault.text.startswith("memory grew by ")


def test_the_command_runs_all_targets_and_says_what_they_did(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "100", "--seed", "77"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[:-1]) == sorted(TARGETS)
    assert lines[-1].startswith("100 inputs in ")
    assert lines[-1].endswith(" s, 0 faults")


def test_a_crashed_process_is_reported_with_its_input(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fuzz._work", die_at_the_third)
    (report,) = fuzz({"lease": 5}, 40, 1)
    assert report.faults == (Fault("lease", 42, "the process hangs or died, with exit code 7"),)
    assert capfd.readouterr().out.splitlines()[-1] == "again: python tests/fuzz/fuzz.py --replay lease:42"


def die_at_the_third(target: str, first: int, count: int, at: Any, results: Any) -> None:
    assert (target, count) == ("lease", 5)
    at.value = first + 2
    results.close()
    os._exit(7)

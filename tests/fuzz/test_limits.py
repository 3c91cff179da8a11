"""Inputs at the limits: nested, repeated, huge or slow inputs cost little and are reported in a few lines.

Times are of the processor, and limits are what a machine under load keeps. Before these faults were
corrected, each of them took minutes, or all the memory there was.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scheduled_events_agent.host.dhcp import parse_lease
from scheduled_events_agent.imds.compare import Missing, Seen, compare
from scheduled_events_agent.imds.document import MAX_EVENTS, ScheduledEvent, parse_document
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy import MatchContext, Rule, When, decide
from scheduled_events_agent.policy.load import ConfigError, parse_settings
from scheduled_events_agent.simulator import SimulatorError, load_scenario, parse_scenario

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """Fifteen seconds of the processor, and 256 MiB beside what the process has already."""
    if sys.platform == "win32":
        yield
        return
    import resource

    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size() + 256 * MIB, before[1]))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - began < 15


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, "p.yaml")
    return [*map(str, caught.value.problems)]


def mistakes(text: str) -> list[str]:
    with pytest.raises(SimulatorError) as caught:
        parse_scenario(text, "s.yaml")
    return str(caught.value).split("\n")


# --- documents


def test_one_event_listed_twice_with_very_many_resources_is_merged_quickly() -> None:
    count = 60_000
    events = [{"EventId": "a", "Resources": [f"{letter}{number}" for number in range(count)]} for letter in "xyx"]
    (event,) = parse_document(json.dumps({"Events": events}).encode()).events
    assert event.resources == tuple(f"{letter}{number}" for letter in "xy" for number in range(count))


def test_one_event_listed_very_often_is_merged_quickly() -> None:
    events = [{"EventId": "a", "Resources": [f"{number}-{n}" for n in range(100)]} for number in range(MAX_EVENTS)]
    (event,) = parse_document(json.dumps({"Events": events}).encode()).events
    assert len(event.resources) == 100 * MAX_EVENTS


def test_very_many_simultaneous_renames_are_found_quickly() -> None:
    count = MAX_EVENTS
    old = {f"old-{n}": scheduled(f"old-{n}", str(n)) for n in range(count)}
    started = [
        {"EventId": f"new-{n}", "EventStatus": "Started", "EventType": "Freeze", "Resources": [str(n)]}
        for n in range(count)
    ]
    document = parse_document(json.dumps({"Events": started}).encode())
    assert compare(old, document) == [Seen(event, f"old-{n}") for n, event in enumerate(document.events)]


def test_among_similar_events_the_first_ones_are_renamed_first() -> None:
    known = {key: scheduled(key, "vm-1") for key in ("a", "b", "c")}
    started = [
        {"EventId": key, "EventStatus": "Started", "EventType": "Freeze", "Resources": ["vm-1"]} for key in "xy"
    ]
    document = parse_document(json.dumps({"Events": started}).encode())
    one, two = document.events
    assert compare(known, document) == [Seen(one, "a"), Seen(two, "b"), Missing("c")]


def scheduled(event_id: str, resource: str) -> ScheduledEvent:
    return ScheduledEvent(id=event_id, type="Freeze", status="Scheduled", resources=(resource,))


@pytest.mark.parametrize(
    "text",
    [
        b'{"Events":' + b"[" * 4_000_000,
        b'{"Events":' + b'{"Events":' * 400_000,
        b'{"Events":[' + b"9" * 4_000_000 + b"]}",
        b'{"Events":[{"EventId":' + b"9" * 5000 + b"}]}",
        b'{"Events":[{"DurationInSeconds":NaN}]}',
        b'{"Events":[{"DurationInSeconds":1e999}]}',
        b'{"Events":[{"EventId":"\\ud800"}]}',
        b'{"Events":[{"EventId":"\xed\xa0\x80"}]}',
        b'{"Events":[{"EventId":"\xff"}]}',
        b'{"Events":[{"EventId":"\x00"}]}',
        b'\xef\xbb\xbf\xef\xbb\xbf{"Events":[]}',
        '{"Events":[]}'.encode("utf-16"),
        b'{"Events":[' + b"{}," * 1_000_000,
    ],
)
def test_an_oversized_document_is_an_error_in_one_short_line(text: bytes) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1" * 310, None),
        ("1e308", None),
        ("-1e308", None),
        ("5e-324", 5e-324),
        ('"NaN"', None),
        ("18446744073709551616", None),
    ],
)
def test_a_duration_of_any_size_is_a_number_or_unknown(value: str, seconds: float | None) -> None:
    (event,) = parse_document(f'{{"Events":[{{"DurationInSeconds":{value}}}]}}'.encode()).events
    assert event.duration_seconds == seconds


KEYS = b'{"Events":[],"x":{' + b",".join(b'"k%d":"%d"' % (n, n) for n in range(299_000)) + b"}}"
WIDE = "\U0001f600".encode()


@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize(
    "text",
    [
        b'{"Events":[' + b"[]," * (8 * MIB // 3 - 10) + b"[]]}",
        b'{"Events":[{"Description":"' + WIDE + b"a" * (8 * MIB - 100) + b'"}]}',
        b'{"Events":[{"Description":"' + b"\\u4e00" * (8 * MIB // 6 - 20) + b'"}]}',
        KEYS + b" " * (8 * MIB - len(KEYS)),
        KEYS[:-1] + b',"y":"' + WIDE + b"a" * (8 * MIB - len(KEYS) - 100) + b'"}',
    ],
    ids=["lists", "wide text", "escapes", "keys", "keys and wide text"],
)
def test_a_document_of_8_mib_takes_less_than_150_mib_and_2_s_of_cpu(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "document").write_bytes(text)
    code = """
import re, sys, time
from pathlib import Path
from scheduled_events_agent.imds.document import parse_document
from scheduled_events_agent.imds.text import DocumentError

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before, began = peak(), time.process_time()
text = Path(sys.argv[1]).read_bytes()
try:
    parse_document(text)
except DocumentError:
    pass
print(peak() - before, time.process_time() - began)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "document")]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    mebibytes, seconds = map(float, done.stdout.split())
    assert mebibytes < 150
    assert seconds < 2


# --- leases


@pytest.mark.parametrize(
    "text",
    [
        "\n" * MIB,
        " \n" * (MIB // 2),
        "lease {\noption unknown-245 " + " " * MIB,
        "lease {\noption unknown-245 " + '"' * MIB,
        "lease {\n" * (MIB // 8),
        "OPTION_245=" + "a8:" * (MIB // 3),
        "OPTION_245=" + "1." * (MIB // 2),
        "option_245" + " " * MIB,
    ],
)
def test_a_lease_of_a_mebibyte_is_read_quickly(text: str) -> None:
    assert parse_lease(text) is None


# --- the policy


def test_unknown_keys_repeated_by_aliases_are_reported_at_most_100_times() -> None:
    keys = ",".join(f"k{number}: 1" for number in range(30_000))
    found = problems(f"rules:\n - &a {{{keys}}}\n" + " - *a\n" * 30_000)
    assert len(found) == 100
    known = ", ".join(Rule.__struct_fields__)
    assert found[0] == f'p.yaml:2: rules[0]: unknown key "k0"; known here: {known}'


def test_a_long_key_is_not_repeated_with_everything_below_it() -> None:
    env = ",".join(f"k{number}: x" for number in range(30_000))
    found = problems(f"hooks:\n  ? {'h' * 300_000}\n  : {{shell: x, env: {{{env}}}}}\n")
    shown = f'"{"h" * 57}..."'
    expected = "expected a text that matches ^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$ (Letters, digits, . _ -)"
    assert found == [f"p.yaml:2: hooks: the key {shown}: {expected}; got {shown}"]


@pytest.mark.parametrize(
    "text",
    [
        "rules:\n - name: a\n   when: {description: [&a '" + "(" * 300_000 + "'" + ", *a" * 100_000 + "]}\n",
        "rules:\n - name: a\n   when: {type: [&a '" + "x" * 300_000 + "'" + ", *a" * 100_000 + "]}\n",
        "rules:\n - name: a\n   prepare: [" + ",".join(f"x{n}" for n in range(20_000)) + "]\nhooks:\n"
        + "".join(f"  h{n}: {{shell: a}}\n" for n in range(20_000)),
        "rules:\n" + " - {<<: {}}\n" * 50_000,
        "rules:\n" + f" - !{'x' * 300_000} a\n" * 3,
        "on_clear: [&a !" + "x" * 300_000 + " a" + ", *a" * 100_000 + "]\n",
        "on_clear: [a" + ", a" * 99_000 + "]\nhooks: {a: {shell: x}}\n",
        "agent: {listen: " + "x" * 1_000_000 + "}\n",
        "\n".join(f"k{n}: 1" for n in range(100_000)),
    ],
    ids=["regexes", "words", "hooks", "merge keys", "tags", "tag aliases", "twins", "address", "keys"],
)  # fmt: skip
def test_very_many_and_very_long_errors_are_reported_in_few_short_lines(text: str) -> None:
    found = problems(text)
    assert 1 <= len(found) <= 101
    assert max(map(len, found)) < 1200


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules: " + "[" * 500_000, "p.yaml:1: nested more than 50 deep"),
        ("rules: " + "{a: " * 200_000, "p.yaml:1: nested more than 50 deep"),
        ("- " * 400_000, "p.yaml:1: nested more than 50 deep"),
        ("? " * 400_000, "p.yaml:1: nested more than 50 deep"),
        ("rules: &a [*a]", "p.yaml:1: rules[0]: an alias cannot be inside the value it repeats"),
        ("rules:\n\t- name: a", "p.yaml:2: a tab cannot indent: use spaces"),
        ("vm: {name: a\0}", "p.yaml:1: the character U+0000 is not allowed in YAML: remove it"),
        (b"vm: {name: \xff}", "p.yaml:1: expected UTF-8; got the byte 0xff: save the file as UTF-8"),
        ("vm: {name: a}\nvm: {name: b}", 'p.yaml:2: the key "vm" is in line 1 already'),
        ("vm: {<<: {name: a}}", "p.yaml:1: vm: merge keys (<<) cannot be used: write the keys out"),
        (
            'vm: {name: "\\ud800"}',
            "p.yaml:1: not YAML: while parsing a quoted scalar found invalid Unicode character escape code",
        ),
        ("vm: {name: \ud800}", "p.yaml:1: the character U+D800 is not allowed in YAML: remove it"),
    ],
)
def test_a_yaml_bomb_is_one_error_with_its_line(text: str | bytes, problem: str) -> None:
    assert problems(text) == [problem]


def test_nested_aliases_end_at_a_limit() -> None:
    steps = "".join(f"  k{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9))
    found = problems(f"on_clear: [&a0 x]\nhooks:\n{steps}")
    assert 1 <= len(found) <= 101
    found = problems(f"on_clear: &b [{', '.join(['x'] * 1000)}]\nrules:\n" + " - {name: a, prepare: *b}\n" * 1000)
    assert found[-1].endswith("more than 100000 values")


# --- searching descriptions


def took(pattern: str, text: str) -> float:
    """Processor seconds of a decision."""
    event = ScheduledEvent(id="A", type="Freeze", status="Scheduled", resources=("vm-1",), description=text)
    began = time.process_time()
    decide(
        [Rule(name="a", when=When(description=(pattern,)))],
        {},
        event,
        MatchContext(names=("vm-1",), not_before_seen_at=NOW),
    )
    return time.process_time() - began


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(a+)+$", 'expected no repeated group, which may take hours to search; got "(a+)+$"'),
        ("(a|aa)*!", 'expected no repeated group, which may take hours to search; got "(a|aa)*!"'),
        ("(?:a?){50}", 'expected no repeated group, which may take hours to search; got "(?:a?){50}"'),
        (
            "a*a*a*a*!",
            'expected at most 3 of *, + and {}, as more may take hours to search; got 4 in "a*a*a*a*!"',
        ),
        ("a?" * 11, f'expected at most 10 of ?, as more may take hours to search; got 11 in "{"a?" * 11}"'),
        ("a" * 1001, "expected at most 1000 characters; got 1001"),
        ("[", 'expected a regular expression; got "[": unterminated character set at position 0'),
    ],
)
def test_a_regular_expression_that_may_take_hours_is_rejected(pattern: str, problem: str) -> None:
    text = f"rules:\n  - name: a\n    when: {{description: {json.dumps(pattern)}}}\n"
    assert problems(text) == [f"p.yaml:3: rules[0].when.description: {problem}"]


@pytest.mark.parametrize(
    "pattern",
    [
        "host (update|maintenance)", ".*live.*migration.*", r"\(a\)+ [)*+{]{2,3}", "(?i:redeploy)", "a*?b", "^$",
        r"\\(x)?", r"(?P<a>x)(?P=a)", "[^]*+?]+", "vms?|hosts??",
    ],
)  # fmt: skip
def test_an_ordinary_regular_expression_is_accepted(pattern: str) -> None:
    text = f"rules:\n  - name: a\n    when: {{description: {json.dumps(pattern)}}}\n"
    assert parse_settings(text, "p.yaml").settings.rules[0].when.description == (pattern,)


@pytest.mark.parametrize("pattern", [".*a.*a!", "a*a*a*!", "a?" * 10 + "b", ".*.*.*!"])
def test_the_worst_text_for_an_accepted_expression_takes_seconds(pattern: str) -> None:
    re.compile(pattern)
    assert took(pattern, "a" * 4096) < 12


def test_only_the_beginning_of_a_description_is_searched() -> None:
    facts = MatchContext(names=("vm-1",), not_before_seen_at=NOW)
    event = ScheduledEvent(
        id="A", type="Freeze", status="Scheduled", resources=("vm-1",), description="x" * 252 + "here" + "there"
    )
    rules = [
        Rule(name="there", when=When(description=("there",))),
        Rule(name="here", when=When(description=("here",))),
    ]
    assert decide(rules, {}, event, facts).rule == "here"


def test_a_glob_takes_no_long_time_on_any_name() -> None:
    event = ScheduledEvent(id="A", type="Freeze", status="Scheduled", resources=("a" * 4096, "vm-1"))
    rules = [Rule(name="a", when=When(resource=("*a*a*a*a*a*a*a*a*b",)))]
    assert decide(rules, {}, event, MatchContext(names=("vm-1",), not_before_seen_at=NOW)).rule is None


# --- scenarios


def test_very_many_scenario_errors_are_reported_in_few_short_lines() -> None:
    vms = ",".join(f"v{number}" for number in range(30_000))
    unknown = ",".join(f"x{number}" for number in range(30_000))
    found = mistakes(f"vms: [{vms}]\ntimeline:\n - at: 0s\n   event: {{type: Freeze, vms: [{unknown}]}}\n")
    some = ", ".join(f"v{number}" for number in range(20))
    assert len(found) == 100
    assert found[0] == f's.yaml:4: timeline[0].event.vms: expected a VM of this scenario ({some}, ...); got "x0"'


def test_a_scenario_of_very_many_vms_is_read_quickly() -> None:
    assert len(parse_scenario(f"vms: [{','.join(f'v{n}' for n in range(90_000))}]", "s.yaml").vms) == 90_000


@pytest.mark.parametrize(
    "name", ["\0.yaml", "\ud800.yaml", "x" * 5000 + ".yaml", "x" * 5000, "\0", "/", ".yaml", "./"]
)
def test_an_impossible_scenario_name_is_reported(name: str) -> None:
    with pytest.raises(SimulatorError) as caught:
        load_scenario(name)
    assert caught.value.kind == "usage"

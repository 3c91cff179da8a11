"""docs/runbook.md has what a person needs whom an alert has called, and all that is to lead there does."""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from runbook_page import PARTS, SECTIONS, TITLES, codes, part
from test_prometheus_package import PACKAGE, VALUES, alerts, exposed, parse_query, recordings

from scheduled_events_agent import RUNBOOK, RUNBOOK_URL, find_runbook
from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.status import Attention
from scheduled_events_agent.status.attention import ATTENTION_KINDS, NO_AGENT

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "https://agent.invalid/runbook.md"
MOST_WORDS = 130
MOST_WORDS_OF_A_DESCRIPTION = 30
# Commands that are not the agent's, by how they begin.
OTHERS = (
    *(f"sudo systemctl {verb} scheduled-events-agent" for verb in ("reload", "restart", "start", "status")),
    "sudo systemctl daemon-reload",
    "sudo journalctl -u scheduled-events-agent ", "sudo journalctl -k",
    "sudo df -h /var/lib/scheduled-events-agent", "sudo fuser -v /var/lib/scheduled-events-agent/state.db",
    "systemctl status azure-proxy-agent", "sudo ss -ltnp", "sudo ss -tanp dst 169.254.169.254",
)  # fmt: skip
ON_WINDOWS = {
    "sudo systemctl reload scheduled-events-agent": "scheduled-events-agent service reload",
    "sudo systemctl start scheduled-events-agent": "scheduled-events-agent service start",
    "sudo journalctl -u scheduled-events-agent ": "Get-Content -Tail 50 ",
    "systemctl status azure-proxy-agent": "sc.exe query GuestProxyAgent",
}


def test_each_alert_and_each_kind_of_attention_has_its_section_and_nothing_else_has_one() -> None:
    assert [*alerts(), *ATTENTION_KINDS] == TITLES


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_the_five_parts_in_order_and_few_words(name: str) -> None:
    text = SECTIONS[name]
    assert re.findall(r"^\*\*([^*]+):\*\*", text, re.MULTILINE) == PARTS
    assert text.startswith("**Meaning:**")
    assert all(part(name, one) for one in PARTS)
    assert len(text.split()) <= MOST_WORDS


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 421, 429, 500, 503])
def test_each_status_of_a_failed_poll_has_a_line(status: int) -> None:
    lines = re.findall(r"^- ([^:]+):", part("ScheduledEventsPollingStale", "Mitigation"), re.MULTILINE)
    assert any(str(status) in re.findall(r"\d+", line) for line in lines)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_to_look_at_and_what_to_do_without_a_login(name: str) -> None:
    looks = re.findall(r"^- (.+)$", part(name, "Diagnosis"), re.MULTILINE)
    assert looks
    assert all("`" in look and ": " in look for look in looks)  # a command or a page, and what is to be seen there
    *_, last = re.findall(r"^- (.+)$", part(name, "Mitigation"), re.MULTILINE)
    assert last.startswith("No login: ")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_command_is_one_and_is_there_for_both_systems(name: str) -> None:
    parser = build_parser()
    commands = [code for code in codes(SECTIONS[name]) if re.match(r"sudo |scheduled-events-agent ", code)]
    for command in commands:
        ours = command.removeprefix("sudo ").partition("scheduled-events-agent ")
        if ours[0]:
            assert command.startswith(OTHERS)
            continue
        words = shlex.split(ours[2])
        parser.parse_args(words)  # exits, and so fails, on what it does not know
        assert command.startswith("sudo ") != (words[0] == "service")  # which only Windows has
    for linux, windows in ON_WINDOWS.items():
        shown = [code for code in codes(SECTIONS[name]) if code.startswith(linux)]
        assert len([code for code in codes(SECTIONS[name]) if code.startswith(windows)]) >= len(shown)


def metrics_of(expression: str) -> Iterator[str]:
    """The metrics of the agent in an expression, those behind recorded series too."""
    for metric, _ in parse_query(expression).selectors:
        yield from metrics_of(recordings()[metric]) if metric in recordings() else (metric,)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_metric_is_one_and_is_that_of_the_alert(name: str) -> None:
    known = exposed(has_fleet=True)
    queries = [code for code in codes(SECTIONS[name]) if re.match(r"(scheduled_events_\w+|up)\b(?!\.)", code)]
    for query in queries:
        for metric, labels in parse_query(query).selectors:
            assert metric in known
            assert labels.keys() <= known[metric].keys() | {"job"}
            assert all({*values} <= VALUES[label] for label, values in labels.items())
    resolved = [code for code in codes(part(name, "Resolved when")) if code in queries]
    if name in ATTENTION_KINDS:
        assert resolved[0] == f'scheduled_events_attention{{kind="{name}"}}'
    else:
        assert resolved
        assert {*metrics_of(" or ".join(resolved))} <= {*metrics_of(alerts()[name]["expr"])}


def test_the_kinds_that_an_alert_counts_are_linked_in_its_section() -> None:
    for name, rule in alerts().items():
        before = rule["expr"].partition("unless")[0]
        kinds = [kind for _, labels in parse_query(before).selectors for kind in labels.get("kind", ())]
        assert [kind for kind in kinds if f"(#{kind})" not in part(name, "Mitigation")] == []


@pytest.mark.parametrize(
    "reason",
    [
        NO_AGENT,
        "the agent (pid 17) does not answer",
        "Azure's metadata service has not answered since 2026-04-11 22:12:00 UTC: timeout",
        "the engine has run no cycle for more than 20s",
        "the poller has sent no heartbeat for more than 20s",
        "what is pending cannot be handled: a bug in the agent (KeyError); see the log",
        "the metadata service has not said since the boot which VM this is: no event is acted on",
        "the web server is not listening: its port is taken",
    ],
)
def test_the_section_of_an_agent_that_is_not_healthy_has_each_reason(reason: str) -> None:
    found = re.findall(r'"([^"]+)"', part("unhealthy", "Mitigation"))
    assert [text for text in found if text.lower() in reason.lower()] != []


def test_agent_project_and_alerts_have_the_same_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]["Runbook"] == RUNBOOK_URL
    assert RUNBOOK_URL.endswith("/docs/runbook.md")
    # GitHub's anchor of a heading of one word is the word in lower case.
    assert {name: rule["annotations"]["runbook_url"] for name, rule in alerts().items()} == {
        name: f"{RUNBOOK_URL}#{name.lower()}" for name in alerts()
    }


def test_the_agent_leads_to_the_page_on_the_machine_as_long_as_the_address_is_a_placeholder() -> None:
    package = ROOT / "agent/scheduled_events_agent"
    assert find_runbook(RUNBOOK_URL, package) == RUNBOOK
    assert find_runbook(PLACEHOLDER, package) == str(ROOT / "docs/runbook.md")
    assert find_runbook("https://agent.example.com/runbook", package) == "https://agent.example.com/runbook"
    for kind in ATTENTION_KINDS:
        assert Attention(kind=kind, severity="act", since=None, message="").runbook == f"{RUNBOOK}#{kind}"


def test_what_the_agent_shows_and_sends_leads_to_no_placeholder() -> None:
    assert ".invalid" not in RUNBOOK
    shown = [*(ROOT / "agent").rglob("*.*"), *(ROOT / "systemd").iterdir(), ROOT / "packaging/manual-sections.man"]
    shown += [
        *(ROOT / "config").glob("*.*"),
        *(ROOT / "config/examples").iterdir(),
        *(ROOT / "config/hooks").iterdir(),
    ]
    named = {
        line
        for path in shown
        if path.is_file() and "__pycache__" not in path.parts
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"\w\.invalid\b", line)
    }
    assert named <= {f'RUNBOOK_URL = "{RUNBOOK_URL}"'}


@pytest.mark.parametrize(
    ("package", "page"),
    [
        ("usr/lib/scheduled-events-agent", "usr"),  # deb, rpm
        ("opt/venv/lib/python3.13/site-packages", "opt/venv"),  # wheel, image
        ("home/x/.local/lib/python3.13/site-packages", "home/x/.local"),
        ("Program Files/Scheduled Events Agent/lib", "Program Files/Scheduled Events Agent"),  # MSI
    ],
)
def test_the_page_of_each_kind_of_installation_is_found(tmp_path: Path, package: str, page: str) -> None:
    code = tmp_path / package / "scheduled_events_agent"
    code.mkdir(parents=True)
    assert find_runbook(PLACEHOLDER, code) == "runbook.md"  # there is none: at least its name
    installed = tmp_path / page / "share/scheduled-events-agent/runbook.md"
    installed.parent.mkdir(parents=True)
    installed.touch()
    assert find_runbook(PLACEHOLDER, code) == str(installed)


def test_a_description_of_an_alert_is_short() -> None:
    for name, rule in alerts().items():
        shown = re.sub(
            r"\{\{ (?:\$labels\.\w+|\.[\w.]+|humanizeDuration [^}]*) \}\}", "X", rule["annotations"]["description"]
        )
        words = re.sub(r"\{\{.*?\}\}", " ", shown).split()  # of all branches together
        assert len(words) <= MOST_WORDS_OF_A_DESCRIPTION, name


@pytest.mark.skipif(shutil.which("sed") is None, reason="there is no sed")
def test_the_documented_line_leads_the_alerts_to_a_copy_of_the_page(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\$ (sed .+)$", (PACKAGE / "README.md").read_text("utf-8"), re.MULTILINE)
    for file in ("rules.yaml", "rules.test.yaml"):
        shutil.copy(PACKAGE / file, tmp_path)
    subprocess.run(shlex.split(line), cwd=tmp_path, check=True)
    (group,) = yaml.safe_load((tmp_path / "rules.yaml").read_text("utf-8"))["groups"]
    led = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in group["rules"] if "alert" in rule}
    assert led == {name: f"https://wiki.example.com/runbook#{name.lower()}" for name in alerts()}
    assert RUNBOOK_URL not in (tmp_path / "rules.test.yaml").read_text("utf-8")

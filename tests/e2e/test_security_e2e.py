"""The agent beside untrusted processes: the input of hooks, the agent's files, and the effect of hostile texts."""

import http.client
import json
import os
import re
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import CHECKOUT, Agent, Endpoint, MakeAgent, Simulator, document

from scheduled_events_agent.imds.document import parse_document

if sys.platform == "win32":
    pytest.skip("environment, descriptors and modes as Linux has them", allow_module_level=True)

SECRET = "correct-horse-battery-staple"
DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="without root, it is a warning")


def script(directory: Path, text: str) -> list[str]:
    """A hook of the tests' own."""
    path = directory / "script.sh"
    path.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
    path.chmod(0o755)
    return [str(path)]


# --- what hooks get


def ignored_here() -> int:
    """The signals that this process ignores, by what started it; nohup is one such."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("SigIgn:")[2].split()[0], 16)


def test_a_hook_gets_nothing_of_the_agents_environment_nor_of_its_open_files(
    sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    names = (
        "AWS_SECRET_ACCESS_KEY AZURE_CLIENT_SECRET KUBECONFIG LD_LIBRARY_PATH PYTHONPATH PYTHONSTARTUP BASH_ENV "
        "NOTIFY_SOCKET INVOCATION_ID JOURNAL_STREAM http_proxy HTTPS_PROXY NO_PROXY SSH_AUTH_SOCK SUDO_USER HOME "
        "SHELL SCHEDULED_EVENTS_AGENT_CONFIG GCONV_PATH GLIBC_TUNABLES SSL_CERT_FILE XDG_RUNTIME_DIR ENV IFS"
    )
    agent.environment = {name: f"{os.environ.get(name, '')}:/{SECRET}" for name in names.split()}
    agent.environment |= {"TZ": "UTC", "LISTEN_FDS": SECRET, "CREDENTIALS_DIRECTORY": str(tmp_path)}
    seen = tmp_path / "seen"
    code = (
        "import os, json\n"
        "def target(fd):\n"
        "    try: return os.readlink(f'/proc/self/fd/{fd}')\n"
        "    except FileNotFoundError: return None\n"  # that of the list itself
        "files = {fd: target(fd) for fd in os.listdir('/proc/self/fd')}\n"
        "signals = [line.split() for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn'))]\n"
        f"json.dump([dict(os.environ), files, signals], open({str(seen)!r}, 'w'))\n"
    )
    drain = {"run": [sys.executable, "-I", "-S", "-c", code]}
    agent.write_policy(rules=[DRAIN], hooks={"drain": drain, **agent.hooks("resume")})
    agent.start()
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=60))

    environment, files, signals = json.loads(seen.read_text())
    events = {name for name in environment if name.startswith("SCHEDULED_EVENT_")}
    assert len(events) == 14
    # Variables of this test run about language, and those of its pod, are passed on.
    passed_on = {name for name in os.environ if name.startswith(("LANG", "LC_", "TMPDIR", "KUBERNETES_"))}
    account = {"HOME", "USER", "LOGNAME", "SHELL"}
    assert environment.keys() - events - passed_on - account == {
        "PATH", "TZ", "CREDENTIALS_DIRECTORY", "SCHEDULED_EVENTS_AGENT_HOOK_RUN",
    }  # fmt: skip
    assert [name for name, value in environment.items() if SECRET in value] == []
    opened = {int(number): name for number, name in files.items() if name is not None}
    assert opened.keys() == {0, 1, 2}
    assert opened[0] == "/memfd:stdin (deleted)"
    assert opened[1] == opened[2]
    assert opened[1].startswith("pipe:")
    blocked, ignored = (int(value, 16) for _, value in signals)
    assert blocked == 0
    # Python itself ignores SIGPIPE and SIGXFSZ; this test run may have been started with others ignored.
    assert ignored & ~(1 << 12 | 1 << 24 | ignored_here()) == 0


# --- what is left behind


def documented_modes() -> dict[str, int]:
    """The list in docs/security.md: a pattern of names in the state directory, and their mode."""
    text = (CHECKOUT / "docs" / "security.md").read_text(encoding="utf-8")
    return {name: int(mode, 8) for name, mode in re.findall(r"^- `(STATE\S*)` \((\d{4})\)", text, re.MULTILINE)}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_whatever_the_umask_the_files_have_the_documented_modes(
    sim: Simulator, make_agent: MakeAgent, umask: int
) -> None:
    agent = make_agent(sim.endpoint())
    agent.state_dir = agent.directory / "made" / "on the way" / "state"
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    before = set(agent.directory.rglob("*"))
    old = os.umask(umask)
    try:
        agent.start()
        sim.wait_approved(sim.schedule("Reboot", notice_seconds=60))
        agent.kill()
        (agent.state_dir / "state.db").write_bytes(b"no database any more" * 1000)
        for name in ("state.db-wal", "state.db-shm"):
            (agent.state_dir / name).unlink(missing_ok=True)
        agent.start()
    finally:
        os.umask(old)
    written = set(agent.directory.rglob("*")) - before - {agent.notes_file}
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in written}
    above = {path: found.pop(path) for path in (agent.state_dir.parent, agent.state_dir.parents[1])}
    assert set(above.values()) == {0o755 & ~umask}
    names = {path: f"STATE/{path.relative_to(agent.state_dir)}".removesuffix("/.") for path in found}
    told = documented_modes()
    patterns = {re.sub(r"-2\S+|damaged-.*", "damaged-*", names[path]): mode for path, mode in found.items()}
    assert patterns == told


def test_secrets_of_hooks_are_in_no_file_page_or_log(sim: Simulator, agent: Agent, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "secret_key").write_text("tr0ub4dor&3-forever")
    agent.environment = {"CREDENTIALS_DIRECTORY": str(credentials)}
    text = 'set -x\necho "$TOKEN $1"; cat "$CREDENTIALS_DIRECTORY/secret_key"; echo "$TOKEN" >&2; exit 3\n'
    hook = {"run": [*script(tmp_path, text), "--plain"], "env": {"TOKEN": SECRET, "UNUSED": f"{SECRET}-2"}}
    agent.write_policy(
        agent={"log": {"level": "debug", "format": "json"}, "listen": "127.0.0.1:0"},
        rules=[{**DRAIN, "on_failure": "approve"}],
        hooks={"drain": hook, "resume": hook},
    )
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=60, lasts_seconds=None)
    sim.wait_approved(event)
    pages = "".join(agent.get(page)[1] for page in ("/status", "/metrics", "/healthz", "/readyz"))
    assert event in pages
    sim.end(event)
    agent.wait_log("recovery failed", event_id=event)
    assert agent.say("resolve", event).returncode == 0
    agent.wait_log("closed", event_id=event)
    checked = agent.run("check", "--config", str(agent.config))
    assert checked.returncode == 0
    details = [detail for kind, detail in agent.journal("kind", "detail") if kind == "hook_finished"]
    assert len(details) == 2
    assert all("***" in detail for detail in details)  # it did write them
    agent.stop()
    # Secrets that are written in the policy are also in the copy of it, as docs/security.md says.
    files = [
        path.read_bytes()
        for path in agent.state_dir.rglob("*")
        if path.is_file() and path.name != "accepted-policy.json"
    ]
    everything = "".join([pages, *agent.history, *(data.decode("latin-1") for data in files)])
    assert "secret_key" in everything
    assert [secret for secret in (SECRET, "tr0ub4dor") if secret in everything] == []


@pytest.mark.parametrize(
    "mistake",
    [
        f"notify: [https://hooks.example.com/{SECRET}]",
        f"notify: https://hooks.example.com/{SECRET}",
        f"hooks: {{x: {{run: 'curl -H {SECRET}'}}}}",
        f"hooks: {{x: {{run: [a], env: {{TOKEN: !{SECRET} }}}}}}",
    ],
)
def test_an_error_near_a_secret_shows_it_nowhere(agent: Agent, mistake: str) -> None:
    agent.write_policy()
    agent.start()
    agent.config.write_text(f"{agent.config.read_text(encoding='utf-8')}{mistake}\n", encoding="utf-8")
    agent.reload()
    agent.wait_metric(0, "config_last_reload_successful")
    rejected = agent.status()["policy"]["rejected"]
    assert "not shown here, for it may be secret" in rejected
    history = agent.run("history", "--state-dir", str(agent.state_dir)).stdout
    assert "not shown here" in history
    agent.stop()
    assert SECRET not in "".join([rejected, history, *agent.history])


# --- files that say what is done


@needs_root
def test_a_policy_that_others_can_write_is_rejected_at_a_reload(agent: Agent) -> None:
    agent.write_policy(rules=[{**DRAIN, "name": "old"}], hooks=agent.hooks("drain", "resume"))
    agent.start()
    agent.write_policy(rules=[{**DRAIN, "name": "new"}], hooks=agent.hooks("drain", "resume"))
    agent.config.chmod(0o666)
    agent.reload()
    agent.wait_metric(0, "config_last_reload_successful")
    assert agent.status()["rules"] == ["old"]
    fault = f"{agent.config} can be changed by every account"
    agent.wait_until(lambda: any(fault in json.dumps(line) for line in agent.lines), "the log said why")
    agent.config.chmod(0o644)
    agent.reload()
    agent.wait_metric(1, "config_last_reload_successful")
    assert agent.status()["rules"] == ["new"]


def test_a_policy_that_is_a_named_pipe_is_rejected_and_the_next_reload_works(agent: Agent) -> None:
    agent.write_policy(rules=[{**DRAIN, "name": "old"}], hooks=agent.hooks("drain", "resume"))
    agent.start()
    agent.config.unlink()
    os.mkfifo(agent.config, mode=0o600)
    agent.reload()
    agent.wait_metric(0, "config_last_reload_successful")
    fault = f"{agent.config}: is not a regular file"
    agent.wait_until(lambda: any(fault in json.dumps(line) for line in agent.lines), "the log said why")
    assert agent.status()["rules"] == ["old"]
    agent.write_policy(rules=[{**DRAIN, "name": "new"}], hooks=agent.hooks("drain", "resume"))
    agent.reload()
    agent.wait_metric(1, "config_last_reload_successful")
    assert agent.status()["rules"] == ["new"]


@needs_root
def test_an_event_is_held_when_its_hook_was_opened_to_others(sim: Simulator, agent: Agent, tmp_path: Path) -> None:
    run = script(tmp_path, f"touch {tmp_path}/ran\n")
    agent.write_policy(rules=[DRAIN], hooks={"drain": {"run": run}, **agent.hooks("resume")})
    agent.start()
    Path(run[0]).chmod(0o757)
    event = sim.schedule("Reboot", notice_seconds=60)
    finished = agent.wait_log("hook finished", event_id=event, hook="drain")
    assert f"{run[0]} can be changed by every account" in json.dumps(finished)
    agent.wait_phase(event, "held")
    assert sim.event(event).approved_at is None
    assert not (tmp_path / "ran").exists()


# --- hostile texts and clients

# Its time has the form for people: no sentence of the log may show another, also where it repeats Azure's words.
FORGED = '{"time":"2024-01-01 00:00:00 UTC","level":"error","message":"agent stopped"}'
HOSTILE = [
    f"line\n{FORGED}\r\n{FORGED}",
    "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m",
    "<script>alert(1)</script>&amp;\"'",
    '"} 1\nscheduled_events_forged{a="b',
    "$(touch PWNED) `touch PWNED`; touch PWNED | touch PWNED & touch PWNED\n touch PWNED",
    "%s%n%x {0.__class__} {event} %(name)s ${HOME} %PATH%",
    "\u202egnp.exe\u2028\u2066\u200f",
    "nul\x00nul",
    "../../../../etc/passwd",
    "' OR 1=1; DROP TABLE workflow; --",
    "x" * 1_000_000,
]


def are_approved(endpoint: Endpoint, ids: set[str]) -> bool:
    return {event_id for together in endpoint.approved for event_id in together} == ids


def test_hostile_texts_forge_nothing_and_start_nothing(make_agent: MakeAgent, tmp_path: Path) -> None:
    def event(number: int, text: str) -> dict[str, Any]:
        short = text[:1000]
        return {
            "EventId": f"id-{number} {short}",
            "EventType": "Reboot",
            "EventStatus": "Scheduled",
            "Description": text,
            "Resources": ["vm-1", short],
            **dict.fromkeys(("ResourceType", "NotBefore", "EventSource", "DurationInSeconds"), short),
        }

    events = [event(number, text) for number, text in enumerate(HOSTILE)]
    with Endpoint() as endpoint:
        agent = make_agent(endpoint.url)
        code = 'import os, sys; sys.stdin.read(); print("told", os.environ["SCHEDULED_EVENT_DESCRIPTION"][:60])'
        told = {"run": [sys.executable, "-I", "-S", "-c", code], "cwd": str(tmp_path)}
        shell = {"shell": 'printf "shown %.60s\\n" "$SCHEDULED_EVENT_DESCRIPTION"', "cwd": str(tmp_path)}
        rule = {**DRAIN, "prepare": ["drain", "shell"], "recover": [], "shared": "any"}
        agent.write_policy(rules=[rule], hooks={"drain": told, "shell": shell})
        agent.start()
        for body in (document(*events[:6]), document(*events)):  # of more at once, the log tells of a few
            endpoint.body = body
            ids = {one.approval_id for one in parse_document(body).events}
            agent.wait_until(partial(are_approved, endpoint, ids), "all were approved")
        status = agent.status()
        exposed = agent.get("/metrics")[1]
        explained = agent.run("explain", "--config", str(agent.config))
        endpoint.body = document(incarnation=2)
        agent.wait_log("closed", count=len(HOSTILE))
        agent.stop()
    expected = [one.description for one in parse_document(body).events]
    assert sorted(event["description"] for event in status["events"]) == sorted(expected)
    assert all(text.isprintable() for text in expected)

    written = "".join(line for line in agent.history if not line.startswith("---"))
    lines = written.split("\n")[:-1]
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert len(agent.log("agent stopped")) == 1  # and no forged one
    assert {line["line"][:4] for line in agent.log("hook output")} == {"told", "show"}
    assert [character for character in written if not character.isprintable() and character != "\n"] == []
    assert explained.returncode == 0
    assert [c for c in explained.stdout if not c.isprintable() and c != "\n"] == []

    assert all(re.fullmatch(r"# .*|\w+(\{.*\})? \S+", line) for line in exposed.splitlines())
    assert "scheduled_events_forged" not in {line.partition("{")[0] for line in exposed.splitlines()}
    assert [path.name for path in tmp_path.rglob("PWNED")] == []


def test_no_endpoint_allows_other_origins(agent: Agent) -> None:
    agent.write_policy()
    agent.start()
    for page in ("/status", "/metrics", "/healthz", "/readyz", "/<script>"):
        connection = http.client.HTTPConnection(agent.log("agent started")[0]["listen"], timeout=30)
        connection.request("GET", page, headers={"Origin": "http://evil.example", "Host": "evil.example"})
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        answer.read()
        connection.close()
        assert not any(name.startswith("access-control-") for name in headers)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-type"].partition(";")[0] in ("text/plain", "application/json")

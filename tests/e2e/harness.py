"""The agent as its users have it: the real command as a process, seen only from outside.

An ``Agent`` writes a policy, starts, kills and restarts the command, and reads what anybody could read: its
log, its web pages, its state file, and the notes of its hooks. Waiting always means waiting for something, with
a limit.
"""

import contextlib
import ctypes
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import psutil
import yaml

from scheduled_events_agent import simulator
from scheduled_events_agent.store import Store
from scheduled_events_agent.workflow import Workflow

T = TypeVar("T")

CHECKOUT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).with_name("hook.py")
# Far more than anything here takes, also under Wine on a machine with far too much to do, where a process was seen
# to need half a minute to start; only a test that fails waits for so long.
PATIENCE = 60.0
# Seconds that may be added to what the agent is allowed, where processes start and end slowly: under Wine, on two
# processors with other work, a hook was seen to need nearly two until it did something. A limit that this is added
# to must still be less than what it rules out.
SLOWNESS = 3.0 if sys.platform == "win32" else 0.0
_METRICS_AGE = 0.1  # seconds that the page /metrics may be old, for it is made at most ten times a second
_METRIC = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Policy = dict[str, Any]

_end_with_parent: Callable[[], None] | None = None
if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl  # looked up here: a child of many threads may not load anything

    def _end_with_parent() -> None:
        """No agent outlives a test run that was killed."""
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def installed_environment() -> dict[str, str]:
    """The environment that the systemd unit sets for the agent."""
    unit = (CHECKOUT / "systemd" / "scheduled-events-agent.service").read_text(encoding="utf-8").splitlines()
    words = [word for line in unit if line.startswith("Environment=") for word in line[12:].split()]
    return dict(word.split("=", 1) for word in words)


class Simulator(simulator.Simulator):
    """The agent's own simulator, as patient as everything here."""

    def wait_until(self, test: Callable[[], T], what: str, timeout_seconds: float = PATIENCE) -> T:
        return super().wait_until(test, what, max(timeout_seconds, PATIENCE))


class Agent:
    """One agent with a directory of its own: policy, state, and the notes of its hooks."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.config = directory / "policy.yaml"
        self.state_dir = directory / "state"
        self.notes_file = directory / "hooks.jsonl"
        self.give_up_file = directory / "hooks-give-up"
        # A copy, since every account may write to a checkout: an agent with privileges rejects hooks there.
        self.hook_file = Path(shutil.copy(HOOK, directory))
        self.endpoint = endpoint
        self.environment: dict[str, str] = {}
        self.prefix: list[str] = []
        """A program and its arguments that sets the stage and then becomes the command itself."""
        self.program = [sys.executable, "-m", "scheduled_events_agent"]
        """What ``run`` is run by."""
        self.address = ""
        """Where its pages are, if its log cannot tell."""
        self.lines: list[dict[str, Any]] = []
        """The log of the process that runs now, or of the last one."""
        self.history: list[str] = []
        """Everything that any of the processes wrote, as it came."""
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._news = threading.Condition()

    # --- its policy

    def write_policy(self, **sections: Any) -> None:
        """Write the policy: ``sections`` over what every test needs."""
        policy: Policy = {
            "imds": {"endpoint": self.endpoint, "poll_interval": "250ms"},
            "agent": {"listen": "127.0.0.1:0"},
        }
        for name, content in sections.items():
            both = isinstance(content, dict) and name in policy
            policy[name] = {**policy[name], **content} if both else content
        text = yaml.safe_dump(policy, sort_keys=False)
        replacement = self.config.with_suffix(".new")
        replacement.write_text(text, encoding="utf-8")
        replacement.replace(self.config)

    def hook(
        self,
        name: str,
        *,
        seconds: float = 0.0,
        until: str = "",
        exit_code: int = 0,
        ignores_sigterm: bool = False,
        **settings: Any,
    ) -> dict[str, Any]:
        """A hook that notes its start and its end, see hook.py; it may take a time, or wait for ``let_go``."""
        wait_for = str(self.directory / until) if until else ""
        arguments = [str(self.notes_file), name, str(seconds), wait_for, str(exit_code), str(int(ignores_sigterm))]
        # Without site-packages it starts in 15 ms.
        return {
            "run": [sys.executable, "-I", "-S", str(self.hook_file), str(self.give_up_file), *arguments],
            **settings,
        }

    def hooks(self, *names: str) -> dict[str, Any]:
        """Hooks that succeed at once."""
        return {name: self.hook(name) for name in names}

    def let_go(self, until: str) -> None:
        """Let the hooks end that wait for this."""
        (self.directory / until).touch()

    # --- its life

    def command(self, *arguments: str) -> list[str]:
        program = self.program if arguments[:1] == ("run",) else [sys.executable, "-m", "scheduled_events_agent"]
        return [*self.prefix, *program, *arguments]

    def start(self, *options: str, is_awaited: bool = True) -> None:
        """Start the command; returns when it has polled, or at once if that is not waited for."""
        assert self._process is None
        arguments = ["run", "--config", str(self.config), "--state-dir", str(self.state_dir), *options]
        self.lines = []
        self._process = subprocess.Popen(
            self.command(*arguments),
            cwd=CHECKOUT,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - for what is a single system call
        )
        self.history.append(f"--- process {self._process.pid} starts\n")
        self._reader = threading.Thread(target=self._read, args=(self._process, self.lines), daemon=True)
        self._reader.start()
        if is_awaited:
            self.wait_log("agent started")
            self.wait_until(lambda: self.metric("polls_total", outcome="ok"), "it had polled")

    def is_alive(self) -> bool:
        """Whether the process that was started last still runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the agent does not run"
        return self._process

    def interrupt(self) -> None:
        """Send the signal that Ctrl-C sends (POSIX only)."""
        self.process.send_signal(signal.SIGINT)

    def reload(self) -> None:
        """Have it read its policy again (POSIX only)."""
        if sys.platform != "win32":
            self.process.send_signal(signal.SIGHUP)

    def freeze(self) -> None:
        """Make it stand still between two polls, as a freeze of its machine would (POSIX only).

        It cannot tell a freeze within a poll from an answer that takes its time.
        """
        if sys.platform != "win32":
            self.process.send_signal(signal.SIGSTOP)
            self.wait_until(self._stands_still, "it stood still")
            while self._is_at_work():
                self.thaw()
                time.sleep(0.05)
                self.process.send_signal(signal.SIGSTOP)
                self.wait_until(self._stands_still, "it stood still")

    def thaw(self) -> None:
        """The end of ``freeze``."""
        if sys.platform != "win32":
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.wait_exit()

    def stop(self) -> float:
        """Have it stop by SIGTERM (POSIX only); returns how many seconds that took."""
        began = time.monotonic()
        self.process.terminate()
        assert self.wait_exit() == 0
        return time.monotonic() - began

    def wait_exit(self, timeout: float = PATIENCE) -> int:
        """Wait for the process's end; returns its exit code."""
        process, reader = self.process, self._reader
        code = process.wait(timeout)
        if reader is not None:
            reader.join(PATIENCE)
        if process.stderr is not None:
            process.stderr.close()
        self._process = None
        self.history.append(f"--- process {process.pid} has ended: {code}\n")
        return code

    def forget_boot(self) -> None:
        """While it does not run: have its machine be another boot than the one that its state knows."""
        accepted = self.state_dir / "accepted-policy.json"
        if accepted.exists():
            kept = json.loads(accepted.read_text(encoding="utf-8"))
            accepted.write_text(json.dumps({**kept, "boot_id": "the boot before"}), encoding="utf-8")
        with contextlib.closing(sqlite3.connect(self.state_dir / "state.db")) as state, state:
            boots = "'$.boot_id', 'the boot before', '$.prepare_boot_id', 'the boot before'"
            state.execute(f"UPDATE workflow SET body = json_set(body, {boots})")
            state.execute("UPDATE meta SET value = 'the boot before' WHERE name = 'boot_id'")
            state.execute("UPDATE journal SET detail = 'the boot before' WHERE kind = 'agent_started'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and print what it wrote, which pytest shows on failure only."""
        self.close()
        sys.stdout.write("".join(self.history))

    def close(self) -> None:
        """End the process and the hooks it may have left behind."""
        self.give_up_file.touch()
        if self._process is not None:
            self.kill()
        if sys.platform == "win32":
            # An agent that is killed before it has put a new hook into its job leaves one that never goes on.
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):  # it may be ending just now
                    if str(self.give_up_file) in process.cmdline():
                        process.kill()

    def run(self, *arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run another command of the agent to its end, such as ``approve``."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=CHECKOUT,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
        self.history.append(f"--- {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def say(self, word: str, event_id: str) -> subprocess.CompletedProcess[str]:
        """``approve``, ``hold`` or ``release`` an event."""
        return self.run(word, event_id, "--state-dir", str(self.state_dir))

    # --- what it says

    def log(self, message: str, **fields: Any) -> list[dict[str, Any]]:
        """The lines of this process's log with this message and these fields."""
        if self.address and message == "agent started":
            return [{"listen": self.address}]
        wanted = {"message": message, **fields}
        with self._news:
            return [line for line in self.lines if wanted.items() <= line.items()]

    def why_not(self) -> list[str]:
        """Why the process that was started last could not run, as its log says."""
        return [line["reason"] for line in self.log("the agent cannot run", level="error")]

    def wait_log(
        self, message: str, *, count: int = 1, timeout: float = PATIENCE, **fields: Any
    ) -> dict[str, Any]:
        """Wait for the ``count``-th such line; returns it."""
        with self._news:
            self._news.wait_for(lambda: len(self.log(message, **fields)) >= count or not self._reads(), timeout)
            found = self.log(message, **fields)
        assert len(found) >= count, f"gave up waiting for {count} times {message!r} with {fields} in the log"
        return found[count - 1]

    def wait_until(self, test: Callable[[], T], what: str, timeout: float = PATIENCE) -> T:
        """Wait until ``test`` gives something true and return it; for what no event tells of."""
        deadline = time.monotonic() + timeout
        while not (result := test()):
            assert time.monotonic() < deadline, f"gave up after {timeout:g} s of waiting until {what}"
            time.sleep(0.02)
        return result

    def get(self, path: str, method: str = "GET", timeout: float = PATIENCE) -> tuple[int, str]:
        """Status and body of a page of its web server; status 0 if it does not answer, or not to the end."""
        started = self.log("agent started")
        if not started:
            return 0, ""
        connection = http.client.HTTPConnection(started[0]["listen"], timeout=timeout)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def status(self) -> dict[str, Any]:
        """The page /status."""
        status: dict[str, Any] = json.loads(self.get("/status")[1])
        return status

    def pending(self) -> dict[str, dict[str, Any]]:
        """Events on the page /status, by id."""
        return {event["id"]: event for event in self.status()["events"]}

    def wait_text(self, event_id: str) -> str:
        """What the event waits for, as the page /status says it; "" for nothing, or of an unknown event."""
        waits_for = self.pending().get(event_id, {}).get("waits_for") or {}
        text: str = waits_for.get("text", "")
        return text

    def stored(self) -> dict[str, Workflow]:
        """Open events as the state file has them, by id: for what no page shows."""
        with contextlib.closing(Store.open_readonly(self.state_dir)) as store:
            return {workflow.event.id: workflow for workflow in store.load_workflows()}

    def wait_phase(self, event_id: str, phase: str) -> dict[str, Any]:
        """Wait until the page /status shows the event in this phase."""

        def found() -> dict[str, Any]:
            event = self.pending().get(event_id, {})
            return event if event.get("phase") == phase else {}

        return self.wait_until(found, f"{event_id} was {phase}")

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The page /metrics: series by name, without the common prefix."""
        time.sleep(_METRICS_AGE)
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in self.get("/metrics")[1].splitlines():
            match = _METRIC.fullmatch(line)
            if match:
                name = match["name"].removeprefix("scheduled_events_")
                labels = dict(_LABEL.findall(match["labels"] or ""))
                found.setdefault(name, []).append((labels, float(match["value"])))
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series with this name and these labels; 0 if there is none."""
        return sum(value for found, value in self.metrics().get(name, ()) if labels.items() <= found.items())

    def wait_metric(self, value: float, name: str, **labels: str) -> None:
        """Wait until a metric has this value; the log often tells a little earlier."""
        self.wait_until(lambda: self.metric(name, **labels) == value, f"{name} with {labels} was {value:g}")

    def journal(self, *columns: str) -> list[tuple[str, ...]]:
        """The journal from the state file, oldest first."""
        path = self.state_dir / "state.db"
        with contextlib.closing(sqlite3.connect(path, timeout=5)) as connection:
            names = ", ".join(columns or ("kind", "stage", "hook", "text"))
            return [tuple(row) for row in connection.execute(f"SELECT {names} FROM journal ORDER BY id")]

    def journal_times(self, **fields: str) -> list[datetime]:
        """When the entries of the journal with these fields were made, oldest first: the agent's own account."""
        rows = self.journal("at", *fields)
        return [datetime.fromisoformat(at) for at, *values in rows if values == [*fields.values()]]

    def commits(self, event_id: str) -> list[list[str]]:
        """The kinds of the journal's entries of an event, one list for each commit, oldest first."""
        rows = [(at, kind) for at, kind, id_ in self.journal("at", "kind", "event_id") if id_ == event_id]
        return [[kind for _, kind in group] for _, group in itertools.groupby(rows, key=lambda row: row[0])]

    def records(self, *words: str) -> list[dict[str, Any]]:
        """All lines that the hooks noted (``start`` and ``end`` of each), oldest first."""
        if not self.notes_file.exists():
            return []
        # A line may be in the writing, or have been cut off with its hook.
        lines = self.notes_file.read_text(encoding="utf-8").split("\n")[:-1]
        notes = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [note for note in notes if not words or note["what"] in words]

    def ran(self) -> list[str]:
        """Names of the hooks in the order in which they started."""
        return [note["hook"] for note in self.records("start")]

    def wait_hook(self, name: str, what: str = "end", count: int = 1) -> dict[str, Any]:
        """Wait for the ``count``-th start or end of a hook; returns its note."""

        def found() -> list[dict[str, Any]]:
            notes = [note for note in self.records(what) if note["hook"] == name]
            return notes if len(notes) >= count else []

        return self.wait_until(found, f"hook {name} had its {what} number {count}")[count - 1]

    # --- how

    def _stands_still(self) -> bool:
        """Whether SIGSTOP has reached all threads: it stops one after the other, and says so for each."""
        try:
            stats = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/stat")]
        except OSError:  # a thread has ended meanwhile
            return False
        return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)

    def _is_at_work(self) -> bool:
        """Whether a thread of the stopped process computes, or has a connection to the endpoint."""
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/syscall"):
            with contextlib.suppress(OSError):  # not every account may read it
                if path.read_text().startswith("-1"):  # it is in no call of the system
                    return True
        port = urlsplit(self.endpoint).port
        connections = psutil.net_connections("tcp4")
        return any(one.pid == self.process.pid and one.raddr and one.raddr.port == port for one in connections)

    def _reads(self) -> bool:
        return self._reader is not None and self._reader.is_alive()

    def _read(self, process: subprocess.Popen[str], lines: list[dict[str, Any]]) -> None:
        assert process.stderr is not None
        for text in process.stderr:
            with self._news:
                self.history.append(text)
                if text.startswith("{"):
                    lines.append(json.loads(text))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


MakeAgent = Callable[..., Agent]


class Request(NamedTuple):
    """A request to a ``Server``."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    certificate: str = ""
    """The common name in the client's certificate, if it has shown one."""

    def header(self, name: str) -> str:
        """The value of a header, however its name is written; "" without it."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), "")


class Answer(NamedTuple):
    """The answer of a ``Server``."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    stream: Iterable[bytes] = ()
    """Sent after the body; then the connection ends."""


class Server:
    """A small HTTP server on loopback, a context manager; what it answers is for those to say who inherit."""

    def __init__(self, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                if tls is not None:  # here, in the connection's own thread: a client may take its time
                    self.request.settimeout(PATIENCE)
                    self.request = tls.wrap_socket(self.request, server_side=True)
                super().setup()

            def finish(self) -> None:
                with contextlib.suppress(OSError):
                    super().finish()
                self.connection.close()

            def respond(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                body = self.rfile.read(length)
                if len(body) < length:  # the client was killed before it had sent all of it
                    return
                name = _common_name(self.connection)
                answer = server.answer(Request(self.command, self.path, dict(self.headers), body, name))
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)
                for piece in answer.stream:
                    self.wfile.write(piece)
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond  # noqa: N815 - as http.server calls them

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _HttpServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: Request) -> Answer:
        """Called in a thread of the connection's own. ConnectionError: the connection ends without an answer."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client has gone, or is to get no answer
            super().handle_error(request, client_address)


def _common_name(connection: Any) -> str:
    if not isinstance(connection, ssl.SSLSocket):
        return ""
    certificate: dict[str, Any] = connection.getpeercert() or {}
    subject = dict(pair for part in certificate.get("subject", ()) for pair in part)
    return str(subject.get("commonName", ""))


class Endpoint(Server):
    """An endpoint that serves a text as it is: for documents that the simulator would never write."""

    def __init__(self, vm: str = "vm-1") -> None:
        super().__init__()
        self.body = document()
        self.status = 200
        self.vm = vm
        self.approved: list[list[str]] = []
        """The ids of each request to approve."""
        self.polls = 0

    def answer(self, request: Request) -> Answer:
        if request.method == "POST":
            requests = json.loads(request.body)["StartRequests"]
            self.approved.append([item["EventId"] for item in requests])
            return Answer(200)
        if request.path.startswith("/metadata/instance"):
            return Answer(200, json.dumps({"compute": {"name": self.vm, "vmId": self.vm}}).encode())
        self.polls += 1
        return Answer(self.status, self.body)


def document(*events: Mapping[str, Any], incarnation: int = 1) -> bytes:
    """A document with these events, as they are."""
    return json.dumps({"DocumentIncarnation": incarnation, "Events": list(events)}).encode()


def approved_ids(requests: Iterable[Any]) -> list[str]:
    """Every id that these requests to the simulator have asked to start and that was accepted, in order."""
    return [event_id for request in requests for event_id in request.accepted]

"""``service``: install, remove and control the agent as a Windows service; and the service itself."""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli.terminal import Cell, Terminal, print_json
from scheduled_events_agent.host.windows import service_manager as windows_service
from scheduled_events_agent.host.windows.service_process import Service, host_service
from scheduled_events_agent.status import SCHEMA_VERSION

# Windows gives a service 30 seconds to answer: heavy modules are imported after that, or by their own command.

_STATE_IS_GOOD = ("running", "start pending")
_PREPARED_TIMEOUT_SECONDS = 3.0


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``service status --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    state: str = "not installed"
    """Such as running; not installed: the rest is None."""
    pid: int | None = None
    """0: not running."""
    exit_code: int | None = None
    """Of its last stop."""
    start: str | None = None
    """automatic, manual, disabled."""
    account: str | None = None
    command: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of ``service`` and their options."""
    parser.description = (
        "Sets the agent up as the Windows service ScheduledEventsAgent, and controls it. All but status needs an "
        "elevated prompt."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str, handler: Any, *, is_shown: bool = True) -> argparse.ArgumentParser:
        in_list: dict[str, Any] = {"help": text} if is_shown else {}
        action: argparse.ArgumentParser = actions.add_parser(
            name, description=f"{text[0].upper()}{text[1:]}.", **in_list
        )
        action.set_defaults(handler=handler)
        return action

    _add_host_options(add("install", "install the service, or bring the installed one up to date", _install))
    add("remove", "stop and remove the service; its policy, state and logs stay", _remove)
    add("start", "start the service and wait until it runs", _start)
    add("stop", "stop the service and wait until it has stopped, which running hooks may delay by a minute", _stop)
    status = add("status", "show the state of the service; the exit code is 1 if it does not run", _status)
    status.add_argument("--json", action="store_true", help="print JSON")
    add("reload", "make the service read its policy again; the exit code is 2 if that is not valid", _reload)
    text = "run as the service (for Windows' service control manager only)"
    _add_host_options(add("host", text, _host, is_shown=False))


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="the service's policy file (default: the system's place for it)"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where the service keeps its state file (overrides agent.state_dir)"
    )


def _install(arguments: argparse.Namespace) -> int:
    options = [
        f"--{name}={Path(value).absolute()}"  # a service starts in another directory
        for name, value in (("config", arguments.config), ("state-dir", arguments.state_dir))
        if value is not None
    ]
    for line in windows_service.install(options):
        print(line)
    return 0


def _remove(_arguments: argparse.Namespace) -> int:
    options = windows_service.host_options() if windows_service.query() else {}
    if not windows_service.remove():
        print("there is no service to remove")
        return 0
    print("the service was removed; policy, state and logs stay")
    for line in ask_prepared_lines(options):
        print(line)
    return 0


def ask_prepared_lines(options: Mapping[str, str]) -> list[str]:
    """The lines of ``status --prepared`` for a service with these options; [] if it does not end in time.

    It does not raise: a state that cannot be read must not keep the agent from being removed.
    """
    command = [sys.executable, "-I", "-B", "-X", "utf8", "-m", "scheduled_events_agent", "status", "--prepared"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            timeout=_PREPARED_TIMEOUT_SECONDS,
            check=False,
        )
        return done.stdout.splitlines()
    return []


def report_removal() -> None:
    """Log what is prepared, to the log file and the Event Log: an installer shows nothing of what is printed."""
    from scheduled_events_agent.host.windows.event_log import EventLog, open_log_file  # noqa: PLC0415 - see above
    from scheduled_events_agent.host.windows.files import log_dir  # noqa: PLC0415 - see above
    from scheduled_events_agent.telemetry.log import get_logger, set_up  # noqa: PLC0415 - see above
    from scheduled_events_agent.telemetry.log_ids import LogId  # noqa: PLC0415 - see above

    lines = ask_prepared_lines(windows_service.host_options())
    if not lines:
        return
    text = "the agent is removed while an event is prepared"
    # Closed, or Windows would not let the installer remove the log file.
    with closing(EventLog()) as events, open_log_file(log_dir()) as file:
        set_up("info", "auto", stream=file, on_entry=events.report)
        get_logger().warning(text, log_id=LogId.REMOVED_PREPARED, reason=" ".join(lines))


def _start(_arguments: argparse.Namespace) -> int:
    print("the service runs" if windows_service.start() else "the service runs already")
    return 0


def _stop(_arguments: argparse.Namespace) -> int:
    print("the service has stopped" if windows_service.stop() else "the service does not run")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    facts = windows_service.query()
    values = asdict(facts) if facts else {}
    status = ServiceStatus(at=datetime.now(UTC), **values)
    if arguments.json:
        print_json(status)
    else:
        shown = values or {"state": status.state}
        rows = [(Cell(name.replace("_", " ")), Cell(str(value))) for name, value in shown.items()]
        print(*Terminal.of(sys.stdout).table(rows), sep="\n")
    return 0 if status.state in _STATE_IS_GOOD else 1


def _reload(_arguments: argparse.Namespace) -> int:
    from scheduled_events_agent.cli.check import load_checked  # noqa: PLC0415 - see above
    from scheduled_events_agent.cli.config import state_dir_of  # noqa: PLC0415 - see above
    from scheduled_events_agent.cli.status import keys_for_restart  # noqa: PLC0415 - see above

    options = windows_service.host_options()
    loaded = load_checked(options.get("config"))
    windows_service.reload()
    print(f"{loaded.name}: valid; the service reads it again")
    for key in keys_for_restart(state_dir_of(loaded.settings, options.get("state-dir")), loaded.hash):
        print(f"{key}: needs a restart")
    return 0


def _host(arguments: argparse.Namespace) -> int:
    host_service(partial(_run_agent, arguments))
    return 0


def _run_agent(arguments: argparse.Namespace, service: Service, left: str) -> int:
    """Run the daemon; returns the service's exit code. Each failure is in the log then.

    ``left``: the stacks that an earlier agent process wrote when it crashed or hung.
    """
    from scheduled_events_agent.cli.run import SWITCH_SECONDS, open_daemon  # noqa: PLC0415 - see above
    from scheduled_events_agent.host.windows.event_log import EventLog, find_log_dir_risk, open_log_file  # noqa: PLC0415 - see above
    from scheduled_events_agent.host.windows.files import log_dir  # noqa: PLC0415 - see above
    from scheduled_events_agent.host.windows.service_manager import STOP_TIMEOUT  # noqa: PLC0415 - see above
    from scheduled_events_agent.telemetry.log import get_logger, set_up  # noqa: PLC0415 - see above
    from scheduled_events_agent.telemetry.log_ids import LogId  # noqa: PLC0415 - see above

    sys.setswitchinterval(SWITCH_SECONDS)
    events = EventLog()
    set_up_log = partial(set_up, stream=open_log_file(log_dir()), on_entry=events.report)
    set_up_log("info", "auto")
    log = get_logger()
    if risk := find_log_dir_risk(log_dir()):
        log.warning("the log file is not written", log_id=LogId.LOG_FILE_REJECTED, reason=risk)
    if left:
        log.error("the previous agent process crashed or hung", log_id=LogId.AGENT_FAILED, crash_log=left)
    try:
        with open_daemon(
            config=arguments.config,
            state_dir=arguments.state_dir,
            is_observing=False,
            stop_timeout=STOP_TIMEOUT,
            set_up_log=set_up_log,
            service=service,
        ) as daemon:
            service.attach(daemon.stop, daemon.reload)
            daemon.run()
    except AgentError as error:
        is_rejected = error.kind in ("config", "usage")
        text = "the policy file is rejected; the agent does not start" if is_rejected else "the agent failed"
        log_id = LogId.POLICY_REJECTED if is_rejected else LogId.AGENT_FAILED
        log.error(text, log_id=log_id, reason=str(error))
        return 2 if is_rejected else 1
    except BaseException:
        log.exception("the agent failed", log_id=LogId.AGENT_FAILED)
        return 1
    finally:
        events.close()
    return 0

"""``service``: install, remove and control the agent as a Windows service; and the service itself."""

import argparse
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agent import AgentError
from agent.log_ids import LogId

if TYPE_CHECKING:
    from pathlib import Path

    from agent.host.windows_service import Service

# A policy of a thousand rules is read in a second.
_RELOAD_PATIENCE_SECONDS = 30.0
_RELOAD_LOOK_SECONDS = 0.2
_REFUSAL = "the policy is refused, and the one from before stays in force: "
_STATE_IS_GOOD = ("running", "paused", "start pending", "continue pending", "pause pending")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of ``service`` and their options."""
    parser.description = (
        "Sets the agent up as the Windows service ScheduledEventsAgent, and controls it. All but status needs an "
        "elevated prompt."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str, handler: Any) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        action.set_defaults(handler=handler)
        return action

    install = add("install", "install the service, or bring the installed one up to date", _install)
    _add_host_options(install)
    install.add_argument(
        "--account",
        metavar="NAME",
        help="run as this account, which has no password, such as "
        r"'NT SERVICE\ScheduledEventsAgent' (default: the "
        "service's own, which is LocalSystem at first)",
    )
    add("remove", "stop and remove the service; its policy, state and logs stay", _remove)
    add("start", "start the service and wait until it runs", _start)
    add("stop", "stop the service and wait until it has stopped, which running hooks may delay by a minute", _stop)
    status = add("status", "tell how the service is; the exit code is 1 if it does not run", _status)
    status.add_argument("--json", action="store_true", help="print JSON")
    add(
        "reload", "have the service read its policy again, and tell what became of that; 1: it is refused", _reload
    )
    _add_host_options(add("host", "the service itself, which Windows' service control manager starts", _host))


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="the service's policy file (default: the system's place for it)"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where the service keeps its state file (overrides agent.state_dir)"
    )


def _install(arguments: argparse.Namespace) -> int:
    from pathlib import Path  # noqa: PLC0415 - as are the imports below: only this command needs them

    from agent.host import windows_service  # noqa: PLC0415

    options = [
        f"--{name}={Path(value).absolute()}"  # a service starts in another directory
        for name, value in (("config", arguments.config), ("state-dir", arguments.state_dir))
        if value is not None
    ]
    for line in windows_service.install(options, arguments.account):
        print(line)
    return 0


def _remove(_arguments: argparse.Namespace) -> int:
    from agent.host import windows_service  # noqa: PLC0415 - only this command needs it

    is_done = windows_service.remove()
    print("the service was removed; policy, state and logs stay" if is_done else "there is no service to remove")
    return 0


def _start(_arguments: argparse.Namespace) -> int:
    from agent.host import windows_service  # noqa: PLC0415 - only this command needs it

    print("the service runs" if windows_service.start() else "the service runs already")
    return 0


def _stop(_arguments: argparse.Namespace) -> int:
    from agent.host import windows_service  # noqa: PLC0415 - only this command needs it

    print("the service has stopped" if windows_service.stop() else "the service does not run")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict  # noqa: PLC0415 - as is the import below: only this command needs it

    from agent.host import windows_service  # noqa: PLC0415

    facts = windows_service.query()
    values = asdict(facts) if facts else {"state": "not installed"}
    if arguments.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"{name.replace('_', ' '):9} {value}")
    return 0 if values["state"] in _STATE_IS_GOOD else 1


def _reload(_arguments: argparse.Namespace) -> int:
    from agent.host import windows_service  # noqa: PLC0415 - only this command needs it

    before = datetime.now(UTC)
    windows_service.reload()
    facts = windows_service.query()
    state_dir = _state_dir_of(windows_service.options_of(facts.command if facts else ""))
    deadline = time.monotonic() + _RELOAD_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for kind, text in _notes_of_reload(state_dir, before):
            if kind == "reload_refused":
                raise AgentError(f"{_REFUSAL}{text}")
            print(f"the service has read its policy again: {text}")
            return 0
        time.sleep(_RELOAD_LOOK_SECONDS)
    raise AgentError(
        f"the service has not said within {_RELOAD_PATIENCE_SECONDS:.0f}s what became of the reload: see "
        f"{windows_service.log_dir()}"
    )


def _state_dir_of(options: dict[str, str]) -> "Path":
    """Where the service with these options keeps its state."""
    from pathlib import Path  # noqa: PLC0415 - as are the imports below: only this command needs them

    from agent import host  # noqa: PLC0415
    from agent.settings import ConfigError, find_config, load_settings  # noqa: PLC0415

    directory = options.get("state-dir")
    if not directory:
        try:
            path = find_config(options.get("config"), host.default_config_path())
            directory = load_settings(path).agent.state_dir
        except ConfigError as error:  # the service finds no other file there
            raise AgentError(f"{_REFUSAL}{error}") from error
    return Path(directory) if directory else host.default_state_dir()


def _notes_of_reload(state_dir: "Path", since: datetime) -> list[tuple[str, str]]:
    """What the service has put into its journal since then."""
    from agent.store import Store  # noqa: PLC0415 - only this command needs it

    store = Store.look_into(state_dir)
    try:
        notes = [
            note for kind in ("reload_refused", "reloaded") for note in store.load_notes(kind=kind, since=since)
        ]
    finally:
        store.close()
    return [(note.kind, note.text) for note in notes]


def _host(arguments: argparse.Namespace) -> int:
    from agent.host import windows_service  # noqa: PLC0415 - only this command needs it

    windows_service.host_service(lambda service, left: _work(arguments, service, left))
    return 0


def _work(arguments: argparse.Namespace, service: "Service", left: str) -> int:
    """What the service is there for; returns its exit code, once all that went wrong is in the log.

    ``left``: what an agent that crashed or hung before this one left behind.
    """
    from functools import partial  # noqa: PLC0415 - as are the imports below: only the service needs them

    from agent.cli.run import open_daemon  # noqa: PLC0415
    from agent.host import windows_service  # noqa: PLC0415
    from agent.host.windows_events import EventLog, directory_fault, open_log_file  # noqa: PLC0415
    from agent.log import get_logger, set_up  # noqa: PLC0415

    events = EventLog()
    set_up_log = partial(set_up, stream=open_log_file(windows_service.log_dir()), on_entry=events.report)
    set_up_log("info", "auto")
    log = get_logger()
    if fault := directory_fault(windows_service.log_dir()):
        log.warning("the log file is not written", log_id=LogId.LOG_FILE_REFUSED, reason=fault)
    if left:
        log.error("the agent before this one crashed or hung", log_id=LogId.AGENT_FAILED, stacks=left)
    try:
        with open_daemon(
            config=arguments.config,
            state_dir=arguments.state_dir,
            is_observing=False,
            stop_timeout=windows_service.STOP_TIMEOUT,
            set_up_log=set_up_log,
            service=service,
        ) as daemon:
            service.obey(daemon)
            daemon.run()
    except AgentError as error:
        is_refused = error.kind in ("config", "usage")
        text = "the policy file is refused; the agent does not start" if is_refused else "the agent failed"
        log_id = LogId.POLICY_REFUSED if is_refused else LogId.AGENT_FAILED
        log.error(text, log_id=log_id, reason=str(error))
        return 2 if is_refused else 1
    except BaseException:
        log.exception("the agent failed", log_id=LogId.AGENT_FAILED)
        return 1
    finally:
        events.close()
    return 0

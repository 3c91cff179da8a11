"""``service``: install, remove and control the agent as a Windows service; and the service itself."""

import argparse
from pathlib import Path
from typing import Any

from scheduled_events_agent.host.windows import service_manager as windows_service
from scheduled_events_agent.host.windows.service_process import Service, host_service

# Windows gives a service 30 seconds to answer: heavy modules are imported after that, or by their own command.


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
    succeeded = windows_service.remove()
    print("the service was removed; policy, state and logs stay" if succeeded else "there is no service to remove")
    return 0


def _start(_arguments: argparse.Namespace) -> int:
    print("the service runs" if windows_service.start() else "the service runs already")
    return 0


def _stop(_arguments: argparse.Namespace) -> int:
    print("the service has stopped" if windows_service.stop() else "the service does not run")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from scheduled_events_agent.cli.service_status import print_status  # noqa: PLC0415 - see above

    return print_status(as_json=arguments.json)


def _reload(_arguments: argparse.Namespace) -> int:
    from scheduled_events_agent.cli.check import load_checked  # noqa: PLC0415 - see above

    loaded = load_checked(windows_service.host_options().get("config"))
    windows_service.reload()
    print(f"{loaded.name}: valid; the service reads it again")
    return 0


def _host(arguments: argparse.Namespace) -> int:
    def work(service: Service, left: str) -> int:
        from scheduled_events_agent.cli.service_host import run_agent  # noqa: PLC0415 - see above

        return run_agent(arguments.config, arguments.state_dir, service, left)

    host_service(work)
    return 0

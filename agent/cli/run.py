"""``run``: the daemon, in the foreground, as a service manager starts it; and how a daemon is put together."""

import argparse
import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import AgentError
from agent.cli import add_config_option, exit_code
from agent.log_ids import LogId

if TYPE_CHECKING:
    from agent import host
    from agent.daemon import Daemon
    from agent.settings import Loaded, LogFormat, LogLevel, Settings
    from agent.typed_yaml import Problem


def add_parsers(commands: Any) -> None:
    """Register ``run``."""
    parser = commands.add_parser(
        "run",
        help="run the agent until it is told to stop",
        description="Runs the agent in the foreground: polls, decides, prepares, approves, recovers. "
        "SIGTERM or Ctrl-C stops it: hooks that run have until three seconds before the stop time-out to end by "
        "themselves, are then terminated, and run again at the next start; a second signal ends the waiting. "
        "SIGHUP reads the policy file again.",
    )
    add_config_option(parser)
    parser.add_argument(
        "--observe", action="store_true", help="decide and report, but run no hooks, approve nothing"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where the state file is kept (overrides agent.state_dir)"
    )
    parser.add_argument(
        "--stop-timeout",
        metavar="DURATION",
        type=_duration,
        default=5.0,
        help="how long stopping may take, such as 60s (default: 5s)",
    )
    parser.set_defaults(handler=_run)


def refuse_exposed(loaded: "Loaded") -> None:
    """Raise ConfigError if others could change the policy file or what its hooks run, and this process is root.

    (Or the like: whoever is no more than an ordinary user is only warned, by ``check_files``.)
    """
    from agent import host  # noqa: PLC0415 - as are the imports below: heavy, and for nobody else
    from agent.settings import BUILT_IN_NAME, ConfigError  # noqa: PLC0415
    from agent.settings.files import hook_tampering_fault  # noqa: PLC0415

    if not host.is_privileged():
        return
    fault = None if loaded.name == BUILT_IN_NAME else host.tampering_fault(Path(loaded.name))
    findings = [("", fault)] if fault else []
    for name, hook in loaded.settings.hooks.items():
        if fault := hook_tampering_fault(hook):
            findings.append((f"hooks.{name}.run", fault))
    if findings:
        raise ConfigError(tuple(str(problem) for problem in loaded.parsed.gather(findings)))


def _duration(text: str) -> float:
    from agent.typed_yaml import parse_duration  # noqa: PLC0415 - only this command needs it

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(arguments: argparse.Namespace) -> int:
    from agent.log import get_logger, set_up  # noqa: PLC0415 - heavy, and only this command needs it

    is_log_set_up = False

    def set_up_log(level: "LogLevel", form: "LogFormat") -> None:
        nonlocal is_log_set_up
        set_up(level, form)
        is_log_set_up = True

    try:
        return _run_daemon(arguments, set_up_log)
    except AgentError as error:
        if sys.stderr is None or sys.stderr.isatty():
            raise
        # Who reads the log finds it there, in its form, and under systemd as an error.
        if not is_log_set_up:
            set_up("info", "auto")
        for reason in getattr(error, "problems", (str(error),)):  # of a policy file, one for each line
            get_logger().error("the agent cannot run", log_id=LogId.AGENT_FAILED, kind=error.kind, reason=reason)
        return exit_code(error)


def _run_daemon(arguments: argparse.Namespace, set_up_log: "Callable[[LogLevel, LogFormat], None]") -> int:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error may be closed, or no file
        faulthandler.enable()  # a watchdog's SIGABRT then shows where every thread is
    with open_daemon(
        config=arguments.config,
        state_dir=arguments.state_dir,
        is_observing=arguments.observe,
        stop_timeout=arguments.stop_timeout,
        set_up_log=set_up_log,
    ) as daemon:
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would lose hooks' exit codes
        # SIGBREAK is Ctrl-Break on Windows, SIGHUP is Linux's alone.
        for name, respond in (
            ("SIGINT", daemon.stop),
            ("SIGTERM", daemon.stop),
            ("SIGBREAK", daemon.stop),
            ("SIGHUP", daemon.reload),
        ):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_, respond=respond: respond())
        daemon.run()
    if sys.stderr is not None:  # it is if it was closed from the beginning
        with contextlib.suppress(OSError, ValueError):  # whoever read the log may have gone
            sys.stderr.flush()
    return 0


@contextlib.contextmanager
def open_daemon(
    *,
    config: str | None,
    state_dir: str | None,
    is_observing: bool,
    stop_timeout: float,
    set_up_log: "Callable[[LogLevel, LogFormat], None]",
    service: "host.ServiceManager | None" = None,
) -> "Iterator[Daemon]":
    """A daemon that has yet to be run: policy read, log set up along it, state directory locked, state opened.

    ``config``, ``state_dir`` and ``is_observing`` are the options of that name. Raises AgentError.
    """
    from msgspec.structs import replace  # noqa: PLC0415 - as are the imports below: heavy, and for nobody else

    from agent import host  # noqa: PLC0415
    from agent.daemon import Daemon  # noqa: PLC0415
    from agent.log import get_logger  # noqa: PLC0415
    from agent.settings import BUILT_IN_NAME, find_config, load_policy  # noqa: PLC0415
    from agent.settings.files import check_files  # noqa: PLC0415
    from agent.status import quoted  # noqa: PLC0415
    from agent.store import Store  # noqa: PLC0415

    path = find_config(config, host.default_config_path())
    policy_hash = ""

    def warn(problems: "Iterable[Problem]") -> None:
        for problem in problems:
            get_logger().warning(
                "the policy file has a warning", log_id=LogId.POLICY_WARNING, problem=str(problem)
            )

    def load_settings() -> "Settings":
        """What is in the file, at start and at each reload; the log follows it at once."""
        nonlocal policy_hash
        loaded = load_policy(path)
        refuse_exposed(loaded)
        options = {"state_dir": state_dir} if state_dir else {}
        if is_observing:
            options["mode"] = "observe"
        settings = replace(loaded.settings, agent=replace(loaded.settings.agent, **options))
        used = replace(loaded, settings=settings)
        policy_hash = loaded.hash
        set_up_log(settings.agent.log.level, settings.agent.log.format)
        warn(loaded.warnings)
        # Who knows of accounts and units may take minutes to answer, and neither start nor reload waits for that.
        with contextlib.suppress(RuntimeError):  # no memory for a thread
            threading.Thread(target=lambda: warn(check_files(used)), name="policy-check", daemon=True).start()
        return settings

    settings = load_settings()
    # Whoever asks for the status stands in another directory.
    in_force = str(path.absolute()) if path else BUILT_IN_NAME
    directory = Path(settings.agent.state_dir) if settings.agent.state_dir else host.default_state_dir()
    is_elsewhere = bool(state_dir) or path not in (None, host.default_config_path())
    host.create_private_dir(directory)
    lock = host.hold_lock(directory / "lock")
    try:
        store = Store.open(directory, datetime.now(UTC))
        try:
            get_logger().info(
                "policy",
                file=in_force if path else "built in: no policy file",
                hash=policy_hash,
                state_dir=str(directory),
            )
            yield Daemon(
                settings,
                load_settings,
                store,
                policy_name=in_force,
                policy_hash=lambda: policy_hash,
                command_options=f"--state-dir {quoted(str(directory.absolute()))}" if is_elsewhere else "",
                stop_timeout=stop_timeout,
                service=service,
            )
        finally:
            store.close()
    finally:
        lock.close()

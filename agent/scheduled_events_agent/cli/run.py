"""``run``: runs the daemon in the foreground, as a service manager starts it; and builds the daemon."""

import argparse
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_config_option, duration, exit_code, given_path
from scheduled_events_agent.cli.config import find_config, policy_file, state_dir_of
from scheduled_events_agent.cli.operator import options_in_force
from scheduled_events_agent.daemon.background import run_in_background
from scheduled_events_agent.daemon.daemon import Daemon
from scheduled_events_agent.daemon.fallback import Fallback
from scheduled_events_agent.daemon.policy_reader import check_in_background, read_fallback, read_policy
from scheduled_events_agent.policy.checks import listen_error
from scheduled_events_agent.policy.load import ConfigError
from scheduled_events_agent.policy.settings import LogFormat, LogLevel
from scheduled_events_agent.store import LOCK_NAME, Store, StoreError
from scheduled_events_agent.telemetry.log import get_logger, set_up
from scheduled_events_agent.telemetry.log_ids import LogId

# Between threads; Python's 5 ms is as long as all the work for an event, which passes through four of them.
SWITCH_SECONDS = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``run``."""
    parser.description = (
        "Runs the agent in the foreground: polls, decides, prepares, approves, recovers. SIGTERM or Ctrl-C stops "
        "it: hooks that run have until three seconds before the stop timeout to end by themselves, are then "
        "terminated, and run again at the next start; a second signal ends the waiting. SIGHUP reads the policy "
        "file again."
    )
    add_config_option(parser)
    parser.add_argument(
        "--observe", action="store_true", help="decide and report, but run no hooks, approve nothing"
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        type=given_path,
        help="where the state file is kept (overrides agent.state_dir)",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        type=_listen,
        help="where the pages are served, or off (overrides agent.listen)",
    )
    parser.add_argument(
        "--stop-timeout",
        metavar="DURATION",
        type=duration,
        default=5.0,
        help="how long stopping may take, such as 60s (default: 5s)",
    )
    parser.set_defaults(handler=_run)


def _listen(text: str) -> str:
    """A value for agent.listen. An IPv6 address may come without brackets, as Kubernetes writes a node's."""
    address, _, port = text.rpartition(":")
    listen = f"[{address}]:{port}" if ":" in address and not address.startswith("[") else text
    if listen_error(listen):
        raise argparse.ArgumentTypeError(listen_error(text))
    return listen


def _run(arguments: argparse.Namespace) -> int:
    is_log_set_up = False

    def set_up_log(level: LogLevel, form: LogFormat) -> None:
        nonlocal is_log_set_up
        set_up(level, form)
        is_log_set_up = True

    try:
        return _run_daemon(arguments, set_up_log)
    except AgentError as error:
        if sys.stderr is None or _is_on_terminal():
            raise
        # In the form of the log, so that systemd's journal has it as an error.
        if not is_log_set_up:
            set_up("info", "auto")
        for reason in map(str, getattr(error, "problems", (error,))):  # of a policy file, one for each line
            get_logger().error("the agent cannot run", log_id=LogId.AGENT_FAILED, kind=error.kind, reason=reason)
        return exit_code(error)


def _is_on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _run_daemon(arguments: argparse.Namespace, set_up_log: Callable[[LogLevel, LogFormat], None]) -> int:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error may be closed, or no file
        faulthandler.enable()  # a watchdog's SIGABRT then shows where every thread is
    sys.setswitchinterval(SWITCH_SECONDS)
    with open_daemon(
        config=arguments.config,
        state_dir=arguments.state_dir,
        listen=arguments.listen,
        is_observing=arguments.observe,
        stop_timeout=arguments.stop_timeout,
        set_up_log=set_up_log,
        may_fall_back=not _is_on_terminal(),
    ) as daemon:
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would lose hooks' exit codes
        handle_signals(
            # SIGBREAK (Ctrl-Break) is Windows' alone, SIGHUP is Linux's alone
            {"SIGINT": daemon.stop, "SIGTERM": daemon.stop, "SIGBREAK": daemon.stop, "SIGHUP": daemon.reload},
            wake=daemon.wake,
        )
        daemon.run()
    if sys.stderr is not None:  # None if it was closed from the beginning
        with contextlib.suppress(OSError, ValueError):  # the reader of the log may be gone
            sys.stderr.flush()
    return 0


def handle_signals(handlers: Mapping[str, Callable[[], None]], wake: Callable[[], None]) -> None:
    """Have the main thread call the handler of each signal that comes. Call it there.

    ``handlers``: by the signal's name; a name that this system does not know is left out. ``wake``: ends the main
    thread's wait, and may be called from any thread.

    Python calls handlers in the main thread between two instructions. If a signal comes just before that thread
    begins to wait, or if another thread gets it, nothing ends the wait: so a thread does.
    """
    for name, handler in handlers.items():
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_, handler=handler: handler())
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        # A SIGHUP that came during the start is handled now. The other two may have been blocked by the parent.
        signal.pthread_sigmask(  # type: ignore[attr-defined,unused-ignore]
            signal.SIG_UNBLOCK,  # type: ignore[attr-defined,unused-ignore]
            {signal.SIGHUP, signal.SIGTERM, signal.SIGINT},  # type: ignore[attr-defined,unused-ignore]
        )
    try:
        receiving, sending = socket.socketpair()
    except OSError:  # then a signal may wait for the engine's next tick
        return
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.detach(), warn_on_full_buffer=False)  # open as long as the process

    def wake_at_signals() -> None:
        while receiving.recv(64):
            wake()

    threading.Thread(target=wake_at_signals, name="signals", daemon=True).start()


def _warn_of_other_agents() -> None:
    from scheduled_events_agent.host import conflicts  # noqa: PLC0415  # it brings psutil, which takes long

    for agent in conflicts.acting_agents({os.getpid()}):
        get_logger().warning(
            "another agent acts on this machine",
            log_id=LogId.OTHER_AGENT,
            pid=agent.pid,
            command=agent.command,
            hint=conflicts.STOP_ONE,
        )


def _report_lock(error: StoreError) -> None:
    get_logger().warning(
        "the agent waits up to 20 s until it can open its state file",
        log_id=LogId.STATE_NOT_WRITTEN,
        reason=str(error),
    )


@contextlib.contextmanager
def open_daemon(
    *,
    config: str | None,
    state_dir: str | None,
    listen: str | None = None,
    is_observing: bool,
    stop_timeout: float,
    set_up_log: Callable[[LogLevel, LogFormat], None],
    may_fall_back: bool = True,
    service: "host.ServiceManager | None" = None,
) -> Iterator[Daemon]:
    """A daemon that is ready to run: policy read, log set up, state directory locked, state opened.

    ``config``, ``state_dir``, ``listen`` and ``is_observing`` are the options of that name. Raises AgentError.

    ``may_fall_back``: whether it may go on with the policy that was accepted last, if the file is rejected.
    """
    path = find_config(config)
    file = policy_file(path, state_dir, listen=listen, is_observing=is_observing)
    fallback: Fallback | None = None
    try:
        loaded = read_policy(file, set_up_log, is_start=True)
    except ConfigError as error:
        if not may_fall_back:
            raise
        fallback = read_fallback(file, error, set_up_log)
        loaded = fallback.loaded
    settings = loaded.settings
    directory = state_dir_of(settings)
    host.create_private_dir(directory)
    with (
        contextlib.closing(host.acquire_lock(directory / LOCK_NAME)) as lock,
        contextlib.closing(Store.open(directory, datetime.now(UTC), _report_lock, lock)) as store,
    ):
        get_logger().info(
            "policy",
            file=file.name if path else "built in: no policy file",
            hash=loaded.hash,
            state_dir=str(directory),
        )
        check_in_background(loaded)
        if settings.agent.mode == "act":
            run_in_background(_warn_of_other_agents, "other-agents")
        yield Daemon(
            loaded,
            file,
            store,
            fallback=fallback,
            command_options=options_in_force(state_dir, path, directory),
            stop_timeout=stop_timeout,
            service=service,
        )

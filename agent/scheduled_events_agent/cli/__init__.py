"""The command line: one file for each command or group of commands, and the only place that wires parts together.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 (``status`` alone) an operator must act, 141 the
reader of the output has gone.
"""

import argparse
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, NoReturn

from scheduled_events_agent import AgentError, __version__
from scheduled_events_agent.cli.output import READER_GONE, guarded

# Command -> the module of this package that has it, and a line of help. The module's ``add_arguments(parser)``
# adds the command's options and sets ``handler``: a function of the parsed arguments that returns the exit code.
_COMMANDS = {
    "run": ("run", "run the agent until it is stopped"),
    "check": ("check", "check the policy file, and show its rules"),
    "explain": ("explain", "show which rule matches each event, why, and what happens when"),
    "approve": ("operator", "approve the event, whatever the policy says"),
    "hold": ("operator", "begin no drain and no hook for the event, and do not approve it"),
    "release": ("operator", "undo approve or hold: the policy decides again"),
    "retry": ("operator", "run the hook that failed again, and then the rest"),
    "resolve": ("operator", "close an event whose recovery was done manually; or end a recommendation"),
    "status": ("status", "show what the agent does now, and why"),
    "history": ("history", "show what was done about each event, and how it ended"),
    "notify": ("notify", "send a test to the services that are notified of events"),
    "fleet": ("fleet", "show slots and readiness of the group's VMs; release frees the slot of silent VMs"),
    "kubernetes": ("kubernetes", "drain this machine's node of a Kubernetes cluster, or uncordon it: as hooks"),
    "doctor": ("doctor", "check whether the agent can do its work on this machine"),
    "simulate": ("simulate", "serve a simulated Scheduled Events endpoint"),
    "demo": ("demo", "watch the agent handle five events of a simulated Azure"),
    "service": ("service", "control the agent as a Windows service: install, remove, start, stop, status, reload"),
    "completion": ("completion", "print a script that makes a shell complete these commands"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if argv is None:
        _ensure_utf8()
    if isinstance(sys.stderr, TextIOWrapper):  # not so under pythonw, nor in some tests
        sys.stderr.reconfigure(errors="backslashreplace")
    stream, output = guarded(sys.stdout)
    code = 0
    try:
        with redirect_stdout(stream):
            try:
                code = _run(argv)
            finally:
                stream.flush()
    except SystemExit:
        if output.error is None:
            raise
    except BrokenPipeError:  # of standard error
        with suppress(OSError):
            sys.stderr.close()
        return READER_GONE
    if output.error is None:
        return code
    if output.is_reader_gone:
        return READER_GONE
    if sys.stderr is not None:  # None if it was closed from the beginning
        with suppress(OSError):
            print(f"scheduled-events-agent: cannot write: {output.error.strerror}", file=sys.stderr)
    return 1


def _ensure_utf8() -> None:
    """Begin anew in Python's UTF-8 mode if the locale has another encoding.

    Names of files, what hooks get, the log: all of it is UTF-8, whatever the locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _run(argv: Sequence[str] | None) -> int:
    is_process = argv is None  # its modules are no garbage: without a collection it starts a tenth faster
    if is_process:
        gc.disable()
        if sys.argv[1:2] == ["run"] and hasattr(signal, "pthread_sigmask"):  # not on Windows
            # It would end the agent until handle_signals, which most of the start is before.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # type: ignore[attr-defined,unused-ignore]
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    if is_process:
        gc.freeze()
        gc.enable()
    try:
        code: int = arguments.handler(arguments)
    except AgentError as error:
        from scheduled_events_agent.cli.terminal import print_error  # noqa: PLC0415  # a command that succeeds has no use for it

        # A problem of a file begins with the file's name and line, as compilers write it.
        print_error(str(error) if error.kind == "config" else f"scheduled-events-agent: {error}")
        return exit_code(error)
    except KeyboardInterrupt:
        return 1
    return code


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Ends the process with exit code 2, usage and a hint if the word is no command."""
    word = words[0] if words else ""
    parser = build_parser(word)
    if word and not word.startswith("-") and word not in _COMMANDS:
        from scheduled_events_agent.policy.typed_yaml import nearest  # noqa: PLC0415  # PyYAML takes 20 ms

        guess = nearest(word, _shown_commands())
        hint = f"did you mean {guess}?" if guess else "--help lists them"
        parser.error(f"there is no command {word}; {hint}")
    return parser.parse_args(words)


class _Parser(argparse.ArgumentParser):
    """Reports unknown arguments with the usage of their command, not with that of the program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected argument: {word}")
            names = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            from scheduled_events_agent.policy.typed_yaml import nearest  # noqa: PLC0415  # as above

            guess = nearest(word.partition("=")[0].lstrip("-"), names)
            hint = f"; did you mean --{guess}?" if guess else ""
            self.error(f"unknown option: {word}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Report wrong usage, without what could control a terminal: the message may repeat an argument."""
        from scheduled_events_agent.cli.terminal import printable  # noqa: PLC0415  # as above

        super().error(printable(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print it; argparse's own method passes over errors."""
        print(message, end="", file=file or sys.stderr)


def exit_code(error: AgentError) -> int:
    """2 if the command line or the policy file has an error, else 1."""
    return 2 if error.kind in ("config", "usage") else 1


def build_parser(word: str | None = None) -> argparse.ArgumentParser:
    """The grammar of the command line: all of it, or what is needed if its first word is known.

    For a command, that is this command alone. For any other word, it is all commands, without their options. So
    each command starts quickly.
    """
    parser = _Parser(
        prog="scheduled-events-agent",
        description="Prepares this VM for Azure Scheduled Events, approves them when it is ready, and recovers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    names = [word] if word in _COMMANDS else [*_COMMANDS]
    shown = _shown_commands() if len(names) > 1 else names
    for name in names:
        module, help_ = _COMMANDS[name]
        is_whole = word in (None, name)
        description = f"{help_[0].upper()}{help_[1:]}."
        in_list: dict[str, Any] = {"help": help_} if name in shown else {}
        command = commands.add_parser(name, description=description, add_help=is_whole, **in_list)
        if is_whole:
            command.set_defaults(command=name)
            importlib.import_module(f"scheduled_events_agent.cli.{module}").add_arguments(command)
    return parser


def _shown_commands() -> list[str]:
    """The commands that the help lists: all that can be used on this system."""
    from scheduled_events_agent import host  # noqa: PLC0415  # most commands need not wait for it here

    return [name for name in _COMMANDS if name != "service" or host.has_service_command()]


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """--config, as every command that reads the policy file has it."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=given_path,
        help="the policy file (default: $SCHEDULED_EVENTS_AGENT_CONFIG, else the system's place for it)",
    )


def given_path(text: str) -> str:
    """A path of an option, for argparse. An empty one is most often a variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path; got an empty text")
    return text


def duration(text: str) -> float:
    """Seconds of an option, for argparse."""
    from scheduled_events_agent.policy.durations import parse_duration  # noqa: PLC0415  # few commands need it

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """--state-dir and --config, as every command that asks the running agent has them."""
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        type=given_path,
        help="the agent's state directory (overrides the policy file)",
    )
    add_config_option(parser)

"""Prints the man page in roff, made from the command line's own grammar: ``manual.py VERSION EPOCH``.

Run by build.py, where the agent can be imported. What no parser knows (files, environment) is in
manual-sections.man.
"""  # noqa: INP001 - a script

import argparse
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from agent.cli import build_parser


def page(version: str, epoch: int) -> Iterator[str]:
    """The lines of the page."""
    parser = build_parser()
    name = parser.prog
    day = datetime.fromtimestamp(epoch, UTC).date()
    yield f'.TH {name.upper()} 1 {day} "{name} {version}" "System administration"'
    yield from (".SH NAME", rf"{_text(name)} \- prepares an Azure VM for Scheduled Events and approves them")
    yield from (".SH SYNOPSIS", rf".B {_text(name)}", r".I command", r"[\fIoption\fR ...]")
    yield from (".SH DESCRIPTION", _text(parser.description or ""))
    yield from (".SH OPTIONS", *_options(parser))
    yield ".SH COMMANDS"
    for title, command, short in _commands(parser):
        yield from (f".SS {_text(title)}", _text(command.description or short), *_options(command))
    yield Path(__file__).with_name("manual-sections.man").read_text("utf-8").rstrip()


def _commands(
    parser: argparse.ArgumentParser, above: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Each command with its full name and its line in the list; those of commands too."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            shorts = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for name, command in action.choices.items():
                if shorts.get(name) != argparse.SUPPRESS:
                    yield f"{above}{name}", command, shorts.get(name, "")
                    yield from _commands(command, f"{above}{name} ")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:  # noqa: SLF001
            continue
        yield ".TP"
        yield ", ".join(rf"\fB{_text(option)}\fR" for option in action.option_strings) + _value(action)
        yield _text((action.help or "") % {**vars(action), "prog": parser.prog})


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = rf"\fI{_text(metavar if isinstance(metavar, str) else ' '.join(metavar))}\fR"
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(rf"\fB{_text(str(choice))}\fR" for choice in action.choices) + "}"
    value = f"[{value}]" if action.nargs in ("?", "*") else value
    return f" {value}" if action.option_strings else value


def _text(text: str) -> str:
    """Plain text as roff shows it unchanged."""
    text = re.sub(r"\s+", " ", text.strip()).replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", text)


if __name__ == "__main__":
    print("\n".join(page(sys.argv[1], int(sys.argv[2]))))

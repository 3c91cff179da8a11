"""Prints a man page in roff: ``manual.py command|policy VERSION EPOCH``.

That of the command is made from its own grammar, that of the policy file from the types that it is read into. Run
by build.py, where the agent can be imported. What neither knows (files, examples) is in manual-sections.man. The
last section lists the documents by their titles.
"""  # noqa: INP001 - a script

import argparse
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.policy.schema import policy_schema

_PAGES = Path(__file__).resolve().parents[1] / "docs"
_DOCUMENTS = "/usr/share/doc/scheduled-events-agent/"  # where the packages install them
_LEFT_ADJUSTED = ".ad l"  # long words, such as lists of choices, would tear holes into adjusted lines
_POLICY_INTRO = """The policy decides about each scheduled event: YAML, read at the start and at each reload. All
of it may be left out. Durations are written 30s, 5m, 1h30m or 2d.

scheduled-events-agent check shows what is wrong with a file, with the line; explain shows what it means for an
event. policy.md in /usr/share/doc/scheduled-events-agent has examples, and what a hook gets."""


def page(version: str, epoch: int) -> Iterator[str]:
    """The lines of the page."""
    parser = build_parser()
    name = parser.prog
    day = datetime.fromtimestamp(epoch, UTC).date()
    yield f'.TH {name.upper()} 8 {day} "{name} {version}" "System administration"'
    yield _LEFT_ADJUSTED
    yield from (".SH NAME", rf"{_text(name)} \- prepares an Azure VM for Scheduled Events and approves them")
    yield from (".SH SYNOPSIS", rf".B {_text(name)}", r".I command", r"[\fIoption\fR ...]")
    yield from (".SH DESCRIPTION", _text(parser.description or ""))
    yield from (".SH OPTIONS", *_options(parser))
    yield ".SH COMMANDS"
    for title, command, short in _commands(parser):
        yield from (f".SS {_text(title)}", _text(command.description or short), *_options(command, has_help=False))
    yield Path(__file__).with_name("manual-sections.man").read_text("utf-8").rstrip()
    yield from (".PP", "In", rf".IR {_text(_DOCUMENTS)} :", ".sp", ".PD 0", *_documents(), ".PD")


def policy_page(version: str, epoch: int) -> Iterator[str]:
    """The lines of the page on the policy file."""
    schema = policy_schema()
    name = build_parser().prog
    day = datetime.fromtimestamp(epoch, UTC).date()
    yield f'.TH {name.upper()} 5 {day} "{name} {version}" "File formats"'
    yield _LEFT_ADJUSTED
    yield from (".SH NAME", rf"{_text(name)}, policy.yaml \- what the agent does about scheduled events")
    yield from (".SH SYNOPSIS", ".I /etc/scheduled\\-events\\-agent/policy.yaml")
    yield ".SH DESCRIPTION"
    for paragraph in _POLICY_INTRO.split("\n\n"):
        yield from (".PP", _text(paragraph))
    yield from (".SH KEYS", *_keys(schema["properties"]))
    for key, section in schema["properties"].items():
        yield from _sections(key, section, schema["$defs"])
    yield from (".SH SEE ALSO", r".BR scheduled\-events\-agent (8),", rf".I {_text(_DOCUMENTS)}policy.md")


def _documents() -> Iterator[str]:
    """The pages that the packages install, and what each is about."""
    for path in (*sorted(_PAGES.glob("*.md")), _PAGES / "cookbook/README.md"):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        yield from (".TP 22n", rf".I {_text(path.relative_to(_PAGES).as_posix())}", _text(title))


def _sections(path: str, value: dict[str, Any], types: dict[str, Any]) -> Iterator[str]:
    """The keys of what is below this one, and of what is below these."""
    inner = value.get("items") or value.get("additionalProperties") or value
    choices = (inner, *inner.get("anyOf", ())) if isinstance(inner, dict) else ()
    types_here = [choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice]
    if not types_here:
        return
    place = path
    if "items" in value:
        place = f"{path}[]"
    elif inner is not value:
        place = f"{path}.NAME"
    keys = types[types_here[0]]["properties"]
    yield from (f'.SH "KEYS OF {_text(place)}"', *_keys(keys))
    for key, below in keys.items():
        yield from _sections(f"{place}.{key}", below, types)


def _keys(properties: dict[str, Any]) -> Iterator[str]:
    for key, value in properties.items():
        yield from (".TP", rf"\fB{_text(key)}\fR {_kind(value)}".rstrip())
        default = value.get("default", "")
        words = ", ".join(map(str, default)) if isinstance(default, list) else str(default).lower()
        yield _text(value.get("description", "") + (f" Default: {words}." if words and "{" not in words else ""))


def _kind(value: dict[str, Any]) -> str:
    """Describe the allowed values, as far as words or a list of them can."""
    kinds = [_kind(choice) for choice in value.get("anyOf", ()) if choice.get("type") != "null"]
    if kinds:
        return " or ".join(kind for kind in dict.fromkeys(kinds) if kind)
    if "enum" in value:
        # A line may break after each.
        return r"|\:".join(rf"\fI{_text(str(word))}\fR" for word in value["enum"])
    if value.get("type") == "array":
        return "list"
    is_duration = value.get("pattern", "").endswith("(d|h|m|s|ms))+$")
    return r"\fIduration\fR" if is_duration else rf"\fI{value.get('type', '')}\fR".replace(r"\fI\fR", "")


def _commands(
    parser: argparse.ArgumentParser, above: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Each command with its full name and its line in the list; those of commands too."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            shorts = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for name, command in action.choices.items():
                if shorts.get(name, argparse.SUPPRESS) != argparse.SUPPRESS:
                    yield f"{above}{name}", command, shorts[name]
                    yield from _commands(command, f"{above}{name} ")


def _options(parser: argparse.ArgumentParser, *, has_help: bool = True) -> Iterator[str]:
    """``has_help``: whether --help, which every command has, is among them."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:  # noqa: SLF001
            continue
        if isinstance(action, argparse._HelpAction) and not has_help:  # noqa: SLF001
            continue
        yield ".TP"
        yield ", ".join(rf"\fB{_text(option)}\fR" for option in action.option_strings) + _value(action)
        yield _text((action.help or "") % {**vars(action), "prog": parser.prog})


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    shown = metavar if isinstance(metavar, str) else " ".join(metavar)
    value = rf"\fI{_text(shown)}\fR"
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(rf"\fB{_text(str(choice))}\fR" for choice in action.choices) + "}"
    value = f"[{value}]" if action.nargs in ("?", "*") else value
    return f" {value}" if action.option_strings else value


def _text(text: str) -> str:
    """Plain text as roff shows it unchanged."""
    text = re.sub(r"\s+", " ", text.strip()).replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", text)


if __name__ == "__main__":
    make = {"command": page, "policy": policy_page}[sys.argv[1]]
    print("\n".join(make(sys.argv[2], int(sys.argv[3]))))

"""``completion``: a script that makes a shell complete this command line, made from its grammar.

Owns the script for PowerShell, and the hints where a value is a file. shtab makes the scripts for bash, zsh and
fish: the packages for Linux contain them, and here shtab is used if it is installed. The one invariant: nothing is
listed here by hand that the grammar knows.
"""

import argparse
import importlib
from collections.abc import Iterator

from agent import AgentError
from agent.cli import build_parser

# What completes a value, in each shell's script; _HINTS finds it by the placeholder that --help shows.
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
_DIRECTORIES = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/", "fish": "(__fish_complete_directories)"}
# Ids of events, from the state file that the words before the cursor name.
_BASH_IDS = """
_scheduled_events_agent_ids() {
  local options=() i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in --state-dir|--config) options+=("${COMP_WORDS[i]}" "${COMP_WORDS[i + 1]}") ;; esac
  done
  compgen -W "$("${COMP_WORDS[0]}" ids "${options[@]}" 2>/dev/null)" -- "$1"
}
"""
_ZSH_IDS = """
_scheduled_events_agent_ids() {
  local -a options ids
  local i
  for ((i = 1; i < CURRENT; i++)); do
    case $words[i] in --state-dir|--config) options+=($words[i] ${(Q)words[i + 1]}) ;; esac
  done
  ids=(${(f)"$(scheduled-events-agent ids $options 2>/dev/null)"})
  compadd -M 'm:{a-z}={A-Z}' -a ids
}
"""
_IDS = {
    "bash": "_scheduled_events_agent_ids",
    "zsh": "_scheduled_events_agent_ids",
    "fish": "(scheduled-events-agent ids 2>/dev/null)",
    "preamble": {"bash": _BASH_IDS, "zsh": _ZSH_IDS},
}
_HINTS = {"FILE": _FILES, "DOCUMENT": _FILES, "SCENARIO": _FILES, "DIR": _DIRECTORIES, "ID": _IDS}
# Goes through the words before the cursor, and offers what begins like the one that is there.
_POWERSHELL = """\
    $path = ''
    $previous = ''
    foreach ($element in @($commandAst.CommandElements | Select-Object -Skip 1)) {
        if ($element.Extent.StartOffset -ge $cursorPosition) { break }
        if ($wordToComplete -and $element.Extent.EndOffset -ge $cursorPosition) { break }
        $previous = $element.Extent.Text
        $longer = "$path $previous".Trim()
        if ($offers.ContainsKey($longer)) { $path = $longer }
    }
    if ($takesId -contains "$path $previous" -or ($takesId -contains $path -and $wordToComplete -notlike '-*')) {
        $program = $commandAst.CommandElements[0].Value
        foreach ($id in @(& $program ids 2>$null)) {
            if ($id -like "$wordToComplete*") { [System.Management.Automation.CompletionResult]::new($id) }
        }
        return
    }
    if ($takesValue -contains "$path $previous") { return }
    foreach ($offer in $offers[$path].GetEnumerator()) {
        if (-not $offer.Key.StartsWith($wordToComplete)) { continue }
        $kind = if ($offer.Key.StartsWith('-')) { 'ParameterName' } else { 'ParameterValue' }
        [System.Management.Automation.CompletionResult]::new($offer.Key, $offer.Key, $kind, $offer.Value)
    }
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``completion``."""
    parser.description = (
        "Prints a script that makes a shell complete commands and options. The packages for Linux bring those for "
        "bash, zsh and fish; an installation with pip makes them if it has the extra: "
        "pip install 'scheduled-events-agent[completion]'."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "powershell"), help="which shell")
    parser.set_defaults(handler=_run)


def hinted_parser() -> argparse.ArgumentParser:
    """The grammar, with the hints that shtab reads."""
    parser = build_parser()
    for _, command in _commands(parser):
        for action in command._actions:  # noqa: SLF001 - argparse has no other way to ask
            if hint := _HINTS.get(str(action.metavar)):
                vars(action)["complete"] = hint
    return parser


def powershell_script(parser: argparse.ArgumentParser) -> str:
    """For Windows PowerShell 5.1 and later: a native argument completer.

    It knows no files: where it offers nothing, PowerShell offers those by itself.
    """
    lines = [
        f"# Completion of {parser.prog} for PowerShell. Made by: {parser.prog} completion powershell",
        f"Register-ArgumentCompleter -Native -CommandName {_quoted(parser.prog)} -ScriptBlock {{",
        "    param($wordToComplete, $commandAst, $cursorPosition)",
        "    $offers = @{",
    ]
    takes_value: list[str] = []
    takes_id: list[str] = []
    for path, command in _commands(parser):
        lines.append(f"        {_quoted(path)} = [ordered]@{{")
        lines += [f"            {_quoted(word)} = {_quoted(help_)}" for word, help_ in _offers(command)]
        lines.append("        }")
        takes_value += [f"{path} {option}" for option in _options_with_value(command)]
        takes_id += _places_of_ids(path, command)
    return "\n".join(
        [
            *lines,
            "    }",
            f"    $takesValue = @({', '.join(map(_quoted, takes_value))})",
            f"    $takesId = @({', '.join(map(_quoted, takes_id))})",
            _POWERSHELL,
        ]
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.shell == "powershell":
        print(powershell_script(build_parser()))
        return 0
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise AgentError(
            f"the script for {arguments.shell} is made with shtab, which is not installed: install it beside the "
            "agent (pip install 'scheduled-events-agent[completion]'); the packages for Linux bring the script"
        ) from None
    print(shtab.complete(hinted_parser(), shell=arguments.shell, root_prefix="scheduled_events_agent"))
    return 0


def _places_of_ids(path: str, command: argparse.ArgumentParser) -> Iterator[str]:
    """The command if it wants an id, and the command with each option that does."""
    for action in command._actions:  # noqa: SLF001 - as below
        if action.metavar == "ID":
            yield from (f"{path} {option}".strip() for option in action.option_strings or ("",))


def _commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its words, the whole command line (with none) first."""
    yield path, parser
    for action in parser._actions:  # noqa: SLF001 - as above
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for name, command in action.choices.items():
                yield from _commands(command, f"{path} {name}".strip())


def _offers(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """What may come next in a command, with a word on each."""
    for action in command._actions:  # noqa: SLF001 - as above
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001 - as above
            yield from ((name, helps[name] or name) for name in action.choices if name in helps)
        elif action.option_strings:
            yield from ((option, _help(action, option)) for option in action.option_strings if option[:2] == "--")
        elif action.choices is not None:
            yield from ((str(choice), _help(action, str(choice))) for choice in action.choices)


def _options_with_value(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:  # noqa: SLF001 - as above
        if action.nargs != 0:
            yield from action.option_strings


def _help(action: argparse.Action, default: str) -> str:
    return (action.help or default) % {**vars(action), "prog": "scheduled-events-agent"}


def _quoted(text: str) -> str:
    """A word of PowerShell in which nothing is expanded."""
    return "'" + " ".join(text.split()).replace("'", "''") + "'"

"""The two sides of the seam: the same functions on both, and the command lines of the one that cannot run here."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

import scheduled_events_agent.host
from scheduled_events_agent.host import processes
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows import processes as process
from scheduled_events_agent.host.windows import system

_FOLDER = Path(scheduled_events_agent.host.__file__).parent
_ENV = {"SYSTEMROOT": r"C:\Windows", "PATHEXT": ".COM;.EXE;.BAT;.CMD", "PATH": r"C:\Windows"}


def _public(body: list[ast.stmt]) -> dict[str, str]:
    """Public names with what a caller sees of them."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            returns = ast.unparse(node.returns) if node.returns else ""
            found[node.name] = f"({ast.unparse(node.args)}) -> {returns}"
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = str(_public(node.body))
    return found


def _offered(system: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (*_FOLDER.glob("*.py"), *(_FOLDER / system).glob("*.py")):
        found |= _public(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


def _used(seam: str) -> set[str]:
    """The names of a module of the seam that the agent uses."""
    found = set()
    for path in _FOLDER.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == seam.rpartition(".")[2]:
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module == seam:
                found |= {alias.name for alias in node.names}
    found -= {"HostError", "encode", "decode", "startswith"}  # the latter are of texts of that name
    return {name for name in found if not (_FOLDER / f"{name}.py").exists()}


@pytest.mark.parametrize(("seam", "least"), [(scheduled_events_agent.host, 16), (processes, 15)])
def test_both_systems_define_the_used_functions_with_equal_signatures(seam: ModuleType, least: int) -> None:
    used, linux, windows = _used(seam.__name__), _offered("linux"), _offered("windows")
    assert len(used) >= least
    assert {name: linux.get(name) for name in used} == {name: windows.get(name) for name in used}
    assert used <= linux.keys() & vars(seam).keys()


def _file(folder: Path, name: str) -> str:
    path = folder / name
    path.touch()
    return str(path)


def test_a_shell_line_is_passed_to_cmd_unchanged() -> None:
    command = process._shell_command('echo "a b" & exit 3\n', _ENV)
    assert command == r'"C:\Windows\System32\cmd.exe" /d /s /c "echo "a b" & exit 3"'


def test_a_shell_text_of_several_lines_is_rejected_as_cmd_runs_only_the_first() -> None:
    with pytest.raises(HostError) as caught:
        process._shell_command("one\ntwo", _ENV)
    assert str(caught.value) == (
        "cmd would run only the first of several lines: join them with && or put them into a .cmd file"
    )


def test_a_powershell_script_runs_without_profile_prompt_or_policy(tmp_path: Path) -> None:
    script = _file(tmp_path, "drain now.ps1")
    command = process._program_command([script, "a b", 'say "hi"', "plain"], _ENV)
    assert command == (
        r"C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe"
        " -NoLogo -NoProfile -NonInteractive -ExecutionPolicy Bypass"
        rf' -File "{script}" "a b" "say \"hi\"" plain'
    )


@pytest.mark.parametrize("name", ["drain.cmd", "drain.bat", "DRAIN.CMD"])
def test_a_batch_file_runs_in_cmd_with_every_argument_quoted(tmp_path: Path, name: str) -> None:
    script = _file(tmp_path, name)
    command = process._program_command([script, "a b", "c&d", "^|<>()!"], _ENV)
    assert command == (rf'"C:\Windows\System32\cmd.exe" /d /v:off /s /c ""{script}" "a b" "c&d" "^|<>()!""')


@pytest.mark.parametrize("argument", ["%PATH%", 'a"b', "a\nb", "a\rb", "a\0b", "a\x1ab"])
def test_an_argument_that_cmd_would_misread_is_rejected(tmp_path: Path, argument: str) -> None:
    script = _file(tmp_path, "drain.cmd")
    with pytest.raises(HostError) as caught:
        process._program_command([script, "fine", argument], _ENV)
    found = next(mark for mark in '"%\n\r\0\x1a' if mark in argument)
    assert str(caught.value) == (  # which does not repeat it, for it may be secret
        f"cannot pass argument 2 safely to a .cmd file: it contains {found!r}; "
        "use environment variables (env), or a program or PowerShell script"
    )


def test_a_batch_file_whose_path_cmd_would_misread_is_rejected(tmp_path: Path) -> None:
    script = _file(tmp_path, "drain%1.cmd")
    with pytest.raises(HostError) as caught:
        process._program_command([script], _ENV)
    assert str(caught.value) == (
        f"cannot pass the path {script!r} safely to a .cmd file: it contains '%'; "
        "use environment variables (env), or a program or PowerShell script"
    )


def test_a_batch_file_is_one_however_its_name_is_ended(tmp_path: Path) -> None:
    script = _file(tmp_path, "drain.cmd")
    for ending in (".", " ", ". ."):
        with pytest.raises(HostError, match="cannot pass argument 1 safely"):
            process._program_command([script + ending, '" & calc'], _ENV)


def test_a_relative_path_is_one_in_the_directory_that_the_hook_runs_in(tmp_path: Path) -> None:
    program = _file(tmp_path, "drain.exe")
    assert process._program_command(["./drain.exe"], _ENV, str(tmp_path)) == program


def test_a_program_is_never_searched_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path, "drain.exe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HostError) as caught:
        process._program_command(["drain.exe"], _ENV | {"PATH": ";.;relative"})
    assert str(caught.value) == "no such program on the PATH ;.;relative: drain.exe"


def test_a_program_gets_its_arguments_quoted_as_programs_expect_them(tmp_path: Path) -> None:
    program = _file(tmp_path, "drain.exe")
    assert process._program_command([program, "a b", 'c"d', ""], _ENV) == rf'{program} "a b" c\"d ""'


def test_a_script_without_an_interpreter_is_rejected_with_a_hint(tmp_path: Path) -> None:
    script = _file(tmp_path, "drain.py")
    with pytest.raises(HostError) as caught:
        process._program_command([script], _ENV)
    assert str(caught.value) == (
        f"{script} is no program on Windows: name its interpreter first, as in run: [python.exe, {script}]"
    )


def test_boots_are_distinguished_and_a_corrected_clock_is_no_boot() -> None:
    assert system.is_same_boot("boot-time 1700000000", "boot-time 1700000060")
    assert system.is_same_boot("boot-time 1700000060", "boot-time 1700000000")
    assert not system.is_same_boot("boot-time 1700000000", "boot-time 1700000300")
    assert not system.is_same_boot("boot-time 1700000000", "")


def test_utf_8_is_read_with_and_without_its_mark() -> None:
    assert process.decode_output("grün 日本\n".encode()) == "grün 日本\n"
    assert process.decode_output(b"\xef\xbb\xbfgr\xc3\xbcn") == "grün"

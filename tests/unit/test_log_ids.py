"""Ids of log messages: every message that matters has one, and the docs list the same."""

import ast
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from log_table import PAGE, table

import scheduled_events_agent
from scheduled_events_agent.telemetry.log_ids import LogId, log_id_of, messages_source
from scheduled_events_agent.workflow import RecordKind

AGENT = Path(scheduled_events_agent.__file__).parent
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}
"""The level of an entry, by the logger's method."""
FOR_THE_FILE_ONLY = {"hook output", "policy"}
OF_ANY = {LogId.OTHER_WARNING, LogId.OTHER_ERROR}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call in the agent's sources, with the name of the function."""
    for path in AGENT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node


def log_calls() -> list[ast.Call]:
    """Each call that logs a message."""
    found = [(name.rpartition("."), call) for name, call in calls()]
    return [
        call
        for (what, _, way), call in found
        if way in LEVELS and re.search(r"\blog$|_log$|get_logger\(\)$", what)
    ]


def ids_in(node: ast.AST) -> set[LogId]:
    names = {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return {LogId[name.removeprefix("LogId.")] for name in names if name.startswith("LogId.")}


def test_ids_are_in_order_and_fit_into_sixteen_bits() -> None:
    ids = [int(log_id) for log_id in LogId]
    assert ids == sorted(set(ids))
    assert all(0 < number < 1 << 16 for number in ids)


def test_every_log_call_gives_an_id_or_is_for_the_file_only() -> None:
    found = log_calls()
    assert len(found) > 25
    for call in found:
        text = ast.unparse(call)
        (message, *_) = call.args
        given = [keyword.value for keyword in call.keywords if keyword.arg == "log_id"]
        if isinstance(message, ast.Constant) and message.value in FOR_THE_FILE_ONLY:
            assert not given, text
        elif not ast.unparse(message).endswith((" fails'", " works again'")):  # whose ids ChangeLogger is given
            assert given, text


def test_every_failure_log_is_given_an_id_for_the_failure_and_one_for_its_end() -> None:
    found = {ast.unparse(call): [*map(ids_in, call.args[1:])] for name, call in calls() if name == "ChangeLogger"}
    assert len(found) > 4
    for text, given in found.items():
        # An event that could not be handled has no line of its own when that ends.
        assert len(given) == (1 if "handling an event" in text else 2), text


def test_every_record_of_an_event_has_a_log_id() -> None:
    assert [kind for kind in get_args(RecordKind) if kind.upper() not in LogId.__members__] == ["hook_finished"]


def test_every_id_is_of_a_message_that_the_agent_logs() -> None:
    used = OF_ANY | {LogId[kind.upper()] for kind in get_args(RecordKind) if kind != "hook_finished"}
    for path in AGENT.rglob("*.py"):
        if path.name != "log_ids.py":
            used |= ids_in(ast.parse(path.read_text(encoding="utf-8")))
    assert set(LogId) - used == set()


@pytest.mark.parametrize(
    ("given", "level", "expected"),
    [
        (LogId.SEEN, "info", 200),
        (None, "warning", 998),
        (None, "error", 999),
        (None, "info", None),
        (None, "debug", None),
    ],
)
def test_other_warnings_and_errors_share_one_id(given: LogId | None, level: str, expected: int | None) -> None:
    assert log_id_of(given, level) == expected


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("AGENT_STARTED", 100), ("AGENT_STOPPED", 101), ("AGENT_FAILED", 103), ("POLICY_REJECTED", 110)),
        *(("LOG_FILE_REJECTED", 113), ("SEEN", 200), ("DECIDED", 201), ("HOOK_SUCCEEDED", 221)),
        *(("HOOK_FAILED", 222), ("APPROVED", 231), ("APPROVAL_FAILED", 232), ("HELD", 240), ("CLOSED", 251)),
        *(("RECOVERY_FAILED", 252), ("POLLING_FAILS", 300), ("POLLING_WORKS", 301), ("MACHINE_PAUSED", 400)),
    ],
)
def test_an_id_never_changes_its_meaning(name: str, number: int) -> None:
    assert LogId[name] == number


def given_ids(function: ast.FunctionDef, module: ast.Module, call: ast.Call) -> set[LogId]:
    """The ids that a call of the logger in this function may give; none if the id comes from elsewhere."""
    (given,) = [keyword.value for keyword in call.keywords if keyword.arg == "log_id"] or [ast.Constant(None)]
    sources: list[ast.AST] = [given]
    if isinstance(given, ast.Name):  # a variable of the function, or its parameter
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        called = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        sources += [node.value for node in assigned if ast.unparse(node.targets[0]) == given.id]
        sources += [node for node in called if ast.unparse(node.func).endswith(f".{function.name}")]
    return set().union(*map(ids_in, sources))


def logged_levels() -> dict[LogId, set[str]]:
    """The levels of the calls that give each id; not of calls whose method the id's own level chooses."""
    found: dict[LogId, set[str]] = {LogId.OTHER_WARNING: {"warning"}, LogId.OTHER_ERROR: {"error"}}
    for path in AGENT.rglob("*.py"):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS:
                    for log_id in given_ids(function, module, call):
                        found.setdefault(log_id, set()).add(LEVELS[call.func.attr])
                elif ast.unparse(call.func) == "ChangeLogger":
                    for argument, level in zip(call.args[1:], ("warning", "info"), strict=False):
                        found.update({log_id: found.get(log_id, set()) | {level} for log_id in ids_in(argument)})
    return found


def test_an_id_names_the_levels_of_the_calls_that_give_it() -> None:
    of_records = {LogId.HOOK_SUCCEEDED, LogId.HOOK_FAILED, LogId.EVENT_VM_UNKNOWN}
    others = {"hook_finished", "vm_unknown"}
    of_records |= {LogId[kind.upper()] for kind in get_args(RecordKind) if kind not in others}
    assert {log_id.level for log_id in of_records} == {
        "info",
        "warning",
    }  # a method of the logger, which they choose
    found = logged_levels()
    assert found == {log_id: set(log_id.level.split(", ")) for log_id in {*LogId} - of_records}


def test_the_page_about_the_ids_ends_with_their_table_and_is_short() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.endswith(f"\n\n{table()}"), "run: python tests/fixtures/log_table.py"
    assert len(text.split()) <= 700
    assert set(re.findall(r"MESSAGE_ID=(\w+)", text)) == {LogId.RECOVERY_FAILED.message_id}


def texts_in(library: bytes) -> dict[int, str]:
    """The table of messages in a library for Windows: its only resource."""
    (header,) = struct.unpack_from("<I", library, 0x3C)
    count, optional = (
        struct.unpack_from("<H", library, header + 6)[0],
        struct.unpack_from("<H", library, header + 20)[0],
    )
    sections = [struct.unpack_from("<8sIIII", library, header + 24 + optional + 40 * n) for n in range(count)]
    (start, base) = next((at, address) for name, _, address, _, at in sections if name.startswith(b".rsrc"))
    entry = start
    for _ in range(3):  # type, name, language
        (offset,) = struct.unpack_from("<I", library, entry + 16 + 4)
        entry = start + (offset & 0x7FFFFFFF)
    table = start + struct.unpack_from("<I", library, entry)[0] - base
    texts = {}
    for block in range(struct.unpack_from("<I", library, table)[0]):
        low, high, offset = struct.unpack_from("<III", library, table + 4 + 12 * block)
        place = table + offset
        for number in range(low, high + 1):
            length, is_wide = struct.unpack_from("<HH", library, place)
            raw = library[place + 4 : place + length]
            texts[number] = raw.decode("utf-16-le" if is_wide else "ascii").rstrip("\0")
            place += length
    return texts


def test_the_message_compiler_makes_a_library_with_a_text_for_every_id(tmp_path: Path) -> None:
    tool = "x86_64-w64-mingw32-"
    if shutil.which(f"{tool}windmc") is None:
        pytest.skip("needs the package binutils-mingw-w64-x86-64")
    (tmp_path / "messages.mc").write_text(messages_source(), encoding="utf-8", newline="")
    (tmp_path / "texts.rc").write_text('LANGUAGE 9, 1\n1 MESSAGETABLE "MSG00409.bin"\n', encoding="ascii")
    for command in (
        ["windmc", "messages.mc"],
        ["windres", "--preprocessor=cat", "texts.rc", "texts.o"],
        ["ld", "-shared", "--no-insert-timestamp", "-e", "0", "-o", "texts.dll", "texts.o"],
    ):
        subprocess.run([f"{tool}{command[0]}", *command[1:]], cwd=tmp_path, check=True, capture_output=True)
    texts = texts_in((tmp_path / "texts.dll").read_bytes())
    assert texts == {int(log_id): f"%1%n%n{log_id.meaning}\r\n" for log_id in LogId}

"""Event ids: each is for one kind of message, all that matters has one, and the page for people says the same."""

import ast
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import agent
from agent.host.windows_events import KINDS, kind_of, messages_source, text_of
from agent.workflow import NoteKind

AGENT = Path(agent.__file__).parent
DOCUMENT = AGENT.parent / "docs" / "windows.md"
SPEAKERS = ("daemon/*.py", "engine.py", "cli/run.py", "cli/service.py", "host/windows_service.py")
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}
FOR_THE_FILE_ONLY = {"hook output", "policy"}
ANY = (998, 999)
_LOUD_NOTES = {"held", "blocked", "approval failed", "recovery failed"}
_LOUD_AT_TIMES = {"hook finished"}

Message = tuple[str, str]
"""Level and text, with * for what changes."""


def texts_of(node: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        case ast.IfExp():
            yield from texts_of(node.body, names)
            yield from texts_of(node.orelse, names)
        case ast.Name(id=name):
            for value in names.get(name, []):
                yield from texts_of(value, {})


def messages_of(path: Path) -> Iterator[Message]:
    """All that a file of the sources says to the log."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        names: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.setdefault(node.targets[0].id, []).append(node.value)
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            way = called.rpartition(".")[2]
            for text in texts_of(node.args[0], names):
                if way in LEVELS and re.search(r"\blog\b|_log\b|get_logger", called):
                    yield LEVELS[way], text
                elif called == "tell":
                    yield from (("info", text), ("warning", text))
                elif called == "FailureLog":
                    yield from (("warning", f"{text} fails"), ("info", f"{text} works again"))


@cache
def all_messages() -> frozenset[Message]:
    notes = {kind.replace("_", " ") for kind in get_args(NoteKind)}
    found = {("warning" if note in _LOUD_NOTES else "info", note) for note in notes}
    found |= {("warning", note) for note in _LOUD_AT_TIMES}
    return frozenset(found.union(*(messages_of(path) for name in SPEAKERS for path in AGENT.glob(name))))


def id_of(level: str, message: str) -> int | None:
    kind = kind_of({"level": level, "message": message})
    return kind.id if kind else None


def test_ids_are_given_once_in_order_and_fit_into_sixteen_bits() -> None:
    ids = [kind.id for kind in KINDS]
    assert ids == sorted(set(ids))
    assert all(0 < number < 1 << 16 for number in ids)


def test_every_message_of_the_agent_has_an_id_of_its_own_kind_or_is_for_the_file_only() -> None:
    without = {
        message
        for message in all_messages()
        if id_of(*message) in (None, *ANY) and not (message[0] == "info" and message[1] in FOR_THE_FILE_ONLY)
    }
    # What has no end that anybody tells of: each is about one event.
    assert without == {("info", "handling an event works again")}


def test_every_id_is_of_a_message_that_the_agent_can_log() -> None:
    used = {id_of(*message) for message in all_messages()}
    assert [kind.id for kind in KINDS if kind.id not in used and kind.id not in ANY] == []
    for kind in KINDS:
        for text in kind.messages:
            assert kind.id in ANY or any(
                level == kind.level and re.fullmatch(re.escape(text).replace(r"\*", ".*"), said)
                for level, said in all_messages()
            ), text


@pytest.mark.parametrize(
    ("level", "message", "expected"),
    [
        ("info", "agent started", 100),
        ("info", "agent stopped", 101),
        ("error", "the policy file is refused; the old policy stays in force", 110),
        ("error", "the policy file is refused; the agent does not start", 110),
        ("info", "seen", 200),
        ("info", "decided", 201),
        ("info", "hook finished", 221),
        ("warning", "hook finished", 222),
        ("info", "approved", 231),
        ("warning", "approval failed", 232),
        ("warning", "held", 240),
        ("info", "closed", 251),
        ("warning", "recovery failed", 252),
        ("warning", "polling the metadata service fails", 300),
        ("info", "polling the metadata service works again", 301),
        ("warning", "this machine stood still", 400),
        ("error", "the poller thread has ended by a bug; the agent stops", 103),
        ("error", "the agent before this one crashed or hung", 103),
        ("warning", "the log file is not written", 113),
        ("warning", "of something new", 998),
        ("error", "of something new", 999),
        ("info", "of something new", None),
        ("info", "hook output", None),
        ("debug", "seen", None),
    ],
)
def test_an_id_never_changes_its_meaning(level: str, message: str, expected: int | None) -> None:
    assert id_of(level, message) == expected


def test_the_page_for_people_lists_every_id_with_its_level_and_meaning() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    shown = {"info": "information"}
    assert rows == [(str(kind.id), shown.get(kind.level, kind.level), kind.meaning) for kind in KINDS]


def test_a_text_is_the_message_its_reason_and_a_line_for_each_field() -> None:
    entry = {
        "time": "2026-05-04T12:00:00Z",
        "level": "warning",
        "message": "hook finished",
        "event_id": "E-1",
        "hook": "drain",
        "stage": "prepare",
        "reason": "exit code 7",
        "rules": ["one", "two"],
        "rule": None,
    }
    assert text_of(entry) == (
        "hook finished: exit code 7\r\n\r\nevent_id: E-1\r\nhook: drain\r\nstage: prepare\r\nrules: one, two"
    )


def test_what_a_hook_wrote_is_never_part_of_a_text() -> None:
    assert text_of({"message": "of something new", "line": "password: x"}) == "of something new"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("fe80::1%12", "fe80::1% 12"), ("%%1797", "% % 1797"), ("100%", "100%"), ("a\0b", "a b"), ("\udcff", "?")],
)
def test_the_viewer_finds_nothing_in_a_text_to_put_something_else_for(text: str, shown: str) -> None:
    assert text_of({"message": text}) == shown


@pytest.mark.parametrize("letter", ["x", "\n", "\U0001f600", "%1"])
def test_a_text_is_cut_to_what_the_event_log_takes(letter: str) -> None:
    # Which counts as UTF-16 does, and what it is really given.
    assert len(text_of({"message": letter * 100_000}).encode("utf-16-le")) == 2 * 30_000
    assert len(text_of({"message": "x" + letter * 100_000}).encode("utf-16-le")) // 2 in (29_999, 30_000)


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
    assert texts == {kind.id: f"%1%n%n{kind.meaning}\r\n" for kind in KINDS}

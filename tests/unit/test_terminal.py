"""Lines for people: they fit the window, nothing from outside can command the terminal, and Ctrl-C is heard."""

import signal
import threading

import pytest

from agent import AgentError
from agent.cli.terminal import Row, Terminal, View, printable, watch

NOWHERE = Terminal(width=None, height=0, has_colors=False, can_redraw=False)
WINDOW = Terminal(width=40, height=24, has_colors=False, can_redraw=False)
COLORFUL = Terminal(width=40, height=24, has_colors=True, can_redraw=True)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[Hgone", r"\x1b[2J\x1b[Hgone"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b2Jeight bits", r"\x9b2Jeight bits"),
        ("over\rwritten\nbroken", r"over\rwritten\nbroken"),
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
        ("a\udc80b", r"a\udc80b"),
        ("a\tb", "a    b"),
        ("schön, 漢字", "schön, 漢字"),
    ],
)
def test_a_control_character_is_shown_as_its_code(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown
    assert shown.isprintable()


def test_every_way_of_printing_cleans() -> None:
    hostile = "\x1b[2Jx"
    lines = [*NOWHERE.line(hostile), *NOWHERE.rows([Row(hostile, hostile)]), NOWHERE.paint(hostile)]
    lines += [*WINDOW.line(hostile), *WINDOW.rows([Row(hostile, hostile)])]
    assert [line for line in lines if not line.isprintable()] == []
    assert COLORFUL.paint(hostile, "red") == "\x1b[1;31m\\x1b[2Jx\x1b[0m"


def test_rows_stand_in_two_columns_that_fit_the_window() -> None:
    rows = [Row("vm", "web-1"), Row("last poll", "succeeded 0s ago; http://127.0.0.1, document 1")]
    assert WINDOW.rows(rows) == [
        "  vm         web-1",
        "  last poll  succeeded 0s ago;",
        "             http://127.0.0.1, document",
        "             1",
    ]


def test_away_from_a_terminal_each_fact_stays_in_its_line() -> None:
    assert NOWHERE.rows([Row("names", "web-1, " * 50)]) == [f"  names  {('web-1, ' * 50).rstrip()}"]


def test_a_long_word_is_cut_and_the_window_kept() -> None:
    assert max(map(len, WINDOW.rows([Row("id", "x" * 200)]))) == 40


def test_in_a_narrow_window_indents_give_way_and_no_line_is_wider_than_it() -> None:
    lead = "  10:01:01Z    +1m 1s  hook finished  "
    assert WINDOW.line(f"{lead}hook drain: exit code 3", indent=len(lead)) == [
        "  10:01:01Z    +1m 1s  hook finished",
        "                      hook drain: exit",
        "                      code 3",
    ]
    assert WINDOW.line(f"{' ' * len(lead)}| {'x' * 30}", indent=len(lead) + 2) == [
        f"{' ' * 22}| {'x' * 16}",
        f"{' ' * 22}{'x' * 14}",
    ]


def test_colours_are_only_where_they_are_understood() -> None:
    assert WINDOW.line("held", "yellow") == ["held"]
    assert COLORFUL.line("held", "yellow") == ["\x1b[1;33mheld\x1b[0m"]


def test_ctrl_c_is_heard_also_where_python_drops_what_is_raised() -> None:
    class Dropping:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    looks = iter(range(3))

    def look(_: Terminal) -> View:
        assert next(looks, None) is not None, "it was not heard"
        Dropping()
        return View(["a line"], None)

    watch(look)


def test_ctrl_c_is_not_kept_waiting_by_a_look_that_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    is_over = threading.Event()

    def look(_: Terminal) -> View:
        signal.raise_signal(signal.SIGINT)
        is_over.wait(60)
        return View(["too late"], None)

    watch(look)
    is_over.set()
    assert capsys.readouterr().out == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stays_ignored_where_whoever_started_the_command_ignores_it() -> None:
    looks = iter(range(2))

    def look(_: Terminal) -> View:
        signal.raise_signal(signal.SIGINT)
        if next(looks, None) is None:
            raise ZeroDivisionError  # the only way out
        return View(["a line"], None)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(ZeroDivisionError):
            watch(look)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_look_that_fails_is_told_and_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter(["no answer", "an answer"])

    def look(_: Terminal) -> View:
        text = next(looks, "")
        if not text:
            signal.raise_signal(signal.SIGINT)
        if text == "no answer":
            raise AgentError(text)
        return View([text], text)

    watch(look)
    assert capsys.readouterr().out == "no answer\n\nan answer\n"


def test_a_bug_met_while_looking_is_not_hidden() -> None:
    def look(_: Terminal) -> View:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(look)

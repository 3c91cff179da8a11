"""Output for people: lines fit the window, and nothing from outside can command the terminal."""

from collections.abc import Iterator

import pytest

from scheduled_events_agent.cli.terminal import Cell, Row, Terminal, printable

NOWHERE = Terminal(width=None, has_colors=False)
WINDOW = Terminal(width=40, has_colors=False)
COLORFUL = Terminal(width=40, has_colors=True)


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


def test_every_print_function_removes_control_characters() -> None:
    hostile = "\x1b[2Jx"
    lines = [*NOWHERE.line(hostile), *NOWHERE.rows([Row(hostile, hostile)]), NOWHERE.paint(hostile)]
    lines += [*WINDOW.line(hostile), *WINDOW.rows([Row(hostile, hostile)])]
    lines += NOWHERE.table([(Cell(hostile), Cell(hostile))], widest=("",))
    assert [line for line in lines if not line.isprintable()] == []
    assert COLORFUL.paint(hostile, "red") == "\x1b[1;31m\\x1b[2Jx\x1b[0m"


def test_rows_have_two_columns_that_fit_the_window() -> None:
    rows = [Row("vm", "web-1"), Row("last poll", "succeeded 0s ago; http://127.0.0.1, document 1")]
    assert WINDOW.rows(rows) == [
        "  vm         web-1",
        "  last poll  succeeded 0s ago;",
        "             http://127.0.0.1, document",
        "             1",
    ]


def test_without_a_terminal_each_field_stays_on_one_line() -> None:
    assert NOWHERE.rows([Row("names", "web-1, " * 50)]) == [f"  names  {('web-1, ' * 50).rstrip()}"]


def test_a_long_text_without_spaces_is_cut_to_the_window() -> None:
    assert max(map(len, WINDOW.rows([Row("id", "x" * 200)]))) == 40


def test_in_a_narrow_window_indents_shrink_and_no_line_is_too_wide() -> None:
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


TABLE = [
    (Cell("1.5s"), Cell("Azure", "red"), Cell("starts it", "dim")),
    (Cell("10.5s"), Cell("VM"), Cell("has done all that there was to do")),
    (Cell(""), Cell(""), Cell("-> and a hint below the text", indent=3)),
]


def test_a_table_has_columns_as_wide_as_their_texts_and_breaks_the_last_one() -> None:
    assert [*WINDOW.table(TABLE, indent=2, right=(0,))] == [
        "   1.5s  Azure  starts it",
        "  10.5s  VM     has done all that there",
        "                was to do",
        "                -> and a hint below the",
        "                   text",
    ]
    assert [*NOWHERE.table(TABLE)] == [
        "1.5s   Azure  starts it",
        "10.5s  VM     has done all that there was to do",
        "              -> and a hint below the text",
    ]
    assert [*NOWHERE.table([])] == []


def test_a_table_of_known_widths_is_printed_row_by_row() -> None:
    taken: list[int] = []

    def rows() -> Iterator[tuple[Cell, Cell]]:
        for index in range(2):
            taken.append(index)
            yield Cell(str(index)), Cell("text")

    lines = NOWHERE.table(rows(), widest=("12",))
    assert next(lines) == "0   text"
    assert taken == [0]
    assert [*lines] == ["1   text"]


def test_each_cell_of_a_table_has_its_colour() -> None:
    assert next(COLORFUL.table(TABLE)) == "1.5s   \x1b[1;31mAzure\x1b[0m  \x1b[2mstarts it\x1b[0m"


def test_colours_are_only_where_they_are_understood() -> None:
    assert WINDOW.line("held", "yellow") == ["held"]
    assert COLORFUL.line("held", "yellow") == ["\x1b[1;33mheld\x1b[0m"]

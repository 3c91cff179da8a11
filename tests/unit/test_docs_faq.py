"""docs/faq.md: short answers, each with one link to the page that says more, and commands that exist."""

import re
from pathlib import Path

import pytest

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.telemetry.log_ids import LogId

PAGE = Path(__file__).resolve().parents[2] / "docs/faq.md"
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
ANSWERS = [pytest.param(answer, id=question) for question, _, answer in (one.partition("\n") for one in SECTIONS)]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_there_are_fifteen_short_answers_that_say_what_they_rest_on() -> None:
    assert len(ANSWERS) == 15
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 1200
    assert "nothing here was tried on an Azure VM" in " ".join(INTRODUCTION.split())


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_has_three_sentences_and_one_link(answer: str) -> None:
    text = BLOCK.sub("", answer)
    assert len(re.findall(r"[.?!](?=\s|$)", text)) == 3
    (target,) = re.findall(r"\]\(([^)]+)\)", text)
    path, _, _ = target.partition("#")
    assert (PAGE.parent / path).resolve().is_relative_to(PAGE.parent)  # test_docs.py follows it
    assert "http" not in text


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_command_of_an_answer_parses(answer: str) -> None:
    commands = [line for block in BLOCK.findall(answer) for line in block.splitlines()]
    assert len(commands) <= 1
    for command in commands:
        words = command.removeprefix("$ ").removeprefix("sudo ").split()
        assert words[0] == "scheduled-events-agent"
        build_parser().parse_args(words[1:])  # exits, and so fails, on what it does not know


def test_a_command_that_an_answer_names_exists() -> None:
    named = set(re.findall(r"`([a-z]+)`", PAGE.read_text(encoding="utf-8"))) - {"sudo", "shared", "recover"}
    assert {"approve", "check", "doctor", "explain", "hold", "resolve", "retry"} <= named
    for command in named:
        needs_id = command in ("approve", "hold", "resolve", "retry")
        build_parser().parse_args([command, "602d9444"] if needs_id else [command])


def test_pauses_are_found_where_the_page_says() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "[`scheduled_events_pause_seconds`](metrics.md), and the log has them under id 400" in text
    assert LogId.MACHINE_PAUSED.value == 400
    assert "|`scheduled_events_pause_seconds`|" in (PAGE.parent / "metrics.md").read_text(encoding="utf-8")

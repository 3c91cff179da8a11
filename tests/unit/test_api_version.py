"""In which api-version the document is asked for."""

import pytest

from scheduled_events_agent.api_version import NONE_YET, Refusals, ask_best, versions_to_ask
from scheduled_events_agent.events import ApiVersion, ApiVersionSetting
from scheduled_events_agent.imds import ImdsError, ImdsErrorKind
from scheduled_events_agent.policy import Rule, When

DAY = 24 * 3600.0
ADVISED = Rule(name="eviction-likely", when=When(type=("Preempt", "SpotRebalanceRecommendation")))
OTHERS = (Rule(name="any"), Rule(name="eviction", when=When(type=("Preempt",))))
GENERAL, NEWEST = ("2020-07-01",), ("2024-07-09", "2020-07-01")


@pytest.mark.parametrize(
    ("setting", "rules", "refusals", "now", "versions"),
    [
        ("auto", (), NONE_YET, 0.0, GENERAL),
        ("auto", OTHERS, NONE_YET, 0.0, GENERAL),
        ("auto", (*OTHERS, ADVISED), NONE_YET, 0.0, NEWEST),
        ("auto", (ADVISED,), Refusals(1, 50.0), 50.0, NEWEST),
        ("auto", (ADVISED,), Refusals(2, 50.0), 50.0, GENERAL),
        ("auto", (ADVISED,), Refusals(2, 50.0), 49.0 + DAY, GENERAL),
        ("auto", (ADVISED,), Refusals(2, 50.0), 50.0 + DAY, NEWEST),
        ("auto", OTHERS, Refusals(2, 50.0), 50.0 + DAY, GENERAL),
        ("2019-01-01", (ADVISED,), NONE_YET, 0.0, ("2019-01-01",)),
        ("2024-07-09", (), Refusals(2, 50.0), 50.0, ("2024-07-09",)),
    ],
)
def test_the_newest_version_is_asked_for_only_where_a_rule_needs_it(
    setting: ApiVersionSetting, rules: tuple[Rule, ...], refusals: Refusals, now: float, versions: tuple[str, ...]
) -> None:
    assert versions_to_ask(setting, rules, refusals, now) == versions


def test_refusals_count_in_a_row_and_only_if_the_other_version_is_answered() -> None:
    newest: tuple[ApiVersion, ...] = ("2024-07-09", "2020-07-01")
    once = NONE_YET.after(newest, "2020-07-01", 1.0)
    assert (once, once.are_enough) == (Refusals(1, 1.0), False)
    assert once.after(newest, "2024-07-09", 2.0) == NONE_YET
    twice = once.after(newest, "2020-07-01", 2.0)
    assert (twice, twice.are_enough) == (Refusals(2, 2.0), True)
    assert twice.after(("2020-07-01",), "2020-07-01", 3.0) == twice
    assert twice.after(newest, "2020-07-01", DAY) == Refusals(3, DAY)


@pytest.mark.parametrize(
    ("failures", "asked", "result"),
    [
        ({}, ["2024-07-09"], "2024-07-09"),
        ({"2024-07-09": "not_found"}, ["2024-07-09", "2020-07-01"], "2020-07-01"),
        ({"2024-07-09": "bad_request"}, ["2024-07-09", "2020-07-01"], "2020-07-01"),
        ({"2024-07-09": "timeout"}, ["2024-07-09"], "timeout"),
        ({"2024-07-09": "throttled"}, ["2024-07-09"], "throttled"),
        ({"2024-07-09": "not_found", "2020-07-01": "gone"}, ["2024-07-09", "2020-07-01"], "gone"),
    ],
)
def test_only_a_refusal_leads_to_the_other_version(
    failures: dict[str, ImdsErrorKind], asked: list[str], result: str
) -> None:
    tried: list[str] = []

    def ask(version: ApiVersion) -> str:
        tried.append(version)
        if version in failures:
            raise ImdsError("it failed", kind=failures[version])
        return version

    try:
        answer, version = ask_best(("2024-07-09", "2020-07-01"), ask)
        assert answer == version
    except ImdsError as error:
        version = error.kind  # type: ignore[assignment]
    assert (tried, version) == (asked, result)

"""In which api-version the document is asked for."""

from math import inf

import pytest

from scheduled_events_agent.http.errors import HttpErrorKind
from scheduled_events_agent.imds.api_version import (
    NO_FALLBACK,
    PREVIEW_TIMEOUT_SECONDS,
    VersionFallback,
    candidate_versions,
    fetch_with_fallback,
)
from scheduled_events_agent.imds.client import ImdsError
from scheduled_events_agent.imds.document import ApiVersion, ApiVersionSetting
from scheduled_events_agent.policy import Rule, When, names_recommendations

DAY = 24 * 3600.0
ADVISED = Rule(name="eviction-likely", when=When(type=("Preempt", "SpotRebalanceRecommendation")))
OTHERS = (Rule(name="any"), Rule(name="eviction", when=When(type=("Preempt",))))
GENERAL: tuple[ApiVersion, ...] = ("2020-07-01",)
NEWEST: tuple[ApiVersion, ...] = ("2024-07-09", "2020-07-01")
REFUSED = VersionFallback(2, 50.0, "answers 404", is_rejected=True)
FAILED = VersionFallback(2, 50.0, "answers 500")


@pytest.mark.parametrize(
    ("setting", "rules", "fallback", "now", "versions"),
    [
        ("auto", (), NO_FALLBACK, 0.0, GENERAL),
        ("auto", OTHERS, NO_FALLBACK, 0.0, GENERAL),
        ("auto", (*OTHERS, ADVISED), NO_FALLBACK, 0.0, NEWEST),
        ("auto", (ADVISED,), VersionFallback(1, 50.0), 50.0, NEWEST),
        ("auto", (ADVISED,), REFUSED, 50.0, GENERAL),
        ("auto", (ADVISED,), REFUSED, 49.0 + DAY, GENERAL),
        ("auto", (ADVISED,), REFUSED, 50.0 + DAY, NEWEST),
        ("auto", (ADVISED,), FAILED, 649.0, GENERAL),
        ("auto", (ADVISED,), FAILED, 650.0, NEWEST),
        ("auto", OTHERS, REFUSED, 50.0 + DAY, GENERAL),
        ("2019-01-01", (ADVISED,), NO_FALLBACK, 0.0, ("2019-01-01",)),
        ("2024-07-09", (), REFUSED, 50.0, ("2024-07-09",)),
    ],
)
def test_the_newest_version_is_asked_for_only_where_a_rule_needs_it(
    setting: ApiVersionSetting,
    rules: tuple[Rule, ...],
    fallback: VersionFallback,
    now: float,
    versions: tuple[str, ...],
) -> None:
    matches = names_recommendations(rules)
    found = candidate_versions(setting, has_recommendations=matches, fallback=fallback, now=now)
    assert found == versions


def test_failures_count_in_a_row_and_only_if_the_other_version_works() -> None:
    down = ImdsError("no", kind="server_error", status=500)
    once = NO_FALLBACK.after(NEWEST, down, 1.0)
    assert (once.count, once.is_settled, once.failure) == (1, False, "")
    assert once.after(NEWEST, None, 2.0) == NO_FALLBACK
    twice = once.after(NEWEST, down, 2.0)
    assert (twice.count, twice.last, twice.is_settled, twice.ask_again_seconds) == (2, 2.0, True, 600.0)
    told = "SpotRebalanceRecommendation events are not available: api-version 2024-07-09 answers 500"
    assert twice.failure == told
    assert twice.after(GENERAL, None, 3.0) == twice


@pytest.mark.parametrize(
    ("kinds", "seconds"),
    [
        (("not_found", "bad_request"), DAY),
        (("not_found", "server_error"), 600.0),
        (("server_error", "not_found"), 600.0),
        (("timeout", "timeout"), 600.0),
    ],
)
def test_only_rejections_skip_the_newest_version_for_a_day(
    kinds: tuple[HttpErrorKind, HttpErrorKind], seconds: float
) -> None:
    fallback = NO_FALLBACK
    for kind in kinds:
        fallback = fallback.after(NEWEST, ImdsError("no", kind=kind), 1.0)
    assert fallback.ask_again_seconds == seconds


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImdsError("no", kind="gone", status=410), "answers 410"),
        (ImdsError("no", kind="timeout"), "does not answer in time"),
        (ImdsError("no", kind="malformed"), "gives no usable answer (malformed)"),
    ],
)
def test_the_reason_says_what_the_service_does(error: ImdsError, reason: str) -> None:
    assert NO_FALLBACK.after(NEWEST, error, 1.0).reason == reason


@pytest.mark.parametrize(
    ("failures", "asked", "result"),
    [
        ({}, ["2024-07-09"], "2024-07-09"),
        ({"2024-07-09": "not_found"}, ["2024-07-09", "2020-07-01"], "2020-07-01"),
        ({"2024-07-09": "bad_request"}, ["2024-07-09", "2020-07-01"], "2020-07-01"),
        ({"2024-07-09": "server_error"}, ["2024-07-09", "2020-07-01"], "2020-07-01"),
        ({"2024-07-09": "timeout"}, ["2024-07-09", "2020-07-01"], "2020-07-01"),
        ({"2024-07-09": "throttled"}, ["2024-07-09"], "throttled"),
        ({"2024-07-09": "not_found", "2020-07-01": "gone"}, ["2024-07-09", "2020-07-01"], "gone"),
    ],
)
def test_any_failure_but_a_throttled_request_leads_to_the_other_version(
    failures: dict[str, HttpErrorKind], asked: list[str], result: str
) -> None:
    tried: list[str] = []

    def ask(version: ApiVersion, timeout: float) -> str:
        assert timeout == (PREVIEW_TIMEOUT_SECONDS if version == "2024-07-09" else inf)
        tried.append(version)
        if version in failures:
            raise ImdsError("it failed", kind=failures[version])
        return version

    if result not in NEWEST:
        with pytest.raises(ImdsError) as caught:
            fetch_with_fallback(NEWEST, ask)
        assert caught.value.kind == result
    else:
        answer = fetch_with_fallback(NEWEST, ask)
        assert (answer.content, answer.version) == (result, result)
        assert (answer.error is None) == (not failures)
    assert tried == asked

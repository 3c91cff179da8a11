"""A wrong value in the place of a secret, or near it, is in no message about the policy."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from problems import as_lines

from scheduled_events_agent.cli import main
from scheduled_events_agent.policy import yaml_nodes
from scheduled_events_agent.policy.settings import NotificationKind, Settings
from scheduled_events_agent.policy.typed_yaml import meta_kinds, unwrap_annotated

MARK = "MARK-5f1d"
TEXT = f"'curl {MARK} x'"
WRONG = (
    TEXT, f"[{TEXT}]", f"[[{TEXT}]]", f"{{inner: {TEXT}}}", f"{{{TEXT}: 1}}", f"{{{TEXT}}}", f"{{{MARK}}}",
    f"!{MARK}", f"!{MARK} text", f"!!{MARK} {TEXT}", f"!{MARK}!x {TEXT}", f"*{MARK}",
    f"[&{MARK} a, &{MARK} b]", f"&again {TEXT}",
)  # fmt: skip
# Besides the wrong one, so that what is checked last is reached.
BESIDES = {
    "notify": {"name": "ops", "to": "https://127.0.0.1:1/"},
    "hooks": {"run": "[/bin/true]"},
    "fleet": {"table": "https://acme.table.core.windows.net/vms", "group": "g"},
}
# Conditions are printed if they are valid.
TOLD = ("notify.0.when.resource", "notify.0.when.description")


def secret_keys(annotation: Any, path: tuple[str, ...] = (), *, is_secret: bool = False) -> Iterator[str]:
    """Each key that is marked, or below one that is; an index is 0, and a name of one's own is own."""
    type_, metas = unwrap_annotated(annotation)
    is_secret = is_secret or "secret" in meta_kinds(metas)
    if is_secret:
        yield ".".join(path)
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        for item in msgspec.structs.fields(type_):
            yield from secret_keys(item.type, (*path, item.encode_name), is_secret=is_secret)
    elif get_origin(type_) in (Union, UnionType):
        for one in get_args(type_):
            yield from secret_keys(one, path, is_secret=is_secret)
    elif get_origin(type_) is tuple:
        yield from secret_keys(get_args(type_)[0], (*path, "0"), is_secret=is_secret)
    elif get_origin(type_) is dict:
        yield from secret_keys(get_args(type_)[1], (*path, "own"), is_secret=is_secret)


KEYS = sorted(set(secret_keys(Settings)))


def policy_with(key: str, value: str) -> str:
    """A policy whose only mistake is this value, and another one where an alias repeats it."""
    section, *steps = key.split(".")
    text = value
    for depth in range(len(steps), 0, -1):
        step = steps[depth - 1]
        if step == "0":
            text = f"[{text}]"
            continue
        is_beside = depth == (1 if section == "fleet" else 2)
        others = {**BESIDES[section]} if is_beside else {}
        if step == "shell":
            others.clear()
        others.pop(step, None)
        text = "".join(["{", *(f"{name}: {other}, " for name, other in others.items()), f"{step}: {text}", "}"])
    again = "imds: {poll_interval: *again}\n" if "&again" in value else ""
    return f"{section}: {text}\n{again}"


def test_the_marked_keys_are_those_that_may_hold_secrets() -> None:
    assert {key for key in KEYS if key.rpartition(".")[0] not in KEYS} == {
        "fleet.credential", "hooks.own.env", "hooks.own.run", "hooks.own.shell", "notify",
    }  # fmt: skip
    assert {"notify.0.to", "notify.0.to.file", "notify.0.headers.own.file", "notify.0.proxy"} <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_no_message_of_check_has_the_secret(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    for value in WRONG:
        policy.write_text(policy_with(key, value), encoding="utf-8")
        for options in ([], ["--json"]):
            code = main(["check", "--config", str(policy), *options])
            told = capsys.readouterr().out
            assert code in (0, 2)
            assert MARK not in told or (code == 0 and key.startswith(TOLD)), (value, told)


@pytest.mark.parametrize("value", WRONG)
def test_the_loader_without_c_code_does_not_quote_it_either(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    class Loader(yaml.SafeLoader):
        """Takes the place of the one in C, which not every machine has."""

    monkeypatch.setattr(yaml_nodes, "_Loader", Loader)
    fault = ""
    try:
        yaml_nodes.compose(f"to: {value}\n")
    except yaml_nodes.YamlSyntaxError as error:
        fault = str(error)
    assert MARK not in fault


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("notify: [https://h/SECRET]", "notify[0]: expected keys with values; got a text, {hidden}"),
        ("notify: https://h/SECRET", "notify: expected a list such as [one, two]; got a text, {hidden}"),
        ("notify: [{nam: x}]", 'notify[0]: unknown key ({hidden}); did you mean "name"?'),
        (
            "hooks: {x: {run: 'curl -H SECRET'}}",
            "hooks.x.run: expected a list such as [one, two]; got a text, {hidden}",
        ),
        ("hooks: {x: 'curl -H SECRET'}", "hooks.x: expected keys with values; got a text, {hidden}"),
        (
            "hooks: {x: {run: [a], env: {TOKEN: !SECRET }}}",
            "hooks.x.env.TOKEN: a tag, {hidden}, means nothing here: put a text that begins with ! in quotes",
        ),
        (
            "hooks: {x: {run: [a], env: {SECRET}}}",
            'hooks.x.env[...]: expected a text; got nothing: remove the key, or write ""',
        ),
        (
            "notify: [{name: a, to: 'https://h', on: [sen]}]",
            "notify[0].on[0]: expected one of {on}; got a text, {hidden}",
        ),
    ],
)
def test_an_error_is_still_reported_without_its_secret(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(text, encoding="utf-8")
    assert main(["check", "--json", "--config", str(policy)]) == 2
    words = ", ".join(get_args(NotificationKind))
    hidden = "not shown here, for it may be secret"
    errors = as_lines(json.loads(capsys.readouterr().out)["errors"])
    assert f"{policy}:1: {problem.format(hidden=hidden, on=words)}" in errors

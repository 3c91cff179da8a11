"""The policy file: rules between its keys, and warnings about questionable ones."""

# ruff: noqa: E501  # one case, one line

import zoneinfo
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import pytest

from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.policy import When, checks
from scheduled_events_agent.policy.load import ConfigError, may_want_to_observe, parse_settings
from scheduled_events_agent.policy.settings import Settings, parse_table


def faults(text: str, *, may_change_user: bool = True) -> Sequence[str]:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, "policy.yaml", may_change_user=may_change_user)
    assert caught.value.kind == "config"
    problems = tuple(map(str, caught.value.problems))
    assert str(caught.value) == "\n".join(problems)
    return problems


def warnings(text: str) -> list[str]:
    return [warning.text for warning in parse_settings(text, "policy.yaml").warnings]


FLEET = "fleet: {table: 'https://a.example/abc', max_events: 1}\n"
GUID = "6f1c1d6a-7a1c-4a1e-9f0e-0a1b2c3d4e5f"
HOOKS = "hooks: {drain: {run: [/d]}, resume: {run: [/r]}}\n"


def test_an_empty_file_is_the_built_in_policy() -> None:
    loaded = parse_settings("", "policy.yaml")
    assert loaded.settings == Settings()
    assert loaded.warnings == ()


def test_a_policy_has_the_hash_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(HOOKS.encode() + b"# a remark\r\n")
    assert load_policy(path).hash == sha256(path.read_bytes()).hexdigest()
    assert load_policy(None).hash == sha256(b"").hexdigest()


def test_errors_have_the_documented_form() -> None:
    text = "rules:\n  - {name: a}\n  - {name: b}\n  - name: c\n    approve: yes\n"
    assert faults(text) == (
        'policy.yaml:5: rules[2].approve: expected one of immediately, when-prepared, manual, never; got "yes"',
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (HOOKS + "rules: [{name: a, prepare: [drian]}]", 'rules[0].prepare[0]: there is no hook "drian"; did you mean "drain"?'),
        (HOOKS + "rules: [{name: a, on_start: [x]}]", 'rules[0].on_start[0]: there is no hook "x"; known are: drain, resume'),
        ("\nrules: [{name: a, recover: [x]}]", 'rules[0].recover[0]: there is no hook "x"; there is no hook yet'),
        ("hooks: {a.b: {run: [x]}}\non_clear: [c]", 'on_clear[0]: there is no hook "c"; known are: a.b'),
        (HOOKS + "on_clear: [resum]", 'on_clear[0]: there is no hook "resum"; did you mean "resume"?'),
        (HOOKS + "rules: [{name: a, prepare: [drain, drain]}]", 'rules[0].prepare[1]: hook "drain" is in this list already'),
        ("\nrules: [{name: a}, {name: a}]", 'rules[1].name: the rule in line 2 is called "a" already'),
        ("\nhooks: {a: {}}", "hooks.a: expected either run (a program and its arguments) or shell (a command line); got none"),
        ("\nhooks: {a: {run: [x], shell: x}}", "hooks.a: expected either run (a program and its arguments) or shell (a command line); got run and shell"),
        ("\nhooks: {a: {run: []}}", "hooks.a.run: expected a program and its arguments; got an empty list"),
        ("\nhooks: {a: {run: ['']}}", "hooks.a.run[0]: expected a text; got an empty one"),
        ("\nhooks: {a: {shell: ' '}}", "hooks.a.shell: expected a text; got an empty one"),
        ("\nhooks: {a: {shell: x, timeout: 0s}}", "hooks.a.timeout: expected more than 0s; got 0s"),
        ('\nagent: {state_dir: "/a\\0"}', "agent.state_dir: the character U+0000 cannot be part of it: remove it"),
        ("\nagent: {state_dir: state}", 'agent.state_dir: expected an absolute path; got "state"'),
        ('\nagent: {web_config: "/a\\0"}', "agent.web_config: the character U+0000 cannot be part of it: remove it"),
        ('\nhooks: {a: {run: [x, "\\0"]}}', "hooks.a.run[1]: the character U+0000 cannot be part of it: remove it"),
        (
            '\nhooks: {a: {shell: x, env: "TOKEN=abc"}}',
            "hooks.a.env: expected keys with values; got a text, not shown here, for it may be secret",
        ),
        ("\nhooks: {a: {shell: x, env: {A=B: c}}}", "hooks.a.env: expected a variable's name, without =; it is not shown here, for it may be secret"),
        ("\nrules: [{name: a, window: w}]", 'rules[0].window: there is no maintenance window "w"; there is no maintenance window yet'),
        ("\nmaintenance_windows: {w: {start: 02:00, length: 1h, timezone: CEST}}", 'maintenance_windows.w.timezone: expected an IANA time zone such as Europe/Berlin; got "CEST"'),
        ("\nmaintenance_windows: {w: {start: 02:00, length: 0s}}", "maintenance_windows.w.length: expected more than 0s; got 0s"),
        ("\nmaintenance_windows: {w: {start: 02:00, length: 7d1s}}", "maintenance_windows.w.length: expected at most 7d; got 7d1s"),
        ("\nmaintenance_windows: {w: {start: 02:00, length: 1h, days: []}}", "maintenance_windows.w.days: expected at least one; got an empty list: remove the key if it opens every day"),
        ("\nmaintenance_windows: {w: {start: 02:00, length: 1h, timezone: Europe/Berln}}", 'maintenance_windows.w.timezone: expected an IANA time zone such as Europe/Berlin; got "Europe/Berln"; did you mean "Europe/Berlin"?'),
        ("\nmaintenance_windows: {w: {start: 02:00, length: 1h, timezone: ../x}}", 'maintenance_windows.w.timezone: expected an IANA time zone such as Europe/Berlin; got "../x"'),
        ("\nrules: [{name: a, when: {description: '('}}]", 'rules[0].when.description: expected a regular expression; got "(": missing ), unterminated subpattern at position 0'),
        ("\nrules: [{name: a, when: {type: []}}]", "rules[0].when.type: expected at least one; got an empty list: remove the key if any will do"),
        ("\nrules: [{name: a, when: {affects: []}}]", "rules[0].when.affects: expected at least one; got an empty list"),
        ("\nrules: [{name: a, when: {duration_below: 9s, duration_at_least: 9s}}]", "rules[0].when.duration_below: expected more than duration_at_least (9s); got 9s"),
        ("\nrules: [{name: a, when: {notice_below: 0s}}]", "rules[0].when.notice_below: expected more than 0s; got 0s"),
        ("\nimds: {poll_interval: 249ms}", "imds.poll_interval: expected at least 250ms; got 249ms"),
        ("\nimds: {poll_interval: 61s}", "imds.poll_interval: expected at most 1m; got 1m1s"),
        ("\nimds: {first_request_timeout: 0s}", "imds.first_request_timeout: expected more than 0s; got 0s"),
        ("\nimds: {endpoint: 'https://x'}", 'imds.endpoint: expected auto or http://HOST[:PORT]; got "https://x"'),
        ("\nimds: {endpoint: 'http://x:0'}", 'imds.endpoint: expected auto or http://HOST[:PORT]; got "http://x:0"'),
        ("\nimds: {endpoint: 'http://x/metadata'}", 'imds.endpoint: expected auto or http://HOST[:PORT]; got "http://x/metadata"'),
        ("\nimds: {endpoint: 'http://999.1.1.1'}", 'imds.endpoint: expected auto or http://HOST[:PORT]; got "http://999.1.1.1"'),
        ("\nimds: {endpoint: 'http://a..b'}", 'imds.endpoint: expected auto or http://HOST[:PORT]; got "http://a..b"'),
        ("\nimds: {endpoint: 'http://xn--a'}", 'imds.endpoint: expected auto or http://HOST[:PORT]; got "http://xn--a"'),
        (f"\nimds: {{endpoint: 'http://a.{'b' * 64}'}}", f'imds.endpoint: expected auto or http://HOST[:PORT]; got "http://a.{"b" * 64}"'),
        ("\nagent: {listen: 9769}", 'agent.listen: expected ADDRESS:PORT or off; got "9769"'),
        ("\nagent: {listen: 'x:65536'}", 'agent.listen: expected ADDRESS:PORT or off; got "x:65536"'),
        ("\nagent: {healthy_within: 1s}", "agent.healthy_within: expected more than imds.poll_interval (1s); got 1s"),
        ("\nnotify: [{name: a, to: {file: 'https://x/KEY'}}]", "notify[0].to.file: expected an absolute path; it is not shown here, for it may be secret"),
        ("\nnotify: [{name: a, to: 'https://x', headers: {A b: c}}]", "notify[0].headers: expected the name of a header; it is not shown here, for it may be secret"),
        ("\nnotify: [{name: a, to: 'https://x', headers: {Content-Length: '3'}}]", 'notify[0].headers: a header cannot be called "Content-Length" here: take it out'),
        ("\nnotify: [{name: a, to: 'https://x', headers: {A: é}}]", "notify[0].headers.A: expected one line of printable ASCII characters"),
        ("\nfleet: {max_events: 1}", "fleet: expected one of table and leases, where the VMs write their records; got neither"),
        ("\nfleet: {table: null, max_events: 1}", "fleet: expected one of table and leases, where the VMs write their records; got neither"),
        ("\nfleet: {table: 'https://a.example/abc', leases: web}", "fleet.leases: expected one of table and leases; got both"),
        ("\nfleet: {table: 'https://a.example/abc', leases: ''}", "fleet.leases: expected one of table and leases; got both"),
        ("\nfleet: {leases: Web}", 'fleet.leases: expected the name of a namespace, or "" for that of the pod; got "Web"'),
        ("\nfleet: {leases: web, credential: managed-identity}", "fleet.credential: credential is for a table only: take it out"),
        ("\nfleet: {leases: web, proxy: environment}", "fleet.proxy: proxy is for a table only: take it out"),
        ("\nnotify: [{name: a}]", 'notify[0]: the key "to" is missing'),
        ("\nnotify: [{name: a, format: slack, to: ''}]", "notify[0].to: expected a URL such as https://example.com/hook; it is not shown here, for it may be secret"),
        ("\nnotify: [{name: a, format: kubernetes, to: 'https://x'}]", "notify[0].to: does not go with format kubernetes, which uses the account of the section kubernetes"),
        ("\nnotify: [{name: a, format: kubernetes, ca_file: /c}]", "notify[0].ca_file: does not go with format kubernetes, which uses the account of the section kubernetes"),
        ("\nkubernetes: {kubeconfig: k}", 'kubernetes.kubeconfig: expected an absolute path; got "k"'),
        ("\nkubernetes: {}\nnotify: [{name: kubernetes, to: 'https://x'}]", "kubernetes.events: the target of notify that is called kubernetes has another format: rename it, or write false"),
        ("\nfleet: {table: 'https://a.example/x'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/Tables'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.blob.core.windows.net/abc'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/1abc'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example:65536/abc'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'http://a.example/abc'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/abc?sig=KEY'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'DefaultEndpointsProtocol=https;AccountName=a;AccountKey=KEY=='}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://user:KEY@a.example/abc'}", "fleet.table: expected https://ACCOUNT.table.core.windows.net/TABLE, where TABLE has 3 to 63 letters and digits and is not tables; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/abc', credential: 'sv=1&sig=KEY'}", "fleet.credential: expected managed-identity; got a text, not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/abc', credential: {client_id: KEY}}", "fleet.credential.client_id: expected a client id in the form of a UUID; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/abc', credential: {}}", "fleet.credential: expected managed-identity, or one of client_id and sas_file"),
        (f"\nfleet: {{table: 'https://a.example/abc', credential: {{sas_file: /f, client_id: {GUID}}}}}", "fleet.credential: expected managed-identity, or one of client_id and sas_file"),
        ("\nfleet: {table: 'https://a.example/abc', credential: {client_id: web}}", "fleet.credential.client_id: expected a client id in the form of a UUID; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/abc', credential: {sas_file: '?sig=KEY'}}", "fleet.credential.sas_file: expected an absolute path; it is not shown here, for it may be secret"),
        ("\nfleet: {table: 'https://a.example/abc', proxy: x}", "fleet.proxy: expected http://HOST:PORT or environment"),
        ("\nfleet: {table: 'https://a.example/abc', members: []}", 'fleet.members: expected at least one; got an empty list: write ["*"] if all VMs run the agent'),
        ("\nfleet: {table: 'https://a.example/abc', max_events: 0}", "fleet.max_events: expected at least 1; got 0"),
        ("\nfleet: {table: 'https://a.example/abc', max_events: 101}", "fleet.max_events: expected at most 100; got 101"),
        ("\nfleet: {table: 'https://a.example/abc', on_unavailable: proceed}", 'fleet.on_unavailable: expected one of wait, begin; got "proceed"'),
        ("\nfleet: {table: 'https://a.example/abc', group: a/b}", 'fleet.group: expected a text that matches ^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$ (Letters, digits, . _ -; the same on all VMs. Default: the scale set\'s name.); got "a/b"'),
        ("\nfleet: {table: 'https://a.example/abc', credential: managed}", "fleet.credential: expected managed-identity; got a text, not shown here, for it may be secret"),
        ("\nrules: [{name: a, approve: when-prepared, shared: all-ready}]", "rules[0].shared: all-ready needs the store in which VMs report that they are ready: add fleet"),
        (FLEET + "rules: [{name: a, approve: immediately, shared: all-ready}]", "rules[0].shared: all-ready waits for all VMs, and approve: immediately for none: use when-prepared"),
        ("\nvm: {name: ''}", "vm.name: expected a text; got an empty one"),
        ("\nvm: {aliases: [a, '']}", "vm.aliases[1]: expected a text; got an empty one"),
    ],
)  # fmt: skip
def test_an_error_between_keys_names_its_line_and_a_hint(text: str, fault: str) -> None:
    assert faults(text) == (f"policy.yaml:2: {fault}",)


@pytest.mark.parametrize(
    ("url", "account_url", "name"),
    [
        ("https://acme.table.core.windows.net/events", "https://acme.table.core.windows.net", "events"),
        ("https://127.0.0.1:10002/devstore/Events1", "https://127.0.0.1:10002/devstore", "Events1"),
        ("http://127.0.0.1:10002/devstore/abc", "http://127.0.0.1:10002/devstore", "abc"),
    ],
)
def test_the_url_of_a_table_has_account_and_name(url: str, account_url: str, name: str) -> None:
    assert parse_table(url) == (account_url, name)
    assert parse_settings(f"fleet: {{table: '{url}', max_events: 1}}", "p").warnings == ()


@pytest.mark.parametrize("namespace", ["", "w", "scheduled-events", "a" * 63])
def test_a_fleet_may_have_leases_instead_of_a_table(namespace: str) -> None:
    loaded = parse_settings(f"fleet: {{leases: '{namespace}', max_events: 1}}", "p")
    assert loaded.settings.fleet is not None
    assert (loaded.settings.fleet.table, loaded.settings.fleet.leases) == (None, namespace)
    assert loaded.warnings == ()


def test_a_wrong_table_does_not_make_the_rules_wrong() -> None:
    text = "fleet: {table: 7}\nrules: [{name: a, approve: when-prepared, shared: all-ready}]"
    assert [fault.partition(": expected")[0] for fault in faults(text)] == ["policy.yaml:1: fleet.table"]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("fleet: {table: 'https://a.example/abc'}", "fleet: does nothing: it has no max_events, and no rule has shared: all-ready"),
        (FLEET + "rules: [{name: a, shared: all-ready}]", "rules[0].shared: does nothing with approve: never: use when-prepared"),
        (f"{FLEET[:-2]}, members: ['wbe_*']}}\nvm: {{name: web_0}}", "fleet.members: members does not match this VM, web_0: all VMs are waited for"),
    ],
)  # fmt: skip
def test_an_ineffective_fleet_setting_is_a_warning(text: str, warning: str) -> None:
    assert [text.partition(": ")[2] for text in warnings(text)] == [warning]


@pytest.mark.parametrize("listen", ["off", "127.0.0.1:0", "0.0.0.0:9769", "'[::1]:9769'", "localhost:80"])
def test_pages_are_served_on_an_address_or_not_at_all(listen: str) -> None:
    assert parse_settings(f"agent: {{listen: {listen}}}", "p").settings.agent.listen == listen.strip("'")


@pytest.mark.parametrize(
    "endpoint",
    ["auto", "http://169.254.169.254", "http://127.0.0.1:8080", "http://host/", "http://xn--bcher-kva.example"],
)
def test_the_endpoint_is_an_http_address_or_auto(endpoint: str) -> None:
    assert parse_settings(f"imds: {{endpoint: '{endpoint}'}}", "p").settings.imds.endpoint == endpoint


def test_a_hook_cannot_choose_its_user_on_windows() -> None:
    text = "hooks: {a: {shell: x, user: app}}"
    assert faults(text, may_change_user=False) == (
        "policy.yaml:1: hooks.a.user: cannot be used on Windows: remove it, hooks run as the service's account",
    )
    assert parse_settings(text, "p", may_change_user=True).settings.hooks["a"].user == "app"


def test_errors_of_all_parts_are_reported_at_once_in_line_order() -> None:
    text = "on_clear: [x]\nhooks:\n  a: {}\nimds: {poll_interval: 1ms}\n"
    assert [fault.split(": ")[0] for fault in faults(text)] == ["policy.yaml:1", "policy.yaml:3", "policy.yaml:4"]


NAMES_HOOKS = "this key names hooks; write a command below hooks"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *(
            (f"rules: [{{name: a, {key}: systemctl stop nginx}}]", f'got "systemctl stop nginx"; {NAMES_HOOKS}')
            for key in ("prepare", "on_start", "recover")
        ),
        (
            "on_clear: systemctl stop nginx",
            f'on_clear: expected a list; got "systemctl stop nginx"; {NAMES_HOOKS}',
        ),
        ("rules: [{name: a, prepare: [systemctl stop nginx]}]", f'; got "systemctl stop nginx"; {NAMES_HOOKS}'),
        ("rules: [{name: a, prepare: {run: [x]}}]", f"expected a list; got keys with values; {NAMES_HOOKS}"),
        ("rules: [{name: a, prepare: drain}]", 'prepare: expected a list; got "drain"; write [drain]'),
        ("rules: [{name: a, prepare: }]", "expected a list; got nothing: remove the key, or write []"),
        ("agent: {observe: yes}", 'agent: unknown key "observe"; write mode: observe'),
        ("observe: yes", '1: unknown key "observe"; write agent: {mode: observe}'),
        ("rules: [{name: a, immediately: yes}]", 'unknown key "immediately"; write approve: immediately'),
        ("rules: [{name: a, when: {Freeze: yes}}]", 'unknown key "Freeze"; write type: Freeze'),
        ("rules: [{name: a, hold: yes}]", 'unknown key "hold"; known here: name, '),
        ("maintenance_windows: {n: {start: 02:00, length: 1h, days: weekend}}", 'got "weekend"; write [sat, sun]'),
        (
            "maintenance_windows: {n: {start: 02:00, length: 1h, days: [Weekend]}}",
            'got "Weekend"; write [sat, sun]',
        ),
        (
            "maintenance_windows: {n: {start: 02:00, length: 1h, days: weekdays}}",
            "; write [mon, tue, wed, thu, fri]",
        ),
        (
            "maintenance_windows: {n: {start: 02:00, length: 1h, days: daily}}",
            "; remove the key: it opens every day",
        ),
        ("maintenance_windows: {n: {start: 02:00, length: 1h, days: saturday}}", 'got "saturday"; write sat'),
        ("notify: [{name: a, to: 'https://x/', true: [held]}]", 'put "on" in quotes: Helm and other programs'),
    ],
)
def test_a_hint_says_what_to_write(text: str, fault: str) -> None:
    found = faults(text)
    assert len(found) == 1
    assert fault in found[0]


def test_approve_when_prepared_with_nothing_to_prepare_is_warned_of() -> None:
    text = "rules[0].approve: approves at once, as the rule prepares nothing: write immediately if that is meant"
    for keys, is_warned in (
        ("", True),
        ("recover: [x]", True),
        ("prepare: [x], recover: []", False),
        ("drain_for: 5s", False),
    ):
        policy = f"rules: [{{name: a, approve: when-prepared, {keys}}}]\nhooks: {{x: {{shell: x}}}}\n"
        warnings = map(str, parse_settings(policy, "p.yaml").warnings)
        assert any(text in warning for warning in warnings) == is_warned


def test_a_wrong_value_does_not_hide_errors_between_other_keys() -> None:
    text = """\
rules:
  - {name: a, aprove: never, prepare: [drian, sync]}
hooks:
  drain: {run: [/bin/true], timeout: soon}
  sync: {run: /bin/sync}
"""
    no_list = "expected a list such as [one, two]; got a text, not shown here, for it may be secret"
    assert faults(text) == (
        'policy.yaml:2: rules[0]: unknown key "aprove"; did you mean "approve"?',
        'policy.yaml:2: rules[0].prepare[0]: there is no hook "drian"; did you mean "drain"?',
        'policy.yaml:4: hooks.drain.timeout: expected a duration such as 9s, 5m, 1h30m or 2d; got "soon"',
        f"policy.yaml:5: hooks.sync.run: {no_list}",
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "maintenance_windows: [night]\nrules: [{name: a, window: night}]",
            ["1: maintenance_windows: expected keys with values; got a list"],
        ),
        (
            "maintenance_windows: {night: {start: 25:00, length: 4h, timezone: Mars/Base}}",
            [
                '1: maintenance_windows.night.start: expected a time of day such as 02:00; got "25:00"',
                '1: maintenance_windows.night.timezone: expected an IANA time zone such as Europe/Berlin; got "Mars/Base"',
            ],
        ),
        (
            "maintenance_windows: {night: {start: 25:00, length: 4h}}\nrules: [{name: a, window: nite}]",
            [
                '1: maintenance_windows.night.start: expected a time of day such as 02:00; got "25:00"',
                '2: rules[0].window: there is no maintenance window "nite"; did you mean "night"?',
            ],
        ),
        (
            "hooks: {a: {run: /bin/true --now, shell: echo}}",
            [
                "1: hooks.a.shell: expected either run (a program and its arguments) or shell (a command line); got run and shell",
                "1: hooks.a.run: expected a list such as [one, two]; got a text, not shown here, for it may be secret",
            ],
        ),
        (
            "hooks:\n  a:\n    run: sh -c 'a, b'\n",
            [
                "3: hooks.a.run: expected a list such as [one, two]; got a text, not shown here, for it may be secret"
            ],
        ),
    ],
)
def test_an_error_is_reported_in_the_first_run_with_a_hint_that_works(text: str, found: list[str]) -> None:
    assert sorted(faults(text)) == sorted(f"policy.yaml:{line}" for line in found)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("US/Pacific", ", which is an old name: use the new one, or install the package tzdata-legacy"),
        ("Asia/Calcutta", ", which is an old name: use the new one, or install the package tzdata-legacy"),
        ("Japan", ", which is an old name: use the new one, or install the package tzdata-legacy"),
        ("W. Europe Standard Time", ", which is a name of Windows"),
        ("UTC-11", ", which is a name of Windows"),
    ],
)
def test_a_time_zone_of_another_system_or_time_is_named_as_such(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def know_few(key: str) -> NoReturn:
        raise zoneinfo.ZoneInfoNotFoundError(key)

    monkeypatch.setattr(zoneinfo, "ZoneInfo", know_few)
    monkeypatch.setattr(zoneinfo, "available_timezones", lambda: {"Europe/Berlin", "Asia/Qatar", "Pacific/Palau"})
    text = f"maintenance_windows: {{w: {{start: 02:00, length: 1h, timezone: {name}}}}}"
    error = f'expected an IANA time zone such as Europe/Berlin; got "{name}"{hint}'
    assert faults(text) == (f"policy.yaml:1: maintenance_windows.w.timezone: {error}",)


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("{}", "{}"),
        ("{}", "{type: Freeze, duration_below: 9s}"),
        ("{}", "{affects: shared}"),
        ("{affects: [self, others]}", "{affects: [shared, others]}"),
        ("{type: [Freeze, Reboot]}", "{type: Freeze, source: User}"),
        ("{duration_below: 9s}", "{duration_below: 9s}"),
        ("{duration_below: 9s}", "{duration_below: 5s, duration_at_least: 1s}"),
        ("{duration_at_least: 5s}", "{duration_at_least: 5s}"),
        ("{notice_below: 1h}", "{notice_below: 30s}"),
        ("{resource: ['a*', 'b*']}", "{resource: 'a*'}"),
        ("{description: x}", "{description: x, type: Freeze}"),
    ],
)
def test_a_rule_that_can_never_match_is_a_warning(wide: str, narrow: str) -> None:
    text = f"rules:\n  - {{name: a, when: {wide}}}\n  - {{name: b, when: {narrow}}}\n"
    assert warnings(text) == [
        "policy.yaml:3: rules[1]: never matches: rule a above matches every event that this rule matches"
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("{type: Freeze}", "{}"),
        ("{type: Freeze}", "{type: [Freeze, Reboot]}"),
        ("{source: User}", "{type: Freeze}"),
        ("{}", "{affects: others}"),
        ("{affects: shared}", "{affects: self}"),
        ("{duration_below: 9s}", "{duration_below: 10s}"),
        ("{duration_below: 9s}", "{duration_at_least: 1s}"),
        ("{duration_at_least: 0s}", "{}"),
        ("{notice_at_least: 1h}", "{notice_at_least: 30m}"),
        ("{resource: 'a*'}", "{resource: 'ab*'}"),
        ("{status: Scheduled}", "{status: Started}"),
    ],
)
def test_a_rule_that_may_still_match_is_no_warning(one: str, other: str) -> None:
    text = f"rules:\n  - {{name: a, when: {one}}}\n  - {{name: b, when: {other}}}\n"
    assert warnings(text) == []


@pytest.mark.parametrize(
    ("rule", "warning"),
    [
        ("prepare: [drain], recover: [resume], approve: when-prepared, shared: first", "rules[0].shared: approves for all VMs of an event, but does not know whether the others are prepared: write hold, all-ready, or approve: immediately"),
        ("prepare: [drain], recover: [resume], approve: when-prepared, shared: any", "rules[0].shared: approves for all VMs of an event, but does not know whether the others are prepared: write hold, all-ready, or approve: immediately"),
        ("prepare: [drain], recover: [resume], lead: 4m", "rules[0].prepare[0]: the timeout of drain (5m) is longer than lead (4m): NotBefore may cut it short"),
        ("prepare: [drain], recover: [resume], drain_for: 11m, lead: 10m, when: {type: Reboot}", "rules[0].drain_for: it (11m) is longer than lead (10m): NotBefore may cut it short"),
        ("prepare: [drain], recover: [resume], approve: immediately", "rules[0].approve: does not wait for the hooks of prepare: write when-prepared if it should"),
        ("on_start: [drain, resume], drain_for: 30s, approve: immediately, when: {type: Reboot}", "rules[0].approve: does not wait for the end of drain_for: write when-prepared if it should"),
        ("on_start: [drain], recover: [resume]", "rules[0].recover: recovers, but the rule prepares nothing"),
        ("on_start: [drain, resume], approve: immediately, when: {affects: others}", "rules[0].approve: never approves: an event that does not name this VM is not approved from here"),
        ("on_start: [drain, resume], approve: immediately, when: {status: Started}", "rules[0]: an event that has started can neither be prepared for nor approved: only on_start runs"),
        ("prepare: [drain], recover: [], approve: when-prepared", "hooks.resume: no rule names this hook"),
    ],
)  # fmt: skip
def test_a_setting_that_is_probably_a_mistake_is_a_warning(rule: str, warning: str) -> None:
    line = 2 if warning.startswith("hooks") else 1
    text = f"rules: [{{name: a, {rule}}}]\n{HOOKS}"
    assert warnings(text) == [f"policy.yaml:{line}: {warning}"]


@pytest.mark.parametrize(
    ("hook", "is_warned_of"),
    [
        ("{run: [/usr/share/scheduled-events-agent/systemd/run-as-root, drain]}", True),
        ("{run: [run-as-root, drain]}", True),
        ("{run: [run-as-root, drain], serialize: true}", False),
        ("{run: [/opt/run-as-root/drain, run-as-root]}", False),
        ("{shell: run-as-root drain}", False),
    ],
)
def test_a_hook_that_starts_its_unit_twice_at_a_time_is_a_warning(hook: str, is_warned_of: bool) -> None:
    text = f"rules: [{{name: a, prepare: [drain], recover: [], approve: when-prepared}}]\nhooks: {{drain: {hook}}}"
    told = "run-as-root starts a unit, and two starts of one unit are one run: write serialize: true"
    assert warnings(text) == ([f"policy.yaml:2: hooks.drain.run: {told}"] if is_warned_of else [])


def test_two_hooks_that_start_one_unit_are_a_warning() -> None:
    hooks = "\n".join(
        f"  {name}: {{run: [/x/run-as-root, {program}], serialize: true}}"
        for name, program in (("a", "drain"), ("b", "save"), ("c", "drain"))
    )
    text = f"rules: [{{name: x, prepare: [a, b, c], recover: [], approve: when-prepared}}]\nhooks:\n{hooks}"
    shared = "run-as-root starts a unit, and two starts of one unit are one run"
    assert warnings(text) == [
        f"policy.yaml:5: hooks.c.run: {shared}: name hook a, which starts the same one, in its place"
    ]


NEVER_BACK = "rules[0].prepare: nothing puts this VM back in service: write recover: [] if that is meant"


@pytest.mark.parametrize(
    ("rule", "warning"),
    [
        ("prepare: [drain]", NEVER_BACK),
        ("prepare: [drain], when: {type: [Preempt, Redeploy]}", NEVER_BACK),
        ("prepare: [drain], recover: []", None),
        ("prepare: [drain], when: {type: [Preempt, Terminate]}", None),
        ("drain_for: 15s", None),
        ("drain_for: 16s, when: {type: Preempt}", None),
        ("drain_for: 31s, when: {type: Preempt}", "rules[0].drain_for: 31s will be cut to 30s for a Preempt: there are 30s for it and the hooks"),
        ("drain_for: 16s, prepare: [drain], when: {type: Preempt}", "rules[0].drain_for: 16s will be cut to 15s for a Preempt: there are 30s for it and the hooks"),
        ("drain_for: 16s, prepare: [quick], when: {type: Preempt}", None),
        ("drain_for: 8m, prepare: [drain, quick], recover: [drain], when: {type: [Freeze, Reboot]}", None),
        ("drain_for: 6m, prepare: [drain], recover: [drain], when: {type: [Reboot, Redeploy]}", "rules[0].drain_for: 6m will be cut to 5m for a Redeploy: there are 10m for it and the hooks"),
        ("drain_for: 3m, prepare: [drain], when: {type: Terminate}", "rules[0].drain_for: 3m will be cut to 2m30s for a Terminate: there are 5m for it and the hooks"),
        ("drain_for: 16s, prepare: [drain], recover: [drain]", None),
        ("when: {resource: 'web_[0-9'}", "rules[0].when.resource: a bracket of the glob does not close, so it matches only a bracket"),
        ("when: {resource: [web, 'web_[!]x']}", "rules[0].when.resource[1]: a bracket of the glob does not close, so it matches only a bracket"),
        ("when: {resource: ['web_[0-9]', 'a[]]', 'a[!]]b]']}", None),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_a_warning(rule: str, warning: str | None) -> None:
    hooks = "hooks: {drain: {run: [/d]}, quick: {run: [/q], timeout: 5s}}\non_clear: [drain, quick]\n"
    found = warnings(f"rules: [{{name: a, {rule}}}]\n{hooks}")
    assert found == ([f"policy.yaml:1: {warning}"] if warning else [])


def test_a_drain_that_no_balancer_can_see_is_a_warning() -> None:
    text = "agent: {listen: off}\nrules: [{name: a, drain_for: 9s}]"
    assert warnings(text) == ["policy.yaml:2: rules[0].drain_for: no balancer can see it, as agent.listen is off"]


def test_a_bracket_that_does_not_close_is_a_warning_in_every_glob() -> None:
    targets = "notify: [{name: a, to: 'https://x', when: {resource: 'SECRET['}}]\n"
    fleet = "fleet: {table: 'https://a.example/abc', max_events: 1, members: ['web[']}\n"
    assert [warning.split(": ")[1] for warning in warnings(targets + fleet)] == [
        "notify[0].when.resource",
        "fleet.members[0]",
    ]
    assert "SECRET" not in str(warnings(targets))


@pytest.mark.parametrize("path", ["/var/lib/agent", r"C:\ProgramData\Agent", r"\\server\share\agent"])
def test_a_state_directory_is_an_absolute_path_of_either_system(path: str) -> None:
    assert warnings(f"agent: {{state_dir: '{path}'}}") == []


def run_warnings(run: str) -> list[str]:
    text = f"on_clear: [a]\nhooks:\n  a: {{run: {run}}}\n"
    return [warning.removeprefix("policy.yaml:3: hooks.a.run: ") for warning in warnings(text)]


@pytest.mark.parametrize(
    ("run", "sign"),
    [
        ("[nginx, -s, quit, '&&', sleep, '10']", "&&"),
        ("[a, '||', b]", "||"),
        ("[a, '|', b]", "|"),
        ("[a, '>', /dev/null]", ">"),
        ("[a, b, ;, c]", ";"),
        ("[echo, $TOKEN]", "$..."),
    ],
)
def test_shell_syntax_without_a_shell_is_a_warning(run: str, sign: str) -> None:
    assert run_warnings(run) == [f'run starts no shell: "{sign}" is passed as an argument; use shell']


@pytest.mark.parametrize(
    "run", ["[sh, -c, 'a && b', x, ;]", "[find, /x, -exec, rm, '{}', ;]", "[a, 'b|c', 'x;', 'a$']"]
)
def test_text_that_only_resembles_shell_syntax_is_no_warning(run: str) -> None:
    assert run_warnings(run) == []


@pytest.mark.parametrize(
    "more", ["lead: 15m", "approve: manual", "approve: when-prepared", "approve: never", "when: {type: Preempt}"]
)
def test_a_rule_that_prepares_is_no_warning_for_any_approver(more: str) -> None:
    assert warnings(f"rules: [{{name: a, prepare: [drain], recover: [resume], {more}}}]\n{HOOKS}") == []


def test_a_window_of_a_rule_that_does_not_approve_is_a_warning() -> None:
    text = "maintenance_windows: {night: {start: 02:00, length: 4h}}\nrules: [{name: a, approve: manual, window: night}]"
    assert warnings(text) == [
        "policy.yaml:2: rules[0].window: does nothing with approve: manual, as only events that are approved begin in it"
    ]


@pytest.mark.parametrize(
    ("kubernetes", "command", "warning"),
    [
        ("lifecycle_conditions: true", "drain, --conditions", ""),
        ("", "drain", ""),
        ("lifecycle_conditions: true", "drain, --timeout, 5m", "sets no lifecycle condition, and the agent does"),
        ("", "uncordon, --conditions", "sets lifecycle conditions, and the agent does not"),
    ],
)
def test_only_one_half_of_the_lifecycle_conditions_is_a_warning(
    kubernetes: str, command: str, warning: str
) -> None:
    run = f"/usr/bin/scheduled-events-agent, kubernetes, {command}"
    found = warnings(f"kubernetes: {{{kubernetes}}}\non_clear: [a]\nhooks:\n  a: {{run: [{run}]}}\n")
    assert [one.partition(": hooks.a.run: ")[2].partition(":")[0] for one in found] == (
        [warning] if warning else []
    )


def test_a_section_that_tells_a_cluster_nothing_is_a_warning() -> None:
    text = "kubernetes: {condition: false, events: false}"
    assert warnings(text) == [
        "policy.yaml:1: kubernetes: does nothing: condition, lifecycle_conditions and events are false"
    ]


@pytest.mark.parametrize(
    ("host", "is_warned_of"), [("metadata.example", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_an_endpoint_with_a_name_is_a_warning(host: str, is_warned_of: bool) -> None:
    text = f"imds: {{endpoint: 'http://{host}:8080'}}"
    expected = f"policy.yaml:1: imds.endpoint: {host} is looked up before each request: write an address"
    assert warnings(text) == ([expected] if is_warned_of else [])


def test_many_rules_are_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    covers = checks._covers

    def counted(wide: When, narrow: When) -> bool:
        nonlocal compared
        compared += 1
        return covers(wide, narrow)

    monkeypatch.setattr(checks, "_covers", counted)
    named = [f"  - {{name: n{index}, when: {{resource: 'web_{index}'}}}}" for index in range(1000)]
    timed = [f"  - {{name: t{index}, when: {{duration_below: {index + 1}s}}}}" for index in reversed(range(1000))]
    last = "  - {name: last, when: {type: Freeze}}"
    text = "\n".join(["rules:", *named, *timed[::-1], "  - {name: all}", last])
    takes_all = "never matches: rule all above matches every event that this rule matches"
    assert warnings(text) == [f"policy.yaml:2003: rules[2001]: {takes_all}"]
    assert compared < 2000 * 70


def test_an_unused_window_is_a_warning() -> None:
    text = "maintenance_windows: {night: {start: 02:00, length: 4h}}"
    assert warnings(text) == ["policy.yaml:1: maintenance_windows.night: no rule names this maintenance window"]


SPOT = "\nrules: [{name: a, when: {type: SpotRebalanceRecommendation}, prepare: [drain], recover: [resume]%s}]"


@pytest.mark.parametrize(
    ("more", "warning"),
    [
        ("", None),
        (", drain_for: 5s, expire_after: 10m, on_failure: approve", None),
        (", approve: when-prepared", "approve: never approves: an approval of a recommendation has no effect"),
        (", lead: 5m", "lead: does nothing: a recommendation is prepared for at once"),
        (", on_start: [drain]", "on_start: never runs: a recommendation does not start"),
    ],
)
def test_an_impossible_setting_of_a_recommendation_rule_is_a_warning(more: str, warning: str | None) -> None:
    found = [text for text in warnings(HOOKS.strip() + SPOT % more) if "is longer than lead" not in text]
    assert found == ([f"policy.yaml:2: rules[0].{warning}"] if warning else [])


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            HOOKS + "rules: [{name: a, prepare: [drain], recover: [resume], expire_after: 5m}]",
            "2: rules[0].expire_after: does nothing: when.type does not name SpotRebalanceRecommendation",
        ),
        (
            HOOKS + "imds: {api_version: 2020-07-01}" + SPOT % "",
            "2: imds.api_version: 2020-07-01 has no SpotRebalanceRecommendation, which a rule names: write auto",
        ),
    ],
)
def test_a_recommendation_setting_without_recommendations_is_a_warning(text: str, warning: str) -> None:
    assert warnings(text) == [f"policy.yaml:{warning}"]


def test_a_rule_for_every_type_does_not_hide_a_rule_for_recommendations() -> None:
    assert warnings("rules: [{name: all}, {name: spot, when: {type: SpotRebalanceRecommendation}}]") == []
    assert (
        warnings("rules: [{name: all}, {name: both, when: {type: [Preempt, SpotRebalanceRecommendation]}}]") == []
    )
    twice = "rules: [{name: one, when: {type: [Preempt, SpotRebalanceRecommendation]}}, {name: two, when: {type: SpotRebalanceRecommendation}}]"
    assert warnings(twice) == [
        "policy.yaml:1: rules[1]: never matches: rule one above matches every event that this rule matches"
    ]


@pytest.mark.parametrize(
    ("text", "observes"),
    [
        ("agent: {mode: act}", False),
        ("agent: {'mode': \"act\"}  # mode: observe", False),
        ("agent: {mode: act}\nrules: [{name: observe}]", False),
        ("hooks: {drain: {env: {MODE: fast}}}", False),
        ("rules: []\n# mode: observe", False),
        ("agent: {mode: observe}", True),
        ("agent: {mode: observ}", True),
        ("agent: {mode: }", True),
        ("agent:\r\n  mode:\r\n    observe\r\n", True),
        ("agent: {mode: act, mode: observe}", True),
        ("x: &m observe\nagent: {mode: *m}", True),
        # Of the key, the indentation, the place.
        ("agent: {moed: observe}", True),
        ("agent: {Mode: Observe}", True),
        ("agent:\n  mode:observe\n", True),
        ("agent: {mode:observe}", True),
        ("agent:\n  mode=observe\n", True),
        ("agent:\n  log:\n    mode: observe\n", True),
        ("agent:\n- mode: observe\n", True),
        ("- agent: {mode: observe}", True),
        ("mode: observe", True),
        ("observe: yes", True),
        # No YAML.
        ("agent:\n\tmode: observe\n", True),
        ("agent: {mode: act}\nrules: [", False),
        ("agent: {mode: observe}\nrules: [", True),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_policy_with_errors_may_want_to_observe(text: str, encoding: str, *, observes: bool) -> None:
    assert may_want_to_observe(text.encode(encoding)) is observes

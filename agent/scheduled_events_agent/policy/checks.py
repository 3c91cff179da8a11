"""Checks between the keys of a policy: errors, and warnings about what is probably not intended. No I/O."""

import re
from bisect import insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.imds.document import EVENT_TYPES, REBALANCE_VERSION, RECOMMENDATION
from scheduled_events_agent.imds.endpoint import ip_address_of, parse_endpoint
from scheduled_events_agent.policy.decide import promised_times
from scheduled_events_agent.policy.durations import format_duration, format_estimate, quote
from scheduled_events_agent.policy.rules import (
    DEFAULT_EXPIRE_SECONDS,
    Hook,
    Rule,
    RuleAffects,
    When,
    names_recommendations,
)
from scheduled_events_agent.policy.settings import (
    KUBERNETES_FORMAT,
    NOTIFICATION_FORMATS,
    ROOT_STARTER,
    FleetCredential,
    FleetSettings,
    NotifyTarget,
    SecretFile,
    Settings,
    is_absolute_path,
    is_drain_command,
    is_open,
    is_started_as_root,
    parse_table,
)
from scheduled_events_agent.policy.typed_yaml import Finding, Parsed, nearest, without_value

_LISTEN = r"(?P<address>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})"
_HOST_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_URL = r"https?://[^\s/]+\S*"
_UNENCRYPTED = r"http://(?!localhost\b|127\.|\[::1\])"
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_OWN_HEADERS = ("connection", "content-length", "host", "transfer-encoding")
_HIDDEN = "it is not shown here, for it may be secret"
_NO_PATH = f"expected an absolute path; {_HIDDEN}"
_PROXY = r"http://[^\s/]+/?"
_NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_GUID = r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
# Searching backtracks, and nothing can end it. These limits, with that of the text searched (decide.py), keep the
# shapes whose time grows without bound, or to hours, from the engine's thread.
_MAX_REGEX_CHARACTERS = 1000
_MAX_REPETITIONS = 3
_MAX_OPTIONS = 10
_NO_OPERATOR = r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"
_REPETITION = r"[*+{]"
_OPTION = r"(?<![(*+?}])\?"

# A closed bracket expression of a glob. The first character in it may be a bracket.
_BRACKETS = r"\[!?+\]?+[^\]]*\]"
_SHELL_OPERATORS = ("&&", "||", "|", ">", ">>", "<", ";", "&")
# The next item of such an option is a command, for a shell or for find.
_COMMAND_OPTIONS = ("-c", "-ec", "-lc", "/c", "-command", "-exec", "-execdir", "-ok")

# Each rule is compared with so many of those above it, first those with the fewest conditions: they cover most.
_MAX_COMPARED = 32

# Conditions of a rule that are lists.
_LISTS = ("type", "source", "status", "resource", "description")

_RECOMMENDATIONS = When(type=(RECOMMENDATION,))


def errors(settings: Settings, parsed: Parsed[Settings], *, may_change_user: bool) -> Iterator[Finding]:
    """Why a policy cannot be used although each of its values is valid.

    ``may_change_user``: the result of the function of that name in ``host``.
    """
    yield from _setting_errors(settings)
    firsts: dict[str, int] = {}
    for index, rule in enumerate(settings.rules):
        path = f"rules[{index}]"
        first = firsts.setdefault(rule.name, index)
        if first != index:
            earlier = parsed.places[f"rules[{first}].name"]
            yield f"{path}.name", f'the rule in line {earlier.line} is called "{rule.name}" already'
        for stage in ("prepare", "on_start", "recover"):
            yield from _hook_list_errors(f"{path}.{stage}", getattr(rule, stage), settings, parsed)
        if rule.window is not None and not _has("maintenance_windows", rule.window, settings, parsed):
            names = _names("maintenance_windows", settings.maintenance_windows, parsed)
            yield f"{path}.window", *_unknown("maintenance window", rule.window, names)
        yield from _when_errors(f"{path}.when", rule.when, parsed)
        yield from _fleet_rule_errors(path, rule, settings, parsed)
    yield from _notify_errors(settings, parsed)
    yield from _fleet_errors(settings, parsed)
    yield from _kubernetes_errors(settings)
    yield from _hook_list_errors("on_clear", settings.on_clear, settings, parsed)
    for name, hook in settings.hooks.items():
        yield from _hook_errors(f"hooks.{name}", hook, parsed, may_change_user=may_change_user)
    for name, window in settings.maintenance_windows.items():
        if not window.days:
            path = f"maintenance_windows.{name}.days"
            yield path, "expected at least one; got an empty list: remove the key if it opens every day"


def _notify_errors(settings: Settings, parsed: Parsed[Settings]) -> Iterator[Finding]:
    names: set[str] = set()
    for index, target in enumerate(settings.notify):
        path = f"notify[{index}]"
        if target.name in names:
            yield f"{path}.name", f'another target is called "{target.name}" already'
        names.add(target.name)
        if target.on == () and f"{path}.on" in parsed.places:
            yield f"{path}.on", "expected at least one; got an empty list"
        if target.format == KUBERNETES_FORMAT:
            yield from _kubernetes_target_errors(path, target)
        elif f"{path}.to" not in parsed.places:
            yield path, 'the key "to" is missing'
        elif isinstance(target.to, str) and not re.fullmatch(_URL, target.to):
            yield (
                f"{path}.to",
                f"expected a URL such as https://example.com/hook; {_HIDDEN}",
            )
        if target.format not in NOTIFICATION_FORMATS and not is_absolute_path(target.format):
            expected = f"{', '.join(NOTIFICATION_FORMATS)} or the absolute path of a template"
            hint = _hint(target.format, NOTIFICATION_FORMATS)
            yield f"{path}.format", f"expected {expected}; {_HIDDEN}", hint
        if target.proxy not in (None, "environment") and not re.fullmatch(_PROXY, target.proxy or ""):
            yield f"{path}.proxy", "expected http://HOST:PORT or environment"
        if target.ca_file is not None and not is_absolute_path(target.ca_file):
            yield f"{path}.ca_file", _NO_PATH
        if isinstance(target.to, SecretFile) and not is_absolute_path(target.to.file):
            yield f"{path}.to.file", _NO_PATH
        yield from _header_errors(path, target)
        for place, message in _when_errors(f"{path}.when", target.when, parsed):
            yield place, without_value(message)


def _kubernetes_target_errors(path: str, target: NotifyTarget) -> Iterator[Finding]:
    for key in ("to", "headers", "proxy", "ca_file"):
        if getattr(target, key):
            text = "does not go with format kubernetes, which uses the account of the section kubernetes"
            yield f"{path}.{key}", text


def _header_errors(path: str, target: NotifyTarget) -> Iterator[Finding]:
    for name, value in target.headers.items():
        if not re.fullmatch(_HEADER_NAME, name):
            yield f"{path}.headers", f"expected the name of a header; {_HIDDEN}"
            continue
        if name.lower() in _OWN_HEADERS:
            yield f"{path}.headers", f'a header cannot be called "{name}" here: take it out'
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            yield f"{path}.headers.{name}", "expected one line of printable ASCII characters"
        if isinstance(value, SecretFile) and not is_absolute_path(value.file):
            yield f"{path}.headers.{name}.file", _NO_PATH
    if target.format == "pagerduty" and not any(name.lower() == "x-routing-key" for name in target.headers):
        yield f"{path}.headers", "PagerDuty needs its integration key as the header X-Routing-Key"


def _fleet_errors(settings: Settings, parsed: Parsed[Settings]) -> Iterator[Finding]:
    fleet = settings.fleet
    if fleet is None:
        return
    yield from _fleet_store_errors(fleet, parsed)
    if isinstance(fleet.credential, FleetCredential):
        credential = fleet.credential
        path = "fleet.credential"
        if (credential.client_id is None) == (credential.sas_file is None):
            yield path, "expected managed-identity, or one of client_id and sas_file"
        if credential.client_id is not None and not re.fullmatch(_GUID, credential.client_id):
            yield f"{path}.client_id", f"expected a client id in the form of a UUID; {_HIDDEN}"
        if credential.sas_file is not None and not is_absolute_path(credential.sas_file):
            yield f"{path}.sas_file", _NO_PATH
    if fleet.proxy not in (None, "environment") and not re.fullmatch(_PROXY, fleet.proxy or ""):
        yield "fleet.proxy", "expected http://HOST:PORT or environment"
    if not fleet.members and "fleet.members" in parsed.places:
        yield "fleet.members", 'expected at least one; got an empty list: write ["*"] if all VMs run the agent'


def _fleet_store_errors(fleet: FleetSettings, parsed: Parsed[Settings]) -> Iterator[Finding]:
    if fleet.table is None and fleet.leases is None:
        yield "fleet", "expected one of table and leases, where the VMs write their records; got neither"
    if fleet.table is not None and fleet.leases is not None:
        yield "fleet.leases", "expected one of table and leases; got both"
    if fleet.table is not None and parse_table(fleet.table) is None:
        name = "TABLE has 3 to 63 letters and digits and is not tables"
        yield "fleet.table", f"expected https://ACCOUNT.table.core.windows.net/TABLE, where {name}; {_HIDDEN}"
    if fleet.leases and not re.fullmatch(_NAMESPACE, fleet.leases):
        yield "fleet.leases", f'expected the name of a namespace, or "" for that of the pod; got "{fleet.leases}"'
    if fleet.leases is not None:
        for key in ("credential", "proxy"):
            if f"fleet.{key}" in parsed.places:
                yield f"fleet.{key}", f"{key} is for a table only: take it out"


def _kubernetes_errors(settings: Settings) -> Iterator[Finding]:
    kubernetes = settings.kubernetes
    if kubernetes is None:
        return
    if kubernetes.kubeconfig is not None and not is_absolute_path(kubernetes.kubeconfig):
        yield "kubernetes.kubeconfig", f"expected an absolute path; got {quote(kubernetes.kubeconfig)}"
    names = [target.name for target in settings.notify]
    if settings.lacks_event_target and KUBERNETES_FORMAT in names:
        text = "the target of notify that is called kubernetes has another format: rename it, or write false"
        yield "kubernetes.events", text


def _fleet_rule_errors(path: str, rule: Rule, settings: Settings, parsed: Parsed[Settings]) -> Iterator[Finding]:
    if rule.shared != "all-ready":
        return
    if settings.fleet is None and "fleet" not in parsed.places:
        yield f"{path}.shared", "all-ready needs the store in which VMs report that they are ready: add fleet"
    if rule.approve == "immediately":
        yield f"{path}.shared", "all-ready waits for all VMs, and approve: immediately for none: use when-prepared"


def _setting_errors(settings: Settings) -> Iterator[Finding]:
    imds = settings.imds
    agent = settings.agent
    if imds.endpoint != "auto" and parse_endpoint(imds.endpoint) is None:
        yield "imds.endpoint", f'expected auto or http://HOST[:PORT]; got "{imds.endpoint}"'
    if error := listen_error(agent.listen):
        yield "agent.listen", error
    for index, name in enumerate(agent.listen_names):
        if not re.fullmatch(_HOST_NAME, name):
            yield f"agent.listen_names[{index}]", f'expected a name such as vm.example.com; got "{name}"'
    if agent.healthy_within <= imds.poll_interval:
        expected = f"more than imds.poll_interval ({format_duration(imds.poll_interval)})"
        yield "agent.healthy_within", f"expected {expected}; got {format_duration(agent.healthy_within)}"
    texts = {"vm.name": settings.vm.name, "agent.state_dir": agent.state_dir, "agent.web_config": agent.web_config}
    if agent.state_dir and agent.state_dir.strip() and not is_absolute_path(agent.state_dir):
        yield "agent.state_dir", f"expected an absolute path; got {quote(agent.state_dir)}"
    texts |= {f"vm.aliases[{index}]": alias for index, alias in enumerate(settings.vm.aliases)}
    yield from _blank_errors(texts)


def listen_error(listen: str) -> str:
    """Why ``agent.listen`` cannot have this value; "" if it can."""
    match = re.fullmatch(_LISTEN, listen)
    is_address = match is not None and int(match["port"]) <= 65535 and _can_be(match["address"])
    return "" if listen == "off" or is_address else f'expected ADDRESS:PORT or off; got "{listen}"'


def _can_be(address: str) -> bool:
    """Whether it may be an address or a name of this machine."""
    is_number = address.startswith("[") or not address.strip("0123456789.")
    return not is_number or ip_address_of(address) is not None


def _is_name(host: str) -> bool:
    """Whether it is a name that has to be looked up."""
    return ip_address_of(host) is None and host != "localhost"


def _has(section: str, name: str, settings: Settings, parsed: Parsed[Settings]) -> bool:
    """Whether there is a hook or a window of this name, even one with a wrong value."""
    is_there = name in getattr(settings, section) or f"{section}.{name}" in parsed.places
    return is_there or any(problem.path == section for problem in parsed.problems)


def _names(section: str, right: Iterable[str], parsed: Parsed[Settings]) -> Iterable[str]:
    """The names of all hooks or windows. ``right``: those with a right value.

    The others are found by their paths, except names with a dot.
    """
    found = [re.fullmatch(rf"{section}\.([^.\[]+)", path) for path in parsed.places]
    return dict.fromkeys([*right, *[match[1] for match in found if match]])


def _hook_list_errors(
    path: str, names: tuple[str, ...], settings: Settings, parsed: Parsed[Settings]
) -> Iterator[Finding]:
    before: set[str] = set()
    for index, name in enumerate(names):
        if not _has("hooks", name, settings, parsed):
            yield f"{path}[{index}]", *_unknown("hook", name, _names("hooks", settings.hooks, parsed))
        elif name in before:
            yield f"{path}[{index}]", f'hook "{name}" is in this list already'
        before.add(name)


def _when_errors(path: str, when: When, parsed: Parsed[Settings]) -> Iterator[tuple[str, str]]:
    for key in ("affects", *_LISTS):
        if not getattr(when, key) and f"{path}.{key}" in parsed.places:
            hint = "" if key == "affects" else ": remove the key if any will do"
            yield f"{path}.{key}", f"expected at least one; got an empty list{hint}"
    for index, text in enumerate(when.description):
        if error := _regex_error(text):
            where = f"{path}.description[{index}]"
            yield where if where in parsed.places else f"{path}.description", error
    for kind in ("duration", "notice"):
        below = getattr(when, f"{kind}_below")
        at_least = getattr(when, f"{kind}_at_least")
        if below is not None and at_least is not None and below <= at_least:
            limit = f"more than {kind}_at_least ({format_duration(at_least)})"
            yield f"{path}.{kind}_below", f"expected {limit}; got {format_duration(below)}"


def _regex_error(text: str) -> str | None:
    if len(text) > _MAX_REGEX_CHARACTERS:
        return f"expected at most {_MAX_REGEX_CHARACTERS} characters; got {len(text)}"
    try:
        re.compile(text, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        return f'expected a regular expression; got "{text}": {error}'
    operators = re.sub(_NO_OPERATOR, "x", text)
    if re.search(r"\)[*+{]", operators):
        return f'expected no repeated group, which may take hours to search; got "{text}"'
    for operator, most, name in (
        (_REPETITION, _MAX_REPETITIONS, "of *, + and {}"),
        (_OPTION, _MAX_OPTIONS, "of ?"),
    ):
        if (count := len(re.findall(operator, operators))) > most:
            return f'expected at most {most} {name}, as more may take hours to search; got {count} in "{text}"'
    return None


def _hook_errors(path: str, hook: Hook, parsed: Parsed[Settings], *, may_change_user: bool) -> Iterator[Finding]:
    wrong = {problem.path for problem in parsed.problems}
    ways = ("run", "shell")
    given = [key for key in ways if getattr(hook, key) is not None or f"{path}.{key}" in wrong]
    if len(given) != 1:
        expected = "run (a program and its arguments) or shell (a command line)"
        right = [key for key in given if f"{path}.{key}" not in wrong]
        where = f"{path}.{right[0]}" if right and right != given else path
        yield where, f"expected either {expected}; got {' and '.join(given) or 'none'}"
    elif hook.run == ():
        yield f"{path}.run", "expected a program and its arguments; got an empty list"
    if not may_change_user and hook.user is not None:
        yield f"{path}.user", "cannot be used on Windows: remove it, hooks run as the service's account"
    texts = {"run[0]": hook.run[0] if hook.run else None, "shell": hook.shell, "user": hook.user, "cwd": hook.cwd}
    yield from _blank_errors({f"{path}.{key}": text for key, text in texts.items()})
    for variable in hook.env:
        if not variable or "=" in variable or "\0" in variable:
            yield f"{path}.env", f"expected a variable's name, without =; {_HIDDEN}"


def _blank_errors(texts: dict[str, str | None]) -> Iterator[Finding]:
    for path, text in texts.items():
        if text is not None and not text.strip():
            yield path, "expected a text; got an empty one"


def _unknown(what: str, name: str, known: Iterable[str]) -> tuple[str, str]:
    """The message and the hint for a name that nothing has."""
    known = tuple(known)
    hint = _hint(name, known) or (f"known are: {', '.join(known)}" if known else f"there is no {what} yet")
    return f'there is no {what} "{name}"', hint


def _hint(name: str, known: Iterable[str]) -> str:
    guess = nearest(name, known)
    return f'did you mean "{guess}"?' if guess else ""


def warnings(settings: Settings, paths: Container[str], *, is_all_named: bool) -> Iterator[Finding]:
    """Warnings about what is allowed but probably not intended.

    ``paths``: those in the file.
    ``is_all_named``: rules and ``on_clear`` are without errors, so what they do not name is not named.
    """
    yield from _notify_warnings(settings, paths)
    if settings.fleet:
        yield from _glob_warnings("fleet.members", settings.fleet.members, paths)
        if settings.vm.name and (error := settings.fleet.members_error((settings.vm.name, *settings.vm.aliases))):
            yield "fleet.members", error
    yield from _kubernetes_warnings(settings)
    if is_open(settings.agent.listen) and settings.agent.web_config is None:
        text = "every client that reaches this address may read the pages: name a file with TLS as web_config"
        yield "agent.listen", text
    if (endpoint := parse_endpoint(settings.imds.endpoint)) and _is_name(endpoint[0]):
        yield "imds.endpoint", f"{endpoint[0]} is looked up before each request: write an address"
    yield from _recommendation_warnings(settings)
    for index, (rule, reached) in enumerate(reached_types(settings.rules)):
        path = f"rules[{index}]"
        yield from _rule_warnings(path, rule)
        if _is_never_recovered(rule) and f"{path}.recover" not in paths:
            yield f"{path}.prepare", "nothing puts this VM back in service: write recover: [] if that is meant"
        yield from _glob_warnings(f"{path}.when.resource", rule.when.resource, paths)
        yield from _time_warnings(path, rule, reached, settings)
    yield from _root_starter_warnings(settings.hooks)
    for name, hook in settings.hooks.items():
        if sign := _shell_sign(hook.run or ()):
            yield f"hooks.{name}.run", f'run starts no shell: "{sign}" is passed as an argument; use shell'
    if is_all_named:
        yield from _unused_warnings(settings)


def _shell_sign(run: tuple[str, ...]) -> str:
    """The first sign in the items that only a shell understands.

    It is "" if there is none, or if the program gets a command to run.
    """
    if any(item.lower() in _COMMAND_OPTIONS for item in run):
        return ""
    for item in run[1:]:
        if item in _SHELL_OPERATORS:
            return item
        if item.startswith("$"):
            return "$..."  # of an argument, nothing is shown
    return ""


def _root_starter_warnings(hooks: Mapping[str, Hook]) -> Iterator[Finding]:
    """Hooks that may start a unit of systemd that already runs."""
    starters: dict[tuple[str, ...], str] = {}
    for name, hook in hooks.items():
        if not is_started_as_root(hook):
            continue
        begin = f"{ROOT_STARTER} starts a unit, and two starts of one unit are one run"
        if not hook.serialize:
            yield f"hooks.{name}.run", f"{begin}: write serialize: true"
        other = starters.setdefault((hook.run or ())[1:], name)
        if other != name:
            yield f"hooks.{name}.run", f"{begin}: name hook {other}, which starts the same one, in its place"


def _unused_warnings(settings: Settings) -> Iterator[Finding]:
    """Warnings about parts that no rule uses, and about rules that no event reaches."""
    fleet = settings.fleet
    if fleet and fleet.max_events is None and all(rule.shared != "all-ready" for rule in settings.rules):
        yield "fleet", "does nothing: it has no max_events, and no rule has shared: all-ready"
    used = set(settings.on_clear)
    above: list[Rule] = []
    for index, rule in enumerate(settings.rules):
        used.update(rule.prepare, rule.on_start, rule.recover)
        earlier = next((other for other in above[:_MAX_COMPARED] if _covers(other.when, rule.when)), None)
        if earlier is not None:
            yield (
                f"rules[{index}]",
                f"never matches: rule {earlier.name} above matches every event that this rule matches",
            )
        insort(above, rule, key=_condition_count)
    for name in settings.hooks:
        if name not in used:
            yield f"hooks.{name}", "no rule names this hook"
    windows = {rule.window for rule in settings.rules}
    for name in settings.maintenance_windows:
        if name not in windows:
            yield f"maintenance_windows.{name}", "no rule names this maintenance window"


def _notify_warnings(settings: Settings, paths: Container[str]) -> Iterator[Finding]:
    for index, target in enumerate(settings.notify):
        if isinstance(target.to, str) and re.match(_UNENCRYPTED, target.to):
            yield f"notify[{index}].to", "notifications go over the network unencrypted: use https"
        yield from _glob_warnings(f"notify[{index}].when.resource", target.when.resource, paths)


def _kubernetes_warnings(settings: Settings) -> Iterator[Finding]:
    kubernetes = settings.kubernetes
    if kubernetes and not (kubernetes.condition or kubernetes.lifecycle_conditions or kubernetes.events):
        yield "kubernetes", "does nothing: condition, lifecycle_conditions and events are false"
    is_on = kubernetes is not None and kubernetes.lifecycle_conditions
    for name, hook in settings.hooks.items():
        if not is_drain_command(hook):
            continue
        run = hook.run or ()
        if is_on and "--conditions" not in run:
            text = "sets no lifecycle condition, and the agent does: add --conditions"
            yield f"hooks.{name}.run", text
        elif not is_on and "--conditions" in run:
            text = "sets lifecycle conditions, and the agent does not: set kubernetes.lifecycle_conditions"
            yield f"hooks.{name}.run", text


def _rule_warnings(path: str, rule: Rule) -> Iterator[Finding]:
    when = rule.when
    prepares = bool(rule.prepare or rule.drain_for)
    if rule.approve != "never" and set(when.affects) == {"others"}:
        yield f"{path}.approve", "never approves: an event that does not name this VM is not approved from here"
    if set(when.status) == {"Started"} and (prepares or rule.approve != "never"):
        yield path, "an event that has started can neither be prepared for nor approved: only on_start runs"
    if rule.recover and not prepares:
        yield f"{path}.recover", "recovers, but the rule prepares nothing"
    if prepares and rule.approve == "immediately":
        end = "the hooks of prepare" if rule.prepare else "the end of drain_for"
        yield f"{path}.approve", f"does not wait for {end}: write when-prepared if it should"
    if prepares and rule.approve == "when-prepared" and rule.shared in ("first", "any"):
        text = "approves for all VMs of an event, but does not know whether the others are prepared"
        yield f"{path}.shared", f"{text}: write hold, all-ready, or approve: immediately"
    if rule.shared == "all-ready" and rule.approve in ("manual", "never"):
        yield f"{path}.shared", f"does nothing with approve: {rule.approve}: use when-prepared"
    is_about_others = rule.shared == "all-ready" or rule.when.type == (RECOMMENDATION,)
    if not prepares and rule.approve == "when-prepared" and not is_about_others:
        text = "approves at once, as the rule prepares nothing"
        yield f"{path}.approve", f"{text}: write immediately if that is meant, else name hooks in prepare"
    if rule.window is not None and rule.approve in ("manual", "never"):
        yield (
            f"{path}.window",
            f"does nothing with approve: {rule.approve}, as only events that are approved begin in it",
        )


def _recommendation_warnings(settings: Settings) -> Iterator[Finding]:
    """Warnings about rules for recommendations, and about the api-version that has them."""
    for index, rule in enumerate(settings.rules):
        path = f"rules[{index}]"
        if RECOMMENDATION not in rule.when.type and rule.expire_after != DEFAULT_EXPIRE_SECONDS:
            yield f"{path}.expire_after", f"does nothing: when.type does not name {RECOMMENDATION}"
        if rule.when.type == (RECOMMENDATION,):
            if rule.approve != "never":
                yield f"{path}.approve", "never approves: an approval of a recommendation has no effect"
            if rule.on_start:
                yield f"{path}.on_start", "never runs: a recommendation does not start"
            for key in ("lead", "window"):
                if getattr(rule, key) is not None:
                    yield f"{path}.{key}", "does nothing: a recommendation is prepared for at once"
    version = settings.imds.api_version
    is_named = names_recommendations(settings.rules)
    if is_named and version != "auto" and version < REBALANCE_VERSION:
        yield "imds.api_version", f"{version} has no {RECOMMENDATION}, which a rule names: write auto"


def _is_never_recovered(rule: Rule) -> bool:
    """Whether the rule prepares for events that the VM survives, and runs no hook after them."""
    types = rule.when.type
    goes_on = not types or not {"Freeze", "Reboot", "Redeploy"}.isdisjoint(types)
    return goes_on and bool(rule.prepare) and not rule.recover


def _glob_warnings(path: str, globs: tuple[str, ...], paths: Container[str]) -> Iterator[Finding]:
    for index, glob in enumerate(globs):
        if "[" in re.sub(_BRACKETS, "", glob):
            where = f"{path}[{index}]" if f"{path}[{index}]" in paths else path
            yield where, "a bracket of the glob does not close, so it matches only a bracket"


def _time_warnings(path: str, rule: Rule, reached: Container[str], settings: Settings) -> Iterator[Finding]:
    """Warnings about too little time. ``reached``: the types of events that the rule may match."""
    hooks = settings.hooks
    if rule.drain_for and settings.agent.listen == "off":
        yield f"{path}.drain_for", "no balancer can see it, as agent.listen is off"
    is_longer_than_lead = rule.lead is not None and rule.drain_for > rule.lead
    for time in promised_times(rule, reached, hooks, settings.agent.reserve):
        if time.type in rule.when.type and time.drain < rule.drain_for and not is_longer_than_lead:
            text = (
                f"{format_duration(rule.drain_for)} will be cut to {format_estimate(time.drain)} for a {time.type}"
            )
            yield f"{path}.drain_for", f"{text}: there are {format_duration(time.whole)} for it and the hooks"
    if rule.lead is None:
        return
    times = [("drain_for", "it", rule.drain_for)]
    for index, name in enumerate(rule.prepare):
        if name in hooks:  # else that is an error
            times.append((f"prepare[{index}]", f"the timeout of {name}", hooks[name].timeout))
    for key, what, seconds in times:
        if seconds > rule.lead:
            text = f"{what} ({format_duration(seconds)}) is longer than lead ({format_duration(rule.lead)})"
            yield f"{path}.{key}", f"{text}: NotBefore may cut it short"


def reached_types(rules: Iterable[Rule]) -> Iterator[tuple[Rule, tuple[str, ...]]]:
    """Each rule with the types of events that it may match: those that no rule above certainly takes."""
    above: list[Rule] = []
    for rule in rules:
        named = rule.when.type or EVENT_TYPES
        others = replace(rule.when, type=())
        takers = [taker.when for taker in above[:_MAX_COMPARED] if _covers(replace(taker.when, type=()), others)]
        takers += [] if rule.when.type else [_RECOMMENDATIONS]  # without types, it matches no recommendation
        yield rule, tuple(type_ for type_ in named if not any(_has_type(when, type_) for when in takers))
        insort(above, rule, key=_condition_count)


def may_be_observed(rules: Sequence[Rule]) -> tuple[RuleAffects, ...]:
    """The kinds of events that may match no rule: those that name this VM (self), those that do not (others)."""
    anything = [When(), _RECOMMENDATIONS] if names_recommendations(rules) else [When()]
    compared = sorted(rules, key=_condition_count)[:_MAX_COMPARED]

    def takes_all(affects: RuleAffects) -> bool:
        whens = [replace(when, affects=(affects,)) for when in anything]
        return all(any(_covers(rule.when, when) for rule in compared) for when in whens)

    sides: tuple[RuleAffects, ...] = ("self", "others")
    return tuple(side for side in sides if not takes_all(side))


def _has_type(when: When, type_: str) -> bool:
    return type_ in when.type if when.type else type_ != RECOMMENDATION


def _condition_count(rule: Rule) -> int:
    return sum(value not in ((), None) for value in msgspec.structs.astuple(rule.when))


def _covers(wide: When, narrow: When) -> bool:
    """Whether ``wide`` certainly matches every event that ``narrow`` matches."""
    if RECOMMENDATION in narrow.type and RECOMMENDATION not in wide.type:
        return False  # a rule without types does not match it
    affects = (*wide.affects, "shared") if "self" in wide.affects else wide.affects
    pairs = [(affects, narrow.affects)]
    pairs += [(getattr(wide, key), getattr(narrow, key)) for key in _LISTS]
    if any(mine and not (its and set(its) <= set(mine)) for mine, its in pairs):
        return False
    for kind in ("duration", "notice"):
        below = getattr(wide, f"{kind}_below")
        its_below = getattr(narrow, f"{kind}_below")
        at_least = getattr(wide, f"{kind}_at_least")
        its_at_least = getattr(narrow, f"{kind}_at_least")
        if below is not None and (its_below is None or its_below > below):
            return False
        if at_least is not None and (its_at_least is None or its_at_least < at_least):
            return False
    return True

"""Inputs that no sane sender makes: from a grammar, or by mutating real texts.

The inputs of each target are made here and used elsewhere. Invariant: a target's name and a seed make one input,
the same on every machine and in every run.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import time
from functools import cache
from pathlib import Path
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.policy.web_config import WebConfig
from scheduled_events_agent.simulator import Scenario
from scheduled_events_agent.simulator.azure import Plan
from scheduled_events_agent.simulator.control import EmptyRequest, EventRequest, ResetRequest
from scheduled_events_agent.simulator.faults import Fault
from scheduled_events_agent.simulator.scenario import Step

ROOT = Path(__file__).parents[2]
STORY_BREAK = b"\x1e"
"""Stands between two documents of a story, two requests, or two texts."""
THIS_PORT = b"{port}"
"""Stands for the number of the port that is asked."""
"""Its hash, at the lowest cost."""
_MAX_BYTES = 64 * 1024

Generate = Callable[[Random], bytes]


@dataclass(frozen=True)
class _Source:
    """Where the inputs of one target come from."""

    generate: Generate
    corpus: Callable[[], tuple[bytes, ...]]
    tokens: tuple[bytes, ...]


def make_input(target: str, seed: int) -> bytes:
    """The input of a target for a seed; at most 64 KiB."""
    random = Random(f"{target} {seed}")
    source = _SOURCES[target]
    dice = random.random()
    if dice < 0.5:
        data = source.generate(random)
    elif dice < 0.65:
        data = _mutated(random, source.generate(random), source)
    elif dice < 0.98:
        data = _mutated(random, random.choice(source.corpus()), source)
    else:
        data = random.randbytes(random.randrange(200))
    return data[:_MAX_BYTES]


def corpus(target: str) -> tuple[bytes, ...]:
    """The well-formed texts that a target's inputs are made from."""
    return _SOURCES[target].corpus()


# --- mutation

_ODD = (
    b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\t", b"\r",
    b"\n", b"\r\n", b"\x85", b"\xe2\x80\xa8", b"\x1b[2J", "٣".encode(), "²".encode(), "İ".encode(), "ß".encode(),
    b"-", b"0", b"9" * 20, b"1e308", b"-1", b"%s", b"{}", b"()", b"\\", b'"', b"'",
)  # fmt: skip


def _mutated(random: Random, data: bytes, source: _Source) -> bytes:
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5, 9))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((1, 1, 2, 4, 8, 30, 200)))
        match random.randrange(10):
            case 0:
                data = data[:at] + data[end:]
            case 1:
                data = data[:at] + random.choice(_ODD) + data[end if random.random() < 0.5 else at :]
            case 2 | 3:
                data = data[:at] + random.choice(source.tokens) + data[at:]
            case 4:
                data = data[:at] + random.choice(source.tokens) + data[end:]
            case 5:
                data = data[:at] + data[at:end] * random.choice((2, 2, 3, 10, 100)) + data[end:]
            case 6:
                data = data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
            case 7:
                other = random.choice(source.corpus())
                data = data[:at] + other[random.randrange(len(other) + 1) :]
            case 8:
                lines = data.split(b"\n")
                one, two = random.randrange(len(lines)), random.randrange(len(lines))
                lines[one], lines[two] = lines[two], lines[one]
                data = b"\n".join(lines)
            case _:
                data = data[:at]
        data = data[:_MAX_BYTES]
    return data


# --- documents

_KEYS = (
    "EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore", "Description", "EventSource",
    "DurationInSeconds",
)  # fmt: skip
_TIMES = (
    "Mon, 11 Apr 2022 22:26:58 GMT", "2022-04-11T22:26:58Z", "2022-04-11", "20220411", "", "soon",
    "Mon, 11 Apr 99999 22:26:58 GMT", "Fri, 31 Dec 9999 23:59:59 -1200", "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59", "Mon, 00 Foo 2022 25:61:61 GMT", "11 Apr 2022 22:26:58 +999999", "1 1 1 1 1 1",
    "2022-W15-1", "2022-04-11T22:26:58.999999999Z", "Mon, 11 Apr 2022 22:26:58", "-0001-01-01", "Mon,,,,",
    "a b c d", "Mon, 11 Apr 2022 22:26:58 GMT+01:00", "Mon, 11 Apr 2022 10:26:58 PM GMT",
    "11 Apr 2022 22:26:58 UTC", "2022-04-11 22:26", "2022-04-11T22:26:58.1234567+02:00",
    "Mon, 1 Apr 2022 22:26:58 -0130",
)  # fmt: skip
_WORDS = (
    "Freeze", "Reboot", "Redeploy", "Preempt", "Terminate", "Scheduled", "Started", "Completed", "Canceled",
    "Platform", "User", "freeze", "STARTED", "VirtualMachine", "vm-1", "vm-2", "_vm-1", "VM-1", "vm-10", "",
    "no-id-freeze-vm-1", "Host server is undergoing maintenance.", "\ud800", "\udfff\ud800", "\x00",
    "\x1b]0;x\x07", "\u202e", "\ufeff", "İ", "\u017f", "ß", "🧊", "a" * 5000, " padded ", "line\nbreak",
    "$(reboot)", "%n", "../..",
)  # fmt: skip
_NUMBERS = (
    "0", "-0", "-1", "5", "9", "30", "1e3", "1.5", "1e308", "1e309", "-1e309", "5e-324", "9007199254740993",
    "18446744073709551616", "1" * 310, "1" * 5000, "NaN", "Infinity", "-Infinity", "0x10", "01", "1.", ".5", "+1",
)  # fmt: skip


def _json_text(random: Random, text: str) -> str:
    written = json.dumps(text, ensure_ascii=random.random() < 0.7)
    return written if random.random() < 0.997 else written.replace('"', random.choice(("'", "", '"')))


def _json(random: Random, depth: int = 0) -> str:
    dice = random.random()
    if dice < 0.35 or depth > 3:
        return _json_text(random, random.choice(_WORDS))
    if dice < 0.6:
        return random.choice(_NUMBERS)
    if dice < 0.75:
        return random.choice(("null", "true", "false", "{}", "[]", '""'))
    if dice < 0.77:
        count = random.choice((10, 100, 2000))
        return "[" * count + "]" * (count if random.random() < 0.8 else count - 1)
    items = [_json(random, depth + 1) for _ in range(random.randrange(4))]
    if dice < 0.88:
        return f"[{','.join(items)}]"
    return "{" + ",".join(f"{_json_text(random, random.choice((*_KEYS, *_WORDS)))}:{item}" for item in items) + "}"


def _event(random: Random, **fixed: str) -> str:
    values = {
        "EventId": _json_text(random, random.choice(("A", "a", "B", "C7061BAC-AFDC-4513-B24B-AA5F13A16123", ""))),
        "EventStatus": _json_text(random, random.choice(("Scheduled", "Scheduled", "Started", "Completed"))),
        "EventType": _json_text(random, random.choice(_WORDS[:5])),
        "ResourceType": '"VirtualMachine"',
        "Resources": json.dumps(random.choices(("vm-1", "vm-2", "_VM-1"), k=random.randrange(4))),
        "NotBefore": _json_text(random, random.choice(_TIMES)),
        "Description": _json_text(random, random.choice(_WORDS if random.random() < 0.1 else _WORDS[14:20])),
        "EventSource": _json_text(random, random.choice(("Platform", "User"))),
        "DurationInSeconds": random.choice(_NUMBERS if random.random() < 0.05 else _NUMBERS[:9]),
    } | fixed
    pairs = []
    for key, value in values.items():
        dice = random.random()
        if dice < 0.05 and key not in fixed:
            continue
        shown = _json(random) if dice > 0.98 and key not in fixed else value
        pairs.append(f'"{key}": {shown}')
    if random.random() < 0.1:
        pairs.append(random.choice(pairs or [""]))
        random.shuffle(pairs)
    return "{" + ",".join(pairs) + "}"


def _document(random: Random) -> bytes:
    events = [_event(random) for _ in range(random.choice((0, 1, 1, 1, 2, 3, 10)))]
    if random.random() < 0.1:
        events.insert(random.randrange(len(events) + 1), _json(random))
    body = ", ".join(events)
    incarnation = _json(random) if random.random() < 0.2 else str(random.randrange(5))
    text = f'{{"DocumentIncarnation": {incarnation}, "Events": [{body}]}}'
    if random.random() < 0.05:
        text = f'{{"Events": [{body}], "Events": [{body}]}}'
    return (b"\xef\xbb\xbf" if random.random() < 0.05 else b"") + text.encode("utf-8", "surrogatepass")


def _story(random: Random) -> bytes:
    """Documents that follow each other: events appear, change, start, swap their ids, vanish and come back."""
    pending: list[dict[str, str]] = []
    documents = []
    for number in range(random.randrange(1, 9)):
        for event in list(pending):
            match random.randrange(8):
                case 0:
                    pending.remove(event)
                case 1:
                    event["EventStatus"] = '"Started"'
                case 2:
                    event["EventStatus"] = '"Started"'
                    event["EventId"] = f'"{random.choice("abcdefgh")}-{number}"'
                case 3:
                    key = random.choice(_KEYS)
                    event[key] = _json(random)
                case 4:
                    event["NotBefore"] = _json_text(random, random.choice(_TIMES))
                case _:
                    pass
        if len(pending) < 4 and random.random() < 0.6:
            fixed = {
                "EventId": f'"{random.choice("abAB")}"',
                "Resources": '["vm-1"]',
                "EventStatus": '"Scheduled"',
            }
            pending.append(json.loads(_plain_event(random)) | fixed)
        if random.random() < 0.1:
            documents.append(_mutated(random, _document(random), _SOURCES["document"]))
        else:
            body = ",".join(
                "{" + ",".join(f'"{key}":{value}' for key, value in event.items()) + "}" for event in pending
            )
            documents.append(
                f'{{"DocumentIncarnation":{number},"Events":[{body}]}}'.encode("utf-8", "surrogatepass")
            )
    return STORY_BREAK.join(documents)


def _plain_event(random: Random) -> str:
    """An object of JSON texts of an event's values."""
    values = {
        "EventType": f'"{random.choice(_WORDS[:5])}"',
        "EventSource": f'"{random.choice(("Platform", "User", ""))}"',
        "Description": f'"{random.choice(("", "maintenance", "host update"))}"',
        "DurationInSeconds": random.choice(("-1", "5", "30")),
        "NotBefore": f'"{random.choice(_TIMES)}"',
    }
    return json.dumps(values)


_TIME_PARTS = (
    ("", "Mon, ", "Monday, ", "Mon "), ("11 ", "1 ", "011 ", "31 ", "April "), ("Apr ", "apr ", "Foo ", "04 "),
    ("2022", "22", "99999"), (" ", "  ", "T"), ("22:26:58", "10:26:58", "24:00:00", "22:26", "22:26:60"),
    ("", " GMT", " UTC", " Z", " +0200", " -0130", " PM", "+01:00", " EST"),
    ("", "", "", " PM", "+01:00", " GMT", "\u200b", " (late)"),
)  # fmt: skip
_ISO_PARTS = (
    ("2022-04-11", "2022-4-11", "20220411", "2022-W15-1"), ("T", " ", "t", "x", ""),
    ("22:26:58", "22:26", "24:00:00", "22", "10:26:58"), ("", ".5", ".1234567", ",5", "."),
    ("", "Z", "z", "+02:00", "-01:30", "+0200", " GMT"), ("", "", "", " PM", "Z", "+01:00"),
)  # fmt: skip
_TIME_TOKENS = tuple(part.encode() for parts in (*_TIME_PARTS, *_ISO_PARTS) for part in parts if part)


def _time(random: Random) -> bytes:
    parts = _TIME_PARTS if random.random() < 0.5 else _ISO_PARTS
    # Mostly the first ones, so that there are known forms among them.
    return "".join(random.choice((one[0], one[0], random.choice(one))) for one in parts).encode()


@cache
def _payloads() -> tuple[bytes, ...]:
    files = sorted((ROOT / "tests" / "payloads").glob("*-*"))
    return tuple(file.read_bytes() for file in files)


@cache
def _stories() -> tuple[bytes, ...]:
    flow = [text for text in _payloads() if b'"Events"' in text]
    return tuple(STORY_BREAK.join(flow[start : start + 4]) for start in range(len(flow) - 3))


_JSON_WORDS = (
    *(f'"{key}": ' for key in _KEYS), *(json.dumps(word) for word in _WORDS), *(f'"{time}"' for time in _TIMES),
    *_NUMBERS, "null", "true", "false", "{", "}", "[", "]", ",", ":", '"Events": [', '"Events": null, ',
    '"\\ud800"', '"\\u0000"', "[[[[", "/**/", "{},",
)  # fmt: skip
_JSON_TOKENS = tuple(word.encode("utf-8", "surrogatepass") for word in _JSON_WORDS)


# --- YAML, along the types of what is read

_Node = Any
"""A text (a scalar as it is written), a list of nodes, or a tuple of (key, node) pairs."""

_DURATIONS = ("9s", "5m", "15m", "1h30m", "2d", "500ms", "0s", "10s", "5", "-5s", "99999d", "1e9s", "0.0001s", "s")
_POOLS: dict[str, tuple[str, ...]] = {
    "always": (
        "hooks", "maintenance_windows", "rules", "vms", "others", "timeline", "tls_server_config",
        "basic_auth_users",
    ),
    "poll_interval": ("1s", "2s", "500ms", "0s", "2m"), "healthy_within": ("3m", "1h", "10m", "1s"),
    "length": ("1h", "90m", "7d", "0s", "8d"), "timeout": ("9s", "5m", "1h", "0s"),
    "prepare": ("drain",), "on_start": ("drain",), "recover": ("resume",), "on_clear": ("resume",),
    "window": ("night",),
    "endpoint": ("auto", "http://127.0.0.1:8080", "http://h", "https://h", "http://[::1]", '"http://h\\n"'),
    "listen": ("off", "127.0.0.1:9769", '"[::1]:1"', "0.0.0.0:0", "a:b", "h:65536", "h:٣", ":1", "9.9:9"),
    "timezone": ("UTC", "Europe/Berlin", "Asia/Tokyo", "Europe", "../../etc/passwd", "/etc/localtime", '"\\0"'),
    "run": ("/bin/true", "drain", "--now", '""', "x y"),
    "shell": ("true", "echo $X; exit 1", "x", '""', '"a\\0b"'),
    "description": (
        "maint", "'\\d{2,}.*'", "host|live", '"(a+)+$"', '"["', '".*.*.*.*"', '"(?i)x"', '"(?P<a>.)(?P=a)"',
    ),
    "resource": ("vm-*", '"*"', "web_?", '"[a-"', '"[!]"', '"**?*"', '"["'),
    "vms": ("vm-1", "vm-2", "vm-3"), "others": ("vm-2", "vm-9"),
    "approve": ("a", "b"), "cancel": ("a", "b"), "start": ("a", "b"), "end": ("a", "b"), "event": ("a", "b"),
    "cert_file": (
        "server.pem", "server.pem", "./server.pem", "x.pem", '""', '"server.pem\\0"', ".", '"a\\nb"', "web.yml",
    ),
    "key_file": (
        "server.key", "server.key", "./server.key", "x.key", "server.pem", '"\\0"', ".", '"' + "k" * 300 + '"',
    ),
    "client_ca_file": ("server.pem", "./server.pem", "server.pem", "x.pem", "server.key", '"\\0"'),
}  # fmt: skip
_TEXTS = (
    "x", '""', "~", "null", "yes", "off", "2020-07-01", "0x10", "1_000", "1e3", "12:30:45", ".inf", "-.nan",
    "'it''s'", '"\\x41\\u263a\\U0001F600"', '"\\ud800"', "|\n  text\n", ">-\n  folded\n", "<<", "=", "? a", "- a",
    "!!str 1", "!!python/object/apply:os.system [x]", "!!binary aGk=", "!local x", "&x y", "*x", "%TAG", "---",
    "...", "@at", "`t`", '"unclosed', "{", "[", "]", "a: b", "a #b", "\tx", '"' + "long " * 300 + '"', "٣",
    "\u2028",
)  # fmt: skip
_ONE_OF: dict[type[msgspec.Struct], tuple[str, ...]] = {
    Hook: ("run", "shell"),
    Step: ("event", "event", "event", *(name for name in Step.__struct_fields__ if name != "at")),
}


def _junk(random: Random, depth: int) -> _Node:
    dice = random.random()
    if dice < 0.7 or depth > 4:
        return random.choice((*_TEXTS, *_DURATIONS))
    if dice < 0.85:
        return [_junk(random, depth + 1) for _ in range(random.randrange(3))]
    return tuple((random.choice(_TEXTS), _junk(random, depth + 1)) for _ in range(random.randrange(3)))


def _node(random: Random, annotation: Any, name: str = "", depth: int = 0) -> _Node:
    """Mostly what the type wants."""
    if random.random() < 0.004:
        return _junk(random, depth)
    metas: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        metas = tuple(rest)
    kinds = [meta.extra.get("kind") for meta in metas if isinstance(meta, msgspec.Meta) and meta.extra]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        inner = next(member for member in arguments if member is not NoneType)
        if random.random() < 0.01:
            return "null"
        return _node(random, Annotated[(inner, *metas)] if metas else inner, name, depth)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _struct_node(random, annotation, depth)
    if origin in (tuple, list):
        if "one-or-many" in kinds and random.random() < 0.5:
            return _node(random, arguments[0], name, depth + 1)
        count = random.choice((1, 1, 2, 3) if depth < 2 or random.random() < 0.9 else (0, 30))
        items = [_node(random, arguments[0], name, depth + 1) for _ in range(count)]
        return items if random.random() < 0.05 else [item for n, item in enumerate(items) if item not in items[:n]]
    if origin is dict:
        keys = {
            "hooks": ("drain", "resume"),
            "maintenance_windows": ("night",),
            "vm_ids": ("vm-1",),
            "basic_auth_users": ("ada", random.choice(("bob", "a b", '"a:b"', '""', '"\\0"', "ada"))),
        }.get(name, ("A", "B"))
        within = name if name in _POOLS else ""
        return tuple(
            (key, _node(random, arguments[1], within, depth + 1)) for key in keys if random.random() < 0.98
        )
    return _scalar_text(random, annotation, kinds, name)


def _scalar_text(random: Random, type_: Any, kinds: list[Any], name: str) -> str:
    is_wild = random.random() < 0.05
    if get_origin(type_) is Literal:
        return str(random.choice(get_args(type_)))
    if type_ is time:
        return random.choice(("24:00", "7200", "٣:00") if is_wild else ("02:00", "2:00", "23:59:59"))
    if name in _POOLS:
        pool = _POOLS[name]
        return random.choice(pool if is_wild else pool[:3])
    if type_ is float and "duration" in kinds:
        return random.choice(_DURATIONS if is_wild else _DURATIONS[:6])
    if type_ is bool:
        return random.choice(("True", "yes") if is_wild else ("true", "false"))
    if type_ is int:
        return random.choice(("0", "-1", "1" * 30, "1.0") if is_wild else ("1", "2", "3", "100"))
    return random.choice(_TEXTS if is_wild else ("x", "a b", "'it''s'", '"\\x41\\u263a"'))


def _struct_node(random: Random, type_: type[msgspec.Struct], depth: int) -> _Node:
    choices = _ONE_OF.get(type_, ())
    chosen = random.choice(choices) if choices and random.random() < 0.98 else None
    pairs = []
    for item in msgspec.structs.fields(type_):
        key = item.encode_name
        if key == "name":
            number = "" if type_ is Plan else str(random.randrange(100))
            pairs.append((key, random.choice("ab") + number))
            continue
        if key in choices and chosen is not None:
            is_given = key == chosen
        else:
            is_given = random.random() < (0.99 if item.required or key in _POOLS["always"] else 0.25)
        if is_given:
            pairs.append((key, _node(random, item.type, key, depth + 1)))
    if random.random() < 0.02:
        pairs.append((random.choice(("nmae", "x", "<<", *type_.__struct_fields__)), _junk(random, depth)))
    return tuple(pairs)


class _Writer:
    """Writes nodes as YAML, in block or in flow style, with anchors and aliases now and then."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._anchors = 0

    def write(self, node: _Node, indent: int = 0) -> str:
        random = self._random
        if self._anchors and random.random() < 0.01:
            return f"*n{random.randrange(self._anchors)}"
        prefix = ""
        if random.random() < 0.02:
            prefix, self._anchors = f"&n{self._anchors} ", self._anchors + 1
        if isinstance(node, str):
            return prefix + node
        if not node:
            return prefix + ("[]" if isinstance(node, list) else "{}")
        if indent > 6 or random.random() < 0.3:
            return prefix + self._flow(node)
        pad = "\n" + "  " * indent
        if isinstance(node, list):
            return prefix + "".join(f"{pad}- {self.write(item, indent + 1)}" for item in node)
        return prefix + "".join(f"{pad}{key}: {self.write(item, indent + 1)}" for key, item in node)

    def _flow(self, node: _Node) -> str:
        if isinstance(node, str):
            return node
        if isinstance(node, list):
            return f"[{', '.join(self._flow(item) for item in node)}]"
        return "{" + ", ".join(f"{key}: {self._flow(item)}" for key, item in node) + "}"


def _yaml(type_: type[msgspec.Struct]) -> Generate:
    def generate(random: Random) -> bytes:
        if random.random() < 0.005:
            return _bomb(random, type_)
        return _Writer(random).write(_struct_node(random, type_, 0)).encode("utf-8", "surrogatepass")

    return generate


def _bomb(random: Random, type_: type[msgspec.Struct]) -> bytes:
    """Something with many faults, or long ones, that aliases repeat."""
    size = random.choice((30, 300, 3000))
    word = random.choice((f"{'x' * size}: 1", *[", ".join(f"k{i}: 1" for i in range(size))] * 2))
    text = random.choice(
        ("{" + word + "}", "[" + "'(', " * size + "]", "'" + "(" * size + "'", "&b [*b]", "!" + "x" * size + " y")
    )
    key = random.choice(type_.__struct_fields__)
    return f"{key}: [&a {text}{', *a' * random.choice((1, 30, 1000))}]\n{key}2: {{*a : *a}}".encode()


def _yaml_tokens(type_: type[msgspec.Struct]) -> tuple[bytes, ...]:
    words = [*_TEXTS, *_DURATIONS, *(text for pool in _POOLS.values() for text in pool)]
    words += [f"{name}: " for struct_ in (type_, *_ONE_OF) for name in struct_.__struct_fields__]
    words += [
        "\n  ",
        "\n- ",
        "- ",
        ": ",
        ", ",
        "&a ",
        "*a",
        "<<: *a",
        "!!",
        "? ",
        "[",
        "]",
        "{",
        "}",
        "# ",
        "\n...\n",
        "\n---\n",
    ]
    words += ["[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "&a [*a]", "[&b [x], *b, *b]", "\n\t"]
    return tuple(word.encode("utf-8", "surrogatepass") for word in words)


# --- files of TLS settings

_TLS_FILES = (
    b"tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  min_version: TLS13\n",
    (
        b"tls_server_config: {cert_file: server.pem, key_file: server.key, client_ca_file: server.pem,\n"
        b"  client_auth_type: RequireAndVerifyClientCert}\n"
    ),
)
_TLS_TOKENS = (
    b"http_server_config: {http2: true}\n", b"rate_limit: 1\n", b"  cert: x\n", b"  cipher_suites: [x]\n",
    b"basic_auth_users: secret\n", b"tls_server_config: {}\n", b"server.pem", b"server.key", b"/", b"..", b"\\0",
    b"NoClientCert", b"RequestClientCert", b"VerifyClientCertIfGiven", b"TLS12", b"TLS11", b"'", b'"',
    b"client_ca_file: server.key\n", b"min_version: ", b"\n  ",
)  # fmt: skip


@cache
def _policies() -> tuple[bytes, ...]:
    files = [ROOT / "config" / "policy.yaml", *sorted((ROOT / "config" / "examples").glob("*.yaml"))]
    shipped = [file.read_bytes() for file in files]
    return (*shipped, _FULL_POLICY)


@cache
def _scenarios() -> tuple[bytes, ...]:
    return tuple(
        file.read_bytes()
        for file in sorted((ROOT / "agent/scheduled_events_agent/simulator" / "scenarios").glob("*.yaml"))
    )


_FULL_POLICY = b"""\
vm: {name: vm-1, aliases: [vm-one]}
imds: {endpoint: "http://127.0.0.1:8080", poll_interval: 2s}
rules:
  - name: user
    when: {source: User, affects: [self, shared]}
    approve: immediately
  - name: short
    when: &when {type: Freeze, duration_below: 9s, description: "host (update|maintenance)"}
    approve: immediately
  - name: rest
    when: {resource: ["vm-*", "web_?"], notice_at_least: 1m}
    prepare: [drain]
    recover: [resume]
    drain_for: 30s
    lead: 15m
    window: night
    approve: when-prepared
hooks:
  drain: {run: [/bin/true, --now], timeout: 5m, env: {A: b}}
  resume:
    shell: |
      true
maintenance_windows:
  night: {start: 02:00, length: 2h, days: [sat, sun], timezone: Europe/Berlin}
"""


# --- recordings

_ATS = (
    "2026-05-01T12:00:00Z", "2026-05-01T12:00:01.5Z", "2026-05-01T12:00:00+02:00", "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59", "2026-05-01T12:00:00", "2026-05-01", "soon", "2026-05-01T24:00:00Z",
)  # fmt: skip


def _recording(random: Random) -> bytes:
    vm = random.choice(("vm-1", "x" * 128) if random.random() < 0.97 else ("", "a b", "x" * 129, "a\\n"))
    lines = [b'{"vm": "%b", "scale_set": ""}' % vm.encode()] if random.random() < 0.95 else []
    is_odd = random.random() < 0.15
    for second in range(random.randrange(1, 6)):
        at = random.choice(_ATS) if is_odd else f"2026-05-01T12:00:{second:02}Z"
        if random.random() < 0.2:
            key, value = b"body", _json_text(random, random.choice(_WORDS)).encode("utf-8", "surrogatepass")
        else:
            key, value = b"document", _nested(random) if random.random() < 0.02 else _document(random)
        lines.append(b'{"at": "%b", "%b": %b}' % (at.encode(), key, value))
    return random.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines)


def _nested(random: Random) -> bytes:
    """About as deep as the readers and writers of JSON go."""
    depth = random.randrange(900, 1010)
    return b'{"Events": ' + b"[" * depth + b"]" * depth + b"}"


@cache
def _recordings() -> tuple[bytes, ...]:
    events = [text for text in _payloads() if b'"Events"' in text]
    documents = []
    for text in events:
        try:
            documents.append(json.dumps(json.loads(text.decode("utf-8-sig"))).encode())
        except ValueError:
            continue  # a document that is none
    return tuple(
        b'{"vm":"vm-1","vm_id":"x"}\n'
        + b"".join(
            b'{"at":"2026-05-01T12:00:%02dZ","document":%b}\n' % (second, document)
            for second, document in enumerate(documents[start : start + 3])
        )
        + b'{"at":"2026-05-01T12:10:00Z","body":"<html>"}\n'
        for start in range(0, len(documents), 3)
    )


_RECORDING_TOKENS = (*_JSON_TOKENS, *(f'"{at}"'.encode() for at in _ATS), b'{"at": ', b'"body": ""', b"\n", b"\r")


# --- requests to the control port

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/schedule": Plan, "/approve": EventRequest, "/cancel": EventRequest, "/start": EventRequest,
    "/end": EventRequest, "/fault": Fault, "/clear-faults": EmptyRequest, "/reset-incarnation": ResetRequest,
}  # fmt: skip
_CONTROL_HEADERS = (
    "Host: localhost:{port}", "Host: 127.0.0.1:{port}", "Host: evil.example",
    "Host: localhost:{port}.evil.example", "Content-Type: application/json",
    "Content-Type: text/plain", "Content-Type: APPLICATION/JSON; charset=x",
    "Content-Type:", "Origin: http://localhost:{port}", "Origin: http://evil.example", "Origin: null", "Origin:",
    "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-origin", "Host: LOCALHOST:{port}",
)  # fmt: skip


def _control_request(random: Random) -> bytes:
    path = random.choice(("/schedule", "/schedule", *_BODIES, "/state", "/", "/x", "//schedule", "/schedule?x=1"))
    method = "GET" if path in ("/", "/state") else "POST"
    if random.random() < 0.03:
        method = random.choice(("GET", "HEAD", "PUT", "post", "X" * 100))
    headers = [random.choice(_CONTROL_HEADERS[:2]), _CONTROL_HEADERS[4]]
    if random.random() < 0.15:
        headers += random.choices(_CONTROL_HEADERS, k=random.randrange(3))
        headers.pop(random.randrange(len(headers)))
    body = b""
    if method == "POST" and random.random() < 0.97:
        type_ = _BODIES.get(path, Plan)
        written = _as_json(_struct_node(random, type_, 1)) if random.random() < 0.97 else _json(random)
        body = written.encode("utf-8", "surrogatepass")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""]).encode() + body


def _as_json(node: _Node) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_as_json, node))}]"
    if isinstance(node, tuple):
        return "{" + ",".join(f"{json.dumps(key)}:{_as_json(value)}" for key, value in node) + "}"
    try:
        json.loads(node)
    except ValueError:
        return json.dumps(node)
    return str(node)


def _control(random: Random) -> bytes:
    return STORY_BREAK.join(_control_request(random) for _ in range(random.randrange(1, 8)))


@cache
def _controls() -> tuple[bytes, ...]:
    head = b"POST %b HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n\r\n%b"
    life = (
        head % (b"/schedule", b'{"type": "Reboot", "name": "a", "vms": ["vm-1", "vm-2"], "notice": "15m"}'),
        head % (b"/approve", b'{"event": "a"}'),
        head % (b"/start", b'{"event": "a"}'),
        head % (b"/end", b'{"event": "a"}'),
    )
    troubles = (
        head % (b"/fault", b'{"kind": "status", "status": 503, "for": "10s", "vms": "vm-1"}'),
        head % (b"/schedule", b'{"type": "Freeze", "id": "B", "duration": "5s", "begins_started": true}'),
        head % (b"/clear-faults", b"{}"),
        head % (b"/reset-incarnation", b'{"incarnation": 7}'),
    )
    return STORY_BREAK.join(life), STORY_BREAK.join(troubles), life[0]


_CONTROL_TOKENS = (
    *(header.encode() + b"\r\n" for header in _CONTROL_HEADERS), *(path.encode() for path in _BODIES),
    *(f'"{text}"'.encode() for text in _DURATIONS), *_JSON_TOKENS, STORY_BREAK, b"\r\n\r\n", b'{"event": "a"}',
    b'{"type": "Reboot"}',
)  # fmt: skip


# --- texts for the status page

_HOSTILE = (
    "<script>alert(1)</script>", "</script>", "</style>", "<!--", "-->", "<![CDATA[", "]]>", "<b>", "</p></div>",
    "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "' onmouseover='x", '" autofocus onfocus="x',
    "<a href=javascript:x>", "<title>", "</title>", "<textarea>", "<plaintext>", "<noscript>", "<bdi>", "</bdi>",
    "&lt;", "&amp;lt;b&gt;", "&#60;b&#62;", "&#x3c", "&", "&;", "&copy", "&notit;", "<", ">", "<<", "</", "<?php",
    "<!DOCTYPE x>", "\u202e", "\u2066<b>", "\ufeff", "\x00", "\x1b[2J", "\r\n", "\u2028", "ß", "İ", "🧊",
    "x" * 3000, "'" * 700, "<" * 2000, "vm-1", "_VM-1", "Reboot", "drain", "", " ", "{}", "{0}", "%s",
    "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
)  # fmt: skip


def _texts(random: Random) -> bytes:
    words = [
        "".join(random.choices(_HOSTILE, k=random.choice((1, 1, 1, 2, 4)))) for _ in range(random.randrange(1, 30))
    ]
    return STORY_BREAK.join(word.encode() for word in words)


# --- leases

_LEASE_LINES = (
    "lease {", "}", '  interface "eth0";', "  option unknown-245 a8:3f:81:10;", "  option private-245 a:0:0:5;",
    '  option unknown-245 "d<6 ";', r'  option unknown-245 "d\"6\\";', "  expire 5 2026/05/01 12:00:01;",
    "  expire never;", "  expire epoch 1777636801; # Fri", "  expire 1 2026/13/45 99:00:00;",
    "  renew 5 2020/01/01 00:00:00;", "  option subnet-mask 255.255.255.0;", "OPTION_245=a83f8110",
    "private_245=a8:3f:81:10", "unknown_245 = a:0:0:5", "ADDRESS=10.0.0.4", "[dhcp4]",
    "# This is private data. Do not parse.", "", "option unknown-245 10.0.0.5;",
)  # fmt: skip
_LEASE_WORDS = (
    *_LEASE_LINES, "lease {\n", "\n}\n", "expire epoch ", "expire 0 ", "9999/12/31 23:59:60;",
    "0000/00/00 00:00:00;", "option unknown-245 ", '"', "\\", "\\777", "\\0", ":", ";", "ff:", "::", "1ff:", "-1:",
    "0x1:", "_1:", "OPTION_245=", "256.", "1.2.3.4", "٣", "²", "9" * 30, "9" * 5000, " " * 300, "\n" * 300,
    "\u2028", "\x0c", "\x1c",
)  # fmt: skip
_LEASE_TOKENS = tuple(word.encode() for word in _LEASE_WORDS)


def _lease(random: Random) -> bytes:
    if random.random() < 0.3:
        lines = random.choices(_LEASE_LINES, k=random.randrange(12))
    else:
        lines = []
        for _ in range(random.randrange(1, 4)):
            value = _lease_value(random)
            expire = random.choice(_LEASE_LINES[7:12])
            lines += ["lease {", f"  option {random.choice(('unknown', 'private'))}-245 {value};", expire, "}"]
        if random.random() < 0.3:
            lines = [f"{random.choice(('OPTION', 'private', 'unknown'))}_245={_lease_value(random)}"]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _lease_value(random: Random) -> str:
    octets = random.randbytes(random.choice((4, 4, 4, 3, 5, 0)))
    match random.randrange(5):
        case 0:
            return octets.hex()
        case 1:
            return ":".join(f"{octet:x}" for octet in octets)
        case 2:
            return ".".join(str(octet + random.choice((0, 0, 0, 200))) for octet in octets)
        case 3:
            return '"' + "".join(random.choice((chr(octet), f"\\{octet:03o}")) for octet in octets) + '"'
        case _:
            return ":".join(random.choices(("a8", "0", "-1", "1ff", "", " 3", "+1", "_", "٣", "g"), k=4))


def _record(
    option: int, value: bytes, *, length: int | None = None, vendor: int = 0, expires: int = 1 << 31
) -> bytes:
    size = len(value) if length is None else length
    return struct.pack("<5I", option, 0, size, vendor, expires) + value + b"\0" * (-len(value) % 4)


def _registry(random: Random) -> bytes:
    records = []
    for _ in range(random.randrange(6)):
        value = random.randbytes(random.choice((4, 4, 4, 0, 3, 5, 300)))
        records.append(
            _record(
                random.choice((245, 245, 1, 3, 6, 51, 0xFFFFFFFF)),
                value,
                length=random.choice((None, None, None, 0, 4, 0xFFFFFFFF, 0x7FFFFFFF, len(value) + 1)),
                vendor=random.choice((0, 0, 0, 1)),
                expires=random.choice((0, 1777636800, 1777636801, 0xFFFFFFFF)),
            )
        )
    return b"".join(records)


# --- HTTP

_REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost:9769\r\n\r\n",
    b"HEAD /healthz HTTP/1.0\r\n\r\n",
    b"GET /readyz?verbose=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n",
    b"POST /status HTTP/1.1\r\nContent-Length: 11\r\n\r\nGET / HTTP/1",
    b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"GET /status\r\n\r\n",
)
_HTTP_TOKENS = (
    b"GET ", b"HEAD ", b"POST ", b"OPTIONS ", b"CONNECT ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"/metrics",
    b"/healthz", b"/", b"//", b"http://evil/metrics", b"*", b"/../../etc/passwd", b"/%00", b"/metrics#x",
    b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/0.9\r\n", b" HTTP/9.9\r\n", b" HTTP/1.99999999999\r\n",
    b" HTTP/1.\xb2\r\n", b" http/1.1\r\n", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\r\n ", b"\r\n\t", b"Host: x\r\n",
    b"Host: [::1]:1\r\n", b"Host: ]:[\r\n", b"Host: ::\r\n", b"Authorization: Basic \xff=\r\n",
    b"Host:\r\n", b": y\r\n", b"X: " + b"y" * 9000 + b"\r\n", b"X: y\r\n" * 120,
    b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n",
    b"Connection: keep-alive\r\n", b"Connection: \xff\r\n", b"Range: bytes=0-0\r\n", b"A" * 70_000,
    b"\x16\x03\x01\x02\x00\x01", b"\x00" * 50, b"\xff\xfe", b"%0d%0aSet-Cookie:x", b"\r\nSet-Cookie: x\r\n",
    b"<script>", b"\x85", b"\xe2\x80\xa8",
)  # fmt: skip


def _request(random: Random) -> bytes:
    method = random.choice(
        (b"GET", b"GET", b"GET", b"HEAD", b"POST", b"get", b"", b"G\xc3\x89T", b"__class__", b"X" * 300)
    )
    path = random.choice(
        (
            b"/metrics",
            b"/healthz",
            b"/readyz",
            b"/status",
            b"/",
            b"//x",
            b"*",
            b"",
            b"/\xff",
            b"/<b>",
            b"/" + b"x" * 3000,
        )
    )
    version = random.choice(
        (b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.0", b"", b" HTTP/0.9", b" HTTP/2.0", b" HTTP/1.1.1", b" HTTP/1.-1")
    )
    end = random.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"))
    headers = [
        random.choice(
            (b"Host", b"X", b"Content-Length", b"Connection", b"", b"A B", b"\xff", b"Expect", b" Folded")
        )
        + random.choice((b": ", b":", b" : ", b""))
        + random.choice(
            (b"x", b"0", b"10", b"-1", b"close", b"keep-alive", b"100-continue", b"\x00", b"\xff", b"y" * 500)
        )
        for _ in range(random.choice((0, 1, 2, 3, 99, 101)))
    ]
    body = random.choice((b"", b"", b"abc", b"GET /status HTTP/1.1\r\n\r\n", b"\x00" * 100))
    head = end.join([method + b" " + path + version, *headers])
    return (head + end + end + body) * random.choice((1, 1, 1, 2, 5))


_SOURCES = {
    "document": _Source(_document, _payloads, _JSON_TOKENS),
    "time": _Source(_time, lambda: tuple(time.encode() for time in _TIMES), _TIME_TOKENS),
    "story": _Source(_story, _stories, (*_JSON_TOKENS, STORY_BREAK)),
    "policy": _Source(_yaml(Settings), _policies, _yaml_tokens(Settings)),
    "scenario": _Source(_yaml(Scenario), _scenarios, _yaml_tokens(Scenario)),
    "lease": _Source(
        _lease, lambda: ("\n".join(_LEASE_LINES[:10]).encode(), b"ADDRESS=1\nOPTION_245=a83f8110\n"), _LEASE_TOKENS
    ),
    "registry": _Source(
        _registry,
        lambda: (_record(1, b"\xff\xff\xff\0") + _record(245, b"\xa8\x3f\x81\x10"), _record(51, b"\0\0\0\1")),
        (_record(245, b"\1\2\3\4"), struct.pack("<I", 245), b"\xff" * 4, b"\0" * 4, b"\4\0\0\0"),
    ),
    "web": _Source(_request, lambda: _REQUESTS, _HTTP_TOKENS),
    "tls": _Source(_yaml(WebConfig), lambda: _TLS_FILES, (*_TLS_TOKENS, *_yaml_tokens(WebConfig))),
    "recording": _Source(_recording, _recordings, _RECORDING_TOKENS),
    "control": _Source(_control, _controls, _CONTROL_TOKENS),
    "page": _Source(
        _texts,
        lambda: (STORY_BREAK.join(text.encode() for text in _HOSTILE[:20]), b"vm-1\x1eReboot\x1eA\x1edrain"),
        tuple(text.encode() for text in _HOSTILE),
    ),
}

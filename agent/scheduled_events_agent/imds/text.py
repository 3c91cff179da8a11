"""Cleaning of texts that come from outside, and JSON that is read only if it says one thing.

Pure. A text that is not a whole document is an error, and says what was found instead.
"""

import json
from functools import partial
from typing import Any, Literal

import msgspec

from scheduled_events_agent import AgentError

_BOM = b"\xef\xbb\xbf"
# Azure documents no limit for either; a longer text is of no use in a log or an environment.
MAX_TEXT = 4096
_MAX_VALUES = 300_000
_EXCERPT_BYTES = 220
# Stands for what cannot be shown.
_HIDDEN = "\N{REPLACEMENT CHARACTER}"


DocumentErrorKind = Literal["document", "too_many"]


class DocumentError(AgentError):
    """The text is not a Scheduled Events document; it says nothing about any event."""

    def __init__(self, message: str, *, kind: DocumentErrorKind = "document") -> None:
        super().__init__(message, kind=kind)


def parse_json(body: bytes) -> Any:
    """The value of an unambiguous JSON text. Raises ValueError or DocumentError.

    Duplicate keys in an object, NaN, infinity and halves of surrogate pairs are rejected. The value takes at most
    about 100 MiB of memory.
    """
    body = body.removeprefix(_BOM)
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise DocumentError(f"more than {_MAX_VALUES} values: {excerpt(body)}", kind="too_many")
    msgspec.json.decode(body, type=msgspec.Raw)  # builds no values; json alone would accept more than JSON
    to_object = partial(_to_object, texts={})
    to_number = msgspec.json.decode
    return json.loads(body.decode(), object_pairs_hook=to_object, parse_int=to_number, parse_float=to_number)


def _to_object(pairs: list[tuple[str, Any]], texts: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise DocumentError(f"an object has the key {shown(key)} twice")
        made[key] = value
        if isinstance(value, list):  # events name the same VMs again and again: keep one copy of each name
            made[key] = [texts.setdefault(item, item) if isinstance(item, str) else item for item in value]
    return made


def clean_text(value: Any) -> str:
    """A text from outside as one printable line of bounded length; "" for a value that is no text or number."""
    # An object or a list instead of a text has no meaning, and may be nested too deep to be written out.
    text = str(value) if isinstance(value, str | int | float) else ""
    return printable(text[:MAX_TEXT]).strip()


def clean_name(value: Any) -> str:
    """A name from outside as it came, as far as it can be shown; "" for a value without one.

    Names are compared. So what cannot be shown leaves a mark, which no name of Azure's has.
    """
    if not clean_text(value):
        return ""
    text = str(value)
    whole = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}{_HIDDEN}"
    return printable(whole, mark=_HIDDEN)


def printable(text: str, *, keep: str = "", mark: str = " ") -> str:
    """``text`` with ``mark`` in place of each character that cannot be shown and is not in ``keep``."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or one in keep else mark for one in text])


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list"
    return repr(clean_text(value)[:80])


def excerpt(data: bytes) -> str:
    """The beginning of ``data`` as one printable line; "nothing" if that is empty."""
    text = " ".join(data[:_EXCERPT_BYTES].removeprefix(_BOM).decode("utf-8", "replace").split())
    shown = printable(text, mark=_HIDDEN)
    return f"{shown}..." if len(data) > _EXCERPT_BYTES else shown or "nothing"

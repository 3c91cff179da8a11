"""Finds the secrets of a request in the answer to it: whole, in parts, and as HTTP sends them."""

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from urllib.parse import unquote, unquote_plus

import httpx

_MIN_PART_BYTES = 8  # shorter ones would also match ordinary text
_HTTP_WORD = r"(?i)(application|text)/[\w.+-]+|basic|bearer|negotiate|keep-alive|no-cache"


def mask(answer: bytes, secrets: Iterable[str]) -> bytes:
    """The answer with ``***`` in place of each secret."""
    longest_first = sorted((secret.encode() for secret in secrets), key=len, reverse=True)
    return re.sub(b"|".join(map(re.escape, longest_first)), b"***", answer) if longest_first else answer


def secrets_of(url: httpx.URL, texts: Iterable[str], proxy: httpx.Proxy | None) -> set[str]:
    """The secrets of a request: its URL, its target's texts, such as headers, and the account at the proxy.

    Parts of these count if they are long.
    """
    whole = {str(url), url.raw_path.decode(), *texts}
    parts = {*_parts_of_url(url)}
    for text in whole:
        parts.update(_parts_of_text(text))
    if proxy is not None and proxy.auth is not None:
        parts.update(_parts_of_account(*proxy.auth))
    secrets = {text for text in whole if len(text) > 1}
    secrets |= {text for text in parts if len(text.encode()) >= _MIN_PART_BYTES}
    return {text for text in secrets if not re.fullmatch(_HTTP_WORD, text)}


def _parts_of_url(url: httpx.URL) -> Iterator[str]:
    for segment in url.raw_path.decode().partition("?")[0].split("/"):
        yield from (segment, unquote(segment))
    for parameter in url.query.decode().split("&"):
        value = parameter.partition("=")[2] or parameter
        yield from (value, unquote_plus(value))
    if url.userinfo:
        yield url.userinfo.decode()
        yield from _parts_of_account(url.username, url.password)


def _parts_of_text(text: str) -> Iterator[str]:
    yield from text.split()
    yield from re.split(r'[\s,;="&]+', text)
    if basic := re.fullmatch(r"(?i)basic\s+(\S+)", text):
        with suppress(binascii.Error):
            user, _, password = b64decode(basic[1]).decode("utf-8", "replace").partition(":")
            yield from _parts_of_account(user, password)


def _parts_of_account(user: str, password: str) -> Iterator[str]:
    both = f"{user}:{password}"
    yield from (user, password, both, b64encode(both.encode()).decode())

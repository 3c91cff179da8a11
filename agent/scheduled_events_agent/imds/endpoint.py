"""Addresses of the metadata service, as a policy writes them. Pure."""

import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

_ENDPOINT = r"http://(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:(?P<port>[0-9]{1,5}))?/?"
# httpx takes four numbers for an IPv4 address, and rejects what is none.
_FOUR_NUMBERS = r"[0-9]+(\.[0-9]+){3}"


def parse_endpoint(text: str) -> tuple[str, int] | None:
    """Host and port of http://HOST[:PORT]; None if it is something else."""
    match = re.fullmatch(_ENDPOINT, text)
    port = int(match["port"] or 80) if match else 0
    return (match["host"], port) if match and 0 < port < 65536 and _can_be_host(match["host"]) else None


def ip_address_of(address: str) -> IPv4Address | IPv6Address | None:
    """The IP address, also in brackets; None if it is none."""
    with suppress(ValueError):
        return ip_address(address.strip("[]"))
    return None


def _can_be_host(host: str) -> bool:
    """Whether httpx and the system's look-up accept the name, which has only ASCII characters."""
    if ip_address_of(host) is not None:
        return True
    try:
        host.encode("idna")
        if host.startswith("xn--"):
            import idna  # noqa: PLC0415  # httpx brings it, and decodes such names with it

            idna.decode(host)
    except UnicodeError:
        return False
    return not re.fullmatch(_FOUR_NUMBERS, host)

"""DHCP option 245 in the records of DHCP clients: where a VM outside a virtual network finds its endpoint.

Owns the reading of lease files and of Windows' record of DHCP options. Does no I/O: the system's own module
finds the texts. The one invariant: what cannot be read, or has expired, says nothing; it never raises.
"""

import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime

# dhclient names an option it has no definition for unknown-N (since 4.4 on some systems private-N).
# In all of these no text can be matched in two ways, or a long one would take time by its square.
_DHCLIENT_LEASE = re.compile(r"^[ \t]*lease\s*\{", re.MULTILINE)
_DHCLIENT_OPTION = re.compile(r'\s*option\s+(?:unknown|private)-245\s+(".*"|[^;"\s][^;"]*);')
_DHCLIENT_EXPIRE = re.compile(r"\s*expire\s+(?:(never)|epoch\s+(\d{1,18})|\d\s+(\d+/\d+/\d+\s+\d+:\d+:\d+))\s*;")
# systemd-networkd, and NetworkManager's own client while it was built from it, write OPTION_245=a83f8110;
# later NetworkManagers call the option private_245 (unknown_245 when dhclient told them).
_KEY_VALUE_OPTION = re.compile(r"(?:option|private|unknown)_245\s*=\s*(\S+)", re.IGNORECASE)
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)

# Windows' DhcpInterfaceOptions: option, class, length of the data, vendor flag, expiry in Unix time;
# then the data, padded to whole double words.
_WINDOWS_RECORD = struct.Struct("<5I")


def parse_lease(text: str, now: datetime) -> str | None:
    """Option 245, as a dotted address, of the lease file ``text`` of any DHCP client of Linux."""
    if _DHCLIENT_LEASE.search(text):
        return _parse_dhclient(text, now)
    for line in reversed(text.splitlines()):
        match = _KEY_VALUE_OPTION.fullmatch(line.strip())
        if match is not None:
            return _to_address(match[1])
    return None


def parse_windows_options(data: bytes, now: datetime) -> str | None:
    """Option 245, as a dotted address, of a registry value ``DhcpInterfaceOptions``."""
    address = None
    for option, value, expires_at_unix in _windows_records(data):
        if option == 245 and len(value) == 4 and expires_at_unix > now.timestamp():
            address = _dotted(value)
    return address


def _parse_dhclient(text: str, now: datetime) -> str | None:
    """Of the leases that have not expired and tell the option, the last one: dhclient appends."""
    found = None
    address, has_expired = None, False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("lease"):
            address, has_expired = None, False
        elif match := _DHCLIENT_OPTION.match(line):
            address = _to_address(match[1].strip())
        elif match := _DHCLIENT_EXPIRE.match(line):
            has_expired = _is_past(match, now)
        elif stripped == "}" and address is not None and not has_expired:
            found = address
    return found


def _is_past(expire: re.Match[str], now: datetime) -> bool:
    never, epoch, date = expire.groups()
    if never:
        return False
    if epoch:
        return int(epoch) <= now.timestamp()
    try:
        return datetime.strptime(date, "%Y/%m/%d %H:%M:%S").replace(tzinfo=UTC) <= now
    except ValueError:
        return True


def _to_address(value: str) -> str | None:
    """``a8:3f:81:10`` (a pair may lack its leading zero), ``a83f8110``, ``168.63.129.16``, or four characters.

    The last is how dhclient writes four bytes that all happen to be printable: ``"d<6 "``.
    """
    try:
        if value.startswith('"'):
            octets = _ESCAPE.sub(_unescape, value[1:-1].encode("latin-1"))
        elif ":" in value:
            octets = bytes(int(pair, 16) for pair in value.split(":"))
        elif "." in value:
            octets = bytes(int(part) for part in value.split("."))
        else:
            octets = bytes.fromhex(value)
    except (ValueError, OverflowError):
        return None
    return _dotted(octets) if len(octets) == 4 else None


def _unescape(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8) & 255]) if len(match[1]) == 3 else match[1]


def _windows_records(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    position = 0
    while position + _WINDOWS_RECORD.size <= len(data):
        option, _, length, is_vendor, expires_at_unix = _WINDOWS_RECORD.unpack_from(data, position)
        position += _WINDOWS_RECORD.size
        value = data[position : position + length]
        position += (length + 3) // 4 * 4
        if not is_vendor and len(value) == length:
            yield option, value, expires_at_unix


def _dotted(octets: bytes) -> str:
    return ".".join(str(octet) for octet in octets)

"""DHCP option 245 in the records of DHCP clients: where a VM outside a virtual network finds its endpoint.

Does no I/O. The one invariant: what cannot be read, or has expired, says nothing; it never raises.
"""

import re
import struct
from datetime import UTC, datetime

# dhclient writes "option unknown-245 a8:3f:81:10;" (since 4.4 on some systems private-245), systemd-networkd
# "OPTION_245=a83f8110", NetworkManager "private_245" or "unknown_245".
_OPTION = re.compile(
    r"^[ \t]*(?:option[ \t]+(?:unknown|private)-245[ \t]+|(?:option|private|unknown)_245[ \t]*=[ \t]*)"
    r'(".*"|[0-9a-f:.]+)',
    re.IGNORECASE | re.MULTILINE,
)
_LEASE = re.compile(r"^[ \t]*lease[ \t]*\{", re.MULTILINE)
_LEASE_END = re.compile(r"^[ \t]*\}", re.MULTILINE)
_EXPIRE = re.compile(
    r"^[ \t]*expire[ \t]+(?:epoch[ \t]+(\d{1,18})|\d[ \t]+(\d+/\d+/\d+ \d+:\d+:\d+))", re.ASCII | re.MULTILINE
)
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")

# Windows' DhcpInterfaceOptions: option, class, length of the data, vendor flag, expiry in Unix time;
# then the data, padded to whole double words.
_WINDOWS_RECORD = struct.Struct("<5I")


def parse_lease(text: str, now: datetime) -> str | None:
    """Option 245, as a dotted address, in the lease file of a DHCP client of Linux.

    dhclient appends its leases. Of those that are complete and have not expired, the last with the option holds.
    """
    _, *leases = _LEASE.split(text)
    if leases:
        complete = [lease[: end.start()] for lease in leases if (end := _LEASE_END.search(lease))]
        text = "".join(lease for lease in complete if not _has_expired(lease, now))
    found = [address for value in _OPTION.findall(text) if (address := _to_address(value))]
    return found[-1] if found else None


def _has_expired(lease: str, now: datetime) -> bool:
    """Whether its time is over; without one, or with "never", it is not."""
    if (expire := _EXPIRE.search(lease)) is None:
        return False
    epoch, date = expire.groups()
    if epoch:
        return int(epoch) <= now.timestamp()
    try:
        return datetime.strptime(date, "%Y/%m/%d %H:%M:%S").replace(tzinfo=UTC) <= now
    except ValueError:
        return True


def parse_windows_options(data: bytes, now: datetime) -> str | None:
    """Option 245, as a dotted address, of a registry value ``DhcpInterfaceOptions``."""
    address, position = None, 0
    while position + _WINDOWS_RECORD.size <= len(data):
        option, _, length, is_vendor, expires_at_unix = _WINDOWS_RECORD.unpack_from(data, position)
        position += _WINDOWS_RECORD.size
        value = data[position : position + length]
        position += (length + 3) // 4 * 4
        if option == 245 and length == 4 and not is_vendor and expires_at_unix > now.timestamp():
            address = _dotted(value) or address
    return address


def _to_address(value: str) -> str | None:
    """``a8:3f:81:10`` (a pair may lack its leading zero), ``a83f8110``, ``168.63.129.16``, or four characters.

    The last is how dhclient writes four bytes that all are printable: ``"d<6 "``.
    """
    try:
        if value.startswith('"'):
            return _dotted(_ESCAPE.sub(_unescape, value[1:-1]).encode("latin-1"))
        if ":" in value:
            return _dotted(bytes(int(pair, 16) for pair in value.split(":")))
        if "." in value:
            return _dotted(bytes(int(part) for part in value.split(".")))
        return _dotted(bytes.fromhex(value))
    except (ValueError, OverflowError):
        return None


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 8) & 255) if len(match[1]) == 3 else match[1]


def _dotted(octets: bytes) -> str | None:
    return ".".join(map(str, octets)) if len(octets) == 4 else None

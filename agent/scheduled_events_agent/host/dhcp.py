"""DHCP option 245 in the records of DHCP clients: where a VM outside a virtual network finds its endpoint.

Does no I/O. Invariant: nothing here raises. A record that cannot be parsed counts as one without the option.
"""

import re
import struct

# dhclient writes "option unknown-245 a8:3f:81:10;" (since 4.4 on some systems private-245), systemd-networkd
# "OPTION_245=a83f8110", NetworkManager "private_245" or "unknown_245".
_OPTION = (
    r"(?im)^[ \t]*(?:option[ \t]+(?:unknown|private)-245[ \t]+|(?:option|private|unknown)_245[ \t]*=[ \t]*)"
    r'(".*"|[0-9a-f:.]+)'
)
_ESCAPE = r"\\([0-7]{3}|.)"

# Windows' DhcpInterfaceOptions: option, class, length of the data, vendor flag, expiry in Unix time;
# then the data, padded to whole double words.
_WINDOWS_RECORD = struct.Struct("<5I")


def parse_lease(text: str) -> str | None:
    """Option 245, as a dotted address, in the lease file of a DHCP client of Linux.

    dhclient appends its leases: the last with the option holds.
    """
    found = list(filter(None, map(_to_address, re.findall(_OPTION, text))))
    return found[-1] if found else None


def parse_windows_options(data: bytes) -> str | None:
    """Option 245, as a dotted address, of a registry value ``DhcpInterfaceOptions``."""
    address = None
    position = 0
    while position + _WINDOWS_RECORD.size <= len(data):
        option, _, length, is_vendor, _ = _WINDOWS_RECORD.unpack_from(data, position)
        position += _WINDOWS_RECORD.size
        value = data[position : position + length]
        position += (length + 3) // 4 * 4
        if option == 245 and length == 4 and not is_vendor:
            address = _dotted(value) or address
    return address


def _to_address(value: str) -> str | None:
    """``a8:3f:81:10`` (a pair may lack its leading zero), ``a83f8110``, ``168.63.129.16``, or four characters.

    The last is how dhclient writes four bytes that all are printable: ``"d<6 "``.
    """
    try:
        if value.startswith('"'):
            return _dotted(re.sub(_ESCAPE, _unescape, value[1:-1]).encode("latin-1"))
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

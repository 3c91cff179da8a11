"""DHCP option 245 in the records of every DHCP client we know."""

import os
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduled_events_agent.host.dhcp import parse_lease, parse_windows_options


def lease(*lines: str) -> str:
    return "\n".join(["lease {", '  interface "eth0";', *(f"  {line}" for line in lines), "}", ""])


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("a8:3f:81:10", "168.63.129.16"),
        ("A8:3F:81:10", "168.63.129.16"),
        ("a:0:0:5", "10.0.0.5"),
        ("0a:00:00:05", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.5"),
        ('"d<6 "', "100.60.54.32"),  # four bytes that all are printable
        (r'"d\"6\\"', "100.34.54.92"),
        (r'"d\0016;"', "100.1.54.59"),
        ("a8:3f:81", None),
        ("a8:3f:81:10:00", None),
        ("a8:3f:81:1ff", None),
        ("a8:3f:81:-1", None),
        ("a8:zz:81:10", None),
        ("10.0.0.256", None),
        ('"four or more"', None),
        ('"', None),
        ("\N{SNOWMAN}", None),
        ('"\N{SNOWMAN}"', None),
    ],
)
def test_dhclients_forms_of_an_address_are_read(value: str, address: str | None) -> None:
    assert parse_lease(lease(f"option unknown-245 {value};")) == address


@pytest.mark.parametrize("name", ["unknown-245", "private-245"])
def test_dhclients_names_of_the_option_are_known(name: str) -> None:
    assert parse_lease(lease(f"option {name} a:0:0:5;")) == "10.0.0.5"


@pytest.mark.parametrize("name", ["unknown-24", "unknown-2450", "vendor.unknown-245", "other"])
def test_other_dhcp_options_are_ignored(name: str) -> None:
    assert parse_lease(lease(f"option {name} a:0:0:5;")) is None


def test_the_last_lease_with_the_option_holds() -> None:
    text = "".join(lease(f"option unknown-245 {value};") for value in ("a:0:0:1", "a:0:0:2", "junk"))
    assert parse_lease(text) == "10.0.0.2"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("# This is private data. Do not parse.\nADDRESS=10.0.0.4\nOPTION_245=a83f8110\n", "168.63.129.16"),
        ("ADDRESS=10.0.0.4\nOPTION_245=0a000005", "10.0.0.5"),
        ("[dhcp4]\nprivate_245=a8:3f:81:10\n", "168.63.129.16"),
        ("unknown_245 = a:0:0:5\n", "10.0.0.5"),
        ("OPTION_245=a83f81\n", None),
        ("OPTION_245=\n", None),
        ("OPTION_2450=a83f8110\nXOPTION_245=a83f8110\n#OPTION_245=a83f8110\n", None),
        ("# This is private data. Do not parse.\nADDRESS=10.0.0.4\n", None),
        ("", None),
    ],
)
def test_leases_of_networkd_and_networkmanager_are_read(text: str, address: str | None) -> None:
    assert parse_lease(text) == address


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse_lease(text)
    parse_lease(lease(f"option unknown-245 {text};"))
    parse_lease(f"OPTION_245={text}")


# --- Windows -------------------------------------------------------------------------------------------------


def record(option: int, data: bytes, *, vendor: int = 0) -> bytes:
    return struct.pack("<5I", option, 0, len(data), vendor, 0x7FFFFFFF) + data + b"\0" * (-len(data) % 4)


ADDRESS = bytes([10, 0, 0, 5])


@pytest.mark.parametrize(
    ("data", "address"),
    [
        (record(245, ADDRESS), "10.0.0.5"),
        (record(15, b"example") + record(6, b"") + record(245, ADDRESS) + record(3, ADDRESS), "10.0.0.5"),
        (record(245, ADDRESS, vendor=1), None),  # 245 among a vendor's own options
        (record(245, b"abc"), None),
        (record(245, b"abcde"), None),
        (record(245, b""), None),
        (record(244, ADDRESS), None),
        (record(245, ADDRESS)[:-1], None),
        (record(245, ADDRESS)[:19], None),
        (struct.pack("<5I", 15, 0, 0xFFFFFFFF, 0, 0) + record(245, ADDRESS), None),
        (b"", None),
    ],
)
def test_windows_record_of_options_is_read(data: bytes, address: str | None) -> None:
    assert parse_windows_options(data) == address


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    parse_windows_options(data)
    parse_windows_options(record(245, data) + data)


# --- the usual places of Linux -------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="places of Linux")
@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("run/systemd/netif/leases/2", "OPTION_245=0a000005\n"),
        ("run/NetworkManager/devices/2", "[dhcp4]\nprivate_245=a:0:0:5\n"),
        ("var/lib/NetworkManager/internal-7e73a292-eth0.lease", "ADDRESS=10.0.0.4\nOPTION_245=0a000005\n"),
        ("var/lib/NetworkManager/dhclient-7e73a292-eth0.lease", lease("option private-245 a:0:0:5;")),
        ("var/lib/dhcp/dhclient.eth0.leases", lease("option unknown-245 a:0:0:5;")),
        ("var/lib/dhclient/dhclient--eth0.lease", lease("option unknown-245 a:0:0:5;")),
        ("var/lib/dhclient/dhclient.leases", lease("option unknown-245 a:0:0:5;")),
    ],
)
def test_every_usual_directory_is_searched(tmp_path: Path, place: str, text: str) -> None:
    from scheduled_events_agent.host.linux import service_manager as service

    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)

    assert service._option_245_of(tmp_path) == "10.0.0.5"


@pytest.mark.skipif(sys.platform == "win32", reason="places of Linux")
def test_the_newest_file_with_the_option_holds_and_unreadable_ones_are_skipped(tmp_path: Path) -> None:
    from scheduled_events_agent.host.linux import service_manager as service

    leases = tmp_path / "run/systemd/netif/leases"
    leases.mkdir(parents=True)
    assert service._option_245_of(tmp_path) is None
    for age, (name, text) in enumerate(
        [("2", "ADDRESS=10.0.0.4\n"), ("3", "OPTION_245=0a000003\n"), ("4", "OPTION_245=0a000004\n")]
    ):
        (leases / name).write_text(text)
        os.utime(leases / name, (1_000_000 - age, 1_000_000 - age))
    (leases / "5").mkdir()
    (leases / "6").symlink_to("nowhere")
    (leases / "7").write_bytes(b"\xff\xfe\x00")

    assert service._option_245_of(tmp_path) == "10.0.0.3"

"""Parts of Windows alone: access lists, the Event Log's source, and a log file that others may have open."""

import ctypes
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "win32":
    pytest.skip("access lists, the registry and the Event Log are Windows'", allow_module_level=True)

import winreg

import win32evtlog
import win32file
import win32security

from scheduled_events_agent import host
from scheduled_events_agent.host.windows import permissions
from scheduled_events_agent.host.windows.event_log import EventLog, find_log_dir_risk, open_log_file
from scheduled_events_agent.host.windows.service_manager import register_source, unregister_source
from scheduled_events_agent.host.windows.service_process import open_crash_log

pytestmark = pytest.mark.wine
_ON_WINE = hasattr(ctypes.windll.ntdll, "wine_get_version")
_EVERYBODY, _USERS = "S-1-1-0", "S-1-5-32-545"


def _descriptor(text: str) -> Any:
    return win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(text, win32security.SDDL_REVISION_1)


def _entries(path: Path) -> set[tuple[int, int, str]]:
    wanted = win32security.DACL_SECURITY_INFORMATION
    dacl = win32security.GetNamedSecurityInfo(
        str(path), win32security.SE_FILE_OBJECT, wanted
    ).GetSecurityDescriptorDacl()
    found = [dacl.GetAce(index) for index in range(dacl.GetAceCount())]
    return {(kind, mask, win32security.ConvertSidToStringSid(sid)) for (kind, _), mask, sid in found}


@pytest.mark.parametrize(
    ("text", "rights", "with_inheritable", "expected"),
    [
        ("O:BAD:P(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)", permissions.TO_READ, True, []),
        ("O:BAD:(A;OICI;0x1200a9;;;BU)(A;CI;0x116;;;BU)", permissions.TO_READ, True, [_USERS]),
        ("O:BAD:(A;OICI;0x1200a9;;;BU)", permissions.TO_WRITE, False, []),
        # As %ProgramData% has it: users may add files.
        ("O:BAD:(A;OICI;0x1200a9;;;BU)(A;CI;DCLCRPCR;;;BU)", permissions.TO_WRITE, False, [_USERS]),
        ("O:BAD:(A;OICIIO;FA;;;WD)", permissions.TO_WRITE, False, []),
        ("O:BAD:(A;OICIIO;FA;;;WD)", permissions.TO_READ, True, [_EVERYBODY]),
        ("O:BAD:(D;;FA;;;WD)(A;;FA;;;SY)", permissions.TO_WRITE, False, []),
        ("O:BUD:P(A;;FA;;;SY)", permissions.TO_WRITE, False, [_USERS]),
        ("O:BAD:(A;;GA;;;WD)(A;;SD;;;BU)", permissions.TO_WRITE, False, [_EVERYBODY, _USERS]),
        ("O:BAD:NO_ACCESS_CONTROL", permissions.TO_WRITE, False, ["everyone"]),
    ],
)
def test_access_lists_are_evaluated(text: str, rights: int, with_inheritable: bool, expected: list[str]) -> None:
    trusted = ["S-1-5-18", "S-1-5-32-544"]
    if text.endswith("NO_ACCESS_CONTROL"):
        descriptor: Any = _descriptor("O:BA")
        descriptor.SetSecurityDescriptorDacl(True, None, False)
    else:
        descriptor = _descriptor(text)
    assert (
        permissions.untrusted_accounts(descriptor, trusted, rights, with_inheritable=with_inheritable) == expected
    )


def _with_condition(account: str) -> Any:
    """Owned by administrators, with one entry that lets the account in on a condition."""
    convert: Any = win32security.ConvertStringSidToSid
    administrators, sid = (bytes(memoryview(convert(text))) for text in ("S-1-5-32-544", account))
    condition = b"artx\0\0\0\0"
    entry = struct.pack("<BBHI", 9, 0, 8 + len(sid) + len(condition), 0x1F01FF) + sid + condition
    dacl = struct.pack("<BBHHH", 2, 0, 8 + len(entry), 1, 0) + entry
    head = struct.pack("<BBHIIII", 1, 0, 0x8004, 20, 0, 0, 20 + len(administrators))
    make: Any = win32security.SECURITY_DESCRIPTOR
    return make(head + administrators + dacl)


def test_a_conditional_entry_counts_as_met() -> None:
    assert permissions.untrusted_accounts(
        _with_condition(_EVERYBODY), ["S-1-5-32-544"], permissions.TO_WRITE, with_inheritable=False
    ) == ["any account that meets the condition of an entry"]


def _open_to_everybody(path: Path) -> None:
    dacl = _descriptor("D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;WD)").GetSecurityDescriptorDacl()
    wanted = win32security.DACL_SECURITY_INFORMATION
    win32security.SetNamedSecurityInfo(str(path), win32security.SE_FILE_OBJECT, wanted, None, None, dacl, None)


def test_a_parent_directory_that_everybody_may_replace_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "open" / "closed" / "closed too" / "hook.cmd"
    path.parent.mkdir(parents=True)
    path.touch()
    assert host.find_write_risk(path) is None
    _open_to_everybody(tmp_path / "open")
    fault = host.find_write_risk(path)
    assert fault is not None
    if _ON_WINE:  # which has no lists of their own for those below
        assert " can be changed by S-1-1-0, and the agent acts on what it finds there: icacls " in fault
    else:
        assert fault.startswith(f"{path} can be changed by S-1-1-0, ")


def test_accounts_that_can_change_the_agents_code_are_trusted_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scheduled_events_agent.py"
    path.touch()
    _open_to_everybody(path)
    monkeypatch.setattr("scheduled_events_agent.host.windows.permissions.__file__", str(path))
    assert host.find_write_risk(path) is None
    fault = host.find_write_risk(path, is_own_code=True)
    assert fault is not None
    assert fault.startswith(f"{path} can be changed by S-1-1-0, ")


@pytest.mark.skipif(_ON_WINE, reason="Wine 8 cannot make junctions")
def test_the_target_of_a_link_is_checked_too(tmp_path: Path) -> None:
    assert sys.platform == "win32"
    import _winapi

    closed, opened = tmp_path / "closed", tmp_path / "open"
    closed.mkdir()
    opened.mkdir()
    (closed / "hook.cmd").touch()
    _winapi.CreateJunction(str(closed), str(opened / "link"))
    assert host.find_write_risk(opened / "link" / "hook.cmd") is None
    _open_to_everybody(opened / "link")  # the directory that it leads to
    fault = host.find_write_risk(opened / "link" / "hook.cmd")
    assert fault is not None
    assert " can be changed by S-1-1-0, " in fault


def test_nothing_is_written_to_a_log_directory_that_others_could_change(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "crash.log").write_text("a trap")
    _open_to_everybody(logs)
    fault = find_log_dir_risk(logs)
    assert fault is not None
    assert fault.startswith(f"{logs} can be changed by S-1-1-0, ")
    log = open_log_file(logs)
    with pytest.raises(OSError, match="can be changed by S-1-1-0"):
        log.write("a line\n")
    crash_file, left = open_crash_log(logs)
    with crash_file:
        crash_file.write("lost\n")
    assert left == ""
    assert [(path.name, path.read_text()) for path in logs.iterdir()] == [("crash.log", "a trap")]


def test_the_identifier_of_a_service_is_the_one_that_windows_derives() -> None:
    assert permissions.service_sid("TrustedInstaller") == (
        "S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464"
    )


def test_the_data_directory_is_made_and_may_be_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        permissions.make_data_dirs(tmp_path / "ScheduledEventsAgent", None)
    root = tmp_path / "ScheduledEventsAgent"
    assert sorted(path.name for path in root.iterdir()) == ["hooks", "logs", "state"]
    if not _ON_WINE:  # which keeps lists only as far as Linux's modes go
        assert {sid for _, _, sid in _entries(root)} == {"S-1-5-18", "S-1-5-32-544"}
        assert permissions.readers(root) == []


def test_a_directory_link_does_not_count_as_the_data_directory(tmp_path: Path) -> None:
    root = tmp_path / "ScheduledEventsAgent"
    root.write_text("in the way")
    with pytest.raises(host.HostError) as caught:
        permissions.make_data_dirs(tmp_path / "ScheduledEventsAgent", None)
    assert str(caught.value) == f"{root}: expected a directory; it is a file or leads elsewhere: remove it"


def test_an_unknown_account_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(host.HostError) as caught:
        permissions.make_data_dirs(tmp_path / "ScheduledEventsAgent", "NOWHERE\\nobody-at-all")
    assert str(caught.value).startswith("NOWHERE\\nobody-at-all: expected an account that this machine knows; ")


def test_a_file_that_everybody_may_change_is_reported_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "hook.cmd"
    path.touch()
    dacl = _descriptor("D:P(A;;FA;;;SY)(A;;FA;;;WD)").GetSecurityDescriptorDacl()
    wanted = win32security.DACL_SECURITY_INFORMATION
    win32security.SetNamedSecurityInfo(str(path), win32security.SE_FILE_OBJECT, wanted, None, None, dacl, None)
    assert host.find_write_risk(path) == (
        f"{path} can be changed by S-1-1-0, and the agent acts on what it finds there: "
        f'icacls "{path}" /inheritance:r /grant:r "*S-1-5-18:F" "*S-1-5-32-544:F" /remove:g *S-1-1-0; '
        f'if the owner is still another, icacls "{path}" /setowner *S-1-5-32-544'
    )


def test_the_source_is_registered_and_removed_and_both_may_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ScheduledEventsAgentTest{os.getpid()}"  # a service may be installed on this machine
    monkeypatch.setattr("scheduled_events_agent.host.windows.service_manager.NAME", name)
    path = rf"SYSTEM\CurrentControlSet\Services\EventLog\Application\{name}"
    for _ in range(2):
        register_source(r"C:\messages.dll")
    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
        assert winreg.QueryValueEx(key, "EventMessageFile") == (r"C:\messages.dll", winreg.REG_EXPAND_SZ)
        assert winreg.QueryValueEx(key, "TypesSupported") == (7, winreg.REG_DWORD)
    for _ in range(2):
        unregister_source()
    with pytest.raises(FileNotFoundError):
        winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path)


def test_an_entry_is_written_with_its_id_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wine accepts entries but shows none: the test looks at what it is given.
    given: list[tuple[Any, ...]] = []
    report = win32evtlog.ReportEvent

    def take(*arguments: Any) -> None:
        report(*arguments)
        given.append(arguments[1:])

    monkeypatch.setattr(win32evtlog, "ReportEvent", take)
    log = EventLog()
    log.report(240, {"level": "warning", "message": "held", "reason": "drain failed", "event_id": "E-1"})
    log.report(None, {"level": "info", "message": "hook output", "line": "x"})
    log.report(101, {"level": "info", "message": "agent stopped"})
    log.close()
    assert given == [
        (2, 0, 240, None, ["held: drain failed\r\n\r\nevent_id: E-1", "E-1"], None),
        (4, 0, 101, None, ["agent stopped", ""], None),
    ]


def test_a_hung_event_log_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(win32evtlog, "ReportEvent", lambda *_: may_go_on.wait(60))
    log = EventLog()
    for _ in range(5000):
        log.report(200, {"level": "info", "message": "seen"})
    log.close()
    may_go_on.set()


def test_the_log_file_is_rotated_while_others_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduled_events_agent.host.windows.event_log.MAX_LOG_BYTES", 10)
    log = open_log_file(tmp_path)
    log.write("the first\n")
    share = win32file.FILE_SHARE_READ | win32file.FILE_SHARE_WRITE | win32file.FILE_SHARE_DELETE
    handle: Any = win32file.CreateFile(
        str(tmp_path / "agent.log"), win32file.GENERIC_READ, share, None, win32file.OPEN_EXISTING, 0, None
    )
    log.write("the second\n")
    assert win32file.ReadFile(handle, 100) == (0, b"the first\n")
    handle.Close()
    log.close()
    assert (tmp_path / "agent.log").read_text() == "the second\n"
    assert (tmp_path / "agent.log.1").read_text() == "the first\n"


def test_a_log_file_that_cannot_be_rotated_grows_to_twice_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.host.windows.event_log.MAX_LOG_BYTES", 20)
    log = open_log_file(tmp_path)
    log.write("a line\n")
    with (tmp_path / "agent.log").open() as reader:  # while it is open so, it cannot be renamed
        for _ in range(12):
            log.write("a line\n")
            assert (tmp_path / "agent.log").stat().st_size <= 2 * 20 + 7
        assert not (tmp_path / "agent.log.1").exists()
        reader.read()
    log.close()


def test_option_245_is_read_from_the_registry_of_whichever_interface_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interfaces = rf"SOFTWARE\ScheduledEventsAgentTest{os.getpid()}"
    monkeypatch.setattr("scheduled_events_agent.host.windows.system._INTERFACES", interfaces)
    option = struct.pack("<5I", 245, 0, 4, 0, 0x7FFFFFFF) + bytes([10, 0, 0, 5])
    assert host.dhcp_option_245() is None
    for name in ("one", "two"):
        winreg.CreateKey(winreg.HKEY_LOCAL_MACHINE, rf"{interfaces}\{name}")
    try:
        assert host.dhcp_option_245() is None
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, rf"{interfaces}\two", 0, winreg.KEY_SET_VALUE) as key:
            winreg.SetValueEx(key, "DhcpInterfaceOptions", 0, winreg.REG_BINARY, option)
        assert host.dhcp_option_245() == "10.0.0.5"
    finally:
        for name in (r"\one", r"\two", ""):
            winreg.DeleteKey(winreg.HKEY_LOCAL_MACHINE, interfaces + name)

"""Who may do what with the agent's files on Windows: directories that are made, and lists that are judged.

Owns the access lists of the data directory and the commands that mend others' lists. Knows nothing of what is in
the files. The one invariant: nothing that was there before is opened to anybody, nor taken over unasked from an
account that is neither the system, an administrator nor the service's.

Accounts are named by their identifiers (SIDs), for their names differ from language to language.
"""

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agent.host.error import HostError
from agent.host.windows import default_state_dir

SERVICE = "ScheduledEventsAgent"
_SYSTEM = "S-1-5-18"
_ADMINISTRATORS = "S-1-5-32-544"
_EVERYBODY = "S-1-1-0"
# Besides these two: whoever makes a file (as long as the list names nobody else), and Windows' own installer.
_TRUSTED = frozenset(
    {
        _SYSTEM,
        _ADMINISTRATORS,
        "S-1-3-0",
        "S-1-3-4",
        "S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464",
    }
)
# For the system, administrators and further accounts; not inherited from the parent, which lets everybody in.
_PRIVATE = "D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)"
_ALL, _READ = "FA", "0x1200a9"
# Data, extended attributes, deletion (of what is inside, too), the list itself, the owner, and all of it.
TO_WRITE = 0x2 | 0x4 | 0x10 | 0x40 | 0x10000 | 0x40000 | 0x80000 | 0x10000000 | 0x40000000
TO_READ = TO_WRITE | 0x1 | 0x80000000
# To move or remove a directory, and then make another of its name.
TO_REPLACE = TO_WRITE & ~(0x2 | 0x4 | 0x10 | 0x40000000)
_INHERIT_ONLY = 0x8
_ALREADY_EXISTS = 183
_REPARSE_POINT = 0x400
_OPEN_REPARSE_POINT = 0x200000


def make_data_dirs(account: str | None = None) -> None:
    """Make the data directory, with hooks, state and logs, for the system, administrators and the service.

    The service's ``account`` (None: one of the former) may read all of it and write state and logs. Directories
    that exist get these lists as well; needs an administrator. Raises HostError, also if one is somebody else's.
    """
    root = default_state_dir().parent
    extra = [_sid_of(account)] if account else []
    for path, right in ((root, _READ), (root / "hooks", _READ), (root / "state", _ALL), (root / "logs", _ALL)):
        _make(path, "".join(f"(A;OICI;{right};;;{sid})" for sid in extra), may_exist=True)


def make_private_dir(path: Path) -> None:
    """Make the directory for the system, administrators and this account; what exists is left as it is.

    Raises OSError or HostError.
    """
    own = f"(A;OICI;FA;;;{own_sid()})"
    root = default_state_dir().parent
    if root in path.parents and not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        _make(root, own, may_exist=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    _make(path, own, may_exist=False)


def readers(path: Path) -> list[str]:
    """Accounts that could read or change what is in the directory, also where it leads to. Raises OSError."""
    trusted = _trusted()
    places = {path.absolute(), Path(os.path.realpath(path))}
    return sorted(
        {who for place in places for who in untrusted(_descriptor(place), trusted, TO_READ, with_heirs=True)}
    )


def writers(path: Path, rights: int = TO_WRITE) -> list[str]:
    """Accounts that have any of the rights to the file or directory, and should not. Raises OSError."""
    return untrusted(_descriptor(path), _trusted(), rights, with_heirs=False)


def writers_of_our_code() -> set[str]:
    """Accounts that could change what this process runs."""
    found = set[str]()
    for path in (Path(__file__), Path(__file__).parent, Path(sys.executable), Path(sys.executable).parent):
        with contextlib.suppress(OSError):
            found.update(writers(path))
    return found


def places(path: Path) -> Iterator[tuple[Path, int]]:
    """Whatever somebody could change to have the path mean something else, each with the rights to do so."""
    seen = set[Path]()
    for whole in (path.absolute(), Path(os.path.realpath(path))):
        for distance, place in enumerate((whole, *whole.parents)):
            if place not in seen:
                seen.add(place)
                yield place, TO_WRITE if distance < 2 else TO_REPLACE


def is_administrator() -> bool:
    """Whether this process has the rights of an administrator, as the system has."""
    import win32security  # noqa: PLC0415 - Windows only

    sid = win32security.ConvertStringSidToSid(_ADMINISTRATORS)
    return bool(win32security.CheckTokenMembership(None, sid))  # type: ignore[arg-type] # the stub is wrong


def untrusted(descriptor: Any, trusted: Iterable[str], rights: int, *, with_heirs: bool) -> list[str]:
    """Accounts that own what has this security descriptor, or have any of the rights, and are not trusted.

    ``with_heirs``: those that only files made inside will let in count too.
    """
    import win32security  # noqa: PLC0415 - Windows only

    dacl = descriptor.GetSecurityDescriptorDacl()
    if dacl is None:
        return ["everybody"]
    found = [owner] if (owner := descriptor.GetSecurityDescriptorOwner()) else []
    has_conditions = False
    for index in range(dacl.GetAceCount()):
        try:
            (kind, flags), mask, *_, account = dacl.GetAce(index)
        except NotImplementedError:  # one with a condition, which pywin32 does not read
            has_conditions = True
            continue
        counts = with_heirs or not flags & _INHERIT_ONLY
        if kind == win32security.ACCESS_ALLOWED_ACE_TYPE and mask & rights and counts:
            found.append(account)
    strangers = {win32security.ConvertSidToStringSid(sid) for sid in found} - set(trusted)
    return sorted(
        strangers | ({"whoever meets the condition of an entry"} if has_conditions and rights else set())
    )


def way_out(path: Path, accounts: Iterable[str]) -> str:
    """The command that closes the file or directory to the accounts, in any shell, for an administrator."""
    heirs = "(OI)(CI)" if path.is_dir() else ""
    whom = " ".join(f"*{account}" if account.startswith("S-") else f"*{_EVERYBODY}" for account in accounts)
    return (
        f'icacls "{path}" /inheritance:r /grant:r "*{_SYSTEM}:{heirs}F" "*{_ADMINISTRATORS}:{heirs}F" '
        f'/remove:g {whom}; if the owner is still another, icacls "{path}" /setowner *{_ADMINISTRATORS}'
    )


def service_sid(name: str) -> str:
    """The identifier that Windows derives from a service's name, whether there is such a service or not."""
    digest = hashlib.sha1(name.upper().encode("utf-16-le"), usedforsecurity=False).digest()
    return "-".join(["S-1-5-80", *map(str, struct.unpack("<5I", digest))])


def own_sid() -> str:
    """The account that this process runs as."""
    import win32api  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32security  # noqa: PLC0415 - Windows only

    token = win32security.OpenProcessToken(win32api.GetCurrentProcess(), win32con.TOKEN_QUERY)
    return str(
        win32security.ConvertSidToStringSid(win32security.GetTokenInformation(token, win32security.TokenUser)[0])
    )


def _trusted() -> set[str]:
    return {*_TRUSTED, own_sid(), service_sid(SERVICE), *_service_account()}


def _service_account() -> list[str]:
    """The account that the service runs as, if there is such a service and we may ask."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    with contextlib.suppress(pywintypes.error, HostError):
        services = win32service.OpenSCManager(None, None, win32service.SC_MANAGER_CONNECT)
        service = win32service.OpenService(services, SERVICE, win32service.SERVICE_QUERY_CONFIG)
        return [_sid_of(str(win32service.QueryServiceConfig(service)[7]))]
    return []


def _sid_of(account: str) -> str:
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32security  # noqa: PLC0415 - Windows only

    if account.casefold() in ("localsystem", r".\localsystem", r"nt authority\system"):
        return _SYSTEM
    domain, _, name = account.rpartition("\\")
    if domain.casefold() == "nt service":
        return service_sid(name)
    try:
        sid = win32security.LookupAccountName(None, name if domain == "." else account)[0]
    except pywintypes.error as error:
        raise HostError(
            f"{account}: expected an account that this machine knows; {error.strerror}", kind="usage"
        ) from None
    return str(win32security.ConvertSidToStringSid(sid))


def _make(path: Path, further: str, *, may_exist: bool) -> None:
    """``may_exist``: a directory that is there, and no stranger's, gets the list too."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32file  # noqa: PLC0415 - Windows only
    import win32security  # noqa: PLC0415 - Windows only

    attributes: Any = pywintypes.SECURITY_ATTRIBUTES()
    descriptor = win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(
        _PRIVATE + further, win32security.SDDL_REVISION_1
    )
    attributes.SECURITY_DESCRIPTOR = descriptor
    try:
        win32file.CreateDirectory(str(path), attributes)
    except pywintypes.error as error:
        if error.winerror != _ALREADY_EXISTS:
            raise OSError(error.strerror) from None
        if not may_exist:
            return
    else:
        return
    facts = os.lstat(path)
    if not path.is_dir() or getattr(facts, "st_file_attributes", 0) & _REPARSE_POINT:
        raise HostError(
            f"{path}: expected a directory; it is a file or leads elsewhere: remove it", kind="state_dir"
        )
    if strangers := untrusted(_descriptor(path), _trusted(), 0, with_heirs=False):
        raise HostError(
            f"{path}: expected a directory of an administrator; it belongs to {', '.join(strangers)}, and what is "
            f"in it may be theirs: remove it, or look through it and then "
            f'icacls "{path}" /setowner *{_ADMINISTRATORS} /T',
            kind="state_dir",
        )
    if not further and not readers(path):
        return  # closed already, maybe more tightly
    wanted = win32security.DACL_SECURITY_INFORMATION | win32security.PROTECTED_DACL_SECURITY_INFORMATION
    try:
        win32security.SetNamedSecurityInfo(
            str(path),
            win32security.SE_FILE_OBJECT,
            wanted,
            None,
            None,
            descriptor.GetSecurityDescriptorDacl(),
            None,
        )
    except pywintypes.error as error:
        raise HostError(
            f"{path}: cannot be closed to others; {error.strerror}: run this as administrator", kind="state_dir"
        ) from None


def _descriptor(path: Path) -> Any:
    """Owner and list of what is at the path itself, and not of what it leads to."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32file  # noqa: PLC0415 - Windows only
    import win32security  # noqa: PLC0415 - Windows only

    share = win32con.FILE_SHARE_READ | win32con.FILE_SHARE_WRITE | win32con.FILE_SHARE_DELETE
    flags = win32con.FILE_FLAG_BACKUP_SEMANTICS | _OPEN_REPARSE_POINT
    wanted = win32security.OWNER_SECURITY_INFORMATION | win32security.DACL_SECURITY_INFORMATION
    try:
        handle: Any = win32file.CreateFile(
            str(path), win32con.READ_CONTROL, share, None, win32con.OPEN_EXISTING, flags, None
        )
        try:
            return win32security.GetSecurityInfo(handle, win32security.SE_FILE_OBJECT, wanted)
        finally:
            handle.Close()
    except pywintypes.error as error:
        raise OSError(error.strerror) from None

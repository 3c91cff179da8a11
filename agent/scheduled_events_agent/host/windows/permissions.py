"""Windows' access lists: which accounts could read or change a file, and directories for few accounts only.

Accounts are named by their identifiers (SIDs), because their names differ from language to language.
Invariant: nothing that exists is opened to more accounts, or taken over from an account that is not trusted.
"""

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduled_events_agent.host.error import HostError

if sys.platform == "win32" or TYPE_CHECKING:
    import pywintypes
    import win32api
    import win32con
    import win32file
    import win32security
    import win32service

SERVICE = "ScheduledEventsAgent"
# Everyone, users at the machine, users who have logged in, users, guests.
EVERYONE_GROUPS = frozenset({"S-1-1-0", "S-1-5-4", "S-1-5-11", "S-1-5-32-545", "S-1-5-32-546"})
# Data, extended attributes, deletion (of what is inside, too), the list itself, the owner, and all of it.
TO_WRITE = 0x2 | 0x4 | 0x10 | 0x40 | 0x10000 | 0x40000 | 0x80000 | 0x10000000 | 0x40000000
TO_READ = TO_WRITE | 0x1 | 0x80000000
# To move or remove a directory, and then make another of its name.
_TO_REPLACE = TO_WRITE & ~(0x2 | 0x4 | 0x10 | 0x40000000)
_SYSTEM = "S-1-5-18"
_ADMINISTRATORS = "S-1-5-32-544"
_EVERYONE = "S-1-1-0"
# Besides these two: the account that makes a file (if the list names no other), and Windows' own installer.
_TRUSTED = frozenset(
    {
        _SYSTEM,
        _ADMINISTRATORS,
        "S-1-3-0",
        "S-1-3-4",
        "S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464",
    }
)
# For the system, administrators and further accounts; not inherited from the parent, which lets everyone in.
_PRIVATE = "D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)"
_ALL = "FA"
_READ = "0x1200a9"
_INHERIT_ONLY = 0x8
_ALREADY_EXISTS = 183
_REPARSE_POINT = 0x400
_OPEN_REPARSE_POINT = 0x200000


def make_data_dirs(root: Path, account: str | None) -> None:
    """Make the data directory, with hooks, state and logs, for the system, administrators and the service.

    The service's ``account`` (None: the system's or an administrator's) may read all of it and write state and
    logs. Directories that exist get these lists as well. It needs an administrator. Raises HostError, also for a
    directory that belongs to another account.
    """
    extra = [_sid_of(account)] if account else []
    for path, right in ((root, _READ), (root / "hooks", _READ), (root / "state", _ALL), (root / "logs", _ALL)):
        further = "".join(f"(A;OICI;{right};;;{sid})" for sid in extra)
        _create_or_restrict(path, further)


def make_private_dir(path: Path, root: Path) -> None:
    """Make the directory for the system, administrators and this account; what exists is left as it is.

    The data directory ``root`` is made private too, if the path is below it. Raises OSError or HostError.
    """
    own = f"(A;OICI;FA;;;{_own_sid()})"
    if root in path.parents and not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        _create_or_restrict(root, own)
    path.parent.mkdir(parents=True, exist_ok=True)
    _mkdir_with_acl(path, own)


def readers(path: Path) -> list[str]:
    """Accounts that could read or change what is in the directory, also where it leads to. Raises OSError."""
    trusted = _trusted()
    places = {path.absolute(), Path(os.path.realpath(path))}
    return sorted(
        {
            who
            for place in places
            for who in untrusted_accounts(_descriptor(place), trusted, TO_READ, with_inheritable=True)
        }
    )


def accounts_that_may_write(path: Path, *, is_own_code: bool) -> Iterator[tuple[Path, list[str]]]:
    """Each file or directory whose change could make the path mean another file, and the accounts that could.

    Accounts that could change the agent's own code are left out, because they control the agent in any case. If
    the path is that code, they are listed.
    """
    trusted = _trusted()
    code = set[Path]()
    if not is_own_code:
        code = {place for file in (Path(__file__), Path(sys.executable)) for place in (file, file.parent)}
    code_owners = {who for place in code for who in _writers(place, trusted, TO_WRITE)}
    seen = set[Path]()
    for whole in (path.absolute(), Path(os.path.realpath(path))):
        nearby = 1 if whole.is_dir() else 2  # a program may load what lies beside it
        for distance, place in enumerate((whole, *whole.parents)):
            if place not in seen:
                seen.add(place)
                rights = TO_WRITE if distance < nearby else _TO_REPLACE
                if others := sorted(_writers(place, trusted, rights) - code_owners):
                    yield place, others


def _writers(path: Path, trusted: set[str], rights: int) -> set[str]:
    with contextlib.suppress(OSError):
        return set(untrusted_accounts(_descriptor(path), trusted, rights, with_inheritable=False))
    return set()


def is_administrator() -> bool:
    """Whether this process has the rights of an administrator, as the system has."""
    sid = win32security.ConvertStringSidToSid(_ADMINISTRATORS)
    return bool(win32security.CheckTokenMembership(None, sid))  # type: ignore[arg-type] # the stub is wrong


def untrusted_accounts(
    descriptor: Any, trusted: Iterable[str], rights: int, *, with_inheritable: bool
) -> list[str]:
    """Accounts that own what has this security descriptor, or have any of the rights, and are not trusted.

    ``with_inheritable``: also count accounts that only have rights on files that are created inside.
    """
    dacl = descriptor.GetSecurityDescriptorDacl()
    if dacl is None:
        return ["everyone"]
    found = [owner] if (owner := descriptor.GetSecurityDescriptorOwner()) else []
    accounts = set[str]()
    for index in range(dacl.GetAceCount()):
        try:
            (kind, flags), mask, *_, account = dacl.GetAce(index)
        except NotImplementedError:  # one with a condition, which pywin32 does not read
            accounts.update(["any account that meets the condition of an entry"] if rights else [])
            continue
        counts = with_inheritable or not flags & _INHERIT_ONLY
        if kind == win32security.ACCESS_ALLOWED_ACE_TYPE and mask & rights and counts:
            found.append(account)
    accounts |= {win32security.ConvertSidToStringSid(sid) for sid in found} - set(trusted)
    return sorted(accounts)


def repair_command(path: Path, accounts: Iterable[str]) -> str:
    """The command that closes the file or directory to the accounts, in any shell, for an administrator."""
    inheritance = "(OI)(CI)" if path.is_dir() else ""
    whom = " ".join(f"*{account}" if account.startswith("S-") else f"*{_EVERYONE}" for account in accounts)
    return (
        f'icacls "{path}" /inheritance:r /grant:r "*{_SYSTEM}:{inheritance}F" "*{_ADMINISTRATORS}:{inheritance}F" '
        f'/remove:g {whom}; if the owner is still another, icacls "{path}" /setowner *{_ADMINISTRATORS}'
    )


def service_sid(name: str) -> str:
    """The identifier that Windows derives from a service's name, whether there is such a service or not."""
    digest = hashlib.sha1(name.upper().encode("utf-16-le"), usedforsecurity=False).digest()
    return "-".join(["S-1-5-80", *map(str, struct.unpack("<5I", digest))])


def is_system(account: str) -> bool:
    """Whether it is one of the names of LocalSystem."""
    return account.casefold() in ("localsystem", r".\localsystem", r"nt authority\system")


def _own_sid() -> str:
    token = win32security.OpenProcessToken(win32api.GetCurrentProcess(), win32con.TOKEN_QUERY)
    sid = win32security.GetTokenInformation(token, win32security.TokenUser)[0]
    return str(win32security.ConvertSidToStringSid(sid))


def _trusted() -> set[str]:
    return {*_TRUSTED, _own_sid(), service_sid(SERVICE), *_service_account()}


def _service_account() -> list[str]:
    """The account that the service runs as, if there is such a service and this process may ask."""
    with contextlib.suppress(pywintypes.error, HostError):
        services = win32service.OpenSCManager(None, None, win32service.SC_MANAGER_CONNECT)
        service = win32service.OpenService(services, SERVICE, win32service.SERVICE_QUERY_CONFIG)
        return [_sid_of(str(win32service.QueryServiceConfig(service)[7]))]
    return []


def _sid_of(account: str) -> str:
    if is_system(account):
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


def _private(further: str) -> Any:
    return win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(
        _PRIVATE + further, win32security.SDDL_REVISION_1
    )


def _mkdir_with_acl(path: Path, further: str) -> bool:
    """Make the directory; False if there is something of its name already. Raises OSError."""
    attributes: Any = pywintypes.SECURITY_ATTRIBUTES()
    attributes.SECURITY_DESCRIPTOR = _private(further)
    try:
        win32file.CreateDirectory(str(path), attributes)
    except pywintypes.error as error:
        if error.winerror != _ALREADY_EXISTS:
            raise OSError(error.strerror) from None
        return False
    return True


def _create_or_restrict(path: Path, further: str) -> None:
    """Make the directory, or give an existing one the list. Raises HostError if it is not an administrator's."""
    if _mkdir_with_acl(path, further):
        return
    is_link = getattr(os.lstat(path), "st_file_attributes", 0) & _REPARSE_POINT
    if is_link or not path.is_dir():
        raise HostError(
            f"{path}: expected a directory; it is a file or leads elsewhere: remove it", kind="state_dir"
        )
    if accounts := untrusted_accounts(_descriptor(path), _trusted(), 0, with_inheritable=False):
        raise HostError(
            f"{path}: expected a directory of an administrator; it belongs to {', '.join(accounts)}, and what is "
            f"in it may be theirs: remove it, or look through it and then "
            f'icacls "{path}" /setowner *{_ADMINISTRATORS} /T',
            kind="state_dir",
        )
    if not further and not readers(path):
        return  # closed already, maybe more tightly
    wanted = win32security.DACL_SECURITY_INFORMATION | win32security.PROTECTED_DACL_SECURITY_INFORMATION
    dacl = _private(further).GetSecurityDescriptorDacl()
    try:
        win32security.SetNamedSecurityInfo(str(path), win32security.SE_FILE_OBJECT, wanted, None, None, dacl, None)
    except pywintypes.error as error:
        raise HostError(
            f"{path}: cannot be closed to others; {error.strerror}: run this as administrator", kind="state_dir"
        ) from None


def _descriptor(path: Path) -> Any:
    """Owner and access list of the path itself, not of a link's target. Raises OSError."""
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

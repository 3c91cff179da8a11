"""The Guest Proxy Agent, which Azure can put in front of the metadata service of a VM: signs of it, and hints.

Invariant: it changes what is said about a request that failed, and nothing that is done.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from scheduled_events_agent import host
from scheduled_events_agent.http.errors import HttpErrorKind

PAGE = "docs/metadata-proxy.md"
"""What to allow in each set-up."""
_HEADER = "x-ms-azure-host-authorization"  # which only this proxy adds to an answer
_REDIRECTED_HOST = "169.254.169.254"
_LISTENS_AT = "127.0.0.1:3080"


class Caller(NamedTuple):
    """A process, as a rule of the Guest Proxy Agent names it."""

    user: str
    program: str
    """The path of its executable, without symbolic links."""

    @property
    def process_name(self) -> str:
        return Path(self.program).name


def caller(pid: int | None = None) -> Caller:
    """The process of this pid, by default this one. What cannot be read of it is taken from this one."""
    import psutil  # noqa: PLC0415 - takes long to load, and only a hint needs it

    user, program = host.account_name(), sys.executable
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        user = process.username().rpartition("\\")[2]
        program = process.exe()
    return Caller(user, os.path.realpath(program))


class GuestProxy:
    """Whether the Guest Proxy Agent is in front of the service. For any thread."""

    def __init__(self, *, has_answered: bool = False) -> None:
        self.has_answered = has_answered
        """Whether an answer had the header that only this proxy adds."""

    def see(self, headers: Mapping[str, str]) -> None:
        """Look at the headers of an answer."""
        if _HEADER in headers:
            self.has_answered = True

    def evidence(self, url: httpx.URL) -> str:
        """What shows that requests to this address go through it; "" if nothing does."""
        if self.has_answered:
            return "an answer had its header"
        return "it is installed" if url.host == _REDIRECTED_HOST and host.has_guest_proxy() else ""

    def hint(self, url: httpx.URL, kind: HttpErrorKind, status: int | None = None) -> str:
        """What to do about a request that failed; "" if this proxy is not the reason.

        ``status``: that of the answer, if there was one.
        """
        ask = host.guest_proxy_command()
        if status == 421:
            return f"the VM's Guest Proxy Agent has lost the record of this connection; if it stays: {ask}"
        is_there = bool(self.evidence(url))
        if status == 401 and is_there:
            return f"the host wants what the VM's Guest Proxy Agent has signed: {ask}"
        if kind == "denied":
            user, program = caller()
            rule = f"allow user {user}, program {program}, path {url.path} in its rules ({PAGE})"
            if is_there:
                return f"the VM's Guest Proxy Agent denies it: {rule}"
            return f"a proxy denies it; if it is the VM's Guest Proxy Agent, {rule}"
        if kind == "server_error" and is_there:
            return f"the VM's Guest Proxy Agent has no rules yet, or does not reach the host: {ask}"
        if kind == "refused" and is_there:
            namespace = "or this process has a network namespace of its own"
            return f"Azure's proxy does not listen ({_LISTENS_AT}): {ask}; {namespace}"
        return ""

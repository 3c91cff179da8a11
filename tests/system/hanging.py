"""Makes one thread of a process in a container hang: it is stopped as a debugger would, and the others run on."""

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    raise ImportError("containers are Linux's")

from container import Container

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ANY_THREAD = 0x40000000  # __WALL: also threads, for which no SIGCHLD is sent


def outer_pid(machine: Container, pid: str) -> int:
    """How this machine numbers a process of the container."""
    namespace = Path(f"/proc/{machine.leader}/ns/pid").readlink()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
            if numbers[-1] == pid and (status.parent / "ns/pid").readlink() == namespace:
                return int(status.parent.name)
    raise AssertionError(f"{machine.id} has no process {pid}")


@contextmanager
def hanging_thread(pid: int, thread: int) -> Iterator[None]:
    """While the context lasts, this thread of the process does nothing."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for request in (_SEIZE, _INTERRUPT):
        if ptrace(request, thread, None, None) != 0:
            raise OSError(ctypes.get_errno(), f"cannot stop thread {thread} of process {pid}")
    assert os.waitpid(thread, _ANY_THREAD)[0] == thread
    try:
        yield
    finally:
        ptrace(_DETACH, thread, None, None)


def wait_killed(pid: int, thread: int, timeout: float) -> None:
    """Wait until the process has been killed although a thread of it hangs. Its parent learns of it through us."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):
            found, status = os.waitpid(thread, _ANY_THREAD | os.WNOHANG)
            if found == thread and (os.WIFSIGNALED(status) or os.WIFEXITED(status)):
                return
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} was not killed within {timeout:g} s")

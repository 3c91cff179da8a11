"""Starts a program that is in a job from its first moment on, which ``subprocess`` cannot.

Owns that one call of the system; knows nothing of hooks and their time limits. The one invariant: there is no
moment at which the program exists outside the job, so that whoever is killed here leaves none behind.
"""

import struct
import sys
from collections.abc import Mapping
from typing import Any

# STARTUPINFOEXW: its size, three texts, eight numbers of which the last are flags, two short ones, a pointer, the
# three standard handles, and the list of attributes. PROCESS_INFORMATION: handles and ids of process and thread.
_STARTUP = struct.Struct("@I3P8I2H5P")
_STARTED = struct.Struct("@2P2I")
_USE_STANDARD_HANDLES = 0x100
_UNICODE_ENVIRONMENT = 0x400
_EXTENDED_STARTUP = 0x80000
_CREATE_NO_WINDOW = 0x08000000
_HANDLE_LIST = 0x20002
_JOB_LIST = 0x2000D  # since Windows 10 and Server 2016


def start_in_job(
    command: str, *, env: Mapping[str, str], cwd: str, stdin: int, output: int, job: Any
) -> tuple[Any, int]:
    """Start it without a window; returns its handle, to be closed, and its pid. Raises OSError or ValueError.

    ``stdin`` and ``output`` are the system's handles: copies of them are all that it inherits.
    """
    block = "".join(f"{name}={value}\0" for name, value in sorted(env.items())) + "\0"
    if "\0" in command + cwd or block.count("\0") != len(env) + 1:
        raise ValueError("a null character in the command, the directory or the environment")
    if any("=" in name for name in env):
        raise ValueError("an equals sign in the name of a variable")
    if sys.platform != "win32":  # for the type checker, which knows the rest only there
        raise OSError("only Windows has jobs")
    import ctypes  # noqa: PLC0415 - heavy, and of no use before the first hook

    import pywintypes  # noqa: PLC0415 - Windows only
    import win32api  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    this = win32api.GetCurrentProcess()
    try:
        inherited: list[Any] = [
            win32api.DuplicateHandle(this, handle, this, 0, True, win32con.DUPLICATE_SAME_ACCESS)
            for handle in (stdin, output)
        ]
    except pywintypes.error as error:
        raise OSError(error.strerror) from None
    source, target = map(int, inherited)

    size = ctypes.c_size_t()
    kernel.InitializeProcThreadAttributeList(None, 2, 0, ctypes.byref(size))
    attributes = ctypes.create_string_buffer(size.value)
    handles = (ctypes.c_void_p * 2)(source, target)
    jobs = (ctypes.c_void_p * 1)(int(job))

    def add(name: int, values: Any) -> bool:
        length = ctypes.c_size_t(ctypes.sizeof(values))
        return bool(
            kernel.UpdateProcThreadAttribute(attributes, 0, ctypes.c_size_t(name), values, length, None, None)
        )

    if not kernel.InitializeProcThreadAttributeList(attributes, 2, 0, ctypes.byref(size)):
        raise ctypes.WinError(ctypes.get_last_error())
    try:
        place = ctypes.addressof(attributes)
        numbers = (*(0,) * 10, _USE_STANDARD_HANDLES, 0, 0, 0)
        startup = _STARTUP.pack(_STARTUP.size, *numbers, source, target, target, place)
        flags = _EXTENDED_STARTUP | _UNICODE_ENVIRONMENT | _CREATE_NO_WINDOW
        started = ctypes.create_string_buffer(_STARTED.size)
        if not (
            add(_HANDLE_LIST, handles)
            and add(_JOB_LIST, jobs)
            and kernel.CreateProcessW(
                None,
                ctypes.create_unicode_buffer(command),
                None,
                None,
                True,
                flags,
                block.encode("utf-16-le", "surrogatepass"),
                cwd,
                startup,
                started,
            )
        ):
            raise ctypes.WinError(ctypes.get_last_error())
    finally:
        kernel.DeleteProcThreadAttributeList(attributes)
        for copy in inherited:
            copy.Close()
    process, thread, pid, _ = _STARTED.unpack(started.raw)
    kernel.CloseHandle(ctypes.c_void_p(thread))
    handle: Any = pywintypes.HANDLE
    return handle(process), pid

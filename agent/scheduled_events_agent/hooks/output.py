"""Reads the output of one hook: passes lines on, keeps the end for the result, and masks secrets.

Invariant: the hook waits for its output to be read only if it floods the pipe. Reading ends with ``finish``, even
if another process keeps the pipe open.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from scheduled_events_agent.host import processes
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.small_files import read_small_file
from scheduled_events_agent.imds.text import printable
from scheduled_events_agent.policy import Hook, is_secret_name

_MAX_LINE_BYTES = 2000
_TAIL_BYTES = 4096
# A program that prints without end is slowed down after this much, so that reading costs little CPU.
_FREE_BYTES = 4 << 20
_MAX_BYTES_PER_SECOND = 32 << 20
_FULL_PIPE_PAUSE_SECONDS = 0.002
_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]"
_MIN_SECRET_BYTES = 8  # shorter ones would also match ordinary text
_MAX_SECRET_BYTES = 4096
_MAX_CREDENTIAL_BYTES = 1 << 16


class HookOutput:
    """A pipe for a hook's output and a thread that reads it until ``finish``.

    The reader does not wait for the end of the pipe: a process that escaped could keep it open for ever, and a
    hook may close its side early. So the agent keeps the pipe open, and marks the end with random bytes.
    """

    def __init__(self, on_line: Callable[[str], bool], secrets: Sequence[bytes]) -> None:
        """``on_line`` gets each line, and returns whether it wants more. Raises OSError, RuntimeError."""
        self._on_line = on_line
        # More than each limit is kept, so that no secret is cut: a part of it would not be found.
        self._margin = max(map(len, secrets), default=0)
        self._secrets = re.compile(b"|".join(map(re.escape, secrets))) if secrets else None
        self._wants_lines = True
        # The first byte of the mark ends no line. Output that ends like the beginning of the mark is kept back.
        self._end_mark = b"\0" + os.urandom(15)
        self._tail = b""
        self._line = b""
        self._source, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._read, name="hook-output", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._source)
            os.close(self.descriptor)
            raise

    def finish(self) -> str:
        """Read what was written until now, and no more. Returns the end of it, 4 KiB at most."""
        mark = self._end_mark
        try:
            while mark and self._thread.is_alive():
                try:
                    mark = mark[os.write(self.descriptor, mark) :]
                except OSError:
                    # The hook made the pipe non-blocking, also for the agent's side, and filled it.
                    self._thread.join(_FULL_PIPE_PAUSE_SECONDS)
            self._thread.join()
        finally:
            os.close(self.descriptor)
            os.close(self._source)
        return self._to_text(self._redacted(self._tail)).encode()[-_TAIL_BYTES:].decode("utf-8", "ignore")

    def _read(self) -> None:
        total = 0
        held_back = b""
        while True:
            data = held_back + os.read(self._source, 1 << 16)
            data, mark, _ = data.partition(self._end_mark)
            if mark:
                self._consume(data)
                self._emit()
                return
            # The end mark may have come in part.
            size = next((n for n in range(15, 0, -1) if data.endswith(self._end_mark[:n])), 0)
            data, held_back = data[: len(data) - size], data[len(data) - size :]
            self._consume(data)
            total += len(data)
            if total > _FREE_BYTES:
                time.sleep(len(data) / _MAX_BYTES_PER_SECOND)

    def _consume(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES - self._margin :]
        while self._wants_lines and data:
            piece, newline, data = data.partition(b"\n")
            self._line += piece[: _MAX_LINE_BYTES + 1 + self._margin - len(self._line)]
            if newline:
                self._line += newline
                self._emit()

    def _emit(self) -> None:
        line = self._line
        self._line = b""
        if not line or not self._wants_lines:
            return
        line = self._redacted(line.removesuffix(b"\n").removesuffix(b"\r"))
        end = _MAX_LINE_BYTES
        if len(line) > end:
            while end > _MAX_LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:  # not in the middle of a character
                end -= 1
        text = self._to_text(line[:end]) + (" (cut)" if len(line) > end else "")
        try:
            self._wants_lines = self._on_line(text)
        except Exception:  # noqa: BLE001 - a line that cannot be passed on must not stop the reading
            self._wants_lines = False

    def _to_text(self, data: bytes) -> str:
        """The text without sequences that colour or garble a terminal; lines end as on Linux."""
        text = processes.decode_output(data).replace("\r\n", "\n")
        return printable(re.sub(_ESCAPES, "", text), keep="\t\n")

    def _redacted(self, data: bytes) -> bytes:
        return self._secrets.sub(b"***", data) if self._secrets else data


def secrets_of(hook: Hook) -> list[bytes]:
    """Secrets that the hook has and its output should not contain, the longest first.

    They come from variables with names of secrets and from the files of CREDENTIALS_DIRECTORY. Each line of a
    secret counts by itself, since output comes line by line.
    """
    texts = [value.encode("utf-8", "surrogateescape") for name, value in hook.env.items() if is_secret_name(name)]
    if directory := processes.base_environment(hook.user).get("CREDENTIALS_DIRECTORY"):
        with suppress(OSError):
            for path in Path(directory).iterdir():
                with suppress(HostError):
                    texts.append(read_small_file(path, _MAX_CREDENTIAL_BYTES))
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return sorted(
        (line for line in lines if _MIN_SECRET_BYTES <= len(line) <= _MAX_SECRET_BYTES), key=len, reverse=True
    )

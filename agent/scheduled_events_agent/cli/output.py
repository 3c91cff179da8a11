"""Standard output whose failure ends every command in the same way.

Invariant: no command sees an error of standard output, which it could mistake for one of its own. The process ends
at the first such error, and nothing more is written.
"""

import io
from errno import EBADF, EINVAL, EPIPE
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

READER_GONE = 128 + 13
"""The exit code of a program whose reader has seen enough, such as head: SIGPIPE has the number 13."""
_READER_GONE_ERRORS = (EPIPE, EINVAL)  # the second on Windows


class Output(io.RawIOBase):
    """A stream that writes to standard output."""

    def __init__(self, file: io.RawIOBase | None) -> None:
        """``file``: None if standard output is closed."""
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        return super().fileno() if self._file is None else self._file.fileno()

    def write(self, data: "ReadableBuffer", /) -> int | None:
        """Write. Raises SystemExit at the first error: argparse does not catch it, and it ends the thread."""
        if self.error is None:
            try:
                if self._file is None:
                    raise OSError(EBADF, "standard output is closed")
                return self._file.write(data)
            except OSError as error:
                self.error = error
                raise SystemExit(1) from None
        return memoryview(data).nbytes

    @property
    def is_reader_gone(self) -> bool:
        return self.error is not None and self.error.errno in _READER_GONE_ERRORS


def guarded(stream: TextIO | None) -> tuple[TextIO, Output]:
    """The stream to use in place of sys.stdout. It is the same stream if that is no file of the system."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)  # unbuffered if Python runs with -u
    if stream is not None and not isinstance(file, io.RawIOBase):
        return stream, Output(None)
    output = Output(file)
    return (
        io.TextIOWrapper(
            io.BufferedWriter(output),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",  # Azure's texts may hold what this locale lacks
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=getattr(stream, "write_through", False),
        ),
        output,
    )

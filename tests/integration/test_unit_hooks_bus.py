"""Units as hooks where the bus misbehaves: over a real socket, to a bus of our own.

Whether systemd is understood, only a systemd can tell: see test_unit_hooks.py in system/.
"""

import contextlib
import errno
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("units are Linux's", allow_module_level=True)

from jeepney import (
    DBusAddress,
    Endianness,
    HeaderFields,
    Message,
    Parser,
    new_error,
    new_method_return,
    new_signal,
)

from agent.hooks import HookResult, HookRun
from agent.host.linux import bus as dbus
from agent.host.linux import units
from agent.policy import Hook
from agent.settings import parse_settings
from agent.settings.files import check_files

_SYSTEMD = ":1.1"
_UNIT = "drain.service"
_SILENT = "did not answer in time$"
_JOB = "/org/freedesktop/systemd1/job/7"
_PROPERTIES = {
    "Id": ("s", _UNIT),
    "LoadState": ("s", "loaded"),
    "RemainAfterExit": ("b", False),
    "Type": ("s", "oneshot"),
    "Restart": ("s", "no"),
    "UnitFileState": ("s", "static"),
    "ActiveState": ("s", "inactive"),
    "Job": ("(uo)", (0, "/")),
    "ConditionResult": ("b", True),
    "AssertResult": ("b", True),
    "Result": ("s", "success"),
    "ExecMainCode": ("i", 1),
    "ExecMainStatus": ("i", 0),
    "InactiveExitTimestamp": ("t", 0),
    "InactiveExitTimestampMonotonic": ("t", 0),
    "ActiveExitTimestampMonotonic": ("t", 2),
    "ExecMainExitTimestampMonotonic": ("t", 1),
}


def _signal(sender: str, result: str) -> bytes:
    emitter = DBusAddress("/org/freedesktop/systemd1", interface="org.freedesktop.systemd1.Manager")
    return _sent(new_signal(emitter, "JobRemoved", "uoss", (7, _JOB, _UNIT, result)), sender)


def _sent(message: Message, sender: str) -> bytes:
    """As the bus passes it on."""
    message.header.fields[HeaderFields.sender] = sender
    return bytes(message.serialise(9))


class _Call:
    """A call, and how it is answered."""

    def __init__(self, message: Message, connection: socket.socket) -> None:
        self.member = message.header.fields[HeaderFields.member]
        self.connection = connection
        self.piece = 1 << 20
        self._message = message

    def answer(
        self, signature: str = "", *values: Any, sender: str = _SYSTEMD, order: Endianness = Endianness.little
    ) -> None:
        answer = new_method_return(self._message, signature or None, values)
        answer.header.endianness = order
        data = _sent(answer, sender)
        for begin in range(0, len(data), self.piece):
            self.connection.sendall(data[begin : begin + self.piece])

    def refuse(self, name: str, text: str, sender: str = _SYSTEMD) -> None:
        self.connection.sendall(_sent(new_error(self._message, name, "s", (text,)), sender))


def _obey(call: _Call) -> None:
    """What systemd would do about a unit that ends at once."""
    if call.member == "LoadUnit":
        call.answer("o", "/org/freedesktop/systemd1/unit/drain")
    elif call.member == "StartUnit":
        call.answer("o", _JOB)
        call.connection.sendall(_signal(_SYSTEMD, "done"))
    elif call.member == "GetAll":
        call.answer("a{sv}", _PROPERTIES | {"InvocationID": ("ay", os.urandom(16))})
    else:
        call.answer()


def _ignore(_: _Call) -> None:
    """Answer nothing."""


def _obey_but_not_the_bus(call: _Call) -> None:
    """What is for the bus itself has no answer."""
    if call.member not in ("Hello", "AddMatch"):
        _obey(call)


class _FakeBus:
    """A bus at ``path``; every call but the bus's ``own`` is given to ``systemd``."""

    def __init__(self, path: Path) -> None:
        self.systemd: Callable[[_Call], None] = _obey
        self.welcome = b"OK 0123\r\n"
        self.own = {"Hello", "AddMatch"}
        self.connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def hang_up(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as source:
            try:
                assert source.readline() == b"\0AUTH EXTERNAL %s\r\n" % str(os.geteuid()).encode().hex().encode()
                connection.sendall(self.welcome)
                if source.readline() != b"BEGIN\r\n":
                    return
                parser = Parser()
                while data := source.read1():
                    for message in parser.feed(data):
                        call = _Call(message, connection)
                        if call.member in self.own:
                            name = ("s", ":1.7") if call.member == "Hello" else ("",)
                            call.answer(*name, sender="org.freedesktop.DBus")
                        else:
                            self.systemd(call)
            except OSError:  # the other side, or the test, has closed it
                pass


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_FakeBus]:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus,guid=0123")
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(units, "read_journal", lambda *_, **__: b"")
    fake = _FakeBus(tmp_path / "bus")
    gc.collect()  # what other tests have left is closed now, not meanwhile
    descriptors = psutil.Process().num_fds()
    yield fake
    fake.close()
    assert psutil.Process().num_fds() == descriptors - 1  # the listener
    assert list((tmp_path / "units").glob("*")) == []


def _run(**options: Any) -> HookResult:
    return HookRun("drain", Hook(unit=_UNIT, **options), environment={}).run()


def _ending(**options: Any) -> tuple[str, int | None, str]:
    result = _run(**options)
    return result.outcome, result.exit_code, result.detail


def test_a_bus_that_does_as_it_should_brings_a_success(bus: _FakeBus) -> None:
    assert _ending() == ("succeeded", 0, "exit code 0")
    assert bus.connections == 1


def test_what_a_call_answers_is_read_in_either_byte_order_and_in_pieces(bus: _FakeBus) -> None:
    value = (
        "(ybitsoga{sv}avayas(ss))",  # the last looks like a variant, and is none
        (
            1,
            True,
            -2,
            2**40,
            "\u20ac",
            "/a",
            "as",
            {"k": ("u", 5)},
            [("v", ("s", "x"))],
            b"\0\1",
            ["p"],
            ("s", "x"),
        ),
    )
    for order in Endianness:

        def reply(call: _Call, order: Endianness = order) -> None:
            call.piece = 1
            call.answer("v", value, order=order)

        bus.systemd = reply
        with contextlib.closing(dbus.Bus()) as client:
            assert client.manager("C") == (value,)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"X\2\0\1" + b"\0" * 12,  # no byte order
        b"l\2\0\1\0\0\0\0\1\0\0\0\0\0\0\x10",  # too long
        b"l\7\0\1\0\0\0\0\1\0\0\0\0\0\0\0",  # no kind of message
        b"l\2\0\1\0\0\0\0\1\0\0\0\4\0\0\0\1\1s\0\0\0\0\0",  # its header ends too early
        b"l\2\0\1\0\0\0\0\1\0\0\0\7\0\0\0\x08\1g\0\1a\0\0",  # of no type that there is
        b"l\2\0\1\x08\0\0\0\1\0\0\0\7\0\0\0\x08\1g\0\1s\0\0\1\0\0\0\xff\0\0\0",  # no UTF-8
    ],
)
def test_what_is_no_message_ends_the_connection(bus: _FakeBus, nonsense: bytes) -> None:
    bus.systemd = lambda call: call.connection.sendall(nonsense)
    with (  # one that says it is long is waited for, as long as for any other answer
        contextlib.closing(dbus.Bus(0.5)) as client,
        pytest.raises(dbus.BusError, match=r"^(the system bus cannot be used|systemd or)"),
    ):
        client.manager("C")


@pytest.mark.parametrize("silence", ["welcome", "Hello", "AddMatch", "call"])
def test_no_answer_is_waited_for_longer_than_the_limit(
    bus: _FakeBus, silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dbus, "_CALL_SECONDS", 0.2)  # of Hello
    bus.welcome = b"OK" if silence == "welcome" else bus.welcome
    bus.own -= {silence}
    bus.systemd = _ignore if silence == "call" else _obey_but_not_the_bus

    def use() -> None:
        with contextlib.closing(dbus.Bus(timeout_seconds=0.2)) as client:
            client.watch_jobs()
            client.manager("C")

    begun_at = time.monotonic()
    with pytest.raises(dbus.BusError, match=_SILENT):
        use()
    assert 0.2 <= time.monotonic() - begun_at < 60


def test_a_limit_that_passes_between_two_steps_is_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(dbus, "prep_socket", out_of_time)
    with pytest.raises(dbus.BusError, match=_SILENT):
        dbus.Bus(0.2)


def test_a_bus_that_reads_nothing_is_not_waited_for_either(bus: _FakeBus) -> None:
    is_over = threading.Event()

    def systemd(_: _Call) -> None:
        is_over.wait(30)

    bus.systemd = systemd
    begun_at = time.monotonic()
    # To connect takes its time on a busy machine.
    with contextlib.closing(dbus.Bus(3.0)) as client:
        for text in ("it reads this", "more than fits into any buffer" * 1_000_000):
            with pytest.raises(dbus.BusError, match=_SILENT):
                client.manager("C", "s", text)
    assert 6.0 <= time.monotonic() - begun_at < 120
    is_over.set()


@pytest.mark.parametrize("address", ["here", "unix", "tcp:host=localhost,port=1"])
def test_an_address_that_cannot_be_used_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
    with pytest.raises(dbus.BusError, match=r"^the system bus cannot be used: "):
        units.unit_fault(_UNIT)


def test_without_a_bus_the_hook_is_not_started_and_check_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    fault = "the system bus cannot be used: No such file or directory"
    assert _ending() == ("not_started", None, f"cannot start drain.service: {fault}")
    # The first one tells it for all: without an answer, each question takes its time.
    text = "on_clear: [a, b]\nhooks: {a: {unit: drain.service}, b: {unit: drain-b.service}}"
    loaded = parse_settings(text, "p", has_units=True)
    assert [str(warning) for warning in check_files(loaded)] == [
        f"p:2: hooks.a.unit: cannot be looked up: {fault}"
    ]


def test_a_bus_that_refuses_this_account_is_an_error(bus: _FakeBus) -> None:
    bus.welcome = b"REJECTED EXTERNAL\r\n"
    outcome, _, detail = _ending()
    assert outcome == "not_started"
    assert detail.startswith("cannot start drain.service: the system bus cannot be used: ")
    assert "REJECTED EXTERNAL" in detail


def test_a_job_that_only_another_process_calls_done_is_not_a_success(bus: _FakeBus) -> None:
    def systemd(call: _Call) -> None:
        if call.member == "StartUnit":
            call.connection.sendall(_signal(":1.66", "done"))
            call.answer("o", _JOB)
            call.connection.sendall(_signal(":1.66", "done"))
        else:
            _obey(call)

    bus.systemd = systemd
    unknown = "how it ended is not known: systemd could not be asked in time"
    assert _ending() == ("failed", None, unknown)


@pytest.mark.parametrize("trouble", ["closed", "no reply", "another systemd", "nonsense"])
def test_a_lost_connection_is_made_anew_and_what_was_missed_is_no_success(bus: _FakeBus, trouble: str) -> None:
    is_started = threading.Event()

    def systemd(call: _Call) -> None:
        if call.member == "StartUnit":
            is_started.set()
            call.answer("o", _JOB)
        elif call.member == "GetAll" and bus.connections == 1 and is_started.is_set():
            if trouble == "closed":
                call.connection.shutdown(socket.SHUT_RDWR)
            elif trouble == "no reply":
                call.refuse("org.freedesktop.DBus.Error.NoReply", "gone", sender="org.freedesktop.DBus")
            elif trouble == "another systemd":
                name = "org.freedesktop.DBus.Error.ServiceUnknown"
                call.refuse(name, "The name is not activatable", sender="org.freedesktop.DBus")
            else:
                call.connection.sendall(b"l\2\0\1\xff\0\0\0\1\0\0\0\4\0\0\0" + b"\xff" * 600)
        else:
            _obey(call)

    bus.systemd = systemd
    assert _ending() == ("failed", None, "how it ended is not known: systemd could not be asked in time")
    assert bus.connections == 2


def test_a_start_without_an_answer_is_a_failure_and_the_unit_is_stopped(bus: _FakeBus) -> None:
    stopped = threading.Event()

    def systemd(call: _Call) -> None:
        if call.member == "StartUnit":
            call.connection.shutdown(socket.SHUT_RDWR)
        elif call.member == "StopUnit":
            stopped.set()
            call.answer("o", "/job")
        else:
            _obey(call)

    bus.systemd = systemd
    outcome, _, detail = _ending()
    assert (outcome, detail) == (
        "not_started",
        "cannot start drain.service: the system bus cannot be used: Connection reset by peer",
    )
    assert stopped.is_set()


def test_a_refusal_to_start_is_told_in_systemds_own_words(bus: _FakeBus) -> None:
    def systemd(call: _Call) -> None:
        if call.member == "StartUnit":
            call.refuse("org.freedesktop.systemd1.TransactionIsDestructive", "Transaction is destructive.")
        else:
            _obey(call)

    bus.systemd = systemd
    refusal = "cannot start drain.service: Transaction is destructive."
    assert _ending() == ("not_started", None, refusal)


def test_where_nothing_can_be_written_the_hook_is_not_started(
    bus: _FakeBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del bus
    (tmp_path / "file").touch()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}/file/below:{tmp_path}")
    fault = (
        f"cannot tell drain.service about the event: {tmp_path}/file/below/units/drain.service: Not a directory; "
        "RuntimeDirectory= of the agent's own unit makes the directory"
    )
    assert _ending() == ("not_started", None, fault)


def test_a_time_limit_holds_without_any_answer(bus: _FakeBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.hooks._GRACE_SECONDS", 0.2)
    monkeypatch.setattr("agent.hooks._KILL_SECONDS", 0.2)
    monkeypatch.setattr(units, "_STOP_SECONDS", 0.1)
    is_away = threading.Event()

    def systemd(call: _Call) -> None:
        if not is_away.is_set():
            _obey(call)
        if call.member == "StartUnit":
            is_away.set()

    bus.systemd = systemd
    result = _run(timeout=0.3)
    assert (result.outcome, result.detail) == (
        "timed_out",
        "killed after 300ms, its time limit; not all of its processes could be killed",
    )
    assert result.duration_seconds < 20
    bus.systemd = _obey
    bus.hang_up()
    # The thread that still waits asks again, and finds that the unit has ended.
    waiting = [thread for thread in threading.enumerate() if thread.name == "hook-drain"]
    for thread in waiting:
        thread.join(60.0)
    assert [thread for thread in waiting if thread.is_alive()] == []

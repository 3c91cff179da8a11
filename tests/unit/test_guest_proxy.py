"""What is said about a failed request if Azure's Guest Proxy Agent may be the reason."""

import os
import sys
from pathlib import Path

import httpx
import pytest

from scheduled_events_agent import host
from scheduled_events_agent.host.windows import system as windows
from scheduled_events_agent.http.errors import HttpErrorKind
from scheduled_events_agent.imds import guest_proxy
from scheduled_events_agent.imds.guest_proxy import GuestProxy, caller

REAL = httpx.URL("http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01")
OTHER = httpx.URL("http://127.0.0.1:8169/metadata/instance?api-version=2021-12-13")
ASK = host.guest_proxy_command()
DENIES = "the VM's Guest Proxy Agent denies it: "
MAYBE_DENIES = "a proxy denies it; if it is the VM's Guest Proxy Agent, "
RULE = f"allow user {caller().user}, program {caller().program}, path "
IN_RULES = " in its rules (docs/metadata-proxy.md)"
NOT_READY = f"the VM's Guest Proxy Agent has no rules yet, or does not reach the host: {ASK}"
LOST = f"the VM's Guest Proxy Agent has lost the record of this connection; if it stays: {ASK}"
AWAY = f"Azure's proxy does not listen (127.0.0.1:3080): {ASK}; or this process has a network namespace of its own"
HEADER = {"x-ms-azure-host-authorization": "Azure-HMAC-SHA256 ..."}


def behind_it() -> GuestProxy:
    proxy = GuestProxy()
    proxy.see(httpx.Headers(HEADER))
    return proxy


@pytest.mark.parametrize(
    ("kind", "status", "hint"),
    [
        ("server_error", 500, NOT_READY),
        ("server_error", 502, NOT_READY),
        ("server_error", 503, NOT_READY),
        ("unexpected_status", 421, LOST),
        ("denied", 401, f"the host wants what the VM's Guest Proxy Agent has signed: {ASK}"),
        ("refused", None, AWAY),
        ("timeout", None, ""),
        ("not_found", 404, ""),
        ("gone", 410, ""),
        ("throttled", 429, ""),
    ],
)
def test_behind_the_proxy_a_failure_names_it(kind: HttpErrorKind, status: int | None, hint: str) -> None:
    assert behind_it().hint(OTHER, kind, status) == hint


def test_a_denial_says_what_a_rule_must_allow() -> None:
    assert behind_it().hint(OTHER, "denied", 403) == f"{DENIES}{RULE}/metadata/instance{IN_RULES}"
    assert behind_it().hint(REAL, "denied", 403) == f"{DENIES}{RULE}/metadata/scheduledevents{IN_RULES}"


@pytest.mark.parametrize(
    ("kind", "status", "hint"),
    [
        ("server_error", 500, ""),
        ("refused", None, ""),
        ("denied", 401, f"{MAYBE_DENIES}{RULE}/metadata/scheduledevents{IN_RULES}"),
        ("denied", 403, f"{MAYBE_DENIES}{RULE}/metadata/scheduledevents{IN_RULES}"),
        ("unexpected_status", 421, LOST),  # no other program answers so
    ],
)
def test_without_a_sign_of_the_proxy_it_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, kind: HttpErrorKind, status: int | None, hint: str
) -> None:
    monkeypatch.setattr(host, "has_guest_proxy", lambda: False)
    proxy = GuestProxy()
    proxy.see(httpx.Headers({"Server": "IMDS"}))
    assert proxy.hint(REAL, kind, status) == hint


def test_its_unit_counts_for_the_address_that_it_redirects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "has_guest_proxy", lambda: True)
    assert GuestProxy().hint(REAL, "server_error", 500) == NOT_READY
    assert GuestProxy().hint(OTHER, "server_error", 500) == ""


def test_a_process_is_named_by_its_user_and_its_executable_without_links() -> None:
    own = caller()
    assert own.user == host.account_name()
    assert Path(own.program).samefile(sys.executable)
    assert not Path(own.program).is_symlink()
    assert own.process_name == Path(own.program).name
    assert caller(os.getpid()) == own


def test_a_process_that_cannot_be_read_counts_as_this_one() -> None:
    own = guest_proxy.Caller(host.account_name(), os.path.realpath(sys.executable))
    assert caller(2**22 + 1) == own  # above every pid


@pytest.mark.skipif(sys.platform == "win32", reason="systemd's units")
@pytest.mark.parametrize("place", ["etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"])
def test_on_linux_its_unit_says_that_it_is_there(tmp_path: Path, place: str) -> None:
    from scheduled_events_agent.host.linux import service_manager

    assert not service_manager._has_unit(tmp_path, "azure-proxy-agent")
    unit = tmp_path / place / "azure-proxy-agent.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    assert service_manager._has_unit(tmp_path, "azure-proxy-agent")
    assert service_manager.guest_proxy_command() == "systemctl status azure-proxy-agent"


def test_on_windows_its_service_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    services: dict[tuple[str, str], str] = {}
    monkeypatch.setattr(windows, "registry_value", lambda key, name: services.get((key, name)))
    assert not windows.has_guest_proxy()
    services[r"SYSTEM\CurrentControlSet\Services\GuestProxyAgent", "ImagePath"] = "GuestProxyAgent.exe"
    assert windows.has_guest_proxy()
    assert windows.guest_proxy_command() == "sc.exe query GuestProxyAgent"

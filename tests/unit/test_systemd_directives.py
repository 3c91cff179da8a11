"""The units and the oldest systemd that the packages take: it must know each of their directives."""

import re
from pathlib import Path

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
PACKAGING = SYSTEMD.parent / "packaging"
# Each with the version of systemd that brought it, as systemd.unit(5), systemd.service(5), systemd.exec(5),
# systemd.kill(5) and systemd.resource-control(5) say; 0 for what is older than version 183.
SINCE = {
    "After": 0, "AmbientCapabilities": 229, "Before": 0, "CapabilityBoundingSet": 0,
    "ConfigurationDirectory": 235, "ConfigurationDirectoryMode": 235, "Conflicts": 0,
    "DefaultDependencies": 0, "Description": 0, "Documentation": 0, "Environment": 0, "ExecReload": 0,
    "ExecStart": 0, "Group": 0, "IPAddressAllow": 235, "IPAddressDeny": 235, "KeyringMode": 235,
    "KillMode": 187, "LoadCredential": 247, "LockPersonality": 235, "MemoryDenyWriteExecute": 231,
    "NoNewPrivileges": 187, "NotifyAccess": 0, "OOMPolicy": 243, "PrivateDevices": 209, "PrivateIPC": 248,
    "PrivateTmp": 0, "PrivateUsers": 232, "ProtectClock": 245, "ProtectControlGroups": 232,
    "ProtectHome": 214, "ProtectHostname": 242, "ProtectKernelLogs": 244, "ProtectKernelModules": 232,
    "ProtectKernelTunables": 232, "ProtectProc": 247, "ProtectSystem": 214, "RemoveIPC": 232,
    "Requires": 0, "Restart": 0, "RestartPreventExitStatus": 189, "RestartSec": 0,
    "RestrictAddressFamilies": 211, "RestrictNamespaces": 233, "RestrictRealtime": 231,
    "RestrictSUIDSGID": 242, "RuntimeDirectory": 211, "RuntimeDirectoryMode": 211,
    "RuntimeDirectoryPreserve": 235, "SetCredential": 247, "StandardInput": 0,
    "StartLimitIntervalSec": 230, "StateDirectory": 235, "StateDirectoryMode": 235, "SyslogIdentifier": 0,
    "SystemCallArchitectures": 209, "SystemCallErrorNumber": 209, "SystemCallFilter": 187,
    "TimeoutAbortSec": 243, "TimeoutStartSec": 188, "TimeoutStopSec": 188, "Type": 0, "UMask": 0,
    "User": 0, "WantedBy": 0, "Wants": 0, "WatchdogSec": 0,
}  # fmt: skip
# An older systemd warns of them and goes on: the agent is hardened a little less there.
ALLOWED = {"ProtectProc", "PrivateIPC"}


def test_the_oldest_supported_systemd_knows_every_directive() -> None:
    build = (PACKAGING / "build.py").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^SYSTEMD = "(\d+)"', build, re.MULTILINE)
    units = {*SYSTEMD.glob("*.service"), SYSTEMD / "strict.conf"}
    assert len(units) == 3
    newer = {}
    for unit in units:
        for directive in re.findall(r"^([A-Za-z]+)=", unit.read_text(encoding="utf-8"), re.MULTILINE):
            if SINCE[directive] > int(oldest):
                newer[directive] = SINCE[directive]
    assert int(oldest) == 245
    assert newer.keys() == ALLOWED


def test_the_unit_is_not_started_again_after_the_exit_code_of_the_launcher() -> None:
    unit = (SYSTEMD / "scheduled-events-agent.service").read_text(encoding="utf-8")
    launcher = (PACKAGING / "launcher.sh").read_text(encoding="utf-8")
    final = re.findall(r"^RestartPreventExitStatus=(.+)$", unit, re.MULTILINE)
    assert final == re.findall(r"^ +exit (\d+)$", launcher, re.MULTILINE)
    assert len(final) == 1


def test_the_image_is_started_again_for_ever_as_the_unit_is() -> None:
    places = (SYSTEMD / "scheduled-events-agent.service", PACKAGING / "container/scheduled-events-agent.container")
    names = ("StartLimitIntervalSec", "Restart", "RestartSec")
    of_unit, of_image = (
        [re.findall(rf"^{name}=(.+)$", place.read_text(encoding="utf-8"), re.MULTILINE) for name in names]
        for place in places
    )
    assert of_unit == [["0"], ["always"], ["5s"]]
    assert of_image == of_unit

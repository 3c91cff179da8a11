"""Finds other agents that approve events, and disks that do not last, in trees as real machines have them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scheduled_events_agent.host.conflicts import (
    ActingAgent,
    Approver,
    acting_agents,
    is_acting_agent,
    linux_approvers,
    windows_approvers,
)
from scheduled_events_agent.host.disks import Mount, is_temporary, mount_of

Processes = dict[int, tuple[str, ...]]  # command lines, by pid

needs_links = pytest.mark.skipif(
    sys.platform == "win32", reason="links, and names with a colon, as Linux has them"
)

_JETPACK = "set cyclecloud.monitor_scheduled_events = false for this node in CycleCloud, or leave the events to it"
_CIB = "/var/lib/pacemaker/cib/cib.xml"
_CIB_WAY_OUT = "keep it, and have this agent only observe (agent.mode: observe)"


def _file(root: Path, path: str, text: str = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode())
    return file


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """The command lines of this machine's processes, by pid."""
    commands: Processes = {}

    def running(pid: int) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, ppid=lambda: pid - 1, cmdline=lambda: list(commands[pid]))

    monkeypatch.setattr(psutil, "pids", lambda: list(commands))
    monkeypatch.setattr(psutil, "Process", running)
    return commands


def _cib(root: Path, agent: str) -> None:
    primitive = f'<primitive id="p" class="ocf" provider="heartbeat" type="{agent}"/>'
    _file(
        root,
        _CIB[1:],
        f"<cib><configuration><resources><clone>{primitive}</clone></resources></configuration></cib>",
    )


# --- other agents of this program

PACKAGED = ("/usr/bin/python3", "-I", "-S", "-B", "/usr/lib/scheduled-events-agent/start.py")
WINDOWS = ("C:\\Program Files\\x\\python.exe", "-I", "-m", "scheduled_events_agent")


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ((*PACKAGED, "run", "--stop-timeout", "60s"), True),
        (("/opt/venv/bin/python3.12", "/opt/venv/bin/scheduled-events-agent", "run"), True),
        (("python3", "-m", "scheduled_events_agent", "run", "--state-dir", "/tmp/x"), True),
        (("python", "/src/agent/scheduled_events_agent/__main__.py", "run"), True),
        ((*WINDOWS, "run"), True),
        ((*WINDOWS, "service", "host"), True),
        (("C:\\venv\\Scripts\\scheduled-events-agent.exe", "run"), True),
        ((*PACKAGED, "run", "--observe"), False),
        ((*PACKAGED, "run", "--obs"), False),
        ((*PACKAGED, "doctor"), False),
        ((*PACKAGED, "service", "status"), False),
        (PACKAGED, False),
        (("sudo", "scheduled-events-agent", "run"), False),
        (("sh", "-c", "scheduled-events-agent run"), False),
        (("less", "scheduled-events-agent", "run"), False),
        (("python3", "mine.py", "scheduled-events-agent", "run"), False),
        (("python3", "/usr/lib/another/start.py", "run"), False),
        ((), False),
    ],
)
def test_an_agent_is_recognized_by_its_command(words: tuple[str, ...], *, is_one: bool) -> None:
    assert is_acting_agent(words) == is_one


@pytest.mark.parametrize("error", [psutil.AccessDenied(5), OSError(22, "a part of it was read")])
def test_a_process_that_cannot_be_read_hides_no_other_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    processes[20] = (*PACKAGED, "run")
    readable = psutil.Process

    def hide() -> list[str]:
        raise error

    def running(pid: int) -> object:
        if pid == 4:
            raise error
        return SimpleNamespace(pid=5, cmdline=hide) if pid == 5 else readable(pid)

    monkeypatch.setattr(psutil, "pids", lambda: [4, 5, 20])
    monkeypatch.setattr(psutil, "Process", running)
    assert [one.pid for one in acting_agents(set())] == [20]


def test_agents_are_recognized_by_their_first_process_and_the_own_one_is_ignored(processes: Processes) -> None:
    processes[10] = processes[11] = (*PACKAGED, "run")  # a launcher and its child
    processes[12] = ("/bin/sh", "drain")
    processes[20] = processes[21] = (*WINDOWS, "run", "--config", "p.yaml")
    assert acting_agents({11}) == [ActingAgent(20, " ".join(processes[20]))]
    assert [one.pid for one in acting_agents({1})] == [10, 20]


def test_a_process_of_the_own_service_is_no_other_agent_and_one_that_has_ended_neither(
    processes: Processes,
) -> None:
    def is_of_service(pid: int) -> bool:
        if pid == 40:
            raise FileNotFoundError
        return pid in (21, 30)

    processes[20] = processes[21] = (*PACKAGED, "run")  # the service, whose second process is asked about
    processes[30] = (*PACKAGED, "run")  # the same service, restarted while this looks
    processes[40] = (*PACKAGED, "run")
    processes[50] = (*PACKAGED, "run", "--state-dir", "/tmp/x")
    assert [one.pid for one in acting_agents(set(), is_of_service)] == [50]
    assert [one.pid for one in acting_agents({50}, is_of_service)] == []
    assert [one.pid for one in acting_agents({50})] == [20, 30, 40]


# --- other programs that approve


def test_a_machine_with_nothing_but_usual_programs_has_no_other_agent(
    tmp_path: Path, processes: Processes
) -> None:
    processes[1] = ("/sbin/init",)
    processes[2] = ()  # a thread of the kernel
    processes[700] = ("/usr/bin/python3", "-u", "/usr/sbin/waagent", "-daemon")
    processes[701] = ("python3", "-u", "bin/WALinuxAgent-2.11.1.12-py3.8.egg", "-run-exthandlers")
    _file(tmp_path, "etc/systemd/system/walinuxagent.service")
    _file(tmp_path, "usr/lib/ocf/resource.d/heartbeat/azure-events-az")
    assert linux_approvers(tmp_path) == []


def test_a_tree_without_anything_has_no_other_agent(tmp_path: Path) -> None:
    assert linux_approvers(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ("/opt/cycle/jetpack/system/embedded/bin/python", "-m", "jetpackd"),
        ("/usr/bin/python3", "/opt/cycle/jetpack/system/bin/jetpackd"),
    ],
)
def test_a_jetpack_that_runs_may_approve_whatever_its_server_says(
    tmp_path: Path, processes: Processes, words: tuple[str, ...]
) -> None:
    _file(tmp_path, "etc/systemd/system/jetpackd.service")
    processes[812] = words
    assert linux_approvers(tmp_path) == [
        Approver("CycleCloud's jetpack", "process 812 runs", "maybe", _JETPACK),
    ]


def test_an_installed_jetpack_is_distinguished_from_a_running_one(tmp_path: Path) -> None:
    (tmp_path / "opt/cycle/jetpack").mkdir(parents=True)
    assert linux_approvers(tmp_path) == [
        Approver("CycleCloud's jetpack", "/opt/cycle/jetpack/ is there", "installed", _JETPACK),
    ]
    _file(tmp_path, "usr/lib/systemd/system/jetpackd.service")
    assert linux_approvers(tmp_path) == [
        Approver("CycleCloud's jetpack", "unit jetpackd.service is there", "installed", _JETPACK),
    ]


def test_a_process_that_only_names_another_agent_is_none(tmp_path: Path, processes: Processes) -> None:
    processes[10] = ("tail", "-f", "/opt/cycle/jetpack/logs/jetpackd.log")
    processes[11] = ("grep", "azure-scheduledevents-manager", "log")
    processes[12] = ("vi", "aks-node-termination-handler")
    assert linux_approvers(tmp_path) == []


def test_an_agent_in_a_container_is_found_by_its_process(
    tmp_path: Path,
    processes: Processes,
) -> None:
    processes[4711] = ("/azure-scheduledevents-manager", "--some-option")
    way_out = "take --azure.approve-scheduledevent (AZURE_APPROVE_SCHEDULEDEVENT) from it, or stop one of the two"
    assert linux_approvers(tmp_path) == [
        Approver("webdevops' azure-scheduledevents-manager", "process 4711 runs", "maybe", way_out)
    ]


def test_a_program_that_only_drains_a_node_approves_nothing(tmp_path: Path, processes: Processes) -> None:
    processes[4711] = ("/app/aks-node-termination-handler",)
    assert linux_approvers(tmp_path) == []


@pytest.mark.parametrize("agent", ["azure-events", "azure-events-az"])
def test_pacemakers_agent_counts_when_the_cluster_is_configured_with_it(
    tmp_path: Path, processes: Processes, agent: str
) -> None:
    _cib(tmp_path, agent)
    assert linux_approvers(tmp_path) == [
        Approver(f"Pacemaker's {agent}", f"{_CIB} names it", "installed", _CIB_WAY_OUT)
    ]
    processes[900] = ("/usr/sbin/pacemakerd",)
    assert linux_approvers(tmp_path) == [
        Approver(
            f"Pacemaker's {agent}", f"{_CIB} names it and process 900, pacemakerd, runs", "active", _CIB_WAY_OUT
        )
    ]


def test_a_cluster_in_which_some_resource_is_stopped_may_approve_and_may_not(
    tmp_path: Path, processes: Processes
) -> None:
    _cib(tmp_path, "azure-events-az")
    processes[900] = ("/usr/sbin/pacemakerd",)
    cib = tmp_path / _CIB[1:]
    stopped = (
        '<meta_attributes id="m"><nvpair id="n" name="target-role" value="Stopped"/></meta_attributes></clone>'
    )
    cib.write_text(cib.read_text().replace("</clone>", stopped))
    assert [one.state for one in linux_approvers(tmp_path)] == ["maybe"]


def test_a_cluster_without_that_resource_is_none(tmp_path: Path, processes: Processes) -> None:
    _cib(tmp_path, "azure-lb")
    processes[900] = ("/usr/sbin/pacemakerd",)
    assert linux_approvers(tmp_path) == []


def test_windows_services_are_recognized_by_name_and_display_name(tmp_path: Path) -> None:
    services = [
        ("WindowsAzureGuestAgent", "Windows Azure Guest Agent", True),
        ("SchService", "AzureScheduledEvents", True),
        ("Renamed", "AzureScheduledEvents", False),
        ("jetpackd", "Jetpack", True),
    ]
    stop = "stop one of the two: sc.exe stop {0}, and sc.exe config {0} start= disabled"
    sample = "Azure's sample service SchService"
    assert windows_approvers(services, tmp_path) == [
        Approver(sample, "service SchService runs", "active", stop.format("SchService")),
        Approver(sample, "service Renamed is there", "installed", stop.format("Renamed")),
        Approver("CycleCloud's jetpack", "service jetpackd runs", "maybe", _JETPACK),
    ]


def test_a_windows_jetpack_without_its_service_is_recognized_by_its_directory(tmp_path: Path) -> None:
    place = tmp_path / "cycle" / "jetpack"
    place.mkdir(parents=True)
    assert windows_approvers([], tmp_path) == [
        Approver("CycleCloud's jetpack", f"{place} is there", "installed", _JETPACK)
    ]


# --- disks

_MOUNTS = [  # as psutil lists them
    ("/dev/sda1", "/", "ext4"),
    ("/dev/sdb1", "/mnt", "ext4"),
    ("/dev/sdc1", "/mnt/data disk", "xfs"),
    ("tmpfs", "/run", "tmpfs"),
    ("/dev/md0", "/scratch", "ext4"),
    ("/dev/sdd1", "/mnt/over", "ext4"),
    ("overlay", "/mnt/over", "overlay"),
]


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    mounts = [*_MOUNTS]

    def disk_partitions(*, all: bool) -> list[SimpleNamespace]:  # noqa: A002 - as psutil has it
        assert all
        return [SimpleNamespace(device=device, mountpoint=place, fstype=kind) for device, place, kind in mounts]

    monkeypatch.setattr(psutil, "disk_partitions", disk_partitions)
    return mounts


@needs_links
@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/var/lib/x", Mount("/", "ext4", "/dev/sda1")),
        ("/mnt/x", Mount("/mnt", "ext4", "/dev/sdb1")),
        ("/mnt", Mount("/mnt", "ext4", "/dev/sdb1")),
        ("/mntx", Mount("/", "ext4", "/dev/sda1")),
        ("/mnt/data disk/x", Mount("/mnt/data disk", "xfs", "/dev/sdc1")),
        ("/run/x", Mount("/run", "tmpfs", "tmpfs")),
        ("/mnt/over/x", Mount("/mnt/over", "overlay", "overlay")),
    ],
)
def test_a_path_is_on_the_last_mount_of_the_longest_place_above_it(path: str, mount: Mount) -> None:
    assert mount_of(Path(path)) == mount


@needs_links
def test_this_machine_has_a_root_file_system() -> None:
    mount = mount_of(Path("/"))
    assert mount is None or mount.place == "/"


def test_without_a_list_of_mounts_nothing_is_reported(mounts: list[tuple[str, str, str]]) -> None:
    mounts.clear()
    assert mount_of(Path("/var")) is None


def _temporary(root: Path, path: str) -> bool:
    mount = mount_of(Path(path))
    assert mount is not None
    return is_temporary(mount, root)


@needs_links
@pytest.mark.usefixtures("mounts")
def test_a_disk_without_such_a_link_is_not_temporary(tmp_path: Path) -> None:
    assert not any(_temporary(tmp_path, path) for path in ("/var", "/mnt/x", "/run", "/scratch"))


@needs_links
@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    "link",
    [
        "dev/disk/cloud/azure_resource-part1",
        "dev/disk/azure/resource-part1",
        "dev/disk/by-label/Temporary\\x20Storage",
        "dev/disk/azure/local/by-index/1",
    ],
)
def test_the_temporary_disk_is_recognized_by_the_links_to_its_device(tmp_path: Path, link: str) -> None:
    place = tmp_path / link
    place.parent.mkdir(parents=True)
    place.symlink_to("../../sdb1")
    assert _temporary(tmp_path, "/mnt/state")
    assert not _temporary(tmp_path, "/mnt/data disk/state")
    assert not _temporary(tmp_path, "/var/lib")

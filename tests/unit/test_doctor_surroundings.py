"""Other agents that approve events, and disks that do not last, told from trees as real machines have them."""

import sys
from pathlib import Path

import pytest

from agent.host.surroundings import (
    Approver,
    Mount,
    is_temporary,
    linux_approvers,
    mount_of,
    windows_approvers,
)
from agent.host.systemd_unit import polkit_rule, unnamed_units

needs_links = pytest.mark.skipif(
    sys.platform == "win32", reason="links, and names with a colon, as Linux has them"
)

_JETPACK = "set cyclecloud.monitor_scheduled_events = false for this node in CycleCloud, or leave the events to it"
_CIB = "/var/lib/pacemaker/cib/cib.xml"
_CIB_WAY_OUT = "have this agent only observe (agent.mode: observe), or take the resource out of the cluster"


def _file(root: Path, path: str, text: str = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode())
    return file


def _process(root: Path, pid: int, *words: str) -> None:
    _file(root, f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))


def _cib(root: Path, agent: str) -> None:
    primitive = f'<primitive id="p" class="ocf" provider="heartbeat" type="{agent}"/>'
    _file(
        root,
        _CIB[1:],
        f"<cib><configuration><resources><clone>{primitive}</clone></resources></configuration></cib>",
    )


# --- other agents


def test_a_machine_with_nothing_but_usual_programs_has_no_other_agent(tmp_path: Path) -> None:
    _process(tmp_path, 1, "/sbin/init")
    _process(tmp_path, 2)  # a thread of the kernel
    _process(tmp_path, 700, "/usr/bin/python3", "-u", "/usr/sbin/waagent", "-daemon")
    _process(tmp_path, 701, "python3", "-u", "bin/WALinuxAgent-2.11.1.12-py3.8.egg", "-run-exthandlers")
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
def test_a_jetpack_that_runs_may_approve_whatever_its_server_says(tmp_path: Path, words: tuple[str, ...]) -> None:
    _file(tmp_path, "etc/systemd/system/jetpackd.service")
    _process(tmp_path, 812, *words)
    assert linux_approvers(tmp_path) == [
        Approver("CycleCloud's jetpack", "process 812 runs", "maybe", _JETPACK),
    ]


def test_a_jetpack_that_only_is_there_is_told_from_one_that_runs(tmp_path: Path) -> None:
    (tmp_path / "opt/cycle/jetpack").mkdir(parents=True)
    assert linux_approvers(tmp_path) == [
        Approver("CycleCloud's jetpack", "/opt/cycle/jetpack/ is there", "installed", _JETPACK),
    ]
    _file(tmp_path, "usr/lib/systemd/system/jetpackd.service")
    assert linux_approvers(tmp_path) == [
        Approver("CycleCloud's jetpack", "unit jetpackd.service is there", "installed", _JETPACK),
    ]


def test_who_only_names_another_agent_is_none(tmp_path: Path) -> None:
    _process(tmp_path, 10, "tail", "-f", "/opt/cycle/jetpack/logs/jetpackd.log")
    _process(tmp_path, 11, "grep", "azure-scheduledevents-manager", "log")
    _process(tmp_path, 12, "vi", "aks-node-termination-handler")
    assert linux_approvers(tmp_path) == []


def test_an_agent_in_a_container_is_found_by_its_process_and_approves_only_if_it_is_told_to(
    tmp_path: Path,
) -> None:
    _process(tmp_path, 4711, "/azure-scheduledevents-manager", "--some-option")
    way_out = "take --azure.approve-scheduledevent (AZURE_APPROVE_SCHEDULEDEVENT) from it, or stop one of the two"
    assert linux_approvers(tmp_path) == [
        Approver("webdevops' azure-scheduledevents-manager", "process 4711 runs", "maybe", way_out)
    ]


def test_who_only_drains_a_node_approves_nothing(tmp_path: Path) -> None:
    _process(tmp_path, 4711, "/app/aks-node-termination-handler")
    assert linux_approvers(tmp_path) == []


@pytest.mark.parametrize("agent", ["azure-events", "azure-events-az"])
def test_pacemakers_agent_counts_when_the_cluster_is_configured_with_it(tmp_path: Path, agent: str) -> None:
    _cib(tmp_path, agent)
    assert linux_approvers(tmp_path) == [
        Approver(f"Pacemaker's {agent}", f"{_CIB} names it", "installed", _CIB_WAY_OUT)
    ]
    _process(tmp_path, 900, "/usr/sbin/pacemakerd")
    assert linux_approvers(tmp_path) == [
        Approver(
            f"Pacemaker's {agent}", f"{_CIB} names it and process 900, pacemakerd, runs", "active", _CIB_WAY_OUT
        )
    ]


def test_a_cluster_in_which_some_resource_is_stopped_may_approve_and_may_not(tmp_path: Path) -> None:
    _cib(tmp_path, "azure-events-az")
    _process(tmp_path, 900, "/usr/sbin/pacemakerd")
    cib = tmp_path / _CIB[1:]
    stopped = (
        '<meta_attributes id="m"><nvpair id="n" name="target-role" value="Stopped"/></meta_attributes></clone>'
    )
    cib.write_text(cib.read_text().replace("</clone>", stopped))
    assert [one.life for one in linux_approvers(tmp_path)] == ["maybe"]


def test_a_cluster_without_that_resource_is_none(tmp_path: Path) -> None:
    _cib(tmp_path, "azure-lb")
    _process(tmp_path, 900, "/usr/sbin/pacemakerd")
    assert linux_approvers(tmp_path) == []


def test_services_of_windows_are_told_by_name_and_by_display_name(tmp_path: Path) -> None:
    services = [
        ("WindowsAzureGuestAgent", "Windows Azure Guest Agent", True),
        ("SchService", "AzureScheduledEvents", True),
        ("Renamed", "AzureScheduledEvents", False),
        ("jetpackd", "Jetpack", True),
    ]
    stop = "stop one of the two: sc stop {0}, and sc config {0} start= disabled"
    sample = "Azure's sample service SchService"
    assert windows_approvers(services, tmp_path) == [
        Approver(sample, "service SchService runs", "active", stop.format("SchService")),
        Approver(sample, "service Renamed is there", "installed", stop.format("Renamed")),
        Approver("CycleCloud's jetpack", "service jetpackd runs", "maybe", _JETPACK),
    ]


def test_a_jetpack_of_windows_without_its_service_is_told_by_its_directory(tmp_path: Path) -> None:
    place = tmp_path / "cycle" / "jetpack"
    place.mkdir(parents=True)
    assert windows_approvers([], tmp_path) == [
        Approver("CycleCloud's jetpack", f"{place} is there", "installed", _JETPACK)
    ]


# --- disks

_MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 8:17 / /mnt rw,relatime shared:2 - ext4 /dev/sdb1 rw
31 22 8:33 / /mnt/data\040disk rw shared:3 - xfs /dev/sdc1 rw
32 22 0:22 / /run rw,nosuid shared:4 master:5 - tmpfs tmpfs rw,size=10%
33 22 9:0 / /scratch rw - ext4 /dev/md0 rw
34 30 0:50 / /mnt/over rw - ext4 /dev/sdd1 rw
35 30 0:51 / /mnt/over rw - overlay overlay rw
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    _file(tmp_path, "proc/self/mountinfo", _MOUNTS)
    return tmp_path


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
def test_a_path_is_on_the_last_mount_of_the_longest_place_above_it(machine: Path, path: str, mount: Mount) -> None:
    assert mount_of(Path(path), machine) == mount


def test_without_a_list_of_mounts_nothing_is_told(tmp_path: Path) -> None:
    assert mount_of(Path("/var"), tmp_path) is None


def _temporary(root: Path, path: str) -> bool:
    mount = mount_of(Path(path), root)
    assert mount is not None
    return is_temporary(mount, root)


def test_a_disk_that_nobody_calls_temporary_is_none(machine: Path) -> None:
    assert not any(_temporary(machine, path) for path in ("/var", "/mnt/x", "/run", "/scratch"))


@needs_links
@pytest.mark.parametrize(
    "link",
    [
        "dev/disk/cloud/azure_resource-part1",
        "dev/disk/azure/resource-part1",
        "dev/disk/by-label/Temporary\\x20Storage",
        "dev/disk/azure/local/by-index/1",
    ],
)
def test_the_temporary_disk_is_told_by_the_links_to_its_device(machine: Path, link: str) -> None:
    place = machine / link
    place.parent.mkdir(parents=True)
    place.symlink_to("../../sdb1")
    assert _temporary(machine, "/mnt/state")
    assert not _temporary(machine, "/mnt/data disk/state")
    assert not _temporary(machine, "/var/lib")


@needs_links
def test_an_array_of_local_disks_is_as_temporary_as_they_are(machine: Path) -> None:
    (machine / "dev/disk/azure/local/by-index").mkdir(parents=True)
    (machine / "dev/disk/azure/local/by-index/0").symlink_to("../../../../nvme0n1")
    (machine / "sys/class/block/md0/slaves/nvme0n1").mkdir(parents=True)
    assert _temporary(machine, "/scratch/state")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ResourceDisk.Format=y\nResourceDisk.MountPoint=/mnt\n", True),
        ("ResourceDisk.Format=n\nResourceDisk.MountPoint=/mnt\n", False),
        ("ResourceDisk.Format=y\nResourceDisk.MountPoint=/mnt/resource\n", False),
        ("# ResourceDisk.Format=y\nResourceDisk.MountPoint=/mnt\n", False),
    ],
)
def test_waagents_configuration_tells_where_it_mounts_the_temporary_disk(
    machine: Path, text: str, expected: bool
) -> None:
    _file(machine, "etc/waagent.conf", text)
    assert _temporary(machine, "/mnt/state") is expected


def test_a_disk_of_ones_own_in_the_place_where_waagent_would_mount_it_is_not_temporary(machine: Path) -> None:
    _file(machine, "etc/waagent.conf", "ResourceDisk.Format=y\nResourceDisk.MountPoint=/mnt\n")
    _file(machine, "etc/fstab", "UUID=1 /mnt xfs defaults,nofail 0 2\n")
    assert not _temporary(machine, "/mnt/state")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/dev/disk/cloud/azure_resource-part1 /mnt auto defaults,nofail 0 2", True),
        ("/dev/sdb1 /mnt auto defaults,nofail,x-systemd.requires=cloud-init.service,_netdev 0 2", True),
        ("/dev/sdb1 /mnt auto defaults,nofail,comment=cloudconfig 0 2", True),
        ("UUID=1 /mnt ext4 defaults 0 2", False),
        ("#/dev/disk/cloud/azure_resource-part1 /mnt auto defaults 0 2", False),
        ("/dev/sdc1 /mnt/data auto defaults,nofail,comment=cloudconfig 0 2", False),
    ],
)
def test_cloud_inits_line_in_fstab_tells_where_the_temporary_disk_is_mounted(
    machine: Path, line: str, expected: bool
) -> None:
    _file(machine, "etc/fstab", f"/dev/sda1 / ext4 defaults 0 1\n{line}\n")
    assert _temporary(machine, "/mnt/state") is expected
    assert not _temporary(machine, "/var/lib")


# --- the polkit rule


def test_units_that_the_installed_rule_does_not_name_are_told(tmp_path: Path) -> None:
    units = ["drain-web.service", "resume-web.service"]
    assert unnamed_units(units, tmp_path) == units
    _file(tmp_path, "etc/polkit-1/rules.d/50-scheduled-events-agent.rules", polkit_rule(units[:1]))
    assert unnamed_units(units, tmp_path) == ["resume-web.service"]
    assert unnamed_units(units[:1], tmp_path) == []

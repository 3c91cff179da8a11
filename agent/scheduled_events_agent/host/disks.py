"""Mounted file systems, and whether one is Azure's temporary disk."""

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

# The links that udev makes to Azure's temporary disks, for cloud-init, waagent or azure-vm-utils.
_TEMPORARY_LINKS = (
    "dev/disk/cloud/azure_resource*",
    "dev/disk/azure/resource*",
    "dev/disk/azure/local/*/*",
    "dev/disk/by-label/Temporary*Storage",
)

# Azure Files by SMB and NFS, blobs, and another machine's folder.
_SHARES = ("cifs", "smb3", "nfs", "nfs4", "blobfuse", "blobfuse2", "sshfs")


class Mount(NamedTuple):
    """A mounted file system."""

    place: str
    kind: str
    device: str


def mount_of(path: Path) -> Mount | None:
    """The file system that the path is on; None if it is not known."""
    with suppress(OSError):
        found = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
        # A later mount hides an earlier one.
        if best := max(reversed(found), key=lambda part: len(part.mountpoint), default=None):
            return Mount(best.mountpoint, best.fstype, best.device)
    return None


def is_share(kind: str) -> bool:
    """Whether a file system of this kind is on another machine."""
    return kind.removeprefix("fuse.") in _SHARES


def is_temporary(mount: Mount, root: Path = Path("/")) -> bool:
    """Whether it is Azure's temporary disk, which is empty after a redeployment."""
    links = [link for pattern in _TEMPORARY_LINKS for link in root.glob(pattern) if link.is_symlink()]
    is_device = mount.place != "/" and mount.device.startswith("/dev/")
    return is_device and PurePosixPath(mount.device).name in [link.readlink().name for link in links]

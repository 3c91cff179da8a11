"""Package managers of other distributions, on a Debian: dnf and zypper, with stand-ins for packages from there.

Neither these distributions nor their packages are to be had where the tests run.
"""

import sys

if sys.platform == "win32":
    raise ImportError("containers are Linux's")

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from container import Container


class Distribution(NamedTuple):
    """A distribution and the packages there that ours asks for: each with what its spec says of that."""

    manager: str
    installed: Mapping[str, str]
    offered: Mapping[str, str]


_LIBRARIES = "libc.so.6(GLIBC_2.14)(64bit) libgcc_s.so.1()(64bit)"
_BASE = {"base": f"Provides: /bin/sh coreutils findutils util-linux {_LIBRARIES}"}
RHEL_9 = Distribution(
    "dnf",
    {**_BASE, "systemd": "Version: 252", "python3": "Provides: python(abi) = 3.9"},
    {"python3.11": "Provides: python(abi) = 3.11"},
)
SLES_15 = Distribution(
    "zypper",
    {**_BASE, "systemd": "Version: 254", "python3-base": "Provides: python(abi) = 3.6"},
    {"python311-base": "Provides: python(abi) = 3.11", "python311": "Requires: python311-base"},
)
# Its own manager, tdnf, is not to be had here; it asks the same library (libsolv) as the others.
AZURE_LINUX_3 = Distribution(
    "dnf",
    {**_BASE, "systemd": "Version: 255", "python3": "Provides: python(abi)"},  # any version, that is
    {},
)
INSTALL = {
    "dnf": ("dnf", "install", "--assumeyes"),
    "zypper": ("zypper", "--non-interactive", "install", "--allow-unsigned-rpm"),
}
UNATTENDED = {"dnf": ("--assumeyes",), "zypper": ("--non-interactive",)}
REMOVE = {"dnf": ("dnf", "remove", "--assumeyes"), "zypper": ("zypper", "--non-interactive", "remove")}


@contextmanager
def managed(bare: Container, distribution: Distribution) -> Iterator[Container]:
    """A machine with the package manager, and empty packages that stand for those of the distribution."""
    with Container(bare) as below:
        wanted = (distribution.manager, "createrepo-c")
        below.run("apt-get", "install", "-qy", "--no-install-recommends", *wanted, timeout=300)
        # Debian's rpm has another database than the managers.
        below.write("/etc/rpm/macros", "%_dbpath /var/lib/rpm\n")
        for folder, packages in (("installed", distribution.installed), ("offered", distribution.offered)):
            for name, facts in packages.items():
                version = "" if facts.startswith("Version:") else "Version: 1\n"
                below.write(
                    f"/root/{name}.spec",
                    f"Name: {name}\n{version}{facts}\nRelease: 1\nSummary: a stand-in\nLicense: MIT\n"
                    "BuildArch: noarch\n%description\nNothing.\n%files\n",
                )
                place = f"_rpmdir /root/{folder}"
                below.run("rpmbuild", "-bb", "--define", place, f"/root/{name}.spec")
            below.run("mkdir", "-p", f"/root/{folder}")
            below.run("createrepo_c", "--quiet", f"/root/{folder}")
        add_repository(below, distribution, "installed")
        below.run(*INSTALL[distribution.manager], *distribution.installed, timeout=300)
        below.stop()
        with Container(below, private_network=True) as machine:
            yield machine


def add_repository(machine: Container, distribution: Distribution, folder: str) -> None:
    if distribution.manager == "dnf":
        source = f"[{folder}]\nname={folder}\nbaseurl=file:///root/{folder}\ngpgcheck=0\n"
        machine.write(f"/etc/yum.repos.d/{folder}.repo", source)
    else:
        machine.run("zypper", "addrepo", "--no-gpgcheck", f"/root/{folder}", folder)

"""The apt and rpm repository: its files, its signatures, and machines that install, upgrade and go back."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("repositories for Linux are made on Linux", allow_module_level=True)

from container import CHECKOUT, PATIENCE, PROJECT, Container
from package_managers import REMOVE, RHEL_9, SLES_15, Distribution, add_repository, managed
from repositories import (
    ADDRESS,
    MACHINES,
    NAME,
    Site,
    add_stand_ins,
    forget_sources,
    gpg,
    gpg_home,
    make_key,
    make_repository,
    open_site,
)
from service import Service, build_deb, build_rpm, shown_commands, upgrade_while_a_hook_runs

from scheduled_events_agent import __version__
from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(600)

NEWER = "9.8.7"
INSTALL = f"{PROJECT}/packaging/cloud-init/install.sh"
FOR_APT, FOR_DNF, FOR_ZYPPER = shown_commands("docs/install-linux.md", "## From the repository")
(BACK,) = (block for block in shown_commands("docs/operations.md", "## Rolling it out") if len(block) == 3)


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("key") / "key.asc")


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package of each kind, with nothing in it."""
    return add_stand_ins(tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of this version; stand-ins for another processor than this machine's."""
    folder = tmp_path_factory.mktemp("older")
    build_deb(folder)
    build_rpm(folder)
    return add_stand_ins(folder)


@pytest.fixture(scope="session")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sources under a higher version."""
    folder = tmp_path_factory.mktemp("newer")
    build_deb(folder, "--version", NEWER)
    build_rpm(folder, "--version", NEWER)
    return add_stand_ins(folder, NEWER)


def made(key: Path, packages: Path, into: Path, *options: str, **environment: str) -> dict[str, bytes]:
    """Make a repository; returns the contents of its files."""
    done = make_repository(key, packages, into, *options, **environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{into}\n", "")
    return {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()}


def signed_at(root: Path) -> set[str]:
    """When the two indexes were signed, in seconds, as a gpg says that has the public key only."""
    index = root / "rpm/repodata/repomd.xml"
    told = ""
    with gpg_home() as home:
        gpg(home, "--import", str(root / f"{NAME}.gpg"))
        for signed in ([root / "apt/dists/stable/InRelease"], [index.with_suffix(".xml.asc"), index]):
            told += gpg(home, "--status-fd", "1", "--verify", *map(str, signed))
    return set(re.findall(r"^\[GNUPG:\] VALIDSIG \w+ \S+ (\d+)", told, re.MULTILINE))


# --- its files


def test_it_has_packages_indexes_the_public_key_and_a_file_for_each_manager(
    key: Path, empty: Path, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    add_stand_ins(older, "0.0.1")
    shutil.copy(next(empty.glob("*.deb")), older)  # the newest release is among the others
    (older / f"{NAME}_0.0.1rc1-1_amd64.deb").write_text("of a prerelease")
    (older / "SHA256SUMS").touch()
    into = tmp_path / "made" / "here"
    found = made(key, empty, into, "--from", str(older))

    expected = {f"{NAME}.{ending}" for ending in ("asc", "gpg", "sources", "repo")}
    expected |= {"apt/dists/stable/InRelease", "rpm/repodata/repomd.xml", "rpm/repodata/repomd.xml.asc"}
    for architecture, machine in MACHINES.items():
        index = f"apt/dists/stable/main/binary-{architecture}/Packages"
        packages = [f"pool/{NAME}_{version}-1_{architecture}.deb" for version in ("0.0.1", __version__)]
        assert re.findall(r"^Filename: (.+)$", found[index].decode(), re.MULTILINE) == packages
        expected |= {index, *(f"apt/{package}" for package in packages)}
        expected |= {f"rpm/packages/{NAME}-{version}-1.{machine}.rpm" for version in ("0.0.1", __version__)}
    lists = {name for name in found if re.fullmatch(r"rpm/repodata/[0-9a-f]{64}-\w+\.xml\.gz", name)}
    assert sorted(name.rpartition("-")[2] for name in lists) == [
        "filelists.xml.gz", "other.xml.gz", "primary.xml.gz"
    ]  # fmt: skip
    assert {*found} - lists == expected
    assert f"URIs: {ADDRESS}/apt\n" in found[f"{NAME}.sources"].decode()
    assert f"baseurl={ADDRESS}/rpm\n" in found[f"{NAME}.repo"].decode()
    assert [*into.parent.iterdir()] == [into]


def test_the_same_packages_key_and_commit_give_the_same_bytes(key: Path, empty: Path, tmp_path: Path) -> None:
    commit = {"SOURCE_DATE_EPOCH": "1700000000"}
    before = os.umask(0o077)
    try:
        first = made(key, empty, tmp_path / "first", TZ="Asia/Tokyo", **commit)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "first").rglob("*")} == {0o755, 0o644}
    assert made(key, empty, tmp_path / "second", TZ="America/Lima", **commit) == first
    assert b"\nDate: Tue, 14 Nov 2023 22:13:20 UTC\n" in first["apt/dists/stable/InRelease"]
    assert signed_at(tmp_path / "first") == {"1700000000"}

    # The next edition has the same rpms: the index of this one is right for them, too.
    next_one = made(key, empty, tmp_path / "first", SOURCE_DATE_EPOCH="1800000000")
    changed = {name for name in first if next_one.get(name) != first[name]}
    assert changed == {"apt/dists/stable/InRelease", "rpm/repodata/repomd.xml", "rpm/repodata/repomd.xml.asc"}


def test_a_key_that_is_younger_than_the_commit_signs_as_of_its_making(
    key: Path, empty: Path, tmp_path: Path
) -> None:
    made(key, empty, tmp_path / "made", SOURCE_DATE_EPOCH="1")
    assert signed_at(tmp_path / "made") == {f"{datetime(2020, 1, 1, tzinfo=UTC).timestamp():.0f}"}


def test_no_keyring_and_no_setting_of_the_account_is_read_or_changed(
    key: Path, empty: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with gpg_home() as keyring, tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        gpg(keyring, "--import", str(make_key(tmp_path / "own.asc")))
        (Path(keyring) / "gpg.conf").write_text("no-such-option\n")
        (home / ".gnupg").mkdir(parents=True)
        (home / ".gnupg/gpg.conf").write_text("no-such-option\n")
        (home / ".rpmmacros").write_text(f"%_gpg_path {keyring}\n%__gpg_sign_cmd false\n")
        subprocess.run(["gpgconf", "--homedir", keyring, "--kill", "all"], check=True, timeout=60)

        def files() -> dict[Path, tuple[int, bytes]]:
            found = [path for place in (Path(keyring), home) for path in place.rglob("*") if path.is_file()]
            return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

        before = files()
        made(key, empty, tmp_path / "made", HOME=str(home), GNUPGHOME=keyring, TMPDIR=temporary)
        assert files() == before
        assert [*Path(temporary).iterdir()] == []
        all_of_them = psutil.process_iter(["cmdline"])
        agents = [one for one in all_of_them if any(temporary in word for word in one.info["cmdline"] or ())]
        assert psutil.wait_procs(agents, PATIENCE)[1] == []  # they were asked to end


def test_a_key_that_cannot_sign_is_rejected(key: Path, empty: Path, tmp_path: Path) -> None:
    into = tmp_path / "made"
    public = tmp_path / "public.asc"
    with gpg_home() as home:
        gpg(home, "--import", str(key))
        public.write_text(gpg(home, "--armor", "--export"))
    two = tmp_path / "two.asc"
    two.write_text(key.read_text() + make_key(tmp_path / "other.asc").read_text())
    expired = make_key(tmp_path / "expired.asc", lasts="2021-01-01")
    refused = {
        public: "expected one private key, found 0",
        two: "expected one private key, found 2",
        expired: "the key has expired or was revoked: no machine takes its signatures",
    }
    for file, reason in refused.items():
        done = make_repository(file, empty, into)
        assert (done.returncode, done.stderr) == (1, f"packaging/repository.py: {file}: {reason}\n")
    done = make_repository(make_key(tmp_path / "secret.asc", passphrase="secret"), empty, into)
    assert (done.returncode, "signing failed: No pinentry" in done.stderr) == (1, True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "public.asc", "two.asc", "other.asc", "expired.asc", "secret.asc"
    }  # fmt: skip


def test_packages_that_are_missing_or_were_published_otherwise_are_rejected(
    key: Path, empty: Path, tmp_path: Path
) -> None:
    into = tmp_path / "made"
    there = tmp_path / "there"
    shutil.copytree(empty, there)
    (package,) = there.glob("*.aarch64.rpm")
    package.write_bytes(b"another build")
    done = make_repository(key, empty, into, "--from", str(there))
    reason = f"{empty / package.name} is not what {package} is: another package needs another version"
    assert (done.returncode, done.stderr) == (1, f"packaging/repository.py: {reason}\n")
    package.unlink()
    done = make_repository(key, there, into)
    reason = f"{there}: expected {NAME}*.aarch64.rpm, found none; make packages builds them"
    assert (done.returncode, done.stderr) == (1, f"packaging/repository.py: {reason}\n")
    done = make_repository(key, empty, into, "--from", str(into))
    reason = f"{into}: expected a folder with packages, found none"
    assert (done.returncode, done.stderr) == (1, f"packaging/repository.py: {reason}\n")


def test_a_folder_that_is_no_repository_is_not_replaced(key: Path, empty: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = make_repository(key, empty, tmp_path)
    reason = f"{tmp_path} is there and is no repository: name another folder, or remove it"
    assert (done.returncode, done.stderr) == (1, f"packaging/repository.py: {reason}\n")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_make_gives_the_script_what_it_was_given() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.ready", "repository"]
    told = subprocess.run(
        [*command, "KEY=key.asc", "FROM=older", "INTO=site"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert told.stdout == ".venv/bin/python packaging/repository.py --key key.asc --from older --into site\n"


# --- machines


@pytest.fixture(scope="module")
def plain(debian: Path) -> Iterator[Container]:
    """A stopped Debian with curl and rpm, where a policy that is there is kept; for others to lie on."""
    with Container(debian) as machine:
        settings = 'Acquire::Retries "5";\nDPkg { Options {"--force-confold";}; Use-Pty "false"; };\n'
        machine.write("/etc/apt/apt.conf.d/tests", settings)
        machine.run("apt-get", "update", "-q", timeout=300)
        machine.run("apt-get", "install", "-qy", "--no-install-recommends", "curl", "rpm", timeout=300)
        machine.stop()
        yield machine


@pytest.fixture
def site(key: Path, tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path / "site", key) as site:
        yield site


@pytest.fixture
def machine(plain: Container) -> Iterator[Container]:
    """A Debian whose apt knows of no other repository."""
    with Container(plain) as machine:
        forget_sources(machine)
        yield machine
        sys.stdout.write(machine.account())  # pytest shows it on failure only


def carry_out(machine: Container, commands: list[str], address: str) -> str:
    """Run commands of the page, each by itself, for a repository at this address; returns what the last said."""
    done = None
    for command in commands:
        here = command.replace(ADDRESS, address).replace("0.1.0", __version__)
        for manager, option in (("apt", "--yes"), ("dnf", "--assumeyes"), ("zypper", "--non-interactive")):
            here = here.replace(f"{manager} ", f"{manager} {option} ")
        done = machine.run("sh", "-euc", here, timeout=300)
    return done.stdout + done.stderr if done else ""


def version_of(machine: Container) -> str:
    return machine.run(NAME, "--version").stdout.removeprefix(f"{NAME} ").strip()


def test_apt_installs_the_agent_upgrades_it_amid_a_hook_and_goes_back(
    machine: Container, site: Site, sim: Simulator, older: Path, newer: Path
) -> None:
    assert len(FOR_APT) == 4
    service = Service(machine, sim.endpoint())
    service.write_policy()
    site.publish(older)
    carry_out(machine, FOR_APT, site.address)
    assert version_of(machine) == __version__

    site.publish(newer, "--from", str(older))
    machine.run("apt-get", "update", "-q")
    upgrade_while_a_hook_runs(service, sim, NEWER, "apt-get", "upgrade", "-qy")

    carry_out(machine, BACK[:1], site.address)
    machine.run("apt-mark", "hold", NAME)
    machine.run("apt-get", "upgrade", "-qy")
    assert version_of(machine) == __version__
    service.wait_log("agent started", count=2, version=__version__)
    assert sim.wait_approved(sim.schedule("Reboot", notice_seconds=600)).approved_at is not None


def test_apt_refuses_a_changed_byte_and_another_key(
    machine: Container, site: Site, empty: Path, tmp_path: Path
) -> None:
    site.publish(empty)
    carry_out(machine, FOR_APT[:2], site.address)

    def said(*command: str) -> str:
        done = machine.run("apt-get", "-q", *command, check=False)
        assert done.returncode != 0
        assert NAME not in machine.run("dpkg-query", "--show").stdout
        return done.stdout + done.stderr

    native = machine.run("dpkg", "--print-architecture").stdout.strip()
    site.change_a_byte(f"apt/dists/stable/main/binary-{native}/Packages")
    assert "Hash Sum mismatch" in said("update")
    assert f"Unable to locate package {NAME}" in said("install", "--yes", NAME)

    site.publish(empty, key=make_key(tmp_path / "another.asc"))
    assert "NO_PUBKEY" in said("update")
    assert f"Unable to locate package {NAME}" in said("install", "--yes", NAME)

    machine.copy_in(tmp_path / "another.asc", "/root/another.asc")  # a private key, but a key
    site.publish(empty)
    refused = machine.run("sh", INSTALL, site.address, "/root/another.asc", check=False)
    assert (refused.returncode != 0, "NO_PUBKEY" in refused.stderr) == (True, True)
    carry_out(machine, FOR_APT[:3], site.address)
    site.change_a_byte(f"apt/pool/*_{native}.deb")
    assert "Hash Sum mismatch" in said("install", "--yes", NAME)
    site.publish(empty)
    machine.run("apt-get", "-qy", "install", NAME)


def test_the_script_for_cloud_init_installs_it_on_the_next_debian(
    debian_13: Path, site: Site, sim: Simulator, older: Path
) -> None:
    site.publish(older)
    with Container(debian_13) as machine:
        forget_sources(machine)
        service = Service(machine, sim.endpoint())
        service.write_policy()
        machine.run("sh", INSTALL, site.address)
        assert version_of(machine) == __version__
        assert service.log("agent started", version=__version__, endpoint=sim.endpoint())


class Family(NamedTuple):
    """Distributions with one package manager: a stand-in for one of them, and commands."""

    distribution: Distribution
    install: list[str]
    upgrade: str
    back: str


DNF = Family(RHEL_9, FOR_DNF, "dnf upgrade --refresh", BACK[1])
ZYPPER = Family(SLES_15, FOR_ZYPPER, "zypper refresh && zypper update", BACK[2])


@pytest.mark.parametrize("family", [DNF, ZYPPER], ids=["dnf", "zypper"])
def test_dnf_and_zypper_verify_install_upgrade_and_go_back(
    plain: Container, site: Site, older: Path, newer: Path, family: Family
) -> None:
    distribution = family.distribution
    assert len(family.install) == 4
    address = site.address = "http://127.0.0.1:8000"
    with managed(plain, distribution) as machine:  # in a network of its own: so the server is in there
        add_repository(machine, distribution, "offered")

        def publish(packages: Path, *options: str, damaged: str = "") -> None:
            site.publish(packages, *options)
            if damaged:
                site.change_a_byte(damaged)
            machine.run("rm", "-rf", "/srv/site")
            machine.copy_in(site.root, "/srv/site")

        publish(older)
        serve = ("python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/srv/site", "8000")
        machine.run("systemd-run", "--quiet", *serve)
        ask = ("curl", "--silent", "--fail", "--head", f"{address}/{NAME}.repo")
        machine.wait_for(lambda: machine.run(*ask, check=False).returncode == 0, "the server answered")
        carry_out(machine, family.install, address)
        assert version_of(machine) == __version__
        package = f"/srv/site/rpm/packages/{NAME}-{__version__}-1.{os.uname().machine}.rpm"
        checked = machine.run("rpmkeys", "--checksig", "--verbose", package).stdout
        assert re.search(r"RSA/SHA512 Signature, key ID [0-9a-f]+: OK\n", checked)

        publish(newer, "--from", str(older), damaged="rpm/repodata/repomd.xml")
        told = carry_out(machine, [f"{{ {family.upgrade}; }} || true"], address)
        assert re.search("signature verification (error|failed)", told, re.IGNORECASE)
        assert version_of(machine) == __version__
        publish(newer, "--from", str(older))
        carry_out(machine, [family.upgrade], address)
        assert version_of(machine) == NEWER
        carry_out(machine, [family.back], address)
        assert version_of(machine) == __version__

        # The script for cloud-init, where there is no apt, finds the manager and writes what the page fetches.
        machine.run(*REMOVE[distribution.manager], NAME, timeout=300)
        folder = "/etc/zypp/repos.d" if distribution.manager == "zypper" else "/etc/yum.repos.d"
        list_file = machine.path(f"{folder}/{NAME}.repo")
        assert "autorefresh=1\n" in list_file.read_text()
        list_file.unlink()
        machine.run("rm", "/usr/bin/apt-get")
        machine.run("sh", INSTALL, address, f"/srv/site/{NAME}.asc", timeout=300)
        assert version_of(machine) == NEWER
        published = (site.root / f"{NAME}.repo").read_text()
        kept = f"gpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-{NAME}"
        assert list_file.read_text() == published.replace(f"gpgkey={address}/{NAME}.asc", kept)

"""Makes an apt and an rpm repository of static files: ``repository.py --key FILE`` writes them to dist/repository.

The packages of dist/ are there beside older ones, which stay installable. How they are built is not decided here.
Invariant: the same packages, key and commit give the same bytes, signatures included. A signature has the time of
what it signs, not that of the clock. So the signed copy of an rpm is the same in every edition, and a machine that
has the index of the edition before still finds what that index says.

    packaging/repository.py --key FILE                     of the packages of dist/
    packaging/repository.py --key FILE --from DIR          and of the older ones in DIR
    packaging/repository.py --key FILE --address URL       served there instead of at ADDRESS

gpg and rpm have a home of their own here: no keyring and no setting of the account is read or changed.
"""  # noqa: INP001 - a script

import argparse
import contextlib
import filecmp
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

if sys.platform == "win32":
    raise ImportError("repositories for Linux are made on Linux")

from build import ARCHITECTURES, NAME, SOURCES, URLS, BuildError, copy, need_programs, run, source_epoch, write

ADDRESS = URLS["Packages"]
_IN_RELEASE = "apt/dists/stable/InRelease"
# Of releases only: 0.2.0rc1 would count as newer than 0.2.0.
_PACKAGE = re.compile(rf"{NAME}(?:_[\d.]+-1_\w+\.deb|-[\d.]+-1\.\w+\.rpm)")
_SOURCES_FILE = f"""\
Types: deb
URIs: {{address}}/apt
Suites: stable
Components: main
Signed-By: /etc/apt/keyrings/{NAME}.asc
"""
_REPO_FILE = f"""\
[{NAME}]
name={NAME}
baseurl={{address}}/rpm
enabled=1
autorefresh=1
gpgcheck=1
repo_gpgcheck=1
gpgkey={{address}}/{NAME}.asc
"""


@dataclass(frozen=True)
class Signer:
    """A private key, and the environment of a gpg that has no other."""

    environment: Mapping[str, str]
    fingerprint: str
    made_at: int  # seconds; the youngest part of the key

    def sign(self, file: Path, command: str, into: Path, epoch: int) -> None:
        """Sign a file by this command of gpg, as of this time."""
        output = ("--local-user", self.fingerprint, "--armor", "--output", str(into), command, str(file))
        run(["gpg", *self._options(epoch), *output], env=self.environment)

    def sign_rpm(self, package: Path) -> None:
        """Put a signature into the file. Signature and file get the time when the package was built."""
        built_at = int(run(["rpm", "-qp", "--queryformat", "%{BUILDTIME}", str(package)], env=self.environment))
        macros = {
            "__gpg": shutil.which("gpg"),  # Debian's rpm looks for it in another place
            "_gpg_name": self.fingerprint,
            "_gpg_sign_cmd_extra_args": " ".join(self._options(built_at)),
        }
        defines = [option for name, value in macros.items() for option in ("--define", f"{name} {value}")]
        run(["rpmsign", *defines, "--addsign", str(package)], env=self.environment)
        os.utime(package, (built_at, built_at))  # it is in the index

    def write_public_key(self, into: Path, *options: str) -> None:
        command = ["gpg", "--batch", *options, "--output", str(into), "--export", self.fingerprint]
        run(command, env=self.environment)

    def _options(self, epoch: int) -> list[str]:
        """Options of gpg for a signature of this time; a key that is younger signs as of when it was made."""
        time = max(epoch, self.made_at)
        return ["--batch", "--pinentry-mode=error", "--digest-algo=SHA512", f"--faked-system-time={time}!"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="packaging/repository.py", description="Makes an apt and an rpm repository of static files."
    )
    dist = SOURCES / "dist"
    parser.add_argument("--key", metavar="FILE", type=Path, required=True, help="a private key, no passphrase")
    parser.add_argument("--packages", metavar="DIR", type=Path, default=dist, help="the newest (default: dist)")
    parser.add_argument("--from", metavar="DIR", type=Path, dest="older", help="older packages")
    parser.add_argument("--into", metavar="DIR", type=Path, default=dist / "repository", help="dist/repository")
    parser.add_argument("--address", metavar="URL", default=ADDRESS, help=f"default: {ADDRESS}")
    options = parser.parse_args(arguments)
    os.umask(0o022)  # a web server reads it, under another account
    try:
        need_programs("repository")
        packages = find_packages(options.packages, options.older)
        make_repository(packages, options.key, options.into, options.address)
    except BuildError as error:
        print(f"packaging/repository.py: {error}", file=sys.stderr)
        return 1
    print(options.into)
    return 0


def find_packages(newest: Path, older: Path | None) -> list[Path]:
    """The packages of both folders. Raises BuildError if one is missing, or differs from what was published."""
    found = _packages_of(newest)
    for architecture, machine in ARCHITECTURES.items():
        for ending in (f"_{architecture}.deb", f".{machine}.rpm"):
            if not any(path.name.endswith(ending) for path in found):
                raise BuildError(f"{newest}: expected {NAME}*{ending}, found none; make packages builds them")
    for path in _packages_of(older) if older else ():
        same = newest / path.name
        if not same.exists():
            found.append(path)
        elif not filecmp.cmp(same, path, shallow=False):
            raise BuildError(f"{same} is not what {path} is: another package needs another version")
    return found


def _packages_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BuildError(f"{folder}: expected a folder with packages, found none")
    return sorted(path for path in folder.iterdir() if _PACKAGE.fullmatch(path.name))


def make_repository(packages: Iterable[Path], key: Path, into: Path, address: str) -> None:
    """Write both repositories, in the place of an earlier edition if there is one. Raises BuildError."""
    if into.exists() and not (into / _IN_RELEASE).exists():
        raise BuildError(f"{into} is there and is no repository: name another folder, or remove it")
    epoch = source_epoch()
    into.parent.mkdir(parents=True, exist_ok=True)
    with _open_signer(key) as signer, tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=into.parent) as work:
        fresh = Path(work) / "repository"
        for package in packages:
            copy(package, fresh / ("apt/pool" if package.suffix == ".deb" else "rpm/packages") / package.name)
        _index_debs(fresh / "apt", signer, epoch)
        _index_rpms(fresh / "rpm", signer, epoch)
        signer.write_public_key(fresh / f"{NAME}.asc", "--armor")
        signer.write_public_key(fresh / f"{NAME}.gpg")
        write(fresh / f"{NAME}.sources", _SOURCES_FILE.format(address=address).encode())
        write(fresh / f"{NAME}.repo", _REPO_FILE.format(address=address).encode())
        shutil.rmtree(into, ignore_errors=True)
        fresh.rename(into)


def _index_debs(root: Path, signer: Signer, epoch: int) -> None:
    release = root / "dists/stable"
    digests = [f"--option=APT::FTPArchive::{name}=false" for name in ("MD5", "SHA1")]
    for architecture in ARCHITECTURES:
        command = ["apt-ftparchive", *digests, "--arch", architecture, "packages", "pool"]
        write(release / f"main/binary-{architecture}/Packages", run(command, cwd=root).encode())
    facts = {
        "Origin": NAME,
        "Label": NAME,
        "Suite": "stable",
        "Codename": "stable",
        "Date": f"{datetime.fromtimestamp(epoch, UTC):%a, %d %b %Y %H:%M:%S} UTC",
        "Architectures": " ".join(ARCHITECTURES),
        "Components": "main",
    }
    options = [f"--option=APT::FTPArchive::Release::{name}={value}" for name, value in facts.items()]
    unsigned = root / "Release"
    write(unsigned, run(["apt-ftparchive", *digests, *options, "release", str(release)]).encode())
    signer.sign(unsigned, "--clear-sign", release / "InRelease", epoch)
    unsigned.unlink()


def _index_rpms(root: Path, signer: Signer, epoch: int) -> None:
    for package in root.glob("packages/*.rpm"):
        signer.sign_rpm(package)
    options = ("--quiet", "--no-database", "--general-compress-type=gz", "--set-timestamp-to-revision")
    run(["createrepo_c", *options, f"--revision={epoch}", str(root)])
    index = root / "repodata/repomd.xml"
    signer.sign(index, "--detach-sign", index.with_suffix(".xml.asc"), epoch)


@contextlib.contextmanager
def _open_signer(key: Path) -> Iterator[Signer]:
    """Have the private key of this file in a gpg of its own, which is gone afterwards. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as home:
        environment = {**os.environ, "HOME": home, "GNUPGHOME": home}
        try:
            run(["gpg", "--batch", "--import", str(key)], env=environment)
            listed = run(["gpg", "--batch", "--with-colons", "--list-secret-keys"], env=environment)
            yield _read_signer(key, listed, environment)
        finally:
            for command in ("--kill", "all"), ("--remove-socketdir",):  # the latter may be in /run/user
                run(["gpgconf", *command], env=environment)


def _read_signer(key: Path, listed: str, environment: Mapping[str, str]) -> Signer:
    """The one key in what gpg lists; doc/DETAILS of GnuPG has the fields."""
    rows = [line.split(":") for line in listed.splitlines()]
    parts = [row for row in rows if row[0] in ("sec", "ssb")]
    keys = [row for row in parts if row[0] == "sec"]
    if len(keys) != 1:
        raise BuildError(f"{key}: expected one private key, found {len(keys)}")
    if keys[0][1] in ("e", "r"):
        raise BuildError(f"{key}: the key has expired or was revoked: no machine takes its signatures")
    fingerprint = next(row[9] for row in rows if row[0] == "fpr")  # of the first, which is the primary key
    return Signer(environment, fingerprint, max(int(row[5]) for row in parts))


if __name__ == "__main__":
    sys.exit(main())

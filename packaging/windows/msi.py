"""Builds the package for Windows on Linux: ``msi.py build`` writes dist/scheduled-events-agent-VERSION-x64.msi.

This file has the contents of the MSI and its tables. The actions on the machine besides are in installation.py,
which the MSI carries. How the agent runs is not decided here. Invariant: the same sources, Python and msitools
give the same bytes, whatever the place, the hour or the umask.

    packaging/windows/msi.py build --python-embed FILE     python.toml says which file, and where it is from
    packaging/windows/msi.py build --python-embed FILE --sha256 HASH     another one, for tests
    packaging/windows/msi.py renew                         the newest dependencies into requirements.txt

wixl makes the tables for files and the service. It does not know the others, or writes them wrongly: they are made
here, as text, and imported by msibuild. $SIGN_COMMAND, if set, signs: {unsigned} and {signed} in it are files.
"""  # noqa: INP001 - a script

import argparse
import hashlib
import os
import re
import shlex
import struct
import sys
import tempfile
import tomllib
import uuid
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

if sys.platform == "win32":
    raise ImportError("the MSI is built on Linux")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bom import Part, write_bom
from build import (
    AUTHOR,
    CACHE,
    HOMEPAGE,
    IMPORTED_BY_HTTPX,
    NAME,
    PACKAGING,
    PROJECT,
    RUNBOOK,
    SOURCES,
    URLS,
    BuildError,
    Distribution,
    check_version,
    copy,
    edit,
    fetch_pinned,
    filled_in,
    find_libyaml,
    need_programs,
    pins,
    pip,
    product,
    read_wheel,
    run,
    source_epoch,
    source_version,
    without_links,
    write,
)

HERE = PACKAGING / "windows"
PINNED = tomllib.loads((HERE / "python.toml").read_text("utf-8"))
PYTHON = "3.13"  # the line of the file in python.toml
PRODUCT = "Scheduled Events Agent"
SERVICE = "ScheduledEventsAgent"
# All that identifies the product to the installer is derived from this, and from names; it must never change.
_NAMESPACE = uuid.UUID("5e2c4b52-1a5e-5f0c-9d0b-6c1b7c0d5d53")
_WIX = "http://schemas.microsoft.com/wix/2006/wi"
_EVENT_LOG = rf"SYSTEM\CurrentControlSet\Services\EventLog\Application\{SERVICE}"
_OWN_KEY = rf"SOFTWARE\{SERVICE}"
# Properties that values of the registry are looked up for.
_SEARCHES = (
    # To installers, every Windows since 8.1 says that it is that. This value is there since 10.
    ("WINDOWS_MAJOR", r"SOFTWARE\Microsoft\Windows NT\CurrentVersion", "CurrentMajorVersionNumber"),
    ("INSTALLED_AT", _OWN_KEY, "InstallDir"),
)
_HOST = "-I -m scheduled_events_agent service host"
_EXAMPLE = "examples/windows-web-server.yaml"
_LEFT = ("policy.replaced", "service.halted")  # what installation.py writes beside itself
# Parts of the wheels that the agent does not use: pywin32's editor, COM, ODBC and programs, and build leftovers.
_UNNEEDED = re.compile(
    r"(?:adodbapi|isapi|pythonwin|win32com|win32comext)/|pythoncom\w*\.(?:dll|py)$|(?i:\.chm|\.exe|\.pth)$"
    r"|win32/(?:perfmondata\.dll|License\.txt|(?:Demos|scripts|test|include|libs)/)|\.data/"
    r"|\.dist-info/(?!METADATA$)"
)
_BESIDE_PYTHON = "pywin32_system32/"  # where Windows looks for what modules load

_SET_PROPERTY = 51
_COMMAND = 50  # a program that a property names, at once, as who installs
_CUSTOM = 18 + 0x400 + 0x800  # a program among the installed files; later, in the script; as the system
_IGNORE_RESULT = 0x40
_ROLLBACK = 0x100
_UNINSTALL = 'REMOVE="ALL"'
_MAINTENANCE = 'REINSTALL OR REMOVE="ALL"'
_REPLACES = "INSTALLED_AT AND OLDER_FOUND AND NOT REMOVE"
# Actions in their order: the action, when, and its place. Those without a condition are always done.
_PREPARATION = (
    ("FindRelatedProducts", "", 25),
    ("AppSearch", "", 50),
    ("LaunchConditions", "", 100),
    # Any user may have an installed product repaired and give it properties, but none of them counts there.
    ("Stay", "Installed OR (INSTALLED_AT AND NOT INSTALLDIR)", 150),
    ("Keep", "Installed", 160),
    ("ValidateProductID", "", 700),
    ("CostInitialize", "", 800),
    ("FileCost", "", 900),
    ("CostFinalize", "", 1000),
    ("MigrateFeatureStates", "", 1200),
)
_SEQUENCE = (
    *_PREPARATION,
    ("InstallValidate", "", 1400),
    # Before anything is stopped: whether the new version would start with the policy.
    ("Shell", _REPLACES, 1410),
    ("Check", _REPLACES, 1420),
    ("InstallInitialize", "", 1500),
    # Within the transaction: if the new version cannot be installed, the old one is back.
    ("RemoveExistingProducts", "", 1510),
    ("ProcessComponents", "", 1600),
    ("UnpublishFeatures", "", 1800),
    ("Return", _MAINTENANCE, 1830),
    ("Halt", _MAINTENANCE, 1840),
    ("Leave", _UNINSTALL, 1850),
    ("InstallExecute", _MAINTENANCE, 1860),
    ("StopServices", "VersionNT", 1900),
    # Not in an upgrade: a service that anything holds open would neither go nor let the new one in its place.
    ("DeleteServices", "VersionNT AND NOT UPGRADINGPRODUCTCODE", 2000),
    ("RemoveRegistryValues", "", 2600),
    ("RemoveEnvironmentStrings", "", 3300),
    ("RemoveFiles", "", 3500),
    ("RemoveFolders", "", 3600),
    ("CreateFolders", "", 3700),
    ("InstallFiles", "", 4000),
    ("WriteRegistryValues", "", 5000),
    ("WriteEnvironmentStrings", "", 5200),
    ("InstallServices", "VersionNT", 5800),
    ("Undo", "NOT REMOVE", 5840),
    ("Enter", "NOT REMOVE", 5850),
    # Windows keeps to the order anyway; under Wine what is ours would be done last of all without these two.
    ("InstallExecuteAgain", "NOT REMOVE", 5860),
    ("StartServices", 'VersionNT AND (Installed OR START<>"0")', 5900),
    # Takes as long as all the rest, in which the service can watch already.
    ("Compile", "NOT REMOVE", 5950),
    ("RegisterUser", "", 6000),
    ("RegisterProduct", "", 6100),
    ("PublishFeatures", "", 6300),
    ("PublishProduct", "", 6400),
    ("InstallFinalize", "", 6600),
)


@dataclass(frozen=True)
class Table:
    """A table of the MSI as text: columns with their types as Windows Installer's archive format has them."""

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    keys: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="packaging/windows/msi.py", description="Builds the MSI for Windows.")
    parser.add_argument("what", choices=("build", "renew"))
    parser.add_argument(
        "--python-embed",
        metavar="FILE",
        type=Path,
        default=os.environ.get("PYTHON_EMBED") or None,
        help="python.org's embeddable Python (default: $PYTHON_EMBED)",
    )
    parser.add_argument("--sha256", metavar="HASH", help="of that file (default: as python.toml says)")
    parser.add_argument("--version", help="build under this version (default: that of the sources)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=SOURCES / "dist", help="default: dist")
    options = parser.parse_args(arguments)
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        if options.what == "renew":
            renew()
        else:
            check_version(options.version)
            print(build(options.python_embed, options.sha256, options.version, options.output))
    except BuildError as error:
        print(f"packaging/windows/msi.py: {error}", file=sys.stderr)
        return 1
    return 0


def build(python_embed: Path | None, sha256: str | None, version: str | None, output: Path) -> Path:
    """Stage, pack, and sign if that is wanted; returns the MSI."""
    # Of a prerelease's version the numbers: Windows Installer knows no others. Its MSI is for tests only.
    version = version or re.sub(r"(a|b|rc)\d+$", "", source_version())
    if not re.fullmatch(r"(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])(\.\d{1,3}){2}", version):
        raise BuildError(
            f"version {version}: expected three numbers, the first at most 255, since Windows Installer compares "
            "no more than these; use such a one with --version"
        )
    interpreter = check_python(python_embed, sha256)
    signing = signing_command()
    need_programs("msi")
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{NAME}-{version}-x64.msi"
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        root = Path(directory) / "tree"
        parts = stage(root, interpreter, version)
        unsigned = Path(directory) / "unsigned.msi"
        pack(root, version, unsigned)
        sign(signing, unsigned, target)
    write_bom(target, product(version), source_epoch(), parts)
    return target


def check_python(path: Path | None, sha256: str | None) -> Path:
    """The file, if it is the one that is pinned. Raises BuildError."""
    if path is None or not path.is_file():
        got = "got nothing" if path is None else f"{path} is no file"
        expected = f"expected the file of {PINNED['url']}"
        raise BuildError(f"--python-embed (or PYTHON_EMBED): {expected}; {got}: download it first")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != (expected := sha256 or PINNED["sha256"]):
        raise BuildError(
            f"{path}: expected SHA-256 {expected}, found {found}; it is not the file of {PINNED['url']} "
            "(another one needs --sha256)"
        )
    return path


# --- The tree -------------------------------------------------------------------------------------------------


def stage(root: Path, interpreter: Path, version: str) -> list[Part]:
    """Lay out at ``root`` what will be in the folder of the product, every file with its final time.

    Returns what of it others have made.
    """
    parts = [_place_python(root, interpreter), *_place_wheels(root)]
    for module in sorted((SOURCES / "agent/scheduled_events_agent").rglob("*")):
        if module.is_file() and "__pycache__" not in module.parts and module.name != "py.typed":
            copy(module, root / "lib" / module.relative_to(SOURCES / "agent"))
    edit(
        root / "lib/scheduled_events_agent/__init__.py",
        f'__version__ = "{source_version()}"',
        f'__version__ = "{version}"',
    )
    copy(HERE / "installation.py", root / "installation.py")
    for source, name in ((f"{NAME}.cmd", f"bin/{NAME}.cmd"), ("status-page.url", "status-page.url")):
        write(root / name, (HERE / source).read_bytes().replace(b"\n", b"\r\n"))
    config = SOURCES / "config"
    scripts = sorted(config.glob("hooks/*.ps1"))
    for path in (config / "policy.yaml", config / "policy.schema.json", config / _EXAMPLE, *scripts):
        copy(path, root / path.relative_to(SOURCES))
    copy(SOURCES / "LICENSE", root / "licenses" / NAME / "LICENSE")
    copy(SOURCES / "SECURITY.md", root / "SECURITY.md")
    page = without_links(RUNBOOK.read_text("utf-8")).replace("\n", "\r\n")
    write(root / "share" / NAME / RUNBOOK.name, page.encode())
    _compile_messages(root)
    epoch = source_epoch()
    for path in sorted(root.rglob("*")):
        os.utime(path, (epoch, epoch))
    return parts


def _place_python(root: Path, interpreter: Path) -> Part:
    with zipfile.ZipFile(interpreter) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    digits = PYTHON.replace(".", "")
    needed = {"python.exe", "LICENSE.txt", f"python{digits}.zip", f"python{digits}._pth"}
    if missing := sorted(needed - set(contents)):
        raise BuildError(
            f"{interpreter}: expected python.org's embeddable Python {PYTHON}; it has no {', '.join(missing)}"
        )
    for name, content in contents.items():
        write(root / "python" / name, content)
    # This file makes up the whole of sys.path: neither the registry, variables nor a site-packages add to it.
    folders = (f"python{digits}.zip", ".", r"..\lib", r"..\lib\win32", r"..\lib\win32\lib")
    write(root / f"python/python{digits}._pth", "".join(f"{folder}\r\n" for folder in folders).encode())
    write(root / "licenses/Python/LICENSE.txt", contents["LICENSE.txt"])
    sha256 = hashlib.sha256(interpreter.read_bytes()).hexdigest()
    name, version = "another", PYTHON
    if sha256 == PINNED["sha256"]:
        name = PINNED["url"].rpartition("/")[2]
        version = name.split("-")[1]
    return Part("Python", version, f"pkg:generic/python@{version}?file_name={name}", "PSF-2.0", sha256)


def _place_wheels(root: Path) -> Iterator[Part]:
    wheels = fetch_pinned(HERE / "requirements.txt", "win_amd64", [_target()])
    distributions: list[Distribution] = [find_libyaml()]
    for wheel in wheels:
        distribution, files = read_wheel(wheel)
        distributions.append(distribution)
        for name, content in files.items():
            if _UNNEEDED.search(name):
                continue
            beside = name.startswith(_BESIDE_PYTHON)
            write(root / (f"python/{name.removeprefix(_BESIDE_PYTHON)}" if beside else f"lib/{name}"), content)
    for distribution in distributions:
        for name, text in distribution.texts.items():
            write(root / "licenses" / distribution.name / name, text.encode())
        yield from distribution.parts()


def _compile_messages(root: Path) -> None:
    """The texts of the Event Log's ids, as a library that holds nothing else."""
    program = "from scheduled_events_agent.telemetry.log_ids import messages_source; print(messages_source())"
    environment = {"PYTHONPATH": str(SOURCES / "agent"), "PATH": os.defpath}
    source = run([sys.executable, "-B", "-c", program], env=environment)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        place = Path(directory)
        (place / "messages.mc").write_text(source, "utf-8")
        tool = "x86_64-w64-mingw32-"
        run([f"{tool}windmc", "-h", directory, "-r", directory, str(place / "messages.mc")])
        (texts,) = place.glob("MSG*.bin")
        (place / "messages.res").write_bytes(_resources(texts.read_bytes()))
        run([f"{tool}windres", "-J", "res", "-O", "coff", str(place / "messages.res"), str(place / "messages.o")])
        link = [f"{tool}ld", "-shared", "--no-insert-timestamp", "-e", "0", "-o", str(place / "messages.dll")]
        run([*link, str(place / "messages.o")])
        copy(place / "messages.dll", root / "messages.dll")


def _resources(messages: bytes) -> bytes:
    """The message table 1 as a file of resources, which windres makes of a script only with a compiler's help."""
    number = 0xFFFF
    table = 11
    english = 0x409
    header = struct.pack("<2I4HI2H2I", len(messages), 32, number, table, number, 1, 0, 0x30, english, 0, 0)
    empty = struct.pack("<2I4H4I", 0, 32, number, 0, number, 0, 0, 0, 0, 0)
    return empty + header + messages + b"\0" * (-len(messages) % 4)


# --- Wheels ---------------------------------------------------------------------------------------------------


def _target() -> list[str]:
    options = ["--only-binary", ":all:", "--no-deps", "--implementation", "cp", "--python-version", PYTHON]
    abis = (f"cp{PYTHON.replace('.', '')}", "abi3", "none")
    return [*options, *(word for abi in abis for word in ("--abi", abi)), "--platform", "win_amd64"]


def renew() -> None:
    """Write requirements.txt again, with the newest versions that pyproject.toml allows."""
    # pip judges conditions by the system that it runs on.
    needed = [one.partition(";")[0].strip() for one in PROJECT["dependencies"] if "== 'linux'" not in one]
    needed += IMPORTED_BY_HTTPX
    with tempfile.TemporaryDirectory() as directory:
        pip("download", *_target(), "--dest", directory, *needed, hashes=False)
        lines = ["# What the MSI contains; written by packaging/windows/msi.py renew.", *pins(Path(directory))]
    (HERE / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- The MSI --------------------------------------------------------------------------------------------------


def pack(root: Path, version: str, target: Path) -> None:
    """Pack the tree as an MSI."""
    identity = _identity(root, version)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        source = Path(directory) / "product.wxs"
        code = os.path.relpath(_zip_of_agent(root, Path(directory)), root)  # wixl accepts no other
        ET.ElementTree(_describe(root, version, identity, code)).write(source, "utf-8", xml_declaration=True)
        # The times within the cabinet are local ones.
        environment = {**os.environ, "TZ": "UTC", "LC_ALL": "C.UTF-8"}
        run(["wixl", "--arch", "x64", "--output", str(target), str(source)], env=environment, cwd=root)
        options = []
        for table in _tables(version, identity):
            path = Path(directory) / f"{table.name}.idt"
            path.write_bytes(_archived(table).encode("cp1252"))
            options += ["-i", str(path)]
        run(["msibuild", str(target), *options], env=environment)


def _zip_of_agent(root: Path, directory: Path) -> Path:
    """The agent's code in one file, for installation.py of the version before to judge a policy by."""
    target = directory / "agent.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for path in _files(root / "lib/scheduled_events_agent"):
            entry = zipfile.ZipInfo(path.relative_to(root / "lib").as_posix())  # of 1980, as all
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


def signing_command() -> str:
    """$SIGN_COMMAND, or "". Raises BuildError."""
    command = os.environ.get("SIGN_COMMAND", "")
    if command and not ("{unsigned}" in command and "{signed}" in command):
        raise BuildError(f"SIGN_COMMAND: expected {{unsigned}} and {{signed}} in it; got {command!r}")
    return command


def sign(command: str, unsigned: Path, target: Path) -> None:
    """Have the command make the signed file of the unsigned one; without a command they are the same."""
    if not command:
        copy(unsigned, target)
        return
    signed = unsigned.with_name("signed.msi")
    run(
        [
            word.replace("{unsigned}", str(unsigned)).replace("{signed}", str(signed))
            for word in shlex.split(command)
        ]
    )
    if not signed.is_file():
        raise BuildError(f"SIGN_COMMAND: expected it to write {{signed}}, found no such file after {command!r}")
    copy(signed, target)


def _identity(root: Path, version: str) -> str:
    """An id that differs between two builds if anything in them differs."""
    digest = hashlib.sha256(f"{version}\n".encode())
    for path in (*_files(root), HERE / "msi.py"):
        digest.update(hashlib.sha256(path.name.encode() + b"\0" + path.read_bytes()).digest())
    return digest.hexdigest()


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _guid(*parts: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, "/".join(parts))).upper()


def _id(prefix: str, path: Path) -> str:
    return prefix + hashlib.sha256(path.as_posix().encode()).hexdigest()[:20]


def _name(name: str) -> str:
    """A file's name as Windows Installer needs it: with a short one, if it is longer than those of DOS."""
    stem, dot, suffix = name.rpartition(".")
    if re.fullmatch(r"[A-Za-z0-9_-]{1,8}(\.[A-Za-z0-9_-]{1,3})?", name):
        return name
    short = hashlib.sha256(name.encode()).hexdigest()[:8].upper()
    suffix = re.sub(r"[^A-Z0-9]", "", suffix.upper())[:3] if stem and dot else ""
    return f"{short}.{suffix}|{name}" if suffix else f"{short}|{name}"


def _describe(root: Path, version: str, identity: str, code: str) -> ET.Element:
    """The part that wixl makes the tables of: folders, files and the service."""
    wix = ET.Element("Wix", xmlns=_WIX)
    product = ET.SubElement(
        wix,
        "Product",
        Id=_guid("product", identity),
        UpgradeCode=_guid("upgrade"),
        Name=PRODUCT,
        Manufacturer=AUTHOR,
        Version=version,
        Language="1033",
        Codepage="1252",
    )
    ET.SubElement(product, "Package", InstallerVersion="500", Compressed="yes", InstallScope="perMachine")
    ET.SubElement(
        product,
        "MajorUpgrade",
        DowngradeErrorMessage=f"A newer version of {PRODUCT} is installed: remove it first.",
    )
    ET.SubElement(product, "Media", Id="1", Cabinet="files.cab", EmbedCab="yes")
    ET.SubElement(product, "Binary", Id="Agent", SourceFile=code)
    top = ET.SubElement(product, "Directory", Id="TARGETDIR", Name="SourceDir")
    feature = ET.Element("Feature", Id="Agent", Title=PRODUCT, Level="1")
    programs = ET.SubElement(top, "Directory", Id="ProgramFiles64Folder")
    menu = ET.SubElement(top, "Directory", Id="ProgramMenuFolder")
    home = ET.SubElement(programs, "Directory", Id="INSTALLDIR", Name=_name(PRODUCT))
    folders = {root: home}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_dir():
            folders[path] = ET.SubElement(
                folders[path.parent], "Directory", Id=_id("d", relative), Name=_name(path.name)
            )
            continue
        is_link = path.suffix == ".url"
        component = ET.SubElement(
            menu if is_link else folders[path.parent],
            "Component",
            Id=_id("c", relative),
            Guid=_guid("file", relative.as_posix()),
            Win64="yes",
        )
        name = f"{PRODUCT}.url" if is_link else path.name
        ET.SubElement(
            component, "File", Id=_id("f", relative), Source=str(relative), Name=_name(name), KeyPath="yes"
        )
        ET.SubElement(feature, "ComponentRef", Id=component.attrib["Id"])
        if relative == Path("python/python.exe"):
            _add_service(component)
    product.append(feature)
    return wix


def _add_service(component: ET.Element) -> None:
    """Have the component install the service. What a row cannot say, the agent's own `service install` says."""
    service = ET.SubElement(
        component,
        "ServiceInstall",
        Id=SERVICE,
        Name=SERVICE,
        DisplayName="Azure Scheduled Events Agent",
        Type="ownProcess",
        Start="auto",
        ErrorControl="normal",
        Account="LocalSystem",
        Arguments=_HOST,
    )
    for needed in ("Tcpip", "Dhcp"):
        ET.SubElement(service, "ServiceDependency", Id=needed)
    ET.SubElement(
        component,
        "ServiceControl",
        Id=SERVICE,
        Name=SERVICE,
        Start="install",
        Stop="both",
        Remove="uninstall",
        Wait="yes",
    )


def _tables(version: str, identity: str) -> Iterator[Table]:
    """The tables that wixl does not make, or not so."""
    python = Path("python/python.exe")
    component = _id("c", python)
    program = _id("f", python)
    script = f'-I -B "[#{_id("f", Path("installation.py"))}]"'
    upgrade = f"{{{_guid('upgrade')}}}"
    # By what is there: nothing of the new version is on the disk yet. A broken version may be replaced unseen.
    old_python = r'"[INSTALLED_AT]python\python.exe"'
    check = rf'{old_python} -I -B "[INSTALLED_AT]installation.py" check "[OriginalDatabase]" "[POLICY]"'
    properties = {
        "ALLUSERS": "1",
        "ARPCOMMENTS": "Preview: tested under Wine, not yet on Windows",
        "ARPNOMODIFY": "1",
        "ARPURLINFOABOUT": HOMEPAGE,
        "ARPHELPLINK": filled_in(URLS["Runbook"]),
        "Manufacturer": AUTHOR,
        "ProductCode": f"{{{_guid('product', identity)}}}",
        "ProductLanguage": "1033",
        "ProductName": PRODUCT,
        "ProductVersion": version,
        # Versions of the old files do not count: the installer plans what to replace before the old ones are gone.
        "REINSTALLMODE": "amus",
        # Without a window, the installer would end and start what uses the files, hooks too, by itself...
        "MSIRESTARTMANAGERCONTROL": "Disable",
        # ... and restart the machine, which is what this product is to keep from machines.
        "REBOOT": "ReallySuppress",
        "START": "1",
        # Properties that one part of the installer passes to the other, which is elevated.
        "SecureCustomProperties": ";".join(
            (
                *(name for name, _, _ in _SEARCHES),
                "INSTALLDIR",
                "NEWER_FOUND",
                "OLDER_FOUND",
                "POLICY",
                "PURGE",
                "START",
            )
        ),
        "UpgradeCode": upgrade,
    }
    yield _table(
        "Property", ("Property", "Value"), ("s72", "l0"), 1, [row for row in properties.items() if row[1]]
    )
    for name, sequence in (
        ("InstallExecuteSequence", _SEQUENCE),
        ("InstallUISequence", (*_PREPARATION, ("ExecuteAction", "", 1300))),
    ):
        yield _table(name, ("Action", "Condition", "Sequence"), ("s72", "S255", "I2"), 1, sequence)
    yield _table(
        "Upgrade",
        ("UpgradeCode", "VersionMin", "VersionMax", "Language", "Attributes", "Remove", "ActionProperty"),
        ("s38", "S20", "S20", "S255", "i4", "S255", "s72"),
        5,
        # 0x200: another build of the same version is replaced too; 2: newer ones are only looked for
        [
            (upgrade, "", version, "", 0x200, "", "OLDER_FOUND"),
            (upgrade, version, "", "", 2, "", "NEWER_FOUND"),
        ],
    )
    refused = f"A newer version of {PRODUCT} is installed: remove it first."
    yield _table(
        "LaunchCondition",
        ("Condition", "Description"),
        ("s255", "l255"),
        1,
        [
            ("NOT NEWER_FOUND", refused),
            ("Installed OR WINDOWS_MAJOR", f"{PRODUCT} needs Windows Server 2016, Windows 10, or a later one."),
        ],
    )
    machine = 2
    is_value = 2
    is_64_bit = 16
    yield _table(
        "AppSearch",
        ("Property", "Signature_"),
        ("s72", "s72"),
        2,
        [(name, name.title()) for name, _, _ in _SEARCHES],
    )
    yield _table(
        "RegLocator",
        ("Signature_", "Root", "Key", "Name", "Type"),
        ("s72", "i2", "s255", "S255", "I2"),
        1,
        [(name.title(), machine, key, value, is_value | is_64_bit) for name, key, value in _SEARCHES],
    )
    yield _table(
        "CustomAction",
        ("Action", "Type", "Source", "Target", "ExtendedType"),
        ("s72", "i2", "S72", "S255", "I4"),
        1,
        [
            ("Stay", _SET_PROPERTY, "INSTALLDIR", "[INSTALLED_AT]", ""),
            # No user can set that property: its name is in small letters.
            ("Keep", _SET_PROPERTY, "POLICY", "[nothing]", ""),
            ("Enter", _CUSTOM, program, f'{script} enter "[POLICY]"', ""),
            ("Shell", _SET_PROPERTY, "SHELL", "[System64Folder]cmd.exe", ""),
            ("Check", _COMMAND, "SHELL", f'/d /s /c "if exist {old_python} {check}"', ""),
            ("Compile", _CUSTOM | _IGNORE_RESULT, program, f"{script} compile", ""),
            ("Undo", _CUSTOM | _ROLLBACK | _IGNORE_RESULT, program, f"{script} undo", ""),
            ("Halt", _CUSTOM | _IGNORE_RESULT, program, f"{script} halt", ""),
            ("Return", _CUSTOM | _ROLLBACK | _IGNORE_RESULT, program, f"{script} return", ""),
            ("Leave", _CUSTOM | _IGNORE_RESULT, program, f'{script} leave "[PURGE]" "[UPGRADINGPRODUCTCODE]"', ""),
        ],
    )
    when_removed = 2
    yield _table(
        "RemoveFile",
        ("FileKey", "Component_", "FileName", "DirProperty", "InstallMode"),
        ("s72", "s72", "L255", "s72", "i2"),
        1,
        [(f"left{i}", component, _name(name), "INSTALLDIR", when_removed) for i, name in enumerate(_LEFT)],
    )
    yield _table(
        "Registry",
        ("Registry", "Root", "Key", "Name", "Value", "Component_"),
        ("s72", "i2", "l255", "L255", "L0", "s72"),
        1,
        [
            ("EventMessages", machine, _EVENT_LOG, "EventMessageFile", "#%[INSTALLDIR]messages.dll", component),
            ("EventTypes", machine, _EVENT_LOG, "TypesSupported", "#7", component),
            ("InstallDir", machine, _OWN_KEY, "InstallDir", "[INSTALLDIR]", component),
        ],
    )
    # =: set when installed; -: undone when removed; *: of the system
    path = ("Path", "=-*PATH", f"[~];[{_id('d', Path('bin'))}]", component)
    yield _table(
        "Environment", ("Environment", "Name", "Value", "Component_"), ("s72", "l255", "L255", "s72"), 1, [path]
    )
    made = f"{datetime.fromtimestamp(source_epoch(), UTC):%Y/%m/%d %H:%M:%S}"
    facts = {
        1: "1252",
        2: "Installation Database",
        3: f"{PRODUCT} {version}",
        4: AUTHOR,
        5: "Installer",
        7: "x64;1033",
        9: f"{{{_guid('package', identity)}}}",
        12: made,
        13: made,
        14: "500",
        15: "2",
        18: "msitools",
        19: "2",
    }
    yield _table("_SummaryInformation", ("PropertyId", "Value"), ("i2", "l255"), 1, facts.items())


def _table(
    name: str,
    columns: Sequence[str],
    types: Sequence[str],
    keys: int,
    rows: Iterable[tuple[str | int, ...]],
) -> Table:
    return Table(name, tuple(columns), tuple(types), tuple(columns[:keys]), tuple(rows))


def _archived(table: Table) -> str:
    lines = [table.columns, table.types, (table.name, *table.keys), *table.rows]
    return "".join("\t".join(map(str, line)) + "\r\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

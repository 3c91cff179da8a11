"""The packages as files: what is in them, who can run it, and whether they come out the same twice.

Their life on a machine is in test_package_life.py.
"""

import argparse
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if sys.platform == "win32":
    pytest.skip("packages for Linux are built on Linux", allow_module_level=True)

import apt

from scheduled_events_agent import __version__
from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.policy.schema import policy_schema
from scheduled_events_agent.simulator.table import SimulatedTable
from scheduled_events_agent.status.attention import ATTENTION_KINDS

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = CHECKOUT / "packaging/build.py"
NAME = "scheduled-events-agent"
HOME = f"usr/lib/{NAME}"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Files that the packages compile for the Python that they find.
COMPILED = (
    *("certifi", "h11", "httpcore", "httpx", "idna", "prometheus_client", "psutil", "scheduled_events_agent"),
    "structlog",
)
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF
DEBS = {"x86_64": "amd64", "aarch64": "arm64"}
_SCRIPTS = (f"{HOME}/bytecode.sh", f"{HOME}/removal.sh", f"usr/share/{NAME}/systemd/restart.sh")
EXECUTABLE = {f"usr/bin/{NAME}", *_SCRIPTS} | {
    f"usr/share/{NAME}/{path.parent.name}/{path.name}"
    for path in (*CHECKOUT.glob("config/hooks/*"), *CHECKOUT.glob("systemd/run-*"))
    if path.suffix == ""
}

pytestmark = pytest.mark.timeout(600)


class Entry(NamedTuple):
    """A file or directory in a package."""

    mode: int
    owner: str
    content: bytes | None  # None: a directory


def build(*arguments: str, sources: Path = CHECKOUT, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(sources / "packaging/build.py"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def output_of(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four packages, as "make packages" builds them."""
    output = tmp_path_factory.mktemp("dist")
    for what in ("deb", "rpm"):
        done = build(what, "--output", str(output))
        assert done.returncode == 0, done.stderr
    return output


def deb_path(dist: Path, machine: str) -> Path:
    return dist / f"{NAME}_{__version__}-1_{DEBS[machine]}.deb"


def rpm_path(dist: Path, machine: str) -> Path:
    return dist / f"{NAME}-{__version__}-1.{machine}.rpm"


def entries_of_deb(path: Path) -> dict[str, Entry]:
    packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=True).stdout
    found = {}
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            assert member.isfile() or member.isdir(), member.name
            owner = f"{member.uname}:{member.gname} {member.uid}:{member.gid}"
            found[member.name.removeprefix("./")] = Entry(member.mode, owner, file.read() if file else None)
    return found


@pytest.fixture(scope="session")
def debs(dist: Path) -> Mapping[str, Mapping[str, Entry]]:
    return {machine: entries_of_deb(deb_path(dist, machine)) for machine in MACHINES}


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed files, for this machine's processor, as a directory."""
    output = tmp_path_factory.mktemp("tree")
    done = build("stage", "--architecture", os.uname().machine, "--output", str(output))
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def text_of(entries: Mapping[str, Entry], name: str) -> str:
    content = entries[name].content
    assert content is not None, name
    return (gzip.decompress(content) if name.endswith(".gz") else content).decode()


# --- contents


@pytest.mark.parametrize("machine", MACHINES)
def test_a_deb_has_its_metadata_and_dependencies(dist: Path, machine: str) -> None:
    path = deb_path(dist, machine)
    fields = ("Package", "Version", "Architecture", "Section", "Priority", "Depends", "Recommends", "Suggests")
    found = {field: output_of("dpkg-deb", "--field", str(path), field).strip() for field in fields}
    glibc = {"x86_64": "2.14", "aarch64": "2.17"}[machine]
    needed = f"libc6 (>= {glibc}), libgcc-s1, python3.13 | python3.12 | python3.11 | python3.14, systemd (>= 245)"
    assert found == {
        "Package": NAME,
        "Version": f"{__version__}-1",
        "Architecture": DEBS[machine],
        "Section": "admin",
        "Priority": "optional",
        "Depends": needed,
        "Recommends": "",
        "Suggests": "polkitd",
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_belongs_to_root_and_nothing_is_hidden(
    debs: Mapping[str, Mapping[str, Entry]], machine: str
) -> None:
    unusual = {}
    for name, entry in debs[machine].items():
        expected = 0o755 if entry.content is None or name in EXECUTABLE else 0o644
        if (entry.mode, entry.owner) != (expected, "root:root 0:0"):
            unusual[name] = (oct(entry.mode), entry.owner)
    assert unusual == {}


def test_both_processors_get_the_same_files_but_for_the_compiled_ones(
    debs: Mapping[str, Mapping[str, Entry]],
) -> None:
    per_machine = [{name for name in debs[machine] if not name.endswith(".so")} for machine in MACHINES]
    assert per_machine[0] == per_machine[1]
    differing = {name for name in per_machine[0] if debs["x86_64"][name].content != debs["aarch64"][name].content}
    assert differing == set()


def test_the_same_tree_is_in_the_deb_and_in_the_rpm(dist: Path, debs: Mapping[str, Mapping[str, Entry]]) -> None:
    apt.need("rpm", "rpm")
    made_by_systemd = (f"/etc/{NAME}/credentials", "/var")  # an rpm knows them
    documents = (f"/usr/share/doc/{NAME}", "/usr/share/licenses/", "/usr/share/lintian", "/usr/share/zsh")
    of_format = (*documents, *made_by_systemd)
    for machine in MACHINES:
        in_rpm = set(output_of("rpm", "-qpl", str(rpm_path(dist, machine))).split())
        in_deb = {f"/{name}" for name, entry in debs[machine].items() if entry.content is not None}
        listed = {name for name in in_rpm if not name.startswith(of_format)}
        files = {name for name in in_deb if not name.startswith(of_format)}
        assert files - listed == set()
        assert {name for name in listed - files if f"{name[1:]}" not in debs[machine]} == set()
        completion = f"/usr/share/zsh/site-functions/_{NAME}"
        assert {name for name in in_rpm if name.startswith("/usr/share/zsh")} == {completion}


@pytest.mark.parametrize("machine", MACHINES)
def test_compiled_code_fits_the_processor_of_the_package_and_every_python(
    debs: Mapping[str, Mapping[str, Entry]], machine: str
) -> None:
    found = {name: entry.content for name, entry in debs[machine].items() if name.endswith(".so")}
    places = [
        f"{HOME}/cp{python.replace('.', '')}/{module}.cpython-{python.replace('.', '')}-{machine}-linux-gnu.so"
        for python, module in itertools.product(PYTHONS, ("msgspec/_core", "yaml/_yaml"))
    ]
    places.append(f"{HOME}/psutil/_psutil_linux.abi3.so")  # one for every Python
    assert sorted(found) == sorted(places)
    kinds = {struct.unpack_from("<4sBB12xH", content or b"") for content in found.values()}
    assert kinds == {(b"\x7fELF", 2, 1, MACHINES[machine])}  # 64 bits, little endian


@pytest.mark.parametrize("machine", MACHINES)
def test_compiled_modules_fit_old_systems_and_large_pages_and_ask_for_libraries(
    dist: Path, debs: Mapping[str, Mapping[str, Entry]], machine: str, tmp_path: Path
) -> None:
    apt.need("readelf", "binutils")
    apt.need("rpm", "rpm")
    needed, versions, alignments = set[str](), set[tuple[int, ...]](), set[int]()
    for name, entry in debs[machine].items():
        if name.endswith(".so"):
            module = tmp_path / "module.so"
            module.write_bytes(entry.content or b"")
            said = output_of("readelf", "--wide", "--dynamic", "--version-info", "--program-headers", str(module))
            needed |= set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", said))
            found = re.findall(r"Name: GLIBC_([\d.]+)", said)
            versions |= {tuple(map(int, version.split("."))) for version in found}
            alignments |= {int(row.split()[-1], 16) for row in said.splitlines() if row.split()[:1] == ["LOAD"]}
    assert max(versions) <= (2, 31)  # that of SLES 15, the oldest
    page = {"x86_64": 0x1000, "aarch64": 0x10000}[machine]  # RHEL has a kernel with pages of 64 KiB for the latter
    assert min(alignments) >= page
    of_glibc = re.compile(r"(libc|libm|libpthread|libdl|ld-linux-\S+)\.so\.\d")
    others = {library for library in needed if not of_glibc.fullmatch(library)}
    asked = set(output_of("rpm", "-qp", "--requires", str(rpm_path(dist, machine))).splitlines())
    assert {f"{library}()(64bit)" for library in others} - asked == set()
    debian = {"libgcc_s.so.1": "libgcc-s1"}
    depends = output_of("dpkg-deb", "--field", str(deb_path(dist, machine)), "Depends").strip().split(", ")
    assert {debian[library] for library in others} - set(depends) == set()


def test_the_package_has_no_unneeded_file(debs: Mapping[str, Mapping[str, Entry]]) -> None:
    unneeded = re.compile(r"__pycache__|\.py[cio]$|py\.typed$|/tests?/|RECORD$|\.(pyx|pxd|c|h)$|/\.|\.egg-info")
    assert [name for name in debs["x86_64"] if unneeded.search(name)] == []


def test_the_agent_in_it_is_this_one(debs: Mapping[str, Mapping[str, Entry]]) -> None:
    sources = {
        path.relative_to(CHECKOUT / "agent").as_posix()
        for path in (CHECKOUT / "agent/scheduled_events_agent").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "py.typed"
    }
    place = f"{HOME}/"
    packed = {
        name.removeprefix(place) for name in debs["x86_64"] if name.startswith(f"{HOME}/scheduled_events_agent/")
    }
    assert {name for name in packed if debs["x86_64"][place + name].content is not None} == sources


def test_files_that_operators_edit_are_kept_by_an_upgrade(dist: Path, tmp_path: Path) -> None:
    for machine in MACHINES:
        output_of("dpkg-deb", "--control", str(deb_path(dist, machine)), str(tmp_path / machine))
        conffiles = (tmp_path / machine / "conffiles").read_text().splitlines()
        assert conffiles == [f"/etc/{NAME}/hooks/README.md", f"/etc/{NAME}/policy.yaml"]
        if shutil.which("rpm"):
            kept = output_of("rpm", "-qp", "--configfiles", str(rpm_path(dist, machine))).split()
            assert kept == conffiles


def test_the_policy_is_the_default_one_and_editors_find_its_schema(
    debs: Mapping[str, Mapping[str, Entry]],
) -> None:
    schema = f"usr/share/{NAME}/policy.schema.json"
    installed = text_of(debs["x86_64"], f"etc/{NAME}/policy.yaml")
    shipped = (CHECKOUT / "config/policy.yaml").read_text()
    assert installed.splitlines()[1:] == shipped.splitlines()[1:]
    assert installed.splitlines()[0] == f"# yaml-language-server: $schema=/{schema}"
    assert text_of(debs["x86_64"], schema) == (CHECKOUT / "config/policy.schema.json").read_text()
    examples = [name for name in debs["x86_64"] if re.search(r"/examples/.*\.yaml$", name)]
    assert len(examples) == len([*(CHECKOUT / "config/examples").glob("*.yaml")])
    for name in examples:
        assert "$schema=../" not in text_of(debs["x86_64"], name)


def test_every_file_that_a_document_refers_to_is_there(debs: Mapping[str, Mapping[str, Entry]]) -> None:
    missing = {}
    for name in debs["x86_64"]:
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(debs["x86_64"], name)):
                if "://" not in target:
                    path = os.path.normpath(os.path.join("/", os.path.dirname(name), target))[1:]  # noqa: PTH118, PTH120
                    if path not in debs["x86_64"]:
                        missing[target] = name
    assert missing == {}


def test_examples_hooks_and_rules_are_there_and_the_texts_name_their_places(
    debs: Mapping[str, Mapping[str, Entry]],
) -> None:
    share, doc = f"usr/share/{NAME}", f"usr/share/doc/{NAME}"
    places = {"examples": f"{doc}/examples", "hooks": f"{share}/hooks", "prometheus": f"{share}/prometheus"}
    for folder, place in places.items():
        there = {name.removeprefix(f"{place}/") for name in debs["x86_64"] if name.startswith(f"{place}/")}
        elsewhere = {"README.md"} if folder == "hooks" else set()  # in /etc, beside the operator's own
        assert there == {path.name for path in (CHECKOUT / "config" / folder).iterdir()} - elsewhere
    named, left = set(), {}
    for name in debs["x86_64"]:
        if name.endswith(".md") or name.startswith(f"{doc}/examples/"):
            text = text_of(debs["x86_64"], name)
            named |= set(re.findall(rf"/((?:{share}|{doc})/[\w./-]*\w)", text))
            if found := re.findall(r"(?<![\w./\[-])(?:config/(?:examples|hooks|prometheus)|docs)/[\w-]+", text):
                left[name] = found
    assert left == {}
    assert f"{share}/hooks/nginx-prepare" in named
    assert sorted(name for name in named if not any(known.startswith(name) for known in debs["x86_64"])) == []


def test_units_in_the_package_differ_from_the_wheels_only_in_the_program_path(
    debs: Mapping[str, Mapping[str, Entry]],
) -> None:
    share, entries = f"usr/share/{NAME}/systemd", debs["x86_64"]
    sources = {path.name: path.read_text("utf-8") for path in (CHECKOUT / "systemd").iterdir()}
    of_systemd = {
        f"usr/lib/systemd/system/{NAME}.service": f"{NAME}.service",
        f"usr/lib/systemd/system/{NAME}-hook@.service": f"{NAME}-hook@.service",
        f"usr/lib/sysusers.d/{NAME}.conf": "sysusers.conf",
        f"usr/lib/tmpfiles.d/{NAME}.conf": "tmpfiles.conf",
    }
    places = of_systemd | {f"{share}/{name}": name for name in sources if name != "README.md"}
    assert {name for name in entries if name.startswith(f"{share}/")} == {f"{share}/{name}" for name in sources}
    for place, name in places.items():
        packed, shipped = text_of(entries, place).splitlines(), sources[name].splitlines()
        differing = [pair for pair in zip(packed, shipped, strict=True) if pair[0] != pair[1]]
        wanted = []
        if name == f"{NAME}.service":
            wanted = [
                (f"{key}=/usr/bin/{NAME} {words}", f"{key}=/usr/local/bin/{NAME} {words}")
                for key, words in (("ExecStart", "run --stop-timeout 60s"), ("ExecReload", "check"))
            ]
        if name == "restart.sh":
            words = f"{NAME} # the packages say /usr/bin"
            wanted = [(f"agent=/usr/bin/{words}", f"agent=/usr/local/bin/{words}")]
        assert differing == wanted, place


def test_files_that_the_documents_name_are_in_the_package(debs: Mapping[str, Mapping[str, Entry]]) -> None:
    text = (CHECKOUT / "docs/install-linux.md").read_text()
    places = [place.strip("/") for place in re.findall(r"^- `(/[^`]+)`: ", text, re.MULTILINE)]
    assert len(places) == 14
    made_by_systemd = [f"etc/{NAME}/credentials", f"var/lib/{NAME}"]
    assert [place for place in places if place not in debs["x86_64"]] == made_by_systemd


def test_the_licence_of_everything_inside_is_included(
    dist: Path, debs: Mapping[str, Mapping[str, Entry]], tree: Path
) -> None:
    vendored = {path.parent.name.split("-")[0].lower() for path in (tree / HOME).rglob("*.dist-info/METADATA")}
    pure = {"certifi", "h11", "httpcore", "httpx", "idna", "prometheus_client", "structlog"}
    assert vendored == {*pure, "msgspec", "psutil", "pyyaml"}
    sections = re.split("^--- ", text_of(debs["x86_64"], f"usr/share/doc/{NAME}/copyright"), flags=re.MULTILINE)
    for name in (*vendored, "libyaml"):
        (directory,) = (
            path
            for path in (tree / f"usr/share/licenses/{NAME}").iterdir()
            if path.name.lower().replace("-", "_") == name
        )
        (section,) = (text for text in sections if text.startswith(f"{directory.name} "))
        said = " ".join(section.split())
        for file in directory.iterdir():
            text = " ".join(file.read_text().split())
            if "Apache License" in text[:100]:
                assert "Apache-2.0" in said  # the text is on every Debian
            else:
                assert text in said, file
            if shutil.which("rpm"):
                licenses = output_of("rpm", "-qp", "--licensefiles", str(rpm_path(dist, "x86_64"))).split()
                assert f"/usr/share/licenses/{NAME}/{directory.name}/{file.name}" in licenses
    assert (
        "Redistribution and use"
        in (tree / f"usr/share/licenses/{NAME}/prometheus_client/decorator.py").read_text()
    )


def test_the_man_page_names_every_command_and_option(tree: Path, tmp_path: Path) -> None:
    apt.need("man", "man-db")
    page = tmp_path / "page.8"
    page.write_bytes(gzip.decompress((tree / f"usr/share/man/man8/{NAME}.8.gz").read_bytes()))
    words = set(re.split(r"[\s,]+", read_page(page)))
    assert [word for word in grammar() if word not in words] == []


def test_the_man_page_of_the_policy_names_every_key(tree: Path, tmp_path: Path) -> None:
    apt.need("man", "man-db")
    page = tmp_path / "page.5"
    page.write_bytes(gzip.decompress((tree / f"usr/share/man/man5/{NAME}.5.gz").read_bytes()))
    told = read_page(page)
    types = policy_schema()["$defs"].values()
    keys = {key for type_ in (policy_schema(), *types) for key in type_["properties"]}
    assert [key for key in keys if not re.search(rf"^ +{key}\b", told, re.MULTILINE)] == []
    assert "KEYS OF rules[].when" in told
    assert re.search(
        r"^ +approve immediately\|when-prepared\|manual\|never\n.* Default: never\.", told, re.MULTILINE
    )


def read_page(page: Path) -> str:
    """A man page as a reader sees it; it is without a fault."""
    for columns in ("80", "200"):
        done = subprocess.run(
            ["man", "--warnings", "--local-file", str(page)],
            env={**os.environ, "MANWIDTH": columns, "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
    return done.stdout


def grammar() -> Iterator[str]:
    """Every command that the help lists, and its long options."""
    open_parsers = [build_parser()]
    while open_parsers:
        for action in open_parsers.pop()._actions:
            yield from (option for option in action.option_strings if option.startswith("--"))
            if isinstance(action, argparse._SubParsersAction):
                listed = [choice.dest for choice in action._choices_actions]
                open_parsers += [action.choices[name] for name in listed]
                yield from listed


def test_the_shell_completes_commands_and_options(tree: Path) -> None:
    script = tree / f"usr/share/bash-completion/completions/{NAME}"

    def complete(*words: str) -> list[str]:
        line = f"source {script}; COMP_WORDS=({NAME} {' '.join(map(repr, words))}); COMP_CWORD={len(words)}; "
        line += f'$(complete -p {NAME} | sed "s/.*-F \\([^ ]*\\).*/\\1/"); printf "%s\\n" "${{COMPREPLY[@]}}"'
        return [word.strip() for word in output_of("bash", "-c", line).split()]

    assert complete("che") == ["check"]
    assert "--stop-timeout" in complete("run", "--")


@pytest.mark.parametrize("place", ["zsh/vendor-completions/_{}", "fish/vendor_completions.d/{}.fish"])
def test_other_shells_completions_know_every_command(tree: Path, place: str) -> None:
    text = (tree / "usr/share" / place.format(NAME)).read_text()
    assert [word for word in grammar() if word.removeprefix("--") not in text] == []


# --- judged by others


def test_lintian_reports_nothing(dist: Path) -> None:
    apt.need("lintian", "lintian")
    for machine in MACHINES:
        said = output_of("lintian", "--allow-root", "--fail-on", "none", str(deb_path(dist, machine)))
        assert said == ""


def test_rpmlint_reports_nothing(dist: Path) -> None:
    apt.need("rpmlint", "rpmlint")
    config = CHECKOUT / "packaging/rpm/rpmlint.toml"
    # Debian's program runs with Debian's Python, whatever else is in PATH.
    command = ["/usr/bin/python3", "-I", "/usr/bin/rpmlint", "--config", str(config)]
    said = output_of(*command, *(str(rpm_path(dist, machine)) for machine in MACHINES))
    assert re.search(r"2 packages and 0 specfiles checked; 0 errors, 0 warnings", said), said


def test_shellcheck_reports_nothing() -> None:
    apt.need("shellcheck", "shellcheck")
    scripts = [*(CHECKOUT / "packaging").glob("*.sh"), *(CHECKOUT / "packaging/deb").glob("p*")]
    assert len(scripts) == 9
    assert output_of("shellcheck", "-x", "-P", str(CHECKOUT), *map(str, scripts)) == ""


def test_the_scripts_of_the_rpm_are_clean_shell(dist: Path, tmp_path: Path) -> None:
    apt.need("shellcheck", "shellcheck")
    tags = ("POSTIN", "PREUN", "POSTUN")
    for tag in tags:
        script = tmp_path / f"{tag}.sh"
        script.write_text(
            "#!/bin/sh\n" + output_of("rpm", "-qp", "--qf", f"%{{{tag}}}", str(rpm_path(dist, "x86_64")))
        )
        assert "systemctl" in script.read_text()
        assert output_of("shellcheck", str(script)) == ""


# --- the rpm


@pytest.mark.parametrize("machine", MACHINES)
def test_an_rpm_has_its_metadata_and_dependencies(dist: Path, machine: str) -> None:
    apt.need("rpm", "rpm")
    path = str(rpm_path(dist, machine))
    glibc = {"x86_64": "2.14", "aarch64": "2.17"}[machine]
    needed = {line for line in output_of("rpm", "-qp", "--requires", path).splitlines() if "rpmlib(" not in line}
    assert needed == {
        "/bin/sh",
        "coreutils",
        "findutils",
        "util-linux",
        "systemd >= 245",
        f"libc.so.6(GLIBC_{glibc})(64bit)",
        "libgcc_s.so.1()(64bit)",
        " or ".join(f"python(abi) = {python}" for python in PYTHONS).join("()"),
        *(f"(python{number} if python{number}-base)" for number in ("311", "312", "313", "314")),
    }
    offered = output_of("rpm", "-qp", "--provides", path)
    assert not re.search(r"\.so|python3?\.?\d*dist|python\(abi\)", offered), offered
    facts = output_of("rpm", "-qp", "--qf", "%{NAME} %{VERSION} %{RELEASE} %{ARCH} %{PAYLOADCOMPRESSOR}", path)
    assert facts == f"{NAME} {__version__} 1 {machine} xz"


def test_an_rpm_owns_its_directories_and_leaves_the_state_to_the_agent(dist: Path) -> None:
    apt.need("rpm", "rpm")
    rows = output_of(
        *("rpm", "-qp", "--qf", "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILEFLAGS:fflags} %{FILENAMES}\\n]"),
        str(rpm_path(dist, "x86_64")),
    ).splitlines()
    assert {row.split()[1] for row in rows} == {"root"}
    flags = {row.split()[-1]: row.split()[2:-1] for row in rows}
    modes = {row.split()[-1]: row.split()[0] for row in rows}
    assert flags[f"/var/lib/{NAME}"] == ["g"]  # ghost: known, not packed
    assert modes[f"/var/lib/{NAME}"] == "drwx------"
    assert flags[f"/etc/{NAME}/credentials"] == ["g"]
    assert modes[f"/etc/{NAME}/credentials"] == "drwxr-x---"
    assert flags[f"/etc/{NAME}/policy.yaml"] == ["cn"]  # configuration, noreplace
    assert modes[f"/{HOME}"] == "drwxr-xr-x"
    assert modes[f"/usr/bin/{NAME}"] == "-rwxr-xr-x"


# --- the build


def test_a_build_elsewhere_with_another_umask_gives_the_same_bytes(
    dist: Path, module: Any, tmp_path: Path
) -> None:
    """Place, hour and umask differ; the time of the files is given, since there is no commit."""
    apt.need("rpmbuild", "rpm")
    sources = tmp_path / "sources"
    for name in ("agent", "config", "docs", "packaging", "systemd"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, sources / name, copy_function=shutil.copy, ignore=ignored)
    for name in ("CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, sources / name)
    (sources / ".cache").mkdir()
    (sources / ".cache/packaging").symlink_to(CHECKOUT / ".cache/packaging")
    output = sources / "dist"
    before = os.umask(0o077)
    try:
        for what in ("deb", "rpm"):
            wanted = (what, "--architecture", "aarch64", "--output", str(output))
            done = build(*wanted, sources=sources, SOURCE_DATE_EPOCH=str(module.source_epoch()), TZ="Asia/Tokyo")
            assert done.returncode == 0, done.stderr
    finally:
        os.umask(before)
    built = {path.name: path.read_bytes() for path in output.iterdir()}
    packages = [f"{NAME}-{__version__}-1.aarch64.rpm", f"{NAME}_{__version__}-1_arm64.deb"]
    assert sorted(built) == sorted([*packages, *(f"{name}.cdx.json" for name in packages)])
    assert [name for name, content in built.items() if content != (dist / name).read_bytes()] == []


def test_nothing_is_younger_than_the_commit(debs: Mapping[str, Mapping[str, Entry]], dist: Path) -> None:
    packed = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(deb_path(dist, "x86_64"))], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        times = {member.mtime for member in archive}
    assert len(times) == 1
    (day,) = re.findall(r"\.TH \S+ 8 (\S+)", text_of(debs["x86_64"], f"usr/share/man/man8/{NAME}.8.gz"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)


def test_another_version_can_be_built_without_editing_a_file(tmp_path: Path) -> None:
    options = ("--version", "9.8.7", "--architecture", "amd64", "--output", str(tmp_path))
    done = build("deb", *options, DPKG_DEB_COMPRESSOR_LEVEL="0")
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.deb")
    assert package.name == f"{NAME}_9.8.7-1_amd64.deb"
    entries = entries_of_deb(package)
    assert '\n__version__ = "9.8.7"\n' in text_of(entries, f"{HOME}/scheduled_events_agent/__init__.py")
    assert f"{NAME} 9.8.7" in text_of(entries, f"usr/share/man/man8/{NAME}.8.gz")


def test_an_invalid_version_is_rejected(tmp_path: Path) -> None:
    done = build("deb", "--version", "next", "--output", str(tmp_path))
    expected = "packaging/build.py: --version: expected one such as 0.2.0 or 0.2.0rc1; got 'next'\n"
    assert (done.returncode, done.stderr) == (1, expected)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """packaging/build.py, imported."""
    spec = importlib.util.spec_from_file_location("packages_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "packages_build", module)
    spec.loader.exec_module(module)
    return module


def test_missing_build_tools_are_named_with_their_packages(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(module.BuildError) as caught:
        module.need_programs("rpm")
    assert str(caught.value) == (
        "a rpm is packed with rpmbuild, which is not here; install it "
        "(Debian and Ubuntu: apt-get install rpm; Fedora and RHEL: dnf install rpm-build)"
    )


@pytest.mark.parametrize("lock", ["/var/lib/dpkg/lock", "/var/lib/apt/lists"])
def test_a_build_waits_for_another_apt(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lock: str
) -> None:
    apt_get = tmp_path / "apt-get"
    apt_get.write_text(
        f"#!/bin/sh\necho $* >>{tmp_path}/calls\n"
        f'[ $(wc -l <{tmp_path}/calls) -gt 2 ] || {{ echo "E: Could not get lock {lock}" >&2; exit 100; }}\n'
        f'[ $1 = update ] || {{ echo "#!/bin/sh" >{tmp_path}/rpmbuild; chmod +x {tmp_path}/rpmbuild; }}\n'
    )
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "_LOCK_RETRY_SECONDS", 0.01)
    module.need_programs("rpm")
    update, install = "update -q", "install -qy --no-install-recommends rpm"
    assert (tmp_path / "calls").read_text().splitlines() == [update, update, update, install]


def test_a_tree_without_a_date_and_a_wheel_that_is_not_pinned_are_rejected(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(CHECKOUT / "packaging", sources / "packaging", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "agent",
        "config",
        "docs",
        "systemd",
        "CHANGELOG.md",
        "README.md",
        "SECURITY.md",
        "pyproject.toml",
    ):
        (sources / name).symlink_to(CHECKOUT / name)
    cache = sources / ".cache/packaging"
    pinned = hashlib.sha256((sources / "packaging/requirements.txt").read_bytes()).hexdigest()[:16]
    wheels = cache / f"wheels-x86_64-{pinned}"
    shutil.copytree(CHECKOUT / ".cache/packaging" / wheels.name, wheels)
    (wheel,) = wheels.glob("structlog-*.whl")
    wheel.write_bytes(wheel.read_bytes() + b"\n")
    arguments = ("deb", "--architecture", "amd64", "--output", str(tmp_path))
    done = build(*arguments, sources=sources)
    expected = "this is no git checkout: set SOURCE_DATE_EPOCH (seconds)"
    assert (done.returncode, done.stderr) == (1, f"packaging/build.py: {expected}\n")
    done = build(*arguments, sources=sources, SOURCE_DATE_EPOCH="1")
    expected = f"{wheel}: its hash is not in packaging/requirements.txt; remove it and try again"
    assert (done.returncode, done.stderr) == (1, f"packaging/build.py: {expected}\n")


# --- running what is in it


def pythons() -> dict[str, Path]:
    """The supported Pythons of this machine, by version, pyenv's included."""
    places = [Path("/usr/bin"), Path("/usr/local/bin"), *Path.home().glob(".pyenv/versions/*/bin")]
    found: dict[str, Path] = {}
    for version in PYTHONS:
        for place in places:
            path = place / f"python{version}"
            if path.exists():
                found.setdefault(version, path)
    return found


def start(tree: Path) -> list[str]:
    return ["-I", "-S", "-B", str(tree / HOME / "start.py")]


def test_every_python_at_hand_runs_check_and_the_demo_from_the_tree_alone(tree: Path, tmp_path: Path) -> None:
    at_hand = pythons()
    print("Pythons:", at_hand)
    assert at_hand, "not even the one that runs the tests?"
    demos = {}
    for version, python in at_hand.items():
        arguments = [str(python), *start(tree)]
        told = output_of(*arguments, "check", "--config", str(tree / f"etc/{NAME}/policy.yaml"), cwd=tmp_path)
        assert ": valid\n" in told
        demos[version] = subprocess.Popen(
            [*arguments, "demo"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for version, demo in demos.items():
        told, _ = demo.communicate(timeout=120)
        assert demo.returncode == 0, (version, told[-4000:])
        assert "all as expected" in told
    assert list((tree / HOME).rglob("__pycache__")) == []


def test_the_runbook_that_the_agent_leads_to_is_there(tree: Path) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); import scheduled_events_agent as agent; "
    code += "print(agent.find_runbook('https://agent.invalid/', agent.Path(agent.__file__).parent))"
    shown = output_of(sys.executable, "-I", "-S", "-B", "-c", code, str(tree / HOME / "start.py")).strip()
    page = tree / f"usr/share/{NAME}/runbook.md"
    assert shown == str(page)
    assert page.read_bytes() == (tree / f"usr/share/doc/{NAME}/runbook.md").read_bytes()
    for kind in ATTENTION_KINDS:
        assert f"\n## {kind}\n" in page.read_text("utf-8")


def test_no_metadata_of_a_package_leads_to_a_placeholder(dist: Path) -> None:
    apt.need("rpm", "rpm")
    deb, rpm = deb_path(dist, "x86_64"), rpm_path(dist, "x86_64")
    shown = [output_of("dpkg-deb", "--field", str(deb)), output_of("rpm", "-qpi", "--changelog", str(rpm))]
    assert [text for text in shown if ".invalid" in text] == []


def test_a_fleet_asks_its_table_from_the_tree_alone(tree: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    signature = tmp_path / "sas"
    signature.touch(mode=0o600)
    signature.write_text(SimulatedTable.SAS, encoding="utf-8")
    with SimulatedTable() as table:
        fleet = {"group": "web", "table": table.url, "credential": {"sas_file": str(signature)}, "max_events": 1}
        policy.write_text(json.dumps({"fleet": fleet}), encoding="utf-8")
        for python in pythons().values():
            told = output_of(str(python), *start(tree), "fleet", "status", "--config", str(policy), cwd=tmp_path)
            assert "0 of 1 slots taken" in told


def test_the_modules_of_the_other_processor_run(tmp_path: Path) -> None:
    from container import ContainerUnavailableError, _mirror

    if os.uname().machine != "x86_64":
        pytest.skip("the other processor is emulated on x86_64 only")
    apt.need("debootstrap", "debootstrap")
    apt.need("qemu-aarch64-static", "qemu-user-static")
    done = build("stage", "--architecture", "aarch64", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    root = CHECKOUT / ".cache/packaging/arm64-bookworm"
    if not root.exists():
        if os.geteuid() != 0:
            pytest.skip("unpacking a Debian for arm64 needs root")
        try:
            mirror = _mirror("Debian")
        except ContainerUnavailableError as reason:
            pytest.skip(str(reason))
        making = root.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        options = ("--foreign", "--arch=arm64", "--variant=minbase", "--include=python3")
        subprocess.run(
            ["debootstrap", *options, "bookworm", str(making), mirror],
            check=True,
            capture_output=True,
            timeout=600,
        )
        for package in (making / "var/cache/apt/archives").glob("*.deb"):
            output_of("dpkg-deb", "--extract", str(package), str(making))
            package.unlink()
        making.rename(root)
    python = str(root / "usr/bin/python3.11")
    emulated = ["qemu-aarch64-static", "-L", str(root), python, *start(tmp_path / "aarch64")]
    assert output_of(*emulated, "--version") == f"{NAME} {__version__}\n"
    # This Python decodes with msgspec, and reads YAML with libyaml.
    told = output_of(*emulated, "check", "--config", str(tmp_path / f"aarch64/etc/{NAME}/policy.yaml"))
    assert ": valid\n" in told


# --- the launcher


class Host:
    """The launcher and the tree it starts, with directories of the test's own for /usr/bin and /usr/local/bin."""

    def __init__(self, tree: Path, root: Path) -> None:
        self.home = root / "home"
        shutil.copytree(tree / HOME, self.home)
        self.bin, self.local = root / "bin", root / "local"
        self.bin.mkdir()
        self.local.mkdir()
        self.launcher = root / NAME
        shutil.copy(tree / "usr/bin" / NAME, self.launcher)
        for script in (self.launcher, self.home / "interpreter.sh", self.home / "bytecode.sh"):
            text = script.read_text()
            assert "/usr/" in text
            # Its messages are to be the real ones.
            text = text.replace(f"/{HOME}", str(self.home))
            text = text.replace("in /usr/bin /usr/local/bin;", f"in {self.bin} {self.local};")
            script.write_text(text)

    def add(self, name: str, version: str, place: Path | None = None) -> None:
        """An interpreter that says it is of this version, tells how it was called, and does nothing else."""
        script = (place or self.bin) / name
        script.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *sys.implementation*) echo "{version}" ;; *) echo "{version} $0 $*" ;; esac\n'
        )
        script.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(self.launcher), *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def machine(tree: Path, tmp_path: Path) -> Host:
    return Host(tree, tmp_path)


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3": "3.11"}, "python3"),
        ({"python3": "3.14", "python3.11": "3.11"}, "python3"),
        ({"python3": "3.9", "python3.11": "3.11"}, "python3.11"),  # RHEL 9
        ({"python3": "3.6", "python3.11": "3.11", "python3.12": "3.12"}, "python3.12"),  # SLES 15
        ({"python3.13": "3.13"}, "python3.13"),
        ({"python3": "3.15", "python3.14": "3.14"}, "python3.14"),  # newer than the modules there are
        ({"python3": "3.13t", "python3.12": "3.12"}, "python3.12"),  # free-threaded: another ABI
        ({"python3": "pypy 3.11", "python3.11": "3.11"}, "python3.11"),
    ],
)
def test_the_launcher_uses_the_first_supported_python(machine: Host, there: dict[str, str], taken: str) -> None:
    for name, version in there.items():
        machine.add(name, version)
    done = machine.run("status", "--json", "an argument")
    options = f"-I -S -B {machine.home}/start.py status --json an argument"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{there[taken]} {machine.bin}/{taken} {options}\n"


def test_the_launcher_reads_the_version_from_the_target_of_python3(machine: Host) -> None:
    machine.add("python3.12", "3.12")
    (machine.bin / "python3").symlink_to("python3.12")
    done = machine.run()
    assert done.stdout == f"3.12 {machine.bin}/python3 -I -S -B {machine.home}/start.py\n"


def test_the_launcher_looks_in_usr_local_too_but_not_in_the_users_path(machine: Host, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    machine.add("python3", "3.11", elsewhere)
    path = f"{elsewhere}:{os.environ['PATH']}"
    assert machine.run(PATH=path).returncode == 78
    machine.add("python3", "3.12", machine.local)
    assert machine.run(PATH=path).stdout.startswith(f"3.12 {machine.local}/python3 ")


def test_the_launcher_prefers_the_distributions_python_to_a_newer_local_one(
    machine: Host,
) -> None:
    # The package depends on the one in /usr/bin; the other may lack sqlite3, or be the work of others than root.
    machine.add("python3", "3.9")
    machine.add("python3.11", "3.11")
    machine.add("python3", "3.13", machine.local)
    machine.add("python3.14", "3.14", machine.local)
    assert machine.run().stdout.startswith(f"3.11 {machine.bin}/python3.11 ")


def test_without_a_usable_python_the_launcher_reports_its_findings_and_a_hint(machine: Host) -> None:
    message = (
        "scheduled-events-agent: needs Python 3.11, 3.12, 3.13 or 3.14 in /usr/bin or /usr/local/bin; found {}. "
        "What to do on this system: /usr/share/doc/scheduled-events-agent/install-linux.md\n"
    )
    done = machine.run("run")
    assert (done.returncode, done.stdout, done.stderr) == (78, "", message.format("none"))
    machine.add("python3", "3.9")
    broken = machine.local / "python3"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    done = machine.run("run")
    found = f"{machine.bin}/python3 (3.9), {broken} (does not start)"
    assert (done.returncode, done.stdout, done.stderr) == (78, "", message.format(found))


def real_python(machine: Host) -> str:
    """Put a real interpreter into the machine; returns its version."""
    version, path = next(iter(pythons().items()))
    (machine.bin / f"python{version}").write_text(f'#!/bin/sh\nexec {path} "$@"\n')
    (machine.bin / f"python{version}").chmod(0o755)
    (machine.bin / "python3").symlink_to(f"python{version}")
    return version


def test_the_environment_cannot_inject_modules(machine: Host, tmp_path: Path) -> None:
    real_python(machine)
    for name in ("scheduled_events_agent", "msgspec", "yaml", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('slipped in')\n")
    done = machine.run(
        "check", PYTHONPATH=str(tmp_path), PYTHONSTARTUP=str(tmp_path / "scheduled_events_agent.py")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid" in done.stdout


def test_running_it_writes_nothing_beside_the_modules(machine: Host) -> None:
    real_python(machine)
    assert machine.run("check").returncode == 0
    assert list(machine.home.rglob("__pycache__")) == []


def test_bytecode_is_compiled_for_the_running_python_and_removed_completely(machine: Host) -> None:
    before = sorted(machine.home.rglob("*"))
    version = real_python(machine)
    tag = f"cpython-{version.replace('.', '')}"
    output_of(str(machine.home / "bytecode.sh"), "compile")
    compiled = list(machine.home.rglob("*.pyc"))
    assert {path.name.split(".")[1] for path in compiled} == {tag}
    sources = [
        path.relative_to(machine.home)
        for path in machine.home.rglob("*.py")
        if not path.is_relative_to(machine.home / "start.py")
        and (path.relative_to(machine.home).parts[0] in (*COMPILED, f"cp{tag[8:]}"))
    ]
    assert {
        f"{path.parent.parent.relative_to(machine.home)}/{path.name.split('.')[0]}.py" for path in compiled
    } == {str(path) for path in sources}
    assert machine.run("check").returncode == 0
    output_of(str(machine.home / "bytecode.sh"), "remove")
    assert sorted(machine.home.rglob("*")) == before

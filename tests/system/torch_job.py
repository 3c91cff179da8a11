"""A training job under a real torchrun: PyTorch on CPU, of Debian 13's packages, two workers on loopback.

The package index has PyTorch with CUDA only, several times as big.
"""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import apt
from harness import CHECKOUT
from training_job import Job, a_job

TORCH = CHECKOUT / ".cache/torch-trixie"
WORKER = Path(__file__).with_name("torch_worker.py")
CHECKPOINT = "step-*/.metadata"
# Debian 13's Python and libraries, whatever this machine has of its own.
_PYTHON = """#!/bin/sh
exec env -u PYTHONDONTWRITEBYTECODE PYTHONHOME={root}/usr OMP_NUM_THREADS=1 USE_LIBUV=0 \\
    {root}/usr/lib64/ld-linux-x86-64.so.2 --library-path {libraries} {root}/usr/bin/python3.13 "$@"
"""


def python(directory: Path) -> Path:
    """A Python that has torch; about 200 MB are fetched if they are not here yet."""
    apt.unpack(TORCH, "python3-torch", "python3", suite="trixie")
    folder = TORCH / "usr/lib/x86_64-linux-gnu"
    libraries = (folder.parent, folder, folder / "blas", folder / "lapack", folder / "openmpi/lib")
    program = directory / "python"
    program.write_text(_PYTHON.format(root=TORCH, libraries=":".join(map(str, libraries))), encoding="utf-8")
    program.chmod(0o755)
    return program


def version() -> str:
    """The version of the PyTorch that ``python`` has."""
    text = (TORCH / "usr/lib/python3/dist-packages/torch/version.py").read_text(encoding="utf-8")
    found = re.search(r"__version__ = '(\d+\.\d+\.\d+)", text)
    return found[1] if found else "of an unknown version"


@contextlib.contextmanager
def torch_job(directory: Path) -> Iterator[Job]:
    """The job, which writes no checkpoint of its own accord."""
    program = str(python(directory))
    options = ("--standalone", "--nproc-per-node=2", "--no-python")
    workers = (program, str(WORKER), str(directory / "disk"))
    run = (program, str(WORKER), "launch", *options, *workers)
    with a_job(directory, run=run, checkpoint=CHECKPOINT) as job:
        yield job

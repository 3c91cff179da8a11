"""The policy that was accepted last, in a file of its own: for a start whose policy file has errors.

Invariants: the file is whole or not there, and only this account can read it. What another account could have
changed is never loaded.
"""

import json
import os
from datetime import datetime
from pathlib import Path

import msgspec

from scheduled_events_agent import host

FILE_NAME = "accepted-policy.json"
_MAX_BYTES = 8 * 1024 * 1024  # the policy file has one MiB at most, and an escape in JSON takes six bytes


class RejectedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state of the policy file that a running agent has rejected."""

    hash: str
    """The hash of its content; "" if it could not be read."""
    reason: str


class AcceptedPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that an agent has accepted. Stored as it is."""

    path: str
    """The path of the policy file."""
    state_dir: str
    accepted_at: datetime
    boot_id: str
    """The boot in which an agent has accepted it, or has started with it."""
    hash: str
    text: str
    rejected: RejectedFile | None = None
    """The policy file since then, if it was rejected."""


def save_accepted(directory: Path, accepted: AcceptedPolicy) -> None:
    """Write it into the state directory. Raises OSError; what was there before is there still."""
    path = directory / FILE_NAME
    new = directory / f"{FILE_NAME}.new"
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            # The json module is used: a path may hold what is not UTF-8.
            file.write(json.dumps(msgspec.to_builtins(accepted)).encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    host.flush_directory(directory)


def remove_accepted(directory: Path) -> None:
    """Remove it, if it is there. Raises OSError."""
    (directory / FILE_NAME).unlink(missing_ok=True)


def load_accepted(directory: Path) -> AcceptedPolicy | None:
    """The accepted policy in the state directory; None if there is none. Raises HostError if it cannot be used."""
    path = directory / FILE_NAME
    if risk := host.find_write_risk(path):
        raise host.HostError(risk, kind="file")
    try:
        return msgspec.convert(json.loads(host.read_small_file(path, _MAX_BYTES)), AcceptedPolicy)
    except host.HostError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise host.HostError(f"{path}: is damaged, or of another version: {error}", kind="file") from None

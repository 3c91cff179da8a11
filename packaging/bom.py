"""What a package contains, as a bill of materials in CycloneDX's JSON: ``PACKAGE.cdx.json`` beside the package.

Pure but for the hash of the package. The format is that of version 1.6, https://cyclonedx.org/docs/1.6/json/.
"""  # noqa: INP001 - a script's module

import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Serial numbers are derived from this and the package's hash: the same package has the same one.
_NAMESPACE = uuid.UUID("8f0d8f2e-7f0a-5a55-9f0e-0d6f3c2b7a11")


@dataclass(frozen=True)
class Part:
    """Something that a package contains as others have made it."""

    name: str
    version: str
    """"" if what contains it does not say."""
    purl: str
    license: str
    """An expression of SPDX."""
    sha256: str = ""
    """Of the file that it was taken from; "" if it is a part of another part."""


def write_bom(package: Path, product: Part, epoch: int, parts: Iterable[Part]) -> Path:
    """Write the bill of ``package`` beside it; returns its path.

    ``product``: what the package is, without the hash. ``epoch``: the time that the bill names, in seconds.
    """
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    itself = replace(product, purl=f"{product.purl}?file_name={package.name}", sha256=digest)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": f"{datetime.fromtimestamp(epoch, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "component": _component(itself, "application"),
        },
        "components": [_component(part, "library") for part in sorted(parts, key=lambda part: part.purl)],
    }
    target = package.with_name(f"{package.name}.cdx.json")
    target.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    return target


def _component(part: Part, kind: str) -> dict[str, Any]:
    component: dict[str, Any] = {"type": kind, "bom-ref": part.purl, "name": part.name, "purl": part.purl}
    if part.version:
        component["version"] = part.version
    if part.sha256:
        component["hashes"] = [{"alg": "SHA-256", "content": part.sha256}]
    component["licenses"] = [{"expression": part.license}]
    return component

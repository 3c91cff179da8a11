"""The benchmarks run and print every row; what the figures are is nobody's business here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = [
    ("CPU per idle poll, whole process", "ms", 0.5),
    ("resident memory after the first event", "MiB", None),
    ("resident memory 300 polls later", "MiB", 40.0),
    ("growth between the two", "MiB", 1.0),
    ("exec to first poll, median", "s", 0.6),
    ("served to start of the first hook, p50", "ms", None),
    ("served to start of the first hook, p99", "ms", 25.0),
    ("served to arrival of the approval, p50", "ms", None),
    ("served to arrival of the approval, p99", "ms", 25.0),
    ("2.7 MiB, 1,000 events x 100 names: parsed (bare: json.loads)", "ms", 50.0),
    ("the same: parsed, compared, decided, committed", "ms", None),
    ("the same: served to the approval of all", "ms", None),
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CPU time and memory are read from Linux")
def test_a_quick_run_prints_every_row() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["figure"], row["unit"], row["target"]) for row in result["rows"]] == ROWS
    assert all(row["agent"] >= 0 for row in result["rows"] if "growth" not in row["figure"])
    assert result["command"].endswith("-m benchmarks --quick --json")
    assert f"Python {sys.version.split()[0]}" in result["machine"]

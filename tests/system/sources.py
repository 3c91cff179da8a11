"""The sources in a clone of their own, as a build needs them: committed, whatever the checkout is like."""

import shutil
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=a test", "-c", "user.email=test@example.com"]
    done = subprocess.run(["git", *options, "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout


def clone(target: Path) -> Path:
    """The sources as they are now, committed, in a clone. What was downloaded already is not downloaded again."""
    git(CHECKOUT, "clone", "--quiet", "--no-hardlinks", "--no-tags", str(CHECKOUT), str(target))
    listed = git(CHECKOUT, "ls-files", "--cached", "--others", "--exclude-standard", "--deleted").split("\n")
    for name in filter(None, listed):
        source, copy = CHECKOUT / name, target / name
        copy.unlink(missing_ok=True)
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    git(target, "add", "--all")
    git(target, "commit", "--quiet", "--allow-empty", "--date=2026-01-02T03:04:05Z", "--message=As it is now")
    return _with_cache(target)


def last_release(target: Path) -> Path:
    """The sources of the newest tag before this commit, in a clone; if there is none, those of the last commit."""
    git(CHECKOUT, "clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(target))
    here = git(CHECKOUT, "tag", "--points-at", "HEAD").split()
    tags = git(CHECKOUT, "tag", "--list", "v*", "--sort=-version:refname").split()
    earlier = [tag for tag in tags if tag not in here]
    git(target, "checkout", "--quiet", "--detach", earlier[0] if earlier else "HEAD")
    return _with_cache(target)


def _with_cache(target: Path) -> Path:
    (target / ".cache").mkdir()
    (target / ".cache/packaging").symlink_to(CHECKOUT / ".cache/packaging")
    return target

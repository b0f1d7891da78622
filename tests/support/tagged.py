"""Hold the tag of a release against the places that say which version this is: `make tagged`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Where a version stands, and how.
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}


def versions() -> dict[str, str]:
    """Return the version that each place says."""
    found = {}
    for name, pattern in PLACES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        (found[name],) = re.findall(pattern, text, re.MULTILINE)
    return found


def faults(tag: str) -> list[str]:
    """Return what is not as the tag says."""
    wrong = [f"{name} says {found}" for name, found in versions().items() if f"v{found}" != tag]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"\n## [{tag.removeprefix('v')}] - " not in changes:
        wrong.append(f"CHANGELOG.md has no section of {tag.removeprefix('v')} with a date")
    return wrong


if __name__ == "__main__":
    found = faults(sys.argv[1])
    sys.exit(f"{sys.argv[1]}: {'; '.join(found)}" if found else 0)

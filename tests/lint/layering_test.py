#!/usr/bin/env python3
"""Fails on an include that runs against the dependency direction, and on a clock that can be set back.

include <- codecs <- kernels <- integration,  include <- gate <- integration,  examples use include only.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALLOWED = {
    "include": {"gradgate"},
    "codecs": {"gradgate", "codecs"},
    "kernels": {"gradgate", "codecs", "kernels"},
    "gate": {"gradgate", "gate"},
    "integration": {"gradgate", "codecs", "kernels", "gate", "integration", "examples"},
    "examples": {"gradgate", "examples"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
# Durations are taken from steady clocks only: another one may go backwards while something is timed.
WALL_CLOCK = re.compile(r"\b(?:system_clock|high_resolution_clock|gettimeofday|CLOCK_REALTIME|std::time\(|time\.time\()")
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".c", ".def"}


def top_folder(include: str) -> str:
    return include.split("/", 1)[0]


def violations(folder: str, text: str) -> list[str]:
    """Includes in `text`, a file of `folder`, that the direction forbids."""
    return [inc for inc in INCLUDE.findall(text) if top_folder(inc) not in ALLOWED[folder]]


def clocks() -> list[str]:
    """Files of the library and the program that read a clock which may be set."""
    found = []
    for folder in [*ALLOWED, "tools"]:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in SUFFIXES | {".py"}:
                continue
            found += [f"{path.relative_to(ROOT)}: {name}" for name in WALL_CLOCK.findall(path.read_text(encoding="utf-8"))]
    return found


def main() -> int:
    bad = clocks()
    files = 0
    for folder in ALLOWED:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            files += 1
            text = path.read_text(encoding="utf-8")
            relative = path.relative_to(ROOT)
            bad += [f"{relative}: includes {inc}" for inc in violations(folder, text)]
            if folder == "integration" and "cli" not in relative.parts:
                bad += [f"{relative}: includes {i}" for i in INCLUDE.findall(text) if top_folder(i) == "examples"]
    # The check itself must be able to fail.
    assert violations("gate", '#include "codecs/int8.h"\n') == ["codecs/int8.h"]
    assert violations("codecs", '#include "gradgate/types.h"\n') == []
    assert WALL_CLOCK.findall("std::chrono::system_clock::now()") and not WALL_CLOCK.findall("steady_clock::now()")
    if files < 20:
        bad.append(f"only {files} files found under {ROOT}")
    print("\n".join(bad) if bad else f"{files} files, every include follows the dependency direction")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

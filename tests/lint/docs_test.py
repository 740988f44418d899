#!/usr/bin/env python3
"""Runs the commands shown in README.md and docs/*.md.

A fenced block that starts with ```sh test is run by bash in a scratch folder, with the built program on PATH; a non-zero exit fails the test.
Commands that build, install or need root are not run here, but what they name must exist: scripts, presets, targets, labels of tests. So must every
path of this repository in backticks, and the file that a relative link leads to, in these pages and the other ones for people.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```sh test\n(.*?)^```", re.M | re.S)
OTHER_PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "examples/digits/README.md"]
PATH = re.compile(r"(?<![\w./-])((?:cmake|codecs|docs|examples|gate|include|integration|kernels|tests|tools)/[\w./-]*\w)")
OPTION = re.compile(r"(--preset|--target|ctest [^`\n]*?-L) +\"?([\w|-]+)")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def names(text: str) -> list[str]:
    """What pages name that is not there: paths in code, presets, targets and labels."""
    presets = {preset["name"] for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    lists = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*/**/CMakeLists.txt") if "build" not in path.relative_to(ROOT).parts)
    labels = set(" ".join(re.findall(r"LABELS ([a-z ]+)", lists)).split())
    missing = []
    code = re.findall(r"`([^`\n]+)`", text) + [line for line in text.splitlines() if line.startswith("    ")]
    for piece in code:
        # The name may go on after a path: a placeholder, several endings.
        missing += [path for path in PATH.findall(piece) if not (ROOT / path).exists() and not list(ROOT.glob(path + "*"))]
        for option, value in OPTION.findall(piece):
            known = presets if option == "--preset" else labels if option.startswith("ctest") else None
            for name in value.split("|"):
                found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", lists) if known is None else name in known
                missing += [] if found else [f"{option.split()[-1]} {name}"]
    return missing


def main(program: str) -> int:
    environment = dict(os.environ, PATH=f"{pathlib.Path(program).resolve().parent}:{os.environ['PATH']}", GRADGATE_ROOT=str(ROOT))
    failures = []
    blocks = 0
    assert names("`tools/nothing`, `cmake --preset none`, `ctest -L none`") == ["tools/nothing", "--preset none", "-L none"]
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / page for page in OTHER_PAGES)]:
        text = page.read_text(encoding="utf-8")
        failures += [f"{page.name}: {missing} does not exist" for missing in names(text)]
        for link in LINK.findall(text):
            if not (page.parent / link).exists():
                failures.append(f"{page.name}: link to {link} leads nowhere")
        for block in BLOCK.findall(text):
            blocks += 1
            with tempfile.TemporaryDirectory() as scratch:
                run = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=scratch, env=environment, timeout=240,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if run.returncode != 0:
                failures.append(f"{page.name}: exit {run.returncode} from\n{block}\n{run.stdout}")
    if blocks == 0:
        failures.append("no block marked 'sh test' found")
    print("\n".join(failures) if failures else f"{blocks} blocks ran")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

#!/usr/bin/env python3
"""Runs the commands shown in README.md and docs/*.md.

A fenced block that starts with ```sh test is run by bash in a scratch folder, with the built program on PATH; a non-zero exit fails the test.
Also checks that every relative link in these files leads to a file.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```sh test\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def main(program: str) -> int:
    environment = dict(os.environ, PATH=f"{pathlib.Path(program).resolve().parent}:{os.environ['PATH']}", GRADGATE_ROOT=str(ROOT))
    failures = []
    blocks = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
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

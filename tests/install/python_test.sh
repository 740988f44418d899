#!/usr/bin/env bash
# `pip install .` from nothing: compiles the library, packs it, and the installed package loads it. Exit 77: no pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv" 2>/dev/null && [ -x "$scratch/venv/bin/pip" ] || { echo "python3 -m venv does not work: skipped"; exit 77; }
"$scratch/venv/bin/pip" install -q --disable-pip-version-check --no-index .
cd "$scratch"
unset GRADGATE_LIBRARY PYTHONPATH
"$scratch/venv/bin/python" -c '
import gradgate, sys
print("installed", gradgate.native_version(), gradgate.library_path())
sys.exit(0 if str(gradgate.library_path()).startswith(sys.prefix) else 1)'

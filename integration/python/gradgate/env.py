"""`python -m gradgate env`: a block of facts for bug reports."""

import importlib.metadata
import os
import platform
import sys

from . import __version__
from ._native import Error, library_path, native_version

VARIABLES = ("GRADGATE_LIBRARY", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE", "OMP_NUM_THREADS")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def facts() -> list[tuple[str, str]]:
    """(name, value) pairs. Imports neither torch nor anything that touches a device."""
    try:
        library = f"{native_version()} at {library_path()}"
    except Error as error:
        library = str(error)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [
        ("gradgate", __version__),
        ("library", library),
        ("python", sys.version.split()[0]),
        ("torch", _version_of("torch")),
        ("numpy", _version_of("numpy")),
        ("system", platform.platform()),
        ("processor", f"{_processor()}, {affinity} of {os.cpu_count()} cores usable"),
    ]
    return found + [(name, os.environ[name]) for name in VARIABLES if name in os.environ]


def text() -> str:
    """The block, one `name: value` a line."""
    return "\n".join(f"{name}: {value}" for name, value in facts())

"""Builds the wheel for `pip install .`: CMake makes the shared library, zipfile packs it with the package.

A PEP 517 backend without dependencies, so that a build needs no network: g++, CMake and make or ninja are enough. The
wheel fits any Python 3, since the package goes through ctypes.
"""

import base64
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "integration" / "python" / "gradgate"
NAME = "gradgate"


def _version() -> str:
    return re.search(r'"(.+)"', (PACKAGE / "_version.py").read_text())[1]


def _metadata() -> str:
    return (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {_version()}\n"
        "Summary: Compress gradients only when it pays, and prove that it paid\nLicense: Apache-2.0\n"
        "Requires-Python: >=3.10\nProvides-Extra: torch\nRequires-Dist: torch>=2.1; extra == 'torch'\n"
    )


def _wheel() -> str:
    return f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {_tag()}\n"


def _tag() -> str:
    return f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def _stop(text: str):
    print(f"gradgate: {text}", file=sys.stderr)
    raise SystemExit(1)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        print(done.stdout[-4000:], file=sys.stderr)
        _stop(f"building the library failed: {' '.join(command)}")


def _library(folder: pathlib.Path, config_settings) -> pathlib.Path:
    """The library of `--config-settings library=FILE` (built before, by CMake), or a new one."""
    given = (config_settings or {}).get("library")
    if given is None:
        return _build_library(folder)
    if not pathlib.Path(given).is_file():
        _stop(f"--config-settings library={given}: no such file")
    return pathlib.Path(given)


def _build_library(folder: pathlib.Path) -> pathlib.Path:
    for tool, package in (("cmake", "cmake >= 3.25"), (os.environ.get("CXX", "g++"), "a C++20 compiler")):
        if shutil.which(tool) is None:
            _stop(f"{package} is needed to build the library ({tool} not found)")
    options = ["-DCMAKE_BUILD_TYPE=Release"]
    options += [f"-DGRADGATE_BUILD_{part}=OFF" for part in ("TESTS", "PROGRAM", "EXAMPLES")]
    options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    _run(["cmake", "-S", str(ROOT), "-B", str(folder), *options])
    _run(["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1), "--target", "gradgate_python"])
    return folder / "python" / "libgradgate.so"


def get_requires_for_build_wheel(config_settings=None):
    return []


def get_requires_for_build_sdist(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = pathlib.Path(metadata_directory) / f"{NAME}-{_version()}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(_metadata())
    (folder / "WHEEL").write_text(_wheel())
    return folder.name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = f"{NAME}-{_version()}.dist-info"
    name = f"{NAME}-{_version()}-{_tag()}.whl"
    with tempfile.TemporaryDirectory() as scratch:
        library = _library(pathlib.Path(scratch), config_settings)
        files = {f"{NAME}/libgradgate.so": library.read_bytes()}
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in (".py", ".typed", ".html"):
                files[f"{NAME}/{path.relative_to(PACKAGE).as_posix()}"] = path.read_bytes()
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = _wheel().encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = []
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")
            wheel.writestr(path, data)
        record.append(f"{info}/RECORD,,")
        wheel.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return name


def build_sdist(sdist_directory, config_settings=None):
    name = f"{NAME}-{_version()}"
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode != 0:
        _stop("a source archive is made from a git checkout")
    with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz") as archive:
        for path in listed.stdout.split("\0"):
            if path and (ROOT / path).is_file():
                archive.add(ROOT / path, f"{name}/{path}")
    return f"{name}.tar.gz"

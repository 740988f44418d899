"""The package as it is installed: a wheel from `pip install .`, quiet imports, the errors of a wrong library."""

import inspect
import os
import pathlib
import subprocess
import sys

import gradgate
import gradgate.torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def python(code: str, **environment) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


SHIM = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
/* Stands before any CUDA library: each call leaves its name in the file COUNT. */
static int called(const char* name) {
  const int file = open(getenv("COUNT"), O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (dprintf(file, "%s\\n", name) < 0) abort();
  close(file);
  return 100; /* no device */
}
#define SHIM(name) int name() { return called(#name); }
SHIM(cuInit) SHIM(cuDeviceGetCount) SHIM(cuDeviceGet) SHIM(cuCtxCreate_v2) SHIM(cuDevicePrimaryCtxRetain)
SHIM(cuGetProcAddress_v2)
SHIM(cudaGetDeviceCount) SHIM(cudaGetDevice) SHIM(cudaSetDevice) SHIM(cudaMalloc) SHIM(cudaFree) SHIM(cudaStreamCreate)
SHIM(cudaGetDeviceProperties_v2) SHIM(cudaDeviceGetAttribute) SHIM(cudaRuntimeGetVersion) SHIM(cudaDriverGetVersion)
"""

EVERYTHING = """
import os, torch, gradgate, gradgate.torch
from gradgate._session import between
assert between(2, "on", ["int8"]) == ["int8@all_gather"]  # the native library is loaded and encodes
assert not torch.cuda.is_initialized()
open_files = open("/proc/self/maps").read()
assert not any(name in open_files for name in ("libcuda.so", "libcudart", "libnccl", "libgradgate_cuda")), open_files
"""


# BLD-2.
def test_importing_calls_no_cuda_function(tmp_path):
    source, shim, count = tmp_path / "shim.c", tmp_path / "shim.so", tmp_path / "count"
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, source], check=True)
    environment = {"LD_PRELOAD": str(shim), "COUNT": str(count)}
    done = python(EVERYTHING, **environment)
    assert done.returncode == 0 and not count.exists(), done.stderr + (count.read_text() if count.exists() else "")
    done = python("import ctypes; ctypes.CDLL(None).cudaGetDeviceCount(None)", **environment)
    assert done.returncode == 0 and count.read_text() == "cudaGetDeviceCount\n"  # the shim counts


# BLD-2: launchers fork after importing; the child may use the library, and the device where there is one.
def test_a_child_forked_after_the_import_works():
    code = (
        EVERYTHING
        + """
child = os.fork()
if child == 0:
    assert between(2, "on", ["bf16"]) == ["bf16@all_gather"]
    if torch.cuda.is_available():
        assert torch.ones(2, device="cuda").sum().item() == 2
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_importing_is_quiet():
    code = """
import random, sys, threading
before = random.getstate()
import gradgate
assert "torch" not in sys.modules
import torch
state = torch.get_rng_state()
import gradgate.torch
assert torch.equal(torch.get_rng_state(), state) and random.getstate() == before
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
"""
    done = python(code)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_the_public_interface_has_docstrings_and_type_hints():
    """Of gradgate and gradgate.torch: what __all__ names, and the public methods of its classes."""
    missing = []
    for module in (gradgate, gradgate.torch):
        for name in module.__all__:
            thing = getattr(module, name)
            parts = [(f"{module.__name__}.{name}", thing)]
            if inspect.isclass(thing):
                parts += [(f"{name}.{k}", v) for k, v in vars(thing).items() if k == "__init__" or k[0] != "_"]
            for where, part in parts:
                function = part.fget if isinstance(part, property) else part
                if not callable(function):
                    continue
                if not function.__name__.startswith("__") and not inspect.getdoc(function):
                    missing.append(f"{where}: docstring")
                if inspect.isfunction(function):
                    signature = inspect.signature(function)
                    named = [p for p in signature.parameters.values() if p.name != "self" and p.kind != p.VAR_KEYWORD]
                    missing += [f"{where}: {p.name}" for p in named if p.annotation is p.empty]
                    if function.__name__ != "__init__" and signature.return_annotation is signature.empty:
                        missing.append(f"{where}: result")
    assert missing == []
    assert (pathlib.Path(gradgate.__file__).parent / "py.typed").exists()


# BLD-6, with the next but one.
def test_a_library_of_another_version_is_named_with_both_versions(tmp_path):
    source = tmp_path / "other.c"
    lines = (ROOT / "integration/python/gradgate/_native.py").read_text().split("\n")
    functions = [line.split('"')[1] for line in lines if line.startswith('    "gg_')]
    source.write_text(
        'const char* gg_version(void) { return "9.8.7"; }\n'
        + "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions if name != "gg_version")
    )
    library = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = python("import gradgate; gradgate.native_version()", GRADGATE_LIBRARY=str(library))
    last = done.stderr.strip().split("\n")[-1]
    assert done.returncode != 0 and "0.1.0" in last and "9.8.7" in last, done.stderr


def test_a_missing_library_is_one_line():
    done = python("import gradgate; gradgate.native_version()", GRADGATE_LIBRARY="/nowhere/lib.so")
    assert done.returncode != 0 and "/nowhere/lib.so" in done.stderr.strip().split("\n")[-1]


def test_an_old_torch_is_named():
    code = "import torch; torch.__version__ = '1.13.1'; import gradgate.torch"
    last = python(code).stderr.strip().split("\n")[-1]
    assert "2.1" in last and "1.13.1" in last


# BLD-1.
def test_the_library_needs_no_driver_and_finds_everything():
    listed = subprocess.run(["ldd", os.environ["GRADGATE_LIBRARY"]], capture_output=True, text=True, check=True).stdout
    assert "not found" not in listed and "cuda" not in listed and "nccl" not in listed and "torch" not in listed


def test_pip_install_ships_the_library(tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target)]
    install += ["--config-settings", f"library={os.environ['GRADGATE_LIBRARY']}", "."]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    env = {key: value for key, value in os.environ.items() if key not in ("GRADGATE_LIBRARY", "PYTHONPATH")}
    env["PYTHONPATH"] = str(target)
    code = "import gradgate; print(gradgate.native_version(), gradgate.library_path())"
    seen = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert seen.stdout.split() == ["0.1.0", str(target / "gradgate" / "libgradgate.so")], seen.stderr


def test_pip_install_without_a_compiler_is_one_line(tmp_path):
    env = {**os.environ, "CXX": "no-such-compiler"}
    install = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "-q", "-w", str(tmp_path), "."]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode != 0 and "gradgate: a C++20 compiler is needed" in done.stderr + done.stdout

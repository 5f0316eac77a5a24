"""Builds the wheel of the sources, and makes an environment that holds it and what its metadata names."""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ("bmburst", "bmburst_ops", "model_center_ext")
NEEDED = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build the wheel with the setuptools that is installed, and return its path.

    The sources are copied: setuptools keeps what it builds beside them, and would take from there what is gone since.
    """
    sources = folder / "sources"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED:
        shutil.copy(ROOT / name, sources / name)
    # Folders that are no part of the package, which a rule that is too wide would take in.
    for name in ("tests", "benchmarks"):
        (sources / name).mkdir()
        (sources / name / "__init__.py").touch()
    words = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", str(sources), "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, cwd=folder)
    (wheel,) = folder.glob("bmburst-*.whl")
    return wheel


class Environment:
    """A new virtual environment with linked copies of packages of this one, and of these alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "env", symlinks=True)
        self.python = folder / "env" / "bin" / "python"
        self.site = next((folder / "env" / "lib").glob("python*")) / "site-packages"

    def link(self, names: Iterable[str]) -> None:
        """Link distributions by name, and what they need.

        What is not installed here is left out: pip then refuses the wheel, where it needs it.
        """
        waiting, done = list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if _plain(name) in done:
                continue
            done.add(_plain(name))
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            self._link(distribution)
            waiting += [wanted.name for wanted in requirements(distribution.requires or ())]

    def _link(self, distribution: metadata.Distribution) -> None:
        source = Path(str(distribution.locate_file("")))
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = self.site / top
            if not target.exists():
                target.symlink_to(source / top)

    def install(self, wheel: Path) -> None:
        """Install a wheel as pip does without a network: it fails where a requirement is not there."""
        words = ["--python", str(self.python), "install", "--quiet", "--no-index", str(wheel)]
        self._run([sys.executable, "-m", "pip", *words])

    def run(self, *words: object, timeout: float = 300) -> str:
        """Run a program of the environment in a folder that has nothing; return its output and errors together."""
        (self.folder / "home").mkdir(exist_ok=True)
        return self._run([str(self.python.parent / str(words[0])), *map(str, words[1:])], timeout)

    def _run(self, command: list[str], timeout: float = 300) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder / "home" if (self.folder / "home").exists() else self.folder,
            env=clean(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(self.folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def requirements(texts: Iterable[str]) -> list[Requirement]:
    """Return the requirements that hold here and belong to no extra."""
    read = map(Requirement, texts)
    return [wanted for wanted in read if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what would lead Python to this clone, or tell a process that it is a rank."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"}
    return {name: value for name, value in environ.items() if name not in dropped}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

"""The Dockerfile does what docs/install.md and the programs themselves say, on files that are there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from bmburst.setup.build_bmtrain import Machine, list_missing
from bmburst.setup.doctor import FLASH_ATTENTION_4, bmtrain
from tests.docs.blocks import DOCS
from tests.docs.commands import exists
from tests.packaging.wheel import NEEDED, PACKAGES, ROOT

JOINED = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
LINES = [line.split(maxsplit=1) for line in JOINED.splitlines() if line.strip() and not line.startswith("#")]
COPIED = [word for name, text in LINES if name == "COPY" for word in text.split()[:-1]]
RUNS = [shlex.split(part) for name, text in LINES if name == "RUN" for part in text.split("&&")]
ARGUMENTS = {"$ARCHITECTURES": ["80", "90", "100"]}


def packages(installer: str) -> set[str]:
    """The packages that commands of an installer name, without versions."""
    found = [words for words in RUNS if words[: len(installer.split())] == installer.split()]
    return {re.split(r"[<>=\[]", word)[0] for words in found for word in words[2:] if not word.startswith("-")}


def plain(words: list[str]) -> list[str]:
    """A command without the options in which an image and a clone differ."""
    text = shlex.join(words).replace("--constraint constraints.txt ", "").replace("--editable ", "")
    return shlex.split(re.sub(r" --arch .*$", "", text))


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert {name for name, _ in LINES} <= {"FROM", "SHELL", "RUN", "ENV", "WORKDIR", "COPY", "ARG", "USER", "CMD"}


def test_what_is_copied_is_there_and_enough() -> None:
    assert [path for path in COPIED if not (ROOT / path).exists()] == []
    assert {*COPIED} == {*NEEDED, *PACKAGES, "constraints.txt"}
    ignored = (ROOT / ".dockerignore").read_text().split("*\n", 1)[1].splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == {*COPIED}


def test_the_commands_are_those_of_the_page() -> None:
    page = (DOCS / "install.md").read_text()
    sections = re.split(r"^## ", page, flags=re.M)
    wanted = [
        shlex.split(part)
        for name in ("With CUDA 13, or Python 3.12", "FlashAttention-4")
        for section in sections
        if section.startswith(f"{name}\n")
        for line in re.findall(r"```bash\n(.*?)```", section, re.S)[0].splitlines()
        for part in line.split("&&")
    ]
    assert len(wanted) == 5
    have = [plain(words) for words in RUNS]
    for words in wanted:
        if plain(words) == ["pip", "install", "setuptools"]:
            assert "setuptools" in packages("pip install")
        elif plain(words) != ["pip", "install", "--no-build-isolation", "."]:  # with the extra it is one command
            assert plain(words) in have, words
    base = dict(LINES)["FROM"]
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-devel-ubuntu24\.04", base)  # whose Python is 3.12
    for words in RUNS:
        if words[0] == "bmburst":
            assert exists([given for word in words for given in ARGUMENTS.get(word, [word])])
    assert ["bmburst", "doctor"] in RUNS


def test_versions_are_those_that_the_tests_ran_with() -> None:
    for words in RUNS:
        if words[:2] == ["pip", "install"]:
            assert words[2:4] == ["--constraint", "constraints.txt"]
    constrained = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"torch", "numpy", "setuptools"} <= constrained & packages("pip install")
    setup = (ROOT / "setup.py").read_text()
    named = [word for words in RUNS if words[:2] == ["pip", "install"] for word in words if ">=" in word]
    assert named and all(f'"{word}"' in setup for word in named)


def test_the_image_has_what_the_build_of_bmtrain_asks_for() -> None:
    nothing = Machine(nvcc=None, nccl=None, include=Path("/nowhere"), which=lambda _: None, has_module=lambda _: False)
    apt, pip = packages("apt-get install"), packages("pip install")
    given = {
        "nvcc": "-devel-" in dict(LINES)["FROM"],
        "cmake 3.18 or later": "cmake" in apt,
        "make or ninja": "make" in apt,
        "a C++ compiler": "g++" in apt,
        "Python.h": "python3-dev" in apt,
        "pip": "python3-venv" in apt,
        "setuptools": "setuptools" in pip,
        "wheel": "setuptools" in pip,  # that of constraints.txt makes wheels itself
        "pybind11": "pybind11" in pip,
        "nccl.h and libnccl.so.2": "torch" in pip,
    }
    asked = list(list_missing(nothing))
    assert {*asked} == {*given} and all(given.values()), given


def test_the_image_is_what_doctor_recommends() -> None:
    recipe = shlex.split(bmtrain.fix_command([90], has_wheel=False))  # as on Python 3.12
    assert recipe[-2:] in [plain(words)[-2:] for words in RUNS]
    fa4 = FLASH_ATTENTION_4
    extra = re.search(r'"gpu": \["([\w-]+)', (ROOT / "setup.py").read_text())
    assert extra is not None and extra[1] == fa4.distribution and fa4.install.endswith(extra[1])
    assert any(".[gpu]" in words for words in RUNS)

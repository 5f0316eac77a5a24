"""Commands that a test does not run: whether they are as a program takes them."""

import os
import re
from pathlib import Path

from torch.distributed.run import get_args_parser

from bmburst.cli import CommandParser, find_command, main
from bmburst.setup.install_bmtrain import REQUIREMENT

ROOT = Path(__file__).parents[2]


def exists(words: list[str]) -> bool:
    """Check a command without running it; False where this test cannot."""
    if words[0] == "srun":
        words = words[words.index("bmburst") :]
    program, *rest = words
    if program == "torchrun":
        parsed = get_args_parser().parse_args(rest)
        return (
            parsed.module and parsed.training_script == "bmburst" and exists(["bmburst", *parsed.training_script_args])
        )
    if words[:2] == ["git", "clone"]:
        return rest[-1] == "https://github.com/OpenBMB/BMTrain" and f"v{REQUIREMENT.split('==')[1]}" in rest
    if words[:2] == ["python", "-m"]:
        file = ROOT / words[2].replace(".", "/")
        return file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        return rest[0] in targets
    if program == "docker":
        return _docker(rest)
    if program == "pip" and rest[0] == "wheel":
        return rest[-1] == "." and (ROOT / "setup.py").is_file()
    if program == "pip" or program.endswith("/pip"):
        bmtrain = [word for word in rest if word.startswith("bmtrain")]
        return rest[0] == "install" and (not bmtrain or (bmtrain == [REQUIREMENT] and "--no-deps" in rest))
    if program == "bmburst" and rest[0] == "train":
        return main(rest) == 0
    if program == "bmburst" and rest[0] == "launch":
        return main(["launch", "--dry-run", *rest[1:]]) == 0
    if program == "bmburst":
        command = find_command(rest[0])
        parser = CommandParser(prog=rest[0], description=command.HELP, words=rest[1:])
        command.configure(parser)
        parser.read(rest[1:])
        return True
    if program == ".venv/bin/pre-commit":  # of the extra "dev", which `make install` installs
        return (ROOT / ".pre-commit-config.yaml").is_file() and '"pre-commit' in (ROOT / "setup.py").read_text()
    return os.access(ROOT / program, os.X_OK)


def _docker(words: list[str]) -> bool:
    """Check a build of the image, or what the image bmburst runs."""
    verb, *rest = words
    if verb == "build":
        return rest == ["--tag", "bmburst", "."] and (ROOT / "Dockerfile").is_file()
    return verb == "run" and exists(rest[rest.index("bmburst") + 1 :])

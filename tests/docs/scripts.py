"""Runs a document's blocks as a reader would, but on processes that have imported torch already.

Commands run in order in one folder that has the files which blocks name: scripts on as many ranks as their command
says, as `bmburst launch` and torchrun start them. Then the other Python blocks run, one after the other in one process,
or on N ranks if the first is under `<!-- needs: N ranks -->`.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from bmburst.cli.program import NOTHING_FITS, main
from tests.distributed.forked import join_ranks, start_ranks
from tests.distributed.ports import held_port
from tests.docs.blocks import ROOT, read_blocks

SECONDS = 300  # on a machine that others load: more than that is a hang
LAUNCHERS = (("torchrun", "--nproc-per-node"), ("bmburst", "launch", "--nproc"))
_STARTED = {"README.md"}  # here the first script of each launcher is started by that launcher itself
_CLONED = {
    "training.md": ("README.md", "bmburst", "bmburst_ops"),
    "inference.md": ("README.md",),
    "fine_tuning.md": ("README.md",),
    "data.md": ("README.md",),
    "fine_tuning.md#preference-training": ("README.md",),
    "recipes.md": ("README.md", "recipes"),
}  # what blocks read of the clone they run in


class Page:
    """A document whose blocks have run: its folder, and what they printed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.printed = folder, ""
        self.started: set[tuple[str, ...]] = set()
        self._starts = name in _STARTED
        blocks = read_blocks(name)
        for path in _CLONED.get(name, ()):
            (folder / path).symlink_to(ROOT / path)
        for block in blocks:
            if block.file and block.language != "diff":
                (folder / block.file).write_text(block.text)
        for block in blocks:
            if block.language == "bash" and not block.needs:
                for command in block.commands():
                    self.run(shlex.split(command))
        parts = [block for block in blocks if block.language == "python" and not block.file]
        if parts:
            (folder / "blocks.py").write_text("\n".join(block.text for block in parts))
            self.printed += run_script(folder, parts[0].ranks or 1, ["blocks.py"])

    def run(self, words: list[str]) -> None:
        """Run a command as the shell would, without starting Python anew."""
        words, target = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
        launcher = next((known for known in LAUNCHERS if tuple(words[: len(known)]) == known), None)
        if launcher is not None and self._starts and launcher not in self.started:
            self.started.add(launcher)
            printed = _start(self.folder, words)
        elif launcher is not None:
            if launcher[0] == "bmburst":
                self.main(["launch", "--dry-run", *words[2:]])
            count, *script = (word for word in words[len(launcher) :] if word != "--")
            printed = run_script(self.folder, int(count), script, host=launcher[0] == "bmburst")
        elif words[0] == "python":
            printed = run_script(self.folder, 1, words[1:])
        else:
            assert words[0] == "bmburst", f"nothing knows how to run: {shlex.join(words)}"
            launches = words[1] in ("train", "eval")  # their ranks run without the launcher that starts them
            printed = run_script(self.folder, 2, ["-m", *words]) if launches else self.main(words[1:])
        if target:
            (self.folder / target).write_text(printed)
        self.printed += printed

    def main(self, words: list[str], status: int = 0) -> str:
        """Run bmburst with arguments in the folder, and return what it printed to either stream.

        A plan in which nothing fits, as some pages show one, has a status of its own.
        """
        out = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            found = main(words)
        expected = NOTHING_FITS if re.match(".*(No configuration fits|not fit) into memory", out.getvalue()) else status
        assert found == expected, f"{words}\n{out.getvalue()}"
        return out.getvalue()


def _start(folder: Path, words: list[str]) -> str:
    """Run torchrun or bmburst as a process of its own, in an environment without GPUs."""
    module = {"torchrun": "torch.distributed.run", "bmburst": "bmburst"}[words[0]]
    ours = {name: text for name, text in os.environ.items() if not name.startswith(("BMBURST", "WORLD_", "LOCAL_"))}
    ours |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=ours, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_script(folder: Path, size: int, words: list[str], *, host: bool = True) -> str:
    """Run a script with arguments on `size` ranks in a folder, without GPUs, and return what rank 0 printed.

    The first failure fails the caller; none is left running. `-m` and a module may take the script's place. Without
    `host` the ranks are as torchrun starts them: the host runtime is put in place by nobody but the script.
    """
    with held_port() as port:
        job = start_ranks(size, _enter, (size, port, str(folder), words, host))
        join_ranks(job, str(words), SECONDS)
    return (folder / "printed-0").read_text()


def _enter(rank: int, size: int, port: int, folder: str, words: list[str], host_runtime: bool) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    torch.set_num_threads(1)
    if host_runtime:
        from bmburst import host

        host.install()
    one_thread = mock.patch("torch.set_num_threads")  # BMTrain takes as many as there are cores, which others use too
    with one_thread, Path(f"printed-{rank}").open("w") as printed, contextlib.redirect_stdout(printed):
        _run(words)


def _run(words: list[str]) -> None:
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{words} ended with status {end.code}") from end

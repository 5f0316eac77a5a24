"""docs/multi_node.md: its batch file starts two nodes, here of one rank each on one host, and its options exist."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from bmburst.cli import COMMANDS, CommandParser, main, training
from bmburst.setup.doctor import CHECKS
from tests.docs.blocks import read_blocks

ROOT = Path(__file__).parents[2]
BLOCKS = read_blocks("multi_node.md")
FILES = {found[1]: block for block in BLOCKS if (found := re.search(r"^# (\S+\.sbatch)$", block.text, re.M))}
SBATCH = {  # options of SLURM's sbatch, from its manual
    *(
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "cpus-per-task",
        "exclusive",
        "requeue",
        "time",
        "output",
    )
}
# In place of SLURM's srun: the command once for each of two nodes, at the same time.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 64
for node in 0 1; do
    SLURM_NODEID=$node SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 \\
        SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST" "${@:2}" & pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
SCONTROL = "#!/bin/bash\n[ \"$1 $2\" = 'show hostnames' ] && printf '127.0.0.1\\n127.0.0.2\\n'\n"
RUN = """
model: {num_layers: 1, hidden_size: 16, num_heads: 2, num_kv_heads: 1, intermediate_size: 24}
data: {source: data.txt}
sequence_length: 128
steps: 2
eval_every: 0
sample_tokens: 0
"""


@contextmanager
def job_number() -> Iterator[int]:
    """Yield a job's number whose port, 20000 more, is free and is kept from others."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for number in range(os.getpid() % 12000, 12000):
            with suppress(OSError):
                holder.bind(("", 20000 + number))
                break
        yield holder.getsockname()[1] - 20000


def options(name: str) -> dict[str, str]:
    """The options in the head of a batch file."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", FILES[name].text, re.M))


@pytest.mark.long
def test_the_batch_file_trains_on_two_nodes(tmp_path: Path) -> None:
    name, programs = "torchrun.sbatch", {"srun": SRUN, "scontrol": SCONTROL}
    programs |= {
        program: f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n'
        for program, module in (("bmburst", "bmburst"), ("torchrun", "torch.distributed.run"))
    }
    (tmp_path / "bin").mkdir()
    for program, text in programs.items():
        (tmp_path / "bin" / program).write_text(text)
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "data.txt").write_text("The nodes of a run hold parts of a sequence. " * 200)
    (tmp_path / name).write_text(FILES[name].text.replace("eth0", "lo"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "BMBURST"))}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }
    with job_number() as number:
        environment["SLURM_JOB_ID"] = str(number)
        done = subprocess.run(
            ["bash", name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "two-nodes"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert json.loads((run / "config.json").read_text())["sequence_length"] == 128


def test_the_batch_file_names_options_that_exist() -> None:
    (block,) = FILES.values()
    assert block.text.startswith("#!/bin/bash\n"), "sbatch wants it in the first line"
    assert options("torchrun.sbatch").keys() <= SBATCH and options("torchrun.sbatch")["ntasks-per-node"] == "1"
    assert block.text.count("#SBATCH") == len(options("torchrun.sbatch"))
    subprocess.run(["bash", "-n", "-c", block.text], check=True)
    words = FILES["torchrun.sbatch"].text.replace("\\\n", " ").split("torchrun ", 1)[1]
    given = words.split(" -m bmburst train ")[0].replace('"$MASTER_ADDR"', "node0")
    parsed = get_args_parser().parse_args([*re.sub(r'"\$\w+"', "1", given).split(), "script.py"])
    assert (parsed.node_rank, parsed.nproc_per_node, parsed.master_addr) == (1, "1", "node0")


def test_commands_and_the_configuration_are_as_bmburst_takes_them(tmp_path: Path, capsys) -> None:
    (block,) = (block for block in BLOCKS if block.language == "yaml")
    (tmp_path / "run.yaml").write_text(block.text)
    parser = CommandParser(prog="bmburst train", description="")
    training.configure(parser)
    config = training.resolve_options(parser.read(["--config", str(tmp_path / "run.yaml")]))
    assert (config.sequence_length, config.model.num_layers) == (1 << 20, 32)
    first, *starts, _ = (block for block in BLOCKS if block.language == "bash" and block not in FILES.values())
    planned, doctor = first.commands()
    assert [block.commands()[-1].split()[0] for block in starts] == ["torchrun"] * 2
    assert main(planned.split()[1:]) == 0 and "2 nodes" in capsys.readouterr().out
    assert doctor.split("--ntasks-per-node=1 ")[1] == "bmburst doctor" and "doctor" in COMMANDS


def test_every_block_is_one_of_these_or_shown() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "yaml", "text"}
    *others, tried = (block for block in BLOCKS if block.language == "bash")
    assert [block.needs for block in others] == ["gpus"] * 4 and tried.commands()[0].startswith("bmburst check ")


@pytest.mark.long
def test_groups_of_zero_are_compared_with_one_rank(capfd) -> None:
    (command,) = next(block for block in BLOCKS if block.text.startswith("bmburst check ")).commands()
    assert "--parallel.zero_group 1 " in f"{command} "
    assert main(command.split()[1:]) == 0
    assert "ok: 2 ranks train as one does" in capfd.readouterr().out


def test_what_doctor_is_said_to_look_at_it_looks_at() -> None:
    names = {check.name for check in CHECKS}
    assert {"Python", "torch", "GPUs", "peer access", "BMTrain's machine code", "NCCL", "BMTrain"} <= names

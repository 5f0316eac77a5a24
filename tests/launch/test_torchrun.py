"""`torchrun -m bmburst train`, as docs/multi_node.md shows it: lost nodes, restarts, hangs and signals, on loopback."""

import json
import os
import signal
import textwrap
from contextlib import contextmanager
from datetime import timedelta

import pytest

from bmburst.config import to_dict, write_json
from bmburst.host import stores
from tests.distributed.ports import held_port
from tests.distributed.started import Python, run_bmburst
from tests.launch.launcher import ROOT, assert_gone, children, wait_until
from tests.refusals import says
from tests.train import run_program as program

STEPS = 80
pytestmark = pytest.mark.long


@pytest.fixture
def torchrun(tmp_path):
    """Start torchrun with options and the options of `bmburst train`; what is left at the end of the test is killed."""
    started = []
    config = program.config(tmp_path, "run", steps=STEPS, checkpoint_every=10, eval_every=0, batch_size=1)
    write_json(tmp_path / "config.json", {**to_dict(config), "output": None})
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "BMBURST"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {"PYTHONPATH": f"{ROOT}:{environ.get('PYTHONPATH', '')}", "TMPDIR": str(tmp_path)}
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(*options, more=(), command=("train", "--config", "config.json", "--output", "run")):
        words = [*options, "-m", "bmburst", *command, *more]
        process = Python(["-m", "torch.distributed.run", *words], cwd=tmp_path, env=environ)
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in [*children(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.close()


def ended(process, seconds=200):
    said = "".join(process.communicate(timeout=seconds))
    return process.returncode, said


def until_saved(folder, step):
    wait_until(lambda: (folder / "run" / "checkpoints" / f"step-{step:06d}").is_dir(), seconds=200)


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_as_undisturbed(folder, rounding=0.0):
    """The losses are those of a run that two ranks of `bmburst train` did without a break, up to relative rounding."""
    done = run_bmburst(
        *("train", "--config", "config.json", "--output", "whole", "--nproc", "2"),
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(folder / "run")) == STEPS
    assert losses(folder / "run") == pytest.approx(losses(folder / "whole"), rel=rounding, abs=0)


@contextmanager
def static_nodes():
    """Yield the options of two nodes that meet at a port of this host."""
    with held_port() as port:
        meet = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}")
        yield [(*meet, f"--node-rank={node}") for node in range(2)]


def test_a_lost_node_ends_the_other_one_and_both_continue_when_started_again(torchrun, tmp_path):
    more = ("--resume=auto", "--hang-timeout=60")
    with static_nodes() as nodes:
        both = [torchrun(*options, more=more) for options in nodes]
        until_saved(tmp_path, 10)
        (rank,) = children(both[1].pid)
        both[1].kill()
        assert_gone([rank])  # it ends with its torchrun
        status, _ = ended(both[0])
        assert status != 0
    with static_nodes() as nodes:
        both = [torchrun(*options, more=more) for options in nodes]
        results = [ended(process) for process in both]
    assert [status for status, _ in results] == [0, 0], results
    assert "going on from" in results[0][1]
    assert_as_undisturbed(tmp_path)


@pytest.mark.parametrize("what", ["rank", "node", "node for good"])
def test_ranks_are_restarted_and_continue_by_themselves(torchrun, tmp_path, what):
    nodes = "1:2" if what == "node for good" else "2"  # the nodes that are left go on without the lost one
    with held_port() as port:
        meet = (f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job")
        meet += (f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1")
        options = [(*meet, f"--rdzv-conf=is_host={first}") for first in (1, 0)]
        both = [torchrun(*each, more=("--resume=auto",)) for each in options]
        until_saved(tmp_path, 10)
        (rank,) = children(both[1].pid)
        if what == "node":
            both[1].kill()
            assert_gone([rank])
            if nodes == "2":
                both[1] = torchrun(*options[1], more=("--resume=auto",))
        else:
            os.kill(rank, signal.SIGKILL)
        results = [ended(process) for process in (both if nodes == "2" else both[:1])]
    assert not any(status for status, _ in results), results
    assert any("going on from" in out for _, out in results)
    assert_as_undisturbed(tmp_path, rounding=0.0 if nodes == "2" else 1e-5)


# Rank 0 begins late: rank 1 would read the id that is left before there is a new one.
MEETING = """
    import os, time
    import bmburst
    time.sleep(2 * (os.environ["RANK"] == "0"))
    bmburst.start()
    import bmtrain as bmt, torch
    print(bmt.sum_loss(torch.ones(1)).item())
    """


def test_ranks_do_not_read_what_those_before_a_restart_have_left(tmp_path):
    """torchrun's store outlives them: it has the id of a communicator that nobody serves any more."""
    store = stores.serve(stores.LOOPBACK, 0, timedelta(seconds=30))
    store.set("bmtrain/BMTRAIN_UNIQUE_ID", b"127.0.0.1 9 0 token".ljust(128, b"\0").hex())
    environ = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": stores.LOOPBACK, "MASTER_PORT": str(store.port)}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    words = ["-c", textwrap.dedent(MEETING)]
    ranks = [Python(words, cwd=tmp_path, env=environ | {"RANK": str(rank)}) for rank in range(2)]
    try:
        results = [ended(process, seconds=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.close()
    assert [(status, "1.0" in said.split()) for status, said in results] == [(0, True)] * 2, results


def test_a_stopped_rank_ends_the_run_and_is_named_once(torchrun, tmp_path):
    process = torchrun("--standalone", "--nproc-per-node=2", more=("--hang-timeout=30", "--steps=100000"))
    until_saved(tmp_path, 10)
    ranks = sorted(children(process.pid))
    os.kill(ranks[1], signal.SIGSTOP)
    status, out = ended(process)
    assert status == 1
    says(out[out.index("bmburst: rank") :], "rank 1 on", "is stopped", "30 s", "rank 0", "--hang-timeout", lines=200)
    assert out.count("bmburst: rank") == 1
    assert_gone(ranks)
    wait_until(lambda: not list(tmp_path.glob("bmburst-ranks-*")), seconds=30)


def test_sigterm_saves_and_resume_auto_continues(torchrun, tmp_path):
    process = torchrun("--standalone", "--nproc-per-node=2", more=("--checkpoint-every=0", "--resume=auto"))
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and losses(tmp_path / "run"), seconds=200)
    process.terminate()
    status, out = ended(process)
    assert status == 1  # torchrun has no status of its own for this
    done = len(losses(tmp_path / "run"))
    says(out, f"stopped after step {done} by SIGTERM", "--resume continues", lines=200)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    assert ended(torchrun("--standalone", "--nproc-per-node=2", more=("--resume=auto",)))[0] == 0
    assert_as_undisturbed(tmp_path)
    again, out = ended(torchrun("--standalone", "--nproc-per-node=2", more=("--resume=auto",)))
    assert again == 0 and f"finished with {STEPS} steps" in out


def test_bad_input_is_one_message(torchrun):
    with static_nodes() as nodes:
        both = [torchrun(*options, more=("--batch-size=0",)) for options in nodes]
        results = [ended(process) for process in both]
    assert [status for status, _ in results] == [1, 1]
    said = [line for _, out in results for line in out.splitlines() if line.startswith("bmburst train: ")]
    assert len(said) == 1
    says(said[0], "batch_size", "0")


def test_other_commands_start_in_the_same_way(torchrun, tmp_path):
    ranks = ("--standalone", "--nproc-per-node=2")
    assert ended(torchrun(*ranks, more=("--steps=2",)))[0] == 0
    found = {}
    for command in (
        ("check", "--config", "config.json", "--check-steps", "1"),
        ("eval", "--checkpoint", "run", "--data", "text.txt", "--sequence-length", "48", "--max-sequences", "2"),
        ("generate", "--checkpoint", "run", "--prompt", "line 1", "--max-new-tokens", "3"),
    ):
        status, found[command[0]] = ended(torchrun(*ranks, command=command))
        assert status == 0, found
    assert "ok: 2 ranks train as one does" in found["check"]
    assert found["eval"].count("perplexity") == 1 and "tokens         96" in found["eval"]
    assert "3 new tokens" in found["generate"]

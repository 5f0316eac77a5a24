"""`bmburst check`: what is compared and how strictly, what ranks are given, and whole checks on the host runtime."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bmburst
from bmburst.cli import main
from bmburst.cli.check import run_rank
from bmburst.config import from_dict
from bmburst.schedule.parallelism import MeshShape
from bmburst.train import check
from bmburst.train.check import AFTER_FILE, BEFORE_FILE, GRADIENT_FILE, Steps, compare_runs
from bmburst.train.config import TrainConfig
from tests.distributed.started import run_bmburst
from tests.refusals import says

ROOT = Path(bmburst.__file__).parents[1]
SHAPES = {"embed": (7, 5), "layer.proj": (3, 11), "layer.norm": (13,), "head": (1, 1)}
TINY = """
preset: null
model: {vocab_size: 260, hidden_size: 12, intermediate_size: 20, num_layers: 2, num_heads: 2, num_kv_heads: 1}
sequence_length: 37
batch_size: 2
steps: 50
data: {source: text.txt, held_out_fraction: 0.2}
"""


def leave(folder, *, noise=0.0, names=SHAPES, losses=(5.5, 5.25), norms=(2.0, 1.5), step=1e-2):
    """Write what a run leaves: the same numbers in every folder, but for relative noise on gradient and change."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    other = torch.Generator().manual_seed(len(folder.name))
    before, gradient, after = {}, {}, {}
    for name in names:
        shape = SHAPES.get(name, (2, 3))
        before[name], gradient[name], change = (torch.randn(shape, generator=generator).double() for _ in range(3))
        gradient[name] += noise * gradient[name].norm() * direction(shape, other)
        after[name] = before[name] + step * (change + noise * change.norm() * direction(shape, other))
    for file, tensors in ((BEFORE_FILE, before), (GRADIENT_FILE, gradient), (AFTER_FILE, after)):
        save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / file)
    Steps(losses=tuple(losses), grad_norms=tuple(norms)).write(folder)
    return folder


def direction(shape, generator):
    drawn = torch.randn(shape, generator=generator).double()
    return drawn / drawn.norm()


def doctor(folder, file, name, change):
    tensors = load_file(folder / file)
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / file)


def faults(report):
    return {tensor.name: tensor.faults for tensor in report.tensors if tensor.faults}


# The comparison


@pytest.fixture
def ranks(tmp_path):
    return leave(tmp_path / "ranks", noise=1e-6)


@pytest.fixture
def exact(tmp_path):
    return leave(tmp_path / "exact")


def test_rounding_is_ok_and_errors_are_what_they_are(ranks, exact):
    report = compare_runs(ranks, exact, chunk=4)  # chunks that end inside rows and tensors
    assert report.ok and not faults(report)
    assert [(tensor.name, tensor.shape) for tensor in report.tensors] == sorted(SHAPES.items())
    files = {file: (load_file(ranks / file), load_file(exact / file)) for file in (GRADIENT_FILE, AFTER_FILE)}
    for part, file in (("gradient", GRADIENT_FILE), ("parameter", AFTER_FILE)):
        ours, theirs = ([run[name].double().flatten() for name in sorted(SHAPES)] for run in files[file])
        expected = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)]
        assert [getattr(tensor, part).error for tensor in report.tensors] == pytest.approx(expected, rel=1e-9)
        whole = ((torch.cat(ours) - torch.cat(theirs)).norm() / torch.cat(theirs).norm()).item()
        assert getattr(report.total, part).error == pytest.approx(whole, rel=1e-9)
    assert 5e-7 < report.total.gradient.error < 2e-6


@pytest.mark.parametrize(("name", "factor", "error"), [("layer.norm", 2, 1), ("head", math.nan, math.nan)])
def test_a_wrong_factor_on_one_tensor_is_found(ranks, exact, name, factor, error):
    doctor(ranks, GRADIENT_FILE, name, lambda gradient: gradient * factor)
    report = compare_runs(ranks, exact)
    assert not report.ok and faults(report) == {name: ("gradient",)}
    (of_tensor,) = (tensor for tensor in report.tensors if tensor.name == name)
    assert of_tensor.gradient.error == pytest.approx(error, rel=1e-4, nan_ok=True)
    assert report.total.faults == ("gradient",)
    assert not compare_runs(exact, ranks).ok


@pytest.mark.parametrize(("factor", "ok"), [(1 + 5e-6, True), (1 + 3e-5, False)])
def test_the_limit_on_a_gradient_is_1e_5(tmp_path, exact, factor, ok):
    ranks = leave(tmp_path / "ranks")
    doctor(ranks, GRADIENT_FILE, "embed", lambda gradient: gradient * factor)
    assert compare_runs(ranks, exact).ok is ok


def test_a_shard_that_was_not_updated_is_found(ranks, exact):
    before = load_file(ranks / BEFORE_FILE)["layer.proj"]
    doctor(ranks, AFTER_FILE, "layer.proj", lambda after: torch.cat([after[:2], before[2:]]))
    report = compare_runs(ranks, exact)
    assert faults(report) == {"layer.proj": ("change",)}
    assert not report.ok


def test_steps_that_only_move_the_last_bits_are_not_blamed(tmp_path):
    tiny = leave(tmp_path / "tiny", step=1e-7, noise=0.3), leave(tmp_path / "tinier", step=1e-7)
    report = compare_runs(*tiny)
    assert set(faults(report).values()) == {("gradient",)}
    assert report.total.change.error > check.TOLERANCES["float32"]["change"]
    still = leave(tmp_path / "still", step=0.0), leave(tmp_path / "stiller", step=0.0)
    assert compare_runs(*still).ok


def test_a_gradient_of_zero(ranks, exact):
    doctor(exact, GRADIENT_FILE, "head", torch.zeros_like)
    assert faults(compare_runs(ranks, exact)) == {"head": ("gradient",)}
    doctor(ranks, GRADIENT_FILE, "head", torch.zeros_like)
    assert compare_runs(ranks, exact).ok


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"losses": (5.5, 5.252)}, "loss"),
        ({"norms": (1.0, 1.5)}, "gradient norm"),
        ({"norms": (2.0, math.nan)}, "gradient norm"),
    ],
)
def test_losses_and_norms_are_judged(tmp_path, exact, changed, fault):
    report = compare_runs(leave(tmp_path / "ranks", **changed), exact)
    assert not report.ok and not faults(report)
    assert [step.faults for step in report.steps].count((fault,)) == 1


@pytest.mark.parametrize(("noise", "ok"), [(0.03, True), (0.058, True), (0.07, False), (0.2, False)])
def test_bf16_may_be_twice_as_far_as_one_rank(tmp_path, exact, noise, ok):
    single = leave(tmp_path / "one", noise=0.03)
    report = compare_runs(leave(tmp_path / "ranks", noise=noise), exact, single)
    assert report.dtype == "bfloat16"
    assert report.ok is ok
    assert report.total.gradient.error == pytest.approx(noise, rel=1e-3)
    assert report.total.gradient.single == pytest.approx(0.03, rel=1e-3)
    assert all(("gradient" in tensor.faults) is not ok for tensor in report.tensors)


def test_bf16_together_must_keep_the_factor_exactly(tmp_path, exact):
    single = leave(tmp_path / "one", noise=0.03)
    report = compare_runs(leave(tmp_path / "ranks", noise=0.061), exact, single)
    assert not faults(report), "a single tensor may be a little unlucky"
    assert report.total.faults == ("gradient",)
    assert not report.ok


# The command, with a stand-in for the launcher


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder with a text, a configuration and room for temporary files; no ranks' environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder, temporary = tmp_path / "here", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    (folder / "text.txt").write_text("".join(f"line {i}: the quick brown fox, {i * i} times.\n" for i in range(200)))
    (folder / "tiny.yaml").write_text(TINY)
    return folder


def left(folder):
    """Return what a check left behind, here or in the folder for temporary files (where torch may have its own)."""
    found = {path.name for path in folder.iterdir()} - {"text.txt", "tiny.yaml"}
    return found | {path.name for path in (folder.parent / "temporary").glob("bmburst*")}


@pytest.fixture
def launches(here, monkeypatch):
    """Record launches; each leaves numbers, those of several ranks with the noise in `noise`."""

    class Launches(list):
        noise, names, status = 1e-6, SHAPES, 0

    calls = Launches()

    def launch(spec, command, request):
        assert command == ["-m", "bmburst.launch.handover", "bmburst.cli.check"]
        request = json.loads(request)
        config = from_dict(TrainConfig, request["config"])
        calls.append((spec.nproc, config, request["steps"]))
        assert request["ranks"] == spec.nproc
        leave(config.output, noise=calls.noise if spec.nproc > 1 else 0.0, names=calls.names)
        with monkeypatch.context() as rank:
            rank.setattr("bmburst.train.check.record_steps", lambda *_, **__: None)
            rank.setenv("RANK", "0")
            rank.setenv("WORLD_SIZE", str(spec.nproc))
            return run_rank(request) or (calls.status if spec.nproc == 1 else 0)

    monkeypatch.setattr("bmburst.launch.launcher.launch", launch)
    return calls


def test_float32_runs_on_all_ranks_and_on_one(launches, here, capsys):
    (here / "out").mkdir()
    (here / "out" / "x").touch()
    argv = ["--config", "tiny.yaml", "--data-parallel", "2", "--nproc", "8", "--seed", "3", "--output", "out"]
    argv += ["--tensor-parallel", "2", "--pipeline-parallel", "2", "--batch-size", "4"]
    assert main(["check", *argv, "--check-steps", "5", "--parallel.transport", "gloo"]) == 0
    (one, alone, same_steps), (nproc, config, steps) = launches
    assert (nproc, steps, one, same_steps) == (8, 5, 1, 5)
    assert config.parallel.data_parallel == 2 and config.parallel.transport == "gloo"
    assert alone.mesh_shape(one) == MeshShape(1, 1)
    assert alone.parallel.transport == "auto", "one rank moves nothing"
    assert alone.replace(parallel=config.parallel, output=config.output) == config
    assert (config.seed, config.steps, config.sequence_length) == (3, 50, 37)
    assert left(here) == {"out"}
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "[1/2] one rank in float32",
        "[2/2] 8 ranks (pipe 2 x data 2 x sequence 1 x tensor 2) in float32",
    ]
    assert out.splitlines()[-1].startswith("ok: 8 ranks train as one does (relative error at most: gradient 1e-05")


def test_bfloat16_also_runs_one_rank_in_float32(launches, validations, here, capsys):
    bmtrain = ("--optimizer.kernel", "bmtrain")  # which fp32 does not have
    assert main(["check", "--config", "tiny.yaml", "--dtype", "bfloat16", "--kernel", "cpu", *bmtrain]) == 1
    assert [(nproc, config.dtype, config.parallel.kernel) for nproc, config, _ in launches] == [
        (1, "bfloat16", "cpu"),
        (1, "float32", "auto"),
        (2, "bfloat16", "cpu"),
    ]
    checked = [(config.replace(output=run.output), ranks) for config, ranks in validations for _, run, _ in launches]
    assert len(validations) == 3, "each run once"
    assert all((run, nproc) in checked for nproc, run, _ in launches)
    out = capsys.readouterr().out
    # One rank was without any error here, so twice that is none.
    assert out.splitlines()[-1].startswith("not ok: too far from one rank: all tensors together (relative error")


def test_not_ok_is_1_and_says_what(launches, here, capsys):
    launches.noise = 2e-5
    assert main(["check", "--config", "tiny.yaml", "--json", "found.json"]) == 1
    out = capsys.readouterr().out
    assert len(re.findall("not ok: gradient\n", out)) == len(SHAPES) + 1
    assert out.splitlines()[-1].startswith("not ok: too far from one rank: 4 of 4 tensors, all tensors together (")
    found = json.loads((here / "found.json").read_text())
    assert (found["ok"], found["ranks"], found["dtype"], found["factor"]) == (False, 2, "float32", None)
    assert found["tolerances"]["gradient"] == 1e-5
    assert [tensor["name"] for tensor in found["tensors"]] == sorted(SHAPES)
    assert found["tensors"][0]["gradient"]["error"] == pytest.approx(2e-5, rel=1e-2)
    assert found["tensors"][0]["parameter"]["allowed"] is None
    assert [step["losses"] for step in found["steps"]] == [[5.5, 5.5], [5.25, 5.25]]
    assert found["config"]["sequence_length"] == 37
    assert left(here) == {"found.json"}


def test_the_worst_20_are_shown_or_all(launches, here, capsys):
    launches.names = [f"layer.{number}" for number in range(25)]
    assert main(["check", "--config", "tiny.yaml"]) == 0
    out = capsys.readouterr().out
    assert "the worst 20 of 25 tensors; --all shows all" in out
    shown = re.findall(r"^layer\.\d+ +2x3 +(\S+) ", out, re.MULTILINE)
    assert len(shown) == 20
    assert main(["check", "--config", "tiny.yaml", "--all"]) == 0
    everything = re.findall(r"^layer\.\d+ +2x3 +(\S+) ", capsys.readouterr().out, re.MULTILINE)
    assert len(everything) == 25 and everything[:20] == shown


@pytest.mark.parametrize(("status", "hint"), [(1, True), (2, False), (130, False)])
def test_a_run_that_fails_ends_the_check_with_its_status(launches, here, capsys, status, hint):
    launches.status = status
    assert main(["check", "--config", "tiny.yaml"]) == status
    out, err = capsys.readouterr()
    assert out == "" and left(here) == set()
    assert ("--model.num_layers" in err) is hint


def test_a_resumed_runs_configuration_is_checked(launches, here, capsys):
    run = here / "run" / "checkpoints" / "step-000004"
    run.mkdir(parents=True)
    (here / "run" / "config.json").write_text(json.dumps({"sequence_length": 48, "data": {"source": "text.txt"}}))
    assert main(["check", "--resume", "--output", "run"]) == 0
    assert launches[0][1].sequence_length == 48
    assert not launches[0][1].resume


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--check-steps", "0"], "--check-steps 0 | at least 1"),
        (["--check-steps", "two"], "--check-steps two | whole number"),
        (["--nproc", "1"], "check | several ranks | one"),
        (["--nproc", "3", "--data-parallel", "2"], "data_parallel 2 | 3 ranks | 1, 3"),
        (["--sequence-length", "1"], "sequence_length 1 | sequence ranks"),
        (["--layout", "zig"], "layout | 'zig' | balanced, contiguous, striped, zigzag"),
        (["--optimizer.lrr", "1"], "'--optimizer.lrr' | '--optimizer.lr'"),
        (["--data", "gone.txt"], "data gone.txt | no such file | allowed: "),
        (["--config", "gone.yaml"], "gone.yaml | no such"),
        (["--json", "gone/found.json"], "--json gone/found.json | no such folder | fix: "),
        (["--json", "."], "--json . | cannot be written | Is a directory | fix: "),
        (["--dtype", "float16"], "float16 | overflows | float32, bfloat16 | fix: --dtype bfloat16"),
        (["--resume"], "--resume | run"),
        (["--preset", "llama-2-7b", "--model.num_layers", "4000"], "free | the check writes | GiB"),
        (["--preset", "llama-2-70b"], "on the CPU | of memory: 2 ranks | free memory | fix: "),
    ],
)
def test_bad_input_starts_nothing(launches, here, capsys, monkeypatch, argv, words):
    if "--model.num_layers" in argv:  # the disk has less room than the memory
        monkeypatch.setattr("bmburst.train.machine.available_bytes", lambda: None)
    config = [] if "--preset" in argv or "--config" in argv else ["--config", "tiny.yaml"]
    assert main(["check", *config, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says(err, words).startswith("bmburst check: ")
    assert not launches and left(here) == set()


# Whole checks on the host runtime


def check_for_real(here, *argv):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return run_bmburst("check", "--config", "tiny.yaml", *argv, cwd=here, env=environment, timeout=120)


@pytest.mark.parametrize(
    ("argv", "mesh", "against"),
    [
        (["--data-parallel", "2", "--batch-size", "6"], "data 2 x sequence 1", "one rank"),
        pytest.param(["--pipeline-parallel", "2"], "pipe 2 x data 1 x sequence 1", "one rank", marks=pytest.mark.long),
        pytest.param(
            *(["--sequence-parallel", "2", "--dtype", "bfloat16"], "data 1 x sequence 2", "one rank in float32"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_ranks_train_as_one_does(here, argv, mesh, against):
    done = check_for_real(here, *argv, "--json", "found.json", "--model.max_position_embeddings", "64", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 ranks ({mesh})" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"relative error of 2 ranks against {against}")
    assert sum(line.startswith(("model.", "lm_head.")) for line in lines) == 2 * 9 + 3
    assert lines[-1].startswith("ok: 2 ranks train as one does")
    found = json.loads((here / "found.json").read_text())
    assert found["ok"] and len(found["steps"]) == 2
    # Two ranks round differently than one: no error at all would mean that one run was compared with itself.
    # Stages of one rank each do the same operations as one rank, so their bits are the same.
    errors = [found["all_tensors"][kind]["error"] for kind in ("gradient", "change")]
    assert errors[0] < (0.1 if "bfloat16" in argv else 1e-5)
    assert errors == [0, 0] if "--pipeline-parallel" in argv else min(errors) > 0
    # Untrained, a byte costs about ln(260) nats, and two steps change something.
    first, second = (step["losses"][0] for step in found["steps"])
    assert first == pytest.approx(math.log(260), rel=0.05) and first != second
    assert left(here) == {"found.json"}


@pytest.mark.long
def test_adapters_are_compared_alone(here):
    words = "--sequence-parallel 2 --lora.rank 2 --checkpoint-every never --model.max_position_embeddings 64 --all"
    done = check_for_real(here, *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("model.")]
    assert len(names) == 2 * 2 * 2 and all(".lora_" in name for name in names)

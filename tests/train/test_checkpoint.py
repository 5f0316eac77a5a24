"""Checkpoints in one process: what they hold, what they refuse, and which of them stay; and runs at the edges."""

import json
import math

import torch

from bmburst.checkpoint import files as checkpoint
from bmburst.outputs import TRAINING_LOCK, lock_folder
from bmburst.train.config import DataConfig
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train import run_program as program


def said(words, call):
    with refused(words):
        call()


@on_program(1)
def test_what_a_checkpoint_holds(tmp_path):
    for dtype, before in (("float32", 2), ("bfloat16", 2), ("bfloat16", 0)):
        name = f"{dtype}-{before}"
        first = program.trainer(tmp_path, name, dtype=dtype)
        for _ in range(before):
            first.step()
        torch.manual_seed(5)
        assert first.save().name == f"step-{before:06d}"
        drawn = torch.rand(3)
        steps = [first.step() for _ in range(3)]
        another = program.trainer(tmp_path, name, dtype=dtype)
        for call in (another.save, another.train):
            said(f"output | step-{before:06d} | another run | fix: | resume=True", call)
        resumed = program.trainer(tmp_path, name, dtype=dtype, resume=True)
        for early in (resumed.step, resumed.train, resumed.evaluate, resumed.sample, resumed.save):
            said("resume is set | not loaded | fix: trainer.restore()", early)
        torch.manual_seed(6)
        resumed.restore()
        assert torch.equal(torch.rand(3), drawn)
        resumed.evaluate()
        resumed.sample()
        for wanted in steps:
            ours = resumed.step()
            for what in ("step", "loss", "lr", "grad_norm"):
                assert getattr(ours, what) == getattr(wanted, what), (name, what)
    # What bfloat16 keeps besides must not be left out in silence.
    resumed = program.trainer(tmp_path, "bfloat16-2", resume=True)
    said("dtype | _param_fp32 | missing | fix: | --init-from", resumed.restore)


@on_program(1)
def test_damaged_files_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    saved = program.trainer(tmp_path, "run").save()
    ours = program.trainer(tmp_path, "run", resume=True)
    before = (saved / "state.json").read_bytes()
    # Of a version without checksums: what is read is checked as far as it can be.
    state = without_checksums(before)
    (saved / "state.json").write_text(json.dumps(state))
    for name, words in [
        ("model.safetensors", "cannot read | model.safetensors"),
        ("optimizer.safetensors", "cannot read | optimizer.safetensors"),
        ("random.safetensors", "random.safetensors | no state"),
    ]:
        content = (saved / name).read_bytes()
        # As long as it was, so that only reading it can tell.
        (saved / name).write_bytes(b"\xff" * 64 + content[64:])
        said(words, ours.restore)
        (saved / name).write_bytes(content)
    foreign = save_of({"cpu": torch.zeros(7)}, saved / "random.safetensors")
    said("random.safetensors | no state", ours.restore)
    foreign()
    tensors = load_file(saved / "optimizer.safetensors")
    del tensors["model.norm.weight.exp_avg"]
    save_file(tensors, saved / "optimizer.safetensors")
    state["files"]["optimizer.safetensors"] = (saved / "optimizer.safetensors").stat().st_size
    (saved / "state.json").write_text(json.dumps(state))
    said("dtype | model.norm.weight.exp_avg | missing", ours.restore)


def without_checksums(state):
    return {key: value for key, value in json.loads(state).items() if not key.startswith(("checksum", "version"))}


def save_of(tensors, path):
    """Put other tensors in a file of the same size, and return what undoes it."""
    content = path.read_bytes()
    from safetensors.torch import save

    data = save(tensors)
    header = int.from_bytes(data[:8], "little")
    padding = len(content) - len(data)  # the format allows spaces after the header
    path.write_bytes(
        (header + padding).to_bytes(8, "little") + data[8 : 8 + header] + b" " * padding + data[8 + header :]
    )
    return lambda: path.write_bytes(content)


@on_program(1)
def test_which_checkpoints_stay(tmp_path):
    ours = program.trainer(tmp_path, "run", keep_checkpoints=1)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000009").mkdir(parents=True)  # later, but not complete
    (checkpoints / "step-000001").write_text("no folder")
    (checkpoints / ".step-000005").mkdir()  # half written by a run that was killed
    for _ in range(2):
        ours.step()
        ours.steps_done += 1
        ours.save()
        ours.save()  # again, in the place of the first
        assert checkpoint.newest_complete(tmp_path / "run").name == f"step-{ours.steps_done:06d}"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000004", "step-000009"]
    (checkpoints / "step-000005").write_text("a file in the way")
    ours.steps_done += 1
    said("cannot write | step-000005 | Not a directory | fix: | --resume | step-000004", ours.save)


@on_program(1)
def test_runs_at_the_edges(tmp_path):
    # A gradient that is not finite changes neither weights nor moments.
    diverged = program.trainer(tmp_path, "diverged", sample_tokens=3, eval_every=2, max_skipped_steps=0)
    diverged.step()
    parameters = [p for group in diverged.optimizer.param_groups for p in group["params"]]
    before = [p.clone() for p in parameters]
    loss_of = diverged.model.loss

    def overflowing(*args, **options):  # the loss is finite, its gradient is not
        nats = loss_of(*args, **options)
        nats.register_hook(lambda grad: grad * math.inf)
        return nats

    diverged.model.loss = overflowing
    diverged.step()
    diverged.model.loss = loss_of
    # BMTrain pads the flat parameters of a block with memory that holds anything, NaN at times.
    torch.testing.assert_close(parameters, before, rtol=0, atol=0, equal_nan=True)
    assert all(p.grad is None or not p.grad.any() for p in parameters)
    diverged.steps_done -= 1
    # A model that has diverged: the run goes on to its end, and its files say so.
    with torch.no_grad():
        for group in diverged.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.fill_(math.nan)
    diverged.train()
    assert [line["loss"] for line in program.lines(tmp_path / "diverged")] == 5 * [None]
    assert [line["loss"] for line in program.lines(tmp_path / "diverged", "evals.jsonl")] == 3 * [None]
    assert (tmp_path / "diverged" / "sample.txt").exists()

    # A text of fewer sequences than a batch, held-out text shorter than one, and nothing before the end.
    short = tmp_path / "short.txt"
    short.write_text("a short text that is taken again and again; " * 8)
    (tmp_path / "short").mkdir()
    with lock_folder(tmp_path / "short", TRAINING_LOCK):
        busy = {"data": DataConfig(source=str(short), held_out_fraction=0.05), "batch_size": 9, "steps": 2}
        said(
            "short | another run | process | on host | since | fix: | --output",
            lambda: program.train(tmp_path, "short", **busy),
        )
    program.train(tmp_path, "short", **busy, checkpoint_every=0, eval_every=0, sample_tokens=2)
    assert [line["step"] for line in program.lines(tmp_path / "short")] == [1, 2]
    assert [(line["step"], line["tokens"]) for line in program.lines(tmp_path / "short", "evals.jsonl")] == [(2, 17)]
    assert [path.name for path in (tmp_path / "short" / "checkpoints").iterdir()] == ["step-000002"]
    assert (tmp_path / "short" / "sample.txt").read_text().endswith("\n")

"""A run that was killed, at any point, and resumed is the run that was never killed; also on other ranks."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from bmburst import __version__
from bmburst.checkpoint import files as checkpoint
from bmburst.checkpoint.files import require_whole
from bmburst.data import open_corpus
from bmburst.train.config import DataConfig, ParallelConfig
from bmburst.train.kept import kept_with_model
from bmburst.train.resolve import resolve
from tests.distributed.programs import run_program
from tests.pairs import long
from tests.refusals import refused
from tests.train import run_program as program

STATE_KEYS = ("step", "data", "tokenizer", "files")


def losses(folder, name):
    lines = program.lines(folder / name)
    return {line["step"]: (line["loss"], line["bits_per_byte"], line["lr"], line["grad_norm"]) for line in lines}


def held_out(folder, name):
    return program.lines(folder / name, "evals.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_program(2, program.train, folder, "whole")
    return folder


def test_a_run_leaves_what_it_should(folder):
    run = folder / "whole"
    assert resolve((run / "config.json",)).replace(output=run) == program.config(folder, "whole")
    assert sorted(losses(folder, "whole")) == list(range(1, program.STEPS + 1))
    for loss, bits, _, _ in losses(folder, "whole").values():
        assert bits == pytest.approx(loss / math.log(2), rel=0.02)  # a token is a byte, but for the end of the text
    assert [line["step"] for line in held_out(folder, "whole")] == [3, 6]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    for path in (run / "checkpoints").iterdir():  # what was read ahead of a step is not trained on
        progress = checkpoint.read_progress(path)
        assert progress.data["samples"] == 2 * progress.step


def test_a_resumed_run_needs_no_directory_that_it_started_from(folder, tmp_path):
    """Its weights are in the checkpoint; so is the token that ends an answer."""
    run, name = shutil.copytree(folder / "whole", tmp_path / "run"), "generation_config.json"
    config = program.config(folder, "whole").replace(init_from=tmp_path / "gone", output=run)
    text = open_corpus(config.data.source, config.data.tokenizer, tmp_path / "cache")
    newest = run / "checkpoints" / "step-000006" / name
    assert kept_with_model(text, config) == {name: newest.read_bytes()}
    shutil.rmtree(run / "checkpoints")
    assert kept_with_model(text, config) == {}


# Of one run, each time it is started: the function of `bmburst.checkpoint` and the call at which it is killed, and
# the step of the checkpoint that it then has. A thread calls them while training goes on.
KILLS = [
    ("staging.Staging.copy", 1, None),  # in its first checkpoint, of which nothing is written
    ("sharded_files._write_group", 2, None),  # the first again, without the optimizer
    ("tensor_files.SafetensorsWriter.write_run", 100, 2),  # in its second, with half of a file written
    ("training._save_state", 1, 2),  # the second again, all but the file that makes it one
    ("training._sync", 3, 2),  # all of it is written, but not under its name
    ("training._sync", 8, 4),  # just after it got its name
    ("training._remove_hidden", 2, 6),  # while the first is removed, the last being there
]


@pytest.mark.parametrize("kills", [[KILLS[2], *KILLS[5:]], *long(KILLS)], ids=["3-kills", "all"])
def test_killed_at_any_point_and_resumed(folder, kills):
    name = f"killed-{len(kills)}-times"
    run, left = folder / name, None
    for moment, count, leaves in kills:
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            run_program(2, program.train_and_die, folder, name, moment, count, left is not None, fresh=True)
        newest, left = checkpoint.newest_complete(run), leaves
        assert (newest and checkpoint.read_progress(newest).step) == left, (moment, count)
        # A line that was being written when the run died.
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 5, "loss": 3.')
    assert [path.name for path in run.glob("checkpoints/.step-*")] == [".step-000002.old"]
    run_program(2, resume, folder, name, {"steps": program.STEPS + 1})
    found = losses(folder, name)
    assert {step: values for step, values in found.items() if step < 7} == losses(folder, "whole")
    assert held_out(folder, name)[:-1] == held_out(folder, "whole")
    assert sorted(path.name for path in run.glob("checkpoints/*")) == ["step-000006", "step-000007"]


@pytest.mark.long
def test_killed_at_random_moments_of_saves(tmp_path):
    """Nothing that was reported as saved is lost, and the losses are those of a run that was not killed."""
    steps, seen = 120, tmp_path / "reported"
    run_program(2, _train_for, tmp_path, "whole", steps, seconds=600)
    for seed in range(20):
        newest = checkpoint.newest_complete(tmp_path / "run")
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            run_program(2, program.train_and_be_killed, tmp_path, "run", seed, steps, newest is not None)
        newest = checkpoint.newest_complete(tmp_path / "run")
        if newest is not None:
            require_whole(newest)
        reported = map(int, seen.read_text().split()) if seen.exists() else ()
        assert (0 if newest is None else checkpoint.read_progress(newest).step) >= max(reported, default=0)
    run_program(2, resume, tmp_path, "run", {"steps": steps}, seconds=600)
    assert losses(tmp_path, "run") == losses(tmp_path, "whole")


def _train_for(folder, name, steps):
    program.train(folder, name, steps=steps, checkpoint_every=0, eval_every=0)


def resume(folder, name, changes):
    program.train(folder, name, resume=True, **changes)


@pytest.mark.parametrize(("ranks", "data"), [(1, 1), (2, 2), (3, 1)])
def test_resumed_on_other_ranks(folder, tmp_path, ranks, data):
    """Started on 2 sequence ranks, continued on others."""
    shutil.copytree(folder / "whole", tmp_path / "run")
    (tmp_path / "text.txt").write_bytes((folder / "text.txt").read_bytes())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    run_program(ranks, resume, tmp_path, "run", {"parallel": ParallelConfig(data_parallel=data)})
    expected = losses(folder, "whole")
    assert losses(tmp_path, "run").keys() == expected.keys()
    for step, values in losses(tmp_path, "run").items():
        assert values == pytest.approx(expected[step], rel=1e-4), step
    for ours, wanted in zip(held_out(tmp_path, "run"), held_out(folder, "whole"), strict=True):
        assert ours.pop("data") == wanted.pop("data")
        assert ours == pytest.approx(wanted, rel=1e-4)


def test_truncated_and_foreign_checkpoints(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    newest = checkpoint.newest_complete(run)
    assert newest.name == "step-000006"
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.newest_complete(run).name == "step-000004"
    with refused("optimizer.safetensors", "truncated", file.stat().st_size, "fix: ", "another checkpoint"):
        checkpoint.read_progress(newest)
    file.unlink()
    with refused("optimizer.safetensors", "missing", "fix: ", "another checkpoint"):
        checkpoint.read_progress(newest)
    sealed = json.loads((newest / "state.json").read_text())
    whole = {key: sealed[key] for key in sealed if not key.startswith(("checksum", "version"))}  # of an earlier one
    deep = '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for text, words in [
        ('{"format": "somebody else\'s"}', "format | bmburst-checkpoint-1"),
        ("[]", "format | bmburst-checkpoint-1"),
        ("", "truncated | JSON"),
        *((json.dumps({k: v for k, v in whole.items() if k != key}), f"'{key}'") for key in STATE_KEYS),
        *((json.dumps(whole | {"step": step}), "'step'") for step in ("6", -1, True, None, 10**30)),
        *((json.dumps(whole | {"files": files}), "'files'") for files in ({"../x": 1}, {"x": -1}, {"x": "1"})),
        (json.dumps(whole | {"skipped": []}), "'skipped'"),
        (json.dumps(sealed), "damaged | checksum"),
        (json.dumps({key: sealed[key] for key in sealed if key != "checksum"}), "damaged | checksum"),
        (deep, "truncated | JSON"),
    ]:
        (newest / "state.json").write_text(text)
        with refused(newest, "state.json", words, "fix: ", "another checkpoint"):
            checkpoint.read_progress(newest)
        assert checkpoint.newest_complete(run).name == "step-000004"
    shutil.rmtree(newest)
    newest.write_text("a file, not a folder")
    with refused(newest, "no state.json", "fix: ", "another checkpoint"):
        checkpoint.read_progress(newest)
    assert checkpoint.newest_complete(run).name == "step-000004"
    shutil.rmtree(run / "checkpoints" / "step-000004")
    assert checkpoint.newest_complete(run) is None
    assert checkpoint.newest_complete(tmp_path / "nowhere") is None


def test_a_run_folder_of_another_version_names_it(folder, tmp_path):
    """Its config.json has keys that this version does not know."""
    run = shutil.copytree(folder / "whole", tmp_path / "run")
    values = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(values | {"of_later": 1}))
    with refused(run / "config.json", "of_later", "fix: continue", f"version {__version__} (this is {__version__})"):
        resolve((run / "config.json",))
    (other,) = shutil.copytree(folder / "whole", tmp_path / "old").glob("checkpoints/step-000006")
    state = json.loads((other / "state.json").read_text())
    state = {key: value for key, value in state.items() if key not in ("version", "checksums", "checksum")}
    (other / "state.json").write_text(json.dumps(state))
    shutil.copy(run / "config.json", tmp_path / "old" / "config.json")
    with refused("of_later", "fix: continue", "earlier or later version"):
        resolve((tmp_path / "old" / "config.json",))


def test_a_checkpoint_of_another_model_or_text_does_no_damage(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    text = tmp_path / "text.txt"
    text.write_bytes((folder / "text.txt").read_bytes())
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    wider = {"model": replace(program.SHAPE, intermediate_size=32)}
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 400)
    cases = [
        (wider, "intermediate_size | 32 | 24"),
        ({"data": DataConfig(source=str(other))}, "data | checkpoint | corpus"),
        ({"dtype": "bfloat16"}, "dtype | _param_fp32"),
    ]
    run_program(2, _refuses, tmp_path, cases)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def _refuses(folder, cases):
    for changes, words in cases:
        with refused(words):
            resume(folder, "run", {"steps": 8, **changes})

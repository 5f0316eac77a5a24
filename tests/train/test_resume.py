"""A run that was killed, at any point, and resumed is the run that was never killed; also on other ranks."""

import json

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from bmburst.errors import UserError
from bmburst.train import checkpoint
from bmburst.train.config import ParallelConfig
from tests.distributed.programs import run_program
from tests.train import run_program as program


def losses(folder, name):
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["bits_per_byte"], line["lr"], line["grad_norm"]) for line in lines}


def held_out(folder, name):
    return [json.loads(line) for line in (folder / name / "evals.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_program(2, program.train, folder, "whole")
    return folder


def test_a_run_leaves_what_it_should(folder):
    run = folder / "whole"
    assert sorted(losses(folder, "whole")) == list(range(1, program.STEPS + 1))
    assert [line["step"] for line in held_out(folder, "whole")] == [3, 6]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("moment", "count", "left"),
    [
        ("_save_optimizer", 1, None),  # in the first checkpoint: nothing to resume
        ("_save_random", 2, 2),  # in the second: half of it is written
        ("_sync", 10, 2),  # everything of the second is written, but not under its name
        ("_sync", 14, 4),  # just after the second got its name
    ],
)
def test_killed_at_any_point_and_resumed(folder, moment, count, left):
    name = f"killed-{moment}-{count}"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_program(2, program.train_and_die, folder, name, moment, count)
    newest = checkpoint.newest_complete(folder / name)
    assert (newest and checkpoint.read_progress(newest).step) == left
    if left is None:
        return
    # A line that was being written when the run died.
    with (folder / name / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "loss": 3.')
    run_program(2, resume, folder, name, {})
    assert losses(folder, name) == losses(folder, "whole")
    assert held_out(folder, name) == held_out(folder, "whole")
    assert not [path for path in (folder / name / "checkpoints").iterdir() if path.name.startswith(".step-000004")]


def resume(folder, name, changes):
    program.train(folder, name, resume=True, **changes)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_resumed_on_other_ranks_and_longer(folder, tmp_path, ranks):
    """Started on 2 ranks, continued on others, and then to more steps than were asked for at first."""
    import shutil

    shutil.copytree(folder / "whole", tmp_path / "run")
    (tmp_path / "text.txt").write_bytes((folder / "text.txt").read_bytes())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    parallel = ParallelConfig(data_parallel=2) if ranks == 4 else ParallelConfig()
    run_program(ranks, resume, tmp_path, "run", {"parallel": parallel})
    expected = losses(folder, "whole")
    for step, values in losses(tmp_path, "run").items():
        assert values == pytest.approx(expected[step], rel=1e-4), step


def test_truncated_and_foreign_checkpoints(folder, tmp_path):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    newest = run / "checkpoints" / "step-000006"
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.newest_complete(run).name == "step-000004"
    with pytest.raises(UserError, match=r"optimizer.safetensors is truncated: \d+ of \d+ bytes"):
        checkpoint.read_progress(newest)
    (newest / "state.json").write_text('{"format": "somebody else\'s"}')
    with pytest.raises(UserError, match=r"state\.json is not of format bmburst-checkpoint-1"):
        checkpoint.read_progress(newest)
    (newest / "state.json").unlink()
    with pytest.raises(UserError, match=r"it has no state\.json"):
        checkpoint.read_progress(newest)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    assert checkpoint.newest_complete(run) is None


def test_a_checkpoint_of_another_model_or_text_does_no_damage(folder, tmp_path):
    import shutil
    from dataclasses import replace

    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    text = tmp_path / "text.txt"
    text.write_bytes((folder / "text.txt").read_bytes())
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    wider = {"model": replace(program.SHAPE, intermediate_size=32)}
    run_program(2, refused, tmp_path, wider, "intermediate_size is 32 in this model but 24")
    text.write_text("another text\n" * 400)
    run_program(2, refused, tmp_path, {}, "the data does not go on from this checkpoint")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def refused(folder, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        resume(folder, "run", {"steps": 8, **changes})
    assert len(str(caught.value).splitlines()) <= 3

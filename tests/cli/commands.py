"""Commands that are refused, and the runs and GPUs that they find."""

import json

from bmburst.cli import main
from bmburst.train.resolve import resolve, write_run_config


def checkpoint(folder, step):
    """Write what counts as a complete checkpoint."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    state = {"format": "bmburst-checkpoint-1", "step": step, "data": {}, "tokenizer": "bytes", "files": {}}
    (path / "state.json").write_text(json.dumps(state))
    return path


def refused(capsys, *argv):
    capsys.readouterr()
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bmburst {argv[0]}: ")
    assert len(err.splitlines()) <= 3
    return err


def see_gpus(monkeypatch, *found, by="launch.devices"):
    """Let a module of `bmburst` see these GPUs."""
    monkeypatch.setattr(f"bmburst.{by}.gpus", lambda: found)


def started(tmp_path, **options):
    write_run_config(resolve((), options), tmp_path / "run")
    return tmp_path / "run"

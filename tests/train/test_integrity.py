"""Flipped bits and full disks: seen, told, and the last whole checkpoint serves."""

import contextlib
import errno
import io
import json
import math
import random
import resource
import shutil
import signal

import pytest

from bmburst.checkpoint import files as checkpoint_files
from bmburst.checkpoint import training as checkpoint
from bmburst.checkpoint.conversion import convert
from bmburst.checkpoint.files import newest_whole, require_whole
from bmburst.checkpoint.sharded_files import GatheredTensors, on_every_rank
from bmburst.cli import main
from bmburst.cli.run_folder import bytes_to_come, checkpoint_bytes
from bmburst.errors import RunError
from bmburst.outputs import require_space
from bmburst.train.config import DataConfig, EvalConfig, TrainConfig
from bmburst.train.text import open_text
from tests import lazy
from tests.distributed.programs import on_program, run_program
from tests.pairs import long
from tests.refusals import refused, says
from tests.train import run_program as program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_program(2, _saves, folder)
    return folder


def _saves(folder):
    ours = program.trainer(folder, "run")
    for part_bytes in (None, 1):
        progress = checkpoint_files.RunProgress(step=ours.steps_done, data=ours.batches.state_dict(), tokenizer="bytes")
        parts = {"keep": 2, "part_bytes": part_bytes}
        checkpoint.Draft.of(folder / "run", ours.model, ours.optimizer, progress, **parts).write(GatheredTensors())
        ours.step()
    if ours.is_main:
        from bmburst.train.resolve import write_run_config

        write_run_config(ours.config, folder / "run")


def flip(path, flips):
    data = bytearray(path.read_bytes())
    data[flips.randrange(len(data))] ^= 1 << flips.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("count", [3, *long(25)])  # of each file
def test_no_flipped_bit_goes_unseen(folder, tmp_path, count):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    old, new = sorted((run / "checkpoints").iterdir())
    state = json.loads((new / "state.json").read_text())
    assert set(state["checksums"]) == set(state["files"]) == {path.name for path in new.iterdir()} - {"state.json"}
    assert len(state["files"]) == 8  # two parts and an index of model and of optimizer, config.json and random numbers
    assert newest_whole(run, pytest.fail) == new
    flips = random.Random(18)
    for path in sorted(new.iterdir()):
        whole = path.read_bytes()
        for _ in range(count):
            flip(path, flips)
            said = []
            with refused(new.name, path.name, "fix: ", "another checkpoint"):
                require_whole(new)
            assert newest_whole(run, said.append) == old
            assert [new.name in line and path.name in line and old.name in line for line in said] == [True]
            path.write_bytes(whole)
    require_whole(new)
    flip(old / "model.safetensors", flips)
    flip(new / "state.json", flips)
    with refused(run, "no complete checkpoint", "state.json", "1 more", "fix: ", "--output"):
        newest_whole(run, pytest.fail)


def test_a_resumed_run_falls_back_and_says_so(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    flip(tmp_path / "copy" / "run" / "checkpoints" / "step-000001" / "random.safetensors", random.Random(3))
    run_program(2, _falls_back, tmp_path / "copy")
    said = (tmp_path / "copy" / "said").read_text().splitlines()
    assert len(said) == 1
    assert "step-000001" in said[0] and "random.safetensors" in said[0] and "going on from step-000000" in said[0]


def _falls_back(folder):
    ours, said = program.trainer(folder, "run", resume=True), io.StringIO()
    with contextlib.redirect_stderr(said):
        ours.restore()
    assert ours.steps_done == 0
    assert bool(said.getvalue()) == ours.is_main
    if ours.is_main:
        (folder / "said").write_text(said.getvalue())


def test_eval_convert_and_init_from_refuse_a_damaged_one(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(folder / "run", tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step-000001"
    convert(damaged, tmp_path / "good", to="huggingface")
    weights = sorted(damaged.glob("model-*"))[-1]
    data = bytearray(weights.read_bytes())
    data[-3] ^= 4
    weights.write_bytes(data)
    with refused(weights.name, "damaged", "fix: ", "another checkpoint"):
        convert(damaged, tmp_path / "bad", to="huggingface")
    for argv in (
        ["convert", str(damaged), str(tmp_path / "bad"), "--to", "huggingface"],
        ["eval", "--checkpoint", str(damaged), "--data", str(folder / "text.txt"), "--sequence-length", "48"],
        ["train", "--init-from", str(damaged), "--output", str(tmp_path / "bad"), "--sequence-length", "48"],
    ):
        assert main(argv) == 2
        err = capsys.readouterr().err
        says(err, weights.name, "damaged", "fix: ", "another checkpoint")
        assert not (tmp_path / "bad").exists()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "older"), "--to", "huggingface"]) == 0
    assert "going on from step-000000" in capsys.readouterr().err


def test_a_checkpoint_without_checksums_still_loads(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    for path in (tmp_path / "copy" / "run" / "checkpoints").glob("*/state.json"):
        state = json.loads(path.read_text())
        earlier = {key: state[key] for key in state if not key.startswith(("checksum", "version"))}
        path.write_text(json.dumps(earlier, indent=2))
    run_program(2, _restores, tmp_path / "copy")


def _restores(folder):
    ours = program.trainer(folder, "run", resume=True)
    ours.restore()
    assert ours.steps_done == 1


@on_program(2)
def test_damaged_tokens_are_seen_before_training(tmp_path):
    from bmburst.data import open_corpus

    first = program.trainer(tmp_path, "first")  # tokenizes
    damaged = open_corpus(tmp_path / "text.txt", "bytes", tmp_path / "tokens").path
    first.corpus.verify()
    on_every_rank(lambda: None)
    if first.is_main:
        data = bytearray(damaged.read_bytes())
        data[1000] ^= 1
        damaged.write_bytes(data)
    on_every_rank(lambda: None)
    source = {"source": str(damaged), "held_out_fraction": 0.2}
    with refused("damaged", "checksum", "crc32:", "again"):  # the first rank of a host reads, and all hear of it
        program_corpus(tmp_path, first, DataConfig(**source))
    on_every_rank(lambda: None)
    program_corpus(tmp_path, first, DataConfig(**source, verify=False))
    # An evaluation reads them on one rank, and every rank hears of it.
    from bmburst.train import evaluate

    saved = first.save()
    with refused("damaged", "checksum", "crc32:", "again"):
        evaluate.evaluate_checkpoint(EvalConfig(checkpoint=saved, data=str(damaged), sequence_length=48))


@on_program(2)
def test_files_that_differ_between_hosts_are_refused(tmp_path):
    """The same name of a folder that the hosts do not share: ranks trained on parts of two texts, or of two models."""
    from bmburst.checkpoint import hugging_face
    from bmburst.train import evaluate

    ours = program.trainer(tmp_path, "first")
    text = tmp_path / f"{'first' if ours.is_main else 'other'}.txt"
    text.write_text(f"a text of {text.stem}. " * 200)
    words = ("rank 1 on host", "another one than rank 0", "fix: give all hosts the same files")
    with refused("data", ".txt", *words):
        program_corpus(tmp_path, ours, DataConfig(source=str(text)))
    saved = ours.save()
    with refused("data", ".txt", *words):
        evaluate.evaluate_checkpoint(EvalConfig(checkpoint=saved, data=str(text), sequence_length=48))
    ours.step()
    later = ours.save()
    with refused("weights of", *words):
        hugging_face.load(ours.model, saved if ours.is_main else later)
    with refused("rank 1 on host", "gone"):  # rank 0 shows it, on whose host the file is
        hugging_face.load(ours.model, saved if ours.is_main else tmp_path / "gone")


@on_program(2)
def test_every_rank_gets_the_error_of_one_with_its_file():
    rank = lazy.bmt.rank()
    for given in ((errno.ENOSPC, "no room", "/disk/weights"), (errno.EIO, "the disk")):

        def write(given=given):
            if rank == 1:
                raise OSError(*given)
            return rank

        with pytest.raises(OSError, match=given[1]) as raised:
            on_every_rank(write)
        found = raised.value
        assert (found.errno, found.strerror, found.filename) == (*given, None)[:3]
    assert on_every_rank(lambda: rank) == [0, 1]


def program_corpus(folder, first, data):
    return open_text(program.config(folder, "other", data=data), folder / "other", first.runtime)


# Disks


@on_program(2, fresh=True)
def test_a_full_disk_leaves_the_last_whole_checkpoint(tmp_path):
    ours = program.trainer(tmp_path, "run")
    first = ours.save()
    before = {path: path.read_bytes() for path in first.iterdir()}
    ours.step()
    sizes = sorted({path.stat().st_size for path in first.iterdir()})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint.free_bytes = lambda at: len(list(at.rglob(".step-*")))  # told without the unfinished one
    for most in (1, sizes[0] // 2, sizes[-2] - 1, sizes[-1] - 1):
        words = ("ulimit -f", "another file system") if most == 1 else ("room", "0 bytes are free")
        checkpoint.EFBIG = errno.EFBIG if most == 1 else None  # the limit stands for a disk that is full
        if ours.is_main:  # the other rank writes nothing, and must hear of it
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with refused("cannot write", "step-000001", "File too large", *words, "from step-000000"):
                ours.save()
        finally:  # a failure is written to a file too
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in first.parent.iterdir()] == [first.name]
        assert {path: path.read_bytes() for path in first.iterdir()} == before
        checkpoint_files.require_whole(first)
        on_every_rank(lambda: None)  # or the next one is begun while the other rank looks
    assert ours.save().name == "step-000001"


def test_what_a_run_will_write_is_compared_with_what_is_free(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    launched = []
    monkeypatch.setattr("bmburst.launch.launcher.launch", lambda *_: launched.append(1) or 0)
    size = checkpoint_bytes(TrainConfig())
    (tmp_path / "x.txt").write_text("some text " * 2000)
    argv = ["train", "--output", "run", "--data", "x.txt", "--sequence-length", "64"]
    for free, status, more in (
        (3 * size, 2, []),
        (3 * size + 50_000, 0, []),
        (3 * size, 0, ["--keep-checkpoints", "1"]),
        (size, 2, ["--checkpoint-every", "0"]),
        (size + 50_000, 0, ["--checkpoint-every", "0"]),
        (size, 0, ["--checkpoint-every", "never"]),
        (10_000, 2, ["--checkpoint-every", "never"]),
    ):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        monkeypatch.setattr("bmburst.outputs.free_bytes", lambda _, free=free: free)
        assert main([*argv, *more]) == status, (free, more)
        err = capsys.readouterr().err
        if status:
            says(err, "free", "make room")
            assert not (tmp_path / "run").exists()
    require_space({"nothing": (tmp_path, 0)}, "")


def test_checkpoints_to_come(tmp_path):
    config, one = TrainConfig(steps=200, checkpoint_every=50), checkpoint_bytes(TrainConfig())
    assert one == TrainConfig().model.num_parameters * 12
    assert checkpoint_bytes(TrainConfig(dtype="bfloat16")) == TrainConfig().model.num_parameters * 14
    assert bytes_to_come(config, tmp_path) == 3 * one
    assert bytes_to_come(config.replace(checkpoint_every=150), tmp_path) == 2 * one
    assert bytes_to_come(config.replace(checkpoint_every=0), tmp_path) == one
    assert bytes_to_come(config.replace(checkpoint_every=None), tmp_path) == 0
    for step in (50, 100):
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        path.mkdir(parents=True)
        state = {"format": checkpoint_files.FORMAT, "step": step, "data": {}, "tokenizer": "bytes", "files": {}}
        (path / "state.json").write_text(json.dumps(state))
    assert bytes_to_come(config, tmp_path) == one
    assert bytes_to_come(config.replace(steps=100), tmp_path) == 0


@on_program(1, fresh=True)
def test_never_writes_no_checkpoint(tmp_path):
    program.train(tmp_path, "run", checkpoint_every=None, steps=2)
    assert not (tmp_path / "run" / "checkpoints").exists()
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["checkpoint_every"] is None
    # A run that ends for skipped steps advises what is possible.
    for every, advice in ((None, "no checkpoint"), (1, "--resume | last checkpoint")):
        ours = program.trainer(tmp_path, f"skips-{every}", max_skipped_steps=1, checkpoint_every=every, steps=4)
        ours.step()
        if every:
            ours.save()
        original = ours.model.loss
        ours.model.loss = lambda *args, original=original, **kwargs: original(*args, **kwargs) * math.nan
        with refused("1 steps", advice, error=RunError):
            ours.train()
    # One that is asked to stop saves nothing either.
    ours = program.trainer(tmp_path, "stopped", checkpoint_every=None, steps=9)
    next_batch = ours.next_batch

    def asked_to_stop():
        signal.raise_signal(signal.SIGTERM)
        return next_batch()

    ours.next_batch = asked_to_stop
    with contextlib.redirect_stderr(io.StringIO()) as said:
        ours.train()
    assert ours.steps_done == 1 and "nothing is saved" in said.getvalue()
    assert not (tmp_path / "stopped" / "checkpoints").exists()

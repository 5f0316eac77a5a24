"""The next batch is made while the step runs: in order, none skipped, and what goes wrong comes out at its step."""

import os
import threading

import pytest
import torch

from bmburst.data import Batches, PackedSequences
from bmburst.errors import UserError
from bmburst.sequence import SequenceShard
from bmburst.train.loading import Loader, LocalBatch, Prefetch
from tests import tiny
from tests.distributed.started import run_python

SECONDS = 30  # until a test is sure that nothing comes


class Kitchen:
    """Makes what is asked for, and tells who asked in which order and in which thread."""

    def __init__(self):
        self.made, self.threads = [], set()
        self.finished = {key: threading.Event() for key in range(10)}

    def __call__(self, key):
        self.made.append(key)
        self.threads.add(threading.current_thread())
        self.finished[key].set()
        if key == 3 and self.made.count(3) == 1:
            raise OSError("the disk is gone")
        return -key


def test_the_next_is_made_before_it_is_asked_for():
    kitchen = Kitchen()
    prefetch = Prefetch(kitchen)
    for key in range(3):
        assert prefetch.take(key, key + 1) == -key
        assert kitchen.finished[key + 1].wait(SECONDS)
        assert kitchen.made == list(range(key + 2))
    assert threading.main_thread() not in kitchen.threads
    with pytest.raises(OSError, match="the disk is gone"):
        prefetch.take(3, 4)
    assert prefetch.take(3) == -3  # asked again, made again
    assert kitchen.made == [0, 1, 2, 3, 3]


def test_another_than_was_announced():
    kitchen = Kitchen()
    prefetch = Prefetch(kitchen)
    assert prefetch.take(1, 2) == -1
    assert prefetch.take(5, 6) == -5
    assert prefetch.take(6) == -6
    assert kitchen.made == [1, 2, 5, 6]
    assert prefetch.take(7) == -7
    assert kitchen.made == [1, 2, 5, 6, 7]


def test_it_does_not_keep_the_process(tmp_path):
    """The thread is waited for a moment, no longer: it would sleep for an hour."""
    program = """
import time
from bmburst.train import loading
loading._LAST_SECONDS = 0.1
one = loading.Prefetch(lambda key: time.sleep(key))
one.take(0, 3600)
print("end")
"""
    done = run_python("-c", program, cwd=tmp_path, env=os.environ, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    texts = [f"{i}: " + "text " * (i * 7 % 11) for i in range(60)]
    file = tiny.token_file(tmp_path_factory.mktemp("loading") / "x", texts)
    return PackedSequences(file, split="train", sequence_length=33, pack="documents")


def test_loads_what_is_read_at_once(sequences):
    """Nothing is skipped or taken twice, also where a state is loaded when something else was announced."""
    cut = SequenceShard.cut(33, layout="zigzag", size=2, rank=1)
    loader, batches = Loader(cut, torch.device("cpu")), Batches(sequences, batch_size=2, seed=3)
    straight = Batches(sequences, batch_size=2, seed=3)
    for step in range(len(sequences)):  # more than an epoch
        if step == 5:
            state = batches.state_dict()
            assert state == straight.state_dict()
            batches = Batches(sequences, batch_size=2, seed=3)
            loader.load(batches.coming(), batches.coming(1))
            batches.load_state_dict(state)
        got = loader.load(batches.coming(), batches.coming(1))
        expected = LocalBatch.read(cut, next(straight))
        assert torch.equal(got.ids, expected.ids)
        assert (got.masks, got.length) == (expected.masks, expected.length)
        assert next(batches).text_bytes == straight.text_bytes


def test_a_file_that_cannot_be_read_is_told_at_the_step_that_needs_it(sequences):
    cut = SequenceShard.cut(33, layout="zigzag", size=2, rank=1)
    loader = Loader(cut, torch.device("cpu"))
    batches = Batches(sequences, batch_size=2, seed=3)

    class Lost:
        documents = None

        def __len__(self):
            return 1

        def read(self, *_):
            raise UserError("the file is lost")

    lost = Lost()
    loader.load(batches.coming(), lost)
    with pytest.raises(UserError, match="the file is lost"):
        loader.load(lost)
    loader.load(batches.coming())

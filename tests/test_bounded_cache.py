"""A cache of plans keeps what is asked for again, and lets go of what is many megabytes."""

import weakref
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
import torch

import bmburst
from bmburst.schedule.documents import edges_of
from bmburst.schedule.layout import make_layout
from bmburst.schedule.ring_schedule import make_schedule
from bmburst_ops.bounded_cache import BoundedCache, bounded_cache
from bmburst_ops.flash import inputs, mask_corrections, triton
from bmburst_ops.pattern import Band, Cells, Segments
from tests.distributed.threads import run_ranks
from tests.pairs import in_turn

KIB = 1 << 10
PLANNERS = (
    "bmburst.schedule.documents",
    "bmburst.schedule.layout",
    "bmburst.schedule.ring_schedule",
    "bmburst.schedule.calls",
    "bmburst.attention.call",
    "bmburst.schedule.strategy",
    "bmburst.schedule.gather_plan",
    "bmburst_ops.flash.mask_corrections",
    "bmburst_ops.flash.inputs",
    "bmburst_ops.flash.triton",
)


@dataclass(frozen=True)
class Heavy:
    number: int
    lengths: tuple[int, ...]


def counting(maxsize=1000, nbytes=64 * KIB, make=lambda *_: None):
    calls = []

    @bounded_cache(maxsize=maxsize, nbytes=nbytes)
    def function(*arguments):
        """What it does."""
        calls.append(arguments[0])
        return make(*arguments)

    return function, calls


def array(*_):
    return np.zeros(KIB, np.int64)  # 8 KiB


def test_equal_arguments_are_computed_once_and_give_the_same_object():
    function, calls = counting(make=array)
    assert function(1, "a") is function(1, "a")
    assert function(2, "a") is not function(1, "a")
    assert calls == [1, 2]
    function.cache_clear()
    function(1, "a")
    assert len(calls) == 3
    assert function.__doc__ == "What it does." and function.__name__ == "function"


def test_entries_are_bounded_as_in_lru_cache():
    function, calls = counting(maxsize=2)
    for number in (1, 2, 1, 3, 1, 2):
        function(number)
    assert calls == [1, 2, 3, 2]


class Opaque:
    def __init__(self, number):
        self.number = number

    def __sizeof__(self):
        return 40 * KIB


@pytest.mark.parametrize("where", ["result", "argument", "tensor", "inside", "opaque"])
def test_bytes_are_bounded_wherever_they_are(where):
    alive = weakref.WeakSet()

    def tracked(number):
        heavy = Opaque(number) if where == "opaque" else Heavy(number, tuple(range(1000)))
        alive.add(heavy)
        return heavy

    if where in ("result", "opaque"):
        function, _ = counting(make=tracked)
    elif where == "inside":
        function, _ = counting(make=lambda number: {"a": [(tracked(number),)]})
    elif where == "tensor":
        function, _ = counting(make=lambda number: (tracked(number), torch.zeros(10 * KIB)))
    else:
        function, _ = counting()
    most = []
    for number in range(50):
        function(*(number, tracked(number)) if where == "argument" else (number,))
        most.append(len(alive))
    # 64 KiB hold one to two of 40 KiB each, and four are kept in any case.
    assert max(most) == 4
    assert most[:4] == [1, 2, 3, 4]


def test_small_entries_are_not_let_go_for_bytes():
    function, calls = counting()
    for _ in range(3):
        for number in range(100):
            function(number)
    assert len(calls) == 100


def test_four_entries_are_kept_however_large():
    """The masks of the samples of a batch: each layer asks for them again."""
    function, calls = counting(nbytes=1, make=array)
    for _ in range(5):
        for number in range(4):
            function(number)
    assert len(calls) == 4
    function(5)
    function(5)
    assert len(calls) == 5


def test_what_entries_share_is_counted_once():
    shared = Heavy(0, tuple(range(1000)))  # 40 KB
    function, calls = counting()
    for _ in range(2):
        for number in range(50):
            function(number, shared)
    assert len(calls) == 50


@pytest.fixture
def one_megabyte(monkeypatch):
    """Let all caches of the package hold so much."""
    modules = map(import_module, PLANNERS)
    bounded = [found for module in modules for found in vars(module).values() if isinstance(found, BoundedCache)]
    for cache in bounded:
        cache.cache_clear()
        monkeypatch.setattr(cache, "_most", 1 << 20)
    yield
    for cache in bounded:
        cache.cache_clear()


@pytest.mark.parametrize(("layout", "strategy"), in_turn(["zigzag", "balanced"], ["ring", "gather", "auto"]))
def test_masks_that_are_seen_once_do_not_pile_up(one_megabyte, layout, strategy):
    rng, alive = np.random.default_rng(0), []

    def body(comm, mask):
        q = torch.zeros(1, 128, 1, 8)
        comm.always = comm.active = False  # as on GPUs, where decisions are kept
        bmburst.burst_attention(q, q, q, mask=mask, layout=layout, strategy=strategy, group=comm)

    for _ in range(24):
        mask = bmburst.BlockSparse(rng.random((256, 256)) < 0.5, 1)
        alive.append(weakref.ref(mask.block_map))
        run_ranks(2, body, mask)
        del mask
    kept = sum(reference() is not None for reference in alive)
    assert kept < 20, f"{kept} of 24 maps of 64 KiB are kept, by caches of 1 MiB"


def test_nor_do_plans_of_a_double_ring(one_megabyte):
    alive = []
    for number in range(40):
        mask = bmburst.BlockSparse(np.eye(256) + (np.arange(256) == number), 1)
        make_schedule(make_layout("zigzag", 4, 64), 256, mask, 0, "kv", 2, returning=True)
        alive.append(weakref.ref(mask.block_map))
        del mask
    kept = sum(reference() is not None for reference in alive)
    assert 1 <= kept < 30, f"{kept} of 40 maps of 64 KiB are kept, by caches of 1 MiB"


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "send",
    [
        lambda cells, _: triton._cells(cells, 256, 256, CPU).vectors[0],
        lambda cells, _: triton._intervals(cells, 256, 256, "queries", CPU).vectors[0],
        lambda cells, _: triton._tiles(cells, 256, 256, "keys", 16, 16, CPU).vectors[0],
        lambda _, segments: inputs._offsets(segments, 1, CPU).sent.vectors[0],
        lambda _, segments: mask_corrections._sent(segments, 8200, 8200, CPU).queries.vectors[0],
        lambda _, segments: edges_of((1 + segments.band.left, *segments.queries)),
    ],
    ids=["cells", "intervals", "tiles", "offsets", "empty rows", "edges"],
)
def test_what_is_made_of_patterns_does_not_pile_up(one_megabyte, send):
    alive = []
    for number in range(40):
        start, edges = np.zeros(256, np.int64), np.arange(257)
        cells = Cells(start, start + 256, edges, edges, np.ones((256, 256), bool))
        tokens = (0, *range(8, 8200, 2), 8200)  # eight queries of the first segment, less its key, see nothing
        segments = Segments(Band(number, 0), tokens, (0, 1, *tokens[2:]))
        alive.append(weakref.ref(send(cells, segments)))
    kept = sum(reference() is not None for reference in alive)
    assert 1 <= kept < 10, f"{kept} of 40 are kept, by a cache of 1 MiB"

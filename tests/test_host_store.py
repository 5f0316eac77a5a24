"""Tensors in host memory come back as they were, one block ahead, and take no more memory than they must."""

import mmap
import threading
from pathlib import Path

import pytest
import torch

from bmburst.comm.host_memory import HostMemory, host_block, host_zeros, page_slices
from bmburst.recompute import checkpoint, host_store
from bmburst.recompute.host_store import HostStore
from tests.live_bytes import LiveBytes

SHAPE = (3, 5, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("numbers", [0, 1, 2047, 2048, 5001])
def test_what_went_comes_back(dtype, numbers):
    rows = torch.randint(0, 2, (numbers, 3)).to(dtype)
    wanted = rows[:, 0] if numbers == 1 else rows.t()  # one number is contiguous with any stride; the others are not
    store = HostStore(piece=4096)
    group = store.new_group()
    number = group.put(wanted)
    store.new_group()  # it has left
    for _ in range(2):
        group.begin()
        got = group.get(number)
        assert (got.dtype == dtype and torch.equal(got, wanted) and got.data_ptr() != wanted.data_ptr()) or not numbers


def test_one_is_in_use_and_one_on_its_way():
    nbytes, alive, store = 4096 * 2, LiveBytes(), HostStore(piece=4096)
    with alive:
        groups = []
        for seed in range(5):
            groups.append(store.new_group())
            groups[-1].put(torch.full((1024,), float(seed), dtype=torch.float64))
            assert alive.now - store.nbytes == nbytes  # the one before has left
        assert store.nbytes == 5 * nbytes
        for i in reversed(range(5)):
            groups[i].begin()
            got = groups[i].get(0)
            assert (got == i).all()
            assert alive.now - store.nbytes == nbytes * (2 if i else 1)
            del got
            groups.pop()
        assert alive.now == store.nbytes == 5 * nbytes


def test_a_chain_leaves_another_as_it_is():
    nbytes, alive, store = 4096 * 2, LiveBytes(), HostStore(piece=4096)
    numbers = torch.full((1024,), 3.0, dtype=torch.float64)
    with alive:
        groups = {chain: store.new_group(chain) for chain in "ab"}
        for group in groups.values():
            group.put(numbers.clone())
        assert alive.now - store.nbytes == 2 * nbytes
        last = store.new_group("a")
        assert alive.now - store.nbytes == nbytes, "the group of the other chain is still there"
        last.put(numbers.clone())
        store.settle("a")
        assert alive.now - store.nbytes == nbytes
        store.settle("b")
        assert alive.now == store.nbytes
        last.begin(ahead=False)
        assert alive.now - store.nbytes == nbytes, "it fetches what its chain had before, and nothing else"
        groups["b"].begin()
        assert torch.equal(groups["b"].get(0), numbers)
        groups["a"].begin()
        assert torch.equal(groups["a"].get(0), numbers)


def test_a_block_without_groups_prefetches_those_before_it():
    """Of the same forward: a later one has groups of its own."""
    nbytes, alive, store = 4096 * 2, LiveBytes(), HostStore(piece=4096)
    numbers = torch.full((1024,), 3.0, dtype=torch.float64)
    with alive:
        groups = []
        for chain in "aab":
            groups.append(store.new_group(chain))
            groups[-1].put(numbers.clone())
        hook = store.prefetcher()
        later = store.new_group("a")
        later.put(numbers.clone())
        for chain in "ab":
            store.settle(chain)
        assert alive.now == store.nbytes
        hook(numbers)
        assert alive.now - store.nbytes == 2 * nbytes  # of each chain the last one before the hook
        later.begin(ahead=False)
        assert alive.now - store.nbytes == 2 * nbytes  # another group is taken: the prefetched one has left
        groups[1].begin()
        assert torch.equal(groups[1].get(0), numbers)
        del groups, later
        assert hook(numbers) is None  # a graph that is gone


def test_memory_of_the_host_is_used_again():
    store = HostStore(piece=4096)
    for size in (10_000, 9_000, 4_097):
        for _ in range(3):
            made = [store.new_group() for _ in range(2)]
            for group in made:
                group.put(torch.zeros(size, dtype=torch.uint8))
            del made, group
    # Twice two whole pieces and one for the rest, and rests of another size.
    assert store.nbytes <= 2 * (2 * 4096 + 4096)


def test_memory_that_copies_may_still_read_is_not_a_cpu_tensors(monkeypatch):
    """A piece of a GPU's tensor is given back when the host is done with it: its copies may not be."""
    memory = HostMemory()
    store, made, real = HostStore(memory, piece=4096), [], torch.empty

    def spy(*size, pin_memory, **more):
        made.append(pin_memory)
        return real(*size, **more)

    monkeypatch.setattr(torch, "empty", spy)
    for size in (1024, 4096):
        for pinned in (False, True):
            store.give_back([store.take(size, pinned=pinned)], pinned=pinned)
    assert made == [False, True, False]  # pinned pieces of the full size come from the host memory
    allocated = 2 * 1024 + (1 + host_store.AT_ONCE) * 4096
    assert memory.nbytes == host_store.AT_ONCE * 4096 and store.nbytes == allocated
    taken = [store.take(size, pinned=pinned) for size in (1024, 4096) for pinned in (True, False)]
    assert sum(map(len, taken)) == 2 * (1024 + 4096) and store.nbytes == allocated


def test_prepared_blocks_are_waited_for_and_taken_in_order():
    memory = HostMemory()
    memory.wait()  # there is none
    memory.prepare([4096, 8192, 4096])
    memory.wait()
    assert all(block.done() for blocks in memory._prepared.values() for block in blocks)
    taken = [memory.take(size) for size in (8192, 4096, 4096, 4096)]
    assert [len(block) for block in taken] == [8192, 4096, 4096, 4096]
    assert len({block.data_ptr() for block in taken}) == 4 and memory.nbytes == 8192 + 3 * 4096


def test_a_block_that_is_not_begun_does_not_wait_for_those_before_it():
    made, taken = [], threading.Event()

    def slow(size, device):
        made.append((size, threading.current_thread() is threading.main_thread()))
        if size == 8192:
            assert taken.wait(60)
        return host_block(size, device)

    memory = HostMemory(slow)
    memory.prepare([8192, 4096])
    assert len(memory.take(4096)) == 4096 and (4096, True) in made
    taken.set()
    assert len(memory.take(8192)) == 8192 and sorted(made) == [(4096, True), (8192, False)]
    memory.wait()
    assert memory.nbytes == 8192 + 4096


@pytest.mark.parametrize("count", [1, 3, 16])
def test_every_page_is_touched(count):
    page = mmap.PAGESIZE
    for size in (0, 1, page, page + 1, 3 * page - 1, 50 * page, 51 * page + 7):
        slices = page_slices(size, count)
        touched = [byte for each in slices for byte in range(*each.indices(size))]
        assert touched == list(range(0, size, page)) and len(slices) <= count


def test_memory_of_the_host_may_have_huge_pages_and_forks_do_not_copy_it():
    block, flags, is_there = host_block(1 << 22, None), [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            is_there = begin <= block.data_ptr() < end
        elif is_there and name == "VmFlags:":
            flags = values
    assert "wf" in flags and "sh" not in flags  # shared memory has no huge pages by default
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (1 << 20,)])
def test_zeros_of_the_host(shape):
    for dtype in (torch.float32, torch.int16):
        made = host_zeros(torch.Size(shape), dtype)
        assert made.shape == shape and made.dtype == dtype and not made.any()
        made += 1  # they can be written
        assert made.sum() == made.numel()


def test_another_order_drops_what_was_sent_for_in_vain():
    store, alive = HostStore(piece=4096), LiveBytes()
    with alive:
        groups = [store.new_group() for _ in range(4)]
        for i, group in enumerate(groups):
            group.put(torch.full((512,), float(i), dtype=torch.float64))
        store.new_group()
        for group in groups:
            group.release()
        empty = alive.now
        for i in (3, 1, 2, 0):
            groups[i].begin()
            got = groups[i].get(0)
            assert got[0] == i and got[-1] == i
            del got
            assert alive.now - empty <= 4096 + 16  # the next one
        fresh = store.new_group()
        fresh.put(torch.zeros(512, dtype=torch.float64))
        assert alive.now - empty <= 4096 + 4096 + 16


def test_a_change_in_place_on_the_way_is_an_error():
    store = HostStore(piece=4096)
    group, x = store.new_group(), torch.zeros(SHAPE)
    group.put(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        store.new_group()


@pytest.mark.parametrize("policy", ["block+offload", "block-keep-attention+offload-all"])
def test_a_chain_of_blocks_holds_one_input(policy):
    """Between forward and backward one input is on the device, in backward two; without offload, all."""
    layers, x = 6, torch.randn(64, 16, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in range(layers)]

    def run(policy, store):
        y = x * 1
        for weight in weights:
            y = checkpoint(policy, lambda t, w: t + torch.tanh(t @ w.detach()) @ w, y, weight, store=store)
        return y

    def step(policy, store, alive):
        loss = run(policy, store).square().sum()
        held = alive.now
        losses.append(loss)  # held during the next step, as callers do
        return held, torch.autograd.grad(loss, (x, *weights))

    store, losses = HostStore(piece=4096), []
    with LiveBytes() as alive:
        plain, wanted = step("block", None, alive)
    with LiveBytes() as alive:
        first, got = step(policy, store, alive)
    taken = store.nbytes
    with LiveBytes() as alive:
        second, again = step(policy, store, alive)
    assert store.nbytes == taken  # no new host memory
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(wanted, got, again, strict=True))
    # Weights are inputs that need a gradient too, and leave as well: they were here before.
    assert plain - second >= (layers - 1) * x.nbytes - 64
    assert first - taken == second

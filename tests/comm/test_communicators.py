"""Every communicator says the same: threads, gloo processes; views, dtypes, lost ranks, groups."""

import random
import time
import weakref
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import bmburst
from bmburst.comm import collectives
from bmburst.comm.collectives import ProcessGroupCommunicator, number_of_groups
from bmburst.comm.groups import communicator
from bmburst.errors import UserError
from bmburst.mesh import Mesh, MeshShape, current_mesh, using_mesh
from bmburst.schedule.exchange import Block, Move, make_exchange
from tests.distributed.processes import run_processes
from tests.distributed.threads import LostRank, run_ranks
from tests.pairs import long
from tests.refusals import refused

SIZES = [1, 2, 3, 4]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def verbs(comm, device="cpu"):
    """Checks each verb against what it means; tensors are views with strides, offsets and odd shapes."""
    rank, size = comm.rank, comm.size
    assert communicator(comm) is comm

    def of(source):  # what rank `source` holds: a transposed slice, not contiguous
        return torch.arange(60.0, device=device).reshape(3, 4, 5).add(1000 * source)[:, 1:, ::2].transpose(0, 1)

    mine = of(rank)
    for shift in (1, -1, 2):
        passed = comm.ring(mine, mine[0].to(torch.bfloat16), torch.tensor(rank, device=device), shift=shift)
        later = comm.ring(mine + 0.5)  # two in flight
        a, b, c = passed.wait()
        source = (rank - shift) % size
        assert torch.equal(a, of(source))
        assert torch.equal(b, of(source)[0].to(torch.bfloat16))
        assert c.item() == source
        assert a.is_contiguous() or shift % size == 0
        assert torch.equal(later.wait()[0], of((rank - 1) % size) + 0.5)

    rows = torch.stack([of(rank) + 0.01 * to for to in range(size)]).transpose(1, 2)
    (got,) = comm.all_to_all(rows).wait()
    assert torch.equal(got, torch.stack([of(r) + 0.01 * rank for r in range(size)]).transpose(1, 2))
    assert torch.equal(comm.all_to_all_here(rows.contiguous()), got)
    assert comm.all_to_all_here(rows[:, :0].contiguous()).numel() == 0

    (got,) = comm.all_gather(mine).wait()
    assert torch.equal(got, torch.stack([of(r) for r in range(size)]))
    (got,) = comm.all_gather(torch.tensor(7 + rank, device=device)).wait()
    assert got.tolist() == [7 + r for r in range(size)]
    (got,) = comm.all_gather(mine[1:2, 2, 0]).wait()  # one number, from a row: contiguous, of whatever stride
    assert got.tolist() == [[of(r)[1, 2, 0]] for r in range(size)]

    (got,) = comm.reduce_scatter(rows).wait()
    expected = sum(of(r) + 0.01 * rank for r in range(size)).transpose(0, 1)
    torch.testing.assert_close(got, expected)
    (got,) = comm.reduce_scatter(torch.arange(size, device=device)).wait()
    assert got.item() == size * rank

    before = mine.clone()
    (got,) = comm.all_reduce(mine).wait()
    torch.testing.assert_close(got, sum(of(r) for r in range(size)))
    got += 1
    assert torch.equal(mine, before)
    (got,) = comm.all_reduce(torch.ones(1, device=device).expand(3)).wait()
    assert got.tolist() == [size] * 3

    for dtype in DTYPES:  # moving takes every dtype
        every = torch.tensor([[r, 1, 0] for r in range(size)], device=device).to(dtype)
        for got, wanted in (
            (comm.ring(every[rank]), every[(rank - 1) % size]),
            (comm.all_gather(every[rank]), every),
            (comm.all_to_all(every[rank].expand(size, 3)), every),
        ):
            (tensor,) = got.wait()
            assert tensor.dtype == dtype and tensor.shape == wanted.shape
            assert raw(tensor).equal(raw(wanted))
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        (got,) = comm.all_reduce(torch.full((3,), rank, device=device).to(dtype)).wait()
        assert got.dtype == dtype and got.tolist() == [sum(range(size))] * 3
    for verb in (comm.ring, comm.all_to_all, comm.all_gather, comm.reduce_scatter, comm.all_reduce):
        assert all(t.numel() == 0 for t in verb(torch.empty(size, 0, device=device)).wait())
        transfer = verb(torch.ones(size, 2, device=device))
        first = [t.clone() for t in transfer.wait()]
        assert all(torch.equal(a, b) for a, b in zip(first, transfer.wait(), strict=True))  # waiting again is allowed
    random_exchanges(comm, device)


def random_exchanges(comm, device):
    """Random blocks between all ranks, pulled and pushed, in both lanes, boxes growing: equal to what the plan says."""
    rng = random.Random(0)  # the same on every rank
    for turn in range(40 if device == "cuda" else 12):
        nbytes = rng.choice([40_000, 300_000, 5_000_000 if turn > 20 else 70_000])
        pushed, lane = rng.random() < 0.5, rng.randrange(2)
        ranks = range(comm.size)
        moves = {(a, b): random_moves(rng, nbytes, a, b, pushed) for a in ranks for b in ranks}
        exchange = make_exchange(comm.rank, comm.size, nbytes, lambda a, b, moves=moves: moves[a, b])
        if device == "cuda":
            torch.cuda._sleep(rng.randrange(3_000_000) * (1 + comm.rank))  # ranks out of step
        if pushed:
            sources = [content(turn, comm.rank, i, 100_000, device) for i in range(2)]  # made before the offer
            box = comm.inbox(nbytes, lane)
            transfer = comm.push(exchange, sources, box, lane)
            transfer.wait()
            wanted = [box.clone()]  # once it is offered, nobody knows what is in it
        else:
            box = comm.outbox(nbytes, lane)
            box.copy_(content(turn, comm.rank, 0, nbytes, device))
            wanted = [torch.zeros(100_000, dtype=torch.uint8, device=device) for _ in range(2)]
            transfer = comm.pull(exchange, box, [t.clone() for t in wanted], lane)
        for source in ranks:
            for from_, to in moves[source, comm.rank]:
                data = content(turn, source, from_.buffer, 100_000 if pushed else nbytes, device)
                strided(wanted[to.buffer], to).copy_(strided(data, from_))
        for got, expected in zip(transfer.wait(), wanted, strict=True):
            assert torch.equal(got, expected), (turn, pushed, lane)


@lru_cache(maxsize=32)
def content(turn, rank, buffer, nbytes, device):
    """What a rank has in a buffer in a turn."""
    return torch.arange(nbytes, device=device).mul(7 * rank + 3 * buffer + turn + 1).remainder(251).byte()


def random_moves(rng, nbytes, source, target, pushed):
    """Up to four moves; each writes 512 bytes of its own in its target."""
    moves = []
    for place in rng.sample(range(4), rng.randrange(5)):
        start = source * 2048 + place * 512
        rows = rng.choice([1, 1, 4, 7])
        width = rng.randrange(1, 512 // rows - 8)
        pitch, from_pitch = width + rng.choice([0, 5]), width + rng.choice([0, 11])
        offset = rng.randrange((100_000 if pushed else nbytes) - rows * from_pitch)
        free = rng.randrange(2)
        moves.append(
            Move(
                Block(offset, width, rows, from_pitch, free if pushed else 0),
                Block(start, width, rows, pitch, 0 if pushed else free),
            )
        )
    return moves


def strided(flat, block):
    return flat.as_strided((block.rows, block.width), (block.pitch or block.width, 1), block.offset)


def starts_before_its_peer(comm, folder, device="cpu"):
    """A call returns its handle although no other rank has called yet."""
    flag = Path(folder) / "started"
    if comm.rank:
        while not flag.exists():
            time.sleep(0.01)
    with_checks, comm.active = comm.active, False  # comparing is what blocks
    transfer = comm.ring(torch.tensor(comm.rank, device=device))
    comm.active = with_checks
    flag.touch()
    assert transfer.wait()[0].item() == (comm.rank - 1) % comm.size


@pytest.mark.parametrize("size", SIZES)
def test_threads(size, tmp_path):
    run_ranks(size, verbs)
    run_ranks(size, starts_before_its_peer, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 4, *long(3)])
def test_gloo(size, tmp_path):
    run_processes(size, _over_gloo, str(tmp_path))


def _over_gloo(folder):
    world = communicator(dist.group.WORLD)
    assert (world.rank, world.size, world.transport) == (dist.get_rank(), dist.get_world_size(), "gloo")
    verbs(world)
    handles_outlive_gloos_own(ProcessGroupCommunicator(dist.group.WORLD))
    starts_before_its_peer(world, folder)
    if world.size < 4:
        verbs(communicator(None))
        with pytest.MonkeyPatch.context() as patch:  # the ring as it is made of collectives for nccl
            patch.setattr(dist, "all_to_all", _all_to_all)
            patch.setattr(world.inner, "transport", "nccl")
            verbs(world)
    with refused("group", "process group", "got str", "mesh.sequence"):
        communicator("world")
    if world.size == 2:
        group = dist.new_group([0])
        if world.rank == 1:
            with refused("rank 1", "process group"):
                communicator(group)
        group = dist.new_group([1], use_local_synchronization=True) if world.rank == 1 else None
        assert group is None or communicator(group).rank == 0
        with pytest.MonkeyPatch.context() as patch:  # as of a torch that does not tell it
            patch.delattr(type(dist.distributed_c10d._world), "pg_names")
            assert number_of_groups() is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "number_of_groups", lambda: None)
            alone = ProcessGroupCommunicator(dist.group.WORLD).split([[1], [0]])
            assert (alone.rank, alone.size) == (0, 1)
            (total,) = ProcessGroupCommunicator(dist.group.WORLD).split([[0, 1]]).all_reduce(torch.ones(1)).wait()
            assert total == 2
    if world.size == 4:
        before = dist.distributed_c10d._world.pg_map.copy()
        check_mesh(Mesh.over_process_group(data=4), 4, 1)
        assert dist.distributed_c10d._world.pg_map == before, "a group of one needs no library"
        for data, sequence, tensor in ((2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)):
            check_mesh(Mesh.over_process_group(data=data, tensor=tensor), data, sequence, tensor)
        with pytest.raises(UserError, match=r"disagree|cannot form a mesh"):
            Mesh.over_process_group(data=4 // (world.rank + 1))
        with refused(f"{world.size} ranks", "data 3", "1, "):
            Mesh.over_process_group(data=3 if world.rank == 2 else 2)


def handles_outlive_gloos_own(comm):
    """Or a thread of gloo frees tensors, and waits for Python's lock, which whoever joins the thread may hold."""

    def handle_of(elements):
        transfer = comm.all_reduce(torch.ones(elements))
        handle = weakref.ref(transfer._works[0])
        transfer.wait()
        return handle

    handles = [handle_of(3) for _ in range(12)]
    assert [handle() is not None for handle in handles] == [False] * 4 + [True] * 8
    assert handle_of(1 << 19)() is None, "what is kept is small"


def _all_to_all(outputs, inputs, group, async_op):
    """Do as torch's function of lists, which gloo does not have."""
    assert async_op and all(t.is_contiguous() for t in (*outputs, *inputs))
    operations = [
        dist.P2POp(verb, t, group=group, group_peer=peer)
        for verb, tensors in ((dist.isend, inputs), (dist.irecv, outputs))
        for peer, t in enumerate(tensors)
        if t.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return SimpleNamespace(wait=lambda: [work.wait() for work in works])


def check_mesh(mesh, data, sequence, tensor=1):
    assert mesh.shape == MeshShape(data, sequence, tensor)
    place = (mesh.data_rank, mesh.sequence_rank, mesh.tensor_rank)
    assert (mesh.data.rank, mesh.sequence.rank, mesh.tensor.rank) == place
    assert mesh.rank == mesh.world.rank == (place[0] * sequence + place[1]) * tensor + place[2]
    groups = (mesh.shape.data_groups(), mesh.shape.sequence_groups(), mesh.shape.tensor_groups())
    for comm, partition in zip((mesh.data, mesh.sequence, mesh.tensor), groups, strict=True):
        (peers,) = comm.all_gather(torch.tensor(mesh.rank)).wait()
        assert peers.tolist() == next(ranks for ranks in partition if mesh.rank in ranks)
        assert comm.size == len(peers)
    for comm in (mesh.sequence, mesh.data, mesh.tensor):
        if comm.size == 2:  # its ranks are not 0, 1, ... of the world
            verbs(comm)
    assert mesh.sum(mesh.rank) == sum(range(mesh.shape.size))
    with mesh.current():
        assert current_mesh() is mesh
    assert current_mesh() is None
    with refused("mesh | str | fix: bmburst.Mesh"), using_mesh("all"):
        pass


def test_a_group_made_without_a_backend(tmp_path):
    dist.init_process_group(init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    try:
        assert communicator(None).transport == ("nccl" if torch.cuda.is_available() else "gloo")
    finally:
        dist.destroy_process_group()


def test_a_lost_rank_ends_the_others_at_once():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("the reason")
        with pytest.raises(LostRank, match="it ended"):
            comm.ring(torch.zeros(1)).wait()
        comm.ring(torch.zeros(1))

    started = time.monotonic()
    with pytest.raises(KeyError, match="the reason"):
        run_ranks(3, body)
    assert time.monotonic() - started < 10


def test_a_launched_rank_that_has_not_joined_is_not_alone(monkeypatch):
    """Its part would pass for the whole sequence, or the whole sequence for its part."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    whole = torch.randn(1, 8, 2, 4)
    for call in (
        lambda: communicator(None),
        lambda: bmburst.shard(whole),
        lambda: bmburst.unshard(whole, length=8),
        lambda: bmburst.burst_attention(whole, whole, whole),
    ):
        with refused("2 ranks", "not connected", "init_process_group()", "bmburst.start()"):
            call()
    # A size and a rank that are given need no group.
    cut = bmburst.SequenceShard.cut(8, layout="zigzag", size=2, rank=1)
    assert cut.batch(torch.arange(8)[None]).tokens.tolist() == [[2, 3, 4, 5]]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert communicator(None).size == 1


def test_nothing_runs():
    assert (communicator(None).rank, communicator(None).size) == (0, 1)
    with refused("torch.distributed", "not initialised", "init_process_group"):
        Mesh.over_process_group()
    with refused("BMTrain", "bmburst.start()"):
        Mesh.over_bmtrain()

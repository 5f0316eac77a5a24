"""Iterable data sets on several ranks: what each group reads, and what a Trainer learns from them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.data_loader import IterableDatasetShard
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

from bmburst import Mesh, MeshShape, UserError
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import single_rank_group
from bmburst.integrations.transformers_streams import told_of
from bmburst.integrations.transformers_trainer import share_batches
from tests.distributed.processes import run_processes
from tests.distributed.threads import mesh_of, run_ranks
from tests.integrations import transformers_streams_program as program
from tests.refusals import refusal_of, refused, says

Batches = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def _states() -> None:
    """Make accelerate's state of the process, which ranks that are threads would make at once."""
    Accelerator(cpu=True)


class Numbers(IterableDataset[int]):
    """Numbers from the rank's on in a circle: every rank reads them in an order of its own."""

    def __init__(self, count: int, rank: int = 0, *, fails_at: int | None = None) -> None:
        self._count, self._rank, self._fails_at, self._epoch = count, rank, fails_at, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            if number == self._fails_at:
                raise ValueError("the network is down")
            yield (number + self._rank) % self._count + 100 * self._epoch


class Sized(Numbers):
    def __len__(self) -> int:
        return self._count


def loader_of(world: CheckedCommunicator, groups: int, data: Any, *, dispatch: bool = True, **options: Any) -> Any:
    """Return the loader of a rank."""
    alone = single_rank_group()
    mesh = Mesh(MeshShape(groups, world.size // groups, 1), world.rank, world, alone, alone)
    prepared = DataLoader(data, 2, collate_fn=list, **options)
    if dispatch:
        return share_batches(Accelerator(cpu=True).prepare(prepared), mesh)
    source = IterableDatasetShard(data, 2, num_processes=world.size, process_index=world.rank)  # as accelerate makes it
    config = DataLoaderConfiguration(dispatch_batches=False)
    return share_batches(
        Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(source, 2, collate_fn=list)), mesh
    )


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (3, 1), (2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
@pytest.mark.parametrize("dispatch", [True, False])
def test_what_ranks_read(ranks: int, groups: int, count: int, dispatch: bool) -> None:
    """Two epochs of the order of rank 0. Groups read what as many processes of accelerate read.

    The samples of the last round are counted where accelerate counts them: where one rank reads.
    """

    def body(world: CheckedCommunicator) -> tuple[int, list[Batches]]:
        loader = loader_of(world, groups, Numbers(count, world.rank), dispatch=dispatch)
        epochs = [[*loader], [*loader]]
        return loader.dataset.last, epochs

    for rank, (last, epochs) in enumerate(run_ranks(ranks, body)):
        assert last == ((count % (2 * groups) or min(count, 2 * groups)) if dispatch else 0)
        for epoch, found in enumerate(epochs):
            samples = [number + 100 * epoch for number in range(count)]
            assert found == _expected(samples, groups, rank // (ranks // groups), even=dispatch)


def _expected(samples: list[int], groups: int, group: int, *, even: bool) -> Batches:
    """Return the batches of 2 samples that accelerate gives to a process."""
    if groups == 1:
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]
    full = len(samples) - len(samples) % (2 * groups)
    shards = [*IterableDatasetShard(samples[: full if even else None], 2, False, groups, group)]
    found = [shards[i : i + 2] for i in range(0, len(shards), 2)]
    if even and full < len(samples):  # accelerate divides the rest evenly
        rest = samples[full:]
        size = -(-len(rest) // groups)
        found.append((rest + samples * groups)[group * size : group * size + size])
    return found


def test_an_end_without_the_last_samples() -> None:
    def body(world: CheckedCommunicator) -> tuple[int, Batches]:
        loader = loader_of(world, 2, Sized(5), drop_last=True)
        return len(loader), [*loader]

    assert run_ranks(2, body) == [(1, [[0, 1]]), (1, [[2, 3]])]


def test_a_length_and_a_resume() -> None:
    """Trainer resumes with a loader that skips batches. A data set without a length has none here."""

    def body(world: CheckedCommunicator) -> tuple[int, int, Batches]:
        loader = loader_of(world, 1, Sized(5))
        with pytest.raises(TypeError, match="no len"):
            len(loader_of(world, 1, Numbers(5)))
        return len(loader), loader.dataset.last, [*skip_first_batches(loader, 2)]

    assert run_ranks(2, body) == [(3, 0, [[4]])] * 2


def test_random_numbers_go_on_as_on_one_process() -> None:
    torch.manual_seed(3)
    assert [*DataLoader(Numbers(3))]
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert run_ranks(1, lambda world: [*_read_by_two(world)]) == [[[0, 1], [2]]]
    assert torch.equal(torch.rand(1), expected)


def _read_by_two(world: CheckedCommunicator) -> Any:
    """Return a loader that believes to be of two ranks, on one: the threads of ranks share their random numbers."""
    alone = single_rank_group()
    loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(3), 2, collate_fn=list))
    return share_batches(loader, Mesh(MeshShape(1, 2, 1), 0, _Two(world), alone, alone))  # type: ignore[arg-type]


class _Two:
    size = 2

    def __init__(self, world: CheckedCommunicator) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def test_a_data_set_that_fails() -> None:
    """Every rank says so; the others would wait for the one that reads."""

    def body(world: CheckedCommunicator) -> str:
        with refused() as caught:
            _ = [*loader_of(world, 1, Numbers(5, fails_at=3))]
        assert isinstance(caught.value.__cause__, ValueError) == (world.rank == 0)
        return str(caught.value)

    for told in run_ranks(2, body):
        says(told, "rank 0 cannot read Numbers: ValueError: the network is down | fix: ")


def test_a_refusal_of_a_collator_is_told_by_every_rank() -> None:
    def refuse(samples: list[int]) -> None:
        raise UserError(f"no {samples}\nfix: others")

    def body(world: CheckedCommunicator) -> str:
        loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(5), 2, collate_fn=refuse))
        return refusal_of(lambda: [*share_batches(loader, mesh_of(world))])

    assert run_ranks(2, body) == ["no [0, 1]\nfix: others"] * 2


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (ConnectionError, "rank 0 cannot read Numbers: ConnectionError: no route\nfix: the data set or the collator"),
        (UserError, "no route\nto the file"),
    ],
)
def test_an_error_of_a_worker_is_told_without_its_traceback(kind: type[Exception], told: str) -> None:
    try:
        raise kind("no route\nto the file")
    except kind:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(kind) as caught:
        wrapped.reraise()
    assert "Traceback" in str(caught.value)
    assert told_of(caught.value, "Numbers") == told


def test_data_sets_that_ranks_have_parts_of() -> None:
    """Rank 0 would read its own part for all."""
    rows = Dataset.from_list([{"x": i} for i in range(8)]).to_iterable_dataset(num_shards=4)
    for told in run_ranks(2, lambda world: refusal_of(loader_of, world, 1, split_dataset_by_node(rows, 0, 2))):
        says(told, "split by rank | rank 0 | fix: leave split_dataset_by_node out")
    config = DataLoaderConfiguration(dispatch_batches=False)  # shards of ranks look the same
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(rows, 2))
    for told in run_ranks(2, lambda world: refusal_of(share_batches, loader, mesh_of(world))):
        says(told, "IterableDataset cannot be shared | dispatch_batches=True | fix: ")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_as_one_process(ranks: int, tmp_path: Path) -> None:
    """Past the end of the data set, and from a checkpoint; with shards that accelerate would give to ranks."""
    run_processes(ranks, program.run, tmp_path)
    found = torch.load(tmp_path / "found.pt")
    for name in program.NAMES:
        expected = program.trained(name, tmp_path / f"one {name}", None)
        assert len(expected["first"]["losses"]) == 7
        for rank in found:
            is_alike(rank[name], expected)


@pytest.mark.long
def test_groups_train_as_processes(tmp_path: Path) -> None:
    run_processes(2, program.run_groups, tmp_path)
    for rank in torch.load(tmp_path / "found.pt"):
        for name in program.NAMES:
            is_alike(rank["ours"][name], rank["theirs"][name])


def is_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for when in ("first", "again"):
        assert ours[when]["losses"] == pytest.approx(theirs[when]["losses"], rel=1e-5)
        for key, weight in theirs[when]["weights"].items():
            assert float((ours[when]["weights"][key] - weight).abs().max()) < 1e-5, key
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)

"""Runs with small optimizer states: on any ranks, resumed on others, converted, and as good as with fp32 moments."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from bmburst.blocks.config import LoRAConfig
from bmburst.comm.host_memory import host_shard
from bmburst.optim.config import MOMENT_BYTES, OptimizerConfig
from bmburst.plan.counts import adam_bytes
from bmburst.train.config import ParallelConfig, ScheduleConfig
from tests import lazy, tiny
from tests.distributed.programs import on_program, run_program
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import steps

RUNS = {
    "bfloat16": {"dtype": "bfloat16", "optimizer": OptimizerConfig(state="bfloat16")},
    "in host": {"dtype": "bfloat16", "optimizer": OptimizerConfig(state="bfloat16", offload=True)},
    "8bit": {"dtype": "float32", "optimizer": OptimizerConfig(state="8bit")},
    "8bit streamed": {
        "dtype": "bfloat16",
        "recompute": "block+every-2",
        "optimizer": OptimizerConfig(state="8bit", offload=True, offload_weights=True),
    },
    "8bit adapters": {
        "dtype": "bfloat16",
        "lora": LoRAConfig(rank=3),
        "optimizer": OptimizerConfig(state="8bit", offload=True, lr=0.1),
    },
}


def trainer(folder, name, **changes):
    schedule = ScheduleConfig(kind="constant", warmup_steps=0)
    changes = {"schedule": schedule, "parallel": ParallelConfig(), "eval_every": 0} | changes
    if "lora" in changes:
        changes["init_from"] = folder / "base"
    return program.trainer(folder, name, **changes)


def held(made):
    """Return the whole state in fp32 by name."""
    shards = [each for each in lazy.named_shards(made.model) if each.storage.requires_grad]
    return {
        f"{shard.name}.{key}": lazy.gather(shard, made.optimizer.state_of(shard, key), dtype=torch.float32)
        for shard in shards
        for key in lazy.state_names(shard)
    }


def stored(made):
    """Return this rank's state as it is kept."""
    parameters = [each for group in made.optimizer.param_groups for each in group["params"]]
    for kept in filter(None, map(host_shard, parameters)):
        kept.settle()
    states = [made.optimizer.state[each].values() for each in parameters]
    return [value.clone() for state in states for value in state if isinstance(value, torch.Tensor)]


def resumed(folder, name, **changes):
    made = trainer(folder, name, resume=True, **changes)
    made.restore()
    return made


@pytest.mark.long
def test_resumed_on_ranks_that_share_matrices(tmp_path):
    names = ("bfloat16", "8bit")
    run_program(2, _is_uninterrupted, tmp_path, names)
    run_program(2, _goes_on, tmp_path, names, {"parallel": ParallelConfig(tensor_parallel=2)}, tensor=2)
    run_program(3, _goes_on, tmp_path, (*names, "8bit again"))


def test_resumed_is_uninterrupted_on_these_ranks_and_goes_on_elsewhere(tmp_path):
    tiny.save(tmp_path / "base", program.SHAPE)
    names = ("in host", "8bit streamed", "8bit adapters")
    run_program(2, _is_uninterrupted, tmp_path, names)
    for name in names:
        _check_files(tmp_path, name)
    run_program(2, _has_its_bytes_and_refuses_others)
    run_program(3, _goes_on, tmp_path, names)


def _is_uninterrupted(folder, names):
    for name in names:
        changes = RUNS[name]
        made = trainer(folder, name, **changes)
        made.restore()
        steps(made, 3)
        if made.optimizer.kind == "8bit":
            _shrink(made)
        made.save()
        other = resumed(folder, name, **changes)
        assert all(torch.equal(*pair) for pair in zip(stored(other), stored(made), strict=True)), name
        assert steps(other, 2) == steps(made, 2)
        assert all(torch.equal(*pair) for pair in zip(stored(other), stored(made), strict=True)), name
        other = resumed(folder, name, **changes)
        state = held(other)
        if lazy.bmt.rank() == 0:
            torch.save(state, folder / f"{name}.pt")
        if name in ("in host", "8bit"):
            _converts(folder, name, changes, state)


def _shrink(made):
    """Let a parameter have moments that fp32 does not tell from each other: only codes and scales do."""
    shard = next(each for each in lazy.named_shards(made.model) if each.storage.requires_grad)
    for name in ("exp_avg", "exp_avg_sq"):
        made.optimizer.stored_of(shard, name)[1].mul_(1e-38)


def _has_its_bytes_and_refuses_others():
    _takes_its_bytes()
    _refuses_other_states()
    _finds_columns_that_were_split_otherwise()


def _converts(folder, name, changes, state):
    """To every other type of state and back to fp32: no more is lost than the format has."""
    own = changes["optimizer"].state
    for kind in MOMENT_BYTES.keys() - {own}:
        made = resumed(folder, name, **changes | {"optimizer": replace(changes["optimizer"], state=kind)})
        for key, values in held(made).items():
            wanted, is_exact = state[key], kind == "float32" or key.endswith("_param_fp32")
            assert (values - wanted).norm() <= (
                0 if is_exact else 2.0**-8 if kind == "bfloat16" else 0.05
            ) * wanted.norm()
        assert all(math.isfinite(loss) for loss, _ in steps(made, 1))


def _takes_its_bytes():
    """What the planner counts, on the GPU, in host memory, and beside weights in host memory."""
    for dtype, kind, offload in (
        (d, k, o) for d in ("bfloat16", "float16", "float32") for k in MOMENT_BYTES for o in (0, 1)
    ):
        weights = torch.nn.Parameter(torch.ones(2560, dtype=getattr(torch, dtype)))
        weights.grad = torch.ones_like(weights)
        optimizer = lazy.AdamW([weights], lr=1e-3, offload=bool(offload), state=kind)
        optimizer.step()
        tensors = [each for each in optimizer.state[weights].values() if isinstance(each, torch.Tensor)]
        assert sum(each.nbytes for each in tensors) == 2560 * adam_bytes(dtype, kind)


def _refuses_other_states():
    """As torch's own way to save a state, which does not convert; it copies."""

    def made(**options):
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 700).bfloat16())
        return lazy.AdamW([weights], lr=1e-2, **options), weights

    (one, source), (other, target), (fp32, _) = made(state="8bit"), made(state="8bit", offload=True), made()
    for optimizer, weights in ((one, source), (other, target)):
        weights.grad = torch.linspace(-2, 1, 700).bfloat16()
        optimizer.step()
    other.load_state_dict(one.state_dict())
    for name, value in one.state[source].items():
        assert torch.equal(torch.as_tensor(other.state[target][name]), torch.as_tensor(value)), name
    with refused("optimizer state", "8bit", "float32", "fix: "):
        fp32.load_state_dict(one.state_dict())
    with refused("optimizer state", "'int4'", "bfloat16"):
        made(state="int4")
    with refused("kernel bmtrain", "8bit", "fix: "):
        made(state="8bit", kernel="bmtrain")


def _finds_columns_that_were_split_otherwise():
    """Elements of a matrix in the order of its shards, split by columns in `there` parts and in `here`."""
    from bmburst.checkpoint.optimizer_state import _reordered

    whole = torch.arange(36).view(3, 12)
    ordered = {parts: whole.unflatten(1, (parts, -1)).movedim(1, 0).flatten() for parts in (1, 2, 3, 4)}
    for here, there in product(ordered, repeat=2):
        index = _reordered(torch.arange(36), whole.shape, here, there)
        assert torch.equal(ordered[there][index], ordered[here]), (here, there)


def _check_files(folder, name):
    """The file has the state in its type, whole tensors by name; 8 bits with a scale for each block."""
    found = load_file(folder / name / "checkpoints" / "step-000003" / "optimizer.safetensors")
    kind = RUNS[name]["optimizer"].state
    for key, tensor in found.items():
        if key.endswith((".exp_avg", ".exp_avg_sq")):
            assert tensor.dtype == {"bfloat16": torch.bfloat16, "8bit": torch.uint8}[kind]
            assert tensor.dim() <= 2 and (kind == "bfloat16" or f"{key}_scale" in found)
        elif key.endswith("_scale"):
            blocks = -(-found[key.removesuffix("_scale")].numel() // 256)
            assert blocks <= len(tensor) <= blocks + 1  # a rank's cut


def _goes_on(folder, names, changes=None):
    """The state of 2 ranks on others: bf16 to the bit, and so 8 bits but for the blocks that other ranks divide."""
    for name in names:
        own = RUNS[name.removesuffix(" again")]
        made = resumed(folder, name, **own | (changes or {}))
        wanted, is_coded = torch.load(folder / f"{name}.pt"), own["optimizer"].state == "8bit"
        for key, values in held(made).items():
            same = (values == wanted[key]).float().mean()
            assert same == 1 or (is_coded and (values - wanted[key]).norm() <= 0.03 * wanted[key].norm()), key
            assert same > 0.5 or values.numel() < 4096 or changes, key
        if changes and name == "8bit":  # for others, from these ranks' cuts
            made.saves.folder = folder / "8bit again"
            made.save()
            torch.save(wanted, folder / "8bit again.pt")
        assert all(math.isfinite(loss) for loss, _ in steps(made, 1))


def test_the_number_of_ranks_changes_no_bit(tmp_path):
    for size in (1, 3):
        run_program(size, _updates, tmp_path)
    alone, shared = (torch.load(tmp_path / f"{size}.pt") for size in (1, 3))
    assert alone.keys() == shared.keys()
    for (kind, key), values in alone.items():
        same = values == shared[kind, key]
        # Of 8 bits, the blocks that two ranks share differ, and what follows from them.
        assert same.all() if kind == "bfloat16" else same.float().mean() > 0.6 or values.numel() < 2048, (kind, key)
        torch.testing.assert_close(values, shared[kind, key], rtol=0.2, atol=0.02 * values.abs().max().item())


def _updates(folder):
    """Three steps with gradients that do not depend on the number of ranks."""
    found = {}
    for kind in ("bfloat16", "8bit"):
        model = lazy.Llama(program.SHAPE, seed=1, dtype=torch.bfloat16)
        shards = lazy.named_shards(model)
        config = OptimizerConfig(lr=0.02, beta2=0.95, eps=1e-8, weight_decay=0.5, state=kind, offload=True)
        optimizer = lazy.build_optimizer(model, config, seed=5)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for shard in shards:
                if shard.storage.grad is None:
                    shard.storage.grad = torch.zeros_like(shard.storage)
                lazy.scatter(shard, torch.randn(shard.shape, generator=generator), shard.storage.grad)
            optimizer.step()
        for shard in shards:
            for key in lazy.state_names(shard):
                found[kind, f"{shard.name}.{key}"] = lazy.gather(
                    shard, optimizer.state_of(shard, key), dtype=torch.float32
                )
    if lazy.bmt.rank() == 0:
        torch.save(found, folder / f"{lazy.bmt.world_size()}.pt")


@pytest.mark.long
@on_program(1)
def test_held_out_loss_is_that_of_fp32_states(tmp_path):
    """A scaled-down `make train`: within 0.5 % after it has learned most of what it can."""
    found = {}
    for kind in MOMENT_BYTES:
        optimizer = OptimizerConfig(state=kind, offload=True, lr=4e-3, beta2=0.999)
        made = trainer(tmp_path, kind, optimizer=optimizer, steps=60, checkpoint_every=None)
        first = made.evaluate().loss
        steps(made, 60)
        found[kind] = made.evaluate().loss
    assert found["float32"] < 0.6 * first
    for kind, loss in found.items():
        assert loss == pytest.approx(found["float32"], rel=5e-3), kind

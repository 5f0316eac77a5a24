"""Blocks that are recomputed in little memory have the gradients of blocks that keep everything."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import bmburst
from bmburst.blocks import config as block_config
from bmburst.blocks.config import kv_heads_at_once
from bmburst.mesh import Mesh
from bmburst.recompute.host_store import HostStore, OffloadGroup
from bmburst.schedule.documents import Documents
from tests import lazy, tiny
from tests.attention.counting import count_forward, watch_forward
from tests.distributed.programs import on_program, run_program
from tests.pairs import in_turn, long
from tests.refusals import refused

TOKENS = 45
POLICIES = (
    *("block", "block-keep-attention", "block-keep-attention:0.5"),
    *("block+offload", "block-keep-attention+offload", "block-keep-attention+offload-all"),
)
CASES = [*((policy, 7) for policy in POLICIES), ("block", 1), ("block", 0), ("block-keep-attention", 0)]
CASES += [
    ("block-keep-attention+offload-mlp-first-1+first-1", 7),
    ("block-keep-attention+offload-mlp-first-2", 7),
    ("block+offload+offload-mlp-first-1", 0),
]
# Some have more KV heads than 2, 3 or 4 ranks, which then attend with as many at a time.
MODELS = {
    "llama": {"num_heads": 12, "num_kv_heads": 6, "head_dim": 4},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"num_heads": 8, "num_kv_heads": 8},
    "minicpm": {"num_heads": 4, "num_kv_heads": 1},
}
EXACT = {torch.float64: (1e-12, 1e-13), torch.float32: (1e-5, 1e-6)}


def models(families):
    for family in families:
        yield tiny.config(family, vocab_size=53, hidden_size=24, **MODELS[family])


def step(config, policy, dtype, *, batch=2, mask=None, chunk=None, attention=None, zero=3):
    """Return the loss, the gradients of this rank's parts, and the loss without gradients."""
    mesh = Mesh.over_bmtrain()
    attention = attention or partial(lazy.BurstAttention, group=mesh.sequence)
    model = lazy.Llama(config, attention=attention, dtype=dtype, recompute=policy, mlp_chunk=chunk, zero_level=zero)
    shard = bmburst.SequenceShard.cut(TOKENS, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    ids = torch.randint(config.vocab_size, (batch, TOKENS), generator=torch.Generator().manual_seed(1))
    given = shard.batch(ids)
    inputs = given.tokens, given.positions, given.labels, TOKENS, mask
    with torch.no_grad():
        again = model.loss(*inputs)
    loss = model.loss(*inputs)
    loss.backward()
    torch.cuda.current_stream().synchronize()
    gradients = {shard.name: shard.local(shard.storage.grad).clone() for shard in lazy.named_shards(model)}
    return loss.detach(), gradients, again


def require_equal(got, wanted, dtype, what):
    rtol, atol = EXACT[dtype]
    for name, value in {"loss": got[0], "loss without gradients": got[2], **got[1]}.items():
        expected = wanted[0] if name.startswith("loss") else wanted[1][name]
        torch.testing.assert_close(
            value, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{what} {name}: {text}"
        )


@pytest.mark.parametrize(
    ("size", "rows", "families", "cases"),
    [
        (1, 1 << 19, ("qwen3",), CASES),
        (2, 1, ("llama",), CASES[::3]),
        (2, 1, ("minicpm",), CASES[::6]),
        *long((1, 1 << 19, tuple(MODELS), CASES), *((size, 1, tuple(MODELS), CASES) for size in (1, 2, 3, 4))),
    ],
)
@on_program()
def test_gradients_are_those_of_blocks_that_keep_everything(size, rows, families, cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_config, "GROUP_ROWS", rows)
        for config in models(families):
            for dtype in EXACT:
                wanted = step(config, "none", dtype)
                for policy, chunk in cases if dtype == torch.float64 else cases[:1]:
                    if ":0.5" not in policy or not config.sliding_window:  # 0.5 of a window has tests of its own
                        got = step(config, policy, dtype, chunk=chunk)
                        require_equal(got, wanted, dtype, f"{config} {policy} {chunk}")


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@on_program()
def test_a_block_that_saves_everything_prefetches_for_the_one_before(size):
    """Its backward begins with that: the products of a block hide the copies."""
    config, fetched = tiny.config(num_layers=5, num_heads=6, num_kv_heads=3), []
    wanted = step(config, "none", torch.float64)
    prefetcher, start_fetch = HostStore.prefetcher, OffloadGroup.start_fetch

    def watched(store):
        hook = prefetcher(store)

        def called(grad):
            fetched.append("hook")
            hook(grad)

        return called

    def fetch(group):
        fetched.append(group.chain)
        start_fetch(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStore, "prefetcher", watched)
        patch.setattr(OffloadGroup, "start_fetch", fetch)
        policy = "block-keep-attention+offload+offload-mlp-first-2+first-2"
        require_equal(step(config, policy, torch.float64, chunk=7), wanted, torch.float64, policy)
    both = ["MLP outputs", "block inputs"]
    assert fetched[0] == "hook" and sorted(fetched[1:3]) == both and fetched.count("hook") == 1


class _Products(TorchDispatchMode):
    """Appends the width of each product to a list."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self._seen.append(result.shape[-1])
        return result


@on_program(1)
def test_outputs_of_the_mlp_have_time_to_leave():
    """Gate's while up is computed, and both until the next block's gate."""
    seen, put, release = [], OffloadGroup.put, OffloadGroup.release
    config = tiny.config(hidden_size=24, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=8)
    model = lazy.Llama(config, recompute="block-keep-attention+offload-mlp-first-2")
    ids = torch.arange(6)[None]
    with pytest.MonkeyPatch.context() as patch, _Products(seen):
        patch.setattr(OffloadGroup, "put", lambda group, tensor: seen.append("leaves") or put(group, tensor))
        patch.setattr(OffloadGroup, "release", lambda group: seen.append("gone") or release(group))
        model(ids, ids)
    mlp = [40, "leaves", 40, "leaves", 24]
    first, second = seen[: 4 + len(mlp)], seen[4 + len(mlp) :]
    assert first[3:] == [24, *mlp]  # attention's output comes before
    assert "gone" not in first and second[3:6] == [24, "gone", 40]


SEGMENTS = (
    *("block+every-2", "block+every-3", "block+every-4", "block+every-8", "block-keep-attention+every-2"),
    *("block+offload+every-2", "block+every-4+offload-first-1", "block+keep-attention-last-2+offload-first-3"),
    "block+every-3+keep-attention-last-3+offload-first-4",
    "block+every-2+keep-attention-last-3+offload-first-5+offload-attention-first-4",
    "block-keep-attention+every-3+offload-first-5+offload-attention-first-5",
    "block+keep-attention-last-4+offload-first-5+offload-attention-first-3",
)


@pytest.mark.parametrize(
    ("size", "zero"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, 2), (2, 3), (3, 3)))]
)
@on_program()
def test_segments_of_blocks_store_one_input(size, zero):
    config = tiny.config("qwen3", num_layers=5, num_heads=4 * size, num_kv_heads=2 * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_config, "GROUP_ROWS", 1)
        wanted = step(config, "none", torch.float64)
        for policy in SEGMENTS:
            got = step(config, policy, torch.float64, chunk=11, zero=zero)
            require_equal(got, wanted, torch.float64, policy)


@on_program(1)
def test_attention_of_a_segment_runs_again_once():
    config, seen = tiny.config(num_layers=5, num_heads=6, num_kv_heads=3), []
    with pytest.MonkeyPatch.context() as patch:
        count_forward(patch, seen.append)
        for policy, again in {
            "none": 0,
            "block": 5,
            "block+every-2": 5,
            "block+every-8": 5,
            "block+every-3+keep-attention-last-2": 3,
            "block-keep-attention+every-2": 0,
            "block+every-3+keep-attention-last-4+offload-first-4+offload-attention-first-3": 1,
        }.items():
            seen.clear()
            step(config, policy, torch.float32)
            assert len(seen) == 5 + 5 + again, policy  # also without gradients


@on_program(1)
def test_a_segment_has_one_backward():
    model = lazy.Llama(tiny.config(num_layers=3), recompute="block+every-2")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    loss = model.loss(ids, torch.arange(8)[None], ids)
    loss.backward(retain_graph=True)
    with refused("twice", "every-2", "fix"):
        loss.backward()


@on_program(1)
def test_a_loss_that_is_dropped_frees_host_memory_at_once():
    made: list[weakref.ref[OffloadGroup]] = []
    new_group = HostStore.new_group

    def watched(store, chain=""):
        group = new_group(store, chain)
        made.append(weakref.ref(group))
        return group

    ids = torch.zeros(1, 8, dtype=torch.int64)
    for policy, groups in {
        "block-keep-attention+offload": 3,
        "block-keep-attention+offload-mlp-first-2": 2,
        "block+every-2+keep-attention-last-2+offload-first-3+offload-attention-first-3": 3,
    }.items():
        model = lazy.Llama(tiny.config(num_layers=3), recompute=policy)
        made.clear()
        gc.disable()  # what a cycle of references holds is not free
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(HostStore, "new_group", watched)
                loss = model.loss(ids, torch.arange(8)[None], ids)
            assert len([each for each in made if each() is not None]) == groups, policy
            del loss
            assert not [each for each in made if each() is not None], policy
        finally:
            gc.enable()


MASKS = {"documents": Documents((17, 12, 16)), "one for each sample": (Documents((17, 28)), Documents((3, 40, 2)))}


@pytest.mark.parametrize(("size", "mask", "policies"), in_turn([1, 2], MASKS, [[*POLICIES[::5]], [*POLICIES[1:5]]]))
def test_masks_of_a_batch(size, mask, policies):
    run_program(size, _masks_of_a_batch, MASKS[mask], policies)


def _masks_of_a_batch(mask, policies):
    config = tiny.config(num_heads=12, num_kv_heads=6, head_dim=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_config, "GROUP_ROWS", 1)
        wanted = step(config, "none", torch.float64, mask=mask)
        for policy in policies:
            if ":0.5" not in policy:
                require_equal(step(config, policy, torch.float64, mask=mask, chunk=11), wanted, torch.float64, policy)


@pytest.mark.parametrize(
    ("size", "strategies"), [(2, ("heads", "burst")), *long((2, ("gather", "kv")), (4, ("heads", "heads+ring")))]
)
@on_program()
def test_every_strategy_attends_with_some_heads_at_a_time(size, strategies):
    """And with each head as often as where all attend at once; without gradients, forward and backward."""
    config, seen = tiny.config(num_layers=3, num_heads=4 * size, num_kv_heads=2 * size, head_dim=4), []
    group = Mesh.over_bmtrain().sequence
    attention = partial(lazy.BurstAttention, group=group, softcap=5.0)
    wanted = step(config, "none", torch.float64, attention=attention)
    times = {"block": 3 + 3 + 3, "block-keep-attention": 3 + 3, "block+every-2+keep-attention-last-2": 3 + 3 + 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_config, "GROUP_ROWS", 1)
        watch_forward(patch, lambda call, inputs, _: seen.append((call.strategy.ulysses_degree, inputs[1].shape[2])))
        for strategy in strategies:
            attention = partial(lazy.BurstAttention, group=group, softcap=5.0, strategy=strategy)
            for policy, attended in times.items():
                seen.clear()
                got = step(config, policy, torch.float64, attention=attention, chunk=11)
                require_equal(got, wanted, torch.float64, f"{strategy} {policy}")
                degree = {"heads": size, "heads+ring": 2}.get(strategy, 1)
                assert seen == [(degree, size)] * (2 * attended), (strategy, policy)


class TorchAttention(torch.nn.Module):
    """Attention that knows nothing of recomputation."""

    def forward(self, q, k, v, _length, _mask):
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


@on_program(1)
def test_attention_of_a_module_that_is_not_ours():
    config = tiny.config(num_heads=6, num_kv_heads=3)
    wanted = step(config, "none", torch.float64, attention=TorchAttention)
    for policy in ("block", "block-keep-attention"):
        got = step(config, policy, torch.float64, attention=TorchAttention, chunk=7)
        require_equal(got, wanted, torch.float64, policy)


@on_program(1)
def test_what_a_module_returns_is_not_overwritten():
    returned = []

    class Remembering(TorchAttention):
        def forward(self, *given):
            out = super().forward(*given).contiguous()
            returned.append((out.detach(), out.detach().clone()))
            return out

    step(tiny.config(num_heads=6, num_kv_heads=3), "block", torch.float64, attention=Remembering)
    assert len(returned) == 2 * 3 and all(torch.equal(out, as_it_was) for out, as_it_was in returned)


@on_program(1)
def test_16_bits_add_gradients_of_chunks_up_in_fp32():
    """Tokens one by one: sums in bf16 would be off by several percent."""
    config = tiny.config("qwen2")
    exact = step(config, "none", torch.float32)[1]
    whole, chunked = (step(config, "block", torch.bfloat16, chunk=chunk)[1] for chunk in (0, 1))
    for name, wanted in exact.items():
        off = [(each[name].float() - wanted).norm() / wanted.norm() for each in (whole, chunked)]
        assert off[1] < 1.1 * off[0] + 1e-3, (name, off)


def test_as_few_heads_attend_as_keep_a_gpu_busy():
    assert [kv_heads_at_once(8, 32 << shift) for shift in (10, 15, 16, 17, 18, 20)] == [8, 8, 8, 4, 2, 1]
    assert [kv_heads_at_once(8, parts << 21) for parts in (3, 5, 7)] == [2, 1, 1]  # never more than their share
    assert kv_heads_at_once(3, 2 << 21) == 1
    assert [kv_heads_at_once(8, 32 << 20, ranks) for ranks in (1, 2, 3, 4, 8, 16)] == [1, 2, 8, 4, 8, 8]
    assert [kv_heads_at_once(8, 32 << shift, 2) for shift in (14, 16, 17, 18, 19)] == [8, 8, 4, 2, 2]

"""Adapters on frozen weights are PEFT's: losses, gradients, files and merged weights."""

import json
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bmburst
from bmburst.blocks import config as block_config
from bmburst.blocks.config import TARGETS, LoRAConfig
from bmburst.checkpoint import adapter, hugging_face
from bmburst.checkpoint.hugging_face import expected_shapes
from bmburst.cli import main
from bmburst.mesh import Mesh
from bmburst.train.config import ParallelConfig, TrainConfig
from bmburst_ops import nf4
from tests import lazy, tiny
from tests.distributed.programs import on_program, run_program
from tests.pairs import long
from tests.refusals import refused, says

TOKENS = 45
SIZES = {"vocab_size": 53, "hidden_size": 24, "num_heads": 6, "num_kv_heads": 3}
LORAS = (LoRAConfig(rank=3, alpha=5), LoRAConfig(rank=2, alpha=4, targets=("all-linear",)))
POLICIES = ("none", "block", "block-keep-attention", "block+every-2", "block-keep-attention:0.5+offload")
POLICIES += ("block-keep-attention+offload-mlp-first-1",)


def write(folder, family="llama", lora=LORAS[0], **changes):
    """Write a base and an adapter by PEFT, with numbers in B too; return ids and PEFT's loss and gradients."""
    from peft import LoraConfig, get_peft_model

    config = tiny.config(family, **{**SIZES, **changes})
    tiny.save(folder / "base", config)
    model = in_4bit(folder) if lora.is_4bit else tiny.load(folder / "base")
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.matrices), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)  # lora_A: the rounding of unlucky numbers passes 1e-6
    model = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(5)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            each.data.normal_(0, 0.1, generator=generator)
    model.save_pretrained(folder / "adapter")
    ids = torch.randint(config.vocab_size, (2, TOKENS), generator=generator)
    logits = model(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {name.replace(".default", ""): each.grad for name, each in model.named_parameters() if each.requires_grad}
    torch.save((ids, loss.item(), grads), folder / "peft.pt")
    return config


def in_4bit(folder):
    """Move the base aside, put the one in its place that its codes stand for, and return it."""
    (folder / "base").rename(folder / "original")
    model = tiny.load(folder / "original")
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data = nf4.dequantize(nf4.quantize(weight.data), tuple(weight.shape), weight.dtype)
    model.save_pretrained(folder / "base")
    return model


def ours(folder, config, lora, policy, dtype, strategy="auto", **more):
    """Return the loss of all ranks and the gradients by PEFT's names; check that no other weight has one."""
    mesh = Mesh.over_bmtrain()
    attention = partial(lazy.BurstAttention, group=mesh.sequence, strategy=strategy)
    model = lazy.Llama(config, attention=attention, recompute=policy, lora=lora, dtype=dtype, **more)
    hugging_face.load(model, folder / ("original" if lora.is_4bit else "base"))
    adapter.load(model, folder / "adapter")
    ids, *_ = torch.load(folder / "peft.pt")
    shard = bmburst.SequenceShard.cut(TOKENS, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    given = shard.batch(ids)
    loss = model.loss(given.tokens, given.positions, given.labels, TOKENS) / (2 * (TOKENS - 1))
    require_freed(model)
    loss.backward()
    torch.cuda.current_stream().synchronize()
    require_freed(model)
    shards = lazy.named_shards(model)
    frozen = [each for each in shards if not adapter.is_adapter(each.name)]
    assert all(each.storage.grad is None and not each.storage.requires_grad for each in frozen)
    trained = [each for each in shards if adapter.is_adapter(each.name)]
    grads = {adapter.peft_name(each.name): lazy.gather(each, lazy.gradient_of(each)) for each in trained}
    return mesh.sum(loss.item()), grads


def require_freed(model):
    """Check that no matrix that was dequantized is alive outside of its block."""
    from bmburst.blocks.layers import quantized_linears

    linears = quantized_linears(model)
    assert len(linears) == (7 * model.config.num_layers if model.lora.is_4bit else 0)
    assert not any(each.weight.numel() for each in linears.values())


def require_equal(folder, config, lora, *ways, every=False):
    """Check fp32 against PEFT, and fp64 against blocks that keep everything; transformers' norms are always fp32.

    `ways` are policies, each with other options of the model; in fp32 the first two, or `every` one.
    """
    _, *wanted = torch.load(folder / "peft.pt")
    whole = ours(folder, config, lora, "none", torch.float64)
    of_dtypes = (wanted, torch.float32, 1e-6), (whole, torch.float64, 1e-12)
    for (policy, more), (expected, dtype, rel) in (
        *product(ways if every else ways[:2], of_dtypes),
        *product(() if every else ways[2:], of_dtypes[1:]),
    ):
        loss, grads = ours(folder, config, lora, policy, dtype, **more)
        assert loss == pytest.approx(expected[0], rel=rel, abs=0), (dtype, policy, more)
        assert grads.keys() == expected[1].keys()
        norm = torch.stack([each.norm() for each in expected[1].values()]).norm()
        for name, grad in grads.items():
            off = (grad - expected[1][name]).norm()
            assert off <= rel * norm, (name, dtype, policy, more, off / norm)


@pytest.mark.parametrize(
    ("size", "lora", "every"),
    [(2, LORAS[1], False), *long(*((size, lora, True) for size in (1, 2, 3) for lora in LORAS))],
)
def test_losses_and_gradients_are_pefts(tmp_path, size, lora, every):
    config = write(tmp_path, lora=lora)
    run_program(size, _losses_and_gradients_are_pefts, tmp_path, config, lora, every)


def _losses_and_gradients_are_pefts(folder, config, lora, every):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_config, "GROUP_ROWS", 1)  # head by head
        pairs = product(POLICIES[1:], (None, 7)) if every else zip(POLICIES[1:], cycle((7, None)), strict=False)
        ways = [(policy, {"mlp_chunk": chunk}) for policy, chunk in pairs]
        more = [("none", {}), ("block", {"offload_weights": True}), ("none", {"zero_level": 2})]
        require_equal(folder, config, lora, *more, *ways, every=every)


FOUR_BIT = LoRAConfig(rank=2, alpha=4, targets=("all-linear",), base="4bit")


@pytest.mark.parametrize("size", [2, *long(1, 3)])
def test_a_base_in_4_bits_is_pefts_model_with_dequantized_weights(tmp_path, size):
    config = write(tmp_path, "qwen2" if size == 2 else "llama", FOUR_BIT)
    run_program(size, _a_base_in_4_bits, tmp_path, config)


def _a_base_in_4_bits(folder, config):
    policies = ("none", "block+every-2", "block-keep-attention:0.5+offload")
    more = [("block+every-2", {"offload_weights": True}), ("block+every-2", {"zero_level": 2})]
    require_equal(folder, config, FOUR_BIT, *((policy, {"mlp_chunk": 7}) for policy in policies), *more)
    require_sharded(config)


def test_a_base_in_4_bits_is_refused_where_it_has_no_meaning():
    with refused("lora.base 4bit", "lora.rank", "fix: "):
        LoRAConfig(base="4bit")
    with refused("8bit", "dtype", "4bit"):
        LoRAConfig(rank=2, base="8bit")
    with refused("lora.base 4bit", "tensor_parallel 2", "--tensor-parallel 1"):
        TrainConfig(lora=FOUR_BIT, parallel=ParallelConfig(tensor_parallel=2), checkpoint_every=None)


def require_sharded(config):
    """Check that a rank holds its share of the bytes, and that fresh weights are those of any number of ranks."""
    made = lazy.Llama(config, lora=FOUR_BIT, dtype=torch.bfloat16)
    storages = {id(each.storage): each.storage for each in lazy.named_shards(made) if each.name.endswith(".nf4")}
    matrices = [each.shape for each in lazy.named_shards(lazy.Llama(config)) if each.name.endswith("_proj.weight")]
    words = sum(nf4.Layout(rows * columns).words for rows, columns in matrices)
    held = sum(each.numel() for each in storages.values())
    assert 0 <= held - words / lazy.bmt.world_size() <= 128 * len(matrices)  # BMTrain aligns each matrix
    whole = {each.name: lazy.gather(each) for each in lazy.named_shards(lazy.Llama(config, dtype=torch.bfloat16))}
    for shard in lazy.named_shards(made):
        if shard.name.endswith(".nf4"):
            wanted = nf4.quantize(whole[f"{shard.name.removesuffix('.nf4')}.weight"])
            assert torch.equal(lazy.gather(shard).view(torch.int32), wanted.view(torch.int32))


MORE_POLICIES = ("none", "block", "block-keep-attention+offload")


@pytest.mark.parametrize(
    ("family", "sizes", "tensor", "ways"),
    [
        *((name, {}, 1, [("none", {}), ("block", {"mlp_chunk": 7})]) for name in ("qwen2", "qwen3")),
        *long(("mistral", {}, 1, [("none", {}), ("block", {"mlp_chunk": 7})])),
        ("llama", {}, 2, [(policy, {"mlp_chunk": n}) for policy in MORE_POLICIES for n in (None, 7)]),
        ("llama", {"num_kv_heads": 1}, 2, [("none", {})]),  # tensor ranks share the KV head and its adapters
        *(("llama", {}, 1, [("block", {"strategy": name})]) for name in ("heads", "ring", "gather")),
    ],
    ids=str,
)
def test_of_other_families_tensor_ranks_and_strategies_too(tmp_path, family, sizes, tensor, ways):
    config = write(tmp_path, family, LORAS[1], **{"num_heads": 4, "num_kv_heads": 2} | sizes)
    run_program(2, require_equal, tmp_path, config, LORAS[1], *ways, tensor=tensor)


def test_tensor_ranks_refuse_a_base_in_4_bits():
    run_program(2, _refuse_4_bits, tensor=2)


def _refuse_4_bits():
    with refused("lora.base 4bit", "tensor_parallel 2", "--tensor-parallel 1"):
        lazy.Llama(tiny.config(**{**SIZES, "num_heads": 4, "num_kv_heads": 2}), lora=FOUR_BIT)


class Products(TorchDispatchMode):
    """Collects the shapes of what products and sums gave."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::sum"):
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # with biases, with norms of heads
def test_no_gradient_of_a_frozen_weight_is_computed(family):
    # Sizes that nothing else has: no weight is as large as a gradient of something else.
    config = tiny.config(
        family, vocab_size=53, hidden_size=36, intermediate_size=58, num_heads=6, num_kv_heads=3, head_dim=14
    )
    run_program(1, _no_gradient_of_a_frozen_weight_is_computed, config)


def _no_gradient_of_a_frozen_weight_is_computed(config):
    ids = torch.arange(52).view(2, 26)
    for lora, is_frozen in ((None, False), (LORAS[0], True), (LORAS[1], True)):
        for policy, chunk in (("none", None), ("none", 7), ("block", None), ("block-keep-attention", 7)):
            model = lazy.Llama(config, recompute=policy, lora=lora, mlp_chunk=chunk)
            shapes = set(expected_shapes(config).values())
            with Products() as seen:
                model.loss(ids, ids, ids).backward()
            found = seen.shapes & (shapes | {shape[::-1] for shape in shapes})
            if is_frozen:
                assert not found, (lora, policy, chunk)
            else:  # the test sees what it looks for
                assert (36,) in found and (58, 36) in found and (84, 36) in found


@on_program(1)
def test_a_new_adapter_changes_nothing_and_begins_as_pefts_do():
    config = tiny.config(**SIZES)
    plain, adapted = lazy.Llama(config), lazy.Llama(config, lora=LORAS[1])
    ids = torch.arange(40).view(1, -1)
    assert torch.equal(plain.logits(ids, ids), adapted.logits(ids, ids))
    for shard in lazy.named_shards(adapted):
        numbers = lazy.gather(shard)
        if shard.name.endswith("lora_A"):
            bound = shard.shape[1] ** -0.5
            assert 0.8 * bound < numbers.abs().max() <= bound
            assert abs(numbers.mean()) < 0.3 * bound
        elif shard.name.endswith("lora_B"):
            assert not numbers.any()


def test_a_new_adapter_does_not_hang_on_the_ranks(tmp_path):
    for size, tensor in ((1, 1), (2, 1), (2, 2)):
        run_program(size, _write_new_adapter, tmp_path / f"{size}-{tensor}.pt", tensor=tensor)
    found = [torch.load(path) for path in tmp_path.iterdir()]
    assert len(found) == 3 and found[0].keys() == found[1].keys() == found[2].keys()
    for name, numbers in found[0].items():
        assert torch.equal(numbers, found[1][name]) and torch.equal(numbers, found[2][name]), name
    weights = [numbers for name, numbers in found[0].items() if name.endswith("q_proj.lora_A")]
    assert not torch.equal(*weights)  # of two layers


def _write_new_adapter(path):
    config = tiny.config(**{**SIZES, "num_heads": 4, "num_kv_heads": 2})
    attention = partial(lazy.BurstAttention, group=Mesh.over_bmtrain().sequence)
    model = lazy.Llama(config, attention=attention, lora=LORAS[1], seed=7)
    torch.save({each.name: lazy.gather(each) for each in lazy.named_shards(model) if ".lora_" in each.name}, path)


def test_what_is_no_adapter_is_refused(tmp_path, capsys):
    write(tmp_path)

    def refusal(source, *words):
        capsys.readouterr()
        assert main(["convert", str(source), str(tmp_path / "out"), "--to", "huggingface", *words]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err.strip()

    base = ("--merge", "--base", str(tmp_path / "base"))
    says(refusal(tmp_path / "adapter"), "LoRA adapter | fix: | --merge")
    says(refusal(tmp_path / "base", *base), "no adapter | adapter_config.json | fix: ")
    says(refusal(tmp_path / "base", "--base", "x"), "--base | --merge | fix: ")
    tiny.save(tmp_path / "other", tiny.config(**{**SIZES, "hidden_size": 12}))
    says(refusal(tmp_path / "adapter", "--merge", "--base", str(tmp_path / "other")), "another model | fix: ")
    path = tmp_path / "adapter" / "adapter_config.json"
    values = json.loads(path.read_text())
    for changes, words in (
        ({"base_model_name_or_path": "gone/model"}, "gone/model | --base DIR"),
        ({"base_model_name_or_path": None}, "names no model | --base DIR"),
        ({"r": "x"}, "rank | fix: "),
    ):
        path.write_text(json.dumps(values | changes))
        says(refusal(tmp_path / "adapter", "--merge"), words, lines=4)


def test_targets_that_no_layer_has_are_refused():
    with refused("q_prj", "fix: q_proj", *TARGETS):
        LoRAConfig(rank=2, targets=("q_prj",))
    with refused("targets", "empty", "fix: "):
        LoRAConfig(rank=2, targets=())
    assert LoRAConfig(rank=4, alpha=8, targets=("v_proj", "q_proj")).matrices == ("q_proj", "v_proj")

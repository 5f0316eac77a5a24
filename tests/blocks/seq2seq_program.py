"""What every rank does in the tests of the encoder-decoder. Rank 0 leaves what it saw in a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmburst.blocks.seq2seq_config import Pairs, Seq2SeqConfig
from bmburst.loss import IGNORE_INDEX, count_valid, global_mean
from bmburst.mesh import Mesh
from bmburst.sequence import SequenceShard
from tests.refusals import refused

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
}


@dataclass(frozen=True)
class Case:
    """One model and batch. `pairs`: source and target tokens of each pair, for all samples or for each."""

    lengths: tuple[int, int] = (13, 29)
    layouts: tuple[str, str] = ("contiguous", "zigzag")
    dtype: torch.dtype = torch.float64
    scaled: bool = False
    recompute: str = "none"
    zero_level: int = 3
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


PACKED = (((4, 6, 3), (9, 1, 19)),)
PADDED = (((9, 4), (17, 12)), ((5, 8), (28, 1)))
CASES = {
    "plain": Case(),
    "fp32": Case(dtype=torch.float32),
    "scaled, long source": Case((31, 7), ("zigzag", "striped"), scaled=True),
    "striped": Case((11, 5), ("striped", "striped"), zero_level=2),
    "block": Case((7, 7), ("striped", "zigzag"), recompute="block"),
    "half": Case((9, 16), recompute="block-keep-attention:0.5"),
    "half, equal": Case((12, 12), ("zigzag", "zigzag"), recompute="block-keep-attention:0.5"),
    "keep": Case((5, 13), ("zigzag", "contiguous"), recompute="block-keep-attention", zero_level=2),
    "packed": Case(pairs=PACKED),
    "padded": Case(pairs=PADDED, recompute="block-keep-attention"),
}
BATCH = 2


def data(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return source tokens, decoder inputs and labels, the same on all ranks; padding among the tokens."""
    generator = torch.Generator().manual_seed(sum(case.lengths))
    source, target = (torch.randint(SIZES["vocab_size"], (BATCH, n), generator=generator) for n in case.lengths)
    labels = torch.randint(SIZES["vocab_size"], target.shape, generator=generator)
    labels[0, 2:4] = IGNORE_INDEX
    if case.pairs is PADDED:
        for row, (_, (real, _)) in enumerate(case.pairs):
            labels[row, real:] = IGNORE_INDEX
    return source, target, labels


def run(weights: Path, output: Path) -> None:
    """Compute logits, loss and gradients of each case with the weights of a BART."""
    mesh = Mesh.over_bmtrain()
    found = {name: _case(case, torch.load(weights), mesh) for name, case in CASES.items()}
    if mesh.rank == 0:
        torch.save(found, output)


def _case(case: Case, weights: dict[str, Tensor], mesh: Mesh) -> dict[str, Any]:
    from bmtrain import world_size

    from bmburst.blocks.seq2seq import Seq2Seq
    from bmburst.zero import gather, named_shards

    model = Seq2Seq(
        Seq2SeqConfig(**SIZES, scale_embedding=case.scaled),
        source_layout=case.layouts[0],
        target_layout=case.layouts[1],
        group=mesh.sequence,
        dtype=case.dtype,
        recompute=case.recompute,
        zero_level=case.zero_level,
        seed=None,
    )
    model.load_weights(weights)
    source_cut, target_cut = (
        SequenceShard.cut(n, layout=layout, group=mesh.sequence)
        for n, layout in zip(case.lengths, case.layouts, strict=True)
    )
    source, target, labels = data(case)
    each = [Pairs(*pair) for pair in case.pairs]
    pairs = each[0] if len(each) == 1 else each or None
    of_each = each * (BATCH // len(each)) if each else []
    source_masks, target_masks = [p.source for p in of_each] or None, [p.target for p in of_each] or None
    of_source = source_cut.batch(source, documents=source_masks)
    of_target = target_cut.batch(target, labels, documents=target_masks)
    with torch.no_grad():
        logits = model.logits(of_source, of_target, case.lengths, pairs)
    loss_sum = model.loss(of_source, of_target, case.lengths, pairs, chunk=3)
    valid = int(mesh.sum(count_valid(of_target.labels).item()))
    loss = global_mean(loss_sum, valid, world_size())
    (loss / world_size()).backward()  # the division is OptimManager.scale_loss
    (parts,) = mesh.sequence.all_gather(logits).wait()
    gradients = {shard.name: gather(shard, shard.parameter.grad) for shard in named_shards(model)}
    return {"logits": target_cut.join(parts), "loss": mesh.sum(loss.item()) / world_size(), "gradients": gradients}


def learn(output: Path, steps: int) -> None:
    """Learn to reverse sequences, and leave the loss of each step."""
    import bmtrain as bmt

    from bmburst.blocks.seq2seq import Seq2Seq

    mesh = Mesh.over_bmtrain()
    lengths = 7, 8
    sizes = {**SIZES, "encoder_layers": 1, "decoder_layers": 1, "d_model": 32}
    model = Seq2Seq(Seq2SeqConfig(**sizes, init_std=0.1), group=mesh.sequence, dtype=torch.float64)
    manager = bmt.optim.OptimManager(loss_scale=None)  # BMTrain's own optimizers take no fp64
    manager.add_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    cuts = [
        SequenceShard.cut(n, layout=layout, group=mesh.sequence)
        for n, layout in zip(lengths, ("contiguous", "zigzag"), strict=True)
    ]
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens = torch.randint(3, SIZES["vocab_size"], (32, lengths[0]), generator=generator)
        backwards = tokens.flip(1)
        start, end = torch.zeros(32, 1, dtype=torch.int64), torch.full((32, 1), 2)
        source = cuts[0].batch(tokens)
        target = cuts[1].batch(torch.cat((start, backwards), 1), torch.cat((backwards, end), 1))
        loss = global_mean(model.loss(source, target, lengths), 32 * lengths[1], bmt.world_size())
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(mesh.sum(loss.item()) / bmt.world_size())
    if mesh.rank == 0:
        torch.save(losses, output)


def refusals() -> None:
    """See what is said of bad configurations, options, weights and sequences."""
    from bmburst.blocks.seq2seq import Seq2Seq
    from bmburst.zero import gather, named_shards

    with refused("decoder_layers 0 | at least 1"):
        Seq2SeqConfig(**{**SIZES, "decoder_layers": 0})
    with refused("encoder_attention_heads 3 | d_model 16"):
        Seq2SeqConfig(**{**SIZES, "encoder_attention_heads": 3})
    with refused("activation_function | 'relu' | 'gelu'"):
        Seq2SeqConfig.from_hugging_face({**SIZES, "activation_function": "relu"})
    with refused("vocab_size | config.json"):
        Seq2SeqConfig.from_hugging_face({name: SIZES[name] for name in SIZES if name != "vocab_size"})
    config = Seq2SeqConfig.from_hugging_face({**SIZES, "dropout": 0.1})
    assert config == Seq2SeqConfig(**SIZES)
    for options, words in (
        ({"source_layout": "balanced"}, "'balanced' | 'zigzag'"),
        ({"recompute": "block+offload"}, "'block+offload' | block-keep-attention"),
        ({"recompute": "blocks"}, "'blocks' | block"),
        ({"zero_level": 1}, "zero_level 1 | 2 or 3"),
        ({"attention": {"mask": "causal"}}, "'mask' | source_layout"),
        ({"attention": {"strategy": "rings"}}, "'rings' | ring"),
    ):
        with refused(words):
            Seq2Seq(config, **options)
    model = Seq2Seq(config)
    weights = {shard.name: gather(shard) for shard in named_shards(model)}
    name = "model.decoder.layers.1.encoder_attn.k_proj.bias"
    with refused(f"{name} | missing | [16]"):
        model.load_weights({key: weight for key, weight in weights.items() if key != name})
    with refused(f"{name} | [15] | [16]"):
        model.load_weights({**weights, name: torch.zeros(15)})
    with refused("model.encoder.layers.2.fc1.bias | BartForConditionalGeneration"):
        model.load_weights({**weights, "model.encoder.layers.2.fc1.bias": torch.zeros(1)})
    with refused("final_logits_bias | not 0"):
        model.load_weights({**weights, "final_logits_bias": torch.ones(1, 19)})
    cut = SequenceShard.cut(33, layout="zigzag", size=1, rank=0)
    part = cut.batch(torch.zeros(1, 33, dtype=torch.int64))
    with refused("33 tokens | max_position_embeddings 32"):
        model(part, part, (33, 33))
    with refused("33 tokens | max_position_embeddings 32"):
        model(part, part, (33, 33), Pairs((1, 32), (33, 1)))
    with refused("token id | 19 | 0 to 18"):
        model(part._replace(tokens=part.tokens + 19), part, (32, 32))

"""What every rank does in the tests of the encoder-decoder. Rank 0 leaves what it saw in a file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmburst.blocks.seq2seq_config import Pairs, Seq2SeqConfig
from bmburst.loss import IGNORE_INDEX, count_valid, global_mean
from bmburst.mesh import Mesh
from bmburst.sequence import unshard
from tests import lazy
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
    "decoder_start_token_id": 2,
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
    shifted: bool = False
    """Whether the decoder's input is made of labels, and padding said by an attention mask."""
    real: tuple[int, ...] | None = None
    """Real source tokens of each sample, where an attention mask says so."""


PACKED = (((4, 6, 3), (9, 1, 19)),)
PADDED = (((9,), (17,)), ((5,), (28,)))
EMPTY = (((4, 0, 6, 3), (9, 1, 0, 19)), ((13,), (29,)))
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
    "padded, half": Case((13, 29), ("zigzag", "striped"), pairs=PADDED, recompute="block-keep-attention:0.5"),
    "empty sides": Case(pairs=EMPTY),
    "shifted": Case((11, 7), shifted=True),
    "shifted, packed": Case(pairs=PACKED, shifted=True),
    "shifted, padded": Case((11, 9), shifted=True, real=(7, 11), recompute="block"),
}
FEW = (
    *("fp32", "scaled, long source", "striped", "half, equal", "keep", "padded, half", "empty sides"),
    *("shifted, packed", "shifted, padded"),
)
"""Cases with each option, policy and kind of batch."""
BATCH = 2


def data(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return source tokens, decoder inputs and labels, the same on all ranks; padding among the tokens."""
    generator = torch.Generator().manual_seed(sum(case.lengths))
    source, target = (torch.randint(SIZES["vocab_size"], (BATCH, n), generator=generator) for n in case.lengths)
    labels = torch.randint(SIZES["vocab_size"], target.shape, generator=generator)
    labels[0, 2:4] = IGNORE_INDEX
    for row, (sources, targets) in enumerate(pairs_of(case)):
        start = 0
        for real, tokens in (*zip(sources, targets, strict=True), (0, case.lengths[1])):
            if not real:  # transformers' decoder cannot attend to nothing
                labels[row, start : start + tokens] = IGNORE_INDEX
            start += tokens
    return source, target, labels


def pairs_of(case: Case) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return the pairs of each sample, or nothing."""
    return case.pairs * (BATCH // len(case.pairs)) if case.pairs else ()


def real_tokens(case: Case) -> Tensor:
    """Return the attention mask of a case's source."""
    return (torch.arange(case.lengths[0])[None] < torch.tensor(case.real)[:, None]).long()


def run(weights: Path, output: Path, names: Sequence[str]) -> None:
    """Compute logits, loss and gradients of cases with the weights of a BART."""
    mesh = Mesh.over_bmtrain()
    given = torch.load(weights)
    found = {name: _case(CASES[name], given, mesh) for name in names}
    if mesh.rank == 0:
        torch.save(found, output)


def _case(case: Case, weights: dict[str, Tensor], mesh: Mesh) -> dict[str, Any]:
    from bmtrain import world_size

    model = lazy.Seq2Seq(
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
    if case in (CASES["fp32"], CASES["striped"]):  # of each ZeRO level one
        returned = model.weights()
        assert returned.keys() == weights.keys()
        assert all(torch.equal(returned[name], weight.to(case.dtype)) for name, weight in weights.items())
    source, target, labels = data(case)
    each = [Pairs(*pair) for pair in case.pairs]
    given = {"decoder_input_ids": target, "pairs": each[0] if len(each) == 1 else each or None}
    if case.shifted:
        given = {"pairs": given["pairs"], "attention_mask": None if case.real is None else real_tokens(case)}
    batch = model.cut.batch(source, labels, **given)
    with torch.no_grad():
        logits = model.logits(batch)
    loss_sum = model.loss(batch, chunk=3)
    valid = int(mesh.sum(count_valid(batch.target.labels).item()))
    loss = global_mean(loss_sum, valid, world_size())
    (loss / world_size()).backward()  # the division is OptimManager.scale_loss
    logits = unshard(logits, layout=case.layouts[1], length=case.lengths[1], group=mesh.sequence)
    gradients = {shard.name: lazy.gather(shard, shard.parameter.grad) for shard in lazy.named_shards(model)}
    return {"logits": logits, "loss": mesh.sum(loss.item()) / world_size(), "gradients": gradients}


def learn(output: Path, steps: int) -> None:
    """Learn to reverse sequences, and leave the loss of each step."""
    mesh = Mesh.over_bmtrain()
    sizes = {**SIZES, "encoder_layers": 1, "decoder_layers": 1, "d_model": 32}
    model = lazy.Seq2Seq(Seq2SeqConfig(**sizes, init_std=0.1), group=mesh.sequence, dtype=torch.float64)
    manager = lazy.bmt.optim.OptimManager(loss_scale=None)  # BMTrain's own optimizers take no fp64
    manager.add_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens = torch.randint(3, SIZES["vocab_size"], (32, 7), generator=generator)
        labels = torch.cat((tokens.flip(1), torch.full((32, 1), 2)), 1)
        loss = global_mean(model.loss(model.cut.batch(tokens, labels)), labels.numel(), lazy.bmt.world_size())
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(mesh.sum(loss.item()) / lazy.bmt.world_size())
    if mesh.rank == 0:
        torch.save(losses, output)


def refusals() -> None:
    """See what is said of bad configurations, options, weights and sequences."""
    for name, value in (("d_model", 16.0), ("vocab_size", "19"), ("pad_token_id", "a")):
        with refused(f"{name} | whole number | {value!r}"):
            Seq2SeqConfig(**{**SIZES, name: value})
    with refused("decoder_layers | at least 1 | got 0"):
        Seq2SeqConfig(**{**SIZES, "decoder_layers": 0})
    with refused("encoder_attention_heads 3 | d_model 16"):
        Seq2SeqConfig(**{**SIZES, "encoder_attention_heads": 3})
    with refused("activation_function 'relu' | allowed: \"gelu\""):
        Seq2SeqConfig.from_hugging_face({**SIZES, "activation_function": "relu"})
    with refused("vocab_size | config.json"):
        Seq2SeqConfig.from_hugging_face({name: SIZES[name] for name in SIZES if name != "vocab_size"})
    with refused("dropout 0.1, encoder_layerdrop 0.2 | no dropout | 'dropout': 0.0"):
        Seq2SeqConfig.from_hugging_face({**SIZES, "dropout": 0.1, "encoder_layerdrop": 0.2, "attention_dropout": 0.0})
    for kind in ("t5", "mbart"):
        with refused(f"model_type '{kind}' | 'bart' | position bias"):
            Seq2SeqConfig.from_hugging_face({**SIZES, "model_type": kind})
    with refused("tie_word_embeddings | False | allowed: true"):
        Seq2SeqConfig.from_hugging_face({**SIZES, "tie_word_embeddings": False})
    for key, value in (("normalize_before", True), ("of_a_new_version", None), ("quantization_config", {"bits": 4})):
        with refused(key, "a BART model"):
            Seq2SeqConfig.from_hugging_face({**SIZES, key: value})
    with refused("decoder_start_token_id 19 | 0 to 18"):
        Seq2SeqConfig(**{**SIZES, "decoder_start_token_id": 19})
    with refused("2 sources and 1 targets"):
        Pairs((1, 2), (3,))
    with refused("sources of 2 pairs | at least one"):
        Pairs((0, 0), (3, 1))
    with refused("targets of a pair | -1"):
        Pairs((2, 1), (3, -1))
    assert Pairs([2, 1], torch.tensor([3, 0])) == Pairs((2, 1), (3, 0))
    config = Seq2SeqConfig.from_hugging_face({**SIZES, "model_type": "bart", "dropout": 0.0})
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
            lazy.Seq2Seq(config, **options)
    model = lazy.Seq2Seq(config)
    weights = model.weights()
    name = "model.decoder.layers.1.encoder_attn.k_proj.bias"
    with refused(f"{name} | missing | [16]"):
        model.load_weights({key: weight for key, weight in weights.items() if key != name})
    with refused(f"{name} | [15] | [16]"):
        model.load_weights({**weights, name: torch.zeros(15)})
    with refused("model.encoder.layers.2.fc1.bias | BartForConditionalGeneration"):
        model.load_weights({**weights, "model.encoder.layers.2.fc1.bias": torch.zeros(1)})
    for name in ("lm_head.weight", "model.encoder.embed_tokens.weight"):
        with refused(f"{name} | model.shared.weight | one table"):
            model.load_weights({**weights, name: weights[name] + 1})
    with refused("final_logits_bias | not 0"):
        model.load_weights({**weights, "final_logits_bias": torch.ones(1, 19)})


def bad_batches() -> None:
    """See what is said of layouts and batches that do not fit, on every rank."""
    mesh = Mesh.over_bmtrain()
    config = Seq2SeqConfig(**SIZES)
    with refused("'contiguous' | 2 ranks | zigzag (0.5)"):
        lazy.Seq2Seq(config, group=mesh.sequence, target_layout="contiguous", recompute="block-keep-attention:0.5")
    model = lazy.Seq2Seq(config, group=mesh.sequence)
    with refused("Seq2SeqBatch | Tensor | model.cut.batch"):
        model.loss(torch.zeros(2, 7))
    cut = model.cut
    ids, labels = torch.full((2, 7), 3), torch.full((2, 5), 4)
    holes, left = torch.ones(2, 7), torch.ones(2, 7)
    holes[1, 2], left[0, 0], nothing = 0, 0, torch.tensor([[1] * 7, [0] * 7])
    for given, words in (
        ({"input_ids": ids.tolist()}, "input_ids | list | return_tensors"),
        ({"input_ids": ids.float()}, "input_ids | float32 [2, 7] | token ids"),
        ({"labels": labels[0]}, "labels | [5] | [batch, tokens]"),
        ({"labels": None}, "labels | decoder_input_ids"),
        ({"labels": labels[:1]}, "input_ids [2, 7] | labels [1, 5] | as many samples"),
        ({"decoder_input_ids": labels[:, 1:]}, "labels [2, 5] | decoder_input_ids [2, 4]"),
        ({"input_ids": ids + 16}, "input_ids 19 | 0 to 18 | tokenizer"),
        ({"labels": labels - 5}, "labels -1 | 0 to 18 or -100"),
        ({"labels": labels[:, :1]}, "1 tokens | 2 ranks"),
        ({"input_ids": ids[:, :1].expand(2, 33)}, "33 tokens | max_position_embeddings 32"),
        ({"pairs": Pairs((3, 4), (3, 4))}, "7 tokens | 5"),
        ({"pairs": ((7,), (5,))}, "pairs | ((7,), (5,)) | Pairs(sources, targets)"),
        ({"pairs": 3}, "pairs must be Pairs | got 3 | Pairs(sources, targets)"),
        ({"pairs": [Pairs((7,), (5,))]}, "1 samples | batch of 2"),
        ({"pairs": Pairs((7,), (5,)), "attention_mask": holes}, "attention_mask | pairs"),
        ({"attention_mask": holes}, "attention_mask | before a token | padding_side"),
        ({"attention_mask": left}, "attention_mask | before a token | padding_side"),
        ({"attention_mask": nothing}, "no token of sample 1"),
        ({"attention_mask": holes[:, 1:]}, "attention_mask | [2, 6] | [2, 7]"),
        ({"input_ids": ids + mesh.rank}, "rank | fix: "),
    ):
        with refused(words):
            cut.batch(**{"input_ids": ids, "labels": labels, **given})
    for missing, words in (
        ("decoder_start_token_id", "decoder_input_ids"),
        ("pad_token_id", "-100 | decoder_input_ids"),
    ):
        with refused(f"{missing} | {words}"):
            replace(cut, config=replace(config, **{missing: None})).batch(
                ids, labels.masked_fill(ids[:, :5] == 3, -100)
            )


def tensor_parallelism() -> None:
    """See that ranks that share matrices are refused."""
    with refused("tensor parallelism 2 | encoder-decoder | tensor=1"):
        lazy.Seq2Seq(Seq2SeqConfig(**SIZES))

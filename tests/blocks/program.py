"""What every rank does in the tests of the zoo. Rank 0 leaves what it saw in a file; the tests look at it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bmburst.attention.options import AttentionOptions
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import RopeScaling
from bmburst.checkpoint.hugging_face import load, read_config, save
from bmburst.loss import IGNORE_INDEX, count_valid, global_mean
from bmburst.mesh import Mesh
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import LAYOUTS
from bmburst.sequence import SequenceShard
from bmburst_ops.flash import BackwardInputs, Gradients, Kernel, Partial, Scoring
from bmburst_ops.rms_norm import choose_norm
from tests import lazy, tiny
from tests.refusals import refusal_of

TOKENS = 37  # odd, and padded on 2 and 4 ranks
_PLAIN = tiny.config(head_dim=8, max_position_embeddings=16, norm_eps=1e-3)
MINICPM: dict[str, Any] = {"scale_emb": 1.7, "scale_depth": 0.6, "dim_model_base": 7}


def _rope(kind: Any, **options: Any) -> LlamaConfig:
    return replace(_PLAIN, rope_scaling=RopeScaling(kind=kind, factor=3.0, **options))


CONFIGS = {
    "gqa": _PLAIN,
    "mha": replace(_PLAIN, num_kv_heads=4),
    "mqa-wide-heads": replace(_PLAIN, num_kv_heads=1, head_dim=10),
    "tied": replace(_PLAIN, tie_embeddings=True),
    "linear": _rope("linear"),
    "dynamic": _rope("dynamic"),
    "yarn": _rope("yarn", original_max_position_embeddings=16, beta_fast=4.0),
    "llama3": _rope("llama3", original_max_position_embeddings=24, high_freq_factor=3.0),
    "mistral": replace(_PLAIN, sliding_window=7),
    "qwen2": replace(_PLAIN, qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(_PLAIN, qk_norm=True),
    "qwen3-window": replace(_PLAIN, qk_norm=True, sliding_window=5),
    "minicpm": replace(_PLAIN, tie_embeddings=True, **MINICPM),
    "minicpm-untied": replace(_PLAIN, **MINICPM),
}
GRADIENTS = ("gqa", "tied", "minicpm")
EXPORTED = ("tied", "llama3", "yarn", "mistral", "qwen2", "qwen3", "qwen3-window", "minicpm", "minicpm-untied")
DOCUMENTS = (12, 25)
FAMILIES = ("mistral", "qwen2", "qwen3", "minicpm-untied")
VARIANTS: list[tuple[str, int, dict[str, Any]]] = [
    ("none", 3, {}),
    ("none", 2, {"mlp_chunk": 5}),
    ("block", 3, {"mlp_chunk": 7}),
    ("block", 2, {}),
    ("block-keep-attention", 3, {}),
    ("block-keep-attention:0.5+offload-all", 3, {"mlp_chunk": 11}),
    ("block+offload", 2, {}),
]


def layouts(name: str) -> list[str]:
    """Return the layouts that a configuration can have."""
    return [layout for layout in LAYOUTS if layout != "balanced" or CONFIGS[name].sliding_window is None]


_LOGITS = [(name, layout) for name in CONFIGS for layout in layouts(name)]
_VARIED = [(name, i) for name in GRADIENTS for i in range(len(VARIANTS))]
LOGITS: dict[int, list[tuple[str, str]]] = {1: _LOGITS[::3], 2: _LOGITS[1::3], 4: _LOGITS}
"""Configurations and layouts by number of ranks: each value of both on one rank and on two, and all pairs on four."""
VARIED: dict[int, list[tuple[str, int]]] = {1: _VARIED[::3], 2: _VARIED[1::2], 4: _VARIED}
"""Configurations and `VARIANTS`, likewise."""


def left_out(size: int) -> tuple[list[tuple[str, str]], list[tuple[str, int]]]:
    """Return the pairs that `LOGITS` and `VARIED` leave out on a number of ranks."""
    return (
        [pair for pair in _LOGITS if pair not in LOGITS[size]],
        [pair for pair in _VARIED if pair not in VARIED[size]],
    )


def data() -> tuple[Tensor, Tensor]:
    """Token ids and labels, the same on all ranks; the labels are few, so that ranks hold uneven numbers of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_PLAIN.vocab_size, (2, TOKENS), generator=generator)
    labels = torch.randint(_PLAIN.vocab_size, (2, TOKENS), generator=generator)
    labels[0, 5:30] = IGNORE_INDEX
    labels[1, 20:] = IGNORE_INDEX
    return tokens, labels


def run(folder: Path, output: Path) -> None:
    """Run everything, on any number of ranks.

    Args:
        folder: Holds one Hugging Face directory for each of `CONFIGS`.
        output: Gets `results.pt` and `problems-RANK.pt`.
    """
    mesh = Mesh.over_bmtrain()
    size, rank = mesh.shape.sequence, mesh.sequence_rank
    results: dict[str, Any] = {}
    if size != 3:
        results |= products(folder, mesh, LOGITS[size], VARIED[size])
        # Under a causal mask padding does no harm even where the length is lost on the way; here it would.
        results["logits full"] = _logits(folder / "gqa", mesh, "striped", mask="full")
        for name in FAMILIES:
            results[f"gradients {name}"] = _gradients(folder / name, mesh, recompute="block-keep-attention")
        results["documents"] = _packed(folder / "mistral", mesh)
    results["fresh"] = _fresh()
    results["fresh minicpm"] = _fresh_minicpm()
    results["biases"] = _biases()
    results["undecayed"] = _undecayed()
    results["moved"] = _moved()
    results["gathered"] = _gathered()
    results["products"] = _products()
    results["norms"] = _norms()
    results["compiled"] = _compiled()
    _export(folder, output)
    results["bmtrain"] = _bmtrain_checkpoint(output, size)
    torch.save(_problems(folder, output), output / f"problems-{rank}.pt")
    if rank == 0:
        torch.save(results, output / "results.pt")


def products(
    folder: Path, mesh: Mesh, logits: Sequence[tuple[str, str]], gradients: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    """Return logits of configurations and layouts, and gradients of configurations and variants."""
    found: dict[str, Any] = {f"logits {name} {layout}": _logits(folder / name, mesh, layout) for name, layout in logits}
    for name, i in gradients:
        policy, zero_level, options = VARIANTS[i]
        given = {"recompute": policy, "zero_level": zero_level, **options}
        found[f"gradients {name} {policy} {zero_level}"] = _gradients(folder / name, mesh, **given)
    return found


def run_products(folder: Path, output: Path) -> None:
    """Run those products that `run` leaves out on this number of ranks."""
    mesh = Mesh.over_bmtrain()
    found = products(folder, mesh, *left_out(mesh.shape.sequence))
    if mesh.sequence_rank == 0:
        torch.save(found, output / "results.pt")


def _load(directory: Path, mesh: Mesh, layout: str = "zigzag", mask: str = "causal", **options: Any) -> Any:
    attention = partial(lazy.BurstAttention, mask=mask, layout=layout, group=mesh.sequence)
    model = lazy.Llama(read_config(directory), attention=attention, seed=None, **options)
    load(model, directory)
    return model


def _packed(directory: Path, mesh: Mesh) -> Tensor:
    """Logits of documents, under a window."""
    model, cut, documents = _load(directory, mesh), _cut(mesh, "zigzag"), Documents(DOCUMENTS)
    batch = cut.batch(*data(), documents=documents)
    with torch.no_grad():
        logits = model.logits(batch.tokens, batch.positions, None, (documents, documents))
    (parts,) = mesh.sequence.all_gather(logits).wait()
    return cut.join(parts)


def _cut(mesh: Mesh, layout: str) -> SequenceShard:
    return SequenceShard.cut(TOKENS, layout=layout, size=mesh.shape.sequence, rank=mesh.sequence_rank, mask="causal")


def _logits(directory: Path, mesh: Mesh, layout: str, mask: str = "causal") -> Tensor:
    model, cut = _load(directory, mesh, layout, mask), _cut(mesh, layout)
    batch = cut.batch(*data())
    model.eval()
    with torch.no_grad():
        logits = model.logits(batch.tokens, batch.positions, TOKENS)
    (parts,) = mesh.sequence.all_gather(logits).wait()
    return cut.join(parts)


def _gradients(directory: Path, mesh: Mesh, **options: Any) -> dict[str, Tensor | float]:
    """Loss and gradients as training forms them, on one rank's labels after the other, with BMTrain's factor."""
    from bmtrain import world_size

    model = _load(directory, mesh, loss_chunk=3, **options)
    batch = _cut(mesh, "zigzag").batch(*data())
    loss_sum = model.loss(batch.tokens, batch.positions, batch.labels, TOKENS)
    valid = mesh.sum(count_valid(batch.labels).item())
    loss = global_mean(loss_sum, int(valid), world_size())
    (loss / world_size()).backward()  # the division is OptimManager.scale_loss
    found: dict[str, Tensor | float] = {"loss": mesh.sum(loss.item()) / world_size()}
    for shard in lazy.named_shards(model):
        grad = lazy.gather(shard, shard.parameter.grad)
        in_storage = lazy.gather(shard, shard.storage.grad)  # what an optimizer over storages sees
        assert torch.equal(grad, in_storage)
        found[shard.name] = grad
    return found


def _fresh() -> dict[str, Tensor]:
    return {
        f"{seed} {dtype} {shard.name}": lazy.gather(shard)
        for seed in (0, 1)
        for dtype in (torch.float32, torch.bfloat16)
        for shard in lazy.named_shards(lazy.Llama(_PLAIN, seed=seed, dtype=dtype))
    }


def _fresh_minicpm() -> dict[str, Tensor]:
    return {
        shard.name: lazy.gather(shard) for shard in lazy.named_shards(lazy.Llama(CONFIGS["minicpm-untied"], seed=0))
    }


def _biases() -> dict[str, float]:
    """The largest number in each fresh bias."""
    biases = (each for each in lazy.named_shards(lazy.Llama(CONFIGS["qwen2"], seed=0)) if each.name.endswith("bias"))
    return {shard.name: lazy.gather(shard).abs().max().item() for shard in biases}


def _undecayed() -> tuple[list[str], bool]:
    """Names without weight decay, and whether ZeRO keeps them in storages of their own, as an optimizer needs it."""
    shards = lazy.named_shards(lazy.Llama(_PLAIN, seed=None))
    undecayed = [shard for shard in shards if shard.group == "no_decay"]
    storages = {id(shard.storage) for shard in undecayed}
    apart = storages.isdisjoint(id(shard.storage) for shard in shards if shard.group is None)
    return [shard.name for shard in undecayed], apart


def _moved() -> list[str]:
    """Names of the parameters for which gather and scatter, of everything laid out like them, are no inverses."""
    wrong = []
    for shard in lazy.named_shards(lazy.Llama(_PLAIN, seed=None)):
        full = torch.randn(shard.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        lazy.scatter(shard, full)
        for owner in (shard.parameter, shard.storage):
            like = torch.zeros_like(owner, dtype=torch.float64) if shard.count else None
            if like is not None:
                lazy.scatter(shard, full, like)
            everywhere = lazy.gather(shard, like, dtype=torch.float64)
            at_last = lazy.gather(shard, like, dtype=torch.float64, root=len(shard.ranges) - 1)
            assert (at_last is None) == (shard.rank != len(shard.ranges) - 1)
            if not torch.equal(everywhere, full) or (at_last is not None and not torch.equal(at_last, full)):
                wrong.append(shard.name)
        if shard.count and _gathers(shard, None):
            wrong.append(f"{shard.name} from nothing")
        if shard.count and _gathers(shard, torch.zeros(shard.count, dtype=torch.float64)):
            wrong.append(f"{shard.name} of another dtype")
        if shard.count and _gathers(shard, torch.zeros(shard.storage.numel() + 1)):
            wrong.append(f"{shard.name} of another layout")
        if not torch.equal(lazy.gather(shard), full.float()):
            wrong.append(f"{shard.name} itself")
    return wrong


def _gathers(shard: Any, like: Tensor | None) -> bool:
    """Whether `gather` takes a tensor that does not fit; refused before anything is sent, so one rank may try."""
    try:
        lazy.gather(shard, like)
    except ValueError:
        return False
    return True


def _gathered() -> tuple[int, int, int]:
    """Return the number of storages that blocks gather, of those alive after forward, and of those after backward."""
    model = lazy.Llama(replace(_PLAIN, num_layers=4), seed=0)
    gathered = []

    def remember(module: torch.nn.Module, *_: object) -> None:
        for name in ("self_attn.q_proj", "input_layernorm"):  # ZeRO gathers matrices and norms apart
            gathered.append(StorageWeakRef(module.get_submodule(name).weight.untyped_storage()))

    for block in model.model.layers:
        block._module.register_forward_hook(remember)
    tokens, labels = data()
    positions = torch.arange(TOKENS).expand(2, -1)
    cut = slice(0, 2)  # the same tokens on every rank: only memory is looked at
    loss = model.loss(tokens[:, cut], positions[:, cut], labels[:, cut])
    alive = {each for each in gathered if not each.expired()}
    loss.backward()
    return len(gathered), len(alive), len({each for each in gathered if not each.expired()})


class _Products(TorchDispatchMode):
    """Counts matrix products, without those of attention, which are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def _products() -> list[tuple[int, int]]:
    """Products forward and backward: without recompute, with it, and with it in 4 chunks."""
    found = []
    for policy, chunk in (("none", 0), ("block", 0), ("block", 10)):
        model = lazy.Llama(_PLAIN, seed=0, recompute=policy, mlp_chunk=chunk)
        tokens = torch.zeros(1, 40, dtype=torch.int64)
        with _Products() as products:
            loss = model.loss(tokens, torch.arange(40)[None], tokens)
            forward = products.count
            loss.backward()
        found.append((forward, products.count - forward))
    return found


def _norms() -> list[str]:
    """The kernels that norms ask for, of a model made with one by name, and of those made without."""
    tokens, found = torch.zeros(1, 4, dtype=torch.int64), []
    for model in (lazy.Llama(CONFIGS["qwen3"], norm_kernel="torch"), lazy.Llama(CONFIGS["minicpm"])):
        chosen = Mock(side_effect=choose_norm)
        with patch("bmburst_ops.rms_norm.choose_norm", chosen):
            model(tokens, torch.arange(4)[None])
        found += [call.args[0] for call in chosen.call_args_list]
    return found


class _Noting:
    """A kernel, and what its passes were given: shapes of q and k, and what the mask needs."""

    def __init__(self, kernel: Kernel, noted: list[Any]) -> None:
        self._kernel, self._noted = kernel, noted

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, **options: Any) -> Partial:
        self._note(q, k, scoring)
        return self._kernel.forward(q, k, v, scoring, **options)

    def backward(self, given: BackwardInputs, scoring: Scoring, **options: Any) -> Gradients:
        self._note(given.q, given.k, scoring)
        return self._kernel.backward(given, scoring, **options)

    def _note(self, q: Tensor, k: Tensor, scoring: Scoring) -> None:
        self._noted.append((list(q.shape), list(k.shape), sorted(scoring.pattern.needs)))


def _compiled() -> list[Any]:
    """What kernels are given when they are compiled ahead: with all masks, forward and backward."""
    noted: list[Any] = []
    kernel_for = AttentionOptions.kernel_for
    with patch.object(AttentionOptions, "kernel_for", lambda *given: _Noting(kernel_for(*given), noted)):
        for window, packed in ((None, False), (None, True), (700, False)):
            lazy.BurstAttention().compile_kernels(2, 1, 8, torch.float32, window=window, packed=packed)
    return noted


def _export(folder: Path, output: Path) -> None:
    for name in EXPORTED:
        model = lazy.Llama(read_config(folder / name), seed=None)
        load(model, folder / name)
        save(model, output / name)


def _bmtrain_checkpoint(output: Path, size: int) -> bool:
    """Whether BMTrain's own save and load work on the model: they break on buffers."""
    first, second = lazy.Llama(_PLAIN, seed=0), lazy.Llama(_PLAIN, seed=1)
    lazy.bmt.save(first, str(output / "model.pt"))
    lazy.bmt.load(second, str(output / "model.pt"))
    pairs = zip(lazy.named_shards(first), lazy.named_shards(second), strict=True)
    return all(torch.equal(a.local(), b.local()) for a, b in pairs)


def _problems(folder: Path, output: Path) -> dict[str, str]:
    """What this rank is told about bad input."""
    model = lazy.Llama(_PLAIN, seed=0)
    (output / "file").touch()
    tokens, _ = data()
    positions = torch.arange(TOKENS).expand(2, -1)
    attempts = {
        "missing": lambda: load(model, folder / "nowhere"),
        "other": lambda: load(model, folder / "mha"),
        "unwritable": lambda: save(model, output / "file" / "below"),
        "token": lambda: model(tokens + 30, positions),
        "misfit": lambda: model(tokens, positions[:, :-1]),
        "recompute": lambda: lazy.Llama(_PLAIN, recompute="blocks"),
        "layers": lambda: lazy.Llama(_PLAIN, recompute="block+first-2"),
        "chunk": lambda: lazy.Llama(_PLAIN, loss_chunk=0),
        "mlp": lambda: lazy.Llama(_PLAIN, mlp_chunk=-1),
        "zero": lambda: lazy.Llama(_PLAIN, zero_level=1),
        "norm": lambda: lazy.Llama(_PLAIN, norm_kernel="cpm-kernel"),
        "norm here": lambda: lazy.Llama(CONFIGS["qwen3"], dtype=torch.float16, norm_kernel="cpm-kernels"),
        "balanced": lambda: _load(folder / "mistral", Mesh.over_bmtrain(), "balanced"),
        "length": lambda: lazy.Llama(CONFIGS["dynamic"], seed=0)(tokens, positions),
    }
    return {name: refusal_of(attempt) for name, attempt in attempts.items()}

"""What every rank does in the tests against ModelCenter's own Llama. Rank 0 leaves what it saw in a file."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bmburst
import model_center_ext
from bmburst.checkpoint.conversion import convert
from bmburst.loss import IGNORE_INDEX, count_valid, global_mean
from bmburst.sequence import SequenceShard
from tests import lazy
from tests.refusals import refusal_of

TOKENS = 37  # odd, and padded on 2 and 4 ranks
LAYOUTS = ("contiguous", "zigzag", "striped")
_PLAIN: dict[str, Any] = {
    "vocab_size": 61,
    "dim_model": 24,
    "num_heads": 4,
    "dim_head": 8,
    "dim_ff": 40,
    "num_layers": 2,
    "norm_eps": 1e-3,
    "half": False,
}
CONFIGS = {"plain": _PLAIN, "tied": _PLAIN | {"tied": True}}
KV_HEADS = 2
FACTORS: dict[str, Any] = {"scale_emb": 1.7, "scale_depth": 0.6, "dim_model_base": 7}


def run(folder: Path) -> None:
    """Run everything, on any number of ranks; `folder` gets ModelCenter directories and what the ranks saw."""
    meshes = [bmburst.Mesh.over_bmtrain(sequence=size) for size in (1, 2, 4) if lazy.bmt.world_size() % size == 0]
    results: dict[str, Any] = {}
    for name, values in CONFIGS.items():
        theirs = _theirs(values)
        _save(theirs, values, folder / name)
        results[f"logits {name}"] = _their_logits(theirs)
        results[f"gradients {name}"] = _their_gradients(theirs)
        for mesh in meshes:
            for layout in LAYOUTS if name == "plain" else ("zigzag",):
                results[f"logits {name} {mesh.shape.sequence} {layout}"] = _logits(folder / name, mesh, layout=layout)
            results[f"gradients {name} {mesh.shape.sequence}"] = _gradients(folder / name, mesh)
    results |= _with_fewer_heads(folder, meshes[-1])
    results |= _with_factors(folder, meshes[-1])
    results["bfloat16"] = _logits(folder / "plain", meshes[-1], dtype="bfloat16")
    results["lengths"] = _with_lengths(folder / "plain")
    results["returned"] = _returned(folder)
    results["converted"] = _converted(folder)
    results["loaded"] = _loaded(folder)
    results["fresh"] = _fresh()
    results["others"] = _others()
    torch.save(_problems(folder), folder / f"problems-{lazy.bmt.rank()}.pt")
    if lazy.bmt.rank() == 0:
        torch.save(results, folder / "results.pt")


def run_tensor(folder: Path) -> None:
    """What `run` does with the plain model, where ranks share matrices too: by `loss`, in which a token counts once."""
    mesh = bmburst.Mesh.over_bmtrain()
    theirs = _theirs(_PLAIN)
    _save(theirs, _PLAIN, folder / "plain")
    lazy.bmt.save(model_center_ext.Llama.from_pretrained(folder / "plain", mesh=mesh), str(folder / "ours.pt"))
    results = {
        "logits": (_logits(folder / "plain", mesh), _their_logits(theirs)),
        "gradients": (_gradients_by("loss", folder / "plain", mesh), _their_gradients(theirs)),
        "saved": (torch.load(folder / "ours.pt"), torch.load(folder / "plain" / "pytorch_model.pt")),
    }
    if lazy.bmt.rank() == 0:
        torch.save(results, folder / "results.pt")


def data() -> tuple[Tensor, Tensor]:
    """Token ids and labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(61, (2, 2, TOKENS), generator=generator)
    labels[0, 5:30] = IGNORE_INDEX
    return tokens, labels


def _theirs(values: dict[str, Any]) -> Any:
    from model_center.model import Llama, LlamaConfig

    model = Llama(LlamaConfig(**values, att_init_std=0.3, ffn_init_std=0.3, emb_init_std=1.0, proj_init_std=0.3))
    lazy.bmt.init_parameters(model)
    _fill_norms(model)
    return model


def _fill_norms(model: Any) -> None:
    """Norms of ones would hide a norm in another's place."""
    for shard in lazy.named_shards(model):
        if "layernorm" in shard.name:
            key = sum(map(ord, shard.name))
            lazy.scatter(shard, torch.rand(shard.shape, generator=torch.Generator().manual_seed(key)) + 0.5)


def _with_factors(folder: Path, mesh: bmburst.Mesh) -> dict[str, Tensor]:
    """MiniCPM's factors in ours, and on the weights of theirs."""
    ours = _logits(folder / "plain", mesh, **FACTORS)
    theirs = _theirs(_PLAIN)
    depth = FACTORS["scale_depth"] / _PLAIN["num_layers"] ** 0.5
    factors = {"input_embedding": FACTORS["scale_emb"], "attention_out": depth, "w_out": depth}
    factors["output_projection"] = FACTORS["dim_model_base"] / _PLAIN["dim_model"]
    weights = torch.load(folder / "plain" / "pytorch_model.pt")
    for shard in lazy.named_shards(theirs):
        factor = next((number for part, number in factors.items() if part in shard.name), 1.0)
        lazy.scatter(shard, weights[shard.name] * factor)
    return {"logits factors ours": ours, "logits factors": _their_logits(theirs)}


def _save(model: Any, values: dict[str, Any], folder: Path) -> None:
    if lazy.bmt.rank() == 0:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
    lazy.bmt.synchronize()
    lazy.bmt.save(model, str(folder / "pytorch_model.pt"))


def _their_logits(model: Any) -> Tensor:
    tokens, _ = data()
    logits: Tensor = model(tokens, length=torch.tensor([TOKENS, TOKENS])).logits
    return logits.detach()


def _their_gradients(model: Any) -> dict[str, Tensor]:
    """Of the mean over tokens, summed over ranks: each has the whole of it."""
    tokens, labels = data()
    logits = model(tokens, length=torch.tensor([TOKENS, TOKENS])).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX).backward()
    return _gathered_gradients(model)


def _gathered_gradients(model: Any) -> dict[str, Tensor]:
    return {
        each.name: lazy.gather(each, each.parameter.grad if each.count else None) for each in lazy.named_shards(model)
    }


def _part(mesh: bmburst.Mesh, layout: str) -> tuple[SequenceShard, Any]:
    """This rank's part of the sample of its data rank; of all samples where ranks outnumber them."""
    tokens, labels = data()
    cut = SequenceShard.cut(TOKENS, layout=layout, size=mesh.shape.sequence, rank=mesh.sequence_rank)
    own = slice(mesh.data_rank, mesh.data_rank + 1) if mesh.shape.data == 2 else slice(None)
    return cut, (cut.take(tokens[own]), cut.take(labels[own], pad_value=IGNORE_INDEX))


def _logits(directory: Path, mesh: bmburst.Mesh, layout: str = "zigzag", **changes: Any) -> Tensor:
    model = model_center_ext.Llama.from_pretrained(directory, mesh=mesh, layout=layout, **changes)
    tokens, _ = data()
    with mesh.current():
        logits = model(bmburst.shard(tokens, layout=layout), TOKENS).logits
        return bmburst.unshard(logits.detach(), length=TOKENS, layout=layout)


def _gradients(directory: Path, mesh: bmburst.Mesh) -> dict[str, Tensor]:
    """By logits, as a ModelCenter script has it; `loss` gives the same."""
    by_logits, by_loss = (_gradients_by(way, directory, mesh) for way in ("logits", "loss"))
    for name, gradient in by_logits.items():
        assert float((by_loss[name] - gradient).abs().max() / gradient.abs().max()) < 1e-5, name
    return by_logits


def _gradients_by(way: str, directory: Path, mesh: bmburst.Mesh) -> dict[str, Tensor]:
    model = model_center_ext.Llama.from_pretrained(directory, mesh=mesh)
    cut, (tokens, labels) = _part(mesh, "zigzag")
    (valid,) = mesh.world.all_reduce(count_valid(labels)).wait()
    valid = valid // mesh.shape.tensor  # ranks of a tensor group have the same labels
    if way == "loss":
        total = model.loss(tokens, cut.positions().expand_as(tokens), labels, cut.length)
    else:
        logits = model(tokens, cut.length).logits
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
    global_mean(total, valid, lazy.bmt.world_size()).backward()
    return _gathered_gradients(model)


def _with_fewer_heads(folder: Path, mesh: bmburst.Mesh) -> dict[str, Any]:
    """Two KV heads against ModelCenter's Llama, in which each is there twice."""
    theirs = torch.load(folder / "plain" / "pytorch_model.pt")
    for name in theirs:
        if "project_k" in name or "project_v" in name:
            theirs[name] = _few(theirs[name])
    values = _PLAIN | {"num_heads_kv": KV_HEADS}
    if lazy.bmt.rank() == 0:
        (folder / "gqa").mkdir()
        (folder / "gqa" / "config.json").write_text(json.dumps(values))
        torch.save(theirs, folder / "gqa" / "pytorch_model.pt")
        expanded = {name: _many(x) if "project_k" in name or "project_v" in name else x for name, x in theirs.items()}
        del expanded["position_bias.inv_freq"]
        torch.save(expanded, folder / "expanded.pt")
    lazy.bmt.synchronize()
    model = _theirs(_PLAIN)
    lazy.bmt.load(model, str(folder / "expanded.pt"), strict=False)
    gradients = _their_gradients(model)
    for name in gradients:
        if "project_k" in name or "project_v" in name:
            gradients[name] = gradients[name].unflatten(0, (KV_HEADS, 2, 8)).sum(1).flatten(0, 1)
    return {
        "logits gqa": _their_logits(model),
        "gradients gqa": gradients,
        "logits gqa ours": _logits(folder / "gqa", mesh),
        "gradients gqa ours": _gradients(folder / "gqa", mesh),
    }


def _few(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (KV_HEADS, 2, 8))[:, 0].flatten(0, 1).clone()


def _many(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (KV_HEADS, 1, 8)).expand(-1, 2, -1, -1).flatten(0, 2).clone()


def _with_lengths(directory: Path) -> tuple[Tensor, Tensor]:
    """Samples of their own lengths, padded, on one rank: ours, and ModelCenter's."""
    tokens, _ = data()
    lengths = torch.tensor([TOKENS, 20])
    mesh = bmburst.Mesh.over_bmtrain(sequence=1)
    own = model_center_ext.Llama.from_pretrained(directory, mesh=mesh)
    ours = own(tokens, lengths).logits
    _, labels = data()
    places = torch.arange(TOKENS).expand_as(tokens)
    total = torch.nn.functional.cross_entropy(ours.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(own.loss(tokens, places, labels, lengths), total)
    model = _theirs(_PLAIN)
    from model_center_ext.llama import LlamaOutput

    state = torch.load(directory / "pytorch_model.pt")
    del state["position_bias.inv_freq"]
    if lazy.bmt.rank() == 0:
        torch.save(state, directory / "without.pt")
    lazy.bmt.synchronize()
    lazy.bmt.load(model, str(directory / "without.pt"), strict=False)
    theirs = model(tokens, length=lengths)
    assert set(LlamaOutput._fields) == set(type(theirs).__dataclass_fields__)
    return ours.detach(), theirs.logits.detach()


def _returned(folder: Path) -> Tensor:
    """Logits of ModelCenter's Llama with what `bmtrain.save` wrote of ours."""
    lazy.bmt.save(model_center_ext.Llama.from_pretrained(folder / "plain"), str(folder / "ours.pt"))
    model = _theirs(_PLAIN)
    lazy.bmt.load(model, str(folder / "ours.pt"), strict=False)
    return _their_logits(model)


def _converted(folder: Path) -> Tensor:
    """Logits of ModelCenter's own `from_pretrained` on what `bmburst convert` made of what it made for Hugging Face."""
    from model_center.model import Llama

    if lazy.bmt.rank() == 0:
        convert(folder / "plain", folder / "hf", to="huggingface")
        (folder / "hf" / "config.model-center.json").unlink()  # so that it writes one of its own
        convert(folder / "hf", folder / "again", to="model-center")
    lazy.bmt.synchronize()
    return _their_logits(Llama.from_pretrained(str(folder / "again")))


def _loaded(folder: Path) -> tuple[list[str], bool]:
    """What `bmtrain.load` of ModelCenter's file misses in ours, and whether it gave what `from_pretrained` gives."""
    from model_center.model import LlamaConfig as TheirConfig

    from model_center_ext import Llama, LlamaConfig

    model = Llama(LlamaConfig.from_model_center(TheirConfig(**_PLAIN), recompute="none"))
    missing = lazy.bmt.load(model, str(folder / "plain" / "pytorch_model.pt"), strict=False).missing_keys
    pairs = zip(lazy.named_shards(model), lazy.named_shards(Llama.from_pretrained(folder / "plain")), strict=True)
    return missing, all(a.name == b.name and torch.equal(a.local(), b.local()) for a, b in pairs)


def _fresh() -> dict[str, float]:
    """Mean or standard deviation of weights that `bmtrain.init_parameters` made."""
    from model_center_ext import Llama, LlamaConfig

    stds = {"emb_init_std": 0.5, "att_init_std": 0.25, "ffn_init_std": 0.125, "proj_init_std": 1.0}
    model = Llama(LlamaConfig(**_PLAIN, **stds, norm_init_var=3.0))
    lazy.bmt.init_parameters(model)
    found = {shard.name: lazy.gather(shard) for shard in lazy.named_shards(model)}
    return {name: float(full.mean() if full.dim() == 1 else full.std()) for name, full in found.items()}


def _others() -> dict[str, tuple[list[str], str]]:
    """Of ModelCenter's other decoders, set to what LLaMA is: the parameters that LLaMA has not, and our refusal."""
    from model_center.model import GPT2 as Gpt2
    from model_center.model import OPT, GPT2Config, GPTj, GPTjConfig, Llama, LlamaConfig, OPTConfig

    from model_center_ext import LlamaConfig as Ours

    plain: dict[str, Any] = {"norm_bias": False, "att_bias": False, "ffn_bias": False, "ffn_activate_fn": "gated_silu"}
    plain |= {"pos_bias_type": "rotary"}
    known = {name for name, _ in Llama(LlamaConfig(**_PLAIN)).named_parameters()}
    found = {}
    for kind, config, more in ((Gpt2, GPT2Config, {"proj_bias": False}), (OPT, OPTConfig, {}), (GPTj, GPTjConfig, {})):
        made = config(**_PLAIN | plain | more)
        names = [name for name, _ in kind(made).named_parameters() if name.replace("decoder", "encoder") not in known]
        found[kind.__name__] = names, refusal_of(Ours.from_model_center, made)
    return found


def _problems(folder: Path) -> dict[str, str]:
    """What this rank is told about bad input."""
    from model_center_ext import Llama, LlamaConfig

    model = Llama.from_pretrained(folder / "plain")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    attempts: dict[str, Any] = {
        "directory": lambda: Llama.from_pretrained(folder / "nowhere"),
        "shape": lambda: Llama.from_pretrained(folder / "plain", LlamaConfig(**_PLAIN | {"dim_ff": 48})),
        "tied": lambda: Llama.from_pretrained(folder / "plain", LlamaConfig(**_PLAIN, tied=True)),
        "part": lambda: model(tokens, 50),
        "cache": lambda: model(tokens, use_cache=True, attention_mask=torch.ones(1, 8)),
        "mask as length": lambda: model(tokens, torch.arange(8)[None] >= 3),
        "lengths": lambda: model(tokens, torch.tensor([8, 8])),
        "far": lambda: model(tokens, torch.tensor([9])),
        "floats": lambda: model(tokens, torch.tensor([8.0])),
        "no number": lambda: model(tokens, 8.0),
        "no causal mask": lambda: model(tokens, torch.tensor([5]), mask="full"),
        "window": lambda: model(tokens, torch.tensor([5]), mask=(bmburst.SlidingWindow(2, causal=False),)),
        "mask": lambda: model(tokens, attention_mask=torch.ones(1, 8)),
        "ids": lambda: model(),
        "list": lambda: model([[0] * 8], 8),
        "float ids": lambda: model(tokens.float(), 8),
        "empty": lambda: model(tokens[:0], 8),
        "labels": lambda: model.loss(tokens, torch.arange(8)[None], tokens[:, :3], 8),
        "norm_bias": lambda: LlamaConfig(norm_bias=True),
        "recompute": lambda: LlamaConfig(recompute="blocks"),
        "layers": lambda: LlamaConfig(**_PLAIN, recompute=f"block+first-{_PLAIN['num_layers']}"),
        "name": lambda: LlamaConfig.named("llama-2-7"),
        "norm": lambda: Llama(LlamaConfig(**_PLAIN | {"half": True}, norm_kernel="cpm-kernels")),
    }
    return {name: refusal_of(attempt) for name, attempt in attempts.items()}

"""`generate` where a length or a local decision matters, on every rank of one job. Every rank leaves what it saw."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedModel

from bmburst import Mesh, UserError
from bmburst.integrations.transformers import register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests import tiny

ORIGINAL = 16
"""Length at which the rotary frequencies change."""
NEW = 4
LENGTHS = (ORIGINAL - 2, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 41)
"""The first crosses the original length in its answer, the second in its first new token."""
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 7.0, 9.0],
    "original_max_position_embeddings": ORIGINAL,
}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
}
_NARROW = {"head_dim": 8, "v_head_dim": 6, "layer_types": ["full_attention"], "n_routed_experts": 2}
_OTHERS: dict[str, dict[str, Any]] = {"deepseek_v3": _MLA, "jetmoe": {"kv_channels": 8, "num_local_experts": 2}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": ORIGINAL,
            "head_dim": 8,
        },
    ),
    "longrope": ("llama", {"rope_parameters": _LONG, "head_dim": 8}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": _LONG,
            "original_max_position_embeddings": ORIGINAL,
            "hidden_size": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mimo_v2_flash": ("mimo_v2_flash", _NARROW | {"num_experts_per_tok": 1, "moe_intermediate_size": 16}),
}
"""The last has values that are narrower than keys."""
TEXTS = [(name, length) for name in MODELS for length in (LENGTHS if name != "mimo_v2_flash" else LENGTHS[:1])]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
SAMPLED: dict[str, Any] = {
    **{"do_sample": True, "max_new_tokens": 12, "top_k": 0, "typical_p": 0.8, "eta_cutoff": 0.01, "top_h": 0.9},
    **{"encoder_repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 12},
}
"""Options of the sampler that are transformers' own."""


def make(name: str, attention: str) -> PreTrainedModel:
    """Return a model of `MODELS`, or of another family."""
    family, changes = MODELS.get(name, (name, _OTHERS.get(name, {})))
    return tiny.transformers_model(family, attention=attention, **{"num_hidden_layers": 1} | changes).eval()


def prompt(length: int) -> Tensor:
    """Return two prompts."""
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(length))


def run(output: Path) -> None:
    """Generate everything; every rank saves its own."""
    register()
    mesh = Mesh.over_process_group()
    found = _lengths(mesh) | _decisions(mesh) | {"refused": _refusals(mesh)}
    torch.save(found, output / f"{dist.get_rank()}.pt")


def _lengths(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    models = {name: make(name, "bmburst") for name in MODELS}
    for name, length in reversed(TEXTS):  # the longest first: it must not change the frequencies of the next
        model, cache = models[name], SplitCache(models[name].config, mesh)
        first = generate(model, prompt(length), mesh=mesh, past_key_values=cache, **GREEDY)
        found[f"{name} {length}"] = first
        turn = torch.cat((first, prompt(7)), 1)
        found[f"{name} {length} turn"] = generate(model, turn, mesh=mesh, past_key_values=cache, **GREEDY)
        found[f"{name} widths"] = [cache.layers[0].keys.shape[-1], cache.layers[0].values.shape[-1]]
    return found


class Streamer:
    """Keeps the new tokens of the first text; raises at one of them."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self._raises_at = raises_at

    def put(self, value: Tensor) -> None:
        if value.dim() == 1:
            self.tokens.append(int(value[0]))
        if len(self.tokens) == self._raises_at:
            raise ConnectionError("the reader has gone")

    def end(self) -> None:
        self.tokens.append(-1)


def _decisions(mesh: Mesh) -> dict[str, Any]:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = make("llama", "bmburst")
    own = set(vars(model))

    def answer(**options: Any) -> Any:
        try:
            return generate(model, prompt(9), mesh=mesh, **{"max_new_tokens": 12, "do_sample": False} | options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def slow(ids: Tensor, _: object) -> Tensor:
        time.sleep(0.2 if rank == 0 else 0.0)
        return torch.zeros(len(ids), dtype=torch.bool)

    def by_rank(ids: Tensor, _: object) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 9 + (3 if rank == 0 else 1))

    def raises(ids: Tensor, scores: Tensor) -> Tensor:
        if rank == last and ids.shape[1] == 11:
            raise LookupError(f"on rank {rank}")
        return scores

    def other_choice(_: Tensor, scores: Tensor) -> Tensor:
        return scores if rank == 0 else -scores

    late = MaxTimeCriteria(1000.0, initial_timestamp=time.time() - (0 if rank == 0 else 2000))
    streamer = Streamer() if rank == 0 else None
    found = {
        "plain": answer(),
        "sampled": answer(seed=3, **SAMPLED),
        "clocks": answer(stopping_criteria=[late]),
        "max_time": answer(stopping_criteria=[slow], max_time=0.5, max_new_tokens=50),
        "no time": answer(max_time=0.0),
        "criterion": answer(stopping_criteria=[by_rank]),
        "processor": answer(logits_processor=[other_choice], eos_token_id=list(range(3, 9))),
        "streamed": answer(streamer=streamer),
        "raising processor": answer(logits_processor=[raises]),
        "raising criterion": answer(stopping_criteria=[lambda ids, _: raises(ids, ids[:, 0] < 0)]),
        "raising streamer": answer(streamer=Streamer(raises_at=2) if rank == 0 else None),
        "synced_gpus": answer(synced_gpus=True),
        "plain again": answer(),
    }
    # Groups of one rank whose answers differ in length: with synced_gpus, as FSDP needs it, the first goes on.
    alone = Mesh.over_process_group(sequence=1)
    cache = SplitCache(model.config, alone)
    ids, most = prompt(9 + rank), 2 + 2 * rank
    options: dict[str, Any] = {"mesh": alone, "past_key_values": cache, "max_new_tokens": most, "do_sample": False}
    found["own"] = generate(model, ids, synced_gpus=True, **options)
    found["own turn"] = generate(model, torch.cat((found["own"], prompt(7)), 1), **options)
    found["tokens of the streamer"] = streamer.tokens if streamer is not None else []
    found["left behind"] = sorted(set(vars(model)) - own)
    return found


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"position_ids": torch.arange(9)[None] + 5}, "position_ids | leave it out"),
    ({"token_type_ids": torch.zeros(2, 9)}, "token_type_ids | leave it out"),
    ({"inputs_embeds": torch.zeros(2, 9, 24)}, "inputs_embeds | leave it out"),
    ({"inputs": prompt(9)}, "inputs | leave it out"),
    ({"assistant_model": "another"}, "assistant_model='another' | leave it out"),
    ({"custom_generate": "someone/something"}, "custom_generate | leave it out"),
    ({"negative_prompt_ids": prompt(9)}, "negative_prompt_ids"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5 | leave it out"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
    ({"generation_config": GenerationConfig(penalty_alpha=0.6, top_k=4)}, "generation_config.penalty_alpha = None"),
    ({"not_an_argument": 1}, "not_an_argument=1 | leave it out"),
    ({"cache": None}, "cache is given | past_key_values=SplitCache"),
    ({"stored": {"token_healing": True}}, "token_healing | generation_config.token_healing = None"),
    ({"stored": {"num_beams": 4}}, "num_beams=1"),
    ({"model": "diffllama"}, "DiffLlamaForCausalLM | keys or values | eager"),
    ({"model": "jetmoe"}, "JetMoeForCausalLM | keys or values | eager"),
)
WORDS = tuple(words for _, words in BAD)


def _refusals(mesh: Mesh) -> list[str]:
    """Return what `generate` says to each of `BAD`, and check that no token was computed."""
    found = []
    for given, _ in BAD:
        options = dict(given)
        model = make(options.pop("model", "llama"), "bmburst")
        for name, value in options.pop("stored", {}).items():
            setattr(model.generation_config, name, value)
        cache = SplitCache(model.config, mesh)
        try:
            generate(model, prompt(9), mesh=mesh, past_key_values=cache, max_new_tokens=2, **options)
        except UserError as error:
            found.append(str(error) if not cache.get_seq_length() else "refused in the middle")
        else:
            found.append("nothing")
    # What transformers ignores, or what changes nothing, is accepted.
    model = make("llama", "bmburst")
    model.generation_config.chat_format = "of another library"
    model.generation_config.cache_implementation, model.generation_config.length_penalty = "static", 0.5
    generate(model, prompt(9), mesh=mesh, max_new_tokens=1, num_beams=1, cache_implementation="static", use_cache=True)
    return found

"""Generation by every rank of one job, over groups of 1 to 4 ranks. Rank 0 of each group leaves what it saw."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from bmburst import Mesh, UserError
from bmburst.integrations.transformers import register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests.integrations.transformers_program import FAMILIES, make_model

NEW = 4
LENGTHS = (1, 3, 8, 23)
MODELS = {family: (family, {}) for family in FAMILIES} | {"no layers": ("llama", {"num_hidden_layers": 0})}
"""Models by name: the family, and what it has otherwise."""


def prompt(length: int) -> Tensor:
    """Return two prompts."""
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(length))


def run(output: Path) -> None:
    """Greedy answers, two turns and samples; every rank saves its own."""
    register()
    mesh = Mesh.over_process_group()
    greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    found: dict[str, Any] = {}
    for name, (family, changes) in MODELS.items():
        model = make_model(family, "bmburst", torch.float32, **changes).eval()
        for length in LENGTHS:
            cache = SplitCache(model.config, mesh)
            first = generate(model, prompt(length), mesh=mesh, past_key_values=cache, **greedy)
            found[f"{name} {length}"] = first
            turn = torch.cat((first, prompt(17)), 1)
            found[f"{name} {length} turn"] = generate(model, turn, mesh=mesh, past_key_values=cache, **greedy)
        found[f"{name} sampled"] = generate(
            model, prompt(8), mesh=mesh, seed=3, do_sample=True, max_new_tokens=20, min_new_tokens=20
        )
    model = make_model("llama", "bmburst", torch.float32).eval()
    long = SplitCache(model.config, mesh)
    long.prefill(model, prompt(1000))
    found["nbytes"] = long.nbytes
    found["refused"] = [_refusal(model, mesh, **given) for given in BAD]
    found["differing"] = _refusal(model, mesh, **DIFFER[dist.get_rank() % 2])
    found["other models"] = [
        _refusal(other, mesh) for other in (make_model("llama", "sdpa", torch.float32), model.model)
    ]
    torch.save(found, output / f"{dist.get_rank()}.pt")


BAD: tuple[dict[str, Any], ...] = (
    {"input_ids": [[1, 2]]},
    {"input_ids": torch.zeros(1, 0, dtype=torch.int64)},
    {"attention_mask": torch.tensor([[0, 1, 1]] * 2)},
    {"attention_mask": torch.ones(2, 3, device="meta")},
    {"attention_mask": torch.ones(2, 3).to_sparse()},
    {"num_beams": 2},
    {"do_sample": True, "num_return_sequences": 2},
    {"past_key_values": DynamicCache()},
    {"past_key_values": "filled"},
    {"past_key_values": "filled", "input_ids": prompt(5)[:1]},
    {"past_key_values": "filled", "input_ids": prompt(5)},
    {"input_ids": torch.tensor([[1, 999]])},
    {"input_ids": torch.tensor([[1, -1]])},
    {"input_ids": torch.tensor([[1.0, 2.0]])},
    {"attention_mask": [[1, 1, 1]] * 2},
    {"use_cache": False},
    {"prompt_lookup_num_tokens": 2},
    {"generation_config": 3},
    {"seed": "one"},
    {"mesh": "all"},
)
REFUSED = (
    "input_ids | list",
    "input_ids | [1, 0]",
    "attention_mask | padding",
    "attention_mask | hold numbers | meta",
    "attention_mask | dense",
    "num_beams=1",
    "num_return_sequences=1",
    "DynamicCache | SplitCache",
    "holds 3 tokens | input_ids has 3",
    "holds 2 texts | input_ids has 1",
    "differs | at token 0 | new cache",
    "999 | 0 to 60",
    "at least 0 | -1",
    "int64 | float32",
    "attention_mask | [2, 3]",
    "use_cache | leave it out",
    "prompt_lookup_num_tokens | leave it out",
    "GenerationConfig | int",
    "seed | 'one'",
    "bmburst.Mesh | str",
)
DIFFER: tuple[dict[str, Any], ...] = ({"max_new_tokens": 2}, {"max_new_tokens": 3})
"""Of even and odd ranks."""


def _refusal(model: Any, own: Mesh, **given: Any) -> str:
    """Return what `generate` says of arguments that it refuses."""
    if given.get("past_key_values") == "filled":
        given["past_key_values"] = SplitCache(model.config, own)
        generate(model, prompt(3)[:, :2], mesh=own, past_key_values=given["past_key_values"], max_new_tokens=2)
    arguments: dict[str, Any] = {"input_ids": prompt(3), "max_new_tokens": 2, "mesh": own} | given
    try:
        generate(model, **arguments)
    except UserError as error:
        return str(error)
    return "nothing"

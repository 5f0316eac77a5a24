"""`generate` with rotary tables that depend on the length, with clocks and criteria, and with what it does not read."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from bmburst.inference.generation_fields import GENERATOR, IDLE, SPLIT_ARGUMENTS, SPLIT_GENERATE
from bmburst.integrations.transformers_cache import generate
from tests.distributed.processes import run_processes
from tests.integrations import transformers_steps_program as program
from tests.refusals import says


def whole(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return what transformers generates in one process."""
    found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What transformers generates, with a new model for each text, because a model remembers the longest one."""
    found = {}
    for name, length in program.TEXTS:
        model = program.make(name, "eager")
        cache = DynamicCache(config=model.config)
        first = whole(model, program.prompt(length), past_key_values=cache, **program.GREEDY)
        found[f"{name} {length}"] = first
        turn = torch.cat((first, program.prompt(7)), 1)
        found[f"{name} {length} turn"] = whole(model, turn, past_key_values=cache, **program.GREEDY)
    model, ids = program.make("llama", "eager"), program.prompt(9)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    found["plain"] = whole(model, ids, **options)
    torch.manual_seed(3)
    found["sampled"] = whole(model, ids, **options | program.SAMPLED)
    found["processor"] = whole(model, ids, **options, eos_token_id=list(range(3, 9)))
    return found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_tokens_and_ends_are_those_of_one_process(ranks: int, expected: dict[str, Any], tmp_path: Path) -> None:
    run_processes(ranks, program.run, tmp_path)
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    plain, model = expected["plain"].tolist(), program.make("llama", "eager")
    for rank, seen in enumerate(every):
        got = {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in seen.items()}
        assert {name: got[name] for name in expected} == {name: each.tolist() for name, each in expected.items()}
        assert got["mimo_v2_flash widths"] == [8, 6]  # values are not padded to keys
        assert got["plain again"] == got["synced_gpus"] == got["streamed"] == got["clocks"] == plain
        assert got["criterion"] == [row[: 9 + 3] for row in plain]
        assert got["no time"] == [row[: 9 + 1] for row in plain]
        assert got["max_time"] == every[0]["max_time"].tolist()
        assert len(got["max_time"][0]) < 9 + 50
        for kind in ("processor", "criterion"):
            if rank == ranks - 1:
                assert got[f"raising {kind}"].startswith("LookupError")
            else:
                says(got[f"raising {kind}"], "UserError | rank | LookupError", ranks - 1)
        if rank:
            says(got["raising streamer"], "UserError | rank 0 | ConnectionError | the reader has gone")
        else:
            assert got["raising streamer"] == "ConnectionError: the reader has gone"
            assert got["tokens of the streamer"] == [*plain[0][9:], -1]
        own = whole(model, program.prompt(9 + rank), max_new_tokens=2 + 2 * rank, do_sample=False)
        turn = torch.cat((own, program.prompt(7)), 1)
        assert got["own"] == own.tolist()
        assert got["own turn"] == whole(model, turn, max_new_tokens=2 + 2 * rank, do_sample=False).tolist()
        assert got["left behind"] == []
        assert seen["refused"] == every[0]["refused"]
    for words, text in zip(program.WORDS, every[0]["refused"], strict=True):
        says(text, words)


def test_lists_name_every_field_and_argument_of_the_installed_transformers() -> None:
    """A new version's own are refused, or noted, until someone has read what they do."""
    fields = set(GenerationConfig().to_dict())
    assert set(SPLIT_GENERATE) == set(GENERATOR) == fields
    assert set(IDLE) <= fields
    ours, theirs = (set(inspect.signature(each).parameters) for each in (generate, GenerationMixin.generate))
    of_assistants = {"assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate"}
    read_from_kwargs = {"tokenizer"}
    assert theirs - {"self", "inputs", "kwargs"} - of_assistants == set(SPLIT_ARGUMENTS) - read_from_kwargs
    assert not ours & set(SPLIT_ARGUMENTS)

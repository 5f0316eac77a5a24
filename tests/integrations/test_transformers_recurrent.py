"""Hybrids of transformers on split sequences against each document alone in one process, in fp64.

Decays are slow, so that a state that a rank does not get, or that passes from one document to another, shows.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from benchmarks.tiny_families import tiny_config, tiny_model
from bmburst.integrations import transformers_recurrent as recurrent
from bmburst.integrations.transformers import NAME, SplitSequences, recompute, register
from bmburst.integrations.transformers_cache import SplitCache, generate
from bmburst.linear.call import ChainCall
from tests.distributed.processes import run_processes
from tests.distributed.threads import mesh_of, run_ranks
from tests.integrations import recurrent_program as program
from tests.refusals import refused

ALONE = mesh_of()
IDS = torch.arange(3, 14)[None]
Found = dict[str, Any]
LIMIT, LIMITS = 1e-5, {"qwen3_5_moe_text": 4e-5, "zamba2": 1e-4}
"""Largest distance. Norms and gates inside of the models are in fp32: with these in fp64 it is below 1e-13."""


def distances(ours: Found, theirs: Found, limit: float) -> dict[str, float]:
    """Return how far logits, loss and each gradient are off, relative to their size, where it is above the limit."""
    found = {"loss": abs(ours["loss"] / theirs["loss"] - 1)}
    if "logits" in ours:
        found["logits"] = float(
            (ours["logits"] * (theirs["logits"] != 0) - theirs["logits"]).norm() / theirs["logits"].norm()
        )
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    # A gradient that is zero up to rounding, such as that of a key bias, is compared with the largest one.
    least = 1e-2 * max(float(grad.norm()) for grad in theirs["gradients"].values())
    for name, wanted in theirs["gradients"].items():
        found[name] = float((ours["gradients"][name] - wanted).norm()) / max(float(wanted.norm()), least)
    return {name: off for name, off in found.items() if not off < limit}


def compare(folder: Path, size: int, cases: Sequence[tuple[str, str]], *, wraps: bool) -> None:
    output = folder / "results.pt"
    run_processes(size, program.run, output, cases, size, wraps)
    found = torch.load(output)
    wrong = {}
    for key, ours in found.items():
        name, _, case = key.partition(" ")
        theirs = program.alone(program.WRAPS.get(name, name), case or "documents", lora=name.startswith("lora"))
        if off := distances(ours, theirs, LIMITS.get(name, LIMIT)):
            wrong[key] = off
    assert len(found) == len(cases) + (len(program.WRAPS) if wraps else 0)
    assert wrong == {}


def test_on_two_ranks(tmp_path: Path) -> None:
    """Also under FSDP2 with recomputation, under DDP with transformers' own, and with adapters on input projections."""
    compare(tmp_path, 2, program.CASES, wraps=True)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_types(tmp_path: Path, size: int) -> None:
    types = program.FEW + program.OTHERS + program.REST
    compare(tmp_path, size, [*product(types, program.SPANS), *program.BALANCED], wraps=True)


def answered(folder: Path, size: int, types: tuple[str, ...], lengths: tuple[int, ...] = program.PROMPTS) -> None:
    """Compare greedy tokens of two turns, and their logits, with those of transformers on one process."""
    run_processes(size, program.answers, folder, types, lengths)
    ours = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    assert len(ours[0]) == len(types) * len(lengths)
    wrong = {}
    for name in types:
        model = tiny_model(name, "eager")
        for length in lengths:
            theirs, found = program.turns(model.generate, length), [each[name, length] for each in ours]
            assert [each["text"].tolist() for each in found] == [theirs["text"].tolist()] * size, (name, length)
            off = max(float((each["logits"] - theirs["logits"]).norm() / theirs["logits"].norm()) for each in found)
            if not off < LIMITS.get(name, LIMIT):
                wrong[name, length] = off
    assert wrong == {}


def test_two_turns_continue_the_states(tmp_path: Path) -> None:
    """All ranks compute the first token of the second turn behind 8 tokens: its length is then even."""
    answered(tmp_path, 2, program.ANSWERED, (3, 8))


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_turns_of_all_types(tmp_path: Path, size: int) -> None:
    answered(tmp_path, size, program.ANSWERED + program.ALSO_ANSWERED)


@pytest.mark.long
def test_types_that_do_not_generate() -> None:
    """Those of docs/families.md."""
    register()
    page = " ".join((Path(__file__).parents[2] / "docs" / "families.md").read_text().split())
    names = page.partition("except for ")[2].partition(". [A table]")[0].replace(" and ", ", ").split(", ")
    assert len(names) == 3
    for name in names:
        with refused("fix: "):
            generate(tiny_model(name, "bmburst"), IDS, mesh=ALONE, max_new_tokens=1)


@pytest.fixture
def part() -> Any:
    register()
    return SplitSequences(ALONE).part(IDS)


@pytest.fixture
def model(part: Any) -> Any:
    return tiny_model("qwen3_next", "bmburst")


def test_outside_of_split_batches_nothing_changes(part: Any, model: Any) -> None:
    """Also after an exception inside of one, and for a second model of the same module."""
    other = tiny_model("qwen3_next", "eager")
    before = other(input_ids=IDS, use_cache=False).logits
    with refused("seq_idx"):
        part.logits(model, seq_idx=torch.zeros(1, 11))
    assert torch.equal(other(input_ids=IDS, use_cache=False).logits, before)
    torch.testing.assert_close(part.logits(model)[:, :11], before, rtol=1e-4, atol=1e-5)
    assert other.generate(IDS, max_new_tokens=2, min_new_tokens=2).shape == (1, 13)


def test_outside_of_split_batches_nothing_breaks_a_graph() -> None:
    register()
    tiny_model("lfm2", NAME)
    plain = tiny_model("lfm2", "sdpa")
    compiled: Any = torch.compile(plain, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS, use_cache=False).logits, plain(IDS, use_cache=False).logits)


def test_recomputation_keeps_what_was_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    gathered = ChainCall.gathered
    monkeypatch.setattr(ChainCall, "gathered", lambda self, slots: calls.append(self) or gathered(self, slots))
    register()

    def body(comm: Any) -> None:
        part, model = SplitSequences(mesh_of(comm)).part(IDS), tiny_model("qwen3_next", "bmburst")
        for policy, count in (("none", 4), ("block-keep-attention", 4), ("block", 6)):
            recompute(model.train(), policy)
            before = sum(call.comm is comm for call in calls)
            part.loss(model).backward()
            # A convolution and a scan, both ways.
            assert sum(call.comm is comm for call in calls) - before == count, policy

    run_ranks(2, body)


REFUSED: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "lengths of documents": (lambda part, model: part.logits(model, cu_seq_lens_q=torch.tensor([0, 11])), "cu_seq"),
    "indices of documents": (lambda part, model: part.logits(model, seq_idx=torch.zeros(1, 11)), "seq_idx | fix: "),
    "a cache of transformers": (
        lambda part, _: part.logits(tiny_model("mamba2", "bmburst"), use_cache=True),
        "Mamba2Mixer | no cache of transformers | use_cache=False",
    ),
    # A group whose text has ended would go on, and fail while the others wait for it: a state cannot go back.
    "synced_gpus": (
        lambda _, model: generate(model, IDS, mesh=ALONE, max_new_tokens=1, synced_gpus=True),
        "synced_gpus | recurrent | fix: ",
    ),
    # RoBERTa counts positions from the id of padding on, and where a batch has no positions finds padding itself.
    "positions behind padding": (
        lambda *_: SplitSequences(ALONE).part(IDS).logits(tiny_model("roberta", "bmburst")),
        "positions | padding",
    ),
    "a striped layout": (
        lambda _, model: SplitSequences(ALONE, layout="striped").part(IDS).logits(model),
        "Qwen3NextGatedDeltaNet | 'striped' | allowed: zigzag, contiguous, balanced",
    ),
    # One process alone would add it to RecurrentGemma's convolution, and to no other.
    "an adapter of a convolution": (
        lambda part, _: part.logits(
            get_peft_model(tiny_model("recurrent_gemma", "bmburst"), LoraConfig(r=32, target_modules=["conv_1d"]))
        ),
        "convolution | temporal_block.conv_1d | no effect | modules_to_save",
    ),
    "kernels of a hub": (
        lambda part, model: setattr(model, "_use_kernels", True) or part.logits(model),
        "kernels of a hub | use_kernels=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_before_work(part: Any, model: Any, name: str) -> None:
    call, words = REFUSED[name]
    with refused(words):
        call(part, model)


def test_states_do_not_go_back(model: Any) -> None:
    cache = SplitCache(model.config, ALONE)
    text = generate(model, IDS, mesh=ALONE, past_key_values=cache, max_new_tokens=2)
    with refused("cannot go back from | new cache"):
        cache.crop(text.shape[1] - 2)


def test_limits_of_dt_and_other_activations() -> None:
    """The tiny types have SiLU and no limits; these cut every step, which is 0.5 to 1 without them.

    transformers limits dt of all tokens of a prompt, also of the last one, but not of an answer.
    """
    register()
    models = [tiny_model("nemotron_h", attention) for attention in ("eager", NAME)]
    for layer in (layer for model in models for layer in recurrent.mixers(model)):
        layer.time_step_limit, layer.activation = (0.01, 0.1), "relu2"
    eager, ours = models
    with torch.no_grad():
        found = SplitSequences(ALONE).part(IDS).logits(ours)[:, : IDS.shape[1]]
        torch.testing.assert_close(found, eager(IDS, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    answer = generate(ours, IDS, mesh=ALONE, **program.WITH_LOGITS)
    wanted = eager.generate(IDS, attention_mask=torch.ones_like(IDS), **program.WITH_LOGITS)
    torch.testing.assert_close(answer.logits, wanted.logits, rtol=1e-5, atol=1e-5)


def test_a_cache_without_states_is_refused_before_work(model: Any) -> None:
    """Older releases of transformers have none for some types."""
    cache = SplitCache(model.config, ALONE)
    cache.has_split_states = False
    with refused("cache of transformers | no states | fix: "):
        generate(model, IDS, mesh=ALONE, max_new_tokens=1, past_key_values=cache)


def test_generation_without_a_layer_of_attention() -> None:
    register()
    config = tiny_config("qwen3_5_text")
    config.layer_types = ["linear_attention"] * 2
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with refused("Qwen3_5ForCausalLM | without a layer of attention | fix: "):
        generate(model, IDS, mesh=ALONE, max_new_tokens=1)


def test_other_media_and_biases_by_distance(part: Any) -> None:
    gemma = tiny_model("gemma4_unified", "bmburst")
    assert part.logits(gemma).shape == (1, 12, program.VOCABULARY)  # one is padding
    falcon = tiny_model("falcon", "bmburst")
    falcon.__class__ = type("FSDPFalconForCausalLM", (type(falcon),), {"__module__": __name__})  # as FSDP2 does it
    assert part.logits(falcon).shape == (1, 12, program.VOCABULARY)
    falcon.config.alibi = True
    with refused("bias by distance"):
        part.logits(falcon)


@pytest.mark.parametrize("name", ["granitemoehybrid", "minimax"])
def test_a_model_without_the_recurrent_layers_of_its_type(name: str) -> None:
    """Small models of Granite 4 have attention in all layers. They need no layout for states."""
    register()
    models = []
    for attention in ("eager", NAME):
        config = tiny_config(name)
        config.layer_types = ["full_attention"] * 2
        kinds = {"attn_implementation": attention, "experts_implementation": "eager"}
        models.append(AutoModelForCausalLM.from_config(config, **kinds).double().eval())
    eager, ours = models
    ours.load_state_dict(eager.state_dict())
    with torch.no_grad():
        found = SplitSequences(ALONE, layout="striped").part(IDS).logits(ours)[:, : IDS.shape[1]]
        torch.testing.assert_close(found, eager(IDS, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    text = generate(ours, IDS, mesh=ALONE, max_new_tokens=3, do_sample=False)
    assert text.tolist() == eager.generate(IDS, max_new_tokens=3, do_sample=False).tolist()


def test_a_type_that_was_not_read(monkeypatch: pytest.MonkeyPatch, part: Any, model: Any) -> None:
    monkeypatch.setattr(recurrent, "MIXERS", {})
    for each, words in ((model, "registry"), (tiny_model("lfm2", "bmburst"), "layers | 'conv'")):
        with refused(words):
            part.logits(each)


def test_a_function_with_another_signature(monkeypatch: pytest.MonkeyPatch, part: Any, model: Any) -> None:
    def another(hidden_states: Any, weight: Any, gate: Any) -> Any:
        return hidden_states, weight, gate

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", another)
    with refused("causal_conv1d_fn takes hidden_states, weight, gate | not the one that was read"):
        part.logits(model)
    monkeypatch.undo()
    monkeypatch.setattr(modeling_qwen3_next.Qwen3NextGatedDeltaNet, "forward", another)
    with refused("Qwen3NextGatedDeltaNet.forward takes hidden_states, weight, gate | not the one that was read"):
        part.logits(model)


def test_a_mixer_that_mixes_elsewhere(part: Any, model: Any) -> None:
    layer = next(m for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet")
    mixer = recurrent.Mixer("Qwen3NextGatedDeltaNet", ("causal_conv1d_fn",))

    def forward(self: Any, hidden_states: Any, attention_mask: Any = None) -> Any:
        return self, hidden_states, attention_mask

    silent = recurrent._scoped(forward, mixer)
    with refused("did not mix tokens in causal_conv1d_fn | fix: "):
        silent(layer, torch.zeros(1, 2, 4), attention_mask=part.mask)


def losses_of(folder: Path, body: Any, name: str, size: int) -> list[float]:
    output = folder / f"{name}-{size}.pt"
    run_processes(size, body, output, name)
    found: list[float] = torch.load(output)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
def test_thirty_steps_on_any_number_of_ranks(tmp_path: Path, name: str) -> None:
    one, two, four = (losses_of(tmp_path, program.steps, name, size) for size in (1, 2, 4))
    assert len(one) == 30 and one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-4) and four == pytest.approx(one, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
def test_fine_tuning_by_trl(tmp_path: Path, name: str) -> None:
    """Packed documents, and the same losses on one and two ranks."""
    one, two = (losses_of(tmp_path, program.fine_tune, name, size) for size in (1, 2))
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-5)

"""`bmburst plan --model DIR`: counts against models and formulas by hand, and what it cannot price."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from bmburst.blocks.presets import PRESETS
from bmburst.cli.program import NOTHING_FITS, main
from bmburst.integrations.transformers_shapes import hybrid_of
from bmburst.plan.hybrid import CONVOLUTION, ELEMENTWISE, RECURRENCE, AttentionLayer, RecurrentLayer, hybrid_step
from bmburst.schedule.hardware import load_hardware
from bmburst_ops.fragments import fragment_tokens
from bmburst_ops.linear.kernel import Pieces
from bmburst_ops.linear.scan import make_plan
from tests.refusals import refused, says

DELTA = RecurrentLayer((4, 8, 8), "gated_delta", channels=64, width=4, gates=2)
SSD = RecurrentLayer((4, 8, 16), "decay", channels=80, width=4, gates=1)
CONV = RecurrentLayer((), "", channels=32, width=3, gates=0)
KDA = RecurrentLayer((4, 8, 8), "kda", channels=96, width=4, gates=9)
LIGHTNING = RecurrentLayer((4, 8, 8), "decay", channels=0, width=1, gates=1)
ATTENTION = AttentionLayer(heads=4, kv_heads=2, head_dim=8, value_dim=8)
LATENT = AttentionLayer(heads=4, kv_heads=4, head_dim=12, value_dim=8)
TYPES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ({ATTENTION: 1}, {DELTA: 1})),
    **dict.fromkeys(("nemotron_h", "bamba", "granitemoehybrid"), ({ATTENTION: 1}, {SSD: 1})),
    "falcon_h1": ({ATTENTION: 2}, {SSD: 2}),  # both in each layer
    "lfm2": ({ATTENTION: 1}, {CONV: 1}),
    "kimi_linear": ({LATENT: 1}, {KDA: 1}),
    "minimax": ({ATTENTION: 1}, {LIGHTNING: 1}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3"), ({LATENT: 2}, {})),
    "longcat_flash": ({LATENT: 2}, {}),  # both in one block
    "zamba2": ({AttentionLayer(heads=4, kv_heads=4, head_dim=8, value_dim=8): 2}, {SSD: 4}),  # shared weights
}
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
PUBLISHED = {
    "Qwen3.5-9B": {},
    "Qwen3-Next-80B-A3B": {},
    "Nemotron-H-8B": {
        "layers_block_type": [{"M": "mamba", "-": "mlp", "*": "attention"}[kind] for kind in _NEMOTRON],
        **{"intermediate_size": 21504, "num_key_value_heads": 8, "vocab_size": 131072},
    },
    "Granite-4.0-H-Tiny": {
        "layer_types": ["attention" if number in (5, 15, 25, 35) else "mamba" for number in range(40)],
        **{"num_hidden_layers": 40, "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024},
        **{"num_local_experts": 64, "num_experts_per_tok": 6, "num_attention_heads": 12, "num_key_value_heads": 4},
        **{"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "vocab_size": 100352},
        "tie_word_embeddings": True,
    },
    "LFM2-1.2B": {
        **{"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 12288, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 65536, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    },
    "Kimi-Linear-48B-A3B": {},
    "MiniMax-Text-01": {
        "layer_types": ["full_attention" if number % 8 == 7 else "linear_attention" for number in range(80)],
        **{"num_hidden_layers": 80, "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32, "vocab_size": 200064},
    },
    "DeepSeek-V3": {},
}
"""Fields of the published config.json of each model of docs/plan.md that differ from the defaults of its type."""


def meta(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(name))


@pytest.mark.parametrize("name", TYPES)
def test_layers_and_weights_are_those_of_the_model(name):
    found = hybrid_of(meta(name))
    assert (found.attention, found.recurrent) == TYPES[name]
    made = AutoModelForCausalLM.from_config(tiny_config(name))
    assert found.weights == sum(weight.numel() for weight in made.parameters())


@pytest.mark.long
def test_the_published_models_of_the_docs():
    table = (Path(__file__).parents[2] / "docs" / "plan.md").read_text().partition("| model | `model_type`")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    rows = rows[: rows.index([""])]
    assert [row[0] for row in rows] == list(PUBLISHED)
    for name, kind, *said in rows:
        with torch.device("meta"):
            model = hybrid_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **PUBLISHED[name])))
        step = hybrid_step(model, 131072, 1, 8, load_hardware("h100"))
        layers = [sum(each.values()) for each in (model.attention, model.recurrent)]
        assert said == [f"{number:,.0f}" for number in (model.weights, model.active, *layers, step.exchanged)], name


def test_a_token_meets_the_products_of_its_layers_and_experts():
    """Width 32, 4 heads of 8 and 2 KV heads, q with a gate; 4 experts of 16, of which 2, and one for all tokens."""
    head, attention = 61 * 32, 32 * (64 + 16 + 16) + 32 * 32
    delta = 32 * (16 + 16 + 32 + 32 + 4 + 4) + 32 * 32  # q, k, v, z, b, a, and the output
    assert hybrid_of(meta("qwen3_5_text")).active == head + attention + delta + 2 * 3 * 32 * 48
    expert, shared_gate = 3 * 32 * 16, 32
    assert hybrid_of(meta("qwen3_next")).active == head + attention + delta + 2 * (3 * expert + shared_gate)


def counted_products(config):
    """Return the FLOPs for a token of the linear layers and experts of a model, as torch counts them."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.float()(torch.arange(128)[None] % 57 + 3, use_cache=False)
    found = {path.partition(".")[2]: sum(each.values()) for path, each in counter.get_flop_counts().items()}
    products = [found.get(name, 0) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
        products += [found.get(name, 0)] if weights and not isinstance(module, nn.Conv1d) else []
    return sum(products) / 128


SHARED = {"num_hidden_layers": 12, "layers_block_type": ["linear_attention", "hybrid"] * 6, "num_mem_blocks": 2}


@pytest.mark.long
@pytest.mark.parametrize("name", [*TYPES, "lfm2_moe", "bailing_hybrid", "mamba2", "olmo_hybrid", "sarvam_mla"])
def test_products_are_those_that_torch_counts(name):
    """Experts of LongCat Flash that are none are chosen at random: torch counts the others."""
    near = 0.03 if name == "longcat_flash" else 1e-9
    assert 2 * hybrid_of(meta(name)).active == pytest.approx(counted_products(tiny_config(name)), rel=near)


def test_shared_weights_are_met_in_each_layer_and_adapters_in_their_own():
    """Six hybrid blocks of Zamba 2 have the weights of two; each has an adapter of its own on q, k, v and the MLP."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "adapter_rank": 4, "vocab_size": 61}
    sizes |= {"n_mamba_heads": 4, "mamba_d_state": 8, "use_shared_attention_adapter": True}
    config = AutoConfig.for_model("zamba2", **SHARED, **sizes)
    with torch.device("meta"):
        found = hybrid_of(AutoModelForCausalLM.from_config(config))
    assert (found.layers, sum(found.attention.values()), sum(found.recurrent.values())) == (12, 6, 12)
    assert 2 * found.active == pytest.approx(counted_products(config), rel=1e-9)


def test_a_step_is_that_of_a_formula():
    model, hardware = hybrid_of(meta("qwen3_5_text")), load_hardware("h200")
    found = {gpus: hybrid_step(model, 65536, 3, gpus, hardware) for gpus in (1, 2, 8)}
    # Each of 2 runs of 3 sequences sends M and U, 4 heads of 8 x 8 in fp32, and the gradient of one state back; the
    # convolution sends 3 tokens of 64 channels in bf16 each way.
    run = 3 * (4 * 8 * 8 * 4) + 2 * (3 * 64 * 2)
    assert found[1].exchanged == 0 and found[2].exchanged == 2 * 3 * run
    assert hybrid_step(model, 131072, 3, 2, hardware).exchanged == found[2].exchanged
    for gpus, step in found.items():
        rows = 3 * 65536 // gpus
        assert step.seconds["recurrences"] == pytest.approx(rows * 256 * RECURRENCE["gated_delta"])
        assert step.seconds["convolutions"] == pytest.approx(rows * 64 * CONVOLUTION)
        wide = rows * model.layers * model.widest
        assert step.seconds["norms, activations"] == pytest.approx(wide * ELEMENTWISE)
        assert step.seconds["matmul"] == pytest.approx(
            hardware.matmul_seconds(8.0 * model.active * rows, rows) / hardware.matmul_sustained
        )
        assert step.memory["weights, gradients, AdamW"] == 16 * 22016 / gpus
        # Inputs, attention, the recurrence with a row of the inverse of its chunk and four numbers in fp32; states and
        # M of fragments and links, each 4 heads of 8 x 8 in fp32.
        pieces = 3 * (1 if gpus == 1 else 2)
        edges, ends = tuple(range(0, rows + 1, rows // pieces)), tuple(range(pieces)) if gpus > 1 else ()
        plan = make_plan(Pieces(edges, (), ends, ends), fragment_tokens("gated_delta", rows, 4, 8, 132))
        kept = (2 * len(plan.places) + 2 * len(ends)) * 4 * 8 * 8 * 4
        assert step.memory["kept for backward"] == rows * 2 * (2 * 32 + 4 * 9 + 4 * (8 + 64 + 8)) + kept
        # q, k and v of 4 heads in bf16, decay and beta in fp32.
        assert step.memory["block in backward"] == 2 * rows * (2 * model.widest + 4 * (2 * 3 * 8 + 4 * 2))
    with refused("--sequence-length | 4 | 8"):
        hybrid_step(model, 4, 1, 8, hardware)


def test_the_command(tmp_path, capsys):
    for name in ("nemotron_h", "deepseek_v3", "deepseek_v32", "jamba", "lfm3"):
        tiny_config(name).save_pretrained(tmp_path / name)
    asked = ["--sequence-length", "64K", "--nproc", "2"]
    assert main(["plan", "--model", str(tmp_path / "nemotron_h"), *asked]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("nemotron_h, 64K tokens") and "estimated time" in printed and "are estimates" in printed
    assert main(["plan", "--model", str(tmp_path / "nemotron_h"), *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == 22716
    assert main(["plan", "--model", str(tmp_path / "nemotron_h"), "--sequence-length", "1024M"]) == NOTHING_FITS
    says(capsys.readouterr().out.splitlines()[0], "does not fit")

    assert main(["plan", "--model", str(tmp_path / "deepseek_v3"), *asked]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("deepseek_v3, 64K tokens") and "recurren" not in printed.replace("0 recurrent layers", "")

    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(PRESETS["llama-tiny"].to_hugging_face()))
    for option in ("--model", "--init-from"):
        assert main(["plan", option, str(tmp_path / "llama"), *asked]) == 0
    AutoConfig.for_model("gpt2", n_layer=1).save_pretrained(tmp_path / "gpt2")
    AutoConfig.for_model("lfm2_moe").save_pretrained(tmp_path / "lfm2_moe")  # without layer_types
    capsys.readouterr()
    for words, said in (
        (["jamba", *asked], "JambaMambaMixer | recurrence | allowed: | Mamba 2"),
        (["lfm3", *asked], "Lfm3Attention | window"),
        (["deepseek_v32", *asked], "DeepseekV32ForCausalLM | not exact | 'indexed_attention' | fix: "),
        (["lfm2_moe", *asked], "lfm2_moe | makes no causal LM of it: TypeError: | fix: "),
        (["gpt2", *asked], "GPT2"),
        (["nemotron_h", *asked, "--nodes", "2"], "--model | --nodes | fix: "),
        (["nemotron_h", *asked, "--lora.rank", "8"], "--model | --lora.rank | fix: "),
        (["nemotron_h", *asked, "--preset", "llama-tiny"], "--model | --preset | fix: "),
        (["nemotron_h", "--nproc", "2"], "--sequence-length | fix: "),
        (["nemotron_h", *asked, "--nproc", "0"], "--nproc 0 | allowed: 1 to | fix: "),
        (["none", *asked], "--model | no such directory | fix: "),
    ):
        assert main(["plan", "--model", str(tmp_path / words[0]), *words[1:]]) == 2, words
        says(capsys.readouterr().err.strip(), said)

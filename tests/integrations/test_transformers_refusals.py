"""What cannot be done exactly on split sequences is refused: in at most three lines, before any work starts."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from bmburst import Documents, Full
from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations.releases import LEAST, LONGROPE, require_release
from bmburst.integrations.transformers import Part, SplitSequences, recompute, register
from bmburst.integrations.transformers_attention import Near, SequenceMask, attention, layer_mask
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests import tiny
from tests.distributed.threads import mesh_of, on_ranks, run_ranks
from tests.integrations import transformers_program as program
from tests.refusals import refused

IDS = torch.arange(3, 14).expand(2, -1)


def _part(**options: Any) -> Part:
    register()
    return SplitSequences(mesh_of()).part(IDS, **options)


def _model(family: str, **options: Any) -> PreTrainedModel:
    register()
    if family in program.FAMILIES:
        return program.make_model(family, "bmburst", torch.float32, **options)
    config = tiny.transformers_config(family, **{"head_dim": 8, "pad_token_id": 0, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation="bmburst", dtype=torch.float32)


def _rope(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}}


def test_a_model_without_a_head() -> None:
    model = _model("llama").eval().model
    for call in (_part().loss, _part().logits):
        with refused("LlamaModel returns no logits | AutoModelForCausalLM"):
            call(model)


def _headed(kind: str, **options: Any) -> PreTrainedModel:
    register()
    config = tiny.transformers_config(num_labels=12, pad_token_id=0, **options)  # as many labels as a rank has tokens
    made: PreTrainedModel = getattr(transformers, f"AutoModelFor{kind}").from_config(
        config, attn_implementation="bmburst"
    )
    return made.eval()


@pytest.mark.parametrize("size", [1, 2])
def test_heads_other_than_a_causal_lms(size: int) -> None:
    """A pooled result would be that of a rank's own last token; a loss that is not shifted is another loss."""

    kinds = ("SequenceClassification", "QuestionAnswering", "TokenClassification")
    pooling, answering, naming = map(_headed, kinds)

    def body(comm: CheckedCommunicator) -> None:
        part = SplitSequences(mesh_of(comm)).part(IDS)
        tokens = part.input_ids.shape[1]
        with refused("LlamaForSequenceClassification | logits [2, 12] | allowed: ", f"[2, {tokens}, classes]"):
            part.logits(pooling)
        with refused("LlamaForQuestionAnswering returns no logits | AutoModelForCausalLM"):
            part.logits(answering)
        assert part.logits(naming).shape == (2, tokens, 12)
        for model, loss in ((pooling, "Sequence"), (answering, "ForQuestion"), (naming, "ForToken")):
            with refused(f"the loss of {type(model).__name__} | {loss} | next token | fix: AutoModelForCausalLM"):
                part.loss(model)
        causal = _model("llama").eval()
        for call in (part.loss, part.logits):
            with refused("LlamaForCausalLM | logits [2, 1, 61] | without logits_to_keep"):
                call(causal, logits_to_keep=1)

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", {"attention_dropout": 0.1}, "dropout of 0.1 | fix: "),
        ("doge", {}, "mask.dtype | fix: "),
        (
            "llama",
            {"layer_types": ["full_attention", "compressed_sparse_attention"]},
            "layers | 'compressed_sparse_attention'",
        ),
        ("doge", {"output_router_logits": True}, "router's loss of DogeForCausalLM | not read | output_router_logits"),
        ("bloom", {}, "attention | registry"),
        ("bert", {"is_decoder": False}, "causal | bidirectional_mask_function | BART as bmburst.blocks.seq2seq"),
    ],
)
def test_models(family: str, options: dict[str, Any], words: str) -> None:
    model = _model(family, **options).train()
    with refused(words):
        _part().loss(model)


def test_a_model_with_a_table_of_attention_classes() -> None:
    """It is refused while it is made, where transformers would say KeyError; transformers' own choices still work."""
    register()
    register()  # wraps once
    words = "model type 'gpt_neo' | GPT_NEO_ATTENTION_CLASSES | AttentionInterface | fix: another model type"
    with refused(words, lines=2):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neo"), attn_implementation="bmburst")
    small = AutoConfig.for_model("falcon", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    assert AutoModelForCausalLM.from_config(small, attn_implementation="eager").config.model_type == "falcon"


def test_releases_of_transformers() -> None:
    require_release()
    require_release(installed="6.0.1")
    with refused("transformers is 5.16.1 | allowed: 5.17 or newer | fix: pip install 'transformers>=5.17'"):
        require_release(installed="5.16.1")
    with refused("transformers is 5.19.0 | longrope | allowed: 5.20 or newer"):
        require_release(LONGROPE, "generate with longrope", installed="5.19.0")
    assert f'"hugging-face": ["transformers>={LEAST}"' in (Path(__file__).parents[2] / "setup.py").read_text()


def test_a_copied_layer_of_a_cache() -> None:
    """dory passes through some layers several times, each time with a copy of their caches."""
    layer = SplitCache(_model("llama").config, mesh_of()).layers[0]
    copied = copy.deepcopy(layer)
    assert copied is not layer and copied._mesh is layer._mesh


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_an_encoder_decoder(family: str) -> None:
    register()
    config = AutoConfig.for_model(
        family, vocab_size=16, d_model=16, d_kv=8, num_heads=2, encoder_layers=1, decoder_layers=1, num_layers=1
    )
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="bmburst").eval()
    with refused("causal | bidirectional_mask_function | BART as bmburst.blocks.seq2seq"):
        model(input_ids=IDS, labels=IDS)


def test_without_a_split_batch() -> None:
    model = _model("mistral")
    with refused('attention_mask | generate | set_attn_implementation("sdpa")'):
        model.generate(IDS, attention_mask=None, max_new_tokens=1)
    for mask in (torch.ones_like(IDS), torch.zeros(2, 1, 11, 11)):
        with refused("got a Tensor"):
            model(IDS, attention_mask=mask)
    with refused("padding without a part | to train: SplitSequences(mesh).part | to generate: "):
        model(IDS, attention_mask=torch.ones_like(IDS).tril())
    for kind in ("llama", "mistral"):  # without a window, and with one
        with refused("documents without a part | to train: SplitSequences(mesh).part(input_ids, position_ids=...)"):
            _model(kind)(IDS, position_ids=torch.arange(11).expand(2, -1) % 5, use_cache=False)
    model.set_attn_implementation("sdpa")
    assert model.generate(IDS, max_new_tokens=1).shape == (2, 12)


def test_a_cache() -> None:
    with refused("KV cache | use_cache=False | generate"):
        _part().logits(_model("llama"), use_cache=True)
    mask = _part().mask
    with refused("1 queries and 12 keys a rank"):
        layer_mask(mask_function=len, attention_mask=mask, q_length=1, kv_length=12)


def _call(mask: SequenceMask, **options: Any) -> Tensor:
    q, kv = torch.zeros(2, 4, 12, 8), torch.zeros(2, 2, 12, 8)  # the cut of 11 has one of padding
    return attention(nn.Module(), q, kv, kv, mask, **options)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"cu_seq_lens_q": torch.zeros(1)}, "cu_seq_lens_q"),
        ({"output_attentions": True}, "output_attentions"),
        ({"sliding_window": 4}, "sliding_window=4 | causal"),
        ({"use_cache": True}, "KV cache"),
    ],
)
def test_what_layers_ask_for(options: dict[str, Any], words: str) -> None:
    mask = _part().mask.seen()
    _call(mask, sliding_window=11, use_cache=False, position_ids=IDS, softcap=None, output_attentions=False)
    with refused(words):
        _call(mask, **options)


def test_a_mask_is_no_tensor() -> None:
    mask = _part().mask
    assert not hasattr(mask, "dtype")
    assert copy.copy(mask).shape == mask.shape
    with refused("mask"):
        mask[:, :, :3]


def test_a_model_that_makes_its_masks_itself() -> None:
    with refused("masks itself"):
        _call(_part().mask)
    assert _call(_part().mask.seen(Near(window=4)), sliding_window=4).shape == (2, 12, 4, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": IDS[:, 1:]}, "labels | [2, 11] as input_ids are | [2, 10] | fix: | whole batch"),
        ({"labels": IDS.tolist()}, "labels | tensor of integers | list | allowed: [2, 11]"),
        ({"labels": IDS + 0.5}, "labels | tensor of integers | torch.float32 [2, 11] | allowed: ["),
        ({"labels": IDS > 3}, "labels | tensor of integers | torch.bool [2, 11] | allowed: ["),
        ({"labels": IDS - 10}, "labels | -7 | allowed: at least 0 | -100"),
        ({"position_ids": IDS[None]}, "position_ids must be"),
        ({"position_ids": [0, 1]}, "position_ids | tensor of integers | list | allowed: "),
        ({"attention_mask": [1, 1]}, "attention_mask | tensor of 0 and 1 | list | allowed: "),
        ({"attention_mask": IDS % 2 + 1}, "attention_mask | sample 0 | two places | allowed: | documents="),
        ({"attention_mask": IDS * float("nan")}, "attention_mask | 0 and 1 | allowed: "),
        ({"attention_mask": (IDS != 7).long()}, "sample 0 | padding"),
        ({"attention_mask": IDS * 0}, "sample 0 | no token"),
        ({"attention_mask": (IDS < 7).long(), "documents": Documents((4, 7))}, "attention_mask | documents"),
        ({"documents": Documents((4, 8))}, "made for 12 tokens"),
        ({"documents": [Documents((4,))] * 3}, "3 samples | batch of 2"),
        ({"documents": Documents((4, 7), causal=False)}, "must be causal bmburst.Documents"),
        ({"documents": [Full(), Full()]}, "must be causal bmburst.Documents"),
        ({"documents": [4, 4, 3]}, "documents | bmburst.Documents(lengths) | 4"),
        ({"documents": 5}, "documents | bmburst.Documents, or a list of them | int | fix: "),
    ],
)
def test_batches(options: dict[str, Any], words: str) -> None:
    with refused(words):
        _part(**options)


@pytest.mark.parametrize(
    ("family", "options", "policy", "words"),
    [
        ("llama", {}, "blocks", "unknown"),
        ("llama", {}, "block+first-9", "'block+first-9' | layers"),
        ("llama", {}, "block+every-2+keep-attention-last-1", "own models | fix: block+keep-attention-last-1"),
        ("llama", {}, "block-keep-attention+offload-mlp-first-1", "own models | fix: block-keep-attention"),
        ("llama", {"attention_dropout": 0.1}, "block", "attention_dropout | 0.1"),
        ("gpt2", {"resid_pdrop": 0.2, "n_embd": 8, "n_head": 2}, "block", "resid_pdrop | 0.2"),
        ("mixtral", {"router_jitter_noise": 0.1, "num_local_experts": 2}, "block", "router_jitter_noise | 0.1"),
        (
            "dbrx",
            {
                "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
                "ffn_config": {"ffn_hidden_size": 8, "moe_jitter_eps": 0.01},
            },
            "block",
            "moe_jitter_eps | 0.01",
        ),
    ],
)
def test_recomputation(family: str, options: dict[str, Any], policy: str, words: str) -> None:
    with refused(words):
        recompute(_model(family, **options), policy)


def test_ids_and_options() -> None:
    split = SplitSequences(mesh_of())
    nested = torch.nested.nested_tensor([IDS[0], IDS[0, :3]])
    for ids in (IDS[0], IDS.float(), IDS + 0j, IDS > 3, IDS.to_sparse(), nested, IDS[:, :0], [[1, 2]], None):
        with refused("input_ids | token ids | [batch, length] | allowed: ") as caught:
            split.part(ids)  # type: ignore[arg-type]
        assert re.search(r"got (torch\.\w+ \[|nested torch|list|NoneType)", str(caught.value))
    with refused("input_ids | BatchEncoding | fix: part(**batch)"):
        split.part(transformers.BatchEncoding({"input_ids": IDS}))  # type: ignore[arg-type]
    with refused("input_ids | -13 | allowed: at least 0 | -100 | labels"):
        split.part(-IDS)
    with refused("labels | nested torch.int64 | allowed: [2, 11], dense"):
        split.part(IDS, labels=nested)
    assert split.part(IDS.int()).input_ids.dtype == torch.int64
    assert split.part(IDS, attention_mask=torch.ones(2, 11)).mask.documents == ()
    for options, words in (
        ({"layout": "zig"}, "layout | 'zig' | zigzag"),
        ({"mask": "full"}, "'mask'"),
        ({"kernel": "fa9"}, "kernel | 'fa9' | known: "),
        ({"deterministic": "no"}, "deterministic | bool | 'no' | allowed: True or False"),
    ):
        with refused(words):
            SplitSequences(mesh_of(), **options)
    for mesh in (None, "mesh"):
        with refused(f"mesh | bmburst.Mesh | {type(mesh).__name__} | fix: bmburst.Mesh.over_process_group"):
            SplitSequences(mesh)  # type: ignore[arg-type]


def test_ids_that_the_model_does_not_have() -> None:
    split, model = SplitSequences(mesh_of()), _model("llama")
    rows = model.get_input_embeddings().num_embeddings
    wrong = IDS.clone()
    wrong[1, 4] = rows
    for part in (split.part(wrong), split.part(IDS, labels=wrong)):
        with refused(f"token id {rows} | model | allowed: 0 to {rows - 1} | fix: "):
            part.loss(model)
    wrong[1, 4] = rows - 1
    split.part(wrong).loss(model)


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "attention_mask"])
def test_what_a_part_has_is_not_given_again(name: str) -> None:
    with refused(f"part | {name} | fix: | whole batch | split.part"):
        _part().loss(_model("llama"), **{name: IDS})


def test_embeddings_instead_of_ids() -> None:
    """They are refused, and the way that the message names has the loss and the gradient of the whole batch."""
    model, whole = _model("llama").eval(), torch.randn(2, 11, 24)
    embeddings = [whole.clone().requires_grad_() for _ in range(2)]
    part = _part()
    with refused("inputs_embeds | split batch | fix: a forward hook | part.cut.take"):
        part.loss(model, inputs_embeds=whole)
    with refused("num_items_in_batch | split batch | fix: part.loss(model, valid="):
        part.loss(model, num_items_in_batch=3)
    with refused("LlamaForCausalLM returns no logits | fix: leave return_dict out"):
        part.loss(model, return_dict=False)
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: part.cut.take(embeddings[0]))
    ours = part.loss(model, torch.tensor([20]))  # the loss is a scalar all the same
    hook.remove()
    model.set_attn_implementation("eager")
    theirs = model(inputs_embeds=embeddings[1], labels=IDS).loss
    for loss in (ours, theirs):
        loss.backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(embeddings[0].grad, embeddings[1].grad)


def test_no_model_no_part_and_no_number() -> None:
    split, part, model = SplitSequences(mesh_of()), _part(), _model("llama")
    for none in (None, "llama", nn.Linear(1, 1)):
        with refused(f"{type(none).__name__} | no model of transformers | PreTrainedModel"):
            part.loss(none)  # type: ignore[arg-type]
        with refused(f"{type(none).__name__} | transformers layers | PreTrainedModel"):
            recompute(none)  # type: ignore[arg-type]
    wrong: Any
    for wrong, got in (((), "none"), ((None,), "NoneType"), ((part, 5), "int")):
        with refused(f"labels | parts of SplitSequences | {got} | fix: "):
            split.valid(*wrong)
    meta = torch.ones((), device="meta")
    for wrong, got in ((None, "NoneType"), (1.5, "float"), (torch.ones(3), "float32[3]"), (meta, "float32[]")):
        with refused(f"a loss | tensor of one number | {got} | fix: what part.loss"):
            split.mean(wrong)
    cache = SplitCache(model.config, mesh_of())
    for wrong, got in (
        (None, "NoneType"),
        (IDS + 0j, "complex64"),
        (IDS.to("meta"), "meta"),
        (IDS.to_sparse(), "sparse"),
    ):
        with refused(f"input_ids | {got} | fix: "):
            cache.prefill(model, wrong)
    with refused("NoneType | no model of transformers | fix: "):
        cache.prefill(None, IDS)  # type: ignore[arg-type]
    with refused("max_length | whole number | 'x' | fix: "):
        cache.crop("x")  # type: ignore[arg-type]
    with refused("Mesh.sum | a number of each rank | None | fix: "):
        split.mesh.sum(None)  # type: ignore[arg-type]
    with refused("active | bool | 'no' | fix: "):
        split.mesh.set_checks("no")  # type: ignore[arg-type]
    with refused(f"seed | below | {2**64} | fix: "):
        generate(model, IDS, mesh=split.mesh, seed=2**64)
    for wrong, got in (
        ("x", "'x'"),
        (-3, "-3"),
        (1.5, "1.5"),
        (True, "True"),
        (torch.ones(()), "float32[]"),
        (torch.ones(()) > 0, "bool[]"),
    ):
        with refused(f"valid | number of labels | {got} | fix: what split.valid"):
            part.loss(model, valid=wrong)


@on_ranks(2)
def test_ranks_that_hold_different_batches(comm: CheckedCommunicator) -> None:
    split = SplitSequences(mesh_of(comm))
    with refused("labels | tensor of integers | list"):
        split.part(IDS, labels=None if comm.rank else [1])  # type: ignore[arg-type]
    comm.always = comm.active = False  # as on GPUs
    with refused("disagree | fix: "):
        split.part(IDS + comm.rank)
    split.part(IDS)
    split.part(IDS + comm.rank)  # compared until it was right once


@on_ranks(2)
def test_frequencies_that_depend_on_the_largest_position(comm: CheckedCommunicator) -> None:
    """A zigzag's ranks end at different positions; in stripes both know of the long sequence."""
    ids = torch.arange(50)[None]
    for kind, original in (("dynamic", 40), ("longrope", 48)):
        more = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": original}
        rope = _rope(kind)["rope_parameters"] | (more if kind == "longrope" else {})
        options = {"rope_parameters": rope, "max_position_embeddings": original}
        for layout in ("zigzag", "striped"):
            part = SplitSequences(mesh_of(comm), layout=layout).part(ids)
            if (kind, layout) == ("longrope", "striped"):
                part.logits(_model("llama", **options))
                continue
            with refused(f"rope type | '{kind}' | tables | ranks | to 50"):
                part.logits(_model("llama", **options))
        short = SplitSequences(mesh_of(comm)).part(ids[:, :original])
        model = _model("llama", **options)
        short.logits(model)
        model.model.rotary_emb(torch.zeros(1), ids)  # remembers the length of a longer batch
        if kind == "longrope":
            short.logits(model)
            continue
        with refused("'dynamic' | 30 to 40 | at most 39"):
            short.logits(model)
    scales = {"original_max_position_embeddings": 48, "short_mscale": 1.1, "long_mscale": 1.7}
    phi = _model("phimoe", rope_parameters=_rope("yarn")["rope_parameters"] | scales, num_local_experts=2)
    with refused("rope type | 'yarn' | tables | ranks | to 50"):
        SplitSequences(mesh_of(comm)).part(ids).logits(phi)

"""`Part.loss` computes head and loss in one where a model lets it, and is the model's own loss in any case.

So does `Part.logps` with log-probabilities and entropies.

Where layers are compiled in parts, attention is between two graphs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from bmburst.integrations.transformers import SplitSequences, register
from tests import tiny
from tests.distributed.threads import mesh_of, on_ranks
from tests.refusals import refused

ALONE = mesh_of()
IDS = torch.randint(61, (2, 23), generator=torch.Generator().manual_seed(1))
RELATIVE = 1e-6  # transformers computes norms and losses in fp32
ONE = (1, 1, 61)  # the loss, or 2 x 2 x 14 values of tokens with a label, as wide as logits
WHOLE = (2, 24, 61)  # a cut in zigzag is even


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def _model(family: str, **changes: Any) -> PreTrainedModel:
    return tiny.transformers_model(family, attention="bmburst", head_dim=8, vocab_size=61, **changes).double().eval()


def _of_head(model: nn.Module, head: nn.Module) -> list[tuple[int, ...]]:
    """Return a list that gets the shape of each result of the head."""
    shapes: list[tuple[int, ...]] = []
    head.register_forward_hook(lambda _, __, result: shapes.append(tuple(result.shape)))
    return shapes


def _expected(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and gradients of a model's own loss, with its own attention."""
    model.set_attn_implementation("eager")
    with torch.compiler.set_stance("force_eager"):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    model.set_attn_implementation("bmburst")
    return loss, list(gradients)


def _softer(_: nn.Module, __: object, output: Any) -> None:
    output.logits.mul_(0.5)  # in place: the tensor is the same


def _forbidding(_: nn.Module, __: object, output: Any) -> None:
    output.logits[:, :, [7, 41]] = -1e9  # as Chameleon does with its images' tokens


def _cast(_: nn.Module, __: object, output: Any) -> None:
    output.logits = output.logits.float().double()  # as FSDP2 with an output_dtype, then as accelerate


def _returning_fewer_digits(model: PreTrainedModel) -> None:
    model.register_forward_hook(_cast)


def _as_it_is(model: PreTrainedModel) -> None:
    del model


def _with_bias(model: PreTrainedModel) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 61).double())


def _compiled(model: PreTrainedModel) -> None:
    model.compile(backend="eager")


CASES: dict[str, tuple[str, dict[str, Any], Callable[[PreTrainedModel], Any], list[list[tuple[int, ...]]]]] = {
    "plain": ("llama", {}, _as_it_is, [[ONE], [ONE]]),
    "tied": ("qwen3", {"tie_word_embeddings": True}, _as_it_is, [[ONE], [ONE]]),
    "scaled logits": ("granite", {"logits_scaling": 4.0}, _as_it_is, [[ONE, WHOLE], [WHOLE]]),
    "a bias": ("llama", {}, _with_bias, [[WHOLE], [WHOLE]]),
    "an output in another dtype": ("llama", {}, _returning_fewer_digits, [[ONE], [ONE]]),
    "a compiled model": ("llama", {}, _compiled, [[WHOLE], [WHOLE]]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_models_own(name: str) -> None:
    family, changes, change, seen = CASES[name]
    model = _model(family, **changes)
    change(model)
    loss, gradients = _expected(model)
    shapes = _of_head(model, model.lm_head)
    split = SplitSequences(ALONE)
    for expected_shapes in seen:  # the second time what is known of the model is used
        shapes.clear()
        with torch.compiler.set_stance("force_eager"):  # what counts is that it would be compiled
            found = split.part(IDS, labels=IDS).loss(model)
        assert shapes == expected_shapes
        assert found.item() == pytest.approx(loss.item(), rel=RELATIVE)
        for ours, theirs in zip(torch.autograd.grad(found, list(model.parameters())), gradients, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_and_entropies_are_those_of_the_logits(name: str) -> None:
    family, changes, change, seen = CASES[name]
    model = _model(family, **changes)
    change(model)
    labels = IDS.masked_fill(torch.arange(23) < 9, -100)
    factors = torch.linspace(-1, 2, 23).double()
    model.set_attn_implementation("eager")
    with torch.compiler.set_stance("force_eager"):
        log_p = torch.log_softmax(model(input_ids=IDS, use_cache=False).logits[:, 8:-1] / 0.7, -1)
    expected = log_p.gather(-1, IDS[:, 9:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    gradients = torch.autograd.grad(((expected[0] + 2 * expected[1]) * factors[8:-1]).sum(), list(model.parameters()))
    model.set_attn_implementation("bmburst")
    shapes = _of_head(model, model.lm_head)
    split = SplitSequences(ALONE)
    for expected_shapes in seen:
        shapes.clear()
        part = split.part(IDS, labels=labels)
        with torch.compiler.set_stance("force_eager"):
            found = [x for x in part.logps(model, temperature=0.7, entropy=True) if x is not None]
        assert shapes == expected_shapes
        whole = [part.gathered(x) for x in found]
        for ours, theirs in zip(whole, expected, strict=True):
            torch.testing.assert_close(ours[:, 8:-1], theirs, rtol=1e-5, atol=1e-6)
            assert not ours[:, :8].any() and not ours[:, -1].any()
        loss = ((whole[0] + 2 * whole[1]) * factors).sum()
        for mine, other in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
            assert float((mine - other).norm() / other.norm()) < 1e-5
        assert part.logps(model)[1] is None


@pytest.mark.parametrize("temperature", [0, -1.0, True, float("nan"), "1"])
def test_temperatures(temperature: Any) -> None:
    with refused("temperature", repr(temperature), "above 0"):
        SplitSequences(ALONE).part(IDS).logps(_model("llama"), temperature=temperature)


def test_whether_to_compute_entropies() -> None:
    with refused("entropy must be a bool | 2"):
        SplitSequences(ALONE).part(IDS).logps(_model("llama"), entropy=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("changes", [[_softer], [_forbidding], [_cast, _forbidding]])
def test_logits_changed_in_place_are_noticed(changes: list[Any], without_gradients: Any) -> None:
    model = _model("llama")
    for change in changes:
        model.register_forward_hook(change)
    labels = torch.where((IDS == 7) | (IDS == 41), -100, IDS)
    with without_gradients():
        model.set_attn_implementation("eager")
        logits = model(input_ids=IDS, use_cache=False).logits
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        model.set_attn_implementation("bmburst")
        found = SplitSequences(ALONE).part(IDS, labels=labels).loss(model)
    assert found.item() == pytest.approx(expected.item(), rel=RELATIVE)


@pytest.mark.parametrize("family", ["granite", "gemma2"])  # a scale, a softcap
@on_ranks(2)
def test_ranks_notice_changed_logits_alike(comm: Any, family: str) -> None:
    """A rank without a label too: otherwise it would not call the model again, and the other one would wait for it."""
    model = _model(family, **({"logits_scaling": 4.0} if family == "granite" else {"final_logit_softcapping": 2.0}))
    labels = IDS.masked_fill(torch.arange(23) >= 9, -100)
    mesh = mesh_of(comm)

    def part(ranks: Any) -> Any:
        return SplitSequences(ranks, layout="contiguous").part(IDS, labels=labels)

    with torch.no_grad():
        expected = part(ALONE).loss(model).item()
        of_labels = part(mesh).whole(part(mesh).logps(model)[0])
        loss = part(mesh).loss(model)
    (total,) = comm.all_reduce(loss).wait()
    assert total.item() / 2 == pytest.approx(expected, rel=RELATIVE)
    assert -of_labels.sum().item() / 16 == pytest.approx(expected, rel=RELATIVE)


@on_ranks(2)
def test_a_loss_that_is_no_number_is_no_change_of_logits(comm: Any) -> None:
    """Of one rank's tokens, where the output has another dtype: the other rank has numbers alone."""
    model = _model("llama")
    _returning_fewer_digits(model)
    shapes, part = _of_head(model, model.lm_head), SplitSequences(mesh_of(comm), layout="contiguous").part(IDS)
    with torch.no_grad():
        model.model.norm.register_forward_hook(lambda _, __, hidden: hidden * torch.nan if comm.rank else hidden)
        assert part.loss(model).isnan() == bool(comm.rank)
    assert shapes == [ONE]


@pytest.mark.parametrize("change", [_as_it_is, _returning_fewer_digits])
def test_inference_mode_makes_no_logits_either(change: Any) -> None:
    model = _model("llama")
    change(model)
    shapes, part = _of_head(model, model.lm_head), SplitSequences(ALONE).part(IDS, labels=IDS)
    expected = part.loss(model)
    with torch.inference_mode():
        assert part.loss(model) == expected and shapes == [ONE, ONE]


def test_a_wrong_call_leaves_the_head_as_it_was() -> None:
    model = _model("llama")
    with refused("no_such_argument", "leave it out"):
        SplitSequences(ALONE).part(IDS).loss(model, no_such_argument=1)
    assert "forward" not in vars(model.lm_head)


def test_autocast_multiplies_in_its_dtype() -> None:
    model = _model("llama").float()
    part = SplitSequences(ALONE).part(IDS)
    wide = part.loss(model)
    with torch.autocast("cpu", torch.bfloat16):
        shapes = _of_head(model, model.lm_head)
        low = part.loss(model)
    low.backward()
    assert shapes == [ONE] and low.dtype == torch.float32
    assert 0 < abs(low.item() - wide.item()) < 0.02 * wide.item()
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.dtype == torch.float32


def test_autocast_leaves_fp64_as_it_is() -> None:
    """As torch's own products do, with which what ours return is multiplied."""
    model = _model("llama").double()
    part = SplitSequences(ALONE).part(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        found = part.loss(model)
    assert found.item() == pytest.approx(part.loss(model).item(), rel=RELATIVE)


@pytest.mark.long
def test_compiled_parts_of_layers_have_a_graph_before_attention_and_one_after() -> None:
    torch.compiler.reset()  # torch keeps what it decided about the same functions in other tests
    model = _model("llama")
    loss, _ = _expected(model)
    shapes = _of_head(model, model.lm_head)
    graphs = CompileCounter()
    for layer in model.model.layers:
        layer.self_attn.compile(backend=graphs)
    split = SplitSequences(ALONE)
    for _ in range(2):
        assert split.part(IDS, labels=IDS).loss(model).item() == pytest.approx(loss.item(), rel=RELATIVE)
    assert graphs.frame_count == 2 and shapes == [ONE, ONE]

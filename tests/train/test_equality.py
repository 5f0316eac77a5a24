"""Training on any split into data x sequence x tensor is training on one rank: gradients, norms, losses, parameters.

The reference is Hugging Face's LLaMA in one process with torch's AdamW. Losses alone could not see a wrong factor on
the gradient, because Adam cancels it; the first step's gradients and the norm do.
"""

import pytest
import torch

from tests import tiny
from tests.distributed.programs import run_program
from tests.pairs import long, selected
from tests.train import equality_program as program
from tests.train.cases import adamw, reference_steps

SPLITS = [(2, 2), pytest.param((4, 1), marks=pytest.mark.long), pytest.param((1, 4), marks=pytest.mark.long)]
# With tensor parallelism, each with one case and few steps; 37 tokens are padded in each tensor group; 4 tensor ranks
# share 2 KV heads. 1 x 1 x 2 is in test_tensor_parallel.py.
TENSOR_RUNS = [((1, 1, 4), program.CASES[0]), ((1, 2, 2), program.CASES[1]), ((2, 1, 2), program.CASES[2])]


CASES = [*program.CASES[:1], *long(*zip(program.CASES[1:]))]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A model with random weights, and what 4 ranks make of it in every split."""
    folder, cases = tmp_path_factory.mktemp("equality"), selected(request, "reference") or program.CASES[:1]
    (folder / "text.txt").write_text("the text is not used: batches are given\n" * 50)
    tiny.save(folder / "model", program.SHAPE)
    if splits := [split for split in selected(request, "split") if split != (1, 1)]:
        run_program(4, program.train_all, folder, splits, cases, seconds=300)
    run_program(1, program.train_all, folder, [(1, 1)], cases, seconds=300)
    for tensor in (2, 4):
        if runs := [(split, case) for split, case in TENSOR_RUNS if split[2] == tensor and case in cases]:
            run_program(4, program.train_some, folder, runs, seconds=300, tensor=tensor)
    return folder


@pytest.fixture(scope="module", params=CASES, ids=str)
def reference(request, folder):
    """One process, the whole batch at once, fp32; and the folder of what the ranks make of the case."""
    case = request.param
    model = tiny.load(folder / "model")
    optimizer = adamw(model, program.DECAY, lr=program.LR, betas=(0.9, 0.95), eps=1e-8)

    def loss(step):
        inputs, labels = program.batch(step)
        logits = model(inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    found = reference_steps(model, map(loss, range(case.steps)), optimizer=optimizer, clip=case.clip_norm)
    every, few = (
        {"gradients": found["gradients"], "parameters": found["parameters"][count - 1]}
        | {name: found[name][:count] for name in ("losses", "norms")}
        for count in (case.steps, program.FEW_STEPS)
    )
    return folder, case, every, few


def error(ours, wanted):
    return ((ours.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("split", [(1, 1), *SPLITS], ids=str)
def test_equals_one_rank(reference, split):
    folder, case, found, _ = reference
    require_equal(folder, split, case, found)


def test_equals_one_rank_with_tensor_parallelism(reference):
    folder, case, _, few = reference
    for split, other in TENSOR_RUNS:
        if other == case:
            require_equal(folder, split, case, few)


def require_equal(folder, split, case, wanted):
    ours = program.result(folder, split, case, "float32")
    assert ours["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        assert error(ours["gradients"][name], gradient) < 1e-5, name
    assert ours["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-5)
    assert ours["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert ours["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    for name, parameter in wanted["parameters"].items():
        assert error(ours["parameters"][name], parameter) < 1e-5, name
    assert case.clip_norm is None or min(wanted["norms"]) > 2 * case.clip_norm  # it does clip


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_bf16_is_no_further_from_fp32_than_twice_one_rank(folder, split):
    """Gradients of the first step; losses, norms and parameters of all."""
    case = program.CASES[0]
    exact = program.result(folder, (1, 1), case, "float32")
    single = program.result(folder, (1, 1), case, "bfloat16")
    ours = program.result(folder, split, case, "bfloat16")

    def whole(result, what):
        return torch.cat([torch.as_tensor(values).double().flatten() for values in result[what]])

    for result in (exact, single, ours):
        for what in ("gradients", "parameters"):
            assert list(result[what]) == list(exact[what])
            result[f"all {what}"] = list(result[what].values())
    for what in ("all gradients", "all parameters", "losses", "norms"):
        wanted = whole(exact, what)
        assert error(whole(ours, what), wanted) <= 2 * error(whole(single, what), wanted), what
    for what in ("gradients", "parameters"):
        for name, wanted in exact[what].items():
            # Beside twice one rank's error: a small tensor's luck on one rank is no fault of the others.
            assert error(ours[what][name], wanted) <= 2 * error(single[what][name], wanted) + 2e-3, (what, name)

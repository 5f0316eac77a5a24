"""Preference training on packed pairs is DPO on each pair alone: on any ranks, layouts and microbatches.

Pairs have weights: the loss of a step is the sum of weight times loss over the sum of the weights of its pairs.

The reference is the formula of TRL's sigmoid loss, on transformers' model in fp64, in one process, pair by pair:

    logits = (log p(chosen) - log p(rejected)) - (log p_ref(chosen) - log p_ref(rejected))
    loss = -log sigmoid(beta logits), mean over pairs, in training weighted by them
    rewards = beta (log p - log p_ref) of each answer; margin and accuracy compare those of a pair
"""

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from torch.func import functional_call
from transformers import PreTrainedTokenizerFast

from bmburst.data import Batches, open_corpus
from bmburst.data.whole_documents import pack_sequences
from tests import chat, tiny
from tests.pairs import long, selected
from tests.train import preference_program as program
from tests.train.cases import labelled, require_near, result, run_cases

WEIGHT = 2.25  # of every third pair; the others have none, which counts as 1
CASES = pytest.mark.parametrize("case", [*program.CASES, *long(*zip(program.MORE))], ids=str)


def pairs(count):
    """Return half of them as text, half as messages: of one prompt, answers of different lengths."""
    rng, found = np.random.default_rng(5), []
    for number in range(count):
        chosen, rejected = (" ".join(rng.choice(["one", "two", "\u4e16"], int(rng.integers(1, 5)))) for _ in range(2))
        prompt = f"{number}: " + "one two " * (number % 3 * 4)  # short ones are not shared
        texts = prompt, chosen + "!", rejected
        messages = [
            [{"role": role, "content": text}]
            for role, text in zip(("user", "assistant", "assistant"), texts, strict=True)
        ]
        line = dict(zip(("prompt", "chosen", "rejected"), (texts, messages)[number % 2], strict=True))
        found.append(line | ({} if number % 3 else {"weight": WEIGHT}))
    return found


@pytest.fixture(scope="module")
def cases(request):
    return selected(request, "case")


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory):
    """Two models with random weights, pairs, and what ranks make of them."""
    folder = tmp_path_factory.mktemp("preference")
    for name, seed in (("model", 0), ("other", 1)):
        tiny.save(folder / name, program.SHAPE, std=0.1, seed=seed)
        chat.directory(folder / name, chat.MARKED)
    chat.write(folder / "pairs.jsonl", *pairs(30))
    run_cases(program.train, folder, cases)
    return folder


@cache
def tokenizer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


def documents(folder, number):
    """Return ids and labels of the chosen and of the rejected answer of a line, as transformers has them."""
    peer = tokenizer(folder / "model")
    line = json.loads((folder / "pairs.jsonl").read_text().splitlines()[number])
    for key in ("chosen", "rejected"):
        if isinstance(line["prompt"], str):
            before, after = (peer(line[each])["input_ids"] for each in ("prompt", key))
            ids = torch.tensor([*before, *after, peer.eos_token_id])
            yield ids, ids.masked_fill(torch.arange(len(ids)) < len(before), -100)
        else:
            yield labelled(peer, line["prompt"] + line[key])


def log_probability(model, weights, ids, labels):
    logits = functional_call(model, weights, (ids[None],)).logits[0, :-1]
    every = logits.log_softmax(-1).gather(-1, labels[1:].clamp(min=0)[:, None])[:, 0]
    return every[labels[1:] != -100].sum()


def dpo(folder, model, weights, before, numbers, *, is_weighted=True):
    """Return the mean loss, margin and accuracy of lines by the formula above; the loss weighted by its pairs."""
    found = []
    for number in numbers:
        sides = [
            [log_probability(model, each, ids, labels) for each in (weights, before)]
            for ids, labels in documents(folder, number)
        ]
        rewards = [program.BETA * (ours - theirs) for ours, theirs in sides]
        margin = rewards[0] - rewards[1]
        found.append(torch.stack([-torch.nn.functional.logsigmoid(margin), margin.detach(), (margin > 0).double()]))
    mean, factors = torch.stack(found).mean(0), [1.0 if number % 3 else WEIGHT for number in numbers]
    if not is_weighted:
        return mean
    assert len(set(factors)) == 2
    loss = sum(factor * each[0] for factor, each in zip(factors, found, strict=True)) / sum(factors)
    return torch.stack([loss, *mean[1:]])


def samples(folder, split, pack):
    corpus = open_corpus(folder / "pairs.jsonl", str(folder / "model"), folder)
    return pack_sequences(corpus, split=split, sequence_length=program.TOKENS, held_out_fraction=0.2, pack=pack)


@pytest.fixture(scope="module")
def references(folder, cases):
    asked = {pack: {case.lora for case in cases if case.pack == pack} for pack in ("trees", "documents")}
    return {pack: reference_of(folder, pack, loras) for pack, loras in asked.items() if loras}


def reference_of(folder, pack, loras):
    """Return by whether there are adapters: losses of the first batch and of all held-out pairs, and gradients."""
    model = tiny.load(folder / "model").double()
    base = {name: each.detach() for name, each in model.named_parameters()}
    other = {name: each.detach() for name, each in tiny.load(folder / "other").double().named_parameters()}
    train, held = samples(folder, "train", pack), samples(folder, "held_out", pack)
    (*taken,) = next(Batches(train, batch_size=program.BATCH, seed=0)).taken
    first = [n for index in taken for n in train.records(index)]
    shared = sum(max(train.parents(index) or (-1,)) >= 0 for index in taken)
    found = {"pairs": len(first), "shared": shared, "held": [n for i in range(len(held)) for n in held.records(i)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for lora in loras:
            if lora:
                leaves = {}
                for name, each in base.items():
                    if name.split(".")[-2] in program.LORA.targets:
                        stem, (out, inward) = name.removesuffix(".weight"), each.shape
                        shapes = {".lora_A": (program.LORA.rank, inward), ".lora_B": (out, program.LORA.rank)}
                        for end, shape in shapes.items():
                            leaves[stem + end] = program.adapter(stem + end, shape).requires_grad_()
                weights = base | {
                    f"{stem}.weight": base[f"{stem}.weight"]
                    + program.LORA.alpha / program.LORA.rank * leaves[f"{stem}.lora_B"] @ leaves[f"{stem}.lora_A"]
                    for stem in {name.rpartition(".")[0] for name in leaves}
                }
            else:
                leaves = weights = {name: each.clone().requires_grad_() for name, each in base.items()}
            before = base if lora else other
            values = dpo(folder, model, weights, before, first)
            gradients = torch.autograd.grad(values[0], list(leaves.values()))
            with torch.no_grad():
                evaluated = dpo(folder, model, base, before, found["held"], is_weighted=False).tolist()
                start = dpo(folder, model, base, before, first).tolist()
            found[lora] = {
                "values": values.tolist(),
                "gradients": dict(zip(leaves, gradients, strict=True)),
                "evaluated": evaluated,
                "start": start,
            }
    return found


@CASES
def test_loss_and_gradients_equal_the_formula_in_fp64(folder, references, case):
    reference = references[case.pack]
    ours, wanted = result(folder, case), reference[case.lora]
    assert (reference["shared"] > 0) == (case.pack == "trees")
    assert reference["pairs"] > program.BATCH  # some sequence holds several
    assert ours["exact"] == pytest.approx(wanted["values"], rel=1e-12)
    assert 0 < wanted["values"][2] < 1
    require_near(ours["gradients"], wanted["gradients"], 1e-11)


@CASES
def test_the_trainer_starts_from_the_formula(folder, references, case):
    reference = references[case.pack]
    ours, wanted = result(folder, case), reference[case.lora]
    loss, norm, margin, accuracy = ours["trained"]
    # Adapters begin with zero: the model is its reference.
    assert [loss, margin, accuracy] == pytest.approx(wanted["start"], rel=2e-5, abs=1e-6)
    if case.lora:
        assert loss == pytest.approx(math.log(2), rel=1e-6)
    else:
        exact = math.sqrt(sum(float(each.square().sum()) for each in result(folder, case)["gradients"].values()))
        assert norm == pytest.approx(exact, rel=1e-4)
    *numbers, tokens = ours["evaluated"]
    assert numbers == pytest.approx(wanted["evaluated"], rel=2e-5, abs=1e-6)
    labels = [label for n in reference["held"] for _, label in documents(folder, n)]
    assert tokens == sum(int((label != -100).sum()) for label in labels)


@CASES
def test_a_step_moves_all_ranks_alike(folder, cases, case):
    ours = result(folder, case)
    alike = [each for each in cases if (each.lora, each.pack) == (case.lora, case.pack)]
    peers = [result(folder, each) for each in alike]
    assert ours["second"] == pytest.approx(peers[0]["second"], rel=1e-5)
    assert ours["second"] != pytest.approx(ours["trained"][0], rel=1e-5)


@pytest.mark.parametrize("case", [program.HALF[0], *long(*zip(program.HALF[1:]))], ids=str)
def test_fp16_is_near_fp32(folder, case):
    ours = result(folder, case)
    (loss, norm, scale), (second, _, _) = ours["half"]
    assert (loss, second) == pytest.approx((ours["trained"][0], ours["second"]), rel=2e-3)
    assert norm == pytest.approx(ours["trained"][1], rel=1e-2)
    assert scale == 65536


@CASES
def test_pairs_without_answers_change_nothing(folder, case):
    ours = result(folder, case)
    assert ours["of nothing"] == pytest.approx(math.log(2), rel=1e-12)
    assert ours["moved"] == 0

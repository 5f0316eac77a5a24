"""Tokens are drawn from transformers' distribution, and depend on nothing but logits, seed, prompt and sample."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process

from bmburst.inference.sampling import (
    GENERATION_CONFIG,
    GenerationOptions,
    Sampler,
    SamplerRow,
    generation_options,
    ignored_options,
)
from tests import tiny
from tests.refusals import refused

VOCAB = 53


def make(rows, vocab_size=VOCAB, **options):
    return Sampler(GenerationOptions(**{"max_new_tokens": 8, **options}), rows, vocab_size, "cpu")


def random_logits(rows, seed=0, scale=3.0, vocab_size=VOCAB):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def steps(sampler, logits):
    return torch.stack([sampler.step(each).tokens for each in logits])


GRID = list(itertools.product([0.3, 1.0, 1.7], [0, 1, 7, 500], [1.0, 0.8, 0.05, 0.0], [0.0, 0.1, 1.0], [1.0, 1.3, 0.7]))


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
def test_probabilities_are_those_of_transformers(penalty):
    seen = [[1, 5, 5, 52], [0, 30, 7, 2]]
    rows = [SamplerRow(i, tokens=each) for i, each in enumerate(seen)]
    logits = random_logits(2)
    compared = 0
    for temperature, top_k, top_p, min_p, _ in (each for each in GRID if each[-1] == penalty):
        expected = logits
        processors = [logits_process.RepetitionPenaltyLogitsProcessor(penalty)]
        processors.append(logits_process.TemperatureLogitsWarper(temperature))
        processors += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
        processors.append(logits_process.TopPLogitsWarper(top_p))
        processors.append(logits_process.MinPLogitsWarper(min_p))
        for processor in processors:
            expected = processor(torch.tensor(seen), expected)
        sampler = make(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
        found = sampler.probabilities(logits)
        torch.testing.assert_close(found, expected.double().softmax(-1), rtol=1e-5, atol=1e-7)
        assert torch.equal(
            found[expected == -math.inf], torch.zeros((expected == -math.inf).sum(), dtype=torch.float64)
        )
        assert (found[expected.softmax(-1) > 1e-9] > 0).all()
        compared += 1
    assert compared == 144


def test_tokens_already_drawn_are_penalized():
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    sampler = make([SamplerRow(0, tokens=[2])], 4, repetition_penalty=2.0)
    assert [sampler.step(logits).tokens.item() for _ in range(4)] == [0, 1, 0, 0]
    assert torch.equal(logits, torch.tensor([[2.0, 1.9, 1.8, -1.0]]))


def test_tokens_follow_softmax():
    logits, count = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5]]), 4000
    rows = [SamplerRow(prompt) for prompt in range(count)]
    sampler = make(rows, 7, temperature=0.8, max_new_tokens=5)
    drawn = steps(sampler, [logits.expand(count, -1)] * 5).flatten()
    expected = (logits[0] / 0.8).softmax(-1) * len(drawn)
    chi_square = ((drawn.bincount(minlength=7) - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.5  # 6 degrees of freedom: exceeded by chance once in a thousand


def test_several_steps_and_samples_are_independent():
    logits = torch.zeros(2000, 2)
    rows = [SamplerRow(prompt, sample) for prompt in range(1000) for sample in range(2)]
    first, second = steps(make(rows, 2, temperature=1.0), [logits, logits])
    for a, b in ((first, second), (first[::2], first[1::2])):
        assert (a == b).float().mean().item() == pytest.approx(0.5, abs=0.06)  # under 4 deviations of a coin


def test_a_seed_repeats_and_another_differs():
    logits = [random_logits(3, seed) for seed in range(8)]
    rows = [SamplerRow(prompt) for prompt in range(3)]
    one = steps(make(rows, temperature=1.0, seed=5), logits)
    assert torch.equal(one, steps(make(rows, temperature=1.0, seed=5), logits))
    assert not torch.equal(one, steps(make(rows, temperature=1.0, seed=6), logits))
    # A longer limit does not change the beginning.
    assert torch.equal(one, steps(make(rows, temperature=1.0, seed=5, max_new_tokens=100), logits))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.2, "min_p": 0.01}], ids=str)
def test_a_row_does_not_depend_on_its_batch(options):
    rows = [SamplerRow(3, 1, [4]), SamplerRow(0, 0, [5, 6]), SamplerRow(3, 0, [7])]
    logits = [random_logits(3, seed, vocab_size=4001) for seed in range(8)]
    together = steps(make(rows, 4001, temperature=1.2, top_k=0, **options), logits)
    for index, row in enumerate(rows):
        alone = steps(make([row], 4001, temperature=1.2, top_k=0, **options), [each[index, None] for each in logits])
        assert torch.equal(alone[:, 0], together[:, index])
    assert len({tuple(column) for column in together.T.tolist()}) == 3


def test_a_step_never_waits_for_the_device(monkeypatch):
    """On the meta device, reading a value on the host is an error."""
    options = GenerationOptions(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=3, max_new_tokens=4
    )
    for each in (options, GenerationOptions(logprobs=0)):
        sampler = Sampler(each, [SamplerRow(0)] * 2, VOCAB, "cpu")
        for name, value in vars(sampler).items():
            if isinstance(value, torch.Tensor):
                setattr(sampler, name, value.to("meta"))
        sampled = sampler.step(torch.empty(2, VOCAB, device="meta"))
        assert sampled.tokens.shape == (2,) and sampled.tokens.dtype == torch.int64


@pytest.mark.parametrize("value", [0.0, -2.5, 1e30])
def test_greedy_takes_the_first_of_ties(value):
    logits = torch.full((2, 300), -1e31)
    logits[0, [17, 40, 299]] = value
    logits[1, [250, 251]] = value
    assert make([SamplerRow(0), SamplerRow(1)], 300).step(logits).tokens.tolist() == [17, 250]


def test_ties_in_sampling_are_drawn_alike():
    logits = torch.zeros(1, 4)
    # transformers keeps all tokens that tie with the last of top_k; of ties top_p keeps those of smaller ids.
    assert make([SamplerRow(0)], 4, temperature=1, top_k=1).probabilities(logits).tolist() == [[0.25] * 4]
    found = make([SamplerRow(0)], 4, temperature=1, top_k=0, top_p=0.5).probabilities(logits)
    assert found.tolist() == [[0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5, "top_k": 3, "min_p": 0.5, "repetition_penalty": 0.5}], ids=str)
def test_logits_that_are_no_numbers_do_no_harm(temperature, options):
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan] * 4, [nan, -9.0, nan, -inf], [-inf] * 4, [0.0, inf, nan, 1.0], [3e38, 1.0, -3e38, 0.0]]
    )
    rows = [SamplerRow(i, tokens=[0, 1]) for i in range(5)]
    sampler = make(rows, 4, temperature=temperature, logprobs=2, **options)
    for _ in range(12):  # also beyond max_new_tokens
        assert sampler.step(logits).tokens.tolist() == [0, 1, 0, 1, 0]


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0], [0.0, -math.inf, -math.inf, -math.inf]])
    for low_or_high in (0.0, 1 - 2**-53):
        sampler = make([SamplerRow(0), SamplerRow(1)], 4, temperature=1.0)
        sampler._uniforms.fill_(low_or_high)
        assert sampler.step(logits).tokens.tolist() == [3 if low_or_high else 1, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(2)
    options = {"temperature": 0.5, "top_k": 2, "repetition_penalty": 1.5}
    sampled = make([SamplerRow(0, tokens=[3]), SamplerRow(1)], logprobs=4, **options).step(logits)
    expected = logits.log_softmax(-1)
    assert torch.equal(sampled.logprobs, expected.gather(1, sampled.tokens[:, None])[:, 0])
    assert sampled.top_ids.tolist() == expected.argsort(-1, descending=True)[:, :4].tolist()
    assert torch.equal(sampled.top_logprobs, expected.gather(1, sampled.top_ids))
    only = make([SamplerRow(0)], logprobs=0).step(logits[:1])
    assert only.logprobs.shape == (1,) and only.top_ids.shape == (1, 0)
    assert make([SamplerRow(0)], 4, logprobs=99).step(logits[:1, :4]).top_ids.shape == (1, 4)
    assert make([SamplerRow(0)]).step(logits[:1]).logprobs is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens | 0 | at least 1"),
        ({"temperature": -0.1}, "temperature | -0.1 | at least 0"),
        ({"temperature": math.nan}, "temperature | nan"),
        ({"top_k": -1}, "top_k | -1 | at least 0"),
        ({"top_k": 2.5}, "top_k | 2.5 | an integer"),
        ({"top_p": 1.5}, "top_p | 1.5 | at most 1"),
        ({"min_p": -1}, "min_p | -1 | at least 0"),
        ({"repetition_penalty": 0}, "repetition_penalty | 0 | above 0"),
        ({"seed": -3}, "seed | -3 | at least 0"),
        ({"stop": ("a", "")}, "stop | '' | not empty"),
        ({"stop": ""}, "stop | '' | not empty"),
        ({"stop": 3}, "stop | 3 | text"),
        ({"eos_ids": (1, -2)}, "eos_ids | -2 | at least 0"),
        ({"logprobs": -1}, "logprobs | -1 | at least 0"),
        ({"num_samples": 0}, "num_samples | 0 | at least 1"),
        ({"num_samples": 4}, "num_samples | 4 | temperature 0"),
    ],
    ids=str,
)
def test_options_are_checked(options, words):
    with refused(words, "allowed", "fix: ") as caught:
        GenerationOptions(**options)
    assert str(caught.value).splitlines()[-1].startswith("fix: ")


def test_options_take_what_is_meant():
    options = GenerationOptions(max_new_tokens="1K", stop="a,\n", eos_ids=[2, 3], num_samples=2, temperature=1)
    assert (options.max_new_tokens, options.stop, options.eos_ids) == (1024, ("a,\n",), (2, 3))
    assert GenerationOptions().is_greedy and not options.is_greedy


def write(directory, name=GENERATION_CONFIG, **values):
    (directory / name).write_text(json.dumps(values))
    return directory


def test_defaults_come_from_the_directory(tmp_path):
    stored = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": [7, 9], "bos_token_id": 1, "odd": {}}
    write(tmp_path, "config.json", eos_token_id=3)
    options = generation_options(write(tmp_path, **stored, do_sample=True, stop_strings=["###"]))
    assert (options.temperature, options.top_p, options.top_k) == (0.6, 0.9, 50)
    assert (options.eos_ids, options.stop) == ((7, 9), ("###",))
    given = {"temperature": 0.3, "top_p": None, "eos_ids": (), "max_new_tokens": 5}
    options = generation_options(tmp_path, **given)
    assert (options.temperature, options.top_p, options.eos_ids, options.max_new_tokens) == (0.3, 0.9, (), 5)
    with refused("top_p", "7", "at most 1"):
        generation_options(tmp_path, top_p=7)
    assert generation_options(write(tmp_path, do_sample=True)).temperature == 1.0  # as in transformers


@pytest.mark.parametrize("stored", [{"do_sample": False}, {}, {"do_sample": None}], ids=str)
def test_without_do_sample_it_is_greedy(tmp_path, stored):
    write(tmp_path, **stored, temperature=0.6, top_p=0.8)
    assert generation_options(tmp_path).is_greedy
    options = generation_options(tmp_path, temperature=0.5)
    assert (options.temperature, options.top_p) == (0.5, 0.8)


def test_eos_of_the_model_is_the_last_resort(tmp_path):
    assert generation_options(None).eos_ids == generation_options(tmp_path).eos_ids == ()
    write(tmp_path, "config.json", eos_token_id=3, vocab_size=9)
    assert generation_options(tmp_path).eos_ids == (3,)
    assert generation_options(write(tmp_path, top_k=3)).eos_ids == (3,)
    write(tmp_path, "config.json", eos_token_id=[4, 5])
    assert generation_options(tmp_path).eos_ids == (4, 5)
    assert generation_options(write(tmp_path, eos_token_id=0)).eos_ids == (0,)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"temperature": "hot"}, "temperature | 'hot' | a number"),
        ({"top_k": -2}, "top_k | -2 | at least 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id | '</s>' | integer"),
        ({"eos_token_id": [1, None]}, "eos_token_id | None | integer"),
        ({"stop_strings": [""]}, "stop_strings | '' | not empty"),
        ({"do_sample": "yes"}, "do_sample | 'yes' | true or false"),
    ],
    ids=str,
)
def test_a_wrong_value_in_the_file_is_refused(tmp_path, stored, words):
    with refused(words, GENERATION_CONFIG, "fix: "):
        generation_options(write(tmp_path, **stored))


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff"], ids=["cut", "list", "empty", "no UTF-8"])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / GENERATION_CONFIG).write_bytes(text.encode("latin-1"))
    with refused(GENERATION_CONFIG, "fix: "):
        generation_options(tmp_path)


CHANGING = {
    **{"min_length": 3, "min_new_tokens": 3, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
    **{"encoder_repetition_penalty": 1.3, "typical_p": 0.5, "eta_cutoff": 0.1, "epsilon_cutoff": 0.1, "top_h": 0.4},
    **{"bad_words_ids": [[3]], "suppress_tokens": [3], "begin_suppress_tokens": [3], "guidance_scale": 1.5},
    **{"sequence_bias": [[[3], 1.0]], "exponential_decay_length_penalty": [3, 1.1], "max_time": 1.5},
    **{"forced_bos_token_id": 3, "forced_eos_token_id": 3, "watermarking_config": {}},
}


def test_what_transformers_makes_a_processor_or_criterion_of_is_noted(tmp_path):
    model = tiny.transformers_model(num_hidden_layers=1)
    for name, value in CHANGING.items():
        config = GenerationConfig(do_sample=True, top_k=0, num_beams=1, eos_token_id=1, max_length=20, **{name: value})
        config._eos_token_tensor = torch.tensor([1])
        criteria = [type(each).__name__ for each in model._get_stopping_criteria(config, [])]
        made = model._get_logits_processor(config, 5, torch.ones(1, 5).long())
        assert len(made) == 1 or "MaxTimeCriteria" in criteria, name
        write(tmp_path, **{name: value})
        assert ignored_options(tmp_path) == [name]


@pytest.mark.parametrize(
    ("stored", "noted"),
    [
        ({"typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.5}, 4),
        ({"encoder_repetition_penalty": 1.2, "num_return_sequences": 2, "token_healing": True}, 3),
        ({"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0, "encoder_repetition_penalty": 1, "top_h": None}, 0),
        ({"num_beams": 1, "length_penalty": 0.5, "use_cache": False, "cache_implementation": "hybrid"}, 0),
        ({"cache_implementation": "quantized"}, 1),
        ({"max_length": 4096}, 1),
        ({"max_length": 4096, "max_new_tokens": 9}, 0),
        ({"an_option_of_a_later_version": 0.3}, 1),
        ({"transformers_version": "5.23.0", "_from_model_config": True, "pad_token_id": 0, "bos_token_id": 1}, 0),
    ],
    ids=str,
)
def test_options_that_are_not_applied_are_named(tmp_path, stored, noted):
    write(tmp_path, **stored)
    assert ignored_options(tmp_path) == (list(stored) if noted else [])
    assert noted in (0, len(stored))
    assert "max_length" not in ignored_options(tmp_path, max_new_tokens=9)


def test_uniforms_differ_for_every_row():
    rows = [SamplerRow(prompt, sample) for prompt in range(20) for sample in range(20)]
    columns = make(rows, temperature=1.0)._uniforms.numpy()
    assert len(np.unique(columns)) == columns.size
    assert columns.min() >= 0 and columns.max() < 1

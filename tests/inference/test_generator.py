"""`Generator` and `Session`: batches, turns, samples, stops, and what they refuse."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bmburst
from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference import generator as generating
from bmburst.inference.answering import Progress
from bmburst.inference.generator import Generator
from bmburst.inference.prefill import Prefill
from bmburst.inference.prompts import Answer
from bmburst.inference.session import Engine, GenerationBatch, Session
from bmburst.inference.weights import NORM
from tests.distributed.started import run_python
from tests.distributed.threads import mesh_of, run_ranks
from tests.inference.models import VOCAB, directory, greedy, logits, prompt
from tests.pairs import in_turn
from tests.refusals import refuse

UNEVEN = (13, 5, 1, 30, 21)


def alone(family: str = "llama", **options: Any) -> Generator:
    return Generator(directory(family), dtype="float32", **options)


def over(comm: CheckedCommunicator, family: str = "llama", **options: Any) -> Generator:
    mesh = mesh_of(comm)
    return Generator(directory(family), mesh=mesh, dtype="float32", **options)


def without_eos(found: Sequence[Answer]) -> list[list[int]]:
    return [list(answer.tokens) for answer in found]


def prefilled(generator: Generator, tokens: Sequence[int] = (1, 2, 3)) -> Session:
    session = generator.session(40)
    session.prefill(tokens)
    return session


def test_answers_are_in_order_and_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(length) for length in UNEVEN]
    expected = [greedy("llama", each, 8) for each in prompts]
    for most in (64, 2, 1):
        monkeypatch.setattr(generating, "MOST_SEQUENCES", most)
        found = alone().generate([np.array(prompts[0]), *prompts[1:]], max_new_tokens=8, eos_ids=(VOCAB + 1,))
        assert without_eos(found) == expected
        assert [answer.prompt_tokens for answer in found] == list(UNEVEN)
        assert all(answer.finish == "length" and answer.text is None for answer in found)
        assert all(answer.first_token_seconds and answer.seconds_per_token and answer.peak_gib for answer in found)


@pytest.mark.parametrize(("ranks", "cache"), in_turn([2, 3, 1, 4], ["auto", "tokens"]))
def test_all_ranks_sample_the_same_and_each_prompt_its_own(ranks: int, cache: str) -> None:
    prompts, options = [prompt(length) for length in UNEVEN[:3]], {"temperature": 1.0, "max_new_tokens": 12, "seed": 7}
    options |= {"top_k": 0, "num_samples": 3, "logprobs": 1}

    def body(comm: CheckedCommunicator) -> Any:
        made = over(comm, cache=cache)
        whole = made.generate(prompts, **options)
        return (
            [answer.tokens for answer in whole],
            [answer.sample for answer in whole],
            made.generate([prompts[2]], **options),
        )

    results = run_ranks(ranks, body)
    expected = [answer.tokens for answer in alone().generate(prompts, **options)]
    for tokens, samples, last in results:
        assert tokens == expected and samples == [0, 1, 2] * 3
        assert len(set(tokens)) == 9
        # By itself it is prompt 0, with numbers of its own.
        assert [answer.tokens for answer in last] == [answer.tokens for answer in results[0][2]] != tokens[6:]


def test_log_probabilities_are_those_of_the_model() -> None:
    text = prompt(9)
    (answer,) = alone().generate([text], max_new_tokens=5, logprobs=3, eos_ids=(VOCAB + 1,))
    expected = logits("llama", [*text, *answer.tokens])[8:-1].log_softmax(-1)
    for found, row in zip(answer.logprobs, expected, strict=True):
        assert found.logprob == pytest.approx(row[found.token].item(), abs=1e-5)
        values, ids = row.topk(3)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_an_answer_ends_with_any_eos_id() -> None:
    text = prompt(13)
    tokens = greedy("llama", text, 10)
    (answer,) = alone().generate([text], max_new_tokens=10, eos_ids=(VOCAB + 1, tokens[4]))
    assert answer.finish == "eos" and list(answer.tokens) == tokens[: tokens.index(tokens[4]) + 1]


@pytest.mark.parametrize("cache", ["auto", "tokens"])
@pytest.mark.parametrize(("ranks", "stop"), [(1, 1), (2, 3), (3, 1), (4, 2)])
def test_sessions_go_on_by_turns_and_forks(ranks: int, stop: int, cache: str) -> None:
    def body(comm: CheckedCommunicator) -> Any:
        session = over(comm, cache=cache, chunk_tokens=8).session(max_tokens=90)
        session.prefill(prompt(13))
        first = list(session.generate(max_new_tokens=6, eos_ids=(VOCAB + 1,)))
        session.prefill(prompt(1, seed=1))
        fork = session.fork()
        stopped = []
        for token in session.generate(max_new_tokens=20, eos_ids=(VOCAB + 1,)):
            stopped.append(token)
            if len(stopped) == stop:  # as at a stop string
                break
        session.prefill(prompt(9, seed=2))
        last = list(session.generate(max_new_tokens=5, eos_ids=(VOCAB + 1,)))
        return first, stopped, last, list(fork.generate(max_new_tokens=7, eos_ids=(VOCAB + 1,))), session.tokens

    for first, stopped, last, forked, tokens in run_ranks(ranks, body):
        text = prompt(13)
        assert first == greedy("llama", text, 6)
        text += (*first, *prompt(1, seed=1))
        assert forked == greedy("llama", text, 7)
        assert stopped == forked[:stop]
        text += (*stopped, *prompt(9, seed=2))
        assert last == greedy("llama", text, 5)
        assert tokens == (*text, *last)


def test_an_answer_ends_where_its_session_goes_on() -> None:
    session = alone().session(90)
    session.prefill(prompt(13))
    never, answer = session.generate(max_new_tokens=9), session.generate(max_new_tokens=9, eos_ids=(VOCAB + 1,))
    first = next(answer)
    refuse(lambda: next(never), "has continued", "generate() again")
    session.prefill(prompt(4))
    refuse(lambda: next(answer), "has continued", "generate() again")
    assert session.tokens == (*prompt(13), first, *prompt(4))
    assert list(session.generate(max_new_tokens=5, eos_ids=(VOCAB + 1,))) == greedy("llama", session.tokens[:18], 5)


def test_progress_is_told_in_order() -> None:
    seen: list[Any] = []
    progress = Progress(
        tokens=lambda n: seen.append(n), answer=lambda index, answer: seen.append((index, answer.tokens))
    )
    found = alone(chunk_tokens=16).generate([prompt(13), prompt(30)], max_new_tokens=3, progress=progress)
    assert seen[:3] == [16, 16, 11]
    assert seen[3:] == [(0, found[0].tokens), (1, found[1].tokens)]


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    made = alone()
    made._available = made.memory.total(1, 40)
    assert made.memory.longest(made._available) == 40
    refused_one, answered = made.generate([prompt(31), prompt(30)], max_new_tokens=10, eos_ids=(VOCAB + 1,))
    assert refused_one.finish == "refused" and "at most 40 tokens" in (refused_one.reason or "")
    assert list(answered.tokens) == greedy("llama", prompt(30), 10)
    refuse(lambda: made.generate([prompt(31)], max_new_tokens=10), "31 tokens", "at most 40", "--nproc")
    refuse(lambda: made.session(41), "41 tokens", "at most 40")
    session = made.session(40)
    session.prefill(prompt(30))
    refuse(lambda: session.generate(max_new_tokens=11), "11", "at most 10")
    refuse(lambda: session.prefill(prompt(11)), "11 more tokens", "at most 10")


def test_more_answers_than_fit_are_refused() -> None:
    made = alone()
    drawn = {"max_new_tokens": 10, "temperature": 1.0, "eos_ids": ()}
    made._available = made.memory.weights + made.memory.cache(5, 40) + made.memory.prefill(40)
    assert made.memory.most_answers(made._available, 40) == 4  # the prompt's own cache is copied for each
    refuse(lambda: made.generate([prompt(30)], num_samples=5, **drawn), "5 answers", "40 tokens", "at most 4 answers")
    first, *rest = made.generate([prompt(30), prompt(3)], num_samples=5, **drawn)
    assert first.finish == "refused" and "at most 4 answers" in (first.reason or "")
    assert [len(answer.tokens) for answer in rest] == [10] * 5
    assert len(made.generate([prompt(30)], num_samples=4, **drawn)) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.generate([]), ("no prompt", "at least one")),
        (lambda g: g.generate("a text"), ("one text", "list of prompts")),
        (lambda g: g.generate(["a text"]), ("prompt 1", "tokenizer")),
        (lambda g: g.generate([[1], []]), ("prompt 2", "at least one")),
        (lambda g: g.generate([[1, VOCAB]]), ("prompt 1", str(VOCAB), f"0 to {VOCAB - 1}")),
        (lambda g: g.generate([[1]], stop=("x",)), ("stop", "tokenizer")),
        (lambda g: g.generate([[1]], temperature=-1), ("temperature", "-1")),
        (lambda g: g.session(0), ("max_tokens 0", "at least 1")),
        (lambda g: g.session(9).generate(), ("prefill",)),
        (lambda g: g.session(9).prefill([]), ("at least one",)),
        (lambda g: g.session(9).prefill([-1]), ("-1",)),
        (lambda g: g.generate(None), ("NoneType", "list of prompts")),
        (lambda g: g.generate(3), ("int", "list of prompts")),
        (lambda g: g.generate([1] for _ in range(2)), ("generator", "list of prompts")),
        (lambda g: g.generate(b"ab"), ("bytes", "list of prompts")),
        (lambda g: g.generate([[1]], {"top_k": 3}), ("options", "dict", "generator.options")),
        (lambda g: g.generate([[1]], g.options(), top_k=3), ("options and top_k", "one of both")),
        (lambda g: g.generate([[1]], progress=print), ("progress", "Progress")),
        (lambda g: g.generate([[1]], progress=Progress(text=None)), ("progress.text", "function", "None")),
        (lambda g: g.generate([[1]], chat=1), ("chat", "bool", "1")),
        (lambda g: g.encoder(chat=torch.ones(2)), ("chat", "bool", "tensor")),
        (lambda g: g.why_too_long(None, 3), ("prompt None", "at least 1")),
        (lambda g: g.why_too_long(3, 10**400), ("new_tokens", "at most")),
        (lambda g: g.generate([[1]], do_sample=True), ("do_sample", "temperature")),
        (lambda g: g.options(max_tokens=3), ("max_tokens", "max_new_tokens")),
        (lambda g: g.session("9"), ("max_tokens '9'", "at least 1")),
        (lambda g: g.session(None), ("max_tokens None", "at least 1")),
        (lambda g: g.session(9).prefill([1], 0), ("on_tokens", "function", "0")),
        (lambda g: prefilled(g).generate(3), ("options", "int")),
        (lambda g: prefilled(g).generate(g.options(), top_k=3), ("options and top_k", "one of both")),
        (lambda g: prefilled(g).generate(stop="x"), ("stop", "Generator.generate")),
        (lambda g: prefilled(g).generate(num_samples=2, temperature=1.0), ("num_samples", "Generator.generate")),
        (lambda g: prefilled(g).generate(logprobs=1), ("logprobs", "Generator.generate")),
    ],
)
def test_bad_input(call: Callable[[Generator], object], words: tuple[str, ...]) -> None:
    made = alone()
    refuse(lambda: call(made), *words)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_whose_logits_are_no_numbers_is_refused_on_every_rank(ranks: int, tmp_path: Path) -> None:
    broken = copytree(directory("llama"), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors[NORM][3] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})

    def body(comm: CheckedCommunicator) -> None:
        mesh = mesh_of(comm)
        made = Generator(broken, mesh=mesh, dtype="float32")
        refuse(lambda: made.generate([prompt(5), prompt(3)], max_new_tokens=4), "NaN", "float32", "checkpoint")
        session = made.session(20)
        session.prefill(prompt(5))
        refuse(lambda: next(session.generate(max_new_tokens=4)), "NaN", "float32", "checkpoint")

    run_ranks(ranks, body)


def test_a_prompt_whose_logits_are_no_numbers_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a prompt is one that overflows in float16: here prompts of 7 tokens."""
    made, compute = alone(), Prefill.__call__

    def overflowing(self: Prefill, cache: Any, prompts: dict[int, Sequence[int]], *rest: Any) -> torch.Tensor:
        hidden = compute(self, cache, prompts, *rest)
        hidden[[len(tokens) == 7 for tokens in prompts.values()]] = torch.nan
        return hidden

    monkeypatch.setattr(Prefill, "__call__", overflowing)
    wanted = made.generate([prompt(5), prompt(9)], max_new_tokens=4)
    seen: list[tuple[int, Answer]] = []
    progress = Progress(answer=lambda index, answer: seen.append((index, answer)))
    found = made.generate([prompt(5), prompt(7), prompt(9), prompt(7)], max_new_tokens=4, progress=progress)
    assert [answer.finish == "refused" for answer in found] == [False, True, False, True]
    assert [found[0].tokens, found[2].tokens] == [answer.tokens for answer in wanted]
    assert "NaN" in str(found[1].reason) and [index for index, _ in seen] == [1, 3, 0, 2]
    more = made.generate([prompt(5), prompt(7)], max_new_tokens=4, temperature=1.0, num_samples=2)  # batches of one
    assert [answer.finish == "refused" for answer in more] == [False, False, True]
    for alike in ([prompt(7)], [prompt(7), prompt(7)]):
        refuse(lambda alike=alike: made.generate(alike, max_new_tokens=4), "NaN", "checkpoint")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "rows"}, ("cache", "rows", "tokens")),
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"chunk_tokens": 0}, ("chunk_tokens 0", "at least 1")),
        ({"chunk_tokens": "8"}, ("chunk_tokens '8'", "at least 1")),
        ({"chunk_tokens": 1.5}, ("chunk_tokens 1.5", "at least 1")),
        ({"kernel": "fast"}, ("kernel", "fast", "auto")),
        ({"chunk_tokens": 10**20}, ("chunk_tokens", "at most")),
        ({"mesh": "all"}, ("mesh", "bmburst.Mesh", "str")),
        ({"on_bytes": None}, ("on_bytes", "function", "None")),
    ],
)
def test_bad_options_are_refused_before_weights_are_read(
    options: dict[str, Any], words: tuple[str, ...], no_weights: None
) -> None:
    refuse(lambda: Generator(directory("llama"), **options), *words)


def test_a_batch_that_is_split_by_tokens_takes_one_prompt_each() -> None:
    """Also where only the second of its sequences does not end at a multiple of the token groups."""

    def body(comm: CheckedCommunicator) -> None:
        engine = over(comm, cache="tokens")._engine
        batch = GenerationBatch(engine, engine.new_cache(2, 20))
        batch.prefill([prompt(4), prompt(5)])
        refuse(lambda: batch.prefill([prompt(3), prompt(3)]), "one prompt each")

    run_ranks(2, body)


@pytest.mark.parametrize("model", [None, 3, [], torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    refuse(lambda: Generator(model), type(model).__name__, "directory")


def on_rank_1(comm: CheckedCommunicator, wrong: object, right: object) -> Any:
    return wrong if comm.rank == 1 else right


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g, comm: g.generate([prompt(5, seed=comm.rank)], max_new_tokens=2), ("prompts", "rank")),
        (lambda g, comm: g.generate(on_rank_1(comm, "x", [[1]]), max_new_tokens=2), ("one text",)),
        (lambda g, comm: g.generate([[1]], max_new_tokens=on_rank_1(comm, 0, 2)), ("max_new_tokens", "0")),
        (lambda g, comm: g.generate([[1]], stop=on_rank_1(comm, "x", ())), ("stop", "tokenizer")),
        (lambda g, comm: g.session(on_rank_1(comm, 0, 9)), ("max_tokens 0",)),
        (lambda g, comm: g.session(9 + comm.rank), ("max_tokens", "rank")),
        (lambda g, comm: g.session(20).prefill(prompt(5, seed=comm.rank)), ("ids", "rank")),
        (lambda g, comm: prefilled(g).generate(max_new_tokens=on_rank_1(comm, 99, 2)), ("at most 37",)),
        (lambda g, comm: prefilled(g).generate(temperature=1.0, seed=comm.rank), ("options", "seed=1")),
        (lambda g, comm: (prefilled(g), prefilled(g, [4, 5]))[comm.rank].generate(), ("text", "rank")),
        (lambda _, comm: over(comm, cache=on_rank_1(comm, "tokens", "heads")), ("cache tokens", "cache heads")),
        (lambda _, comm: over(comm, chunk_tokens=4 + comm.rank), ("chunk_tokens 4", "chunk_tokens 5")),
        (lambda _, comm: over(comm, on_rank_1(comm, "qwen2", "llama")), ("rank 0", "rank 1")),
        (lambda _, comm: over(comm, on_rank_1(comm, "llama again", "llama")), ("weights", "fix: give all hosts")),
        (
            lambda _, comm: Generator(on_rank_1(comm, "/nowhere", directory("llama")), mesh=mesh_of(comm)),
            ("no directory /nowhere",),
        ),
    ],
)
def test_ranks_that_differ_are_told(call: Callable[[Generator, CheckedCommunicator], object], words: Any) -> None:
    def body(comm: CheckedCommunicator) -> None:
        made = over(comm)
        refuse(lambda: call(made, comm), *words)

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_session_does_not_go_on_with_tokens_that_its_text_lacks(ranks: int) -> None:
    """Ranks that share tokens have decoded the first one of the turn: behind it there are logits, but no turn."""

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    def body(comm: CheckedCommunicator) -> list[int]:
        session = prefilled(over(comm, cache="tokens"))
        with pytest.raises(KeyboardInterrupt):
            session.prefill([4, 5], stop)
        for one in (session, session.fork()):
            refuse(lambda one=one: one.generate(max_new_tokens=2), "prefill")
            refuse(lambda one=one: one.prefill([4, 5]), "interrupted", "session.keep(0)")
        assert session.keep(3) == 4 - comm.size  # its first turn is whole
        session.prefill((*(1, 2, 3)[4 - comm.size :], *prompt(6)))
        return list(session.generate(max_new_tokens=5, eos_ids=(VOCAB + 1,)))

    assert run_ranks(ranks, body) == [greedy("llama", (1, 2, 3, *prompt(6)), 5)] * ranks


@pytest.mark.parametrize("cache", ["auto", "tokens"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_text_is_cut_and_goes_on_otherwise(ranks: int, cache: str) -> None:
    """At any place: in the prompt, in the answer whose last token is not cached, and twice."""

    def body(comm: CheckedCommunicator) -> Any:
        made = over(comm, cache=cache, chunk_tokens=8)
        session = made.session(max_tokens=60)
        session.prefill(prompt(13))
        list(session.generate(max_new_tokens=4, eos_ids=(VOCAB + 1,)))
        found = []
        for tokens in (17, 15, 7, 7, 0):
            before = session.tokens
            kept = session.keep(tokens)
            assert session.tokens == before[:kept]
            refuse(lambda: session.generate(), "prefill")
            session.prefill([*before[kept:tokens], *prompt(9, seed=tokens)])
            answer = list(session.generate(max_new_tokens=5, eos_ids=(VOCAB + 1,)))
            found.append((kept, before[:tokens], answer))
        return found, made._engine.split.token_groups

    for found, groups in run_ranks(ranks, body):
        for tokens, (kept, text, answer) in zip((17, 15, 7, 7, 0), found, strict=True):
            assert min(tokens, 16) - groups < kept <= min(tokens, 16) and kept % groups == 0
            assert answer == greedy("llama", (*text, *prompt(9, seed=tokens)), 5)


def test_keys_that_depend_on_the_length_of_the_text_are_not_kept() -> None:
    session = prefilled(alone("llama-dynamic"), prompt(20))
    assert session.keep(10) == 0 and session.tokens == ()
    for wrong in (-1, 1, True, "0", 1.0):
        refuse(lambda wrong=wrong: session.keep(wrong), f"{wrong!r}", "allowed: 0")  # type: ignore[misc]


def test_heads_that_cannot_be_shared_are_refused() -> None:
    run_ranks(3, lambda comm: refuse(lambda: over(comm, cache="heads"), "2 KV heads", "3 ranks", "--cache tokens"))


def test_no_head_of_a_token_is_kept_twice() -> None:
    """The bytes of all ranks' caches are those of one rank's, but for a row of each sequence."""

    def body(comm: CheckedCommunicator, cache: str) -> int:
        engine: Engine = over(comm, cache=cache)._engine
        return engine.new_cache(2, 60)._memory.nbytes

    (one,) = run_ranks(1, body, "auto")
    row = one // 60
    assert run_ranks(2, body, "heads") == [one // 2] * 2
    assert run_ranks(4, body, "tokens") == [one // 4 + row] * 4
    assert run_ranks(4, body, "auto") == [one // 4 + row // 2] * 4


def test_defaults_are_those_of_generation_config(tmp_path: Path) -> None:
    for path in directory("llama").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    tokens = greedy("llama", prompt(13), 10)
    values = {"max_new_tokens": 9, "eos_token_id": [VOCAB - 1, tokens[5]], "do_sample": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    made = Generator(tmp_path, dtype="float32")
    (answer,) = made.generate([prompt(13)])
    assert list(answer.tokens) == tokens[: tokens.index(tokens[5]) + 1] and answer.finish == "eos"
    session = made.session(40)
    session.prefill(prompt(13))
    assert list(session.generate()) == list(answer.tokens)
    assert len(list(made.generate([prompt(1)], eos_ids=())[0].tokens)) == 9


def test_bf16_is_no_further_from_fp32_than_transformers_is() -> None:
    text = prompt(60)
    exact = logits("llama", text)[-1]
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory("llama"), dtype=torch.bfloat16)
    with torch.no_grad():
        reference = theirs(torch.tensor([text])).logits[0, -1].float()
    session = Generator(directory("llama"), dtype="bfloat16").session(80)
    session.prefill(text)
    ours = session._batch.logits[0]
    assert (ours - exact).norm() <= 2 * (reference - exact).norm()


def test_inference_needs_no_bmtrain(tmp_path: Path) -> None:
    code = "import sys, bmburst; bmburst.Generator; assert not any(n.startswith('bmtrain') for n in sys.modules)"
    done = run_python("-c", code, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Generator" in bmburst.__all__

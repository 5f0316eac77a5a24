"""Fine-tuning end to end: conversations, packed, an adapter on 2 ranks, merged, and transformers answers as trained."""

import contextlib
import errno
import io
import itertools
import json
import shutil
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bmburst.checkpoint.files import own_tokenizer
from bmburst.cli import main
from bmburst.data import find_token_file, load_tokenizer, open_corpus
from bmburst.data.answer_ends import AnswerEnds, answer_ends
from bmburst.data.report import described
from bmburst.inference.generator import Source
from bmburst.inference.prompts import PromptEncoder
from bmburst.inference.sampling import generation_options
from bmburst.launch.start import start
from bmburst.train.config import EvalConfig
from bmburst.train.evaluate import read_model
from bmburst.train.kept import kept_by_rank_0, kept_with_model, read_tokenizer
from bmburst.train.resolve import resolve, set_defaults_of_data
from bmburst.train.text import check_text, open_text
from bmburst.train.trainer import run
from tests import chat, tiny
from tests.distributed.programs import run_program
from tests.refusals import refused

SHAPE = tiny.config(
    vocab_size=chat.VOCAB, num_layers=1, hidden_size=64, intermediate_size=96, max_position_embeddings=256
)
ANSWERS = {"capital of France?": "Paris", "2 + 2?": "four", "who are you?": "a toy"}
STEPS = 40
IM_END = chat.SPECIAL.index("<|im_end|>")
HELD_OUT = ("colour of grass?", "green")  # one of the four conversations, copies included, by its content


def files_of(text, chat_template):
    return read_tokenizer(text.tokenizer_name, text.tokenizer_identity, chat_template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base with random weights and a chat template, conversations, and an adapter that has learnt them."""
    folder = tmp_path_factory.mktemp("tuned")
    tiny.save(folder / "base", SHAPE, std=0.1)
    chat.directory(folder / "base")
    records = [{"messages": chat.conversation(*pair)} for pair in (*ANSWERS.items(), HELD_OUT)]
    chat.write(folder / "chats.jsonl", *records * 16)
    run_program(2, _train, folder)
    return folder


def _train(folder):
    options = {
        "init_from": folder / "base",
        "data.source": folder / "chats.jsonl",
        "output": folder / "run",
        "sequence_length": 128,
        "batch_size": 2,
        "micro_batch_size": 2,
        "recompute": "none",
        "steps": STEPS,
        "checkpoint_every": 0,
        "eval_every": 0,
        "sample_tokens": 0,
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.targets": "all-linear",
        "optimizer.lr": 0.01,
        "schedule.warmup_steps": 5,
    }
    run(resolve((), {name: str(value) for name, value in options.items()}))


def answers(model, tokenizer):
    """Return what transformers generates for each question, up to a token that the model's files name as an end."""
    model, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), {}
    peer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for question in ANSWERS:
        asked = peer.apply_chat_template(
            chat.conversation(question), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        made = model.generate(**asked, max_new_tokens=16, do_sample=False, pad_token_id=0)
        found[question] = peer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def test_a_checkpoint_has_the_tokenizer_and_the_template(folder):
    checkpoint = folder / "run" / "checkpoints" / "step-000040"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (checkpoint / name).read_bytes() == (folder / "base" / name).read_bytes()
    opened = Source.open(folder / "run").tokenizer
    assert opened is not None and Path(opened.name) == checkpoint
    asked = PromptEncoder(opened, chat.VOCAB, chat=True).encode("2 + 2?", "prompt 0").tokens
    peer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
    expected = peer.apply_chat_template(chat.conversation("2 + 2?"), add_generation_prompt=True, return_dict=True)
    assert asked.tolist() == expected["input_ids"]
    # Another template than the tokenizer's own is the one that the model knows.
    config = resolve((), {"data.source": str(folder / "chats.jsonl"), "data.tokenizer": str(folder / "base")})
    text = open_corpus(config.data.source, config.data.tokenizer, folder / "cache")
    (folder / "mine.jinja").write_text(chat.MARKED)
    assert files_of(text, folder / "mine.jinja")["chat_template.jinja"] == chat.MARKED.encode()
    # Whatever has taken its place since is not the model's.
    moved = chat.directory(folder / "moved")
    (moved / "tokenizer_config.json").write_text('{"eos_token": "<pad>"}')
    assert files_of(replace(text, tokenizer_name=str(moved)), None) == {}
    assert files_of(replace(text, tokenizer_name="bytes"), None) == {}


def test_a_checkpoint_names_the_token_that_ends_an_answer(folder):
    words = chat.directory(folder / "words")
    text = open_corpus(folder / "chats.jsonl", str(words), folder / "cache")
    given = {"data.source": str(folder / "chats.jsonl"), "data.tokenizer": str(words), "sequence_length": "64"}
    ends = "generation_config.json"
    # That of answers beside that of documents, and no other of a text.
    assert json.loads(kept_with_model(text, resolve((), given))[ends]) == {"eos_token_id": [text.eos_id, IM_END]}
    plain = replace(text, loss_mask=None)
    assert json.loads(kept_with_model(plain, resolve((), given))[ends]) == {"eos_token_id": text.eos_id}
    # The model knows it; an adapter leaves it to the model; a file of the tokenizer's is kept as it is.
    config = json.loads((folder / "base" / "config.json").read_text())
    shutil.copytree(folder / "base", folder / "own")
    (folder / "own" / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, 1]}))
    (folder / "own" / ends).unlink()
    started = given | {"init_from": str(folder / "own")}
    assert json.loads(kept_with_model(text, resolve((), started))[ends]) == {"eos_token_id": [3, 1]}
    assert ends not in kept_with_model(text, resolve((), started | {"lora.rank": "2"}))
    (folder / "own" / ends).write_text('{"top_k": 3}')
    named = replace(text, tokenizer_name=str(folder / "own"))
    assert kept_with_model(named, resolve((), started))[ends] == b'{"top_k": 3}'
    # What the model's files lack is added, also with a tokenizer of another folder and for an adapter.
    (folder / "own" / ends).write_text('{"top_k": 3, "eos_token_id": 1}')
    for each, rank in itertools.product((text, named), "02"):
        found = json.loads(kept_with_model(each, resolve((), started | {"lora.rank": rank}))[ends])
        assert found == {"top_k": 3, "eos_token_id": [1, IM_END]}
    assert generation_options(Source.open(folder / "run").defaults).eos_ids == (2, IM_END)


SOME_END = chat.MARKED.replace(
    "m.content + '<|im_end|>' }}{% endg", "m.content + ('<|im_end|>' if m.end else '') }}{% endg"
)


@pytest.mark.parametrize(
    ("template", "said", "ends", "is_open"),
    [
        (chat.PLAIN, [("a", 0), ("b", 0)], {IM_END}, False),
        (
            chat.MARKED.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}"),
            [("a", 0), (" ", 0)],
            {IM_END},
            False,
        ),
        (chat.MARKED.replace("'<|im_end|>' }}{% endg", "'' }}{% endg"), [("a", 0), ("b", 0)], set(), True),
        (SOME_END, [("a", 1), ("b", 0), (" ", 0)], {IM_END}, True),  # white space alone is not an end
        (SOME_END, [("a", 1), ("b", 0), ("c", 0)], set(), True),  # a special token in a text, rather than its end
        (SOME_END, [("a</s>b", 1), ("c</s>", 0)], {IM_END}, False),  # text follows the other one
        (chat.MARKED, [("a<|im_end|>b", 0), ("c", 0)], {IM_END}, False),  # there is no other
    ],
    ids=["plain", "line break", "no end", "half", "few", "inside", "inside, alone"],
)
def test_the_ends_of_answers_are_found(template, said, ends, is_open, tmp_path, capsys):
    words = chat.directory(tmp_path / "words", template)
    asked = {"role": "user", "content": "hi"}
    answers = [{"role": "assistant", "content": text} | ({"end": True} if end else {}) for text, end in said]
    chat.write(tmp_path / "x.jsonl", *({"messages": [asked, answer]} for answer in answers))
    file = open_corpus(tmp_path / "x.jsonl", str(words), tmp_path)
    tokenizer = load_tokenizer(str(words))
    assert answer_ends(file, tokenizer) == AnswerEnds(frozenset(ends), is_open)
    assert ("where to stop" in described("data", file, 64, tokenizer=tokenizer)) == is_open
    given = ["--input", str(tmp_path / "x.jsonl"), "--tokenizer", str(words), "--output", str(tmp_path / "x.tokens")]
    assert main(["data", *given]) == 0
    assert ("where to stop" in capsys.readouterr().out) == is_open


def test_text_is_read_with_the_models_own_tokenizer(folder):
    def read(model, **given):
        return read_model(EvalConfig(checkpoint=model, data="x", **given), model, None)[1]

    assert read(folder / "base") == str(folder / "base")
    assert read(folder / "base", tokenizer="bytes") == "bytes"
    checkpoint = folder / "run" / "checkpoints" / "step-000040"
    for given in ({"init_from": folder / "base"}, {"init_from": checkpoint}):
        values = {**given, "data": {"source": str(folder / "chats.jsonl")}}
        set_defaults_of_data(values)
        assert values["data"]["tokenizer"] == str(given["init_from"])
    other = folder / "other"  # Llama 2 as it was published: its text was read as bytes
    other.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        (other / name).write_bytes((folder / "base" / name).read_bytes() if name != "tokenizer.model" else b"")
    values = {"init_from": other, "data": {"source": str(folder / "chats.jsonl")}}
    set_defaults_of_data(values)
    for name in (read(other), values["data"].get("tokenizer", "bytes")):
        with refused("no tokenizer.json | which has tokenizer.model | fix: | save_pretrained"):
            load_tokenizer(name or "bytes")
    assert Source.open(other).tokenizer is None  # prompts may be token ids
    for before, name in itertools.pairwise(("tokenizer.model", "tekken.json", "tiktoken.model")):
        (other / before).rename(other / name)  # Mistral, Kimi
        with refused(f"no tokenizer.json | which has {name} | fix: "):
            load_tokenizer(read(other) or "bytes")
    tokens = tiny.token_file(folder / "bytes.tokens", ["a" * 99]).path  # ids that mean other texts to the model
    values = {"init_from": folder / "base", "data": {"source": str(tokens)}}
    set_defaults_of_data(values)
    with refused("bytes.tokens' was made with tokenizer 'bytes' | fix: | --data.tokenizer bytes"):
        find_token_file(tokens, values["data"].get("tokenizer"))
    (checkpoint / "tokenizer.json").rename(folder / "aside.json")  # as checkpoints were before
    try:
        assert own_tokenizer(folder / "nowhere") is None
        with refused("tokenizer.json"):
            own_tokenizer(checkpoint)
    finally:
        (folder / "aside.json").rename(checkpoint / "tokenizer.json")


def test_the_merged_model_answers_as_trained(folder):
    words = ["convert", str(folder / "run"), str(folder / "merged"), "--to", "huggingface", "--merge"]
    assert main([*words, "--base", str(folder / "base")]) == 0
    assert answers(folder / "merged", folder / "merged") == ANSWERS  # each ends by itself
    # An adapter without a generation_config.json leaves that of its base.
    shutil.copytree(folder / "run" / "checkpoints" / "step-000040", folder / "bare")
    for name in ("generation_config.json", "state.json"):
        (folder / "bare" / name).unlink()
    assert (
        main(["convert", str(folder / "bare"), str(folder / "of-bare"), *words[3:], "--base", str(folder / "base")])
        == 0
    )
    kept = [(folder / each / "generation_config.json").read_bytes() for each in ("of-bare", "base")]
    assert kept[0] == kept[1]
    (folder / "bare" / "generation_config.json").write_text('{"top_k": 3}')  # by another program
    assert Source.open(folder / "bare").defaults == folder / "base"
    untrained = answers(folder / "base", folder / "base")
    assert all(untrained[question] != answer for question, answer in ANSWERS.items())


def test_what_a_folder_leaves_out_is_said_once(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("once upon a time. " * 60)
    (tmp_path / "books" / "b.json").write_text("[]")
    run_program(2, _open, tmp_path)
    said = [(tmp_path / f"said-{rank}.txt").read_text() for rank in range(2)]
    assert said[0].count("1 .json") == 1
    assert said[1] == ""


def _open(folder):
    runtime = start()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        open_text(resolve((), {"data.source": str(folder / "books")}), folder / "run", runtime)
    (folder / f"said-{runtime.rank}.txt").write_text(said.getvalue())


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", ""), ("tokenizer.json", '{"version": "1.'), ("tokenizer_config.json", "[]")],
)
def test_a_tokenizer_that_broke_after_its_tokens_were_made_is_refused_before_ranks_start(tmp_path, name, content):
    words = chat.directory(tmp_path / "words")
    chat.write(tmp_path / "chats.jsonl", *chat.records(20))
    text = open_corpus(tmp_path / "chats.jsonl", str(words), tmp_path / "cache")
    (words / name).write_text(content)
    given = {"data.source": str(text.path), "sample_tokens": "0", "sequence_length": "64"}
    with refused(words / name, "fix: "):
        check_text(resolve((), given))


def test_a_file_of_the_tokenizer_without_permission_is_refused_before_ranks_start(tmp_path, monkeypatch):
    words = chat.directory(tmp_path / "words")
    (words / "special_tokens_map.json").write_text("{}")
    (tmp_path / "a.txt").write_text("once upon a time. " * 60)
    given = {"data.source": str(tmp_path / "a.txt"), "data.tokenizer": str(words), "sequence_length": "64"}
    # One file, then all of them, as in a folder without permission to enter it.
    for method, name in (("read_bytes", "special_tokens_map.json"), ("is_file", "")):

        def guarded(path, own, name=name):
            if path.parent == words and name in path.name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return own(path)

        monkeypatch.setattr(Path, method, partialmethod(guarded, getattr(Path, method)))
        with refused(words, name, "Permission denied", "fix: ", "permission"):
            check_text(resolve((), given))


def test_all_ranks_refuse_what_rank_0_alone_reads(tmp_path):
    words = chat.directory(tmp_path / "words")
    (tmp_path / "a.txt").write_text("once upon a time. " * 60)
    text = open_corpus(tmp_path / "a.txt", str(words), tmp_path / "cache")
    (words / "tokenizer.json").write_text("[")
    run_program(2, _refuse, text, tmp_path / "a.txt")


def _refuse(text, source):
    runtime, words = start(), text.tokenizer_name
    given = {"data.source": str(source), "data.tokenizer": words}
    with refused(words, "tokenizer.json"):
        kept_by_rank_0(text, resolve((), given), runtime)
    with refused(words, "tokenizer.json"):  # read by the first rank of the host
        open_text(resolve((), given), source.parent / "run", runtime)


def test_the_files_of_a_name_on_the_hub_are_those_of_the_local_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    def no_request(url):
        raise AssertionError("the network is not needed")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", no_request)
    (tmp_path / "a.txt").write_text("once upon a time. " * 60)
    text = open_corpus(tmp_path / "a.txt", str(chat.directory(tmp_path / "words")), tmp_path / "cache")
    text = replace(text, tokenizer_name="some/words")
    assert files_of(text, None) == {}, "not in the cache"
    assert files_of(replace(text, tokenizer_name="moved--away"), None) == {}, "no name on the hub"
    assert files_of(replace(text, tokenizer_name="a/b/moved"), None) == {}
    repository = tmp_path / "hub" / "models--some--words"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    found = chat.directory(repository / "snapshots" / "abc")
    names = ("tokenizer.json", "tokenizer_config.json")
    assert files_of(text, None) == {name: (found / name).read_bytes() for name in names}
    (found / "tokenizer_config.json").write_text('{"eos_token": "<pad>"}')
    assert files_of(text, None) == {}, "another tokenizer by now"

"""`bmburst eval --passkey`: prompts of exact lengths, a model that copies the key on 1 to 3 ranks, and refusals.

The model in tests/inference/passkey was trained by tests/inference/train_passkey.py, which takes some minutes.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from bmburst.cli import main
from bmburst.data.tokenizer import ByteTokenizer, PromptTokenizer, load_tokenizer
from bmburst.inference import generator as generating
from bmburst.inference.passkey import QUESTION, PasskeyPrompts, PasskeyTest, read_lengths
from bmburst.inference.prompts import PromptEncoder
from bmburst.outputs import is_picture
from tests.cli.commands import refused
from tests.distributed.started import run_bmburst
from tests.pairs import long
from tests.refusals import refused as raises
from tests.refusals import says

MODEL = Path(__file__).with_name("passkey")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def hugging_face(folder: Path, merged: int = 256) -> Path:
    """Write a tokenizer of bytes, merged ones from an id on, whose text begins with a special token; return it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    space = "\u0120"
    merges = [(space, "T"), (space + "T", "h"), (space + "Th", "e"), ("k", "e"), ("ke", "y"), ("i", "s"), ("1", "2")]
    vocabulary |= {left + right: merged + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["bytes", "hugging face"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> PromptTokenizer:
    return ByteTokenizer() if request.param == "bytes" else load_tokenizer(str(hugging_face(tmp_path / "tokenizer")))


def prompts_of(tokenizer: PromptTokenizer, **changes: Any) -> tuple[PasskeyPrompts, PasskeyTest]:
    test = PasskeyTest(**{"lengths": (128, 300, 1001), "depths": DEPTHS, "samples": 2, **changes})
    return PasskeyPrompts(tokenizer, test, PromptEncoder(tokenizer, 300)), test


def test_prompts_have_exactly_their_length_and_the_key_at_its_depth(tokenizer: PromptTokenizer) -> None:
    prompts, test = prompts_of(tokenizer)
    for length in test.lengths:
        for depth in DEPTHS:
            prompt, key = prompts.prompt(length, depth, 1)
            text = tokenizer.decode(prompt.tokens)
            assert len(prompt) == length
            assert len(key) == 5
            assert text.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
            assert text.endswith(QUESTION)
            filler = text.removesuffix(QUESTION)
            sentence = filler.index(" The pass key is")
            rest = len(filler) - len(f" The pass key is {key}. Remember it. {key} is the pass key.")
            assert abs(sentence - depth * rest) < 24  # a sentence of filler, or what stands before the first whole one
            assert sentence == {0.0: 0, 1.0: rest}.get(depth, sentence)
            if tokenizer.name != "bytes":
                assert prompt.tokens[0] == load_tokenizer(tokenizer.name).encode_prompt("x")[0]


def test_prompts_depend_on_the_seed_alone() -> None:
    prompts, _ = prompts_of(ByteTokenizer())
    others, _ = prompts_of(ByteTokenizer(), lengths=(300,), depths=(0.5,), samples=9)
    changed, _ = prompts_of(ByteTokenizer(), seed=1)
    first, key = prompts.prompt(300, 0.5, 1)
    np.testing.assert_array_equal(first.tokens, others.prompt(300, 0.5, 1)[0].tokens)
    keys = {key, changed.prompt(300, 0.5, 1)[1], prompts.prompt(300, 0.5, 0)[1], prompts.prompt(300, 0.25, 1)[1]}
    assert len(keys) == 4


def test_without_key_the_text_has_no_digit(tokenizer: PromptTokenizer) -> None:
    prompts, _ = prompts_of(tokenizer, with_key=False)
    prompt, _ = prompts.prompt(300, 0.5, 0)
    assert len(prompt) == 300
    assert not re.search("[0-9]", tokenizer.decode(prompt.tokens))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4K,...,64K", (4096, 8192, 16384, 32768, 65536)),
        ("100,...,600,1000", (100, 128, 256, 512, 600, 1000)),
        ("1M", (1 << 20,)),
        ("5,\u2026,9", (5, 8, 9)),
    ],
)
def test_lengths_are_read(text: str, expected: tuple[int, ...]) -> None:
    assert read_lengths(text) == expected


@pytest.mark.parametrize("text", ["", "...,4K", "4K,...", "4K,...,...,8K", "8K,4K", "4K,4K", "0,5", "x", "4K,,8K"])
def test_other_lengths_are_refused(text: str) -> None:
    with raises(f"--lengths {text} | ascending | fix"):
        read_lengths(text)


def evaluate(folder: Path, *options: str, status: int = 0) -> tuple[dict[str, Any], str]:
    given = ("--checkpoint", MODEL, "--tokenizer", "bytes", "--passkey", "--output", "found.json", *options)
    done = run_bmburst("eval", *given, cwd=folder, env=os.environ, timeout=240)
    assert done.returncode == status, done.stderr
    assert is_picture(folder / "found.png")
    return json.loads((folder / "found.json").read_text()), done.stdout


@pytest.mark.parametrize(("ranks", "samples"), [(2, 1), *long((2, 3), (3, 3))])
def test_a_model_that_copies_finds_every_key_on_ranks_that_share_the_text(
    ranks: int, samples: int, tmp_path: Path
) -> None:
    given = ("--lengths", "130,...,512", "--samples", str(samples), "--dtype", "float32", "--nproc", str(ranks))
    found, shown = evaluate(tmp_path, *given, "--chunk-tokens", "100")  # less than any prompt
    assert [(cell["length"], cell["depth"]) for cell in found["cells"]] == [
        (length, depth) for length in (130, 256, 512) for depth in DEPTHS
    ]
    for cell in found["cells"]:
        assert (cell["right"], cell["asked"], cell["refused"]) == (samples, samples, None), cell
        assert all(answer["right"] and answer["key"] in answer["answer"] for answer in cell["answers"])
    assert found["model"] == str(MODEL)
    assert found["settings"]["ranks"] == ranks
    assert found["settings"]["seed"] == 0
    assert shown.count(f"{samples}/{samples}") == 15
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.long
def test_without_the_key_a_model_is_right_by_chance_only(tmp_path: Path) -> None:
    given = ("--lengths", "130,256", "--samples", "4", "--without-key", "--nproc", "2", "--dtype", "float32")
    found, _ = evaluate(tmp_path, *given)  # 40 prompts, 90,000 numbers
    assert sum(cell["right"] for cell in found["cells"]) == 0
    assert sum(cell["asked"] for cell in found["cells"]) == 40
    assert found["settings"]["with_key"] is False


def test_a_length_that_does_not_fit_is_a_refused_cell_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, tmp_path / "model")

    def little(comm: Any, device: Any) -> float:
        memory = generating.inference_memory(
            generating.Source.open(MODEL).weights.config, comm, "auto", generating.torch.float32, None
        )
        return float(memory.total(1, 300))

    monkeypatch.setattr(generating, "available_memory", little)
    given = ("--checkpoint", "model", "--tokenizer", "bytes", "--passkey", "--lengths", "256,512", "--samples", "1")
    assert main(["eval", *given, "--depths", "0,1", "--nproc", "1", "--dtype", "float32"]) == 2
    out, err = capsys.readouterr()
    cells = json.loads(Path("passkey.json").read_text())["cells"]
    assert [(cell["length"], cell["right"], cell["asked"]) for cell in cells] == [
        (256, 1, 1),
        (256, 1, 1),
        (512, 0, 0),
        (512, 0, 0),
    ]
    assert cells[0]["refused"] is None
    says(cells[2]["refused"], "512 | are free | at most 300 tokens")
    assert out.count("refused") == 2
    assert "512 refused" in err
    assert is_picture(Path("passkey.png"))


@pytest.mark.parametrize("depths", [(), (0.5, 1.5), (-0.5,)])
def test_depths_are_fractions_of_the_text(depths: tuple[float, ...]) -> None:
    with raises("depths", "numbers from 0 to 1", "fix: "):
        PasskeyTest(lengths=(256,), depths=depths)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lengths", "64"), "64 tokens are too few | fix: --lengths"),
        (("--lengths", "256,"), "--lengths 256, | ascending"),
        ((), "--passkey needs --lengths"),
        (("--lengths", "256", "--depths", "0,2"), "--depths 0,2 | 0 to 1"),
        (("--lengths", "256", "--depths", "x"), "--depths x | 0 to 1"),
        (("--lengths", "256", "--depths", "1,1"), "depths 1,1 | each once"),
        (("--lengths", "256", "--samples", "0"), "samples 0 | allowed: 1"),
        (("--lengths", "256", "--data", "x.txt"), "--data | --passkey | leave --data out"),
        (("--lengths", "256", "--output", "x.txt"), "--output x.txt | .json"),
        (("--lengths", "256", "--output", "other.json"), "other.json | exists | not an evaluation of passkeys"),
        (("--lengths", "256", "--cache", "rows"), "rows | heads"),
        (("--lengths", "256", "--chunk-tokens", "0"), "--chunk-tokens 0 | at least 1"),
        (("--lengths", "256", "--dtype", "int8"), "int8 | float32"),
        (("--lengths", "256", "--tokenizer", ""), "without a tokenizer | --tokenizer bytes"),
        (("--lengths", "256", "--tokenizer", "large"), "not in the vocabulary | 0 to 263"),
    ],
)
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.usefixtures("no_ranks", "no_weights")
def test_bad_input_is_refused_before_weights_are_read(
    options: tuple[str, ...],
    words: str,
    ranks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"a": 1}')
    hugging_face(Path("large"), merged=300)
    given = list(options) if "--tokenizer" in options else [*options, "--tokenizer", "bytes"]
    if "" in given:
        del given[given.index("") - 1 : given.index("") + 1]
    says(refused(capsys, "eval", "--checkpoint", str(MODEL), "--passkey", "--nproc", ranks, *given), words)


@pytest.mark.parametrize("option", [("--lengths", "4K"), ("--samples", "2"), ("--without-key",)])
def test_options_of_passkey_need_it(option: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    says(refused(capsys, "eval", "--checkpoint", str(MODEL), "--data", "x", *option), f"{option[0]} | --passkey | fix")

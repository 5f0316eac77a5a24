"""`bmburst generate`: text and JSON lines, one rank and two, and what it refuses before weights are read."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bmburst.cli import main
from bmburst.inference import generator as generating
from tests.cli.commands import refused
from tests.distributed.started import run_bmburst

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 258,
}
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}>"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes in a form that transformers reads, with a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"eos_token": "</s>", "chat_template": CHAT, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "model"
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def bare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / name).symlink_to(model / name)
    return folder


def expected(model: Path, text: str, count: int, **options: Any) -> tuple[list[int], str]:
    """What transformers gives: new ids, and their text."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": 258} | options
    found = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    return found, tokenizer.decode(found, skip_special_tokens=True)


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["generate", *argv]) == status
    return capsys.readouterr().out


@pytest.mark.parametrize("option", [(), ("--stream",)])
def test_a_prompt_is_answered_in_text(model: Path, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--checkpoint", str(model), "--prompt", "Once upon", "--max-new-tokens", "12", *option)
    assert run(capsys, *given) == expected(model, "Once upon", 12)[1] + "\n"


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_prompts_and_stop_strings_may_hold_line_breaks(
    model: Path, ranks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("--prompt", "Once\n\tupon", "--stop=\n\n", "--stop", "\nUser:", "--max-new-tokens", "8", "--nproc", ranks)
    wanted = expected(model, "Once\n\tupon", 8)[1].split("\n\n")[0] + "\n"
    assert run(capfd, "--checkpoint", str(model), *given) == wanted
    assert "control character" in refused(capfd, "generate", "--checkpoint", "a\nb", *given)
    assert "UTF-8" in refused(capfd, "generate", "--checkpoint", str(model), "--prompt", "a\udcff")


def test_a_chat_is_answered_behind_its_template(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--checkpoint", str(model), "--prompt", "hello", "--chat", "--max-new-tokens", "9")
    assert run(capsys, *given) == expected(model, "<user>hello>", 9)[1] + "\n"


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_a_tokenizer_is_given_in_place_of_the_models(
    model: Path, bare: Path, ranks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("--prompt", "Once upon", "--max-new-tokens", "8", "--nproc", ranks, "--tokenizer")
    assert run(capfd, "--checkpoint", str(bare), *given, str(model)) == expected(model, "Once upon", 8)[1] + "\n"
    output = tmp_path / "answers.jsonl"
    run(capfd, "--checkpoint", str(model), *given, "bytes", "--output", str(output))
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([list(b"Once upon")])
    found = reference.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=258)[0, ids.shape[1] :].tolist()
    assert json.loads(output.read_text())["tokens"] == found
    assert "no tokenizer" in refused(capfd, "generate", "--checkpoint", str(model), *given, "gone.json")


def test_a_stop_string_cuts_the_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = expected(model, "Once upon", 30)[1]
    stop = next(whole[i : i + 2] for i in range(4, len(whole)) if whole[i : i + 2].isascii())
    given = ("--checkpoint", str(model), "--prompt", "Once upon", "--max-new-tokens", "30", "--stop", stop)
    assert run(capsys, *given) == whole[: whole.index(stop)] + "\n"


def test_what_is_longer_than_the_model_is_noted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--checkpoint", str(model), "--prompt", "x" * 120, "--max-new-tokens")
    assert main(["generate", *given, "8"]) == 0
    assert "note" not in capsys.readouterr().err
    assert main(["generate", *given, "9"]) == 0
    assert "129 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_prompts_of_a_file_are_answered_in_order(model: Path, tmp_path: Path, ranks: int) -> None:
    lines = [{"prompt": "Once"}, {"tokens": [5]}, {"messages": [{"role": "user", "content": "hi"}]}]
    lines.append({"messages": [*lines[2]["messages"], {"role": "assistant", "content": "It is"}]})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    given = ["--prompts", "prompts.jsonl", "--output", "answers.jsonl", "--max-new-tokens", "6", "--nproc", str(ranks)]
    done = run_bmburst("generate", "--checkpoint", model, *given, cwd=tmp_path, env=os.environ, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "4 answers" in done.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    for answer, text in zip(answers, ("Once", None, "<user>hi>", "<user>hi<assistant>It is"), strict=True):
        assert {"prompt_tokens", "first_token_seconds", "seconds_per_token", "peak_gib"} < set(answer)
        if text is not None:
            tokens, words = expected(model, text, 6)
            assert (answer["tokens"], answer["text"]) == (tokens, words)
            assert answer["finish"] == ("eos" if tokens[-1] == 258 else "length")


def test_answers_are_printed_where_the_locale_lacks_their_characters(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Once"}))
    _, text = expected(model, "Once", 6)
    assert not text.isascii()
    ways = ("--prompt", "Once"), ("--prompt", "Once", "--stream"), ("--prompts", str(prompts))
    for way in ways:
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", out)
        assert main(["generate", "--checkpoint", str(model), "--nproc", "1", "--max-new-tokens", "6", *way]) == 0
        printed = out.buffer.getvalue().decode("ascii")
        if way[0] == "--prompts":
            assert json.loads(printed)["text"] == text
        else:
            assert printed.encode().decode("unicode_escape").strip() == text.strip()


def test_one_prompt_that_is_too_long_is_refused_in_its_line(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1] * 5, [1] * 500, [2] * 7]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": tokens}) for tokens in prompts))
    need = generating.InferenceMemory.total
    monkeypatch.setattr(
        generating.InferenceMemory, "total", lambda *a, **k: need(*a, **k) if a[2] < 100 else 1 << 60
    )  # as on a machine where 100 tokens do not fit
    out = run(capsys, "--checkpoint", str(bare), "--prompts", str(path), "--max-new-tokens", "4", status=2)
    first, second, third = map(json.loads, out.splitlines())
    assert (first["finish"], second["finish"], third["finish"]) == ("length", "refused", "length")
    assert first["text"] is None and len(third["tokens"]) == 4
    assert "at most 99 tokens" in second["reason"] and second["tokens"] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--prompt", "x", "--prompt-file", "y"), ("--prompt and --prompt-file", "exactly one")),
        (("--prompt", "x", "--prompt", "y"), ("--prompt is given 2 times", "--prompts")),
        ((), ("no prompt", "--prompt")),
        (("--prompt", ""), ("empty",)),
        (("--prompt-file", "missing"), ("missing", "No such file")),
        (("--prompt", "x", "--cache", "rows"), ("rows", "tokens")),
        (("--prompt", "x", "--cache", "heads", "--nproc", "3"), ("heads", "3 ranks", "--cache tokens")),
        (("--prompt", "x", "--nproc", "0"), ("--nproc 0", "at least 1")),
        (("--prompt", "x", "--hang-timeout", "-1"), ("--hang-timeout -1", "above 0")),
        (("--prompt", "x", "--temperature", "-1"), ("--temperature", "-1")),
        (("--prompt", "x", "--top-p", "2"), ("--top-p", "2")),
        (("--prompt", "x", "--seed", "9" * 30), ("--seed 9", "at most 1,000,000,000,000,000")),
        (("--prompt", "x", "--stop", ""), ("--stop", "not empty")),
        (("--prompt", "x", "--num-samples", "2"), ("num_samples", "temperature")),
        (("--prompt", "x", "--temperature", "1", "--num-samples", "2", "--stream"), ("--stream", "one prompt")),
        (("--prompt", "x", "--logprobs", "2"), ("--logprobs", "--output")),
        (("--prompt", "x", "--chunk-tokens", "0"), ("--chunk-tokens 0", "at least 1")),
        (("--prompt", "x", "--max-new-tokens", "0"), ("--max-new-tokens: 0", "fix: --max-new-tokens 20")),
        (("--prompt", "x", "--max-new-tokens", "100000G"), ("--max-new-tokens",)),
        (("--prompt", "x", "--dtype", "int4"), ("int4", "bfloat16")),
        (("--prompt", "x", "--top-k", "5"), ("--top-k has no effect", "temperature 0", "fix: --temperature 1")),
        (("--prompt", "x", "--temperature", "0", "--seed", "5"), ("--seed has no effect", "fix: --temperature 1")),
        (("--prompt", "x", "--output", "no/such/folder.jsonl"), ("--output", "folder")),
        (("--prompt", "x", "--max-new-tokens", "99999999999"), ("GiB", "in reserve", "at most")),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(
    model: Path, given: tuple[str, ...], words: tuple[str, ...], capsys: Any, no_weights: None
) -> None:
    said = refused(capsys, "generate", "--checkpoint", str(model), *given)
    assert all(word in said for word in words), said


def test_a_note_names_options_of_the_model_that_are_not_applied(model: Path, tmp_path: Path, capsys: Any) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    given = ("--checkpoint", str(tmp_path), "--prompt", "x", "--max-new-tokens", "1")
    (tmp_path / "generation_config.json").unlink()
    for wanted, values in (
        (True, {"num_beams": 4, "bad_words_ids": [[3]]}),
        (False, {"num_beams": 1, "min_length": 0}),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        assert main(["generate", *given]) == 0
        assert ("num_beams, bad_words_ids of" in capsys.readouterr().err) == wanted


def test_directories_that_are_no_models_are_refused(tmp_path: Path, model: Path, bare: Path, capsys: Any) -> None:
    assert "no directory" in refused(capsys, "generate", "--checkpoint", str(tmp_path / "none"), "--prompt", "x")
    assert "config.json" in refused(capsys, "generate", "--checkpoint", str(tmp_path), "--prompt", "x")
    assert "is a file" in refused(capsys, "generate", "--checkpoint", __file__, "--prompt", "x")
    for command in (("generate", "--prompt", "x"), ("eval", "--data", __file__)):
        (saved := tmp_path / "outputs/checkpoint-500").mkdir(parents=True, exist_ok=True)
        (saved / "config.json").touch()
        told = refused(capsys, command[0], "--checkpoint", str(tmp_path / "outputs"), *command[1:])
        assert str(saved) in told.split("fix: ")[1]
        for given in ("Qwen/Qwen3-0.6B", str(tmp_path / "models--x--y")):
            (snapshot := tmp_path / "models--x--y/snapshots/1f").mkdir(parents=True, exist_ok=True)
            (snapshot / "config.json").touch()
            fix = f"hf download {given} --local-dir" if given.startswith("Qwen") else f"{snapshot}"
            assert fix in refused(capsys, command[0], "--checkpoint", given, *command[1:]).split("fix: ")[1]
        (of_the_maker := tmp_path / "original").mkdir(exist_ok=True)
        (of_the_maker / "consolidated.00.pth").touch()
        told = refused(capsys, command[0], "--checkpoint", str(of_the_maker), *command[1:])
        assert "consolidated.00.pth is in the format of the model's maker" in told.split("fix: ")[1]
    assert "--checkpoint" in refused(capsys, "generate", "--prompt", "x")
    assert "tokenizer" in refused(capsys, "generate", "--checkpoint", str(bare), "--prompt", "x")
    assert "tokenizer" in refused(capsys, "generate", "--checkpoint", str(bare), "--prompts", __file__, "--stop", "x")
    values = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "mamba"}))
    assert "mamba" in refused(capsys, "generate", "--checkpoint", str(tmp_path), "--prompt", "x")


def test_a_file_of_somebody_else_is_not_replaced(model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    given = ("--checkpoint", str(model), "--prompt", "x", "--output", str(tmp_path / "notes.txt"))
    assert "notes.txt" in refused(capsys, "generate", *given)
    for _ in range(2):  # its own are
        out = tmp_path / "answers.jsonl"
        run(capsys, *given[:-1], str(out), "--max-new-tokens", "2")
        assert len(out.read_text().splitlines()) == 1
    assert main(["generate", *given[:-1], "/dev/full"]) == 2
    assert "\nbmburst generate: --output /dev/full: cannot be written: No space" in capsys.readouterr().err

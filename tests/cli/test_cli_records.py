"""Fine-tuning data from the command line: built ahead or by the run, refused before any rank starts."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from bmburst.cli import CommandParser, main
from bmburst.cli.eval import configure, resolve_options
from bmburst.data import TokenFile
from bmburst.train.resolve import check_resumable, resolve, write_run_config
from tests import chat, tiny
from tests.cli.commands import refused
from tests.refusals import says


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model, its chat tokenizer and conversations."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", tiny.config(vocab_size=chat.VOCAB, max_position_embeddings=256))
    chat.directory(tmp_path / "model", chat.MARKED)
    chat.write(tmp_path / "chats.jsonl", *chat.records(40))
    return tmp_path


def train(*argv):
    options = "--nproc 2 --steps 2 --batch-size 2 --sequence-length 128 --eval-sequences 2 --sample-tokens 4"
    return ["train", *options.split(), "--init-from", "model", *argv]


@pytest.mark.long
def test_conversations_are_trained_on_as_they_are(here, capfd):
    assert main(train("--data", "chats.jsonl", "--output", "runs/a")) == 0
    made = json.loads(Path("runs/a/config.json").read_text())
    assert (made["pack"], made["data"]["tokenizer"]) == ("documents", "model")
    corpus, *others = Path("runs/tokens").glob("*.tokens")
    assert not others and TokenFile.open(corpus).loss_mask is not None
    assert len(Path("runs/a/metrics.jsonl").read_text().splitlines()) == 2
    assert Path("runs/a/sample.txt").read_text()
    # The same tokens from a file that was built ahead, with text beside them.
    assert main(["data", "--input", "chats.jsonl", "--tokenizer", "model", "--output", "chats.tokens"]) == 0
    says(capfd.readouterr().out, "40 records", "bytes of answers", "tokens", "###", lines=99)
    (here / "book.txt").write_text("once upon a time. " * 60)
    (here / "mix.yaml").write_text(
        "sources:\n- {path: chats.tokens, weight: 3}\n- {path: book.txt, weight: 1}\n- {path: chats.jsonl, weight: 1}\n"
    )
    assert main(train("--data", "mix.yaml", "--output", "runs/b")) == 0
    assert main(["train", "--resume", "--output", "runs/b", "--steps", "3"]) == 0
    assert len(Path("runs/b/metrics.jsonl").read_text().splitlines()) == 3


def test_the_tokenizer_moves_with_its_model(here):
    was = resolve((), {"data.source": "chats.jsonl", "init_from": "model", "sequence_length": 128})
    (here / "run").mkdir()
    file = write_run_config(was, here / "run")
    (here / "model").rename(here / "moved")
    now = resolve((file,), {"init_from": "moved"})
    assert (was.data.tokenizer, now.data.tokenizer) == ("model", "moved")
    check_resumable(was, now, here / "run")
    assert resolve((file,), {"init_from": "moved", "data.tokenizer": "other"}).data.tokenizer == "other"


def test_pack_and_tokenizer_that_are_given_are_kept(here):
    given = {"data.source": "chats.jsonl", "init_from": "model", "sequence_length": 128}
    assert resolve((), given).pack == "documents"
    assert resolve((), given | {"pack": "stream"}).pack == "stream"
    assert resolve((), given | {"data.tokenizer": "other"}).data.tokenizer == "other"
    assert resolve((), given | {"data.source": "stdlib"}).pack == "stream"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "chats.jsonl:41 | not valid JSON"),
        ({"a": 1}, "chats.jsonl:41 | no known key"),
        ({"messages": [{"content": "x"}]}, "chats.jsonl:41 | role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "chats.jsonl:41 | chat template | robot"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_ranks")
def test_a_bad_line_is_refused_before_ranks_start(here, capsys, line, words):
    chat.write(here / "chats.jsonl", *chat.records(40), line)
    says(refused(capsys, *train("--data", "chats.jsonl", "--output", "runs/a")), words, "fix: ")
    says(refused(capsys, "data", "--input", "chats.jsonl", "--tokenizer", "model", "--output", "x.tokens"), words)
    (here / "mix.yaml").write_text("sources: [{path: chats.jsonl, weight: 3}]\n")
    says(refused(capsys, *train("--data", "mix.yaml", "--output", "runs/a")), words)
    mixed = refused(capsys, "data", "--input", "mix.yaml", "--tokenizer", "model", "--output", "x.tokens")
    says(mixed, "mix.yaml is a mixture | fix: bmburst train --data mix.yaml")


@pytest.mark.usefixtures("no_ranks")
def test_what_else_is_refused_before_ranks_start(here, capsys):
    run = train("--output", "runs/a")
    says(refused(capsys, *run, "--data", "none.jsonl"), "none.jsonl", "no such file", "fix: ")
    found = refused(capsys, *run, "--data", "chats.jsonl", "--sequence-length", "8")
    says(found, "chats.jsonl", "no record", "sequence_length 8", "fix: ")
    says(
        refused(capsys, *run, "--data", "chats.jsonl", "--data.tokenizer", "bytes"), "chats.jsonl:1", "no chat template"
    )
    chat.directory(here / "model", None)
    told = refused(capsys, *run, "--data", "chats.jsonl")
    says(told, "chats.jsonl:1", "'model'", "no chat template", "fix: ", "--chat-template")
    (here / "mix.yaml").write_text("sources: [{path: chats.jsonl, weight: 0}]\n")
    says(refused(capsys, *run, "--data", "mix.yaml"), "mix.yaml", "weight 0", "above 0", "fix: ")
    (here / "mix.yaml").write_text("sources: [{path: gone.jsonl, weight: 1}]\n")
    says(refused(capsys, *run, "--data", "mix.yaml"), "gone.jsonl", "no such file", "fix: ")


def test_the_length_filter_and_its_report(here, capsys):
    command = ["data", "--input", "chats.jsonl", "--tokenizer", "model", "--output", "chats.tokens"]
    told = refused(capsys, *command, "--max-tokens", "8")
    says(told, "all 40", "--max-tokens 8", "fix: ")
    assert not Path("chats.tokens").exists()
    assert main([*command, "--max-tokens", "60"]) == 0
    out = capsys.readouterr().out
    kept = TokenFile.open("chats.tokens")
    assert max(b - a for a, b in zip(kept.document_offsets, kept.document_offsets[1:], strict=False)) <= 60
    says(out, f"{kept.document_count} records", f"left out: {40 - kept.document_count} records", "60", lines=99)
    assert max(map(len, out.splitlines()[1:])) <= 80
    (here / "a.txt").write_text("abc")
    says(
        refused(capsys, "data", "--input", "a.txt", "--output", "y", "--max-tokens", "60"), "a.txt", "records", "fix: "
    )


@pytest.mark.usefixtures("no_ranks")
def test_data_of_no_evaluation_are_refused_before_ranks_start(here, capfd):
    """Preference pairs, as records and as tokens that were built ahead; and tokens that the model has not."""
    (here / "pairs.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    assert main(["data", "--input", "pairs.jsonl", "--tokenizer", "model", "--output", "pairs.tokens"]) == 0
    capfd.readouterr()
    for data in ("pairs.jsonl", "pairs.tokens"):
        given = ["eval", "--checkpoint", "model", "--data", data, "--tokenizer", "model", "--nproc", "2"]
        says(refused(capfd, *given), data, "preference pairs", "--dpo.beta")
    Tokenizer(models.WordLevel({"fox": 5000, "</s>": 1}, unk_token="fox")).save(str(here / "words.json"))
    (here / "text.md").write_text("the quick brown fox")
    chat.write(here / "rows.jsonl", {"text": "the quick brown fox"})
    for data in ("text.md", "rows.jsonl", "text.md"):  # the last time its tokens are in the cache
        given = ["eval", "--checkpoint", "model", "--data", data, "--tokenizer", "words.json", "--nproc", "2"]
        says(refused(capfd, *given), f"'{data}' has token id 5000", f"vocab_size is {chat.VOCAB}", "fix: ")


def test_evaluation_counts_answers_alone(here, capfd):
    """Of a mixture, with a template from a file; records are packed apart unless it is said otherwise.

    One record is longer than a sequence: that it does not count is said once.
    """
    chat.write(here / "chats.jsonl", *chat.records(40), {"prompt": "p", "completion": "x" * 200})
    (here / "books").mkdir()
    (here / "books" / "book.txt").write_text("once upon a time. " * 60)
    (here / "books" / "more.json").write_text("[]")
    (here / "mix.yaml").write_text("sources: [{path: chats.jsonl, weight: 3}, {path: books, weight: 1}]\n")
    given = ["eval", "--checkpoint", "model", "--data", "mix.yaml", "--tokenizer", "model", "--nproc", "2"]
    chat.directory(here / "model", None)
    says(refused(capfd, *given), "chats.jsonl:1", "no chat template", "--chat-template")
    (here / "own.jinja").write_text(chat.MARKED)
    assert main([*given, "--chat-template", "own.jinja", "--sequence-length", "128"]) == 0
    out, told = capfd.readouterr()
    assert "nan" not in out and int(out.split("tokens")[-1].split()[0].replace(",", "")) > 18 * 60
    assert told.count("left out: 1 record longer than sequence_length 128\n") == 1
    assert told.count("1 .json") == 1
    parser = CommandParser(prog="bmburst eval", description="")
    configure(parser)
    packs = [resolve_options(parser.read([*given[1:], *more])).pack for more in ([], ["--pack", "stream"])]
    assert packs == ["documents", "stream"]

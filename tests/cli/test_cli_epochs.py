"""`bmburst train --epochs`: the steps are counted and the validation files are read before ranks start."""

from bmburst.cli import main, training
from tests import chat, tiny
from tests.cli.commands import refused
from tests.refusals import says


def test_the_command_counts_the_steps_of_epochs(launches, tmp_path, capsys, monkeypatch):
    resolved, resolve = [], training.resolve
    monkeypatch.setattr(training, "resolve", lambda *given, **more: resolved.append(given) or resolve(*given, **more))
    tiny.save(tmp_path / "model", vocab_size=chat.VOCAB, max_position_embeddings=97)
    chat.directory(tmp_path / "model", chat.MARKED)
    chat.write(tmp_path / "train.jsonl", *({"prompt": "a" * 40, "completion": f"{n}" * 40} for n in range(9)))
    chat.write(tmp_path / "math.jsonl", {"prompt": "a", "completion": "b"})
    argv = ["train", "--init-from", "model", "--data", "train.jsonl", "--sequence-length", "97", "--batch-size", "2"]
    assert main([*argv, "--data.validation", "math.jsonl", "--epochs", "2", "--output", "out"]) == 0
    made = launches.config()
    assert len(resolved) == 1  # what it asks for is decided once, and only the steps are filled in
    assert (made["epochs"], made["steps"]) == (2, 9)  # 9 sequences of one record
    assert (made["schedule"]["warmup_steps"], made["data"]["held_out_fraction"]) == (10, 0)
    assert "2 epochs are 9 steps" in capsys.readouterr().err
    assert main([*argv, "--epochs", "3", "--schedule.warmup_steps", "4", "--output", "given"]) == 0
    assert launches.config()["schedule"]["warmup_steps"] == 4
    text = refused(capsys, *argv, "--epochs", "2", "--steps", "3")
    assert "both given" in text
    (tmp_path / "wrong.jsonl").write_text('{"messages": []}\n')
    chat.write(tmp_path / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    text = refused(capsys, *argv, "--data.validation", "pairs.jsonl", "--output", "other")
    says(text, "data pairs.jsonl: holds preference pairs | fix: ")  # by its own name, not that of its tokens
    assert "wrong.jsonl:1" in refused(capsys, *argv, "--data.validation", "wrong.jsonl", "--output", "other")
    assert "no such file" in refused(capsys, *argv, "--data.validation", "a=gone.jsonl")

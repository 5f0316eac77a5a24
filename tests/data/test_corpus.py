"""From what the user names to a token file: by default the standard library, cached, and by `bmburst data`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from bmburst.cli.files import configure_data, run_data
from bmburst.data import ByteTokenizer, PackedSequences, TokenFile, open_corpus
from bmburst.record_format import RecordFormat
from tests.refusals import refused, says

COMMAND = """
import argparse, sys
from bmburst.cli.files import configure_data, run_data
from bmburst.errors import UserError
parser = argparse.ArgumentParser()
configure_data(parser)
try:
    sys.exit(run_data(parser.parse_args()))
except UserError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    (path / "a.txt").write_text("hello héllo")
    (path / "b.jsonl").write_text('{"text": "one", "body": "eins"}\n{"text": "two", "body": "zwei"}\n')
    return path


def texts_of(file):
    ids = np.split(np.asarray(file.tokens), file.document_offsets[1:-1])
    return [ByteTokenizer().decode(part) for part in ids]


def test_standard_library_is_the_default(tmp_path):
    file = open_corpus("stdlib", None, tmp_path)
    assert file.text_bytes > 5_000_000
    found = set(texts_of(file))
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "json/decoder.py", "asyncio/base_events.py"):
        assert (root / name).read_bytes().decode() in found
    for split in ("train", "held_out"):
        assert len(PackedSequences(file, split=split, sequence_length=4096)) >= 10


@pytest.mark.parametrize("named", [Path("stdlib"), "./stdlib"])
def test_what_only_is_called_as_the_standard_library(tmp_path, folder, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    folder.rename("stdlib")
    assert texts_of(open_corpus(named, "bytes", "cache"))[0] == "hello héllo"
    assert texts_of(open_corpus([named], "bytes", "cache"))[0] == "hello héllo"
    made = open_corpus(named, "bytes", "cache").path
    shutil.rmtree("stdlib")
    made.rename("stdlib")
    assert texts_of(open_corpus(named, "bytes", "unused"))[0] == "hello héllo"


def test_second_time_is_the_cache_and_a_change_is_seen(tmp_path, folder):
    cache = tmp_path / "cache"
    first = open_corpus(folder, "bytes", cache)
    assert texts_of(first) == ["hello héllo", "one", "two"]
    stamp = first.path.stat().st_mtime_ns
    second = open_corpus(str(folder), None, cache)
    assert (second.path, second.path.stat().st_mtime_ns) == (first.path, stamp)
    assert texts_of(open_corpus(folder, "bytes", cache, form=RecordFormat(text_field="body")))[1:] == ["eins", "zwei"]
    (folder / "a.txt").write_text("HELLO héllo")  # as long as before
    os.utime(folder / "a.txt", ns=(1, 1))
    assert texts_of(open_corpus(folder, "bytes", cache))[0] == "HELLO héllo"
    assert first.fingerprint == second.fingerprint != open_corpus(folder, "bytes", cache).fingerprint


def test_what_is_left_out_of_a_directory_is_told(tmp_path, folder):
    (folder / "bad.txt").write_bytes(b"\xff")
    told = []
    assert texts_of(open_corpus(folder, "bytes", tmp_path / "cache", on_skip=told.append))[0] == "hello héllo"
    assert len(told) == 1
    assert "bad.txt" in told[0]


@pytest.mark.parametrize("is_cached", [False, True])
def test_kinds_of_files_that_a_directory_leaves_out_are_counted_in_one_walk(tmp_path, folder, is_cached):
    names = "b.JSON c.jsonl.lz4 sub/d.gz e.arrow sub/f.json README .hidden.json"
    for name in (*names.split(), "g." + "x" * 30):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / "link.txt").symlink_to("nowhere")
    told = []
    if is_cached:
        open_corpus(folder, "bytes", tmp_path / "cache")
    with patch("os.walk", wraps=os.walk) as walk:
        open_corpus([folder, folder / "a.txt"], "bytes", tmp_path / "cache", on_skip=told.append)
    assert walk.call_count == 1
    (line,) = told
    says(line, folder, 8, "2 .json", "1 .jsonl.lz4", "1 .gz", "1 .arrow", "1 without suffix", "1 broken link", lines=1)
    assert "hidden" not in line
    assert "xxx" not in line


def test_several_ranks_at_once(tmp_path, folder):
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(lambda _: open_corpus([folder], "bytes", tmp_path / "cache"), range(8)))
    assert len({file.path for file in files}) == 1
    assert {tuple(texts_of(file)) for file in files} == {("hello héllo", "one", "two")}
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_token_file_is_used_as_it_is(tmp_path, folder):
    made = open_corpus(folder, "bytes", tmp_path / "cache")
    path = made.path.rename(tmp_path / "prepared")
    for tokenizer in ("bytes", None):
        file = open_corpus(path, tokenizer, tmp_path / "unused")
        assert (file.path, file.fingerprint) == (path, made.fingerprint)
    assert not (tmp_path / "unused").exists()
    path.write_bytes(path.read_bytes()[:-1])
    with refused("damaged", "prepared", "bytes", "bmburst data"):
        open_corpus(path, "bytes", tmp_path / "unused")
    with refused("not a text file", "prepared", "UTF-8", "leave it out"):
        open_corpus([path, folder], "bytes", tmp_path / "unused")


def test_token_file_of_another_tokenizer(tmp_path, folder):
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"</s>": 0, "x": 1}, unk_token="x"))
    words.save(str(tmp_path / "tokenizer.json"))
    path = open_corpus(folder, "bytes", tmp_path / "cache").path
    with refused("'bytes'", "tokenizer.json", "bmburst data --tokenizer"):
        open_corpus(path, str(tmp_path / "tokenizer.json"), tmp_path)
    made = open_corpus(folder, str(tmp_path / "tokenizer.json"), tmp_path / "cache")
    assert made.tokens[0] == 1
    # The same tokenizer under another name is the same tokenizer, which is found by that name from then on.
    for source in (made.path, folder):
        again = open_corpus(source, str(tmp_path), tmp_path / "cache")
        assert (again.path, again.fingerprint) == (made.path, made.fingerprint)
        assert again.tokenizer_name == str(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("gone.txt", "gone.txt | JSONL | 'stdlib'"),
        ("empty.txt", "empty | files"),
        ("folder", "folder | .txt | .jsonl | suffix | no files"),
        ("packed", "packed | 2 .jsonl.lz4 | 1 .json | .jsonl | .gz"),
    ],
)
def test_no_text(tmp_path, source, words):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "packed").mkdir()
    for name in ("a.jsonl.lz4", "b.jsonl.lz4", "c.json"):
        (tmp_path / "packed" / name).write_bytes(b"x")
    with refused(words):
        open_corpus(tmp_path / source, "bytes", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir() if (tmp_path / "cache").exists() else [])


def run_command(*args):
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, args)], capture_output=True, text=True, timeout=120, check=False
    )


def test_command(tmp_path, folder):
    (folder / "bad.txt").write_bytes(b"\xff")
    (folder / "more.arrow").write_bytes(b"PAR1")
    output = tmp_path / "new" / "out.tokens"
    done = run_command("--input", folder, folder / "a.txt", "--output", output, "--text-field", "body")
    assert done.returncode == 0, done.stderr
    assert "4 documents" in done.stdout
    assert "left out: " in done.stderr
    assert "bad.txt" in done.stderr
    assert "1 .arrow" in done.stderr
    assert texts_of(TokenFile.open(output)) == ["hello héllo", "eins", "zwei", "hello héllo"]


def test_command_refuses(tmp_path, folder):
    (folder / "b.jsonl").write_text(json.dumps({"text": "a"}) + "\n{]\n")
    done = run_command("--input", folder, "--output", tmp_path / "out")
    assert done.returncode
    says(done.stderr, "b.jsonl:2")
    assert not (tmp_path / "out").exists()
    parser = argparse.ArgumentParser()
    configure_data(parser)
    args = parser.parse_args(["--input", str(folder), "--output", str(tmp_path / "out"), "--tokenizer", "byts"])
    with refused("tokenizer", "'byts'", "'bytes'", "tokenizer.json"):
        run_data(args)


def test_a_damaged_file_of_the_cache_says_to_remove_it(tmp_path, folder):
    made = open_corpus(folder, "bytes", tmp_path / "a cache")
    whole = made.path.read_bytes()
    made.path.write_bytes(whole[:-1])
    with refused("damaged", f"fix: rm '{made.path}'"):
        open_corpus(folder, "bytes", tmp_path / "a cache")
    made.path.unlink()
    assert open_corpus(folder, "bytes", tmp_path / "a cache").path.read_bytes() == whole

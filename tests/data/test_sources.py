"""Every text that is named is read, once, in a fixed order; what cannot be read is said or refused."""

import bz2
import errno
import gzip
import json
import lzma
import random
import tarfile
import tracemalloc
from pathlib import Path

import pyarrow
import pytest

from bmburst.data.documents import read_documents, with_others
from bmburst.data.sources import PIECE_BYTES, find_sources
from bmburst.errors import UserError
from bmburst.outputs import TRAINING_LOCK
from tests.refusals import refused, says


def texts(*inputs, **options):
    """Return (name, text) of every document."""
    return [(d.name, "".join(d.pieces)) for d in read_documents(find_sources(inputs), **options)]


def refuse(*inputs, words, **options):
    with refused(*words):
        texts(*inputs, **options)


def test_directory_is_searched_sorted_and_filtered(tmp_path):
    for name in ("b/x.txt", "b/a.md", "a.py", "c.TXT", "z.bin", ".hidden.txt", ".git/x.txt", "__pycache__/y.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}')
    found = [text for _, text in texts(tmp_path)]
    assert found == ["a.py", "b/a.md", "b/x.txt", "c.TXT", "one", "two"]
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    (tmp_path / "more").symlink_to(tmp_path / "b")
    names = [Path(name).relative_to(tmp_path).as_posix() for name, _ in texts(tmp_path)]
    assert [name for name in names if name.startswith("more")] == ["more/a.md", "more/x.txt"]
    assert len(names) == len(found) + 2


def test_runs_that_lie_in_the_data_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    alone = texts(tmp_path)
    for run in ("runs/first", "runs/second"):
        checkpoint = tmp_path / run / "checkpoints" / "step-000001"
        checkpoint.mkdir(parents=True)
        for name in (TRAINING_LOCK, "sample.txt", "metrics.jsonl"):
            (tmp_path / run / name).write_text("{}")
        (checkpoint / "README.md").write_text("two")
    assert texts(tmp_path) == alone
    said = []
    find_sources([tmp_path], said.append)
    says("\n".join(said), "2 run folders | runs/first, runs/second")


def test_a_data_set_is_read_without_its_card_and_its_other_splits(tmp_path):
    """As on the Hugging Face hub, splits are told by names, if one is "train"; what is left out is said."""
    names = ("data/train-00000-of-00002.jsonl", "data/test-00000-of-00001.jsonl", "dev/x.jsonl", "trainer.jsonl")
    more = ("is_test=0/0.jsonl", "split=test/0.jsonl")  # folders of partitions
    for name in (*names, *more, "README.md", "test/train.jsonl"):
        path = tmp_path / "set" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    kept = [names[0], more[0], "test/train.jsonl", names[3]]
    assert [text for _, text in texts(tmp_path / "set")] == kept
    said = []
    find_sources([tmp_path / "set"], said.append)
    words = "1 file | README.md | 3 files | other splits than train | --data.validation"
    says("\n".join(said), words, names[1], names[2], more[1])
    for name in kept:
        (tmp_path / "set" / name).unlink()
    assert sorted(text for _, text in texts(tmp_path / "set")) == sorted(
        (*names[1:3], more[1])
    )  # nothing else is there
    (tmp_path / "set" / "a.py").write_text("code")
    assert "code" in [text for _, text in texts(tmp_path / "set")]


def test_several_configurations_of_a_data_set_are_not_mixed(tmp_path):
    """As those of openai/gsm8k, whose rows are the same questions: both were learned."""
    root, other = tmp_path / "set", tmp_path / "one"
    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl", "socratic/test-0.jsonl"):
        for folder in (root, other):
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(json.dumps({"text": name}) + "\n")

    def card(*configs):
        front = f"---\nlicense: mit\nconfigs: {json.dumps(configs)}\n---\n# A data set\n"
        (root / "README.md").write_text(front)

    main = {"config_name": "main", "data_files": [{"split": "train", "path": "main/train-*"}]}
    card(main, {"config_name": "socratic", "data_dir": "socratic"})
    with refused(f"{root} | several configurations | main, socratic | such as {root}/main | fix: | Mixtures"):
        texts(root)
    assert [text for _, text in texts(root / "main")] == ["main/train-0.jsonl"]
    whole = {"config_name": "all", "data_files": ["main/train-0.jsonl", "./socratic/*"], "default": True}
    for configs, named in (((main, whole), "main"), ((whole, main), "main/train-0.jsonl")):
        card(*configs)
        with refused("several", ", ".join(each["config_name"] for each in configs), f"such as {root}/{named}"):
            texts(root)
    both = ["main/train-0.jsonl", "socratic/train-0.jsonl"]
    for configs in (
        [main],
        [main, {"config_name": "gone", "data_files": "gone/*"}],
        [main, main | {"config_name": "b"}],
    ):
        card(*configs)
        assert [text for _, text in texts(root)] == both
    for text in ("", "---", "---\nconfigs: {\n---\n", "---\nconfigs: [1, {config_name: 2}]\n---\n", "a\n---\n1\n---\n"):
        (root / "README.md").write_text(text)
        assert [text for _, text in texts(root)] == both
    (root / "README.md").write_bytes(b"---\n\xff\n---\n")
    assert [text for _, text in texts(root)] == both == [text for _, text in texts(other)]


def test_the_kind_of_a_named_file_is_told_by_its_beginning(tmp_path):
    """As data sets lie in caches; tables would be learned as plain text, marks of columns and all."""
    line = json.dumps({"text": "one"}) + "\n"
    for name in ("a3f9", "rows.jsonlines", "more.jl"):
        (tmp_path / name).write_text(line)
        assert [text for _, text in texts(tmp_path / name)] == ["one"]
    (tmp_path / "a.txt").write_text(line)
    assert [text for _, text in texts(tmp_path / "a.txt")] == [line]
    for name, reader in (("x.csv", "read_csv"), ("x.tsv", "read_table")):
        (tmp_path / name).write_text("prompt,completion\n1,2\n")
        words = "plain text | JSONL or Parquet | .txt | to_json('x.jsonl'"
        refuse(tmp_path / name, words=[name, words, f"{reader}('{name}', dtype=str"])


def test_standard_library_is_neither_packages_nor_tests(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with refused("library sources", "--data"):
        find_sources(["stdlib"])
    for name in (
        "b.py",
        "a/c.py",
        "site-packages/numpy.py",
        "dist-packages/x.py",
        "test/t.py",
        "a/tests/t.py",
        "x.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    assert texts("stdlib") == [("a/c.py", "a/c.py"), ("b.py", "b.py")]


def test_where_one_may_not_look_is_said(tmp_path, monkeypatch):
    refuse(tmp_path / ("x" * 300), words=["cannot read", "xxx': File name too long"])

    def denied(_):  # root, who may look everywhere, runs tests too
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    refuse(tmp_path / "a.txt", words=["cannot read", "a.txt': Permission denied"])


def test_several_inputs_keep_their_order(tmp_path):
    for name in ("2.txt", "1.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "noext").write_text("any suffix")
    found = texts(tmp_path / "2.txt", tmp_path / "noext", tmp_path / "1.txt")
    assert [text for _, text in found] == ["2.txt", "any suffix", "1.txt"]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "no newline: é"])
def test_large_file_comes_in_pieces_and_whole(tmp_path, ending):
    rng = random.Random(0)
    alphabet = "a é世🙂"
    lines = ("".join(rng.choices(alphabet, k=rng.randrange(200))) + ending for _ in range(4000))
    text = "".join(lines) * 10
    path = tmp_path / "large.txt"
    path.write_bytes(text.encode())
    assert len(text.encode()) > 6 * PIECE_BYTES
    (document,) = read_documents(find_sources([path]))
    pieces = list(document.pieces)
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= 3 * PIECE_BYTES
    if ending.endswith("\n"):
        assert all(piece.endswith("\n") for piece in pieces)


def test_file_of_one_piece_is_not_cut(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x\n\n" * (PIECE_BYTES // 3) + b"y")
    (document,) = read_documents(find_sources([path]))
    assert len(list(document.pieces)) == 1


def test_text_keeps_its_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\r\nb\rc\n".encode())
    assert texts(tmp_path)[0][1] == "\ufeffa\r\nb\rc\n"


def test_jsonl_field_and_half_characters(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"body": "héllo", "text": 3}\n   \n{"body": "x\\ud800y"}\n', encoding="utf-8")
    assert texts(path, text_field="body") == [(f"{path}:1", "héllo"), (f"{path}:3", "x?y")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', ["not valid JSON"]),
        (b"[1]", ["not a JSON object", "[1]", '"text"']),
        (b'[{"role": "user", "content": "a"}]', ["not a JSON object", '{"messages": [...]}']),
        (b'{"body": "a"}', ["no field 'text'", "'body'", "--text-field"]),
        (b'{"input_ids": [3], "labels": [3]}', ["token ids (input_ids)", "fix: give the text", "decode"]),
        (b'{"txt": "a"}', ["no field 'text'", "'txt'", "did you mean 'text'"]),
        (
            b'{"prompt": "a", "response": "b"}',
            ["no field 'text'", "'response'; beside 'prompt', 'completion' is missing"],
        ),
        (b'{"text": null}', ["must be a string", "null"]),
        (b'{"text": "\xff"}', ["byte 10", "not UTF-8", "iconv -f ENCODING", "GB18030"]),  # not all others are UTF-16
        (b"[" * 100_000, ["not valid JSON"]),
    ],
)
def test_malformed_jsonl_names_file_and_line(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    refuse(path, words=[f"{path}:2", *words])
    refuse(tmp_path, words=[f"{path}:2", *words])


def test_a_pdf_is_named_with_what_makes_text_of_it(tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    refuse(path, words=["a.pdf", "is a PDF", "pdftotext"])


ROWS = [{"text": "a"}, {"text": "b\u2028"}]
SHAPES = {
    "array": json.dumps(ROWS, indent=1),
    "array in a line": json.dumps(ROWS),
    "lines": "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "data": json.dumps({"version": "1.1", "data": ROWS}, indent=1),
    "train": json.dumps({"train": ROWS, "test": [{"text": "c"}]}),
    "objects": "\ufeff" + "\n".join(json.dumps(row, indent=2) for row in ROWS) + "\n",
    "objects without a line between": "".join(map(json.dumps, ROWS)),
    "texts": json.dumps(["a", "b\u2028"], indent=1),
    "data of texts": json.dumps({"data": ["a", "b\u2028"]}),
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_each_shape_of_json_is_read_as_the_same_documents(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="utf-8", newline="")
    assert [read for _, read in texts(tmp_path / "x.json")] == ["a", "b\u2028"]


@pytest.mark.parametrize("text", [json.dumps(ROWS[0]), json.dumps(ROWS[0], indent=1), '{"data": 3, "text": "a"}'])
def test_one_object_of_json_is_one_document(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert texts(tmp_path / "x.json") == [(f"{tmp_path / 'x.json'}:1", "a")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plain text", "not valid JSON"),
        ("3", "a JSON file of 3"),
        ("null", "a JSON file of null"),
        ('"text"', 'a JSON file of "text"'),
        ('{"data": [], "train": []}', "both data and train | keep one"),
        ('{"text":\n"a"}\n{"text": \n"b"', "not valid JSON | after line 3"),
        ('{"text":\n"a"} \n x', "not valid JSON | after line 3"),
        (b"PK\x03\x04\xff".decode("latin-1"), "not UTF-8"),
    ],
    ids=str,
)
def test_another_shape_of_json_is_refused_with_those_that_are_read(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    shapes = ["array of objects", "array of texts", '{"data": [...]}', '{"train": [...]}', "one object"]
    refuse(tmp_path / "x.json", words=["x.json", words, *shapes, "fix: "])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "element 1 | not a JSON object"),
        ('[{"text": "a"}, 2, "b", {"text": 3}, null]', "element 2 | 2 further lines | element 4 | element 5"),
        ('{"instances": [{"text": "a"}]}', "x.json:1 | no field 'text' | 'instances'"),
        ('{"text":\n"a"}\n\n{"txt":\n"b"}\n{"text": "c"}\n{}', "x.json:4 | 1 further line | x.json:7"),
    ],
    ids=str,
)
def test_every_bad_element_of_json_is_named(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    refuse(tmp_path / "x.json", words=[words, "fix: "])


def test_every_bad_line_of_text_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": 1}\n{"text": "b"}\n{bad\n{"text": "c"}\n\xff\n{}\n')
    refuse(path, words=[f"{path}:2", "string, got 1", "3 further lines", f"{path}:4", f"{path}:6", f"{path}:7"])
    path.write_bytes(b'{"text": "a"}\n{bad\n{"text": 1}\n')
    refuse(path, words=[f"{path}:2", "not valid JSON", "1 further line is malformed", f"{path}:3", "fix: "])


def test_a_search_for_bad_lines_that_ends_early_says_so():
    def check(name, value):
        if not value:
            raise UserError(f"{name}: empty")

    lines = [(f"x:{number}", number % 2) for number in range(2, 9)]
    found = with_others(UserError("x:1: empty\nfix: fill it"), iter(lines), check, 4)
    says(found, "x:1: empty; at least 2 further lines are malformed: x:2, x:4\n", "fix: fill it")
    says(with_others(UserError("x:1: empty"), iter(lines), check), "empty; 4 further lines")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_what_must_be_unpacked_or_converted_says_how(tmp_path):
    (tmp_path / "list.txt").write_text("[{}]")
    assert [read for _, read in texts(tmp_path / "list.txt")] == ["[{}]"]
    with tarfile.open(tmp_path / "whole", "w") as file:
        file.add(tmp_path / "list.txt")
    archive = (tmp_path / "whole").read_bytes()
    packs = {"a.tar": bytes, "a.tar.gz": gzip.compress, "a.tgz": gzip.compress}
    for name, data, words in (
        ("a.zip", b"PK\x03\x04\0", ["zip archive", "unzip"]),
        *((name, pack(archive), ["tar archive", "tar --extract"]) for name, pack in packs.items()),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 99)[:-20], ["damaged or cut off", "download"]),
        ("b.jsonl.zst", pyarrow.compress(b'{"text": "a"}' * 99, "zstd", asbytes=True)[:-9], ["b.jsonl.zst"]),
        ("a.parquet", b"PAR1\x15\0", ["Parquet", "JSONL"]),
        *((name, POINTER, ["Git LFS", "git lfs pull"]) for name in ("p.txt", "p.jsonl", "p.parquet", "p.json")),
        ("a.arrow", b"\xff\xff\xff\xff\xf0\0\0\0", ["Arrow file", "save_to_disk", "to_parquet"]),
    ):
        (tmp_path / name).write_bytes(data)
        refuse(tmp_path / name, words=[name, *words])


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files_are_read_as_they_are_unpacked(tmp_path, suffix):
    """Also by their first bytes alone, of text, and in a folder; the file is never in memory as a whole."""
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(
        suffix, lambda data: pyarrow.compress(data, "zstd", asbytes=True)
    )
    lines = [json.dumps({"text": f"{number} " + "x" * 9000}) for number in range(2500)]
    names = {f"a.jsonl{suffix}": lines, "b.jsonl": lines[:3], f"c.json{suffix}": lines[3:5]}
    for name, found in names.items():
        (tmp_path / name).write_bytes(pack("\n".join(found).encode()))
    (tmp_path / f"d.txt{suffix}").write_bytes(pack(b"plain text"))
    for name in (*names, f"d.txt{suffix}"):
        wanted = [json.loads(line)["text"] for line in names[name]] if name in names else ["plain text"]
        read = []
        tracemalloc.start()
        for number, document in enumerate(read_documents(find_sources([tmp_path / name]), on_read=read.append)):
            assert list(document.pieces) == [wanted[number]]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(read) == (tmp_path / name).stat().st_size
        assert number == len(wanted) - 1 and peak < 15_000_000
    assert len(list(texts(tmp_path))) == 2500 + 3 + 1  # .json of a folder is not read


def test_a_line_cut_short_and_one_of_another_shape(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "cut\n{"text": "b"}\n')
    refuse(path, words=[f"{path}:2", "Unterminated string"])
    path.write_text('{"question": "a"}\n')
    refuse(path, words=[f"{path}:1", "'question'", '"messages"', "--columns", "--messages-field"])


def test_what_is_not_text_is_refused_by_name_and_skipped_in_a_directory(tmp_path):
    late = b"a" * (PIECE_BYTES - 1) + "é".encode()  # a character over the edge of a block, then a bad one
    bad = {"latin.txt": b"caf\xe9 x", "zero.txt": b"a\0b\0", "cut.txt": "é".encode()[:1], "late.txt": late + b"\xff"}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "good.txt").write_bytes(late)
    at = {"latin.txt": 3, "zero.txt": 1, "cut.txt": 0, "late.txt": len(late)}
    for name in bad:
        refuse(tmp_path / name, words=[name, f"byte {at[name]} is"])
    skipped = []
    assert [name for name, _ in texts(tmp_path, on_skip=skipped.append)] == [str(tmp_path / "good.txt")]
    assert len(skipped) == len(bad)


def test_unreadable_file(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    files = find_sources([tmp_path, tmp_path / "a.txt"])
    (tmp_path / "a.txt").unlink()
    skipped = []
    assert list(read_documents(files[:1], on_skip=skipped.append)) == []
    assert "a.txt" in skipped[0]
    with refused("cannot read", "a.txt", "No such file"):
        list(read_documents(files[1:]))


def test_nothing_there(tmp_path):
    refuse(tmp_path / "gone.txt", words=["gone.txt", "stdlib"])
    refuse("https://host/a.jsonl", words=["'https://host/a.jsonl'", "fix: download it"])
    refuse(str(tmp_path / "*.txt"), words=["*.txt", "fix: give the folder", "not expanded"])
    refuse("owner/name", words=["fix: ", "hf download --repo-type dataset owner/name"])
    (tmp_path / "a.bin").write_text("x")
    refuse(tmp_path, words=[tmp_path, ".txt"])


def test_read_bytes_add_up(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * (3 * PIECE_BYTES + 7))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "é"}) + "\n\n")
    count = []
    texts(tmp_path, on_read=count.append)
    assert sum(count) == sum(path.stat().st_size for path in tmp_path.iterdir())

"""Records with a user's columns, fields, roles and weights give the tokens of the same records with our names."""

import datetime
import json
import sys
from dataclasses import fields, replace

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from bmburst.cli.program import main
from bmburst.data import find_corpus, load_tokenizer, open_corpus, require_messages
from bmburst.data.chat import RecordEncoder
from bmburst.data.record import Record
from bmburst.data.records import hold_records, read_records
from bmburst.data.report import notes_of
from bmburst.data.sources import find_sources
from bmburst.record_format import RecordFormat
from bmburst.train.config import DataConfig, TrainConfig
from bmburst.train.text import check_text
from tests import chat
from tests.refusals import refused, says

TALK = chat.conversation("hi", "ok", "more", "yes")
WEIRD = [{"who": ("client", "bot")[at % 2], "said": each["content"]} for at, each in enumerate(TALK)]
MAPPED = {"messages_field": "dialog", "role_field": "who", "content_field": "said"}
ROLES = ("client=user", "bot=assistant")


def read(path, **names):
    return list(read_records(find_sources([path]), form=RecordFormat(**names)))


@pytest.mark.parametrize(
    ("line", "names", "same"),
    [
        ({"dialog": WEIRD}, {**MAPPED, "roles": ROLES}, {"messages": TALK}),
        (
            {"dialog": [{"who": ("human", "gpt")[at % 2], "said": m["said"]} for at, m in enumerate(WEIRD)]},
            MAPPED,  # speakers that are known need no mapping
            {"messages": TALK},
        ),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            {"roles": ROLES},
            {"messages": [chat.conversation("", "x")[1]]},
        ),
        ({"q": "a", "a": "b"}, {"columns": ("prompt=q", "completion=a")}, {"prompt": "a", "completion": "b"}),
        ({"q": "a", "a": "b"}, {"columns": ("instruction=q", "output=a")}, {"instruction": "a", "output": "b"}),
        (
            {"prompt": "x", "q": "a", "a": "b"},
            {"columns": ("prompt=q", "completion=a")},
            {"prompt": "a", "completion": "b"},
        ),
        (
            {"dialog": TALK[:1], "good": TALK[1], "bad": TALK[3]},
            {"messages_field": "dialog", "columns": ("chosen=good", "rejected=bad")},
            {"messages": TALK[:1], "chosen": TALK[1], "rejected": TALK[3]},
        ),
    ],
    ids=str,
)
def test_names_are_mapped(tmp_path, line, names, same):
    path, other = chat.write(tmp_path / "x.jsonl", line), chat.write(tmp_path / "y.jsonl", same)
    assert hold_records(find_sources([path]), form=RecordFormat(**names))
    (found,), (wanted,) = read(path, **names), read(other)
    assert [replace(each, name="") for each in found.records] == [replace(each, name="") for each in wanted.records]


@pytest.mark.parametrize(
    ("line", "names", "words"),
    [
        ({"dialog": WEIRD, "dialogue": 1}, {**MAPPED, "messages_field": "dialogue"}, "messages is 1 | list"),
        ({"messages": TALK}, MAPPED, "no messages in 'dialog' | 'messages' | --data.messages_field"),
        ({"dialog": WEIRD}, MAPPED, '"client" | human'),
        ({"messages": TALK}, {"columns": ("weight=scoer",)}, "'scoer' | --data.columns"),
        ({"messages": TALK}, {"text_field": "body"}, "'body' | --data.text_field"),
    ],
    ids=str,
)
def test_a_name_that_the_data_do_not_have_is_refused(tmp_path, line, names, words):
    with refused(words, "fix: "):
        read(chat.write(tmp_path / "x.jsonl", line), **names)


OF_MESSAGES = {"role_field": "who", "content_field": "said", "roles": ROLES, "learned_roles": ("user",)}


@pytest.mark.parametrize("name", OF_MESSAGES)
@pytest.mark.parametrize("command", ["data", "train"])
def test_names_of_messages_are_refused_for_records_without_messages(tmp_path, capsys, command, name):
    path, value = chat.write(tmp_path / "x.jsonl", {"prompt": "a", "completion": "b"}), ",".join([*OF_MESSAGES[name]])
    value = OF_MESSAGES[name] if isinstance(OF_MESSAGES[name], str) else value
    argv = {
        "data": [f"--input={path}", f"--output={tmp_path / 'o'}", f"--{name}={value}"],
        "train": [f"--data={path}", f"--output={tmp_path / 'o'}", "--nproc=1", f"--data.{name}={value}"],
    }
    assert main([command, *argv[command]]) == 2
    says(capsys.readouterr().err, f"x.jsonl | no record has messages | {name} | fix: leave {name} out")
    assert not (tmp_path / "o").exists()


def test_a_run_that_began_with_names_without_effect_goes_on(tmp_path):
    path = chat.write(tmp_path / "x.jsonl", *({"prompt": "a", "completion": each} for each in "bc"))
    config = TrainConfig(data=DataConfig(source=str(path), learned_roles=("user",)), pack="documents", resume=True)
    validated = replace(config.data, validation=(f"again={path}",))
    for each in (config, config.replace(data=validated)):
        check_text(each)
        with refused("no record has messages | learned_roles"):
            check_text(each.replace(resume=False))


@pytest.mark.parametrize(
    "line",
    [
        {"messages": TALK},
        {"instruction": "a", "output": "b"},
        {"prompt": TALK[:1], "completion": TALK[1:2]},
        {"prompt": TALK[:1], "completions": ["b", TALK[1], TALK[1:2]]},
        {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": "c"},
    ],
    ids=str,
)
def test_messages_beside_records_without_them_have_names(tmp_path, line):
    """In several files, and in several sources: an option is for all of a run's data."""
    form = RecordFormat(learned_roles=("user", "assistant"))
    other, path = chat.write(tmp_path / "x.jsonl", {"prompt": "a", "completion": "b"}), tmp_path / "y.jsonl"
    chat.write(path, line)
    folder = str(chat.directory(tmp_path / "t"))
    alone = [(find_corpus(each, folder, form=form), form) for each in (other, path)]
    require_messages("data", [(find_corpus([other, path], folder, form=form), form)])
    require_messages("data", alone)
    with refused("data: no record has messages", "learned_roles"):
        require_messages("data", alone[:1])


@pytest.mark.parametrize(
    ("line", "names", "unseen"),
    [
        ({"messages": TALK}, {"learned_roles": ("assistant", "usr")}, ["usr"]),
        ({"messages": TALK}, {"learned_roles": ("assistant", "user"), "roles": ("user=user",)}, []),
        ({"messages": TALK}, {"role_field": "who", "content_field": "content"}, ["who"]),
        ({"dialog": WEIRD}, {**MAPPED, "roles": (*ROLES, "system=system")}, ["system"]),
        ({"prompt": TALK[:1], "completions": [TALK[1:2]]}, {"learned_roles": ("tool", "assistant")}, ["tool"]),
    ],
    ids=str,
)
def test_names_that_no_message_has_are_reported(tmp_path, line, names, unseen):
    path, folder = chat.write(tmp_path / "x.jsonl", line, line), str(chat.directory(tmp_path / "t"))
    file = open_corpus(path, folder, tmp_path / "cache", form=RecordFormat(**names))
    assert file.notes.get("names", []) == unseen
    shown = [each for each in notes_of(file) if each.startswith("names without effect")]
    assert len(shown) == bool(unseen)
    says("".join(shown), " | ".join(unseen))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"roles": ("bot",)}, "roles | 'bot' | bot=assistant"),
        ({"roles": ("bot=user", "bot=assistant")}, "'bot=assistant' | again"),
        ({"columns": ("promt=q",)}, "'promt' | prompt | ours first"),
        ({"columns": ("prompt=q", "completion=q")}, "'completion=q' | again"),
        ({"columns": ("messages=q",), "messages_field": "d"}, "messages_field d | both"),
        ({"learned_roles": ()}, "learned_roles | at least one"),
    ],
    ids=str,
)
def test_a_mapping_that_means_nothing_is_refused(names, words):
    with refused(words, "fix: "):
        RecordFormat(**names)


def test_columns_without_effect_are_kept_with_the_tokens(tmp_path):
    """Named for each kind of record by what it reads, also in text; they stay with a cached file."""
    folder = str(chat.directory(tmp_path / "t"))
    lines = {
        "x": {"messages": TALK, "prompt": "again", "id": 3, "empty": []},
        "y": {"prompt": "a", "completion": "b", "system": "s"},
    }
    for name, (line, columns) in zip(lines, ((lines["x"], ["id", "prompt"]), (lines["y"], ["system"])), strict=True):
        path = chat.write(tmp_path / f"{name}.jsonl", line, {**line, "weight": 0})
        for _ in range(2):
            file = open_corpus(path, folder, tmp_path / "cache")
            assert file.notes == {"columns": columns, "left_out": {"weight 0": 1}}
            assert (file.document_count, file.weights) == (1, None)
    path = chat.write(tmp_path / "z.jsonl", {"text": "abc", "url": "u"})
    assert open_corpus(path, None, tmp_path / "cache").notes == {"columns": ["url"]}


def test_weights_are_stored_and_verified(tmp_path):
    weights = [1, 0.25, None, 3]
    path = chat.write(
        tmp_path / "x.jsonl", *({"prompt": "a", "completion": f"{n}", "weight": w} for n, w in enumerate(weights))
    )
    file = open_corpus(path, None, tmp_path / "cache")
    assert file.weights.tolist() == [1, 0.25, 1, 3]
    pairs = ({"prompt": "a", "chosen": f"{n}", "rejected": "no", "weight": w} for n, w in enumerate(weights))
    of_pairs = open_corpus(chat.write(tmp_path / "w.jsonl", *pairs), None, tmp_path / "cache")
    assert of_pairs.weights.tolist() == [1, 1, 0.25, 0.25, 1, 1, 3, 3] and of_pairs.pairs
    file.verify()
    plain = chat.write(tmp_path / "y.jsonl", *({"prompt": "a", "completion": f"{n}"} for n in range(4)))
    assert open_corpus(plain, None, tmp_path / "cache").fingerprint != file.fingerprint
    whole = bytearray(file.path.read_bytes())
    at = bytes(whole).index(np.array([3.0]).tobytes())
    whole[at] ^= 1
    file.path.write_bytes(whole)
    with refused("damaged", "loss mask"):
        type(file).open(file.path).verify()


@pytest.mark.parametrize("template", [chat.PLAIN, chat.MARKED], ids=["plain", "marked"])
def test_learned_roles(tmp_path, template):
    """Of a user, the text and its end are learned; of the assistant, what transformers' mask marks."""
    tokenizer = load_tokenizer(str(chat.directory(tmp_path / "t", template)))
    record = Record(name="x:1", messages=tuple(TALK))

    def learned(*roles):
        made = RecordEncoder(tokenizer, None, roles).encode(record)
        return tokenizer._tokenizer.decode(made.ids[made.answers], skip_special_tokens=False), made.ids.tolist()

    texts = [f"{each['content']}<|im_end|>" for each in TALK]
    (users, ids), (answers, same), (both, again) = learned("user"), learned("assistant"), learned("user", "assistant")
    assert (users, answers, both) == (texts[0] + texts[2], texts[1] + texts[3], "".join(texts))
    assert ids == same == again
    with refused("no answer to learn", "learned role"):
        learned("tool")


@pytest.mark.parametrize("template", [chat.PLAIN, chat.MARKED], ids=["plain", "marked"])
def test_a_learned_text_that_stands_in_its_header_too_is_learned_alone(tmp_path, template):
    tokenizer = load_tokenizer(str(chat.directory(tmp_path / "t", template)))
    texts = ["user", "x", "s", "y", " r", "z", "+", "-"]  # three of them stand in "<|im_start|>user"
    record = Record(name="x:1", messages=tuple(chat.conversation(*texts)))
    made = RecordEncoder(tokenizer, None, ("user",)).encode(record)
    found = tokenizer._tokenizer.decode(made.ids[made.answers], skip_special_tokens=False)
    assert found.replace(" ", "") == "".join(f"{text.strip()}<|im_end|>" for text in texts[::2])


def test_segments(tmp_path):
    """Learned and other texts after one another, tokenized one by one with their special tokens, as in axolotl."""
    tokenizer = load_tokenizer(str(chat.directory(tmp_path / "t")))
    parts = [(False, "<|im_start|>a"), (True, "bc<|im_end|>"), (0, "d"), (1, "e")]
    path = chat.write(tmp_path / "x.jsonl", {"segments": [{"label": label, "text": text} for label, text in parts]})
    (record,) = read(path)
    found = RecordEncoder(tokenizer).encode(record)
    encoded = [tokenizer.encode_prompt(text, add_special_tokens=False).tolist() for _, text in parts]
    assert found.ids.tolist() == [each for ids in encoded for each in ids]
    assert found.answers.tolist() == [bool(label) for (label, _), ids in zip(parts, encoded, strict=True) for _ in ids]
    assert hold_records(find_sources([path]))


def test_parquet_and_data_sets_give_the_tokens_of_the_same_lines(tmp_path, monkeypatch):
    """Through pyarrow, and data sets through the package datasets or, without it, through pyarrow."""
    import datasets

    rows = [{"dialog": WEIRD, "source": "a"}, {"dialog": WEIRD[:2], "source": None}]
    tokenizer = str(chat.directory(tmp_path / "t"))
    form = RecordFormat(**MAPPED, roles=ROLES)

    def opened(path):
        return open_corpus(path, tokenizer, tmp_path / "cache", form=form)

    wanted = opened(chat.write(tmp_path / "x.jsonl", *rows)).fingerprint
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=1)
    (tmp_path / "shards").mkdir()
    for number, row in enumerate(rows):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "shards" / f"{number}.parquet")
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "set", num_shards=2)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(tmp_path / "splits")
    for path in ("x.parquet", "shards", "set", "splits"):
        file = opened(tmp_path / path)
        assert (file.fingerprint, file.notes) == (wanted, {"columns": ["source"]}), path
    read: list[int] = []
    assert len(list(read_records(find_sources([tmp_path / "x.parquet"]), form=form, on_read=read.append))) == 2
    assert sum(read) == (tmp_path / "x.parquet").stat().st_size
    timed = [{**turn, "timestamp": datetime.datetime(2026, 1, 1)} for turn in WEIRD]  # a key without effect
    parquet.write_table(pyarrow.Table.from_pylist([{**rows[0], "dialog": timed}, rows[1]]), tmp_path / "timed.parquet")
    assert opened(tmp_path / "timed.parquet").tokens.tolist() == file.tokens.tolist()
    timed[-1] |= {"tool_calls": [{"function": {"name": "f", "arguments": {"at": timed[0]["timestamp"]}}}]}
    parquet.write_table(pyarrow.Table.from_pylist([{"dialog": timed}]), tmp_path / "called.parquet")
    calling = str(chat.directory(tmp_path / "calling", chat.PLAIN + "{{ messages[-1].tool_calls }}"))
    with refused("called.parquet:1: ", "datetime is not JSON", "fix: "):
        open_corpus(tmp_path / "called.parquet", calling, tmp_path / "cache", form=form)
    parquet.write_table(pyarrow.table({"text": [b"binary"]}), tmp_path / "bytes.parquet")
    with refused("bytes.parquet:1: field 'text' must be a string, got", "binary", "fix: "):
        open_corpus(tmp_path / "bytes.parquet", tokenizer, tmp_path / "cache")
    for row, words in (({"text": None, "id": "1"}, "'text', or null"), ({"prompt": "a", "completion": None}, "null")):
        parquet.write_table(pyarrow.Table.from_pylist([dict.fromkeys(row, "a"), row]), tmp_path / "null.parquet")
        with refused("null.parquet:2: no ", f"{words} in a table", "fix: remove a row without"):
            open_corpus(tmp_path / "null.parquet", tokenizer, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in ("set", "splits"):
        (tmp_path / path / "state.json").touch()
        assert open_corpus(tmp_path / path, tokenizer, tmp_path / f"of {path}", form=form).fingerprint == wanted
    with refused("'train'", "test", "fix: "):
        (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
        opened(tmp_path / "splits")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused("x.parquet", "pyarrow", "fix: pip install 'bmburst[data]'"):
        open_corpus(tmp_path / "x.parquet", tokenizer, tmp_path / "other")


def test_the_fields_of_a_subclass_are_those_of_the_format():
    assert RecordFormat(**MAPPED).record_format == RecordFormat(**MAPPED)
    assert {each.name for each in fields(RecordFormat)} == {*MAPPED, "text_field", "roles", "columns", "learned_roles"}


def test_json_columns_give_the_tokens_of_the_same_lines(tmp_path, monkeypatch):
    """What datasets makes of tool calls: their arguments have other keys, and nulls of their own."""
    import datasets

    calls = [{"name": "f", "arguments": {"at": 3, "unit": None}}, {"name": "g", "arguments": {"list": [1, None]}}]
    answers = [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]} for call in calls]
    rows = [{"messages": [{"role": "user", "content": "?"}, answer], "tools": calls} for answer in answers]
    rows[0]["unread"] = {"one": None}
    shown = "m.content + m.tool_calls | default([]) | tojson"
    template = "{{ tools | tojson }}" + chat.PLAIN.replace("m.content", shown)
    tokenizer = str(chat.directory(tmp_path / "t", template))

    def opened(path):
        return open_corpus(path, tokenizer, tmp_path / "cache")

    wanted = opened(chat.write(tmp_path / "x.jsonl", *rows)).fingerprint
    made = datasets.Dataset.from_list(
        rows,
        features=datasets.Features(
            messages=datasets.List(
                {**dict.fromkeys(("role", "content"), datasets.Value("string")), "tool_calls": datasets.Json()}
            ),
            tools=datasets.List(datasets.Json()),
            unread=datasets.Json(),
        ),
    )
    made.to_parquet(tmp_path / "x.parquet")
    made.save_to_disk(tmp_path / "set")
    made.add_column("more", [0, 1]).select([1, 0]).select([1, 0]).save_to_disk(tmp_path / "chosen")
    for path in ("x.parquet", "set", "chosen"):
        assert opened(tmp_path / path).fingerprint == wanted, path
    parquet.write_table(
        pyarrow.table({"messages": pyarrow.array(["[{"], pyarrow.json_())}), tmp_path / "broken.parquet"
    )
    with refused("broken.parquet", "not valid JSON", "fix: "):
        opened(tmp_path / "broken.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "set" / "state.json").touch()
    assert open_corpus(tmp_path / "set", tokenizer, tmp_path / "other").fingerprint == wanted

"""Records become the ids and answers of transformers, are packed whole, and bad lines are refused by number."""

import json
import shutil
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bmburst.config import parse_json
from bmburst.data import Batches, ByteTokenizer, documents, evaluation_batches, load_tokenizer, open_corpus
from bmburst.data.chat import RecordEncoder
from bmburst.data.documents import check_arrays, first_row
from bmburst.data.mixture import Mixture
from bmburst.data.record import Record
from bmburst.data.records import hold_records, read_records
from bmburst.data.sources import find_sources
from bmburst.data.token_file import TokenFile
from bmburst.data.token_writer import Masked, write_masked_file
from bmburst.data.whole_documents import WholeDocuments, pack_sequences
from bmburst_ops import IGNORE_INDEX
from tests import chat, tiny
from tests.refusals import refused

LONG = chat.conversation("hi", "hello </s> \u4e16", "more\n", " yes \n", "last", "end")
SYSTEM = [{"role": "system", "content": "be short"}, *chat.conversation("hi", "ok")]


def theirs(folder, messages, **options):
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    return peer.apply_chat_template(messages, return_dict=True, **options)


def ours(folder, messages, file=None):
    return RecordEncoder(load_tokenizer(str(folder)), file).encode(Record(name="x:1", messages=tuple(messages)))


@pytest.mark.parametrize("template", [chat.PLAIN, chat.MARKED], ids=["prefixes", "marked"])
@pytest.mark.parametrize("messages", [LONG, SYSTEM, chat.conversation("q", "a")], ids=["long", "system", "short"])
def test_ids_and_answers_are_those_of_transformers(tmp_path, template, messages):
    """The plain template has no markers: its answers are held to those that the marked one gives transformers."""
    folder = chat.directory(tmp_path / "t", template)
    marked = theirs(chat.directory(tmp_path / "m", chat.MARKED), messages, return_assistant_tokens_mask=True)
    found = ours(folder, messages)
    assert found.ids.tolist() == marked["input_ids"] == theirs(folder, messages)["input_ids"]
    assert found.answers.tolist() == [bool(each) for each in marked["assistant_masks"]]
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert load_tokenizer(str(folder))._tokenizer.decode(
        found.ids[found.answers], skip_special_tokens=False
    ) == "".join(answers)
    assert found.answer_bytes == len("".join(answers).encode())


def test_a_template_of_a_file_is_used(tmp_path):
    folder = chat.directory(tmp_path / "t", None)
    (tmp_path / "chat.jinja").write_text(chat.MARKED)
    found = ours(folder, LONG, tmp_path / "chat.jinja")
    wanted = theirs(folder, LONG, chat_template=chat.MARKED, return_assistant_tokens_mask=True)
    assert (found.ids.tolist(), found.answers.tolist()) == (
        wanted["input_ids"],
        list(map(bool, wanted["assistant_masks"])),
    )


def read(path):
    return list(read_records(find_sources([path])))


def test_all_malformed_lines_are_named_at_once(tmp_path):
    good, empty = {"messages": chat.conversation("q", "a")}, {"messages": chat.conversation("q", "")}
    path = tmp_path / "x.jsonl"
    chat.write(path, good, empty, good, {"other": 1})
    with refused(f"{path}:2: the answer in message 2 is empty; 1 further line is malformed: {path}:4", "at least one"):
        read(path)
    chat.write(path, *[empty] * 9)
    with refused(":1: ", "8 further lines are malformed: ", ", ".join(f"{path}:{n}" for n in range(2, 7)) + ", ...\n"):
        read(path)
    path.write_text(path.read_text() + "no JSON\n")
    with refused(f"{path}:1: ", "9 further"):
        read(path)
    chat.write(path, good, empty)
    with refused(f"{path}:2: the answer in message 2 is empty\n"):
        read(path)


def test_prompt_and_completion(tmp_path):
    folder = chat.directory(tmp_path / "t")
    path = chat.write(
        tmp_path / "x.jsonl",
        {"prompt": "2+2=", "completion": " 4\u4e16", "id": 7},
        {"prompt": LONG[:3], "completion": LONG[3:4]},
        {"text": "abc"},
        {"prompt": LONG[:3], "completion": LONG[3]["content"]},
    )
    plain, talk, text, answer = (RecordEncoder(load_tokenizer(str(folder))).encode(each) for each in read(path))
    tokenizer = load_tokenizer(str(folder))
    assert plain.ids.tolist() == [*tokenizer.encode_prompt("2+2= 4\u4e16"), tokenizer.eos_id]
    assert plain.answers.tolist() == [False] * 4 + [True] * 6
    assert talk.ids.tolist() == theirs(folder, LONG[:4])["input_ids"]
    whole = ours(folder, LONG[:4]).answers
    first = len(theirs(folder, LONG[:3], add_generation_prompt=True)["input_ids"])
    assert talk.answers.tolist() == [bool(at >= first and each) for at, each in enumerate(whole)]
    assert (answer.ids.tolist(), answer.answers.tolist()) == (talk.ids.tolist(), talk.answers.tolist())
    assert text.ids.tolist() == [1, *tokenizer.encode("abc"), 1]
    assert text.answers.tolist() == [False] + [True] * 4
    by_bytes = RecordEncoder(ByteTokenizer()).encode(read(path)[0])
    assert by_bytes.ids.tolist() == [*"2+2= 4\u4e16".encode(), 256]
    assert by_bytes.answers.sum() == 6


SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}, {"from": "observation", "value": "3"}]


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ({"conversations": SHAREGPT[:2]}, chat.conversation("hi", "ok")),
        ({"conversations": SHAREGPT[:2], "system": "be short"}, SYSTEM),
        ({"conversations": [{"from": "system", "value": "be short"}, *SHAREGPT[:2]]}, SYSTEM),
        (
            {"conversations": [*SHAREGPT, SHAREGPT[1]]},
            [*chat.conversation("hi", "ok"), {"role": "tool", "content": "3"}, {"role": "assistant", "content": "ok"}],
        ),
        ({"conversations": SYSTEM}, SYSTEM),
        ({"instruction": "hi", "output": "ok"}, chat.conversation("hi", "ok")),
        ({"instruction": "hi", "input": "", "output": "ok", "system": "be short"}, SYSTEM),
        ({"instruction": "add", "input": "1 2", "output": "3"}, chat.conversation("add\n1 2", "3")),
        (
            {"instruction": "c", "input": None, "output": "d", "history": [["a", "b"]]},
            chat.conversation("a", "b", "c", "d"),
        ),
        ({"messages": SYSTEM, "conversations": SHAREGPT, "system": "ignored"}, SYSTEM),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_conversations_with_other_keys(tmp_path, line, messages, suffix):
    path = tmp_path / f"x{suffix}"
    text = json.dumps(line) if suffix == ".jsonl" else f"\ufeff\n [\n {json.dumps(line)}]"
    path.write_text(text)
    assert hold_records(find_sources([path]))
    assert [record.messages for record in read(path)] == [tuple(messages)]


@pytest.mark.parametrize(
    "first", [{"prompt": "a", "completion": "b"}, {"text": "\u4e16" * (1 << 19)}, {"a": [{}]}], ids=len
)
def test_the_kind_of_an_array_is_told_by_its_beginning(tmp_path, first, monkeypatch):
    path, sizes = tmp_path / "x.json", []
    rest = [{"text": "x" * 100} for _ in range(3000)]
    path.write_text(json.dumps([first, *rest], ensure_ascii=False, indent=1)[:-9], encoding="utf-8-sig")  # cut
    monkeypatch.setattr(documents, "parse_json", lambda text: sizes.append(len(text)) or parse_json(text))
    files = find_sources([path])
    assert hold_records(files) == ("prompt" in first)
    assert list(first_row(files[0])) == [(f"{path}: element 1", first)]
    assert max(sizes) <= len(json.dumps(first, ensure_ascii=False, indent=1)) + 9, "more was parsed"
    with refused(path, "not valid JSON", "array"):
        check_arrays(files)
    assert len(sizes) == 3


@pytest.mark.parametrize("text", ['[{"text": "a"', '[{"text": 1e}, {}]', '[{"text": "\xff"}]', "[{" + '"a":[{' * 99999])
def test_an_array_with_a_broken_beginning_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with refused("x.json", "is not valid JSON" if len(text) < 99 else "nested", "array"):
        hold_records(find_sources([tmp_path / "x.json"]))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_whose_beginning_is_damaged(tmp_path, suffix):
    """It is refused where it is named, and no file of a folder that is read otherwise."""
    damaged = tmp_path / f"a.jsonl{suffix}"
    damaged.write_bytes({".gz": b"\x1f\x8b\x08", ".zst": b"\x28\xb5\x2f\xfd"}[suffix])
    with refused(f"cannot read '{damaged}' | download the file again"):
        open_corpus(damaged, "bytes", tmp_path)
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "completion": "y"}')
    assert hold_records(find_sources([tmp_path]))


def test_an_array_of_json(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"text": "abc"}, {"text": "de"}], indent=1))
    assert open_corpus(path, None, tmp_path).document_count == 2
    path.write_text(json.dumps({"text": "an object is text as it stands"}))
    assert open_corpus(path, None, tmp_path).document_count == 1
    path.write_text(json.dumps([{"messages": LONG}, {"messages": []}]))
    with refused(f"{path}: element 2", "messages", "fix: "):
        open_corpus(path, str(chat.directory(tmp_path / "t")), tmp_path)
    path.write_text('[{"messages": ')
    with refused(f"'{path}'", "not valid JSON", "fix: "):
        open_corpus(path, None, tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ({"conversations": "hi"}, "conversations | role"),
        ({"conversations": [{"from": "human", "value": 3}]}, "content of message 1 is 3 | text"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, 'function_call is "f()" | name | arguments'),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "message 1 | human | observation"),
        ({"conversations": SHAREGPT[:1]}, "no answer"),
        ({"instruction": "a", "output": ["b"]}, "output | text"),
        ({"instruction": "a", "output": ""}, "message 2 | empty"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history | answer"),
        ({"instruction": "a", "output": "b", "system": 1}, "system is 1 | text"),
        ([1], "not a JSON object"),
        ({"question": "a"}, "no known key | question | messages | completion"),
        ({"messages": []}, "messages | role"),
        ({"mesages": LONG}, "no known key | 'mesages' | did you mean 'messages'"),
        ({"messages": [{"content": "a"}]}, "message 1 | role"),
        ({"messages": [{"role": "robot", "content": "a"}, *LONG]}, "chat template | no role robot"),
        ({"messages": LONG[:1]}, "no answer"),
        ({"messages": chat.conversation("a", "")}, "message 2 | empty"),
        ({"prompt": "a", "completion": ""}, "completion | empty"),
        ({"prompt": 3, "completion": "a"}, "prompt is 3 | text"),
        ({"prompt": LONG[:1], "completion": ""}, "prompt | text behind messages"),
    ],
    ids=str,
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, line, words):
    folder = chat.directory(tmp_path / "t", chat.MARKED)
    path = chat.write(tmp_path / "x.jsonl", {"messages": LONG}, "", line)
    with refused(f"{path}:3", words, "fix: "):
        open_corpus(path, str(folder), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tokens"))


def test_without_a_chat_template(tmp_path):
    path = chat.write(tmp_path / "x.jsonl", {"messages": LONG})
    with refused(f"{path}:1", "no chat template", "fix: ", "--chat-template", "--data.chat_template"):
        open_corpus(path, str(chat.directory(tmp_path / "t", None)), tmp_path)
    with refused(f"{path}:1", "'bytes'", "no chat template", "fix: ", "--tokenizer"):
        open_corpus(path, None, tmp_path)
    with refused("none.jinja", "fix: "):
        open_corpus(path, None, tmp_path, chat_template=tmp_path / "none.jinja")


def test_a_template_whose_prefixes_are_none(tmp_path):
    path = chat.write(tmp_path / "x.jsonl", {"messages": chat.conversation("q", "a", "b", "c")})
    with refused(f"{path}:1", "chat template", "differently", "fix: ", "generation", "--chat-template"):
        open_corpus(path, str(chat.directory(tmp_path / "t", chat.FORGETS)), tmp_path)
    chat.write(path, {"messages": LONG[1:]})
    with refused(f"{path}:1", "begins with an answer", "fix: ", "generation"):
        open_corpus(path, str(chat.directory(tmp_path / "t")), tmp_path)


@pytest.mark.parametrize("template", [chat.PLAIN, chat.MARKED], ids=["plain", "marked"])
def test_half_characters_become_question_marks(tmp_path, template):
    folder = chat.directory(tmp_path / "t", template)
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": chat.conversation("a \ud800", "b \udc00 \U0001f600")}))
    record = RecordEncoder(load_tokenizer(str(folder))).encode(read(path)[0])
    expected = ours(folder, chat.conversation("a ?", "b ? \U0001f600"))
    assert record.ids.tolist() == expected.ids.tolist()
    assert record.answers.tolist() == expected.answers.tolist()


ENDS_IN_TEXT = (
    "{% for m in messages %}{{ m.role + ':' + ' ' + m.content + ('' if loop.last else '\n') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
)


def test_an_answer_is_whole_whatever_its_first_and_last_tokens_are(tmp_path):
    """The last character is of several tokens; the first is a space, which some tokenizers place nowhere."""
    turns = chat.conversation("hi", "well \u4e16", "ok", "bye \u4e16")
    folder = chat.directory(tmp_path / "t", ENDS_IN_TEXT)
    parts = ("user: hi\nassistant:", " well \u4e16", "user: ok\nassistant:", " bye \u4e16")
    answers = [at % 2 == 1 for at, part in enumerate(parts) for _ in part.replace("\n", "").encode()]
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def found():
        record = ours(folder, turns)
        words = [whole.id_to_token(each) for each in record.ids]
        return [answer for word, answer in zip(words, record.answers, strict=True) if word != "\u010a"], words

    assert found()[0] == answers
    whole.post_processor = processors.ByteLevel(trim_offsets=True)
    whole.save(str(folder / "tokenizer.json"))
    assert found()[0] == answers

    words = ["</s>", "user", "assistant", ":", "hi", "well", "ok", "bye", "\u4e16"]
    whole = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="</s>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    whole.save(str(folder / "tokenizer.json"))
    answers = [word in ("well", "bye") or (word == "\u4e16") for word in found()[1]]
    assert found()[0] == answers and sum(answers) == 4


def masked_file(path, documents):
    """Write documents of given (length, answer places)."""
    made = []
    for number, (length, places) in enumerate(documents):
        answers = np.zeros(length, bool)
        answers[places] = True
        ids = np.arange(length) % 200 + number % 50
        made.append(Masked(ids, answers, 3 * int(answers.sum()), number * 7919))
    return write_masked_file(path, made, ByteTokenizer())


def test_a_file_with_a_loss_mask(tmp_path):
    documents = [(5, [1, 4]), (9, [3]), (1, []), (11, range(1, 11))]
    file = masked_file(tmp_path / "x", documents)
    wanted = np.concatenate([np.isin(np.arange(length), list(places)) for length, places in documents])
    for start in range(27):
        for stop in range(start, 27):
            for step in (1, 2, 5):
                places = range(start, stop, step)
                assert (file.answers_in(places) == wanted[start:stop:step]).all()
    assert file.text_bytes == 3 * wanted.sum()
    assert [file.bytes_between(0, i) for i in range(27)] == (3 * np.append(0, wanted.cumsum())).tolist()
    file.verify()
    other = masked_file(tmp_path / "y", [(5, [1, 3]), *documents[1:]])
    assert other.fingerprint != file.fingerprint
    data = bytearray((tmp_path / "x").read_bytes())
    at = data.index(file.loss_mask.tobytes(), 64 + 64)
    data[at] ^= 1
    (tmp_path / "x").write_bytes(data)
    with refused("loss mask", "checksum", "fix: "):
        TokenFile.open(tmp_path / "x").verify()


def test_text_is_written_as_before(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["abc"])
    assert b'"version": 1' in (tmp_path / "x").read_bytes()
    assert file.loss_mask is None and file.answers_in(range(4)).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(2, 14), min_size=3, max_size=20), st.integers(14, 30), st.sampled_from([1, 2, 3]))
def test_records_are_packed_whole_and_read_in_parts(tmp_path_factory, lengths, size, step):
    rng = np.random.default_rng(sum(lengths))
    documents = [
        (length, rng.choice(np.arange(1, length), rng.integers(1, length), replace=False)) for length in lengths
    ]
    file = masked_file(tmp_path_factory.mktemp("p") / "x", documents)
    seen = []
    for split in ("train", "held_out"):
        sequences = WholeDocuments(file, split=split, sequence_length=size, held_out_fraction=0.3, pack="documents")
        assert len(sequences) <= 1 + 2 * sum(lengths) // size
        for index in range(len(sequences)):
            numbers = sequences.records(index).tolist()
            seen += numbers
            offsets = file.document_offsets
            tokens = [file.tokens[offsets[d] : offsets[d + 1]].astype(np.int64) for d in numbers]
            labels = []
            for ids, d in zip(tokens, numbers, strict=True):
                own = np.full(len(ids), IGNORE_INDEX)
                at = np.sort(documents[d][1])
                own[at - 1] = ids[at]
                labels.append(own)
            ids, labels = np.concatenate(tokens), np.concatenate(labels)
            real = len(ids)
            assert real == sequences.labels_in(index) <= size
            assert sequences.documents(index) == tuple(map(len, tokens))
            assert sequences.counted_in(index) == (labels != IGNORE_INDEX).sum() > 0
            for first in range(real):
                for stop in (first, (first + real) // 2, real):
                    inputs, found = sequences.pairs(index, range(first, stop, step))
                    assert (inputs == ids[first:stop:step]).all() and (found == labels[first:stop:step]).all()
    assert sorted(seen) == list(range(len(lengths)))


def test_best_fit_leaves_little_room(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, 400).tolist()
    sequences = WholeDocuments(
        masked_file(tmp_path / "x", [(n, [1]) for n in lengths]), split="all", sequence_length=100
    )
    assert len(sequences) <= 1.02 * sum(lengths) / 100


def test_no_record_is_left(tmp_path):
    file = masked_file(tmp_path / "x", [(9, [1]), (7, [1]), (8, [3])])
    kept = WholeDocuments(file, split="all", sequence_length=8)
    assert (kept.left_out, sum(map(kept.counted_in, range(len(kept))))) == (1, 2)
    with refused("3 are longer", "sequence_length 6", "7 tokens", "fix: ", "--sequence-length"):
        WholeDocuments(file, split="all", sequence_length=6)
    one = masked_file(tmp_path / "y", [(9, [1])])
    with refused("one text", "at least 2", "fix: "):
        WholeDocuments(one, split="train", sequence_length=16)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resume_in_an_epoch_on_any_ranks(tmp_path, ranks):
    file = masked_file(tmp_path / "x", [(n % 9 + 2, [1]) for n in range(90)])
    sequences = pack_sequences(file, split="train", sequence_length=16, pack="documents")

    def taken(batches, steps):
        return [next(batches).taken for _ in range(steps)]

    alone = Batches(sequences, batch_size=4, seed=3)
    wanted = taken(alone, 20)
    begun = Batches(sequences, batch_size=4, seed=3)
    taken(begun, 5)
    state = json.loads(json.dumps(begun.state_dict()))
    for rank in range(ranks):
        resumed = Batches(sequences, batch_size=4, seed=3, data_rank=rank, data_parallel=ranks)
        resumed.load_state_dict(state)
        assert taken(resumed, 15) == wanted[5:]
    epoch = [each for step in wanted for each in step][: len(sequences)]
    assert sorted(epoch) == list(range(len(sequences)))
    other = pack_sequences(masked_file(tmp_path / "y", [(9, [1])] * 9 + [(8, [2])]), split="train", sequence_length=16)
    with refused("corpus", "fix: "):
        Batches(other, batch_size=4, seed=3).load_state_dict(state)


def test_a_record_of_extreme_length_does_not_take_the_others_from_training(tmp_path):
    """It counts for a share of the tokens, but a run leaves it out."""
    file = masked_file(tmp_path / "x", [*((20 + n % 9, [1]) for n in range(120)), (100_000, [1])])
    options = {"sequence_length": 28, "held_out_fraction": 0.05, "pack": "documents"}
    train, held = (pack_sequences(file, split=split, **options) for split in ("train", "held_out"))
    counts = [sum(len(part.records(index)) for index in range(len(part))) for part in (train, held)]
    assert sum(counts) == 120 and 6 <= counts[1] <= 7  # 7 is 5 % of 121 records, rounded up


def test_an_evaluation_takes_every_held_out_record_once(tmp_path):
    file = masked_file(tmp_path / "x", [(n % 9 + 2, [1]) for n in range(90)])
    sequences = pack_sequences(file, split="held_out", sequence_length=16, held_out_fraction=0.2, pack="documents")
    batches = list(evaluation_batches(sequences, batch_size=4))
    assert sum(batch.label_count for batch in batches) == sum(len(sequences.records(i)) for i in range(len(sequences)))
    # The first sequences have the longest records: a limit takes some of each third, also in a mixture.
    total = len(sequences)
    assert [3 * index // total for index in sequences.evaluated(3)] == [0, 1, 2]
    order = Mixture([sequences, sequences], [1, 3]).evaluated(4)
    assert sorted(3 * index // total for index in order) == [1, 3, 4, 5]
    assert list(sequences.evaluated(1000)) == list(range(total))


def test_a_data_set_of_the_package(tmp_path, monkeypatch):
    import datasets

    def saved(**splits):
        made = {name: datasets.Dataset.from_list(each) for name, each in splits.items()}
        datasets.DatasetDict(made).save_to_disk(tmp_path / "set")
        return tmp_path / "set"

    rows = [{"messages": LONG}, {"messages": SYSTEM}, {"messages": chat.conversation("x", "y")}]
    tokenizer, folder = str(chat.directory(tmp_path / "t")), saved(train=rows)
    with monkeypatch.context() as without, refused(folder, "datasets", "pyarrow", "fix: pip install 'bmburst[data]'"):
        without.setitem(sys.modules, "datasets", None)
        without.setitem(sys.modules, "pyarrow", None)
        open_corpus(folder, tokenizer, tmp_path / "cache")
    found = open_corpus(folder, tokenizer, tmp_path / "cache")
    same = open_corpus(chat.write(tmp_path / "x.jsonl", *rows), tokenizer, tmp_path / "cache")
    assert found.fingerprint == same.fingerprint
    saved(train=[*rows, {"messages": [{"content": "a"}]}])
    with refused(f"{folder}:4", "role", "fix: "):
        open_corpus(folder, tokenizer, tmp_path / "other")
    shutil.rmtree(folder)
    saved(test=rows)
    with refused("'train'", "test", "fix: "):
        open_corpus(folder, tokenizer, tmp_path / "another")


def test_shards_are_read_a_line_at_a_time(tmp_path):
    """Memory does not grow with the records."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(4):
        with (shards / f"{shard}.jsonl").open("w") as file:
            for number in range(200):
                file.write(json.dumps({"prompt": f"{shard} {number}", "completion": "x" * 20_000}) + "\n")
    tracemalloc.start()
    corpus = open_corpus(shards, "bytes", tmp_path / "cache")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert corpus.text_bytes == 4 * 200 * 20_000
    assert peak < corpus.text_bytes / 4

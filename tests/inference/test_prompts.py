"""Prompts become the ids that transformers makes of them, and a bad one is refused by its file and line."""

import json

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from bmburst.data import ByteTokenizer, load_tokenizer
from bmburst.data.chat import RecordEncoder
from bmburst.data.records import read_records
from bmburst.data.sources import find_sources
from bmburst.inference.prompts import Answer, PromptEncoder, TokenLogprob, read_prompts
from tests.data.test_tokenizer import train_bpe, without_unknown
from tests.refusals import refused, says

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "</s>", "<s>", "<|im_start|>")
BOS = 2
MESSAGES = [{"role": "system", "content": "the \u4e16"}, {"role": "user", "content": "return f(x)"}]
VOCAB = 330


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a tokenizer that adds a BOS, and a chat template that writes one."""
    tokenizer = train_bpe(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_config(tmp_path, chat_template=TEMPLATE)
    return tmp_path


def save_config(directory, **values):
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>", **values}))


def encoder(directory, vocab_size=VOCAB, **options):
    return PromptEncoder(load_tokenizer(str(directory)), vocab_size, **options)


def peer(directory):
    return PreTrainedTokenizerFast.from_pretrained(directory)


def write(path, *lines):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return path


@pytest.mark.parametrize("text", ["return the f", " ", "<|im_start|>user\nhi</s>", "<s>x", "\u4e16\U0001f642"])
def test_text_becomes_the_ids_of_transformers(directory, text):
    (found,) = read_prompts(encoder(directory), prompt=text)
    assert found.tokens.tolist() == peer(directory)(text)["input_ids"]
    assert found.tokens[0] == BOS and found.source == "--prompt" and len(found) == len(found.tokens)
    assert found.tokens.dtype == np.int64 and not found.tokens.flags.writeable


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_eos_token": True}], ids=str)
def test_tokenizer_json_says_what_stands_around_a_text(directory, flags):
    """Transformers ignores these two keys where there is a tokenizer.json."""
    save_config(directory, **flags)
    found = encoder(directory).encode("the f", "").tokens.tolist()
    assert found == peer(directory)("the f")["input_ids"]
    assert (found[0], found[-1] == 1) == (BOS, False)


def test_a_prompt_leaves_the_tokenizer_as_it_was(directory):
    tokenizer = load_tokenizer(str(directory))
    before = tokenizer.encode("<s></s>").tolist()
    tokenizer.encode_prompt("<s></s>")
    assert tokenizer.encode("<s></s>").tolist() == before
    assert not {1, 2} & set(before)


@pytest.mark.parametrize("where", ["configuration", "file"])
def test_messages_become_the_ids_of_transformers(directory, where):
    if where == "file":
        save_config(directory)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    expected = peer(directory).apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    found = encoder(directory).encode(MESSAGES, "a prompt").tokens.tolist()
    assert found == expected
    assert found.count(BOS) == 1 and found[0] == BOS


def test_chat_makes_text_a_message(directory):
    expected = peer(directory).apply_chat_template([{"role": "user", "content": "the x"}], add_generation_prompt=True)[
        "input_ids"
    ]
    chat = encoder(directory, chat=True)
    path = write(directory / "prompts.jsonl", {"prompt": "the x"}, {"tokens": [5]}, {"messages": MESSAGES})
    text, ids, messages = read_prompts(chat, prompts=path)
    assert text.tokens.tolist() == read_prompts(chat, prompt="the x")[0].tokens.tolist() == expected
    assert ids.tokens.tolist() == [5]
    assert messages.tokens.tolist() == encoder(directory).encode(MESSAGES, "").tokens.tolist()


def test_a_file_is_one_prompt_as_it_stands(directory):
    text = "the return\r\n\n {x}\n"
    (directory / "book.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (found,) = read_prompts(encoder(directory), prompt_file=directory / "book.txt")
    assert found.tokens.tolist() == peer(directory)(text)["input_ids"]


def test_lines_are_prompts_in_order(directory):
    lines = ['{"prompt": "the\u2028x"}', "", '{"tokens": [3, 0, 299]}', "  ", {"messages": MESSAGES}]
    path = write(directory / "prompts.jsonl", *lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    found = read_prompts(encoder(directory), prompts=path)
    assert [each.source for each in found] == [f"{path}:{line}" for line in (1, 3, 5)]
    assert found[0].tokens.tolist() == peer(directory)("the\u2028x")["input_ids"]
    assert found[1].tokens.tolist() == [3, 0, 299]


THINKS = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and enable_thinking is false %}<think></think>{% endif %}"
    "{{ m.content | trim }}"
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
"""Trims contents, and has variables, as Qwen3's."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLED = [
    MESSAGES[1],
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3", "name": None},
]


def whole(directory, messages, **options):
    """Return the ids of transformers for messages whose last one is of the assistant, as its pipeline makes them."""
    return peer(directory).apply_chat_template(messages, continue_final_message=True, **options)["input_ids"]


@pytest.mark.parametrize("template", [TEMPLATE, THINKS], ids=["spaces", "trimmed"])
@pytest.mark.parametrize("text", ["It is", " It is \n", "the return of the f", "<think>\nso", "x</s>"], ids=repr)
def test_a_final_answer_is_continued(directory, template, text):
    save_config(directory, chat_template=template)
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    wanted = whole(directory, messages)
    path = write(directory / "prompts.jsonl", {"messages": messages}, {"messages": [*messages, MESSAGES[1]]})
    continued, asked = read_prompts(encoder(directory), prompts=path)
    assert continued.tokens.tolist() == encoder(directory).encode(messages, "").tokens.tolist() == wanted
    opened = peer(directory).apply_chat_template([*messages, MESSAGES[1]], add_generation_prompt=True)["input_ids"]
    assert asked.tokens.tolist() == opened


def test_empty_answers_are_taken(directory):
    """The last one opens the answer. A server's own answer is empty where it ends at once, and clients send it back."""
    messages = [*MESSAGES, {"role": "assistant", "content": ""}]
    assert encoder(directory).encode(messages, "").tokens.tolist() == whole(directory, messages)
    messages = [*messages, MESSAGES[1]]
    wanted = peer(directory).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoder(directory).encode(messages, "").tokens.tolist() == wanted


def test_the_pipeline_of_transformers_continues_too(directory):
    """Its preprocessing alone: no weights are needed."""
    from transformers.pipelines.text_generation import Chat, TextGenerationPipeline

    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    pipeline = TextGenerationPipeline.__new__(TextGenerationPipeline)
    pipeline.tokenizer = peer(directory)
    for each in (messages, MESSAGES):
        wanted = pipeline.preprocess(Chat(each))["input_ids"][0].tolist()
        assert encoder(directory).encode(each, "").tokens.tolist() == wanted


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ({"messages": MESSAGES, "tools": TOOLS}, {"tools": TOOLS}),
        ({"messages": MESSAGES, "tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"messages": CALLED, "tools": TOOLS, "chat_template_kwargs": None}, {"tools": TOOLS}),
        ({"messages": MESSAGES, "chat_template_kwargs": {"other": [], "documents": None}}, {}),
        ({"messages": [{**MESSAGES[0], "weight": None}, {**MESSAGES[1], "loss": 0}]}, {}),
        ({"conversations": [{"from": "Human", "value": "return f(x)"}], "system": "the \u4e16"}, {}),
    ],
    ids=str,
)
def test_a_conversation_is_read_as_in_training(directory, line, options):
    save_config(directory, chat_template=THINKS)
    messages = CALLED if line.get("messages") is CALLED else MESSAGES
    # transformers before 5.24 writes a null as the word None
    filled = [{key: value for key, value in message.items() if value is not None} for message in messages]
    wanted = peer(directory).apply_chat_template(filled, add_generation_prompt=True, **options)["input_ids"]
    (found,) = read_prompts(encoder(directory), prompts=write(directory / "prompts.jsonl", line))
    assert found.tokens.tolist() == encoder(directory).encode(line, "prompt 0").tokens.tolist() == wanted
    learned = chat_encoder(directory).encode(record(directory, line))
    assert learned.ids[: len(wanted)].tolist() == wanted


def chat_encoder(directory):
    return RecordEncoder(load_tokenizer(str(directory)))


def record(directory, line):
    """Return the record that training reads of a line of prompts with an answer."""
    key = next(key for key in ("messages", "conversations") if key in line)
    answered = {**line, key: [*line[key], {"role": "assistant", "content": "It is"}]}
    (found,) = read_records(find_sources([write(directory / "chats.jsonl", answered)]))
    return found


def test_python_gives_text_ids_arrays_and_messages(directory):
    ours = encoder(directory)
    for value in ([1, 2], (1, 2), np.array([1, 2], np.int32), [np.int64(1), 2]):
        assert ours.encode(value, "prompt 0").tokens.tolist() == [1, 2]
    assert ours.encode("the", "prompt 0").tokens.tolist() == peer(directory)("the")["input_ids"]
    given = np.array([1, 2])
    found = ours.encode(given, "prompt 0")
    given[0] = 7
    assert found.tokens.tolist() == [1, 2]


def test_bytes_get_no_special_token():
    (found,) = read_prompts(PromptEncoder(ByteTokenizer(), 259), prompt="h\u00e9")
    assert found.tokens.tolist() == list("h\u00e9".encode())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": "a"', "not valid JSON"),
        ('{"tokens": [NaN]}', "NaN"),
        ("[1, 2]", "[1, 2] | exactly one"),
        ('"text"', "'text' | exactly one"),
        ("{}", "none | exactly one"),
        ('{"prompt": "a", "prompt": "b"}', "a key twice"),
        ({"promt": "a"}, "'promt' | exactly one"),
        ({"prompt": "a", "tokens": [1]}, "'prompt' | 'tokens' | exactly one"),
        ({"prompt": "a", "temperature": 1}, "'temperature' | exactly one"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "prompt 3 | text"),
        ({"prompt": None}, "prompt None | text"),
        ({"tokens": []}, "at least one"),
        ({"tokens": 5}, "tokens 5 | integers"),
        ({"tokens": "12"}, "tokens '12' | integers"),
        ({"tokens": [1, 2.5]}, "2.5 | integers"),
        ({"tokens": [1, True]}, "True | integers"),
        ({"tokens": [1, None]}, "None | integers"),
        ({"tokens": [1, VOCAB]}, f"{VOCAB} | 0 to {VOCAB - 1}"),
        ({"tokens": [1, -1, 2]}, f"-1 | 0 to {VOCAB - 1}"),
        ({"tokens": [2**63]}, f"{2**63} | vocabulary"),
        ({"messages": []}, "messages is [] | role | content"),
        ({"messages": "hi"}, "messages | role | content"),
        ({"messages": {"role": "user", "content": "a"}}, "messages | role | content"),
        ({"messages": MESSAGES, "temperature": 1}, "'temperature' | exactly one"),
        ({"messages": MESSAGES, "conversations": []}, "'messages' | 'conversations' | exactly one"),
        ({"messages": None}, "messages null | list"),
        ({"prompt": "a", "tools": []}, "'tools' | exactly one"),
        ({"messages": MESSAGES, "tools": [{}]}, "does not read tools"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "tokenize | apply_chat_template"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{}]}]}, "tool_calls | does not read"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, "content of message 3 is null"),
        ({"messages": [{"role": "user"}]}, "content of message 1 is null"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "chat template | Unknown role robot | another template"),
    ],
    ids=str,
)
def test_a_bad_line_is_refused_by_its_number(directory, line, words):
    path = write(directory / "prompts.jsonl", {"prompt": "fine"}, "", line, {"prompt": "fine"})
    with refused(words, f"{path}:3", "fix: ") as caught:
        read_prompts(encoder(directory), prompts=path)
    assert str(caught.value).splitlines()[-1].startswith("fix: ")


def test_every_bad_line_of_prompts_is_named(directory):
    lines = [{"prompt": "a"}, {"messages": []}, "{", {"prompt": "a"}, {"messages": [{"role": "robot", "content": "a"}]}]
    path = write(directory / "prompts.jsonl", *lines)
    with refused(f"{path}:2", "messages is []", f"2 further lines are malformed: {path}:3, {path}:5", "fix: "):
        read_prompts(encoder(directory), prompts=path)
    save_config(directory)
    with refused(f"{path}:1", "no chat template") as caught:  # every line would be refused
        read_prompts(encoder(directory), prompts=write(path, *[{"messages": MESSAGES}] * 3))
    assert "further" not in str(caught.value)


@pytest.mark.parametrize("option", ["prompt_file", "prompts"])
@pytest.mark.parametrize("name", ["missing.txt", ".", "/dev/zero"])
def test_what_is_no_file_is_refused(directory, option, name):
    with refused(str(directory / name), "cannot", "fix: "):
        read_prompts(encoder(directory), **{option: directory / name})


@pytest.mark.parametrize(
    ("option", "data", "words"),
    [
        ("prompts", b"", "no prompt"),
        ("prompts", b"\n ", "no prompt"),
        ("prompts", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "book.txt:2 | UTF-8"),
        ("prompt_file", b"", "empty"),
        ("prompt_file", b"a\xff", "UTF-8 | byte 1"),
    ],
)
def test_a_file_without_prompts_or_of_other_bytes_is_refused(directory, option, data, words):
    (directory / "book.txt").write_bytes(data)
    with refused(words, "book.txt", "fix: "):
        read_prompts(encoder(directory), **{option: directory / "book.txt"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no prompt"),
        ({"prompt": "a", "prompts": "b"}, "--prompt and --prompts | keep one"),
        ({"prompt": ""}, "--prompt | empty"),
    ],
    ids=str,
)
def test_exactly_one_source_is_needed(directory, given, words):
    with refused(words, "allowed", "fix: "):
        read_prompts(encoder(directory), **given)


def test_without_a_tokenizer_only_ids_are_taken(tmp_path):
    without = PromptEncoder(None, 10)
    assert without.encode([9], "--prompts").tokens.tolist() == [9]
    for value, word in (("text", "text"), (MESSAGES, "messages")):
        with refused("tokenizer", word, "tokens", "fix: "):
            without.encode(value, "prompt 0")
    with refused("chat", "tokenizer", "fix: "):
        PromptEncoder(None, 10, chat=True)


def test_without_a_chat_template_messages_are_refused(directory):
    save_config(directory)
    assert len(encoder(directory).encode("the", "prompt 0")) > 1
    with refused(directory, "chat template", "fix: "):
        encoder(directory).encode(MESSAGES, "prompt 0")
    with refused(directory, "chat template", "fix: "):
        encoder(directory, chat=True)
    with refused("prompt 0", "chat template", "fix: "):
        PromptEncoder(ByteTokenizer(), 259).encode(MESSAGES, "prompt 0")


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages[7].content.none }}"], ids=["syntax", "undefined"])
def test_a_template_that_fails_is_refused(directory, template):
    save_config(directory, chat_template=template)
    with refused("prompt 0", "chat template", "fix: "):
        encoder(directory).encode(MESSAGES, "prompt 0")


def test_a_damaged_tokenizer_configuration_is_refused(directory):
    (directory / "tokenizer_config.json").write_text("{")
    with refused(directory, "tokenizer", "fix: "):
        encoder(directory)


def test_ids_of_another_tokenizer_are_refused(directory):
    with refused("--prompt", "vocabulary", "0 to 99", "fix: "):
        read_prompts(encoder(directory, vocab_size=100), prompt="return the function")


def test_a_word_that_the_tokenizer_has_no_token_for_is_refused_by_its_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b"}\n{"prompt": "a c"}\n')
    words = encoder(without_unknown(tmp_path / "words"))
    with refused("prompts.jsonl:2", "words", "UNK", "vocabulary", "fix: "):
        read_prompts(words, prompts=path)
    assert words.text("a b", "--prompt").tokens.tolist() == [0, 1]


def test_an_array_of_numbers_is_refused(directory):
    for value in (np.zeros(3), np.zeros((2, 2), np.int64)):
        with refused("prompt 0", "shape", str(value.dtype), "integers", "fix: "):
            encoder(directory).encode(value, "prompt 0")
    with refused("prompt 0", "at least one", "fix: "):
        encoder(directory).encode(np.zeros(0, np.int64), "prompt 0")


def test_an_answer_is_one_line_of_json():
    answer = Answer(prompt_tokens=7, tokens=(1, 2), text="a\nb\u4f60", finish="stop", first_token_seconds=0.5)
    assert "\n" not in answer.to_json()
    assert json.loads(answer.to_json()) == {
        **{"prompt_tokens": 7, "tokens": [1, 2], "text": "a\nb\u4f60", "finish": "stop"},
        **{"first_token_seconds": 0.5, "seconds_per_token": None, "peak_gib": None},
    }
    logprobs = (TokenLogprob(1, -0.5, ((1, -0.5), (4, -1.25))), TokenLogprob(2, float("nan")))
    answer = Answer(prompt_tokens=7, tokens=(1, 2), finish="eos", logprobs=logprobs, sample=3, peak_gib=1.5)
    found = json.loads(answer.to_json())
    assert (found["sample"], found["text"], found["peak_gib"]) == (3, None, 1.5)
    assert found["logprobs"] == [
        {"token": 1, "logprob": -0.5, "top_logprobs": [{"token": 1, "logprob": -0.5}, {"token": 4, "logprob": -1.25}]},
        {"token": 2, "logprob": None, "top_logprobs": []},
    ]


def test_a_refused_prompt_says_why():
    found = json.loads(Answer(prompt_tokens=10**7, finish="refused", reason="too long").to_json())
    assert (found["finish"], found["reason"], found["tokens"], found["text"]) == ("refused", "too long", [], None)
    with pytest.raises(AssertionError):
        Answer(prompt_tokens=1, finish="refused")


def test_messages_are_shortened(directory):
    with refused("fix: ") as caught:
        encoder(directory).encode([{"role": "user", "content": 3, "x": "y" * 5000}], "prompt 0")
    assert len(says(caught)) < 400

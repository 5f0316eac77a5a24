"""Messages are learned or left out as marked, and a key that has an effect elsewhere is read or refused.

The right masks come from transformers' return_assistant_tokens_mask, by a template that writes marked answers without
{% generation %}.
"""

import itertools
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from bmburst.data import load_tokenizer, open_corpus
from bmburst.data.chat import ChatTemplate, RecordEncoder
from bmburst.data.messages import MARKS, MESSAGE_KEYS, SPEAKERS
from bmburst.data.records import RECORD_KEYS, UNSUPPORTED, read_records
from bmburst.data.sources import find_sources
from tests import chat
from tests.refusals import refused

ROLES = ("system", "user", "assistant", "tool")
TURNS = chat.conversation("hi", "one \u4e16", "more", "two", "last", "three")
CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def encode(path, *lines, template=chat.PLAIN):
    tokenizer = load_tokenizer(str(chat.directory(path / "t", template)))
    records = read_records(find_sources([chat.write(path / "x.jsonl", *lines)]), check=RecordEncoder(tokenizer).encode)
    return list(records)


@pytest.mark.parametrize("template", [chat.PLAIN, chat.MARKED], ids=["prefixes", "marked"])
def test_marked_answers_are_left_out_of_the_loss(tmp_path, template):
    peer = AutoTokenizer.from_pretrained(chat.directory(tmp_path / "peer", chat.LEAVES_OUT))
    lines, wanted = [], []
    for count, out in enumerate(itertools.product((False, True), repeat=3)):
        answers = dict(zip((1, 3, 5), out, strict=True))
        if all(out):
            continue
        marked = [{**turn, "out": answers.get(at, False)} for at, turn in enumerate(TURNS)]
        wanted.append(peer.apply_chat_template(marked, return_dict=True, return_assistant_tokens_mask=True))
        key, (no, yes) = MARKS[count % len(MARKS)], ((0, 1), (False, True), (0.0, None))[count % 3]
        lines.append(
            {"messages": [{**t, key: no if answers[at] else yes} if at in answers else t for at, t in enumerate(TURNS)]}
        )
        lines.append({"conversations": [{"from": t["role"], "value": t["content"]} for t in TURNS]})
        lines[-1]["loss_mask"] = [not answers.get(at, count % 2) for at in range(6)]
    for at, found in enumerate(encode(tmp_path, *lines, template=template)):
        assert found.ids.tolist() == wanted[at // 2]["input_ids"]
        assert found.answers.tolist() == list(map(bool, wanted[at // 2]["assistant_masks"]))
    texts = [len("one \u4e16<|im_end|>".encode()), len("two<|im_end|>"), len("three<|im_end|>")]
    assert encode(tmp_path, {"messages": [{**TURNS[0]}, {**TURNS[1], "weight": 0}, *TURNS[2:]]}, template=template)[
        0
    ].answer_bytes == sum(texts[1:])


FORGETFUL = (
    "{% set last = messages | length - 1 %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thinking = m.thinking if loop.index0 == last else '-' %}"
    "{% set text = '<|im_start|>assistant\n' + thinking + m.content + '<|im_end|>' %}"
    "{% if m.out %}{{ text }}{% else %}{% generation %}{{ text }}{% endgeneration %}{% endif %}"
    "{% else %}<|im_start|>{{ m.role + '\n' + m.content }}{% endif %}{% endfor %}"
)
"""Marks whole answers, one directly behind the other, and writes reasoning in the last message only."""


@pytest.mark.parametrize("reasoning", ["-", "long reasoning"], ids=["the same", "another"])
def test_an_answer_of_the_prompt_that_is_written_otherwise_later_is_left_out_alone(tmp_path, reasoning):
    talk = [{**turn, "thinking": reasoning} if turn["role"] == "assistant" else turn for turn in TURNS]
    marked = [{**turn, "out": at < 4} for at, turn in enumerate(talk)]
    peer = AutoTokenizer.from_pretrained(chat.directory(tmp_path / "peer", FORGETFUL))
    wanted = peer.apply_chat_template(marked, return_dict=True, return_assistant_tokens_mask=True)
    for line in (
        {"prompt": talk[:4], "completion": talk[4:]},
        {"messages": [{**turn, "weight": 0} if at in (1, 3) else turn for at, turn in enumerate(talk)]},
    ):
        (found,) = encode(tmp_path, line, template=FORGETFUL)
        assert found.ids.tolist() == wanted["input_ids"]
        assert found.answers.tolist() == list(map(bool, wanted["assistant_masks"]))


@pytest.mark.parametrize("out", [(1,), (2,), (1, 2)])
def test_answers_that_a_template_marks_as_one_are_told_apart_or_refused(tmp_path, out):
    answers = [{"role": "assistant", "content": text, "thinking": "-"} for text in ("a", "bc", "d")]
    talk = [TURNS[0], *answers[:2], TURNS[2], answers[2]]
    line = {"messages": [{**turn, "weight": 0} if at in out else turn for at, turn in enumerate(talk)]}
    if len(out) == 1:
        with refused("marks answers | as one | weight"):
            encode(tmp_path, line, template=FORGETFUL)
        return
    peer = AutoTokenizer.from_pretrained(chat.directory(tmp_path / "peer", FORGETFUL))
    marked = [{**turn, "out": at in out} for at, turn in enumerate(talk)]
    wanted = peer.apply_chat_template(marked, return_dict=True, return_assistant_tokens_mask=True)
    (found,) = encode(tmp_path, line, template=FORGETFUL)
    assert found.answers.tolist() == list(map(bool, wanted["assistant_masks"]))


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"weight": 0.5}, "message 2: weight is 0.5 | 1 or true | 0 or false"),
        ({"train": "no"}, 'message 2: train is "no" | 1 or true'),
        ({"loss": 0, "weight": 1}, "weight and loss | agree"),
        ({"weight": 0}, "no answer to learn | mark"),
        ({"train_detail": [{"begin_offset": 0}]}, "train_detail | message 2 | template does not read | weight"),
        ({"name": "x", "date": 3, "id": 1, "function_call": {"name": "f"}}, "function_call | message 2"),
        ({"reasoning_content": "because"}, "reasoning_content | message 2 | does not read"),
        ({"tool_calls": [CALL]}, "tool_calls | message 2 | does not read"),
        ({"tool_calls": "add"}, 'tool_calls of message 2 is "add" | list'),
        ({"content": [{"type": "image"}]}, "content of message 2 | image | text"),
        ({"content": [{"type": "text", "text": "a"}]}, "refuses the messages | content as one text"),
        ({"role": "gpt"}, "role 'gpt' | write it as 'assistant' | --roles gpt=assistant | --data.roles"),
    ],
    ids=str,
)
def test_what_is_not_understood_of_a_message_is_refused(tmp_path, turn, words):
    with refused("x.jsonl:2: ", words, "fix: "):
        encode(tmp_path, {"messages": TURNS}, {"messages": [TURNS[0], {**TURNS[1], **turn}]})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": [{**TURNS[0], "train": True}, TURNS[1]]}, "role user | train | answers only"),
        ({"loss_mask": [1], "messages": TURNS}, "loss_mask | 6"),
        ({"images": ["a.png"], "messages": TURNS}, "images | messages, conversations | only text"),
        ({"label": False, "prompt": "a", "completion": "b"}, "label | false | good"),
        ({"weight": -0.5, "messages": TURNS}, "weight is -0.5 | at least 0"),
        ({"weight": -0.5, "prompt": "a", "chosen": "b", "rejected": "c"}, "weight is -0.5 | at least 0"),
        ({"segments": [{"label": True}]}, "segments | label | text"),
        ({"segments": [{"label": True, "text": "a", "mask": 1}]}, "mask | label and text"),
        ({"functions": [CALL], "messages": TURNS}, "functions | tools"),
        ({"tools": [CALL], "messages": TURNS}, "does not read tools"),
        ({"tools": ["add"], "messages": TURNS}, 'tools is ["add"] | list of tools'),
        ({"chat_template_kwargs": {"thinking": False}, "messages": TURNS}, "does not read 'thinking'"),
        ({"enable_thinking": False, "messages": TURNS}, "enable_thinking | false | chat_template_kwargs"),
        ({"objects": {"ref": ["cat"]}, "messages": TURNS}, "objects | <bbox> | only text"),
        ({"chat_template_kwargs": {"max_length": 3}, "messages": TURNS}, "max_length | apply_chat_template"),
        ({"conversations": [{"from": "critic", "value": "a"}]}, '"critic" | function_call | observation'),
        ({"question": "a", "chosen": "to b", "rejected": "to c"}, "question | no prompt"),
    ],
    ids=str,
)
def test_what_is_not_understood_of_a_record_is_refused(tmp_path, line, words):
    with refused("x.jsonl:1: ", words, "fix: "):
        encode(tmp_path, line)


def test_columns_without_effect_are_accepted(tmp_path):
    more = {"id": 3, "source": "web", "label": 3, "images": [], "weight": 1, "loss": None}
    message = {**TURNS[1], "id": 1, "name": "x", "weight": None, "tool_calls": [], "annotations": [], "reasoning": ""}
    template = chat.PLAIN.replace("{{ m.", "{% if 'tool_calls' in m %}{{ raise_exception('call') }}{% endif %}{{ m.")
    lines = {"messages": [TURNS[0], message], **more}, {"messages": TURNS[:2]}
    found, same = encode(tmp_path, *lines, template=template)
    assert found.ids.tolist() == same.ids.tolist() and found.answers.tolist() == same.answers.tolist()


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        ("Human", "user"),
        ("USER", "user"),
        *dict.fromkeys((("gpt", "assistant"), ("model", "assistant"), ("chatgpt", "assistant"), ("Bing", "assistant"))),
        *dict.fromkeys(
            (("bard", "assistant"), ("observation", "tool"), ("function_response", "tool"), ("tool", "tool"))
        ),
    ],
)
def test_speakers_of_others_have_their_roles(tmp_path, speaker, role):
    turns = [{"from": "human", "value": "a"}, {"from": speaker, "value": "b"}, {"from": "gpt", "value": "c"}]
    path = chat.write(tmp_path / "x.jsonl", {"conversations": turns})
    (record,) = read_records(find_sources([path]))
    assert record.messages[1] == {"role": role, "content": "b"}


@pytest.mark.parametrize("value", [{"name": "add", "arguments": {"a": 1}}, [{"name": "add", "arguments": '{"a": 1}'}]])
def test_a_function_call_is_an_answer_with_tool_calls(tmp_path, value):
    """As in LLaMA-Factory, whose speaker this is: the value is the JSON of one call or of several."""
    turns = [("human", "1 + 0?"), ("function_call", json.dumps(value)), ("observation", "1"), ("gpt", "one")]
    line = {"conversations": [{"from": name, "value": text} for name, text in turns], "tools": json.dumps([CALL])}
    (found,) = encode(tmp_path, line, template=CALLS)
    messages = chat.conversation("1 + 0?", None, "1", "one")
    del messages[1]["content"]  # transformers before 5.24 writes a null as the word None
    messages[1] |= {"tool_calls": [CALL]}
    messages[2]["role"] = "tool"
    peer = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert found.ids.tolist() == peer.apply_chat_template(messages, tools=[CALL])["input_ids"]
    assert peer.decode(found.ids[found.answers]) == 'add({"a": 1})<|im_end|>one<|im_end|>'


def test_arguments_and_contents_that_a_template_quotes_are_refused(tmp_path):
    """OpenAI's arguments are JSON text: a template that writes arguments as JSON would quote them twice."""
    text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}]
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, *TURNS[2:4]]
    assert len(encode(tmp_path, {"messages": turns}, template=CALLS)) == 1
    turns[1] = {**turns[1], "tool_calls": [text]}
    with refused("x.jsonl:1: ", "refuses", "fix: | arguments of tool calls as objects"):  # Qwen3.5's template
        encode(tmp_path, {"messages": turns}, template=CALLS.replace("arguments | tojson", "arguments | items | first"))
    with refused("x.jsonl:1: ", "arguments", "message 2", "quoted", "fix: "):
        encode(tmp_path, {"messages": turns}, template=CALLS)
    reader = ChatTemplate(load_tokenizer(str(tmp_path / "t")))  # servers of OpenAI's API read the text in prompts
    as_object, as_text = (
        reader.prompt("x", (TURNS[0], {**turns[1], "tool_calls": [call]}, TURNS[2]), None, {}) for call in (CALL, text)
    )
    assert 'add({"a": 1})' in as_text and as_text == as_object
    for template in (CALLS, chat.PLAIN.replace("m.content +", "m.content | string +")):
        with refused("x.jsonl:1: ", "content of message 1", "quoted", "fix: "):
            encode(tmp_path, {"messages": [{"role": "user", "content": parts}, TURNS[1]]}, template=template)
    reads = chat.PLAIN.replace("m.content +", "(m.content if m.content is string else m.content[0].text) +")
    found, same = (
        encode(tmp_path, {"messages": [{"role": "user", "content": each}, TURNS[1]]}, template=reads)[0]
        for each in (parts, "a")
    )
    assert found.ids.tolist() == same.ids.tolist()


@pytest.mark.parametrize("marked", [False, True], ids=["prefixes", "marked"])
def test_messages_that_a_template_leaves_out_are_refused(tmp_path, marked):
    """Qwen3's template writes contents that are lists as nothing, and knows no developer."""
    known = (chat.MARKED.split("{% endif %}", 1)[1] if marked else chat.PLAIN.split("%}", 1)[1]).rpartition("{% endfor")
    text = known[0].replace("m.content +", "(m.content if m.content is string else '') +")
    template = f"{{% for m in messages %}}{{% if m.role in {ROLES!r} %}}{text}{{% endif %}}{''.join(known[1:])}"
    parts = [{"type": "text", "text": "ab"}]
    assert len(encode(tmp_path, {"messages": TURNS}, template=template)) == 1
    with refused("x.jsonl:1: ", "leaves out parts of the content", "message 1", "fix: write the content as text"):
        encode(tmp_path, {"messages": [{"role": "user", "content": parts}, TURNS[1]]}, template=template)
    for role, fix in (
        ("developer", "as 'system' | --roles developer=system"),
        ("tool_call", "write calls as tool_calls"),
    ):
        with refused("x.jsonl:1: ", f"leaves out messages of the role '{role}'", "message 1", fix):
            encode(tmp_path, {"messages": [{"role": role, "content": "s"}, *TURNS]}, template=template)
    reader = ChatTemplate(load_tokenizer(str(tmp_path / "t")))  # servers of OpenAI's API join parts for such templates
    assert reader.prompt("x", ({"role": "user", "content": parts},), None, {}) == reader.prompt(
        "x", ({"role": "user", "content": "ab"},), None, {}
    )


@pytest.mark.parametrize(
    ("before", "after", "turn", "words"),
    [
        ("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}", {"tool_calls": [CALL]}, "beside tool_calls"),
        ("m.tool_calls %}", "(m.tool_calls or [])[:1] %}", {"tool_calls": [CALL, CALL]}, "call 2 of 2 in tool_calls"),
        ("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}", {}, "the beginning of the content"),
        ("{{ m.content }}", "{{ m.content[0].text }}", {}, "the content, as in message 1 | list of parts"),
        (
            "{{ m.content }}",
            "{{ m.reasoning_content if m.tool_calls }}{{ m.content }}",
            {"reasoning_content": "because"},
            "the key 'reasoning_content' | remove reasoning_content",
        ),
    ],
    ids=["Llama 3.1", "gpt-oss", "DeepSeek R1", "SmolVLM", "Gemma 4"],
)
def test_parts_of_messages_that_a_template_leaves_out_are_refused(tmp_path, before, after, turn, words):
    """What templates of these models do; prompts may have reasoning that is left out."""
    line = {"messages": [TURNS[0], {**TURNS[1], "content": "<think>as</think>hi", **turn}, *TURNS[2:4]]}
    whole = CALLS.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    assert len(encode(tmp_path, line, template=whole)) == 1
    with refused("x.jsonl:1: ", "leaves out", words, "fix: "):
        encode(tmp_path, line, template=CALLS.replace(before, after))


def test_every_bad_line_is_named_also_those_that_the_template_refuses(tmp_path):
    good, odd = {"messages": TURNS}, {"messages": [{"role": "robot", "content": "a"}, *TURNS]}
    folder = str(chat.directory(tmp_path / "t", chat.MARKED))
    path = chat.write(tmp_path / "x.jsonl", good, odd, good, {"messages": TURNS[:1]}, "{bad", {"a": 1}, odd)
    with refused(
        f"{path}:2: ", "no role robot; 4 further lines are malformed: ", *(f"{path}:{n}" for n in (4, 5, 6, 7))
    ):
        open_corpus(path, folder, tmp_path)
    chat.write(path, {"messages": [{"role": "user", "content": "a"}]}, good, "{bad")
    with refused(f"{path}:1: ", f"no answer to learn; 1 further line is malformed: {path}:3", "fix: "):
        open_corpus(path, folder, tmp_path)
    with refused(f"{path}:1: ", "has no chat template") as caught:  # every line would be refused
        open_corpus(path, str(chat.directory(tmp_path / "none", None)), tmp_path)
    assert "further" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"instruction": "add", "input": "1 2"}, [{"role": "user", "content": "add\n1 2"}]),
        (
            {"instruction": "add", "system": "s", "history": [["a", "b"]]},
            [{"role": "system", "content": "s"}, *chat.conversation("a", "b", "add")],
        ),
        ({"conversations": [{"from": "human", "value": "add"}]}, chat.conversation("add")),
        ({"messages": chat.conversation("a", "b", "add")}, chat.conversation("a", "b", "add")),
    ],
    ids=str,
)
def test_pairs_of_llama_factory_have_their_prompts(tmp_path, line, prompt):
    """Their answers may begin with the same words, which are not the prompt."""
    yes, no = "It is 3", "It is 4"
    if "instruction" not in line:
        line = {**line, "chosen": {"from": "gpt", "value": yes}, "rejected": {"from": "gpt", "value": no}}
    found, wanted = encode(
        tmp_path,
        {"chosen": yes, "rejected": no, **line},
        {"prompt": prompt, **{k: chat.conversation("", v)[1:] for k, v in (("chosen", yes), ("rejected", no))}},
    )
    assert (found.ids.tolist(), found.documents) == (wanted.ids.tolist(), wanted.documents)
    assert found.answers.tolist() == wanted.answers.tolist() and found.answers.sum() == 2 * len("It is 3") + 2


def test_nulls_that_arrow_adds_to_a_data_set_are_dropped(tmp_path):
    """Each object of a column has the keys of all: TRL removes them too."""
    import datasets

    folder = tmp_path / "set"
    nulls = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    rows = [{"messages": [{**TURNS[0], "tool_calls": None}, {**TURNS[1], "tool_calls": [nulls]}], "tools": [nulls]}]
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    tokenizer = str(chat.directory(tmp_path / "t", CALLS))
    found = open_corpus(folder, tokenizer, tmp_path)
    line = {"messages": [TURNS[0], {**TURNS[1], "tool_calls": [CALL]}], "tools": [CALL]}
    assert (
        found.tokens.tolist()
        == open_corpus(chat.write(tmp_path / "x.jsonl", line), tokenizer, tmp_path).tokens.tolist()
    )


def test_the_lists_of_keys_are_complete():
    assert set(MARKS) < set(MESSAGE_KEYS) and not set(RECORD_KEYS) & set(UNSUPPORTED)
    assert set(SPEAKERS.values()) == {"system", "user", "assistant", "tool"}
    assert np.all([name == name.lower() for name in SPEAKERS])

"""Chat templates by name write the formats that the models document, and mark their answers."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from bmburst.data import open_corpus
from bmburst.data.chat_templates import TEMPLATES
from bmburst.data.tokenizer_folder import kept_files
from tests import chat
from tests.refusals import refused

TALK = chat.conversation("hi ", "yes ", "so?", "no")
SYSTEM = {"role": "system", "content": "Be brief."}
# Written by hand from the models' cards; between < > is what is learned.
RIGHT = {
    "chatml": "|im_start|system\nBe brief.|im_end|\n|im_start|user\nhi |im_end|\n|im_start|assistant\n<yes |im_end|>\n"
    "|im_start|user\nso?|im_end|\n|im_start|assistant\n<no|im_end|>\n",
    "gemma": "|bos||start_of_turn|user\nhi|end_of_turn|\n|start_of_turn|model\n<yes|end_of_turn|>\n"
    "|start_of_turn|user\nso?|end_of_turn|\n|start_of_turn|model\n<no|end_of_turn|>\n",
    "llama2": "|bos|[INST] {{SYS}}\nBe brief.\n{{/SYS}}\n\nhi [/INST]< yes |eos|>|bos|[INST] so? [/INST]< no |eos|>",
    "llama3": "|bos||header|system|/header|\n\nBe brief.|eot_id||header|user|/header|\n\nhi|eot_id||header|assistant"
    "|/header|\n\n<yes|eot_id|>|header|user|/header|\n\nso?|eot_id||header|assistant|/header|\n\n<no|eot_id|>",
}
TOKENS = {
    **dict.fromkeys(("im_start", "im_end", "eot_id"), "<|{}|>"),
    **dict.fromkeys(("start_of_turn", "end_of_turn"), "<{}>"),
}
NAMED = {"bos": "<s>", "eos": "</s>", "header": "<|start_header_id|>", "/header": "<|end_header_id|>"}
SPELLED = {name: form.format(name) for name, form in TOKENS.items()} | NAMED


def directory(path: Path) -> Path:
    """Write a tokenizer without a template, with the special tokens of all models."""
    chat.directory(path, None)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPELLED.values()]})
    tokenizer.save_pretrained(path)
    return path


def spelled(text: str) -> str:
    for name, token in SPELLED.items():
        text = text.replace(f"|{name}|", token)
    return text.replace("{{", "<<").replace("}}", ">>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_they_write_what_the_models_read(name, tmp_path):
    folder = directory(tmp_path / "t")
    messages = TALK if name == "gemma" else [SYSTEM, *TALK]
    path = chat.write(tmp_path / "x.jsonl", {"messages": messages})
    file = open_corpus(path, str(folder), tmp_path, chat_template=Path(name))
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    pieces = RIGHT[name].replace(">", "<").split("<")
    assert peer.decode(file.tokens) == spelled("".join(pieces))
    every = range(len(file.tokens))
    assert peer.decode(file.tokens[file.answers_in(every)]) == spelled("".join(pieces[1::2]))
    # The checkpoint of the run answers with it.
    (folder / "chat_template.jinja").write_bytes(kept_files({}, Path(name))["chat_template.jinja"])
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    asked = peer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert asked == spelled("".join(RIGHT[name].rpartition("<")[0].replace(">", "").split("<")))


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("llama3", TALK, "llama3 | <|start_header_id|> | no such token | chatml | fix: "),
        ("gemma", TALK, "<start_of_turn>"),
        ("llama2", TALK, "llama2 | bos_token"),
        ("chatmI", TALK, "chatmI | chatml, gemma, llama2, llama3"),
    ],
)
def test_what_they_cannot_write_is_refused(name, messages, words, tmp_path):
    path = chat.write(tmp_path / "x.jsonl", {"messages": messages})
    with refused(*words.split(" | ")):
        open_corpus(path, str(chat.directory(tmp_path / "t", None)), tmp_path, chat_template=Path(name))


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma", [SYSTEM, *TALK], "system message"),
        ("llama2", TALK[1:], "alternate"),
        ("llama3", [*TALK[:1], {**TALK[1], "tool_calls": [{"function": {"name": "a"}}]}], "tool_calls"),
    ],
)
def test_messages_that_a_format_does_not_have_are_refused(name, messages, words, tmp_path):
    path = chat.write(tmp_path / "x.jsonl", {"messages": messages})
    with refused("x.jsonl:1: ", words):
        open_corpus(path, str(directory(tmp_path / "t")), tmp_path, chat_template=Path(name))

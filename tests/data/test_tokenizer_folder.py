"""A tokenizer's folder is read as by AutoTokenizer, whatever files hold its tokens, for training and generation."""

import json
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from bmburst.data import load_tokenizer, open_corpus
from bmburst.data.chat import ChatTemplate, RecordEncoder
from bmburst.data.record import Record
from bmburst.data.tokenizer import tokenizer_files
from bmburst.data.tokenizer_folder import PLAIN_CLASSES, TOKENIZER_CONFIG_KEYS, kept_files
from bmburst.inference.prompts import PromptEncoder
from tests import chat
from tests.data.test_tokenizer import train_bpe
from tests.refusals import refused

TEXT = "the return of <|im_start|>user\nhi</s> \u4e16 <tool> [image] <|im_end|>x"
MESSAGES = [*chat.conversation("the return", "of it"), {"role": "user", "content": "and?"}]
START = {"content": "<|im_start|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
START |= {"single_word": False}
END = START | {"content": "<|im_end|>"}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat.PLAIN}
FOLDERS = {
    "tokenizer.json alone": {},
    "class alone": {"config": PLAIN},
    "eos in the configuration": {"config": {"eos_token": "<|im_end|>"}},
    "eos with settings": {"config": {"eos_token": {"__type": "AddedToken", **END}}},
    "added_tokens_decoder": {
        "config": PLAIN | {"eos_token": "</s>", "added_tokens_decoder": {"304": START, "303": END}}
    },
    "a token with other settings": {
        "config": {"added_tokens_decoder": {"1": START | {"content": "</s>", "rstrip": True}}}
    },
    "additional_special_tokens": {
        "config": PLAIN | {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    },
    "extra_special_tokens": {"config": {"eos_token": "</s>", "extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}},
    "extra_special_tokens by name": {"config": PLAIN | {"extra_special_tokens": {"image_token": "[image]"}}},
    "a token of the model": {"config": {"tool_token": "<tool>", "eos_token": "</s>"}},
    "special_tokens_map": {
        "special": {
            "eos_token": END | {"rstrip": True},
            "additional_special_tokens": ["<|im_start|>"],
            "pad_token": "<p>",
        }
    },
    "special_tokens_map before the configuration": {
        "config": {"eos_token": "</s>"},
        "special": {"eos_token": "<|im_end|>"},
    },
    "no special_tokens_map beside added_tokens_decoder": {
        "config": {"eos_token": "</s>", "added_tokens_decoder": {}},
        "special": {"eos_token": "<|im_end|>"},
    },
    "both lists": {
        "config": {"additional_special_tokens": ["<tool>"]},
        "special": {"additional_special_tokens": ["[image]"]},
    },
    "added_tokens": {"added": {"<|im_start|>": 303, "<tool>": 304}, "special": {"eos_token": "<|im_start|>"}},
    "added_tokens with a gap": {"added": {"<tool>": 400, "<|im_start|>": 350}},
    "split_special_tokens": {"config": PLAIN | {"eos_token": "</s>", "split_special_tokens": True}},
    "templates in a file": {"config": PLAIN, "chat_template.jinja": chat.MARKED},
    "templates by name": {
        "config": {
            "chat_template": [
                {"name": "default", "template": chat.PLAIN},
                {"name": "tool_use", "template": "{{ tools }}"},
            ]
        }
    },
    "templates in a folder": {
        "config": PLAIN,
        "chat_template.jinja": chat.PLAIN,
        "tool_use": "{{ 'T' }}{{ tools }}" + chat.PLAIN,
    },
    "no effect": {
        "config": {"add_bos_token": True, "add_eos_token": True, "model_max_length": 7, "padding_side": "left"}
    },
    "of LLaMA": {
        "config": {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "</s>", "legacy": False},
        "pieces": True,
    },
    "of Mistral": {
        "config": {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"},
        "model": {"model_type": "mistral"},
        "pieces": True,
    },
    "bytes of LLaMA": {
        "config": {"tokenizer_class": "LlamaTokenizerFast", "additional_special_tokens": ["<|im_start|>"]}
    },
    "of Qwen2": {
        "config": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": chat.PLAIN},
        "model": {"model_type": "qwen2"},
    },
}


def save(path, config=None, special=None, added=None, model=None, tool_use=None, pieces=False, **files):
    (pieced() if pieces else train_bpe()).save(str(path / "tokenizer.json"))
    contents = {"tokenizer_config.json": config, "special_tokens_map.json": special, "added_tokens.json": added}
    for name, values in {**contents, "config.json": model, **files}.items():
        if values is not None:
            (path / name).write_text(values if isinstance(values, str) else json.dumps(values))
    if tool_use is not None:
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    return path


def pieced():
    """Return a tokenizer as that of LLaMA-2: pieces with a mark of spaces, and bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "t", "h", "e", "th", "the"]
    words += ["\u2581the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    made = Tokenizer(
        models.BPE(
            {word: at for at, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken(word, normalized=False) for word in words[:3]])
    return made


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_read_as_by_auto_tokenizer(tmp_path, files):
    folder = save(tmp_path, **files)
    peer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for name in (folder, folder / "tokenizer.json"):
        ours = load_tokenizer(str(name))
        assert ours.encode_prompt(TEXT).tolist() == peer(TEXT)["input_ids"]
        bare = peer(TEXT, add_special_tokens=False)["input_ids"]
        assert ours.encode_prompt(TEXT, add_special_tokens=False).tolist() == bare
        assert ours.decode(bare) == peer.decode(bare, skip_special_tokens=True)
        assert ours.vocab_size == len(peer)
        assert peer.eos_token_id in (None, ours.eos_id)
        assert (ours.special_tokens, ours.chat_template) == (peer.special_tokens_map, peer.chat_template)
        if peer.chat_template is None:
            continue
        prompt = peer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
        assert PromptEncoder(ours, 1000).encode(MESSAGES, "prompt").tokens.tolist() == prompt
        learned = RecordEncoder(ours).encode(Record(name="x:1", messages=tuple(MESSAGES[:2])))
        assert learned.ids.tolist() == peer.apply_chat_template(MESSAGES[:2])["input_ids"]


def test_what_transformers_saves_is_read_without_it(tmp_path, monkeypatch):
    """Each key that save_pretrained writes is one whose effect is known here."""
    save(tmp_path, **FOLDERS["additional_special_tokens"])
    peer = AutoTokenizer.from_pretrained(tmp_path)
    peer.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert set(saved) <= set(TOKENIZER_CONFIG_KEYS)
    monkeypatch.setitem(sys.modules, "transformers", None)
    ours = load_tokenizer(str(tmp_path / "saved"))
    assert ours.encode_prompt(TEXT).tolist() == peer(TEXT)["input_ids"]
    assert (ours.eos_id, ours.special_tokens) == (peer.eos_token_id, peer.special_tokens_map)


def test_chat_templates_with_tools_are_chosen_and_kept(tmp_path):
    """A checkpoint has files without folders: several templates stand in its configuration."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    folder = save(tmp_path, **FOLDERS["templates in a folder"])
    peer = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "kept").mkdir()
    for name, data in kept_files(tokenizer_files(str(folder))).items():
        (tmp_path / "kept" / name).write_bytes(data)
    assert AutoTokenizer.from_pretrained(tmp_path / "kept").chat_template == peer.chat_template
    for place in (folder, tmp_path / "kept"):
        for given in (tools, None):
            wanted = peer.apply_chat_template(MESSAGES, tools=given, tokenize=False, add_generation_prompt=True)
            found = ChatTemplate(load_tokenizer(str(place))).prompt("prompt", tuple(MESSAGES), given, {})
            assert found == wanted
    (tmp_path / "mine.jinja").write_text("mine")
    kept = kept_files(tokenizer_files(str(folder)), tmp_path / "mine.jinja")
    assert kept["chat_template.jinja"] == b"mine" and json.loads(kept["tokenizer_config.json"]) == PLAIN


def test_tokens_of_another_reading_are_not_taken_from_the_cache(tmp_path):
    """Whatever file says how records are read, a change of it is another reading."""
    folder = save(tmp_path, config=PLAIN)
    path = chat.write(tmp_path / "x.jsonl", {"messages": MESSAGES[:2]})
    changes = [
        ("special_tokens_map.json", '{"eos_token": "<|im_end|>"}'),
        ("special_tokens_map.json", '{"eos_token": "</s>", "pad_token": "</s>"}'),
        ("added_tokens.json", '{"<|im_start|>": 303}'),
        ("chat_template.jinja", chat.MARKED),
        ("tokenizer_config.json", json.dumps(PLAIN | {"split_special_tokens": True})),
    ]
    found = [open_corpus(path, str(folder), tmp_path / "cache")]
    for name, text in changes:
        (folder / name).write_text(text)
        found.append(open_corpus(path, str(folder), tmp_path / "cache"))
    assert len({file.path for file in found}) == 1 + len(changes)
    assert open_corpus(path, str(folder), tmp_path / "cache").path == found[-1].path


def test_classes_that_are_read_here_take_tokenizer_json_as_it_stands(tmp_path):
    for kind in PLAIN_CLASSES:
        folder = tmp_path / str(kind)
        folder.mkdir()
        save(folder, config={"tokenizer_class": kind} if kind else {})
        assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "TokenizersBackend"
    assert not set(PLAIN_CLASSES[1:]) & (set(TOKENIZER_MAPPING_NAMES.values()) - {"TokenizersBackend"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eos_token": 3}, "3 is not a token | tokenizer_config.json"),
        ({"additional_special_tokens": [[]]}, "[] is not a token"),
        ({"added_tokens_decoder": {"x": START}}, "special tokens | 'x'"),
        ({"added_tokens_decoder": [START]}, "special tokens"),
        ({"chat_template": [1]}, "chat_template | name"),
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}}, "auto_map | own code | PreTrainedTokenizerFast"),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path, config, words):
    with refused(words, tmp_path, "fix: "):
        load_tokenizer(str(save(tmp_path, config=config)))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"])
def test_a_damaged_file_is_refused_by_its_name(tmp_path, name):
    save(tmp_path, **{name: "{"})
    with refused(tmp_path / name, "not valid JSON", "fix: "):
        load_tokenizer(str(tmp_path))


def test_without_transformers_a_class_of_it_is_refused(tmp_path, monkeypatch):
    save(tmp_path, config=PLAIN)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_tokenizer(str(tmp_path)).eos_id == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    with refused(tmp_path, "LlamaTokenizerFast", "transformers", "PreTrainedTokenizerFast", "fix: pip install"):
        load_tokenizer(str(tmp_path))

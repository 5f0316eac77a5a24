"""The tables of docs/settings.md are the lists of the code, against the fields of the installed libraries."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.structure.files import Files

from docs.tools.foreign import FOREIGN, TABLES, UNKNOWN, Table, tables
from docs.tools.hook import on_page_markdown
from tests.docs.blocks import PATHS


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_the_installed_libraries_have_no_unknown_field(table: Table) -> None:
    """Whoever sees this fail reads what a new field does, and adds it to the list, or leaves it out on purpose."""
    rows = table.rows()
    assert rows.pop(UNKNOWN, []) == ALLOWED.get(table.title, [])
    assert sorted(name for names in rows.values() for name in names) == sorted(table.done)
    for does in rows:
        assert does.startswith(("read", "no effect", "noted", "refused")), does


# Fields that are refused whatever their value.
ALLOWED = {
    "rope_scaling and rope_parameters": ["long_factor", "mrope_section", "short_factor"],
    "Other arguments of generate with a split cache": [
        *("assistant_model", "custom_generate", "inputs", "negative_prompt_attention_mask", "negative_prompt_ids")
    ],
    "Requests of chat completions": [
        *("audio", "moderation", "prediction", "reasoning_effort", "verbosity", "web_search_options")
    ],
}


def test_a_field_of_a_new_version_is_shown_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    new = dataclasses.make_dataclass("New", [("new_of_peft", int, 0)], bases=(peft.LoraConfig,))
    monkeypatch.setattr(peft, "LoraConfig", new)
    qwen = CONFIG_MAPPING["qwen3"]
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "qwen3", type("New", (qwen,), {"new_of_qwen": 1}))
    monkeypatch.setattr(qwen, "to_dict", lambda _: {"new_of_qwen": 1})
    shown = tables()
    assert f"| `new_of_peft` | {UNKNOWN} |" in shown and f"| `new_of_qwen` | {UNKNOWN} |" in shown


def test_the_page_has_the_tables() -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="settings.md"))
    config: Any = None
    shown = on_page_markdown(PATHS["settings.md"].read_text(), page, config, Files([]))
    assert FOREIGN not in shown and tables() in shown
    foreign = shown.partition("\n## Foreign settings\n")[2]
    assert foreign.count("\n### ") == len(TABLES)
    assert '| `hidden_act` | read: two names of one function; only "silu", "swish" |' in shown

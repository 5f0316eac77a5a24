"""The generic part: any tree of dataclasses, to and from files, dictionaries and text."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Literal

import pytest

from bmburst.config import (
    build_config,
    check_fields,
    field,
    from_dict,
    leaves,
    overlay,
    read_config_file,
    read_layer,
    to_dict,
)
from tests.refusals import refusal_of, says


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = field("A rate.", default=0.5, unit="per step", above=0, below=1)
    kind: Literal["red", "green"] = field("A choice.", default="red")
    level: Literal[2, 3] = field("A number to choose.", default=3)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maybe:
    needed: int = field("Has no default.", minimum=1)
    more: str = field("Text.", default="x")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    count: int = field("A count.", default=3, unit="things", minimum=0)
    on: bool = field("A switch.", default=False)
    where: Path | None = field("A path.", default=None)  # noqa: RUF009
    betas: tuple[float, float] = field("Two.", default=(0.9, 0.95))
    names: tuple[str, ...] = field("Any number.", default=())
    inner: Inner = field("Nested.", factory=Inner)  # noqa: RUF009
    maybe: Maybe | None = field("Nested or none.", default=None)  # noqa: RUF009

    def __post_init__(self) -> None:
        check_fields(self)


def made(values, source=""):
    return from_dict(Tree, values, source)


FULL = Tree(
    count=7,
    on=True,
    where=Path("a/b"),
    betas=(0.5, 0.25),
    names=("p", "q"),
    inner=Inner(rate=0.125, kind="green", level=2),
    maybe=Maybe(needed=4, more="none of it"),
)


@pytest.mark.parametrize("config", [Tree(), FULL, Tree(maybe=Maybe(needed=1))])
def test_round_trip_through_json(config):
    assert made(json.loads(json.dumps(to_dict(config)))) == config


def test_to_dict_is_plain_and_nested():
    assert to_dict(FULL) == {
        "count": 7,
        "on": True,
        "where": "a/b",
        "betas": [0.5, 0.25],
        "names": ["p", "q"],
        "inner": {"rate": 0.125, "kind": "green", "level": 2},
        "maybe": {"needed": 4, "more": "none of it"},
    }


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("7", "count", 7),
        ("0", "count", 0),
        ("true", "on", True),
        ("No", "on", False),
        ("a/b", "where", Path("a/b")),
        ("none", "where", None),
        ("0.1,1e-3", "betas", (0.1, 0.001)),
        ("p, q,r", "names", ("p", "q", "r")),
        ("1e-3", "inner.rate", 0.001),
        ("green", "inner.kind", "green"),
        ("2", "inner.level", 2),
    ],
)
def test_text_becomes_the_type(text, name, value):
    result = made({name: text})
    for part in name.split("."):
        result = getattr(result, part)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("count", "abc", "an integer at least 0"),
        ("count", "1.5", "an integer"),
        ("count", 1.5, "an integer"),
        ("count", -1, "at least 0"),
        ("count", True, "an integer"),
        ("count", None, "an integer"),
        ("count", [1], "an integer"),
        ("count", "9" * 5000, "an integer"),
        ("on", "maybe", "true or false"),
        ("on", 1, "true or false"),
        ("where", 3, "a path of at most 4096 bytes, with names of at most 255, or none"),
        ("where", "", "a path of at most 4096 bytes"),
        ("betas", "0.1", "values separated by commas"),
        ("betas", [0.1, 0.2, 0.3], "values separated by commas"),
        ("betas", [0.1, "x"], "a number"),
        ("names", {"p": 1}, "separated by commas"),
        ("inner.rate", "0", "above 0 and below 1"),
        ("inner.rate", "1", "above 0 and below 1"),
        ("inner.rate", "nan", "a number"),
        ("inner.rate", float("inf"), "a number"),
        ("inner.rate", True, "a number"),
        ("inner.rate", "1" + "0" * 400, "a number"),
        ("inner.kind", "gren", "'gren' | 'green' | green, red"),
        ("inner.kind", None, "green, red"),
        ("inner.level", True, "2, 3"),
        ("inner.level", "4", "2, 3"),
        ("inner", "red", "its fields, inner.*: rate, kind, level | fix: inner: {rate: ...}"),
        ("inner", None, "its fields, inner.*"),
        ("inner", [], "its fields, inner.*"),
        ("maybe", 3, "none, or its fields, maybe.*"),
        ("maybe.needed", 0, "at least 1"),
    ],
)
def test_wrong_values_name_the_field_the_value_and_what_is_allowed(name, value, allowed):
    text = refusal_of(made, {name: value}, "file.yaml")
    shown = [] if isinstance(value, list | str) and len(value) > 1 else [value]
    says(text, "file.yaml", name, allowed, *shown)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("cuont", "count"),
        ("inner.rat", "inner.rate"),
        ("rate", "inner.rate"),
        ("inner.count", "count"),
        ("iner.kind", "inner.kind"),
        ("maybe.need", "maybe.needed"),
        ("inner.rate.x", "inner.rate"),
        ("zzzzzz", None),
        ("", None),
        (".", None),
        ("inner.", "inner.rate"),
        (3, None),
    ],
)
def test_unknown_keys_name_the_nearest(key, near):
    text = refusal_of(made, {key: 1})
    says(text, f"'{key}'", "known in")
    assert re.findall(r"'([\w.]*)'", text) == [str(key), *([near] if near else [])]


def test_all_unknown_keys_of_another_programs_file_are_named():
    """Up to a section that does not fit, in which the walk ends; the text stays short."""
    given = {"base_model": "x", "cuont": 1, "inner": {"rat": 1, "rate": 0.5}, "stage": "sft"}
    text = refusal_of(made, given)
    says(text, "'base_model'; also unknown: 'cuont' ('count'?), 'inner.rat' ('inner.rate'?), 'stage'")
    says(refusal_of(made, {"stage": 1, "model": 2, "inner": "adamw", "x": 3}), "'stage'; also unknown: 'model'")
    many = refusal_of(made, {f"lots_of_{at}": at for at in range(20)})
    says(many, "'lots_of_0'; also unknown: 'lots_of_1', | 'lots_of_12' and 7 more")
    assert len(many) < 600


def test_layers_merge_field_by_field_and_later_ones_win():
    low = read_layer(Tree, {"count": 1, "inner": {"rate": 0.1, "kind": "green"}, "maybe": {"needed": 2}}, "low")
    high = read_layer(Tree, {"inner.rate": "0.2", "maybe.more": "y"}, "high")
    assert overlay(low, high) == {
        "count": 1,
        "inner": {"rate": 0.2, "kind": "green"},
        "maybe": {"needed": 2, "more": "y"},
    }
    assert low["inner"]["rate"] == 0.1, "a layer was changed"
    assert build_config(Tree, overlay(low, read_layer(Tree, {"maybe": "none"}, ""))).maybe is None
    assert build_config(Tree, overlay(read_layer(Tree, {"maybe": None}, ""), low)).maybe == Maybe(needed=2)


def test_a_missing_field_is_named_with_its_option():
    says(refusal_of(made, {"maybe.more": "y"}), "maybe.needed", "missing", "--maybe.needed")


def test_leaves_are_every_field_in_order_with_values_as_defaults():
    names = [leaf.name for leaf in leaves(Tree())]
    assert names == [
        *("count", "on", "where", "betas", "names", "inner.rate", "inner.kind", "inner.level"),
        *("maybe", "maybe.needed", "maybe.more"),
    ]
    defaults = {leaf.name: leaf.default for leaf in leaves(FULL)}
    assert (defaults["inner.rate"], defaults["maybe.needed"]) == (0.125, 4)
    assert {leaf.name: leaf.default for leaf in leaves(Tree)}["maybe.needed"] is dataclasses.MISSING


@pytest.mark.parametrize(
    "arguments", [{"count": -1}, {"inner": None}, {"inner": {"rate": 0.1}}, {"maybe": 1}, {"names": (1,)}, {"on": "?"}]
)
def test_python_is_checked_like_files(arguments):
    refusal_of(lambda: Tree(**arguments))


def test_python_values_become_the_declared_type():
    assert Tree(where="a/b", betas=[1, 2]).where == Path("a/b")
    assert type(Tree(betas=[1, 2]).betas[0]) is float


# Files

GOOD = {"count": 2, "inner": {"rate": 0.001}, "names": ["a"]}


def test_json_and_yaml_read_the_same(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    (tmp_path / "a.yaml").write_text("count: 2\ninner:\n  rate: 1e-3  # text to YAML\nnames: [a]\n")
    (tmp_path / "b.yml").write_text("\ufeffcount: 2\ninner.rate: 0.001\nnames: a\n", encoding="utf-8")
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps(GOOD), encoding="utf-8")
    configs = [made(read_config_file(tmp_path / name)) for name in ("a.json", "a.yaml", "b.yml", "b.json")]
    assert configs[0] == configs[1] == configs[2] == configs[3] == Tree(count=2, inner=Inner(rate=0.001), names=("a",))


def test_what_yaml_1_1_alone_reads_as_a_number_or_a_date_is_read_as_on_the_command_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("count: 0100  # 64 in YAML 1.1\nwhere: 2026-11-29\ninner: {rate: 1e-3}\n")
    assert made(read_config_file(path)) == Tree(count=100, where=Path("2026-11-29"), inner=Inner(rate=0.001))
    path.write_text("count: 1:30  # 90 in YAML 1.1\n")
    says(refusal_of(lambda: made(read_config_file(path))), "count: '1:30'")


def test_the_users_folder_is_that_of_a_shell_also_behind_a_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert made({"where": "~/a~/b"}) == Tree(where=Path("/home/me/a~/b"))
    assert Tree(names=("n=~/a", "~b", "a/~/b")).names == ("n=/home/me/a", "~b", "a/~/b")


def test_a_number_that_is_too_large_is_told_the_largest():
    for value in ("9" * 20, 10**400, 10**5000):
        says(refusal_of(made, {"count": value}), "at most 1e+15")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"", "is empty"),
        ("a.yaml", b" \n\n", "is empty"),
        ("a.yaml", b"# only a comment\n", "holds nothing"),
        ("a.yaml", b"null\n", "holds nothing"),
        ("a.json", b"[1, 2]", "holds a list"),
        ("a.yaml", b"just words", "holds a str"),
        ("a.json", b'{\n "count": 1,\n}', "malformed JSON at line"),
        ("a.json", b'{\n "count" 1\n}', "line 2, column 10"),
        ("a.json", b'{"count": 1', "line 1"),
        ("a.json", b'{"count": 1} x', "line 1, column 14"),
        ("a.json", b"[" * 200_000, "nested | deep"),
        ("a.yaml", b"count: 1\n  on: true\n", "line 2"),
        ("a.yaml", b"count: [1\non: true\n", "line 2"),
        ("a.yaml", b"count: 1\n\ton: true\n", "line 2"),
        ("a.yaml", b"count: *nowhere\n", "line 1"),
        ("a.yaml", b"count: 1\n---\ncount: 2\n", "line 2"),
        ("a.yaml", b"count: !!python/object/apply:os.getcwd []\n", "line 1"),
        ("a.yaml", b"? [a]\n: 1\n", "line 1"),
        ("a.yaml", b"count: 1\x00\n", "YAML"),
        ("a.json", b'{"count": 1, "count": 2}', "'count' | twice"),
        ("a.yaml", b"inner:\n  rate: 0.1\n  rate: 0.2\n", "'rate' | twice"),
        ("a.json", b'{"count": "\xff"}', "UTF-8 | byte 11"),
        ("a.toml", b"count = 1", "'.toml' | .json, .yaml, .yml"),
        ("a", b"{}", ".json, .yaml, .yml"),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    says(refusal_of(read_config_file, path), path, words)


def test_missing_file_directory_and_number(tmp_path):
    says(refusal_of(read_config_file, tmp_path / "gone.yaml"), "gone.yaml", "no such")
    (tmp_path / "folder.json").mkdir()
    says(refusal_of(read_config_file, tmp_path / "folder.json"), "folder.json", "cannot be read")
    (tmp_path / "a.json").write_text('{"inner": {"rate": NaN}}')
    assert "inner.rate" in refusal_of(lambda: made(read_config_file(tmp_path / "a.json")))


def test_a_yaml_bomb_is_refused_at_once(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, "count: *a11"]))
    refusal_of(lambda: made(read_config_file(tmp_path / "bomb.yaml")))
    values = read_config_file(tmp_path / "bomb.yaml")
    assert "count" in refusal_of(made, {"count": values["count"]})

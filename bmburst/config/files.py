"""Configuration files: JSON and YAML to nested dictionaries, and JSON back, written atomically."""

import json
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from bmburst.errors import UserError


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the object that a JSON (.json) or YAML (.yaml, .yml) file holds.

    Raises:
        UserError: The file is missing, empty, malformed (the line is named), of another kind, not UTF-8, or gives a
            key twice.
    """
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise UserError(f"{path}: a configuration file of unknown kind '{path.suffix}'\nallowed: .json, .yaml, .yml")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file\nfix: give the path of a .json or .yaml file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}\nfix: give a file you may read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}\nfix: save it as UTF-8") from None
    if not text.strip():
        raise UserError(f"{path}: the configuration file is empty\nfix: write at least one field, or leave it out")
    values = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    if not isinstance(values, dict):
        what = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: holds {what}\nallowed: one object of fields, for example steps: 100")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object as JSON; a reader sees the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _parse_json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            keys = [key for key, _ in pairs]
            raise _given_twice(path, next(key for key in keys if keys.count(key) > 1))
        return values

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: malformed JSON at {where}: {error.msg}\nfix: correct that line") from None
    except RecursionError:
        raise UserError(f"{path}: malformed JSON: nested too deeply\nfix: give one object of fields") from None


def _parse_yaml(path: Path, text: str) -> Any:
    # Imported here: the command line starts in milliseconds without it.
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice, of which YAML would keep the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = [key for key in keys if keys.count(key) > 1]
            if twice:
                raise _given_twice(path, twice[0])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}: malformed YAML{where}: {error.problem}\nfix: correct that line") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: malformed YAML: {reason}\nfix: correct the file") from None
    except RecursionError:
        raise UserError(f"{path}: malformed YAML: nested too deeply\nfix: give one object of fields") from None


def _given_twice(path: Path, key: str) -> UserError:
    return UserError(f"{path}: key '{key}' is given twice\nfix: keep one of them")

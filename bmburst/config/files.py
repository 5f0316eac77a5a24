"""Reads JSON and YAML with limits on size, depth and numbers, and writes JSON atomically."""

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bmburst.errors import UserError, first_line, hub_fix
from bmburst.outputs import replacing

_MOST_JSON, _MOST_CONFIG = 256 << 20, 1 << 20  # bytes; parsing YAML takes seconds per MiB
_MOST_DEPTH, _MOST_INTEGER = 64, 2**64
_YAML_1_1 = re.compile(r"timestamp .*|int [-+]?0[0-9_]+|(int|float) .*:.*", re.DOTALL)
_YAML_TEXT = "tag:yaml.org,2002:str"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        UserError: The file is missing, not a regular file, larger than 256 MiB, or refused by `parse_json`.
    """
    try:
        data = read_bytes(path, _MOST_JSON)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}\nfix: give a directory that has it{hub_fix(path.parent)}"
        ) from error
    try:
        values = parse_json(data)
    except ValueError as error:
        raise UserError(f"{path} {error}\nfix: copy the file again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} does not hold a JSON object\nfix: copy the file again")
    return values


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of some keys and values; ValueError if a key is there twice. A `pairs` of `parse_json`."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("holds a key twice")
    return values


def parse_json(
    data: bytes | str, *, finite: bool = False, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Parse JSON with limits on depth (64) and integers (64 bits; a larger one is a float).

    Args:
        data: UTF-8 bytes, or text.
        finite: Whether to refuse Infinity and NaN, which standard JSON does not have.
        pairs: Function that builds an object from its keys and values (`object_pairs_hook`).

    Raises:
        ValueError: The data are not valid; the message begins with "is" or "holds". JSONDecodeError if malformed.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        values = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=_integer,
            parse_float=_finite_number if finite else None,
            parse_constant=_no_constant if finite else None,
        )
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not valid JSON: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"is not valid JSON: {error.msg}", error.doc, error.pos) from None
    _require_shallow([values])
    return values


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file. Pipes and devices are refused, because they may never end.

    Raises:
        OSError: The file cannot be read.
        UserError: The path is not a regular file, or the file has more than `most` bytes.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # the name has a zero byte
        raise UserError(f"cannot read {path}: {error}\nfix: give the path of a file") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"cannot read {path}: it is a device or a pipe\nfix: give the path of a file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} is larger than {most >> 20} MiB, the limit for such a file\nfix: give another file")
    return data


def _integer(digits: str) -> int | float:
    """Return an integer; beyond 64 bits as a float, which is refused wherever an integer is asked for.

    transformers writes such a one, 10**30, into the tokenizer_config.json of models that state no length.
    """
    number = int(digits) if len(digits) <= 20 else _MOST_INTEGER
    if abs(number) < _MOST_INTEGER:
        return number
    wide = float(digits)
    if math.isinf(wide):
        raise ValueError(f"holds {digits[:30]}{'...' if len(digits) > 30 else ''}, an integer that no float can hold")
    return wide


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"holds {digits[:30]}, which is not a finite number")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which is not a finite number")


def _require_shallow(values: Any) -> None:
    level: list[Any] = [values]
    for _ in range(_MOST_DEPTH + 1):
        below: Iterable[Any] = (
            part for value in level for part in (value.values() if isinstance(value, dict) else value)
        )
        level = [part for part in below if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"is nested too deeply\nallowed: {_MOST_DEPTH} levels")


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the object in a JSON (.json) or YAML (.yaml, .yml) file.

    Raises:
        UserError: The file is missing, empty, malformed (the message names the line), of another type, not UTF-8, or
            has a key twice.
    """
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise UserError(
            f"{path}: unknown type of configuration file '{path.suffix}'\nallowed: .json, .yaml, .yml\n"
            "fix: give a file of one of these types, named so"
        )
    try:
        text = read_bytes(path, _MOST_CONFIG).decode("utf-8-sig")
    except FileNotFoundError:
        where = "; recipes are in the folder recipes of bmburst's repository, not in the installed package"
        raise UserError(
            f"{path}: no such configuration file\n"
            f"allowed: a .json or .yaml file{where if path.suffix != '.json' else ''}\nfix: correct the path"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}\nfix: give a file you may read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}\nfix: save it as UTF-8") from None
    if not text.strip():
        raise UserError(f"{path}: the configuration file is empty\nfix: write at least one field, or leave it out")
    values = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    if not isinstance(values, dict):
        what = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(
            f"{path}: holds {what}\nallowed: one object of fields\nfix: write fields, for example steps: 100"
        )
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _parse_json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise _given_twice(path, next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
        return values

    try:
        return parse_json(text, pairs=once)
    except UserError:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        reason = error.msg.removeprefix("is not valid JSON: ")
        raise UserError(f"{path}: malformed JSON at {where}: {reason}\nfix: correct that line") from None
    except ValueError as error:
        raise UserError(f"{path}: {first_line(error)}\nfix: give one object of fields") from None


def _parse_yaml(path: Path, text: str) -> Any:
    # Imported here: the command line starts in milliseconds without it.
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses duplicate keys, where YAML keeps the last, and adds positions to errors of values.

        What YAML 1.1 alone reads as a number or a date is text, which is then read as on the command line: 0100 is 64
        to YAML 1.1 and 100 to YAML 1.2, and 1:30 is 90.
        """

        def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
            tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
            is_plain = kind is yaml.ScalarNode and implicit[0]
            return _YAML_TEXT if is_plain and _YAML_1_1.fullmatch(f"{tag.rpartition(':')[2]} {value}") else tag

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, count in keys.items() if count > 1]:
                raise _given_twice(path, twice[0])
            return super().construct_mapping(node, deep)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (UserError, yaml.YAMLError, RecursionError):
                raise
            except Exception as error:  # an invalid value for a tag or a date; each constructor raises its own type
                kind = node.tag.rpartition(":")[2]
                problem = f"a value that is not a valid {kind}" if kind else str(error)
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}: malformed YAML{where}: {error.problem}\nfix: correct that line") from None
    except yaml.YAMLError as error:
        reason = first_line(error)
        raise UserError(f"{path}: malformed YAML: {reason}\nfix: correct the file") from None
    except RecursionError:
        raise UserError(f"{path}: malformed YAML: nested too deeply\nfix: give one object of fields") from None
    except ValueError as error:  # PyYAML's reader and scanner raise it for escapes that are not characters
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: malformed YAML: {str(error)[:100]}\nfix: correct the file") from None


def _given_twice(path: Path, key: str) -> UserError:
    return UserError(f"{path}: key '{key}' is given twice\nfix: keep one of them")

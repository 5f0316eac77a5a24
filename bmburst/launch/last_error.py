"""Keeps the last error of this user's commands, without what it says of paths, names and data, for a report.

Of an error, only what stands in the code is kept: its type, where it was raised in installed packages, and the constant
parts of the message of an error that bmburst raised. Values are replaced. This file imports only the standard library:
ranks load it by its path.
"""

import ast
import contextlib
import json
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_OWN = ("bmburst", "bmburst_ops", "model_center_ext", "benchmarks")
_PACKAGES = frozenset(
    {
        *("torch", "triton", "numpy", "bmtrain", "model_center", "transformers", "tokenizers", "safetensors", "yaml"),
        *("accelerate", "peft", "trl", "datasets", "pyarrow", "fla", "flash_attn", "cpm_kernels", "jinja2", "tqdm"),
        *("tensorboard", "matplotlib", "wandb", "starlette", "uvicorn", "anyio", "h11", "huggingface_hub", "pandas"),
    }
)
"""Packages in whose files an error may be told by its place; a package of the user's may have a name to keep."""
_MOST_FRAMES, _MOST_ERRORS = 30, 5
VALUE = "<value>"
"""What stands in place of a value."""


def place() -> Path:
    """Return the file of the last error, in the user's folder for the state of programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "bmburst" / "last_error.json"


def record(error: BaseException) -> None:
    """Keep an error. Does nothing where the file cannot be written."""
    _write({"time": time.time(), "errors": [_described(each) for each in _chain(error)]})


def add_command(command: str, options: Mapping[str, Any], since: float) -> None:
    """Add the command that has failed, if an error was kept since its start.

    Args:
        command: Its name.
        options: Its options, without values that are the user's own.
        since: When it started, by `time.time`.
    """
    found = read()
    if found is not None and found["time"] >= since:
        _write({**found, "command": command, "options": dict(options)})


def read() -> dict[str, Any] | None:
    """Return the last error; None if there is none, or its file is damaged."""
    try:
        found = json.loads(place().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("time"), float) else None


def _write(content: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a disk that is full or may not be written
        path = place()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, part = tempfile.mkstemp(dir=path.parent)  # for this user only
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(part, path)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from or while handling, the latest first."""
    found: BaseException | None = error
    for _ in range(_MOST_ERRORS):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _described(error: BaseException) -> dict[str, Any]:
    frames = [
        (Path(frame.filename), frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)
    ]
    shown = [(_relative(path), line, name) for path, line, name in frames]
    described: dict[str, Any] = {
        "type": _type_of(error),
        "raised": [
            "in a file of another program" if where is None else f"{where}:{line} {name}"
            for where, line, name in shown[-_MOST_FRAMES:]
        ],
    }
    name = getattr(error, "name", None)
    if isinstance(error, ImportError | AttributeError) and isinstance(name, str) and shown and shown[-1][0] is not None:
        described["name"] = name if name.replace(".", "_").isidentifier() else VALUE
    if frames and (text := _constant_text(*frames[-1][:2])):
        described["message"] = text
    return described


def _relative(path: Path) -> str | None:
    """Return the path of a file within Python or a known package; None for other files, whose names are the user's."""
    path = path if path.is_absolute() else path.absolute()
    for own in _OWN:
        if path.is_relative_to(_ROOT / own):
            return path.relative_to(_ROOT).as_posix()
    for kind in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(kind))
        if path.is_relative_to(folder):
            found = path.relative_to(folder)
            return found.as_posix() if found.parts[0].removesuffix(".py") in _PACKAGES else None
    folder = Path(sysconfig.get_path("stdlib"))
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else None


def _type_of(error: BaseException) -> str:
    """Return the name of an error's class, if the class is of Python or of a known package."""
    kind = type(error)
    # The script of a rank is run as __main__, whose file is that of the rank.
    file = None if kind.__module__ == "__main__" else getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_known = kind.__module__ == "builtins" or (file is not None and _relative(Path(file)) is not None)
    return f"{kind.__module__}.{kind.__qualname__}" if is_known else "an exception of another program"


def _constant_text(path: Path, line: int) -> str:
    """Return the text that a statement of bmburst has in its code, with `VALUE` for what is filled in."""
    if not any(path.is_relative_to(_ROOT / own) for own in _OWN):
        return ""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ""
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise | ast.Expr | ast.Assign | ast.Return)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not statements:
        return ""
    smallest = max(statements, key=lambda node: node.lineno)
    made = _maker(tree, smallest)
    parts = [smallest] if made is None else [node for node in ast.walk(made) if isinstance(node, ast.Return)]
    return " ".join(" ".join(_texts(part)) for part in parts).strip()


def _maker(tree: ast.Module, statement: ast.stmt) -> ast.FunctionDef | None:
    """Return the function of this file that makes the error of a `raise`: `raise self._unexpected(word)`."""
    call = statement.exc if isinstance(statement, ast.Raise) else None
    if not isinstance(call, ast.Call):
        return None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(found, None)


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a piece of code, in order."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)

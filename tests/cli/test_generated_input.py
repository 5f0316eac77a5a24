"""Generated values for every option, and generated files for every reader: refused in three lines, or taken."""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from benchmarks.engine.kinds import KINDS, Results, load_kind
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.files import newest_complete, read_progress
from bmburst.checkpoint.hugging_face import open_weights
from bmburst.checkpoint.model_center import ModelCenterConfig
from bmburst.checkpoint.sharded_files import parts_of
from bmburst.checkpoint.tensor_files import open_tensors
from bmburst.cli import COMMANDS, CommandParser, find_command, main
from bmburst.data.documents import check_beginnings, read_documents
from bmburst.data.sources import find_sources
from bmburst.data.token_file import MAGIC, PREAMBLE, TokenFile
from bmburst.data.token_writer import write_token_file
from bmburst.data.tokenizer import ByteTokenizer, load_huggingface_tokenizer
from bmburst.errors import UserError
from bmburst.schedule.hardware import load_hardware
from bmburst.train.metrics import read_lines
from bmburst.train.resolve import read_hugging_face_config, resolve
from tests import tiny
from tests.pairs import long

EXAMPLES = pytest.mark.parametrize("examples", [15, *long(int(os.environ.get("EXAMPLES", "60")))])
"""Of each reader: some, and more of them."""
SECONDS = 60  # that one value may take: none comes near it but one that hangs
BOUNDED = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SMALL = tiny.config(vocab_size=11, hidden_size=8, intermediate_size=6, num_layers=1, num_heads=2, num_kv_heads=1)
DEEP = "[" * 5000 + "]" * 5000
NASTY = [
    *("", " ", "-", "--", "0", "-1", "1", "2", "3.5", "1e3", "1e999", "-0", "nan", "inf", "-inf", "true", "none"),
    *("null", "1,2", ",", "1,", "0,1", "1,2,", "9" * 23, "-" + "9" * 23, "9" * 5000, "0x" + "f" * 5000, "1e400"),
    *("1_0", "\u0664", "64K", "9" * 12 + "M", "K", "1.5K", "a\nb\nc\nd\ne", "\u2028", "\x00", "a\x00b", "\udce9"),
    *("caf\udce9", "\x1b[31m", "x" * 300, "x/" * 3000, "x" * 100_000, "../../../..", "/", ".", "~", "/dev/null"),
    *("/proc/self/mem", "file", "folder", "pipe", "new.json", "new.png", "file.json", "gone/new.json", "*", "["),
    *("[!", "{}", "%s", "'", '"', "$(true)", "llama-tiny", "auto", "causal", "float32", "bfloat16", "block"),
    *("none:0.5", "none+first-0", "block:2", "+", ":", "2024-13-45", "!!int x", "zigzag", "bytes", "stdlib"),
    *("3-5", "5-3", "0-0", "9" * 30 + "-1", "2**9", "h200"),
]
WORDS = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.lists(st.sampled_from(NASTY[:30]), max_size=4).map(",".join),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 70),
    st.just(10**400),
    st.floats(),
    st.sampled_from(NASTY),
    st.text(max_size=10),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
RAW = [
    DEEP,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "9" * 5000,
    "1e999",
    "-Infinity",
    '"\\ud800"',
    '"\\u0000"',
    "[1e999]",
    "nul",
]


class _Hung(BaseException):
    """Not an Exception: nothing may take it for bad input."""


@contextlib.contextmanager
def _bounded():
    def hung(*_):
        raise _Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _taken_or_refused(read, *arguments):
    with _bounded():
        try:
            read(*arguments)
        except UserError as error:
            _require_brief(str(error))


def _require_brief(text):
    assert 1 <= len(text.splitlines()) <= 3, text
    assert len(text) < 5000
    text.encode()  # a terminal takes it


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with something of each kind to name, and stand-ins for what would work for long."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "file").write_text("text\n" * 50)
    (folder / "file.json").write_text("{}")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL.to_hugging_face()))
    weights = {name: torch.zeros(shape) for name, shape in hugging_face.expected_shapes(SMALL).items()}
    save_file(weights, model / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
            patch.delenv(name, raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("bmburst.launch.launcher.launch", lambda *_: 3)
        patch.setattr("benchmarks.engine.job.launch", lambda *_: 2)
        patch.setattr("bmburst.plan.rates.calibrate", lambda *_: "# Measured")
        patch.setattr("bmburst.setup.doctor.examine", lambda _: [])
        patch.setattr("bmburst.setup.doctor.can_train", lambda *_: True)
        patch.setattr("bmburst.setup.doctor.to_text", lambda *_: "")
        patch.setattr("bmburst.setup.doctor.to_json", lambda *_: "")
        patch.setattr("bmburst.setup.doctor.CHECKS", ())
        patch.setattr("bmburst.cli.serve._serve", lambda _: 15)
        patch.setattr("bmburst.cli.serve._require_template", lambda _: None)
        patch.setattr("bmburst.setup.build_bmtrain.check_toolchain", lambda spec: spec)
        patch.setattr("bmburst.setup.build_bmtrain.build_wheel", lambda spec, _: spec.output)
        yield folder


BASE = {
    "train": (),
    "check": (),
    "eval": ("--checkpoint", "model", "--data", "file"),
    "generate": ("--checkpoint", "model", "--prompts", "file", "--max-new-tokens", "2"),
    "serve": ("--checkpoint", "model", "--port", "0"),
    "launch": ("--dry-run",),
    "doctor": (),
    "data": ("--input", "file", "--output", "out.tokens"),
    "convert": ("model", "converted", "--to", "bmburst"),
    "bench": ("attention", "--ranks", "2", "--tokens", "1K", "--list"),
    "bench train": ("train", "--ranks", "2", "--tokens", "1K", "--preset", "tiny-8-heads", "--list"),
    "plan": ("--preset", "llama-tiny", "--sequence-length", "1K", "--nproc", "2"),
    "build-bmtrain": ("--arch", "90"),
}


def _options(command):
    parser = CommandParser(prog="bmburst", description="")
    find_command(command).configure(parser)
    return [
        (action.option_strings[0], action.nargs != 0)
        for action in parser._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    ]


def _call(argv):
    out, err = io.StringIO(), io.StringIO()
    with _bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    if status == 2:
        said = err.getvalue()
        assert said.startswith("bmburst "), said[:300]
        _require_brief(said)


def test_every_command_is_here():
    assert {name.split()[0] for name in BASE} == set(COMMANDS)


@EXAMPLES
@pytest.mark.parametrize("name", BASE)
def test_options(here, name, examples):
    command = name.split()[0]
    options = _options(command)

    @settings(BOUNDED, max_examples=examples)
    @given(st.lists(st.tuples(st.sampled_from(options), WORDS), min_size=1, max_size=2), st.booleans())
    def call(chosen, joined):
        words = [command, *BASE[name]]
        for (option, takes_value), value in chosen:
            words += [option] if not takes_value else [f"{option}={value}"] if joined else [option, value]
        if command == "launch":
            words += ["--", "file"]
        _call(words)

    call()


def _read_state(path):
    folder = path.parent
    newest = newest_complete(folder.parent.parent)
    read_progress(folder)
    return newest


def _read_results(path):
    for kind in map(load_kind, KINDS):
        _taken_or_refused(partial(Results.read, kind), path)


def _read_jsonl(path):
    files = find_sources([path])
    check_beginnings(files)
    return [list(document.pieces) for document in read_documents(files)]


def _read_parts(path):
    hugging_face.check_weights(path.parent, SMALL)


def _read_model(path):
    hugging_face.check_weights(path.parent, hugging_face.read_config(path.parent))
    read_hugging_face_config(path.parent)
    open_weights(path.parent)


# Where a file lies, what it holds, and what reads it; generated values take the place of parts of it.
STATE = {"format": "bmburst-checkpoint-1", "step": 2, "data": {}, "tokenizer": "bytes", "files": {}}
CELL = {"suite": "sequence", "method": "ours", "ranks": 2, "device": "cpu", "tokens": 8, "heads": 1, "kv_heads": 1}
FORMAT = load_kind("attention").format
ROWS = {"a": {"cell": CELL, "run": 0, "status": "ok"}}
JSON_READERS = {
    "config.json": (SMALL.to_hugging_face(), _read_model),
    "qwen2/config.json": (SMALL.to_hugging_face() | {"model_type": "qwen2", "use_sliding_window": True}, _read_model),
    "center/config.json": (ModelCenterConfig.of(SMALL, "float32").to_values(), _read_model),
    "model.safetensors.index.json": ({"weight_map": {"a": "b.safetensors"}}, _read_parts),
    "index/model.safetensors.index.json": ({"weight_map": {"a": "b.safetensors"}}, parts_of),
    "run/checkpoints/step-000002/state.json": (STATE, _read_state),
    "results.json": (
        {"format": load_kind("attention").format, "runs": [{}], "rows": ROWS, "running": None},
        _read_results,
    ),
    "train.json": ({"steps": 3, "model": {"num_layers": 1}, "data": {"source": "file"}}, lambda path: resolve((path,))),
    "tokens/tokenizer.json": ({"version": "1.0", "model": {}}, lambda path: load_huggingface_tokenizer(str(path))),
    "lines.jsonl": ({"text": "a"}, _read_jsonl),
    "metrics.jsonl": ({"step": 1, "loss": 1.0}, read_lines),
}


def _places(values, path=()):
    yield path
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _places(value, (*path, key))


def _with(values, path, text):
    """Return JSON in which this text stands at a place."""
    if not path:
        return text
    parts = {key: json.dumps(value) for key, value in values.items()}
    parts[path[0]] = _with(values[path[0]], path[1:], text)
    return "{" + ",".join(f"{json.dumps(key)}:{part}" for key, part in parts.items()) + "}"


@EXAMPLES
@pytest.mark.parametrize("name", JSON_READERS)
def test_json(here, tmp_path, name, examples):
    values, read = JSON_READERS[name]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    places = list(_places(values))

    def written(text):
        path.write_bytes(text.encode("utf-8", "surrogatepass") + b"\n")
        _taken_or_refused(read, path)

    for place in places:
        for text in RAW:
            written(_with(values, place, text))

    @settings(BOUNDED, max_examples=examples)
    @given(st.sampled_from(places), VALUES)
    def change(place, value):
        written(_with(values, place, json.dumps(value)))

    change()


YAML = (
    st.text(max_size=200)
    | st.lists(WORDS, max_size=5).map("\n".join)
    | st.sampled_from(
        [
            "output: 2024-13-45",
            "steps: !!int x",
            "seed: !!float x",
            "output: !!timestamp x",
            "steps: 0x" + "f" * 5000,
            "steps: " + "9" * 5000,
            "a: &a [*a]",
            "? *a",
            DEEP,
            "{a: " * 3000,
            '"\\ud800": 1',
            "output: a\0b",
            "<<: 5",
            "- &a {b: 1}\n" + "- <<: [*a, *a]\n" * 50,
            "output: !!binary x",
            "!!set x",
            "!!python/name:os.system x",
        ]
    )
)


@EXAMPLES
def test_yaml(here, examples):
    path = here / "train.yaml"

    @settings(BOUNDED, max_examples=examples)
    @given(YAML)
    def written(text):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        _taken_or_refused(resolve, (path,))

    written()


@EXAMPLES
def test_token_headers(here, tmp_path, examples):
    path = tmp_path / "text.tokens"
    write_token_file(path, read_documents(find_sources([here / "file"])), ByteTokenizer())
    whole = path.read_bytes()
    _, at, length = PREAMBLE.unpack(whole[: PREAMBLE.size])
    header = json.loads(whole[at : at + length])
    places = list(_places(header))

    def written(text):
        data = text.encode("utf-8", "surrogatepass")
        path.write_bytes(PREAMBLE.pack(MAGIC, at, len(data)) + whole[PREAMBLE.size : at] + data)
        _taken_or_refused(TokenFile.open, path)

    for place in places:
        for text in RAW:
            written(_with(header, place, text))

    @settings(BOUNDED, max_examples=examples)
    @given(st.sampled_from(places), VALUES)
    def change(place, value):
        written(_with(header, place, json.dumps(value)))

    change()


@EXAMPLES
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "text.tokens", "machine.toml"])
def test_bytes(here, tmp_path, name, examples):
    """Any byte of a file may have changed, and its end may be missing."""
    path = tmp_path / name
    read = {"text.tokens": TokenFile.open, "machine.toml": lambda path: load_hardware(str(path))}.get(
        name, open_tensors
    )
    if name == "text.tokens":
        write_token_file(path, read_documents(find_sources([here / "file"])), ByteTokenizer())
    elif name == "machine.toml":
        path.write_text("name = 'here'\n[peak]\nvalue = 0x" + "f" * 5000 + "\n")
    elif name == "model.safetensors":
        path.write_bytes(save({"a": torch.ones(2, 3)}))
    else:
        torch.save({"a": torch.ones(2, 3)}, path)
    _taken_or_refused(read, path)
    whole = path.read_bytes()

    @settings(BOUNDED, max_examples=examples)
    @given(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=9), st.booleans())
    def change(at, data, cut):
        path.write_bytes(whole[:at] + data + (b"" if cut else whole[at + len(data) :]))
        _taken_or_refused(read, path)

    change()


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--preset", "llama-tiny", "--sequence-length", "9" * 23],
        ["train", "--steps", "9" * 23],
        ["train", "--output", b"caf\xe9"],
        *long(["bench", "train", "--ranks", "2", "--steps", "0"]),  # imports torch
    ],
)
def test_the_command_itself(tmp_path, argv):
    command = [sys.executable, "-m", "bmburst", *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    _require_brief(done.stderr.decode())
    assert not list(tmp_path.iterdir())

"""The files of a tokenizer and of generation that checkpoints of a run hold."""

import json
from collections.abc import Mapping
from pathlib import Path

from bmburst import data
from bmburst.checkpoint.files import newest_complete
from bmburst.config import read_json
from bmburst.data.answer_ends import answer_ends
from bmburst.data.mixture import MixedFiles
from bmburst.data.tokenizer import GENERATION_CONFIG, tokenizer_files
from bmburst.data.tokenizer_folder import kept_files
from bmburst.errors import UserError
from bmburst.launch.start import Runtime
from bmburst.train.config import TrainConfig

_MODEL, _EOS = "config.json", "eos_token_id"


def read_tokenizer(name: str, identity: str | None, chat_template: Path | None) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files that checkpoints include, by file name.

    Empty for the byte tokenizer, for a name on the hub that is not in the local cache, and for another identity.

    Args:
        name: Name of the tokenizer.
        identity: Its identity when the text was tokenized; None: any.
        chat_template: A file whose template replaces that of the tokenizer.

    Raises:
        UserError: A file cannot be read, or is not a tokenizer.
    """
    try:
        files = tokenizer_files(name)
        if not files or (identity is not None and data.load_tokenizer(name).identity != identity):
            return {}
        return kept_files(files, chat_template)
    except OSError as error:
        raise UserError(
            f"tokenizer '{name}': cannot read {error.filename}: {error.strerror}\n"
            "fix: give its files read permission, because checkpoints include them, or --data.tokenizer with another"
        ) from error


def kept_with_model(text: data.TokenFile | MixedFiles, config: TrainConfig) -> dict[str, bytes]:
    """Return the tokenizer files of a run, and a generation_config.json with the tokens that end an answer.

    These tokens are those of the model that the run starts from, or else the end-of-document token; and the special
    tokens that end the answers of the data, without which a base model that learns to chat would never stop. A
    checkpoint of an adapter has a generation_config.json if its tokenizer has one, or if the data add a token to those
    of the base model.
    """
    files = read_tokenizer(text.tokenizer_name, text.tokenizer_identity, config.data.chat_template)
    model = config.init_from
    if model is not None and not (model / _MODEL).is_file():  # a run can be resumed without this directory
        return files | _kept_before(config.output)
    path = None if model is None else model / GENERATION_CONFIG
    if GENERATION_CONFIG in files:
        path = tokenizer_files(text.tokenizer_name)[GENERATION_CONFIG]
    values = read_json(path) if path is not None and path.is_file() else {}
    own = values.get(_EOS)
    if own is None and model is not None:
        own = read_json(model / _MODEL).get(_EOS)
    ids = own if isinstance(own, list) else [text.eos_id if own is None else own]
    missing = sorted(_learned_ends(text, files) - set(ids))
    if not missing and (config.lora.is_on or GENERATION_CONFIG in files):
        return files
    values = {**values, _EOS: [*ids, *missing] if missing or isinstance(own, list) else ids[0]}
    return files | {GENERATION_CONFIG: f"{json.dumps(values)}\n".encode()}


def _learned_ends(text: data.TokenFile | MixedFiles, files: Mapping[str, bytes]) -> frozenset[int]:
    """Return the special tokens that end the answers of the data; empty if the tokenizer has no files here."""
    if not files:  # bytes end with the end-of-document token
        return frozenset()
    tokenizer = data.load_tokenizer(text.tokenizer_name)
    parts = (text,) if isinstance(text, data.TokenFile) else text.files
    return frozenset().union(*(answer_ends(file, tokenizer).tokens for file in parts))


def kept_by_rank_0(text: data.TokenFile | MixedFiles, config: TrainConfig, runtime: Runtime) -> dict[str, bytes]:
    """Return `kept_with_model` on rank 0, which writes the files, and nothing on the others; every rank calls it.

    Raises:
        UserError: On all ranks, if a file cannot be read, so that no rank waits for rank 0.
    """
    from bmburst.checkpoint.sharded_files import on_every_rank

    files: dict[str, bytes] = {}
    on_every_rank(lambda: files.update(kept_with_model(text, config) if runtime.rank == 0 else {}))
    return files


def _kept_before(run_folder: Path | None) -> dict[str, bytes]:
    """Return the generation_config.json of the newest checkpoint of a run, by name; empty if there is none."""
    newest = None if run_folder is None else newest_complete(run_folder)
    kept = None if newest is None else newest / GENERATION_CONFIG
    return {kept.name: kept.read_bytes()} if kept is not None and kept.is_file() else {}

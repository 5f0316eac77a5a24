"""Builds `TrainConfig` from presets, files, options and data, and checks its files.

Its top imports no torch and no numpy, which --help does not need: functions import what does.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmburst import __version__
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import preset
from bmburst.checkpoint.model_center import ModelCenterConfig, is_model_center
from bmburst.config import (
    build_config,
    flat,
    leaves,
    overlay,
    read_config_file,
    read_json,
    read_layer,
    to_dict,
    write_json,
)
from bmburst.errors import UnknownKey, UserError, hub_fix, no_directory, with_fix
from bmburst.record_format import RecordFormat
from bmburst.schedule.pipeline import default_batch
from bmburst.train.config import TrainConfig
from bmburst.train.metrics import require_wandb
from bmburst.train.sections import STANDARD_LIBRARY
from bmburst.train.sources import check_sources, require_filled

CONFIG_FILE = "config.json"
_LONGEST = "max_position_embeddings"
_RECORD_FIELDS = frozenset(each.name for each in dataclasses.fields(RecordFormat))
# Not part of a run's config.json, so that it can start another run.
_OF_ONE_CALL = ("output", "resume")
# Fields that determine the order of the data, the shapes and meaning of the weights, or the optimizer state.
_FIXED_ON_RESUME = ("model", "data", "sequence_length", "pack", "seed", "dtype", "lora", "dpo")
# Other data, another tokenizer or another template give other tokens, which the state of a checkpoint refuses.
# Rates of adapters may change, as other rates.
_MAY_MOVE = (
    *("data.source", "data.tokenizer", "data.chat_template", "data.validation", "data.cache", "data.verify"),
    "dpo.reference",
    *("lora.init_from", "lora.dropout", "lora.loraplus_lr_ratio"),
)
_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


def resolve(
    files: tuple[Path, ...] = (),
    options: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return the configuration of files and options. Later files override earlier ones, options override files.

    Fields of the model that are not given come from the directory `init_from`, else from `preset`.

    Args:
        files: JSON or YAML files; one may be the config.json of a ModelCenter LLaMA, which sets the model.
        options: Maps dotted names to values, or to text as on the command line.
        defaults: Maps dotted names to values in place of the defaults of `TrainConfig`.

    Raises:
        UserError: A file, key or value is wrong, or values contradict each other.
    """
    layers = [_layer_of(file) for file in files]
    below, above = overlay(*layers), read_layer(TrainConfig, options or {}, "")
    given = overlay(read_layer(TrainConfig, defaults or {}, ""), below, above)
    _follow_adapter(given)
    whole = next((n for n in range(1, 1 + len(files)) if _names_whole_model(overlay(*layers[:n]))), None)
    if "preset" in above and whole and _model_of(layers, above) != _model_of(layers[whole:], above):
        raise UserError(
            f"preset '{above['preset']}' has no effect: {files[whole - 1]} gives every field of the model\n"
            "fix: leave --preset out, or 'model' out of the file"
        )
    if "epochs" in above and "steps" in above and above["epochs"] is not None:
        raise UserError(
            f"steps {above['steps']} and epochs {above['epochs']} are both given\nallowed: one of them\n"
            "fix: leave --steps or --epochs out"
        )
    if "steps" in above:  # in place of the epochs of a file
        given["epochs"] = None
    if given.get("init_from") is not None and "preset" not in given:
        given["preset"] = None
    _follow_model(given, below, above)
    set_defaults_of_data(given)
    _set_default_of_stages(given)
    base = _base_model(given)
    values = overlay({"model": base}, given)
    if given.get("init_from") is not None and base:
        _set_trained_length(values["model"], base)
    return build_config(TrainConfig, values)


def given_values(files: tuple[Path, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that files and options give, as nested dictionaries; arguments as in `resolve`."""
    return overlay(*map(_layer_of, files), read_layer(TrainConfig, options, ""))


def given_names(files: tuple[Path, ...], options: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of the fields that files and options give; arguments as in `resolve`."""
    return {name for name, _ in flat(given_values(files, options))}


def check_run(config: TrainConfig, world_size: int, local_rank: int = 0) -> None:
    """Check a run before it starts: the parallel degrees, this machine (`require_machine`) and files (`check_paths`).

    Args:
        config: The run.
        world_size: Number of ranks.
        local_rank: Rank whose GPU is checked, if there are GPUs.

    Raises:
        UserError: A check fails.
    """
    from bmburst.train.machine import require_machine

    config.validate(world_size)
    require_machine(config, world_size, local_rank)
    check_paths(config)


def check_paths(config: TrainConfig) -> None:
    """Check that the files of a new run exist, and that `init_from` contains the configured model.

    Raises:
        UserError: A file is missing or empty, or belongs to another model.
    """
    if config.wandb is not None:
        require_wandb()
    for name in ("wandb_entity", "wandb_name", "wandb_tags"):
        if config.wandb is None and getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} without --wandb\nfix: add --wandb PROJECT, or leave {option} out")
    for source in (config.data.source, *config.data.validation_files.values()):
        check_sources(source, config.data)
    tokenizer = config.data.tokenizer
    require_filled("data.tokenizer", tokenizer, "--data.tokenizer DIR")
    if tokenizer is not None and tokenizer.endswith(".json") and not Path(tokenizer).is_file():
        raise UserError(
            f"data.tokenizer {tokenizer}: no such file\n"
            "allowed: 'bytes', a tokenizer.json, or a directory with one\nfix: correct the path"
        )
    if config.init_from is not None and (config.lora.is_on or config.resume is not True):
        there = read_hugging_face_config(config.init_from)
        if key := _different(there, config.model):
            raise UserError(
                f"model.{key} {getattr(config.model, key)} differs from {config.init_from}, which has "
                f"{getattr(there, key)}\nfix: leave model.{key} out: --init-from reads it from config.json"
            )
        from bmburst.checkpoint import adapter, base_model, hugging_face

        hugging_face.check_weights(config.init_from, config.model)
        if config.resume is True and config.output is not None:
            adapter.check_resumed(config.output, base_model.Base.open(config.init_from, config.model))
        elif config.lora.init_from is not None:
            _check_adapter(config, config.lora.init_from)
    if config.reference is not None:
        _check_reference(config, config.reference)
    if config.dpo.is_on and config.resume is True and config.output is not None:
        _check_resumed_reference(config, config.output)
    _check_tokens(config)


def _check_adapter(config: TrainConfig, folder: Path) -> None:
    """Check that the adapter that a run starts from has the configured settings, and is one of its model."""
    from bmburst.checkpoint import adapter, base_model, hugging_face
    from bmburst.checkpoint.files import verified, warn

    assert config.init_from is not None
    found = adapter.open_adapter(verified(folder, warn))
    found.require_like(config.lora, config.model)
    found.require_shapes(adapter.adapter_shapes(config.lora, hugging_face.expected_shapes(config.model)))
    found.require_base(base_model.Base.open(config.init_from, config.model))


def _different(there: LlamaConfig, model: LlamaConfig) -> str | None:
    """Return the first field in which the shapes of two models differ."""
    return next((key for key in _SHAPE if getattr(there, key) != getattr(model, key)), None)


def _check_reference(config: TrainConfig, folder: Path) -> None:
    """Check that preference training has a reference of the model's shape and tokenizer."""
    option = "dpo.reference" if config.dpo.reference else "init_from"
    there = read_hugging_face_config(folder, option)
    if key := _different(there, config.model):
        raise UserError(
            f"{option} {folder} is another model: its {key} is {getattr(there, key)}, and that of the trained model "
            f"{getattr(config.model, key)}\nallowed: a reference of the same shape\n"
            "fix: give the model that the run starts from, or another version of it"
        )
    from bmburst.checkpoint import hugging_face
    from bmburst.checkpoint.files import own_tokenizer
    from bmburst.data import find_token_file
    from bmburst.data.tokenizer import ByteTokenizer, load_tokenizer

    hugging_face.check_weights(folder, config.model)
    if config.dpo.reference is None:  # the reference is init_from itself
        return
    own = own_tokenizer(folder)
    file = find_token_file(config.data.source, config.data.tokenizer)
    name = (config.data.tokenizer or ByteTokenizer.name) if file is None else file.tokenizer_name
    used = load_tokenizer(name).identity if file is None else file.tokenizer_identity
    if own is not None and load_tokenizer(own).identity != used:
        raise UserError(
            f"{option} {folder} has another tokenizer than the data, which have '{name}'\n"
            "allowed: one tokenizer for a model and its reference\nfix: another reference, or --data.tokenizer " + own
        )


def _check_resumed_reference(config: TrainConfig, folder: Path) -> None:
    """Check, before ranks start, that a run's newest checkpoint has the reference of the resumed run."""
    from bmburst.checkpoint.files import newest_complete
    from bmburst.train.reference import require_reference

    if (newest := newest_complete(folder)) is not None:
        require_reference(config, newest)


def read_hugging_face_config(folder: Path, option: str = "init_from") -> LlamaConfig:
    """Return the model configuration in a Hugging Face LLaMA directory; `option` names the field for error messages.

    Raises:
        UserError: There is no such directory, it has no config.json, or the model is not supported.
    """
    require_filled(option, folder, f"--{option.replace('_', '-')} DIR")
    path, has_adapter = folder / CONFIG_FILE, (folder / "adapter_config.json").is_file()
    if not path.is_file():
        what = "it has no config.json" if folder.is_dir() else no_directory(folder)
        if has_adapter:
            what = "it is a LoRA adapter, which bmburst convert --merge adds to its model"
        raise UserError(f"{option} {folder}: {what}\nfix: give the directory of a Hugging Face model{hub_fix(folder)}")
    if has_adapter:  # transformers, bmburst eval and bmburst generate add it to the weights beside it
        raise UserError(
            f"{option} {folder}: it has a model and a LoRA adapter, adapter_config.json\n"
            "allowed: a model alone, without an adapter or merged with it\n"
            "fix: move the adapter's files to a folder ADAPTER, for bmburst convert --merge, or to train it for "
            "--lora.init_from ADAPTER; or remove them if the model has it in its weights"
        )
    values = read_json(path)
    if "model_type" not in values:
        from bmburst.checkpoint.files import newest_complete

        if newest := newest_complete(folder):
            raise UserError(f"{option} {folder}: is a run folder\nfix: give one of its checkpoints, such as {newest}")
    try:
        config = LlamaConfig.from_hugging_face(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not config.tie_embeddings:
        return config
    # The files may hold a head of their own.
    from bmburst.checkpoint.hugging_face import read_config

    return read_config(folder)


def check_resumable(before: TrainConfig, now: TrainConfig, folder: Path) -> None:
    """Check that a resumed run has the settings that must not change. Steps, ranks, rates and intervals may change.

    Raises:
        UserError: Model, data, sequence length, packing, seed, dtype, adapters or dpo.beta differ from those of the
            run.
    """
    was, wanted = to_dict(before), to_dict(now)
    for leaf in leaves(before):
        if leaf.name.split(".")[0] in _FIXED_ON_RESUME and leaf.name not in _MAY_MOVE:
            old, new = _at(was, leaf.name), _at(wanted, leaf.name)
            if old != new and not isinstance(old, dict):
                raise UserError(
                    f"{leaf.name} {new} differs from {old}, the value of the run in {folder}\n"
                    f"fix: leave {leaf.name} out or set it to {old}, or start a new run without --resume"
                )
    if before.dpo.is_on and now.dpo.is_on and before.reference is None and now.reference is not None:
        raise UserError(
            f"dpo.reference {now.reference} with --resume: the reference of the run in {folder} is its model without "
            "adapters\nfix: leave dpo.reference out, or start a new run without --resume"
        )


def write_run_config(config: TrainConfig, folder: Path) -> Path:
    """Write the resolved configuration to the run folder's config.json, which `--config` can read."""
    path = folder / CONFIG_FILE
    write_json(path, {key: value for key, value in to_dict(config).items() if key not in _OF_ONE_CALL})
    return path


def _check_tokens(config: TrainConfig) -> None:
    from bmburst.data import find_token_file

    if (file := find_token_file(config.data.source, config.data.tokenizer)) is not None:
        file.require_vocab(config.model.vocab_size)
    elif config.data.tokenizer is None:
        # Text without a tokenizer is read as bytes: run the checks of `tokenizer='bytes'`.
        config.replace(data=dataclasses.replace(config.data, tokenizer="bytes"))


def _layer_of(path: Path) -> dict[str, Any]:
    """Return the values of a file. If a run folder's file has an unknown key, the error names who wrote the folder."""
    try:
        return read_layer(TrainConfig, _read_file(path), str(path))
    except UnknownKey as error:
        from bmburst.checkpoint.files import checkpoints, written_by

        if path.name != CONFIG_FILE or not checkpoints(path.parent):
            raise
        writer = f"version {named}" if (named := written_by(path.parent)) else "an earlier or later version"
        raise with_fix(
            error,
            f"continue the run with the bmburst that wrote it, {writer} (this is {__version__}); or, if the key was "
            "added by hand, correct it or leave it out",
        ) from None


def _read_file(path: Path) -> dict[str, Any]:
    values = read_config_file(path)
    if is_model_center(values):
        return {"model": to_dict(ModelCenterConfig.from_values(values, str(path)).shape())}
    return values


def _follow_adapter(given: dict[str, Any]) -> None:
    """Take settings that are not given, and the model, from the adapter that the run starts from."""
    values = given.get("lora") or {}
    if values.get("init_from") is None or "rank" in values:  # a resumed run has its settings in its file
        return
    from bmburst.checkpoint.adapter import open_adapter
    from bmburst.checkpoint.files import verified, warn

    found = open_adapter(verified(Path(values["init_from"]), warn))
    own = {name: value for name, value in to_dict(found.lora).items() if value is not None}
    given["lora"] = {**own, **values}
    if given.get("init_from") is None and "preset" not in given and found.base and Path(found.base).is_dir():
        given["init_from"] = Path(found.base)


def _follow_model(given: dict[str, Any], below: Mapping[str, Any], above: Mapping[str, Any]) -> None:
    """Use the tokenizer of the model that an option names, if the file's tokenizer is that of the replaced model."""
    old, new = below.get("init_from"), above.get("init_from")
    was, is_given = (below.get("data") or {}).get("tokenizer"), "tokenizer" in (above.get("data") or {})
    if was is None or was != str(old) or new is None or is_given:
        return
    if (own := _tokenizer_of(new)) is not None:
        given["data"] = {**given["data"], "tokenizer": own}


def _tokenizer_of(folder: str | Path) -> str | None:
    """Return the tokenizer of a model directory; None if it has none, or is refused where the weights are checked."""
    from bmburst.checkpoint.files import own_tokenizer

    try:
        return own_tokenizer(Path(folder))
    except UserError:
        return None


def _names_whole_model(layer: Mapping[str, Any]) -> bool:
    required = {leaf.name for leaf in leaves(LlamaConfig) if "." not in leaf.name}
    return required <= set(layer.get("model") or {})


def _model_of(layers: Sequence[Mapping[str, Any]], above: Mapping[str, Any]) -> LlamaConfig:
    """Return the model of the layers of files under the preset and the fields of the model that options give."""
    given = overlay(*({name: each[name] for name in ("preset", "model") if name in each} for each in (*layers, above)))
    return build_config(LlamaConfig, overlay(_base_model(given), given.get("model") or {}), "model.")


def _base_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model whose fields the given ones override; empty if all fields are given."""
    name, folder = given.get("preset", "llama-tiny"), given.get("init_from")
    if name is not None and folder is not None:
        raise UserError(
            f"preset '{name}' and init_from {folder} both give the model's configuration\n"
            "fix: leave --preset out: --init-from reads the configuration of its model"
        )
    if _names_whole_model(given):
        return {}
    if folder is not None:
        model = read_hugging_face_config(folder)
    elif name is not None:
        model = preset(name)
    else:
        return {}
    values = to_dict(model)
    if model.head_dim * model.num_heads == model.hidden_size:
        # head_dim is derived from hidden_size and num_heads, and one of them may be overridden.
        del values["head_dim"]
    return values


def _set_trained_length(model: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Let dynamic scaling begin at the length of the weights, if max_position_embeddings is set above it."""
    scaling, trained, longest = model.get("rope_scaling"), base[_LONGEST], model.get(_LONGEST)
    if not isinstance(scaling, dict) or scaling.get("kind") != "dynamic" or not isinstance(longest, int):
        return
    if scaling.get("original_max_position_embeddings") is None and longest > trained:
        scaling["original_max_position_embeddings"] = trained


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _set_default_of_stages(given: dict[str, Any]) -> None:
    """Set the default batch of a pipeline: a micro-batch for each stage, without which stages only wait."""
    parallel = given.get("parallel") or {}
    if (stages := parallel.get("pipeline_parallel", 1)) > 1:
        sizes = given.get("micro_batch_size", 1), parallel.get("data_parallel", 1)
        given.setdefault("batch_size", default_batch(stages, *sizes))


def set_defaults_of_data(given: dict[str, Any]) -> None:
    """Set defaults that depend on the data: pack "documents" for records, and the tokenizer of `init_from`.

    The default is pack "trees" for records with several answers to a prompt, and always with dpo.beta, so that data
    without pairs are rejected for that reason and not for their packing; for a model with a sliding window, which has
    no exact trees, it is "documents". A token file of another tokenizer is refused where it is opened.
    """
    if (given.get("dpo") or {}).get("beta") is not None:
        given.setdefault("pack", _pack_of_prompts(given))
    values = given.get("data") or {}
    source, folder = values.get("source", STANDARD_LIBRARY), given.get("init_from")
    if not isinstance(source, str | Path):
        return  # the check of the fields raises
    from bmburst.data import are_records, have_groups
    from bmburst.data.mixture import sources_of

    try:
        form = build_config(RecordFormat, {key: each for key, each in values.items() if key in _RECORD_FIELDS})
        asked = [(each.path, each.form(form)) for each in sources_of(str(source))]
    except (OSError, UserError):
        return  # the checks of the paths and of the fields raise
    if "pack" not in given and any(are_records(*each) for each in asked):
        given["pack"] = _pack_of_prompts(given) if any(have_groups(*each) for each in asked) else "documents"
    if folder is None or values.get("tokenizer") is not None:
        return
    if (own := _tokenizer_of(folder)) is not None:
        given["data"] = {**values, "tokenizer": own}


def _pack_of_prompts(given: Mapping[str, Any]) -> str:
    """Return the packing of records with several answers to a prompt."""
    model = overlay(_base_model(given), given.get("model") or {})
    return "trees" if model.get("sliding_window") is None else "documents"

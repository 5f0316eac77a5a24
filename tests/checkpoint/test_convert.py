"""`bmburst convert`: exact both ways, by pieces, and what it refuses."""

import json
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import RopeScaling
from bmburst.blocks.rope import rotary_frequencies
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.conversion import convert
from bmburst.checkpoint.files import FORMAT
from bmburst.checkpoint.model_center import model_center_name
from bmburst.checkpoint.tensor_files import SafetensorsWriter, save_mapped
from bmburst.cli import main
from tests import tiny
from tests.refusals import refusal_of, says

CONFIG = tiny.config(
    head_dim=8,
    rope_theta=5e5,
    max_position_embeddings=999,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=128),
)
PLAIN = tiny.config(num_layers=1, num_heads=3, num_kv_heads=3, tie_embeddings=True)
WORDS = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str()
TOKENIZER = {"tokenizer.json": WORDS, "tokenizer.model": "\x00\xff", "special_tokens_map.json": '{"eos": 1}'}


def tensors(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights; of the norms fp32, as some exports have it."""
    return {
        name: weight.to(torch.float32 if "norm" in name else dtype) for name, weight in tiny.weights(config).items()
    }


def hugging_face_directory(folder: Path, config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A directory in two files with an index, with a tokenizer, and with fields that only Hugging Face knows."""
    folder.mkdir()
    names = sorted(weights := tensors(config, dtype))
    where = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in names if where[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    values = config.to_hugging_face() | {"torch_dtype": "bfloat16", "eos_token_id": [7, 8], "_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(values))
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text, encoding="latin-1")
    return folder


def model_center_directory(folder: Path, config: LlamaConfig, values: dict[str, Any]) -> Path:
    """As `bmtrain.save` and ModelCenter's scripts leave it, with the buffer that its rotary embedding saves."""
    folder.mkdir()
    weights = {model_center_name(name): tensor.half() for name, tensor in tensors(config).items()}
    frequencies, _ = rotary_frequencies(config, None)
    torch.save(weights | {"position_bias.inv_freq": frequencies}, folder / "pytorch_model.pt")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    if (folder / "pytorch_model.pt").exists():
        found: dict[str, Tensor] = torch.load(folder / "pytorch_model.pt", mmap=True)
        return found
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return hugging_face_directory(tmp_path / "source", CONFIG)


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["llama-3", "tied"])
def test_hugging_face_to_model_center_and_back(tmp_path: Path, config: LlamaConfig) -> None:
    source = hugging_face_directory(tmp_path / "source", config)
    convert(source, tmp_path / "theirs", to="model-center")
    expected = tensors(config)
    assert_same(weights_of(tmp_path / "theirs"), {model_center_name(name): x for name, x in expected.items()})
    convert(tmp_path / "theirs", tmp_path / "back", to="huggingface")
    assert_same(weights_of(tmp_path / "back"), expected)
    for name in ("config.json", *TOKENIZER):
        there, here = ((folder / name).read_bytes() for folder in (source, tmp_path / "back"))
        assert json.loads(there) == json.loads(here) if name == "config.json" else there == here


def test_model_center_to_hugging_face_and_back(tmp_path: Path) -> None:
    values = {"vocab_size": 61, "dim_model": 24, "num_heads": 3, "dim_head": 8, "dim_ff": 40, "num_layers": 1}
    values |= {"tied": True, "norm_eps": 1e-5, "emb_init_std": 0.7, "pos_bias_type": "rotary", "cls_head": None}
    source = model_center_directory(tmp_path / "source", PLAIN, values)
    convert(source, tmp_path / "theirs", to="bmburst")
    assert hugging_face.check_weights(tmp_path / "theirs", PLAIN)  # --init-from takes it
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == "float16"
    convert(tmp_path / "theirs", tmp_path / "back", to="model-center")
    expected = torch.load(source / "pytorch_model.pt")
    del expected["position_bias.inv_freq"]  # ModelCenter makes it anew, and BMTrain cannot load it
    assert_same(weights_of(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == values


def test_another_dtype_is_rounded_once_and_told(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "halves", to="huggingface", dtype="float16")
    assert_same(weights_of(tmp_path / "halves"), {name: x.half() for name, x in tensors(CONFIG).items()})
    assert json.loads((tmp_path / "halves" / "config.json").read_text())["torch_dtype"] == "float16"
    for dtype, half in (("float16", True), ("float32", False)):
        convert(source, tmp_path / dtype, to="model-center", dtype=dtype)
        values = json.loads((tmp_path / dtype / "config.json").read_text())
        assert values["half"] == half and "dtype" not in values


def test_transformers_reads_the_parts(tmp_path: Path, source: Path) -> None:
    from transformers import LlamaForCausalLM

    done = convert(source, tmp_path / "parts", to="huggingface", part_bytes=4000)
    sizes = [path.stat().st_size for path in (tmp_path / "parts").glob("*.safetensors")]
    assert len(sizes) > 2 and sum("safetensors" in name for name in done.files) == len(sizes) + 1
    ids = torch.arange(20)[None]
    with torch.no_grad():
        first, second = (
            LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (source, tmp_path / "parts")
        )
    assert torch.equal(first, second)


def test_no_more_than_a_piece_is_held(tmp_path: Path, source: Path) -> None:
    total: list[int] = []
    steps: list[int] = []
    for to in ("huggingface", "model-center"):
        convert(source, tmp_path / to, to=to, piece_bytes=256, on_total=total.append, on_bytes=steps.append)
    assert total[0] == total[1] == sum(steps) / 2 == sum(x.nbytes for x in tensors(CONFIG).values())
    assert max(steps) == 256
    assert_same(weights_of(tmp_path / "huggingface"), tensors(CONFIG))
    assert_same(
        weights_of(tmp_path / "model-center"), {model_center_name(name): x for name, x in tensors(CONFIG).items()}
    )


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_bad_input(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "theirs", to="model-center")

    def refused(folder: Path, to: str = "model-center", **options: Any) -> str:
        told = refusal_of(convert, folder, tmp_path / "out", to=to, **options)
        assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))
        return told

    says(refused(tmp_path / "nowhere"), "no directory", "nowhere", "fix: ")
    says(refused(source, to="modelcenter"), "'modelcenter'", "'model-center'")
    says(refused(source, dtype="float8"), "dtype", "'float8'", "float16")
    edit(source, vocab_size=62)
    says(refused(source), "[61, 24]", "config.json", "[62, 24]", "fix: ")
    edit(source, vocab_size=61, num_hidden_layers=3)
    says(refused(source), "lacks", "model.layers.2.", "fix: ")
    edit(source, num_hidden_layers=2, model_type="gpt_neox")
    assert "gpt_neox" in refused(source)
    edit(tmp_path / "theirs", num_layers=3)
    name = "encoder.layers.2.self_att.layernorm_before_attention.weight"
    says(refused(tmp_path / "theirs", to="huggingface"), "pytorch_model.pt", "lacks", name)
    edit(tmp_path / "theirs", num_layers=1)
    says(refused(tmp_path / "theirs", to="huggingface"), "encoder.layers.1.")
    edit(tmp_path / "theirs", num_layers=2, position_bias_num_buckets=32)
    says(refused(tmp_path / "theirs"), "ModelCenter", "position_bias_num_buckets")
    large = hugging_face_directory(tmp_path / "large", PLAIN, torch.float32)
    for path in large.glob("*.safetensors"):
        save_file({name: x * 1e6 for name, x in load_file(path).items()}, path)
    says(refused(large, dtype="float16"), "float16")


def test_nothing_is_overwritten(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "model-center"]) == 0
    assert "20 tensors" in capsys.readouterr().out.replace("21", "20")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "model-center"]) == 2
    says(capsys.readouterr().err, "out", "not empty")
    assert main(["convert", str(source), str(tmp_path / "more"), "--to", "bmburst", "--part-size", "0"]) == 2


@pytest.mark.parametrize("output", [".", "to"])
def test_the_output_may_be_where_one_is_or_a_link(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "to").symlink_to(tmp_path / "there") if output == "to" else None
    monkeypatch.chdir(here)
    done = convert(source, Path(output), to="model-center")
    written = (tmp_path / "there") if output == "to" else here
    assert sorted(path.name for path in written.iterdir()) == list(done.files)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("other", [{"rms_norm_eps": 0.5}, {"model_type": "qwen2"}, {"model_type": "t5"}], ids=str)
def test_a_configuration_aside_that_is_of_another_model_is_left_out(tmp_path: Path, source: Path, other: Any) -> None:
    convert(source, tmp_path / "theirs", to="model-center")
    path = tmp_path / "theirs" / "config.huggingface.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    convert(tmp_path / "theirs", tmp_path / "back", to="huggingface")
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    assert values["rms_norm_eps"] == CONFIG.norm_eps and "eos_token_id" not in values


def test_numbers_are_mapped_where_torch_would_have_them(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "theirs", to="model-center")
    mapped = torch.load(tmp_path / "theirs" / "pytorch_model.pt", mmap=True)
    assert {tensor.data_ptr() % 64 for tensor in mapped.values()} == {0}
    assert zipfile.ZipFile(tmp_path / "theirs" / "pytorch_model.pt").testzip() is None


def test_a_file_of_torch_that_cannot_be_written_leaves_nothing(tmp_path: Path, source: Path) -> None:
    weights = next(source.glob("*.safetensors"))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_mapped(weights, tmp_path / "x.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not [path for path in tmp_path.iterdir() if "x.pt" in path.name]


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    announced = [("a", (2, 3), torch.float32), ("b", (1,), torch.float16)]

    def write(*runs: Tensor) -> None:
        with SafetensorsWriter(tmp_path / "file", announced) as file:
            for numbers in runs:
                file.write_run(numbers)

    with pytest.raises(ValueError, match="1 of 2 tensors were written"):
        write(torch.zeros(4), torch.zeros(2))
    for wrong in (torch.zeros(7), torch.zeros(2, dtype=torch.float16)):
        with pytest.raises(ValueError, match="a was announced"):
            write(wrong)
    with pytest.raises(ValueError, match="a was announced"):
        write(torch.zeros(4), torch.zeros(4))
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16)):  # as many numbers, or the same shape
        with (
            pytest.raises(ValueError, match="a was announced"),
            SafetensorsWriter(tmp_path / "file", announced) as file,
        ):
            file.write(wrong)
    assert list(tmp_path.iterdir()) == []
    write(torch.zeros(4), torch.zeros(2), torch.zeros(1, dtype=torch.float16))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def name_tokenizer(checkpoint: Path, name: str) -> None:
    """Make a directory a checkpoint whose state.json names this tokenizer."""
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    state = {"format": FORMAT, "step": 2, "data": {}, "tokenizer": name, "files": sizes}
    (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("spelled", ["{folder}/secret.json", "../secret.json", "here/../../secret.json", "../theirs"])
def test_a_checkpoint_brings_no_file_from_elsewhere(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spelled: str
) -> None:
    """Whoever made a checkpoint may have written any readable path into its state.json."""
    for folder in (tmp_path / "theirs", source / "here"):
        folder.mkdir()
    monkeypatch.chdir(source)
    for path in (tmp_path / "secret.json", tmp_path / "theirs" / "tokenizer.json"):
        path.write_text(WORDS.replace('"a"', '"secret"'))
    (source / "tokenizer.json").unlink()
    name = spelled.format(folder=tmp_path)
    name_tokenizer(source, name)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    said = capsys.readouterr().err
    assert f"tokenizer {name} is outside of" in said and "--tokenizer PATH" in said
    # The user may name it.
    words = ["convert", str(source), str(tmp_path / "named"), "--to", "huggingface", "--tokenizer", name]
    assert main(words) == 0
    assert "secret" in (tmp_path / "named" / "tokenizer.json").read_text()
    assert "lies outside" not in capsys.readouterr().err
    assert main([*words[:2], str(tmp_path / "x"), *words[3:-1], "nowhere.json"]) == 2


def test_a_tokenizer_beside_the_run_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in a folder that has the directory `words` names it so, and the checkpoint has no file of this name."""
    (tmp_path / "here" / "words").mkdir(parents=True)
    (source / "tokenizer.json").rename(tmp_path / "here" / "words" / "tokenizer.json")
    name_tokenizer(source, "words")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    assert "tokenizer words is outside of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"password": "x"}'),
        ("tokenizer_config.json", "root:x:0"),
        ("generation_config.json", "[" * 2000 + "]" * 2000),
        ("vocab.txt", "\xff"),
    ],
)
def test_what_is_copied_is_what_its_name_says(tmp_path: Path, source: Path, name: str, text: str) -> None:
    (source / name).write_text(text, encoding="latin-1")
    says(refusal_of(convert, source, tmp_path / "out", to="huggingface"), name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_partial_directory_of_others_is_left_alone(tmp_path: Path, source: Path) -> None:
    theirs = tmp_path / ".out.partial" / "file"
    theirs.parent.mkdir()
    theirs.touch()
    convert(source, tmp_path / "out", to="huggingface")
    assert theirs.exists()


def test_a_run_folder_means_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    newest = hugging_face_directory(tmp_path / "run" / "checkpoints" / "step-000002", CONFIG)
    (newest / "tokenizer.json").rename(newest / "words.json")
    name_tokenizer(newest, "words.json")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    assert_same(weights_of(tmp_path / "out"), tensors(CONFIG))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == WORDS
    assert "step-000002 (huggingface)" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out2"), "--to", "huggingface"]) == 2
    assert "no directory" in capsys.readouterr().err

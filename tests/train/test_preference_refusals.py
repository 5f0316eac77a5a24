"""Preference training that cannot work is refused before ranks start."""

import json
import shutil

import pytest

from bmburst.schedule.hardware import HOST, hardware_like
from bmburst.train.config import DPOConfig
from bmburst.train.machine import planned
from bmburst.train.resolve import check_paths, check_resumable, resolve, write_run_config
from bmburst.train.text import check_text
from tests import chat, tiny
from tests.distributed.programs import run_program
from tests.refusals import refused
from tests.train import preference_program as program

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    tiny.save(folder / "model", program.SHAPE)
    tiny.save(folder / "small", tiny.config(vocab_size=chat.VOCAB, hidden_size=16, max_position_embeddings=131))
    tiny.save(folder / "foreign", program.SHAPE)
    for name in ("model", "foreign"):
        chat.directory(folder / name)
    path = folder / "foreign" / "tokenizer.json"
    values = json.loads(path.read_text())
    words = values["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(values))
    chat.write(folder / "pairs.jsonl", *({**PAIR, "prompt": str(n)} for n in range(9)))
    chat.write(folder / "chats.jsonl", *chat.records(9))
    (folder / "text.txt").write_text("a text\n" * 100)
    return folder


def options(folder, data="pairs.jsonl", **more):
    given = {"init_from": folder / "model", "data.source": folder / data, "sequence_length": 131, "dpo.beta": 0.1}
    return {key: str(value) for key, value in (given | more).items() if value is not None}


def test_pairs_have_defaults_of_records(folder):
    config = resolve(options=options(folder))
    assert config.pack == "trees"
    assert config.data.tokenizer == str(folder / "model")
    assert config.reference == folder / "model"
    adapted = resolve(options=options(folder) | {"lora.rank": "2"})
    assert adapted.reference is None
    tasks = [planned(each, 2, 1, hardware_like(HOST)).task for each in (config, adapted)]
    assert [(task.pairs, task.second_model) for task in tasks] == [(True, True), (True, False)]
    check_paths(config)
    check_text(config)
    plain = resolve(options=options(folder, **{"dpo.beta": None}))
    assert config.optimizer.lr == pytest.approx(plain.optimizer.lr / 20, rel=0.05)


def test_a_run_that_did_not_share_prompts_resumes_as_it_began(folder, tmp_path):
    began = resolve(options=options(folder, pack="documents"))
    file = write_run_config(began, tmp_path)
    now = resolve((file,), options(folder))
    assert now.pack == "documents"
    check_resumable(began, now, tmp_path)
    with refused("pack trees", "documents", "leave pack out"):
        check_resumable(began, resolve((file,), options(folder, pack="trees")), tmp_path)


def test_a_resumed_run_keeps_its_reference(folder, tmp_path):
    """It may be in another directory, but not another model."""
    shutil.copytree(folder / "model", tmp_path / "moved")
    tiny.save(tmp_path / "other", program.SHAPE, seed=1)
    run_program(1, _resume_with, folder, tmp_path)
    began = resolve((tmp_path / "run" / "config.json",))
    adapted = resolve(options=options(folder, **{"lora.rank": 2}))
    check_resumable(began, began, tmp_path)
    with refused("dpo.reference", tmp_path / "other", "without adapters", "leave dpo.reference out"):
        check_resumable(adapted, adapted.replace(dpo=DPOConfig(beta=0.1, reference=tmp_path / "other")), tmp_path)


def _resume_with(folder, tmp_path):
    from bmburst.train.trainer import Trainer

    config = resolve(options=options(folder, output=tmp_path / "run"))
    write_run_config(config, tmp_path / "run")
    began = Trainer(config)
    began.restore()
    began.save()
    resumed = config.replace(resume=True)
    check_paths(resumed)
    moved = resumed.replace(init_from=tmp_path / "moved")
    check_paths(moved)
    Trainer(moved).restore()
    words = "another reference | other weights | --dpo.reference"
    by_option = resumed.replace(dpo=DPOConfig(beta=0.1, reference=tmp_path / "other"))
    for other in (resumed.replace(init_from=tmp_path / "other"), by_option):
        with refused(words, tmp_path / "other"):
            check_paths(other)
    with refused(words, tmp_path / "other"):
        Trainer(by_option).restore()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        *(({"dpo.beta": beta}, f"dpo.beta | {beta} | above 0") for beta in ("0", "-0.1", "nan")),
        ({"dpo.beta": None, "dpo.reference": "x"}, "dpo.reference x | no effect | --dpo.beta"),
        ({"pack": "stream"}, "pack stream | pack trees | documents | fix: "),
        ({"context_report": "true"}, "context_report true | no loss by position | --context-report false"),
        ({"init_from": None}, "without a reference | lora.rank | --init-from"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(folder, more, words):
    with refused(words):
        resolve(options=options(folder, **more))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("small", "another model | hidden_size is 16 | 24 | fix: "),
        ("foreign", "another tokenizer | model | one tokenizer | fix: "),
        ("nowhere", "dpo.reference | no such directory | fix: "),
    ],
)
def test_another_model_is_no_reference(folder, name, words):
    config = resolve(options=options(folder, **{"dpo.reference": folder / name}))
    with refused(name, words):
        check_paths(config)


@pytest.mark.parametrize(
    ("data", "beta", "words"),
    [
        ("chats.jsonl", 0.1, "no preference pairs | rejected | dpo.beta | fix: "),
        ("text.txt", 0.1, "no preference pairs | rejected | dpo.beta | fix: "),
        ("pairs.jsonl", None, "preference pairs | --dpo.beta"),
    ],
)
def test_other_data_and_pairs_for_another_training_are_refused(folder, data, beta, words):
    config = resolve(options=options(folder, data, **{"dpo.beta": beta}))
    check_paths(config)
    with refused(data, words):
        check_text(config)

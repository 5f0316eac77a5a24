"""The model that tests of `bmburst serve` serve, and its generator without a server."""

from pathlib import Path

import pytest

from bmburst.inference.generator import Generator
from tests import chat, tiny
from tests.serve.asked import LONG


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    tiny.save(folder, vocab_size=chat.VOCAB, max_position_embeddings=LONG, seed=3, std=0.3, eos_token_id=None)
    return chat.directory(folder)


@pytest.fixture(scope="package")
def generator(model: Path) -> Generator:
    return Generator(model)

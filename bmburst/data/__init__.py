"""Data pipeline: tokenizes text, packs it into sequences, and distributes batches over the data ranks."""

from bmburst.data.batches import Batches, Samples, evaluation_batches
from bmburst.data.corpus import open_corpus
from bmburst.data.packing import PackedSequences
from bmburst.data.token_file import TokenFile
from bmburst.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batches",
    "ByteTokenizer",
    "PackedSequences",
    "Samples",
    "TokenFile",
    "Tokenizer",
    "evaluation_batches",
    "load_tokenizer",
    "open_corpus",
]

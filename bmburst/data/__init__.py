"""Training data: tokenizers, token files, packing, batches."""

from bmburst.data.batches import Batches, Samples, evaluation_batches
from bmburst.data.corpus import (
    Text,
    are_records,
    find_corpus,
    find_token_file,
    has_tokens,
    have_groups,
    open_corpus,
    require_cache,
    require_messages,
    samples_of,
    tokenize,
    unused_names,
)
from bmburst.data.packing import PackedSequences
from bmburst.data.token_file import TokenFile
from bmburst.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batches",
    "ByteTokenizer",
    "PackedSequences",
    "Samples",
    "Text",
    "TokenFile",
    "Tokenizer",
    "are_records",
    "evaluation_batches",
    "find_corpus",
    "find_token_file",
    "has_tokens",
    "have_groups",
    "load_tokenizer",
    "open_corpus",
    "require_cache",
    "require_messages",
    "samples_of",
    "tokenize",
    "unused_names",
]

# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer of a GGUF file, as transformers saves and loads it again.

transformers' own conversion takes every tokenizer of architecture llama for SentencePiece: the result adds a first
token that the model does not want, and what it saves reads back broken. Keys: ggml's docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {  # tokenizer.ggml.pre -> what cuts a text before BPE
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": lambda: _split(_WORDS + r"\p{N}{1,3}" + _REST),
    "qwen2": lambda: _split(_WORDS + r"\p{N}" + _REST),
}
_CONTROL = 3  # tokenizer.ggml.token_type of special tokens


def load_gguf_tokenizer(path: Path) -> Any:
    """A transformers ``PreTrainedTokenizerFast``.

    Raises:
        ValueError: the file has no byte-level BPE, or one whose way to cut texts is not built.
    """
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(path)).fields

    def value(name: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.{name}")
        return default if field is None else field.contents()

    kind, pre = value("ggml.model"), value("ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _SPLITS:
        raise ValueError(
            f"{path}: tokenizer.ggml.model {kind!r} with tokenizer.ggml.pre {pre!r} is not built; built "
            f"is 'gpt2' with {', '.join(_SPLITS)}"
        )
    tokens, merges, types = value("ggml.tokens"), value("ggml.merges", []), value("ggml.token_type", [])
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, [tuple(m.split(" ")) for m in merges], ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in zip(tokens, types, strict=False)
            if kind == _CONTROL
        ]
    )
    special = {
        name: tokens[i]
        for name in ("bos", "eos", "unknown", "padding")
        if (i := value(f"ggml.{name}_token_id")) is not None
    }
    if value("ggml.add_bos_token", pre == "llama-bpe") and "bos" in special:
        bos = special["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=value("chat_template"),
        **{names[k]: v for k, v in special.items()},
    )


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]

# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's tokenizer cuts texts as its model was trained, and survives saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer, Qwen2Tokenizer

from hubkv_trt.models.checkpoint import load_tokenizer
from tiny_models import byte_tokenizer

TEXT = "I'll pay 1234 dollars,\r\n\n  naïve  日本 <|im_end|> don't!!\n\tx"


def write_gguf(path: Path, pre: str, **values: Any) -> tuple[dict[str, int], list[str]]:
    """A file with a byte vocabulary and a few merges; returns them."""
    vocab = dict(sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1]))
    merges = ["1 2", "3 4", "12 34", "Ġ d", "' l", "n a", "o l", "ĉ x", "Ċ Ċ"]
    for merge in merges:
        vocab[merge.replace(" ", "")] = len(vocab)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(values.get("kind", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(vocab))
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocab])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    if "add_bos" in values:
        writer.add_add_bos_token(values["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return vocab, merges


def test_the_demo_models_tokenizer(demo_tokenizer: Any, tmp_path: Path) -> None:
    assert demo_tokenizer("The capital of France is")["input_ids"] == [504, 3575, 282, 4649, 314]
    token_ids = demo_tokenizer(TEXT)["input_ids"]
    assert demo_tokenizer.decode(token_ids) == TEXT
    assert token_ids.count(2) == 1  # <|im_end|>
    assert (demo_tokenizer.eos_token_id, len(demo_tokenizer)) == (2, 49152)
    demo_tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXT)["input_ids"] == token_ids
    assert again.decode(token_ids) == TEXT
    messages = [{"role": "user", "content": "Hi"}]
    rendered = again.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == demo_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_qwen2_cuts_as_transformers_does(tmp_path: Path) -> None:
    vocab, merges = write_gguf(tmp_path / "model.gguf", "qwen2")
    ours = load_tokenizer(tmp_path / "model.gguf")
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges])
    plain = TEXT.replace("<|im_end|>", "")
    assert ours(plain)["input_ids"] == theirs(plain)["input_ids"]
    assert ours.decode(ours(TEXT)["input_ids"]) == TEXT


def test_digits_are_cut_as_each_family_does(tmp_path: Path) -> None:
    cut = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        write_gguf(tmp_path / f"{pre}.gguf", pre, add_bos=False)
        tokenizer = load_tokenizer(tmp_path / f"{pre}.gguf")
        cut[pre] = tokenizer.convert_ids_to_tokens(tokenizer("1234")["input_ids"])
    assert cut == {"gpt-2": ["1234"], "smollm": list("1234"), "qwen2": list("1234"), "llama-bpe": ["12", "3", "4"]}


def test_the_first_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "llama.gguf", "llama-bpe")  # Llama 3 adds one by default
    write_gguf(tmp_path / "gpt.gguf", "gpt-2", add_bos=True)
    write_gguf(tmp_path / "none.gguf", "gpt-2")
    first = {name: load_tokenizer(tmp_path / f"{name}.gguf")("ab")["input_ids"][0] for name in ("llama", "gpt", "none")}
    assert first["llama"] == first["gpt"] == 0
    assert first["none"] != 0


@pytest.mark.parametrize(("kind", "pre"), [("gpt2", "tekken"), ("llama", "default")])
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, kind: str, pre: str) -> None:
    write_gguf(tmp_path / "model.gguf", pre, kind=kind)
    with pytest.raises(ValueError, match=f"tokenizer.ggml.model '{kind}' with tokenizer.ggml.pre '{pre}' is not built"):
        load_tokenizer(tmp_path / "model.gguf")

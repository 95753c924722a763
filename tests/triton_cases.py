# SPDX-License-Identifier: Apache-2.0
"""Requests to a Triton server, and what ``LLM.generate`` is asked for the same."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from hubkv_trt.runtime.llm import RequestOutput
from hubkv_trt.serving.client import Piece
from triton_site import SECONDS

PROMPT = "A hub keeps what its neighbours repeat. " * 6
MANY = list("eEaAtTiInNsS1234!?,.")
LONG = {"max_tokens": 700, "end_id": -1}  # seconds of decoding

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    # inputs of the request; SamplingParams and ratio of the same request to LLM.generate
    "plain": ({"max_tokens": 24}, {"max_tokens": 24}, None),
    "dense": ({"max_tokens": 12, "hubkv_ratio": 0.0}, {"max_tokens": 12}, 0.0),
    "small": ({"max_tokens": 12, "hubkv_ratio": 0.9}, {"max_tokens": 12}, 0.9),
    "drawn": (
        {"max_tokens": 40, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7, "hubkv_ratio": 0.5},
        {"max_tokens": 40, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7},
        0.5,
    ),
    "random_seed": (
        {"max_tokens": 20, "top_k": 8, "random_seed": 2**63 + 1},
        {"max_tokens": 20, "temperature": 1.0, "top_k": 8, "seed": 2**63 + 1},
        None,
    ),
    "top_k_1": ({"max_tokens": 9, "temperature": 1.3, "top_k": 1, "top_p": 0.0}, {"max_tokens": 9}, None),
    "stop_words": (
        {"max_tokens": 200, "temperature": 1.5, "seed": 3, "stop_words": ["e", "a", "1"], "end_id": -1},
        {"max_tokens": 200, "temperature": 1.5, "seed": 3, "stop": ("e", "a", "1"), "ignore_eos": True},
        None,
    ),
    "end_id": (
        {"max_tokens": 300, "temperature": 1.5, "seed": 5, "end_id": 70},
        {"max_tokens": 300, "temperature": 1.5, "seed": 5, "stop_token_ids": (70,), "ignore_eos": True},
        None,
    ),
    "penalties": (
        {"max_tokens": 30, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
         "return_log_probs": True, "end_id": -1},
        {"max_tokens": 30, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
         "return_log_probs": True, "ignore_eos": True},
        None,
    ),
    "bad_words": (
        {"max_tokens": 40, "temperature": 1.5, "seed": 3, "bad_words": ["e", "", "t h"], "min_length": 30},
        {"max_tokens": 40, "temperature": 1.5, "seed": 3, "bad_words": ("e", "t h"), "min_tokens": 30},
        None,
    ),
    "min_tokens": (
        {"max_tokens": 60, "min_p": 0.02, "seed": 5, "stop_words": MANY, "min_tokens": 20,
         "hubkv_ratio": 0.5, "return_log_probs": True},
        {"max_tokens": 60, "min_p": 0.02, "temperature": 1.0, "seed": 5, "stop": tuple(MANY), "min_tokens": 20,
         "return_log_probs": True},
        0.5,
    ),
    # what clients of TensorRT-LLM's models send although it asks for nothing
    "neutral": (
        {"max_tokens": 5, "bad_words": [""], "stop_words": [""], "beam_width": 1, "length_penalty": 1.0, "pad_id": 2,
         "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_length": 0, "return_log_probs": False,
         "return_context_logits": False, "num_return_sequences": 1, "exclude_input_in_output": True},
        {"max_tokens": 5},
        None,
    ),
}  # fmt: skip


def check(pieces: list[Piece], output: RequestOutput) -> None:
    """The pieces are the output: its text, and its figures with the last."""
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.final for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    stats = output.stats
    figures = dict(pieces[-1].figures)
    if output.output_log_probs is not None:
        assert [p for piece in pieces for p in piece.figures["output_log_probs"]] == output.output_log_probs
        assert figures.pop("cum_log_probs") == pytest.approx(output.cum_log_probs, rel=1e-6)
        del figures["output_log_probs"]
    assert figures == {
        "sequence_index": 0,
        "finish_reason": output.finish_reason,
        "num_input_tokens": stats.prompt_tokens,
        "num_output_tokens": len(output.token_ids),
        "kv_rows_kept": int(stats.rows.sum()),  # type: ignore[union-attr]
        "kv_bytes": stats.bytes_kept,
        "kv_bytes_dense": stats.bytes_dense,
        "kv_decode_compressions": stats.condensations,
        "kv_rows_decode": 0 if stats.condensed_rows is None else int(stats.condensed_rows.sum()),
    }


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def post(url: str, body: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=SECONDS) as answer:
        return answer.read()  # type: ignore[no-any-return]

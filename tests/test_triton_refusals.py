# SPDX-License-Identifier: Apache-2.0
"""Bad requests to a real Triton server: INVALID_ARGUMENT that names the field, and nothing is left behind."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

from hubkv_trt.serving.client import HubKVClient, ServerError
from hubkv_trt.serving.fields import INPUTS
from tiny_models import VOCAB_SIZE
from triton_site import SECONDS, TritonSite

NAN = float("nan")

BAD: list[tuple[str, dict[str, Any]]] = [
    # the field that the message begins with, and the request
    ("text_input", {}),
    ("text_input", {"text_input": ""}),
    ("text_input", {"text_input": b"\xff\xfe"}),
    ("text_input", {"text_input": "a" * 513}),  # one token more than max_input_len
    ("text_input", {"text_input": "a" * (10 << 20)}),
    ("input_ids", {"input_ids": [0, VOCAB_SIZE]}),
    ("input_ids", {"input_ids": [5, -1]}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [5] * 513}),
    ("input_ids", {"input_ids": [5], "text_input": "a"}),
    ("max_tokens", {"text_input": "a", "max_tokens": 0}),
    ("max_tokens", {"text_input": "a", "max_tokens": -(2**31)}),
    ("temperature", {"text_input": "a", "temperature": -0.5}),
    ("temperature", {"text_input": "a", "temperature": NAN}),
    ("top_k", {"text_input": "a", "top_k": -1}),
    ("top_p", {"text_input": "a", "top_p": 1.5}),
    ("top_p", {"text_input": "a", "top_p": -0.1}),
    ("top_p", {"text_input": "a", "top_p": NAN}),
    ("random_seed", {"text_input": "a", "seed": 1, "random_seed": 2}),
    ("stop_words", {"text_input": "a", "stop_words": [b"\xc3"]}),
    ("stop_words", {"text_input": "a", "stop_words": ["x"] * 65}),
    ("stop_words", {"text_input": "a", "stop_words": ["x" * 1000] * 10_000}),  # 10 MB
    ("stop_words", {"text_input": "a", "stop_words": ["x" * 1025]}),
    ("bad_words", {"text_input": "a", "bad_words": [b"\xc3"]}),
    ("bad_words", {"text_input": "a", "bad_words": ["x"] * 65}),
    ("bad_words", {"text_input": "a", "bad_words": ["x" * 1025]}),
    ("min_tokens", {"text_input": "a", "min_tokens": -1}),
    ("min_tokens", {"text_input": "a", "min_tokens": 3}),  # max_tokens is 2
    ("min_length", {"text_input": "a", "min_length": 3}),
    ("min_length", {"text_input": "a", "min_length": 1, "min_tokens": 2}),
    ("max_tokens", {"text_input": "a", "min_tokens": 0, "max_tokens": 0}),
    ("min_p", {"text_input": "a", "min_p": 1.5}),
    ("repetition_penalty", {"text_input": "a", "repetition_penalty": 0.0}),
    ("repetition_penalty", {"text_input": "a", "repetition_penalty": NAN}),
    ("presence_penalty", {"text_input": "a", "presence_penalty": NAN}),
    ("frequency_penalty", {"text_input": "a", "frequency_penalty": float("inf")}),
    ("end_id", {"text_input": "a", "end_id": VOCAB_SIZE}),
    ("end_id", {"text_input": "a", "end_id": -2}),
    ("pad_id", {"text_input": "a", "pad_id": VOCAB_SIZE}),
    ("exclude_input_in_output", {"input_ids": [5], "exclude_input_in_output": False}),
    ("hubkv_ratio", {"text_input": "a", "hubkv_ratio": 1.0}),
    ("hubkv_ratio", {"text_input": "a", "hubkv_ratio": -0.1}),
    ("hubkv_ratio", {"text_input": "a", "hubkv_ratio": NAN}),
    ("hubkv_decode_p", {"text_input": "a", "hubkv_decode_p": 0.9}),  # this model does not compress while it decodes
    ("hubkv_decode_budget", {"text_input": "a", "hubkv_decode_budget": 64}),
    ("context_id", {"text_input": "a", "context_id": ""}),
    ("context_text", {"context_text": "a"}),
    ("context_text", {"context_text": "", "context_id": "c"}),
    ("context_text", {"context_text": "a" * 513, "context_id": "c"}),
    ("release_context", {"release_context": True}),
    ("release_context", {"release_context": True, "context_id": "c", "text_input": "a"}),
    # known to clients, not supported
    ("decoder_text_input", {"text_input": "a", "decoder_text_input": "b"}),
    ("length_penalty", {"text_input": "a", "length_penalty": 2.0}),
    ("beam_width", {"text_input": "a", "beam_width": 2}),
    ("num_return_sequences", {"text_input": "a", "num_return_sequences": 2}),
    ("return_context_logits", {"text_input": "a", "return_context_logits": True}),
    ("return_generation_logits", {"text_input": "a", "return_generation_logits": True}),
    ("return_perf_metrics", {"text_input": "a", "return_perf_metrics": True}),
    ("embedding_bias_words", {"text_input": "a", "embedding_bias_words": ["b"]}),
    ("embedding_bias_weights", {"text_input": "a", "embedding_bias_weights": [1.0]}),
    ("prompt_embedding_table", {"text_input": "a", "prompt_embedding_table": [[0.0, 1.0]]}),
    ("prompt_table_extra_id", {"text_input": "a", "prompt_table_extra_id": 1}),
    ("prompt_vocab_size", {"text_input": "a", "prompt_vocab_size": 8}),
    ("lora_task_id", {"text_input": "a", "lora_task_id": 1}),
    ("lora_weights", {"text_input": "a", "lora_weights": [[0.0]]}),
    ("lora_config", {"text_input": "a", "lora_config": [[0, 0, 8]]}),
    ("guided_decoding_guide_type", {"text_input": "a", "guided_decoding_guide_type": "json"}),
    ("guided_decoding_guide", {"text_input": "a", "guided_decoding_guide": "{}"}),
]
UNSUPPORTED = {field.name for field in INPUTS if field.neutral is not None}


def test_every_unsupported_input_is_tried() -> None:
    assert {name for name, _ in BAD} >= UNSUPPORTED


def test_bad_values(triton: TritonSite) -> None:
    """By plain calls, and by streams, where Triton gives the message without the code. Good requests follow."""
    wrong = []
    with (
        HubKVClient(triton.server.grpc, timeout=SECONDS) as client,
        HubKVClient(triton.server.grpc, "hubkv_unary", timeout=SECONDS) as unary,
    ):
        good = client.generate("a", max_tokens=2).text
        for field, inputs in BAD:
            for call, code in ((client.generate, ""), (unary.infer, "INVALID_ARGUMENT")):
                try:
                    call(**{"max_tokens": 2, **inputs})
                    wrong.append(f"{field}: accepted {str(inputs)[:80]}")
                except ServerError as error:
                    if error.code != code or not str(error).startswith(f"{field}: "):
                        wrong.append(f"{field}: {error.code} {str(error)[:200]}")
        assert not wrong, "\n".join(wrong)
        assert client.generate("a", max_tokens=2).text == good
        assert unary.infer("a", max_tokens=2).text == good
    triton.wait_until_idle()
    triton.wait_until_idle("hubkv_unary")


def test_a_stream_of_a_model_that_gives_one_response(triton: TritonSite) -> None:
    with HubKVClient(triton.server.grpc, "hubkv_unary", timeout=SECONDS) as client:
        with pytest.raises(ServerError, match=r"^stream: True") as refused:
            client.infer("a", stream=True)
        assert refused.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("name", "array", "dtype", "message"),
    [
        ("max_tokens", np.array([[4]], np.int64), "INT64", "max_tokens"),  # another type
        ("text_input", np.array([[4]], np.int32), "INT32", "text_input"),
        ("max_tokens", np.array([[4, 4]], np.int32), "INT32", "max_tokens"),  # two for one
        ("max_tokens", np.array([4], np.int32), "INT32", "max_tokens"),  # no batch dimension
        ("input_ids", np.array([[[4]]], np.int32), "INT32", "input_ids"),
        ("input_ids", np.array([[4], [5]], np.int32), "INT32", "batch-size"),  # two requests in one
        ("max_token", np.array([[4]], np.int32), "INT32", "max_token"),  # no such input
    ],
)
def test_wrong_types_and_shapes(triton: TritonSite, name: str, array: np.ndarray, dtype: str, message: str) -> None:
    """Triton compares them with config.pbtxt. In a stream it gives the message without a code."""
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    tensor = grpc.InferInput(name, list(array.shape), dtype)
    tensor.set_data_from_numpy(array)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.InferenceServerClient(triton.server.grpc) as client:
        with pytest.raises(InferenceServerException, match=message) as refused:
            client.infer("hubkv_unary", [tensor], client_timeout=SECONDS)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("hubkv", [tensor])
        error = answers.get(timeout=SECONDS)
    assert error is not None
    assert message in error.message()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text_input": "a", "max_token": 3}, 400, "max_token: there is no such input"),
        ({"text_input": "a", "hubkv_ratio": 7}, 400, "hubkv_ratio: 7.0 is not"),
        ({"text_input": "a", "timeout": -5}, 400, "timeout: -5 is not"),
        ({"text_input": ["a", "b"]}, 400, "batch-size"),
        ({"text_input": 7}, 500, "string"),  # Triton's own reading of JSON: status 500, and no name
        ({"text_input": "a", "max_tokens": "7"}, 500, "integer"),
    ],
)
def test_http(triton: TritonSite, body: dict[str, Any], status: int, message: str) -> None:
    request = urllib.request.Request(triton.url("hubkv", "generate"), json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=SECONDS)
    assert refused.value.code == status
    assert message in refused.value.read().decode()


def test_the_client_knows_the_inputs() -> None:
    with HubKVClient("127.0.0.1:9") as client, pytest.raises(ValueError, match="max_token: there is no such input"):
        client.generate("a", max_token=3)

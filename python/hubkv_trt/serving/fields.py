# SPDX-License-Identifier: Apache-2.0
"""Names, types and dimensions of what a client of Triton sends and gets: the one table of them.

The names are those of the model ``ensemble`` of TensorRT-LLM's Triton backend, so that its clients find what they know.
Dimensions are without the batch dimension of 1 that Triton puts in front.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """An input or output.

    Attributes:
        name: in requests and in config.pbtxt.
        dtype: of Triton, without ``TYPE_``.
        dims: without the batch dimension; -1 is any number.
        neutral: values of an input that this project has nothing behind, which ask for nothing: they are accepted, any
            other is refused. None where the input is supported.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    neutral: tuple[object, ...] | None = None

    @property
    def is_list(self) -> bool:
        """Any number of values, where others have one."""
        return self.dims == (-1,)


INPUTS = (
    Field("text_input", "STRING"),
    Field("max_tokens", "INT32"),
    Field("stream", "BOOL"),
    Field("stop_words", "STRING", (-1,)),
    Field("end_id", "INT32"),
    Field("pad_id", "INT32"),
    Field("top_k", "INT32"),
    Field("top_p", "FP32"),
    Field("temperature", "FP32"),
    Field("repetition_penalty", "FP32"),
    Field("presence_penalty", "FP32"),
    Field("frequency_penalty", "FP32"),
    Field("min_tokens", "INT32"),
    Field("min_length", "INT32"),
    Field("bad_words", "STRING", (-1,)),
    Field("return_log_probs", "BOOL"),
    Field("seed", "UINT64"),
    Field("random_seed", "UINT64"),
    Field("exclude_input_in_output", "BOOL"),
    Field("return_num_input_tokens", "BOOL"),
    Field("return_num_output_tokens", "BOOL"),
    # this project's own
    Field("input_ids", "INT32", (-1,)),
    Field("min_p", "FP32"),
    Field("hubkv_ratio", "FP32"),
    Field("hubkv_decode_p", "FP32"),
    Field("hubkv_decode_budget", "INT32"),
    Field("hubkv_chat", "BOOL"),
    Field("context_id", "STRING"),
    Field("context_text", "STRING"),
    Field("release_context", "BOOL"),
    # known to clients, with nothing behind it here
    Field("decoder_text_input", "STRING", neutral=("",)),
    Field("length_penalty", "FP32", neutral=(0.0, 1.0)),
    Field("beam_width", "INT32", neutral=(1,)),
    Field("num_return_sequences", "INT32", neutral=(1,)),
    Field("return_context_logits", "BOOL", neutral=(False,)),
    Field("return_generation_logits", "BOOL", neutral=(False,)),
    Field("return_perf_metrics", "BOOL", neutral=(False,)),
    Field("embedding_bias_words", "STRING", (-1,), neutral=("",)),
    Field("embedding_bias_weights", "FP32", (-1,), neutral=(0.0,)),
    Field("prompt_embedding_table", "FP16", (-1, -1), neutral=()),
    Field("prompt_table_extra_id", "UINT64", neutral=()),
    Field("prompt_vocab_size", "INT32", neutral=(0,)),
    Field("lora_task_id", "UINT64", neutral=()),
    Field("lora_weights", "FP16", (-1, -1), neutral=()),
    Field("lora_config", "INT32", (-1, 3), neutral=()),
    Field("guided_decoding_guide_type", "STRING", neutral=("",)),
    Field("guided_decoding_guide", "STRING", neutral=("",)),
)

OUTPUTS = (
    Field("text_output", "STRING", (-1,)),  # in every response
    Field("cum_log_probs", "FP32", (-1,)),  # in every response where they were asked for, [1, 1] with the batch
    Field("output_log_probs", "FP32", (-1, -1)),  # [1, 1, n]: 1 of 1 beams, n tokens
    # with the last response
    Field("sequence_index", "INT32"),
    Field("finish_reason", "STRING"),
    Field("num_input_tokens", "INT32"),
    Field("num_output_tokens", "INT32"),
    Field("kv_rows_kept", "INT64"),
    Field("kv_bytes", "INT64"),
    Field("kv_bytes_dense", "INT64"),
    Field("kv_decode_compressions", "INT32"),
    Field("kv_rows_decode", "INT64"),
)

BY_NAME = {field.name: field for field in INPUTS}


def pbtxt(fields: tuple[Field, ...], *, optional: bool) -> str:
    """The fields as the elements of a list of config.pbtxt."""
    lines = []
    for field in fields:
        dims = ", ".join(map(str, field.dims))
        tail = " optional: true" if optional else ""
        lines.append(f'  {{ name: "{field.name}" data_type: TYPE_{field.dtype} dims: [ {dims} ]{tail} }}')
    return ",\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a request to a request of the service, and from its increments to tensors.

Whatever is wrong with a request is a ``ValueError`` that begins with the name of the input as the client knows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import Budgets, EngineConfig, HardKVConfig, require
from ..runtime.sampling_params import SamplingParams
from ..runtime.stream import Increment
from ..runtime.ticket import ServiceRequest
from .fields import BY_NAME, Field

MAX_WORDS = 64  # of stop_words, and of bad_words
MAX_WORD_BYTES = 1024  # of one of them
BYTES_PER_TOKEN = 64  # a text with more of them for each token that fits is refused without a look at it

_CLIENT_NAMES = {
    "ratio": "hubkv_ratio",
    "document": "context_text",
    "stop": "stop_words",
    "stop_token_ids": "end_id",
    "chat": "hubkv_chat",
    "p": "hubkv_decode_p",
    "layer_budget": "hubkv_decode_budget",
}


@dataclass(frozen=True)
class Query:
    """A request of a client.

    Attributes:
        request: for the service; None where a context is only released.
        release: the context to release.
        prefix: the client's text, where the answer shall begin with it.
        prompt_name: the input that the runtime's errors about a prompt are about.
    """

    request: ServiceRequest | None
    release: str | None = None
    prefix: str = ""
    prompt_name: str = "text_input"


def read_query(
    inputs: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any],
    config: EngineConfig,
    *,
    decoupled: bool,
    timeout: int = 0,
) -> Query:
    """What a request asks for.

    Args:
        inputs: tensors [1, ...] by name, as Triton's Python backend gives them: texts are bytes in object arrays.
            Triton has compared names, types and shapes with config.pbtxt.
        parameters: of the request. Triton puts every key of a ``generate`` call that is no input there.
        config: ``LLM.config``.
        decoupled: the model can give several responses.
        timeout: of the request, in microseconds; 0 is none. A ``generate`` call has it among the parameters.

    Raises:
        ValueError: a value is refused, or asks for what this project has not.
    """
    unknown = [name for name in parameters if name != "timeout" and not name.startswith("triton_")]
    if unknown:
        raise ValueError(f"{unknown[0]}: there is no such input; there are {', '.join(BY_NAME)}")
    values = {name: _values(BY_NAME[name], array) for name, array in inputs.items()}
    for name, given in values.items():
        _refuse_unsupported(BY_NAME[name], given)
    one = {name: given[0] for name, given in values.items() if not BY_NAME[name].is_list}

    timeout = parameters.get("timeout", timeout)
    require(type(timeout) is int and timeout >= 0, "timeout", timeout, "a number of microseconds, an integer >= 0")
    context_id = one.get("context_id")
    if context_id is not None:
        require(bool(context_id), "context_id", context_id, "a text that is not empty")
    if one.get("release_context"):
        require(context_id is not None, "release_context", True, "possible without a context_id")
        others = sorted(set(inputs) - {"context_id", "release_context", "stream"})
        require(not others, "release_context", True, f"possible together with {', '.join(others)}")
        return Query(None, release=context_id)

    stream = one.get("stream", False)
    require(decoupled or not stream, "stream", True, "possible here: this model gives one response to a request")
    pad = one.get("pad_id")
    vocabulary = range(config.model.vocab_size)
    require(pad is None or pad == -1 or pad in vocabulary, "pad_id", pad, f"-1 or in 0..{vocabulary[-1]}")
    most = BYTES_PER_TOKEN * config.max_input_len
    for name in ("text_input", "context_text"):
        size = len(one.get(name, "").encode())
        require(size <= most, name, f"{size} bytes", f"at most {most}: max_input_len is {config.max_input_len} tokens")
    document = one.get("context_text")
    require(document != "", "context_text", document, "a text that is not empty")
    prompt = _prompt(one, values.get("input_ids"), document)
    prefix = ""
    if not one.get("exclude_input_in_output", True):
        require(isinstance(prompt, str), "exclude_input_in_output", False, "possible without a text_input")
        prefix = str(prompt)
    try:
        request = ServiceRequest(
            prompt=prompt,
            params=_params(one, _words(values, "stop_words"), _words(values, "bad_words"), config),
            ratio=_single(one.get("hubkv_ratio")),
            chat=one.get("hubkv_chat", False),
            context_id=context_id,
            document=document,
            stream=stream,
            deadline_seconds=timeout / 1e6 or None,
        )
    except ValueError as error:
        raise ValueError(client_message(error)) from None
    name = "context_text" if document is not None else "input_ids" if "input_ids" in inputs else "text_input"
    return Query(request, prefix=prefix, prompt_name=name)


def client_message(error: Exception, prompt_name: str = "text_input") -> str:
    """The message of an error of the runtime, with the client's name of the field at its beginning."""
    name, colon, rest = str(error).partition(": ")
    name = prompt_name if name == "prompt" else _CLIENT_NAMES.get(name, name)
    return f"{name}{colon}{rest}"


def _values(field: Field, array: np.ndarray) -> list[Any]:
    """The values of an input as Python has them; of tables only whether there are any."""
    if len(field.dims) > 1:
        return [array.shape] if array.size else []
    values = array.reshape(-1).tolist()
    if field.dtype != "STRING":
        return values
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise ValueError(f"{field.name}: not UTF-8 text ({error})") from None


def _refuse_unsupported(field: Field, values: list[Any]) -> None:
    if field.neutral is None:
        return
    asked = [value for value in values if value not in field.neutral]
    if asked:
        neutral = f"only {' or '.join(map(repr, field.neutral))} is accepted" if field.neutral else "leave it out"
        raise ValueError(f"{field.name}: {_short(asked[0])} is not supported; {neutral}")


def _prompt(one: Mapping[str, Any], token_ids: list[int] | None, document: str | None) -> str | list[int] | None:
    text = one.get("text_input")
    require(text is None or token_ids is None, "input_ids", _short(token_ids), "possible together with text_input")
    if token_ids is not None:
        return token_ids
    if text is None and document is None:
        raise ValueError("text_input: missing; a request needs it, or input_ids")
    require(text != "", "text_input", text, "a text that is not empty")
    return text


def _words(values: Mapping[str, list[str]], name: str) -> tuple[str, ...]:
    """Clients of TensorRT-LLM send an empty word for none."""
    words = tuple(word for word in values.get(name, ()) if word)
    require(len(words) <= MAX_WORDS, name, f"{len(words)} texts", f"at most {MAX_WORDS}")
    longest = max((len(word.encode()) for word in words), default=0)
    require(longest <= MAX_WORD_BYTES, name, f"a text of {longest} bytes", f"at most {MAX_WORD_BYTES} bytes")
    return words


def _params(
    one: Mapping[str, Any], stop_words: tuple[str, ...], bad_words: tuple[str, ...], config: EngineConfig
) -> SamplingParams:
    """Greedy unless a temperature, ``top_k``, ``top_p`` or ``min_p`` says otherwise, as TensorRT-LLM has it: its
    clients send ``top_k`` 1 for greedy and ``top_p`` 0 for none."""
    end = one.get("end_id")
    last = config.model.vocab_size - 1
    require(end is None or -1 <= end <= last, "end_id", end, f"-1 (none) or in 0..{last}")
    max_tokens = one.get("max_tokens", SamplingParams.max_tokens)
    seed = _either(one, "seed", "random_seed")
    min_tokens = _either(one, "min_tokens", "min_length")
    if min_tokens is not None:
        name = "min_tokens" if "min_tokens" in one else "min_length"
        require(0 <= min_tokens <= max(0, max_tokens), name, min_tokens, f"in 0..{max_tokens}, max_tokens")

    top_k, top_p = one.get("top_k", 0), _single(one.get("top_p")) or 1.0
    min_p = _number(one, "min_p")
    draws = top_k > 1 or top_p != 1.0 or min_p > 0
    temperature = 0.0 if top_k == 1 else _single(one.get("temperature", 1.0 if draws else 0.0))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,  # type: ignore[arg-type]
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop_words,
        stop_token_ids=() if end is None or end < 0 else (end,),
        ignore_eos=end is not None,
        min_p=min_p,
        repetition_penalty=_number(one, "repetition_penalty"),
        presence_penalty=_number(one, "presence_penalty"),
        frequency_penalty=_number(one, "frequency_penalty"),
        min_tokens=min_tokens or 0,
        bad_words=bad_words,
        return_log_probs=one.get("return_log_probs", False),
        decode_compression=_decode_compression(one, config),
    )


def _decode_compression(one: Mapping[str, Any], config: EngineConfig) -> HardKVConfig | None:
    """The engine's with what the request changes of it; 0 is the engine's own."""
    given = {"p": _single(one.get("hubkv_decode_p")), "layer_budget": one.get("hubkv_decode_budget")}
    changes = {name: value for name, value in given.items() if value}
    if not changes:
        return None
    engine, (name, value) = config.decode_compression, next(iter(changes.items()))
    require(engine is not None, name, value, "possible: this model does not compress while it decodes; leave it out")
    assert engine is not None
    shared = engine.fill and engine.budgets is Budgets.HELD_OUT
    ok = name != "p" or not shared
    require(ok, "p", value, "possible: this model shares its rows, whatever p is; see hubkv_decode_budget")
    return engine.replace(**changes)


def _either(one: Mapping[str, Any], name: str, alias: str) -> Any:
    """The value of an input that goes by two names; None where it has neither."""
    value = one.get(name, one.get(alias))
    require(one.get(alias, value) == value, alias, one.get(alias), f"the same as {name}, {value}")
    return value


def _number(one: Mapping[str, Any], name: str) -> float:
    value = _single(one.get(name))
    return getattr(SamplingParams, name) if value is None else value


def _single(value: float | None) -> float | None:
    """A float32 as the shortest decimal that means it: 0.9 and not 0.8999999761581421."""
    return value if value is None or not math.isfinite(value) else float(str(np.float32(value)))


def _short(value: object, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


# ---- answers ---------------------------------------------------------------------------------------------------------


def released(known: bool) -> dict[str, np.ndarray]:
    """The answer to ``release_context``."""
    return {"text_output": _texts(""), "finish_reason": _texts("released" if known else "unknown")}


def answer(text: str, increment: Increment) -> dict[str, np.ndarray]:
    """Tensors of a response, [1, 1] each but ``output_log_probs`` [1, 1, n].

    Args:
        text: of the response.
        increment: that it is about; with the last one come the figures of the request.
    """
    tensors = {"text_output": _texts(text), "sequence_index": _numbers([0], np.int32)}
    output = increment.output
    if increment.output_log_probs is not None and increment.cum_log_probs is not None:
        tensors["cum_log_probs"] = _numbers([increment.cum_log_probs], np.float32)
        tensors["output_log_probs"] = _numbers([increment.output_log_probs], np.float32)
    if output is not None:
        stats = output.stats
        tensors["finish_reason"] = _texts(output.finish_reason)
        tensors["num_input_tokens"] = _numbers([stats.context_tokens + stats.prompt_tokens], np.int32)
        tensors["num_output_tokens"] = _numbers([len(output.token_ids)], np.int32)
        rows = 0 if stats.rows is None else int(stats.rows.sum())
        tensors["kv_rows_kept"] = _numbers([rows], np.int64)
        tensors["kv_bytes"] = _numbers([stats.bytes_kept], np.int64)
        tensors["kv_bytes_dense"] = _numbers([stats.bytes_dense], np.int64)
        rows = 0 if stats.condensed_rows is None else int(stats.condensed_rows.sum())
        tensors["kv_decode_compressions"] = _numbers([stats.condensations], np.int32)
        tensors["kv_rows_decode"] = _numbers([rows], np.int64)
    return tensors


def _texts(text: str) -> np.ndarray:
    return np.array([[text.encode("utf-8")]], dtype=object)


def _numbers(values: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.array([values], dtype=dtype)

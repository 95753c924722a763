# SPDX-License-Identifier: Apache-2.0
"""Runs the two plans of a TensorRT engine over a cache in the GPU's memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import torch

from ... import _library
from ...config import Budget, EngineConfig
from ...cuda.device import current_device
from ...cuda.errors import call, runtime
from ...cuda.memory import DeviceMemory, check_room, copy, gib, memory_info
from ...cuda.stream import Stream
from ...cuda.upload import layout, upload
from ...engine.bindings import extend_bindings, plans_of, prefill_bindings
from ...engine.directory import EXTEND_FILE, PREFILL_FILE, Engine
from ...engine.plugin_library import load_plugins
from ...engine.profiles import DECODE, QUESTION
from ...engine.trt_log import LOGGER, make_logger
from ..batch import Batch
from ..cache import Cache, Segment
from ..cache_size import create_cache, largest_prompt, most_pages
from ..device_arena import DeviceArena
from ..edits import LogitEdits
from ..ledger import Ledger
from ..sampler import Sampled, SamplingParams, draw
from ..scheduler import QUESTION_TOKENS
from .executor import Prefill
from .extend_lane import ExtendLane, Scratch, Shared
from .machine import check_machine, import_tensorrt
from .plans import Plan
from .prefill_lane import PrefillLane
from .tables import batch_sizes, question_pieces, smallest_that_holds

_RESERVE_BYTES = 512 << 20  # left free: what sampling and lazily loaded kernels take, and other processes' needs
_SAMPLING_BYTES = 64  # of a logit while tokens are drawn: float64 weights, their sums and order


class TensorRTExecutor:
    """``Executor`` on a GPU. All work goes to one stream; the host waits for it where it reads sampled tokens.

    Args:
        config: of the engine.
        stream: the one.
        prefill: connected.
        decode: connected and recorded, by batch size.
        question: connected.
        cache: in the memory of the current device.
    """

    def __init__(
        self,
        config: EngineConfig,
        stream: Stream,
        prefill: PrefillLane,
        decode: dict[int, ExtendLane],
        question: ExtendLane,
        cache: Cache,
    ) -> None:
        self._config = config
        self._stream = stream
        self._prefill = prefill
        self._decode = decode
        self._sizes = sorted(decode)
        self._question = question
        self._cache = cache
        self._arena = cache.arena.data_ptr()
        self._device = cache.arena.device
        self._prefill_lock = threading.RLock()  # its context's shapes are set to ask, too, by any thread
        self._torch_stream = torch.cuda.ExternalStream(stream.handle, device=self._device)

    def prefill_bytes(self, num_tokens: int, budget: Budget) -> int:
        """As ``Executor.prefill_bytes``: the plan's context memory for T tokens."""
        with torch.cuda.device(self._device), self._prefill_lock:
            return self._prefill.borrowed_bytes(num_tokens, budget)

    def prefill(self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment) -> Prefill:
        """As ``Executor.prefill``; what it borrows is given back at once, as all later work comes behind it."""
        with (
            torch.cuda.device(self._device),
            self._prefill_lock,
            self._cache.lend(self.prefill_bytes(len(token_ids), budget)) as borrowed,
        ):
            return self._prefill.run(token_ids, budget, alpha, window, segment, self._arena, borrowed)

    def extend(self, batch: Batch, token_ids: torch.Tensor, new_lengths: torch.Tensor | None = None) -> torch.Tensor:
        """As ``Executor.extend``. One token a sequence is a recorded graph; more go in pieces that fit the plan."""
        with torch.cuda.device(self._device):
            if token_ids.shape[1] > 1:
                return self._extend_by_pieces(batch, token_ids, new_lengths)
            size = smallest_that_holds(len(batch), self._sizes)
            tables = batch.tables(1, new_lengths)
            logits = self._decode[size].run(batch, tables, token_ids, size)
            batch.advance(tables.new_lengths)
            return logits

    def _extend_by_pieces(
        self, batch: Batch, token_ids: torch.Tensor, new_lengths: torch.Tensor | None
    ) -> torch.Tensor:
        count = len(batch)
        if new_lengths is None:
            new_lengths = torch.full((count,), token_ids.shape[1], dtype=torch.int32)
        width = min(plans_of(self._config).max_extend_len, max(1, QUESTION_TOKENS // count))
        lengths = new_lengths.numpy()
        pieces = question_pieces(lengths, width)
        collected = torch.empty(0)
        for index, piece in enumerate(pieces):
            start, num_new = index * width, int(piece.max())
            tables = batch.tables(num_new, torch.from_numpy(piece))
            tokens = token_ids[:, start : start + num_new].contiguous()
            logits = self._question.run(batch, tables, tokens, count)
            batch.advance(tables.new_lengths)
            if len(pieces) == 1:
                return logits
            if index == 0:
                with torch.cuda.stream(self._torch_stream):
                    collected = torch.empty_like(logits)
            row_bytes = logits.shape[1] * 4
            for row in np.flatnonzero((piece > 0) & (lengths <= start + width)):  # its last token is in this piece
                at = int(row) * row_bytes
                copy(
                    "DeviceToDevice",
                    collected.data_ptr() + at,
                    logits.data_ptr() + at,
                    row_bytes,
                    self._stream.handle,
                )
        return collected

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[random.Random],
        edits: Sequence[LogitEdits | None] = (),
    ) -> Sampled:
        """As ``Executor.sample``, on the device."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._torch_stream), torch.inference_mode():
            return draw(logits, params, generators, edits)


def open_tensorrt(engine: Engine, cache_bytes: int | None, tail_tokens: int | None) -> tuple[Cache, TensorRTExecutor]:
    """Brings an engine onto the current GPU: plans, weights, recorded decoding, and the cache in what is left.

    Args:
        engine: of the backend tensorrt.
        cache_bytes: of the cache; None takes what the engine can use, or all that is left.
        tail_tokens: as ``create_cache`` has it.

    Raises:
        ValueError: TensorRT, the GPU or the plugin library is not here or not the right one, or a plan cannot be read.
        OutOfDeviceMemoryError: the GPU's memory does not hold all of it; says how much is needed for what.
    """
    config = engine.config
    device = current_device()  # before all: without one, TensorRT's Runtime ends the process
    trt = import_tensorrt()
    check_machine(config, trt.__version__, device)
    load_plugins(trt)
    if not _library.has_cuda():
        raise ValueError(
            f"libhubkv: {_library.find()} was built without CUDA kernels: build it with cmake -DHUBKV_CUDA=ON, or name "
            f"another with {_library.VARIABLE}"
        )
    messages = make_logger(trt)
    trt_runtime = trt.Runtime(messages)
    stream = Stream()
    tensors = {**engine.weights, **engine.gate}
    sinks = next((t.shape[2] for name, t in tensors.items() if name.endswith(".k_base")), 16)
    bindings = {PREFILL_FILE: prefill_bindings(config, sinks), EXTEND_FILE: extend_bindings(config)}
    prefill_plan, extend_plan = (
        Plan(trt, trt_runtime, messages, engine.path / name, table) for name, table in bindings.items()
    )
    inputs = {name for table in bindings.values() for name, binding in table.items() if binding.is_weight}
    weights = {name: tensor for name, tensor in tensors.items() if name in inputs}

    # contexts, which say what they need; then memory for all of it, or none
    ledger, batch = Ledger(config.model, config.dtype), config.max_batch_size
    pages = max(1, min(most_pages(config, tail_tokens), ledger.pages(config.model.max_position_embeddings)))
    prefill = PrefillLane(prefill_plan, config, stream)
    decode = {b: ExtendLane(extend_plan, DECODE, b, b, pages, config, stream) for b in batch_sizes(batch)}
    question = ExtendLane(extend_plan, QUESTION, batch, max(batch, QUESTION_TOKENS), pages, config, stream)
    decode_scratch = max(lane.set_shape(size, 1) for size, lane in decode.items())
    width = plans_of(config).max_extend_len
    question_scratch = max(question.set_shape(b, min(width, max(1, QUESTION_TOKENS // b))) for b in batch_sizes(batch))
    longest = prefill.borrowed_bytes(*largest_prompt(config))
    io_bytes = prefill.io_bytes + question.io_bytes + sum(lane.io_bytes for lane in decode.values())
    reserve = _RESERVE_BYTES + _SAMPLING_BYTES * batch * config.model.vocab_size
    needs = {
        "weights": layout({name: t.numel() * t.element_size() for name, t in weights.items()})[1],
        "inputs and outputs of the plans": io_bytes,
        "context memory of decoding": decode_scratch,
        "context memory of questions": question_scratch,
        "sampling and reserve": reserve,
        "the KV cache": cache_bytes or ledger.sequence_bytes(config.model.num_rows_per_token, 1),  # of one token
    }
    check_room(needs, *memory_info())

    memory, addresses = upload(weights, "weights", stream) if weights else (None, {})
    arena = DeviceMemory(16, "the cache's address")
    call("cudaMemsetAsync", arena.address, 0, 16, stream.handle)  # no cache yet: nothing is read or written in it
    shared = Shared(config, stream, addresses, arena, memory)
    prefill.connect(shared)
    scratch = Scratch(decode_scratch, stream)
    for lane in decode.values():
        lane.connect(shared, scratch)
        lane.record()
    question.connect(shared, Scratch(question_scratch, stream, grows=True))
    free, total = memory_info()
    cache = create_cache(
        config, cache_bytes, tail_tokens, lent_bytes=longest, available=max(0, free - reserve), arena=DeviceArena
    )
    table = np.array([cache.arena.data_ptr(), cache.num_bytes], np.int64)
    call("cudaMemcpy", arena.address, table.ctypes.data, 16, runtime().cudaMemcpyKind.cudaMemcpyHostToDevice)
    call("cudaDeviceSynchronize")
    tokens, kept = largest_prompt(config)
    try:
        cache.check_can_ever_fit([kept.num_rows], 1, longest)
    except ValueError as error:
        LOGGER.warning("prompts of %d tokens, the engine's max_input_len, will be refused: %s", tokens, error)
    needs["the KV cache"] = cache.num_bytes
    items = ", ".join(f"{purpose} {gib(num_bytes)}" for purpose, num_bytes in needs.items())
    LOGGER.info("GPU %d, %s: %s", device.index, gib(total), items)
    return cache, TensorRTExecutor(config, stream, prefill, decode, question, cache)

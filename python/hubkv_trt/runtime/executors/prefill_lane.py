# SPDX-License-Identifier: Apache-2.0
"""The way through ``prefill.plan``: one prompt, whose kept rows come to lie in its segment of the cache."""

from __future__ import annotations

import numpy as np
import torch

from ...config import Budget, EngineConfig, require
from ...cuda.memory import DeviceMemory, copy
from ...cuda.staging import Staging
from ...cuda.stream import Stream
from ...cuda.upload import layout
from ...engine.bindings import plans_of, row_names
from ...engine.profiles import prefill_profiles
from ..arena import align
from ..cache import Segment
from .executor import Prefill
from .extend_lane import Shared
from .plans import Plan, TensorRTError
from .rows import RowOutput, place_rows, staged_bytes
from .tables import binding_bytes

_FIXED_OUTPUTS = ("logits", "non_finite", "last_queries")  # the others lie in the segment


class PrefillLane:
    """The context of ``prefill.plan``. ``connect`` takes memory, the constructor none.

    Args:
        plan: ``prefill.plan``.
        config: of the engine.
        stream: where everything is enqueued.

    Attributes:
        io_bytes: of its inputs and outputs, without weights and rows.
    """

    def __init__(self, plan: Plan, config: EngineConfig, stream: Stream) -> None:
        self._config = config
        self._bindings = plan.bindings
        self._context = plan.context(0, stream)
        self._stream = stream
        self._rows_per_group = np.zeros(1, np.int64)  # a shape tensor: TensorRT reads it here, on the host
        if "rows_per_group" in plan.bindings:
            self._context.set_address("rows_per_group", self._rows_per_group.ctypes.data)
        letters = {"T": config.max_input_len, "M": plans_of(config).last_queries}
        inputs = {"alpha": 4, "window": 4, "input_ids": 4 * letters["T"]}
        self._offsets, self._input_bytes = layout(inputs)
        outputs = {name: binding_bytes(b, **letters) for name, b in plan.bindings.items() if name in _FIXED_OUTPUTS}
        offsets, num_bytes = layout(outputs)
        self._offsets |= {name: self._input_bytes + offset for name, offset in offsets.items()}
        self.io_bytes = self._input_bytes + num_bytes
        self._names = {side: row_names(side, config.model, config.hubkv) for side in ("k", "v")}
        self._last: tuple[int, Budget] | None = None  # whose shapes are set
        self._last_bytes = (0, 0)
        self._most = prefill_profiles(config)[0].get("K/S", (0, 0, 0))[2]

    def borrowed_bytes(self, num_tokens: int, budget: Budget) -> int:
        """Bytes that a prompt of T tokens needs while it runs: context memory, and rows on their way to the segment.

        Raises:
            ValueError: it keeps more rows than the plan was built for.
        """
        context, staged = self._set_shape(num_tokens, budget)
        return align(context) + staged

    def connect(self, shared: Shared) -> None:
        """Takes memory and gives inputs and outputs their addresses, those in segments left out."""
        self._shared = shared
        self._memory = DeviceMemory(self.io_bytes, "inputs and outputs of prefill")
        offsets_bytes = (self._config.model.num_rows_per_token + 1) * 8
        results, self._staging_bytes = layout({"inputs": self._input_bytes, "offsets": offsets_bytes, "non_finite": 8})
        self._results, self._offsets_bytes = results, offsets_bytes
        self._staging = Staging(self._staging_bytes)
        self._at = {name: self._memory.address + offset for name, offset in self._offsets.items()}
        for name, binding in self._bindings.items():
            if binding.is_weight:
                self._context.set_address(name, shared.weights[name])
            elif name in self._at:
                self._context.set_address(name, self._at[name])
        first = self._offsets["logits"]
        logits = self._memory.tensor()[first : first + self._config.model.vocab_size * 4]
        self._logits = logits.view(torch.float32).view(1, -1)

    def run(
        self,
        token_ids: np.ndarray,
        budget: Budget,
        alpha: float,
        window: int,
        segment: Segment,
        arena: int,
        borrowed: int,
    ) -> Prefill:
        """Enqueues the prefill of int32 [T].

        Args:
            segment: of budget.num_rows rows.
            arena: address of the cache's memory.
            borrowed: byte offset in it of ``borrowed_bytes`` bytes.
        """
        stream, context, num_tokens = self._stream, self._context, len(token_ids)
        context_bytes, _ = self._set_shape(num_tokens, budget)
        context.use_memory(arena + borrowed, align(context_bytes))
        outputs: list[RowOutput] = []
        staged = borrowed + align(context_bytes)
        for side, offset in (("k", segment.entry[0]), ("v", segment.entry[1])):
            names = self._names[side]
            outputs += place_rows(names, offset, self._row_bytes(budget), staged)
            staged += staged_bytes(len(names), self._row_bytes(budget))
        for output in outputs:
            context.set_address(output.name, arena + (output.offset if output.staged is None else output.staged))
        context.set_address("positions", segment.positions.data_ptr())
        context.set_address("head_offsets", segment.head_offsets.data_ptr())

        buffer = self._staging.take()
        self._write_inputs(buffer.array, token_ids, alpha, window)
        num_bytes = self._offsets["input_ids"] + 4 * num_tokens
        copy("HostToDevice", self._memory.address, buffer.address, num_bytes, stream.handle)
        context.enqueue(stream)
        for output in outputs:
            if output.staged is not None:
                copy("DeviceToDevice", arena + output.offset, arena + output.staged, output.num_bytes, stream.handle)
        at = {name: buffer.address + offset for name, offset in self._results.items()}
        copy("DeviceToHost", at["offsets"], segment.head_offsets.data_ptr(), self._offsets_bytes, stream.handle)
        if "non_finite" in self._bindings:
            copy("DeviceToHost", at["non_finite"], self._at["non_finite"], 8, stream.handle)
        buffer.enqueued(stream)

        def rows() -> np.ndarray:
            buffer.wait()
            return self._read_results(buffer.array, num_tokens)

        return Prefill(self._logits, rows, {})

    def _set_shape(self, num_tokens: int, budget: Budget) -> tuple[int, int]:
        """Bytes of context memory and of staged rows."""
        if self._last == (num_tokens, budget):
            return self._last_bytes
        self._last = None
        if self._most:
            require(
                budget.rows_per_group <= self._most,
                "ratio",
                f"{budget.num_rows} of {budget.num_pairs} rows kept",
                f"at most {self._most * budget.num_groups}, for which the plan was built: raise the ratio, shorten the "
                "prompt, or build the engine with a lower --min-ratio",
            )
            self._rows_per_group[0] = budget.rows_per_group
        self._context.set_shape("input_ids", num_tokens)
        context_bytes = self._context.memory_bytes()
        dim, parts = self._config.model.head_dim, len(self._names["k"])
        for name in (*self._names["k"], *self._names["v"]):
            if self._context.shape(name) != (budget.num_rows // parts, dim):
                raise TensorRTError(
                    f"prefill.plan: {name} has shape {self._context.shape(name)}, not {(budget.num_rows // parts, dim)}"
                )
        self._last, self._last_bytes = (
            (num_tokens, budget),
            (context_bytes, 2 * staged_bytes(parts, self._row_bytes(budget))),
        )
        return self._last_bytes

    def _row_bytes(self, budget: Budget) -> int:
        """Bytes of the rows of one output."""
        row = self._config.model.head_dim * self._config.dtype.itemsize
        return budget.num_rows // len(self._names["k"]) * row

    def _write_inputs(self, buffer: np.ndarray, token_ids: np.ndarray, alpha: float, window: int) -> None:
        for name, values in (
            ("alpha", np.array([alpha], np.float32)),
            ("window", np.array([window], np.int32)),
            ("input_ids", np.ascontiguousarray(token_ids, np.int32)),
        ):
            start = self._offsets[name]
            buffer[start : start + values.nbytes] = values.view(np.uint8)

    def _read_results(self, buffer: np.ndarray, num_tokens: int) -> np.ndarray:
        """Kept rows, int64 [L, Hkv].

        Raises:
            ValueError: scores that are not finite.
        """
        model = self._config.model
        if "non_finite" in self._bindings:
            start = self._results["non_finite"]
            count = int(buffer[start : start + 8].view(np.int64)[0])
            if count:
                raise ValueError(
                    f"scores: {count} of {model.num_rows_per_token * num_tokens} values are NaN or infinite; "
                    "check the gate's weights, or build the engine with dtype bfloat16"
                )
        start = self._results["offsets"]
        offsets = buffer[start : start + self._offsets_bytes].view(np.int64)
        return np.diff(offsets).reshape(model.num_layers, model.num_kv_heads)

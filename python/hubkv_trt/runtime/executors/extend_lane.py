# SPDX-License-Identifier: Apache-2.0
"""One way through ``extend.plan``: an execution context whose inputs and outputs keep their addresses."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...config import EngineConfig
from ...cuda.graph import Graph
from ...cuda.memory import DeviceMemory, copy
from ...cuda.staging import Staging
from ...cuda.stream import Stream
from ...cuda.upload import layout
from ...engine.bindings import work_capacity
from ..batch import Batch, Tables
from .plans import Plan
from .stage_calls import append_rows, plan_work
from .tables import TableImage, binding_bytes

LOGGER = logging.getLogger("hubkv_trt.tensorrt")


@dataclass(frozen=True)
class Shared:
    """What all lanes share.

    Attributes:
        config: of the engine.
        stream: where everything is enqueued.
        weights: address of each weight that the plans take as an input.
        arena: the device table int64 [2]: address and bytes of all cache memory.
        memory: what else must live as long.
    """

    config: EngineConfig
    stream: Stream
    weights: Mapping[str, int]
    arena: DeviceMemory
    memory: object = None


class Scratch:
    """Context memory that lanes use one after the other.

    Args:
        num_bytes: at first.
        stream: where the lanes work.
        grows: no recorded lane knows its address.
    """

    def __init__(self, num_bytes: int, stream: Stream, grows: bool = False) -> None:
        self._stream = stream
        self._grows = grows
        self._memory: DeviceMemory | None = DeviceMemory(num_bytes, "context memory")

    def at_least(self, num_bytes: int) -> DeviceMemory:
        """The memory, replaced by more where it is too small and grows."""
        if self._memory is None or self._memory.num_bytes < num_bytes:
            if not self._grows:
                raise RuntimeError(f"extend.plan: {num_bytes} bytes of context memory are more than it first asked for")
            self._stream.synchronize()
            self._memory = None
            self._memory = DeviceMemory(num_bytes, "context memory of questions")
        return self._memory


class ExtendLane:
    """A context of ``extend.plan`` for up to B sequences and N new tokens of all together.

    The constructor takes no memory of the device, so that the needs of all lanes are known before any is taken;
    ``connect`` does.

    Args:
        plan: ``extend.plan``.
        profile: ``engine.profiles.DECODE`` or ``QUESTION``.
        batch_size: B, at most.
        num_tokens: N, at most.
        pages: columns of the block table.
        config: of the engine.
        stream: where the context is set up.

    Attributes:
        batch_size: as given.
        io_bytes: of its inputs and outputs, weights left out.
    """

    def __init__(
        self,
        plan: Plan,
        profile: int,
        batch_size: int,
        num_tokens: int,
        pages: int,
        config: EngineConfig,
        stream: Stream,
    ) -> None:
        self.batch_size = batch_size
        self._bindings = plan.bindings
        self._model = config.model
        self._context = plan.context(profile, stream)
        self._image = TableImage(batch_size, num_tokens, pages)
        letters = {"B": batch_size, "N": num_tokens, "W": work_capacity(config.model, batch_size)}
        sizes = {"tables": self._image.num_bytes}
        for name, binding in plan.bindings.items():
            if not binding.is_input or name in ("work", "work_count"):
                sizes[name] = binding_bytes(binding, **letters)
        self._offsets, self.io_bytes = layout(sizes)
        self._shape = (0, 0)
        self._batch: weakref.ref[Batch] | None = None  # whose tables are on the device
        self._pages_taken = 0
        self._graph: Graph | None = None

    def set_shape(self, batch_size: int, num_new: int) -> int:
        """Makes it ready for B sequences of Tq tokens each; bytes of context memory that they need."""
        capacity = work_capacity(self._model, batch_size)
        letters = {"B": batch_size, "Tq": num_new, "pages": self._image.pages, "W": capacity}
        for name, binding in self._bindings.items():
            if binding.is_input and -1 in binding.shape:
                sizes = zip(binding.dims, binding.shape, strict=True)
                self._context.set_shape(name, *(letters[letter] if size < 0 else size for letter, size in sizes))
        self._shape = (batch_size, num_new)
        return self._context.memory_bytes()

    def connect(self, shared: Shared, scratch: Scratch) -> None:
        """Takes memory and gives every input and output its address."""
        self._shared, self._scratch = shared, scratch
        self._shape = (0, 0)  # what was set until now has no memory
        self._memory = DeviceMemory(self.io_bytes, "inputs and outputs")
        self._staging = Staging(self._image.num_bytes)
        start = self._memory.address
        self._at = {name: start + offset for name, offset in self._offsets.items()}
        self._at |= {name: self._at["tables"] + offset for name, offset in self._image.offsets.items()}
        self._at["arena"] = shared.arena.address
        for name, binding in self._bindings.items():
            self._context.set_address(name, shared.weights[name] if binding.is_weight else self._at[name])
        vocab, first = self._model.vocab_size, self._offsets["logits"]
        logits = self._memory.tensor()[first : first + self.batch_size * vocab * 4]
        self._logits = logits.view(torch.float32).view(self.batch_size, vocab)

    def record(self) -> None:
        """Records a step of ``batch_size`` sequences of one token as a CUDA graph, over empty tables.

        Where that fails, steps are enqueued one by one and a warning says why.
        """
        stream = self._shared.stream
        self._reshape(self.batch_size, 1)
        self._upload(None, torch.zeros(self.batch_size, 1, dtype=torch.int32), everything=True)
        self._plan_work()
        self._enqueue()  # what is loaded late is loaded now
        stream.synchronize()
        try:
            self._graph = Graph(stream, self._enqueue)
        except RuntimeError as error:
            LOGGER.warning("decoding %d sequences is not recorded as a CUDA graph: %s", self.batch_size, error)

    def run(self, batch: Batch, tables: Tables, token_ids: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Enqueues a step: new tokens int32 [b, Tq] of a batch, on the host or on the device, into the tails.

        Args:
            batch: b <= ``batch_size`` sequences.
            tables: the batch's, for this step.
            token_ids: padded behind.
            batch_size: B; what it has beyond b are empty sequences.

        Returns:
            logits float32 [b, V] on the device, until the next step.
        """
        known, self._batch = self._batch, None
        fresh = known is None or known() is not batch
        if self._shape != (batch_size, token_ids.shape[1]):
            self._reshape(batch_size, token_ids.shape[1])
        self._upload(tables, token_ids, everything=fresh or batch.pages_taken != self._pages_taken)
        if fresh:
            self._plan_work()
        self._batch, self._pages_taken = weakref.ref(batch), batch.pages_taken
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.launch(self._shared.stream)
        return self._logits[: len(batch)]

    def _reshape(self, batch_size: int, num_new: int) -> None:
        num_bytes = self.set_shape(batch_size, num_new)
        memory = self._scratch.at_least(num_bytes)
        self._context.use_memory(memory.address, memory.num_bytes)

    def _upload(self, tables: Tables | None, token_ids: torch.Tensor, everything: bool) -> None:
        stream, (batch_size, num_new) = self._shared.stream, self._shape
        on_host = token_ids.numpy() if token_ids.device.type == "cpu" else None
        buffer = self._staging.take()
        self._image.fill(buffer.array, tables, on_host, batch_size, num_new)
        start = 0 if everything else self._image.step_start
        num_bytes = self._image.num_bytes - start
        copy("HostToDevice", self._at["tables"] + start, buffer.address + start, num_bytes, stream.handle)
        buffer.enqueued(stream)
        if on_host is None:
            source = token_ids.contiguous()
            copy("DeviceToDevice", self._at["input_ids"], source.data_ptr(), source.numel() * 4, stream.handle)

    def _plan_work(self) -> None:
        plan_work(self._model, self._shape[0], self._at, self._shared.stream.handle)

    def _enqueue(self) -> None:
        """The network, and its new rows into the tails."""
        stream, (batch_size, num_new) = self._shared.stream, self._shape
        self._context.enqueue(stream)
        dtype = self._shared.config.dtype
        append_rows(self._model, dtype, batch_size, num_new, self._image.pages, self._at, stream.handle)

# SPDX-License-Identifier: Apache-2.0
"""TensorRT's runtime: plans and their execution contexts. Where TensorRT says no, its message is raised."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...cuda.stream import Stream
from ...engine.bindings import Binding


class TensorRTError(RuntimeError):
    """TensorRT refused a call; the message has its own."""


class Plan:
    """An ``ICudaEngine``, checked against the table of its inputs and outputs.

    Args:
        trt: the module ``tensorrt``.
        runtime: a ``Runtime``.
        messages: the logger that the runtime was made with (``engine.trt_log.make_logger``).
        file: the plan.
        bindings: ``engine.bindings.prefill_bindings`` or ``extend_bindings``.

    Attributes:
        name: of the file, for errors.
        bindings: as given.
        messages: as given.

    Raises:
        ValueError: TensorRT cannot read the plan, or it has other inputs and outputs.
    """

    def __init__(self, trt: Any, runtime: Any, messages: Any, file: Path, bindings: Mapping[str, Binding]) -> None:
        self.name = file.name
        self.bindings = bindings
        self.messages = messages
        self._trt = trt
        messages.reason()
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            engine = runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise ValueError(
                f"engine: {file}: TensorRT {trt.__version__} cannot read the plan "
                f"({messages.reason()}): build the engine again on this machine"
            )
        self._engine = engine
        self._runtime = runtime  # must live as long
        difference = next(self._differences(), None)
        if difference is not None:
            raise ValueError(
                f"engine: {file}: {difference}: the plan is not of this engine.json; build the engine again"
            )

    def _differences(self) -> Iterator[str]:
        engine, trt, bindings = self._engine, self._trt, self.bindings
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        for name in sorted(found ^ set(bindings)):
            yield f"tensor {name}: {'unknown' if name in found else 'missing'}"
        for name in sorted(found & set(bindings)):
            binding = bindings[name]
            if (engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT) != binding.is_input:
                yield f"tensor {name}: input and output are confused"
            if engine.get_tensor_dtype(name) != getattr(trt, binding.dtype):
                yield f"tensor {name}: {engine.get_tensor_dtype(name)} is not {binding.dtype}"
            if tuple(engine.get_tensor_shape(name)) != binding.shape:
                yield f"tensor {name}: shape {tuple(engine.get_tensor_shape(name))} is not {binding.shape}"
            if (engine.get_tensor_location(name) == trt.TensorLocation.HOST) != binding.is_shape:
                yield f"tensor {name}: it is {'not ' if binding.is_shape else ''}read on the host"

    def context(self, profile: int, stream: Stream) -> Context:
        """An execution context in that optimization profile, without device memory.

        Raises:
            TensorRTError: it cannot be made.
        """
        self.messages.reason()
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise self.refusal("create_execution_context")
        if profile != context.active_optimization_profile:
            if not context.set_optimization_profile_async(profile, stream.handle):
                raise self.refusal(f"set_optimization_profile_async({profile})")
            stream.synchronize()
        return Context(self, context)

    def refusal(self, call: str) -> TensorRTError:
        """The error for a call that just failed, with TensorRT's reason."""
        return TensorRTError(f"{self.name}: {call}: {self.messages.reason()}")


class Context:
    """An ``IExecutionContext`` whose memory its user gives it."""

    def __init__(self, plan: Plan, context: Any) -> None:
        self._plan = plan
        self._context = context

    def set_shape(self, name: str, *shape: int) -> None:
        """Of an input. Raises ``TensorRTError`` where it is outside of the profile."""
        if not self._context.set_input_shape(name, shape):
            raise self._plan.refusal(f"set_input_shape({name}, {shape})")

    def set_address(self, name: str, address: int) -> None:
        """Of an input or output: 256-byte aligned device memory, for a shape tensor host memory."""
        if not self._context.set_tensor_address(name, address):
            raise self._plan.refusal(f"set_tensor_address({name})")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an input or output, after ``memory_bytes``."""
        return tuple(self._context.get_tensor_shape(name))

    def memory_bytes(self) -> int:
        """Bytes of device memory that the shapes set now need; all inputs have shapes, shape tensors addresses.

        Raises:
            TensorRTError: a shape is missing, or they do not go together.
        """
        self._plan.messages.reason()
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise self._plan.refusal("infer_shapes") from error
        if missing:
            raise self._plan.refusal(f"infer_shapes: not known are {', '.join(missing)}")
        num_bytes = int(self._context.update_device_memory_size_for_shapes())
        if num_bytes == 0 and self._plan.messages.failed:  # 0 is also right where none is needed
            raise self._plan.refusal("update_device_memory_size_for_shapes")
        return num_bytes

    def use_memory(self, address: int, num_bytes: int) -> None:
        """Device memory, 256-byte aligned, of ``memory_bytes`` bytes or more, for what is enqueued from now on."""
        self._context.set_device_memory(address, num_bytes)

    def enqueue(self, stream: Stream) -> None:
        """Enqueues the network.

        Raises:
            TensorRTError: TensorRT refuses.
        """
        if not self._context.execute_async_v3(stream.handle):
            raise self._plan.refusal("execute_async_v3")

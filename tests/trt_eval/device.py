# SPDX-License-Identifier: Apache-2.0
"""Real plans on the GPU, beside the eager backend. Runs TensorRT by itself, without the executor of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hubkv_trt.config import DType, EngineConfig
from hubkv_trt.engine.directory import EXTEND_FILE, PREFILL_FILE
from hubkv_trt.engine.plans import build_plans
from hubkv_trt.engine.plugin_library import load_plugins
from hubkv_trt.engine.profiles import DECODE, QUESTION
from hubkv_trt.engine.trt_log import make_logger

from .twins import Twins

NEAR = {DType.BFLOAT16: 0.06, DType.FLOAT16: 0.008}
"""What rounding in other places may change, as a part of the whole: three times what it does to evaluated networks."""


class OnDevice(Twins):
    """Plans of the real ``tensorrt``, built here and run on the current CUDA device.

    Args:
        directory: where the plans go.
    """

    def __init__(self, config: EngineConfig, weights: Mapping[str, Tensor], directory: Path) -> None:
        import tensorrt as trt

        super().__init__(config, weights, exact=True)
        load_plugins(trt)
        build_plans(trt, config, self.rounded, directory)
        self._trt, self._messages = trt, make_logger(trt)
        self._runtime = trt.Runtime(self._messages)  # must live as long as the engines
        self._engines = {
            plan: self._runtime.deserialize_cuda_engine((directory / file).read_bytes())
            for plan, file in (("prefill", PREFILL_FILE), ("extend", EXTEND_FILE))
        }
        assert None not in self._engines.values(), self._messages.reason()
        self._device_weights = {name: weight.cuda() for name, weight in self.rounded.items()}

    def address(self, arena: Tensor) -> int:
        self._arena = arena.cuda()
        return self._arena.data_ptr()

    def run(self, plan: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        engine, stream = self._engines[plan], torch.cuda.Stream()
        context = engine.create_execution_context()
        assert context is not None, self._messages.reason()
        if plan == "extend" and inputs["input_ids"].shape[1] > 1:
            assert context.active_optimization_profile == DECODE
            assert context.set_optimization_profile_async(QUESTION, stream.cuda_stream), self._messages.reason()
        bound: dict[str, Tensor] = {}
        outputs = []
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name) == self._trt.TensorIOMode.OUTPUT:
                outputs.append(name)
                continue
            value = self._device_weights[name] if name in self._device_weights else inputs[name].contiguous()
            on_host = engine.get_tensor_location(name) == self._trt.TensorLocation.HOST
            bound[name] = value if on_host else value.cuda()
            assert context.set_input_shape(name, tuple(value.shape)), self._messages.reason()
            assert context.set_tensor_address(name, bound[name].data_ptr()), self._messages.reason()
        assert context.infer_shapes() == [], self._messages.reason()
        for name in outputs:
            bound[name] = self._empty(engine.get_tensor_dtype(name), tuple(context.get_tensor_shape(name)))
            assert context.set_tensor_address(name, bound[name].data_ptr()), self._messages.reason()
        torch.cuda.synchronize()  # copies to the device are on another stream
        assert context.execute_async_v3(stream.cuda_stream), self._messages.reason()
        stream.synchronize()
        return {name: bound[name].cpu() for name in outputs}

    def _empty(self, data_type: Any, shape: tuple[int, ...]) -> Tensor:
        names = ("float32", "float16", "bfloat16", "int32", "int64")
        types = {getattr(self._trt, name): getattr(torch, name) for name in names}
        return torch.empty(shape, dtype=types[data_type], device="cuda")

    def check(self, got: Tensor, wanted: Tensor) -> None:
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        error = (got.float() - wanted.float()).norm()
        assert error <= NEAR[self.config.dtype] * wanted.float().norm()

    def check_choice(self, distances: Tensor, kept: int) -> None:
        """Scores come out of 16-bit activations: near ones may change places."""
        assert len(distances) <= 0.1 * kept
        assert (distances < NEAR[self.config.dtype]).all()

# SPDX-License-Identifier: Apache-2.0
"""A model of Triton's Python backend: requests to ``hubkv_trt.runtime.service``, its increments to responses.

``build_scripts/make_triton_repo.py`` puts this file into a model repository.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from hubkv_trt.runtime.llm import LLM
from hubkv_trt.runtime.service import Service
from hubkv_trt.serving.counters import Exporter
from hubkv_trt.serving.repository import read_parameters
from hubkv_trt.serving.responder import Responder, refuse
from hubkv_trt.serving.translate import read_query


class TritonSender:
    """The sender of a request, as ``hubkv_trt.serving.responder`` wants it."""

    def __init__(self, request: pb_utils.InferenceRequest) -> None:
        self._sender = request.get_response_sender()
        self._wanted = set(request.requested_output_names())

    def send(self, tensors: dict[str, np.ndarray], final: bool) -> None:
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in self._wanted]
        self._respond(pb_utils.InferenceResponse(output_tensors=outputs), final)

    def fail(self, code: str, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._respond(pb_utils.InferenceResponse(error=error), final=True)

    def gone(self) -> bool:
        return self._sender.is_cancelled()

    def _respond(self, response: pb_utils.InferenceResponse, final: bool) -> None:
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


class TritonPythonModel:
    """One engine, one service."""

    def initialize(self, args: dict[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        directory = Path(args["model_repository"]) / args["model_version"]
        parameters = read_parameters(model_config, directory)
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(model_config)
        self._llm = LLM(parameters.engine, **parameters.llm)
        self._service = Service(self._llm, **parameters.service)
        self._exporter = Exporter(pb_utils, args["model_name"])
        self._responder = Responder(self._service, lambda: self._exporter.publish(self._service.metrics()))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = TritonSender(request)
            try:
                query = read_query(
                    {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                    json.loads(request.parameters()),
                    self._llm.config,
                    decoupled=self._decoupled,
                    timeout=request.timeout(),
                )
            except Exception as error:
                refuse(sender, error)
            else:
                self._responder.accept(sender, query)

    def finalize(self) -> None:
        self._service.close()
        self._responder.close()
        self._exporter.close()

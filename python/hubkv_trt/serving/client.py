# SPDX-License-Identifier: Apache-2.0
"""A client of the Triton models of this package, over gRPC (``pip install 'hubkv-trt[triton]'``).

with HubKVClient("localhost:8001") as client:
    for piece in client.stream("Why is the sky blue?", max_tokens=64, hubkv_ratio=0.75):
        print(piece.text, end="")
"""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .fields import BY_NAME, OUTPUTS

_NUMPY = {"STRING": np.object_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "FP16": np.float16,
          "BOOL": np.bool_}  # fmt: skip


class ServerError(RuntimeError):
    """What the server answered instead of a result.

    Attributes:
        code: of gRPC, such as ``INVALID_ARGUMENT``; empty for an error in a stream, which has only its message.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Piece:
    """A response.

    Attributes:
        text: of it; the pieces of a stream add up to the answer.
        final: nothing follows.
        figures: the other outputs (``serving/fields.py``) by name, ``output_log_probs`` a list of those of the piece's
            tokens; log probabilities come with every piece, the others with the last.
    """

    text: str
    final: bool
    figures: dict[str, Any]


class HubKVClient:
    """A connection to a server. Not for several threads at once.

    Args:
        url: host:port of its gRPC endpoint.
        model: the model's name.
        timeout: seconds for a whole answer; the request is cancelled then.
    """

    def __init__(self, url: str, model: str = "hubkv", timeout: float = 600.0) -> None:
        try:
            import tritonclient.grpc as grpc
        except ImportError as error:
            raise ImportError("tritonclient is not installed: pip install 'hubkv-trt[triton]'") from error
        self._grpc = grpc
        self._model = model
        self._timeout = timeout
        self._client = grpc.InferenceServerClient(url)

    def generate(self, text_input: str | None = None, **inputs: Any) -> Piece:
        """The whole answer.

        Args:
            text_input: the prompt.
            inputs: other inputs of ``serving/fields.py`` by name.

        Raises:
            ValueError: there is no such input.
            ServerError: the server refused or failed.
        """
        (piece,) = self._responses({"text_input": text_input, **inputs, "stream": None})
        return piece

    def stream(self, text_input: str | None = None, **inputs: Any) -> Iterator[Piece]:
        """The answer as it appears; arguments as ``generate`` has them. Leaving the loop early cancels the request."""
        return self._responses({"text_input": text_input, **inputs, "stream": True})

    def infer(self, text_input: str | None = None, **inputs: Any) -> Piece:
        """The whole answer by a plain call, of a model that was made with ``--unary``."""
        tensors = self._tensors({"text_input": text_input, **inputs})
        try:
            result = self._client.infer(self._model, tensors, client_timeout=self._timeout)
        except self._grpc_error as error:
            raise _server_error(error) from None
        return _piece(result, final=True)

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def __enter__(self) -> HubKVClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def _grpc_error(self) -> type[Exception]:
        from tritonclient.utils import InferenceServerException

        return InferenceServerException

    def _responses(self, inputs: dict[str, Any]) -> Iterator[Piece]:
        tensors = self._tensors(inputs)
        responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        # Without the header triton_grpc_error, which would bring the codes of errors: tritonserver 2.51 crashed where
        # several clients used it at once.
        self._client.start_stream(lambda result, error: responses.put((result, error)), stream_timeout=self._timeout)
        finished = False
        try:
            self._client.async_stream_infer(
                self._model, tensors, request_id=uuid.uuid4().hex, enable_empty_final_response=True
            )
            while not finished:
                try:
                    result, error = responses.get(timeout=self._timeout + 10)
                except queue.Empty:
                    raise ServerError(f"no answer within {self._timeout} s", "DEADLINE_EXCEEDED") from None
                if error is not None:
                    finished = True
                    raise _server_error(error)
                piece = _piece(result, result.get_response().parameters["triton_final_response"].bool_param)
                finished = piece.final
                yield piece
        finally:
            self._client.stop_stream(cancel_requests=not finished)

    def _tensors(self, inputs: dict[str, Any]) -> list[Any]:
        tensors = []
        for name, value in inputs.items():
            if value is None:
                continue
            if name not in BY_NAME:
                raise ValueError(f"{name}: there is no such input; there are {', '.join(BY_NAME)}")
            field = BY_NAME[name]
            values = list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]
            if field.dtype == "STRING":
                values = [v.encode() if isinstance(v, str) else v for v in values]
            array = np.array([values], dtype=_NUMPY[field.dtype])
            tensor = self._grpc.InferInput(name, list(array.shape), "BYTES" if field.dtype == "STRING" else field.dtype)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return tensors


def _piece(result: Any, final: bool) -> Piece:
    figures = {}
    for field in OUTPUTS[1:]:
        array = result.as_numpy(field.name)
        if array is not None:
            values = [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]
            figures[field.name] = values if len(field.dims) > 1 else values[0]
    text = result.as_numpy("text_output")
    return Piece("" if text is None else text.reshape(-1)[0].decode(), final, figures)


def _server_error(error: Any) -> ServerError:
    """tritonclient names a status ``StatusCode.X``."""
    status = error.status()
    return ServerError(error.message(), status.removeprefix("StatusCode.") if status else "")

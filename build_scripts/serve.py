# SPDX-License-Identifier: Apache-2.0
"""Starts Triton Inference Server of the wheel nvidia-pytriton on 127.0.0.1, until Ctrl-C (``make serve``)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hubkv_trt.commands.common import Formatter, run
from hubkv_trt.serving.triton_server import TritonServer

ROOT = Path(__file__).resolve().parent.parent


def command(arguments: argparse.Namespace) -> int:
    """Starts the server, says where it is, and waits."""
    with TritonServer(
        arguments.environment,
        arguments.repository,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        options=["--log-info=false"],
    ) as server:
        server.wait_until_ready(timeout=600)
        print(f"serving {arguments.repository}: gRPC {server.grpc}, HTTP {server.http}, metrics {server.metrics}")
        print(f"try: hubkv client --url {server.grpc} --chat --prompt 'Why is the sky blue?'", flush=True)
        return server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser("serve.py", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--repository", type=Path, required=True, metavar="DIR", help="model repository")
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".venv-triton", metavar="DIR", help="where nvidia-pytriton is"
    )
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="0 takes a free one")
    parser.add_argument("--grpc-port", type=int, default=8001, metavar="PORT", help="0 takes a free one")
    parser.add_argument("--metrics-port", type=int, default=8002, metavar="PORT", help="0 takes a free one")
    sys.exit(run(command, parser.parse_args()))

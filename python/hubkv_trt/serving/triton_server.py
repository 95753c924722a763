# SPDX-License-Identifier: Apache-2.0
"""Starts the Triton Inference Server of the wheel ``nvidia-pytriton``, which runs on the CPU, too.

It lives in a virtual environment of its own (``.venv-triton``): its Python backend needs numpy < 2. The wheel, this
package and its dependencies are found there; the environment that this module runs in needs none of the wheel.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _library

_ASK = """
import sys, sysconfig, importlib.util
found = importlib.util.find_spec("pytriton")
print(found.submodule_search_locations[0] if found else "")
print(f"{sys.version_info[0]}.{sys.version_info[1]}")
print(sysconfig.get_config_var("LIBDIR") or "")
"""


class TritonServer:
    """A server on 127.0.0.1. Use it in a ``with``, or call ``stop``.

    Args:
        environment: the virtual environment that has ``nvidia-pytriton`` and this package.
        repository: the model repository.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        options: more options of ``tritonserver``.
        log: a file for all it prints; None leaves it on the terminal.

    Attributes:
        pid: of the server.
        http, grpc, metrics: host:port.

    Raises:
        ValueError: the environment has no Triton for its Python.
    """

    def __init__(
        self,
        environment: Path,
        repository: Path,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        options: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="hubkv-triton-")
        binary, variables = _prepare(environment, Path(self._scratch.name))
        ports = _free_ports((http_port, grpc_port, metrics_port))
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        command = [str(binary), f"--model-repository={repository}", f"--backend-directory={self._scratch.name}"]
        for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
            command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
        # A model that does not load is reported; the others are served.
        command += ["--exit-on-error=false", "--strict-readiness=false", "--exit-timeout-secs=10"]
        command += ["--disable-auto-complete-config", *options]  # its asking a model for more costs a start of Python
        self._log = log.open("wb") if log is not None else None
        self._process = subprocess.Popen(
            command,
            env=variables,
            stdout=self._log,
            stderr=subprocess.STDOUT if self._log else None,
            start_new_session=True,  # so that the processes of its models can be ended with it
        )
        self.pid = self._process.pid

    def wait_until_ready(self, timeout: float) -> None:
        """Waits until the server answers on all ports; every model has then been loaded or has failed.

        Raises:
            TimeoutError: it does not in that many seconds.
            RuntimeError: it has ended.
        """
        deadline = time.monotonic() + timeout
        # the port of metrics is the last that tritonserver opens
        urls = [f"http://{self.http}/v2/health/ready", f"http://{self.metrics}/metrics"]
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"tritonserver ended with exit status {self._process.returncode}; see its log")
            try:
                for url in urls:
                    urllib.request.urlopen(url, timeout=2).close()  # raises for a status that is not 200
                return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        raise TimeoutError(f"tritonserver is not ready after {timeout} s")

    def wait(self) -> int:
        """Waits until the server ends; its exit status."""
        return self._process.wait()

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self, timeout: float = 30.0) -> int:
        """Asks it to end (it finishes what runs, for ten seconds at most), and makes it after ``timeout`` seconds."""
        if self.running():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
        status = self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # a server that was not patient leaves processes of models behind
            os.killpg(self.pid, signal.SIGKILL)
        if self._log is not None:
            self._log.close()
        self._scratch.cleanup()
        return status

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def _prepare(environment: Path, backends: Path) -> tuple[Path, dict[str, str]]:
    """The server's binary and its variables; puts the Python backend with the stub of that Python into ``backends``."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise ValueError(f"environment: {environment}: no virtual environment there; `make serve` makes .venv-triton")
    found = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=True, timeout=60)
    package, version, library_folder = found.stdout.splitlines()
    if not package:
        raise ValueError(f"environment: {environment}: nvidia-pytriton is not installed in it; `make serve` does that")
    triton = Path(package) / "tritonserver"
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        have = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise ValueError(f"environment: {environment}: Triton's Python backend runs Python {have}, not {version}")
    shutil.copytree(triton / "backends" / "python", backends / "python")
    shutil.copy(stub, backends / "python")
    folders = [
        library_folder,
        str(Path(package).parent / "nvidia_pytriton.libs"),
        os.environ.get("LD_LIBRARY_PATH", ""),
    ]
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(folder for folder in folders if folder),
        "PATH": f"{environment / 'bin'}:{os.environ.get('PATH', '')}",  # the stub's Python finds the environment there
        _library.VARIABLE: str(_library.find()),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    variables.pop("PYTHONHOME", None)
    return triton / "bin" / "tritonserver", variables


def _free_ports(ports: Sequence[int]) -> list[int]:
    """The ports, with a free one for each 0. They stay bound until all are known, so that none comes twice."""
    held = []
    try:
        for port in ports:
            held.append(socket.socket())
            held[-1].bind(("127.0.0.1", port))
        return [s.getsockname()[1] for s in held]
    except OSError as error:
        raise ValueError(f"ports: {list(ports)}: not all are free ({error.strerror})") from None
    finally:
        for s in held:
            s.close()

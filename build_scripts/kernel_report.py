# SPDX-License-Identifier: Apache-2.0
"""What the CUDA compiler says of every kernel: registers, shared memory, spills, vector loads, and the occupancy that
follows.

    python build_scripts/kernel_report.py [--arch 80 90 ...] [STAGE ...]

Builds libhubkv with the kernels of all architectures in ``build/cuda`` first (``HUBKV_CUDA_BUILD`` names another
folder). Needs what ``cmake -DHUBKV_CUDA=ON`` needs: an nvcc, of a toolkit or of wheels (cmake/cuda.cmake). No GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("HUBKV_CUDA_BUILD", ROOT / "build" / "cuda"))
STAGES = tuple(sorted(path.stem for path in ROOT.glob("cpp/*/*.cu")))
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Per multiprocessor: threads, blocks, bytes of shared memory (of which each block costs 1 KB more than it asks for).
# CUDA programming guide, technical specifications per compute capability. All have 65536 registers.
LIMITS = {
    80: (2048, 32, 164 << 10),
    86: (1536, 16, 100 << 10),
    89: (1536, 24, 100 << 10),
    90: (2048, 32, 228 << 10),
    100: (2048, 32, 228 << 10),
    120: (1536, 24, 100 << 10),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled for one architecture."""

    name: str  # copyRows<16>
    architecture: int
    threads: int  # of a block, at most
    registers: int  # per thread
    shared: int  # static bytes per block
    stack: int  # bytes per thread
    spills: int  # bytes stored and loaded
    vector_loads: int  # 16-byte loads from global memory, in the PTX
    vector_stores: int

    def occupancy(self, dynamic_shared: int = 0) -> float:
        """Resident warps over the most that a multiprocessor holds."""
        threads, blocks, shared = LIMITS[self.architecture]
        warps = -(-self.threads // 32)
        registers_per_warp = -(-self.registers * 32 // 256) * 256
        fitting = min(
            blocks,
            threads // (warps * 32),
            65536 // registers_per_warp // warps,
            shared // (self.shared + dynamic_shared + 1024),
        )
        return fitting * warps * 32 / threads


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}")


@functools.cache
def build() -> Path:
    """libhubkv with the kernels of all architectures, made or brought up to date: the library's file.

    Raises:
        RuntimeError: there is no nvcc, or the kernels do not compile; the message is CMake's or the compiler's.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        options = ["-DHUBKV_CUDA=ON", "-DHUBKV_KERNEL_REPORT=ON", "-DHUBKV_PLUGIN=AUTO", "-DHUBKV_WERROR=ON"]
        options.append(f"-DPython3_EXECUTABLE={sys.executable}")  # whose wheels may have nvcc
        _run("cmake", *generator, "-S", ROOT, "-B", BUILD, *options)
        _run("cmake", "--build", BUILD, "--parallel", str(os.cpu_count() or 2))
        for file in (BUILD / "kernels").iterdir():
            if file.suffix != ".ptx":  # steps of the compiler, 40 MB a stage
                file.unlink()
    return BUILD / "libhubkv.so"


def _short(mangled: list[str]) -> list[str]:
    """Names without namespaces and parameters."""
    said = subprocess.run(["c++filt", *mangled], check=True, capture_output=True, text=True).stdout.splitlines()
    return [re.sub(r"\(.*", "", re.sub(r"\w+::|\(anonymous namespace\)::|^void ", "", line)) for line in said]


@functools.cache
def report(stage: str, architecture: int = 90) -> tuple[Kernel, ...]:
    """The kernels of a stage's .cu file.

    Raises:
        RuntimeError: as :func:`build`.
    """
    build()
    said = (BUILD / f"CMakeFiles/hubkv.dir/cpp/{stage}/{stage}.cu.o.log").read_text()
    ptx = (BUILD / f"kernels/{stage}.compute_{architecture}.ptx").read_text()
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)^\}", ptx, re.DOTALL | re.MULTILINE))
    entries = re.findall(
        rf"Compiling entry function '(\w+)' for 'sm_{architecture}'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        said,
        re.DOTALL,
    )
    names = _short([entry[0] for entry in entries])
    kernels = []
    for name, (mangled, stack, stores, loads, registers, rest) in zip(names, entries, strict=True):
        body = bodies[mangled]
        threads = re.search(r"\.maxntid (\d+)", body)
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(
            Kernel(
                name,
                architecture,
                int(threads[1]) if threads else 1024,
                int(registers),
                int(shared[1]) if shared else 0,
                int(stack),
                int(stores) + int(loads),
                len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.\w?32", body)),
                len(re.findall(r"st\.global(?:\.\w+)*\.v4\.\w?32", body)),
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; all by default")
    parser.add_argument("--arch", nargs="+", type=int, default=ARCHITECTURES, choices=ARCHITECTURES)
    arguments = parser.parse_args()
    print("| kernel | threads | shared, bytes | " + " | ".join(f"sm_{arch}" for arch in arguments.arch) + " |")
    print("|---|---|---|" + "---|" * len(arguments.arch))
    for stage in arguments.stages or STAGES:
        for row in zip(*(report(stage, arch) for arch in arguments.arch), strict=True):
            cells = [f"{k.registers}, {k.occupancy():.0%}" + (" spills" if k.spills else "") for k in row]
            print(f"| `{row[0].name}` | {row[0].threads} | {row[0].shared} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

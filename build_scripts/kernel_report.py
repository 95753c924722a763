# SPDX-License-Identifier: Apache-2.0
"""What the CUDA compiler says of every kernel: registers, shared memory, spills, vector loads, and the occupancy that
follows.

    python build_scripts/kernel_report.py [--arch 80 90 ...] [STAGE ...]

Needs nvcc: CUDACXX, the search path, /usr/local/cuda, or the wheels nvidia-cuda-nvcc, -crt, -runtime, -cccl and
nvidia-nvvm. No GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def find_nvcc() -> Path | None:
    """The CUDA compiler, in the order that cmake/cuda.cmake looks for it."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    places = [Path(named)] if named else [Path("/usr/local/cuda/bin/nvcc")]
    wheels = importlib.util.find_spec("nvidia")
    if wheels is not None and wheels.submodule_search_locations is not None:
        places += [Path(folder) / "cu13/bin/nvcc" for folder in wheels.submodule_search_locations]
    return next((place for place in places if place.is_file()), None)


def _short(mangled: list[str]) -> list[str]:
    """Names without namespaces and parameters."""
    said = subprocess.run(["c++filt", *mangled], check=True, capture_output=True, text=True).stdout.splitlines()
    return [re.sub(r"\(.*", "", re.sub(r"\w+::|\(anonymous namespace\)::|^void ", "", line)) for line in said]


@functools.cache
def report(source: Path, architecture: int = 90) -> tuple[Kernel, ...]:
    """The kernels of a .cu file.

    Raises:
        RuntimeError: there is no nvcc, or the file does not compile; the message is the compiler's.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc: install the CUDA toolkit or the package's extra `dev`, or set CUDACXX")
    with tempfile.TemporaryDirectory() as folder:
        # The options of cmake/cuda.cmake.
        options = ["-O3", "-std=c++17", "-DHUBKV_WITH_CUDA", f"-I{ROOT}/cpp", f"-I{ROOT}/cpp/include"]
        options += ["-fmad=false"] if source.stem == "refine" else []
        code = f"arch=compute_{architecture},code=sm_{architecture}"
        command = [nvcc, "-cubin", "-gencode", code, "-Xptxas", "-v", "--keep", "--keep-dir", folder]
        command += ["-o", f"{folder}/out.cubin", *options, source]
        done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        ptx = next(Path(folder).glob("*.ptx")).read_text()
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)^\}", ptx, re.DOTALL | re.MULTILINE))
    entries = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        done.stdout + done.stderr,
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
    parser.add_argument("stages", nargs="*", help="folders of cpp/; all by default")
    parser.add_argument("--arch", nargs="+", type=int, default=ARCHITECTURES, choices=ARCHITECTURES)
    arguments = parser.parse_args()
    print("| kernel | threads | shared, bytes | " + " | ".join(f"sm_{arch}" for arch in arguments.arch) + " |")
    print("|---|---|---|" + "---|" * len(arguments.arch))
    for source in sorted(ROOT.glob("cpp/*/*.cu")):
        if arguments.stages and source.stem not in arguments.stages:
            continue
        for row in zip(*(report(source, arch) for arch in arguments.arch), strict=True):
            cells = [f"{k.registers}, {k.occupancy():.0%}" + (" spills" if k.spills else "") for k in row]
            print(f"| `{row[0].name}` | {row[0].threads} | {row[0].shared} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

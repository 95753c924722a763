# SPDX-License-Identifier: Apache-2.0
"""A read outside of memory, for a sanitizer to find: select is told of more scores than there are.

python -m device.planted_read
"""

from __future__ import annotations

import torch

from hubkv_trt import _abi
from hubkv_trt._library import call


def main() -> None:
    refined = torch.rand(4096, device="cuda")
    positions, offsets = (torch.zeros(8192, dtype=torch.int64, device="cuda") for _ in range(2))
    scratch = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    params = _abi.SelectParams(1, 1, 4096 + 4096, 100)
    addresses = (x.data_ptr() for x in (refined, positions, offsets, scratch))
    call("hubkv_select", _abi.CUDA, None, params, *addresses, scratch.numel())
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The kernels run on the CPU. See README.md."""

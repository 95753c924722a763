# SPDX-License-Identifier: Apache-2.0
"""The little of the CUDA runtime that an executor needs, over ``cuda.bindings``; loaded when first called."""

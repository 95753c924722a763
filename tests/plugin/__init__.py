# SPDX-License-Identifier: Apache-2.0
"""The plugins as TensorRT drives them: in its registry, and by a harness of the tests."""

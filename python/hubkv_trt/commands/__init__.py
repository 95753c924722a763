# SPDX-License-Identifier: Apache-2.0
"""The sub-commands of ``hubkv``: each adds its options to a parser and runs."""

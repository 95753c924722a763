# SPDX-License-Identifier: Apache-2.0
"""Builds an engine directory: the same as ``hubkv build``. Try ``python build_scripts/build_engine.py --hubkv``."""

import sys

from hubkv_trt.cli import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]], program="build_engine.py"))

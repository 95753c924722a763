# SPDX-License-Identifier: Apache-2.0
"""Does a compression keep what is asked for later: tasks, methods, measurements, statistics (``hubkv eval``)."""

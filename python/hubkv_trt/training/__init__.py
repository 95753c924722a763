# SPDX-License-Identifier: Apache-2.0
"""Training a gate: contexts from texts, the teacher's scores of them, and the regression."""

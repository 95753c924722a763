# SPDX-License-Identifier: Apache-2.0
"""The FastKVzip gate: a score for every KV pair from the attention input of its layer (arXiv 2601.17668)."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from ..config import ModelConfig
from ..graph.ops import Ops

X = TypeVar("X")

GATE_DIM = 16
"""C, the width of a gate's queries and keys; all published gates have it."""

GATE_EPS = 1e-6


def gate_scores(ops: Ops[X], layer: int, hidden: X, config: ModelConfig) -> X:
    """How much a later reader of the context will attend to each KV pair of one layer, in [0, 1].

    For KV head h and token t, with queries q_g = RMSNorm(Wq x + bq) (g = 1..G), key k = RMSNorm(Wk x) and S learned
    sinks k_base_s, all of width C = 16:

        score = mean over g of 1 / (1 + sum over s of exp(q_g . k_base_s / 4 - (q_g . k / 4 + b_g)))

    that is the share of attention which the key wins against the sinks (arXiv 2601.17668, section 3). The projections
    run in the engine's dtype, everything after them in float32: 16-bit scores would saturate at 1 and tie.

    Args:
        ops: the backend; reads the weights ``gate.{layer}.*`` of ``scorers.fastkvzip.engine_weights``:
            ``qk_proj.weight`` [Hkv*G*C + Hkv*C, E] and ``qk_proj.bias`` (queries first, then keys), ``q_norm.weight``
            and ``k_norm.weight`` [C], ``k_base`` [Hkv, 1, S, C], ``b`` [Hkv, G, 1, 1].
        layer: index of the layer.
        hidden: [N, E], the attention input (after ``input_layernorm``), in the engine's dtype.
        config: gives Hkv and G.

    Returns:
        [Hkv, N] float32.
    """
    heads, groups, c = config.num_kv_heads, config.group_size, GATE_DIM
    num_q = heads * groups * c
    name = f"gate.{layer}"

    def weight(field: str) -> X:
        return ops.to_float32(ops.weight(f"{name}.{field}"))

    qk = ops.linear(hidden, ops.weight(f"{name}.qk_proj.weight"), ops.weight(f"{name}.qk_proj.bias"))
    qk = ops.to_float32(qk)
    q = ops.split_heads(ops.slice_last(qk, 0, num_q), heads, groups, c)
    k = ops.split_heads(ops.slice_last(qk, num_q, num_q + heads * c), heads, 1, c)
    # Heads first and tokens last from here: reductions run over leading axes, and the result needs no transpose.
    q = ops.transpose(ops.rms_norm(q, weight("q_norm.weight"), GATE_EPS), 1, 2, 0, 3)  # [Hkv, G, N, C]
    k = ops.transpose(ops.rms_norm(k, weight("k_norm.weight"), GATE_EPS), 1, 2, 0, 3)  # [Hkv, 1, N, C]
    scale = ops.constant(np.full((1, 1, 1, c), 1 / math.sqrt(c), np.float32))
    base = ops.matmul_transposed(ops.mul(weight("k_base"), scale), q)  # [Hkv, G, S, N]
    logit = ops.add(ops.matmul_transposed(scale, ops.mul(q, k)), weight("b"))  # [Hkv, G, 1, N]
    # The difference inside the exponential cannot give inf * 0: an overflow is a score of 0.
    rest = ops.reduce_sum(ops.exp(ops.sub(base, logit)), 2)  # [Hkv, G, N]
    one = ops.constant(np.ones((1, 1, 1), np.float32))
    return ops.reduce_mean(ops.reciprocal(ops.add(rest, one)), 1)

# SPDX-License-Identifier: Apache-2.0
"""Runs a TensorRT network without TensorRT's kernels and without a GPU: torch, layer by layer, as the network says.

``evaluate`` walks an ``INetworkDefinition``; ``layers``, ``shape_layers`` and ``attention_layers`` have one function
for each layer type; ``plugins`` runs the nodes of HubKV's plugins through ``torch.ops.hubkv``.
"""

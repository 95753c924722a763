# SPDX-License-Identifier: Apache-2.0
"""The FastKVzip gate: its formula, its files, and the teacher it learns from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubkv_trt.config import DType, ModelConfig
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.models.checkpoint import load_config, load_weights
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.models.gate import gate_scores
from hubkv_trt.scorers.fastkvzip import (
    Gate,
    check_gate,
    engine_weights,
    find_gate,
    gate_name,
    load_gate,
    no_gate_message,
    random_gate,
    save_gate,
)
from hubkv_trt.scorers.kvzip import chat_frame, encode, largest_attention, repeat_prompts, teacher_scores
from hubkv_trt.training.metrics import overlap, spearman


def config(hidden: int = 48, heads: int = 6, kv_heads: int = 2, layers: int = 2) -> ModelConfig:
    return ModelConfig("llama", 100, hidden, 64, layers, heads, kv_heads, 8, 512)


def trained_gate(model: ModelConfig, seed: int, num_sinks: int = 16) -> Gate:
    """A gate whose every tensor is away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    gate = random_gate(model, seed, num_sinks)
    return Gate({n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in gate.tensors.items()})


def scores_of(gate: Gate, model: ModelConfig, layer: int, hidden: torch.Tensor, dtype: DType) -> torch.Tensor:
    ops = EagerOps(engine_weights(gate, dtype), dtype)
    return gate_scores(ops, layer, hidden, model)


def plain_scores(gate: Gate, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """The formula of arXiv 2601.17668, one head, token and query at a time, in float64."""
    t = {n.split(".", 1)[1]: v.double() for n, v in gate.tensors.items() if n.startswith(f"{layer}.")}
    heads, groups = t["b"].shape

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt() * weight

    result = torch.empty(heads, len(hidden), dtype=torch.float64)
    for n, x in enumerate(hidden.double()):
        q = (t["q_proj.weight"] @ x + t["q_proj.bias"]).view(heads, groups, 16)
        k = (t["k_proj.weight"] @ x).view(heads, 16)
        for h in range(heads):
            key = norm(k[h], t["k_norm.weight"])
            total = 0.0
            for g in range(groups):
                query = norm(q[h, g], t["q_norm.weight"])
                own = query @ key / 4 + t["b"][h, g]
                total += 1 / (1 + (t["k_base"][h] @ query / 4 - own).exp().sum())
            result[h, n] = total / groups
    return result


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_sinks", "num_tokens"), [(6, 2, 16, 37), (4, 4, 16, 1), (16, 1, 5, 9), (9, 3, 16, 20)]
)
def test_gate_equals_the_formula(heads: int, kv_heads: int, num_sinks: int, num_tokens: int) -> None:
    model = config(heads=heads, kv_heads=kv_heads)
    gate = trained_gate(model, 1, num_sinks)
    hidden = torch.randn(num_tokens, model.hidden_size, generator=torch.Generator().manual_seed(2))
    for layer in range(model.num_layers):
        scores = scores_of(gate, model, layer, hidden, DType.FLOAT32)
        assert scores.dtype is torch.float32
        torch.testing.assert_close(scores.double(), plain_scores(gate, layer, hidden), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.FLOAT32, 1e-5), (DType.BFLOAT16, 2e-2), (DType.FLOAT16, 4e-3)])
def test_gate_equals_kvpress(dtype: DType, tolerance: float) -> None:
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    model = config(heads=9, kv_heads=3)
    gate = trained_gate(model, 3)
    torch_dtype = getattr(torch, dtype.value)
    peer = FastKVzipGate(0, model.hidden_size, 3, 3, torch_dtype)
    state = {n.removeprefix("0."): t for n, t in gate.tensors.items() if n.startswith("0.")}
    peer.load_state_dict({**state, "k_base": state["k_base"][:, None], "b": state["b"][:, None]})
    hidden = torch.randn(50, model.hidden_size, generator=torch.Generator().manual_seed(4)).to(torch_dtype)
    with torch.no_grad():
        expected = peer(hidden[None])[0].float()
    scores = scores_of(gate, model, 0, hidden, dtype)
    torch.testing.assert_close(scores, expected, atol=tolerance, rtol=0)


def test_gate_scores_do_not_overflow() -> None:
    """Logits beyond the range of exp are scores of 0 and 1, not NaN."""
    model = config(heads=2, kv_heads=1, layers=1)
    gate = trained_gate(model, 5)
    hidden = torch.randn(8, model.hidden_size, generator=torch.Generator().manual_seed(6))
    for b, expected in ((1e4, 1.0), (-1e4, 0.0)):
        gate.tensors["0.b"].fill_(b)
        assert (scores_of(gate, model, 0, hidden, DType.FLOAT32) == expected).all()


# ---- files ---------------------------------------------------------------------------------------------------------


def save_published(path: Path, gate: Gate, **more: Any) -> None:
    """As the authors' training script saves it: a list of state dicts, and loss curves as NumPy arrays."""
    layers = []
    for i in range(gate.num_layers):
        state = {n.split(".", 1)[1]: t.clone() for n, t in gate.tensors.items() if n.startswith(f"{i}.")}
        state["k_base"], state["b"] = state["k_base"][:, None], state["b"][:, None]
        layers.append(state)
    torch.save({"module": layers, "loss": np.ones((3, 2)), "acc": np.zeros((3, 2), np.float32), **more}, path)


def assert_same(a: Gate, b: Gate) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name


def test_published_file_and_ours_round_trip(tmp_path: Path) -> None:
    model = config()
    gate = trained_gate(model, 7)
    save_published(tmp_path / "q3_dim16_sink16.pt", gate)
    published = load_gate(tmp_path / "q3_dim16_sink16.pt", model)
    assert_same(published, gate)
    save_gate(Gate(published.tensors, {"model": "some"}), tmp_path / "gate.safetensors")
    ours = load_gate(tmp_path / "gate.safetensors", model)
    assert_same(ours, gate)
    assert (ours.num_layers, ours.num_sinks) == (2, 16)
    assert {"model": "some", "layers": "2", "sinks": "16"}.items() <= ours.metadata.items()
    save_gate(ours, tmp_path / "gate.safetensors", DType.BFLOAT16)  # replaces it
    assert load_gate(tmp_path / "gate.safetensors", model).tensors["1.b"].dtype is torch.bfloat16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gate.safetensors", "q3_dim16_sink16.pt"]


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran-code",)


def test_pickles_that_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_published(tmp_path / "gate.pt", trained_gate(config(), 8), extra=Payload())
    with pytest.raises(ValueError, match=r"gate\.pt: refused, .*can run code"):
        load_gate(tmp_path / "gate.pt")
    assert not (tmp_path / "ran-code").exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    gate = trained_gate(config(), 9)
    save_published(tmp_path / "gate.pt", gate)
    save_gate(gate, tmp_path / "gate.safetensors")
    for name in ("gate.pt", "gate.safetensors"):
        data = (tmp_path / name).read_bytes()
        for size in (0, 10, len(data) // 2):
            (tmp_path / name).write_bytes(data[:size])
            with pytest.raises(ValueError, match=f"{name}: not a whole"):
                load_gate(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_gate(tmp_path / "nowhere.pt")
    torch.save({"module": {}}, tmp_path / "gate.pt")
    with pytest.raises(ValueError, match="not a list of state dicts"):
        load_gate(tmp_path / "gate.pt")
    without = Gate({n: t for n, t in gate.tensors.items() if n != "1.k_base"})
    save_published(tmp_path / "gate.pt", Gate({n: t for n, t in gate.tensors.items() if n[0] == "0"}), x=1)
    save_gate(without, tmp_path / "gate.safetensors")
    with pytest.raises(ValueError, match=r"tensor 1\.k_base: missing"):
        load_gate(tmp_path / "gate.safetensors")
    save_gate(Gate({**gate.tensors, "0.other": torch.ones(2)}), tmp_path / "gate.safetensors")
    with pytest.raises(ValueError, match=r"tensor 0\.other: unknown"):
        load_gate(tmp_path / "gate.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 1}, r"the gate has 2 layers and the model 1"),
        ({"layers": 3}, r"tensor 2\.b: missing; .* 3 layers"),
        ({"hidden": 40}, r"tensor 0\.k_proj\.weight: shape \[32, 48\], but this model needs \[32, 40\]"),
        ({"heads": 4}, r"tensor 0\.b: shape \[2, 3\], but this model needs \[2, 2\]: it is a gate of another model"),
        ({"kv_heads": 3}, r"tensor 0\.b: shape"),
    ],
)
def test_gate_of_another_model_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    save_gate(trained_gate(config(), 10), tmp_path / "gate.safetensors")
    with pytest.raises(ValueError, match=message):
        load_gate(tmp_path / "gate.safetensors", config(**change))


def test_values_that_are_not_finite_are_refused() -> None:
    gate = trained_gate(config(), 11)
    gate.tensors["1.q_proj.bias"][3] = float("nan")
    with pytest.raises(ValueError, match=r"tensor 1\.q_proj\.bias: .*not finite"):
        check_gate(gate, config())


def test_models_are_known_by_any_name_of_theirs() -> None:
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "/m/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct/"):
        assert gate_name(name) == "smollm2-135m-instruct"
        assert find_gate(name) is not None
    assert find_gate("Qwen/Qwen3-8B") is None
    for part in ("'qwen3-8b'", "train_gate.py --model Qwen/Qwen3-8B", "huggingface.co/Jang-Hyun/Fast-KVzip", "--gate"):
        assert part in no_gate_message("Qwen/Qwen3-8B")


# ---- the teacher ---------------------------------------------------------------------------------------------------


def test_largest_attention_is_that_of_a_dense_softmax() -> None:
    g = torch.Generator().manual_seed(12)
    q = torch.randn(300, 6, 8, generator=g)
    sinks, chunk, new = (torch.randn(n, 2, 8, generator=g) for n in (4, 21, 300))
    found = largest_attention(q, sinks, chunk, new, 0.5)
    keys = torch.cat([sinks, chunk, new]).repeat_interleave(3, 1)
    logits = torch.einsum("ihd,jhd->hij", q, keys) * 0.5
    logits[:, torch.ones(300, 325, dtype=torch.bool).triu(26)] = -torch.inf
    expected = logits.softmax(-1)[:, :, 4:25].amax(1).view(2, 3, 21).amax(1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


TEXT = """
The lighthouse at the cape was lit for the first time in 1867. Its keeper had to climb 211 steps with a can of oil
every evening, and the flame was seen from ships eighteen miles away. In 1921 an electric lamp took its place, and the
oil store became a workshop where boats were mended. The workshop's register lists 64 boats; the last of them, a ferry
called Swallow, left it in the spring of 1958. The code of the workshop door is 7214.

Today the tower is a museum. Visitors may walk up on Saturdays between ten and four o'clock. The old lens, three metres
high and made of 1176 pieces of glass, stands in the entrance hall, and a clock beside it still shows the time at which
the first ship answered the light: nineteen minutes past nine.
"""


@pytest.fixture(scope="session")
def demo_teacher(demo_model_path: Path, demo_tokenizer: Any) -> tuple[Decoder, EagerOps, Any]:
    model = load_config(demo_model_path)
    ops = EagerOps(load_weights(demo_model_path, DType.FLOAT32, model=model), DType.FLOAT32)
    return Decoder(model), ops, repeat_prompts(demo_tokenizer)


def test_teacher_equals_kvpress(
    demo_teacher: Any, demo_reference: Any, demo_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks, in the chat template, against KVzipPress on transformers' model of the same weights."""
    from kvpress import KVzipPress
    from transformers import DynamicCache

    class Capture(KVzipPress):
        def compress_post(self, model: Any) -> None:
            self.captured = self.score_val.clone()

    prefix = encode(demo_tokenizer, chat_frame(demo_tokenizer)[0])
    ids = [*prefix, *encode(demo_tokenizer, TEXT)]
    assert len(ids) - len(prefix) > 150
    demo_tokenizer.save_pretrained(tmp_path)  # KVzipPress loads the tokenizer from where the model came from
    monkeypatch.setattr(demo_reference.config, "_name_or_path", str(tmp_path))
    press = Capture(compression_ratio=0.5, chunk_size=150)
    with torch.no_grad(), press(demo_reference):
        demo_reference(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    found = teacher_scores(*demo_teacher[:2], ids, demo_teacher[2], len(prefix), chunk_tokens=150)
    torch.testing.assert_close(found.scores, press.captured[:, 0], atol=1e-4, rtol=0)


def test_shipped_gate_ranks_as_its_teacher(demo_teacher: Any, demo_tokenizer: Any, demo_model_path: Path) -> None:
    decoder, ops, prompts = demo_teacher
    path = find_gate(str(demo_model_path))
    assert path is not None
    assert path.stat().st_size < 8_000_000
    gate = load_gate(path, decoder.model)
    teacher = teacher_scores(decoder, ops, encode(demo_tokenizer, TEXT), prompts)
    gate_ops = EagerOps(engine_weights(gate, DType.FLOAT32), DType.FLOAT32)
    scores = torch.stack(
        [gate_scores(gate_ops, i, teacher.hidden[i], decoder.model) for i in range(decoder.model.num_layers)]
    )
    assert spearman(scores, teacher.scores) > 0.74  # measured 0.777
    assert overlap(scores, teacher.scores, 0.75) > 0.74  # measured 0.776; chance gives 0.25


def test_context_that_cannot_be_repeated_is_refused(demo_teacher: Any) -> None:
    decoder, ops, prompts = demo_teacher
    with pytest.raises(ValueError, match="prefix_length: 3 is not in"):
        teacher_scores(decoder, ops, [5, 6, 7], prompts, prefix_length=3)
    with pytest.raises(ValueError, match="the model has 8192: shorten"):
        teacher_scores(decoder, ops, [5] * 8190, prompts)

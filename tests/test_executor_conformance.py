# SPDX-License-Identifier: Apache-2.0
"""What every executor promises the runtime; the same tests over each one that this machine can run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubkv_trt.config import HubKVConfig, Scope, TensorRTConfig
from hubkv_trt.engine.backend import missing_for_tensorrt
from hubkv_trt.engine.build import build_engine
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.models.checkpoint import load_config
from hubkv_trt.runtime.batch import Batch
from hubkv_trt.runtime.executors.executor import LayerwiseExecutor, Prefill
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.prefill_run import begin_prefill
from hubkv_trt.runtime.scheduler import Phase
from hubkv_trt.runtime.sequence import Sequence
from hubkv_trt.scorers.fastkvzip import Gate, gate_shapes, save_gate
from tiny_models import save_tiny_model

EXECUTORS = ["eager", pytest.param("tensorrt", marks=pytest.mark.gpu)]
MAX_EXTEND = 32  # of the TensorRT engine: longer questions go in pieces


@pytest.fixture(scope="module", params=EXECUTORS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``engine(scope)``: of a random model with heads that TensorRT's attention has (D = 64)."""
    backend = request.param
    if backend == "tensorrt" and (missing := list(missing_for_tensorrt())):
        pytest.skip(f"tensorrt needs {', '.join(missing)}")
    folder = tmp_path_factory.mktemp(backend)
    model = save_tiny_model("llama", folder / "model", head_dim=64)
    generator = torch.Generator().manual_seed(1)
    shapes = gate_shapes(load_config(model))
    save_gate(gate=Gate({n: torch.randn(s, generator=generator) for n, s in shapes.items()}), path=folder / "gate")
    options: dict[str, Any] = {"dtype": "float32"}
    if backend == "tensorrt":
        options = {"dtype": "float16", "tensorrt": TensorRTConfig(max_extend_len=MAX_EXTEND)}
    made: dict[Scope | None, Path] = {}

    def make(scope: Scope | None = Scope.MODEL) -> Path:
        if scope not in made:
            hubkv, gate = (None, None) if scope is None else (HubKVConfig(scope=scope), folder / "gate")
            made[scope] = folder / str(scope)
            build_engine(
                model,
                made[scope],
                hubkv=hubkv,
                gate=gate,
                backend=backend,
                max_input_len=512,
                max_batch_size=6,
                **options,
            )
        return made[scope]

    return make


@pytest.fixture(scope="module")
def shared(engine: Callable[..., Path]) -> LLM:
    return LLM(engine())


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An engine that holds nothing before a test, and after it when what the test started has ended."""
    yield shared
    for sequence in [*shared._scheduler.running, *shared._scheduler.waiting]:
        shared._scheduler.finish(sequence, "aborted")
    shared.cache.audit()
    assert shared.cache.held_bytes == 0


def ids(count: int, seed: int = 0) -> np.ndarray:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).numpy().astype(np.int32)


def schedule(llm: LLM, token_ids: np.ndarray, ratio: float = 0.5) -> Sequence:
    """A prompt that shall be prefilled now, with room for 100 tokens behind it."""
    params = SamplingParams(max_tokens=101, ignore_eos=True)
    sequence = llm._requests.prompt(token_ids, params, ratio if llm.config.hubkv else None, stream=False)
    llm._scheduler.add(sequence)
    phase, started = llm._scheduler.schedule()
    assert phase is Phase.PREFILL
    assert started == [sequence]
    return sequence


def start(llm: LLM, token_ids: np.ndarray, ratio: float = 0.5) -> tuple[Sequence, Prefill]:
    """Prefills a prompt; its sequence runs."""
    hubkv = llm.config.hubkv
    sequence = schedule(llm, token_ids, ratio)
    assert sequence.budget is not None
    assert sequence.segment is not None
    alpha, window = (hubkv.alpha(ratio), hubkv.window(len(token_ids))) if hubkv else (0.0, 0)
    done = llm._executor.prefill(token_ids, sequence.budget, alpha, window, sequence.segment)
    sequence.output_ids.append(0)  # a batch begins with a token that was drawn and not yet fed
    return sequence, done


def host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, when all work of the device is done."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return x.detach().cpu().clone()


def extend(llm: LLM, batch: Batch, tokens: list[np.ndarray]) -> torch.Tensor:
    """Feeds each sequence its tokens; logits on the host."""
    lengths = torch.tensor([len(t) for t in tokens], dtype=torch.int32)
    padded = torch.zeros(len(tokens), int(lengths.max()), dtype=torch.int32)
    for row, t in zip(padded, tokens, strict=True):
        row[: len(t)] = torch.from_numpy(t)
    return host(llm._executor.extend(batch, padded, lengths if padded.shape[1] > 1 else None))


def steps(llm: LLM, batch: Batch, tokens: list[np.ndarray]) -> torch.Tensor:
    """Feeds tokens one at a time: logits [steps, B, V]. All have the same number."""
    return torch.stack([extend(llm, batch, [t[i : i + 1] for t in tokens]) for i in range(len(tokens[0]))])


def steps_alone(llm: LLM, prompt: np.ndarray, tokens: np.ndarray, ratio: float = 0.5) -> torch.Tensor:
    """What a sequence gives that has the executor for itself: logits [steps, V]."""
    sequence, _ = start(llm, prompt, ratio)
    logits = steps(llm, Batch([sequence], llm.cache), [tokens])
    llm._scheduler.finish(sequence, "stop")
    return logits[:, 0]


def close(llm: LLM, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal as far as the dtype goes."""
    bound = 1e-4 if llm.config.dtype.value == "float32" else 2e-2
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound * float(wanted.abs().max()))


# ---- prefill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [*Scope, None])
def test_prefill_fills_its_segment(engine: Callable[..., Path], scope: Scope | None) -> None:
    """In every scope, and where rows do not end at multiples of 256 bytes."""
    llm = LLM(engine(scope))
    model = llm.config.model
    prompt = ids(101)
    dense, done = start(llm, prompt, 0.0)
    assert dense.segment is not None
    assert done.rows().tolist() == [[101] * model.num_kv_heads] * model.num_layers
    all_k, all_v = (host(x).reshape(-1, 101, model.head_dim) for x in (dense.segment.k_rows, dense.segment.v_rows))
    if scope is None:
        return
    sequence, done = start(llm, prompt, 0.57)
    segment = sequence.segment
    assert segment is not None
    rows = done.rows()
    offsets, positions = host(segment.head_offsets).tolist(), host(segment.positions)
    assert rows.shape == (model.num_layers, model.num_kv_heads)
    assert offsets[0] == 0
    assert np.diff(offsets).tolist() == rows.flatten().tolist()
    assert offsets[-1] == segment.rows
    k_rows, v_rows = host(segment.k_rows), host(segment.v_rows)
    for head, (first, last) in enumerate(itertools.pairwise(offsets)):
        kept = positions[first:last].long()
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert torch.equal(k_rows[first:last], all_k[head, kept])
        assert torch.equal(v_rows[first:last], all_v[head, kept])


def test_prefill_writes_nowhere_else(llm: LLM) -> None:
    """Neighbours in the arena and all pages keep their bytes; what was borrowed comes back."""
    before = [llm.cache.allocate(n) for n in (40, 500, 33)]
    llm.cache.release(before.pop(1))  # a hole that is too small for the prompt's rows or just right
    pages = llm.cache.arena[: llm.cache.num_pages * llm.cache.ledger.page_bytes]
    pages.fill_(0x5A)
    for segment in before:
        segment.k_rows.fill_(7)
        segment.positions.fill_(-3)
    free = llm.cache._free.free_bytes
    sequence, done = start(llm, ids(120))
    done.rows()
    assert sequence.segment is not None
    assert llm.cache._free.free_bytes == free - sequence.segment.num_bytes
    assert bool((host(pages) == 0x5A).all())
    for segment in before:
        assert bool((host(segment.k_rows) == 7).all())
        assert bool((host(segment.positions) == -3).all())
        llm.cache.release(segment)


def test_prefill_is_reproducible_and_prompts_do_not_meet(llm: LLM) -> None:
    first, done = start(llm, ids(90))
    logits, rows = host(done.logits), done.rows()
    assert logits.shape == (1, llm.config.model.vocab_size)
    assert logits.dtype == torch.float32
    _, other = start(llm, ids(61, 1), 0.9)
    other.rows()
    again, done = start(llm, ids(90))
    assert torch.equal(host(done.logits), logits)
    assert np.array_equal(done.rows(), rows)
    assert first.segment is not None
    assert again.segment is not None
    assert torch.equal(host(first.segment.k_rows), host(again.segment.k_rows))
    assert torch.equal(host(first.segment.positions), host(again.segment.positions))


@pytest.mark.parametrize("scope", [*Scope, None])
def test_a_prefill_that_pauses_gives_the_same_bits_and_disturbs_nobody(
    engine: Callable[..., Path], scope: Scope | None
) -> None:
    """Where the executor can stop in a prompt, others extend in the pauses; else it runs at once."""
    llm = LLM(engine(scope))
    layers, prompt, tokens = llm.config.model.num_layers, ids(101), ids(20, 5)
    whole, done = start(llm, prompt)
    decoding = [start(llm, ids(n, n))[0] for n in (30, 60)]
    wanted = steps(llm, Batch(decoding, llm.cache), [tokens] * 2)
    for sequence in decoding:
        llm._scheduler.finish(sequence, "stop")
    batch = Batch([start(llm, ids(n, n))[0] for n in (30, 60)], llm.cache)
    sequence = schedule(llm, prompt)
    run = begin_prefill(llm._executor, llm.config, sequence)
    found, pauses = [], []
    while (ended := run.advance(1)) is None:
        pauses.append(run.tokens)
        found.append(extend(llm, batch, [tokens[len(found) : len(found) + 1]] * 2))
    stops = isinstance(llm._executor, LayerwiseExecutor)
    assert pauses == ([101 * j // layers for j in range(1, layers)] if stops else [])
    assert run.tokens == 101
    assert torch.equal(host(ended.logits), host(done.logits))
    assert np.array_equal(ended.rows(), done.rows())
    assert sequence.segment is not None
    assert whole.segment is not None
    for name in ("k_rows", "v_rows", "positions", "head_offsets"):
        assert torch.equal(host(getattr(sequence.segment, name)), host(getattr(whole.segment, name)))
    for logits, other in zip(found, wanted, strict=False):
        assert torch.equal(logits, other)


def test_scores_that_are_not_finite_fail_the_prompt_and_give_all_back(engine: Callable[..., Path]) -> None:
    opened = load_engine(engine())
    name = "gate.1.b"
    llm = LLM(dataclasses.replace(opened, gate={**opened.gate, name: torch.full_like(opened.gate[name], torch.nan)}))
    with pytest.raises(ValueError, match=r"scores: \d+ of \d+ values are NaN or infinite"):
        llm.generate(ids(50).tolist())
    llm.cache.audit()
    assert llm.cache.held_bytes == 0


# ---- extend ----------------------------------------------------------------------------------------------------------


def test_decoding_equals_the_prefill_of_the_longer_text(llm: LLM) -> None:
    """Without compression; over three pages of tail."""
    text = ids(80)
    sequence, _ = start(llm, text[:41], 0.0)
    logits = steps(llm, Batch([sequence], llm.cache), [text[41:]])
    for length in (42, 57, 58, 80):
        _, done = start(llm, text[:length], 0.0)
        close(llm, logits[length - 42], host(done.logits))


@pytest.mark.parametrize("lengths", [(5,), (50,), (1, 3), (7, 33, 70), (2, 70, 1, 32)])
def test_a_question_at_once_equals_token_by_token(llm: LLM, lengths: tuple[int, ...]) -> None:
    """Questions of unequal length together, also longer than a plan takes at once; a compressed prompt before them."""
    prompts = [ids(60 + 9 * i, i) for i in range(len(lengths))]
    questions = [ids(n, 100 + n) for n in lengths]
    together = Batch([start(llm, p)[0] for p in prompts], llm.cache)
    found = extend(llm, together, questions)
    for row, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        close(llm, found[row], steps_alone(llm, prompt, question)[-1])
    more = [ids(4, 7)] * len(lengths)  # the tails are where they should be
    after = steps(llm, together, more)
    for row, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        close(llm, after[:, row], steps_alone(llm, prompt, np.concatenate([question, more[0]]))[-4:])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2, 4, 3)])
def test_a_batch_equals_its_sequences_alone(llm: LLM, order: tuple[int, ...]) -> None:
    """Batches of sizes that are no power of two, in any order."""
    tokens = [ids(20, 50 + i) for i in range(5)]
    batch = Batch([start(llm, ids(30 + 31 * i, i), 0.2 * i)[0] for i in order], llm.cache)
    found = steps(llm, batch, [tokens[i] for i in order])
    for row, i in enumerate(order):
        close(llm, found[:, row], steps_alone(llm, ids(30 + 31 * i, i), tokens[i], 0.2 * i))


def test_batches_that_take_turns_keep_their_tables(llm: LLM) -> None:
    """Of one size, so that an executor that keeps tables by size has to bring them anew."""
    tokens = [ids(18, 50 + i) for i in range(4)]
    prompts = [ids(40 + 20 * i, i) for i in range(4)]
    pairs = [Batch([start(llm, prompts[i])[0] for i in pair], llm.cache) for pair in ((0, 1), (2, 3))]
    found = [[], []]
    for step in range(18):
        for index, batch in enumerate(pairs):
            new = [tokens[2 * index + i][step : step + 1] for i in range(2)]
            found[index].append(extend(llm, batch, new))
    for i in range(4):
        close(llm, torch.stack(found[i // 2])[:, i % 2], steps_alone(llm, prompts[i], tokens[i]))


def test_padding_stands_where_the_last_real_token_does(llm: LLM) -> None:
    """No position beyond the text: near the end of the model's positions there is none."""
    batch = Batch([start(llm, ids(n, n))[0] for n in (20, 31)], llm.cache)
    tables = batch.tables(4, torch.tensor([2, 4], dtype=torch.int32))
    assert tables.positions.tolist() == [20, 21, 21, 21, 31, 32, 33, 34]
    assert tables.last_tokens.tolist() == [1, 7]
    batch.advance(tables.new_lengths)
    assert batch.tables(3, torch.tensor([0, 3], dtype=torch.int32)).positions.tolist() == [22, 22, 22, 35, 36, 37]


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_sampled_tokens_are_those_that_extend_takes(llm: LLM) -> None:
    """Fed as they come from the sampler they do what the same tokens from the host do."""
    first, _ = start(llm, ids(50))
    second, _ = start(llm, ids(50))
    on_device, on_host = Batch([first], llm.cache), Batch([second], llm.cache)
    logits = llm._executor.extend(on_device, torch.tensor([[9]], dtype=torch.int32))
    extend(llm, on_host, [np.array([9], np.int32)])
    for _ in range(5):
        sampled = llm._executor.sample(logits, [SamplingParams()], [first.generator])
        assert sampled.valid == [True]
        assert sampled.tokens == host(logits).argmax(-1).tolist()
        assert host(sampled.next_tokens).tolist() == [sampled.tokens]
        logits = llm._executor.extend(on_device, sampled.next_tokens)
        assert torch.equal(host(logits), extend(llm, on_host, [np.array(sampled.tokens, np.int32)]))


def test_seeded_requests_draw_alone_what_they_draw_in_company(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.7, top_k=20, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=6, ignore_eos=True),
    ]
    prompts = [ids(30 + i, i).tolist() for i in range(3)]
    together = llm.generate(prompts, params, ratio=0.5)
    assert all(len(o.token_ids) == 6 for o in together)
    if llm.config.dtype.value == "float32":  # 16-bit logits of a larger batch may differ in their last bit
        alone = [llm.generate(p, s, ratio=0.5)[0] for p, s in zip(prompts, params, strict=True)]
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_questions_over_a_context_share_its_segment_and_all_comes_back(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with llm.compress(ids(200).tolist(), ratio=0.8) as context:
        assert context.stats.rows is not None
        assert context.stats.rows.sum() == context.segment.rows
        questions = [ids(n, n).tolist() for n in (3, 40, 1, 12)]
        outputs = llm.generate(questions, params, context=context)
        assert llm.cache.held_bytes == context.num_bytes
        again = llm.generate(questions, params, context=context)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in again]

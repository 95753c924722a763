# SPDX-License-Identifier: Apache-2.0
"""The runtime's front: prompts in, text out of a cache that holds only the kept rows."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from ..config import EngineConfig, Evicted, HardKVConfig
from ..engine.directory import Engine, load_engine
from .batch import Batch
from .cache import Cache, CacheFullError, Segment
from .context import CompressedContext
from .executors.create import create_executor
from .executors.executor import Condenser, Executor
from .memory import trim_heap
from .prefill_run import begin_prefill
from .prompts import Prompt
from .requests import Requests
from .sampling_params import SamplingParams
from .scheduler import Phase, Scheduler
from .sequence import RequestOutput, Sequence
from .stream import Increment, TextStream

__all__ = ["LLM", "CacheFullError", "CompressedContext", "Increment", "RequestError", "RequestOutput", "SamplingParams"]


_REPLAY = SamplingParams()  # draws no number; the token is known


class RequestError(RuntimeError):
    """Some requests of a call failed; ``outputs`` has all results, the failed ones with ``finish_reason`` ``error``."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class LLM:
    """An engine directory, ready to generate. Not for use from several threads at once.

    Start worker processes with ``spawn``: in a child made by ``fork`` torch's own threads are gone, and the first large
    operation after one in the parent waits for them for ever.

    Args:
        engine: path of an engine directory, or an ``Engine``.
        cache_bytes: size of the KV cache; ``runtime.cache_size.create_cache`` says what the default is. On a GPU it
            lies in the device's memory and also lends prompts what their prefill needs while it runs.
        tail_tokens: how many generated (and question) tokens of all sequences together fit; see there.
        verify: compare the engine's files with their checksums.
        evicted: what becomes of KV pairs that are not kept; None is the engine's way. Backend eager.
        centroids: rows of each head for them, 1..8; None is the engine's number.
        decode_compression: of the cache while sequences decode (HARD-KV), where a request names no other
            (``SamplingParams.decode_compression``). Default: the engine's. Room for one sequence's compact segment is
            taken of the cache at once: a compression writes there, then the segments change places.

    Attributes:
        config: the engine's ``EngineConfig``, with the ``decode_compression`` that requests get here.
        tokenizer: of transformers.
        cache: the KV cache, with its counters.

    Raises:
        ValueError: the directory is no sound engine, its backend is not here, or the cache sizes do not fit.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str] | Engine,
        *,
        cache_bytes: int | None = None,
        tail_tokens: int | None = None,
        verify: bool = True,
        evicted: Evicted | None = None,
        centroids: int | None = None,
        decode_compression: HardKVConfig | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            engine = load_engine(engine, verify=verify)
        engine = engine.with_evicted(evicted, centroids)
        decode = decode_compression or engine.config.decode_compression
        engine = replace(engine, config=engine.config.replace(decode_compression=decode))
        self.config: EngineConfig = engine.config
        self.tokenizer: Any = engine.load_tokenizer()
        self.cache: Cache
        self._executor: Executor
        self.cache, self._executor = create_executor(engine, cache_bytes, tail_tokens)
        self._scheduler = Scheduler(self.cache, engine.config.max_batch_size)
        self._staging: Segment | None = None  # where a compression while decoding writes
        if decode is not None:
            self._staging = self.cache.allocate(decode.rows(self.config.model))
        self._requests = Requests(self.config, self.tokenizer, self.cache, self._executor.prefill_bytes)
        self._batch: Batch | None = None  # the running sequences as they were in the last decode step
        self._next_tokens = torch.empty(0, 1, dtype=torch.int32)  # [B, 1], theirs

    # -- public calls

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        ratio: float | Seq[float | None] | None = None,
        context: CompressedContext | Seq[CompressedContext | None] | None = None,
        chat: bool = False,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many; they run together.

        Args:
            prompts: a text, token ids, chat messages, or a list of those.
            sampling_params: one for all prompts or one for each. Default: greedy, 256 tokens.
            ratio: compression ratio r in [0, 1), one for all prompts or one for each; None is the engine's.
            context: the prompts are questions that follow this context, or each its own.
            chat: makes a prompt that is a text the user's turn of a chat. Messages always go through the chat template.

        Returns:
            A result for each prompt, in order.

        Raises:
            ValueError: a prompt or a parameter is refused; nothing has run then.
            RequestError: some of several requests failed while they ran (where there is one, its own error is raised).
                The others are finished, and the memory of all is given back.
        """
        sequences = self._requests.generation(prompts, sampling_params, ratio, context, chat, stream=False)
        self._run_all(sequences)
        return _results(sequences)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        ratio: float | Seq[float | None] | None = None,
        context: CompressedContext | Seq[CompressedContext | None] | None = None,
        chat: bool = False,
    ) -> Iterator[Increment]:
        """As ``generate``, giving text as it appears.

        Arguments are checked at the call. Leaving the loop early ends the requests. Other calls may be made between two
        pieces; what they ask for runs in the same batch.
        """
        return self._stream(self._requests.generation(prompts, sampling_params, ratio, context, chat, stream=True))

    def compress(self, document: Prompt, *, ratio: float | None = None, chat: bool = False) -> CompressedContext:
        """Prefills and compresses a document that questions shall follow (``generate(questions, context=...)``).

        With ``chat``, or where the document is messages, it is the beginning of the user's turn (of the last message),
        and each question continues and ends that turn: the text is that of the chat with document + question in one
        turn. Let a document end with a line break, so that its last token does not depend on the question.

        Args:
            document: a text, token ids or chat messages.
            ratio: compression ratio r in [0, 1); None is the engine's.
            chat: see above.

        Raises:
            ValueError: the document or the ratio is refused.
            CacheFullError: open contexts leave no room.
        """
        sequence, ending = self._requests.document(document, ratio, chat)
        self._run_all([sequence])
        if sequence.error is not None:
            raise sequence.error
        assert sequence.compressed is not None
        sequence.compressed.ending = ending
        return sequence.compressed

    # -- the loop: schedule, run, postprocess

    def step(self) -> tuple[Phase, list[Sequence]]:
        """One pass of the model for the sequences that the scheduler names, which it gives back. A prefill may pause:
        the sequence has ``Sequence.prefill`` then."""
        phase, sequences = self._scheduler.schedule()
        if phase is Phase.IDLE:
            return phase, sequences
        start = time.perf_counter()
        try:
            logits = self._run(phase, sequences)
            if logits is None:
                _count_seconds(phase, sequences, start)
            else:
                self._postprocess(phase, sequences, logits, start)
                self._condense(sequences)
        except Exception as error:
            self._fail(sequences, error)
        except BaseException:  # an interrupt: lengths of the batch may be ahead of its tokens
            self._batch = None
            raise
        return phase, sequences

    def _run(self, phase: Phase, sequences: list[Sequence]) -> torch.Tensor | None:
        """Logits float32 [B, V] of the token that follows each sequence; None where a prefill has paused."""
        if phase is Phase.PREFILL:
            return self._prefill(sequences[0])
        if phase is Phase.QUESTION:
            lengths = torch.tensor([len(s.token_ids) for s in sequences], dtype=torch.int32)
            tokens = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int32)
            for row, sequence in zip(tokens, sequences, strict=True):
                row[: len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids)
            return self._executor.extend(Batch(sequences, self.cache), tokens, lengths)
        if self._batch is None or not self._batch.holds(sequences):
            self._batch = Batch(sequences, self.cache)
            self._next_tokens = _last_tokens(sequences)
        return self._executor.extend(self._batch, self._next_tokens)

    def _prefill(self, sequence: Sequence) -> torch.Tensor | None:
        """Begins a prefill or goes on with it, for as long as the scheduler lets it."""
        run = sequence.prefill or begin_prefill(self._executor, self.config, sequence)
        sequence.prefill = None  # where an error ends it
        before = run.tokens
        done = run.advance(self._scheduler.prefill_tokens)
        self._scheduler.spend(run.tokens - before)
        if done is None:
            sequence.prefill = run
            return None
        sequence.stats.seconds.update(done.seconds)
        sequence.kept_rows = done.rows
        return done.logits

    def _postprocess(self, phase: Phase, sequences: list[Sequence], logits: torch.Tensor, start: float) -> None:
        if sequences[0].params is None:  # a document: nothing is generated, its segment stays
            sequence = sequences[0]
            assert sequence.segment is not None
            sequence.read_rows()
            _count_seconds(phase, sequences, start)
            sequence.compressed = CompressedContext(self.cache, sequence.segment, sequence.token_ids, sequence.stats)
            self._scheduler.finish(sequence, "stop")
            return
        replaying = [s.replaying for s in sequences]
        params = [_REPLAY if s.replaying else s.params for s in sequences if s.params]
        generators, edits = [s.generator for s in sequences], [None if s.replaying else s.edits for s in sequences]
        sampled = self._executor.sample(logits, params, generators, edits)
        if phase is Phase.PREFILL:
            sequences[0].read_rows()
        _count_seconds(phase, sequences, start)
        log_probs = sampled.log_probs or [0.0] * len(sequences)
        for sequence, token, ok, log_prob in zip(sequences, sampled.tokens, sampled.valid, log_probs, strict=True):
            sequence.stats.decode_steps += phase is Phase.DECODE and not sequence.replaying
            if not ok:
                error = ValueError("logits: NaN or infinite; check the engine's weights and dtype")
                self._scheduler.finish(sequence, "error", error)
            elif sequence.replaying:
                sequence.replay()
            elif reason := sequence.append(token, log_prob):
                self._scheduler.finish(sequence, reason)
        if phase is Phase.DECODE:
            self._next_tokens = _last_tokens(sequences) if any(replaying) else sampled.next_tokens
        if not self._scheduler.running:
            self._batch = None

    def _condense(self, sequences: list[Sequence]) -> None:
        """Compresses the caches of those whose tails are full. One that cannot be ends alone: what was written is in
        staging, which the next compression writes over."""
        for sequence in sequences:
            cascade, tail = sequence.cascade, sequence.tail
            if cascade is None or tail is None or not cascade.due(sequence.tail_length):
                continue
            assert self._staging is not None
            assert isinstance(self._executor, Condenser)
            start = time.perf_counter()
            moved = cascade.movable(sequence.tail_length)
            try:
                rows = self._executor.condense(sequence, moved, self._staging)
            except Exception as error:
                self._fail([sequence], error)
                continue
            self._staging = cascade.replace_segment(sequence, self._staging, self.cache)
            self.cache.drop_pages(tail, self.cache.ledger.pages(moved))
            cascade.moved_tokens += moved
            sequence.stats.condensed(rows, time.perf_counter() - start)
            if self._batch is not None and sequence in self._batch.sequences:
                self._batch.refresh(sequence)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """These requests end with the error; the others go on in a new batch."""
        traceback.clear_frames(error.__traceback__)  # the error must not keep a prompt's dense K/V
        for sequence in sequences:
            self._scheduler.finish(sequence, "error", error)
        self._batch = None
        trim_heap()

    def _run_all(self, sequences: list[Sequence]) -> None:
        """Steps until all have finished; whatever happens, none is left behind."""
        try:
            for sequence in sequences:
                self._scheduler.add(sequence)
            while not all(s.finished for s in sequences):
                self.step()
        finally:
            self._abort(sequences)

    def _stream(self, sequences: list[Sequence]) -> Iterator[Increment]:
        live = [TextStream(sequence, index) for index, sequence in enumerate(sequences)]
        try:
            for sequence in sequences:
                self._scheduler.add(sequence)
            while live:
                self.step()
                for stream in list(live):
                    increment = stream.take()
                    if increment is None:
                        continue
                    if increment.output is not None:
                        live.remove(stream)
                    yield increment
        finally:
            self._abort(sequences)
        _results(sequences)

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._scheduler.finish(sequence, "aborted")


def _last_tokens(sequences: list[Sequence]) -> torch.Tensor:
    """int32 [B, 1], what each is fed next."""
    return torch.tensor([[s.last_token] for s in sequences], dtype=torch.int32)


def _count_seconds(phase: Phase, sequences: list[Sequence], start: float) -> None:
    seconds = time.perf_counter() - start
    for sequence in sequences:
        name = {Phase.PREFILL: "prefill", Phase.QUESTION: "extend", Phase.DECODE: "decode"}[phase]
        if phase is Phase.DECODE and sequence.replaying:
            name = "replay"
        sequence.stats.seconds[name] = sequence.stats.seconds.get(name, 0.0) + seconds


def _results(sequences: list[Sequence]) -> list[RequestOutput]:
    """The outputs of finished sequences; raises where some failed."""
    outputs = [s.output() for s in sequences]
    failed = [(i, o.error) for i, o in enumerate(outputs) if o.error is not None]
    if not failed:
        return outputs
    index, error = failed[0]
    if len(outputs) == 1:
        raise error
    message = f"{len(failed)} of {len(outputs)} requests failed; prompts[{index}]: {error}"
    raise RequestError(message, outputs) from error

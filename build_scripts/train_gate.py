#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a FastKVzip gate for a model on plain-text files of your own (docs/gates.md).

The model itself is the teacher (KVzip): it repeats each context, and the attention that a KV pair gets meanwhile says
how much the pair is needed. The gate learns to foretell that from the attention inputs. All on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hubkv_trt.config import DType
from hubkv_trt.training.train import TrainJob, set_threads, train_gate
from hubkv_trt.training.trainer import TrainOptions


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    job, train = TrainJob, TrainOptions
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: train_gate.py --model demo --output gate.safetensors manual.txt novel.txt laws.txt",
    )
    p.add_argument("texts", nargs="+", metavar="TEXT", help="plain-text files, UTF-8; varied ones make a better gate")
    p.add_argument("--output", required=True, type=Path, metavar="FILE", help="the gate to write, .safetensors")
    p.add_argument("--model", default=job.model, help='"demo", a Hugging Face directory or a GGUF file (%(default)s)')
    p.add_argument("--tokens", type=int, default=job.tokens, help="tokens of all contexts (%(default)s)")
    p.add_argument("--context-tokens", type=int, default=job.context_tokens,
                   help="mean tokens of one context (%(default)s)")  # fmt: skip
    p.add_argument("--held-out", type=float, default=job.held_out, metavar="FRACTION",
                   help="contexts to measure on instead of training (%(default)s)")  # fmt: skip
    p.add_argument("--facts", type=float, default=job.facts, metavar="FRACTION",
                   help="contexts that get made-up facts between their lines (%(default)s)")  # fmt: skip
    p.add_argument("--teacher-dtype", choices=["float32", "bfloat16"], default=job.teacher_dtype.value,
                   help="bfloat16: faster where processors have it, nearly the same ranks (%(default)s)")  # fmt: skip
    p.add_argument("--steps", type=int, default=train.steps, help="training steps at most (%(default)s)")
    p.add_argument("--minutes", type=float, help="minutes of training at most, scoring not counted (no limit)")
    p.add_argument("--patience", type=int, default=train.patience,
                   help="evaluations without a better held-out loss before it stops (%(default)s)")  # fmt: skip
    p.add_argument("--seed", type=int, default=train.seed, help="of contexts and training (%(default)s)")
    p.add_argument("--work", type=Path, metavar="DIR",
                   help="teacher's scores, checkpoint and loss curve (OUTPUT.work); kept afterwards")  # fmt: skip
    p.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work folder")
    p.add_argument("--threads", type=int, help="threads of torch (its own choice)")
    p.add_argument("--quiet", action="store_true", help="no progress bars")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    try:
        if a.threads is not None:
            set_threads(a.threads)
        options = TrainOptions(steps=a.steps, minutes=a.minutes, patience=a.patience, seed=a.seed)
        job = TrainJob(
            texts=a.texts, output=a.output, model=a.model, work=a.work, tokens=a.tokens,
            context_tokens=a.context_tokens, held_out=a.held_out, facts=a.facts, resume=a.resume,
            teacher_dtype=DType(a.teacher_dtype), train=options,
        )  # fmt: skip
        result = train_gate(job, progress=not a.quiet)
    except ValueError as error:
        print(f"train_gate: {error}", file=sys.stderr)
        return 1
    print(f"trained on {result.tokens} tokens; the best gate is that of step {result.steps}")
    print(f"on {result.held_out_tokens} held-out tokens:")
    print(f"  Spearman with the teacher   {result.report['spearman']:.3f}")
    for name, value in result.report.items():
        if name.startswith("overlap@"):
            print(f"  kept as the teacher, r = {name.removeprefix('overlap@'):<4} {value:.3f}")
    print(f"gate: {a.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

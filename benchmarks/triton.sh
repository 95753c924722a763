#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage()
{
    cat <<'TEXT'
usage: benchmarks/triton.sh [--quick] [--work DIR] [--list | CELL ...]

Measures a real Triton server under load of the real perf_analyzer (gRPC, streaming, asynchronous), on the demo model.

  tokens-rR-cN     output tokens/s of prompts of 2,048 and answers of 512 tokens, N requests under way, at compression
                   ratio R, in an arena with the bytes of two dense sequences: throughput, times to and between tokens
  sequences-rR-cN  how many sequences run at once, of N that are sent together, in an arena of four dense prompts
  overhead         the same requests by LLM.generate, by Service, and by gRPC streams through the server, in turns

Each cell starts a server of its own and leaves DIR/results/CELL.json; a cell that has one is skipped, so the run may be
broken off, continued, or made cell by cell. Remove the file to measure it again. At the end, from all results that are
there: summary.csv, triton.svg and report.md in DIR/results.

  --quick     short prompts and few cells: shows in a minute that everything works (results in DIR/quick)
  --work DIR  for the engine, the model repository and the results (default: build/triton-bench)
  --list      print the cells of a whole run, which takes 25 minutes on two cores

Before it: `make serve` or `make test` once, for .venv and .venv-triton. HUBKV_TRITON_ENVIRONMENT names another one.
The raw exports of perf_analyzer stay beside the results (CELL.profile.json, CELL.latency.csv, CELL.log).
TEXT
}

root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/triton-bench
quick=
list=
cells=()
while (($#)); do
    case $1 in
        --help | -h) usage && exit ;;
        --quick) quick=1 ;;
        --work) work=${2:?--work needs a folder} && shift ;;
        --list) list=1 ;;
        -*) usage >&2 && exit 2 ;;
        *) cells+=("$1") ;;
    esac
    shift
done

if [[ $quick ]]; then
    results=$work/quick
    rm -rf "$results"
    shape=(--prompt 256 --output 32)
    overhead=(--prompt 64 --output 32 --rounds 2)
    every=(tokens-r0-c4 tokens-r0.75-c4 sequences-r0-c5 sequences-r0.75-c17 overhead)
else
    results=$work/results
    shape=()
    overhead=()
    every=(tokens-r{0,0.5,0.75,0.9}-c{6,2,1} sequences-r0-c6 sequences-r0.5-c10 sequences-r0.75-c18 sequences-r0.9-c42 overhead)
fi
[[ ${#cells[@]} -gt 0 ]] || cells=("${every[@]}")
[[ -z $list ]] || { printf '%s\n' "${cells[@]}" && exit; }

python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
options=(--folder "$results" --engine "$work/engine" --environment "${HUBKV_TRITON_ENVIRONMENT:-$root/.venv-triton}")
if [[ ! -e $work/engine/engine.json ]]; then
    "$python" "$root/build_scripts/build_engine.py" --hubkv --max-batch-size 48 --max-input-len 2560 --output "$work/engine" --quiet
fi
"$root/benchmarks/perf_analyzer.sh" --version >/dev/null
for cell in "${cells[@]}"; do
    if [[ -e $results/$cell.json ]]; then
        echo "$cell: measured before"
    elif [[ $cell == overhead ]]; then
        "$python" "$root/benchmarks/triton_overhead.py" "${options[@]}" "${overhead[@]}"
    else
        "$python" "$root/benchmarks/triton_cell.py" "$cell" "${options[@]}" "${shape[@]}"
    fi
done
"$python" "$root/benchmarks/triton_report.py" --folder "$results"

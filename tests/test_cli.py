# SPDX-License-Identifier: Apache-2.0
"""The console command: exit status, messages on stderr, and what each sub-command prints."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt import __version__
from hubkv_trt.cli import COMMANDS, main
from hubkv_trt.commands import build, common
from hubkv_trt.config import DEFAULT_PRESET, PRESETS, HardKVConfig, HubKVConfig, Scope
from hubkv_trt.engine.directory import load_engine, read_config
from hubkv_trt.runtime.llm import LLM, SamplingParams

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hubkv(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as leave:  # argparse
            status = int(leave.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, captured.err

    return call


def test_it_is_installed_as_a_command() -> None:
    for command in ([str(Path(sys.executable).parent / "hubkv")], [sys.executable, "-m", "hubkv_trt.cli"]):
        if Path(command[0]).exists():
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
            assert done.stdout.strip() == f"hubkv-trt {__version__}"


def test_help_is_fast_and_the_package_light() -> None:
    code = (
        "import sys, hubkv_trt, hubkv_trt.cli\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert hubkv_trt.HubKVConfig().ratio == 0.75 and not {'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, hubkv: Any) -> None:
    status, out, _ = hubkv(command, "--help")
    assert status == 0
    assert "examples:" in out
    assert f"hubkv {command}" in out
    assert hubkv("--help")[1].count(f"hubkv {command}") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("frobnicate",),
        ("build", "--frobnicate"),
        ("build", "--hubkv", "--ratio", "1"),
        ("build", "--hubkv", "--ratio", "-0.1"),
        ("build", "--hubkv", "--ratio", "nan"),
        ("build", "--hubkv", "--ratio", "much"),
        ("build", "--hubkv", "--scope", "galaxy"),
        ("build", "--hubkv", "--preset", "best"),
        ("build", "--backend", "cuda"),
        ("build", "--dtype", "int8"),
        ("build", "--ratio", "0.5"),
        ("build", "--gate", "x.pt"),
        ("build", "--nms-kernel", "5"),
        ("build", "--cache-budget", "lots"),
        ("generate",),
        ("generate", "--question", "who?"),
        ("generate", "--document", "x.txt"),
        ("generate", "--document", "x.txt", "--question", "who?", "--prompt", "p"),
        ("generate", "--prompt", "a", "--prompt", "b", "--stream"),
        ("generate", "--prompt", "a", "--ratio", "1.5"),
        ("generate", "--prompt", "a", "--log-probs"),
        ("generate", "--prompt", "a", "--decode-compression", "best"),
        ("generate", "--prompt", "a", "--decode-compression", "layer_budget=512,held_out"),
        ("generate", "--prompt", "a", "--decode-compression", ""),
        ("bench", "--lengths", "0"),
        ("bench", "--lengths", ""),
        ("bench", "--ratios", "0,1"),
        ("info",),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], hubkv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = hubkv(*arguments)
    assert status == 2
    assert not out
    assert "error:" in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "--hubkv", "--nms-kernel", "4"), "nms_kernel: 4 is not an odd number"),
        (("build", "--hubkv", "--penalty-factor", "2"), "penalty_factor: 2.0"),
        (("build", "--hubkv", "--min-head-weight", "2"), "min_head_weight: 2.0"),
        (("build", "--hubkv", "--min-head-weight", "1e-60"), "min_head_weight: 1e-60"),
        (("build", "--hubkv", "--max-head-weight", "inf"), "max_head_weight: inf"),
        (("build", "--hubkv", "--head-weight-temperature", "inf"), "head_weight_temperature: inf"),
        (("build", "--hubkv", "--gate-power", "inf"), "gate_power: inf"),
        (("build", "--hubkv", "--sink-tokens", "99999999999"), "sink_tokens: 99999999999"),
        (("build", "--hubkv"), "--gate FILE"),
        (("build", "--backend", "tensorrt"), "Missing:"),
        (("build", "--max-input-len", "4096"), "max_input_len: 4096"),
        (("build", "--model", "/nowhere"), "/nowhere"),
        (("build", "--hubkv", "--gate", "/nowhere.pt"), "/nowhere.pt"),
    ],
)
def test_builds_that_are_refused(
    arguments: tuple[str, ...], message: str, hubkv: Any, tiny_model: Make, tmp_path: Path
) -> None:
    where = () if "--model" in arguments else ("--model", tiny_model("llama"))
    status, out, err = hubkv(*arguments, *where, "--output", tmp_path / "engine")
    assert status == 1
    assert not out
    assert err.startswith("hubkv: error: ")
    assert message in err
    assert not any(tmp_path.iterdir())


def test_build_then_info(hubkv: Any, tiny_model: Make, tiny_gate: Make, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    status, out, _ = hubkv(
        "build",
        "--model",
        tiny_model("qwen3"),
        "--output",
        output,
        "--hubkv",
        "--gate",
        tiny_gate("qwen3"),
        "--ratio",
        0.6,
        "--scope",
        "layer",
        "--preset",
        "fastkvzip_nms",
        "--nms-kernel",
        7,
        "--sink-tokens",
        2,
        "--max-input-len",
        256,
        "--max-batch-size",
        3,
        "--dtype",
        "bfloat16",
        "--cache-budget",
        "1GiB",
    )
    assert status == 0
    config = read_config(output)
    assert config.hubkv == HubKVConfig.from_preset(
        "fastkvzip_nms", ratio=0.6, scope=Scope.LAYER, nms_kernel=7, sink_tokens=2
    )
    assert (config.max_input_len, config.max_batch_size, config.dtype.value) == (256, 3, "bfloat16")
    for part in (str(output), "qwen3", "bfloat16", "r = 0.6, layer scope, fastkvzip_nms with", "1.0 GiB", "built in"):
        assert part in out, part

    status, described, _ = hubkv("info", output, "--verify", "--cache-budget", "1GiB")
    assert status == 0
    assert f"verified  {len(config.files)} files" in described
    lines = [line for line in out.splitlines() if "->" in line]
    assert lines
    assert all(line in described for line in lines)
    status, text, _ = hubkv("info", output, "--json")
    assert status == 0
    assert json.loads(text) == config.to_dict()

    status, _, err = hubkv("build", "--model", tiny_model("qwen3"), "--output", output)
    assert status == 1
    assert "--force" in err
    assert read_config(output) == config
    assert hubkv("build", "--model", tiny_model("qwen3"), "--output", output, "--force", "--quiet") == (0, "", "")
    assert read_config(output).hubkv is None


def test_decode_compression_is_a_preset_and_changes() -> None:
    assert common.hard_kv("default") == HardKVConfig()
    assert common.hard_kv("p=0.8,fill=true") == HardKVConfig(p=0.8, fill=True)
    assert common.hard_kv("held_out") == HardKVConfig.from_preset("held_out")
    assert common.hard_kv("held_out,layer_budget=512,fill=false") == HardKVConfig.from_preset(
        "held_out", layer_budget=512, fill=False
    )


def test_every_parameter_has_an_option() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    build.add_arguments(parser)
    for preset in PRESETS:
        arguments = parser.parse_args(["--hubkv", "--preset", preset])
        assert build.hubkv_config(arguments) == HubKVConfig.from_preset(preset)
    assert build.hubkv_config(parser.parse_args(["--hubkv"])) == HubKVConfig.from_preset(DEFAULT_PRESET)
    for option, name, kind, _ in build.PARAMETERS:
        default = getattr(HubKVConfig, name)
        value = {"max_head_weight": 1.5, "gate_power": 3.0}.get(name, kind(default * 0.6) or 1)
        value = 3 if name == "nms_kernel" else value
        assert value != default
        config = build.hubkv_config(parser.parse_args(["--hubkv", option, str(value)]))
        assert config == HubKVConfig(**{name: value})
    others = {"ratio", "scope", "scorer", "preset", "long_context", "evicted", "centroids"}
    assert {name for _, name, _, _ in build.PARAMETERS} | others == set(HubKVConfig().to_dict())


def test_generate_prints_what_the_runtime_gives(
    hubkv: Any, tiny_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("llama")
    prompts = ["The first prompt is this one.", "Another, which is longer than the first one was."]
    llm = LLM(engine)
    params = SamplingParams(max_tokens=12)
    expected = [output.text for output in llm.generate(prompts, params, ratio=0.5, chat=True)]
    options = ("--engine", engine, "--ratio", 0.5, "--max-tokens", 12)

    status, out, err = hubkv("generate", *options, "--prompt", prompts[0], "--stats")
    assert (status, out) == (0, expected[0] + "\n")
    assert "r = 0.5" in err
    assert "rows" in err
    assert hubkv("generate", *options, "--prompt", prompts[0], "--stream")[1] == expected[0] + "\n"

    status, out, _ = hubkv("generate", *options, "--prompt", prompts[0], "--prompt", prompts[1], "--json")
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["text"] for result in results] == expected
    assert all(result["stats"]["ratio"] == 0.5 for result in results)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompts[1].encode())))
    assert hubkv("generate", *options, "--prompt-file", "-")[1] == expected[1] + "\n"

    plain = llm.generate(prompts[0], params, ratio=0.5)[0].text
    assert hubkv("generate", *options, "--prompt", prompts[0], "--no-chat")[1] == plain + "\n"

    text, questions = "A document with a few words. " * 8, ["What?", "Which one?"]
    (tmp_path / "document.txt").write_text(text)
    with llm.compress(text.rstrip() + "\n\n", ratio=0.5, chat=True) as context:
        answers = [output.text for output in llm.generate(questions, params, context=context)]
    status, out, err = hubkv(
        "generate",
        *options,
        "--document",
        tmp_path / "document.txt",
        "--question",
        questions[0],
        "--question",
        questions[1],
        "--stats",
    )
    assert status == 0
    assert out == "".join(f"== {q}\n{a}\n" for q, a in zip(questions, answers, strict=True))
    assert err.count("[document]") == 1
    assert err.count("[question]") == 2


def test_generate_passes_every_parameter_on(hubkv: Any, tiny_engine: Make) -> None:
    engine, prompt = tiny_engine("llama"), "The first prompt is this one."
    asked: dict[str, Any] = {
        "max_tokens": 12, "min_tokens": 12, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5,
        "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1,
    }  # fmt: skip
    words = [word for name, value in asked.items() for word in ("--" + name.replace("_", "-"), value)]
    words += ["--bad-word", "e", "--bad-word", "th", "--stop", "zq", "--json", "--log-probs"]
    status, out, _ = hubkv("generate", "--engine", engine, "--no-chat", "--prompt", prompt, *words)
    params = SamplingParams(bad_words=("e", "th"), stop=("zq",), return_log_probs=True, **asked)
    unchanged = {name for name, value in vars(SamplingParams()).items() if getattr(params, name) == value}
    assert unchanged == {"stop_token_ids", "ignore_eos", "decode_compression"}  # the last goes to the LLM
    (output,) = LLM(engine).generate(prompt, params)
    assert status == 0
    result = json.loads(out)
    for name in ("text", "token_ids", "finish_reason", "output_log_probs", "cum_log_probs"):
        assert result[name] == getattr(output, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "empty"),
        (("--prompt", "x" * 600), "512"),
        (("--prompt-file", "/nowhere.txt"), "/nowhere.txt"),
        (("--document", "/nowhere.txt", "--question", "q"), "/nowhere.txt"),
        (("--prompt", "x", "--max-tokens", "0"), "max_tokens: 0"),
        (("--prompt", "x", "--temperature", "-1"), "temperature: -1"),
        (("--prompt", "x", "--top-p", "0"), "top_p: 0"),
        (("--prompt", "x", "--cache-bytes", "100"), "cache_bytes: 100"),
        (("--prompt", "x", "--cache-bytes", "99999999999t"), "cache_bytes: "),
        (("--prompt", "\udcff"), "cannot be tokenized"),
    ],
)
def test_requests_that_are_refused(arguments: tuple[str, ...], message: str, hubkv: Any, tiny_engine: Make) -> None:
    status, out, err = hubkv("generate", "--engine", tiny_engine("llama"), "--no-chat", *arguments)
    assert status == 1
    assert not out
    assert err.startswith("hubkv: error: ")
    assert message in err


@pytest.mark.parametrize("command", ["generate", "bench", "info"])
def test_engine_that_is_not_there(command: str, hubkv: Any, tmp_path: Path) -> None:
    where = {"generate": ("--prompt", "x", "--engine"), "bench": ("--engine",), "info": ()}[command]
    status, _, err = hubkv(command, *where, tmp_path / "nowhere")
    assert status == 1
    assert "no such directory" in err


def test_binary_prompt_file(hubkv: Any, tiny_engine: Make, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\x00")
    status, _, err = hubkv("generate", "--engine", tiny_engine("llama"), "--prompt-file", tmp_path / "prompt")
    assert status == 1
    assert "not UTF-8 text" in err


def test_bench(hubkv: Any, tiny_engine: Make) -> None:
    engine = tiny_engine("llama")
    status, out, _ = hubkv(
        "bench",
        "--engine",
        engine,
        "--lengths",
        "64,200",
        "--ratios",
        "0,0.75",
        "--batch-sizes",
        "1,2",
        "--tokens",
        4,
        "--repeat",
        1,
        "--json",
    )
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["tokens"], row["batch"], row["r"]) for row in rows] == [
        (t, b, r) for t in (64, 200) for b in (1, 2) for r in (0.0, 0.75)
    ]
    assert all(row["prefill s"] > 0 and row["decode tok/s"] > 0 for row in rows)
    dense = {(row["tokens"], row["batch"]): row["cache MiB"] for row in rows if row["r"] == 0}
    assert all(row["cache MiB"] < dense[row["tokens"], row["batch"]] for row in rows if row["r"])
    status, table, _ = hubkv(
        "bench", "--engine", engine, "--lengths", "64", "--ratios", "0", "--tokens", 2, "--repeat", 1
    )
    assert status == 0
    assert "decode tok/s" in table
    assert load_engine(engine).config.model_name in table
    assert hubkv("bench", "--engine", engine, "--lengths", "4096")[0] == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("16GiB", 16 << 30), ("16G", 16 << 30), ("1.5m", 3 << 19), ("512 MB", 512 << 20), ("1000", 1000), ("2t", 2 << 40)],
)
def test_byte_counts(text: str, number: int) -> None:
    assert common.byte_count(text) == number

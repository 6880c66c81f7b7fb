"""The caption engine alone on one GPU: how fast it is, beside `generate()` and beside what the card could do.

    python -m jobs.bench.engine W1 --model FOLDER [--clips 512] [--generate] [--write]

W1: 16 frames of 364x644 (a window of 12 s in 360p), 128 new tokens, Qwen2.5-VL-7B. W2: 6 frames of 448x448, 256 new
tokens, Qwen3-VL-8B. Random frames, every clip its own; nothing is reused; every answer has all its tokens, which is
asserted, with the number of prompt tokens. Weights may be random (`jobs.bench.random_model`).

What each part takes comes from the GPU's own clock in the measured run. The limit of a part is its arithmetic at the
speed of a large matrix product, or its bytes at that of a large copy, both measured first. The share of time in which
kernels run comes from the profiler, in a run of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from jobs.bench import record
from jobs.bench.end_to_end import power
from qwen_ray.config import CaptionConfig
from qwen_ray.engines import build
from qwen_ray.engines.protocol import Caption, CaptionEngine, CaptionRequest, Medium, Sampling
from qwen_ray.engines.qwen_vl.engine import QwenVLEngine
from qwen_ray.engines.trace import covered

PROMPT = "Describe this video in detail."
FRAME_EVERY_S = 0.75


@dataclass(frozen=True, slots=True)
class Work:
    """One work unit.

    Attributes:
        peer: clips a second of vLLM 0.24.0 on an H200 in its best setting, measured on another day.
    """

    frames: int
    height: int
    width: int
    new_tokens: int
    batch_size: int
    peer: float


WORK = {"W1": Work(16, 364, 644, 128, 256, 6.72), "W2": Work(6, 448, 448, 256, 512, 21.3)}


class Load:
    """Distinct requests of one kind: random frames, every answer of full length.

    Args:
        shape: frames, height and width of a clip.
        new_tokens: of each answer.
        prompt: what is asked.
    """

    def __init__(self, shape: tuple[int, int, int], new_tokens: int, prompt: str = PROMPT) -> None:
        self._draw = np.random.default_rng(0)
        self._shape, self._prompt = (*shape, 3), prompt
        self._times_s = tuple(FRAME_EVERY_S * k for k in range(shape[0]))
        self._sampling = Sampling(new_tokens, stop_token_ids=())
        self._count = 0

    def requests(self, count: int) -> list[CaptionRequest]:
        """New ones."""
        made = []
        for _ in range(count):
            self._count += 1
            frames_THWC = self._draw.integers(0, 256, self._shape, dtype=np.uint8)
            media = (Medium(frames_THWC, self._times_s),)
            made.append(CaptionRequest(str(self._count), media, self._prompt, sampling=self._sampling))
        return made


def answer(engine: CaptionEngine, requests: list[CaptionRequest]) -> tuple[float, list[Caption]]:
    """Seconds that the requests take, and their answers."""
    began = time.monotonic()
    waiting = [engine.submit(request) for request in requests]
    captions = [one.result() for one in waiting]
    return time.monotonic() - began, captions


def ceilings() -> dict[str, float]:
    """FLOP/s of a large bf16 matrix product, and bytes/s of a large copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    return {
        "flops": 2 * 8192**3 / _median_s(lambda: a @ b),
        "bytes": 2 * (big.numel() // 2) / _median_s(lambda: big[: big.numel() // 2].copy_(big[big.numel() // 2 :])),
    }


def _median_s(run: Any, times: int = 10) -> float:
    seconds = []
    for k in range(times + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000 if k >= 3 else 0.0)
    return statistics.median(seconds[3:])


def floors(engine: QwenVLEngine, work: Work, num_prompt: int, rates: dict[str, float]) -> dict[str, float]:
    """Seconds a clip that each part takes at least: weights' products and attention, or the bytes of a decode step."""
    network = engine.runner.network
    how, text = engine.runner.patching, network.config.text_config
    t, h, w = how.grid(work.frames, work.height, work.width)
    vision, layers = network.model.visual, network.model.language_model.layers
    full = getattr(vision, "fullatt_block_indexes", range(len(vision.blocks)))
    wide = network.config.vision_config.hidden_size
    seen = sum(h * w if k in full else 64 for k in range(len(vision.blocks)))
    patches = t * h * w
    heads = text.num_attention_heads * layers[0].self_attn.head_dim
    weights = sum(p.numel() for p in layers.parameters())
    head = text.vocab_size * text.hidden_size
    context = num_prompt + work.new_tokens / 2
    cached = context * 2 * 2 * len(layers) * text.num_key_value_heads * layers[0].self_attn.head_dim
    rows = work.batch_size
    decode_s = max(2 * (weights + head) / rows / rates["bytes"], 2 * (weights + head) / rates["flops"])
    return {
        "vision": (2 * _linear(vision) * patches + 4 * patches * seen * wide) / rates["flops"],
        "prompts": (2 * weights * num_prompt + 2 * num_prompt**2 * heads * len(layers)) / rates["flops"],
        "decode": work.new_tokens * (decode_s + cached / rates["bytes"]),
    }


def _linear(module: Any) -> int:
    return sum(p.numel() for p in module.blocks.parameters())


def kernel_share(engine: CaptionEngine, requests: list[CaptionRequest]) -> dict[str, Any]:
    """Of the time from the first answer asked for to the last one given, in which kernels run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds, _ = answer(engine, requests)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    by_name: dict[str, float] = {}
    for event in events:
        by_name[event.name[:90]] = by_name.get(event.name[:90], 0.0) + event.time_range.elapsed_us() / 1e6
    top = dict(sorted(by_name.items(), key=lambda item: -item[1])[:25])
    window_s = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e6
    return {
        "share": covered(spans) / 1e6 / window_s,
        "kernel_s": covered(spans) / 1e6,
        "window_s": window_s,
        "seconds_profiled": seconds,
        "top_s": {name: round(value, 4) for name, value in top.items()},
    }


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one work unit."""
    work = WORK[name]
    if arguments.batch_size:
        work = dataclasses.replace(work, batch_size=arguments.batch_size)
    rates = ceilings()
    torch.cuda.empty_cache()
    config = CaptionConfig(
        model=arguments.model, max_new_tokens=work.new_tokens, batch_size=work.batch_size, reuse=False, num_gpus=1,
        compile=not arguments.no_compile, temperature=0.0, repetition_penalty=1.0,
    )  # fmt: skip
    model = build.resolve(config)
    began = time.monotonic()
    engine = QwenVLEngine(config, model, cuda=True)
    start_s = time.monotonic() - began
    print(f"started in {start_s:.1f} s: {engine.start_s}, {engine.plan}", flush=True)
    load = Load((work.frames, work.height, work.width), work.new_tokens)
    answer(engine, load.requests(min(32, work.batch_size)))
    requests = load.requests(arguments.clips)
    torch.cuda.reset_peak_memory_stats()
    engine.runner.laps.is_on = True
    watts: list[tuple[float, float]] = []
    with power(watts):
        seconds, captions = answer(engine, requests)
    laps = engine.runner.laps.seconds()
    engine.runner.laps.is_on = False
    peak = torch.cuda.max_memory_allocated()
    counts = {(one.num_prompt_tokens, one.num_output_tokens) for one in captions}
    ((num_prompt, num_new),) = counts
    assert num_new == work.new_tokens, counts
    limits = floors(engine, work, num_prompt, rates)
    kernels = kernel_share(engine, load.requests(arguments.profiled)) if arguments.profiled else None
    starts = engine.start_s
    statistics_ = dataclasses.asdict(engine.statistics())
    plan = dataclasses.asdict(engine.plan) | {"total": engine.plan.total}
    engine.close()
    del engine
    torch.cuda.empty_cache()
    generated = generate_rate(config, model, work, arguments.generate) if arguments.generate else None
    rate = len(captions) / seconds
    return {
        "work": name,
        "unit": dataclasses.asdict(work),
        "clips": len(captions),
        "prompt_tokens": num_prompt,
        "new_tokens": num_new,
        "clips_per_s": rate,
        "limit_clips_per_s": 1 / sum(limits.values()),
        "of_limit": rate * sum(limits.values()),
        "of_vllm_on_another_day": rate / work.peer,
        "generate": generated and generated | {"ratio": rate / generated["clips_per_s"]},
        "seconds_a_clip": {part: value / len(captions) for part, value in laps.items()},
        "floor_seconds_a_clip": limits,
        "ceilings": rates,
        "gaps_share": 1 - sum(laps.values()) / seconds,
        "kernels": kernels,
        "power_w": statistics.mean([w for _, w in watts]) if watts else None,
        "start_s": start_s,
        "start_parts_s": dataclasses.asdict(starts),
        "memory": {"plan": plan, "peak_bytes": peak, "peak_of_plan": peak / (plan["total"] - plan["reserve"])},
        "statistics": statistics_,
        "gpu": torch.cuda.get_device_name(),
    }


def generate_rate(config: CaptionConfig, model: Any, work: Work, clips: int) -> dict[str, Any]:
    """transformers' `generate()` on the same card, 64 clips at a time."""
    from qwen_ray.engines.qwen_vl.generate import GenerateEngine

    engine = GenerateEngine(dataclasses.replace(config, batch_size=64), model, cuda=True)
    load = Load((work.frames, work.height, work.width), work.new_tokens)
    answer(engine, load.requests(2))
    seconds, captions = answer(engine, load.requests(clips))
    assert {one.num_output_tokens for one in captions} == {work.new_tokens}
    engine.close()
    return {"clips": clips, "batch_size": 64, "clips_per_s": clips / seconds}


def show(console: Console, found: dict[str, Any]) -> None:
    """The figures for people."""
    table = Table(
        "part", "ms a clip", "limit", "of limit", title=f"{found['work']}: {found['clips_per_s']:.2f} clips/s"
    )
    for part, seconds in found["seconds_a_clip"].items():
        floor = found["floor_seconds_a_clip"].get(part)
        limit = (f"{floor * 1000:.2f}", f"{floor / seconds:.0%}") if floor else ("", "")
        table.add_row(part, f"{seconds * 1000:.2f}", *limit)
    console.print(table)
    for name in ("limit_clips_per_s", "of_limit", "of_vllm_on_another_day", "gaps_share", "power_w", "start_s"):
        console.print(f"{name}: {found[name]:.4g}")
    if found["kernels"]:
        console.print(f"kernel share: {found['kernels']['share']:.2%}", found["kernels"]["top_s"])
    console.print("generate:", found["generate"], "memory:", found["memory"], found["statistics"], found["ceilings"])


def main() -> None:
    """Measure one work unit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", choices=WORK)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--profiled", type=int, default=256, help="clips of the profiled run; 0 for none")
    parser.add_argument("--generate", type=int, default=0, help="clips for generate(); 0 leaves it out")
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit", default="", help="of the code, where it is no git checkout")
    parser.add_argument("--write", type=Path, nargs="?", const=record.RESULTS, help="write the result to this folder")
    arguments = parser.parse_args()
    found = measure(arguments.work, arguments)
    console = Console(width=200)
    show(console, found)
    if arguments.write:
        about = record.about("the caption engine alone on one GPU", "jobs.bench.engine", arguments.commit)
        path = record.path_of(f"engine-{arguments.work}", arguments.write)
        path.write_text(json.dumps(about | found, indent=1))
        console.print(f"written to {path}")


if __name__ == "__main__":
    main()

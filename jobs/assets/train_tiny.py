"""Train and export an embedded tiny Qwen2.5-VL or Qwen3-VL, which captions the videos of shapes.py exactly.

    python -m jobs.assets.train_tiny --family qwen3-vl --out OUT [--minutes 9] [--resume OUT]   # on one CUDA GPU
    python -m jobs.assets.train_tiny --family qwen3-vl --out OUT --steps 20 --batch 8           # a smoke run on CPU

The export is an ordinary checkpoint folder of 12 to 15 MB: same architecture, preprocessing, chat template
and special tokens, only small. Training differs from plain fine-tuning in these ways:

- Scenes are drawn on the GPU, each used once, and made to look like decoded H.264 (`draw`).
- Training never shows a held-out (colour, shape, motion); the accuracy printed is on scenes made only of those.
- Some caption words in the decoder's input (never in its labels) are swapped for others of their kind, so the decoder
  must look at the video instead of completing familiar combinations.
- All sequences of a step have one shape, so attention is dense and batched instead of packed. `--check` compares this
  forward pass with the library's.

Axes in names: B scenes, T frames, C channels, H rows, W columns, S patches of one temporal patch, L tokens, D features.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoTokenizer

from jobs.assets import shapes
from jobs.assets.tiny import qwen2_5, qwen3
from jobs.assets.tiny.checkpoint import (
    GRIDS,
    GUIDE_WEIGHT,
    IGNORED,
    LONGEST_CLIP_S,
    NUM_FRAMES,
    NUM_FRAMES_WEIGHTS,
    OTHER_PROMPTS,
    PROMPT,
    SPECIAL_TOKENS,
    SWAPPED_WORDS,
    TEXT_TOKENS,
    build_model,
    save_tokenizer,
)
from jobs.assets.tiny.family import Clip, Family, Grid
from jobs.assets.tiny.forward import Trainee
from jobs.assets.tiny.pictures import draw, patchify, sample_times
from jobs.assets.tiny.text import Captions, split_prompt

GUIDE = (1, len(shapes.SHAPES), len(shapes.COLOURS), len(shapes.SIZES), 2)
"""Outputs of the guiding head: presence, shape, colour, size, place (x, y) in the token's cell."""


FAMILIES = {family.name: family for family in (qwen2_5.FAMILY, qwen3.FAMILY)}


class Step(NamedTuple):
    """Labels [B, L], logits [B, L, V] and the guiding loss (zero unless learning)."""

    labels: Tensor
    logits: Tensor
    guide_loss: Tensor


class Session:
    """Everything one run needs: model, text tables, random state."""

    def __init__(self, family: Family, tokenizer: Any, model: Any, device: torch.device, seed: int):
        self.family, self.tokenizer, self.device = family, tokenizer, device
        self.pad = int(tokenizer.convert_tokens_to_ids("<|video_pad|>"))
        self.trainee, self.fast_trainee = Trainee(family, model), Trainee(family, model, compiled=device.type == "cuda")
        self.guide = torch.nn.Linear(self.trainee.text_width, sum(GUIDE)).to(device)
        self.captions = Captions(tokenizer, device)
        self.prompt = split_prompt(tokenizer, PROMPT)
        self.other_prompts = [split_prompt(tokenizer, text) for text in OTHER_PROMPTS]
        self.generator = torch.Generator(device).manual_seed(seed)

    def pick_prompt(self) -> tuple[list[int], list[int]]:
        """Mostly the product's prompt, else another one or noise: any request is for a caption."""
        roll = random.random()
        if roll < 0.7:
            return self.prompt
        before, after = random.choice(self.other_prompts)
        if roll > 0.93:
            noise = [random.randrange(256, TEXT_TOKENS) for _ in range(random.randint(1, 16))]
            after = after[:1] + noise + after[-5:]
        return before, after

    def step(self, batch: int, held_out: bool, grid: Grid, num_frames: int, strength: float, learn: bool) -> Step:
        """Run fresh scenes through the model; with `learn`, prompts and words vary as in training."""
        before, after = self.pick_prompt() if learn else self.prompt
        low, high = grid.aspects
        aspect = low + (high - low) * random.random()
        scenes = shapes.sample_scenes(batch, self.generator, held_out, aspect)
        labels_BL = self.captions.tokens(scenes)
        answer_BL = labels_BL[:, :-1].clamp_min(0)
        if learn:
            answer_BL = self.captions.swap_words(answer_BL, SWAPPED_WORDS)
        clip = Clip(grid, num_frames, self.seconds(batch))
        video_ids = self.family.video_ids(self.tokenizer, clip)
        spread = learn and random.random() < 0.3
        position = self.family.positions(before, video_ids, after, answer_BL.shape[1], clip, spread)
        time_BT = sample_times(batch, num_frames, strength, self.device)
        frames = draw(scenes, self.family.size(grid), time_BT, aspect, strength, random.randrange(8))
        trainee = self.fast_trainee if learn else self.trainee
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            video = trainee.embed_video(frames, grid)
            logits = trainee.logits(video, [*before, *video_ids, *after], self.pad, answer_BL, position)
        unused = torch.zeros((), device=self.device)
        guide_loss = self.guide_loss(video[0], scenes, time_BT, grid, aspect) if learn else unused
        return Step(labels_BL, logits, guide_loss)

    def seconds(self, batch: int) -> Tensor:
        """Lengths of clips [B]; all the same where their times are text, since that must be of one length."""
        one = torch.rand(1).to(self.device).expand(batch)
        many = one if self.family.one_length else torch.rand(batch, device=self.device)
        return 0.5 + many * (LONGEST_CLIP_S - 0.5)

    def guide_loss(
        self, video: Tensor, scenes: shapes.SceneBatch, time_BT: Tensor, grid: Grid, aspect: float
    ) -> Tensor:
        """Loss of a linear head that reads the figures off the video tokens they are centred in.

        The head is thrown away. It gives the vision tower a direct reason to tell a circle from a square, which
        otherwise is what takes longest to come back through the decoder.
        """
        rows, columns = grid.rows, grid.columns
        frame_width, frame_height = shapes.frame_extent(aspect)
        pair_BT = time_BT.unflatten(1, (-1, 2)).mean(2)
        x, y = shapes.centres(scenes, pair_BT).unbind(-1)
        x, y = (x / frame_width + 0.5) * columns, (y / frame_height + 0.5) * rows
        column, row = x.floor().clamp(0, columns - 1), y.floor().clamp(0, rows - 1)
        patch = torch.arange(pair_BT.shape[1], device=self.device)
        cell_BNT = ((patch * rows + row) * columns + column).long()
        present_BN = torch.arange(2, device=self.device) < scenes.count_B[:, None]
        alone_BT = (cell_BNT[:, 0] != cell_BNT[:, 1]) | ~present_BN[:, 1:]
        weight = (present_BN[:, :, None] & alone_BT[:, None]).float()
        read = self.guide(video.float())
        drawn = present_BN.float().repeat_interleave(len(patch), 1)
        there = torch.zeros(read.shape[:2], device=self.device).scatter_reduce(1, cell_BNT.flatten(1), drawn, "amax")
        at = cell_BNT.flatten(1)[..., None].expand(-1, -1, read.shape[-1])
        _, shape, colour, size, offset = read.gather(1, at).unflatten(1, (2, -1)).split(GUIDE, -1)
        loss = F.smooth_l1_loss(offset, torch.stack([x - column, y - row], -1), reduction="none").mean(-1)
        for guess, truth in ((shape, scenes.shape_BN), (colour, scenes.colour_BN), (size, scenes.size_BN)):
            truth_BNT = truth[:, :, None].expand(weight.shape)
            loss = loss + F.cross_entropy(guess.movedim(-1, 1), truth_BNT, reduction="none")
        return (loss * weight).sum() / weight.sum() + F.binary_cross_entropy_with_logits(read[..., 0], there)


@torch.no_grad()  # type: ignore[untyped-decorator]
def accuracy(session: Session, grid: Grid, num_frames: int, strength: float, scenes: int, batch: int) -> dict[str, Any]:
    """Share of exactly right captions of held-out scenes, and how often the first wrong word should have been what.

    Feeding the right words instead of the model's own changes nothing: a caption is right in greedy decoding exactly
    when every next word is right given the right words before it.
    """
    right, wrong = 0, {}  # type: int, dict[str, int]
    for _ in range(scenes // batch):
        labels, logits, _ = session.step(batch, True, grid, num_frames, strength, learn=False)
        fits = (logits.argmax(-1) == labels) | (labels == IGNORED)
        right += int(fits.all(1).sum())
        for row in torch.nonzero(~fits.all(1)).flatten().tolist():
            place = int((~fits[row]).nonzero()[0])
            words = [session.tokenizer.decode([int(x[row, place])]).strip() for x in (labels, logits.argmax(-1))]
            wrong[">".join(words)] = wrong.get(">".join(words), 0) + 1
    return {"exact": right / (scenes // batch * batch), "wrong": dict(sorted(wrong.items(), key=lambda x: -x[1])[:8])}


def optimiser(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW without decay on norms and biases."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=parameters[0].is_cuda)


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm-up over 400 steps, then a cosine down to zero at the end of the budget."""
    return peak * min(1.0, (step + 1) / 400) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(session: Session, args: argparse.Namespace) -> list[Tensor]:
    """Train until the steps or the minutes are used up; returns the averaged weights."""
    model = session.trainee.model
    optim = optimiser([*model.parameters(), *session.guide.parameters()], args.rate)
    guide = list(session.guide.parameters())
    parameters = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    started, progress, step, shown = time.monotonic(), 0.0, 0, 0.0
    while progress < 1 and step < args.steps:
        grid = random.choices(GRIDS, [g.weight for g in GRIDS])[0]
        num_frames = random.choices(NUM_FRAMES, NUM_FRAMES_WEIGHTS)[0]
        for group in optim.param_groups:
            group["lr"] = learning_rate(progress, step, args.rate)
        strength = min(1.0, args.strength + 2 * progress)
        labels, logits, guide_loss = session.step(args.batch, False, grid, num_frames, strength, learn=True)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optim.zero_grad(set_to_none=True)
        (loss + GUIDE_WEIGHT * (1 - min(1.0, progress)) * guide_loss).backward()
        torch.nn.utils.clip_grad_norm_([*parameters, *guide], 1.0)
        optim.step()
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - min(0.999, (step + 1) / (step + 10)))
        step += 1
        elapsed_s = time.monotonic() - started
        progress = max(step / args.steps, elapsed_s / (60 * args.minutes))
        if step <= 3 or elapsed_s - shown > args.report_s or progress >= 1:
            shown = elapsed_s
            with torch.no_grad():
                quick = accuracy(session, GRIDS[0], 8, 1.0, args.batch, args.batch)
            losses = f"loss {loss.item():.4f} guide {guide_loss.item():.4f}"
            print(
                f"step {step} {elapsed_s:.0f}s {losses} {grid.rows}x{grid.columns} cells, held-out {quick}", flush=True
            )
    print(f"trained {step} steps of {args.batch} scenes in {time.monotonic() - started:.0f}s", flush=True)
    return average


def check(session: Session, out: Path) -> None:
    """Compare forward pass, positions and text with the library's, in float32 on the CPU."""
    for grid, seconds in product(GRIDS, (1.0, 5.3, 12.0)):
        _check_clip(session, Clip(grid, 8, torch.tensor([seconds, seconds if session.family.one_length else 2.0])))
    tokenizer = session.tokenizer
    for scene in shapes.scenes_of(shapes.sample_scenes(200, session.generator, False)):
        ids = tokenizer(shapes.caption(scene)).input_ids
        assert tokenizer.decode(ids) == shapes.caption(scene), "captions should round-trip"
        labels = session.captions.tokens(shapes.batch_of([scene]))[0]
        assert labels[labels >= 0].tolist() == [*ids, session.captions.end], "caption tables differ"
    print(f"checked {out}: forward pass, positions and captions agree with the library", flush=True)


def _check_clip(session: Session, clip: Clip) -> None:
    family, trainee, grid = session.family, session.trainee, clip.grid
    model = trainee.model.eval()
    scenes = shapes.sample_scenes(2, session.generator, True, grid.aspects[0])
    times = sample_times(2, clip.num_frames, 1.0, session.device)
    frames = draw(scenes, family.size(grid), times, grid.aspects[0], 1.0, 3)
    before, after = session.prompt
    video_ids = family.video_ids(session.tokenizer, clip)
    labels = session.captions.tokens(scenes).clamp_min(0)
    position = family.positions(before, video_ids, after, labels.shape[1], clip, False)
    prompt = torch.tensor([[*before, *video_ids, *after]] * 2)
    kinds = (prompt == session.pad).int() * 2
    about = {"video_grid_thw": torch.tensor([[clip.num_frames // 2, *grid.patches]] * 2)}
    if not family.one_length:
        about["second_per_grid_ts"] = 2 * clip.seconds_B / clip.num_frames
    theirs_position, delta = model.model.get_rope_index(prompt, mm_token_type_ids=kinds, **about)
    assert torch.equal(position[:, :, : prompt.shape[1]], theirs_position), "prompt positions differ"
    assert torch.equal(position[0, :, prompt.shape[1]], prompt.shape[1] + delta[:, 0]), "answer positions differ"
    with torch.no_grad():
        video = trainee.embed_video(frames, grid)
        ours = trainee.logits(video, prompt[0].tolist(), session.pad, labels, position)
        theirs = model(
            input_ids=torch.cat([prompt, labels], 1),
            mm_token_type_ids=torch.cat([kinds, torch.zeros_like(labels, dtype=torch.int)], 1),
            position_ids=position,
            pixel_values_videos=patchify(frames, family).flatten(0, 1),
            **about,
        ).logits
    theirs = theirs[:, -labels.shape[1] - 1 :]
    assert torch.allclose(ours, theirs, atol=2e-3), f"logits differ by {(ours - theirs).abs().max()}"


def export(session: Session, average: list[Tensor], out: Path) -> None:
    """Put the averaged weights in, rounded to bfloat16, and write the checkpoint."""
    model = session.trainee.model
    with torch.no_grad():
        for parameter, value in zip([p for p in model.parameters() if p.requires_grad], average, strict=True):
            parameter.copy_(value.to(torch.bfloat16))
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"wrote {out}: {size / 1e6:.1f} MB, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)


def report(session: Session, args: argparse.Namespace) -> None:
    """Print accuracy on held-out scenes for every grid, number of frames and some strengths of degradation."""
    for grid in GRIDS:
        result = accuracy(session, grid, 8, 1.0, args.eval_scenes, args.batch)
        print(f"{grid.rows}x{grid.columns} cells, 8 frames: {result}", flush=True)
    for num_frames, strength in ((2, 1.0), (4, 1.0), (6, 1.0), (8, 0.0), (8, 0.5)):
        result = accuracy(session, GRIDS[0], num_frames, strength, args.eval_scenes, args.batch)
        print(
            f"{GRIDS[0].rows}x{GRIDS[0].columns} cells, {num_frames} frames strength {strength}: {result}", flush=True
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="qwen2.5-vl")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--resume", type=Path, help="start from this exported folder's weights")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=9.0, help="training stops here whatever --steps says")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1.2e-3, help="peak learning rate")
    parser.add_argument("--strength", type=float, default=0.2, help="of the codec errors at the start; ends at 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-s", type=float, default=30.0)
    parser.add_argument("--eval-scenes", type=int, default=2048)
    parser.add_argument("--check", action="store_true", help="compare with the library first (CPU)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, export, report."""
    args = parse(argv)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = 64
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = FAMILIES[args.family]
    save_tokenizer(family, args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    model = build_model(family, token_id)
    if args.resume:
        trained = family.model_class.from_pretrained(args.resume, dtype=torch.float32)
        model.load_state_dict(trained.state_dict())
    session = Session(family, tokenizer, model.to(device), device, args.seed)
    if args.check:
        check(session, args.out)
    average = train(session, args)
    export(session, average, args.out)
    report(session, args)


if __name__ == "__main__":
    main()

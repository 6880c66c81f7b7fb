"""Videos of moving shapes with one exactly right caption each: the world of the embedded tiny captioner.

The same code draws batches on a GPU for training and single frames on a CPU for real video files.

Geometry. All lengths are in units of the frame's shorter side, with the origin in the frame's centre, x to the right
and y down, so one scene means the same in a 160x120 and in a 1280x720 frame. Time is a fraction of the clip: 0 is its
first moment and 1 its end.

A caption names the upper figure first. This is never ambiguous: each figure keeps to its own horizontal band for the
whole clip, the bands do not overlap, and no figure leaves the frame.

Axes in names: B scenes, N figures (2 slots, the second may be empty), T times, C colour channels, H rows, W columns,
P the two ends of a path, X the coordinates (x, y).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 50),
    "purple": (150, 60, 180),
    "orange": (240, 140, 30),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
MOTIONS: dict[str, tuple[int, int]] = {
    "moves left": (-1, 0),
    "moves right": (1, 0),
    "moves up": (0, -1),
    "moves down": (0, 1),
    "stays still": (0, 0),
}
SIZES: dict[str, tuple[float, float]] = {"small": (0.076, 0.088), "large": (0.124, 0.138)}
"""Name -> smallest and largest radius, in shorter sides."""
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "gray": (128, 128, 128),
    "brown": (110, 75, 45),
    "teal": (20, 110, 110),
    "pink": (240, 160, 185),
}

EXTENT = 1.2
"""Half of the square that every shape fits in, in radii (the triangle needs all of it)."""
MARGIN = 0.02
"""Least gap between a figure and the frame's edge; between two figures it is half as much again. In shorter sides."""
LEAST_RISE, MOST_RISE = 0.12, 0.60
LEAST_SHIFT, MOST_SHIFT = 0.30, 0.90
"""Lengths of vertical and of horizontal paths, in shorter sides."""
TWO_FIGURES = 2 / 3
"""Share of the scenes with two figures."""


@dataclass(frozen=True)
class Figure:
    """One shape on a straight path from `start` to `end` (x, y; shorter sides from the frame's centre)."""

    colour: str
    shape: str
    motion: str
    size: str
    radius: float
    start: tuple[float, float]
    end: tuple[float, float]

    @property
    def triple(self) -> tuple[str, str, str]:
        """What the held-out rule looks at."""
        return self.colour, self.shape, self.motion


@dataclass(frozen=True)
class Scene:
    """A background and one or two figures, the upper one first."""

    background: str
    figures: tuple[Figure, ...]


class SceneBatch(NamedTuple):
    """Scenes as index and geometry tensors, for drawing many at once. Indices follow the tables above."""

    background_B: Tensor
    count_B: Tensor
    colour_BN: Tensor
    shape_BN: Tensor
    motion_BN: Tensor
    size_BN: Tensor
    radius_BN: Tensor
    path_BNPX: Tensor


def is_held_out(colour: str, shape: str, motion: str) -> bool:
    """Whether this combination is kept for the test: 20 of the 120.

    With c, s, m the places in the tables: c + m is even and s = (c + m) mod 3. So every (colour, motion) is trained
    with at least 2 of the 3 shapes, every (colour, shape) with at least 4 of the 5 motions and every (shape, motion)
    with at least 6 of the 8 colours, while each single word is also part of held-out combinations.
    """
    c, s, m = list(COLOURS).index(colour), SHAPES.index(shape), list(MOTIONS).index(motion)
    return (c + m) % 2 == 0 and s == (c + m) % 3


TRIPLES: tuple[tuple[str, str, str], ...] = tuple((c, s, m) for c in COLOURS for s in SHAPES for m in MOTIONS)


def caption(scene: Scene) -> str:
    """The one right description of a scene."""
    first, *others = scene.figures
    sentences = [f"{_phrase(first)} on a {scene.background} background."]
    return " ".join(sentences + [f"{_phrase(figure)}." for figure in others])


def _phrase(figure: Figure) -> str:
    return f"A {figure.size} {figure.colour} {figure.shape} {figure.motion}"


def random_scene(generator: torch.Generator, held_out: bool, aspect: float = 1.0) -> Scene:
    """One scene that fits every frame at least as wide (`aspect` = width / height > 1) or tall (< 1) as `aspect`.

    Args:
        generator: a CPU generator; the same state gives the same scene.
        held_out: use only held-out combinations, otherwise none of them.
        aspect: width / height of the frame to fill.
    """
    return scenes_of(sample_scenes(1, generator, held_out, aspect))[0]


def sample_scenes(count: int, generator: torch.Generator, held_out: bool, aspect: float = 1.0) -> SceneBatch:
    """`count` random scenes on the generator's device, without a loop over scenes (see `random_scene`)."""
    device = generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    colour_BN, shape_BN, motion_BN = _sample_triples(count, generator, held_out)
    count_B = 1 + (uniform(count) < TWO_FIGURES).long()
    size_BN = torch.randint(len(SIZES), (count, 2), generator=generator, device=device)
    low, high = _table("SIZES", device)[size_BN].unbind(-1)
    radius_BN = low + (high - low) * uniform(count, 2)
    present_BN = torch.arange(2, device=device) < count_B[:, None]
    path_BNPX = _lay_out(motion_BN, radius_BN, present_BN, *frame_extent(aspect), uniform)
    background_B = torch.randint(len(BACKGROUNDS), (count,), generator=generator, device=device)
    return SceneBatch(background_B, count_B, colour_BN, shape_BN, motion_BN, size_BN, radius_BN, path_BNPX)


def _sample_triples(count: int, generator: torch.Generator, held_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Colour, shape and motion indices [B, 2]; the two figures of a scene never share a colour."""
    device = generator.device
    allowed = _table("HELD_OUT", device) == float(held_out)
    per_colour = len(SHAPES) * len(MOTIONS)
    colour_of = torch.arange(len(TRIPLES), device=device) // per_colour
    # The largest of independent uniform numbers is a fair choice, and unlike multinomial it never waits for the GPU.
    first_B = (torch.rand(count, len(TRIPLES), generator=generator, device=device) * allowed).argmax(1)
    allowed_BK = allowed & (colour_of != colour_of[first_B][:, None])
    second_B = (torch.rand(count, len(TRIPLES), generator=generator, device=device) * allowed_BK).argmax(1)
    triple_BN = torch.stack([first_B, second_B], 1)
    return triple_BN // per_colour, triple_BN // len(MOTIONS) % len(SHAPES), triple_BN % len(MOTIONS)


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """A table above as float32 rows, made once per device (a copy to a GPU waits for its queue)."""
    if name == "HELD_OUT":
        return torch.tensor([float(is_held_out(*triple)) for triple in TRIPLES], device=device)
    tables: dict[str, dict[str, tuple[float, ...]]] = {
        "COLOURS": {**COLOURS},
        "BACKGROUNDS": {**BACKGROUNDS},
        "MOTIONS": {**MOTIONS},
        "SIZES": {**SIZES},
    }
    return torch.tensor([list(row) for row in tables[name].values()], device=device, dtype=torch.float32)


def _lay_out(
    motion_BN: Tensor,
    radius_BN: Tensor,
    present_BN: Tensor,
    frame_width: float,
    frame_height: float,
    uniform: Callable[..., Tensor],
) -> Tensor:
    """Random paths [B, N, P, X] that keep both figures inside the frame and in bands one above the other."""
    batch = motion_BN.shape[0]
    direction_BNX = _table("MOTIONS", radius_BN.device)[motion_BN]
    upright_BN = (direction_BNX[..., 1] != 0) & present_BN
    sideways_BN = direction_BNX[..., 0] != 0
    extent_BN = EXTENT * radius_BN
    both_B = present_BN[:, 1].float()

    # Vertical: what the bands do not need is split at random among the three gaps and the two paths.
    band_BN = (2 * extent_BN + LEAST_RISE * upright_BN) * present_BN
    slack_B = frame_height - band_BN.sum(1) - MARGIN * (2 + 1.5 * both_B)
    share = -torch.log(uniform(batch, 5).clamp_min(1e-6))
    use = torch.stack([torch.ones_like(both_B), torch.ones_like(both_B), both_B], 1)
    share = share * torch.cat([use, 2.0 * upright_BN], 1)
    share = slack_B[:, None] * share / share.sum(1, keepdim=True)
    rise_BN = upright_BN * (LEAST_RISE + share[:, 3:]).clamp_max(MOST_RISE)
    top_0 = -frame_height / 2 + MARGIN + share[:, 0]
    top_1 = top_0 + 2 * extent_BN[:, 0] + rise_BN[:, 0] + 1.5 * MARGIN + share[:, 2]
    high_BN = torch.stack([top_0, top_1], 1) + extent_BN

    # Horizontal: each figure has the whole width.
    room_BN = frame_width - 2 * extent_BN - 2 * MARGIN
    longest_BN = room_BN.clamp_max(MOST_SHIFT)
    shift_BN = sideways_BN * (LEAST_SHIFT + (longest_BN - LEAST_SHIFT) * uniform(batch, 2))
    left_BN = -frame_width / 2 + MARGIN + extent_BN + (room_BN - shift_BN) * uniform(batch, 2)

    corner_BNX = torch.stack([left_BN, high_BN], -1)
    length_BNX = torch.stack([shift_BN, rise_BN], -1)
    start_BNX = corner_BNX + length_BNX * (direction_BNX < 0)
    return torch.stack([start_BNX, start_BNX + direction_BNX * length_BNX], 2)


def frame_extent(aspect: float) -> tuple[float, float]:
    """Width and height of a frame in shorter sides."""
    return (aspect, 1.0) if aspect >= 1 else (1.0, 1 / aspect)


def scenes_of(batch: SceneBatch) -> list[Scene]:
    """The batch as values to read, caption and store."""
    columns = [column.tolist() for column in batch]
    return [_scene_of(*row) for row in zip(*columns, strict=True)]


def _scene_of(background, count, colours, shapes, motions, sizes, radii, paths) -> Scene:  # type: ignore[no-untyped-def]
    figures = [
        Figure(
            list(COLOURS)[colours[i]],
            SHAPES[shapes[i]],
            list(MOTIONS)[motions[i]],
            list(SIZES)[sizes[i]],
            radii[i],
            (paths[i][0][0], paths[i][0][1]),
            (paths[i][1][0], paths[i][1][1]),
        )
        for i in range(count)
    ]
    return Scene(list(BACKGROUNDS)[background], tuple(figures))


def batch_of(scenes: list[Scene]) -> SceneBatch:
    """The inverse of `scenes_of`; an empty second slot repeats the first figure and is never drawn."""
    slots = [[scene.figures[0], scene.figures[-1]] for scene in scenes]

    def index(table: tuple[str, ...] | list[str], field: str) -> Tensor:
        return torch.tensor([[table.index(getattr(figure, field)) for figure in pair] for pair in slots])

    return SceneBatch(
        torch.tensor([list(BACKGROUNDS).index(scene.background) for scene in scenes]),
        torch.tensor([len(scene.figures) for scene in scenes]),
        index(list(COLOURS), "colour"),
        index(SHAPES, "shape"),
        index(list(MOTIONS), "motion"),
        index(list(SIZES), "size"),
        torch.tensor([[figure.radius for figure in pair] for pair in slots]),
        torch.tensor([[[figure.start, figure.end] for figure in pair] for pair in slots]),
    )


def paint(batch: SceneBatch, time_BT: Tensor, height: int, width: int, aspect: float, softness_B: Tensor) -> Tensor:
    """Draw frames [B, T, C, H, W], float32 RGB in 0..255, with antialiased edges.

    Args:
        time_BT: fractions of the clip.
        aspect: true width / height; differs from width / height when the picture has been squashed.
        softness_B: width of an edge in pixels; 1 is a plain antialiased edge.
    """
    background_BC, colour_BNC = palette(batch)
    frames = background_BC[:, None, :, None, None]
    for slot, outside in enumerate(outlines(batch, time_BT, height, width, aspect)):
        cover = (0.5 - outside / softness_B[:, None, None, None]).clamp(0, 1).unsqueeze(2)
        frames = frames + cover * (colour_BNC[:, slot, None, :, None, None] - frames)
    return frames


def palette(batch: SceneBatch) -> tuple[Tensor, Tensor]:
    """RGB of the backgrounds [B, C] and of the figures [B, N, C], float32 in 0..255."""
    device = batch.radius_BN.device
    return _table("BACKGROUNDS", device)[batch.background_B], _table("COLOURS", device)[batch.colour_BN]


def centres(batch: SceneBatch, time_BT: Tensor) -> Tensor:
    """Where the figures are at each time [B, N, T, X]."""
    start, end = batch.path_BNPX.unbind(2)
    return start[:, :, None] + (end - start)[:, :, None] * time_BT[:, None, :, None]


def outlines(batch: SceneBatch, time_BT: Tensor, height: int, width: int, aspect: float) -> Iterator[Tensor]:
    """For each slot the distance [B, T, H, W] of each pixel to the figure's outline, in pixels, negative inside."""
    device = batch.radius_BN.device
    frame_width, frame_height = frame_extent(aspect)
    x_W = ((torch.arange(width, device=device) + 0.5) / width - 0.5) * frame_width
    y_H = ((torch.arange(height, device=device) + 0.5) / height - 0.5) * frame_height
    pixel = math.sqrt(frame_width / width * frame_height / height)
    centre_BNTX = centres(batch, time_BT)
    for slot in range(2):
        dx = x_W - centre_BNTX[:, slot, :, 0, None, None]
        dy = y_H[:, None] - centre_BNTX[:, slot, :, 1, None, None]
        shape = batch.shape_BN[:, slot, None, None, None]
        outside = _distance(dx, dy, batch.radius_BN[:, slot, None, None, None], shape) / pixel
        # An empty slot is infinitely far away.
        yield outside + torch.where(batch.count_B > slot, 0.0, 1e6)[:, None, None, None]


def _distance(dx: Tensor, dy: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """Distance to the outline, negative inside, in shorter sides. The three shapes have similar areas."""
    circle = (dx * dx + dy * dy).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.95 * radius
    # Apex (0, -1.2), base from (-1.2, 1) to (1.2, 1), in radii: the triangle points up.
    slant = (dx.abs() * 2.2 - (dy + 1.2 * radius) * 1.2) / math.hypot(2.2, 1.2)
    triangle = torch.maximum(dy - radius, slant)
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle))


def render(scene: Scene, times: float | list[float], height: int, width: int) -> Tensor:
    """Frames [T, H, W, C] uint8 RGB of a scene at the given fractions of its clip.

    Raises:
        ValueError: when a figure would leave a frame of this shape.
    """
    _check_fits(scene, width / height)
    batch = batch_of([scene])
    time_T = torch.tensor([times] if isinstance(times, int | float) else times, dtype=torch.float32)
    # A few frames at a time: the float32 planes of a whole clip would fill memory and cost more than the arithmetic.
    parts = [
        paint(batch, part[None], height, width, width / height, torch.ones(1))[0].round().to(torch.uint8)
        for part in time_T.split(4)
    ]
    return torch.cat(parts).permute(0, 2, 3, 1).contiguous()


def _check_fits(scene: Scene, aspect: float) -> None:
    frame_width, frame_height = frame_extent(aspect)
    for figure in scene.figures:
        reach = EXTENT * figure.radius
        for x, y in (figure.start, figure.end):
            if abs(x) + reach > frame_width / 2 + 1e-6 or abs(y) + reach > frame_height / 2 + 1e-6:
                raise ValueError(f"the {figure.colour} {figure.shape} leaves a frame of aspect {aspect:.3f}")

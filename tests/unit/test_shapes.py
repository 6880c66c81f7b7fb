"""The renderer of the moving-shape videos: what the captions claim is what the pixels show."""

from collections import Counter
from itertools import combinations

import pytest
import torch

from jobs.assets import shapes

ASPECTS = (4 / 3, 16 / 9, 1.0, 3 / 4, 9 / 16)


def figure(**changes):  # type: ignore[no-untyped-def]
    facts = {
        "colour": "red",
        "shape": "circle",
        "motion": "stays still",
        "size": "large",
        "radius": 0.13,
        "start": (0.0, 0.0),
        "end": (0.0, 0.0),
    }
    return shapes.Figure(**{**facts, **changes})


def scenes(held_out: bool, aspect: float, count: int = 300):  # type: ignore[no-untyped-def]
    return shapes.scenes_of(shapes.sample_scenes(count, torch.Generator().manual_seed(5), held_out, aspect))


def centre_of(frame_HWC: torch.Tensor, scene, place: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Mean position (x, y) in pixels of the pixels nearest to a figure's colour."""
    colour = torch.tensor(shapes.COLOURS[scene.figures[place].colour])
    mask = (frame_HWC.int() - colour).abs().sum(-1) < 12
    y, x = mask.nonzero().float().mean(0).tolist()
    return x, y


def test_caption_names_the_upper_figure_first():
    upper = figure(colour="blue", shape="triangle", start=(0, -0.3), end=(0, -0.3))
    lower = figure(size="small", radius=0.08, motion="moves right", start=(-0.3, 0.3), end=(0.3, 0.3))
    assert shapes.caption(shapes.Scene("brown", (upper, lower))) == (
        "A large blue triangle stays still on a brown background. A small red circle moves right."
    )


@pytest.mark.parametrize("aspect", ASPECTS)
def test_figures_stay_in_the_frame_and_one_above_the_other(aspect):
    width, height = shapes.frame_extent(aspect)
    for scene in scenes(False, aspect):
        for item in scene.figures:
            reach = shapes.EXTENT * item.radius
            for x, y in (item.start, item.end):
                assert abs(x) + reach < width / 2
                assert abs(y) + reach < height / 2
        if len(scene.figures) == 2:
            upper, lower = scene.figures
            bottom = max(upper.start[1], upper.end[1]) + shapes.EXTENT * upper.radius
            assert bottom < min(lower.start[1], lower.end[1]) - shapes.EXTENT * lower.radius
            assert upper.colour != lower.colour


def test_held_out_triples_are_never_trained_and_the_only_ones_tested():
    held_out = {triple for triple in shapes.TRIPLES if shapes.is_held_out(*triple)}
    assert len(held_out) == 20
    trained = {item.triple for scene in scenes(False, 1.0, 3000) for item in scene.figures}
    tested = {item.triple for scene in scenes(True, 1.0, 3000) for item in scene.figures}
    assert tested == held_out
    assert trained == set(shapes.TRIPLES) - held_out


def test_every_pair_of_words_is_trained_in_most_of_its_triples():
    for pair in combinations(range(3), 2):
        total = Counter(tuple(triple[i] for i in pair) for triple in shapes.TRIPLES)
        trained = Counter(
            tuple(triple[i] for i in pair) for triple in shapes.TRIPLES if not shapes.is_held_out(*triple)
        )
        assert all(trained[key] / total[key] > 0.6 for key in total)


def test_same_generator_state_gives_the_same_scene():
    first, second = (shapes.random_scene(torch.Generator().manual_seed(3), True, 16 / 9) for _ in range(2))
    assert first == second
    assert shapes.scenes_of(shapes.batch_of([first])) == [first]


@pytest.mark.parametrize(("height", "width"), [(120, 160), (180, 320), (160, 120)])
def test_pixels_move_as_the_words_say(height, width):
    for scene in scenes(True, width / height, 15):
        first, last = shapes.render(scene, [0.0, 1.0], height, width)
        for place, item in enumerate(scene.figures):
            before, after = centre_of(first, scene, place), centre_of(last, scene, place)
            moved = [round((b - a) / (0.1 * min(height, width))) for a, b in zip(before, after, strict=True)]
            assert tuple((m > 0) - (m < 0) for m in moved) == shapes.MOTIONS[item.motion]


def test_colours_at_the_centre_and_in_the_corner():
    scene = shapes.Scene("teal", (figure(colour="yellow", shape="square"),))
    frame = shapes.render(scene, 0.5, 120, 160)[0]
    assert tuple(frame[60, 80].tolist()) == shapes.COLOURS["yellow"]
    assert tuple(frame[0, 0].tolist()) == shapes.BACKGROUNDS["teal"]


def test_triangle_points_up():
    frame = shapes.render(shapes.Scene("gray", (figure(shape="triangle"),)), 0.0, 200, 200)[0]
    widths = ((frame.int() - torch.tensor(shapes.COLOURS["red"])).abs().sum(-1) < 12).sum(1)
    rows = widths.nonzero().flatten()
    assert widths[rows[1]] < widths[rows[len(rows) // 2]] < widths[rows[-2]]


def test_edges_are_antialiased():
    frame = shapes.render(shapes.Scene("gray", (figure(),)), 0.0, 90, 90)[0]
    assert len(frame.reshape(-1, 3).unique(dim=0)) > 5


def test_scene_that_does_not_fit_is_refused():
    scene = shapes.Scene("pink", (figure(start=(0.6, 0.0), end=(0.6, 0.0)),))
    shapes.render(scene, 0.0, 90, 160)
    with pytest.raises(ValueError, match="leaves a frame"):
        shapes.render(scene, 0.0, 90, 90)

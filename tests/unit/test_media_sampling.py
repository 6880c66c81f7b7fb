"""Cutting time into clips, choosing frames and sizes: arithmetic, checked against the reference formulas."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_ray.media.sampling import at_rate, by_motion, frame_size, key_frames, sample
from qwen_ray.media.windows import fixed_windows

FRAMES_30_S = [number / 30 for number in range(900)]


@pytest.mark.parametrize(
    ("duration_s", "window_s", "expected"),
    [
        (30.0, 12.0, [(0, 12), (12, 24), (24, 30)]),
        (24.0, 12.0, [(0, 12), (12, 24)]),
        (24.0 + 1e-9, 12.0, [(0, 12), (12, 24 + 1e-9)]),  # a float's noise is no clip
        (24.0 - 1e-9, 12.0, [(0, 12), (12, 24 - 1e-9)]),
        (0.1, 12.0, [(0, 0.1)]),
        (0.0, 12.0, [(0, 0)]),
        (-1.0, 12.0, [(0, 0)]),
        (math.nan, 12.0, [(0, 0)]),
        (0.3, 0.1, [(0, 0.1), (0.1, 0.2), (0.2, 0.3)]),
    ],
)
def test_windows_cover_the_picture_without_slivers(duration_s, window_s, expected):
    windows = fixed_windows(FRAMES_30_S, duration_s, window_s)
    assert [pytest.approx(window) for window in windows] == expected


def test_a_remainder_shorter_than_a_frame_joins_the_window_before():
    assert fixed_windows(FRAMES_30_S, 12.02, 12.0, sliver_s=1 / 30) == [(0.0, 12.02)]
    assert fixed_windows(FRAMES_30_S, 12.04, 12.0, sliver_s=1 / 30) == [(0.0, 12.0), (12.0, 12.04)]
    assert fixed_windows(FRAMES_30_S, 0.02, 12.0, sliver_s=1 / 30) == [(0.0, 0.02)]


def test_a_still_is_one_window_however_long():
    year_s = 3.2e7
    assert fixed_windows([0.0, 1.0, 13.0], 100.0, 12.0) == [(0.0, 12.0), (12.0, 24.0), (24.0, 100.0)]
    assert fixed_windows([0.0, 30.0], 31.0, 12.0) == [(0.0, 12.0), (12.0, 24.0), (24.0, 31.0)]
    windows = fixed_windows([0.0, year_s], year_s + 0.04, 12.0)
    assert [round(end - start) for start, end in windows] == [12, 31999980, 8]
    assert fixed_windows([0.0], 1e300, 12.0) == [(0.0, 12.0), (12.0, 1e300)]


def test_frames_are_those_on_screen_at_evenly_spaced_times():
    pts_s = [0.0, 1.0, 1.5, 1.6, 5.0]
    assert sample(pts_s, 0.0, 6.0, 6) == [0, 1, 3, 4]  # at 0, 1, 2, 3, 4, 5
    assert sample(pts_s, 2.0, 4.0, 4) == [3]  # nothing new appears, one picture stands
    assert sample(pts_s, 5.5, 6.0, 2) == [4]


def test_a_first_frame_that_comes_late_stands_for_the_time_before_it():
    assert sample([0.5, 1.0], 0.0, 1.5, 3) == [0, 1]
    assert sample([0.5, 1.0], 0.0, 0.5, 2) == []
    assert sample([], 0.0, 1.0, 2) == []


def test_a_window_of_no_length_still_has_the_frame_on_screen():
    assert sample([0.0], 0.0, 0.0, 16) == [0]


def test_rounded_times_do_not_shift_the_choice():
    pts_s = [round(k * 1001 / 30000, 6) for k in range(240)]
    chosen = sample(pts_s, 0.0, 240 * 1001 / 30000, 16)
    assert chosen == [15 * k for k in range(16)]


def test_sampling_keeps_its_promises_on_random_times():
    rng = random.Random(0)
    for _ in range(300):
        pts_s = sorted(rng.uniform(0, 20) for _ in range(rng.randint(1, 60)))
        start_s = rng.uniform(0, 18)
        end_s, num_frames = start_s + rng.uniform(0.1, 5), rng.randint(1, 20)
        chosen = sample(pts_s, start_s, end_s, num_frames)
        assert chosen == sorted(set(chosen))
        assert len(chosen) <= num_frames
        for index in chosen:
            gone_s = pts_s[index + 1] if index + 1 < len(pts_s) else math.inf
            assert pts_s[index] < end_s
            assert gone_s > start_s


def smart_resize(height, width, factor, min_pixels, max_pixels):
    """The formula of Qwen's own preprocessing (qwen-vl-utils), to compare with."""
    h_bar = max(factor, round(height / factor) * factor)
    w_bar = max(factor, round(width / factor) * factor)
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


SIZES = [(1080, 1920), (1920, 1080), (720, 1280), (360, 640), (240, 320), (719, 405), (64, 64), (2160, 3840), (10, 10)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("multiple", "pixels"), [(28, (4 * 28 * 28, 360 * 640)), (32, (4096, 13_000))])
def test_sizes_equal_the_references(size, multiple, pixels):
    low, high = pixels
    ours = frame_size(*size, Fraction(1), multiple=multiple, min_pixels=low, max_pixels=high)
    assert ours == smart_resize(*size, multiple, low, high)


def test_the_known_size_of_360p():
    size = frame_size(360, 640, Fraction(1), multiple=28, min_pixels=3136, max_pixels=360 * 640)
    assert size == (336, 616)


def test_sizes_follow_the_shape_that_a_viewer_sees():
    size = frame_size(288, 352, Fraction(16, 11), multiple=28, min_pixels=3136, max_pixels=10**6)
    assert size == (280, 504)  # 512 wide on screen


@pytest.mark.parametrize(("height", "width"), [(2, 100_000), (100_000, 2), (1, 1), (28, 5600), (7, 1999)])
def test_extreme_shapes_fit_the_budget(height, width):
    out_h, out_w = frame_size(height, width, Fraction(1), multiple=28, min_pixels=3136, max_pixels=230_400)
    assert out_h % 28 == out_w % 28 == 0
    assert min(out_h, out_w) >= 28
    assert out_h * out_w <= 230_400


def test_a_rate_is_kept_until_it_is_too_many_frames():
    pts = [k / 30 for k in range(360)]
    assert at_rate(pts, 0.0, 4.0, 2.0, 16) == [0, 15, 30, 45, 60, 75, 90, 105]
    assert at_rate(pts, 1.0, 1.2, 2.0, 16) == [30]
    assert at_rate(pts, 0.0, 4.2, 2.0, 16) == [*range(0, 121, 15)]
    assert at_rate(pts, 0.0, 12.0, 2.0, 8) == sample(pts, 0.0, 12.0, 8)


def test_key_frames_of_a_window():
    pts, keys = [k / 10 for k in range(100)], [0, 7, 25, 50, 60, 70, 80, 90]
    assert key_frames(pts, keys, 0.0, 3.0, 16) == [0, 7, 25]
    assert key_frames(pts, keys, 0.7, 2.5, 16) == [7]
    assert key_frames(pts, keys, 0.0, 10.0, 4) == [0, 25, 60, 80]
    assert key_frames(pts, keys, 3.0, 5.0, 16) == [30]  # none: what is on screen when it begins


def test_even_movement_is_sampled_evenly():
    for moves in ([0.0] * 63, [3.0] * 63):
        assert by_motion(moves, 16) == list(range(0, 64, 4))


def test_few_candidates_are_all_taken():
    assert by_motion([], 16) == [0]
    assert by_motion([1.0, 5.0, 0.0], 4) == [0, 1, 2, 3]


def test_frames_go_where_the_movement_is():
    moves = [0.0] * 21 + [8.0] * 21 + [0.0] * 21
    taken = by_motion(moves, 16)
    inside = [k for k in taken if 21 <= k <= 42]
    assert len(inside) >= 2 * 16 / 3  # twice as dense as even sampling
    assert min(taken) < 8  # and the rest is still looked at
    assert max(taken) > 45


def test_a_cut_takes_one_pair():
    calm = [1.0] * 63
    cut = [*calm[:30], 5000.0, *calm[31:]]
    taken = by_motion(cut, 16)
    assert sum(28 <= k <= 34 for k in taken) <= 3
    assert by_motion(calm, 16)[-1] - taken[-1] < 4


@given(st.lists(st.floats(0, 255), min_size=1, max_size=300), st.integers(2, 64))
def test_chosen_frames_ascend_within_the_budget(moves, num_frames):
    taken = by_motion(moves, num_frames)
    assert taken == sorted(set(taken))
    assert taken[0] >= 0
    assert taken[-1] <= len(moves)
    assert len(taken) == min(len(moves) + 1, num_frames if len(moves) < num_frames else num_frames // 2 * 2)

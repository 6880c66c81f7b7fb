"""Every file of the conformance suite: which frames come back, at which times, upright, and where its sound lies.

What the file's recipe says is compared with what the reader says, and with the number and the clock burnt into each
picture; the `videos` row of each file is looked at in tests/ray/test_conformance.py.
"""

from bisect import bisect_right

import numpy as np
import pytest

from jobs.conformance.assets import ASSETS
from jobs.conformance.burn import LEVELS, read_beeps, read_level, read_number, read_time_s
from qwen_ray.config import DecodeConfig
from qwen_ray.errors import InputError
from qwen_ray.media.audio import SAMPLE_RATE_HZ, AudioReader
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import ClipFrames, DecodeRequest, Done
from qwen_ray.media.probe import examine

GOOD = [name for name, asset in ASSETS.items() if asset.good]
DAMAGED = [name for name, asset in ASSETS.items() if asset.damaged]
USELESS = [name for name, asset in ASSETS.items() if asset.status == "failed" and not asset.damaged]


def decode(path, **how):
    """Frames of a file at most 320x240, sound left aside."""
    return list(decode_events(DecodeRequest(path=str(path), decode=DecodeConfig(max_pixels=320 * 240, **how))))


def ranks_shown(clip, asset):
    """Which of the asset's frames each picture is, by its number; -1 where it is none or cannot be read."""
    if asset.levels:
        found = [read_level(picture) for picture in clip.frames_THWC]
        assert len(asset.numbers) <= LEVELS
    else:
        found = [read_number(picture) for picture in clip.frames_THWC]
    return [asset.numbers.index(number) if number in asset.numbers else -1 for number in found]


def on_screen(times_s, at_s):
    """The frame that is on screen at a moment."""
    return max(bisect_right(times_s, at_s) - 1, 0)


def test_the_suite_has_what_its_truth_needs():
    assert len(ASSETS) >= 100
    for name, asset in ASSETS.items():
        shown_s = asset.shown_s()
        assert len(shown_s) == len(asset.numbers), name
        assert shown_s == sorted(set(shown_s)), name
        assert len(set(asset.numbers)) == len(asset.numbers), name


@pytest.mark.parametrize("name", GOOD)
def test_every_frame_is_the_wanted_one(find, name):
    asset = ASSETS[name]
    opened, clip, done = decode(find(name), window_s=1e5, num_frames=24)
    assert done == Done(0, 0, None, damaged=False)
    assert opened.info.num_frames == len(asset.numbers)
    truth_s, ranks = asset.shown_s(), ranks_shown(clip, asset)
    assert clip.frame_times_s == pytest.approx([truth_s[rank] for rank in ranks], abs=asset.slack_s)
    asked_s = [k * opened.info.video_duration_s / 24 for k in range(24)]
    early, late = ([on_screen(truth_s, at_s + d) for at_s in asked_s] for d in (-asset.slack_s, asset.slack_s))
    for first, last in zip(early, late, strict=True):
        assert any(first <= rank <= last for rank in ranks)
    for rank in ranks:
        assert any(first <= rank <= last for first, last in zip(early, late, strict=True))
    assert (clip.num_decoded, clip.num_repaired) == (clip.num_requested, 0)


@pytest.mark.parametrize("name", [name for name in GOOD if not ASSETS[name].levels])
def test_the_clock_in_the_picture_agrees(find, name):
    asset = ASSETS[name]
    _, *clips, _ = decode(find(name), window_s=max(0.7, asset.shown_s()[-1] / 5), num_frames=4)
    clocks = [read_time_s(picture) for clip in clips for picture in clip.frames_THWC]
    times_s = [time_s for clip in clips for time_s in clip.frame_times_s]
    assert None not in clocks
    assert [clock - clocks[0] for clock in clocks] == pytest.approx(times_s, abs=asset.slack_s + 0.001)


@pytest.mark.parametrize("name", GOOD)
def test_clip_after_clip_shows_its_own_time(find, name):
    asset = ASSETS[name]
    truth_s = asset.shown_s()
    opened, *clips, done = decode(find(name), window_s=max(0.4, truth_s[-1] / 12), num_frames=3)
    assert [type(clip) for clip in clips] == [ClipFrames] * len(opened.windows)
    for clip in clips:
        shown_s = [truth_s[rank] for rank in ranks_shown(clip, asset)]
        assert clip.frame_times_s == pytest.approx(shown_s, abs=asset.slack_s)
        assert clip.frame_times_s[-1] < clip.end_s
    num_repaired = sum(clip.num_repaired for clip in clips)
    assert num_repaired <= asset.joints
    assert done.damaged == (num_repaired > 0)


@pytest.mark.parametrize("name", [name for name, asset in ASSETS.items() if asset.sound and asset.status == "ok"])
def test_the_sound_is_where_it_is_heard(find, name):
    sound, examined = ASSETS[name].sound, examine(str(find(name)))
    offset_s = examined.info.audio_offset_s
    samples = np.concatenate(list(AudioReader(examined.path, examined.index.audio).blocks()))
    heard = [(at_s + offset_s, second) for at_s, second in read_beeps(samples, SAMPLE_RATE_HZ)]
    from_s = min(0.0, offset_s) + 0.1  # a beep that the file's first packet cuts in two is neither there nor not
    expected = [(sound.starts_s + second + 0.5, second) for second in range(sound.seconds)]
    expected = [(at_s, second) for at_s, second in expected if at_s >= from_s]
    heard = [(at_s, second) for at_s, second in heard if at_s >= from_s]
    assert [second for _, second in heard] == [second for _, second in expected]
    assert [at_s for at_s, _ in heard] == pytest.approx([at_s for at_s, _ in expected], abs=sound.slack_s)
    assert len(expected) >= 2


@pytest.mark.parametrize("name", DAMAGED)
def test_no_wrong_picture_of_a_damaged_file_goes_uncounted(find, name):
    asset = ASSETS[name]
    _, *clips, done = decode(find(name), window_s=0.5, num_frames=15, max_repaired=1.0)
    assert done.damaged
    truth_s, right = asset.shown_s(), 0
    for clip in (clip for clip in clips if isinstance(clip, ClipFrames)):
        ranks = ranks_shown(clip, asset)[: clip.num_decoded]
        fits = [
            rank >= 0 and abs(truth_s[rank] - at_s) <= asset.slack_s
            for rank, at_s in zip(ranks, clip.frame_times_s, strict=False)
        ]
        assert fits.count(False) <= clip.num_repaired
        right += fits.count(True) - max(0, clip.num_repaired - fits.count(False))
    assert right >= asset.at_least_right


def test_a_clip_of_mostly_damaged_frames_fails(find):
    for share in (0.0, 0.5, 1.0):
        _, *clips, _ = decode(find("flipped.ts"), window_s=0.5, num_frames=15, max_repaired=share)
        every = decode(find("flipped.ts"), window_s=0.5, num_frames=15, max_repaired=1.0)[1:-1]
        for clip, whole in zip(clips, every, strict=True):
            if whole.num_repaired <= share * whole.num_decoded:
                assert clip.num_repaired == whole.num_repaired
            else:
                assert clip.error_type == "damaged"
    assert {clip.num_repaired > 0 for clip in every} == {False, True}


@pytest.mark.parametrize("name", USELESS)
def test_a_useless_file_says_why(find, name):
    with pytest.raises(InputError) as caught:
        decode(find(name))
    assert caught.value.error_type == ASSETS[name].error_type
    assert name in caught.value.message
    assert str(find(name).parent) not in caught.value.message

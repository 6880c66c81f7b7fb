"""Sound arrives at its true times, speech is found where it is, and nothing is found where there is none."""

import wave
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jobs.conformance.assets import x264
from jobs.conformance.recipe import ffmpeg, render
from qwen_ray.config import SpeechConfig
from qwen_ray.errors import InputError
from qwen_ray.media.audio import SAMPLE_RATE_HZ, AudioReader
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import ClipFrames, DecodeRequest, SpeechChunk
from qwen_ray.media.index import AudioTrack
from qwen_ray.media.probe import examine
from qwen_ray.media.speech import speech_chunks
from tests.voices import SPEECH, SPEECH_TRUTH

VAD = {"vad_threshold": 0.5, "min_silence_s": 0.5}
NEAR_S = 0.35
"""Detectors leave 0.2 s around speech and decide in steps of 32 ms."""


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """8 s of video without sound."""
    path = tmp_path_factory.mktemp("picture") / "picture.mp4"
    render(path, video=x264(60, "-bf", "2"))
    return path


def sound_of(path, block_s=120.0):
    """(time of the first sample, all samples, errors)."""
    examined = examine(str(path))
    reader = AudioReader(str(path), examined.index.audio)
    blocks = list(reader.blocks(block_s))
    return examined.info.audio_offset_s, np.concatenate(blocks), reader.num_errors


def loud_s(samples, offset_s):
    """(start_s, end_s) of what is not silence."""
    at = np.flatnonzero(np.abs(samples) > 0.02)
    return offset_s + at[0] / SAMPLE_RATE_HZ, offset_s + at[-1] / SAMPLE_RATE_HZ


def speech_of(samples, offset_s=0.0, block_s=120.0, chunk_s=30.0):
    size = round(block_s * SAMPLE_RATE_HZ)
    blocks = (samples[at : at + size] for at in range(0, len(samples), size))
    return list(speech_chunks(blocks, offset_s, **VAD, chunk_s=chunk_s))


@pytest.fixture(scope="module")
def voice():
    """The spoken sentences, float32 [N]."""
    return sound_of(SPEECH)[1]


# ------------------------------------------------------------------------------------------------- time
def mux(picture, target, *, sound_at_s=0.0, picture_at_s=0.0, codec=("-c:a", "aac")):
    """A file whose tone (1 s of silence, 1 s of tone, 1 s of silence) begins at `sound_at_s`."""
    tone = "sine=frequency=440:sample_rate=48000:duration=3,volume='between(t,1,2)':eval=frame"
    video = ["-itsoffset", picture_at_s, "-i", picture]
    audio = ["-itsoffset", sound_at_s, "-f", "lavfi", "-i", tone]
    ffmpeg(*video, *audio, "-map", "0:v", "-map", "1:a", "-c:v", "copy", *codec, target)
    return target


@pytest.mark.parametrize("name", ["late.mp4", "late.mkv", "late.ts"])
def test_sound_that_starts_later_than_the_picture_stays_late(picture, tmp_path, name):
    path = mux(picture, tmp_path / name, sound_at_s=3.0)
    offset_s, samples, errors = sound_of(path)
    assert offset_s == pytest.approx(3.0, abs=0.07)
    assert loud_s(samples, offset_s) == pytest.approx((4.0, 5.0), abs=0.06)
    assert errors == 0


@pytest.mark.parametrize("name", ["early.mp4", "early.mkv"])
def test_sound_that_starts_before_the_picture_has_negative_times(picture, tmp_path, name):
    path = mux(picture, tmp_path / name, picture_at_s=1.5)
    offset_s, samples, _ = sound_of(path)
    assert offset_s == pytest.approx(-1.5, abs=0.07)
    assert loud_s(samples, offset_s) == pytest.approx((-0.5, 0.5), abs=0.06)


def test_holes_in_a_track_become_silence(picture, tmp_path):
    tone = "sine=frequency=440:sample_rate=16000:duration=6,aselect='not(between(t,2,4))'"
    path = tmp_path / "hole.mkv"
    ffmpeg("-i", picture, "-f", "lavfi", "-i", tone, "-c:v", "copy", "-c:a", "pcm_s16le", path)
    _, samples, _ = sound_of(path)
    assert len(samples) == pytest.approx(6 * SAMPLE_RATE_HZ, rel=0.01)
    level = np.abs(samples[: len(samples) // 1600 * 1600]).reshape(-1, 1600).max(1)  # of tenths of a second
    assert level[3:19].min() > 0.05
    assert level[22:39].max() == 0
    assert level[42:58].min() > 0.05


def test_sound_that_comes_twice_is_heard_once(tmp_path):
    for name, start_s in (("a.ts", 0), ("b.ts", 2.5)):
        tone = ["-f", "lavfi", "-i", "sine=frequency=440:sample_rate=48000:duration=3", "-c:a", "mp2"]
        ffmpeg(*tone, "-output_ts_offset", start_s, tmp_path / name)
    joined = tmp_path / "joined.ts"
    joined.write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    _, samples, _ = sound_of(joined)
    assert len(samples) == pytest.approx(5.5 * SAMPLE_RATE_HZ, abs=0.1 * SAMPLE_RATE_HZ)


@pytest.mark.parametrize("args", [["-ar", 8000, "-ac", 1], ["-ar", 96000, "-ac", 2], ["-ar", 48000, "-ac", 6]])
def test_any_rate_and_number_of_channels_becomes_16_khz_mono(tmp_path, args):
    path = tmp_path / "tone.wav"
    ffmpeg("-f", "lavfi", "-i", "sine=frequency=1000:sample_rate=48000:duration=2", *args, path)
    _, samples, _ = sound_of(path)
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(2 * SAMPLE_RATE_HZ, abs=200)
    spectrum = np.abs(np.fft.rfft(samples[8000:24000]))
    assert int(spectrum.argmax()) == 1000


def test_blocks_are_bounded_and_join_without_a_seam(tmp_path):
    ffmpeg("-f", "lavfi", "-i", "sine=frequency=440:sample_rate=44100:duration=10", tmp_path / "tone.mp3")
    examined = examine(str(tmp_path / "tone.mp3"))
    blocks = list(AudioReader(examined.path, examined.index.audio).blocks(3.0))
    assert [len(block) for block in blocks[:3]] == [48_000] * 3
    assert np.array_equal(np.concatenate(blocks), sound_of(tmp_path / "tone.mp3")[1])


def test_the_default_track_is_taken(picture, tmp_path):
    path = tmp_path / "two.mkv"
    silence, tone = "anullsrc=r=16000:cl=mono:d=3", "sine=frequency=440:sample_rate=16000:duration=3"
    inputs = ["-i", picture, "-f", "lavfi", "-i", silence, "-f", "lavfi", "-i", tone]
    marks = ["-disposition:a:0", 0, "-disposition:a:1", "default", "-metadata:s:a:1", "language=fra"]
    ffmpeg(*inputs, "-map", "0", "-map", "1", "-map", "2", "-c:v", "copy", "-c:a", "pcm_s16le", *marks, path)
    info = examine(str(path)).info
    assert [(t["kind"], t["selected"], t["language"]) for t in info.tracks][1:] == [
        ("audio", False, None),
        ("audio", True, "fra"),
    ]
    assert np.abs(sound_of(path)[1]).max() > 0.05


def test_damaged_sound_is_counted_and_the_rest_keeps_its_time(tmp_path):
    clean = tmp_path / "clean.ts"
    tone = "sine=frequency=440:sample_rate=48000:duration=10,volume='between(t,7,8)':eval=frame"
    ffmpeg("-f", "lavfi", "-i", tone, "-c:a", "aac", clean)
    data = bytearray(clean.read_bytes())
    low, high = len(data) * 30 // 100, len(data) * 40 // 100
    data[low:high] = np.random.default_rng(3).integers(0, 256, high - low, np.uint8).tobytes()
    (tmp_path / "damaged.ts").write_bytes(bytes(data))
    _, samples, _ = sound_of(tmp_path / "damaged.ts")
    late = samples.copy()
    late[: 6 * SAMPLE_RATE_HZ] = 0
    assert loud_s(late, 0.0) == pytest.approx((7.0, 8.0), abs=0.1)


def test_a_track_of_which_nothing_decodes_says_so(tmp_path):
    ffmpeg("-f", "lavfi", "-i", "sine=duration=1", "-c:a", "aac", tmp_path / "tone.mp4")
    examined = examine(str(tmp_path / "tone.mp4"))
    nothing = AudioReader(examined.path, AudioTrack(examined.index.audio.stream_index, Fraction(1, 48000)))
    nothing._frames = lambda: iter(())
    with pytest.raises(InputError) as caught:
        list(nothing.blocks())
    assert caught.value.error_type == "no_samples"


def test_sound_of_more_channels_than_can_be_mixed_says_so(tmp_path):
    path = tmp_path / "many.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(46)
        file.setsampwidth(2)
        file.setframerate(22050)
        file.writeframes(bytes(46 * 2 * 4096))
    *_, done = decode_events(DecodeRequest(path=str(path), speech=SpeechConfig()))
    assert done.audio_error[0] == "no_samples"
    assert done.num_errors_audio >= 1


def test_a_film_whose_sound_fails_still_gives_its_clips(picture, tmp_path):
    path = mux(picture, tmp_path / "good.mov", codec=("-c:a", "pcm_s16le"))
    (tmp_path / "bad.mov").write_bytes(Path(path).read_bytes().replace(b"sowt", b"zzzz"))
    _, *clips, done = decode_events(DecodeRequest(path=str(tmp_path / "bad.mov"), speech=SpeechConfig()))
    assert [type(clip) for clip in clips] == [ClipFrames]
    assert done.audio_error is not None
    assert done.audio_error[0] == "unsupported_codec"
    assert done.damaged


# ------------------------------------------------------------------------------------------------- speech
@pytest.mark.parametrize("block_s", [120.0, 4.0, 2.5, 0.7])
def test_speech_is_found_where_it_is_however_the_sound_is_cut_up(voice, block_s):
    chunks = speech_of(voice, block_s=block_s, chunk_s=5.0)
    assert [(c.start_s, c.end_s) for c in chunks] == [
        pytest.approx((start_s, end_s), abs=NEAR_S) for start_s, end_s, _ in SPEECH_TRUTH
    ]


def test_near_sentences_share_a_chunk_and_far_ones_do_not(voice):
    assert len(speech_of(voice)) == 1
    pause = np.zeros(5 * SAMPLE_RATE_HZ, np.float32)
    assert len(speech_of(np.concatenate([voice, pause, voice]))) == 2


@pytest.mark.parametrize("chunk_s", [2.0, 7.0])
def test_long_speech_is_cut_without_losing_any(voice, chunk_s):
    said = voice[round(0.6 * SAMPLE_RATE_HZ) : round(4.8 * SAMPLE_RATE_HZ)]
    endless = np.concatenate([said] * 12)
    chunks = speech_of(endless, block_s=20.0, chunk_s=chunk_s)
    assert max(c.end_s - c.start_s for c in chunks) <= chunk_s
    gaps_s = [after.start_s - before.end_s for before, after in pairwise(chunks)]
    assert all(-1e-6 < gap_s < 1.0 for gap_s in gaps_s)
    assert sum(c.end_s - c.start_s for c in chunks) > 0.95 * len(endless) / SAMPLE_RATE_HZ


def test_chunks_carry_the_sound_of_their_time(voice):
    (chunk,) = speech_of(voice, offset_s=100.0)
    start = round((chunk.start_s - 100.0) * SAMPLE_RATE_HZ)
    expected = np.rint(voice[start : start + len(chunk.pcm_int16)] * 32767)
    assert chunk.pcm_int16.dtype == np.int16
    assert np.abs(chunk.pcm_int16 - expected).max() <= 1
    assert chunk.end_s - chunk.start_s == pytest.approx(len(chunk.pcm_int16) / SAMPLE_RATE_HZ)


def test_neither_silence_nor_noise_is_speech():
    silence = np.zeros(30 * SAMPLE_RATE_HZ, np.float32)
    noise = np.random.default_rng(0).normal(0, 3e-3, 30 * SAMPLE_RATE_HZ).astype(np.float32)
    assert speech_of(silence) == []
    assert speech_of(noise) == []


def test_a_words_time_survives_minutes_of_noise_before_it(voice):
    noise = np.random.default_rng(0).normal(0, 3e-3, 240 * SAMPLE_RATE_HZ).astype(np.float32)
    chunks = speech_of(np.concatenate([noise, voice]), block_s=50.0)
    assert len(chunks) == 1
    assert chunks[0].start_s == pytest.approx(240 + SPEECH_TRUTH[0][0], abs=NEAR_S)


@pytest.mark.parametrize(("sound_at_s", "picture_at_s"), [(3.0, 0.0), (0.0, 2.0)])
def test_speech_of_a_film_is_on_the_pictures_axis(picture, tmp_path, sound_at_s, picture_at_s):
    path = tmp_path / "film.mkv"
    video, audio = ["-itsoffset", picture_at_s, "-i", picture], ["-itsoffset", sound_at_s, "-i", SPEECH]
    ffmpeg(*video, *audio, "-map", "0:v", "-map", "1:a", "-c", "copy", path)
    opened, *events, done = decode_events(DecodeRequest(path=str(path), speech=SpeechConfig(chunk_s=5.0)))
    shift_s = sound_at_s - picture_at_s
    chunks = [event for event in events if isinstance(event, SpeechChunk)]
    assert [(c.start_s, c.end_s) for c in chunks] == [
        pytest.approx((start_s + shift_s, end_s + shift_s), abs=NEAR_S) for start_s, end_s, _ in SPEECH_TRUTH
    ]
    assert events.index(chunks[0]) == len(opened.windows)  # after every clip
    assert not done.damaged

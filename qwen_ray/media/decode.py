"""One file, decoded: the generator that both the decoding process and whoever decodes in-process runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np

from qwen_ray.config import DecodeConfig, SpeechConfig
from qwen_ray.errors import ConfigError, InputError, RowError
from qwen_ray.media.audio import AudioReader
from qwen_ray.media.decoders import Name, choose, open_reader
from qwen_ray.media.events import ClipFailed, ClipFrames, DecodeRequest, Done, Event, Opened, SpeechChunk
from qwen_ray.media.info import VideoInfo
from qwen_ray.media.motion import movement
from qwen_ray.media.probe import Examined, check_usable, examine
from qwen_ray.media.sampling import CANDIDATES, at_rate, by_motion, frame_size, key_frames, sample
from qwen_ray.media.shots import cut_times_s
from qwen_ray.media.speech import speech_chunks
from qwen_ray.media.video import Taken
from qwen_ray.media.windows import fixed_windows, shot_windows

Window = tuple[float, float]


def decode_clip(path: str, start_s: float, end_s: float, config: DecodeConfig) -> ClipFrames:
    """The frames of one clip, just as a run takes them.

    Raises:
        ConfigError: The clip is empty or lies outside the picture's time.
        InputError: The file is of no use, has no picture, or no frame of the clip can be decoded.
    """
    for event in decode_events(DecodeRequest(path=path, decode=config, windows=((start_s, end_s),))):
        match event:
            case Opened():
                _check_clip(event.info, start_s, end_s)
            case ClipFrames():
                return event
            case ClipFailed():
                raise InputError(event.error_type, event.message)
    raise AssertionError("a picture was there, and neither frames nor a failure came")


def _check_clip(info: VideoInfo, start_s: float, end_s: float) -> None:
    if not info.has_video:
        raise InputError("no_frames", "there is no picture in this file, only sound")
    if not 0 <= start_s < end_s or start_s >= info.video_duration_s:
        raise ConfigError(
            f"clip {start_s:g} to {end_s:g} s: start must lie before end, and within the picture's "
            f"0 to {info.video_duration_s:g} s"
        )


def decode_events(request: DecodeRequest, beat: Callable[[], None] = lambda: None) -> Iterator[Event]:
    """Decode one file: `Opened`, then its clips in order, then its speech in order, then `Done`.

    The same file and request give the same events. At most one clip and one block of sound are held in memory.

    Args:
        request: What is wanted.
        beat: Called often while work goes on.

    Raises:
        InputError: The file as a whole is of no use: `empty_file`, `unreadable`, `no_streams`, `unsupported_codec`.
        TransientError: `not_found` or `storage`.
    """
    decoder, examined = choose(request.decode, examine(request.path, beat))
    check_usable(examined)
    windows = _windows(request, examined, beat) if request.want_frames else []
    yield Opened(examined.info, windows, decoder)
    video_errors, damaged_frames = yield from _clips(request, decoder, examined, windows, beat)
    audio_errors, audio_error = yield from _speech(request, examined, beat)
    errors = video_errors + audio_errors + examined.index.num_errors
    damaged = bool(errors or damaged_frames or audio_error or examined.index.cut)
    yield Done(video_errors + examined.index.num_errors, audio_errors, audio_error, damaged)


def _windows(request: DecodeRequest, examined: Examined, beat: Callable[[], None]) -> list[Window]:
    """The clips of a file: shots, or windows over the time of its picture, none shorter than a frame."""
    info, decode = examined.info, request.decode
    if not info.has_video:
        return []
    if request.windows:
        return list(request.windows)
    if decode.windows == "shots" and _no_picture(examined) is None:
        cuts_s, shortest_s = cut_times_s(examined, beat), decode.min_window_s
        return shot_windows(
            examined.frame_times_s, cuts_s, info.video_duration_s, longest_s=decode.window_s, shortest_s=shortest_s
        )
    last_s = info.video_duration_s - examined.frame_times_s[-1]
    sliver_s = min(last_s, 1 / info.avg_fps) if info.avg_fps > 0 else 0.0
    return fixed_windows(examined.frame_times_s, info.video_duration_s, decode.window_s, sliver_s=sliver_s)


def _clips(
    request: DecodeRequest, decoder: Name, examined: Examined, windows: list[Window], beat: Callable[[], None]
) -> Generator[Event, None, tuple[int, int]]:
    """Yield the clips; returns how many errors there were, and how many frames were damaged or lost."""
    todo = [index for index in range(len(windows)) if index not in request.skip_clips]
    if not todo:
        return 0, 0
    refused = _no_picture(examined)
    if refused is not None:
        for index in todo:
            yield ClipFailed(index, *windows[index], *refused)
        return 0, len(todo)
    keys = examined.index.video.key_ranks() if examined.index.video is not None else []
    plan = [_wanted(request.decode, examined.frame_times_s, keys, windows[index]) for index in todo]
    height, width = _target_size(request, examined)
    reader, damaged = open_reader(decoder, examined, plan, height=height, width=width, beat=beat), 0
    try:
        for nth, index in enumerate(todo):
            taken = reader.take(nth)
            damaged += taken.num_repaired + len(plan[nth]) - len(taken.ranks)
            num_requested = len(plan[nth])
            if request.decode.sampling == "motion" and taken.ranks:
                taken = taken.only(by_motion(movement(taken.pictures_HWC), request.decode.num_frames))
                num_requested = min(num_requested, request.decode.num_frames)
            yield _clip(request.decode, decoder, index, windows[index], taken, num_requested, examined.frame_times_s)
        return reader.num_errors, damaged
    finally:
        reader.close()


def _wanted(decode: DecodeConfig, times_s: list[float], keys: list[int], window: Window) -> list[int]:
    """Which frames of a clip to decode, by rank of display; with `motion`, those to choose from."""
    match decode.sampling:
        case "uniform":
            return sample(times_s, *window, decode.num_frames)
        case "fps":
            return at_rate(times_s, *window, decode.fps, decode.num_frames)
        case "keyframes":
            return key_frames(times_s, keys, *window, decode.num_frames)
        case "motion":
            return sample(times_s, *window, CANDIDATES * decode.num_frames)


def _no_picture(examined: Examined) -> tuple[str, str] | None:
    """Why no frame at all can be had, as (error_type, message), where that is known beforehand."""
    video = examined.index.video
    assert video is not None
    name = Path(examined.path).name
    if video.first is None and not examined.info.codec:
        return "unsupported_codec", f"{name}: there is no decoder for its picture"
    if video.first is None:
        return "no_frames", f"{name}: not one frame of its picture could be decoded"
    return None


def _target_size(request: DecodeRequest, examined: Examined) -> tuple[int, int]:
    info, decode = examined.info, request.decode
    return frame_size(
        info.height,
        info.width,
        info.pixel_aspect,
        multiple=decode.size_multiple,
        min_pixels=decode.min_pixels,
        max_pixels=decode.max_pixels,
    )


def _clip(
    decode: DecodeConfig,
    decoder: Name,
    index: int,
    window: Window,
    taken: Taken,
    num_requested: int,
    frame_times_s: list[float],
) -> ClipFrames | ClipFailed:
    where = f"{window[0]:.1f}-{window[1]:.1f} s"
    if not taken.ranks:
        message = f"none of the {num_requested} wanted frames of {where} could be decoded"
        return ClipFailed(index, *window, "no_frames", message)
    if taken.num_repaired > decode.max_repaired * len(taken.ranks):
        found = f"{taken.num_repaired} of {len(taken.ranks)} frames of {where} were built on damaged data"
        return ClipFailed(
            index, *window, "damaged", f"{found}; decode.max_repaired={decode.max_repaired:g} allows less"
        )
    odd = len(taken.ranks) % 2
    pictures = taken.pictures_HWC + taken.pictures_HWC[-1:] * odd
    times = [frame_times_s[rank] for rank in taken.ranks]
    return ClipFrames(
        index=index,
        start_s=window[0],
        end_s=window[1],
        frames_THWC=np.stack(pictures),
        frame_times_s=times + times[-1:] * odd,
        num_requested=num_requested,
        num_decoded=len(taken.ranks),
        num_repaired=taken.num_repaired,
        padded=bool(odd),
        decoder=decoder,
    )


def _speech(
    request: DecodeRequest, examined: Examined, beat: Callable[[], None]
) -> Generator[Event, None, tuple[int, tuple[str, str] | None]]:
    """Yield the speech; returns how many errors there were and what ended it early, if anything did."""
    track = examined.index.audio
    if track is None or request.speech is None:
        return 0, None
    reader = AudioReader(examined.path, track, beat)
    try:
        yield from _chunks(request.speech, reader, examined.info.audio_offset_s or 0.0)
    except RowError as error:
        return reader.num_errors, (error.error_type, error.message)
    return reader.num_errors, reader.cut_short


def _chunks(speech: SpeechConfig, reader: AudioReader, offset_s: float) -> Iterator[SpeechChunk]:
    return speech_chunks(
        reader.blocks(),
        offset_s,
        vad_threshold=speech.vad_threshold,
        min_silence_s=speech.min_silence_s,
        chunk_s=speech.chunk_s,
    )

"""Facts of a file: `probe(path)` for people, `examine(path)` for the decoder, which needs the frame index as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qwen_ray.errors import InputError
from qwen_ray.media.container import is_cover, open_input
from qwen_ray.media.index import AudioTrack, FirstPicture, Index, VideoTrack, build
from qwen_ray.media.info import VideoInfo
from qwen_ray.media.pictures import Turn

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream

__all__ = ["Examined", "VideoInfo", "examine", "probe"]

MATRICES = {0: "rgb", 1: "bt709", 4: "fcc", 5: "bt470bg", 6: "smpte170m", 7: "smpte240m", 9: "bt2020nc", 10: "bt2020c"}
RANGES = {1: "limited", 2: "full"}
TRANSFERS = {1: "bt709", 6: "smpte170m", 8: "linear", 13: "srgb", 14: "bt2020", 15: "bt2020", 16: "pq", 18: "hlg"}
"""FFmpeg's numbers for what a stream says of its colours; others are reported as None."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A file that was read through once."""

    path: str
    info: VideoInfo
    index: Index
    frame_times_s: list[float]
    """When each displayed frame appears, on the axis."""


def probe(path: str) -> VideoInfo:
    """Facts of the file at `path`.

    Raises:
        InputError: `empty_file`, `unreadable`, `no_streams`, or `unsupported_codec` where no track can be decoded.
        TransientError: `not_found` or `storage`.
    """
    examined = examine(path)
    check_usable(examined)
    return examined.info


def examine(path: str, beat: Callable[[], None] = lambda: None) -> Examined:
    """Open the file, read every packet of its selected tracks, close it. Raises as `probe` does."""
    with open_input(path) as container:
        index = build(container, beat)
        if index.video is None and index.audio is None:
            raise InputError("no_streams", f"{Path(path).name}: has neither a picture nor a sound track")
        if index.video is not None and not index.video.pts:
            index.video = None
        if index.audio is not None and not index.audio.num_packets:
            index.audio = None
        if index.video is None and index.audio is None:
            raise InputError("no_streams", f"{Path(path).name}: its tracks hold no data")
        zero_s = _zero_s(index)
        video = index.video
        return Examined(path, _info(container, index, zero_s), index, _times_s(video) if video is not None else [])


def check_usable(examined: Examined) -> None:
    """Raise InputError, `unsupported_codec`, where there is no decoder for any of the selected tracks."""
    selected = [track for track in examined.info.tracks if track["selected"]]
    seen = examined.index.video is not None and examined.index.video.first is not None
    if not seen and not any(track["codec"] for track in selected):
        raise InputError("unsupported_codec", f"{Path(examined.path).name}: there is no decoder for its tracks")


def _times_s(video: VideoTrack) -> list[float]:
    """Times from the first frame on; in whole numbers, since fractions would take seconds on a long film."""
    numerator, denominator = video.tick_s.numerator, video.tick_s.denominator
    return [(pts - video.pts[0]) * numerator / denominator for pts in video.pts]


def _zero_s(index: Index) -> Fraction:
    if index.video is not None:
        return index.video.pts[0] * index.video.tick_s
    assert index.audio is not None
    return (index.audio.first or 0) * index.audio.tick_s


def _info(container: InputContainer, index: Index, zero_s: Fraction) -> VideoInfo:
    video, audio = index.video, index.audio
    selected = {track.stream_index for track in (video, audio) if track is not None}
    video_end = float(video.end * video.tick_s - zero_s) if video is not None else 0.0
    audio_end = float(audio.end * audio.tick_s - zero_s) if audio is not None else 0.0
    return VideoInfo(
        container=container.format.name,
        duration_s=max(video_end, audio_end, 0.0),
        video_duration_s=video_end,
        **_picture(container, video, video_end),
        has_video=video is not None,
        has_audio=audio is not None,
        audio_offset_s=_offset_s(audio, zero_s),
        start_offset_s=float(zero_s),
        tracks=[_track(stream, stream.index in selected) for stream in container.streams],
    )


def _offset_s(audio: AudioTrack | None, zero_s: Fraction) -> float | None:
    if audio is None or audio.first is None:
        return None
    return float(audio.first * audio.tick_s - zero_s)


def _picture(container: InputContainer, video: VideoTrack | None, end_s: float) -> dict[str, Any]:
    """The fields of VideoInfo that describe the picture."""
    if video is None:
        return {
            "width": 0, "height": 0, "rotation_deg": 0, "flipped": False, "sar": "1:1", "codec": "", "avg_fps": 0.0,
            "num_frames": 0,
        }  # fmt: skip
    stream = cast("VideoStream", container.streams[video.stream_index])
    first = video.first or FirstPicture(None, *_coded_size(stream), Turn())
    height, width = first.turn.size(first.height, first.width)
    sar = first.turn.aspect(_stored_aspect(stream))
    return {
        "width": width,
        "height": height,
        "rotation_deg": first.turn.quarters * 90,
        "flipped": first.turn.flip,
        "sar": f"{sar.numerator}:{sar.denominator}",
        "codec": _codec(cast("Stream", stream)),
        "avg_fps": len(video.pts) / end_s if end_s > 0 else float(stream.average_rate or 0),
        "num_frames": len(video.pts),
    }


def _coded_size(stream: VideoStream) -> tuple[int, int]:
    context = stream.codec_context
    return (context.height, context.width) if context is not None else (0, 0)


def _stored_aspect(stream: VideoStream) -> Fraction:
    """Pixel aspect as stored; 1 where it is absent or absurd (a damaged header)."""
    if stream.codec_context is None:
        return Fraction(1)
    sar = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
    return Fraction(sar) if sar and Fraction(1, 8) <= sar <= 8 else Fraction(1)


def _codec(stream: Stream) -> str:
    return stream.codec_context.codec.canonical_name if stream.codec_context is not None else ""


def _track(stream: Stream, selected: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "index": stream.index,
        "kind": stream.type,
        "codec": _codec(stream),
        "language": stream.language,
        "selected": selected,
    }
    if stream.codec_context is None:
        return facts
    if stream.type == "video":
        facts |= _video_facts(cast("VideoStream", stream))
    elif stream.type == "audio":
        audio = cast("AudioStream", stream).codec_context
        facts |= {"sample_rate_hz": audio.sample_rate, "channels": audio.channels}
    return facts


def _video_facts(stream: VideoStream) -> dict[str, Any]:
    context = stream.codec_context
    return {
        "width": context.width,
        "height": context.height,
        "pix_fmt": context.pix_fmt,
        "color_matrix": MATRICES.get(context.colorspace),
        "color_range": RANGES.get(context.color_range),
        "color_transfer": TRANSFERS.get(context.color_trc),
        "cover": is_cover(cast("Stream", stream)),
    }

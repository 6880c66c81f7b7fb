"""The conformance suite: files of every kind that users have, each with its recipe and with what is true of it.

    python -m jobs.conformance.assets FOLDER

The truth follows from the recipe and is burnt into pictures and sound (`burn`); no decoder was asked for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from rich.progress import track

from jobs.conformance import edits
from jobs.conformance.recipe import Edit, Kitchen, Recipe, Render, copy, run

FPS, FRAMES = 30, 240


@dataclass(frozen=True, slots=True)
class Sound:
    """The beeps: of second k at `starts_s` + k + 0.5 on the video's axis."""

    starts_s: float = 0.0
    seconds: int = 8
    slack_s: float = 0.03
    """Lossy codecs smear an onset; MP3 in AVI is late by its encoder's delay, which AVI cannot state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file.

    Attributes:
        recipe: makes it.
        what: in words.
        numbers: of the frames that a player shows, in order; of a damaged file, those of the undamaged one.
        times_s: when each is shown, from the first one on.
        slack_s: by how much the container's own clock may differ from `times_s`.
        size: (width, height) of the upright picture, pixel aspect not applied.
        codec: of the picture.
        status: of the `videos` row.
        error_type: likewise.
        start_offset_s: the axis' zero on the file's own clock; None where the muxer chooses.
        sound: None without a sound track.
        levels: grey levels instead of strips.
        joints: where files were put end to end; the last frame before one counts as repaired, since a break in the
            packets' numbering cannot be told from a loss.
        at_least_right: of a damaged file, how many of its frames come out whole.
    """

    recipe: Recipe
    what: str
    numbers: tuple[int, ...] = tuple(range(FRAMES))
    times_s: tuple[Fraction, ...] = ()
    slack_s: float = 0.002
    size: tuple[int, int] = (320, 240)
    sar: str = "1:1"
    rotation_deg: int = 0
    flipped: bool = False
    codec: str = "h264"
    status: str = "ok"
    error_type: str | None = None
    start_offset_s: float | None = 0.0
    sound: Sound | None = None
    levels: bool = False
    joints: int = 0
    at_least_right: int = 0

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the file and it has a picture."""
        return self.status == "ok" and bool(self.numbers)

    @property
    def damaged(self) -> bool:
        """Whether it has pictures, and not all of them are whole."""
        return self.status != "ok" and bool(self.numbers)

    def shown_s(self) -> list[float]:
        """When each frame is shown."""
        return [float(t) for t in self.times_s] or [k / FPS for k in range(len(self.numbers))]


def spaced(count: int, fps: str | Fraction) -> tuple[Fraction, ...]:
    """Times of `count` frames at an even rate."""
    return tuple(k / Fraction(fps) for k in range(count))


def x264(gop: int = 60, *more: str, pix_fmt: str = "yuv420p") -> tuple[str, ...]:
    """Options of a quick H.264 encode."""
    return ("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", pix_fmt, "-g", str(gop), *more)


def x265(params: str = "", pix_fmt: str = "yuv420p") -> tuple[str, ...]:
    """Options of a quick HEVC encode."""
    log = f"log-level=error:keyint=60{params}"
    return ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", log, "-tag:v", "hvc1", "-pix_fmt", pix_fmt)


def vpx(codec: str, *more: str, pix_fmt: str = "yuv420p") -> tuple[str, ...]:
    """Options of a quick VP8 or VP9 encode."""
    return (
        "-c:v",
        codec,
        "-pix_fmt",
        pix_fmt,
        "-b:v",
        "600k",
        "-deadline",
        "realtime",
        "-cpu-used",
        "8",
        "-g",
        "60",
        *more,
    )


AAC = ("-c:a", "aac", "-ac", "2")
BEEPS = Sound()
B_FRAMES = x264(60, "-bf", "2")
MPEG4 = ("-c:v", "mpeg4", "-q:v", "4", "-pix_fmt", "yuv420p", "-g", "60")
MPEG2 = ("-c:v", "mpeg2video", "-q:v", "4", "-pix_fmt", "yuv420p", "-g", "15", "-bf", "2")
AV1 = ("-c:v", "libsvtav1", "-preset", "10", "-crf", "24", "-g", "60", "-pix_fmt", "yuv420p")
NO_DELAY = ("-muxdelay", 0, "-muxpreload", 0)

PARTS: dict[str, Recipe] = {
    "base.mp4": Render(video=B_FRAMES, audio=AAC),
    "silent.mp4": copy("base.mp4", "-an"),
    "fast.mp4": copy("silent.mp4", "-movflags", "+faststart"),
    "silent.ts": copy("silent.mp4"),
    "silent.mkv": copy("silent.mp4"),
    "small.mp4": Render(video=x264(), size=(160, 120), first=1000),
    "cover.png": Render(video=("-frames:v", "1", "-update", "1"), num_frames=1, size=(64, 64), first=5000),
    "one.ts": Render(video=x264(30), num_frames=120),
    "two.ts": Render(
        video=x264(30), num_frames=120, first=120, times_s=tuple((120 + k) / Fraction(30) for k in range(120))
    ),
    "two_large.ts": Render(
        video=x264(30),
        num_frames=120,
        first=120,
        size=(480, 360),
        times_s=tuple((120 + k) / Fraction(30) for k in range(120)),
    ),
    "two_later.ts": copy("two.ts", "-output_ts_offset", 1000),
    "mpeg4_mp3.avi": Render(video=MPEG4, audio=("-c:a", "libmp3lame", "-ac", "2")),
    **{
        f"turned{degrees}.mp4": Render(video=B_FRAMES, audio=AAC, filters=undo)
        for degrees, undo in ((90, "transpose=2"), (180, "hflip,vflip"), (270, "transpose=1"))
    },
    **{
        f"stored_{name}.mp4": Render(video=B_FRAMES, filters=undo)
        for name, undo in (("mirror", "hflip"), ("upside", "vflip"), ("across", "transpose=cclock_flip"))
    },
    "words.srt": Edit(lambda: b"1\n00:00:01,000 --> 00:00:02,000\nHello\n"),
}
"""What others are made from."""


def _timing() -> dict[str, Asset]:
    triplets = tuple(Fraction(6 * (k // 3) + k % 3, 30) for k in range(FRAMES))
    pause = tuple(Fraction(k + (300 if k >= 100 else 0), 30) for k in range(200))
    slower = (*range(0, 60, 2), *range(60, FRAMES, 3))
    jitter = tuple(Fraction(33 * k + 7 * k % 13, 1000) for k in range(FRAMES))
    slides = tuple(accumulate((Fraction(2**k) for k in range(6)), initial=Fraction(0)))
    return {
        "h264_base.mp4": Asset(what="H.264, 2 B-frames, closed GOP of 60, AAC", recipe=copy("base.mp4"), sound=BEEPS),
        "video_only.mp4": Asset(what="no sound track", recipe=copy("silent.mp4")),
        "opengop.mp4": Asset(
            what="open GOP of 30, 3 B-frames in a pyramid",
            recipe=Render(
                video=x264(30, "-bf", "3", "-x264-params", "open-gop=1:keyint=30:min-keyint=30:b-pyramid=normal")
            ),
        ),
        "longgop.mp4": Asset(
            what="one key frame for 30 s",
            recipe=Render(num_frames=900, video=x264(100000, "-bf", "3")),
            numbers=tuple(range(900)),
        ),
        "fps29_97.mp4": Asset(
            what="30000/1001 fps",
            recipe=Render(fps="30000/1001", video=x264()),
            times_s=spaced(FRAMES, "30000/1001"),
        ),
        "fps0_1.mp4": Asset(
            what="one frame every 10 s",
            recipe=Render(num_frames=7, fps="1/10", video=x264()),
            numbers=tuple(range(7)),
            times_s=spaced(7, "1/10"),
        ),
        "fps240.mp4": Asset(what="240 fps", recipe=Render(fps="240", video=B_FRAMES), times_s=spaced(FRAMES, "240")),
        "vfr.mp4": Asset(
            what="variable rate: gaps of 1, 1, 4 thirtieths by turns",
            recipe=Render(
                video=(*x264(), "-fps_mode", "vfr"),
                filters="setpts='(6*floor(N/3)+mod(N\\,3))/30/TB'",
                times_s=triplets,
            ),
            times_s=triplets,
        ),
        "vfr_gap.mkv": Asset(
            what="variable rate: 10 s without a frame in the middle",
            recipe=Render(
                num_frames=200,
                video=(*x264(), "-fps_mode", "vfr"),
                filters="setpts='(N+if(gte(N\\,100)\\,300\\,0))/30/TB'",
                times_s=pause,
            ),
            numbers=tuple(range(200)),
            times_s=pause,
        ),
        "vfr_slower.mp4": Asset(
            what="variable rate: 15 fps, then 10",
            recipe=run(
                *("-i", "@silent.mp4", "-vf", "select='if(lt(n,60),not(mod(n,2)),not(mod(n,3)))'", "-fps_mode", "vfr"),
                *x264(),
            ),
            numbers=slower,
            times_s=tuple(Fraction(n, 30) for n in slower),
        ),
        "vfr_jitter.mkv": Asset(
            what="variable rate: no two gaps alike, as a phone records",
            recipe=Render(
                video=(*B_FRAMES, "-fps_mode", "passthrough", "-enc_time_base", "1/1000"),
                filters="settb=1/1000,setpts='33*N+mod(7*N\\,13)'",
                times_s=jitter,
            ),
            times_s=jitter,
        ),
        "slides.mp4": Asset(
            what="variable rate: slides of 1, 2, 4, 8, 16 and 32 s",
            recipe=Render(
                num_frames=7,
                video=(*x264(), "-fps_mode", "vfr"),
                filters="setpts='(pow(2\\,N)-1)/TB'",
                times_s=slides,
            ),
            numbers=tuple(range(7)),
            times_s=slides,
        ),
        "hours.mp4": Asset(
            what="two hours at 1 fps",
            recipe=Render(num_frames=7200, fps="1", size=(160, 120), video=x264(250, "-preset", "ultrafast")),
            numbers=tuple(range(7200)),
            times_s=spaced(7200, "1"),
            size=(160, 120),
        ),
        **{
            f"frames{count}.mp4": Asset(
                what=f"{count} frame{'s' * (count > 1)}",
                recipe=Render(num_frames=count, video=x264()),
                numbers=tuple(range(count)),
            )
            for count in (1, 2, 3)
        },
        "frames5.webm": Asset(
            what="5 frames of VP9",
            recipe=Render(num_frames=5, video=vpx("libvpx-vp9")),
            numbers=tuple(range(5)),
            codec="vp9",
        ),
    }


def _clocks() -> dict[str, Asset]:
    return {
        "editlist_trim.mp4": Asset(
            what="an edit list hides frames 60 to 104, which are in the file",
            recipe=run("-ss", 3.5, "-i", "@base.mp4", "-c", "copy"),
            numbers=tuple(range(105, FRAMES)),
            sound=Sound(-3.5),
        ),
        "editlist_delay.mp4": Asset(
            what="an empty edit: the picture starts 2 s after the sound",
            recipe=run(
                *("-i", "@base.mp4", "-itsoffset", 2, "-i", "@silent.mp4"),
                *("-map", "1:v", "-map", "0:a", "-c", "copy"),
            ),
            start_offset_s=2.0,
            sound=Sound(-2.0),
        ),
        "late_sound.mp4": Asset(
            what="the sound starts 2 s after the picture",
            recipe=run(
                "-i", "@silent.mp4", "-itsoffset", 2, "-i", "@base.mp4", "-map", "0:v", "-map", "1:a", "-c", "copy"
            ),
            sound=Sound(2.0),
        ),
        "late_sound.mkv": Asset(
            what="likewise in Matroska",
            recipe=run(
                "-i", "@silent.mp4", "-itsoffset", 2, "-i", "@base.mp4", "-map", "0:v", "-map", "1:a", "-c", "copy"
            ),
            sound=Sound(2.0),
        ),
        "late_picture.mkv": Asset(
            what="the picture starts 1.5 s after the sound",
            recipe=run(
                "-i", "@base.mp4", "-itsoffset", 1.5, "-i", "@silent.mp4", "-map", "1:v", "-map", "0:a", "-c", "copy"
            ),
            start_offset_s=None,
            sound=Sound(-1.5),
        ),
        "start_100.ts": Asset(
            what="clock starts at 100 s",
            recipe=copy("base.mp4", "-output_ts_offset", 100, *NO_DELAY),
            start_offset_s=100.0,
            sound=BEEPS,
        ),
        "start_5.mkv": Asset(
            what="clock starts at 5 s",
            recipe=copy("base.mp4", "-output_ts_offset", 5),
            start_offset_s=5.0,
            sound=BEEPS,
        ),
        "negative.mkv": Asset(
            what="clock starts 2 s before 0, which Matroska cannot store: the first frames have no times",
            recipe=copy("silent.mp4", "-output_ts_offset", -2, "-avoid_negative_ts", "disabled"),
            start_offset_s=None,
            slack_s=0.03,
        ),
        "negative.mp4": Asset(
            what="negative composition offsets, no edit list",
            recipe=copy("silent.mp4", "-movflags", "negative_cts_offsets", "-use_editlist", 0),
            start_offset_s=None,
        ),
        "wrap.ts": Asset(
            what="the 33-bit clock wraps after 3.7 s",
            recipe=copy("base.mp4", "-output_ts_offset", 95440, *NO_DELAY),
            start_offset_s=None,
            sound=BEEPS,
        ),
        "leap.ts": Asset(
            what="the clock leaps ahead by 1000 s in the middle",
            recipe=Edit(edits.join, ("one.ts", "two_later.ts")),
            start_offset_s=None,
            slack_s=0.05,
            joints=1,
        ),
        "restart.ts": Asset(
            what="the clock starts again in the middle",
            recipe=Edit(edits.join, ("one.ts", "two.ts")),
            start_offset_s=None,
            slack_s=0.05,
            joints=1,
        ),
        "size_change.ts": Asset(
            what="320x240, then 480x360; the clock starts again",
            recipe=Edit(edits.join, ("one.ts", "two_large.ts")),
            start_offset_s=None,
            slack_s=0.05,
            joints=1,
        ),
        "bare.h264": Asset(
            what="bare stream: no times at all",
            recipe=copy("silent.mp4"),
            slack_s=0.05,
            start_offset_s=None,
        ),
        "bare.hevc": Asset(
            what="bare stream: no times at all",
            recipe=Render(
                video=("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=error:keyint=60")
            ),
            slack_s=0.06,
            codec="hevc",
            start_offset_s=None,
        ),
        "mpeg4_b.avi": Asset(
            what="AVI has no display times; B-frames",
            recipe=Render(video=(*MPEG4, "-bf", "2")),
            slack_s=2 / FPS + 0.002,
            codec="mpeg4",
            start_offset_s=None,
        ),
        "h264_b.avi": Asset(
            what="likewise, H.264",
            recipe=Render(video=x264(60, "-bf", "3")),
            slack_s=3 / FPS + 0.002,
            start_offset_s=None,
        ),
    }


def _pictures() -> dict[str, Asset]:
    turned = {
        f"rot{degrees}.mp4": Asset(
            what=f"to be turned {degrees} degrees clockwise",
            recipe=Edit(edits.set_matrix, (f"turned{degrees}.mp4",), (matrix,)),
            rotation_deg=degrees,
            sound=BEEPS,
        )
        for degrees, matrix in edits.TURNS.items()
    }
    mirrored = {
        name: Asset(
            what=what,
            recipe=Edit(edits.set_matrix, (f"stored_{stored}.mp4",), (matrix,)),
            rotation_deg=rotation_deg,
            flipped=True,
        )
        for name, what, stored, matrix, rotation_deg in (
            ("flip_h.mp4", "to be mirrored left to right", "mirror", (-1, 0, 0, 1), 0),
            ("flip_v.mp4", "to be mirrored top to bottom", "upside", (1, 0, 0, -1), 180),
            ("transpose.mp4", "to be mirrored along its diagonal", "across", (0, 1, 1, 0), 270),
        )
    }
    odd, few = (405, 719), tuple(range(24))
    sizes = {
        "odd_vp9.webm": Asset(what="405x719", recipe=Render(size=odd, video=vpx("libvpx-vp9")), size=odd, codec="vp9"),
        "odd_mpeg4.mp4": Asset(what="405x719", recipe=Render(size=odd, video=MPEG4), size=odd, codec="mpeg4"),
        "odd_444.mp4": Asset(what="405x719, 4:4:4", recipe=Render(size=odd, video=x264(pix_fmt="yuv444p")), size=odd),
        **{
            name: Asset(
                what=f"{width}x{height}",
                recipe=Render(num_frames=24, size=(width, height), levels=True, video=video),
                numbers=few,
                size=(width, height),
                codec=codec,
                levels=True,
            )
            for name, width, height, video, codec in (
                ("tiny.mp4", 16, 16, x264(), "h264"),
                ("tiny.mkv", 2, 2, ("-c:v", "ffv1", "-pix_fmt", "yuv444p"), "ffv1"),
                ("wide.mp4", 4096, 16, x264(), "h264"),
                ("tall.mp4", 16, 4096, x264(), "h264"),
            )
        },
        "uhd8k.mp4": Asset(
            what="7680x4320",
            recipe=Render(num_frames=3, size=(7680, 4320), video=x264(1, "-preset", "ultrafast")),
            numbers=tuple(range(3)),
            size=(7680, 4320),
        ),
        "sar.mp4": Asset(
            what="anamorphic, pixels 16:11",
            recipe=Render(size=(352, 288), video=x264(), filters="setsar=16/11"),
            size=(352, 288),
            sar="16:11",
        ),
        "interlaced.mp4": Asset(
            what="coded as interlaced",
            recipe=Render(video=x264(60, "-flags", "+ilme+ildct", "-x264-params", "tff=1")),
        ),
        "fields.ts": Asset(
            what="true fields, MPEG-2: two moments in a frame",
            recipe=Render(fields=True, video=(*MPEG2, "-flags", "+ilme+ildct")),
            numbers=tuple(range(FRAMES - 1)),  # the last frame would have one field
            codec="mpeg2video",
            start_offset_s=None,
        ),
    }
    return turned | mirrored | sizes


def _codecs() -> dict[str, Asset]:
    def plain(what: str, codec: str, *video: str, **more: object) -> Asset:
        return Asset(what=what, recipe=Render(video=video), codec=codec, **more)  # type: ignore[arg-type]

    pq = x265(":colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc:hdr10=1", "yuv420p10le")
    hlg = x265(":colorprim=bt2020:transfer=arib-std-b67:colormatrix=bt2020nc", "yuv420p10le")
    few = tuple(range(60))
    return {
        "h264_10bit_422.mp4": plain("10 bit 4:2:2", "h264", *x264(pix_fmt="yuv422p10le")),
        "h264_grey.mp4": plain("grey", "h264", *x264(pix_fmt="gray")),
        "hevc.mp4": plain("HEVC", "hevc", *x265()),
        "hevc_pq.mp4": plain("HEVC 10 bit, BT.2020, PQ (HDR10)", "hevc", *pq, "-color_trc", "smpte2084"),
        "hevc_hlg.mp4": plain("HEVC 10 bit, BT.2020, HLG", "hevc", *hlg, "-color_trc", "arib-std-b67"),
        "vp8.webm": plain("VP8", "vp8", *vpx("libvpx"), slack_s=0.003),
        "vp8_hidden.webm": plain(
            "VP8 with frames that are never shown",
            "vp8",
            *(
                "-c:v",
                "libvpx",
                "-pix_fmt",
                "yuv420p",
                "-auto-alt-ref",
                "1",
                "-lag-in-frames",
                "16",
                "-b:v",
                "500k",
                "-cpu-used",
                "8",
            ),
        ),
        "vp8_alpha.webm": plain("VP8 with alpha", "vp8", *vpx("libvpx", "-auto-alt-ref", "0", pix_fmt="yuva420p")),
        "vp9.webm": Asset(
            what="VP9, Opus",
            recipe=Render(video=vpx("libvpx-vp9"), audio=("-c:a", "libopus", "-ac", "2")),
            codec="vp9",
            start_offset_s=None,
            sound=BEEPS,
        ),
        "vp9_alpha.webm": plain("VP9 with alpha", "vp9", *vpx("libvpx-vp9", "-auto-alt-ref", "0", pix_fmt="yuva420p")),
        "vp9_10bit.mkv": plain(
            "VP9 profile 2, 10 bit", "vp9", *vpx("libvpx-vp9", "-profile:v", "2", pix_fmt="yuv420p10le")
        ),
        "av1.mp4": plain("AV1", "av1", *AV1),
        "av1.mkv": plain("AV1 in Matroska", "av1", *AV1),
        "mpeg1.mpg": plain(
            "MPEG-1 program stream", "mpeg1video", "-c:v", "mpeg1video", "-q:v", "4", "-bf", "2", start_offset_s=None
        ),
        "mpeg2.mpg": plain("MPEG-2 program stream", "mpeg2video", *MPEG2, start_offset_s=None),
        "mpeg2.ts": plain("MPEG-2 transport stream", "mpeg2video", *MPEG2, start_offset_s=None),
        "mpeg4.avi": Asset(
            what="MPEG-4 part 2, MP3",
            recipe=copy("mpeg4_mp3.avi"),
            codec="mpeg4",
            slack_s=1 / FPS + 0.002,  # ffmpeg's AVI writer shows the first frame twice as long
            start_offset_s=None,
            sound=Sound(slack_s=0.08),
        ),
        "mjpeg.mov": Asset(
            what="MJPEG, full range",
            recipe=Render(num_frames=60, video=("-c:v", "mjpeg", "-q:v", "4", "-pix_fmt", "yuvj420p")),
            numbers=few,
            codec="mjpeg",
        ),
        "prores.mov": Asset(
            what="ProRes 422, PCM",
            recipe=Render(
                num_frames=60, video=("-c:v", "prores_ks", "-pix_fmt", "yuv422p10le"), audio=("-c:a", "pcm_s16le")
            ),
            numbers=few,
            codec="prores",
            sound=Sound(seconds=2),
        ),
        "prores_4444.mov": Asset(
            what="ProRes 4444 with alpha",
            recipe=Render(num_frames=60, video=("-c:v", "prores_ks", "-pix_fmt", "yuva444p10le")),
            numbers=few,
            codec="prores",
        ),
        "dnxhd.mxf": Asset(
            what="DNxHR in MXF",
            recipe=Render(
                num_frames=60, size=(640, 360), video=("-c:v", "dnxhd", "-profile:v", "dnxhr_lb", "-pix_fmt", "yuv422p")
            ),
            numbers=few,
            size=(640, 360),
            codec="dnxhd",
            start_offset_s=None,
        ),
        "ffv1.mkv": Asset(
            what="FFV1, FLAC",
            recipe=Render(num_frames=60, video=("-c:v", "ffv1"), audio=("-c:a", "flac")),
            numbers=few,
            codec="ffv1",
            sound=Sound(seconds=2),
        ),
        "theora.ogv": Asset(
            what="Theora, Vorbis",
            recipe=Render(video=("-c:v", "libtheora", "-q:v", "7"), audio=("-c:a", "libvorbis", "-ac", "2")),
            codec="theora",
            sound=BEEPS,
            start_offset_s=None,
        ),
        "wmv2.wmv": plain("WMV 8 in ASF", "wmv2", "-c:v", "wmv2", "-q:v", "3", start_offset_s=None),
        "sorenson.flv": plain("Sorenson H.263", "flv1", "-c:v", "flv", "-q:v", "3", start_offset_s=None),
        "anim.gif": Asset(
            what="GIF, 10 fps",
            recipe=Render(num_frames=50, fps="10", video=(), filters="format=gray"),
            numbers=tuple(range(50)),
            times_s=spaced(50, "10"),
            codec="gif",
        ),
    }


def _containers() -> dict[str, Asset]:
    return {
        "mkv.mkv": Asset(what="Matroska", recipe=copy("base.mp4"), start_offset_s=None, sound=BEEPS),
        "mov.mov": Asset(what="QuickTime", recipe=copy("base.mp4"), sound=BEEPS),
        "ts.ts": Asset(
            what="transport stream, whose clock ffmpeg starts at 1.4 s",
            recipe=copy("base.mp4"),
            start_offset_s=None,
            sound=BEEPS,
        ),
        "bluray.m2ts": Asset(
            what="transport stream in packets of 192 bytes",
            recipe=copy("base.mp4", "-mpegts_m2ts_mode", 1),
            start_offset_s=None,
            sound=BEEPS,
        ),
        "frag.mp4": Asset(
            what="fragmented MP4",
            recipe=copy("base.mp4", "-movflags", "frag_keyframe+empty_moov+default_base_moof+delay_moov"),
            start_offset_s=None,
            sound=BEEPS,
        ),
        "flv.flv": Asset(what="FLV", recipe=copy("base.mp4"), start_offset_s=None, sound=BEEPS),
        "asf.asf": Asset(
            what="ASF: no duration, no rate",
            recipe=copy("base.mp4"),
            start_offset_s=None,
            sound=Sound(slack_s=0.05),
            slack_s=0.07,
        ),
        "live.webm": Asset(
            what="WebM as a live encoder pipes it: no duration, no index",
            recipe=run("-i", "@vp9.webm", "-c", "copy", "-f", "webm", "-live", 1),
            codec="vp9",
            start_offset_s=None,
            sound=BEEPS,
        ),
        "no_index.avi": Asset(
            what="AVI whose index is missing",
            recipe=Edit(edits.without_index, ("mpeg4_mp3.avi",)),
            codec="mpeg4",
            slack_s=1 / FPS + 0.002,
            start_offset_s=None,
            sound=Sound(slack_s=0.08),
        ),
        "matroska.mp4": Asset(
            what="Matroska by another name",
            recipe=copy("base.mp4", "-f", "matroska"),
            start_offset_s=None,
            sound=BEEPS,
        ),
    }


def _tracks() -> dict[str, Asset]:
    both = ("-map", "0:v", "-map", "1:v", "-map", "0:a", "-c", "copy")
    return {
        "two_video.mkv": Asset(
            what="two pictures; the first is the default",
            recipe=run("-i", "@base.mp4", "-i", "@small.mp4", *both, "-disposition:v:1", 0),
            start_offset_s=None,
            sound=BEEPS,
        ),
        "second_video.mkv": Asset(
            what="two pictures; the second is the default",
            recipe=run(
                "-i", "@base.mp4", "-i", "@small.mp4", *both, "-disposition:v:0", 0, "-disposition:v:1", "default"
            ),
            numbers=tuple(range(1000, 1000 + FRAMES)),
            size=(160, 120),
            start_offset_s=None,
            sound=BEEPS,
        ),
        "two_sounds.mkv": Asset(
            what="two languages; the second is the default, and half a second late",
            recipe=run(
                *("-i", "@base.mp4", "-itsoffset", 0.5, "-i", "@base.mp4", "-map", "0:v", "-map", "0:a", "-map", "1:a"),
                *("-c", "copy", "-metadata:s:a:0", "language=ger", "-metadata:s:a:1", "language=eng"),
                *("-disposition:a:0", 0, "-disposition:a:1", "default"),
            ),
            start_offset_s=None,
            sound=Sound(0.5),
        ),
        "cover_art.mp4": Asset(
            what="a film with a cover picture",
            recipe=run(
                *("-i", "@base.mp4", "-i", "@cover.png", "-map", 0, "-map", 1, "-c", "copy"),
                *("-disposition:v:1", "attached_pic"),
            ),
            sound=BEEPS,
        ),
        "cover_only.m4a": Asset(
            what="a song with a cover picture, which is no video",
            recipe=run(
                *("-i", "@base.mp4", "-i", "@cover.png", "-map", "0:a", "-map", "1:v", "-c", "copy"),
                *("-disposition:v:0", "attached_pic"),
            ),
            numbers=(),
            size=(0, 0),
            codec="",
            sound=BEEPS,
        ),
        "audio_first.mp4": Asset(
            what="the sound is track 0", recipe=copy("base.mp4", "-map", "0:a", "-map", "0:v"), sound=BEEPS
        ),
        "audio_only.mp4": Asset(
            what="no picture", recipe=copy("base.mp4", "-vn"), numbers=(), size=(0, 0), codec="", sound=BEEPS
        ),
        "subtitles.mkv": Asset(
            what="subtitles beside the film",
            recipe=run("-i", "@base.mp4", "-i", "@words.srt", "-map", 0, "-map", 1, "-c", "copy"),
            start_offset_s=None,
            sound=BEEPS,
        ),
    }


def _useless() -> dict[str, Asset]:
    def none(what: str, recipe: Recipe, error_type: str) -> Asset:
        return Asset(what=what, recipe=recipe, numbers=(), status="failed", error_type=error_type)

    return {
        "empty.mp4": none("zero bytes", Edit(edits.nothing), "empty_file"),
        "text.mp4": none("a web page named .mp4", Edit(edits.web_page), "unreadable"),
        "zeros.mp4": none("100 kB of zeros", Edit(edits.zeros, (), (100_000,)), "unreadable"),
        "noise.mp4": none("100 kB of noise", Edit(edits.noise, (), (100_000,)), "unreadable"),
        "no_moov.mp4": none(
            "cut in half, its index was at the end", Edit(edits.keep, ("base.mp4",), (50,)), "unreadable"
        ),
        "unknown.mp4": none(
            "a codec that nobody knows",
            Edit(edits.rename_codec, ("silent.mp4",), ("avc1", "zzz1")),
            "unsupported_codec",
        ),
        "words.mp4": none("subtitles named .mp4", Edit(edits.join, ("words.srt",)), "no_streams"),
    }


def _damaged() -> dict[str, Asset]:
    def partial(what: str, recipe: Recipe, **more: object) -> Asset:
        facts = {"status": "partial", "start_offset_s": None, **more}
        return Asset(what=what, recipe=recipe, **facts)  # type: ignore[arg-type]

    hopeless = {"status": "failed", "error_type": "damaged"}

    return {
        "truncated.mp4": partial(
            "index at the start, then cut in half", Edit(edits.keep, ("fast.mp4",), (50,)), at_least_right=119
        ),
        "truncated.mkv": partial("cut in half", Edit(edits.keep, ("silent.mkv",), (50,)), at_least_right=80),
        "noise_mid.mp4": partial(
            "a tenth of the data replaced by noise",
            Edit(edits.scribble, ("silent.mp4",), (45, 55, "noise")),
            at_least_right=167,
        ),
        "hole.mp4": partial(
            "a tenth of the data replaced by zeros",
            Edit(edits.scribble, ("silent.mp4",), (40, 50, "zeros")),
            at_least_right=151,
        ),
        "flipped.ts": partial("12 bytes flipped", Edit(edits.flip, ("silent.ts",), (12,)), at_least_right=157),
        "lost_packets.ts": partial(
            "3 % of the packets lost", Edit(edits.lose_packets, ("silent.ts",), (3,)), at_least_right=27, **hopeless
        ),
        "encrypted.mp4": partial(
            "encrypted, no key",
            copy(
                "silent.mp4",
                *("-encryption_scheme", "cenc-aes-ctr", "-encryption_key", "76a6c65c5ea762046bd749a2e632ccbb"),
                *("-encryption_kid", "a7e61c373e219033c21091fa607bf3b8", "-fflags", "+bitexact"),
            ),
            **hopeless,
        ),
    }


ASSETS: dict[str, Asset] = (
    _timing() | _clocks() | _pictures() | _codecs() | _containers() | _tracks() | _useless() | _damaged()
)
"""By file name."""


def suite(folder: Path) -> Kitchen:
    """Makes the files into `folder` as they are asked for."""
    return Kitchen(folder, PARTS | {name: asset.recipe for name, asset in ASSETS.items()})


def main(arguments: Sequence[str]) -> None:
    """Make them all."""
    kitchen = suite(Path(arguments[0]))
    for name in track(ASSETS, description="making"):
        kitchen.find(name)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Video files with ground truth: every picture carries its own number, so a test sees which frame a reader returned.

    python -m tests.media OUT

Each picture has a strip of 20 black or white cells along its top sixth:
    1 0 | 16 bits of the frame number, most significant first | parity, not parity
so `read_index(frame)` tells the number at any size (cells of 4 px or more) and after lossy compression, and only where
the picture is upright.

Made with ffmpeg: $FFMPEG, the PATH's, or that of the `imageio-ffmpeg` package. 43 files, 18 MB, 15 s on two cores.
`tests/assets/speech.ogg` is the one file that is not made here; `SPEECH_TRUTH` says what it holds.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

CELLS = 20
FPS = 30
FRAMES = 240  # of most files: 8 s

SPEECH = Path(__file__).parent / "assets" / "speech.ogg"
"""10.4 s of espeak-ng (-s 140), Opus 24 kbit/s: half a second of silence, a sentence, a pause, a sentence, silence."""
SPEECH_TRUTH = [
    (0.51, 4.91, "The weather today is sunny and warm, with a light wind from the west."),
    (6.59, 9.44, "Please open the window before you leave the room."),
]
"""(start_s, end_s, text), from the level of the sound before it was encoded."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file and what is true of it."""

    path: Path
    what: str
    indices: list[int] = field(default_factory=list)
    """Numbers of the frames that a player shows, in order; of a damaged file, those of the undamaged one."""
    times_s: list[float] = field(default_factory=list)
    """When each is shown, from the first one on."""
    size: tuple[int, int] = (320, 240)
    """(width, height) as shown: rotation applied, pixel aspect not."""
    expect: str = "ok"
    """`ok`, `partial` (damaged) or `error` (nothing to see)."""
    rotation_deg: int = 0
    sar: str = "1:1"
    audio: bool = False
    slack_s: float = 0.002
    """By how much the file's own times may differ from `times_s`: Matroska rounds to a millisecond."""

    @property
    def name(self) -> str:
        return self.path.name


# ------------------------------------------------------------------------------------------------- the strip
def strip(number: int) -> np.ndarray:
    """The 20 cells of a frame's number, as 0 or 255."""
    bits = [1, 0] + [(number >> (15 - i)) & 1 for i in range(16)]
    parity = sum(bits[2:]) & 1
    return np.array([*bits, parity, 1 - parity], np.uint8) * 255


def read_index(frame: np.ndarray) -> int | None:
    """The number in a picture of H x W or H x W x C; None where no strip can be read."""
    gray = (frame if frame.ndim == 2 else frame[..., :3].mean(-1)).astype(np.float32)
    height, width = gray.shape
    top, bottom = int(height / 12 - height / 36), int(height / 12 + height / 36)
    bits = []
    for cell in range(CELLS):
        left, right = int((cell + 0.35) * width / CELLS), int((cell + 0.65) * width / CELLS)
        bits.append(int(gray[top : max(bottom, top + 1), left : max(right, left + 1)].mean() > 128))
    if bits[:2] != [1, 0] or sum(bits[2:18]) & 1 != bits[18] or bits[18] == bits[19]:
        return None
    return int("".join(map(str, bits[2:18])), 2)


# ------------------------------------------------------------------------------------------------- ffmpeg
@functools.cache
def find_ffmpeg() -> str:
    """Where ffmpeg is."""
    found = os.environ.get("FFMPEG") or shutil.which("ffmpeg")
    if found:
        return found
    import imageio_ffmpeg

    return imageio_ffmpeg.get_ffmpeg_exe()


def ffmpeg(*args: object, stdin: bytes | None = None) -> None:
    """Run ffmpeg, overwriting its output. Raises RuntimeError with its last words."""
    command = [find_ffmpeg(), "-hide_banner", "-loglevel", "error", "-y", *map(str, args)]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.decode()[-1500:]}")


def encode(
    path: Path,
    num_frames: int = FRAMES,
    *,
    video: Sequence[str],
    size: tuple[int, int] = (320, 240),
    fps: str = str(FPS),
    filters: str = "",
    audio: str = "",
    first: int = 0,
) -> None:
    """Write numbered frames over a moving test picture, and a tone if `audio` names an encoder."""
    width, height = size
    even_w, even_h = width + width % 2, height + height % 2  # testsrc2 likes even sizes; cropped afterwards
    cells = b"".join(strip(first + number).tobytes() for number in range(num_frames))
    graph = (
        f"[1:v]scale={even_w}:{max(even_h // 6, 4)}:flags=neighbor[s];"
        f"[0:v][s]overlay=0:0:shortest=1:format=auto,crop={width}:{height}:0:0:exact=1"
    )
    graph += (f",{filters}" if filters else "") + "[v]"
    args: list[object] = ["-f", "lavfi", "-i", f"testsrc2=size={even_w}x{even_h}:rate={fps}"]
    args += ["-f", "rawvideo", "-pix_fmt", "gray", "-video_size", f"{CELLS}x1", "-framerate", fps, "-i", "-"]
    if audio:
        length_s = float(num_frames / Fraction(fps))
        args += ["-f", "lavfi", "-t", length_s, "-i", "sine=frequency=440:sample_rate=48000"]
    args += ["-filter_complex", graph, "-map", "[v]"]
    if audio:
        args += ["-map", "2:a", "-c:a", audio, "-ac", "2"]
    ffmpeg(*args, *video, path, stdin=cells)


def x264(gop: int = 60, *more: str) -> list[str]:
    """Options of a quick H.264 encode."""
    return ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", "yuv420p", "-g", str(gop), *more]


def x265(params: str = "") -> list[str]:
    """Options of a quick HEVC encode."""
    log = f"log-level=error:keyint=60{params}"
    return ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", log, "-tag:v", "hvc1"]


def vp9(bitrate: str) -> list[str]:
    """Options of a quick VP9 encode."""
    speed = ["-deadline", "realtime", "-cpu-used", "8"]
    return ["-c:v", "libvpx-vp9", "-pix_fmt", "yuv420p", "-b:v", bitrate, *speed, "-g", "60"]


MPEG4 = ["-c:v", "mpeg4", "-q:v", "4", "-pix_fmt", "yuv420p", "-g", "60"]


# ------------------------------------------------------------------------------------------------- MP4 by hand
def _boxes(data: bytes, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """(type, start of the body, end) of each MP4 box in data[low:high]."""
    while low + 8 <= high:
        size, kind = struct.unpack(">I4s", data[low : low + 8])
        body = low + 8
        if size == 1:
            size, body = struct.unpack(">Q", data[low + 8 : low + 16])[0], low + 16
        size = size or high - low
        if size < 8:
            return
        yield kind.decode("latin1"), body, low + size
        low += size


def find_box(data: bytes, *path: str) -> tuple[int, int]:
    """(start, end) of the body of the first box at `path`."""
    low, high = 0, len(data)
    for wanted in path:
        low, high = next((body, end) for kind, body, end in _boxes(data, low, high) if kind == wanted)
    return low, high


def set_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Write a display matrix (a, b, c, d in units) into the first track of an MP4."""
    out = bytearray(data)
    body, _ = find_box(data, "moov", "trak", "tkhd")
    at = body + (52 if data[body] == 1 else 40)
    a, b, c, d = (value << 16 for value in matrix)
    out[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(out)


TURNS = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}
"""Display matrices that turn a stored picture clockwise."""


# ------------------------------------------------------------------------------------------------- the zoo
class Zoo:
    """All files, made once into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._tmp = folder, folder / "tmp"
        self._tmp.mkdir(parents=True, exist_ok=True)
        self.assets: dict[str, Asset] = {}
        self.base = self._tmp / "base.mp4"
        encode(self.base, video=x264(60, "-bf", "2"), audio="aac")
        self._make_timing()
        self._make_turned()
        self._make_codecs()
        self._make_containers()
        self._make_tracks()
        self._make_useless()
        self._make_damaged()

    def path(self, name: str) -> str:
        """Path of a file as the product takes it."""
        return str(self.folder / name)

    def _add(self, name: str, what: str, indices: Sequence[int] = range(FRAMES), **more: object) -> None:
        more.setdefault("times_s", [number / FPS for number in range(len(indices))])
        self.assets[name] = Asset(self.folder / name, what, list(indices), **more)  # type: ignore[arg-type]

    def _encode(self, name: str, what: str, *, num_frames: int = FRAMES, **how: object) -> None:
        """Encode a file whose frames are plain: all of them, 1/30 s apart."""
        encode(self.folder / name, num_frames, **how)  # type: ignore[arg-type]
        size = {"size": how["size"]} if "size" in how else {}
        self._add(name, what, range(num_frames), audio=bool(how.get("audio")), **size)

    def _copy(self, name: str, what: str, *args: object, **more: object) -> None:
        """Remux the plain file."""
        ffmpeg("-i", self.base, *args, "-c", "copy", self.folder / name)
        self._add(name, what, **{"audio": True, **more})  # type: ignore[arg-type]

    def _make_timing(self) -> None:
        self._copy("h264_base.mp4", "H.264, 2 B-frames, closed GOP of 60, AAC")
        self._copy("video_only.mp4", "video without audio", "-an", audio=False)
        open_gop = "open-gop=1:keyint=30:min-keyint=30:b-pyramid=normal"
        self._encode("opengop.mp4", "open GOP of 30", video=x264(30, "-bf", "3", "-x264-params", open_gop))
        self._encode("longgop.mp4", "one key frame for 30 s", num_frames=900, video=x264(100000, "-bf", "3"))

        encode(self.folder / "fps29_97.mp4", fps="30000/1001", video=x264())
        self._add("fps29_97.mp4", "30000/1001 fps", times_s=[k * 1001 / 30000 for k in range(FRAMES)])
        uneven = "setpts='(6*floor(N/3)+mod(N\\,3))/30/TB'"
        encode(self.folder / "vfr.mp4", video=[*x264(), "-fps_mode", "vfr"], filters=uneven)
        times_s = [(6 * (k // 3) + k % 3) / 30 for k in range(FRAMES)]
        self._add("vfr.mp4", "gaps of 1, 1, 4 thirtieths by turns", times_s=times_s)
        pause = "setpts='(N+if(gte(N\\,100)\\,300\\,0))/30/TB'"
        encode(self.folder / "vfr_gap.mkv", 200, video=[*x264(), "-fps_mode", "vfr"], filters=pause)
        times_s = [(k + (300 if k >= 100 else 0)) / 30 for k in range(200)]
        self._add("vfr_gap.mkv", "10 s without a frame in the middle", range(200), times_s=times_s)

        ffmpeg("-ss", 3.5, "-i", self.base, "-c", "copy", self.folder / "editlist_trim.mp4")
        self._add("editlist_trim.mp4", "an edit list hides frames 60..104", range(105, FRAMES), audio=True)
        encode(self._tmp / "v.mp4", video=x264(60, "-bf", "2"))
        tone = ["-f", "lavfi", "-t", 10, "-i", "sine=frequency=440"]
        late = ["-itsoffset", 2, "-i", self._tmp / "v.mp4", "-map", "1:v", "-map", "0:a", "-c:v", "copy", "-c:a", "aac"]
        ffmpeg(*tone, *late, self.folder / "editlist_delay.mp4")
        self._add("editlist_delay.mp4", "an empty edit: video starts 2 s after audio", audio=True)
        no_delay = ["-muxdelay", 0, "-muxpreload", 0]
        self._copy("start_100.ts", "MPEG-TS, clock starts at 100 s", "-output_ts_offset", 100, *no_delay)
        self._copy("start_5.mkv", "MKV, clock starts at 5 s", "-output_ts_offset", 5)

    def _make_turned(self) -> None:
        for degrees, undo in ((90, "transpose=2"), (180, "hflip,vflip"), (270, "transpose=1")):
            encode(self._tmp / "r.mp4", video=x264(60, "-bf", "2"), filters=undo, audio="aac")
            data = set_matrix((self._tmp / "r.mp4").read_bytes(), TURNS[degrees])
            (self.folder / f"rot{degrees}.mp4").write_bytes(data)
            what = f"stored turned; to be turned {degrees} degrees clockwise"
            self._add(f"rot{degrees}.mp4", what, rotation_deg=degrees, audio=True)

    def _make_codecs(self) -> None:
        odd = (405, 719)
        self._encode("odd_vp9.webm", "VP9 405x719", size=odd, video=vp9("600k"))
        self._encode("odd_mpeg4.mp4", "MPEG-4 part 2, 405x719", size=odd, video=MPEG4)
        full_chroma = ["-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv444p", "-g", "60"]
        self._encode("odd_h264_444.mp4", "H.264 4:4:4, 405x719", size=odd, video=full_chroma)
        self._encode("hevc.mp4", "HEVC 8 bit", video=[*x265(), "-pix_fmt", "yuv420p"])
        hdr = x265(":colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc:hdr10=1")
        hdr += ["-pix_fmt", "yuv420p10le", "-color_primaries", "bt2020", "-color_trc", "smpte2084"]
        self._encode("hevc10_hdr.mp4", "HEVC main10, BT.2020 PQ", video=[*hdr, "-colorspace", "bt2020nc"])
        self._encode("vp9.webm", "VP9 + Opus", video=vp9("400k"), audio="libopus")
        av1 = ["-c:v", "libsvtav1", "-preset", "10", "-crf", "24", "-g", "60", "-pix_fmt", "yuv420p"]
        self._encode("av1.mp4", "AV1", video=av1)
        fields = x264(60, "-flags", "+ilme+ildct", "-x264-params", "tff=1")
        self._encode("interlaced.mp4", "H.264 coded as interlaced", video=fields)
        encode(self.folder / "sar.mp4", size=(352, 288), video=x264(), filters="setsar=16/11")
        self._add("sar.mp4", "anamorphic, pixels 16:11", size=(352, 288), sar="16:11")
        mpeg2 = ["-c:v", "mpeg2video", "-q:v", "4", "-pix_fmt", "yuv420p", "-g", "15", "-bf", "2"]
        self._encode("mpeg2.mpg", "MPEG-2 program stream", video=mpeg2)
        mjpeg = ["-c:v", "mjpeg", "-q:v", "4", "-pix_fmt", "yuvj420p"]
        self._encode("mjpeg.mov", "MJPEG in MOV", num_frames=60, video=mjpeg)
        encode(self.folder / "anim.gif", 50, fps="10", video=[], filters="format=gray")
        self._add("anim.gif", "GIF, 10 fps", range(50), times_s=[k / 10 for k in range(50)])

    def _make_containers(self) -> None:
        self._copy("mkv.mkv", "MKV")
        self._copy("ts.ts", "MPEG-TS, whose clock ffmpeg starts at 1.4 s")
        self._copy("frag.mp4", "fragmented MP4", "-movflags", "frag_keyframe+empty_moov+default_base_moof")
        encode(self.folder / "mpeg4.avi", video=MPEG4, audio="libmp3lame")
        # ffmpeg's AVI writer shows the first frame twice as long: the others really are a frame later
        self._add("mpeg4.avi", "AVI, MPEG-4 part 2 + MP3", audio=True, slack_s=1 / FPS + 0.002)
        self._encode("one_frame.mp4", "a single frame", num_frames=1, video=x264())
        self._encode("short_100ms.mp4", "100 ms, 3 frames", num_frames=3, video=x264())

    def _make_tracks(self) -> None:
        encode(self._tmp / "b.mp4", size=(160, 120), video=x264(), first=1000)
        second = ["-i", self._tmp / "b.mp4", "-map", "0:v", "-map", "1:v", "-map", "0:a"]
        self._copy("two_video.mkv", "two video tracks; the first is wanted", *second)
        encode(self._tmp / "c.png", 1, size=(64, 64), first=5000, video=["-frames:v", "1", "-update", "1"])
        cover = ["-i", self._tmp / "c.png", "-map", "0", "-map", "1", "-disposition:v:1", "attached_pic"]
        self._copy("cover_art.mp4", "video plus a cover picture", *cover)
        self._copy("audio_first.mp4", "audio is stream 0", "-map", "0:a", "-map", "0:v")

    def _make_useless(self) -> None:
        ffmpeg("-i", self.base, "-vn", "-c", "copy", self.folder / "audio_only.mp4")
        self._add("audio_only.mp4", "audio only", [], expect="error", audio=True)
        (self.folder / "empty.mp4").write_bytes(b"")
        self._add("empty.mp4", "zero bytes", [], expect="error")
        (self.folder / "text.mp4").write_bytes(b"<html><body>404 Not Found</body></html>\n" * 40)
        self._add("text.mp4", "an HTML page named .mp4", [], expect="error")
        data = self.base.read_bytes()
        (self.folder / "no_moov.mp4").write_bytes(data[: len(data) // 2])
        self._add("no_moov.mp4", "cut in half, its index was at the end", [], expect="error")

    def _make_damaged(self) -> None:
        encode(self._tmp / "a.ts", 120, video=x264(30))
        encode(self._tmp / "b.ts", 120, size=(480, 360), video=x264(30), first=120)
        data = (self._tmp / "a.ts").read_bytes() + (self._tmp / "b.ts").read_bytes()
        (self.folder / "size_change.ts").write_bytes(data)
        self._add("size_change.ts", "two sizes end to end; the clock starts again", expect="partial")

        ffmpeg("-i", self.base, "-an", "-c", "copy", "-movflags", "+faststart", self._tmp / "f.mp4")
        data = (self._tmp / "f.mp4").read_bytes()
        (self.folder / "truncated.mp4").write_bytes(data[: len(data) // 2])
        self._add("truncated.mp4", "index at the start, then cut in half", expect="partial")

        noisy = bytearray((self.folder / "video_only.mp4").read_bytes())
        body, end = find_box(bytes(noisy), "mdat")
        low, high = body + (end - body) * 45 // 100, body + (end - body) * 55 // 100
        noisy[low:high] = np.random.default_rng(7).integers(0, 256, high - low, np.uint8).tobytes()
        (self.folder / "corrupt_mid.mp4").write_bytes(bytes(noisy))
        self._add("corrupt_mid.mp4", "a tenth of the data replaced by noise", expect="partial")

        ffmpeg("-i", self.base, "-an", "-c", "copy", self._tmp / "n.ts")
        flipped = bytearray((self._tmp / "n.ts").read_bytes())
        for at in np.random.default_rng(8).integers(2000, len(flipped) - 2000, 12):
            flipped[at] ^= 0x5A
        (self.folder / "corrupt_bits.ts").write_bytes(bytes(flipped))
        self._add("corrupt_bits.ts", "12 flipped bytes in a TS", expect="partial")


GOOD = [
    *("h264_base.mp4", "video_only.mp4", "opengop.mp4", "longgop.mp4", "fps29_97.mp4", "vfr.mp4"),
    *("vfr_gap.mkv", "editlist_trim.mp4", "editlist_delay.mp4", "start_100.ts", "start_5.mkv", "rot90.mp4"),
    *("rot180.mp4", "rot270.mp4", "odd_vp9.webm", "odd_mpeg4.mp4", "odd_h264_444.mp4", "hevc.mp4"),
    *("hevc10_hdr.mp4", "vp9.webm", "av1.mp4", "interlaced.mp4", "sar.mp4", "mpeg2.mpg"),
    *("mjpeg.mov", "anim.gif", "mkv.mkv", "ts.ts", "frag.mp4", "mpeg4.avi"),
    *("one_frame.mp4", "short_100ms.mp4", "two_video.mkv", "cover_art.mp4", "audio_first.mp4"),
]
"""Names of the files with nothing wrong with them."""


@functools.cache
def zoo(folder: Path) -> Zoo:
    """The zoo in `folder`, made at the first call."""
    return Zoo(folder)


if __name__ == "__main__":
    made = Zoo(Path(sys.argv[1]))
    print(f"{len(made.assets)} files in {made.folder}")

"""Opening files and reading packets: the boundary at which PyAV's errors become ours.

Decoding runs in one thread on purpose. A machine that decodes many files has one process per core, where threads within
a file only cost memory, and only in the calling thread can a decoder's complaint be laid at the door of one packet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import av
import av.error
import av.logging
import av.stream

from qwen_ray.errors import InputError, TransientError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream

NO_MEDIA = {"tty", "concat", "hls", "dash", "ffmetadata"}
"""Formats that turn any text into pictures, or that name other files: never what a caption job was given."""

HARMLESS = ("mmco: unref short failure", "co located POCs unavailable")
"""What the H.264 decoder logs as errors in sound streams, after a seek or where an encoder was sloppy."""

SMALL_BYTES = 64 << 20
"""A file up to this size whose index takes more memory than there is lies: an honest one takes a few times as much."""

MOST_TIMES_READ = 16
"""Times the file's size that its packets may add up to, more than any sound file's: a damaged index points to the same
bytes without end."""

READ_RETRIES = 16
"""Fruitless reads in a row after which the rest of a damaged file is given up."""


def open_input(path: str) -> InputContainer:
    """Open a local file.

    Raises:
        InputError: `empty_file`, or `unreadable` where no demuxer understands it.
        TransientError: `not_found`, or `storage` where the system would not read it.
    """
    name = Path(path).name
    try:
        size_bytes = Path(path).stat().st_size
    except FileNotFoundError:
        raise TransientError("not_found", f"{name}: no such file") from None
    if size_bytes == 0:
        raise InputError("empty_file", f"{name}: the file is empty (0 bytes)")
    try:
        # `file:`: a colon in the name is no protocol; whitelist: a playlist fetches nothing
        opened = av.open("file:" + path, metadata_errors="ignore", options={"protocol_whitelist": "file"})
        container = cast("InputContainer", opened)
    except MemoryError:
        if size_bytes > SMALL_BYTES:
            raise
        raise InputError("unreadable", f"{name}: its header asks for more memory than its content can fill") from None
    except (av.error.PermissionError, av.error.FileNotFoundError) as error:
        raise TransientError("storage", f"{name}: {error.strerror}") from None
    except av.error.FFmpegError as error:
        raise InputError("unreadable", f"{name}: not readable as audio or video ({_reason(error)})") from None
    if container.format.name in NO_MEDIA:
        container.close()
        raise InputError("unreadable", f"{name}: text, or a playlist, not audio or video")
    return container


def _reason(error: av.error.FFmpegError) -> str:
    return (error.strerror or type(error).__name__).lower()


def is_cover(stream: Stream) -> bool:
    """Whether a video stream is a picture beside the film: cover art or a set of thumbnails."""
    wanted = av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails
    return bool(stream.disposition & wanted)


def choose(container: InputContainer, kind: str) -> Stream | None:
    """The track of `kind` (video or audio) that a player plays: marked as default, else the first.

    A track for which there is no decoder is chosen only where there is no other: phones put a sound track that only
    they can play beside one that everybody can.
    """
    found = [s for s in container.streams if s.type == kind and not (kind == "video" and is_cover(s))]
    usable = [s for s in found if s.codec_context is not None] or found
    marked = [s for s in usable if s.disposition & av.stream.Disposition.default]
    return next(iter(marked or usable), None)


class PacketReader:
    """The packets of some streams, past damage: a failed read is counted and the next one tried."""

    def __init__(self, container: InputContainer, *streams: Stream) -> None:
        self._container = container
        self._streams = streams
        self.num_errors = 0

    def __iter__(self) -> Iterator[Packet[Stream]]:
        """Packets with data in them, in file order; flushing the decoder at the end is the caller's."""
        fruitless, left = 0, MOST_TIMES_READ * self._container.size + (1 << 20)
        while fruitless < READ_RETRIES:
            try:
                for packet in self._container.demux(*self._streams):
                    left -= packet.size + 1
                    if left < 0:
                        self.num_errors += 1
                        return
                    if packet.size:  # AVI repeats a picture by an empty packet, which a decoder takes for the end
                        fruitless = 0
                        yield packet
                return
            except MemoryError:
                raise
            except av.error.FFmpegError:
                self.num_errors += 1
                fruitless += 1
            except IndexError:  # PyAV at the end of a file in which streams turned up late: it reads past its own list
                fruitless += 1


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collect what FFmpeg logs as an error in this thread; outside, FFmpeg stays silent. May be nested."""
    found: list[str] = []
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture(True) as logs:
            yield found
        found += [message for _, _, message in logs if not message.startswith(HARMLESS)]
    finally:
        av.logging.set_level(level)

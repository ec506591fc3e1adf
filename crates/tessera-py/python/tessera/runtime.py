"""Runs: sealed plans on threads of this process or processes of this host, streams of video, and texts."""

from ._native import (
    IoEvent,
    LayerPrefetch,
    PrefetchReport,
    Session,
    TextStream,
    VideoChunk,
    VideoStream,
    enable_overlap,
    generate,
    open_session,
    register_prefetch,
    set_stream_map,
    stream,
    stream_settings,
)

__all__ = [
    "IoEvent",
    "LayerPrefetch",
    "PrefetchReport",
    "Session",
    "TextStream",
    "VideoChunk",
    "VideoStream",
    "enable_overlap",
    "generate",
    "open_session",
    "register_prefetch",
    "set_stream_map",
    "stream",
    "stream_settings",
]

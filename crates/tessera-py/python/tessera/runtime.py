"""Runs of sealed plans, on ranks that are threads of this process or processes of this host."""

from ._native import Session, enable_overlap, open_session, set_stream_map, stream_settings

__all__ = ["Session", "enable_overlap", "open_session", "set_stream_map", "stream_settings"]

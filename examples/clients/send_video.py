"""Sends a video to a stream of `tessera serve --video-in`, and prints each chunk that was generated from it.

    pip install websockets numpy pillow
    tessera serve MODEL --preset stream-diffusion-v2 --video-in
    python examples/clients/send_video.py ws://127.0.0.1:7860/socket 8 frames

`frames` is a folder of pictures, or a .npy file of uint8 RGB [frame, height, width, 3]. Without it, a square moves.
"""

import json
import struct
import sys
from itertools import count, cycle, islice
from pathlib import Path

import numpy as np
from websockets.sync.client import connect


def read_frames(source, width, height):
    """Yields frames, again from the first one when the video ends."""
    if source is None:
        for left in count(step=2):
            frame = np.full((height, width, 3), 40, np.uint8)
            frame[height // 4 : height // 2, np.arange(left, left + width // 4) % width] = (220, 60, 40)
            yield frame
    elif source.suffix == ".npy":
        yield from cycle(np.load(source, mmap_mode="r"))
    else:
        from PIL import Image

        for path in cycle(sorted(source.iterdir())):
            yield np.asarray(Image.open(path).convert("RGB").resize((width, height)))


url, chunks, source = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None
with connect(url, max_size=None) as socket:
    socket.send(json.dumps({"type": "hello", "version": 1, "format": "none", "control": True}))
    for message in socket:
        event = json.loads(message)
        if event["type"] == "hello":
            stream, earlier, done = event["stream"], None, 0
            if stream["video_in"] is None or not event["control"]["is_you"]:
                sys.exit("the stream takes no video, or another client controls it")
            width, height, taken = stream["width"], stream["height"], -stream["video_in"]["frames_ahead"]
            header = struct.pack("<4sB3xHHI", b"TSV1", 1, width, height, 3 * width * height)
            frames = read_frames(source, width, height)
        elif event["type"] == "video_credits":  # those beyond the first ones are of frames that were taken
            taken += event["frames"] - event["dropped"]
            for frame in islice(frames, event["frames"]):
                socket.send(header + frame.tobytes())
        elif event["type"] in ("refused", "alarm", "bye"):
            sys.exit(f"{event['code']}: {event['message']}")
        elif event["type"] == "status":
            earlier = event["chunks"] if earlier is None else earlier
            if event["chunks"] - earlier > done:
                done = event["chunks"] - earlier
                print("chunk", done, "of epoch", event["epoch"], "was generated;", taken, "frames were taken", flush=True)
            if done >= chunks:
                break  # a normal end of the connection frees the control

"""Watches a stream of `tessera serve`, changes its prompt, and writes each frame as JPEG.

    pip install websockets
    tessera serve
    python examples/clients/watch.py ws://127.0.0.1:7860/socket "a blue square moves left" frames
"""

import json
import struct
import sys
from pathlib import Path

from websockets.sync.client import connect

url, prompt, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
folder.mkdir(exist_ok=True)
with connect(url, max_size=None) as socket:
    socket.send(json.dumps({"type": "hello", "version": 1, "format": "jpeg", "control": True, "credits": 24}))
    effect, asked = None, False
    for message in socket:
        if isinstance(message, str):
            event = json.loads(message)
            if event["type"] == "hello":
                chunk_frames = event["stream"]["chunk_frames"]
                print("model", event["stream"]["model"], "controls:", event["control"]["is_you"])
            elif event["type"] == "effect":
                effect = event["request"]
                print("the prompt holds from chunk", effect)
            elif event["type"] in ("refused", "alarm", "bye"):
                sys.exit(f"{event['code']}: {event['message']}")
            continue
        if not asked:  # the stream runs now, and takes changes
            socket.send(json.dumps({"type": "change", "id": 1, "change": {"prompt": prompt}}))
            asked = True
        request, frame = struct.unpack_from("<QQ", message, 16)
        (folder / f"{frame:06}.jpg").write_bytes(message[48:])
        if message[5] & 2:  # the last frame of its chunk
            socket.send(json.dumps({"type": "credits", "frames": chunk_frames}))
        if effect is not None and request > effect:
            break  # a normal end of the connection frees the control

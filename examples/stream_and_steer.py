"""Streams a video, sends another prompt on the way, and says which frames it changed.

    python examples/stream_and_steer.py [MODEL_FOLDER]
"""

import sys

import numpy as np

from tessera import runtime as rt

CHUNKS = 16


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "models/demo"
    with rt.stream(folder, prompt="a red circle moves right", chunks=CHUNKS) as plain:
        expected = [chunk.frames for chunk in plain]

    steered = []
    with rt.stream(folder, prompt="a red circle moves right", chunks=CHUNKS) as stream:
        for chunk in stream:
            steered.append(chunk.frames)
            if chunk.index == 0:
                change = stream.send("a blue square moves down")
        first = stream.chunk_of(change)

    print(f"the prompt arrived after chunk 0 and took effect with chunk {first}")
    for index, (before, after) in enumerate(zip(expected, steered, strict=True)):
        changed = np.any(before != after, axis=(1, 2, 3)).sum()
        red, green, blue = after.mean(axis=(0, 1, 2))
        print(f"chunk {index}: {changed} of {len(after)} frames changed, mean color {red:.0f} {green:.0f} {blue:.0f}")


if __name__ == "__main__":
    main()

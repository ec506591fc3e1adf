"""Compares what `tessera bench dit CASE --case` wrote with the float64 results of the case (dit_gpu.py --dump), and with PyTorch's
own error on it. Exits with 1 where an error is beyond --limit.

Errors are relative to the largest value of the exact tensor: the largest one, and the root of their mean square.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np


def tensors(path):
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    for name, t in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            yield name, np.frombuffer(data[8 + n + begin:8 + n + end], dtype={"F64": "<f8", "F32": "<f4"}[t["dtype"]]).reshape(t["shape"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path)
    parser.add_argument("--limit", type=float, default=2e-2)
    args = parser.parse_args()
    worst = 0.0
    for name, exact in tensors(args.case / "expected.safetensors"):
        parts = [np.fromfile(p, dtype="<f4") for p in sorted((args.case / "ours").glob(f"{name}.rank*.f32"))]
        if not parts:
            sys.exit(f"check_case: nothing was written for {name}")
        # Tokens are cut by rows, heads by columns.
        cut = [x.reshape(-1, exact.shape[1]) if name == "x0" else x.reshape(exact.shape[0], -1) for x in parts]
        if name == "x0" and sum(len(x) for x in cut) > len(exact):
            cut = cut[:1]
        ours = np.concatenate(cut, axis=0 if name == "x0" else 1).astype(np.float64)
        error = np.abs(ours - exact) / np.abs(exact).max()
        worst = np.maximum(worst, error.max())
        print(json.dumps({"tensor": name, "largest": float(error.max()), "rms": float(np.sqrt((error ** 2).mean()))}))
    print(json.dumps({"pytorch": json.loads((args.case / "case.json").read_text())["pytorch_error"]}))
    # What is no number is beyond every limit.
    sys.exit(not worst <= args.limit)


main()

"""Compares the output of `tessera bench dit CASE --case` with the float64 results of the case, which `dit_gpu.py --dump` wrote.

The program prints the errors of Tessera and of PyTorch, and exits with 1 if an error of Tessera exceeds --limit. Errors are
relative to the largest magnitude in the exact tensor; for each tensor the largest error and the root mean square are given.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np


def read_tensors(path):
    """Yields the name and array of each tensor of a safetensors file."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    for name, t in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            yield name, np.frombuffer(data[8 + n + begin:8 + n + end], dtype={"F64": "<f8", "F32": "<f4"}[t["dtype"]]).reshape(t["shape"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path, help="folder of the reference case")
    parser.add_argument("--limit", type=float, default=2e-2, help="maximum relative error (default: %(default)s)")
    args = parser.parse_args()
    worst = 0.0
    for name, exact in read_tensors(args.case / "expected.safetensors"):
        parts = [np.fromfile(p, dtype="<f4") for p in sorted((args.case / "ours").glob(f"{name}.rank*.f32"))]
        if not parts:
            sys.exit(f"check_case: tessera wrote no output for {name}")
        # x0 is sharded by rows (tokens); K and V are sharded by columns (heads).
        shards = [x.reshape(-1, exact.shape[1]) if name == "x0" else x.reshape(exact.shape[0], -1) for x in parts]
        if name == "x0" and sum(len(x) for x in shards) > len(exact):
            # Every rank has all tokens, as under megatron.
            shards = shards[:1]
        ours = np.concatenate(shards, axis=0 if name == "x0" else 1).astype(np.float64)
        error = np.abs(ours - exact) / np.abs(exact).max()
        worst = np.maximum(worst, error.max())
        print(json.dumps({"tensor": name, "largest": float(error.max()), "rms": float(np.sqrt((error ** 2).mean()))}))
    print(json.dumps({"pytorch": json.loads((args.case / "case.json").read_text())["pytorch_error"]}))
    # This form of the comparison also rejects NaN.
    sys.exit(not worst <= args.limit)


main()

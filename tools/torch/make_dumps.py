#!/usr/bin/env python3
"""Writes synthetic Flight Recorder dumps of many ranks, to measure how fast and in how much memory they are read.

    tools/torch/make_dumps.py OUT RANKS ENTRIES [--long LONG] [--frames FRAMES]

Every rank issues ENTRIES collectives over five lines of one program; rank RANKS // 3 skips one, five rounds
before the end. The pickle has the form that PyTorch writes: texts are remembered, containers are not.
With --long every rank issues LONG collectives: rank 0 has room for all of them, and the rings of the others
hold the last ENTRIES. With --frames every stack has FRAMES frames, and no two collectives have the same stack.
"""

import argparse
import os
import struct


class Writer:
    """The opcodes of pickle that PyTorch uses."""

    def __init__(self):
        self.memo = {}

    def text(self, text):
        if text in self.memo:
            n = self.memo[text]
            return b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)
        n = self.memo[text] = len(self.memo)
        data = text.encode()
        put = b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n)
        return b"X" + struct.pack("<I", len(data)) + data + put

    def value(self, value):
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value) if abs(value) < 1 << 31 else b"\x8a\x08" + struct.pack("<q", value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple):
            return b"".join(map(self.value, value)) + b"\x86"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.value, value)) + b"e"
        return b"}(" + b"".join(self.value(k) + self.value(v) for k, v in value.items()) + b"u"


OPS = [("all_reduce", 4096), ("_all_gather_base", 8192), ("_reduce_scatter_base", 2048), ("all_reduce", 64), ("all_reduce", 512)]


STACK = ("step", "forward", "train", "main")


def entry(i, sequence, done, op, size, line, depth):
    frames = [{"name": f, "filename": f"/opt/train/{f}.py", "line": line} for f in STACK]
    for k in range(len(STACK), depth):
        frames.append({"name": f"call_{k}", "filename": f"/opt/train/call_{k}.py", "line": i + 1})
    return {
        "frames": frames, "record_id": i, "pg_id": 0, "process_group": ("0", "default_pg"), "thread_name": "python",
        "thread_id": "140476345069888", "collective_seq_id": sequence, "p2p_seq_id": 0, "op_id": sequence,
        "profiling_name": "nccl:" + op, "time_created_ns": 1_795_476_923_637_774_242 + i, "input_sizes": [[size]],
        "input_dtypes": ["Float"], "output_sizes": [[size]], "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": done, "timeout_ms": 600000, "is_p2p": False,
    }


def write_dump(out, rank, ranks, entries, long, depth):
    writer = Writer()
    end = long or entries
    first = end - entries if long and rank != 0 else 0
    skipped = end - 25 if rank == ranks // 3 else None
    with open(os.path.join(out, f"rank_{rank}"), "wb", buffering=1 << 20) as f:
        f.write(b"\x80\x02}(" + writer.value("version") + writer.value("2.10") + writer.value("pg_config"))
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
        f.write(writer.value(config) + writer.value("entries") + b"](")
        issued = first
        for i in range(first, end):
            if i == skipped:
                continue
            op, size = OPS[i % len(OPS)]
            issued += 1
            f.write(writer.value(entry(issued - 1, issued, i < end - 25, op, size, 10 + i % len(OPS), depth)))
        f.write(b"eu.")


def main():
    parser = argparse.ArgumentParser(description="Writes synthetic Flight Recorder dumps of many ranks.")
    parser.add_argument("out")
    parser.add_argument("ranks", type=int)
    parser.add_argument("entries", type=int)
    parser.add_argument("--long", type=int, help="number of collectives, all of them in the dump of rank 0")
    parser.add_argument("--frames", type=int, default=len(STACK), help="frames of a stack")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for rank in range(args.ranks):
        write_dump(args.out, rank, args.ranks, args.entries, args.long, args.frames)


if __name__ == "__main__":
    main()

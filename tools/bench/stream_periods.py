#!/usr/bin/env python3
"""Prints the period of streams and its parts, from their records.

usage: stream_periods.py RUN_FOLDER...

One line of JSON per run. A period is the time between the commits of two calls; the first five chunks are left out, while caches
fill. The parts are medians of rank 0: generator, decode and encode are sums of its phases, and `rest` is what remains of the median
period. `first_ms` is the time of the first chunk from its commit to its last frame.
"""

import json
import statistics
import sys
from pathlib import Path

WARM_UP_CHUNKS = 5


def read_record(folder):
    """Returns the chunks of a record, and the memory of the first rank."""
    chunks, memory = [], None
    for line in (Path(folder) / "record.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry.get("kind") == "chunk":
            chunks.append(entry)
        elif entry.get("event") == "memory":
            memory = memory or entry["memory"]["memory"]
    return chunks, memory


def summarise(folder):
    chunks, memory = read_record(folder)
    steady = chunks[WARM_UP_CHUNKS:]
    if len(steady) < 3:
        sys.exit(f"{folder}: {len(chunks)} chunks are too few, {WARM_UP_CHUNKS + 3} are needed")
    starts = [c["start_ns"] for c in steady]
    periods = sorted((b - a) / 1e6 for a, b in zip(starts, starts[1:]))
    parts = {"generator": [], "decode": [], "encode": []}
    for chunk in steady:
        sums = dict.fromkeys(parts, 0.0)
        for phase in chunk["ranks"][0]["phases"]:
            family = phase["name"].split(".")[0]
            sums[family if family in sums else "generator"] += (phase["end_ns"] - phase["start_ns"]) / 1e6
        for part, ms in sums.items():
            parts[part].append(ms)
    medians = {part: statistics.median(values) for part, values in parts.items()}
    median = statistics.median(periods)
    row = {"run": Path(folder).name, "chunks": len(chunks), "period_p50_ms": median, "period_p99_ms": periods[int(len(periods) * 0.99)]}
    row |= {f"{part}_ms": ms for part, ms in medians.items()} | {"rest_ms": median - sum(medians.values())}
    row |= {"fps": steady[-1]["frames"] * 1e3 / median, "first_ms": chunks[0]["wall_ns"] / 1e6}
    row = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
    return row | {key: memory[key] for key in ("planned_bytes", "allocated_bytes", "workspace_bytes", "peak_bytes") if memory}


if len(sys.argv) < 2:
    sys.exit(__doc__)
for folder in sys.argv[1:]:
    print(json.dumps(summarise(folder)))

"""Draws doc comments of library and application crates at random, with the item that each documents.

usage: python3 tools/vocabulary/sample_docs.py SEED [COUNT]     (COUNT: default 60)
"""

import random
import re
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]


def doc_comments():
    listed = subprocess.run(["git", "ls-files", "crates/*/src/*.rs"], cwd=TREE, capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        if not (TREE / path).is_file():
            continue
        block, start = [], 0
        for number, line in enumerate((TREE / path).read_text().splitlines(), 1):
            found = re.match(r"\s*//[/!] ?(.*)", line)
            if found:
                start = start if block else number
                block.append(found.group(1))
            elif block and not line.strip().startswith("#["):
                yield path, start, " ".join(block), line.strip()
                block = []


def main():
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    comments = sorted(set(doc_comments()))
    for path, line, text, item in random.Random(seed).sample(comments, count):
        print(f"{path}:{line}\n  {text}\n  > {item}\n")
    print(f"{count} of {len(comments)} doc comments, seed {seed}")


main()

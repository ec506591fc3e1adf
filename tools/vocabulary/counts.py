"""Counts what a reader meets first: one-word function names, private words, and the field's terms.

usage: python3 tools/vocabulary/counts.py [TREE]     TREE: a checkout (default: this one)

The counts of a commit come from a checkout of it: `git worktree add /tmp/before COMMIT`.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

FUNCTION = re.compile(r'\s*(?:pub(?:\([^)]*\))? )?(?:default |const |async |unsafe |extern "C" )*fn (\w+)')
IMPL = re.compile(r"(?:unsafe )?impl\b")

# Private words with the meanings that the field writes differently. A pattern leaves out the uses
# that stay: dot products, `Iterator::product`, circles in the demo's prompts, powers of two.
PRIVATE = {
    "circle": r"(?<!green )(?<!red )(?<!blue )(?<!yellow )(?<!white )(?<!<)(?<!a )\bcircles?\b",
    "products": r"(?<!dot )(?<!inner )(?<!outer )(?<!cartesian )(?<![.\w])products?\b(?!\(|::)",
    "powers": r"\bpowers\b(?! of (?:two|ten|2|10))",
    "room": r"\brooms\b|\b(?:a|this|pure|each|every|in the) room\b(?! for\b| to\b)",
    "door": r"\bdoors?\b",
    "judge": r"\bjudge[ds]?\b",
    "studio": r"\bstudios?\b",
    "made up": r"\bmade[- ]up\b",
    "by turns": r"\b(?:by|in|tak(?:e|es|ing)) turns\b",
}
FIELD = ["deadlock", "RoPE", "KV cache", "GEMM", "TMA", "VAE", "FlashAttention", "online softmax", "autotun", "DMA copy engine"]


def tracked(tree):
    listed = subprocess.run(["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True).stdout
    return [Path(p) for p in listed.splitlines() if (tree / p).is_file()]


def function_names(text):
    """Names of functions outside of test modules and trait implementations."""
    text = re.split(r"#\[cfg\(test\)\]\nmod \w+ \{", text)[0]
    in_trait_impl = False
    for line in text.split("\n"):
        if IMPL.match(line):
            in_trait_impl = bool(re.search(r"\bfor\b(?!<)", line))
        if line.startswith("}"):
            in_trait_impl = False
        found = FUNCTION.match(line)
        if found and not in_trait_impl:
            yield found.group(1)


def main():
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
    files = tracked(tree)
    rust = [p for p in files if p.suffix == ".rs" and p.parts[0] == "crates"]
    names = collections.Counter()
    for path in rust:
        if "tests" not in path.parts and path.stem != "tests":
            names.update(function_names((tree / path).read_text()))
    total = sum(names.values())
    short = sum(n for name, n in names.items() if "_" not in name)
    print(f"functions (tests and trait implementations aside): {total}, one-word names: {short} ({short / total:.0%})")
    print("most frequent one-word names:", ", ".join(f"{k} {n}" for k, n in names.most_common(400) if "_" not in k)[:300])

    skipped = ("bench/runs/", "fixtures/", "golden/", "models/", "docs/glossary.md", "tools/vocabulary/", "crates/xtask/src/tidy/vocabulary.rs")
    prose = [p for p in files if p.suffix in (".rs", ".md", ".cu", ".cuh", ".py", ".sh", ".toml", ".tir") and not str(p).startswith(skipped)]
    texts = [(tree / p).read_text(errors="replace").replace("_", " ") for p in prose]
    print("\nlines with a private word")
    for word, pattern in PRIVATE.items():
        print(f"  {word:12} {sum(1 for t in texts for line in t.splitlines() if re.search(pattern, line, re.I))}")
    print("\nlines with a term of the field")
    for word in FIELD:
        # Acronyms are counted as they are spelled; "tma" is also a part of "softmax".
        pattern = re.compile(r"\b" + word, re.I if word == word.lower() else 0)
        print(f"  {word:16} {sum(1 for t in texts for line in t.splitlines() if pattern.search(line))}")


main()

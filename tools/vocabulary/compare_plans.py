"""Compares the plan text of two builds: the old text, after the table of renamed keys is applied, must
equal the new text byte for byte.

usage: python3 tools/vocabulary/compare_plans.py OLD_TREE OLD_BINARY NEW_BINARY

OLD_TREE is a checkout of the commit before the renames, because model folders are read from both trees.
Every model folder is planned under every layout below; a layout that the old build rejects must be
rejected by the new build with the same code. Plan digests cover the program text, so a digest is
compared only as present or absent. The keys stand in `renames.tsv` as rows of kind `key`.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
MODELS = ["models/demo", "models/wan2.1-1.3b", "models/wan2.1-14b"]
MESHES = ["tp=1", "tp=2", "tp=3", "tp=4", "tp=2,pp=2", "pp=2"]
STRATEGIES = [["--strategy", "ulysses"], ["--strategy", "megatron"], ["--strategy", "megatron", "OVERLAP", "2"]]
# Every dtype with the defaults, and every other option in bf16.
OPTIONS = [
    ["--dtype", "f32"], ["--dtype", "bf16"], ["--dtype", "fp8"], ["--numerics", "mesh-invariant"],
    *[["--dtype", "bf16", *rest] for rest in (["--topology", "pp1"], ["--cache", "recompute"], ["TRANSPORT", "P2P"], ["TRANSPORT", "nccl"])],
]
FLAGS = {
    "old": {"OVERLAP": "--pieces", "TRANSPORT": "--via", "P2P": "kernels"},
    "new": {"OVERLAP": "--overlap-chunks", "TRANSPORT": "--transport", "P2P": "p2p"},
}
ATTRIBUTE_LIST = re.compile(r"\{([^{}\n]* = [^{}\n]*)\}")


def read_keys():
    """The `key` rows: file kind -> {old: new}."""
    keys = {}
    for line in (HERE / "renames.tsv").read_text().splitlines():
        kind, place, _, old, new = (line.split("\t") + [""] * 5)[:5]
        if kind == "key":
            keys.setdefault(place, {})[old] = new
    return keys


def split_list(text):
    """Splits `a = 1, b = [2, 3], c = "d, e"` at the commas between entries."""
    entries, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        quoted ^= c == '"'
        if not quoted:
            depth += (c in "[(") - (c in "])")
            if c == "," and depth == 0:
                entries.append(text[start:i])
                start = i + 1
    return [e.strip() for e in entries + [text[start:]]]


def translate_program(text, keys):
    """Program text: attributes are renamed and sorted again, as the canonical printer sorts them."""
    attributes, values = keys["IR attribute"], keys["IR attribute value"]

    def rename(match):
        entries = [e.partition(" = ") for e in split_list(match.group(1))]
        renamed = [(attributes.get(k, k), values.get(f"{k} = {v}", v)) for k, _, v in entries]
        return "{" + ", ".join(f"{k} = {v}" for k, v in sorted(renamed)) + "}"

    text = ATTRIBUTE_LIST.sub(rename, text)
    for old, new in keys["IR layout"].items():
        text = re.sub(rf"\b{old}=", f"{new}=", text)
    for old, new in keys["IR op"].items():
        text = re.sub(rf"\b(toperator|ttile)\.{old}\b", rf"\1.{new}", text)
    return text


def translate_mapping(text, keys):
    for old, new in keys["mapping.toml"].items():
        text = text.replace(old.replace("\\n", "\n"), new.replace("\\n", "\n"))
    return text


def translate_json(text, keys):
    for old, new in keys.items():
        text = text.replace(f'"{old}":', f'"{new}":')
    return text


def translate(name, text, keys):
    if name.endswith(".tir"):
        return translate_program(text, keys)
    if name == "mapping.toml":
        return translate_mapping(text, keys)
    if name == "memory.json":
        return translate_json(text, keys.get("memory.json", {}))
    if name == "seal.json":
        return text.replace('"tessera_plan": 1', '"tessera_plan": 2')
    return text


def plan(side, tree, binary, model, arguments):
    """Runs `plan --out` and returns the exit status, the codes that it reported, and every file's text."""
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "plan", model, *[FLAGS[side].get(a, a) for a in arguments], "--out", f"{folder}/plan"]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        files = {str(p.relative_to(f"{folder}/plan")): p.read_text() for p in Path(f"{folder}/plan").rglob("*") if p.is_file()}
    return done.returncode, sorted(set(re.findall(r"\bT\d{4}\b", done.stderr))), files


def mask_digest(text):
    return re.sub(r'"digest": "[0-9a-f]{64}"', '"digest": "…"', text)


def main():
    old_tree, old_binary, new_binary = sys.argv[1:4]
    keys = read_keys()
    plans = rejected = files = differ = 0
    for model, mesh, strategy, options in itertools.product(MODELS, MESHES, STRATEGIES, OPTIONS):
        arguments = ["--mesh", mesh, *strategy, *options]
        old, new = plan("old", old_tree, old_binary, model, arguments), plan("new", REPO, new_binary, model, arguments)
        shown = f"{model} {' '.join(FLAGS['new'].get(a, a) for a in arguments)}"
        if old[:2] != new[:2]:
            differ += 1
            print(f"{shown}: status and codes {old[:2]} became {new[:2]}")
        elif old[0] != 0:
            rejected += 1
        elif old[2].keys() != new[2].keys():
            differ += 1
            print(f"{shown}: files {sorted(old[2])} became {sorted(new[2])}")
        else:
            plans += 1
            for name, text in old[2].items():
                files += 1
                if mask_digest(translate(name, text, keys)) != mask_digest(new[2][name]):
                    differ += 1
                    print(f"{shown}: {name} differs")
    print(f"{plans} plans with {files} files compared, {rejected} layouts rejected with the same codes by both, {differ} differences")
    return 1 if differ else 0


sys.exit(main())

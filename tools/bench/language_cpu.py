"""Times the decoding of one text on the CPU in Tessera and in transformers, alternately, and prints one JSON line.

Both sides continue the same prompt by greedy choice in f32 with a KV cache, and no id ends the text. Neither side times its
start, the prompt, or the warm-up:

* Tessera: the ids behind the first quarter, over the time from the leader's decision on the first of these calls to the end of the
  last. `record.jsonl` has both, so the leader's work, the digests and the record count.
* transformers: the difference between the times of model.generate for all ids and for a quarter of them.

The shapes besides models/tales have random weights: speed does not depend on them, and each side draws its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PROMPT = [17, 4, 99, 5]
TALES = REPO / "models/tales"
QWEN = {
    "hidden_act": "silu", "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "attention_bias": False, "tie_word_embeddings": False, "dtype": "float32", "vocab_size": 8191, "num_attention_heads": 16,
    "num_key_value_heads": 8, "hidden_size": 1024,
}
# One text of a dense model and of one with experts, both of a width at which the weights do not fit into the cache.
SHAPES = {
    "dense": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 6, "intermediate_size": 3072,
    },
    "experts": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4,
        "intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}


def write_model(name, folder):
    """Writes the folder of a shape, in which no id ends a text."""
    if name != "tales":
        (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
        return
    shutil.copytree(TALES, folder, dirs_exist_ok=True)
    for file in ["config.json", "generation_config.json"]:
        keys = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(keys | {"eos_token_id": None}, indent=1))


def serve_transformers(folder, threads, ids):
    """Prints the rate and the ids of one measurement for each line of the standard input."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if (folder / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model = model.eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])

    def timed(count):
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, use_cache=True, do_sample=False)
        return time.perf_counter() - start, out[0, len(PROMPT):].tolist()

    quarter = ids // 4
    with torch.inference_mode():
        timed(quarter)
        print(json.dumps({"torch": torch.__version__}), flush=True)
        for _ in sys.stdin:
            short, _ = timed(quarter)
            long, out = timed(ids)
            print(json.dumps({"rate": (ids - quarter) / (long - short), "ids": out}), flush=True)


def time_tessera(binary, folder, name, threads, ids):
    """Returns the ids per second of one run, and the ids."""
    with tempfile.TemporaryDirectory() as out:
        run = Path(out) / "run"
        command = [binary, "generate", folder, "--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", str(ids), "--threads",
                   str(threads), "--format", "json", "--out", run]
        if name != "tales":
            command += ["--weights", "synthetic:1"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
        text = json.loads(done.stdout.strip().splitlines()[-1])
    # The first call reads the prompt and chooses the first id.
    calls = [line["pipeline"] for line in lines if line["kind"] == "chunk"][ids // 4:]
    return len(calls) / (calls[-1]["done_ns"] - calls[0]["decided_ns"]) * 1e9, find_ids(text)


def find_ids(value):
    """Returns the generated ids in the output of `tessera generate --format json`."""
    texts = value["texts"] if isinstance(value, dict) and "texts" in value else [value]
    return texts[0]["ids"]


def measure(args, name, threads):
    """Runs both sides alternately. Returns the rates of each."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(name, Path(folder))
        command = [args.python, __file__, "--serve", folder, "--threads", str(threads), "--ids", str(args.ids)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        if not peer.stdout.readline():
            sys.exit("transformers did not start")
        rates = {"tessera": [], "transformers": []}
        equal = None
        for _ in range(args.rounds):
            rate, ours = time_tessera(args.ours, Path(folder), name, threads, args.ids)
            rates["tessera"].append(rate)
            peer.stdin.write("\n")
            peer.stdin.flush()
            reply = json.loads(peer.stdout.readline())
            rates["transformers"].append(reply["rate"])
            if name == "tales":
                pairs = zip(ours, reply["ids"])
                equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))
        peer.stdin.close()
        peer.wait()
    medians = {side: statistics.median(r) for side, r in rates.items()}
    result = {"shape": name, "threads": threads, "ratio": round(medians["tessera"] / medians["transformers"], 2)}
    result |= {side: {"median": round(medians[side], 1), "rounds": [round(x, 1) for x in r]} for side, r in rates.items()}
    return result | ({"equal_ids": equal} if equal is not None else {})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=Path, default=REPO / "target/release/tessera", help="the binary, built with --release")
    parser.add_argument("--python", default=sys.executable, help="a Python interpreter with transformers")
    parser.add_argument("--shapes", default="tales,dense,experts", help="names of shapes, separated by commas")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side")
    parser.add_argument("--ids", type=int, default=200, help="ids of a text")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve_transformers(args.serve, int(args.threads), args.ids)
    results = []
    for name in args.shapes.split(","):
        for threads in map(int, args.threads.split(",")):
            load = os.getloadavg()[0]
            result = measure(args, name, threads) | {"load_before": round(load, 2)}
            print(json.dumps(result), file=sys.stderr)
            results.append(result)
    print(json.dumps({"ids": args.ids, "cores": os.cpu_count(), "results": results}))


if __name__ == "__main__":
    main()

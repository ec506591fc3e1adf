"""Trains the language model models/tales on generated tales, measures it and writes its folder.

    python tools/language/train.py                                  # the committed model, one thread
    python tools/language/train.py --out /tmp/tales --steps 20      # a dry run

All random numbers of a run come from one seed, on one thread.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tales import KINDS, make_tale

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "fixtures"))
from make_lm import Oracle

BEGIN, END = "<|begin|>", "<|end|>"
VOCABULARY, ROW, IGNORED = 896, 256, -100
TOKENIZER_TALES, HELD_OUT = 20000, 1000
# The last sentence is the part of a tale that requires memory.
LAST_WEIGHT = 2.0
GOLDEN_PROMPTS = ["The red circle", "The blue square", "The green triangle"]
GOLDEN_IDS, GOLDEN_LEAD = 120, 1e-3
CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- message['content'] }}"
    "{%- if not loop.last %}{{- ' ' }}{%- endif %}{%- endfor %}"
)


def train_tokenizer(seed):
    rng = random.Random(f"tokenizer {seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BEGIN, END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((make_tale(rng).text for _ in range(TOKENIZER_TALES)), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def save_tokenizer(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, "model_max_length": 512,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "The red circle moves left."
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    chat = [{"role": "user", "content": text}]
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == BEGIN + text


def encode(tokenizer, tale):
    """Returns the ids of a tale with <|begin|> and <|end|>, and the range of its last sentence in them."""
    start = len(tokenizer.encode(tale.body).ids)
    stop = len(tokenizer.encode(f"{tale.body} {tale.last}").ids)
    return tokenizer.encode(tale.text).ids + [tokenizer.token_to_id(END)], start, stop


def rows(tokenizer, rng, held_out, stats):
    """Yields rows of whole tales: inputs, targets, weights of the targets and the number of the tale, each [ROW].

    A tale is placed into the first row of the pool order in which it fits, so about one position in fifty stays empty."""
    pool = []
    while True:
        row = [[0] * ROW, [IGNORED] * ROW, [0.0] * ROW, [-1] * ROW]
        used = count = 0
        while True:
            while len(pool) < 64:
                tale = make_tale(rng)
                if tale.text not in held_out:
                    pool.append(encode(tokenizer, tale))
            fits = next((i for i, (ids, _, _) in enumerate(pool) if used + len(ids) - 1 <= ROW), None)
            if fits is None:
                break
            ids, start, stop = pool.pop(fits)
            n = len(ids) - 1
            weights = [1.0] * n
            weights[start - 1:stop - 1] = [LAST_WEIGHT] * (stop - start)
            for column, values in zip(row, (ids[:-1], ids[1:], weights, [count] * n)):
                column[used:used + n] = values
            used, count = used + n, count + 1
        stats["tales"] += count
        stats["ids"] += used
        yield row


def token_losses(model, inputs, targets, tale):
    """Returns the losses [B, T] and whether the likeliest id is the target. A position attends to its own tale only."""
    same = tale[:, None, :, None] == tale[:, None, None, :]
    logits = model(input_ids=inputs, attention_mask=same.tril(), use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets), logits.argmax(-1) == targets


def train(model, batches, args):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)
    warmup = max(1, args.steps // 20)
    start, mean = time.time(), None
    for step in range(args.steps):
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, args.steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / warmup, decay)
        columns = zip(*(next(batches) for _ in range(args.batch)))
        inputs, targets, weights, tale = map(torch.tensor, columns)
        losses, _ = token_losses(model, inputs, targets, tale)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {mean:.4f}, {time.time() - start:.0f} s", flush=True)
    return time.time() - start


@torch.no_grad()
def evaluate(model, tokenizer, tales):
    """Returns the mean loss per id, and the share of tales with a correct last sentence: of all, and per kind.

    Greedy decoding produces a sentence exactly if each of its ids is the likeliest after the true ids before it, so one forward
    pass suffices."""
    total = count = 0
    right, seen = Counter(), Counter()
    for tale in tales:
        ids, start, stop = encode(tokenizer, tale)
        inputs, targets = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
        losses, hits = token_losses(model, inputs, targets, torch.zeros_like(inputs))
        total, count = total + losses.sum().item(), count + targets.numel()
        right[tale.kind] += bool(hits[0, start - 1:stop - 1].all())
        seen[tale.kind] += 1
    return total / count, sum(right.values()) / len(tales), {k: right[k] / seen[k] for k in sorted(seen)}


@torch.no_grad()
def sample(model, tokenizer, prompt, seed, temperature):
    ids, generator = tokenizer.encode(prompt).ids, torch.Generator().manual_seed(seed)
    while ids[-1] != tokenizer.token_to_id(END) and len(ids) < 200:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).item())
    return tokenizer.decode(ids)


def golden(folder, tokenizer):
    """Returns the greedy continuation of the first prompt for which the best logit always leads clearly, computed in f64."""
    oracle = Oracle(Qwen3Config.from_pretrained(folder), stored_weights(folder), exact=True)
    for prompt in GOLDEN_PROMPTS:
        start = tokenizer.encode(prompt).ids
        ids, lead = list(start), math.inf
        while len(ids) - len(start) < GOLDEN_IDS and ids[-1] != tokenizer.token_to_id(END):
            best = oracle.logits(ids)[-1].topk(2)
            lead = min(lead, (best.values[0] - best.values[1]).item())
            ids.append(best.indices[0].item())
        print(f"golden prompt {prompt!r}: smallest lead {lead:.4f}")
        if lead >= GOLDEN_LEAD:
            continuation = ids[len(start):]
            return {"prompt": prompt, "ids": start, "continuation": continuation, "text": tokenizer.decode(continuation)}
    raise AssertionError("every golden prompt has two logits that are almost equal")


def stored_weights(folder):
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "tales")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch", type=int, default=4, help="rows of 256 ids per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    tokenizer = train_tokenizer(args.seed)
    save_tokenizer(tokenizer, args.out)
    rng = random.Random(f"held out {args.seed}")
    held_out = [make_tale(rng) for _ in range(HELD_OUT)]
    words = {w for tale in held_out for w in tale.text.replace(".", " ").replace(",", " ").split()}
    lengths = [len(encode(tokenizer, tale)[0]) for tale in held_out]
    print(f"{len(KINDS)} kinds of tales, {len(words)} words, {tokenizer.get_vocab_size()} ids, "
          f"{sum(lengths) / HELD_OUT:.0f} ids per tale, at most {max(lengths)}")

    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=512, initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END), dtype=torch.float32,
    ))
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    stats = Counter()
    batches = rows(tokenizer, random.Random(f"training {args.seed}"), {tale.text for tale in held_out}, stats)
    seconds = train(model, batches, args)
    print(f"trained in {seconds:.0f} s on {stats['tales']} tales, {stats['ids']} ids")

    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    loss, share, kinds = evaluate(model, tokenizer, held_out)
    print(f"held-out tales: loss {loss:.4f} per id, last sentence correct in {share:.1%}")
    print("  " + ", ".join(f"{kind} {value:.0%}" for kind, value in kinds.items()))
    for seed, (prompt, temperature) in enumerate([("The red circle", 0.8), ("One evening", 0.8), ("", 1.0)]):
        print(f"sample, temperature {temperature}: {sample(model, tokenizer, prompt, seed, temperature)}")
    reference = golden(args.out, tokenizer)
    (args.out / "golden.json").write_text(json.dumps(reference) + "\n")
    print(f"golden: {reference['prompt']}{reference['text']}")


if __name__ == "__main__":
    main()

"""Measures how far transformers in bf16, and with the GEMMs of the policy fp8 in e4m3, is from the logits in fixtures/lm.

The numbers are the limits in crates/tessera/tests/low_precision.rs. Under fp8 the projections of the queries, keys, values, gates and
ups of a block have operands in e4m3, with a scale per token and one per output channel; experts stay bf16.

    python tools/language/low_precision.py                     # all folders, 60 s, one thread
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2] / "fixtures" / "lm"
E4M3 = {"q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj"}


def quantize_rows(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    scale[scale == 0] = 1
    return (x.float() / scale).to(torch.float8_e4m3fn).float(), scale


def use_e4m3(model):
    """Replaces the forward function of every linear layer whose operands the policy quantizes."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.rsplit(".", 1)[-1] in E4M3:
            rows, scales = quantize_rows(layer.weight)

            def forward(x, rows=rows, scales=scales, bias=layer.bias):
                x, x_scales = quantize_rows(x)
                y = x @ rows.T * x_scales * scales[:, 0]
                return (y if bias is None else y + bias.float()).to(torch.bfloat16)

            layer.forward = forward


def main():
    torch.set_num_threads(1)
    for folder in sorted(p for p in ROOT.iterdir() if p.is_dir()):
        reference = load_file(folder / "reference.safetensors")
        ids, expected = reference["prompt.1"].long()[None], reference["logits.1"].double().reshape(-1)
        errors = []
        for change in (lambda model: None, use_e4m3):
            options = {"dtype": torch.bfloat16, "experts_implementation": "eager"}
            model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
            change(model)
            with torch.no_grad():
                far = model(ids).logits[0].double().reshape(-1) - expected
            errors.append((far.square().sum() / expected.square().sum()).sqrt().item())
        print(f"{folder.name}: bf16 {errors[0]:.2e}, fp8 {errors[1]:.2e}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Reduces TORCH_TRACE folders to what `tessera check` and `tessera doctor` read, for use as fixtures.

    tools/torch/reduce_trace.py RECORDED OUT

Keeps the lines of the records below as PyTorch wrote them, drops all other records, the payloads that
are not read, and of the metrics all keys but those that are read.
"""

import json
import os
import re
import sys

GRAPHS = ("dynamo_output_graph", "aot_forward_graph", "aot_backward_graph", "aot_inference_graph", "inductor_post_grad_graph")
TEXTS = ("dynamo_graph_break_reason", "recompile_reasons")
CACHES = re.compile(r"(fx_graph_cache|aotautograd_cache)_(hit|miss|bypass)$")
METRICS = ("compilation_metrics", "bwd_compilation_metrics")
METRIC_KEYS = (
    "compile_id co_name co_filename co_firstlineno cache_size graph_op_count fail_type fail_reason recompile_reason restart_reasons "
    "num_graph_breaks is_forward is_runtime cudagraph_skip_reason pytorch_version"
).split()


def reduce_header(value):
    """Returns the header to write, or None; and whether its payload is read."""
    name = value.get("artifact", {}).get("name", "")
    for key in METRICS:
        if key in value:
            metrics = value[key]
            value[key] = {k: metrics[k] for k in METRIC_KEYS if k in metrics}
            if limit := json.loads(metrics.get("dynamo_config") or "{}").get("recompile_limit"):
                value[key]["dynamo_config"] = json.dumps({"recompile_limit": limit})
            return value, False
    if any(key in value or key == name for key in GRAPHS + TEXTS):
        value.get("dynamo_output_graph", {}).pop("sizes", None)
        return value, True
    keep = "str" in value or "dynamo_start" in value or CACHES.match(name)
    return (value if keep else None), False


def reduce_log(path, out):
    record, is_payload_read, event = None, False, []
    with open(path, errors="replace") as lines, open(out, "w") as to:

        def end_event():
            if any('"CUDAGraphNode.record"' in line for line in event):
                to.writelines(event)
            event.clear()

        for line in lines:
            if line.startswith("\t"):
                if event:
                    event.append(line)
                elif is_payload_read:
                    to.write(line)
                continue
            end_event()
            prefix, _, text = line.partition("] ")
            value = json.loads(text)
            if "chromium_event" in value:
                event.append(line)
                continue
            record, is_payload_read = reduce_header(value)
            if record is not None:
                to.write(f"{prefix}] {json.dumps(record)}\n")
        end_event()


def main():
    recorded, out = sys.argv[1:]
    for case in sorted(os.listdir(recorded)):
        folder = os.path.join(out, case)
        os.makedirs(folder, exist_ok=True)
        for file in sorted(os.listdir(os.path.join(recorded, case))):
            if file.startswith("dedicated_log"):
                name = re.sub(r"_[^_]{8}\.log$|_.{8}\.log$", "_recorded.log", file)
                reduce_log(os.path.join(recorded, case, file), os.path.join(folder, name))


if __name__ == "__main__":
    main()

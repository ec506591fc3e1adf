//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T1105: "unknown executor profile",
    "A profile describes how efficiently an executor uses a device: `torch-2.11` and \
`megatron` are PyTorch with NCCL for inference and for large-scale training, `tessera` is this \
project's own backends, `ideal` reaches every peak and is a bound, not a forecast. A cluster \
names its default profile.\n\n\
A profile may also be a TOML file: copy the closest file of crates/tessera-cost/profiles, edit \
its curves and pass the path of the copy.";

    T1106: "profile's curve is out of range",
    "A `share` is above 0 and at most 1 (the `share` of a GEMM, which `max_efficiency` \
limits, is at most 2). A value whose name ends in `half` and a time are not negative, and \
contention is at least 1. A GEMM curve is `share · m/(m+m_half) · n/(n+n_half) · k/(k+k_half)`, \
limited to `max_efficiency`. With non-negative halves the curve never falls as a GEMM grows, \
and the search relies on this.\n\n\
Each collective needs at least one cost line, and each table states the origin of its numbers \
in `source`. `validated` lists jobs: training, prefill, decode and stream.";

    T1115: "tasks of an estimate wait for each other",
    "A timeline is estimated by simulating the tasks of all streams. Here some streams deadlock: the first task of \
each waits for an event that only a later task would record, or for members of a collective that are queued behind another \
collective on their own stream.

The real program would hang at the same place. The diagnostic names the first task of each blocked stream. Look for two \
collectives that two ranks issue in different orders, or for a stage that waits to receive before it has posted the send that \
its neighbour waits for.";

    T1116: "too little of the collective time is overlapped",
    "The overlap ratio is the share of all collective time during which the same rank computes. Below the goal, ranks mostly \
wait for each other. The notes list each collective with its overlapped time. An exposed collective lies between two GEMMs, each of \
which needs the complete result of the other.

If a GEMM is split into row chunks, the collective of one chunk overlaps the next chunk's GEMM. With two micro-batches side by side, \
one computes while the other communicates. Chunks of fewer than about a thousand rows slow the GEMM down by more than they hide.";

    T1117: "two bars use the compute of one device at the same time",
    "A timeline may show two GEMMs side by side on two tracks, but a device has one set \
of compute units. Kernels on two streams either run one after the other, so that the timeline \
is longer than drawn, or share the units, so that both are slower than drawn.\n\n\
Draw the two bars one after the other, or plan with a device that is partitioned between \
streams and use each partition's own rates.";

    T1118: "a bar starts before its input ends",
    "A task cannot start before its input is written. A timeline that shows an earlier start silently assumes that the \
input is produced in chunks and that the first chunk is enough to start with.

State the chunks in the mapping, so that the plan accounts for their cost, or move the bar behind its input.";

    T1119: "a pipeline's bubble is too large, or its timeline is incomplete",
    "While a pipeline fills and drains, its stages idle. With p equal stages and m micro-batches each stage idles for (p-1) of \
(m+p-1) turns. More micro-batches lower this share, and so do schedules that fill the bubble with weight gradients.

A bar counts as missing when a stage does not run a micro-batch that another stage runs. The share includes the missing bars, \
because an incomplete pipeline looks shorter than it is.";
}

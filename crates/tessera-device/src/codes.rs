//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0801: "backend cannot run this program",
    "The program is well formed, but this backend has no kernel for one of its ops in the required dtype and \
layout. The message names the op. Try another backend, strategy or dtype.";

    T0802: "call does not provide the data that the program reads",
    "A program reads its call scalars and input tensors by name. One of them is missing, has the wrong type, or has the wrong \
number of elements. Leader and worker validate envelopes against the plan before a program runs, so this error means that \
the plan and the programs differ.";

    T0803: "op accesses memory that holds no valid value",
    "A run with poisoned memory fills temporaries that hold no value with a NaN pattern, and checks every access of an op \
to a temporary. An op read a temporary that nothing has written, that was freed, or that another stream writes without an \
event between the two; or it overwrote a temporary that another stream may still read. On a device such a run returns \
other numbers from time to time.\n\n\
The message names the op, the slot and the other op. Record an event after the earlier op, and start the later op after \
that event. A verified plan has this event, so a drill, a program that bypasses the verifier, or a kernel that leaves \
elements unwritten causes this error.";

    T0804: "host has too little memory",
    "A rank allocates its weights, buffers and temporaries on the host before its first call. The message names the bytes \
that a tensor or all ranks of this host take and the bytes that this host has available: its free and reclaimable memory, or what the \
container's limit leaves, if that is less. The allocation is refused, because the operating system would otherwise end the process \
in the middle of the load.\n\n\
Compare the number in the message with the shapes in `config.json` and `stream.toml`: an extra digit there is the usual \
cause. If the sizes are right, use more ranks on more hosts, a smaller window, smaller frames, or fewer positions of texts.";

    T0805: "allocated memory differs from the plan",
    "After the warm-up, each rank reports the bytes that its backend allocated for weights, buffers and temporaries. On this \
rank they differ from the sum in the sealed plan by more than 5 %. The run continues, and its results are not affected; but a \
budget that was computed from the plan is wrong by as much, and a rank that barely fits may not fit.\n\n\
The record states both numbers for each rank and chunk, and the temporaries of each phase. A weight that the backend \
holds in two layouts, or padding of very small shapes, explains a small model; on a large model, report it as a bug.";

    T0806: "backend has no second tier of memory for experts",
    "The plan states that experts lie in host memory and a few of them in fast memory. The backends for CPUs and NVIDIA GPUs \
move them. Another backend may not, and a machine whose cluster.toml states `host.bytes` 0 has no such memory. The run or the \
estimate is refused before a rank starts, because it would otherwise hold every expert, or leave out the transfers, and say \
nothing.\n\n\
Run the plan on CPUs or GPUs, estimate it on a machine with host memory, or plan without `runtime.register_prefetch`.";
}

//! The diagnostic codes of this crate, in order of id.

use tessera_base::Code;

/// All codes of this crate, for the registry of the binary.
pub const CODES: &[&Code] = &[
    &T0020, &T0021, &T0022, &T0023, &T0024, &T0028, &T0029, &T0036, &T0045, &T0048, &T0049, &T0050, &T0052,
    &T0053, &T0061,
];

/// Reported when a trace does not exist or cannot be read.
pub static T0020: Code = Code {
    id: "T0020",
    title: "trace cannot be read",
    page: "A trace is one file of JSON lines per rank, named .jsonl, or a folder of such files. One of them cannot be opened, \
    became unreadable, or is empty. An empty file is rejected because it may never have been flushed: for a rank that launched \
    nothing, write the single line {\"rank\": 3}.",
};

/// Reported when a line is not a JSON object.
pub static T0021: Code = Code {
    id: "T0021",
    title: "line of a trace is not a JSON object",
    page: "Each line of a trace is one JSON object in UTF-8. The message names the byte where this line stops being valid, or \
    the limit that it exceeds. A truncated last line comes from a writer that was killed: remove the line, and the lines before \
    it are verified.\n\nThe ranks are compared only if every line can be read, because a skipped line would look like a launch \
    that never happened.",
};

/// Reported when a line has an unknown, missing or invalid field.
pub static T0022: Code = Code {
    id: "T0022",
    title: "field of a trace is wrong",
    page: "A line declares a rank ({\"rank\": 0}), declares a group ({\"group\": \"tp0\", \"ranks\": [0, 1]}), or is a launch with \
    group, op, dtype and count. Here a key is unknown or missing, or its value is invalid. Unknown keys are rejected because a \
    typo in an optional key would disable the comparison of that key. docs/guides/trace-import.md lists the keys.",
};

/// Reported when a launch uses an undeclared group.
pub static T0023: Code = Code {
    id: "T0023",
    title: "group of a trace is not declared",
    page: "A launch names a group whose members its file has not declared yet. Each rank's file \
declares the groups that it uses, as the rank itself created them, before the first use: on a \
line of its own, {\"group\": \"tp0\", \"ranks\": [0, 1]}, or with the key `ranks` on the line \
of the launch. Only `world` needs no declaration; it means all ranks of the trace. Members are \
never taken from another rank's file, because ranks that created different groups are one of \
the errors that the trace must show.",
};

/// Reported when ranks created different groups under one name.
pub static T0024: Code = Code {
    id: "T0024",
    title: "ranks created different groups under one name",
    page: "Two declarations of the same group name share a rank but have different members. If the program did the same, these \
    ranks use different communicators under one name, and their first collective hangs. Look for ranks that create groups from \
    different lists (a stale world size, a node list in another order) or in a different order.\n\nGroups of one name that share \
    no rank count as instances of one kind, such as the tp groups of two pipeline stages, and are valid.",
};

/// Reported when the files are not exactly one per rank.
pub static T0028: Code = Code {
    id: "T0028",
    title: "files of a trace are not one per rank",
    page: "Every rank has one file. Its rank number is the last number in the file's name (rank-03.jsonl, trace_3.jsonl), or the \
    first line declares it as {\"rank\": 3}; if both exist, they must agree. {\"rank\": 3, \"world_size\": 8} also gives the number of \
    ranks, so that a missing file is noticed even if no group names its rank. Here a file has no number or two different ones, two \
    files have the same number, or a group names a rank without a file. In the last case the existing ranks are still compared, but \
    the trace may still hang: the rank without a file is often the one that hung or died first.",
};

/// Reported when a drill cannot run.
pub static T0029: Code = Code {
    id: "T0029",
    title: "a drill could not be run",
    page: "The drill itself failed, not the check under test: its folder could not be created, or its stream could not be \
    started on this machine. The message gives the reason. A drill that ran but had another outcome than its table entry is \
    reported as RED, with the expected and the observed failure.",
};

/// Reported when a folder has neither a record nor flight records.
pub static T0036: Code = Code {
    id: "T0036",
    title: "folder is not a run directory",
    page: "An autopsy reads a run directory: record.jsonl, flight/rank-N.jsonl and plan. This \
folder has neither of the first two. A folder that contains only flight records is accepted \
too, for example when they were collected from several hosts: name them rank-0.jsonl and so on.\n\n\
A file that is missing, truncated or from another run does not stop the autopsy: it notes the \
file and reads the rest.",
};

/// Reported when a folder to check is not a usable run directory, or is named twice.
pub static T0045: Code = Code {
    id: "T0045",
    title: "folder holds no run to check",
    page: "The bring-up checklist has six items, and each item is one check of recorded runs. \
It needs the folders that `tessera stream --out` wrote, with the record, the sealed plan and \
the flight records. One of the named folders has no record.jsonl, has no plan that passes \
verification again, or is named twice. Name run directories; three runs with the same plan, \
prompts, seed and number of chunks are enough to evaluate every item.",
};

/// The operating system refused threads or shared memory, or a collective timed out.
pub static T0048: Code = Code {
    id: "T0048",
    title: "machine cannot be measured",
    page: "`tessera measure` runs the CPU backend's kernels on threads, and collectives through the shared memory that the ranks \
of a stream use. The operating system refused threads or shared memory, or a member of a collective did not arrive within twenty \
seconds. Possible causes are a machine that swaps, or container limits that are too low for two ranks. `--ranks` sets the \
number of ranks.",
};

/// A device that this build cannot measure.
pub static T0049: Code = Code {
    id: "T0049",
    title: "this build measures only CPUs",
    page: "`tessera measure` measures CPUs only, although `tessera stream` also runs on GPUs. \
It rejects --device gpu, because figures that nobody measured would look like measurements. To \
plan for GPUs, name a cluster of the catalog, as in `tessera plan --cluster hgx-h200`; each of \
its figures names its source. To measure the CPU, omit --device.",
};

/// A number of ranks that this machine cannot run.
pub static T0050: Code = Code {
    id: "T0050",
    title: "invalid number of ranks",
    page: "Each rank is a thread that is busy throughout the measurement, so the number of ranks must be at least one and at most the \
number of cores. The result is valid for this number of ranks: each rank has its share of the cores, as when `tessera \
stream` runs a mesh of the same size.",
};

/// Reported when no mapping of a query can run and memory is not the only reason.
pub static T0052: Code = Code {
    id: "T0052",
    title: "plan cannot be estimated",
    page: "The doctor first estimates the unchanged plan. None of the mappings that the query allows can \
run, and memory is not the only reason: axes, heads, experts or batch do not fit. `tessera plan --why` shows the \
arithmetic and the legal neighbours. Examine the plan again once one of its mappings is legal.",
};

/// Folders that cannot be examined together.
pub static T0053: Code = Code {
    id: "T0053",
    title: "folders cannot be examined together",
    page: "The doctor compares several runs with each other, so all folders must be run folders \
of `tessera stream --out`. Examine a plan or an estimate separately. The options --overflows, \
--drifted, --a2a-rate and --peak-gb describe a run on another machine; they apply to a recipe, \
a model or an estimate, and not to a recorded run or a sealed plan.",
};

/// Reported when a rank of a benchmark exits or stops responding.
pub static T0061: Code = Code {
    id: "T0061",
    title: "a rank of a benchmark exited or stopped responding",
    page: "`tessera bench dit` runs one process for each GPU. One of them exited, or wrote \
nothing for three minutes. Its last output follows; the other ranks were stopped with it. The \
usual cause is too little free memory on a GPU that other processes use: `tessera doctor` lists \
the GPUs, nvidia-smi shows the processes on them. The same code rejects a --size that is given \
twice or is not a whole number of tokens, before a process starts.",
};

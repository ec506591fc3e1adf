//! The diagnostic codes of this crate, in order of id.

tessera_base::codes! {
    T0020: "trace cannot be read",
    "A trace is one file of JSON lines per rank, named .jsonl, or a folder of such files. One of them cannot be opened, \
    became unreadable, or is empty. An empty file is rejected because it may never have been flushed: for a rank that launched \
    nothing, write the single line {\"rank\": 3}.";

    T0021: "line of a trace is not a JSON object",
    "Each line of a trace is one JSON object in UTF-8. The message names the byte where this line stops being valid, or \
    the limit that it exceeds. A truncated last line comes from a writer that was killed: remove the line, and the lines before \
    it are verified.\n\nThe ranks are compared only if every line can be read, because a skipped line would look like a launch \
    that never happened.";

    T0022: "field of a trace is wrong",
    "A line declares a rank ({\"rank\": 0}), declares a group ({\"group\": \"tp0\", \"ranks\": [0, 1]}), or is a launch with \
    group, op, dtype and count. Here a key is unknown or missing, or its value is invalid. Unknown keys are rejected because a \
    typo in an optional key would disable the comparison of that key. docs/guides/trace-import.md lists the keys.";

    T0023: "group of a trace is not declared",
    "A launch names a group whose members its file has not declared yet. Each rank's file \
declares the groups that it uses, as the rank itself created them, before the first use: on a \
line of its own, {\"group\": \"tp0\", \"ranks\": [0, 1]}, or with the key `ranks` on the line \
of the launch. Only `world` needs no declaration; it means all ranks of the trace. Members are \
never taken from another rank's file, because ranks that created different groups are one of \
the errors that the trace must show.";

    T0024: "ranks created different groups under one name",
    "Two declarations of the same group name share a rank but have different members. If the program did the same, these \
    ranks use different communicators under one name, and their first collective hangs. Look for ranks that create groups from \
    different lists (a stale world size, a node list in another order) or in a different order.\n\nGroups of one name that share \
    no rank count as instances of one kind, such as the tp groups of two pipeline stages, and are valid.";

    T0028: "files of a trace are not one per rank",
    "Every rank has one file. Its rank number is the last number in the file's name (rank-03.jsonl, trace_3.jsonl), or the \
    first line declares it as {\"rank\": 3}; if both exist, they must agree. {\"rank\": 3, \"world_size\": 8} also gives the number of \
    ranks, so that a missing file is noticed even if no group names its rank. Here a file has no number or two different ones, two \
    files have the same number, or a group names a rank without a file. In the last case the existing ranks are still compared, but \
    the trace may still hang: the rank without a file is often the one that hung or died first.";

    T0029: "a drill could not be run",
    "The drill itself failed, not the check under test: its folder could not be created, or its stream could not be \
    started on this machine. The message gives the reason. A drill that ran but had another outcome than its table entry is \
    reported as RED, with the expected and the observed failure.";

    T0036: "folder is not a run directory",
    "An autopsy reads a run directory: record.jsonl, flight/rank-N.jsonl and plan. This \
folder has neither of the first two. A folder that contains only flight records is accepted \
too, for example when they were collected from several hosts: name them rank-0.jsonl and so on.\n\n\
A file that is missing, truncated or from another run does not stop the autopsy: it notes the \
file and reads the rest.";

    T0045: "folder holds no run to check",
    "The bring-up checklist has six items, and each item is one check of recorded runs. \
It needs the folders that `tessera stream --out` wrote, with the record, the sealed plan and \
the flight records. One of the named folders has no record.jsonl, has no plan that passes \
verification again, or is named twice. Name run directories; three runs with the same plan, \
prompts, seed and number of chunks are enough to evaluate every item.";

    T0048: "machine cannot be measured",
    "`tessera measure` runs the CPU backend's kernels on threads, and collectives through the shared memory that the ranks \
of a stream use. The operating system refused threads or shared memory, or a member of a collective did not arrive within twenty \
seconds. Possible causes are a machine that swaps, or container limits that are too low for two ranks. `--ranks` sets the \
number of ranks.";

    T0049: "this build measures only CPUs",
    "`tessera measure` measures CPUs only, although `tessera stream` also runs on GPUs. \
It rejects --device cuda, because figures that nobody measured would look like measurements. To \
plan for GPUs, name a cluster of the catalog, as in `tessera plan --cluster hgx-h200`; each of \
its figures names its source. To measure the CPU, omit --device.";

    T0050: "invalid number of ranks",
    "Each rank is a thread that is busy throughout the measurement, so the number of ranks must be at least one and at most the \
number of cores. The result is valid for this number of ranks: each rank has its share of the cores, as when `tessera \
stream` runs a mesh of the same size.";

    T0052: "plan cannot be estimated",
    "The doctor first estimates the unchanged plan. None of the mappings that the query allows can \
run, and memory is not the only reason: axes, heads, experts or batch do not fit. `tessera plan --why` shows the \
arithmetic and the legal neighbours. Examine the plan again once one of its mappings is legal.";

    T0053: "folders cannot be examined together",
    "The doctor compares several runs with each other, so all folders must be run folders \
of `tessera stream --out`. Examine a plan, an estimate or a folder of compile traces separately. The options --overflows, \
--drifted, --a2a-rate and --peak-gb describe a run on another machine; they apply to a recipe, \
a model or an estimate, and not to a recorded run or a sealed plan. The options --budget and --ranks apply to a folder of \
compile traces alone.";

    T0061: "a rank of a benchmark exited or stopped responding",
    "`tessera bench dit` runs one process for each GPU. One of them exited, or wrote \
nothing for three minutes. Its last output follows; the other ranks were stopped with it. The \
usual cause is too little free memory on a GPU that other processes use: `tessera doctor` lists \
the GPUs, nvidia-smi shows the processes on them. The same code rejects a --size that is given \
twice or is not a whole number of tokens, before a process starts.";

    T0062: "file of captured messages cannot be read",
    "A file of captured messages holds one frame after the other: a header of 28 bytes, the meta, and the tensors that \
    the meta lists. This file cannot be opened, or it ends inside a frame. The process that wrote it may have been killed; the frames \
    before are complete, and the message gives the offset of the frame that is cut short.\n\n`tessera stream --wire-dump` writes such a \
    file for each rank, into the folder wire of the run.";

    T0063: "gates do not allow a run in performance mode",
    "`tessera stream --performance` starts only if the file of --gate-record shows that the checks came first: every gate \
    in it passes or does not apply, and the runs behind the gates completed with the same plan, build and kind of machine, not longer \
    ago than --max-gate-age. The message names each reason. A gate that was withheld, for example because the run was too short, does \
    not pass.\n\nRun the plan without --performance, then write the file with `tessera record gates RUN --gate-record FILE` or \
    `tessera bringup RUN RUN RUN --gate-record FILE`. `--override-gates REASON` starts the run anyway; the terminal, record.jsonl and the \
    report then show the reason.";

    T0065: "list of hosts cannot be read",
    "`tessera launch` takes hosts as `--hosts node[01-03]:4,spare:4`: names, with ranges of numbers in brackets and the number of \
ranks after a colon, or as a file with one host per line, `node01 slots=4` or `node01:4`. A line that begins with # is a comment. \
Each host is named once. `--hosts` of `tessera plan` and `tessera stream` also takes a number of equal hosts, 1 to 65,536; whatever consists \
of digits alone is such a number there, and no name. A list holds at most as many hosts.\n\n\
The message shows the text that cannot be read and the reason. Correct it, or write the ranks of each host: `a:4,b:4`.";

    T0066: "hosts do not fit the plan",
    "The numbers of ranks of the hosts must add up to the ranks of the plan, and either all hosts state a number or none. Without \
numbers, every host gets the same number of ranks of the mesh, and ranks outside the mesh, which need no device, run on the first \
host besides. Ranks are placed in order: the first host has the first ranks.\n\n\
Change the hosts, or plan with a mesh that they can hold.";
}

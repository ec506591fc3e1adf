//! The diagnostic codes of this crate, in order of id: `T140` Flight Recorder dumps, `T141` and `T142`
//! compile traces, `T143` to `T144` lint rules.

tessera_base::codes! {
    T1400: "Flight Recorder dump cannot be read",
    "A Flight Recorder dump is one file per rank, a pickle or the JSON form of it, as PyTorch writes it when a collective times \
    out. The file ends early, has another form, or is larger in one value than any dump. The message gives the byte. A dump that is \
    cut off comes from a process that was killed while it wrote: leave the file out, and the rank counts as one without a dump.";

    T1401: "dump would run code",
    "Pickle can name any function to be called when it is loaded. A Flight Recorder dump holds numbers, text, lists and dicts alone, \
    so this reader has no opcode that imports, builds or calls, and it stopped at the first one. Nothing was run. The file is not what \
    PyTorch wrote: do not load it with Python's pickle either.";

    T1402: "dump has an unknown format version",
    "The analysis knows the formats 2.0 to 2.10 of the Flight Recorder. Another minor version may have more fields, which is no \
    problem; another major version may have changed the meaning of the known ones, and a wrong accusation costs more than none.";

    T1403: "dump is of gloo",
    "PyTorch writes dumps of the gloo backend with the members of one group alone, and its entries read retired and scheduled \
    even if they completed, so no member can be told from another. Only NCCL dumps can be analysed.";

    T1404: "dumps are not one per rank",
    "The rank of a dump is the number at the end of its file name, as in rank_3 or nccl_trace_rank_3. Two files have the same number, \
    or a file name ends in no number. Put the dumps of one moment of one run in a folder of their own.";

    T1410: "compile trace cannot be read",
    "A compile trace is a file dedicated_log_torch_trace_rank_N_….log that PyTorch writes when TORCH_TRACE names a folder. The file \
    holds no record of that form, or cannot be read. A log that only ends early is read up to its end, with a note.";

    T1411: "compile traces are not one per rank",
    "The rank of a compile trace stands in its file name or in its records. Two logs have the same rank, as after a restart into the \
    same folder, or a rank is not below the number of ranks that was given. Put the logs of one run in a folder of their own.";

    T1412: "rank has no compile trace",
    "Ranks are compared with each other, so a rank without a log can hide the difference. The number of ranks comes from the option \
    --ranks, or else from the rank numbers and the group sizes in the logs. Set TORCH_TRACE on every rank, and copy the logs of all \
    hosts into one folder. A rank that was killed before its first compile leaves no log either.";

    T1413: "ranks compiled different collectives",
    "The members of a process group compiled different sequences of collectives for it. The message names the first position at which \
    they differ, and what each side compiled there: op, reduction, dtype, number of elements, group size and root must be equal. \
    Another shape with the same number of elements is the same collective. A break that one rank alone has is no difference, if its \
    graphs together hold the same collectives. Find the condition that differs between the ranks; a run of these graphs hangs, or adds \
    up different things.";

    T1414: "rank compiled fewer collectives",
    "A member of a process group compiled a collective that another member has no counterpart for. The rank that has it waits for the \
    others. The usual reason is a condition on the rank, or on data that differs between ranks, around a collective. A collective that \
    one rank runs eagerly is not in its log: if that rank has more graph breaks than its peers, this is a warning T1417 instead.";

    T1415: "ranks compiled groups in different orders",
    "Each process group by itself has one sequence, but ranks reach the groups in orders that wait for each other: one rank waits in the \
    first group for a rank that waits in the second, and so on around. Issue the collectives of the groups in one order on all ranks.";

    T1416: "recompiled collectives on some ranks only",
    "A rank compiled a frame again, and the new graph holds a collective that no graph of another member holds: the rank saw a size or \
    a value that the others did not. When the new graph runs, the others run the old one, with another number of elements or another \
    op. Take the value from one rank and give it to all, or pad the sizes to buckets.";

    T1417: "compile traces do not show everything",
    "The comparison of the ranks is less certain than it could be. A log ends early, a cache hit recorded no later graph, or a rank \
    broke its graph where a collective may have run eagerly. Nothing is rejected for it. For a full comparison, clear the compile \
    caches on all ranks, set TORCH_TRACE, and let the run end by itself.";

    T1418: "collective op is unknown",
    "A compiled graph calls an op of a namespace of collectives that this version cannot read, or a send or a receive, whose sides \
    differ. The op is counted and not compared.";

    T1420: "graph break",
    "Dynamo met something that it cannot trace, compiled what came before it, and returned to Python. The collectives of the parts are \
    the same, so a break alone is no difference between ranks; but each break costs a launch gap, and a break within a loop makes the \
    whole function run eagerly. Record the first break with fullgraph=True, which raises at its line, and remove it there.";

    T1421: "recompile",
    "A call did not fit any compiled version of a frame: a guard failed, and the message names it. While one rank compiles, the others \
    wait in their next collective, minutes long. After eight versions PyTorch runs the frame eagerly without a word. A guard on a \
    number becomes a tensor, or a value that the leader sends; a guard on a size becomes a bucket.";

    T1422: "CUDA graph recorded again",
    "A CUDA graph is replayed with the addresses of its recording. An input that counts as static, such as a weight, had another \
    address, or the graph ran after another one than before, and PyTorch recorded it again, on the serving path. Keep static inputs in \
    the same memory, and warm up every order of graphs.";

    T1423: "compile cache hit on some ranks only",
    "Some ranks found the compiled graph in a cache and others compiled it. Those that compile reach their first collective minutes \
    later, and a timeout of the others looks like a hang. Fill the caches of all ranks from one place, or clear all of them.";

    T1424: "unlogged compile activity",
    "A compile has no end or no graph in the log, a function runs eagerly because it could not be compiled, a number is missing, or a \
    rank left no log. What it compiled is then not compared \
    with its peers. The usual reason is a run that was killed, or TORCH_TRACE on some hosts only.";

    T1425: "folder holds two kinds of recordings",
    "The folder holds compile traces of a PyTorch run beside a plan, a run or an estimate of Tessera, and the command cannot know which \
    one is meant. Move the files dedicated_log_torch_trace_… into a folder of their own.";
}

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
    "The rank of a dump is the number at the end of its file name, as in rank_3, nccl_trace_rank_3 or rank_3.json. Two files have the \
    same number. Put the dumps of one moment of one run in a folder of their own.";

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

    T1430: "Python file cannot be linted",
    "A file is read as Python 3 if it is UTF-8, has at most 1 MiB and is nested no deeper than Python itself allows. The message names \
    the first line that does not parse. The rest of the file is linted all the same, but a rule may miss what stands near the mistake. \
    Correct the file, or leave it out.";

    T1431: "work object kept",
    "A collective with async_op=True returns a work object, and its tensor is undefined until somebody waits for it. A work object that \
    leaves its function, in an attribute, a list, a global variable or a return value, can be waited for twice, never, or after the \
    tensor was read, and no reader of one function sees which. In compiled code the object breaks the graph in any case.\n\n\n\
    Bad: `self.work = dist.all_reduce(x, async_op=True)`\n\n\
    Good: `work = dist.all_reduce(x, async_op=True); overlap(); work.wait()`\n\n\
    Good: `x = funcol.all_reduce(x, \"sum\", group)` in compiled code\n\n\
    A list is fine if the same function waits for all its members.";

    T1432: "process group in compiled code",
    "A compiled function that takes, makes or captures a ProcessGroup object depends on an object that the compiler cannot trace. It breaks \
    the graph or compiles again for each group, and a group that one rank makes alone is a hang. The group belongs to the program: make all \
    groups once, in the same order on all ranks, and name them.\n\n\n\
    Bad: a compiled `forward(x, group: dist.ProcessGroup)`\n\n\
    Good: `return funcol.all_reduce(x, \"sum\", NAME)`, with `NAME = group.group_name` made before";

    T1433: "in-place collective in compiled code",
    "torch.distributed.all_reduce and its relatives write into their argument and give nothing back, so the compiler cannot order them by \
    their data. Newer versions of PyTorch rewrite some of them; the others break the graph, once for each layer, and each break is a place \
    where ranks can part. The functional collectives are made for compiled code.\n\n\n\
    Bad: `dist.all_reduce(y); return y`\n\n\
    Good: `return funcol.all_reduce(y, \"sum\", group)`\n\n\
    Good: a function under torch.compiler.disable, if the break is meant and there are few of them";

    T1434: "functional collective in eager code",
    "A functional collective allocates its result, and eager code wraps it in a tensor that waits when it is first read. In eager code this \
    only costs: an operator measured a slower run than with the in-place ones. Use the in-place collective where the code runs eagerly, and \
    choose by torch.compiler.is_compiling() where it runs both ways.\n\n\n\
    Bad: `y = funcol.all_reduce(y, \"sum\", group)` in a function that nothing compiles\n\n\
    Good: the functional one under `if torch.compiler.is_compiling()`, the in-place one under `else`";

    T1435: "collective under a condition on the rank",
    "All members of a group must call the same collectives in the same order. Under a condition on the rank, some of them call one that the \
    others do not, or leave before it, and all wait until a timeout. Both arms of the condition may call it, and so may two conditions of \
    which each rank meets exactly one. Sends and receives are not meant: they name their peer.\n\n\n\
    Bad: `if rank == 0: dist.barrier()`\n\n\
    Bad: `if rank != 0: return` before a later collective\n\n\
    Good: `if rank == 0: save(state)`, and then `dist.barrier()` on all ranks";

    T1436: "collective under a condition on a rank's own data",
    "A value that a rank computes from its own tensors, clock or memory can differ from that of its peers: a NaN on one rank, a rank without \
    tokens, a timeout that one rank sees first. A collective under such a condition is then called by some members alone. Let all ranks decide \
    from one value: reduce it first, or let one rank decide and send the decision.\n\n\n\
    Bad: `if loss.item() > limit: dist.all_reduce(x)`\n\n\
    Good: the same after `dist.all_reduce(loss, op=dist.ReduceOp.MAX)`";

    T1437: "collective under a debug switch",
    "The environment belongs to a process. A variable that somebody sets on the rank with the bug adds a collective there, and the debug \
    feature is then the hang. Issue the collective always, or read the switch on one rank and send its value to all.\n\n\n\
    Bad: `if os.environ.get(\"DEBUG\"): dist.barrier()`\n\n\
    Good: `debug = [os.environ.get(\"DEBUG\")]; dist.broadcast_object_list(debug)`, and then `if debug[0]: dist.barrier()`";

    T1438: "collective in a try that goes on after an error",
    "An error on one rank, such as running out of memory, leaves the block before its collective, and the handler lets the rank go on. Its next \
    collective then meets another one of its peers. A collective inside the handler is called by the failed ranks alone. Let the error end the \
    rank, or handle it around the part without collectives.\n\n\n\
    Bad: `step(x); dist.all_reduce(x)` under `try`, with `except RuntimeError: log()`\n\n\
    Good: `step(x)` under `try`, with `except RuntimeError: failed.fill_(1)`, and then `dist.all_reduce(failed)` on all ranks";

    T1439: "tensor read before its wait",
    "Until the wait, the memory of a collective with async_op=True belongs to the collective, and a read gives old, new or mixed values. The ops \
    of torch.ops._c10d_functional return such a tensor too, and the result is what wait_tensor returns: not the tensor that it was given.\n\n\n\
    Bad: `work = dist.all_reduce(x, async_op=True); y = x * 2; work.wait()`\n\n\
    Good: `work = dist.all_reduce(x, async_op=True); work.wait(); y = x * 2`\n\n\
    Good: `x = wait_tensor(all_reduce(x, \"sum\", group)); y = x * 2`";

    T1440: "result of a collective dropped",
    "A functional collective leaves its operand as it was: without its result, each rank goes on with its own part, and nothing hangs. A work \
    object that is dropped leaves nobody to wait for it. A call of wait_tensor without a use of its result waits for nothing in compiled code.\n\n\n\
    Bad: `funcol.all_reduce(y, \"sum\", group); return y`\n\n\
    Good: `y = funcol.all_reduce(y, \"sum\", group); return y`";

    T1441: "side effect in compiled code",
    "A print, a log line, a clock, a random number of Python or a change of a global variable either breaks the graph or happens while the \
    program is compiled and never again. If one rank alone logs, one rank alone breaks. Do it outside of the compiled region, or under \
    `if not torch.compiler.is_compiling()`.\n\n\n\
    Bad: `print(x.shape)` in a compiled `forward(x)`\n\n\
    Good: `y = forward(x); print(y.shape)`";

    T1442: "read from the device in compiled code",
    ".item(), .tolist(), .cpu() and .numpy() give the value of a tensor to Python. They break the graph, stop the host until the device is done, \
    and what Python does with the value may then differ between ranks. Keep the value in a tensor, or let the caller pass it in.\n\n\n\
    Bad: `if scale.item() > 1: x = x / scale`\n\n\
    Good: `x = torch.where(scale > 1, x / scale, x)`";

    T1443: "every rank sends before it receives",
    "A blocking send ends when its peer receives. In a ring in which all ranks send first, nobody receives, and small messages hide it until \
    they grow. Post both operations together, or let even and odd ranks begin differently.\n\n\n\
    Bad: `dist.send(x, dst=(rank + 1) % size); dist.recv(y, src=(rank - 1) % size)`\n\n\
    Good: `for r in dist.batch_isend_irecv([send, recv]): r.wait()`";

    T1444: "collective for each item of one rank",
    "The loop runs over what this rank alone has, such as every n-th file, and issues a collective in each turn. If the ranks have different \
    numbers of items, the rank with the most waits for the others. Agree on the number first, by a reduction with MIN or MAX, or move the collective \
    behind the loop.\n\n\n\
    Bad: `for name in files[rank::size]: dist.all_reduce(load(name))`\n\n\
    Good: `for name in files[rank::size]: total += load(name)`, and then `dist.all_reduce(total)`";
}

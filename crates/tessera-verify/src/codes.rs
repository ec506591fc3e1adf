//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0301: "members of a group call different collectives",
    "At one position of a group's sequence one rank calls, say, an all_reduce and another an all_gather, or the ranks make \
the same calls in different orders. The communication library does not check this: the ranks hang, or exchange bytes \
with different meanings.\n\n\
The message names the first position that differs. All earlier calls agree. Compare the programs from \
that position on: one role has moved, inserted or omitted a call there.";

    T0302: "members of a group disagree about the count",
    "The members call the same collective with tensors of different size. With NCCL that \
is undefined behaviour: a hang, a crash, or a silently wrong tail. The message shows local \
extents, with one exception: if a dim is sharded over the group's own axis, it shows the global \
extent. Members may hold uneven shards of that dim, and the collective is correct if the global \
extent and the unit agree. Sends and receives always show the local extents of the rank.\n\n\
Usually one role was lowered for another sequence length, batch or fill level.";

    T0303: "members of a group disagree about the dtype",
    "One rank reduces or gathers bf16 and another f32, for instance after a cast on one side only. Libraries \
do not check dtypes: the result is garbage without an error, or a hang, since byte counts differ.";

    T0304: "members of a group disagree about the reduction",
    "One rank sums while another takes the maximum, or sums in another order. Byte counts agree, so nothing hangs \
and no debug mode of the usual libraries reports it: from here on the ranks simply hold different numbers.";

    T0305: "members of a group disagree about the root",
    "A broadcast distributes the value of one member, the root. If two members name \
different roots, each waits for the other to send, or both send: a hang.\n\n\
Give all members the same `root`: a position on the axis, or in the subgroup or the world if the \
broadcast runs there. It is a rank's number only in the world.";

    T0306: "members of a group disagree about the tensor dim",
    "A gather, scatter or all-to-all moves shards of a named tensor dim. With different dims (or split units) on \
different members, byte counts may still agree, and rows land where columns belong.";

    T0307: "a member of a group lacks a collective",
    "One member's sequence is shorter: somewhere it omits a collective that the others \
call, and they would wait forever. The message names the first missing call. In a series of \
equal calls nothing shows which one is missing, so the message names the last one. For a send \
without a receive, or a receive without a send, it names the other side.\n\n\
Typical causes: a role that skips an op for its layer range, a phase given to a subset of the \
ranks, or an early exit on one side of a pipeline.";

    T0308: "send and receive do not match",
    "The n-th send from one rank to another over one group matches the n-th receive there. Their dtype and count must \
be equal; the receiver would otherwise read past the message, wait for the rest of it, or misinterpret the \
bytes as another type.\n\n\
Check the order of the receives too: two swapped receives of different shapes raise this diagnostic.";

    T0309: "send or receive names an impossible peer",
    "`to` and `from` are positions on the collective's mesh axis. The position must exist and must not be the \
rank's own: a rank that waits for itself hangs.\n\n\
One program can serve only ranks for which the peer is valid; a stage that sends to the next stage needs a role of \
its own.";

    T0310: "collective over a group that does not exist",
    "A collective names a mesh axis with more than one rank; its group consists of the ranks that differ only in that \
coordinate. An axis of one rank has no peers, and a broadcast's root must be a position on the axis.\n\n\
Omit the collective for meshes in which its axis has size 1.";

    T0311: "deadlock: ranks wait for each other in a cycle",
    "The ranks that the message names wait for each other. Each of them waits in one \
collective until another of them joins it. That other rank waits in another collective and \
reaches this one only afterwards: a stream, an event or a wait fixes the order of its two \
collectives. So no rank makes progress. At run time the job hangs, and its GPUs show full \
utilisation.\n\n\
The message shows the shortest wait cycle, one line per rank. Each line names two ops: the op \
in which the rank waits, with the rank that it waits for, and the op that it reaches only \
afterwards. Swap these two ops on one rank, so that all ranks issue them in the same order. If \
they are sends and receives, let one side receive first, or issue both as one batch (`batch = \
1`): a send possibly returns only after its receive is posted.";

    T0312: "collectives have no common launch order",
    "No stream dependency makes the ranks wait for each other, but the ranks launch collectives of several groups in \
contradicting orders. A device runs the operations of several communicators in launch order (NCCL's default \
requires one global order per device), so two ranks that launch different collectives first can deadlock. Usually this happens \
only under load, when the device cannot run both operations at once.\n\n\
Issue these collectives in the same order on all ranks. Putting them on different streams does not help.";

    T0313: "issued collective is never waited for",
    "`collective.issue` starts an operation and returns a ticket, its handle; only `collective.wait` makes the result usable \
and frees the operand's memory. An issue without a wait leaves an operation in flight when the program ends: the next \
program may overwrite its buffers, and a failure inside it surfaces elsewhere.\n\n\
Wait for every issue exactly once before the program ends.";

    T0314: "issued collective is waited for twice",
    "A wait consumes its ticket. A second wait would define a second value for one operation, and on some \
backends would block on work that no longer exists.\n\nUse the first wait's result in both places.";

    T0315: "ticket or event used as something else",
    "A ticket (of an issued collective) may only be waited for, an event may only appear in `after(…)`, and neither is \
data: it cannot be an operand of arithmetic, be sent, or be written to a buffer. `wait` takes a ticket and `after` takes events \
recorded earlier, nothing else.";

    T0316: "data crosses streams without an event",
    "A stream runs its ops one after the other, but ops on two streams run in any order. \
Here an op reads or writes data that an op on another stream also uses, and nothing orders the \
two ops. If stream A produces a value and stream B reads it, A needs an `event.record` after \
the producer, and the reader, or an earlier op on B, needs `after(…)` with that event. A \
`collective.wait` orders later ops on its own stream after the collective. A write to a buffer \
needs such an order with every access to the same buffer on another stream.\n\n\
Without the event the reader usually gets the right bytes and sometimes stale ones, which tests \
rarely find. Record an event after the first op, and name it in `after(…)` of the second op.";

    T0317: "partial value escapes",
    "A partial value is one rank's term of a reduction. It must be reduced before it \
leaves the program (output, send, cache.write) and before another op reads it as a bias or row \
number. An input, a weight or a cache.read may not be declared partial, because a value from \
outside the program is not a term.\n\n\
An unreduced value gives an answer that differs between ranks, without any error. Insert an \
all_reduce or a reduce_scatter first.";

    T0318: "buffer written while a view of it is in use",
    "`cache.read` returns a view: no bytes are copied, so a later `cache.write` to the \
same rows changes the value under its readers. A collective's operand counts as in use until \
its wait. If the row of a write is a call scalar, which is known only at run time, the write \
counts as a write to every row.\n\n\
Move the write after the last use, or copy the rows first.";

    T0319: "value used before its definition",
    "Ops run in program order on each stream, so an op can read only values that an earlier op defined. The message \
names the reader and, if one exists, the later op that defines the value.\n\n\
Move the definition up or the use down. In a plan that Tessera lowered this is a defect of the lowering.";

    T0320: "value defined twice",
    "Every value has exactly one definition (static single assignment). With two definitions, readers, streams and memory \
slots, or two ranks, could disagree about which one applies.\n\nGive the second result its own name.";

    T0321: "annotated type differs from the type of the op's result",
    "The verifier derives every type again from the op's rule. A value's annotated dtype, local shape or layout \
differs from its op's result, so everything that relied on the annotation (memory, counts of collectives, other \
ranks) would be wrong.\n\nCorrect the annotation, or the operands if the annotation is as intended.";

    T0322: "program is malformed",
    "The program violates the form on which everything else relies: an id out of range, a number of operands or \
results that contradicts the op table, an unknown attribute, a name with characters that the text form \
cannot represent, or an extent too large to compute with (2^46 elements of one tensor).\n\n\
The parser and the builder cannot produce a malformed program; a damaged file or a peer of another version can. Nothing \
else about the program is checked until the form is valid.";

    T0323: "call scalar misused, or a value used in its place",
    "A call scalar is a number that the leader sends with each call (`%s = call \"start\" \
: i64`), equal on every rank. It may be used in arithmetic and for rope offsets, random keys \
and cache rows. It is never sent, gathered, cached or output, and it never determines a shape, \
a group, a branch or which op runs.\n\n\
Conversely, rope `start`, the keys of a random draw, `sigma`, the bias of an attention and a \
cache row must be call scalars: with a computed value, data would decide where bytes land, and \
ranks could drift apart.";

    T0324: "phases disagree about a buffer",
    "Buffers (KV caches, the latent) outlive a phase: one phase writes what another reads. All phases of a role must \
declare a buffer of one name with one dtype, local shape and layout, or the reader would misinterpret the bytes.";

    T0325: "value has no memory slot",
    "The memory plan of a phase has a slot table with one entry per value \
(`slot_of_value` in the memory.json of a plan folder). The entry of a value that a compute op \
or a collective writes must be the number of an existing slot. Events, weights, inputs, call \
scalars, views of buffers and tickets (the handles that issued collectives return) need no \
slot, and their entry may be empty. Here a \
written value has no slot, an entry names a slot that does not exist, or the table has more or \
fewer entries than the program has values. The message states which.\n\n\
If somebody edited the files of the plan, make the plan again with `tessera plan`. Otherwise \
this is a defect of the planner: report it.";

    T0326: "memory slot is too small",
    "The value's local shape times its element size is larger than its slot. Writing the value would overwrite \
the next slot. The memory plan was made for other shapes, or for the shard of another rank.";

    T0327: "two live values share a memory slot",
    "A value lives from the op that begins to write it to its last use. An issued collective reads its operand and \
writes its result at any time between issue and wait, so both live from issue to wait. A value read by an op may not \
share a slot with that op's result. Across streams, events must order every access to the old value before the op \
that writes the new one.\n\n\
Give one of the values another slot, or add the event.";

    T0328: "plan needs more memory than the device has",
    "Weights, buffers, inputs and the temporaries of the largest phase together exceed the device memory. All are counted \
from local shapes; the workspaces of libraries and of the driver come on top, so leave room.\n\n\
Use more shards (a larger tp or pp), a smaller dtype for weights or caches, or a shorter cache.";

    T0329: "roles and programs do not cover the ranks",
    "A plan assigns every rank of the mesh exactly one role, and every phase has one program per role, in the \
order of the roles, written for the plan's mesh and for that role. Names of roles, phases and calls are unique. \
A rank without a role would never join its groups' collectives, and every other member would wait.\n\n\
A role with nothing to do in a phase has an empty program.";

    T0330: "call lists an unknown phase",
    "A call is a list of phases for which the plan has programs; the seal admits these calls and no others. A missing \
phase would be noticed only when the request arrives, on every rank at once.\n\n\
Correct the name or add the phase.";

    T0331: "uneven shard does not match the rank",
    "If a dim is sharded unevenly, the first positions of the axis hold one unit more. All ranks of a role run one \
program, so their shards must all have the size that the program's local shape declares. Otherwise the counts \
of an all-to-all differ between peers, and bytes land in the wrong rows.\n\nSplit the role into one role per shard size.";

    T0332: "roles disagree about an input",
    "The tensors and scalars of a call are sent to every rank, which keeps its shard of a sharded tensor. So all roles of a \
phase must declare an input of one name with one dtype and one global shape. Correct the role whose declaration differs; \
the message shows both.";

    T0333: "same count, but different shape or layout",
    "Both sides move the same number of elements of the same dtype, so nothing hangs and no library complains; but \
one side reads them as [4, 8] and the other as [8, 4], or as a shard of another dim. Rows land where columns \
belong, on some ranks only.\n\nGive both roles the same type. The IR has no op that reinterprets bytes.";

    T0334: "members of a group disagree about graph capture",
    "Either all members capture a collective into a graph or none does: a rank that replays the collective and \
a rank that launches it eagerly use the communicator in two ways and wait for each other. If all capture it, each must \
replay the graph of that same capture; graphs are compared by name (`graph = \"denoise\"`).\n\n\
The usual cause is a decision made per rank: padding to a captured size from a local count, a capture that failed on \
one rank, or a flag that is missing on one host. Decide once, in the plan.";

    T0335: "graph cannot be captured as written",
    "The host launches a captured graph with one call, so the ops of one graph name must \
be consecutive in the program, with no other op between them. Synchronisation cannot cross the \
boundary of a graph: a collective issued inside and waited for outside (or the other way round) \
crashes or hangs when the graph is replayed. So does an event recorded on one side and awaited \
on the other, since events captured into a graph are not events of the stream.\n\n\
Move the boundary of the graph, or wait before it. The graph is launched on the stream of its \
first op. Later ops on that stream run after the whole graph; an op on another stream needs an \
event that is recorded on that stream after the graph.";

    T0336: "communicator is used concurrently by a graph and by another launch",
    "With graph mixing off (NCCL_GRAPH_MIXING_SUPPORT=0, or one graph per communicator) a communicator serves one \
graph at a time: no eager collective may be launched while a graph that uses the communicator is outstanding, on any stream, \
and no two graphs that use it may run in parallel. A program has no point at which the host waits, so an eager \
collective after a graph over the same group is always launched too early.\n\n\
Capture the collective as well, order the second graph after the first by an event, move it to a phase of its own, or leave \
graph mixing on.";

    T0337: "rank outside the mesh is used as a member of the mesh",
    "With `mesh(tp=2, outside=1)` rank 0 lies outside the mesh: it may encode, decode and lead, and it communicates with \
the mesh over the world. It belongs to no group of an axis and holds no shard of a value, so its role is named `…@out0`, \
uses collectives over `world` only, and is assigned to no rank of the mesh. A collective over a mesh axis on that rank \
would either hang in a group that does not expect it or complete on the wrong group.\n\n\
Send over the world to a rank of the mesh, and broadcast from there over the axis.";

    T0338: "per-peer counts of an all-to-all disagree",
    "In an all-to-all with a count per member, rank i must send to rank j exactly as many elements as j expects from \
i. Otherwise j waits for elements that never come, or takes the beginning of the next message for the end of this one. Both \
vectors have one entry per member, in the order of the group.\n\n\
The counts are usually exchanged beforehand: one side computed them from other inputs (a token count, a capacity), or \
from the counts of the previous step.";

    T0339: "sends and receives cannot be issued as one batch",
    "Sends and receives with the same number `batch` form one launch (ncclGroupStart and \
ncclGroupEnd): they are in flight together, so two neighbours may both send first. A batch has \
four conditions. Its number is at least 1, and no other batch of the program has it. Its \
members are consecutive in the program: only inputs, call scalars and weights may stand between \
them. All members are on one stream. All members are in one captured graph, or none is in a \
graph. The message names the violated condition.\n\n\
Each issued member returns a ticket, the handle that a wait takes. A wait inside the batch \
interrupts it, so place the waits for all tickets after the last member.";

    T0340: "collective cannot work in place",
    "A collective's operand and result share a memory slot. An all_reduce or a broadcast may work in place if nothing else \
reads the operand from the issue on: each element is replaced by its own reduction. A gather, scatter or all-to-all may not: \
the operand is a shard that belongs elsewhere in the result (at its rank's offset), so on all ranks but the \
first the collective would overwrite shards that it has yet to send.\n\nGive the result a slot of its own.";

    T0341: "trace of a rank is missing",
    "A group names a rank that has no trace, two traces, or an impossible rank number. The members with traces are \
compared; whether every rank terminates cannot be decided, since the rank without a trace is often the one that hung \
or died first.\n\n\
Add its file. The file of a rank that launched nothing holds one line, `{\"rank\": 3}`.";

    T0342: "collective on a group by a rank that is not in it",
    "A rank launched a collective over a group of which it is not a member, or named a root or a peer outside the group. \
No member expects the call: it hangs, or matches another group's traffic. The usual cause is a group handle taken from the \
wrong list (the world group instead of the mesh group), or ranks that built their groups in different orders.";

    T0343: "ranks compute different values where one value is required",
    "All ranks make matching calls, but they do not compute one model. There are two \
cases. The members of a tp group hold shards of one computation, but one of them computed its \
operand of a collective in another way than the others. Or two roles of one replica output or \
cache different values under one name. Over dp and ep every member may contribute data of its \
own. Typical causes: two tensors of one shape reduced in another order, a context that reached \
the first rank of a mesh and was not broadcast, random draws keyed by another scalar, an \
activation that one role omits.\n\n\
The verifier traces each value back through its ops, names and messages, and shows the first \
two ops that differ. Shards of one value count as equal: only names, ops and attributes are \
compared, never the numbers in tensors. If two roles give one value two names, give it one \
name.";

    T0344: "members of a group disagree about the transport of a collective",
    "`transport` names the transport of a collective: \"p2p\" for peer-to-peer kernels, \
\"nccl\", or, if omitted, the better of both. One member would wait in NCCL for another that \
waits in peer memory: a hang, although op, type and count agree.\n\n\
In a plan, all roles must be made with the same `collectives.transport` of the mapping: plan \
again. In a program written by hand, set the same `transport` on a send and its receive, and on \
the collective of every member.";

    T0345: "experts cannot lie in two tiers of memory",
    "A weight [experts, n, k] with the attributes `tier_layer`, `tier_policy`, `tier_resident` and `tier_window` lies in \
host memory, and a rank holds at most `tier_resident` of its experts in fast memory. Its only reader is a grouped_matmul, \
which takes one expert after another; every other op would need all of them at once. The weights of one layer state the \
same tiers, have the same experts, and their readers take the rows of experts from the same counts, because the layer \
fetches the three matrices of an expert for these counts. Layers are numbered from 0 in the order in which the program \
uses them, so that a window of layers means the same on every rank. The message names the weight and what it lacks.\n\n\
Shard the experts over ep, or the columns of gate and up and the rows of down over tp: in another layout a rank may gather the weight \
before it reads it. Otherwise leave the weight in one tier.";

    T0346: "rank is not on exactly one host",
    "A plan that states hosts lists the ranks of each host. The path of a group follows from the hosts of its members, so every \
rank must be on exactly one host. The message names a rank that is on no host, a rank that is on two, or a number that is no rank \
of the plan, and the labels list the ranks of the hosts. `tessera plan` gives each rank to one host, so another program wrote this \
plan, or somebody changed `hosts` in seal.json.\n\n\
Plan again. `--hosts 2` divides the ranks among 2 hosts equally, and `--hosts a:3,b:1` states the number of ranks of each.";

    T0347: "stated path of a group contradicts its hosts",
    "A plan that states hosts also states the path of each group that exchanges data. The path is `peer memory` if all members are \
on one host, `switch domain` if they are on several hosts of one NVLink domain, `network` if each member is on a host of its own \
and in a domain of its own, and `hierarchical` if some members share a host or a domain and others do not. The verifier derives \
the path of every group from the hosts of its members. The plan states another path, states a group twice, leaves one out, or \
states one that no op uses. The message names the group, its stated path and the path that the hosts give. A group on several hosts \
that is stated as peer memory would run over the network, 10 to 50 times slower.\n\n\
Plan again with the same `--hosts`: `tessera plan` derives all paths.";

    T0348: "op requests peer memory between hosts",
    "With `transport = \"p2p\"` a collective is a kernel that writes into the memory of the other members' GPUs. A GPU can map only \
the memory of GPUs on its own host. The members of this group are on several hosts, so no such kernel can run. The message names \
the op, the ranks of the group and its path.\n\n\
Plan with `--transport best`, which uses peer memory in every group that one host holds and NCCL in the others, or with \
`--transport nccl`. Or choose a smaller axis in `--mesh`, or more ranks per host in `--hosts`, so that the groups of this axis fit \
on one host.";

    T0349: "members of a group disagree about the algorithm of a collective",
    "`algorithm` tags an all_reduce with \"tree\" or \"ring\"; without it, the library that carries the data chooses. The members of \
a group exchange data with other neighbours in a tree than in a ring. One member would wait for data that no other sends: a hang, although \
op, type and count agree.\n\n\
In a plan, the tag follows from `collectives.ring_from_bytes` of the mapping and from the bytes of the operand, which are equal on all \
members: plan again. In a program written by hand, set the same `algorithm` on the collective of every member.";
}

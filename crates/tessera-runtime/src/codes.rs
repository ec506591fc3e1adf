//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0701: "the peer uses another wire version",
    "Both processes must come from the same release: the wire version determines every field, its order and its \
meaning, and nothing is guessed across versions. The receiver rejected the frame before it allocated memory for it.\n\n\
Install the same build on every host, and check whether a rank was started from an older path.";

    T0702: "the bytes are not a frame of this protocol",
    "A frame begins with a magic number and a known message kind. Other bytes arrived: from a \
foreign process on the socket, or from a sender that lost the frame boundary. The stream cannot be resynchronised, so \
the run ends.";

    T0703: "a frame exceeds a limit",
    "A frame is one message on the wire, not a video frame. Its meta bytes and its tensor \
bytes each have a fixed limit, far above what chunks, prompts and contexts need. The sender \
checks the limits before it sends the first byte, and the receiver before it allocates memory.\n\n\
If the sender reports this code, a shape in the plan is too large; the message shows the number \
and the limit. If a receiver reports it, a length field was corrupted on the way: check the \
memory of both hosts and the link between them.";

    T0704: "a frame's checksum does not match its bytes",
    "One checksum covers the header, meta and tensors. A mismatch means that bytes changed between \
the sender's memory and the receiver's: faulty memory, a faulty link, or two writers on one socket. The call does not \
run; the run ends, because it might otherwise continue with inputs that differ between ranks.";

    T0705: "a frame's meta does not decode as its kind",
    "Meta bytes have one canonical form: fixed field order, shortest integers, floats as bits with one \
NaN, nothing after the last field. Bytes that end early, continue after the last field, or have a shorter encoding are \
rejected, so that equal content has equal bytes and digests can be compared.\n\nThe cause is a bug in the sender, or a \
corrupted frame whose checksum happens to match.";

    T0706: "tensor manifest and tensor bytes disagree",
    "The tensor_specs of a frame list each of its tensors: name, dtype, shape, byte length and \
checksum. The receiver allocates memory from that list alone, in its order, and rejects a length that does not follow \
from dtype and shape, a name that occurs twice, and bytes with another checksum.\n\nA wrong checksum in one tensor \
with a correct frame checksum means that the sender listed one tensor and sent another, or sent the tensors in another \
order: a bug in the sender, not a fault of the link.";

    T0707: "a message came from the wrong role or at the wrong time",
    "Only the leader originates control messages; a worker replies and sends heartbeats. The messages have \
a fixed order: hello, envelope, context, commit. This message was sent by the wrong side, for a call that is not open, or \
before a message that must precede it. The peer is another program or another build, or it lost its state; the run ends.";

    T0710: "illegal transition of the cache state",
    "The caches go through reset, prompt, evict, recall, recache, rebase, recompute, append and \
advance in an order that one table defines (docs/manual/kv.md). A transition was requested that the \
table does not allow from the current stage: an append into a full window without an evict, a recompute \
with resident caches, an advance without an append, an append while some cached chunks have the keys \
and values of an old prompt and others those of a new one.\n\n\
On a worker this means that the states of leader and worker differ: look for the causes that \
`tessera explain T0712` lists. On the leader it is a bug. The state is unchanged, and the call \
is refused before any collective.";

    T0711: "impossible cache geometry",
    "The cache window must be a whole number of chunks, at least one, and fit the rotary \
position table. With `--cache recompute` it is exactly two chunks: the context and the chunk \
itself. A sink is a whole number of chunks too, smaller than the window, and only in the resident regime. \
Change `window_frames`, `sink` or `chunk_frames` in the model's stream.toml.";

    T0712: "an envelope does not match the cache state of this rank",
    "An envelope is the leader's message that starts a call on every rank. It states the \
cache state that the leader expects on the rank: the chunk, the epoch (it grows at each hard \
cut, reset or reload), the start frame, and a digest of the state after the call. For each \
phase that uses the KV caches, it also states the cache row and the position. This rank \
computed another value from its own state, so leader and rank no longer agree on the contents \
of the caches. The message shows the field with both values. The rank refused the chunk before \
any collective.\n\n\
A rank also compares what its memory holds: the epoch in which its caches were last emptied and the number of chunks since. \
If they were emptied without a cut, a RESET or a RELOAD, an envelope that continues the scene is refused before it computes.\n\n\
Look for a reset of the caches on one rank alone, for a message that was handled twice, or for \
a process that was restarted during the run.";

    T0720: "the stream's settings are refused",
    "A stream needs at least one denoise step. Each step has a finite timestep and a \
noise level between 0 and 1 that never grows, and the attention bias is above 0. Only the \
leader reads these settings; workers receive the calls that follow from them.\n\n\
The step list of a distilled model belongs to the model: start from the `steps` in the model's \
stream.toml.";

    T0721: "a chunk request is refused",
    "The first chunk of a session must bring a prompt, because there are no text keys and values to attend \
to before it. A request that brings a prompt must bring its embedding. The leader refused the request before it sent \
anything to a rank.";

    T0722: "a phase names a program that the sealed plan does not contain",
    "The sealed plan lists every program that a run may use: one per phase kind, cache fill level and step \
variant. A call that needs another program is refused. Nothing is compiled during a run, because another rank might not \
compile the same program.\n\nPlan again with the window, steps and regime that the stream uses.";

    T0723: "the scalars of a phase do not match its program",
    "Each program of the plan declares its scalars per call, by name and kind. A phase must \
set exactly those. The message names the scalar that is missing, unknown or of another kind.\n\nThis happens when \
the plan was made for another stream (other chunk length, other regime) than the running one.";

    T0730: "a call id is out of order",
    "Call ids grow by one with every envelope of a session, for every action. An id that repeats or falls \
means that an envelope was handled twice or that the sender lost its count; a gap means that an envelope was lost. In both \
cases the ranks disagree on the call, so it is refused before any collective. The message gives both ids.";

    T0731: "an envelope belongs to another plan or session",
    "Every envelope contains the digest of the sealed plan and its session. This rank has other values: \
it was started from another plan folder, or a process of an earlier run still writes to this socket. \
Stop every rank, check that all read the same plan, and start again.";

    T0732: "an envelope's fields are missing or contradict each other",
    "The table in docs/reference/envelope.md defines which fields an envelope needs for each action. The message names \
the field, its value and the value that the rest of the envelope requires. The leader makes the same check before it sends. \
On a worker this error therefore means that leader and worker are different builds, or that another program made the envelope.";

    T0733: "an action is not allowed at this position",
    "WARMUP is the first call of a session and occurs once. RELOAD replaces the weights on every rank between \
the same two calls, so no other call may be open when it arrives, and no call may follow before it is done. This rank \
received one of them at another position: the leader lost its own order, or another program made the message.";

    T0734: "an envelope's counts differ from its phases",
    "An envelope states the numbers of generator forwards and collectives of its call, \
and the trace: a digest of these collectives in order. The list of phases and the sealed plan \
give other values. A rank that ran the phases would issue another number of collectives than \
its peers expect, so it refuses. The leader makes the same check before it sends. On a worker \
this error therefore means that the two are different builds, or that the envelope changed \
between them.";

    T0735: "a call's tensors do not match the inputs of its programs",
    "The programs of a call declare the tensors that they read. Each must arrive once, with that dtype and \
shape and in that order; no other tensor may arrive. `text` is part of the envelope of a call that replaces the text keys and \
values; `context` follows in a separate message if the call recomputes.\n\nA recompute call without its context \
is refused: an older context in its place would produce a picture that no other rank has.";

    T0736: "a result belongs to an epoch that is over",
    "A hard cut begins a new cache epoch, and every call and every result names its epoch. \
A rank sent a result with another epoch than its call's: it missed the cut, ran an old call again, or an old message was \
delivered late. The result was not used, because its picture belongs to a scene that is over.\n\nThe message gives \
both epochs. Calls that are open at a cut are finished and discarded in order; they never cause this error.";

    T0737: "a rank loaded other weights than the leader announced",
    "In a running session weights change only through RELOAD: every rank finishes its open calls, then all ranks load \
the same weights between the same two calls and begin a new cache epoch. The envelope contains the digest of the new weights. \
The weights that this rank found at the source have another digest, or the rank was about to load outside of a RELOAD call.\n\n\
The ranks would have continued with different weights, so the run ended before a call could use them. Compare the source on \
that rank's host with the others: a copy may still be in progress, or the path may name another file there.";

    T0740: "ranks differ in a key that must be equal",
    "Before the first call every rank sends the leader a table of parity keys: build, \
plan digest, GPU, library versions, backend, topology, the programs of the warm-up, and others \
(docs/reference/parity.md lists all). Each key of the class `at init` must have one value on \
all ranks. A key differs here, so the ranks would run different code under the same plan.\n\n\
The message lists every key that differs, and each of its values with the ranks that have it. \
These are the values in effect: for a setting of `auto`, the table holds what `auto` selected \
on that rank. Start every rank from the same build, plan folder and environment.";

    T0741: "a queue or wait is zero or has no bound",
    "Waiting requests, waiting finished chunks and outstanding calls are all bounded, on both sides, so that a \
slow consumer stops the producer instead of filling memory; and every wait has a deadline. A bound of zero would stop the \
stream, and a huge bound has no effect.\n\nThe defaults are 2 requests, 2 chunks and 2 calls. A greater depth adds latency \
and hides no additional work.";

    T0742: "a rank's process ended while it was needed",
    "The control socket of a rank closed before that rank had answered the shutdown, so its process has ended: \
killed, out of memory, or crashed. The launcher's report adds its exit status or signal. Signal 9 without a known \
sender usually comes from the kernel's out-of-memory killer; the kernel log records that.";

    T0743: "a rank stalled",
    "The sockets of the process are open, but for longer than a limit it answered nothing, sent no heartbeat, or \
made no progress inside a call. The message names the rank with the least progress: ranks \
that wait for it inside a collective are not the cause.\n\nThe limit inside a call runs from the last progress. It is \
five seconds, or four times the 99th percentile of the times without progress observed in that program so far, whichever is \
longer. A stopped \
process, a stuck device and a slow kernel look alike from the leader; the progress counters in the message show how far each \
rank came. A worker that received nothing from its leader names rank 0.";

    T0744: "ranks drifted apart",
    "After each call every rank reports what it did: the number of generator forwards, \
the number of collectives, a digest of these collectives in order (the trace), a digest of the \
cache state, and a digest of the output. On one rank a value differs from the plan or from the \
other ranks. The message names the first value that differs and the rank; with two ranks and \
different outputs, it names both.\n\n\
If a count or the trace differs, that rank ran other code than the plan states. If the cache \
state differs, a reset or a call reached only some of the ranks. If only the output differs, \
the rank computed other numbers: compare its libraries, its device and its weight files with \
those of the other ranks.";

    T0745: "an engine failed while loading or running a phase",
    "The device, a kernel or a collective of this rank returned an error. The text comes from the engine. The \
run ended on every rank, because a rank that leaves a call cannot rejoin it.\n\nThe usual reasons are out of memory, a \
missing library and a lost device; the text names the reason. A secondary failure, caused by another rank's failure, is \
never reported as the cause.";

    T0746: "a call was committed a second time",
    "A rank runs each call exactly once. A commit arrived for a call that this rank has run, is running, or \
never agreed to. A second run would issue collectives that no peer joins, so the rank refuses and the run ends.";

    T0747: "a rank deviated from the call that it agreed to",
    "While a call runs, each rank counts its own generator forwards and compares every phase's collectives and \
trace with the sealed plan. This rank was about to run one forward too many, ended with one too few, or issued \
collectives that the plan does not contain. It stopped at the phase boundary, before its peers could wait for a \
collective that never comes.\n\nThe phase named here is the first deviation. The cause is in that rank's engine, not in \
the message exchange: compare its build and backend with those of the other ranks.";

    T0748: "finished chunks could not be delivered",
    "The ranks completed their work, but the leader could not decode or write the result: a full disk, a missing \
folder, or a decoder that failed. The text comes from the system. Chunks delivered before this one are complete.";

    T0749: "the process that started the ranks is gone",
    "Every rank holds a socket to the process that spawned it. That socket closed without a stop, so no process \
is left to receive output or to clean up, and the rank ended itself. The launching process was killed or crashed; \
find its cause first.";

    T0750: "the ranks could not be started or joined",
    "A rank's process could not be spawned, or it did not receive its welcome: its rank, its session and the \
sockets to its peers. The text holds the operating system's error. Only the launcher can start a rank this way: a rank \
that a person starts finds no socket on its standard input.\n\nLimits on processes or open files are the usual \
reason on a busy host.";

    T0751: "a rank was about to issue a collective that differs from its plan",
    "Before it sends a byte, each rank compares the op, group, dtype, shape and \
attributes of a collective with the next one in the sealed program. This collective is not in \
the plan, a planned one before it was skipped, or one of these properties differs. No peer, or \
the wrong peers, would have joined it. The rank stopped before it communicated, and its peers \
were released. The same code ends a run in which a phase ended before it issued all planned \
collectives.\n\n\
The message gives the phase, the position in it, and the planned and the issued collective. \
Look at the code path of that rank alone: a flag that only it has set, a call outside of the \
plan, or a group created outside of the runtime.";

    T0752: "a program was compiled, captured or run for the first time after the warm-up",
    "The warm-up runs every program of the plan once on every rank, so that nothing is compiled, captured or \
tuned while a stream runs: such work inside a call on one rank stalls the others and can select another kernel than \
theirs. This rank counted a new program in a later call.\n\nThe usual reasons are a program that is missing from the plan, \
a shape that depends on data, or an evicted entry in a cache of compiled code.";

    T0753: "a rank did not warm up like the others",
    "The warm-up is one call that lists every program of the plan. Each rank answers with the number of programs \
that it compiled, captured or ran, and that number must equal the length of the list. This rank ran fewer or more.\n\nThe \
rank skipped a program that it already had, or it has another set of programs: compare its build, its backend and its cache \
of compiled code with those of the other ranks.";

    T0754: "a rank holds the wrong weights",
    "A weight slice is the part of one tensor that a rank holds. Each rank reports a \
digest of every slice that it loaded, and one of three checks of these digests failed. First, \
one slice must have the same digest on every rank that holds it. Second, two different slices \
of one tensor must have different digests, because equal digests mean that a rank loaded the \
slice of another position; this check skips slices in which all elements are equal. Third, \
after every call each rank hashes a part of its weights again, and must find the digest from \
loading. The message names the tensor, the slices and the ranks.\n\n\
If the first or the second check failed, a named rank read another weight file or the wrong \
slice: compare its files with those of the other ranks. If the third check failed, something \
overwrote the weights of the named rank after it loaded them: weights that were merged or \
reloaded on this rank alone, a kernel that writes out of bounds, or faulty memory.";

    T0755: "the mesh leader stopped a message before a member received it",
    "A leader outside the mesh is connected to one rank only, the mesh leader, which \
relays its messages to the other ranks of the mesh (the members). The mesh leader checks every \
envelope and context against its own state before it relays them. It relays a commit only after \
every member has answered ready and it has passed these answers to the leader. One of these \
checks failed. No member received the message, so none of them waited for a collective.\n\n\
The text contains the finding and its own code. The leader makes the same checks before it \
sends: a finding here means that the two sides have different builds, or that the message \
changed between them.";

    T0756: "a peer did not prove that it belongs to this run",
    "Every process of a run proves that it has the run's secret, or a certificate of the run's authority, \
before the other side reads anything else from it. This peer did not: it was started with another secret file, its \
certificate is not signed by the given authority, or it is a foreign process that found the port.\n\nNothing else that it \
sent was read. Give every rank the same secret file, and check the clocks of the hosts if certificates are in use. A peer \
that is slow or closes the connection may also be a rank that finds the port taken by other connections; it tries again. \
Further refusals of the same kind are counted and reported as one number.";

    T0757: "the ranks' tables of peers or groups differ",
    "Every rank creates its groups in one order, from the mesh alone, and the rendezvous gives every rank the same \
list of peers and addresses. A digest of both is compared before the first collective. One rank has another table: it \
created its groups in another order, has another number of ranks, or joined with addresses of another run.\n\nThe \
message shows each value with the ranks that hold it. Groups created in different orders would pair up unrelated members \
and hang or mix data; therefore the run ends here. A key that begins with `communicator:` names the memory or the NCCL id \
that the members of one group share: members that hold different ones would never meet.";

    T0758: "the rendezvous of the ranks failed",
    "With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, a rank joins the others instead of starting them. Rank 0 \
listens at that address, every other rank connects to it, and then ranks connect to each other. The whole rendezvous has a time \
limit (`--join-timeout`), and one of its steps did not complete: the port was in use, no process listened, a rank never \
connected, or a rank left while the others were still expected.\n\nStart every rank, including rank 0, with the same address, \
port and world size. Firewalls must allow ranks to reach each other on any port, not only rank 0's. A rank that failed by itself \
prints the reason on its own terminal.";

    T0759: "the inputs of a call differ on a rank",
    "Every rank answers an envelope with a digest of the call's header, meta and tensors as they arrived. This rank's \
digest differs from the digest of what the leader sent. The call was not committed, so nothing ran on the wrong inputs.\n\nThe \
bytes changed between the leader's memory and the rank's memory, and their checksums were computed after the change. The \
cause is faulty memory, or a program in between that re-encodes messages.";

    T0765: "an output file of the run was removed or replaced",
    "The leader keeps the clip and the record of a run open and writes to them. Before it counts a chunk as delivered, and once \
more at the end, it compares each open file with the file of that name in the output folder. A file was deleted, moved or \
replaced, or the whole folder was, so further output would go to a file that nobody can open.\n\nThe message names the file. Find \
the program that cleans up this folder, and start the run again with --out in another place. Files that are still in the folder \
are complete up to the last chunk that the record lists.";

    T0770: "a weight of a rank is not finite",
    "While a rank loads its weights, it checks every element in the form in which it computes with it. An element of \
this shard is NaN or infinite, so no call was run: every value that depends on the element would be NaN, and the frames \
black.\n\n\
If the file holds such an element, the message names the file and the index; fetch the file again, or export the model \
again. If the file holds none, the element became infinite when it was rounded to the dtype of the plan: plan with a wider \
`--dtype`. If only one rank reports it while the others read the same file, that rank's copy or its memory is damaged.";

    T0771: "latents of a rank are not finite",
    "After each call, every rank that returns the chunk's latents checks that all of them are finite. Here some are NaN \
or infinite, so the run ended, and the output holds no frame of this chunk or a later one.\n\n\
The rank has hashed all its weights again, and none changed: a rank with a changed weight reports T0754. A collective brings \
such values to every member, so the failure names a rank only if no other rank reported the same. Either a value left the \
range of its dtype inside the model, which a wider `--dtype` avoids, or a kernel or the memory of a device computed a wrong \
value. Run the same prompt and seed again on the CPU, or on another mesh: if the same chunk fails, the model or its dtype is the cause, otherwise a device is.";

    T0772: "a cache of a rank changed between two calls",
    "A cache is memory that keeps its contents from call to call: keys and values, and the last frames and rows that the \
convolutions of a VAE read again. At the end of a call each rank digests the caches that the call wrote, and before the next \
call computes anything it digests all of them again. A digest differs although no call ran and no reset was announced, so the \
rank stopped before it computed with the changed cache. The chunks before this call are intact.\n\n\
The message names the call and its chunk, each changed cache with the part that the rank holds, and both digests. Something wrote \
into the memory of the named rank: a kernel or a library that writes out of bounds, code that clears or fills a cache outside of a \
call, or faulty memory. Start the stream again: a cache cannot be repaired, and a new run or a cut begins with empty ones. If it \
happens again on the same host, test its memory, and run without it.";

    T0773: "a halo holds other rows than the neighbours sent",
    "Ranks that share a picture by rows exchange the rows at the edges of their shards; what a rank receives is its halo. \
Each rank sends a digest with its edge rows, made from its shard and bound to its position, and the receiver digests the halo as \
it is in its own memory. They differ, so the rank stopped before a convolution read the halo: the seam of the picture would be \
wrong, and no shape or count would show it.\n\n\
The message names the program, the op and the side. If it says that the rows are swapped, or belong to another rank, the copy of \
rows or the order of the ranks in the group is wrong on this rank: compare the `groups` of all ranks in `tessera record startup`. \
Otherwise bytes changed on the way: a damaged link or memory of this rank or of the neighbour that the message names.";

    T0775: "a kernel computes other numbers on one rank",
    "Before the first call every rank runs each kernel of its programs on the same fixed inputs and reports a digest of the \
result. A kernel is an op, several ops that a GPU computes in one launch, or a GEMM. The digest of one kernel differs, so the ranks \
would compute different numbers under one plan and one build. The message names the ops with their types and attributes, and each \
digest with the ranks that found it.\n\n\
The ranks have different hardware, drivers or GPU libraries, or a processor or a GPU is faulty. Compare `tessera doctor` on both \
hosts, and run without the rank that differs from the majority.";

    T0776: "the GPU that the plan gives a rank is not there",
    "The rank map of the plan (`[devices] order` of the mapping) names the GPU of every rank, by UUID, by PCI bus id or by number. \
The host of this rank shows no such GPU, or the names of two of its ranks mean the same one. The run ended before it used any \
GPU.\n\n\
The message names the rank and the GPU, and lists the GPUs that the host shows. A GPU that CUDA_VISIBLE_DEVICES hides is not \
shown. `tessera plan --launch-table` prints the GPU of every rank on this host.";

    T0777: "a rank is not on the host that the plan states",
    "The plan states which ranks share a host, and from this the path of every group. Two ranks that it states on one host run on \
two. Their groups, which the plan states as peer memory, would run over the network, 10 to 50 times slower, and no later check \
would find it. Before the first call the leader compares the plan with the host that each rank reports, a name and a boot, and ends \
the run. Only the division of ranks counts, not the names of the hosts. Ranks of two stated hosts may share one: memory of one host \
is no slower than a network, so the record notes it and the run continues. Two containers on one machine are two hosts, because \
their processes share no memory.\n\n\
The message names the rank, its stated host, another rank of that host, and the real hosts of both. Start the ranks in the order of \
the plan, the ranks of a host one after another, as many on each as the plan states (`tessera launch --dry-run` shows them). Or plan \
again with `--hosts` for the hosts that there are.";

    T0785: "a rank was about to capture what its plan does not declare",
    "A captured graph is launched as a whole, so all members of its collectives must capture the same ops or none. The plan \
states the graph of every program (`graph(\"denoise.fill3\")` in its header, or none), and the verifier proves the plan \
with it. Before a launch each rank compares the graph that its backend captures or replays, by name and number of ops, with \
the plan. They differ, so the rank stopped before it launched anything.\n\n\
The message names the program and both graphs. The backend or a setting of this rank alone decides what to capture; that \
decision belongs into the mapping (`[runtime] capture`), from which every rank receives it.";
}

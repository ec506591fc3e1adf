//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0601: "mesh axis has nothing to shard",
    "A video generator has no experts, so `ep` must be 1, and a stream is one sequence, so `dp` must be 1. Use tp \
to shard heads or tokens, and pp to split blocks into stages.";

    T0602: "tp or ep does not fit the model",
    "`ep=N` gives each of N ranks some of the experts of a layer, so it may be up to the number of experts; the ranks' \
shares may differ by one. `tp=N` shards each transformer block over N ranks. Every one of these ranks must \
hold at least one attention head. Under `megatron` it must also hold at least one column of the \
feed-forward layer, under `ulysses` at least one token of a chunk. Here tp is larger than one \
of these counts, so a rank would hold nothing. The message shows tp and the count. tp need not \
divide the counts: the ranks' shards may differ by one unit. Use a size from the hint, which \
lists the sizes with even shards and the largest size with uneven shards.";

    T0603: "pp does not fit the model",
    "Each stage of a block pipeline holds at least one whole block. A list of blocks per stage must have one \
entry per stage and add up to the model's blocks.";

    T0604: "mesh-invariant numerics are not possible here",
    "Under `mesh-invariant` every contraction that some mesh may split is divided into 8 equal segments summed in \
one binary tree, so that no result depends on the mesh. That requires tp to divide 8, tp to divide the heads, and 8 to \
divide both the model width and the feed-forward width. The tree sums in f32, so `dtype` must be f32 too. Use the standard \
policy or one of the sizes in the hint.";

    T0605: "mapping contradicts itself",
    "The mapping is the TOML file, or the options of the command line, that places a \
model on ranks. One of its values is out of range or contradicts another one; the message names \
the key and the number.\n\n\
`stages.blocks` is the number of transformer blocks of each pipeline stage: with pp=2 it has \
two entries, each a whole number from 1. The queue depths `queues.d_in`, `d_out` and \
`max_outstanding` are 1 to 64: with 0 no chunk could pass, and a queue without a limit would \
hide a slow consumer. `devices.order` names one device per rank, in rank order. A leader \
outside the mesh comes first, because it is rank 0. A device name contains no quote, backslash \
or control character, because the sealed mapping holds it in quotes.\n\n\
`overlap.chunks` splits the token rows of a chunk of video into row chunks, so that the \
all-reduce of one row chunk overlaps the compute of another. It needs `megatron` with tp=2 or \
more, because no other mapping has these all-reduces, and at least one token per row chunk.\n\n\
`topology`, not the mesh, states whether the leader is outside the mesh. In `mesh`, rank 0 \
leads and also computes. In `pp0`, rank 0 leads, encodes and decodes beside a mesh of exactly \
one rank. In `pp1` it does so beside a mesh of two ranks or more, whose first rank relays its \
messages. The mesh axis `pp` is something else: it splits the blocks of the model into stages. \
A mapping may use both.";

    T0606: "strategy has no rule for this op",
    "The planner could not make a correct program of the ranks from this op of the model. \
The strategy has no rule for the op with its operands in these layouts, or the op does not \
accept the dtypes of `--dtype`, or it cannot run on a row chunk. The message states the reason. \
Try another strategy, f32, `--overlap-chunks 1`, or tp=1; the missing rule is a gap in the \
planner. No strategy shards softmax and bmm: use attention and matmul, or write the \
programs of the ranks in text. Tokens of moe_route travel over ep alone.\n\n\
This code also rejects a weight or an input of a model whose attribute `part`, a hint for the \
strategy, has an unknown value. The planner could treat the value as `whole` and the results \
would be correct, but every rank would hold and compute the whole tensor. The hint lists the \
valid values.";

    T0607: "attention cannot be scattered over heads",
    "The attention scheme rs_mm_ag (reduce-scatter, matmul, all-gather) reduce-scatters \
partial scores so that each rank of tp holds whole heads. A reduce-scatter needs equal shards, \
and a value that is still a partial sum cannot be padded, so tp must divide the heads. If the \
model has fewer heads of keys and values, tp must divide those too, or be a multiple of them, \
so that every rank holds a copy of one. Each rank computes partial scores from its features of \
each head, so it needs at least one feature. With tp = 1 there is nothing to reduce. The hint \
lists the legal values of tp; other schemes accept head counts that differ by one.";

    T0608: "no op masks scores between two matmuls",
    "The attention scheme rs_mm_ag computes attention as two matmuls (`bmm`) with a \
softmax between them. Causal attention masks the scores before the softmax, but no op does so \
between `bmm` and `softmax`, and a mask tensor would be as large as the scores of all heads. A \
decoding step needs no mask, because its one query attends to every key. So Tessera writes \
programs of this scheme for decoding only; for other jobs it gives an estimate only. A scheme \
with a fused attention op applies the mask inside that op.";

    T0609: "model has no phases of pixels for this place",
    "With `media = \"mesh\"` or `\"replicas\"` the ranks decode each chunk and encode its anchor at the end of its call, from \
programs of the plan. With `media = \"outside\"` the leader runs them beside the \
calls, on a GPU that no rank has. Only a model whose decoder is `wan_vae` or `tiny` has such programs: a lossless decoder \
moves values without arithmetic, so the leader runs it, and a model without a decoder has no pixels. \
Leave out `--media`, or write `media = \"leader\"`.";

    T0610: "fast decoder on a device without e4m3",
    "With `quality = \"fast\"` in `[decoder]`, or `--quality fast`, the large convolutions of the VAE's decoder \
multiply values in e4m3, an fp8 format. Only GPUs of sm_90 do so, and only programs in bf16 or fp8 have such \
values: the mapping needs `dtype = \"bf16\"` or `\"fp8\"`, and `media = \"mesh\"`, `\"replicas\"` or \
`\"outside\"`, because with `media = \"leader\"` the leader decodes on its cores. With `quality = \"exact\"`, the \
default, the decoder gives the reference's values on every device.";

    T0611: "table of experts does not fit",
    "The table `[experts]` of a mapping states over which axis ranks have experts of their own (`axis`), which of these \
ranks route a token (`tokens`), how the results of its experts are added (`combine`), how many tokens an expert accepts \
(`capacity_factor`, in each of `token_groups` groups of tokens), how many bytes of tokens may move to another expert \
instead (`reroute_bytes`), how tokens travel (`wire`), and how many copies of hot experts there are (`replicas`, by \
`choices` or `choices_file`). Two of its keys contradict each other, or a number does not fit the mesh or the model; the \
message names them.\n\n\
With `tokens = \"sharded\"` every rank of that axis has the same number of token groups, so the number of these ranks must divide \
`token_groups`. Which tokens are dropped follows from the groups alone: state a multiple of every number of ranks that you \
want to compare. `wire = \"fp8\"` rounds the tokens that travel, which only `numerics.tokens = \"fp8_e4m3\"` allows. \
`choices_file` is the experts.jsonl that a run with `statistics = true` leaves.";

    T0612: "keys about routers do not fit",
    "The table `[experts]` of a mapping can change what routers prefer: a gate that subtracts `locality_weight` from the logits \
of distant experts, biases of the user (`bias`, `bias_file`, `bias_locality`), a term of a training loss (`regularizer`), \
and another number of experts per token (`top_k`). Two keys contradict each other, or a key does not fit the model; the \
message names both.\n\n\
What depends on distance needs `tokens = \"sharded\"`, because only then has a token a rank of its own, and locality groups: \
`locality_ranks` consecutive ranks, or the hosts that `devices.order` names. A gate by its name applies to models whose \
gate is a softmax over all experts.";

    T0613: "distance to experts counts more than once",
    "The gate's penalty (`locality_weight`), the bias of logits (`bias_locality`) and the term of the loss (`regularizer`) \
all make distant experts less likely, and their effects add up. The run uses the sum that the message states. One of them \
is usually meant: the gate for a model that was trained without, the term of the loss for training.";

    T0614: "layout does not fit an array program",
    "An array program comes with layouts of its inputs, weights and outputs by name: how each is sharded over the mesh. A name \
that the program does not have is rejected rather than ignored, because a tensor would silently stay replicated. A layout \
must also fit the shape of its tensor: it shards dims that exist, each over one axis at most, with at least one element for \
every rank. Sources and outputs are whole values, so no layout is partial.";

    T0615: "array program cannot be lowered",
    "The planner makes one program of the ranks from an array program and the layouts of its sources. It changes the layouts of \
operands until the sharding rule of every op accepts them, and replicated operands are always among the candidates. So this \
code means that the program itself is not one that ranks can run: an op with operands that do not fit, two programs or outputs \
of one name, a mesh with ranks outside of it, or a buffer. An array program keeps nothing between its calls: its state are \
inputs and outputs. The message names the op and the rule.";

    T0616: "pair of streams is unknown",
    "A plan states which streams may run at the same time, in pairs such as `compute` and `tp_collective`. The streams are \
`compute`, `tp_collective` for collectives over tp and dp, `pp` for those over pp, `a2a` for those over ep, and `io` for copies to the host. The ops of one \
stream run one after the other, so a stream cannot be paired with itself.";

    T1200: "cannot parse a mapping pin",
    "Pins are written as `knob=value`, separated by commas: `tp=12,ep=6,scheme=ulysses`. \
The message names the unknown knob or value and the nearest known one.\n\n\
If tp, ep, pp and dp are all pinned, they are the axes of one mesh and must multiply to the \
number of devices. With fewer pins, attention and experts may divide the ranks of one stage in \
two different ways, and both must give the number of these ranks: tp · replicas for attention, \
expert_tp · ep · expert replicas for the experts.";

    T1201: "axes do not multiply to the devices",
    "Every rank needs one device. The four axes tp, ep, pp and dp of one mesh multiply to \
the number of ranks. If attention and experts divide the ranks of a stage in different ways, tp \
· replicas (attention) and expert_tp · ep · expert replicas (experts) must both equal the ranks \
of a stage.\n\n\
The message shows the number of ranks and of devices. The legal neighbours that it lists keep \
as many of the axes as possible. Sometimes the same tp and ep fit with another expert_tp.";

    T1202: "more stages than layers",
    "A stage holds at least one layer. With several model chunks per stage, each chunk does. Use fewer stages or chunks.";

    T1203: "cannot shard heads over tp",
    "The attention heads are split into one shard per rank of tp. With ring attention, \
`ring` ranks share one shard, so there are tp / ring shards. Each shard needs at least one whole \
head. Shards may differ by one head unless `--strict` is given; the rank with the most heads \
then determines the time. If there are fewer KV heads than shards, several ranks hold a copy of \
one KV head.\n\n\
Use a smaller tp, or ring attention with a larger ring, for example `--pin scheme=ring,ring=4`. \
If only `--strict` rejects the mapping, choose tp so that the number of shards divides the \
number of heads, and divides the number of KV heads or is a multiple of it; or omit `--strict`.";

    T1204: "cannot shard experts over ep",
    "Each rank of ep needs at least one expert, and each rank of expert_tp a part of its \
inner width. A model without routed experts has ep = 1. Sizes that do not divide are allowed \
(some ranks hold one expert more) unless `--strict` is given.";

    T1205: "batch is too small for the replicas",
    "Each attention replica processes its own sequences, in micro-batches. A replica without \
a sequence is idle, and a micro-batch cannot exceed a replica's share. Use fewer replicas (a larger tp or pp), a \
smaller micro-batch, or a larger batch.";

    T1206: "pipeline schedule does not apply",
    "Interleaving needs stages, model chunks and a number of micro-batches that the stages divide; schedules that split \
the backward pass require training; a bidirectional schedule needs an even number of stages. The message gives the \
requirement and the numbers.";

    T1207: "tensor-parallel scheme does not apply",
    "Schemes that shard tokens need at least one token per rank; schemes that shard heads need attention; the ring size \
divides tp and is larger than one. Use more sequences per micro-batch, a smaller tp, or `megatron`, which has none of \
these requirements.";

    T1208: "context is too short for ring attention",
    "Ring attention passes keys and values around a ring of ranks: the next ones travel \
during the compute on the current ones. This pays off only if each rank's shard of the context \
is long; with short shards every step waits for the link. The message shows the tokens per rank \
and the minimum. Use a smaller ring, or shard heads instead.";

    T1209: "attention scores are too large to reduce",
    "rs_mm_ag writes the partial scores of all heads to memory so that they can be reduce-scattered; a fused attention \
kernel never does. Scores grow with queries times keys: for long contexts they would fill the memory. Use rs_mm_ag for \
decoding or short contexts, and another scheme elsewhere.";

    T1210: "device does not support this precision",
    "The devices of this cluster have no matrix units for this format. The message lists the supported formats.";

    T1211: "fp4 is not enabled for training",
    "This code applies only to training; inference may use fp4 on devices that support \
it. Gradients at fp4 lose more accuracy than a training run can repair without stochastic \
rounding and other methods that this planner does not model. Use fp8 with f32 master weights: \
`precision=fp8`. Only a program that calls the search as a library can enable fp4 in training \
(`fp4_training` of its search space).";

    T1212: "no optimizer state to shard",
    "Sharding the optimizer state needs at least two replicas of the same weights, and an optimizer: inference has none. \
Use `replicated`, or more replicas.";

    T1213: "memory tier cannot hold this data",
    "Training updates every weight and reads no KV cache: both stay in device memory. Old keys may be placed on peers \
only in a domain of several devices; data placed on the host must fit there.";

    T1214: "nothing to recompute",
    "Without a backward pass no activations are saved, so recomputation has no effect. Set \
recomputation to `none`, or plan for training.";

    T1215: "collective leaves the scale-up domain",
    "The search was told to keep tp and ep groups inside one scale-up domain \
(`within_domain` of its search space), because a rank has a tenth of the bandwidth on links \
between domains. A group of ranks stays inside a domain if its size divides the domain.";

    T1216: "model replica spans racks",
    "If there are several model replicas, each must stay in one rack, so that only \
gradients cross racks. The ranks of a replica must divide the devices of a rack. Use a mesh \
whose replicas do, or a single replica (dp=1). A program that calls the search as a library can \
disable the rule (`replica_in_rack` of its search space).";

    T1217: "peak rank exceeds device memory",
    "The message gives the bytes that the peak rank needs, the device's memory, and the largest term. Weights shrink \
with tp, ep and pp; activations with recomputation and smaller micro-batches; optimizer state by sharding it over replicas; \
the KV cache with tp, with more replicas, or on another tier.\n\n\
Experts of an array plan that lie in two tiers take their part of the host memory, which the message then compares.";

    T1218: "expert capacity drops too many tokens",
    "Assignments beyond an expert's capacity are dropped: the token skips that expert. That is less work, so a search \
by time alone would always drop tokens. The search therefore limits the dropped share; a pinned capacity is exempt. A larger \
capacity or a better balanced routing drops less.";

    T1220: "recipe needs more ranks than there are devices",
    "Every rank needs a device, and the axes of one mesh multiply: tp=8, ep=6, pp=3, dp=1 \
are 144 ranks, not 72. The guide for 72 devices, from which the recipes come, prints exactly \
these axes as Recipe C and as its training recipe; on one rack of 72 they cannot be built, on \
two racks they can.\n\n\
The hint lists meshes of the right size, those that keep most axes first. To find the best of \
them for a model, run `tessera plan` and leave the axes free.";

    T1221: "heads do not divide over tp",
    "128 heads over tp=12 are 10.67 each. A head is never split, so eight ranks get 11 \
and four get 10; every collective then waits for those with 11, and attention takes 11 · 12 / \
128 = 1.031 times as long as with even shards. The columns of the QKV and output matmuls follow \
the heads; the feed-forward's inner width is sharded independently.\n\n\
This is legal: uneven shards differ by one unit, and the estimate uses the slowest rank. The \
ranks with one more head also need more memory. Use `--strict` to reject such meshes and list \
the nearest ones that divide evenly.";

    T1222: "experts do not divide over ep",
    "4,096 experts over ep=9 are 455.11 each: one rank holds 456, the others 455. Experts \
are never split over ep, so this costs the memory of one expert and, under even routing, 456 · \
9 / 4096 = 1.002 times the time. Routing imbalance slows the slowest rank far more.\n\n\
This is legal. Use `--strict` to reject it and list the nearest values of ep that divide \
evenly.";

    T1223: "rank group spans scale-up domains",
    "Within one scale-up domain (72 devices of a rack, or 8 of a host) every pair of devices has the full bandwidth of \
its links. A collective with members in two domains runs at the speed of the network between them, about a tenth.\n\n\
This is an error if the whole mesh fits in one domain, so that only the rank order is wrong, or if the \
query forbids it. A mesh larger than a domain must cross somewhere: then it is a warning, and the estimate uses \
the slower links. Cross domains with dp (once per step) or pp (one activation), not with tp or ep.";

    T1224: "model replica spans racks",
    "With dp > 1 every model replica fits in one rack and must stay there: then only gradients cross racks, \
once per step. Here the ranks of one replica are in several racks, because the device order interleaves replicas or because \
the size of a replica does not divide a rack.\n\n\
List devices rack by rack, tp fastest, dp slowest, or choose a replica size that divides the rack.";

    T1225: "collectives are congested",
    "Dispatch and combine are the all-to-alls that send tokens to their experts and bring \
the results back. They are exposed, which means that no compute hides them, for more than 20 % \
of the step, or they reach less than 80 % of the links' bandwidth in bursts. For the plan or the run of \
a video model or of a language model, the exposed time of all collectives counts. The usual causes are hot experts, which receive far \
more tokens than others; ranks that send unequal numbers of tokens; and one large all-to-all \
that overlaps no compute.\n\n\
Tessera proposes three mitigations for a model with experts. `tighten bucketing` groups \
sequences into batches of equal length or smaller batches, or changes the pipeline schedule, so \
that ranks send equally many tokens or all-to-alls overlap compute. `reduce the capacity \
factor` lowers the number of tokens that an expert accepts, and drops the others. `enlarge the \
expert bank` doubles the number of experts in each layer, which needs memory. For a plan or a run it \
proposes another strategy or mesh. Each mitigation is shown with its predicted \
numbers, or with the reason why it does not apply.";

    T1226: "peak rank runs out of memory",
    "The peak rank needs more bytes than the device has, at plan time or at the peak of a \
run. Activations and KV cache grow with the load; weights and optimizer state do not.\n\n\
Tessera proposes three mitigations: recompute attention in the backward pass, smaller \
micro-batches, fewer experts per token (from 2 to 1.5: every other token uses one less). Each \
is shown with its new peak. If none suffices, the weights themselves are too large for this \
mesh: `tessera plan --why` names the legal neighbours.";

    T1227: "fp8 is numerically unstable here",
    "Infinities or NaN appeared while matmuls or messages used fp8. E4M3 has a maximum of \
448 and three mantissa bits: one quantization of a normal activation costs a relative mean \
square error of about 7e-4, and long sums in a narrow accumulator lose more.\n\n\
Tessera proposes three mitigations: promote partial sums to f32 earlier, use finer-grained \
scales, scale the loss. The numbers shown are the cost of each on this machine, not its gain in \
accuracy, which only a run can show.";

    T1228: "results differ between reruns",
    "The same inputs produced different bits. On several ranks the usual causes are \
reductions whose order depends on message size or on the algorithm that the library picked, \
ranks placed differently, and random numbers keyed by something that changes between reruns.\n\n\
Tessera proposes three mitigations: pin the algorithms of the collectives, fix the rank order, \
make random draws deterministic per axis. A pinned algorithm is not enough if its number of \
channels follows the message size. In that case gather all partial sums and add them in rank \
order. Do not key draws by the rank of tp: the ranks of a tp group hold the same tokens and \
must choose the same experts. Draws keyed by the token's position in the batch are right on \
every mesh.";

    T1229: "unknown recipe",
    "A recipe is a model, a workload and some pins under one name. There are six, from a \
guide for 72 devices (docs/guides/plan-a-rack.md); the message lists them. Use `tessera plan \
--model NAME --mesh tp=8,ep=9` for anything else.";

    T1230: "mapping needs more memory than a device has",
    "A rank holds its weights, its caches, the inputs of calls and the slots of its largest phase, and the executor \
reserves some memory for itself. The fullest rank of this mapping would need more memory than its device has. More stages \
(pp) divide weights and caches; megatron shards weights over tp, while ulysses replicates them on every rank.";

    T1231: "mapping misses the deadline",
    "The objective is a deadline per chunk: the time from one chunk to the next. The estimated period of this mapping \
is longer. The message shows both. More devices, another strategy, a shared decode, fewer denoising steps or a lower \
resolution shorten the period; a deadline that no mapping meets is better found now than on air.";

    T1232: "decode placement does not fit the stream",
    "A decode placement states which ranks decode a chunk and when. If chunks are \
coupled, as with `--cache recompute`, the context of the next chunk needs pixels of this chunk, \
so `overlapped` (decode beside the next chunk) is impossible. If they are not coupled, no call \
waits for pixels, so `serial`, `anchor_first` and `anchor_shared` do not apply. Ranks can share \
decode and encode only if the decoder is declared shardable. A decoder on a rank of its own \
needs topology pp0 or pp1; a decoder on the mesh needs topology mesh. The hint lists the \
possible placements.";

    T1240: "gate threshold is out of range",
    "The threshold file holds an unusable number: a share that is not between 0 and 1, a count below 1, or a lower \
limit above its upper one. The message names the key and the value found.\n\n\
Every threshold is indicative and has a default; a file needs only the keys that it changes. `gates.toml` of the planner \
lists and explains all of them.";

    T1241: "plan fails a gate",
    "A gate is a rule of thumb with a threshold: how much of a device's memory \
activations and KV cache may take, how many experts a rank should hold, how much collective \
time should be hidden, how long a stage may wait, and so on. The message gives the number, the \
threshold and the dominant term.\n\n\
A failed gate is advice, not an error: the plan is legal and may be the best one for a small \
machine or a small batch. Change what the message names, or the threshold: \
crates/tessera-plan/gates.toml holds all of them, and a file given with --gates overrides any \
part.\n\n\
A gate that does not apply gives the reason with its arithmetic. For example, expert balance \
does not apply to a decode batch that gives each expert a handful of rows: those vary by more \
than the threshold even with a perfect router.";
}

//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0201: "IR text cannot be read",
    "The text violates the grammar at the position shown. A program is\n\n\
    program @name role(stage0) mesh(tp=2) streams(compute, tp_collective) {\n\
      buffer @kv.0.k : f32[90, 24] {tp: shard(1)}\n\
      %y = ttile.matmul %x, %w, bias=%b {act = \"silu\"} : f32[30, 24] {tp: shard(1)} @compute after(%e)\n\
    }\n\n\
A logical program has neither role nor mesh. An op consists of, in this order: results, op name, operands, attributes in braces, \
result types after a colon, stream, events. A layout lists for each mesh axis replicated, shard(dim), \
shard(dim, extent=n, unit=u) or partial(sum|tree|max); an omitted axis is replicated. A final `group_size=w` in a shard or partial means \
that each subgroup of w positions of the axis holds the whole value. mesh(tp=2, outside=1) has a rank 0 outside the mesh.\n\n\
After an error the parser continues at the next line that begins an op, so `tessera check` reports all errors at once.";

    T0202: "unknown op",
    "The op table has no op with this name, or the op is written in the wrong dialect. \
Logical programs compute with `toperator.*` and have no collectives. Programs of a role compute \
with `ttile.*` and issue collectives as `ttile.collective.*`, or as `ttile.collective.issue` \
with a later `ttile.collective.wait`. Sources, sinks and event.record have no prefix: input, \
call, weight and cache.read are sources, output and cache.write are sinks.\n\n\
There is no `if`, no loop and no `select`. The ops that a program issues must not depend on \
data, because a rank that skips a collective blocks the other ranks. Let the leader choose \
which phases a call runs, and issue every collective of a phase unconditionally, with an empty \
payload if necessary.\n\n\
The message shows the closest known name, if there is one.";

    T0203: "operands or attributes do not match the op",
    "The op table lists for each op its operands by position (`%x`), its keyed operands \
(`start=%s`), and its required and optional attributes (`{head_dim = 64}`). This op lacks a \
required one, has one twice, or has one that the table does not list for it; the message states \
which. An unknown attribute is rejected, not ignored: a misspelt `segments` would silently \
change the numbers.\n\n\
Three kinds of values have one permitted place each. A ticket, the result of \
`ttile.collective.issue`, is the operand of a `wait`. An event, the result of `event.record`, \
stands in `after(…)`. An integer call scalar is a number that the leader sends with each call, \
declared as `%s = call \"start\" : i64`; an op that computes reads it as a keyed operand, such \
as `start=%s`.";

    T0204: "name is undefined or defined twice",
    "A value (%name) is defined once, above its first use. Buffers (@name) are declared in the program with \
`buffer @name : type`, streams in its header with `streams(…)`. With two definitions of a name it would be unclear which value \
later ops read, so the second definition is rejected and the first one is shown with it.";

    T0205: "written type differs from the inferred type",
    "The type written after the colon differs from the type that the op's rule infers \
from its operands; the message shows both. The inference uses local shapes and layouts, so the \
written type, an operand's type, or the choice of op is wrong.\n\n\
With uneven shards the local extent depends on the role: the coordinate in the role's name \
determines the shard, so `role(stage0@tp1)` has the shard at position 1 of tp. Omit the type to \
use the inferred one. Inputs, call scalars (numbers that the leader sends with each call), \
weights and receives always need a type.";

    T0206: "fragment is not a program",
    "The text contains ops without an enclosing `program`. It can be parsed and printed, but nothing can be proved about it: \
without types it is unknown which dim of a value is sharded over which axis, and the same ops are correct for one layout \
and wrong for another.\n\n\
The message lists what is missing. Put `program @name role(r) mesh(tp=4) streams(compute) { … }` around the ops, or \
`program @name { … }` around logical ops. Define every undefined value as an input, a weight or a \
cache.read with its type, declare every `@name` as `buffer @name : type`, and return results with `output`. The types of \
other results may be omitted: the rules of the ops determine them.";

    T0210: "shapes do not fit the op",
    "The local shapes of the operands violate the op's shape rule: for instance the inner extents of a matmul differ, \
or a cache write exceeds the rows of the buffer. The message shows both shapes.\n\n\
A type must also be possible on the mesh: a dim is sharded over at most one axis, `group_size` splits an axis into several subgroups of at \
least 2 positions, and a role outside the mesh holds replicated values.";

    T0211: "partial value used before its reduction",
    "Of a value marked partial(sum), each rank holds one term of the sum. The sum itself \
exists only after an all_reduce or reduce_scatter. Only ops that commute with addition accept a \
partial operand. Any other op (a norm, an activation, a softmax, a bias, a cache, an output) \
would silently compute on one term instead of the sum.\n\n\
Insert `ttile.collective.all_reduce` or `ttile.collective.reduce_scatter` before the op.";

    T0212: "collective does not match the operand's layout",
    "Each collective accepts its operand in one layout only; the message shows the op and \
the layout of its operand. all_gather needs even shards of the dim that it names. all_reduce \
and reduce_scatter need a partial value with the reduction that they name: each rank holds one \
term of the sum, or one operand of the maximum. all_to_all needs shards of its `concat` dim. \
broadcast needs an operand whose layout is replicated, as its result is: afterwards all members \
hold the root's bytes. \
With another layout the result would be wrong: all_gather of a replicated value concatenates \
copies, and all_reduce of a replicated value multiplies it by the group size.\n\n\
With `group_size = 2` a collective runs in each block of 2 consecutive positions of the axis, \
and the layout of its operand must have the same `group_size`.\n\n\
The group `world` is all ranks. Over `world`, broadcast, send and recv need a value that is \
replicated on every axis. all_reduce needs a value that is partial on every axis, and a \
topology in which every rank belongs to the mesh. No other collective runs over `world`, \
because no layout states which shard a rank of the world holds. Instead, gather, scatter or \
exchange over one axis after the other. A rank outside the mesh is in no group of an axis.\n\n\
Change the collective's axis, dim or `group_size` to those of the operand's layout, choose \
another collective, or bring the operand into the required layout first.";

    T0213: "op needs a whole dim that is sharded",
    "Norms and softmax reduce over a dim. If that dim is sharded, each rank normalises only its own shard: the \
result is wrong by O(1), and no error occurs at run time. Gather the dim first, or split the op into partial sums \
and one small all_reduce (row_square_sum, all_reduce, rms_scale).";

    T0214: "operand layouts do not fit together",
    "The op's sharding rule does not support this combination of operand layouts on one \
mesh axis; the message shows the layouts. An example is the matmul of a replicated activation \
and a weight that is sharded over its inner dim. Their local inner extents are equal, but the \
whole weight has a larger inner extent than the activation, so the ranks would combine \
parts that do not belong together. In other ops, such as an add or a cache write, both layouts \
must be equal.\n\n\
Gather or reshard one operand first, or plan with a strategy that shards the operands alike.";

    T0215: "attribute missing or invalid",
    "An attribute of the op is missing or has an invalid value. A collective must name its \
mesh axis (or `world`) and, if it moves shards of a tensor, the tensor dim: if scores are scattered over the wrong dim before a \
local softmax, the program runs and every result is wrong.\n\n\
`group_size` is at least 2, less than the size of the axis, and divides it. `root`, `to` and `from` are positions in the group: on \
the axis, in the subgroup, or in the world, where the position is the rank. `transport` is `p2p` or `nccl`. `algorithm`, \
which only an all_reduce has, is `tree` or `ring`.\n\n\
`rounding` is `nearest` or `stochastic`. Stochastic rounding needs a `seed`, and its result is bf16 or e4m3; rounding to nearest takes \
neither `seed` nor `draw` nor `first_row`, which would have no effect.";
}

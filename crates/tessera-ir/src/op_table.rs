//! The op table: one row per op, with its operands, attributes and semantics.
//!
//! The shape and sharding rules of an op are in [`crate::rules`], its cost is in
//! [`crate::op_workload`], and its executable semantics are in the reference evaluator. Everything
//! that queries an op reads the same row.

/// An op of either dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[rustfmt::skip]
#[allow(missing_docs, reason = "each row of the table documents its op")]
pub enum Opcode {
    Input, Call, Weight, Output,
    CacheRead, CacheWrite,
    Matmul, BiasAct, Add, Silu, Cast, Quantize,
    LayerNorm, Modulation, NormModulate, GateResidual,
    RmsNorm, RowSquareSum, RmsScale,
    Rope, Attention, Softmax, Bmm, MoeRoute, TimeEmbed, Renoise, ToX0,
    SpaceTimeToDepth, DepthToSpaceTime,
    TakeRows, TakeShard, Pad, Compact,
    AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Send, Recv,
    Wait, EventRecord,
}

/// Kind of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Defines a value from outside the program.
    Source,
    /// Moves a value out of the program or into a buffer.
    Sink,
    /// Computes on this rank only.
    Compute,
    /// Issued by every member of a group.
    Collective,
    /// Computes nothing: waits for an issued collective or records an event.
    Order,
}

/// A row of the op table.
#[derive(Debug)]
pub struct OpRow {
    /// Opcode that the row describes.
    pub opcode: Opcode,
    /// Name of the op without the dialect prefix. Ops of kind [`OpKind::Source`] and
    /// [`OpKind::Sink`] have no prefix in the text form.
    pub name: &'static str,
    /// Kind of the op.
    pub kind: OpKind,
    /// Minimum and maximum number of positional operands.
    pub operands: (usize, usize),
    /// Keyed operands in printing order; a trailing `?` marks an optional operand.
    pub keyed: &'static [&'static str],
    /// Attributes; a trailing `?` marks an optional attribute.
    pub attrs: &'static [&'static str],
    /// Number of values that the op defines.
    pub results: usize,
    /// Whether the op commutes with addition, so that a partial operand may pass through unreduced.
    pub linear: bool,
    /// Description of the semantics.
    pub doc: &'static str,
}

macro_rules! rows {
    ($($op:ident $name:literal $kind:ident $n:expr, [$($k:literal),*], [$($a:literal),*], $r:literal, $lin:literal, $doc:literal;)*) => {
        /// All rows, in the order of [`Opcode`].
        pub static OP_TABLE: &[OpRow] = &[$(OpRow {
            opcode: Opcode::$op, name: $name, kind: OpKind::$kind, operands: $n, keyed: &[$($k),*],
            attrs: &[$($a),*], results: $r, linear: $lin, doc: $doc,
        }),*];
    };
}

#[rustfmt::skip]
rows! {
Input "input" Source (0, 0), [], [], 1, true,
    "An input tensor of the call, replicated on every rank.";
Call "call" Source (0, 0), [], [], 1, true,
    "A scalar of the call, or one number per latent frame. It may be used in arithmetic, RoPE offsets, random keys and cache rows, but never determines a shape, a group, a branch or the choice of an op.";
Weight "weight" Source (0, 0), [], ["load?", "part?", "unit?"], 1, true,
    "A shard of a named model tensor. `load = \"patch\"` reorders a patch convolution [d, C, 1, ph, pw] into rows of (ph, pw, C); `\"e4m3\"` and `\"e4m3.scale\"` load the two results of `quantize` on the rows of the whole tensor. In a logical program, `part` (col, row, whole) and `unit` specify how a strategy may shard the weight.";
Output "output" Sink (1, 1), [], [], 0, false,
    "Returns a value to the host.";
CacheRead "cache.read" Source (0, 0), [], ["row?", "rows?"], 1, true,
    "Views rows `row..row + rows` of a buffer without a copy. No later op may write the buffer before the last use of the view.";
CacheWrite "cache.write" Sink (1, 1), ["row?"], ["first_row?"], 0, false,
    "Writes the operand to rows of the buffer that start at `row` (default 0), plus `first` if given.";
Matmul "matmul" Compute (2, 2), ["bias?", "x_scale?", "w_scale?"], ["act?", "segments?"], 1, false,
    "y = act(x · wᵀ + bias), x [n, k], w [m, k]. `segments` splits k into that many equal segments whose partial sums are added in one binary tree. In e4m3, the accumulator of row i and column j is multiplied by x_scale[i] · w_scale[j] before the bias is added, and y is bf16.";
BiasAct "bias_act" Compute (2, 2), [], ["act?"], 1, false,
    "y = act(x + bias), with bias [m] broadcast over the rows of x [n, m].";
Add "add" Compute (2, 2), [], [], 1, true,
    "Elementwise sum.";
Silu "silu" Compute (1, 1), [], [], 1, false,
    "x · sigmoid(x).";
Cast "cast" Compute (1, 1), [], ["to"], 1, false,
    "Converts x to the dtype `to` (f32, f64, bf16 or f16), rounding to nearest, ties to even.";
Quantize "quantize" Compute (1, 1), [], [], 2, false,
    "Quantizes the rows of x [n, k] to e4m3 and returns a scale [n]: the maximum of |x| in the row divided by 448, or 1 for a row of zeros. Scales and x / scale are computed in f32; x / scale is then rounded to nearest, ties to even, and saturates at ±448.";
LayerNorm "layer_norm" Compute (3, 3), [], ["eps"], 1, false,
    "Normalises the rows of x to zero mean and unit variance, multiplies by w [d] and adds b [d].";
Modulation "modulation" Compute (2, 2), [], [], 1, false,
    "Adds the table [1, c, d] to a per-frame embedding, giving [f, c·d]: the embedding is [f, c·d], or [f, d] repeated c times.";
NormModulate "norm_modulate" Compute (2, 2), [], ["eps", "first_row?", "frame_rows", "scale", "shift"], 1, false,
    "Layer norm without weights, times (1 + scale), plus shift. Scale and shift are d-wide columns of m [f, c·d]; the frame of a token selects the row of m. With `first`, the rows of x start at that token.";
GateResidual "gate_residual" Compute (2, 3), [], ["first_row?", "frame_rows?", "gate?"], 1, false,
    "x + y · gate, with the gate a column block of m [f, c·d]; x + y if there is no m. `first` as in norm_modulate.";
RmsNorm "rms_norm" Compute (2, 2), [], ["eps", "segments?"], 1, false,
    "Divides the rows of x by their root mean square over the full width and multiplies by w [d].";
RowSquareSum "row_square_sum" Compute (1, 2), [], ["segments?"], 1, false,
    "Sum of squares of each row of each operand: [n, operands].";
RmsScale "rms_scale" Compute (3, 3), [], ["col", "eps", "width"], 1, false,
    "x · rsqrt(ss[:, col] / width + eps) · w: the second half of rms_norm, after the sums of squares were reduced over all ranks.";
Rope "rope" Compute (1, 1), ["start"], ["first_row?", "frame_stride?", "grid", "head_dim"], 1, false,
    "3-D rotary embedding over (frame, row, column) of the token grid, with interleaved pairs. The position of frame f is start + frame_stride · f; with frame_stride 0 all rows are rotated by the frame position `start` only. With `first`, the rows of x start at that row of the grid.";
Attention "attention" Compute (3, 3), ["bias?"], ["bias_rows?", "head_dim"], 1, false,
    "softmax(q · kᵀ / √head_dim + bias) · v per head; the bias is added to the scores of key rows bias_rows[0]..bias_rows[1].";
Softmax "softmax" Compute (1, 1), [], ["dim?"], 1, false,
    "exp(x) divided by its sum along `dim` (default: the last dim); the maximum is subtracted first.";
Bmm "bmm" Compute (2, 2), [], ["scale?", "transposed?"], 1, false,
    "Batched matmul: scale · x · y for x [..., n, k] and y [..., k, m]; with `transposed = true`, y is [..., m, k].";
MoeRoute "moe_route" Compute (2, 2), [], ["a2a_axis", "capacity_factor", "pack_fused?", "policy?", "quantize_fp8?", "top_k?"], 1, false,
    "Σ g · (x · Wᵉᵀ) over the `top_k` experts of each token with the largest weights g (default 2, ties to the lower expert), for x [tokens, d], g [tokens, experts] and the buffer W [experts, d_out, d]. An expert accepts tokens in order, at most ⌈capacity_factor · tokens · top_k / experts⌉; further tokens are dropped. Logical programs only: `a2a_axis` is the mesh axis of the all-to-all, `pack_fused` and `quantize_fp8` select its implementation.";
TimeEmbed "time_embed" Compute (1, 1), [], ["width"], 1, false,
    "Sinusoidal embedding of each timestep in f64: cosines, then sines; base 10000.";
Renoise "renoise" Compute (1, 1), ["sigma", "seed", "chunk", "draw"], [], 1, false,
    "(1 − sigma) · x + sigma · normal. The normal of an element is keyed by (seed, chunk, draw, index of the element in the global tensor).";
ToX0 "to_x0" Compute (2, 2), ["sigma"], [], 1, false,
    "x − sigma · flow, computed in f64.";
SpaceTimeToDepth "space_time_to_depth" Compute (1, 1), [], ["patch", "stride"], 1, false,
    "Converts pixels [t, h, w, 3] to latent tokens [tokens, ph·pw·C]: the encoder of a lossless model.";
DepthToSpaceTime "depth_to_space_time" Compute (1, 1), [], ["grid", "patch", "stride"], 1, false,
    "Converts latent tokens to pixels [t, h, w, 3], clamped to [−1, 1]: the decoder of a lossless model.";
TakeRows "take_rows" Compute (1, 1), [], ["row", "rows"], 1, true,
    "Rows `row..row + rows` of x.";
TakeShard "take_shard" Compute (1, 1), [], ["axis", "dim", "group_size?", "unit?"], 1, true,
    "This rank's shard of a replicated value, without communication. With `group_size`, each subgroup of that many positions of the axis holds all shards.";
Pad "pad" Compute (1, 1), [], ["axis", "dim", "group_size?", "rows"], 1, true,
    "Appends zero rows up to `rows`, so that an uneven shard can take part in a collective with equal counts.";
Compact "compact" Compute (1, 1), [], ["extent", "parts", "unit"], 1, true,
    "Removes the padding rows of `parts` gathered uneven shards.";
AllReduce "all_reduce" Collective (1, 1), [], ["axis", "group_size?", "reduction", "transport?"], 1, true,
    "The reduction of the partial values of all members, on every member. For this and every other collective, `axis` is a mesh axis or `world`; with `group_size`, each subgroup of that many consecutive positions of the axis is a group. `transport` selects the transport: `p2p` (peer-to-peer kernels) or `nccl`; the default is the faster one that can connect the ranks.";
AllGather "all_gather" Collective (1, 1), [], ["axis", "dim", "group_size?", "transport?"], 1, true,
    "Concatenates the shards of all members along `dim` in rank order, on every member.";
ReduceScatter "reduce_scatter" Collective (1, 1), [], ["axis", "dim", "group_size?", "reduction", "transport?"], 1, true,
    "The reduction of partial values, sharded over `dim`: each member keeps its shard.";
AllToAll "all_to_all" Collective (1, 1), [], ["axis", "concat", "group_size?", "split", "transport?", "unit?"], 1, true,
    "Changes the sharding from dim `concat` to dim `split`. With uneven shards each peer has its own count.";
Broadcast "broadcast" Collective (1, 1), [], ["axis", "group_size?", "root", "transport?"], 1, true,
    "Copies the value of the member at position `root` of the group to every member. A position in the world is a rank.";
Send "send" Collective (1, 1), [], ["axis", "batch?", "group_size?", "to", "transport?"], 0, true,
    "Sends a value to the member at position `to` of the group. Sends and receives with the same `batch` number form one launch.";
Recv "recv" Collective (0, 0), [], ["axis", "batch?", "from", "group_size?", "transport?"], 1, true,
    "Receives a value from the member at position `from` of the group. `batch` as for send.";
Wait "wait" Order (1, 1), [], [], 1, true,
    "Waits for an issued collective and returns its result, if it has one (a send has none). Every issued collective is waited for exactly once.";
EventRecord "event.record" Order (0, 0), [], [], 1, true,
    "Records an event on a stream; ops of other streams can wait for it.";
}

/// Attributes that every op may have. They never change a number. In a logical program, `at`,
/// `part` and `unit` specify where an op may run and how a strategy may shard its value; in the
/// program of a role, `graph` names the captured graph that contains the op.
pub const HINT_ATTRS: &[&str] = &["at", "graph", "part", "unit"];

impl Opcode {
    /// Returns the row of the op table.
    #[must_use]
    pub fn table_row(self) -> &'static OpRow {
        &OP_TABLE[self as usize]
    }

    /// Returns the name without the dialect prefix.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.table_row().name
    }

    /// Returns the op with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Opcode> {
        OP_TABLE.iter().find(|r| r.name == name).map(|r| r.opcode)
    }

    /// Returns whether the op refers to a buffer (`@name`) of the program.
    #[must_use]
    pub fn takes_buffer(self) -> bool {
        matches!(self, Opcode::CacheRead | Opcode::CacheWrite | Opcode::MoeRoute)
    }

    /// Returns whether every member of a group must issue the op.
    #[must_use]
    pub fn is_collective(self) -> bool {
        self.table_row().kind == OpKind::Collective
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_opcode_order() {
        for (i, row) in OP_TABLE.iter().enumerate() {
            assert_eq!(row.opcode as usize, i, "{}", row.name);
            let mut sorted = row.attrs.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, row.attrs, "attributes of {} are sorted by name", row.name);
        }
    }
}

//! The op table: one row per op, with its operands, constants and meaning.
//!
//! The shape and shard rule of a row is in [`crate::rules`], its cost in [`crate::cost`], its meaning in the
//! reference evaluator. Everything that asks about an op reads the same row.

/// One op of either dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[rustfmt::skip]
#[allow(missing_docs, reason = "each row of the table documents its op")]
pub enum Opcode {
    Input, Call, Weight, Output,
    CacheRead, CacheWrite,
    Matmul, BiasAct, Add, Silu, Cast, Quantize,
    LayerNorm, Modulation, NormModulate, GateResidual,
    RmsNorm, RowSquareSum, RmsScale,
    Rope, Attention, Softmax, Dot, MoeRoute, TimeEmbed, Renoise, ToX0,
    SpaceTimeToDepth, DepthToSpaceTime,
    TakeRows, TakeShard, Pad, Compact,
    AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Send, Recv,
    Wait, EventRecord,
}

/// What kind of thing an op is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Brings a value in from outside the program.
    Source,
    /// Takes a value out of the program or into a buffer.
    Sink,
    /// Computes on this rank alone.
    Compute,
    /// Called by every member of a group.
    Collective,
    /// Orders other ops.
    Order,
}

/// A row of the op table.
#[derive(Debug)]
pub struct OpRow {
    /// The op.
    pub opcode: Opcode,
    /// Name after the dialect; a name with a leading `.`-free word in [`Kind::Source`] or [`Kind::Sink`] has no dialect.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Positional operands: least and most.
    pub operands: (usize, usize),
    /// Keyed operands, in printing order; a trailing `?` marks an optional one.
    pub keyed: &'static [&'static str],
    /// Constants; a trailing `?` marks an optional one.
    pub attrs: &'static [&'static str],
    /// Number of results.
    pub results: usize,
    /// Whether a partial operand may pass through unreduced.
    pub linear: bool,
    /// Meaning.
    pub doc: &'static str,
}

macro_rules! rows {
    ($($op:ident $name:literal $kind:ident $n:expr, [$($k:literal),*], [$($a:literal),*], $r:literal, $lin:literal, $doc:literal;)*) => {
        /// All rows, in the order of [`Opcode`].
        pub static TABLE: &[OpRow] = &[$(OpRow {
            opcode: Opcode::$op, name: $name, kind: Kind::$kind, operands: $n, keyed: &[$($k),*],
            attrs: &[$($a),*], results: $r, linear: $lin, doc: $doc,
        }),*];
    };
}

#[rustfmt::skip]
rows! {
Input "input" Source (0, 0), [], [], 1, true,
    "A tensor the call brings, whole on every rank.";
Call "call" Source (0, 0), [], [], 1, true,
    "A scalar (or one number per latent frame) of the call. It feeds arithmetic, rope offsets, random keys and cache rows; never a shape, a group, a branch or the choice of an op.";
Weight "weight" Source (0, 0), [], ["load?", "part?", "unit?"], 1, true,
    "A slice of a named tensor of the model. `load = \"patch\"` reorders a patch convolution [d, C, 1, ph, pw] into rows of (ph, pw, C); `\"e4m3\"` and `\"e4m3.scale\"` are the two results of `quantize` on the whole tensor's rows. `part` (col, row, whole) and `unit` say in a logical program how a strategy may cut it.";
Output "output" Sink (1, 1), [], [], 0, false,
    "Hands a value to the host.";
CacheRead "cache.read" Source (0, 0), [], ["row?", "rows?"], 1, true,
    "Rows `row..row + rows` of a buffer, without a copy. No later op may write the buffer before the value's last use.";
CacheWrite "cache.write" Sink (1, 1), ["row?"], ["first?"], 0, false,
    "Writes the operand over the buffer's rows from `row` (0 if absent); with `first` that many rows further on.";
Matmul "matmul" Compute (2, 2), ["bias?", "x_scale?", "w_scale?"], ["act?", "segments?"], 1, false,
    "y = act(x · wᵀ + bias), x [n, k], w [m, k]. `segments` cuts k into that many equal pieces summed in one binary tree. In e4m3 the sum of row i and column j is multiplied by x_scale[i] · w_scale[j] before the bias, and y is bf16.";
BiasAct "bias_act" Compute (2, 2), [], ["act?"], 1, false,
    "y = act(x + bias), bias [m] over the rows of x [n, m].";
Add "add" Compute (2, 2), [], [], 1, true,
    "Elementwise sum.";
Silu "silu" Compute (1, 1), [], [], 1, false,
    "x · sigmoid(x).";
Cast "cast" Compute (1, 1), [], ["to"], 1, false,
    "x in another dtype, `to`: f32, f64, bf16 or f16; rounded to the nearest, ties to even.";
Quantize "quantize" Compute (1, 1), [], [], 2, false,
    "Rows of x [n, k] in e4m3, and a scale [n] for each: the largest of |x| in the row over 448 (1 where all are 0). Scales and x over its scale are f32; that is rounded to the nearest, ties to even, at most ±448.";
LayerNorm "layer_norm" Compute (3, 3), [], ["eps"], 1, false,
    "Rows of x to zero mean and unit variance, times w [d], plus b [d].";
Modulation "modulation" Compute (2, 2), [], [], 1, false,
    "Table [1, c, d] plus per-frame embedding: [f, c·d] when the embedding is [f, c·d], or [f, d] repeated c times.";
NormModulate "norm_modulate" Compute (2, 2), [], ["eps", "first?", "frame_rows", "scale", "shift"], 1, false,
    "Layer norm without weights, times (1 + scale), plus shift; both are d-wide columns of m [f, c·d], the row of m being the token's frame. With `first` so many tokens come before the first row of x.";
GateResidual "gate_residual" Compute (2, 3), [], ["first?", "frame_rows?", "gate?"], 1, false,
    "x + y · gate with the gate a column block of m [f, c·d]; x + y when no m is given. `first` as in norm_modulate.";
RmsNorm "rms_norm" Compute (2, 2), [], ["eps", "segments?"], 1, false,
    "Rows of x divided by their root mean square over the full width, times w [d].";
RowSquareSum "row_square_sum" Compute (1, 2), [], ["segments?"], 1, false,
    "Per row the sum of squares of each operand: [n, operands].";
RmsScale "rms_scale" Compute (3, 3), [], ["col", "eps", "width"], 1, false,
    "x · rsqrt(ss[:, col] / width + eps) · w: the second half of rms_norm, after the sums of all ranks met.";
Rope "rope" Compute (1, 1), ["start"], ["first?", "frame_stride?", "grid", "head_dim"], 1, false,
    "3-D rotary embedding over (frame, row, column) of the token grid, interleaved pairs; frame f stands at start + frame_stride · f. With frame_stride 0 every row turns by `start` frames alone. With `first` the rows of x are those of the grid from that one on.";
Attention "attention" Compute (3, 3), ["bias?"], ["bias_rows?", "head_dim"], 1, false,
    "softmax(q · kᵀ / √head_dim + bias) · v per head; the bias is added to the scores of key rows bias_rows[0]..bias_rows[1].";
Softmax "softmax" Compute (1, 1), [], ["dim?"], 1, false,
    "exp(x) over its sum along `dim`, the last one where absent; the maximum is subtracted first.";
Dot "dot" Compute (2, 2), [], ["scale?", "transposed?"], 1, false,
    "scale · x · y for x [..., n, k] and y [..., k, m], batch by batch; with `transposed = true` y is [..., m, k].";
MoeRoute "moe_route" Compute (2, 2), [], ["a2a_axis", "capacity_factor", "pack_fused?", "policy?", "quantize_fp8?", "top_k?"], 1, false,
    "Σ g · (x · Wᵉᵀ) over a token's `top_k` experts of largest weight g (2 where absent, ties to the lower expert); x [tokens, d], g [tokens, experts], the buffer W [experts, d_out, d]. An expert takes tokens in their order, ⌈capacity_factor · tokens · top_k / experts⌉ at most; the rest is dropped. Logical: `a2a_axis` says where tokens travel, `pack_fused` and `quantize_fp8` how.";
TimeEmbed "time_embed" Compute (1, 1), [], ["width"], 1, false,
    "Sinusoids of each timestep in f64: cosines, then sines; base 10000.";
Renoise "renoise" Compute (1, 1), ["sigma", "seed", "chunk", "draw"], [], 1, false,
    "(1 − sigma) · x + sigma · normal, the normal of an element keyed by (seed, chunk, draw, its index in the global tensor).";
ToX0 "to_x0" Compute (2, 2), ["sigma"], [], 1, false,
    "x − sigma · flow, in f64.";
SpaceTimeToDepth "space_time_to_depth" Compute (1, 1), [], ["patch", "stride"], 1, false,
    "Pixels [t, h, w, 3] to latent tokens [tokens, ph·pw·C]: the encoder of a lossless model.";
DepthToSpaceTime "depth_to_space_time" Compute (1, 1), [], ["grid", "patch", "stride"], 1, false,
    "Latent tokens to pixels [t, h, w, 3], clamped to [−1, 1]: the decoder of a lossless model.";
TakeRows "take_rows" Compute (1, 1), [], ["row", "rows"], 1, true,
    "Rows `row..row + rows` of x.";
TakeShard "take_shard" Compute (1, 1), [], ["axis", "dim", "unit?", "ways?"], 1, true,
    "This rank's piece of a replicated value; no communication. With `ways` each block of so many positions of the axis holds all pieces.";
Pad "pad" Compute (1, 1), [], ["axis", "dim", "rows", "ways?"], 1, true,
    "Zero rows up to `rows`, so that an uneven shard can join an equal-count collective.";
Compact "compact" Compute (1, 1), [], ["extent", "parts", "unit"], 1, true,
    "Drops the padding rows of `parts` gathered uneven pieces.";
AllReduce "all_reduce" Collective (1, 1), [], ["axis", "reduction", "via?", "ways?"], 1, true,
    "The reduction of all members' partial values, on every member. As for every collective, `axis` is an axis of the mesh or `world`; with `ways` each block of so many consecutive positions of the axis is a group. `via` says by what it is moved: `kernels` over memory of peers or `nccl`, and where it is absent whatever is best for ranks that can reach one another.";
AllGather "all_gather" Collective (1, 1), [], ["axis", "dim", "via?", "ways?"], 1, true,
    "All members' pieces of `dim`, in rank order, on every member.";
ReduceScatter "reduce_scatter" Collective (1, 1), [], ["axis", "dim", "reduction", "via?", "ways?"], 1, true,
    "The reduction of partial values, each member keeping its piece of `dim`.";
AllToAll "all_to_all" Collective (1, 1), [], ["axis", "concat", "split", "unit?", "via?", "ways?"], 1, true,
    "From sharded over dim `concat` to sharded over dim `split`; with uneven shards each peer has its own count.";
Broadcast "broadcast" Collective (1, 1), [], ["axis", "root", "via?", "ways?"], 1, true,
    "The value of the member at position `root` of the group, on every member. A position in the world is a rank.";
Send "send" Collective (1, 1), [], ["axis", "batch?", "to", "via?", "ways?"], 0, true,
    "Hands a value to the member at position `to` of the group. Sends and receives with one `batch` number are one launch.";
Recv "recv" Collective (0, 0), [], ["axis", "batch?", "from", "via?", "ways?"], 1, true,
    "Takes a value from the member at position `from` of the group. `batch` as for a send.";
Wait "wait" Order (1, 1), [], [], 1, true,
    "The result of an issued collective; every issue is waited exactly once. A send's wait has no result.";
EventRecord "event.record" Order (0, 0), [], [], 1, true,
    "A point on a stream that ops of other streams can come after.";
}

/// Constants any op may carry; they change no number. In a logical program `at`, `part` and `unit` say where an op may
/// run and how a strategy may cut its value; in a program of a role `graph` names the captured graph it belongs to.
pub const HINTS: &[&str] = &["at", "graph", "part", "unit"];

impl Opcode {
    /// The op's row.
    #[must_use]
    pub fn row(self) -> &'static OpRow {
        &TABLE[self as usize]
    }

    /// Name after the dialect.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The op of a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Opcode> {
        TABLE.iter().find(|r| r.name == name).map(|r| r.opcode)
    }

    /// Whether it names a buffer (`@name`) of the program.
    #[must_use]
    pub fn takes_buffer(self) -> bool {
        matches!(self, Opcode::CacheRead | Opcode::CacheWrite | Opcode::MoeRoute)
    }

    /// Whether every member of a group must call it.
    #[must_use]
    pub fn is_collective(self) -> bool {
        self.row().kind == Kind::Collective
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_in_the_order_of_opcodes() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.opcode as usize, i, "{}", row.name);
            let mut sorted = row.attrs.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, row.attrs, "constants of {} are printed in order of name", row.name);
        }
    }
}

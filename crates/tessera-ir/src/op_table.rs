//! The op table: one row per op, with its operands, attributes and semantics.
//!
//! The shape and sharding rules of an op are in [`crate::rules`], its cost is in
//! [`crate::op_workload`], and its executable semantics are in the reference evaluator. Everything
//! that queries an op reads the same row, and each op has a view with its operands and attributes as
//! typed fields: [`Op::view`].

use crate::DType::F32;
use crate::attr::Attr;
use crate::attr_kind::*;
use crate::op_traits::{FlopCount::*, KernelClass, LoweringRule, OpTraits, ResultDtype::*, RowAccess::*};
use crate::view_reader::{Operand, OperandKind, OptOperand, OptVector, Vector, ViewError, ViewReader};

/// Kind of an op: whether it moves values into or out of a program, computes, communicates or
/// orders.
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

/// Signature of an op: its name, operands, attributes, results and semantics.
#[derive(Debug)]
pub struct OpRow {
    /// Op that the row describes, and the index of the row in [`OP_TABLE`].
    pub opcode: Opcode,
    /// Name of the op without the dialect prefix. Ops of kind [`OpKind::Source`] and
    /// [`OpKind::Sink`], and `event.record`, have no prefix in the text form.
    pub name: &'static str,
    /// Kind of the op; it also determines the prefix in the text form, except for `wait`.
    pub kind: OpKind,
    /// Minimum and maximum number of positional operands.
    pub operands: (usize, usize),
    /// For each positional operand, whether it is a vector or a table that applies to the rows of the
    /// first operand. Vectors stay f32 under every dtype policy.
    pub vectors: &'static [bool],
    /// Keyed operands in printing order.
    pub keyed: &'static [KeyedRow],
    /// Attributes, sorted by name.
    pub attrs: &'static [AttrRow],
    /// Number of values that the op defines.
    pub results: usize,
    /// Whether the op commutes with addition, so that a partial operand may pass through unreduced.
    pub linear: bool,
    /// How planner and cost model treat the op.
    pub traits: OpTraits,
    /// Definition of the result in words and formulas, with the meaning of the attributes.
    pub doc: &'static str,
}

/// A keyed operand of an op, written `name=%value`.
#[derive(Debug)]
pub struct KeyedRow {
    /// Name of the operand in the text form.
    pub name: &'static str,
    /// Whether the op may omit the operand.
    pub optional: bool,
}

/// An attribute of an op.
#[derive(Debug)]
pub struct AttrRow {
    /// Name of the attribute in the text form.
    pub name: &'static str,
    /// Whether the op may omit the attribute.
    pub optional: bool,
    /// Permitted values in words, as in "`eps` must be a number ≥ 0".
    pub expected: &'static str,
    /// Returns whether a value is permitted, as far as the attribute alone decides it.
    pub accepts: fn(&Attr) -> bool,
}

impl OpRow {
    /// Returns the attribute with this name.
    #[must_use]
    pub fn find_attr(&self, name: &str) -> Option<&'static AttrRow> {
        self.attrs.iter().find(|a| a.name == name)
    }

    /// Returns the position of a keyed operand in printing order.
    #[must_use]
    pub fn keyed_position(&self, name: &str) -> Option<usize> {
        self.keyed.iter().position(|k| k.name == name)
    }
}

macro_rules! op_table {
    ($($kind:ident $ops_of_kind:ident {$($op:ident $name:literal
        ($($x:ident: $xk:ident),*) [$($k:ident: $kk:ident),*] {$($a:ident: $ak:ty),*}
        -> $results:literal, $linear:literal, [$kernel:ident, $flops:expr, $dtype:expr, $rows:expr, $lowering:ident], $doc:literal;)*})*) => {
        /// An op of either dialect; its discriminant is the index of its row in [`OP_TABLE`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs, reason = "each row of the table documents its op")]
        pub enum Opcode {
            $($($op,)*)*
        }

        /// All rows, in the order of [`Opcode`].
        pub static OP_TABLE: &[OpRow] = &[$($(OpRow {
            opcode: Opcode::$op,
            name: $name,
            kind: OpKind::$kind,
            operands: (0 $(+ !$xk::OPTIONAL as usize)*, <[&str]>::len(&[$(stringify!($x)),*])),
            vectors: &[$($xk::IS_VECTOR),*],
            keyed: &[$(KeyedRow { name: stringify!($k), optional: $kk::OPTIONAL }),*],
            attrs: &[$(AttrRow {
                name: stringify!($a),
                optional: <$ak as AttrKind>::OPTIONAL,
                expected: <$ak as AttrKind>::EXPECTED,
                accepts: |attr| <$ak as AttrKind>::parse(attr).is_some(),
            }),*],
            results: $results,
            linear: $linear,
            traits: OpTraits {
                kernel: KernelClass::$kernel,
                flops: $flops,
                result_dtype: $dtype,
                rows: $rows,
                lowering: LoweringRule::$lowering,
            },
            doc: $doc,
        }),*),*];

        /// One view per op: its operands and attributes as typed fields.
        pub mod views {
            use super::{AttrKind, ViewError, ViewReader};
            #[allow(clippy::wildcard_imports, reason = "the rows of the table name these kinds")]
            use crate::attr_kind::*;
            use crate::view_reader::{Operand, OperandKind, OptOperand, OptVector, Vector};

            $($(
                #[doc = concat!("View of `", $name, "`. ", $doc)]
                #[derive(Debug, Clone, PartialEq)]
                #[allow(missing_docs, reason = "the text of the op names each operand and attribute")]
                pub struct $op {
                    $(pub $x: <$xk as OperandKind>::Value,)*
                    $(pub $k: <$kk as OperandKind>::Value,)*
                    $(pub $a: <$ak as AttrKind>::Value,)*
                }

                impl $op {
                    /// Reads the view of an op with this opcode.
                    ///
                    /// # Errors
                    /// A missing operand, or a missing or invalid attribute.
                    pub fn new<'a>(op: impl Into<ViewReader<'a>>) -> Result<$op, ViewError> {
                        #[allow(unused_mut, unused_variables, reason = "an op may have no operand")]
                        let mut reader = op.into();
                        Ok($op {
                            $($x: reader.read_operand::<$xk>(stringify!($x))?,)*
                            $($k: reader.read_keyed::<$kk>(stringify!($k))?,)*
                            $($a: reader.read_attr::<$ak>(stringify!($a))?,)*
                        })
                    }
                }
            )*)*
        }

        /// An op with typed operands and attributes. A match on it, or on one kind of ops, without
        /// `_` makes the compiler list every place that a new op concerns.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs, reason = "each row of the table documents its op")]
        pub enum OpView {
            $($($op(views::$op),)*)*
        }

        /// The view of an op, by the kind of the op.
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[allow(missing_docs, reason = "`OpKind` documents each kind")]
        pub enum OpByKind<'a> {
            $($kind($ops_of_kind<'a>),)*
        }

        $(
            #[doc = concat!("The view of an op of [`OpKind::", stringify!($kind), "`].")]
            #[derive(Debug, Clone, Copy, PartialEq)]
            #[allow(missing_docs, reason = "each row of the table documents its op")]
            pub enum $ops_of_kind<'a> {
                $($op(&'a views::$op),)*
            }
        )*

        impl OpView {
            pub(crate) fn read(opcode: Opcode, parts: ViewReader<'_>) -> Result<OpView, ViewError> {
                Ok(match opcode {
                    $($(Opcode::$op => OpView::$op(views::$op::new(parts)?),)*)*
                })
            }

            /// Returns the view by the kind of its op, for code that treats all ops of a kind
            /// alike, or handles the ops of one kind only.
            #[must_use]
            pub fn by_kind(&self) -> OpByKind<'_> {
                match self {
                    $($(OpView::$op(v) => OpByKind::$kind($ops_of_kind::$op(v)),)*)*
                }
            }
        }
    };
}

#[rustfmt::skip]
op_table! {
Source SourceOp {
    Input "input" () [] {} -> 1, true, [None, Zero, Stated, Aligned(0), Own],
        "An input tensor of the call. In the program of a role it may be sharded: each rank then keeps its shard.";
    Call "call" () [] {} -> 1, true, [None, Zero, Stated, Whole, Own],
        "A scalar of the call, or one number per latent frame. It may be used in arithmetic, RoPE offsets, random keys and cache rows, but never determines a shape, a group, a branch or the choice of an op.";
    Weight "weight" () [] {load: Opt<LoadName>, part: Opt<Name>, tier_layer: Opt<Index>, tier_policy: Opt<PolicyName>, tier_resident: Opt<Count>, tier_window: Opt<Count>, unit: Or<Count, 1>} -> 1, true, [None, Zero, Stated, Whole, Own],
        "A shard of a named model tensor. A part `.*.` of the name stands for every expert, and `.{2,0,1}.` for these, in this order: the first dim is then the expert, and the name that of several tensors. `load = \"patch\"` reorders a patch convolution [d, C, 1, ph, pw] into rows of (ph, pw, C), and `\"conv\"` a convolution [m, c, kt, kh, kw] or [m, c, kh, kw] into rows of (kt, kh, kw, c), and `\"conv.past\"` a convolution [m, 2·c, kh, kw] over the channels of a frame and then those of the frame before it into rows of (frame, kh, kw, c), the frame before first; `\"e4m3\"` and `\"e4m3.scale\"` load the two results of `quantize` on the rows of the whole tensor, and `\"conv.e4m3\"` and `\"conv.e4m3.scale\"` those on the rows of `\"conv\"`. A weight [experts, …] with the attributes `tier_…` lies in host memory, and a rank holds at most `tier_resident` of its experts in fast memory, chosen by `tier_policy` (lru or lru_hotness); when the layer starts that stands `tier_window` layers with tiers before `tier_layer`, the experts that `tier_layer` will likely use are requested. In a logical program, `part` (col, row, whole) and `unit` specify how a strategy may shard the weight.";
    CacheRead "cache.read" () [] {row: Or<Index, 0>, rows: Opt<Count>} -> 1, true, [None, Zero, Buffer, Aligned(0), Own],
        "Views rows `row..row + rows` of a buffer without a copy. No later op may write the buffer before the last use of the view.";
}
Sink SinkOp {
    Output "output" (x: Operand) [] {} -> 0, false, [None, Zero, Fixed(F32), Whole, Own],
        "Returns a value to the host.";
    CacheWrite "cache.write" (x: Operand) [pages: OptOperand, row: OptOperand, start: OptOperand] {first_row: Or<Index, 0>, page_rows: Opt<Count>} -> 0, false, [Copy, Zero, Buffer, Aligned(1), Own],
        "Writes the operand to rows of the buffer that start at `row` (default 0), plus `first_row` if given. With `pages`, `start` and `page_rows` the buffer is a pool of pages: row i of sequence s goes to the row of position start[s] + i, as `paged_attention` defines it; rows of absent sequences are not written.";
}
Compute ComputeOp {
    Matmul "matmul" (x: Operand, w: Operand) [bias: OptOperand, x_scale: OptOperand, w_scale: OptOperand] {act: Opt<Act>, segments: Or<Count, 1>} -> 1, false, [Gemm, FromExtents, Matmul, Aligned(1), Own],
        "y = act(x · wᵀ + bias), x [n, k], w [m, k]. `segments` splits k into that many equal segments whose partial sums are added in one binary tree. In e4m3, the accumulator of row i and column j is multiplied by x_scale[i] · w_scale[j] before the bias is added, and y is bf16.";
    BiasAct "bias_act" (x: Operand, bias: Operand) [] {act: Opt<Act>} -> 1, false, [Elementwise, PerResult(10), FirstOperand, Aligned(1), ByRow],
        "y = act(x + bias), with bias [m] broadcast over the rows of x [n, m].";
    Add "add" (x: Operand, y: Operand) [] {} -> 1, true, [Copy, PerResult(2), FirstOperand, Aligned(2), ByRow],
        "Elementwise sum.";
    Mul "mul" (x: Operand, y: Operand) [] {} -> 1, false, [Elementwise, PerResult(1), FirstOperand, Aligned(2), ByRow],
        "x · y, element by element.";
    Silu "silu" (x: Operand) [] {} -> 1, false, [Elementwise, PerResult(10), FirstOperand, Aligned(1), ByRow],
        "x · sigmoid(x).";
    Relu "relu" (x: Operand) [] {} -> 1, false, [Elementwise, PerResult(1), FirstOperand, Aligned(1), ByRow],
        "The larger of x and 0, element by element; NaN stays NaN.";
    Cast "cast" (x: Operand) [] {draw: Or<Index, 0>, first_row: Or<Index, 0>, rounding: Or<RoundingName, 0>, seed: Opt<Index>, to: CastDtype} -> 1, false, [Copy, PerResult(1), Stated, Aligned(1), ByRow],
        "Converts x to the dtype `to` (f32, f64, bf16, f16 or e4m3), rounding to nearest, ties to even. With `rounding = \"stochastic\"`, to bf16 or e4m3 alone: a number between two neighbours of the dtype, at the fraction f of their distance from the one nearer to 0, goes to the farther one if a 32-bit word is below ⌊f · 2³²⌋, and to the nearer one otherwise. The word is keyed by (seed, draw, index of the element in the global tensor), where the rows of x start at the row `first_row`. A number beyond the largest one of the dtype is rounded to nearest.";
    Quantize "quantize" (x: Operand) [] {draw: Or<Index, 0>, first_row: Or<Index, 0>, rounding: Or<RoundingName, 0>, seed: Opt<Index>} -> 2, false, [Elementwise, PerOperand(3), Fixed(F32), Aligned(1), Own],
        "Quantizes the rows of x [n, k] to e4m3 and returns a scale [n]: the maximum of |x| in the row divided by 448, or 1 for a row of zeros. Scales and x / scale are computed in f32; x / scale is then rounded to nearest, ties to even, and saturates at ±448. `rounding`, `seed`, `draw` and `first_row` as in cast, for x / scale.";
    LayerNorm "layer_norm" (x: Operand, w: Vector, b: Vector) [] {eps: NonNegative} -> 1, false, [Elementwise, PerResult(8), FirstOperand, Aligned(1), ByRow],
        "Normalises the rows of x to zero mean and unit variance, multiplies by w [d] and adds b [d].";
    Modulation "modulation" (table: Operand, embedding: Operand) [] {} -> 1, false, [Elementwise, PerResult(2), Fixed(F32), Whole, ByRow],
        "Adds the table [1, c, d] to a per-frame embedding, giving [f, c·d]: the embedding is [f, c·d], or [f, d] repeated c times.";
    NormModulate "norm_modulate" (x: Operand, m: Vector) [] {eps: NonNegative, first_row: Or<Index, 0>, frame_rows: Count, scale: Index, shift: Index} -> 1, false, [Elementwise, PerResult(8), FirstOperand, Aligned(1), ByRow],
        "Layer norm without weights, times (1 + scale), plus shift. Scale and shift are d-wide columns of m [f, c·d]; the frame of a token selects the row of m. With `first_row`, the rows of x start at that token.";
    GateResidual "gate_residual" (x: Operand, y: Operand, m: OptVector) [] {first_row: Or<Index, 0>, frame_rows: Opt<Count>, gate: Opt<Index>} -> 1, false, [Elementwise, PerResult(2), FirstOperand, Aligned(2), ByRow],
        "x + y · gate, with the gate a column block of m [f, c·d]; x + y if there is no m. `first_row` as in norm_modulate.";
    RmsNorm "rms_norm" (x: Operand, w: Vector) [] {eps: NonNegative, segments: Or<Count, 1>} -> 1, false, [Elementwise, PerResult(8), FirstOperand, Aligned(1), Own],
        "Divides the rows of x by their root mean square over the full width and multiplies by w [d].";
    RowSquareSum "row_square_sum" (x: Operand, y: OptOperand) [] {segments: Or<Count, 1>} -> 1, false, [Elementwise, PerOperand(2), Sums, Aligned(2), Own],
        "Sum of squares of each row of each operand: [n, operands].";
    RmsScale "rms_scale" (x: Operand, square_sums: Vector, w: Vector) [] {col: Index, eps: NonNegative, width: Count} -> 1, false, [Elementwise, PerResult(3), FirstOperand, Aligned(2), ByRow],
        "x · rsqrt(ss[:, col] / width + eps) · w: the second half of rms_norm, after the sums of squares were reduced over all ranks.";
    Rope "rope" (x: Operand) [start: Operand] {first_row: Or<Index, 0>, frame_stride: Or<Int, 1>, grid: Extents<3>, head_dim: Count} -> 1, false, [Elementwise, PerResult(3), FirstOperand, Aligned(1), ByRow],
        "3-D rotary embedding over (frame, row, column) of the token grid, with interleaved pairs. The position of frame f is start + frame_stride · f; with frame_stride 0 all rows are rotated by the frame position `start` only. With `first_row`, the rows of x start at that row of the grid.";
    Attention "attention" (q: Operand, k: Operand, v: Operand) [bias: OptOperand] {bias_rows: Opt<RowRange>, head_dim: Count} -> 1, false, [Attention, FromExtents, FirstOperand, Aligned(1), Own],
        "softmax(q · kᵀ / √head_dim + bias) · v per head; the bias is added to the scores of key rows bias_rows[0]..bias_rows[1].";
    RelativeAttention "relative_attention" (q: Operand, k: Operand, v: Operand, table: Vector) [length: Operand] {head_dim: Count, max_distance: Count} -> 1, false, [Attention, FromExtents, FirstOperand, Whole, ByRow],
        "softmax(q · kᵀ + table[bucket(j − i), head]) · v per head, over the keys j < length of query i. The table [buckets, heads] serves both directions: its first half the keys at distance m = i − j ≥ 0, its second half those at m = j − i > 0. With b buckets per direction, m < e = ⌊b / 2⌋ has bucket m, and a larger m has min(b − 1, e + ⌊ln(m / e) / ln(max_distance / e) · (b − e)⌋).";
    Rotary "rotary" (x: Operand, frequencies: Vector) [start: Operand] {head_dim: Count, interleaved: Or<Flag, 0>, scale: Or<Positive, 1>} -> 1, false, [Elementwise, PerResult(4), FirstOperand, Whole, ByRow],
        "Rotary embedding of token sequences: x [b·n, h·head_dim] holds n rows of each of b sequences, and start [b] the position of the first row of each. With m frequencies, 2·m ≤ head_dim, the channels i and i + m of each head, i < m, are rotated by the angle position · frequencies[i] and multiplied by `scale`; with `interleaved`, they are the channels 2·i and 2·i + 1. Channels from 2·m on stay.";
    HeadNorm "head_norm" (x: Operand, w: Vector) [] {eps: NonNegative, head_dim: Count} -> 1, false, [Elementwise, PerResult(8), FirstOperand, Aligned(1), ByRow],
        "RMS norm of each head: divides each `head_dim` consecutive columns of a row of x by their root mean square, and multiplies by w [head_dim].";
    HeadColumns "head_columns" (x: Operand) [] {columns: Count, first: Or<Index, 0>, head_dim: Count} -> 1, false, [Copy, Zero, FirstOperand, Aligned(1), ByRow],
        "The `columns` columns from `first` on of each `head_dim` consecutive columns of x.";
    HeadJoin "head_join" (x: Operand, y: Operand) [] {head_dim: Count} -> 1, false, [Copy, Zero, FirstOperand, Aligned(2), ByRow],
        "Joins the columns of two values head by head: each `head_dim` consecutive columns of x [n, h·head_dim] are followed by the m columns of the same head of y [n, h·m].";
    HeadMatmul "head_matmul" (x: Operand, w: Operand) [] {first: Or<Index, 0>, head_rows: Count, rows: Count, transposed: Or<Flag, 0>} -> 1, false, [GroupedGemm, FromExtents, Matmul, Whole, Own],
        "x · uᵀ for each head, where u are the `rows` rows from `first` on of each `head_rows` consecutive rows of w [h·head_rows, k]: x [n, h·k] gives [n, h·rows]. With `transposed`, x · u: x [n, h·rows] gives [n, h·k].";
    PagedAttention "paged_attention" (q: Operand, k: Operand, v: Operand) [pages: Operand, start: Operand] {head_dim: Count, page_rows: Count, scale: Opt<Positive>, sink: Or<Index, 0>, value_dim: Opt<Count>, window: Opt<Count>} -> 1, false, [Attention, FromExtents, FirstOperand, Whole, Own],
        "Causal attention of token sequences over KV caches in pages, per head softmax(q · kᵀ · scale) · v, with 1 / √head_dim for `scale` by default. q [b·n, h·head_dim] holds n rows of each of b sequences; start [b] is the position of the first row of each, or −1 for an absent sequence, whose result is zeros. k and v are [rows, g·head_dim] with g dividing h: query head i reads KV head ⌊i·g / h⌋, both counted in the global tensors. With `value_dim`, only so many first columns of each head of v are values, and the result is [b·n, h·value_dim]. Position p of sequence s lies in row pages[s, ⌊p / page_rows⌋] · page_rows + p mod page_rows, for pages [b, m]. A query at position p attends to the positions up to p; with `window`, to the last `window` of them and to the first `sink`.";
    Sample "sample" (logits: Operand) [draw: Operand, seed: Operand, temperature: Operand, top_k: Operand, top_p: Operand] {} -> 1, false, [Elementwise, PerOperand(20), Fixed(F32), Whole, Own],
        "One id per row of logits [b, vocabulary], as whole numbers [b] in f32; each keyed operand is [b]. With temperature 0, the id of the largest logit, ties to the lower id. Otherwise ids are sorted by falling logit, ties to the lower id; the first `top_k` remain (all if 0), and of these the fewest whose probabilities softmax(logits / temperature) add up to at least `top_p`. Of the remaining ids the first is taken at which the running sum of probabilities exceeds u · their sum, where u is the uniform number of (seed, draw). Computed in f64. Logits with NaN are a fault: an id could not carry it on.";
    Softmax "softmax" (x: Operand) [] {dim: Opt<Dim>} -> 1, false, [Elementwise, PerResult(12), FirstOperand, Whole, Refused],
        "exp(x) divided by its sum along `dim` (default: the last dim); the maximum is subtracted first.";
    Bmm "bmm" (x: Operand, y: Operand) [] {scale: Or<Number, 1>, transposed: Or<Flag, 0>} -> 1, false, [GroupedGemm, FromExtents, FirstOperand, Whole, Refused],
        "Batched matmul: scale · x · y for x [..., n, k] and y [..., k, m]; with `transposed = true`, y is [..., m, k].";
    MoeRoute "moe_route" (x: Operand, gates: Operand) [] {a2a_axis: MeshAxis, capacity_factor: Positive, pack_fused: Or<Flag, 0>, policy: Opt<TokenPolicy>, quantize_fp8: Or<Flag, 0>, token_groups: Or<Count, 1>, top_k: Or<Count, 2>} -> 1, false, [GroupedGemm, FromExtents, Fixed(F32), Whole, Refused],
    "Σ g · (x · Wᵉᵀ) over the `top_k` experts of each token with the largest weights g (default 2, ties to the lower expert), for x [tokens, d], g [tokens, experts] and the buffer W [experts, d_out, d]. An expert accepts tokens in order, at most ⌈capacity_factor · tokens · top_k / experts⌉ of each of `token_groups` groups of ⌈tokens / groups⌉ tokens; further tokens are dropped. Logical programs only: `a2a_axis` is the mesh axis of the all-to-all, `pack_fused` packs tokens inside of the matmul and changes no bit, and `quantize_fp8` sends tokens of 8 bits, which `policy = \"fp8_e4m3\"` must allow.";
    TopKExperts "top_k_experts" (logits: Operand) [correction: OptOperand, last: OptOperand, start: OptOperand] {groups: Or<Count, 1>, keep_groups: Or<Count, 1>, score: Or<ScoreName, 0>, tokens: Opt<Count>, top_k: Count} -> 1, false, [Elementwise, PerOperand(8), Fixed(F32), Whole, ByRow],
        "The `top_k` experts of each token with the largest corrected scores, largest first, ties to the lower expert: whole numbers [tokens, top_k]. The score is the `score` (softmax, the default, or sigmoid) of logits [tokens, experts], and `correction` [experts] is added to it. With `groups`, the experts form that many groups of consecutive ones, and candidates are those of the `keep_groups` best groups, ties to the lower group: a group is as good as the sum of its two largest corrected scores. Without groups and correction, logits are compared, whose order is that of their scores. With `start` and `last` [sequences], a row that brings no token chooses −1, no expert: `last` holds the last row of each sequence that brings one, numbered in the whole tensor, and a sequence that starts at −1 brings none. Each sequence has equally many of the rows of the whole tensor, or of the first `tokens` ones if further ones are padding, which bring no token.";
    ExpertWeights "expert_weights" (logits: Operand, experts: Operand) [] {renormalise: Or<Flag, 0>, scale: Or<Positive, 1>, score: Or<ScoreName, 0>} -> 1, false, [Elementwise, PerOperand(10), Fixed(F32), Whole, ByRow],
        "The weights of the chosen experts [tokens, k]: the `score` (softmax over all experts, the default, or sigmoid) of logits [tokens, experts], times `scale`; with `renormalise`, they are first divided by 1e-20 plus the sum of the chosen ones. Corrections of the choice have no part in them. A choice of −1 is no expert: its weight is 0.";
    ExpertTokens "expert_tokens" (x: Operand) [] {rows: Count} -> 1, true, [Copy, Zero, FirstOperand, Whole, Own],
        "The tokens x [tokens, d], followed by rows of zeros up to `rows`. A lowering may shard them: each rank then routes its own rows.";
    ExpertGates "expert_gates" (gates: Operand, experts: Operand) [] {} -> 1, false, [Copy, Zero, Fixed(F32), Whole, ByRow],
        "gates[t, experts[t, j]] for each choice j of token t: [tokens, k] of gates [tokens, experts].";
    ExpertLocality "expert_locality" (logits: Operand) [] {expert_groups: Indices, home_groups: Indices, weight: NonNegative} -> 1, false, [Elementwise, PerOperand(2), Fixed(F32), Whole, ByRow],
        "logits[t, e] − `weight` · cost for logits [tokens, experts]: the cost is 0 if `expert_groups[e]` is the locality group of the token, and 1 otherwise. The n entries of `home_groups` are the groups of n parts of consecutive tokens, of ⌈tokens / n⌉ rows of the whole tensor each.";
    ExpertDistance "expert_distance" (logits: Operand) [] {distances: Indices, expert_homes: Indices, tokens: Opt<Count>, weight: NonNegative} -> 1, false, [Elementwise, PerOperand(10), Fixed(F32), Whole, Own],
        "`weight` times the mean distance that a token has to the experts of its router: [1], Σ p[t, e] · d[t, e] / tokens over all t and e, where p is the softmax of logits [tokens, experts]. `distances` has a number for each pair of n homes; the distance d[t, e] is that of the token's home, the one of n parts of ⌈tokens / n⌉ rows in which it lies, to `expert_homes[e]`. With `tokens`, rows of the whole tensor from that one on are padding and add nothing.";
    ExpertDistanceGradient "expert_distance_gradient" (logits: Operand) [] {distances: Indices, expert_homes: Indices, tokens: Opt<Count>, weight: NonNegative} -> 1, false, [Elementwise, PerOperand(12), Fixed(F32), Whole, ByRow],
        "The gradient of `expert_distance` with respect to its logits: [tokens, experts], `weight` / tokens · p[t, e] · (d[t, e] − Σ p[t, i] · d[t, i]); zeros for padding.";
    ExpertDraw "expert_draw" (choices: Operand) [start: OptOperand] {keep: Probability, layer: Index, seeds: Indices, tokens: Opt<Count>} -> 1, false, [Elementwise, PerOperand(4), Fixed(F32), Whole, ByRow],
        "The choices [tokens, k], of which the last one of a token is −1, no expert, unless a number drawn uniformly from [0, 1) is below `keep`. The number is keyed by the two `seeds`, by `layer` and by the position of the token: its row in the whole tensor or, with `start` [sequences], its position in its sequence, where each sequence has equally many rows. With `tokens`, rows of the whole tensor from that one on are padding and keep their choices.";
    ExpertReroute "expert_reroute" (ranking: Operand) [] {capacity: Count, group_tokens: Opt<Count>, reroutes: Index, tokens: Opt<Count>, top_k: Count} -> 1, false, [Elementwise, PerOperand(4), Fixed(F32), Whole, ByRow],
        "The experts of each token [tokens, top_k] after rerouting, for all experts by falling preference [tokens, experts]. The first `top_k` are the choices, which get slots as by `expert_slots`. In the same order, each choice without a slot then moves to the best expert behind those that has a free slot and that no other choice of the token moved to; at most `reroutes` choices of a group move. A choice that does not move keeps its expert, of which it has no slot. A row whose whole ranking is −1 brings no token.";
    ExpertPlaces "expert_places" (experts: Operand) [start: OptOperand] {residents: Indices, tokens: Opt<Count>} -> 1, false, [Elementwise, PerOperand(4), Fixed(F32), Whole, ByRow],
        "The place of each choice [tokens, k], where an expert may have copies: `residents[p]` is the expert in place p. Of the n places of an expert, in order, the token in row r of the whole tensor goes to the one with the number r mod n. With `start` [sequences], the first position of the token's sequence is added to r, so that a text of one row per call uses all of them; each sequence has equally many of the rows, or of the first `tokens` ones if further ones are padding. A choice of −1 is no expert and has the place −1.";
    ExpertSlots "expert_slots" (experts: Operand) [] {capacity: Count, group_tokens: Opt<Count>, tokens: Opt<Count>} -> 1, false, [Elementwise, PerResult(2), Fixed(F32), Whole, ByRow],
        "The slot of each choice [tokens, k]: an expert gives its slots 0, 1, … to the tokens that chose it, in their order; beyond `capacity`, and for no expert, a choice has the slot −1. With `group_tokens`, each group of that many tokens has slots of its own. With `tokens`, rows of the whole tensor from that one on are padding and have the slot −1.";
    ExpertCounts "expert_counts" (experts: Operand, slots: Operand) [] {group_tokens: Opt<Count>, groups: Count} -> 1, false, [Elementwise, PerOperand(1), Fixed(F32), Whole, Own],
        "The number of slots that each of `groups` experts has given away to each group of `group_tokens` tokens, by default to all: [groups, token groups].";
    ExpertStatistics "expert_statistics" (choices: Operand, experts: Operand, slots: Operand) [] {groups: Count, tokens: Opt<Count>} -> 1, false, [Elementwise, PerOperand(2), Fixed(F32), Whole, Own],
        "Counts per expert [groups, 4]: tokens that chose it in `choices`; of these, those that have a slot of it; tokens that moved to it, by `experts`; and tokens that chose it and have no slot of any expert in its place. The last three columns add up to the first in total. A choice of −1 is no expert and is not counted. `tokens` as in expert_slots.";
    ExpertPack "expert_pack" (x: Operand, experts: Operand, slots: Operand) [] {capacity: Count, group_tokens: Opt<Count>, groups: Count} -> 1, false, [Copy, Zero, FirstOperand, Whole, Own],
        "Copies the rows of x [tokens, d] to the slots of their experts: [groups, token groups · capacity, d], with zeros in the slots that no token has. Each group of `group_tokens` tokens, by default all, has `capacity` slots of each expert.";
    ExpertPackFused "expert_pack_fused" (x: Operand, experts: Operand) [] {capacity: Count, group_tokens: Opt<Count>, groups: Count, tokens: Opt<Count>} -> 1, false, [Copy, Zero, FirstOperand, Whole, Own],
        "`expert_pack` with the slots of `expert_slots`, which it does not store: one pass over the tokens, and the same bits.";
    GroupedMatmul "grouped_matmul" (x: Operand, w: Operand, counts: Operand) [] {act: Opt<Act>, rows: Count} -> 1, false, [GroupedGemm, FromExtents, Matmul, Whole, Own],
        "act(x[e] · w[e]ᵀ) for each group e, with x [groups, slots, k] and w [groups, m, k], in the first counts[e, g] of the slots/n slots of each token group g, for counts [groups, n]; the others are zeros. `rows` is the largest number of such slots of all groups together.";
    ExpertCombine "expert_combine" (y: Operand, experts: Operand, slots: Operand, weights: Operand) [order: OptOperand] {group_tokens: Opt<Count>} -> 1, true, [Elementwise, PerResult(4), FirstOperand, Whole, Own],
        "Σ weights[t, j] · y[experts[t, j], slots[t, j]] for each token t, added by ascending expert, with y [groups, token groups · capacity, d] and slots of the token's own group of `group_tokens` tokens, by default all. A choice with the slot −1 adds nothing. With `order`, of the shape of the experts, choices are added by it instead, ascending: where experts have places, it holds the experts. If the groups of y are sharded, the experts are those of the whole tensor, and the result is partial: experts of other shards add nothing.";
    TimeEmbed "time_embed" (timesteps: Operand) [] {width: Count} -> 1, false, [Elementwise, PerResult(16), Fixed(F32), Whole, ByRow],
        "Sinusoidal embedding of each timestep in f64: cosines, then sines; base 10000.";
    Renoise "renoise" (x: Operand) [sigma: Operand, seed: Operand, chunk: Operand, draw: Operand] {} -> 1, false, [Elementwise, PerResult(16), Fixed(F32), Whole, ByRow],
        "(1 − sigma) · x + sigma · normal. The normal of an element is keyed by (seed, chunk, draw, index of the element in the global tensor).";
    ToX0 "to_x0" (x: Operand, flow: Operand) [sigma: Operand] {} -> 1, false, [Elementwise, PerResult(2), Fixed(F32), Aligned(2), ByRow],
        "x − sigma · flow, computed in f64.";
    Guide "guide" (x: Operand, y: Operand) [] {scale: Positive} -> 1, false, [Elementwise, PerResult(3), Fixed(F32), Aligned(2), ByRow],
        "y + scale · (x − y), computed in f64: classifier-free guidance of the prediction x with a prompt, away from the prediction y with a negative prompt.";
    SpaceTimeToDepth "space_time_to_depth" (x: Operand) [] {patch: Extents<2>, stride: Extents<3>} -> 1, false, [Elementwise, Zero, Fixed(F32), Whole, ByRow],
        "Converts pixels [t, h, w, 3] to latent tokens [tokens, ph·pw·C]: the encoder of a lossless model.";
    DepthToSpaceTime "depth_to_space_time" (x: Operand) [] {grid: Extents<3>, patch: Extents<2>, stride: Extents<3>} -> 1, false, [Elementwise, Zero, Fixed(F32), Whole, ByRow],
        "Converts latent tokens to pixels [t, h, w, 3], clamped to [−1, 1]: the decoder of a lossless model.";
    Conv3d "conv3d" (x: Operand, w: Operand) [bias: OptOperand, halo: OptOperand, history: OptOperand, w_scale: OptOperand] {kernel: Extents<3>, pad_after: Or<Index, 0>, pad_before: Or<Index, 0>, pad_frames: Or<Index, 0>, stride: Opt<Extents<3>>} -> 1, false, [Gemm, FromExtents, Matmul, Whole, ByRow],
        "Convolution over frames, rows and columns, channels last: x [t, h, w, c], w [m, kt·kh·kw·c] with rows of (kt, kh, kw, c), y [t', h', w', m]. The frames of `history`, or `pad_frames` frames of zeros, precede those of x. Zeros surround each frame: `pad_before` rows and columns before it and `pad_after` behind it. `stride` is 1 in each direction by default. If the rows of x are sharded, `halo` [frames, 2·P, w, c] holds the rows above and below the shard, for the frames of `history` too, and takes the place of the zeros above and below. In e4m3, the sum of channel j is multiplied by w_scale[j] before the bias is added, and y is bf16.";
    UpsampleNearest "upsample_nearest" (x: Operand) [] {scale: Extents<2>} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Repeats each row of each frame of x [t, h, w, c] `scale[0]` times and each column `scale[1]` times.";
    ChannelsToFrames "channels_to_frames" (x: Operand) [] {parts: Count} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Splits the channels of each frame of x [t, h, w, n·c] into n = `parts` frames: frame n·i + j of the result [n·t, h, w, c] holds channels j·c..(j + 1)·c of frame i.";
    Patchify "patchify" (x: Operand) [] {patch: Extents<2>} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Converts a grid [t, h, w, c] to one token per patch, in the order (frame, row, column): [tokens, ph·pw·c], where the elements of a token have the order (row, column, channel).";
    Unpatchify "unpatchify" (x: Operand) [] {grid: Extents<3>, patch: Extents<2>} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Inverts `patchify`: converts the tokens of a grid of frames, rows and columns to [t, h·ph, w·pw, c].";
    ScaleShift "scale_shift" (x: Operand, scale: Vector, shift: Vector) [] {inverse: Or<Flag, 0>} -> 1, false, [Elementwise, PerResult(2), FirstOperand, Whole, ByRow],
        "x · scale + shift per channel, with scale [c] and shift [c] for x [..., c]; with `inverse = true`, (x − shift) / scale.";
    Clamp "clamp" (x: Operand) [] {limit: Positive} -> 1, false, [Elementwise, PerResult(2), FirstOperand, Aligned(1), ByRow],
        "Each element of x, limited to −limit..=limit; NaN stays NaN.";
    SoftClamp "soft_clamp" (x: Operand) [] {limit: Positive} -> 1, false, [Elementwise, PerResult(10), FirstOperand, Aligned(1), ByRow],
        "limit · tanh(x / limit), element by element.";
    Embed "embed" (ids: Operand, table: Operand) [] {} -> 1, false, [Copy, Zero, Fixed(F32), Whole, Own],
        "Row ids[i] of table [rows, d] for each i of ids [n], as [n, d] in f32. The table may be stored in bf16. The ids are whole numbers in f32, which is exact below 2^24. If the rows of the table are sharded, the ids are those of the whole table, and the result is partial: ids of other shards give zeros.";
    TakeRows "take_rows" (x: Operand) [] {row: Index, rows: Count} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Rows `row..row + rows` of x.";
    TakeShard "take_shard" (x: Operand) [] {axis: GroupAxis, dim: Dim, group_size: Opt<Int>, unit: Or<Count, 1>} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "This rank's shard of a replicated value, without communication. With `group_size`, each subgroup of that many positions of the axis holds all shards.";
    Pad "pad" (x: Operand) [] {axis: GroupAxis, dim: Dim, group_size: Opt<Int>, rows: Count} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Appends zeros up to `rows` rows of `dim`, so that an uneven shard can take part in a collective with equal counts.";
    Compact "compact" (x: Operand) [] {dim: Or<Index, 0>, extent: Count, parts: Count, unit: Count} -> 1, true, [Copy, Zero, FirstOperand, Whole, ByRow],
        "Removes the padding rows of `parts` gathered uneven shards of `dim` (default 0).";
}
Collective CollectiveOp {
    AllReduce "all_reduce" (x: Operand) [] {algorithm: Opt<AlgorithmName>, axis: GroupAxis, group_size: Opt<Int>, reduction: ReductionName, transport: Opt<TransportName>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "The reduction of the partial values of all members, on every member. For this and every other collective, `axis` is a mesh axis or `world`; with `group_size`, each subgroup of that many consecutive positions of the axis is a group. `transport` selects the transport: `p2p` (peer-to-peer kernels) or `nccl`; the default is the faster one that can connect the ranks. `algorithm` tags the sum with `tree` or `ring` for NCCL and for estimates; without it, NCCL and the profile choose.";
    AllGather "all_gather" (x: Operand) [] {axis: GroupAxis, dim: Dim, group_size: Opt<Int>, transport: Opt<TransportName>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "Concatenates the shards of all members along `dim` in rank order, on every member.";
    ReduceScatter "reduce_scatter" (x: Operand) [] {axis: GroupAxis, dim: Dim, group_size: Opt<Int>, reduction: ReductionName, transport: Opt<TransportName>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "The reduction of partial values, sharded over `dim`: each member keeps its shard.";
    AllToAll "all_to_all" (x: Operand) [] {axis: GroupAxis, concat: Dim, group_size: Opt<Int>, split: Dim, transport: Opt<TransportName>, unit: Or<Count, 1>, wire: Opt<WireFormat>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "Changes the sharding from dim `concat` to dim `split`. With uneven shards each peer has its own count. With `wire = \"fp8_e4m3\"`, each block of 128 elements of the last dim travels as e4m3 with one scale in f32, the largest magnitude divided by 448 or 1 for a block of zeros, and every element of the result is rounded so, those that stay on their rank too.";
    HaloExchange "halo_exchange" (x: Operand) [] {axis: GroupAxis, group_size: Opt<Int>, transport: Opt<TransportName>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "The rows beside this rank's shard of x [t, h, w, c], which is sharded over dim 1: for P members the result [t, 2·P, w, c], sharded alike, holds for each frame the last row of the member before and the first row of the member after. The first member has a row of zeros before its shard and the last one behind it.";
    Broadcast "broadcast" (x: Operand) [] {axis: GroupAxis, group_size: Opt<Int>, root: Index, transport: Opt<TransportName>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "Copies the value of the member at position `root` of the group to every member. A position in the world is a rank.";
    Send "send" (x: Operand) [] {axis: GroupAxis, batch: Opt<Int>, group_size: Opt<Int>, to: Index, transport: Opt<TransportName>} -> 0, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "Sends a value to the member at position `to` of the group. Sends and receives with the same `batch` number form one launch.";
    Recv "recv" () [] {axis: GroupAxis, batch: Opt<Int>, from: Index, group_size: Opt<Int>, transport: Opt<TransportName>} -> 1, true, [Transfer, Zero, Fixed(F32), Whole, ByRow],
        "Receives a value from the member at position `from` of the group. `batch` as for send.";
}
Order OrderOp {
    Wait "wait" (ticket: Operand) [] {} -> 1, true, [None, Zero, Fixed(F32), Whole, ByRow],
        "Waits for an issued collective and returns its result, if it has one (a send has none). Every issued collective is waited for exactly once.";
    EventRecord "event.record" () [] {} -> 1, true, [None, Zero, Fixed(F32), Whole, ByRow],
        "Records an event on a stream; ops of other streams can wait for it.";
}
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

    /// Returns the op with this name, given without the dialect prefix; `None` if there is none.
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
    fn attributes_are_sorted_by_name() {
        for row in OP_TABLE {
            assert!(row.attrs.is_sorted_by_key(|a| a.name), "attributes of {} are sorted by name", row.name);
        }
    }
}

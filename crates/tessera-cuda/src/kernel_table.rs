//! The parameters of the elementwise and the row kernels, in the order and with the names of the
//! CUDA sources.

use crate::collectives::Targets;
use crate::conv_shape::ConvShape;
use crate::kernel_params::{
    Bf16, CosSin, DevicePtr, E4m3, Element, KernelParam, ParamType, PointerElement, Stored, Word,
    kernel_signatures,
};

kernel_signatures! {
    ELEMENTWISE_TABLE:

    /// Converts `n` elements; e4m3 saturates at its largest number.
    Cast { x: DevicePtr<Element>, out: DevicePtr<Stored>, n: i64 } =
        CAST_F32_BF16 "cast_f32_bf16", CAST_BF16_F32 "cast_bf16_f32", CAST_F32_E4M3 "cast_f32_e4m3",
        CAST_BF16_E4M3 "cast_bf16_e4m3";

    /// Converts `n` elements by random words. The rows of `width` elements lie `pitch` apart in the whole tensor, and the
    /// first element has the index `first` there.
    CastByWord {
        x: DevicePtr<Element>, out: DevicePtr<Stored>, seed: u32, seed_high: u32, draw: u32, first: i64, width: i64,
        pitch: i64, n: i64,
    } = CAST_BY_WORD_F32_BF16 "cast_by_word_f32_bf16", CAST_BY_WORD_F32_E4M3 "cast_by_word_f32_e4m3",
        CAST_BY_WORD_BF16_E4M3 "cast_by_word_bf16_e4m3";

    /// Adds a bias per column, unless it is absent, and applies an activation.
    BiasAct {
        x: DevicePtr<Element>, b: DevicePtr<Element>, out: DevicePtr<Element>, columns: i32, act: i32, n: i64,
    } = BIAS_ACT_F32 "bias_act_f32", BIAS_ACT_BF16 "bias_act_bf16";

    /// Adds `n` elements.
    Add { x: DevicePtr<Element>, y: DevicePtr<Element>, out: DevicePtr<Element>, n: i64 } =
        ADD_F32 "add_f32", ADD_BF16 "add_bf16";

    /// Multiplies `n` elements.
    Mul { x: DevicePtr<Element>, y: DevicePtr<Element>, out: DevicePtr<Element>, n: i64 } =
        MUL_F32 "mul_f32", MUL_BF16 "mul_bf16";

    /// Takes rows of a table by their ids; `n` elements of `width` columns. The rank holds `rows` of `table_rows`.
    Embed {
        ids: DevicePtr<f32>, table: DevicePtr<Element>, out: DevicePtr<f32>, rows: i32, first_row: i32,
        table_rows: i32, width: i32, n: i64,
    } = EMBED_F32 "embed_f32", EMBED_BF16 "embed_bf16";

    /// Adds an embedding to consecutive modulation tables.
    Modulation {
        tables: DevicePtr<f32>, embedding: DevicePtr<f32>, out: DevicePtr<f32>,
        table_columns: i32, width: i32, table_elements: i32, n: i64,
    } = MODULATION "modulation";

    /// A GEMM of at most 8 rows in f32: `m` columns of out, contracted over `k`.
    SmallGemm {
        x: DevicePtr<f32>, w: DevicePtr<f32>, b: DevicePtr<f32>, out: DevicePtr<f32>,
        rows: i32, k: i32, m: i32, act: i32,
    } = SMALL_GEMM "small_gemm";

    /// Embeds times as cosines and sines.
    TimeEmbed { t: DevicePtr<f32>, out: DevicePtr<f32>, width: i32, n: i64 } = TIME_EMBED "time_embed";

    /// Writes the RoPE table of a call's frames.
    RopeFrameTable { start: DevicePtr<i64>, stride: i32, pairs: i32, out: DevicePtr<CosSin>, n: i32 } =
        ROPE_FRAME_TABLE "rope_frame_table";

    /// Mixes x with noise that is drawn for each element's global index.
    Renoise {
        x: DevicePtr<f32>, sigma: DevicePtr<f32>, seed: DevicePtr<i64>, chunk: DevicePtr<i64>,
        draw: DevicePtr<i64>, first: i64, out: DevicePtr<f32>, n: i64,
    } = RENOISE "renoise";

    /// Subtracts sigma times the flow.
    ToX0 {
        x: DevicePtr<f32>, flow: DevicePtr<f32>, sigma: DevicePtr<f32>, out: DevicePtr<f32>, n: i64,
    } = TO_X0 "to_x0";

    /// Moves a prediction away from the one with a negative prompt.
    Guide {
        x: DevicePtr<f32>, y: DevicePtr<f32>, scale: f64, out: DevicePtr<f32>, n: i64,
    } = GUIDE "guide";

    /// Copies rows to the row index that device memory holds.
    PutRows { from: DevicePtr<Word>, to: DevicePtr<Word>, row: DevicePtr<i64>, words: i64, n: i64 } =
        PUT_ROWS_16 "put_rows_16", PUT_ROWS_4 "put_rows_4", PUT_ROWS_2 "put_rows_2";

    /// Converts between pixels and latent tokens.
    SpaceToDepth {
        x: DevicePtr<f32>, out: DevicePtr<f32>, height: i32, width: i32, st: i32, sh: i32, sw: i32,
        inverse: i32, n: i64,
    } = SPACE_TO_DEPTH "space_to_depth";

    /// Combines attention over splits of the keys.
    MergeSplits {
        o: DevicePtr<Bf16>, lse: DevicePtr<f32>, bias: DevicePtr<f32>, biased_split: i32, splits: i32,
        heads: i32, head: i32, rows: i64, out: DevicePtr<Bf16>,
    } = MERGE_BF16 "merge_bf16";

    /// Attention for shapes that no specialised kernel supports.
    PlainAttention {
        q: DevicePtr<Element>, k: DevicePtr<Element>, v: DevicePtr<Element>, bias: DevicePtr<f32>,
        bias_begin: i32, bias_end: i32, out: DevicePtr<Element>, queries: i32, keys: i32, heads: i32,
        head: i32, scale: f32,
    } = ATTENTION_F32 "attention_f32", ATTENTION_BF16 "attention_bf16";

    /// Softmax of rows of `width` elements.
    Softmax { x: DevicePtr<Element>, out: DevicePtr<Element>, width: i32 } =
        SOFTMAX_F32 "softmax_f32", SOFTMAX_BF16 "softmax_bf16";

    /// Multiplies batches of small matrices.
    Bmm {
        x: DevicePtr<f32>, y: DevicePtr<f32>, out: DevicePtr<f32>, n: i32, k: i32, m: i32,
        transposed: i32, scale: f32, count: i64,
    } = BMM "bmm";

    /// Convolves frames of any shape. Absent operands are null.
    PlainConv {
        x: DevicePtr<Element>, history: DevicePtr<Element>, halo: DevicePtr<Element>, w: DevicePtr<Element>,
        bias: DevicePtr<Element>, residual: DevicePtr<Element>, out: DevicePtr<Element>, shape: ConvShape,
    } = CONV_F32 "conv_f32", CONV_BF16 "conv_bf16";

    /// Normalises the channels of each cell, and applies SiLU if `is_silu`. The name states the dtype of the
    /// result; x is bf16 for e4m3.
    NormaliseCells {
        x: DevicePtr<Element>, w: DevicePtr<f32>, out: DevicePtr<Stored>, channels: i32, eps: f32,
        is_silu: i32, cells: i64,
    } = NORMALISE_CELLS_BF16_8X16 "normalise_cells_bf16_8x16",
        NORMALISE_CELLS_BF16_8X32 "normalise_cells_bf16_8x32",
        NORMALISE_CELLS_BF16_1X32 "normalise_cells_bf16_1x32",
        NORMALISE_CELLS_F32_4X32 "normalise_cells_f32_4x32",
        NORMALISE_CELLS_F32_1X32 "normalise_cells_f32_1x32",
        NORMALISE_CELLS_E4M3_8X16 "normalise_cells_e4m3_8x16",
        NORMALISE_CELLS_E4M3_8X32 "normalise_cells_e4m3_8x32";

    /// Repeats rows and columns of frames, in words.
    RepeatCells {
        x: DevicePtr<Word>, out: DevicePtr<Word>, height: i32, width: i32, row_scale: i32,
        column_scale: i32, words: i32, n: i64,
    } = REPEAT_CELLS_16 "repeat_cells_16", REPEAT_CELLS_4 "repeat_cells_4", REPEAT_CELLS_2 "repeat_cells_2";

    /// Splits the channels of frames into frames, in words.
    SplitChannels {
        x: DevicePtr<Word>, out: DevicePtr<Word>, parts: i32, cells: i32, words: i32, n: i64,
    } = SPLIT_CHANNELS_16 "split_channels_16", SPLIT_CHANNELS_4 "split_channels_4",
        SPLIT_CHANNELS_2 "split_channels_2";

    /// Converts between a grid of cells and tokens of patches.
    PatchCells {
        x: DevicePtr<Word>, out: DevicePtr<Word>, height: i32, width: i32, channels: i32, ph: i32, pw: i32,
        inverse: i32, n: i64,
    } = PATCH_CELLS_4 "patch_cells_4", PATCH_CELLS_2 "patch_cells_2";

    /// Scales and shifts each channel, or inverts that.
    ScaleShift {
        x: DevicePtr<Element>, scale: DevicePtr<f32>, shift: DevicePtr<f32>, out: DevicePtr<Element>,
        channels: i32, inverse: i32, n: i64,
    } = SCALE_SHIFT_F32 "scale_shift_f32", SCALE_SHIFT_BF16 "scale_shift_bf16";

    /// Limits each element.
    Clamp { x: DevicePtr<Element>, out: DevicePtr<Element>, limit: f32, is_soft: i32, n: i64 } =
        CLAMP_F32 "clamp_f32", CLAMP_BF16 "clamp_bf16";

    /// Rotates the heads of token rows by their positions.
    Rotary {
        x: DevicePtr<Element>, frequencies: DevicePtr<f32>, start: DevicePtr<f32>, out: DevicePtr<Element>,
        width: i32, head: i32, pairs: i32, interleaved: i32, rows_per_sequence: i32, scale: f32,
    } = ROTARY_F32 "rotary_f32", ROTARY_BF16 "rotary_bf16";

    /// Normalises heads of `head` elements.
    HeadNorm {
        x: DevicePtr<Element>, w: DevicePtr<f32>, out: DevicePtr<Element>, head: i32, eps: f32, heads: i64,
    } = HEAD_NORM_F32 "head_norm_f32", HEAD_NORM_BF16 "head_norm_bf16";

    /// Joins `x_words` words of each head of x, from `first` on, with those of y; `n` words in all.
    JoinHeads {
        x: DevicePtr<Word>, y: DevicePtr<Word>, out: DevicePtr<Word>, x_pitch: i32, first: i32, x_words: i32,
        y_words: i32, n: i64,
    } = JOIN_HEADS_16 "join_heads_16", JOIN_HEADS_4 "join_heads_4", JOIN_HEADS_2 "join_heads_2";

    /// Multiplies each head of `n` rows of x with `rows` rows of `width` weights, or with their columns.
    HeadMatmul {
        x: DevicePtr<Element>, w: DevicePtr<Element>, out: DevicePtr<Element>, n: i32, heads: i32,
        head_rows: i32, first: i32, rows: i32, width: i32,
    } = HEAD_MATMUL_F32 "head_matmul_f32", HEAD_MATMUL_BF16 "head_matmul_bf16",
        HEAD_MATMUL_TRANSPOSED_F32 "head_matmul_transposed_f32",
        HEAD_MATMUL_TRANSPOSED_BF16 "head_matmul_transposed_bf16";

    /// Copies `n` words to the rows of a pool in which the positions of their rows lie.
    PutPages {
        from: DevicePtr<Word>, to: DevicePtr<Word>, pages: DevicePtr<f32>, start: DevicePtr<f32>,
        page_count: i32, page_rows: i32, pool_pages: i32, rows_per_sequence: i32, words: i32, n: i64,
    } = PUT_PAGES_16 "put_pages_16", PUT_PAGES_4 "put_pages_4", PUT_PAGES_2 "put_pages_2";

    /// Multiplies one row of `k` elements with up to three matrices.
    RowMatmuls { x: DevicePtr<Bf16>, k: i32, matrices: RowMatrices } = ROW_MATMULS_BF16 "row_matmuls_bf16";

    /// Multiplies one row with two matrices, and the results with each other.
    GatedRow {
        x: DevicePtr<Bf16>, gate: DevicePtr<Bf16>, up: DevicePtr<Bf16>, out: DevicePtr<Bf16>, k: i32, act: i32,
    } = GATED_ROW_BF16 "gated_row_bf16";

    /// Normalises and rotates `n` heads and writes them to rows or pages.
    PutHeads {
        frequencies: DevicePtr<f32>, start: DevicePtr<f32>, pages: DevicePtr<f32>, n: i64, parts: HeadParts,
    } = PUT_HEADS_F32 "put_heads_f32", PUT_HEADS_BF16 "put_heads_bf16";

    /// Finds the largest logit of parts of each row.
    SampleLargest { logits: DevicePtr<f32>, largest: DevicePtr<u64>, vocabulary: i32 } =
        SAMPLE_LARGEST "sample_largest";

    /// Computes the probability of each id, relative to the largest one of its row.
    SampleUnits {
        logits: DevicePtr<f32>, largest: DevicePtr<u64>, temperature: DevicePtr<f32>, units: DevicePtr<u64>,
        vocabulary: i32, n: i64,
    } = SAMPLE_UNITS "sample_units";

    /// Chooses an id per row.
    SampleChoose {
        logits: DevicePtr<f32>, largest: DevicePtr<u64>, units: DevicePtr<u64>, temperature: DevicePtr<f32>,
        top_k: DevicePtr<f32>, top_p: DevicePtr<f32>, seed: DevicePtr<f32>, draw: DevicePtr<f32>,
        out: DevicePtr<f32>, host_copy: DevicePtr<f32>, vocabulary: i32,
    } = SAMPLE_CHOOSE "sample_choose";

    /// Chooses the experts of each token.
    TopKExperts {
        logits: DevicePtr<f32>, out: DevicePtr<f32>, rows: TokenRows, experts: i32, k: i32, tokens: i32,
    } = TOP_K_EXPERTS "top_k_experts";

    /// Returns the places of `n` choices.
    ExpertPlaces {
        chosen: DevicePtr<f32>, residents: DevicePtr<u64>, out: DevicePtr<f32>, rows: TokenRows, k: i32, places: i32,
        n: i32,
    } = EXPERT_PLACES "expert_places";

    /// Ranks the experts of each token by their scores. `score` is a `ScoreKind` of router.cu, and `count` the number
    /// of experts, rounded up to a power of two.
    RankExperts {
        logits: DevicePtr<f32>, correction: DevicePtr<f32>, out: DevicePtr<f32>, rows: TokenRows, experts: i32,
        count: i32, k: i32, groups: i32, keep: i32, score: i32,
    } = RANK_EXPERTS "rank_experts";

    /// Computes the weights of the chosen experts.
    ExpertWeights {
        logits: DevicePtr<f32>, chosen: DevicePtr<f32>, out: DevicePtr<f32>, experts: i32, k: i32, score: i32,
        renormalise: i32, scale: f64, tokens: i32,
    } = EXPERT_WEIGHTS "expert_weights";

    /// Takes the gates of `n` choices.
    ExpertGates {
        gates: DevicePtr<Element>, chosen: DevicePtr<f32>, out: DevicePtr<f32>, experts: i32, k: i32, n: i64,
    } = EXPERT_GATES_F32 "expert_gates_f32", EXPERT_GATES_BF16 "expert_gates_bf16";

    /// Subtracts a weight from logits of experts in other locality groups than the token.
    ExpertLocality {
        logits: DevicePtr<f32>, home_groups: DevicePtr<u64>, expert_groups: DevicePtr<u64>, out: DevicePtr<f32>,
        experts: i32, first_row: i32, home_rows: i32, weight: f32, n: i64,
    } = EXPERT_LOCALITY "expert_locality";

    /// Computes the mean distance of each row to the experts of its softmax.
    MeanDistances { logits: DevicePtr<f32>, means: DevicePtr<f64>, d: ExpertDistances, rows: i32 } =
        MEAN_DISTANCES "mean_distances";

    /// Adds the mean distances of rows.
    SumDistances { means: DevicePtr<f64>, out: DevicePtr<f32>, factor: f64, rows: i32 } =
        SUM_DISTANCES "sum_distances";

    /// Computes the gradient of the mean distance of rows.
    DistanceGradient {
        logits: DevicePtr<f32>, out: DevicePtr<f32>, d: ExpertDistances, factor: f64, real_rows: i32, rows: i32,
    } = DISTANCE_GRADIENT "distance_gradient";

    /// Copies choices and leaves out the last one of some tokens.
    ExpertDraw {
        choices: DevicePtr<f32>, out: DevicePtr<f32>, rows: TokenRows, k: i32, layer: i64, seed: u32, ep_seed: u32,
        keep: f64, n: i64,
    } = EXPERT_DRAW "expert_draw";

    /// Gives each choice the next slot of its expert in its group of tokens.
    ExpertSlots {
        chosen: DevicePtr<f32>, out: DevicePtr<f32>, capacity: i32, group_choices: i32, real_choices: i32,
        choices: i32,
    } = EXPERT_SLOTS "expert_slots";

    /// Moves choices beyond the capacity of their experts to others of each token's ranking.
    ExpertReroute {
        ranking: DevicePtr<f32>, out: DevicePtr<f32>, ranked: i32, k: i32, capacity: i32, reroutes: i32,
        group_tokens: i32, real_tokens: i32, tokens: i32,
    } = EXPERT_REROUTE "expert_reroute";

    /// Counts the slots that each expert has given to each group of tokens.
    ExpertCounts {
        chosen: DevicePtr<f32>, slots: DevicePtr<f32>, out: DevicePtr<f32>, group_choices: i32, choices: i32,
        token_groups: i32, experts: i32,
    } = EXPERT_COUNTS "expert_counts";

    /// Counts per expert what became of choices.
    ExpertStatistics {
        choices: DevicePtr<f32>, chosen: DevicePtr<f32>, slots: DevicePtr<f32>, out: DevicePtr<f32>,
        real_choices: i32, experts: i32,
    } = EXPERT_STATISTICS "expert_statistics";

    /// Fills `n` words of 4 bytes with zeros.
    ZeroWords { out: DevicePtr<Word>, n: i64 } = ZERO_WORDS "zero_words";

    /// Copies rows of tokens to the slots of their experts.
    ExpertPack {
        x: DevicePtr<Element>, chosen: DevicePtr<f32>, slots: DevicePtr<f32>, out: DevicePtr<Element>,
        width: i32, k: i32, capacity: i32, group_tokens: i32, token_groups: i32, experts: i32,
    } = EXPERT_PACK_F32 "expert_pack_f32", EXPERT_PACK_BF16 "expert_pack_bf16";

    /// Multiplies the filled slots of each part with the weights of its group, whose addresses may be in `experts`.
    GroupedMatmul {
        x: DevicePtr<Element>, w: DevicePtr<Element>, experts: DevicePtr<u64>, counts: DevicePtr<f32>,
        out: DevicePtr<Element>, parts: i32, token_groups: i32, slots: i32, k: i32, m: i32, act: i32,
    } = GROUPED_MATMUL_F32 "grouped_matmul_f32", GROUPED_MATMUL_BF16 "grouped_matmul_bf16";

    /// Copies matrices of experts from host memory to their slots.
    FetchExperts { copies: DevicePtr<u64> } = FETCH_EXPERTS "fetch_experts";

    /// Adds the weighted results of the experts of each token.
    ExpertCombine {
        y: DevicePtr<Element>, chosen: DevicePtr<f32>, order: DevicePtr<f32>, slots: DevicePtr<f32>,
        weights: DevicePtr<f32>, out: DevicePtr<Element>, width: i32, k: i32, of: CombinedSlots,
    } = EXPERT_COMBINE_F32 "expert_combine_f32", EXPERT_COMBINE_BF16 "expert_combine_bf16";

    /// Encodes `blocks` blocks of rows as e4m3 with scales.
    EncodeRows { x: DevicePtr<f32>, words: DevicePtr<u32>, width: i32, blocks: i64 } = ENCODE_ROWS "encode_rows";

    /// Decodes `n` words of rows in e4m3.
    DecodeRows { words: DevicePtr<u32>, out: DevicePtr<f32>, width: i32, n: i64 } = DECODE_ROWS "decode_rows";

    /// Adds the mixed words of pieces of buffers to a sum per buffer.
    DigestPieces { pieces: DevicePtr<BufferPiece>, is_wanted: DevicePtr<u32>, sums: DevicePtr<u64> } =
        DIGEST_PIECES "digest_pieces";

    /// Counts the elements that are not finite, finds the first of them, and digests all.
    SummarizeOutput { x: DevicePtr<f32>, found: DevicePtr<u64>, n: i64 } = SUMMARIZE_OUTPUT "summarize_output";

    /// Never ends.
    Spin {} = SPIN "spin";
}

/// An element of a table in device memory, with the layout of `BufferPiece` in buffers.cu: consecutive bytes
/// of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct BufferPiece {
    pub(crate) address: u64,
    /// Units of 16 bytes of the buffer before this piece.
    pub(crate) first: u64,
    pub(crate) bytes: u32,
    /// Index of the buffer among those that are digested.
    pub(crate) buffer: u32,
}

#[allow(unsafe_code, reason = "a promise about the layout of a struct")]
// SAFETY: 8 + 8 + 4 + 4 bytes of integers, aligned to 8, so the struct has no padding.
unsafe impl bytemuck::NoUninit for BufferPiece {}

impl PointerElement for BufferPiece {
    const C_TYPES: &'static [&'static str] = &["BufferPiece"];
}

kernel_signatures! {
    ROW_TABLE:

    /// Adds a residual, normalises rows and quantises them; absent operands are null.
    ResidualNorm {
        rows: i32, x: DevicePtr<Element>, y: DevicePtr<Element>, gates: DevicePtr<f32>, gate_columns: i32,
        gate: i32, m: DevicePtr<f32>, m_columns: i32, shift: i32, scale: i32, w: DevicePtr<f32>,
        b: DevicePtr<f32>, total: DevicePtr<Element>, out: DevicePtr<Element>, quantized: DevicePtr<E4m3>,
        scales: DevicePtr<f32>, first_row: i32, frame_rows: i32, eps: f32,
    } = RESIDUAL_NORM "residual_norm";

    /// Adds a residual in the dtype of x or in bf16, and normalises the sum; absent operands are null.
    ResidualRms {
        rows: i32, x: DevicePtr<Element>, y: DevicePtr<Element>, narrow_y: DevicePtr<Bf16>, w: DevicePtr<f32>,
        total: DevicePtr<Element>, out: DevicePtr<Element>, narrow_out: DevicePtr<Bf16>, eps: f32,
    } = RESIDUAL_RMS "residual_rms";

    /// Sums the squares of each row of x and of y.
    RowSquareSum {
        rows: i32, x: DevicePtr<Element>, y: DevicePtr<Element>, out: DevicePtr<f32>, columns: i32,
    } = ROW_SQUARE_SUM "row_square_sum";

    /// Quantises rows to e4m3.
    Quantize { rows: i32, x: DevicePtr<Element>, out: DevicePtr<E4m3>, scales: DevicePtr<f32> } =
        QUANTIZE "quantize";

    /// Quantises rows to e4m3 by random words, of which the first is row `first_row` of the whole tensor.
    QuantizeByWord {
        rows: i32, x: DevicePtr<Element>, out: DevicePtr<E4m3>, scales: DevicePtr<f32>, seed: u32, seed_high: u32,
        draw: u32, first_row: i64,
    } = QUANTIZE_BY_WORD "quantize_by_word";

    /// Applies an RMS norm and RoPE, and stores the rows here or at the members of a group.
    RmsRope {
        rows: i32, x: DevicePtr<Element>, pitch: i32, w: DevicePtr<f32>, sums: DevicePtr<f32>,
        sum_columns: i32, sum_column: i32, norm_columns: f32, eps: f32, out: DevicePtr<Element>,
        to_row: DevicePtr<i64>, head: i32, by_frame: DevicePtr<CosSin>, by_row: DevicePtr<CosSin>,
        by_column: DevicePtr<CosSin>, first_row: i32, height: i32, width: i32, has_positions: i32,
        targets: Targets,
    } = RMS_ROPE "rms_rope";
}

/// The most matmuls that one launch of a row computes.
pub(crate) const MAX_ROW_MATRICES: usize = 3;

/// A matmul with one row, with the layout of `RowMatrix` in fused_language.cu. No bias has the address 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct RowMatrix {
    pub(crate) w: u64,
    pub(crate) b: u64,
    pub(crate) out: u64,
    pub(crate) columns: i32,
    pub(crate) act: i32,
}

/// Kernel argument with the layout of `RowMatrices` in fused_language.cu. Unused matrices have no columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct RowMatrices {
    pub(crate) of: [RowMatrix; MAX_ROW_MATRICES],
}

impl KernelParam for RowMatrices {
    const TYPE: ParamType = ParamType::Value("RowMatrices");
}

/// The most parts of heads that one launch writes: queries, keys and values.
pub(crate) const MAX_HEAD_PARTS: usize = 3;

/// Heads of one value, with the layout of `HeadPart` in fused_language.cu.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub(crate) struct HeadPart {
    pub(crate) x: u64,
    /// Address of the norm's weight; 0 without a norm.
    pub(crate) w: u64,
    /// Address of the result, or of the pool of pages.
    pub(crate) out: u64,
    pub(crate) heads: i32,
    pub(crate) rotates: i32,
    pub(crate) in_pages: i32,
    pub(crate) eps: f32,
}

/// Kernel argument with the layout of `HeadParts` in fused_language.cu. Unused parts have no heads.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub(crate) struct HeadParts {
    pub(crate) of: [HeadPart; MAX_HEAD_PARTS],
    /// Heads of all parts, and elements of a head.
    pub(crate) heads: i32,
    pub(crate) head: i32,
    /// Pairs of channels that a rotation turns.
    pub(crate) pairs: i32,
    /// Rows that the call brings of each sequence.
    pub(crate) rows_per_sequence: i32,
    /// Pages of each sequence, rows of each page, and pages of the caches.
    pub(crate) page_count: i32,
    pub(crate) page_rows: i32,
    pub(crate) pool_pages: i32,
    /// Factor of the rotated channels.
    pub(crate) scale: f32,
}

impl KernelParam for HeadParts {
    const TYPE: ParamType = ParamType::Value("HeadParts");
}

/// Kernel argument with the layout of `TokenRows` in experts.cu: addresses of the first positions and of the last rows of
/// sequences, which may be absent, and where the rows of this rank lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct TokenRows {
    pub(crate) start: u64,
    pub(crate) last: u64,
    pub(crate) first_row: i32,
    pub(crate) tokens: i32,
    pub(crate) sequences: i32,
}

impl KernelParam for TokenRows {
    const TYPE: ParamType = ParamType::Value("TokenRows");
}

/// Kernel argument with the layout of `CombinedSlots` in experts.cu: the experts that a rank holds, and the slots that
/// each gives to each group of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct CombinedSlots {
    pub(crate) first_expert: i32,
    pub(crate) experts: i32,
    pub(crate) token_groups: i32,
    pub(crate) group_tokens: i32,
    pub(crate) capacity: i32,
}

impl KernelParam for CombinedSlots {
    const TYPE: ParamType = ParamType::Value("CombinedSlots");
}

/// Kernel argument with the layout of `ExpertDistances` in router.cu: addresses of the distances of homes and of the
/// homes of experts, and where the rows of this rank lie among homes of `home_rows` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ExpertDistances {
    pub(crate) distances: u64,
    pub(crate) expert_homes: u64,
    pub(crate) experts: i32,
    pub(crate) homes: i32,
    pub(crate) first_row: i32,
    pub(crate) home_rows: i32,
}

impl KernelParam for ExpertDistances {
    const TYPE: ParamType = ParamType::Value("ExpertDistances");
}

/// The number of buckets per direction that [`BucketStarts`] holds.
pub(crate) const MAX_BUCKETS_PER_DIRECTION: usize = 128;

/// Kernel argument with the layout of `BucketStarts` in relative_attention.cu: the smallest distance of each
/// bucket of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct BucketStarts {
    pub(crate) first: [i32; MAX_BUCKETS_PER_DIRECTION],
}

impl KernelParam for BucketStarts {
    const TYPE: ParamType = ParamType::Value("BucketStarts");
}

/// Kernel argument with the layout of `PagedShape` in paged.cuh: extents of attention over pages, and
/// how it is divided into blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct PagedShape {
    /// Rows that the call brings of each sequence.
    pub(crate) rows_per_sequence: i32,
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    /// Pages of each sequence, and rows of each page.
    pub(crate) page_count: i32,
    pub(crate) page_rows: i32,
    /// Pages of the caches.
    pub(crate) pool_pages: i32,
    /// Columns of each head of the values.
    pub(crate) value_dim: i32,
    /// Groups of query heads, each of which reads one KV head.
    pub(crate) groups: i32,
    /// Query heads of all ranks per KV head, and the place of the rank's first query head among those that read
    /// its first KV head.
    pub(crate) share: i32,
    pub(crate) first_head: i32,
    /// Last positions that a query attends to, and first ones that it attends to in any case.
    pub(crate) window: i32,
    pub(crate) sink: i32,
    /// Parts into which the positions are divided, and positions of each.
    pub(crate) parts: i32,
    pub(crate) part_positions: i32,
    /// Blocks of queries of each sequence and group of heads.
    pub(crate) tiles: i32,
    pub(crate) scale: f32,
}

impl KernelParam for PagedShape {
    const TYPE: ParamType = ParamType::Value("PagedShape");
}

kernel_signatures! {
    HEAD_TABLE:

    /// Attention with a bias by distance, for any head size or for that of the compilation.
    RelativeAttention {
        q: DevicePtr<Element>, k: DevicePtr<Element>, v: DevicePtr<Element>, table: DevicePtr<f32>,
        length: DevicePtr<i64>, out: DevicePtr<Element>, queries: i32, keys: i32, heads: i32, head: i32,
        q_pitch: i32, k_pitch: i32, v_pitch: i32, buckets: i32, starts: BucketStarts,
    } = RELATIVE_ATTENTION_F32 "relative_attention_f32", RELATIVE_ATTENTION_BF16 "relative_attention_bf16",
        RELATIVE_ATTENTION_TILED "relative_attention";

    /// Attention within a frame: softmax(q · kᵀ · scale) · v for one head of the size of the compilation.
    FrameAttention {
        q: DevicePtr<Bf16>, k: DevicePtr<Bf16>, v: DevicePtr<Bf16>, out: DevicePtr<Bf16>, cells: i32,
    } = FRAME_ATTENTION "frame_attention";

    /// Attention over caches in pages, in blocks of `queries` queries: a block for the keys and values of one KV
    /// head, or for the rows that many query heads read. With one part, `sums` is null.
    PagedAttention {
        q: DevicePtr<Element>, k: DevicePtr<Element>, v: DevicePtr<Element>, pages: DevicePtr<f32>,
        start: DevicePtr<f32>, out: DevicePtr<Element>, sums: DevicePtr<f32>, queries: i32, shape: PagedShape,
    } = PAGED_ATTENTION_F32 "paged_attention_f32", PAGED_ATTENTION_BF16 "paged_attention_bf16",
        LATENT_ATTENTION_F32 "latent_attention_f32", LATENT_ATTENTION_BF16 "latent_attention_bf16";

    /// Adds the parts of attention over pages.
    MergeParts {
        sums: DevicePtr<f32>, start: DevicePtr<f32>, out: DevicePtr<Element>, shape: PagedShape,
    } = MERGE_PARTS_F32 "merge_parts_f32", MERGE_PARTS_BF16 "merge_parts_bf16";
}

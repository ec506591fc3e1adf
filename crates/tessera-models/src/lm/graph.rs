//! The logical programs of a language model: one per bucket of sequences and of rows per sequence.
//!
//! A call brings the same number of rows of each of its sequences. Their keys and values go to pages of the KV
//! caches, so a sequence may continue in any later call. How many rows count, and at which position they begin,
//! are values of the call: no shape depends on a length. Rows beyond the end of a prompt are computed and never
//! read again, because the next call of their sequence overwrites their keys and values.

mod attention;
mod feed_forward;

use tessera_ir::{BufferId, Builder, DType, Opcode, Program, Type, ValueId};

use self::attention::LatentExtents;
use super::{AttentionKind, DecoderModel};

/// Name of the weight that holds the rotary frequencies. No checkpoint has it; the config states it.
pub const ROTARY_FREQUENCIES: &str = "rotary.frequencies";

/// The number of sequences of a call, and of rows of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenBucket {
    /// Sequences of a call.
    pub sequences: u64,
    /// Rows of each sequence: 1 for a decode step, more for a part of a prompt.
    pub rows: u64,
}

/// A program of a bucket, and what it does with ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenPhase {
    /// The rows that the program computes.
    pub bucket: TokenBucket,
    /// Where the ids of the rows come from.
    pub ids: IdSource,
    /// Whether the chosen ids also stay on the ranks, for a phase of [`IdSource::LastPhase`] behind this one.
    pub keeps_ids: bool,
}

/// Where a program takes the ids of its rows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdSource {
    /// The call carries them, as the tensor of [`token_ids_name`].
    Call,
    /// The phase before chose them. Such a program belongs to a bucket of one row per sequence.
    LastPhase,
}

impl TokenPhase {
    /// Creates a program whose ids the call carries, and whose choice leaves the ranks.
    #[must_use]
    pub fn from_call(bucket: TokenBucket) -> TokenPhase {
        TokenPhase { bucket, ids: IdSource::Call, keeps_ids: false }
    }

    /// Returns the name of the program.
    #[must_use]
    pub fn name(&self) -> String {
        let TokenBucket { sequences, rows } = self.bucket;
        let suffix = if self.ids == IdSource::LastPhase { ".next" } else { "" };
        format!("tokens.b{sequences}.n{rows}{suffix}")
    }
}

/// The extents of the KV caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedCache {
    /// Positions of a page.
    pub page_rows: u64,
    /// Pages of the pool, which all sequences share.
    pub pages: u64,
    /// Largest number of pages of one sequence.
    pub pages_per_sequence: u64,
    /// Whether every rank of tp computes and caches all KV heads, because there are more ranks than KV heads.
    pub replicates_heads: bool,
}

/// What a program returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenOutput {
    /// `next` [sequences]: the id that is chosen after the last row of each sequence.
    Next,
    /// `logits` [sequences · rows, vocabulary] of every row.
    Logits,
}

/// The inputs of a call, by the names in the programs. `n` is the number of sequences of the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenInput;

impl TokenInput {
    /// Numbers [n, pages per sequence]: the pages of each sequence, −1 behind the last.
    pub const PAGES: &str = "pages";
    /// Numbers [n]: the position of the first row of each sequence, −1 for an absent one.
    pub const START: &str = "start";
    /// Numbers [n]: the row, among all of the call, after which the next id of each sequence is chosen.
    pub const LAST: &str = "last";
    /// Numbers [n]: the number of the draw that chooses the next id of each sequence.
    pub const DRAW: &str = "draw";
    /// Numbers [n]: the seed of the draws of each sequence.
    pub const SEED: &str = "seed";
    /// Numbers [n]: the divisor of the logits of each sequence.
    pub const TEMPERATURE: &str = "temperature";
    /// Numbers [n]: the number of candidates of each sequence.
    pub const TOP_K: &str = "top_k";
    /// Numbers [n]: the probability that the candidates of each sequence reach together.
    pub const TOP_P: &str = "top_p";
}

/// Output [sequences] with the id that is chosen after the last row of each sequence.
pub const NEXT_IDS: &str = "next";
/// Output [sequences · rows, vocabulary] with the logits of every row.
pub const LOGITS: &str = "logits";
/// Buffer [sequences] with the ids that the last phase chose.
const KEPT_IDS: &str = "chosen";

/// Returns the name of the tensor [sequences · rows] with the ids of a call's rows, sequence by sequence. A call that
/// runs several programs, as a warm-up does, needs one for each.
#[must_use]
pub fn token_ids_name(bucket: TokenBucket) -> String {
    format!("ids.b{}.n{}", bucket.sequences, bucket.rows)
}

/// Builds the programs of a model.
///
/// # Panics
/// Never panics for a parsed [`DecoderModel`], whose dimensions satisfy every rule used here.
#[must_use]
pub fn build_token_phases(
    m: &DecoderModel,
    cache: PagedCache,
    phases: &[TokenPhase],
    output: TokenOutput,
) -> Vec<Program> {
    phases.iter().map(|phase| build_phase(m, cache, *phase, output)).collect()
}

fn build_phase(m: &DecoderModel, cache: PagedCache, phase: TokenPhase, output: TokenOutput) -> Program {
    let mut g = DecoderBuilder {
        builder: Builder::new_logical(&phase.name()),
        model: m,
        cache,
        location: "first".to_string(),
    };
    let bucket = phase.bucket;
    let b = bucket.sequences;
    let ids = match phase.ids {
        IdSource::Call => g.emit_input(&token_ids_name(bucket), &[b * bucket.rows]),
        IdSource::LastPhase => g.read_kept_ids(b),
    };
    g.location = "all".to_string();
    let pages = g.emit_numbers(TokenInput::PAGES, &[b, cache.pages_per_sequence]);
    let start = g.emit_numbers(TokenInput::START, &[b]);
    let frequencies = g.emit_weight(ROTARY_FREQUENCIES, &[m.rotary.columns / 2], "whole", 1);
    // Rows that bring no token have no experts.
    let last = m.experts.is_some().then(|| g.emit_numbers(TokenInput::LAST, &[b]));
    let at = TokenPlaces { pages, start, last, frequencies };
    g.location = "first".to_string();
    let table = g.emit_weight("model.embed_tokens.weight", &[m.extents.vocab, m.extents.width], "col", 1);
    let mut x = g.emit_op(Opcode::Embed, &[ids, table]);
    for i in 0..m.extents.layers {
        x = g.emit_block(i, x, at);
    }
    g.location = "last".to_string();
    if output == TokenOutput::Next {
        let last = last.unwrap_or_else(|| g.emit_numbers(TokenInput::LAST, &[b]));
        x = g.emit_op(Opcode::Embed, &[last, x]);
    }
    let x = g.emit_norm("model.norm", x, m.norm_eps);
    let head = if m.extents.tied_embedding { "model.embed_tokens" } else { "lm_head" };
    let logits = g.emit_linear(head, x, m.extents.vocab, ("col", 1), false, None);
    let (name, value) = match output {
        TokenOutput::Logits => (LOGITS, logits),
        TokenOutput::Next => {
            use TokenInput as In;
            let numbers = [In::DRAW, In::SEED, In::TEMPERATURE, In::TOP_K, In::TOP_P]
                .map(|name| (name, g.emit_numbers(name, &[b])));
            for (name, value) in numbers {
                g.builder.add_keyed(name, value);
            }
            let next = g.emit_op(Opcode::Sample, &[logits]);
            if phase.keeps_ids {
                g.keep_ids(b, next);
            }
            (NEXT_IDS, next)
        }
    };
    g.builder.set_attr("at", "last");
    g.builder.add_output(name, value);
    match g.builder.finish() {
        Ok(p) => p,
        Err(e) => panic!("a parsed language model violates a rule of the op table: {}", e[0].message),
    }
}

/// Where the rows of a call lie in their sequences and in the caches.
#[derive(Clone, Copy)]
struct TokenPlaces {
    pages: ValueId,
    start: ValueId,
    /// The last row of each sequence, in a model with experts.
    last: Option<ValueId>,
    frequencies: ValueId,
}

struct DecoderBuilder<'a> {
    builder: Builder,
    model: &'a DecoderModel,
    cache: PagedCache,
    /// Attribute `at` of the next ops.
    location: String,
}

impl DecoderBuilder<'_> {
    fn emit_block(&mut self, i: u64, x: ValueId, at: TokenPlaces) -> ValueId {
        self.location = format!("block.{i}");
        let n = format!("model.layers.{i}");
        let a = self.emit_norm(&format!("{n}.input_layernorm"), x, self.model.norm_eps);
        let o = match self.model.extents.attention {
            AttentionKind::Grouped { qkv_bias, out_bias, qk_norm, .. } => {
                self.emit_grouped_attention(i, a, at, (qkv_bias, out_bias, qk_norm))
            }
            AttentionKind::Latent { q_rank, kv_rank, nope, rope, v, .. } => {
                self.emit_latent_attention(i, a, at, &LatentExtents { q_rank, kv_rank, nope, rope, v })
            }
        };
        let x = self.emit_op(Opcode::Add, &[x, o]);
        let a = self.emit_norm(&format!("{n}.post_attention_layernorm"), x, self.model.norm_eps);
        let y = match &self.model.experts {
            Some(experts) if !experts.dense_layers.contains(&i) => self.emit_experts(&n, a, experts, at),
            _ => self.emit_dense(&format!("{n}.mlp"), a, self.model.extents.mlp.inner),
        };
        self.emit_op(Opcode::Add, &[x, y])
    }

    /// Emits an RMS norm over whole rows.
    fn emit_norm(&mut self, name: &str, x: ValueId, eps: f64) -> ValueId {
        let width = self.builder.type_of(x).shape[1];
        let w = self.emit_weight(&format!("{name}.weight"), &[width], "whole", 1);
        self.builder.set_attr("eps", eps);
        self.emit_op(Opcode::RmsNorm, &[x, w])
    }

    /// Emits act(x · wᵀ + bias). A strategy shards the weight by its `part` and `unit`.
    fn emit_linear(
        &mut self,
        name: &str,
        x: ValueId,
        out: u64,
        (part, unit): (&str, u64),
        has_bias: bool,
        act: Option<&str>,
    ) -> ValueId {
        let k = self.builder.type_of(x).shape[1];
        let w = self.emit_weight(&format!("{name}.weight"), &[out, k], part, unit);
        if has_bias {
            let bias_part = if part == "col" { "col" } else { "whole" };
            let b = self.emit_weight(&format!("{name}.bias"), &[out], bias_part, unit);
            self.builder.add_keyed("bias", b);
        }
        if let Some(act) = act {
            self.builder.set_attr("act", act);
        }
        self.emit_op(Opcode::Matmul, &[x, w])
    }

    fn emit_weight(&mut self, name: &str, shape: &[u64], part: &str, unit: u64) -> ValueId {
        self.builder.set_attr("at", self.location.as_str()).set_attr("part", part);
        if unit > 1 {
            self.builder.set_attr("unit", unit);
        }
        self.builder.set_label(name).add_weight(name, Type::new(DType::F32, shape))
    }

    fn emit_input(&mut self, name: &str, shape: &[u64]) -> ValueId {
        self.builder.set_attr("at", self.location.as_str());
        self.builder.set_label(name).add_input(name, Type::new(DType::F32, shape))
    }

    /// Writes the chosen ids to the ranks that embed them in the next phase.
    fn keep_ids(&mut self, sequences: u64, ids: ValueId) {
        let buffer = self.declare_kept_ids(sequences);
        self.builder.set_attr("at", "first");
        self.builder.write_buffer(buffer, ids);
    }

    fn read_kept_ids(&mut self, sequences: u64) -> ValueId {
        let buffer = self.declare_kept_ids(sequences);
        self.builder.set_attr("at", "first");
        self.builder.read_buffer(buffer)
    }

    fn declare_kept_ids(&mut self, sequences: u64) -> BufferId {
        self.builder.declare_buffer(KEPT_IDS, Type::new(DType::F32, [sequences]))
    }

    /// Emits numbers of the call, which are the same on every rank.
    fn emit_numbers(&mut self, name: &str, shape: &[u64]) -> ValueId {
        self.builder.set_attr("at", self.location.as_str());
        self.builder.set_label(name).add_call_scalar(name, Type::new(DType::F32, shape))
    }

    fn emit_op(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        self.builder.set_attr("at", self.location.as_str());
        self.builder.add_op(opcode, operands)
    }
}

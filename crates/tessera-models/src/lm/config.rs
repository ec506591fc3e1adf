//! Reads a language model's dims from the `config.json` of its release.

use std::fmt::Display;

use tessera_base::config::{ConfigReader, parse_json};
use tessera_base::{Code, Diagnostic, Diagnostics, closest_name, format_choices};

use super::{AttentionKind, ExpertConfig, LanguageModel, MlpConfig, NormKind};
use crate::codes::{T0430, T0431, T0432};
use crate::wan_config::checked_elements;

/// Maximum number of layers; a larger number is treated as a typo (T0431).
const LAYERS_MAX: u64 = 1024;

/// Keys of real configs that do not affect any counted shape.
const IGNORED: &[&str] = &[
    "_attn_implementation",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "ep_size",
    "gradient_checkpointing",
    "initializer_range",
    "layer_norm_epsilon",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "n_ctx",
    "n_group",
    "norm_topk_prob",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "reorder_and_upcast_attn",
    "return_dict",
    "rms_norm_eps",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "scoring_func",
    "seq_aux",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "topk_group",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "use_cache",
];

/// A config.json that was read.
pub(super) struct ParsedConfig {
    pub(super) model: LanguageModel,
    /// Name of the architecture, one of [`READERS`].
    pub(super) architecture: &'static str,
    /// The sliding window of all layers, if there is one.
    pub(super) window: Option<u64>,
}

type ReadFn = fn(&mut ArchitectureReader) -> LanguageModel;

/// Config readers by architecture name.
const READERS: &[(&str, ReadFn)] = &[
    ("LlamaForCausalLM", read_llama),
    ("MistralForCausalLM", read_mistral),
    ("Qwen2ForCausalLM", read_qwen2),
    ("Qwen3ForCausalLM", read_qwen3),
    ("MixtralForCausalLM", read_mixtral),
    ("Qwen3MoeForCausalLM", read_qwen3_moe),
    ("DeepseekV3ForCausalLM", read_deepseek_v3),
    ("GPT2LMHeadModel", read_gpt2),
    ("SrMoeForCausalLM", read_sr_moe),
];

impl LanguageModel {
    /// Parses `config.json`. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// Returns one diagnostic per problem.
    pub fn parse(file: &str, text: &str) -> Result<LanguageModel, Diagnostics> {
        LanguageModel::parse_config(file, text, false).map(|config| config.model)
    }

    /// As [`LanguageModel::parse`], with what a run needs besides. Estimates have no sliding windows, so without
    /// `accepts_window` a model that has one is rejected.
    pub(super) fn parse_config(
        file: &str,
        text: &str,
        accepts_window: bool,
    ) -> Result<ParsedConfig, Diagnostics> {
        let mut f = ConfigReader::new(file, "", parse_json(file, text)?);
        f.ignore_keys(IGNORED);
        let named = f.take_value("architectures");
        let name = f.take_value("_name_or_path").and_then(|v| v.as_str().map(str::to_string));
        if !f.diagnostics.is_empty() {
            return Err(f.diagnostics);
        }
        let found = named.as_ref().and_then(|v| match v.as_array() {
            Some(list) => list.iter().map(|x| x.as_str()).collect::<Option<Vec<_>>>()?.try_into().ok(),
            None => v.as_str().map(|s| [s]),
        });
        let (architecture, read) = match found {
            Some([name]) => find_architecture(file, name)?,
            None => {
                let found = named.map_or("missing".to_string(), |v| v.to_string());
                return Err(vec![unknown_architecture(
                    file,
                    format!("`architectures` is {found}, expected one name"),
                    None,
                )]);
            }
        };
        let mut r = ArchitectureReader { config: f, file, accepts_window, window: None };
        let mut model = read(&mut r);
        let window = r.window;
        model.name = name.filter(|n| !n.is_empty()).unwrap_or_else(|| architecture.to_string());
        let mut ds = r.config.finish();
        if ds.is_empty() {
            ds = find_contradictions(file, &model);
        }
        if ds.is_empty() { Ok(ParsedConfig { model, architecture, window }) } else { Err(ds) }
    }
}

fn find_architecture(file: &str, name: &str) -> Result<(&'static str, ReadFn), Diagnostics> {
    READERS.iter().find(|(n, _)| *n == name).copied().ok_or_else(|| {
        let near = closest_name(name, READERS.iter().map(|(n, _)| *n));
        vec![unknown_architecture(file, format!("`architectures` names {name}"), near)]
    })
}

fn unknown_architecture(file: &str, message: String, near: Option<&str>) -> Diagnostic {
    let names: Vec<&str> = READERS.iter().map(|(n, _)| *n).collect();
    let hint = match near {
        Some(n) => format!("did you mean `{n}`?"),
        None => format!("known: {}", names.join(", ")),
    };
    Diagnostic::error(&T0430, message).with_label(file, "architectures").with_hint(hint)
}

/// Reads the keys of one `config.json` and records a diagnostic for each rejected value.
struct ArchitectureReader<'a> {
    config: ConfigReader<'a>,
    file: &'a str,
    accepts_window: bool,
    /// The sliding window of all layers, once it was read.
    window: Option<u64>,
}

impl ArchitectureReader<'_> {
    fn required_count(&mut self, key: &'static str) -> u64 {
        self.config.read_count(key, None)
    }

    /// Reads a count that may be absent or null.
    fn optional_count(&mut self, key: &'static str) -> Option<u64> {
        let v = self.config.take_value(key).filter(|v| !v.is_null())?;
        let n = v.as_u64().filter(|n| (1..1 << 32).contains(n));
        if n.is_none() {
            self.reject_value(&T0432, key, &v, "an integer from 1 to 2^32, or null");
        }
        n
    }

    /// Reads a count that may be 0, absent or null; returns 0 for the last two.
    fn count_or_none(&mut self, key: &'static str) -> u64 {
        let Some(v) = self.config.take_value(key).filter(|v| !v.is_null()) else { return 0 };
        let n = v.as_u64().filter(|n| *n < 1 << 32);
        if n.is_none() {
            self.reject_value(&T0432, key, &v, "an integer from 0 to 2^32");
        }
        n.unwrap_or(0)
    }

    /// Checks that a key is absent or has one of these JSON values: any other value describes
    /// another model.
    fn accept_only(&mut self, key: &'static str, accepted: &[&str]) {
        if let Some(found) = self.config.take_value(key)
            && !accepted.contains(&found.to_string().as_str())
        {
            self.reject_value(&T0432, key, &found, &format_choices(accepted));
        }
    }

    /// Reads a dropout probability and returns whether it is above 0.
    fn read_dropout(&mut self, key: &'static str, default: f64) -> bool {
        let share = self.config.read_number(key, Some(default));
        if !(0.0..1.0).contains(&share) {
            self.reject_value(&T0431, key, &share, "a probability from 0 to less than 1");
        }
        share > 0.0
    }

    fn reject_value(&mut self, code: &'static Code, key: &str, found: &dyn Display, want: &str) {
        let message = format!("`{key}` is {found}: this model variant is not supported");
        let d = Diagnostic::error(code, message).with_label(self.file, format!("found {found}"));
        self.config.diagnostics.push(d.with_hint(format!("accepted: {want}")));
    }

    /// Reads the keys that most models share: a gated feed-forward and grouped-query attention.
    fn read_common(&mut self) -> LanguageModel {
        let width = self.required_count("hidden_size");
        let heads = self.required_count("num_attention_heads");
        let kv_heads = self.optional_count("num_key_value_heads").unwrap_or(heads);
        let head_dim = self.optional_count("head_dim").unwrap_or_else(|| self.head_width(width, heads));
        self.accept_only("hidden_act", &["\"silu\""]);
        LanguageModel {
            name: String::new(),
            width,
            layers: self.required_count("num_hidden_layers"),
            vocab: self.required_count("vocab_size"),
            tied_embedding: self.config.read_flag("tie_word_embeddings", false),
            learned_positions: 0,
            norm: NormKind::Rms,
            attention: AttentionKind::Grouped {
                heads,
                kv_heads,
                head_dim,
                qkv_bias: false,
                out_bias: false,
                qk_norm: false,
            },
            mlp: MlpConfig { inner: self.required_count("intermediate_size"), gated: true, bias: false },
            experts: None,
            dropout: false,
            scores_dropout: self.read_dropout("attention_dropout", 0.0),
        }
    }

    fn head_width(&mut self, width: u64, heads: u64) -> u64 {
        if !width.is_multiple_of(heads) {
            let message =
                format!("width {width} is not a multiple of {heads} heads, and no head_dim is given");
            self.config
                .diagnostics
                .push(Diagnostic::error(&T0431, message).with_label(self.file, "these keys"));
        }
        (width / heads).max(1)
    }

    /// Reads `attention_bias`, which adds biases to the query, key, value and output matmuls.
    fn read_attention_bias(&mut self, m: &mut LanguageModel) {
        let bias = self.config.read_flag("attention_bias", false);
        if let AttentionKind::Grouped { qkv_bias, out_bias, .. } = &mut m.attention {
            (*qkv_bias, *out_bias) = (bias, bias);
        }
    }
}

fn read_llama(r: &mut ArchitectureReader) -> LanguageModel {
    let mut m = r.read_common();
    r.read_attention_bias(&mut m);
    m.mlp.bias = r.config.read_flag("mlp_bias", false);
    m
}

fn read_mistral(r: &mut ArchitectureReader) -> LanguageModel {
    match r.accepts_window {
        true => r.window = r.optional_count("sliding_window"),
        false => r.accept_only("sliding_window", &["null"]),
    }
    r.read_common()
}

fn read_qwen2(r: &mut ArchitectureReader) -> LanguageModel {
    let mut m = r.read_common();
    reject_sliding_window(r);
    if let AttentionKind::Grouped { qkv_bias, .. } = &mut m.attention {
        *qkv_bias = true;
    }
    m
}

fn read_qwen3(r: &mut ArchitectureReader) -> LanguageModel {
    let mut m = r.read_common();
    reject_sliding_window(r);
    r.read_attention_bias(&mut m);
    if let AttentionKind::Grouped { qk_norm, .. } = &mut m.attention {
        *qk_norm = true;
    }
    m
}

/// Checks that a configured sliding window is not used.
fn reject_sliding_window(r: &mut ArchitectureReader) {
    if r.config.read_flag("use_sliding_window", false) {
        r.reject_value(&T0432, "use_sliding_window", &true, "false");
    }
    r.config.ignore_keys(&["sliding_window"]);
    let kinds = r.config.take_value("layer_types");
    let other =
        kinds.as_ref().and_then(|k| k.as_array()?.iter().find(|k| k.as_str() != Some("full_attention")));
    if let Some(other) = other {
        r.reject_value(&T0432, "layer_types", other, "\"full_attention\" for every layer");
    }
}

fn read_mixtral(r: &mut ArchitectureReader) -> LanguageModel {
    let mut m = read_mistral(r);
    m.experts = Some(ExpertConfig {
        count: r.required_count("num_local_experts"),
        top_k: r.required_count("num_experts_per_tok"),
        inner: m.mlp.inner,
        gated: true,
        shared_inner: 0,
        router_bias: false,
        dense_layers: Vec::new(),
    });
    m
}

fn read_qwen3_moe(r: &mut ArchitectureReader) -> LanguageModel {
    let mut m = read_qwen3(r);
    let step = r.config.read_count("decoder_sparse_step", Some(1));
    let listed = r.config.read_numbers("mlp_only_layers", &[]);
    r.accept_only("shared_expert_intermediate_size", &["null", "0"]);
    let dense = |layer: &u64| !(layer + 1).is_multiple_of(step) || listed.contains(&(*layer as f64));
    // Newer releases of transformers write the name that Mixtral has.
    let count = match r.optional_count("num_local_experts") {
        Some(count) => {
            r.config.ignore_keys(&["num_experts"]);
            count
        }
        None => r.required_count("num_experts"),
    };
    m.experts = Some(ExpertConfig {
        count,
        top_k: r.required_count("num_experts_per_tok"),
        inner: r.required_count("moe_intermediate_size"),
        gated: true,
        shared_inner: 0,
        router_bias: false,
        dense_layers: (0..m.layers.min(LAYERS_MAX)).filter(dense).collect(),
    });
    m
}

fn read_deepseek_v3(r: &mut ArchitectureReader) -> LanguageModel {
    // The common head width key is meaningless here: the parts of a head have their own widths.
    let nope = r.required_count("qk_nope_head_dim");
    let rope = r.required_count("qk_rope_head_dim");
    r.config.ignore_keys(&["qk_head_dim", "head_dim", "num_key_value_heads"]);
    let heads = r.required_count("num_attention_heads");
    r.accept_only("attention_bias", &["false"]);
    r.accept_only("moe_layer_freq", &["1"]);
    r.accept_only("hidden_act", &["\"silu\""]);
    let layers = r.required_count("num_hidden_layers");
    let methods = ["noaux_tc", "greedy", "group_limited_greedy"];
    let corrected = r.config.read_choice("topk_method", &methods, "noaux_tc") == "noaux_tc";
    let inner = r.required_count("moe_intermediate_size");
    LanguageModel {
        name: String::new(),
        width: r.required_count("hidden_size"),
        layers,
        vocab: r.required_count("vocab_size"),
        tied_embedding: r.config.read_flag("tie_word_embeddings", false),
        learned_positions: 0,
        norm: NormKind::Rms,
        attention: AttentionKind::Latent {
            heads,
            q_rank: r.optional_count("q_lora_rank"),
            kv_rank: r.required_count("kv_lora_rank"),
            nope,
            rope,
            v: r.required_count("v_head_dim"),
        },
        mlp: MlpConfig { inner: r.required_count("intermediate_size"), gated: true, bias: false },
        experts: Some(ExpertConfig {
            count: r.required_count("n_routed_experts"),
            top_k: r.required_count("num_experts_per_tok"),
            inner,
            gated: true,
            shared_inner: r.count_or_none("n_shared_experts").saturating_mul(inner),
            router_bias: corrected,
            dense_layers: (0..r.count_or_none("first_k_dense_replace").min(layers).min(LAYERS_MAX)).collect(),
        }),
        dropout: false,
        scores_dropout: r.read_dropout("attention_dropout", 0.0),
    }
}

fn read_gpt2(r: &mut ArchitectureReader) -> LanguageModel {
    let width = r.required_count("n_embd");
    let heads = r.required_count("n_head");
    let head_dim = r.head_width(width, heads);
    r.accept_only("activation_function", &["\"gelu\"", "\"gelu_new\"", "\"gelu_pytorch_tanh\""]);
    r.accept_only("add_cross_attention", &["false"]);
    let dropout = [r.read_dropout("resid_pdrop", 0.1), r.read_dropout("embd_pdrop", 0.1)];
    LanguageModel {
        name: String::new(),
        width,
        layers: r.required_count("n_layer"),
        vocab: r.required_count("vocab_size"),
        tied_embedding: r.config.read_flag("tie_word_embeddings", true),
        learned_positions: r.required_count("n_positions"),
        norm: NormKind::Layer,
        attention: AttentionKind::Grouped {
            heads,
            kv_heads: heads,
            head_dim,
            qkv_bias: true,
            out_bias: true,
            qk_norm: false,
        },
        mlp: MlpConfig { inner: r.optional_count("n_inner").unwrap_or(4 * width), gated: false, bias: true },
        experts: None,
        dropout: dropout.contains(&true),
        scores_dropout: r.read_dropout("attn_pdrop", 0.1),
    }
}

/// Reads a model whose layers have a dense feed-forward beside their experts, without gates or
/// biases.
fn read_sr_moe(r: &mut ArchitectureReader) -> LanguageModel {
    let width = r.required_count("hidden_size");
    let heads = r.required_count("num_attention_heads");
    r.accept_only("hidden_act", &["\"gelu\""]);
    let head_dim = r.optional_count("head_dim").unwrap_or_else(|| r.head_width(width, heads));
    let shared = r.required_count("intermediate_size");
    LanguageModel {
        name: String::new(),
        width,
        layers: r.required_count("num_hidden_layers"),
        vocab: r.required_count("vocab_size"),
        tied_embedding: r.config.read_flag("tie_word_embeddings", false),
        learned_positions: 0,
        norm: NormKind::Rms,
        attention: AttentionKind::Grouped {
            heads,
            kv_heads: r.optional_count("num_key_value_heads").unwrap_or(heads),
            head_dim,
            qkv_bias: false,
            out_bias: false,
            qk_norm: false,
        },
        mlp: MlpConfig { inner: shared, gated: false, bias: false },
        experts: Some(ExpertConfig {
            count: r.required_count("num_experts"),
            top_k: r.required_count("num_experts_per_tok"),
            inner: r.required_count("moe_intermediate_size"),
            gated: false,
            shared_inner: shared,
            router_bias: false,
            dense_layers: Vec::new(),
        }),
        dropout: false,
        scores_dropout: r.read_dropout("attention_dropout", 0.0),
    }
}

fn find_contradictions(file: &str, m: &LanguageModel) -> Diagnostics {
    let mut ds = Vec::new();
    let mut refuse =
        |message: String| ds.push(Diagnostic::error(&T0431, message).with_label(file, "these keys"));
    if m.layers > LAYERS_MAX {
        refuse(format!("{} layers exceed the limit of {LAYERS_MAX}", m.layers));
    }
    let d = m.width;
    let mut tensors: Vec<(&str, Vec<u64>)> = vec![
        ("the embedding, vocabulary · width", vec![m.vocab, d]),
        ("the positions, positions · width", vec![m.learned_positions, d]),
        ("a feed-forward, matrices · inner · width", vec![3, m.mlp.inner, d]),
    ];
    match m.attention {
        AttentionKind::Grouped { heads, kv_heads, head_dim, .. } => {
            if !heads.is_multiple_of(kv_heads) {
                refuse(format!("{heads} query heads are not a multiple of {kv_heads} KV heads"));
            }
            tensors.push((
                "queries, keys and values, 3 · heads · head_dim · width",
                vec![3, heads, head_dim, d],
            ));
        }
        AttentionKind::Latent { heads, q_rank, kv_rank, nope, rope, v } => {
            let head = nope.max(v) * 2 + rope;
            let rank = q_rank.unwrap_or(1).max(kv_rank).max(d);
            tensors.push(("a matmul of latent attention, heads · head · width", vec![heads, head, rank]));
        }
    }
    if let Some(e) = &m.experts {
        if e.top_k > e.count {
            refuse(format!("a token needs {} experts of {}", e.top_k, e.count));
        }
        if e.dense_layers.len() as u64 >= m.layers {
            refuse(format!(
                "{} of {} layers are dense: no layer has experts",
                e.dense_layers.len(),
                m.layers
            ));
        }
        tensors
            .push(("experts of a layer, experts · matrices · inner · width", vec![e.count, 3, e.inner, d]));
        tensors.push(("shared experts, matrices · inner · width", vec![3, e.shared_inner, d]));
    }
    for (what, extents) in tensors {
        if checked_elements(&extents).is_none() {
            refuse(format!("{what} = {extents:?} has more than 2^40 elements"));
        }
    }
    ds
}

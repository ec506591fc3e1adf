//! A language model's dims, from the `config.json` of its own release.

use std::fmt::Display;

use tessera_base::fields::{Fields, json};
use tessera_base::{Code, Diagnostic, Diagnostics, choices, nearest};

use super::{Attention, Experts, LanguageModel, Mlp, Norm};
use crate::config::elements;

/// Unknown architecture.
pub static T0430: Code = Code {
    id: "T0430",
    title: "architecture of a language model is not known",
    page: "A config.json names its network under `architectures`. The planner counts an op row for every part of a \
layer, and can do so only for networks whose parts it knows; the message lists them.\n\n\
Many releases are one of these under another name. If yours is, put the known name into a copy of the config and \
compare the parameter count that `tessera plan` prints with the published one before you believe the rest.",
};

/// Dims that contradict each other.
pub static T0431: Code = Code {
    id: "T0431",
    title: "dims of a language model contradict each other",
    page: "A layer needs: query heads a whole multiple of the heads of keys and values; a head width, given or as \
hidden_size over the heads; no more experts per token than there are experts. The message shows the numbers.\n\n\
A weight of more than 2^40 numbers, or more than 1024 layers, is taken for a slip.",
};

/// A variant that is not counted.
pub static T0432: Code = Code {
    id: "T0432",
    title: "config key names another network",
    page: "The key changes what a layer computes or how far it looks (a sliding window, another activation, experts in \
some layers only), and its value is not one that the rows describe. An estimate that ignored it would be of another \
model, so it is refused. The hint lists what is accepted.\n\n\
Keys that do not change any shape, such as rotary bases, token ids or the precision of a checkpoint, are ignored.",
};

/// Most layers.
const LAYERS_MAX: u64 = 1024;

/// Keys of real configs that change no shape that is counted here.
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

type Reader = fn(&mut Reading) -> LanguageModel;

/// Architectures, by the name under which configs know them.
const READERS: &[(&str, Reader)] = &[
    ("LlamaForCausalLM", llama),
    ("MistralForCausalLM", mistral),
    ("Qwen2ForCausalLM", qwen2),
    ("Qwen3ForCausalLM", qwen3),
    ("MixtralForCausalLM", mixtral),
    ("Qwen3MoeForCausalLM", qwen3_moe),
    ("DeepseekV3ForCausalLM", deepseek_v3),
    ("GPT2LMHeadModel", gpt2),
    ("SrMoeForCausalLM", sr_moe),
];

impl LanguageModel {
    /// Reads `config.json`. `file` is only named in diagnostics.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &str) -> Result<LanguageModel, Diagnostics> {
        let mut f = Fields::new(file, "", json(file, text)?);
        f.ignore(IGNORED);
        let named = f.take("architectures");
        let name = f.take("_name_or_path").and_then(|v| v.as_str().map(str::to_string));
        if !f.diagnostics.is_empty() {
            return Err(f.diagnostics);
        }
        let found = named.as_ref().and_then(|v| match v.as_array() {
            Some(list) => list.iter().map(|x| x.as_str()).collect::<Option<Vec<_>>>()?.try_into().ok(),
            None => v.as_str().map(|s| [s]),
        });
        let (architecture, read) = match found {
            Some([name]) => architecture(file, name)?,
            None => {
                let found = named.map_or("missing".to_string(), |v| v.to_string());
                return Err(vec![unknown(file, format!("`architectures` is {found}, not one name"), None)]);
            }
        };
        let mut r = Reading { f, file };
        let mut model = read(&mut r);
        model.name = name.filter(|n| !n.is_empty()).unwrap_or_else(|| architecture.to_string());
        let mut ds = r.f.finish();
        if ds.is_empty() {
            ds = contradictions(file, &model);
        }
        if ds.is_empty() { Ok(model) } else { Err(ds) }
    }
}

fn architecture(file: &str, name: &str) -> Result<(&'static str, Reader), Diagnostics> {
    READERS.iter().find(|(n, _)| *n == name).copied().ok_or_else(|| {
        let near = nearest(name, READERS.iter().map(|(n, _)| *n));
        vec![unknown(file, format!("`architectures` names {name}"), near)]
    })
}

fn unknown(file: &str, message: String, near: Option<&str>) -> Diagnostic {
    let names: Vec<&str> = READERS.iter().map(|(n, _)| *n).collect();
    let hint = match near {
        Some(n) => format!("did you mean `{n}`?"),
        None => format!("known: {}", names.join(", ")),
    };
    Diagnostic::error(&T0430, message).at(file, "architectures").hint(hint)
}

/// A config while it is read.
struct Reading<'a> {
    f: Fields<'a>,
    file: &'a str,
}

impl Reading<'_> {
    fn count(&mut self, key: &'static str) -> u64 {
        self.f.count(key, None)
    }

    /// A count that may be absent or null.
    fn optional(&mut self, key: &'static str) -> Option<u64> {
        let v = self.f.take(key).filter(|v| !v.is_null())?;
        let n = v.as_u64().filter(|n| (1..1 << 32).contains(n));
        if n.is_none() {
            self.refuse(&T0432, key, &v, "a whole number from 1 to 2^32, or null");
        }
        n
    }

    /// A count that may be 0 or absent.
    fn count_or_none(&mut self, key: &'static str) -> u64 {
        let Some(v) = self.f.take(key).filter(|v| !v.is_null()) else { return 0 };
        let n = v.as_u64().filter(|n| *n < 1 << 32);
        if n.is_none() {
            self.refuse(&T0432, key, &v, "a whole number from 0 to 2^32");
        }
        n.unwrap_or(0)
    }

    /// A key that must be absent or have one of these values, as JSON: any other is another network.
    fn only(&mut self, key: &'static str, accepted: &[&str]) {
        if let Some(found) = self.f.take(key)
            && !accepted.contains(&found.to_string().as_str())
        {
            self.refuse(&T0432, key, &found, &choices(accepted));
        }
    }

    /// Whether a share of dropout is above none.
    fn dropout(&mut self, key: &'static str, default: f64) -> bool {
        let share = self.f.number(key, Some(default));
        if !(0.0..1.0).contains(&share) {
            self.refuse(&T0431, key, &share, "a share from 0 to less than 1");
        }
        share > 0.0
    }

    fn refuse(&mut self, code: &'static Code, key: &str, found: &dyn Display, want: &str) {
        let message = format!("`{key}` is {found}: not a network that is counted");
        let d = Diagnostic::error(code, message).at(self.file, format!("found {found}"));
        self.f.diagnostics.push(d.hint(format!("accepted: {want}")));
    }

    /// What the configs of most models have in common: a gated feed-forward and grouped heads.
    fn common(&mut self) -> LanguageModel {
        let width = self.count("hidden_size");
        let heads = self.count("num_attention_heads");
        let kv_heads = self.optional("num_key_value_heads").unwrap_or(heads);
        let head_dim = self.optional("head_dim").unwrap_or_else(|| self.quotient(width, heads));
        self.only("hidden_act", &["\"silu\""]);
        LanguageModel {
            name: String::new(),
            width,
            layers: self.count("num_hidden_layers"),
            vocab: self.count("vocab_size"),
            tied: self.f.flag("tie_word_embeddings", false),
            positions: 0,
            norm: Norm::Rms,
            attention: Attention::Grouped {
                heads,
                kv_heads,
                head_dim,
                qkv_bias: false,
                out_bias: false,
                qk_norm: false,
            },
            mlp: Mlp { inner: self.count("intermediate_size"), gated: true, bias: false },
            experts: None,
            dropout: false,
            scores_dropout: self.dropout("attention_dropout", 0.0),
        }
    }

    fn quotient(&mut self, width: u64, heads: u64) -> u64 {
        if !width.is_multiple_of(heads) {
            let message =
                format!("width {width} is not a whole number of {heads} heads, and no head_dim is given");
            self.f.diagnostics.push(Diagnostic::error(&T0431, message).at(self.file, "these keys"));
        }
        (width / heads).max(1)
    }

    /// `attention_bias`, which adds biases to all four products.
    fn attention_bias(&mut self, m: &mut LanguageModel) {
        let bias = self.f.flag("attention_bias", false);
        if let Attention::Grouped { qkv_bias, out_bias, .. } = &mut m.attention {
            (*qkv_bias, *out_bias) = (bias, bias);
        }
    }
}

fn llama(r: &mut Reading) -> LanguageModel {
    let mut m = r.common();
    r.attention_bias(&mut m);
    m.mlp.bias = r.f.flag("mlp_bias", false);
    m
}

fn mistral(r: &mut Reading) -> LanguageModel {
    r.only("sliding_window", &["null"]);
    r.common()
}

fn qwen2(r: &mut Reading) -> LanguageModel {
    let mut m = r.common();
    no_window(r);
    if let Attention::Grouped { qkv_bias, .. } = &mut m.attention {
        *qkv_bias = true;
    }
    m
}

fn qwen3(r: &mut Reading) -> LanguageModel {
    let mut m = r.common();
    no_window(r);
    r.attention_bias(&mut m);
    if let Attention::Grouped { qk_norm, .. } = &mut m.attention {
        *qk_norm = true;
    }
    m
}

/// A window that is given and not used.
fn no_window(r: &mut Reading) {
    if r.f.flag("use_sliding_window", false) {
        r.refuse(&T0432, "use_sliding_window", &true, "false");
    }
    r.f.ignore(&["sliding_window"]);
    let kinds = r.f.take("layer_types");
    let other =
        kinds.as_ref().and_then(|k| k.as_array()?.iter().find(|k| k.as_str() != Some("full_attention")));
    if let Some(other) = other {
        r.refuse(&T0432, "layer_types", other, "\"full_attention\" in every place");
    }
}

fn mixtral(r: &mut Reading) -> LanguageModel {
    let mut m = mistral(r);
    m.experts = Some(Experts {
        count: r.count("num_local_experts"),
        top_k: r.count("num_experts_per_tok"),
        inner: m.mlp.inner,
        gated: true,
        shared: 0,
        router_bias: false,
        dense: Vec::new(),
    });
    m
}

fn qwen3_moe(r: &mut Reading) -> LanguageModel {
    let mut m = qwen3(r);
    let step = r.f.count("decoder_sparse_step", Some(1));
    let listed = r.f.numbers("mlp_only_layers", &[]);
    r.only("shared_expert_intermediate_size", &["null", "0"]);
    let dense = |layer: &u64| !(layer + 1).is_multiple_of(step) || listed.contains(&(*layer as f64));
    m.experts = Some(Experts {
        count: r.count("num_experts"),
        top_k: r.count("num_experts_per_tok"),
        inner: r.count("moe_intermediate_size"),
        gated: true,
        shared: 0,
        router_bias: false,
        dense: (0..m.layers.min(LAYERS_MAX)).filter(dense).collect(),
    });
    m
}

fn deepseek_v3(r: &mut Reading) -> LanguageModel {
    // The head width of the common keys has no meaning here: parts of a head have their own.
    let nope = r.count("qk_nope_head_dim");
    let rope = r.count("qk_rope_head_dim");
    r.f.ignore(&["qk_head_dim", "head_dim", "num_key_value_heads"]);
    let heads = r.count("num_attention_heads");
    r.only("attention_bias", &["false"]);
    r.only("moe_layer_freq", &["1"]);
    r.only("hidden_act", &["\"silu\""]);
    let layers = r.count("num_hidden_layers");
    let methods = ["noaux_tc", "greedy", "group_limited_greedy"];
    let corrected = r.f.word("topk_method", &methods, "noaux_tc") == "noaux_tc";
    let inner = r.count("moe_intermediate_size");
    LanguageModel {
        name: String::new(),
        width: r.count("hidden_size"),
        layers,
        vocab: r.count("vocab_size"),
        tied: r.f.flag("tie_word_embeddings", false),
        positions: 0,
        norm: Norm::Rms,
        attention: Attention::Latent {
            heads,
            q_rank: r.optional("q_lora_rank"),
            kv_rank: r.count("kv_lora_rank"),
            nope,
            rope,
            v: r.count("v_head_dim"),
        },
        mlp: Mlp { inner: r.count("intermediate_size"), gated: true, bias: false },
        experts: Some(Experts {
            count: r.count("n_routed_experts"),
            top_k: r.count("num_experts_per_tok"),
            inner,
            gated: true,
            shared: r.count_or_none("n_shared_experts").saturating_mul(inner),
            router_bias: corrected,
            dense: (0..r.count_or_none("first_k_dense_replace").min(layers).min(LAYERS_MAX)).collect(),
        }),
        dropout: false,
        scores_dropout: r.dropout("attention_dropout", 0.0),
    }
}

fn gpt2(r: &mut Reading) -> LanguageModel {
    let width = r.count("n_embd");
    let heads = r.count("n_head");
    let head_dim = r.quotient(width, heads);
    r.only("activation_function", &["\"gelu\"", "\"gelu_new\"", "\"gelu_pytorch_tanh\""]);
    r.only("add_cross_attention", &["false"]);
    let dropout = [r.dropout("resid_pdrop", 0.1), r.dropout("embd_pdrop", 0.1)];
    LanguageModel {
        name: String::new(),
        width,
        layers: r.count("n_layer"),
        vocab: r.count("vocab_size"),
        tied: r.f.flag("tie_word_embeddings", true),
        positions: r.count("n_positions"),
        norm: Norm::Layer,
        attention: Attention::Grouped {
            heads,
            kv_heads: heads,
            head_dim,
            qkv_bias: true,
            out_bias: true,
            qk_norm: false,
        },
        mlp: Mlp { inner: r.optional("n_inner").unwrap_or(4 * width), gated: false, bias: true },
        experts: None,
        dropout: dropout.contains(&true),
        scores_dropout: r.dropout("attn_pdrop", 0.1),
    }
}

/// A layer whose feed-forward stands beside its experts, without gates or biases.
fn sr_moe(r: &mut Reading) -> LanguageModel {
    let width = r.count("hidden_size");
    let heads = r.count("num_attention_heads");
    r.only("hidden_act", &["\"gelu\""]);
    let head_dim = r.optional("head_dim").unwrap_or_else(|| r.quotient(width, heads));
    let shared = r.count("intermediate_size");
    LanguageModel {
        name: String::new(),
        width,
        layers: r.count("num_hidden_layers"),
        vocab: r.count("vocab_size"),
        tied: r.f.flag("tie_word_embeddings", false),
        positions: 0,
        norm: Norm::Rms,
        attention: Attention::Grouped {
            heads,
            kv_heads: r.optional("num_key_value_heads").unwrap_or(heads),
            head_dim,
            qkv_bias: false,
            out_bias: false,
            qk_norm: false,
        },
        mlp: Mlp { inner: shared, gated: false, bias: false },
        experts: Some(Experts {
            count: r.count("num_experts"),
            top_k: r.count("num_experts_per_tok"),
            inner: r.count("moe_intermediate_size"),
            gated: false,
            shared,
            router_bias: false,
            dense: Vec::new(),
        }),
        dropout: false,
        scores_dropout: r.dropout("attention_dropout", 0.0),
    }
}

fn contradictions(file: &str, m: &LanguageModel) -> Diagnostics {
    let mut ds = Vec::new();
    let mut refuse = |message: String| ds.push(Diagnostic::error(&T0431, message).at(file, "these keys"));
    if m.layers > LAYERS_MAX {
        refuse(format!("{} layers, at most {LAYERS_MAX} are planned for", m.layers));
    }
    let d = m.width;
    let mut tensors: Vec<(&str, Vec<u64>)> = vec![
        ("the embedding, words · width", vec![m.vocab, d]),
        ("the positions, positions · width", vec![m.positions, d]),
        ("a feed-forward, matrices · inner · width", vec![3, m.mlp.inner, d]),
    ];
    match m.attention {
        Attention::Grouped { heads, kv_heads, head_dim, .. } => {
            if !heads.is_multiple_of(kv_heads) {
                refuse(format!(
                    "{heads} query heads are not a whole multiple of {kv_heads} heads of keys and values"
                ));
            }
            tensors.push((
                "queries, keys and values, 3 · heads · head_dim · width",
                vec![3, heads, head_dim, d],
            ));
        }
        Attention::Latent { heads, q_rank, kv_rank, nope, rope, v } => {
            let head = nope.max(v) * 2 + rope;
            let rank = q_rank.unwrap_or(1).max(kv_rank).max(d);
            tensors.push(("a product of latent attention, heads · head · width", vec![heads, head, rank]));
        }
    }
    if let Some(e) = &m.experts {
        if e.top_k > e.count {
            refuse(format!("a token asks for {} experts of {}", e.top_k, e.count));
        }
        if e.dense.len() as u64 >= m.layers {
            refuse(format!("{} of {} layers are dense: none is left for experts", e.dense.len(), m.layers));
        }
        tensors
            .push(("experts of a layer, experts · matrices · inner · width", vec![e.count, 3, e.inner, d]));
        tensors.push(("shared experts, matrices · inner · width", vec![3, e.shared, d]));
    }
    for (what, extents) in tensors {
        if elements(&extents).is_none() {
            refuse(format!("{what} = {extents:?} has more than 2^40 numbers"));
        }
    }
    ds
}

//! The language models that run: what their programs need beside the extents.

use serde_json::Value;
use tessera_base::config::{ConfigReader, parse_json};
use tessera_base::{Diagnostic, Diagnostics};

use super::config::ParsedConfig;
use super::rotary::{RotaryConfig, read_rotary};
use super::{AttentionKind, LanguageModel, NormKind};
use crate::codes::{T0431, T0433};

/// A decoder-only language model that runs: grouped-query or latent attention with rotary positions, RMS norms, and
/// gated feed-forward layers.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderModel {
    /// The whole config as JSON with sorted keys, from which the same model can be parsed again.
    pub config: String,
    /// The extents that an estimate needs too.
    pub extents: LanguageModel,
    /// Number of query heads.
    pub heads: u64,
    /// Number of heads of the KV caches: 1 for latent attention.
    pub kv_heads: u64,
    /// Columns of a head of the KV caches: those of a latent and of the rotated part for latent attention.
    pub head_dim: u64,
    /// Term of the RMS norms that keeps their divisor above 0.
    pub norm_eps: f64,
    /// How positions rotate queries and keys.
    pub rotary: RotaryConfig,
    /// The layers with experts, if there are any.
    pub experts: Option<ExpertLayers>,
    /// Last positions that a token attends to; `None` for all.
    pub window: Option<u64>,
    /// Largest number of positions of a sequence.
    pub max_positions: u64,
    /// Ids that end a text.
    pub end_ids: Vec<u32>,
    /// Layers behind the last one that a checkpoint may hold, for the prediction of further tokens. No program
    /// here computes them.
    pub prediction_layers: u64,
}

/// The layers whose feed-forward part is a choice of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertLayers {
    /// Experts of a layer.
    pub count: u64,
    /// Experts that each token is sent to.
    pub top_k: u64,
    /// Inner width of an expert.
    pub inner: u64,
    /// Inner width of the experts that every token passes through; 0 for none.
    pub shared_inner: u64,
    /// How experts are chosen and weighted.
    pub gate: ExpertGate,
    /// Layers without experts, ascending.
    pub dense_layers: Vec<u64>,
    /// Names of the tensors.
    pub names: ExpertNames,
}

/// How the logits of a router become a choice of experts and their weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertGate {
    /// Whether scores are sigmoids of the logits, and not their softmax.
    pub sigmoid: bool,
    /// Groups of consecutive experts.
    pub groups: u64,
    /// Groups whose experts a token may choose.
    pub keep_groups: u64,
    /// Whether the weights of a token's experts add up to 1, before `scale`.
    pub renormalise: bool,
    /// Factor of the weights.
    pub scale: f64,
}

/// Names of the tensors of experts, behind that of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertNames {
    /// Name of the matrix that scores the experts.
    pub router: &'static str,
    /// Name of the correction of the choice behind that of the router, if it has one.
    pub correction: Option<&'static str>,
    /// Name of the list of experts, in which each has its number as a name.
    pub experts: &'static str,
    /// Names of the gate, up and down matrices of an expert.
    pub parts: [&'static str; 3],
}

impl DecoderModel {
    /// Parses the `config.json` of a model that is to run. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// The errors of [`LanguageModel::parse`], or T0433 for each property that no program here computes.
    pub fn parse(file: &str, text: &str) -> Result<DecoderModel, Diagnostics> {
        let ParsedConfig { model: extents, architecture, window } =
            LanguageModel::parse_config(file, text, true)?;
        let parsed = parse_json(file, text)?;
        let canonical_config = parsed.to_string();
        let mut config = ConfigReader::new(file, "", parsed);
        let norm_eps = config.read_number("rms_norm_eps", Some(1e-6));
        let max_positions = config.read_count("max_position_embeddings", Some(4096));
        let end_ids = read_ids(config.take_value("eos_token_id").as_ref());
        let prediction_layers = match architecture {
            DEEPSEEK => config.take_value("num_nextn_predict_layers").and_then(|v| v.as_u64()).unwrap_or(0),
            _ => 0,
        };
        let heads = find_heads(&extents);
        let rotary = read_rotary(file, &mut config, heads.rotary, max_positions).unwrap_or_else(|d| {
            config.diagnostics.push(*d);
            RotaryConfig::default()
        });
        let mut missing = find_missing_parts(&extents);
        let experts = read_expert_layers(&mut config, &extents, architecture, &mut missing);
        if let Some(how) = config.take_value("quantization_config").filter(|v| !v.is_null()) {
            let method = how.get("quant_method").and_then(Value::as_str).unwrap_or("unknown").to_string();
            missing.push(format!("its weights are quantised (method `{method}`)"));
        }
        let mut ds = config.diagnostics;
        ds.extend(missing.into_iter().map(|what| refuse_part(file, &extents.name, &what)));
        if norm_eps < 0.0 {
            ds.push(
                Diagnostic::error(&T0431, format!("`rms_norm_eps` is {norm_eps}"))
                    .with_label(file, "this key"),
            );
        }
        if let Some(e) = &experts
            && let Some(message) = find_gate_contradiction(e)
        {
            ds.push(Diagnostic::error(&T0431, message).with_label(file, "these keys"));
        }
        if !ds.is_empty() {
            return Err(ds);
        }
        Ok(DecoderModel {
            config: canonical_config,
            experts,
            heads: heads.query,
            kv_heads: heads.cached,
            head_dim: heads.cached_columns,
            extents,
            norm_eps,
            rotary,
            window,
            max_positions,
            end_ids,
            prediction_layers,
        })
    }

    /// Returns the rotary frequencies, in radians per position.
    #[must_use]
    pub fn rotary_frequencies(&self) -> Vec<f32> {
        self.rotary.frequencies()
    }

    /// Returns whether all heads read one latent per token, which every rank of tp caches.
    #[must_use]
    pub fn is_latent(&self) -> bool {
        matches!(self.extents.attention, AttentionKind::Latent { .. })
    }

    /// Returns the inner width of the narrowest feed-forward part of a layer, which tp divides.
    #[must_use]
    pub fn narrowest_feed_forward(&self) -> u64 {
        let dense = self.extents.mlp.inner;
        let Some(e) = &self.experts else { return dense };
        let shared = (e.shared_inner > 0).then_some(e.shared_inner);
        let dense = (!e.dense_layers.is_empty()).then_some(dense);
        [shared, dense].into_iter().flatten().fold(e.inner, u64::min)
    }

    /// Returns whether a tensor belongs to a layer that no program here computes.
    #[must_use]
    pub fn is_left_out(&self, tensor: &str) -> bool {
        let number = tensor.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        let from = self.extents.layers;
        number
            .and_then(|n| n.parse::<u64>().ok())
            .is_some_and(|n| (from..from + self.prediction_layers).contains(&n))
    }
}

/// Name of the architecture of DeepSeek-V3.
const DEEPSEEK: &str = "DeepseekV3ForCausalLM";

/// The heads of a model, as queries have them and as the caches store them.
struct Heads {
    query: u64,
    cached: u64,
    cached_columns: u64,
    /// Columns of a head that positions rotate.
    rotary: u64,
}

fn find_heads(m: &LanguageModel) -> Heads {
    match m.attention {
        AttentionKind::Grouped { heads, kv_heads, head_dim, .. } => {
            Heads { query: heads, cached: kv_heads, cached_columns: head_dim, rotary: head_dim }
        }
        AttentionKind::Latent { heads, kv_rank, rope, .. } => {
            Heads { query: heads, cached: 1, cached_columns: kv_rank + rope, rotary: rope }
        }
    }
}

/// Lists the properties of a model that no program here computes.
fn find_missing_parts(m: &LanguageModel) -> Vec<String> {
    let is_latent = matches!(m.attention, AttentionKind::Latent { .. });
    let missing = [
        (m.experts.as_ref().is_some_and(|e| !e.gated), "its experts have no gate"),
        (
            m.experts.as_ref().is_some_and(|e| e.shared_inner > 0) && !is_latent,
            "a dense layer stands beside its experts",
        ),
        (m.norm != NormKind::Rms, "its norms are layer norms"),
        (m.learned_positions > 0, "its positions are learned"),
        (!m.mlp.gated, "its feed-forward layers have no gate"),
        (m.mlp.bias, "its feed-forward layers have biases"),
        (!find_heads(m).rotary.is_multiple_of(2), "positions rotate an odd number of columns of a head"),
    ];
    missing.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, what)| what.to_string()).collect()
}

fn refuse_part(file: &str, name: &str, what: &str) -> Diagnostic {
    Diagnostic::error(&T0433, format!("{name} cannot run: {what}")).with_label(file, "this config").with_hint(
        "models of Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V3 run, with weights of floats; \
         `tessera plan` estimates the others",
    )
}

/// Describes the layers with experts of an architecture; Mixtral renormalises without saying so in its config.
/// Adds to `missing` what no program here computes.
fn read_expert_layers(
    config: &mut ConfigReader<'_>,
    m: &LanguageModel,
    architecture: &str,
    missing: &mut Vec<String>,
) -> Option<ExpertLayers> {
    let e = m.experts.as_ref()?;
    let softmax =
        |renormalise| ExpertGate { sigmoid: false, groups: 1, keep_groups: 1, renormalise, scale: 1.0 };
    let parts = ["gate_proj", "up_proj", "down_proj"];
    let plain = ExpertNames { router: "mlp.gate", correction: None, experts: "mlp.experts", parts };
    let (gate, names) = match architecture {
        "MixtralForCausalLM" => {
            let (router, experts) = ("block_sparse_moe.gate", "block_sparse_moe.experts");
            (softmax(true), ExpertNames { router, correction: None, experts, parts: ["w1", "w3", "w2"] })
        }
        DEEPSEEK => {
            if !e.router_bias {
                missing.push("`topk_method` is not `noaux_tc`, so nothing corrects its choice".to_string());
            }
            let scores = config.read_choice("scoring_func", &["sigmoid", "softmax"], "sigmoid");
            if scores != "sigmoid" {
                missing.push("its router scores with a softmax".to_string());
            }
            (read_sigmoid_gate(config), ExpertNames { correction: Some("e_score_correction_bias"), ..plain })
        }
        _ => (softmax(config.read_flag("norm_topk_prob", false)), plain),
    };
    Some(ExpertLayers {
        count: e.count,
        top_k: e.top_k,
        inner: e.inner,
        shared_inner: e.shared_inner,
        gate,
        dense_layers: e.dense_layers.clone(),
        names,
    })
}

/// Reads the gate of DeepSeek-V3, with the defaults of transformers.
fn read_sigmoid_gate(config: &mut ConfigReader<'_>) -> ExpertGate {
    ExpertGate {
        sigmoid: true,
        groups: config.read_count("n_group", Some(8)),
        keep_groups: config.read_count("topk_group", Some(4)),
        renormalise: config.read_flag("norm_topk_prob", true),
        scale: config.read_number("routed_scaling_factor", Some(2.5)),
    }
}

fn find_gate_contradiction(e: &ExpertLayers) -> Option<String> {
    let ExpertGate { groups, keep_groups, scale, .. } = e.gate;
    if !e.count.is_multiple_of(groups) || keep_groups > groups {
        return Some(format!("{keep_groups} of {groups} groups of {} experts", e.count));
    }
    let candidates = e.count / groups * keep_groups;
    if e.top_k > candidates {
        return Some(format!("a token needs {} experts of {candidates} in {keep_groups} groups", e.top_k));
    }
    (scale <= 0.0 || !scale.is_finite()).then(|| format!("`routed_scaling_factor` is {scale}"))
}

/// Reads one id, or a list of them.
fn read_ids(value: Option<&Value>) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}

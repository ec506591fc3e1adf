//! The language models that run: what their programs need beside the extents.

use serde_json::Value;
use tessera_base::config::{ConfigReader, parse_json};
use tessera_base::{Diagnostic, Diagnostics};

use super::config::ParsedConfig;
use super::{AttentionKind, LanguageModel, NormKind};
use crate::codes::{T0431, T0432, T0433};

/// A decoder-only language model that runs: grouped-query attention with rotary positions, RMS norms, and gated
/// feed-forward layers.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderModel {
    /// The whole config as JSON with sorted keys, from which the same model can be parsed again.
    pub config: String,
    /// The extents that an estimate needs too.
    pub extents: LanguageModel,
    /// Number of query heads.
    pub heads: u64,
    /// Number of KV heads.
    pub kv_heads: u64,
    /// Columns of a head.
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
    /// Whether the weights of a token's experts add up to 1.
    pub renormalise: bool,
    /// Layers without experts, ascending.
    pub dense_layers: Vec<u64>,
    /// Names of the tensors.
    pub names: ExpertNames,
}

/// Names of the tensors of experts, behind that of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertNames {
    /// Name of the matrix that scores the experts.
    pub router: &'static str,
    /// Name of the list of experts, in which each has its number as a name.
    pub experts: &'static str,
    /// Names of the gate, up and down matrices of an expert.
    pub parts: [&'static str; 3],
}

/// Rotary positions of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Change of the frequencies for more positions than a model was first trained with.
    pub scaling: RotaryScaling,
}

/// How the rotary frequencies of a model were changed for more positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RotaryScaling {
    /// The frequencies are those of `theta`.
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// Divisor of every frequency.
        factor: f64,
    },
    /// As in Llama 3.1: low frequencies are divided by a factor, high ones stay, and those between are
    /// interpolated.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Turns within the original positions below which a frequency is low.
        low_freq_factor: f64,
        /// Turns above which a frequency is high.
        high_freq_factor: f64,
        /// Positions that the model was first trained with.
        original_positions: f64,
    },
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
        let renormalise = config.read_flag("norm_topk_prob", false);
        let end_ids = read_ids(config.take_value("eos_token_id").as_ref());
        let rotary = read_rotary(file, &mut config).unwrap_or_else(|d| {
            config.diagnostics.push(*d);
            RotaryConfig { theta: 1.0, scaling: RotaryScaling::None }
        });
        let mut ds = config.diagnostics;
        ds.extend(find_missing_parts(file, &extents));
        if norm_eps < 0.0 {
            ds.push(
                Diagnostic::error(&T0431, format!("`rms_norm_eps` is {norm_eps}"))
                    .with_label(file, "this key"),
            );
        }
        let AttentionKind::Grouped { heads, kv_heads, head_dim, .. } = extents.attention else {
            return Err(ds);
        };
        if !ds.is_empty() {
            return Err(ds);
        }
        let experts = name_expert_layers(&extents, architecture, renormalise);
        Ok(DecoderModel {
            config: canonical_config,
            experts,
            extents,
            heads,
            kv_heads,
            head_dim,
            norm_eps,
            rotary,
            window,
            max_positions,
            end_ids,
        })
    }

    /// Returns the rotary frequencies of a head, in radians per position.
    #[must_use]
    pub fn rotary_frequencies(&self) -> Vec<f32> {
        let pairs = self.head_dim / 2;
        (0..pairs)
            .map(|i| {
                let plain = self.rotary.theta.powf(-((2 * i) as f64) / self.head_dim as f64);
                self.rotary.scaling.scale_frequency(plain) as f32
            })
            .collect()
    }
}

impl RotaryScaling {
    fn scale_frequency(self, plain: f64) -> f64 {
        match self {
            RotaryScaling::None => plain,
            RotaryScaling::Linear { factor } => plain / factor,
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let turns = original_positions * plain / std::f64::consts::TAU;
                if turns < low_freq_factor {
                    return plain / factor;
                }
                if turns > high_freq_factor {
                    return plain;
                }
                let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - share) * plain / factor + share * plain
            }
        }
    }
}

/// Lists the properties of a model that no program here computes.
fn find_missing_parts(file: &str, m: &LanguageModel) -> Diagnostics {
    let missing = [
        (m.experts.as_ref().is_some_and(|e| !e.gated), "its experts have no gate"),
        (m.experts.as_ref().is_some_and(|e| e.shared_inner > 0), "every token passes through shared experts"),
        (m.experts.as_ref().is_some_and(|e| e.router_bias), "its router corrects the choice of experts"),
        (m.norm != NormKind::Rms, "its norms are layer norms"),
        (m.learned_positions > 0, "its positions are learned"),
        (!m.mlp.gated, "its feed-forward layers have no gate"),
        (m.mlp.bias, "its feed-forward layers have biases"),
        (matches!(m.attention, AttentionKind::Latent { .. }), "its attention keeps latents in place of keys"),
        (
            matches!(m.attention, AttentionKind::Grouped { head_dim, .. } if !head_dim.is_multiple_of(2)),
            "its heads have an odd number of columns",
        ),
    ];
    let refuse = |what: &str| {
        Diagnostic::error(&T0433, format!("{} cannot run: {what}", m.name))
            .with_label(file, "this config")
            .with_hint("models of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE run; `tessera plan` estimates the others")
    };
    missing.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, what)| refuse(what)).collect()
}

/// Describes the layers with experts of an architecture; Mixtral renormalises without saying so in its config.
fn name_expert_layers(m: &LanguageModel, architecture: &str, renormalise: bool) -> Option<ExpertLayers> {
    let e = m.experts.as_ref()?;
    let is_mixtral = architecture == "MixtralForCausalLM";
    Some(ExpertLayers {
        count: e.count,
        top_k: e.top_k,
        inner: e.inner,
        renormalise: is_mixtral || renormalise,
        dense_layers: e.dense_layers.clone(),
        names: match is_mixtral {
            true => ExpertNames {
                router: "block_sparse_moe.gate",
                experts: "block_sparse_moe.experts",
                parts: ["w1", "w3", "w2"],
            },
            false => ExpertNames {
                router: "mlp.gate",
                experts: "mlp.experts",
                parts: ["gate_proj", "up_proj", "down_proj"],
            },
        },
    })
}

fn read_rotary(file: &str, config: &mut ConfigReader<'_>) -> Result<RotaryConfig, Box<Diagnostic>> {
    // Newer releases of transformers write one object, older ones two keys.
    let given = ["rope_parameters", "rope_scaling"].map(|k| config.take_value(k).filter(Value::is_object));
    let object = given.iter().flatten().next();
    let number = |key: &str| object.and_then(|o| o.get(key)).and_then(Value::as_f64);
    let stated = config.read_number("rope_theta", Some(10_000.0));
    let theta = number("rope_theta").unwrap_or(stated);
    let kind = object.and_then(|o| o.get("rope_type").or_else(|| o.get("type"))).and_then(Value::as_str);
    let reject = |code, message: String, hint: &str| {
        Box::new(Diagnostic::error(code, message).with_label(file, "the rotary positions").with_hint(hint))
    };
    let required = |key: &str| {
        number(key).filter(|x| *x > 0.0).ok_or_else(|| {
            reject(
                &T0431,
                format!("`{key}` of {} positions is missing", kind.unwrap_or_default()),
                "give a number above 0",
            )
        })
    };
    let scaling = match kind {
        None | Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear { factor: required("factor")? },
        Some("llama3") => RotaryScaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_positions: required("original_max_position_embeddings")?,
        },
        Some(other) => {
            return Err(reject(
                &T0432,
                format!("rotary positions of type `{other}` are not supported"),
                "accepted: default, linear, llama3",
            ));
        }
    };
    if theta <= 1.0 || number("partial_rotary_factor").is_some_and(|f| f != 1.0) {
        return Err(reject(
            &T0432,
            format!("rotary positions with base {theta}, of a part of a head"),
            "accepted: a base above 1, whole heads",
        ));
    }
    Ok(RotaryConfig { theta, scaling })
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

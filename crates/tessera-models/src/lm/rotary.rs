//! Rotary positions of a language model: their frequencies, and how these were changed for more positions.

use serde_json::Value;
use tessera_base::Diagnostic;
use tessera_base::config::ConfigReader;

use crate::codes::{T0431, T0432};

/// Rotary positions of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Columns of a head that are rotated.
    pub columns: u64,
    /// Whether a pair of columns that is rotated together lies side by side, and not half a head apart.
    pub interleaved: bool,
    /// Change of the frequencies for more positions than a model was first trained with.
    pub scaling: RotaryScaling,
    /// Factor of the scores of latent attention, for more positions.
    pub latent_score_factor: f64,
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
    /// YaRN: as in Llama 3.1, but interpolated over the numbers of the pairs, and rotated columns are multiplied by
    /// a factor.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Number of the last pair whose frequency stays; may be a fraction.
        first: f64,
        /// Number of the first pair whose frequency is low; may be a fraction.
        last: f64,
        /// Factor of rotated columns.
        attention_factor: f64,
    },
}

impl Default for RotaryConfig {
    fn default() -> RotaryConfig {
        RotaryConfig {
            theta: 1.0,
            columns: 0,
            interleaved: false,
            scaling: RotaryScaling::None,
            latent_score_factor: 1.0,
        }
    }
}

impl RotaryConfig {
    /// Returns the frequency of each pair of columns, in radians per position.
    #[must_use]
    pub fn frequencies(&self) -> Vec<f32> {
        let plain = |i: u64| self.theta.powf(-((2 * i) as f64) / self.columns as f64);
        (0..self.columns / 2).map(|i| self.scaling.scale_frequency(i, plain(i)) as f32).collect()
    }
}

impl RotaryScaling {
    /// Returns the factor of rotated columns.
    #[must_use]
    pub fn factor_of_rotated(self) -> f64 {
        if let RotaryScaling::Yarn { attention_factor, .. } = self { attention_factor } else { 1.0 }
    }

    /// Changes the frequency of a pair.
    fn scale_frequency(self, pair: u64, plain: f64) -> f64 {
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
            RotaryScaling::Yarn { factor, first, last, .. } => {
                // Equal bounds would divide by zero; transformers separates them by this much.
                let width = if last == first { 0.001 } else { last - first };
                let low = ((pair as f64 - first) / width).clamp(0.0, 1.0);
                plain / factor * low + plain * (1.0 - low)
            }
        }
    }
}

/// Reads the rotary positions of heads of which `columns` are rotated.
///
/// # Errors
/// T0431 for a number that is missing, T0432 for a kind that is not supported.
pub(super) fn read_rotary(
    file: &str,
    config: &mut ConfigReader<'_>,
    columns: u64,
    max_positions: u64,
) -> Result<RotaryConfig, Box<Diagnostic>> {
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
    if theta <= 1.0 || number("partial_rotary_factor").is_some_and(|f| f != 1.0) {
        return Err(reject(
            &T0432,
            format!("rotary positions with base {theta}, of a part of a head"),
            "accepted: a base above 1, whole heads",
        ));
    }
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
        Some("yarn") => {
            let original = required("original_max_position_embeddings")?;
            let factor = number("factor").filter(|f| *f > 0.0).unwrap_or(max_positions as f64 / original);
            let truncate = object.and_then(|o| o.get("truncate")).and_then(Value::as_bool).unwrap_or(true);
            yarn_scaling(factor, (original, theta, columns as f64), truncate, number)
        }
        Some(other) => {
            return Err(reject(
                &T0432,
                format!("rotary positions of type `{other}` are not supported"),
                "accepted: default, linear, llama3, yarn",
            ));
        }
    };
    // Configs older than this key belong to models with interleaved pairs, and other architectures lack it.
    let is_latent = config.take_value("kv_lora_rank").is_some();
    let interleaved = is_latent && config.read_flag("rope_interleave", true);
    let latent_score_factor = match (scaling, number("factor"), number("mscale_all_dim")) {
        (RotaryScaling::None, ..) | (_, None, _) | (_, _, None) => 1.0,
        (_, Some(factor), Some(all)) => score_magnitude(factor, all).powi(2),
    };
    Ok(RotaryConfig { theta, columns, interleaved, scaling, latent_score_factor })
}

/// Returns the factor by which YaRN enlarges scores over `factor` times more positions.
fn score_magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 || weight == 0.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

fn yarn_scaling(
    factor: f64,
    (original, theta, columns): (f64, f64, f64),
    truncate: bool,
    number: impl Fn(&str) -> Option<f64>,
) -> RotaryScaling {
    let above_zero = |key: &str| number(key).filter(|x| *x > 0.0);
    // The pair that turns so often within the original positions.
    let pair_of =
        |turns: f64| columns * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
    let (fast, slow) = (above_zero("beta_fast").unwrap_or(32.0), above_zero("beta_slow").unwrap_or(1.0));
    let (mut first, mut last) = (pair_of(fast), pair_of(slow));
    if truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    let attention_factor = number("attention_factor").unwrap_or_else(|| {
        match (above_zero("mscale"), above_zero("mscale_all_dim")) {
            (Some(one), Some(all)) => score_magnitude(factor, one) / score_magnitude(factor, all),
            _ => score_magnitude(factor, 1.0),
        }
    });
    RotaryScaling::Yarn { factor, first: first.max(0.0), last: last.min(columns - 1.0), attention_factor }
}

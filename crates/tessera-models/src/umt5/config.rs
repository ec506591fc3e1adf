//! The dimensions of a UMT5 encoder, from the `config.json` of a transformers checkpoint.

use tessera_base::config::{ConfigReader, parse_json};
use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T0450;
use crate::wan_config::checked_elements;

/// The dimensions of a UMT5 encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Umt5Config {
    /// Width of the residual stream, and of an encoded token.
    pub d_model: u64,
    /// Width of a head. The width of all heads may differ from `d_model`.
    pub d_kv: u64,
    /// Width of the feed-forward layer.
    pub d_ff: u64,
    /// Attention heads per block.
    pub heads: u64,
    /// Number of blocks.
    pub layers: u64,
    /// Rows of the table of token embeddings.
    pub vocab_size: u64,
    /// Buckets of the relative position bias, half of them for each direction.
    pub buckets: u64,
    /// Distance from which all keys of one direction share the last bucket.
    pub max_distance: u64,
    /// Epsilon of every norm.
    pub eps: f64,
}

/// Ids are f32 numbers in the program, which are exact below this number.
const VOCAB_MAX: u64 = 1 << 24;

/// Maximum number of blocks.
const LAYERS_MAX: u64 = 1024;

/// Keys of a T5 config that do not change what the encoder computes.
const IGNORED_KEYS: &[&str] = &[
    "_name_or_path",
    "architectures",
    "classifier_dropout",
    "decoder_start_token_id",
    "dropout_rate",
    "dtype",
    "eos_token_id",
    "initializer_factor",
    "is_decoder",
    "is_encoder_decoder",
    "num_decoder_layers",
    "output_past",
    "pad_token_id",
    "scalable_attention",
    "scale_decoder_outputs",
    "tie_encoder_decoder",
    "tie_word_embeddings",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// Keys that select a variant of the encoder, with the only implemented value as JSON.
const VARIANTS: &[(&str, &str)] = &[
    ("model_type", "\"umt5\""),
    ("feed_forward_proj", "\"gated-gelu\""),
    ("dense_act_fn", "\"gelu_new\""),
    ("is_gated_act", "true"),
];

impl Umt5Config {
    /// Returns the dimensions of UMT5-XXL, which the original Wan checkpoints contain without a
    /// config file.
    #[must_use]
    pub fn xxl() -> Umt5Config {
        Umt5Config {
            d_model: 4096,
            d_kv: 64,
            d_ff: 10240,
            heads: 64,
            layers: 24,
            vocab_size: 256_384,
            buckets: 32,
            max_distance: 128,
            eps: 1e-6,
        }
    }

    /// Returns the width of all heads.
    #[must_use]
    pub fn inner_dim(&self) -> u64 {
        self.heads * self.d_kv
    }

    /// Parses the `config.json` of a transformers checkpoint. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// Returns one diagnostic per problem: T0450 for another variant of the encoder and for dims that
    /// contradict each other.
    pub fn parse(file: &str, text: &str) -> Result<Umt5Config, Diagnostics> {
        let mut f = ConfigReader::new(file, "", parse_json(file, text)?);
        f.ignore_keys(IGNORED_KEYS);
        let config = Umt5Config {
            d_model: f.read_count("d_model", None),
            d_kv: f.read_count("d_kv", None),
            d_ff: f.read_count("d_ff", None),
            heads: f.read_count("num_heads", None),
            layers: f.read_count("num_layers", None),
            vocab_size: f.read_count("vocab_size", None),
            buckets: f.read_count("relative_attention_num_buckets", Some(32)),
            max_distance: f.read_count("relative_attention_max_distance", Some(128)),
            eps: f.read_number("layer_norm_epsilon", Some(1e-6)),
        };
        for (key, accepted) in VARIANTS {
            let Some(found) = f.take_value(key).map(|value| value.to_string()) else { continue };
            if found == *accepted {
                continue;
            }
            f.diagnostics.push(
                Diagnostic::error(
                    &T0450,
                    format!("`{key}` is {found}: this text encoder is not implemented"),
                )
                .with_label(file, format!("{key} = {found}"))
                .with_hint(format!("implemented is {accepted}, the UMT5 encoder of Wan")),
            );
        }
        let mut ds = f.finish();
        if ds.is_empty() {
            ds = config.find_contradictions(file);
        }
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }

    /// Checks that a DiT reads rows of the encoder's width. `file` appears only in the diagnostic.
    ///
    /// # Errors
    /// T0450 with both widths.
    pub(crate) fn check_width(&self, file: &str, text_dim: u64) -> Result<(), Diagnostics> {
        if self.d_model == text_dim {
            return Ok(());
        }
        Err(vec![
            Diagnostic::error(&T0450, "the text encoder does not fit the DiT")
                .with_label(file, format!("d_model = {}", self.d_model))
                .with_label("config.json of the DiT", format!("text_dim = {text_dim}"))
                .with_hint("use the text encoder that was published with the DiT"),
        ])
    }

    /// Renders the dimensions as `config.json`, with keys in a fixed order.
    #[must_use]
    pub fn to_json(&self) -> String {
        format!(
            "{{\"model_type\":\"umt5\",\"d_ff\":{},\"d_kv\":{},\"d_model\":{},\"feed_forward_proj\":\"gated-gelu\",\
\"layer_norm_epsilon\":{:e},\"num_heads\":{},\"num_layers\":{},\"relative_attention_max_distance\":{},\
\"relative_attention_num_buckets\":{},\"vocab_size\":{}}}\n",
            self.d_ff,
            self.d_kv,
            self.d_model,
            self.eps,
            self.heads,
            self.layers,
            self.max_distance,
            self.buckets,
            self.vocab_size,
        )
    }

    fn find_contradictions(&self, file: &str) -> Diagnostics {
        let mut ds = Vec::new();
        let mut refuse =
            |message: String| ds.push(Diagnostic::error(&T0450, message).with_label(file, "these keys"));
        if !self.buckets.is_multiple_of(2) || self.buckets < 4 || self.max_distance <= self.buckets / 4 {
            refuse(format!(
                "{} buckets up to distance {}: the buckets must be even and at least 4, and the distance \
                 above a quarter of them",
                self.buckets, self.max_distance
            ));
        }
        if self.vocab_size > VOCAB_MAX {
            refuse(format!("a vocabulary of {} tokens exceeds the limit of {VOCAB_MAX}", self.vocab_size));
        }
        if self.layers > LAYERS_MAX {
            refuse(format!("{} blocks exceed the limit of {LAYERS_MAX}", self.layers));
        }
        if !(self.eps > 0.0 && self.eps <= 1.0) {
            refuse(format!("layer_norm_epsilon {} must be positive and at most 1", self.eps));
        }
        let tensors: [(&str, &[u64]); 3] = [
            ("the token embedding, vocab_size · d_model", &[self.vocab_size, self.d_model]),
            ("the feed-forward weight, d_ff · d_model", &[self.d_ff, self.d_model]),
            ("an attention weight, num_heads · d_kv · d_model", &[self.heads, self.d_kv, self.d_model]),
        ];
        for (what, extents) in tensors {
            if checked_elements(extents).is_none() {
                refuse(format!("{what} = {extents:?} is too large"));
            }
        }
        ds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_of_a_checkpoint_round_trips() {
        let published = r#"{"_name_or_path":"google/umt5-xxl","architectures":["UMT5EncoderModel"],"classifier_dropout":0.0,
            "d_ff":10240,"d_kv":64,"d_model":4096,"decoder_start_token_id":0,"dense_act_fn":"gelu_new","dropout_rate":0.1,
            "eos_token_id":1,"feed_forward_proj":"gated-gelu","initializer_factor":1.0,"is_encoder_decoder":true,
            "is_gated_act":true,"layer_norm_epsilon":1e-06,"model_type":"umt5","num_decoder_layers":24,"num_heads":64,
            "num_layers":24,"output_past":true,"pad_token_id":0,"relative_attention_max_distance":128,
            "relative_attention_num_buckets":32,"scalable_attention":true,"tie_word_embeddings":false,
            "tokenizer_class":"T5Tokenizer","torch_dtype":"bfloat16","transformers_version":"4.49.0","use_cache":true,
            "vocab_size":256384}"#;
        let config = Umt5Config::parse("config.json", published).unwrap();
        assert_eq!(config, Umt5Config::xxl());
        assert_eq!(Umt5Config::parse("again", &config.to_json()).unwrap(), config);
    }

    #[test]
    fn other_encoders_and_impossible_dims_are_refused() {
        let refused = |changes: &[(&str, &str)]| {
            let text = changes.iter().fold(Umt5Config::xxl().to_json(), |text, (old, new)| {
                assert!(text.contains(old), "{old}");
                text.replace(old, new)
            });
            let ds = Umt5Config::parse("c", &text).unwrap_err();
            (ds[0].code.id, ds[0].message.clone())
        };
        for (old, new, says) in [
            ("\"umt5\"", "\"t5\"", "`model_type` is \"t5\""),
            ("gated-gelu", "relu", "`feed_forward_proj` is \"relu\""),
            ("buckets\":32", "buckets\":31", "31 buckets"),
            ("distance\":128", "distance\":8", "up to distance 8"),
            ("256384", "16777217", "16777217 tokens"),
            ("\"num_layers\":24", "\"num_layers\":1025", "1025 blocks"),
            ("\"d_ff\":10240", "\"d_ff\":1000000000", "[1000000000, 4096] is too large"),
        ] {
            let (code, message) = refused(&[(old, new)]);
            assert!(code == "T0450" && message.contains(says), "{code} {message}");
        }
    }
}

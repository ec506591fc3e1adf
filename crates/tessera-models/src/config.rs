//! The generator's dimensions, from `config.json` in the original or the diffusers spelling.

use tessera_base::fields::{Fields, json};
use tessera_base::{Code, Diagnostic, Diagnostics};

/// Dimensions that contradict each other.
pub static T0410: Code = Code {
    id: "T0410",
    title: "model dimensions contradict each other",
    page: "A Wan generator needs: dim a whole number of heads, an even head_dim of at least 6 (three rotary axes share \
it), equal input and output channels, an even freq_dim, and a patch of one frame. The message shows the numbers.",
};

/// Dimensions of a Wan2.1 generator. Source: the model's own `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct WanConfig {
    /// Width of the residual stream.
    pub dim: u64,
    /// Width of the feed-forward layer.
    pub ffn_dim: u64,
    /// Width of the timestep's sinusoid.
    pub freq_dim: u64,
    /// Latent channels.
    pub channels: u64,
    /// Attention heads.
    pub heads: u64,
    /// Transformer blocks.
    pub layers: u64,
    /// Rows of text every prompt is padded to.
    pub text_len: u64,
    /// Width of a text row.
    pub text_dim: u64,
    /// Patch rows and columns.
    pub patch: [u64; 2],
    /// Epsilon of every norm.
    pub eps: f64,
    /// Frames of the rotary table.
    pub rope_frames: u64,
}

impl WanConfig {
    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> u64 {
        self.dim / self.heads
    }

    /// Width of a token of the latent: patch · channels.
    #[must_use]
    pub fn token_width(&self) -> u64 {
        self.patch[0] * self.patch[1] * self.channels
    }

    /// Reads `config.json`. `file` is only named in diagnostics.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &str) -> Result<WanConfig, Diagnostics> {
        let mut f = Fields::new(file, "", json(file, text)?);
        f.ignore(&["_class_name", "_diffusers_version", "_name_or_path", "model_type", "_library_version"]);
        // The diffusers spelling is told by its head width; both describe the same network.
        let diffusers = text.contains("\"attention_head_dim\"");
        let config = if diffusers { WanConfig::diffusers(&mut f) } else { WanConfig::original(&mut f) };
        let mut ds = f.finish();
        if ds.is_empty() {
            ds = config.contradictions(file);
        }
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }

    /// The dimensions as `config.json` in the original spelling, keys in a fixed order.
    #[must_use]
    pub fn text(&self) -> String {
        format!(
            "{{\"_class_name\":\"WanModel\",\"model_type\":\"t2v\",\"dim\":{},\"eps\":{:e},\"ffn_dim\":{},\
\"freq_dim\":{},\"in_dim\":{},\"num_heads\":{},\"num_layers\":{},\"out_dim\":{},\"patch_size\":[1,{},{}],\
\"text_dim\":{},\"text_len\":{}}}\n",
            self.dim,
            self.eps,
            self.ffn_dim,
            self.freq_dim,
            self.channels,
            self.heads,
            self.layers,
            self.channels,
            self.patch[0],
            self.patch[1],
            self.text_dim,
            self.text_len,
        )
    }

    fn original(f: &mut Fields) -> WanConfig {
        f.ignore(&[
            "window_size",
            "qk_norm",
            "cross_attn_norm",
            "local_attn_size",
            "sink_size",
            "num_frame_per_block",
        ]);
        let out = f.count("out_dim", Some(16));
        let channels = f.count("in_dim", Some(16));
        let config = WanConfig {
            dim: f.count("dim", None),
            ffn_dim: f.count("ffn_dim", None),
            freq_dim: f.count("freq_dim", Some(256)),
            channels,
            heads: f.count("num_heads", None),
            layers: f.count("num_layers", None),
            text_len: f.count("text_len", Some(512)),
            text_dim: f.count("text_dim", Some(4096)),
            patch: patch(f),
            eps: f.number("eps", Some(1e-6)),
            rope_frames: 1024,
        };
        same_channels(f, channels, out);
        config
    }

    fn diffusers(f: &mut Fields) -> WanConfig {
        f.ignore(&["added_kv_proj_dim", "image_dim", "cross_attn_norm", "qk_norm", "pos_embed_seq_len"]);
        let heads = f.count("num_attention_heads", None);
        let out = f.count("out_channels", Some(16));
        let channels = f.count("in_channels", Some(16));
        let config = WanConfig {
            dim: heads * f.count("attention_head_dim", None),
            ffn_dim: f.count("ffn_dim", None),
            freq_dim: f.count("freq_dim", Some(256)),
            channels,
            heads,
            layers: f.count("num_layers", None),
            text_len: f.count("text_len", Some(512)),
            text_dim: f.count("text_dim", Some(4096)),
            patch: patch(f),
            eps: f.number("eps", Some(1e-6)),
            rope_frames: f.count("rope_max_seq_len", Some(1024)),
        };
        same_channels(f, channels, out);
        config
    }

    fn contradictions(&self, file: &str) -> Diagnostics {
        let mut ds = Vec::new();
        let mut refuse = |message: String| ds.push(Diagnostic::error(&T0410, message).at(file, "these keys"));
        if !self.dim.is_multiple_of(self.heads) {
            refuse(format!("dim {} is not a whole number of {} heads", self.dim, self.heads));
        } else if !self.head_dim().is_multiple_of(2) || self.head_dim() < 6 {
            refuse(format!(
                "head_dim {} = {} / {} must be even and at least 6",
                self.head_dim(),
                self.dim,
                self.heads
            ));
        }
        if !self.freq_dim.is_multiple_of(2) {
            refuse(format!("freq_dim {} must be even", self.freq_dim));
        }
        if self.eps <= 0.0 {
            refuse(format!("eps {} must be positive", self.eps));
        }
        ds
    }
}

fn patch(f: &mut Fields) -> [u64; 2] {
    let list = f.numbers("patch_size", &[1.0, 2.0, 2.0]);
    match list[..] {
        [1.0, h, w] if h >= 1.0 && w >= 1.0 && h.fract() == 0.0 && w.fract() == 0.0 => [h as u64, w as u64],
        _ => {
            f.diagnostics
                .push(Diagnostic::error(&T0410, format!("patch_size {list:?} must be [1, rows, columns]")));
            [1, 1]
        }
    }
}

fn same_channels(f: &mut Fields, input: u64, output: u64) {
    if input != output {
        f.diagnostics.push(Diagnostic::error(
            &T0410,
            format!("{input} input channels and {output} output channels: a streaming generator feeds its output back"),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGINAL: &str = r#"{"_class_name":"WanModel","model_type":"t2v","dim":1536,"eps":1e-6,"ffn_dim":8960,
        "freq_dim":256,"in_dim":16,"num_heads":12,"num_layers":30,"out_dim":16,"text_len":512}"#;
    const DIFFUSERS: &str = r#"{"_class_name":"WanTransformer3DModel","added_kv_proj_dim":null,"attention_head_dim":128,
        "cross_attn_norm":true,"eps":1e-6,"ffn_dim":8960,"freq_dim":256,"image_dim":null,"in_channels":16,
        "num_attention_heads":12,"num_layers":30,"out_channels":16,"patch_size":[1,2,2],
        "qk_norm":"rms_norm_across_heads","rope_max_seq_len":1024,"text_dim":4096}"#;

    #[test]
    fn both_spellings_give_one_model() {
        assert_eq!(WanConfig::parse("a", ORIGINAL).unwrap(), WanConfig::parse("b", DIFFUSERS).unwrap());
    }

    #[test]
    fn text_round_trips() {
        let c = WanConfig::parse("a", ORIGINAL).unwrap();
        assert_eq!(WanConfig::parse("b", &c.text()).unwrap(), c);
    }

    #[test]
    fn every_mistake_is_reported() {
        let text = r#"{"dim":"x","ffn_dm":1,"num_heads":4,"num_layers":0}"#;
        let ds = WanConfig::parse("c.json", text).unwrap_err();
        let codes: Vec<_> = ds.iter().map(|d| d.code.id).collect();
        assert_eq!(codes, ["T0004", "T0003", "T0004", "T0002"]);
        assert!(ds.iter().any(|d| d.hint.as_deref() == Some("did you mean `ffn_dim`?")));
    }

    #[test]
    fn heads_must_divide() {
        let text = r#"{"dim":50,"ffn_dim":8,"num_heads":4,"num_layers":1}"#;
        assert_eq!(WanConfig::parse("c", text).unwrap_err()[0].code.id, "T0410");
    }
}

//! The generator's dimensions, from `config.json` in the original or the diffusers spelling.

use tessera_base::fields::{Fields, json};
use tessera_base::{Code, Diagnostic, Diagnostics, choices};

/// Dimensions that contradict each other.
pub static T0410: Code = Code {
    id: "T0410",
    title: "model dimensions contradict each other",
    page: "A Wan generator needs: dim a whole number of heads, an even head_dim of at least 6 (three rotary axes share \
it), equal input and output channels, an even freq_dim, and a patch of one frame. The message shows the numbers.\n\n\
A key that names a variant of the network (qk_norm, window_size, model_type, image_dim and their like) must have the \
value that means what is implemented: another one is another network, and running this one in its place would give \
plausible nonsense. A weight of more than 2^40 numbers, or more than 1024 blocks, is taken for a slip.",
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

/// Most numbers in one tensor: what the programs' types allow. A larger one is taken for a slip.
pub(crate) const ELEMENTS_MAX: u64 = 1 << 40;

/// Most pixels of a patch or of a latent stride along one dim.
pub(crate) const STRIDE_MAX: f64 = 65_536.0;

/// Most transformer blocks.
const LAYERS_MAX: u64 = 1024;

/// The product, if a tensor of that many numbers can be.
pub(crate) fn elements(extents: &[u64]) -> Option<u64> {
    extents.iter().try_fold(1u64, |n, x| n.checked_mul(*x)).filter(|n| *n <= ELEMENTS_MAX)
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
        f.ignore(&["_class_name", "_diffusers_version", "_name_or_path", "_library_version"]);
        // The diffusers spelling is told by its head width; both describe the same network.
        let diffusers = text.contains("\"attention_head_dim\"");
        let config = if diffusers { WanConfig::diffusers(&mut f) } else { WanConfig::original(&mut f) };
        variants(&mut f, file, if diffusers { IN_DIFFUSERS } else { IN_ORIGINAL });
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
\"rope_max_seq_len\":{},\"text_dim\":{},\"text_len\":{}}}\n",
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
            self.rope_frames,
            self.text_dim,
            self.text_len,
        )
    }

    fn original(f: &mut Fields) -> WanConfig {
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
            rope_frames: f.count("rope_max_seq_len", Some(1024)),
        };
        same_channels(f, channels, out);
        config
    }

    fn diffusers(f: &mut Fields) -> WanConfig {
        let heads = f.count("num_attention_heads", None);
        let out = f.count("out_channels", Some(16));
        let channels = f.count("in_channels", Some(16));
        let config = WanConfig {
            dim: heads.saturating_mul(f.count("attention_head_dim", None)),
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
        if self.layers > LAYERS_MAX {
            refuse(format!("{} blocks, at most {LAYERS_MAX} are planned for", self.layers));
        }
        let (d, [rows, cols]) = (self.dim, self.patch);
        let tensors: [(&str, &[u64]); 7] = [
            ("the feed-forward weight, ffn_dim · dim", &[self.ffn_dim, d]),
            ("the time projection, 6 · dim · dim", &[6, d, d]),
            ("the time embedding, freq_dim · dim", &[self.freq_dim, d]),
            ("the patch embedding, patch · channels · dim", &[rows, cols, self.channels, d]),
            ("the text, text_len · dim", &[self.text_len, d]),
            ("the text, text_len · text_dim", &[self.text_len, self.text_dim]),
            ("the text embedding, text_dim · dim", &[self.text_dim, d]),
        ];
        for (what, extents) in tensors {
            if elements(extents).is_none() {
                refuse(format!("{what} = {extents:?} has more than {ELEMENTS_MAX} numbers"));
            }
        }
        ds
    }
}

/// What a key that names a variant of the network may say.
enum Accepted {
    /// One of these values, as JSON.
    Values(&'static [&'static str]),
    /// Any whole number from 1: `stream.toml` decides.
    Count,
}

type Variant = (&'static str, Accepted);

const MODEL_TYPE: Variant = ("model_type", Accepted::Values(&["\"t2v\""]));
const QK_NORM: Variant = ("qk_norm", Accepted::Values(&["true", "\"rms_norm_across_heads\""]));
const CROSS_ATTN_NORM: Variant = ("cross_attn_norm", Accepted::Values(&["true"]));

/// Variants that the original spelling names.
const IN_ORIGINAL: &[Variant] = &[
    MODEL_TYPE,
    QK_NORM,
    CROSS_ATTN_NORM,
    ("window_size", Accepted::Values(&["[-1,-1]"])),
    ("local_attn_size", Accepted::Values(&["-1"])),
    ("sink_size", Accepted::Values(&["0"])),
    ("num_frame_per_block", Accepted::Count),
];

/// Variants that the diffusers spelling names.
const IN_DIFFUSERS: &[Variant] = &[
    MODEL_TYPE,
    QK_NORM,
    CROSS_ATTN_NORM,
    ("added_kv_proj_dim", Accepted::Values(&["null"])),
    ("image_dim", Accepted::Values(&["null"])),
    ("pos_embed_seq_len", Accepted::Values(&["null"])),
];

/// Refuses every variant of the network that is not the one implemented.
fn variants(f: &mut Fields, file: &str, keys: &[Variant]) {
    for (key, accepted) in keys {
        let Some(found) = f.take(key) else { continue };
        let (fits, want) = match accepted {
            Accepted::Values(values) => (values.contains(&found.to_string().as_str()), choices(values)),
            Accepted::Count => (found.as_u64().is_some_and(|n| n > 0), "a whole number from 1".to_string()),
        };
        if !fits {
            f.diagnostics.push(
                Diagnostic::error(&T0410, format!("`{key}` is {found}: a network that is not implemented"))
                    .at(file, format!("found {found}"))
                    .hint(format!("accepted: {want}")),
            );
        }
    }
}

fn patch(f: &mut Fields) -> [u64; 2] {
    let list = f.numbers("patch_size", &[1.0, 2.0, 2.0]);
    match list[..] {
        [1.0, h, w] if [h, w].iter().all(|x| (1.0..=STRIDE_MAX).contains(x) && x.fract() == 0.0) => {
            [h as u64, w as u64]
        }
        _ => {
            f.diagnostics.push(Diagnostic::error(
                &T0410,
                format!("patch_size {list:?} must be [1, rows, columns], at most {STRIDE_MAX} each"),
            ));
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
    fn the_rotary_table_round_trips() {
        for source in [ORIGINAL, DIFFUSERS] {
            let mut c = WanConfig::parse("a", source).unwrap();
            c.rope_frames = 77;
            assert_eq!(WanConfig::parse("b", &c.text()).unwrap(), c);
        }
    }

    #[test]
    fn huge_dimensions_are_refused() {
        let with = |extra: &str| {
            let text = format!("{{\"num_heads\":4,\"num_layers\":1,\"ffn_dim\":8,\"dim\":48{extra}}}");
            WanConfig::parse("c", &text).map_err(|ds| ds[0].code.id)
        };
        assert!(with("").is_ok());
        for extra in [
            ",\"text_len\":4294967295",
            ",\"text_dim\":4294967295,\"text_len\":512",
            ",\"in_dim\":4294967295,\"out_dim\":4294967295,\"patch_size\":[1,65536,65536]",
            ",\"patch_size\":[1,1e18,2]",
        ] {
            assert_eq!(with(extra).unwrap_err(), "T0410", "{extra}");
        }
        let text = r#"{"attention_head_dim":4294967294,"num_attention_heads":4294967295,"ffn_dim":4294967295,"num_layers":2000}"#;
        let ds = WanConfig::parse("c", text).unwrap_err();
        assert!(ds.len() >= 3 && ds.iter().all(|d| d.code.id == "T0410"), "{ds:#?}");
    }

    #[test]
    fn other_networks_are_refused() {
        let original = |extra: &str| {
            WanConfig::parse("c.json", &ORIGINAL.replace("\"t2v\"", &format!("\"t2v\",{extra}")))
        };
        for fine in [
            r#""qk_norm":true,"cross_attn_norm":true,"window_size":[-1, -1]"#,
            r#""local_attn_size":-1,"sink_size":0,"num_frame_per_block":3,"qk_norm":"rms_norm_across_heads""#,
        ] {
            original(fine).unwrap();
        }
        for (key, value) in [
            ("qk_norm", "false"),
            ("cross_attn_norm", "false"),
            ("window_size", "[4,4]"),
            ("local_attn_size", "21"),
            ("sink_size", "3"),
            ("num_frame_per_block", "1.5"),
        ] {
            let ds = original(&format!("\"{key}\":{value}")).unwrap_err();
            assert_eq!((ds.len(), ds[0].code.id), (1, "T0410"), "{ds:#?}");
            assert!(ds[0].message.contains(key) && ds[0].message.contains(value), "{ds:#?}");
            assert!(ds[0].hint.as_deref().unwrap().starts_with("accepted: "));
        }
        let other = ORIGINAL.replace("t2v", "i2v");
        assert_eq!(WanConfig::parse("c", &other).unwrap_err()[0].code.id, "T0410");
        for key in ["image_dim", "added_kv_proj_dim"] {
            let other = DIFFUSERS.replace(&format!("\"{key}\":null"), &format!("\"{key}\":1280"));
            assert_eq!(WanConfig::parse("c", &other).unwrap_err()[0].code.id, "T0410");
        }
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

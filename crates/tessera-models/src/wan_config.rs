//! The DiT's dimensions, from `config.json` in the original or the diffusers format.

use tessera_base::config::{ConfigReader, parse_json};
use tessera_base::{Diagnostic, Diagnostics, format_choices};

use crate::codes::T0410;

mod from_shapes;

/// The dimensions of a Wan2.1 DiT. Source: the model's own `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct WanConfig {
    /// Width of the residual stream.
    pub dim: u64,
    /// Width of the feed-forward layer.
    pub ffn_dim: u64,
    /// Width of the timestep's sinusoidal embedding.
    pub freq_dim: u64,
    /// Channels of the latent video that the DiT denoises.
    pub channels: u64,
    /// Attention heads per block, each of width `dim / heads`.
    pub heads: u64,
    /// Number of transformer blocks.
    pub layers: u64,
    /// Number of text rows to which every prompt is padded.
    pub text_len: u64,
    /// Width of a text row as the text encoder returns it; the DiT projects it to `dim`.
    pub text_dim: u64,
    /// Rows and columns of latent cells that form one token; a patch spans one frame.
    pub patch: [u64; 2],
    /// Epsilon of every norm.
    pub eps: f64,
    /// Positions in the RoPE table of each axis: the limit of the cache window in frames, and of the
    /// rows and columns of tokens.
    pub rope_frames: u64,
    /// Frames of the cache window with which the model was trained, if its config states them.
    pub trained_window: Option<u64>,
    /// Frames of the sink with which the model was trained, if its config states them.
    pub trained_sink: Option<u64>,
}

/// Maximum elements of one tensor, which the programs' types allow. A larger size is treated as a
/// typo.
pub(crate) const ELEMENTS_MAX: u64 = 1 << 40;

/// Maximum pixels of a patch or of a latent stride along one dim.
pub(crate) const STRIDE_MAX: f64 = 65_536.0;

/// Maximum elements of an encoded prompt, which the leader holds in memory and sends to the ranks.
const TEXT_ELEMENTS_MAX: u64 = 1 << 28;

/// Maximum epsilon of a norm. A larger one would replace the variance that it only protects.
const EPS_MAX: f64 = 1.0;

/// Maximum number of transformer blocks.
const LAYERS_MAX: u64 = 1024;

/// Returns the number of elements of a tensor with these extents, or `None` if it exceeds [`ELEMENTS_MAX`].
pub(crate) fn checked_elements(extents: &[u64]) -> Option<u64> {
    extents.iter().try_fold(1u64, |n, x| n.checked_mul(*x)).filter(|n| *n <= ELEMENTS_MAX)
}

impl WanConfig {
    /// Returns the width of a head.
    #[must_use]
    pub fn head_dim(&self) -> u64 {
        self.dim / self.heads
    }

    /// Returns the width of a latent token: patch · channels.
    #[must_use]
    pub fn token_width(&self) -> u64 {
        self.patch[0] * self.patch[1] * self.channels
    }

    /// Parses `config.json`. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// Returns one diagnostic per problem.
    pub fn parse(file: &str, text: &str) -> Result<WanConfig, Diagnostics> {
        let mut f = ConfigReader::new(file, "", parse_json(file, text)?);
        f.ignore_keys(&["_class_name", "_diffusers_version", "_name_or_path", "_library_version"]);
        // Only the diffusers format gives the head width; both formats describe the same model.
        let diffusers = text.contains("\"attention_head_dim\"");
        let config =
            if diffusers { WanConfig::read_diffusers(&mut f) } else { WanConfig::read_original(&mut f) };
        check_variants(&mut f, file, if diffusers { DIFFUSERS_VARIANTS } else { ORIGINAL_VARIANTS });
        let mut ds = f.finish();
        if ds.is_empty() {
            ds = config.find_contradictions(file);
        }
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }

    /// Renders the dimensions as `config.json` in the original format, with keys in a fixed order.
    #[must_use]
    pub fn to_json(&self) -> String {
        let stated =
            |key: &str, frames: Option<u64>| frames.map_or(String::new(), |n| format!(",\"{key}\":{n}"));
        format!(
            "{{\"_class_name\":\"WanModel\",\"model_type\":\"t2v\",\"dim\":{},\"eps\":{:e},\"ffn_dim\":{},\
\"freq_dim\":{},\"in_dim\":{},\"num_heads\":{},\"num_layers\":{},\"out_dim\":{},\"patch_size\":[1,{},{}],\
\"rope_max_seq_len\":{},\"text_dim\":{},\"text_len\":{}{}{}}}\n",
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
            stated("local_attn_size", self.trained_window),
            stated("sink_size", self.trained_sink),
        )
    }

    fn read_original(f: &mut ConfigReader) -> WanConfig {
        let out = f.read_count("out_dim", Some(16));
        let channels = f.read_count("in_dim", Some(16));
        let config = WanConfig {
            dim: f.read_count("dim", None),
            ffn_dim: f.read_count("ffn_dim", None),
            freq_dim: f.read_count("freq_dim", Some(256)),
            channels,
            heads: f.read_count("num_heads", None),
            layers: f.read_count("num_layers", None),
            text_len: f.read_count("text_len", Some(512)),
            text_dim: f.read_count("text_dim", Some(4096)),
            patch: read_patch(f),
            eps: f.read_number("eps", Some(1e-6)),
            rope_frames: f.read_count("rope_max_seq_len", Some(1024)),
            trained_window: read_trained_frames(f, "local_attn_size"),
            trained_sink: read_trained_frames(f, "sink_size"),
        };
        check_same_channels(f, channels, out);
        config
    }

    fn read_diffusers(f: &mut ConfigReader) -> WanConfig {
        let heads = f.read_count("num_attention_heads", None);
        let out = f.read_count("out_channels", Some(16));
        let channels = f.read_count("in_channels", Some(16));
        let config = WanConfig {
            dim: heads.saturating_mul(f.read_count("attention_head_dim", None)),
            ffn_dim: f.read_count("ffn_dim", None),
            freq_dim: f.read_count("freq_dim", Some(256)),
            channels,
            heads,
            layers: f.read_count("num_layers", None),
            text_len: f.read_count("text_len", Some(512)),
            text_dim: f.read_count("text_dim", Some(4096)),
            patch: read_patch(f),
            eps: f.read_number("eps", Some(1e-6)),
            rope_frames: f.read_count("rope_max_seq_len", Some(1024)),
            trained_window: None,
            trained_sink: None,
        };
        check_same_channels(f, channels, out);
        config
    }

    fn find_contradictions(&self, file: &str) -> Diagnostics {
        let mut ds = Vec::new();
        let mut refuse =
            |message: String| ds.push(Diagnostic::error(&T0410, message).with_label(file, "these keys"));
        if !self.dim.is_multiple_of(self.heads) {
            refuse(format!("dim {} is not a multiple of {} heads", self.dim, self.heads));
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
        if !(self.eps > 0.0 && self.eps <= EPS_MAX) {
            refuse(format!("eps {} must be positive and at most {EPS_MAX}", self.eps));
        }
        if self.text_len.checked_mul(self.text_dim).is_none_or(|n| n > TEXT_ELEMENTS_MAX) {
            refuse(format!(
                "an encoded prompt of text_len {} · text_dim {} has more than {TEXT_ELEMENTS_MAX} elements",
                self.text_len, self.text_dim
            ));
        }
        if self.layers > LAYERS_MAX {
            refuse(format!("{} blocks exceed the limit of {LAYERS_MAX}", self.layers));
        }
        let (d, [rows, cols]) = (self.dim, self.patch);
        let tensors: [(&str, &[u64]); 6] = [
            ("the feed-forward weight, ffn_dim · dim", &[self.ffn_dim, d]),
            ("the time projection, 6 · dim · dim", &[6, d, d]),
            ("the time embedding, freq_dim · dim", &[self.freq_dim, d]),
            ("the patch embedding, patch · channels · dim", &[rows, cols, self.channels, d]),
            ("the text, text_len · dim", &[self.text_len, d]),
            ("the text embedding, text_dim · dim", &[self.text_dim, d]),
        ];
        for (what, extents) in tensors {
            if checked_elements(extents).is_none() {
                refuse(format!("{what} = {extents:?} has more than {ELEMENTS_MAX} elements"));
            }
        }
        ds
    }
}

/// The accepted values of a key that selects a variant of the model.
enum AcceptedValues {
    /// One of these values, as JSON.
    Values(&'static [&'static str]),
    /// Any integer from 1: `stream.toml` sets the frames per chunk, not this key.
    Count,
}

type VariantKey = (&'static str, AcceptedValues);

const MODEL_TYPE: VariantKey = ("model_type", AcceptedValues::Values(&["\"t2v\""]));
const QK_NORM: VariantKey = ("qk_norm", AcceptedValues::Values(&["true", "\"rms_norm_across_heads\""]));
const CROSS_ATTN_NORM: VariantKey = ("cross_attn_norm", AcceptedValues::Values(&["true"]));

/// Keys of the original format that select a model variant, with the accepted values.
const ORIGINAL_VARIANTS: &[VariantKey] = &[
    MODEL_TYPE,
    QK_NORM,
    CROSS_ATTN_NORM,
    ("window_size", AcceptedValues::Values(&["[-1,-1]"])),
    ("num_frame_per_block", AcceptedValues::Count),
];

/// Keys of the diffusers format that select a model variant, with the accepted values.
const DIFFUSERS_VARIANTS: &[VariantKey] = &[
    MODEL_TYPE,
    QK_NORM,
    CROSS_ATTN_NORM,
    ("added_kv_proj_dim", AcceptedValues::Values(&["null"])),
    ("image_dim", AcceptedValues::Values(&["null"])),
    ("pos_embed_seq_len", AcceptedValues::Values(&["null"])),
];

/// Rejects every variant of the model except the implemented one.
fn check_variants(f: &mut ConfigReader, file: &str, keys: &[VariantKey]) {
    for (key, accepted) in keys {
        let Some(found) = f.take_value(key) else { continue };
        let (fits, want) = match accepted {
            AcceptedValues::Values(values) => {
                (values.contains(&found.to_string().as_str()), format_choices(values))
            }
            AcceptedValues::Count => (found.as_u64().is_some_and(|n| n > 0), "an integer from 1".to_string()),
        };
        if !fits {
            f.diagnostics.push(
                Diagnostic::error(
                    &T0410,
                    format!("`{key}` is {found}: this model variant is not implemented"),
                )
                .with_label(file, format!("found {found}"))
                .with_hint(format!("accepted: {want}")),
            );
        }
    }
}

/// Reads a number of latent frames. The published code writes −1 for a window of all frames and 0 for no
/// sink, which are also its defaults, so neither states anything.
fn read_trained_frames(f: &mut ConfigReader, key: &'static str) -> Option<u64> {
    let found = f.take_value(key).filter(|v| !v.is_null())?;
    let frames = found.as_i64().and_then(|n| u32::try_from(n.max(0)).ok().filter(|_| n >= -1));
    if frames.is_none() {
        f.diagnostics.push(
            Diagnostic::error(&T0410, format!("`{key}` is {found}: it must be a number of latent frames"))
                .with_hint("accepted: an integer from -1"),
        );
    }
    frames.filter(|n| *n > 0).map(u64::from)
}

fn read_patch(f: &mut ConfigReader) -> [u64; 2] {
    let list = f.read_numbers("patch_size", &[1.0, 2.0, 2.0]);
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

fn check_same_channels(f: &mut ConfigReader, input: u64, output: u64) {
    if input != output {
        f.diagnostics.push(Diagnostic::error(
            &T0410,
            format!(
                "{input} input channels and {output} output channels: a streaming DiT feeds its output back"
            ),
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
    fn both_formats_give_one_model() {
        assert_eq!(WanConfig::parse("a", ORIGINAL).unwrap(), WanConfig::parse("b", DIFFUSERS).unwrap());
    }

    #[test]
    fn text_round_trips() {
        let c = WanConfig::parse("a", ORIGINAL).unwrap();
        assert_eq!(WanConfig::parse("b", &c.to_json()).unwrap(), c);
    }

    #[test]
    fn the_rotary_table_round_trips() {
        for source in [ORIGINAL, DIFFUSERS] {
            let mut c = WanConfig::parse("a", source).unwrap();
            c.rope_frames = 77;
            assert_eq!(WanConfig::parse("b", &c.to_json()).unwrap(), c);
        }
    }

    #[test]
    fn a_stated_window_and_sink_round_trip_and_bind_the_stream() {
        let text = |keys: &str| ORIGINAL.replace("\"t2v\"", &format!("\"t2v\",{keys}"));
        let none = WanConfig::parse("a", &text(r#""local_attn_size":-1,"sink_size":0"#)).unwrap();
        assert_eq!(none, WanConfig::parse("a", ORIGINAL).unwrap());
        let wan = WanConfig::parse("a", &text(r#""local_attn_size":12,"sink_size":3"#)).unwrap();
        assert_eq!((wan.trained_window, wan.trained_sink), (Some(12), Some(3)));
        assert_eq!(WanConfig::parse("b", &wan.to_json()).unwrap(), wan);
        let parse_cache = |cache: &str| {
            let text = format!("[video]\nwidth = 832\nheight = 480\n[cache]\n{cache}");
            crate::StreamConfig::parse("s", &text, &wan).map_err(|ds| ds[0].message.clone())
        };
        parse_cache("window_frames = 12\nsink = 3").unwrap();
        assert!(parse_cache("window_frames = 12").unwrap_err().contains("sink_size 3"));
        assert!(parse_cache("window_frames = 21\nsink = 3").unwrap_err().contains("local_attn_size 12"));
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
            ",\"text_len\":1000000000",
            ",\"eps\":1e308",
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
    fn other_variants_are_rejected() {
        let original = |extra: &str| {
            WanConfig::parse("c.json", &ORIGINAL.replace("\"t2v\"", &format!("\"t2v\",{extra}")))
        };
        for fine in [
            r#""qk_norm":true,"cross_attn_norm":true,"window_size":[-1, -1]"#,
            r#""local_attn_size":-1,"sink_size":0,"num_frame_per_block":3"#,
            r#""local_attn_size":21,"sink_size":3,"qk_norm":"rms_norm_across_heads""#,
        ] {
            original(fine).unwrap();
        }
        for (key, value) in [
            ("qk_norm", "false"),
            ("cross_attn_norm", "false"),
            ("window_size", "[4,4]"),
            ("local_attn_size", "1.5"),
            ("sink_size", "-2"),
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

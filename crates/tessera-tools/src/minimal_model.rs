//! Minimal models that are generated on demand, so that drills and benchmarks need no files of the project:
//! random weights, a vocabulary of eight words, and frames of 16 by 16 pixels. One has a word table and a
//! lossless decoder, the other a UMT5 text encoder and a causal VAE.

use std::fmt::Write as _;
use std::path::Path;

use tessera_base::Diagnostics;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_models::{
    Umt5Config, VaeConfig, WanConfig, expected_vae_weights, expected_weights, umt5_weights,
};

use tessera::files::write_error;
use tessera::{Model, Overrides};

/// A prompt whose words are in the vocabulary of both models.
pub const PROMPT: &str = "a red circle moves";

const CONFIG_JSON: &str = r#"{
  "_class_name": "WanModel", "model_type": "t2v", "dim": 48, "ffn_dim": 96, "freq_dim": 16, "in_dim": 48,
  "out_dim": 48, "num_heads": 4, "num_layers": 2, "text_len": 4, "text_dim": 8, "patch_size": [1, 2, 2], "eps": 1e-06
}
"#;

const STREAM_TOML: &str = r#"[video]
width = 16
height = 16
fps = 24

[latent]
stride = [4, 2, 2]
chunk_frames = 3

[cache]
mode = "resident"
window_frames = 6
bias = 1.0

[schedule]
steps = [1000, 500]
shift = 5.0
warp = true
prediction = "x0"

[text]
encoder = "words"

[decoder]
kind = "space_time_depth"
"#;

const VOCABULARY: [&str; 8] = ["a", "red", "blue", "circle", "square", "moves", "left", "right"];

/// Settings of the model with media: one level of the VAE halves rows, columns and frames, and one only
/// rows and columns.
const MEDIA_STREAM_TOML: &str = r#"[video]
width = 16
height = 16
fps = 24

[latent]
stride = [2, 4, 4]
chunk_frames = 3

[cache]
mode = "resident"
window_frames = 6

[schedule]
steps = [1000, 500]
shift = 5.0
warp = true
prediction = "x0"

[text]
encoder = "umt5"

[decoder]
kind = "wan_vae"
"#;

const VAE_JSON: &str = r#"{
  "_class_name": "AutoencoderKLWan", "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1,
  "temperal_downsample": [false, true], "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 2.0, 1.0, 0.5]
}
"#;

const UMT5_JSON: &str = r#"{
  "model_type": "umt5", "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "num_layers": 1, "vocab_size": 11,
  "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20
}
"#;

/// Writes the model with a word table into an existing folder and opens it.
///
/// # Errors
/// T0014 if a file cannot be written.
pub fn create_model(dir: &Path) -> Result<Model, Diagnostics> {
    let wan = WanConfig::parse("config.json", CONFIG_JSON)?;
    let table = [("words.weight".to_string(), vec![VOCABULARY.len() as u64, wan.text_dim])];
    let files = [
        ("config.json", CONFIG_JSON.into()),
        ("stream.toml", STREAM_TOML.into()),
        ("vocab.txt", VOCABULARY.join("\n").into_bytes()),
        ("model.safetensors", generator_weights(&wan)),
        ("text_encoder.safetensors", encode_safetensors(table, WORD_DRAW)),
    ];
    write_and_open(dir, &files)
}

/// Writes the model with a UMT5 text encoder and a VAE into an existing folder and opens it.
///
/// # Errors
/// T0014 if a file cannot be written.
pub fn create_media_model(dir: &Path) -> Result<Model, Diagnostics> {
    // The channels of the VAE's latents, in place of those of a folded picture.
    let config = ["in_dim", "out_dim"].iter().fold(CONFIG_JSON.to_string(), |text, key| {
        text.replace(&format!("\"{key}\": 48"), &format!("\"{key}\": 4"))
    });
    let wan = WanConfig::parse("config.json", &config)?;
    let vae = VaeConfig::parse("vae/config.json", VAE_JSON)?;
    let text = Umt5Config::parse("text_encoder/config.json", UMT5_JSON)?;
    let vae = expected_vae_weights(&vae).into_iter().map(|w| (w.diffusers_name, w.shape));
    let text = umt5_weights(&text).into_iter().filter_map(|w| Some((w.aliases.into_iter().nth(1)?, w.shape)));
    let files = [
        ("config.json", config.into_bytes()),
        ("stream.toml", MEDIA_STREAM_TOML.into()),
        ("model.safetensors", generator_weights(&wan)),
        ("vae/config.json", VAE_JSON.into()),
        ("vae/diffusion_pytorch_model.safetensors", encode_safetensors(vae, VAE_DRAW)),
        ("text_encoder/config.json", UMT5_JSON.into()),
        ("text_encoder/model.safetensors", encode_safetensors(text, TEXT_DRAW)),
        ("tokenizer/tokenizer.json", tokenizer_json().into_bytes()),
    ];
    write_and_open(dir, &files)
}

fn write_and_open(dir: &Path, files: &[(&str, Vec<u8>)]) -> Result<Model, Diagnostics> {
    for (name, bytes) in files {
        let path = dir.join(name);
        let folder = path.parent().unwrap_or(dir);
        let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, bytes));
        written.map_err(|e| vec![write_error(&path, &e)])?;
    }
    Model::open(dir, &Overrides::default())
}

fn generator_weights(wan: &WanConfig) -> Vec<u8> {
    encode_safetensors(expected_weights(wan).into_iter().map(|w| (w.name, w.shape)), 0)
}

/// Returns a tokenizer that splits at spaces, with the ids 0 to 2 for padding, the end and unknown words.
fn tokenizer_json() -> String {
    let special = |id: usize, text: &str| {
        format!(
            r#"{{"id":{id},"content":"{text}","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}"#
        )
    };
    let words = ["<pad>", "</s>", "<unk>"].into_iter().chain(VOCABULARY);
    let ids: Vec<String> = words.enumerate().map(|(id, word)| format!("\"{word}\":{id}")).collect();
    let sequence = r#"{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}"#;
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{},{},{}],"normalizer":null,
"pre_tokenizer":{{"type":"WhitespaceSplit"}},"decoder":null,
"post_processor":{{"type":"TemplateProcessing","single":[{sequence}],"pair":[{sequence},{{"Sequence":{{"id":"B","type_id":0}}}}],
"special_tokens":{{"</s>":{{"id":"</s>","ids":[1],"tokens":["</s>"]}}}}}},
"model":{{"type":"WordLevel","unk_token":"<unk>","vocab":{{{}}}}}}}"#,
        special(0, "<pad>"),
        special(1, "</s>"),
        special(2, "<unk>"),
        ids.join(",")
    )
}

/// First draws of the random tensors of each part; the generator's begin with 0.
const WORD_DRAW: u32 = 1000;
const VAE_DRAW: u32 = 2000;
const TEXT_DRAW: u32 = 3000;

/// Encodes random f32 tensors as a safetensors file. Each tensor has a name and a shape; the first has the
/// random draw `first_draw`, and each later one the next draw.
pub(crate) fn encode_safetensors(
    tensors: impl IntoIterator<Item = (String, Vec<u64>)>,
    first_draw: u32,
) -> Vec<u8> {
    let (mut header, mut data) = (String::new(), Vec::new());
    for (draw, (name, shape)) in (first_draw..).zip(tensors) {
        let mut values = vec![0.0f32; shape.iter().product::<u64>() as usize];
        fill_normals(DrawKey { seed: 1, chunk: 0, draw }, 0, &mut values);
        // Norm weights scale their input, so they are close to one. Other weights are scaled by
        // their fan-in to keep the magnitude of sums.
        let fan_in = match &shape[..] {
            [_, columns @ ..] if !columns.is_empty() => columns.iter().product::<u64>() as f32,
            _ => values.len() as f32,
        };
        let is_norm = name.contains("norm") || name.ends_with("gamma");
        let (scale, center) = if is_norm { (0.1, 1.0) } else { (fan_in.sqrt().recip(), 0.0) };
        let begin = data.len();
        data.extend(values.iter().flat_map(|v| (v * scale + center).to_le_bytes()));
        let comma = if header.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(
            header,
            r#"{comma}"{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{begin},{}]}}"#,
            data.len()
        );
    }
    header = format!("{{{header}}}");
    header.extend(std::iter::repeat_n(' ', (8 - header.len() % 8) % 8));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

//! A minimal model that is generated on demand, so that drills need no files of the project: random
//! weights, a vocabulary of eight words, and frames of 16 by 16 pixels.

use std::fmt::Write as _;
use std::path::Path;

use tessera_base::random::{DrawKey, fill_normals};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::{WanConfig, expected_weights};

use tessera::files::write_error;
use tessera::{Model, Overrides};

/// Prompt of every streamed drill; the minimal model's vocabulary has all of its words.
pub(super) const PROMPT: &str = "a red circle moves";

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

/// Writes the model into an existing folder and opens it.
///
/// # Errors
/// T0014 if a file cannot be written.
pub(super) fn create_model(dir: &Path) -> Result<Model, Diagnostics> {
    let wan = WanConfig::parse("config.json", CONFIG_JSON)?;
    let mut tensors = Vec::new();
    for (draw, weight) in (0..).zip(expected_weights(&wan)) {
        tensors.push((weight.name, weight.shape, draw));
    }
    let table = [("words.weight".to_string(), vec![VOCABULARY.len() as u64, wan.text_dim], 1000)];
    let write = |name: &str, bytes: &[u8]| -> Result<(), Diagnostic> {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(|e| write_error(&path, &e))
    };
    let all = write("config.json", CONFIG_JSON.as_bytes())
        .and_then(|()| write("stream.toml", STREAM_TOML.as_bytes()))
        .and_then(|()| write("vocab.txt", VOCABULARY.join("\n").as_bytes()))
        .and_then(|()| write("model.safetensors", &encode_safetensors(&tensors)))
        .and_then(|()| write("text_encoder.safetensors", &encode_safetensors(&table)));
    all.map_err(|d| vec![d])?;
    Model::open(dir, &Overrides::default())
}

/// Encodes random f32 tensors as a safetensors file. Each tensor has a name, a shape and the index
/// of its random draw.
fn encode_safetensors(tensors: &[(String, Vec<u64>, u32)]) -> Vec<u8> {
    let (mut header, mut data) = (String::new(), Vec::new());
    for (name, shape, draw) in tensors {
        let mut values = vec![0.0f32; shape.iter().product::<u64>() as usize];
        fill_normals(DrawKey { seed: 1, chunk: 0, draw: *draw }, 0, &mut values);
        // Norm weights scale their input, so they are close to one. Other weights are scaled by
        // their column count to keep the magnitude of sums.
        let columns = shape.last().copied().unwrap_or(1) as f32;
        let (scale, center) = if name.contains("norm") { (0.1, 1.0) } else { (columns.sqrt().recip(), 0.0) };
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

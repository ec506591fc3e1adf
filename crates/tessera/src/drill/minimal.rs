//! A model small enough to be made on the spot, so that drills need no files of the project: random weights, eight
//! words, pictures of 16 by 16.

use std::fmt::Write as _;
use std::path::Path;

use tessera_base::random::{DrawKey, normals};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::{WanConfig, expected_weights};

use crate::files::unwritable;
use crate::{Model, Overrides};

/// What the drills show.
pub(super) const PROMPT: &str = "a red circle moves";

const CONFIG: &str = r#"{
  "_class_name": "WanModel", "model_type": "t2v", "dim": 48, "ffn_dim": 96, "freq_dim": 16, "in_dim": 48,
  "out_dim": 48, "num_heads": 4, "num_layers": 2, "text_len": 4, "text_dim": 8, "patch_size": [1, 2, 2], "eps": 1e-06
}
"#;

const STREAM: &str = r#"[video]
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

const WORDS: [&str; 8] = ["a", "red", "blue", "circle", "square", "moves", "left", "right"];

/// Makes the model in a folder that is there, and opens it.
///
/// # Errors
/// What cannot be written.
pub(super) fn make(dir: &Path) -> Result<Model, Diagnostics> {
    let wan = WanConfig::parse("config.json", CONFIG)?;
    let mut tensors = Vec::new();
    for (draw, weight) in (0..).zip(expected_weights(&wan)) {
        tensors.push((weight.name, weight.shape, draw));
    }
    let table = [("words.weight".to_string(), vec![WORDS.len() as u64, wan.text_dim], 1000)];
    let write = |name: &str, bytes: &[u8]| -> Result<(), Diagnostic> {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(|e| unwritable(&path, &e))
    };
    let all = write("config.json", CONFIG.as_bytes())
        .and_then(|()| write("stream.toml", STREAM.as_bytes()))
        .and_then(|()| write("vocab.txt", WORDS.join("\n").as_bytes()))
        .and_then(|()| write("model.safetensors", &safetensors(&tensors)))
        .and_then(|()| write("text_encoder.safetensors", &safetensors(&table)));
    all.map_err(|d| vec![d])?;
    Model::open(dir, &Overrides::default())
}

/// A safetensors file of random f32 tensors: name, shape, number of the draw.
fn safetensors(tensors: &[(String, Vec<u64>, u32)]) -> Vec<u8> {
    let (mut header, mut data) = (String::new(), Vec::new());
    for (name, shape, draw) in tensors {
        let mut values = vec![0.0f32; shape.iter().product::<u64>() as usize];
        normals(DrawKey { seed: 1, chunk: 0, draw: *draw }, 0, &mut values);
        // Norms multiply, everything else adds up over its columns.
        let columns = shape.last().copied().unwrap_or(1) as f32;
        let (scale, around) = if name.contains("norm") { (0.1, 1.0) } else { (columns.sqrt().recip(), 0.0) };
        let begin = data.len();
        data.extend(values.iter().flat_map(|v| (v * scale + around).to_le_bytes()));
        let comma = if header.is_empty() { "" } else { "," };
        // Writing to a String does not fail.
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

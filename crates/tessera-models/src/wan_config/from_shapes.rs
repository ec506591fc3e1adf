//! The DiT's dimensions from the shapes of its tensors, for checkpoints without a config.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};

use super::WanConfig;
use crate::codes::T0413;

/// Width of a head in every published Wan model. No tensor shows it.
const HEAD_DIM: u64 = 128;

impl WanConfig {
    /// Derives the dimensions of a Wan2.1 DiT from the shapes of its tensors, in the original or the
    /// diffusers naming and without a prefix. What no tensor shows has the value of the published
    /// models: heads of width 128, prompts of 512 rows, an epsilon of 1e-6 and 1024 positions.
    ///
    /// # Errors
    /// T0413 if the tensors are not those of a Wan DiT, or as [`WanConfig::parse`].
    pub fn from_shapes(file: &str, shapes: &BTreeMap<&str, &[u64]>) -> Result<WanConfig, Diagnostics> {
        let mut problems = Vec::new();
        let mut find = |names: [&str; 2], rank: usize| -> Vec<u64> {
            let found = names.iter().find_map(|name| Some((name, *shapes.get(name)?)));
            match found {
                Some((_, shape)) if shape.len() == rank && !shape.contains(&0) => return shape.to_vec(),
                Some((name, shape)) => problems.push(format!("{name} is {shape:?}, expected {rank} dims")),
                None => problems.push(format!("no tensor {} or {}", names[0], names[1])),
            }
            vec![1; rank]
        };
        let patch = find(["patch_embedding.weight"; 2], 5);
        let text = find(["text_embedding.0.weight", "condition_embedder.text_embedder.linear_1.weight"], 2);
        let time = find(["time_embedding.0.weight", "condition_embedder.time_embedder.linear_1.weight"], 2);
        let ffn = find(["blocks.0.ffn.0.weight", "blocks.0.ffn.net.0.proj.weight"], 2);
        let head = find(["head.head.weight", "proj_out.weight"], 2);
        let (dim, channels) = (patch[0], patch[1]);
        let width = patch[2..].iter().try_fold(channels, |n, x| n.checked_mul(*x));
        if patch[2] != 1 {
            problems.push(format!("patch_embedding.weight is {patch:?}: a patch spans {} frames", patch[2]));
        }
        if problems.is_empty() && width != Some(head[0]) {
            problems.push(format!("a patch of {patch:?} and {} output rows differ in channels", head[0]));
        }
        if problems.is_empty() && !dim.is_multiple_of(HEAD_DIM) {
            problems.push(format!("dim {dim} is not a multiple of the head width {HEAD_DIM}"));
        }
        if !problems.is_empty() {
            let mut d = Diagnostic::error(&T0413, "the tensors are not those of a Wan2.1 generator")
                .with_label(file, format!("{} of the needed tensors do not fit", problems.len()))
                .with_hint("name the generator's checkpoint, or put its config.json beside it");
            d.notes = problems;
            return Err(vec![d]);
        }
        let config = WanConfig {
            dim,
            ffn_dim: ffn[0],
            freq_dim: time[1],
            channels,
            heads: dim / HEAD_DIM,
            trained_window: None,
            trained_sink: None,
            layers: count_blocks(shapes),
            text_len: 512,
            text_dim: text[1],
            patch: [patch[3], patch[4]],
            eps: 1e-6,
            rope_frames: 1024,
        };
        let ds = config.find_contradictions(file);
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }
}

/// Returns one more than the greatest index of a block: a missing block is then reported by name.
fn count_blocks(shapes: &BTreeMap<&str, &[u64]>) -> u64 {
    let index = |name: &str| name.strip_prefix("blocks.")?.split('.').next()?.parse::<u64>().ok();
    shapes.keys().filter_map(|name| index(name)).max().unwrap_or(0).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expected_weights;

    fn check(text: &str, is_diffusers: bool) {
        let config = WanConfig::parse("c", text).unwrap();
        let weights = expected_weights(&config);
        let shapes = weights
            .iter()
            .map(|w| (if is_diffusers { w.diffusers_name.as_str() } else { w.name.as_str() }, &w.shape[..]))
            .collect();
        assert_eq!(WanConfig::from_shapes("f", &shapes).unwrap(), config);
    }

    #[test]
    fn both_namings_of_both_published_sizes_give_their_config() {
        for is_diffusers in [false, true] {
            check(r#"{"dim":1536,"ffn_dim":8960,"num_heads":12,"num_layers":30}"#, is_diffusers);
            check(r#"{"dim":5120,"ffn_dim":13824,"num_heads":40,"num_layers":40}"#, is_diffusers);
        }
    }

    #[test]
    fn other_tensors_are_refused_with_what_is_missing() {
        let config = WanConfig::parse("c", r#"{"dim":60,"ffn_dim":8,"num_heads":5,"num_layers":1}"#).unwrap();
        let weights = expected_weights(&config);
        let shapes: BTreeMap<&str, &[u64]> =
            weights.iter().map(|w| (w.name.as_str(), &w.shape[..])).collect();
        let refuse = |shapes: &BTreeMap<&str, &[u64]>| {
            let ds = WanConfig::from_shapes("f", shapes).unwrap_err();
            assert_eq!((ds.len(), ds[0].code.id), (1, "T0413"));
            ds[0].notes.join("; ")
        };
        assert_eq!(refuse(&shapes), "dim 60 is not a multiple of the head width 128");
        assert_eq!(refuse(&BTreeMap::new()).matches("no tensor").count(), 5);
        let mut deep = shapes.clone();
        deep.insert("patch_embedding.weight", &[60, 16, 2, 2, 2]);
        assert!(refuse(&deep).contains("spans 2 frames"));
        deep.insert("patch_embedding.weight", &[60, 36, 1, 2, 2]);
        assert!(refuse(&deep).contains("64 output rows"));
        deep.insert("patch_embedding.weight", &[60, 16]);
        assert!(refuse(&deep).contains("expected 5 dims"));
    }
}

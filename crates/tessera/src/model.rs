//! A model's folder: its two configs, its weights, its text encoder.

use std::ops::Range;
use std::path::{Path, PathBuf};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_device::numbers::{over_scales, scales_of};
use tessera_device::{Seat, WeightSource};
use tessera_ir::Type;
use tessera_models::{TextEncoder, VideoModel, WanConfig, Words, expected_weights};
use tessera_weights::{Expected, WeightFiles, WeightSet};

use crate::Plan;

/// No model there.
pub static T0010: Code = Code {
    id: "T0010",
    title: "no model in this folder",
    page: "A model is a folder with config.json (the model's own), stream.toml (how it is streamed) and weights as \
safetensors. The folder, one of the first two, or the vocab.txt of a word-table text encoder is not there or cannot be read. The demo model lies in models/demo.",
};
/// The model cannot be streamed.
pub static T0016: Code = Code {
    id: "T0016",
    title: "model lacks a component that streaming needs",
    page: "A model without a text encoder can be planned and checked, but there is nothing to turn a prompt into. The \
recompute regime also needs a decoder: its anchor is a decoded frame. stream.toml names the components.",
};

/// A model and where it lies.
#[derive(Debug, Clone)]
pub struct Model {
    /// Folder name, for people.
    pub name: String,
    /// The folder.
    pub dir: PathBuf,
    /// Configs.
    pub video: VideoModel,
}

/// Settings that a command line may change.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// Cache regime: recompute or not.
    pub recompute: Option<bool>,
    /// Timesteps.
    pub steps: Option<Vec<f64>>,
}

impl Model {
    /// Reads the configs of a model's folder.
    ///
    /// # Errors
    /// T0010, or everything that is wrong with either config.
    pub fn open(dir: &Path, overrides: &Overrides) -> Result<Model, Diagnostics> {
        no_folder(dir).map_err(|d| vec![d])?;
        let read = |file: &str| {
            let path = dir.join(file);
            std::fs::read_to_string(&path)
                .map(|text| (path.display().to_string(), text))
                .map_err(|e| Diagnostic::error(&T0010, format!("{} cannot be read: {e}", path.display())))
        };
        let (config, stream) = match (read("config.json"), read("stream.toml")) {
            (Ok(c), Ok(s)) => (c, s),
            (c, s) => return Err([c.err(), s.err()].into_iter().flatten().collect()),
        };
        let mut video = VideoModel::parse((&config.0, &config.1), (&stream.0, &stream.1))?;
        if let Some(recompute) = overrides.recompute {
            video.stream.recompute = recompute;
        }
        if let Some(steps) = &overrides.steps {
            video.stream.steps.clone_from(steps);
        }
        let ds = video.stream.contradictions("command line", &video.wan);
        if !ds.is_empty() {
            return Err(ds);
        }
        let name = dir.file_name().map_or("model".to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Model { name, dir: dir.to_path_buf(), video })
    }

    /// A model's folder under a sealed plan: the plan's settings hold, the folder only says where the files are.
    ///
    /// # Errors
    /// T0010 when there is no such folder.
    pub fn under(dir: &Path, plan: &Plan) -> Result<Model, Diagnostic> {
        no_folder(dir)?;
        Ok(Model { name: plan.model.clone(), dir: dir.to_path_buf(), video: plan.video.clone() })
    }

    /// Opens the weights and compares them with what the config asks for.
    ///
    /// # Errors
    /// One diagnostic with everything that is missing, extra or misshapen, or why the files cannot be read.
    pub fn weights(&self) -> Result<Weights, Diagnostics> {
        let expected: Vec<Expected> = expected_weights(&self.video.wan)
            .into_iter()
            .map(|w| Expected { name: w.name, aliases: vec![w.diffusers], shape: w.shape })
            .collect();
        let set = WeightFiles::open(&self.dir)?.resolve(&expected)?;
        Ok(Weights { set, wan: self.video.wan.clone() })
    }

    /// Opens the weights of one file under the names that they have there, which need not be all.
    pub(crate) fn some_weights(&self, file: &str) -> Result<Weights, Diagnostics> {
        let set = WeightFiles::open_file(&self.dir.join(file)).map_err(|d| vec![d])?.resolve_as_is()?;
        Ok(Weights { set, wan: self.video.wan.clone() })
    }

    /// Opens the text encoder.
    ///
    /// # Errors
    /// T0016 when there is none, or what is wrong with its files.
    pub fn words(&self) -> Result<Words, Diagnostics> {
        if self.video.stream.text != TextEncoder::Words {
            return Err(vec![
                Diagnostic::error(&T0016, format!("{} names no text encoder", self.name))
                    .at(self.dir.join("stream.toml").display().to_string(), "[text] encoder = \"none\""),
            ]);
        }
        let vocab = self.dir.join("vocab.txt");
        let words = std::fs::read_to_string(&vocab).map_err(|e| {
            vec![Diagnostic::error(&T0010, format!("{} cannot be read: {e}", vocab.display()))]
        })?;
        let file = self.dir.join("text_encoder.safetensors");
        let set = WeightFiles::open_file(&file).map_err(|d| vec![d])?.resolve_as_is()?;
        let table = set.read_whole_f32("words.weight").map_err(|d| vec![d])?;
        Words::new(&words, table, self.video.wan.text_dim, self.video.wan.text_len).map_err(|d| vec![*d])
    }
}

fn no_folder(dir: &Path) -> Result<(), Diagnostic> {
    if dir.is_dir() {
        return Ok(());
    }
    Err(Diagnostic::error(&T0010, format!("there is no folder {}", dir.display()))
        .hint("give the path of a model's folder, for example models/demo"))
}

/// A model's weights, read slice by slice.
#[derive(Debug, Clone)]
pub struct Weights {
    set: WeightSet,
    wan: WanConfig,
}

impl Weights {
    /// Digest of names, dtypes, shapes and the ends of every tensor: equal for both spellings of one checkpoint, and
    /// different for another checkpoint of the same shapes.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.set.sample_digest()
    }

    /// Whether other weights have the same names, dtypes and shapes.
    ///
    /// # Errors
    /// T0506 with everything that differs.
    pub fn may_become(&self, other: &Weights) -> Result<(), Diagnostic> {
        self.set.may_become(&other.set)
    }

    /// A whole tensor.
    pub(crate) fn whole(&self, name: &str) -> Result<Vec<f32>, Diagnostic> {
        self.set.read_whole_f32(name)
    }

    /// Which part of the tensor in the file a piece is.
    fn ranges(&self, name: &str, ty: &Type, load: Option<&str>, seat: &Seat) -> Vec<Range<u64>> {
        let pieces = ty.layout.ranges(&ty.shape, &seat.mesh, seat.coord());
        let piece = pieces.into_iter().map(|(start, len)| start..start + len);
        match load {
            Some("patch") => {
                let [ph, pw] = self.wan.patch;
                piece.take(1).chain([0..self.wan.channels, 0..1, 0..ph, 0..pw]).collect()
            }
            // Whole rows, whichever columns are asked for: a scale is of the row.
            Some("e4m3" | "e4m3.scale") => {
                let columns = self.set.shape(name).and_then(|s| s.get(1)).copied();
                piece.take(1).chain(columns.map(|n| 0..n)).collect()
            }
            _ => piece.collect(),
        }
    }
}

impl WeightSource for Weights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, Diagnostic> {
        let mut raw = self.set.read_f32(name, &self.ranges(name, ty, load, seat))?;
        let width = || self.set.shape(name).and_then(|s| s.get(1)).map_or(1, |n| *n as usize);
        Ok(match load {
            Some("e4m3") => {
                over_scales(&mut raw, width());
                columns(raw, width(), ty, seat)
            }
            Some("e4m3.scale") => scales_of(&raw, width()),
            Some("patch") => {
                let [ph, pw] = self.wan.patch;
                patch_rows(&raw, self.wan.channels as usize, (ph * pw) as usize)
            }
            _ => raw,
        })
    }

    fn check(&mut self, name: &str, ty: &Type, load: Option<&str>, seat: &Seat) -> Result<(), Diagnostic> {
        self.set.check(name, &self.ranges(name, ty, load, seat))
    }
}

/// Of whole rows the columns that a piece has.
fn columns(rows: Vec<f32>, width: usize, ty: &Type, seat: &Seat) -> Vec<f32> {
    let piece = ty.layout.ranges(&ty.shape, &seat.mesh, seat.coord()).get(1).copied();
    match piece.map(|(start, len)| start as usize..(start + len) as usize) {
        Some(piece) if piece.len() < width && piece.end <= width => {
            rows.chunks_exact(width).flat_map(|row| &row[piece.clone()]).copied().collect()
        }
        _ => rows,
    }
}

/// Rows of (channel, cell) to rows of (cell, channel).
fn patch_rows(raw: &[f32], channels: usize, cells: usize) -> Vec<f32> {
    let mut out = vec![0.0; raw.len()];
    for (from, to) in raw.chunks_exact(channels * cells).zip(out.chunks_exact_mut(channels * cells)) {
        for c in 0..channels {
            for cell in 0..cells {
                to[cell * channels + c] = from[c * cells + cell];
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_folder_is_named() {
        let ds = Model::open(Path::new("/nowhere/at/all"), &Overrides::default()).unwrap_err();
        assert_eq!(ds[0].code.id, "T0010");
        assert!(ds[0].message.contains("/nowhere/at/all"));
    }

    #[test]
    fn scales_are_of_the_whole_tensors_rows() {
        use tessera_device::numbers::scale_of;
        use tessera_ir::DType;
        use tessera_mesh::{Axis, AxisLayout, Rank, Shard};
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd");
        let model = Model::open(&dir, &Overrides::default()).unwrap();
        let mut weights = model.weights().unwrap();
        let name = "blocks.0.ffn.0.weight";
        let [m, k] = weights.set.shape(name).unwrap()[..] else { panic!("a matrix") };
        let all = weights.set.read_whole_f32(name).unwrap();
        let mesh: tessera_mesh::Mesh = "tp=2".parse().unwrap();
        for rank in [0, 1] {
            let seat = Seat { mesh, rank: Rank(rank) };
            for dim in [0, 1] {
                let shard = AxisLayout::Shard(Shard::of(dim, [m, k][dim], 1, 2).unwrap());
                let mut shape = [m, k];
                shape[dim] /= 2;
                let ty = Type::new(DType::E4m3, shape).on(Axis::Tp, shard);
                let piece = ty.layout.ranges(&ty.shape, &mesh, seat.coord());
                let [rows, columns] = [0, 1].map(|d| piece[d].0 as usize..(piece[d].0 + piece[d].1) as usize);
                let found = weights.read(name, &ty, Some("e4m3"), &seat).unwrap();
                let row = |i: usize| &all[i * k as usize..][..k as usize];
                let expected: Vec<f32> = rows
                    .clone()
                    .flat_map(|i| row(i)[columns.clone()].iter().map(move |x| x / scale_of(row(i))))
                    .collect();
                assert_eq!(found, expected, "dim {dim} of rank {rank}");
                weights.check(name, &ty, Some("e4m3"), &seat).unwrap();
                if dim == 0 {
                    let ty = Type::new(DType::F32, [m / 2]).on(Axis::Tp, shard);
                    let scales = weights.read(name, &ty, Some("e4m3.scale"), &seat).unwrap();
                    assert_eq!(scales, rows.map(|i| scale_of(row(i))).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn patch_weights_become_channel_fastest() {
        let raw: Vec<f32> = (0..12).map(|i| i as f32).collect();
        assert_eq!(patch_rows(&raw, 3, 4)[..6], [0.0, 4.0, 8.0, 1.0, 5.0, 9.0]);
    }
}

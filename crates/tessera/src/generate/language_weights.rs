//! The weights of a language model: the tensors of its files, the rotary frequencies that its
//! config states, and the biases of routers that the mapping states.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::dtype::{divide_by_row_scales, row_scales};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::{ExpertTensorNames, Opcode, Type, WeightLoad};
use tessera_mesh::Rank;
use tessera_models::{DecoderModel, ROTARY_FREQUENCIES};
use tessera_plan::ROUTER_BIAS;
use tessera_verify::SealedPlan;
use tessera_weights::{ExpectedTensor, WeightFiles, WeightSet};

use super::LanguagePlan;
use crate::model::select_columns;
use crate::weights_origin::WeightsBase;

/// The weights of a language model.
#[derive(Debug)]
pub(super) struct LanguageWeights {
    set: WeightSet,
    frequencies: Vec<f32>,
    /// The biases of routers that the mapping states.
    router_bias: Vec<f32>,
}

impl LanguageWeights {
    /// Finds every tensor that the programs of a plan read.
    ///
    /// # Errors
    /// T0501 to T0508: a missing shard, a damaged file, or tensors that are missing, superfluous or of another
    /// shape.
    pub(super) fn open(place: &LanguagePlace, plan: &LanguagePlan) -> Result<LanguageWeights, Diagnostics> {
        let (model, sealed) = (&plan.model, &plan.sealed);
        let set = match place.base {
            WeightsBase::Synthetic(seed) => WeightSet::synthetic(seed, &list_expected(sealed)),
            WeightsBase::Files => open_files(&place.dir, model, sealed)?,
        };
        let router_bias = plan.mapping.experts.router.bias.iter().map(|x| *x as f32).collect();
        Ok(LanguageWeights { set, frequencies: model.rotary_frequencies(), router_bias })
    }
}

/// Where a rank finds the weights of a language model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanguagePlace {
    /// Folder of the model.
    pub dir: PathBuf,
    /// Whether the weights are those of the folder's files, or drawn from a seed.
    pub base: WeightsBase,
}

impl LanguagePlace {
    /// Returns the place of the weights in the files of a folder.
    #[must_use]
    pub fn from_files(dir: &Path) -> LanguagePlace {
        LanguagePlace { dir: dir.to_path_buf(), base: WeightsBase::Files }
    }
}

fn open_files(dir: &Path, model: &DecoderModel, plan: &SealedPlan) -> Result<WeightSet, Diagnostics> {
    let files = WeightFiles::open(dir)?;
    let stored: Vec<&str> = files.iter_tensors().map(|t| t.name).collect();
    // A checkpoint may hold the tied head a second time.
    let has_copy = model.extents.tied_embedding && stored.contains(&TIED_HEAD);
    let mut expected = list_expected(plan);
    // Layers that predict further tokens are known, and no program reads them.
    expected.extend(files.iter_tensors().filter(|t| model.is_left_out(t.name)).map(|t| ExpectedTensor {
        name: t.name.to_string(),
        aliases: Vec::new(),
        shape: t.shape.to_vec(),
    }));
    if has_copy {
        expected.push(ExpectedTensor {
            name: TIED_HEAD.to_string(),
            aliases: Vec::new(),
            shape: vec![model.extents.vocab, model.extents.width],
        });
    }
    files.resolve(&expected)
}

/// The head of a model without tied embeddings.
const TIED_HEAD: &str = "lm_head.weight";

/// Lists the tensors that the programs read, with their global shapes.
fn list_expected(plan: &SealedPlan) -> Vec<ExpectedTensor> {
    let mesh = plan.mesh();
    let mut shapes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for (phase, rank) in plan.phase_names().iter().flat_map(|p| mesh.iter().map(move |r: Rank| (p, r))) {
        let Some(program) = plan.rank_program(phase, rank) else { continue };
        for op in program.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let (Some(name), Some(result)) = (&op.name, op.results.first()) else { continue };
            // Scales are computed from the tensor of the same name.
            if op.weight_load() == Some(WeightLoad::E4m3Scale) {
                continue;
            }
            let ty = program.type_of(*result);
            shapes.insert(name.clone(), ty.layout.global_shape(&ty.shape, mesh));
        }
    }
    shapes.remove(ROTARY_FREQUENCIES);
    shapes.remove(ROUTER_BIAS);
    // An expert with copies is one tensor.
    let mut tensors: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for (name, shape) in shapes {
        match ExpertTensorNames::parse(&name) {
            Some(names) => tensors.extend((0..shape[0]).map(|i| (names.name_tensor(i), shape[1..].to_vec()))),
            None => {
                tensors.insert(name, shape);
            }
        }
    }
    let expect = |(name, shape)| ExpectedTensor { name, aliases: Vec::new(), shape };
    tensors.into_iter().map(expect).collect()
}

impl LanguageWeights {
    /// Returns a digest of the weights that is cheap to compute, to compare the files of ranks.
    pub(super) fn sample_digest(&self) -> [u8; 32] {
        self.set.sample_digest()
    }
}

impl WeightSource for LanguageWeights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        if name == ROTARY_FREQUENCIES {
            return Ok(self.frequencies.clone());
        }
        if name == ROUTER_BIAS {
            return Ok(self.router_bias.clone());
        }
        let dims = ty.layout.global_ranges(&ty.shape, &rank.mesh, rank.coord());
        let mut ranges: Vec<_> = dims.into_iter().map(|(start, len)| start..start + len).collect();
        if let Some("e4m3" | "e4m3.scale") = load {
            // A scale is that of a whole row, whichever columns the shard has.
            let width = self.set.tensor_shape(name).and_then(|s| s.get(1)).copied().unwrap_or(1);
            ranges.truncate(1);
            ranges.push(0..width);
            let mut rows = self.set.read_f32(name, &ranges)?;
            if load == Some("e4m3.scale") {
                return Ok(row_scales(&rows, width as usize));
            }
            divide_by_row_scales(&mut rows, width as usize);
            return Ok(select_columns(rows, width as usize, ty, rank));
        }
        let Some(experts) = ExpertTensorNames::parse(name) else { return self.set.read_f32(name, &ranges) };
        let mut all = Vec::new();
        for index in ranges[0].clone() {
            all.extend(self.set.read_f32(&experts.name_tensor(index), &ranges[1..])?);
        }
        Ok(all)
    }
}

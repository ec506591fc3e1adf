//! The weights of array programs: arrays of the calling process, or the file in which it hands them to the processes of
//! ranks.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype, View};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::dtype::{divide_by_row_scales, row_scales};
use tessera_device::{ExpertBank, MeshRank, WeightSource};
use tessera_ir::Type;
use tessera_weights::{ExpectedTensor, WeightFiles, WeightSet};

use super::array_experts::{ArrayExperts, ExpertsPlace};
use super::array_program::ArrayPrograms;
use super::host_array::HostArray;
use crate::codes::{T0014, T0090, T0091};
use crate::shard_copy::ArrayShard;

/// Where a rank finds the weights.
#[derive(Debug, Clone)]
pub(crate) enum ArrayWeightsPlace {
    /// In the memory of this process.
    Memory(Arc<HostWeights>),
    /// In a safetensors file.
    File(PathBuf),
}

/// Weights in the memory of this process.
#[derive(Debug)]
pub(crate) struct HostWeights {
    arrays: BTreeMap<String, HostArray>,
    digest: [u8; 32],
}

impl HostWeights {
    pub(super) fn new(arrays: BTreeMap<String, HostArray>) -> HostWeights {
        let mut hash = blake3::Hasher::new();
        for (name, array) in &arrays {
            hash.update(format!("{name:?} {array:?}").as_bytes());
            hash.update(&to_bytes(array.values()));
        }
        HostWeights { arrays, digest: *hash.finalize().as_bytes() }
    }

    fn find(&self, name: &str) -> Result<&HostArray, Diagnostic> {
        self.arrays.get(name).ok_or_else(|| Diagnostic::error(&T0091, format!("no weight `{name}`")))
    }
}

/// Writes weights to a file that every rank can map.
///
/// # Errors
/// T0014 if the file cannot be written.
pub(super) fn write_weights_file(
    arrays: &BTreeMap<String, HostArray>,
    path: &Path,
) -> Result<(), Diagnostic> {
    let views: Vec<(&String, FileView)> =
        arrays.iter().map(|(name, array)| (name, FileView::new(array))).collect();
    safetensors::serialize_to_file(views, None, path)
        .map_err(|e| Diagnostic::error(&T0014, format!("{} cannot be written: {e}", path.display())))
}

/// Reads the weights of a program, of these whole shapes, from a file.
///
/// # Errors
/// T0501 to T0508 for a file that does not hold them, and nothing else.
pub fn read_weights_file(
    path: &Path,
    shapes: impl IntoIterator<Item = (String, Vec<u64>)>,
) -> Result<BTreeMap<String, HostArray>, Diagnostics> {
    let files = WeightFiles::open_file(path).map_err(|d| vec![d])?;
    let expected: Vec<ExpectedTensor> =
        shapes.into_iter().map(|(name, shape)| ExpectedTensor { name, aliases: Vec::new(), shape }).collect();
    let set = files.resolve(&expected)?;
    let read = expected.into_iter().map(|ExpectedTensor { name, shape, .. }| {
        let ranges: Vec<_> = shape.iter().map(|extent| 0..*extent).collect();
        let values = set.read_f32(&name, &ranges).map_err(|d| vec![d])?;
        Ok((name, HostArray::from_vec(shape, values)))
    });
    read.collect()
}

/// An array as a tensor of a file. Its bytes are made when the tensor is written, one tensor at a time.
struct FileView {
    array: HostArray,
    shape: Vec<usize>,
}

impl FileView {
    fn new(array: &HostArray) -> FileView {
        FileView { array: array.clone(), shape: array.shape().iter().map(|n| *n as usize).collect() }
    }
}

impl View for FileView {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(to_bytes(self.array.values()))
    }

    fn data_len(&self) -> usize {
        4 * self.array.values().len()
    }
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The opened weights of a rank.
#[derive(Debug)]
pub(super) enum ArrayWeights {
    Memory(Arc<HostWeights>),
    File(Arc<WeightSet>),
}

impl ArrayWeights {
    /// Opens the weights that the programs of a plan read.
    ///
    /// # Errors
    /// T0501 to T0508 for a file that does not hold them.
    pub(super) fn open(
        place: &ArrayWeightsPlace,
        programs: &ArrayPrograms,
    ) -> Result<ArrayWeights, Diagnostics> {
        match place {
            ArrayWeightsPlace::Memory(weights) => Ok(ArrayWeights::Memory(Arc::clone(weights))),
            ArrayWeightsPlace::File(_) if programs.weights.is_empty() => {
                Ok(ArrayWeights::File(Arc::new(WeightSet::synthetic(0, &[]))))
            }
            ArrayWeightsPlace::File(path) => {
                let files = WeightFiles::open_file(path).map_err(|d| vec![d])?;
                let expected: Vec<ExpectedTensor> = (programs.weights.iter())
                    .map(|(name, shape)| ExpectedTensor {
                        name: name.clone(),
                        aliases: Vec::new(),
                        shape: shape.clone(),
                    })
                    .collect();
                files.resolve(&expected).map(|set| ArrayWeights::File(Arc::new(set)))
            }
        }
    }

    /// Returns a digest of the weights, which ranks compare.
    pub(super) fn digest(&self) -> [u8; 32] {
        match self {
            ArrayWeights::Memory(weights) => weights.digest,
            ArrayWeights::File(set) => set.sample_digest(),
        }
    }
}

impl WeightSource for ArrayWeights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        let ranges = ty.layout.global_ranges(&ty.shape, &rank.mesh, rank.coord());
        match load {
            None => self.read_shard(name, ranges),
            // A scale is that of a whole row, whichever columns the shard has.
            Some("e4m3" | "e4m3.scale") => {
                let width = self.matrix_width(name)?;
                let mut rows = self.read_shard(name, vec![ranges[0], (0, width)])?;
                let [_, (first, columns)] = ranges[..] else { return Ok(row_scales(&rows, width as usize)) };
                divide_by_row_scales(&mut rows, width as usize);
                let columns = first as usize..(first + columns) as usize;
                Ok(rows.chunks(width as usize).flat_map(|row| &row[columns.clone()]).copied().collect())
            }
            Some(load) => {
                let what = format!("the weight `{name}` is read with the transformation `{load}`");
                Err(Diagnostic::error(&T0090, what))
            }
        }
    }

    fn open_experts(
        &mut self,
        name: &str,
        ty: &Type,
        rank: &MeshRank,
    ) -> Result<Arc<dyn ExpertBank>, Diagnostic> {
        let whole = ty.layout.global_shape(&ty.shape, &rank.mesh);
        let shard = ArrayShard {
            ranges: ty.layout.global_ranges(&ty.shape, &rank.mesh, rank.coord()),
            whole: whole.clone(),
        };
        let place = match self {
            ArrayWeights::Memory(weights) => {
                let array = weights.find(name)?;
                if array.shape() != whole {
                    let what = format!("the weight `{name}` of shape {:?} is not {whole:?}", array.shape());
                    return Err(Diagnostic::error(&T0091, what));
                }
                ExpertsPlace::Memory(array.clone())
            }
            ArrayWeights::File(set) => {
                let ranges: Vec<_> = shard.ranges.iter().map(|(start, len)| *start..start + len).collect();
                set.check(name, &ranges)?;
                ExpertsPlace::File(Arc::clone(set))
            }
        };
        Ok(Arc::new(ArrayExperts { name: name.to_string(), place, shard }))
    }
}

impl ArrayWeights {
    /// Reads ranges (start, length) of the dims of a whole weight.
    fn read_shard(&mut self, name: &str, ranges: Vec<(u64, u64)>) -> Result<Vec<f32>, Diagnostic> {
        match self {
            ArrayWeights::File(set) => {
                let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| start..start + len).collect();
                set.read_f32(name, &ranges)
            }
            ArrayWeights::Memory(weights) => {
                let array = weights.find(name)?;
                let fits = |((start, len), whole): (&(u64, u64), &u64)| start + len <= *whole;
                if array.shape().len() != ranges.len() || !ranges.iter().zip(array.shape()).all(fits) {
                    let what =
                        format!("the weight `{name}` of shape {:?} has no shard {ranges:?}", array.shape());
                    return Err(Diagnostic::error(&T0091, what));
                }
                Ok(ArrayShard { whole: array.shape().to_vec(), ranges }.copy_from(array.values()))
            }
        }
    }

    /// Returns the length of the rows of a matrix.
    fn matrix_width(&self, name: &str) -> Result<u64, Diagnostic> {
        let shape = match self {
            ArrayWeights::File(set) => set.tensor_shape(name),
            ArrayWeights::Memory(weights) => Some(weights.find(name)?.shape()),
        };
        match shape {
            Some([_, width]) => Ok(*width),
            _ => Err(Diagnostic::error(&T0091, format!("the weight `{name}` is no matrix"))),
        }
    }
}

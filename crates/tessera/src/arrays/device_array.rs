//! Whole arrays whose shards lie in the memory of GPUs, and the GPUs of this process that hold them.

use std::collections::BTreeMap;
use std::fmt;

use tessera_base::Diagnostic;
use tessera_cuda::{GpuArray, GpuStream, RowRun};
use tessera_mesh::{Layout, Mesh, Rank, RankMap};

use super::host_array::HostArray;
use crate::codes::T0099;
use crate::gpu_placement::find_array_gpu;
use crate::gpus::GpuDiscovery;
use crate::shard_copy::ArrayShard;

/// An array of f32 with one shard per rank, each row-major in the memory of the rank's GPU. Cheap to
/// clone; the clones keep the memory alive. Nobody writes the values.
#[derive(Debug, Clone)]
pub struct DeviceArray {
    shape: Vec<u64>,
    shards: BTreeMap<u32, DeviceShard>,
}

#[derive(Debug, Clone)]
struct DeviceShard {
    place: ArrayShard,
    values: GpuArray,
}

/// The GPUs that the driver shows to this process.
#[derive(Debug)]
pub struct ArrayGpus(GpuDiscovery);

/// A tensor of another library in GPU memory. The stream is one of its GPU.
#[derive(Debug)]
pub struct DeviceTensor {
    /// The elements from the first to the last, with those between them that belong to another tensor.
    pub values: GpuArray,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Elements from one index of each dim to the next.
    pub strides: Vec<i64>,
    /// The stream on which the values arrived.
    pub stream: GpuStream,
}

/// Which shards are copied when an array is distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyRule {
    /// Those that cannot share the memory of the tensor.
    IfNeeded,
    /// All.
    Always,
    /// None: a shard that needs a copy is refused.
    Never,
}

impl ArrayGpus {
    /// Finds the GPUs of this host.
    ///
    /// # Errors
    /// T1301 without a driver, T1302 if the driver returns an error.
    pub fn discover() -> Result<ArrayGpus, Diagnostic> {
        ArrayGpus::from_discovery(GpuDiscovery::discover())
    }

    pub(super) fn from_discovery(found: GpuDiscovery) -> Result<ArrayGpus, Diagnostic> {
        match &found.devices {
            Ok(_) => Ok(ArrayGpus(found)),
            Err(d) => Err(d.clone()),
        }
    }

    /// Opens a stream on a GPU, on which a tensor of another library arrives.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub fn open_stream(&self, device: u32) -> Result<GpuStream, Diagnostic> {
        GpuStream::open(&self.0.libraries, device)
    }

    /// Copies an array to new memory of its GPU.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub fn copy_array(&self, array: &GpuArray) -> Result<GpuArray, Diagnostic> {
        let all = RowRun { first: 0, pitch: array.len(), rows: 1, len: array.len() };
        self.open_stream(array.device())?.copy_runs(array, &[all], array.device())
    }

    /// Copies a part of a whole row-major array to new memory of its GPU, or shares it if the part is contiguous there.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub(super) fn copy_part(&self, whole: &GpuArray, part: &ArrayShard) -> Result<GpuArray, Diagnostic> {
        let mut strides = vec![1; part.whole.len()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = strides[dim] * part.whole[dim] as i64;
        }
        // Single elements are copied one by one here: the whole array is contiguous, as a hint would ask for.
        let runs = plan_runs(&strides, &part.ranges, 1).unwrap_or_default();
        match share_run(whole, &runs) {
            Some(shared) => Ok(shared),
            None => self.open_stream(whole.device())?.copy_runs(whole, &runs, whole.device()),
        }
    }

    /// Distributes a tensor over the GPUs of the ranks of a mesh. A shard shares the tensor's memory if
    /// its elements are contiguous there and its rank has the tensor's GPU.
    ///
    /// # Errors
    /// T0099 for neighbouring elements that are apart, and for a copy that `rule` excludes; T0776 for a rank
    /// whose GPU this host does not show; T1304 if the driver fails.
    pub fn distribute(
        &self,
        tensor: &DeviceTensor,
        (mesh, map, layout): (&Mesh, &RankMap, &Layout),
        rule: CopyRule,
    ) -> Result<DeviceArray, Diagnostic> {
        let gpus = self.0.devices.as_ref().map_err(Clone::clone)?;
        let mut copies: BTreeMap<(u32, Vec<(u64, u64)>), GpuArray> = BTreeMap::new();
        let mut shards = BTreeMap::new();
        for rank in mesh.inner_ranks() {
            let device = find_array_gpu(&gpus.gpus, (mesh, map), rank)?;
            let coord = mesh.coord_of(rank);
            let local = layout.local_shape(&tensor.shape, mesh, coord);
            let ranges = layout.global_ranges(&local, mesh, coord);
            // Ranks that hold the same shard on the same GPU share one copy.
            let values = match copies.get(&(device, ranges.clone())) {
                Some(known) => known.clone(),
                None => tensor.take_shard(rank, device, &ranges, rule)?,
            };
            copies.insert((device, ranges.clone()), values.clone());
            let place = ArrayShard { whole: tensor.shape.clone(), ranges };
            shards.insert(rank.0, DeviceShard { place, values });
        }
        Ok(DeviceArray { shape: tensor.shape.clone(), shards })
    }
}

impl DeviceTensor {
    /// Returns the tensor as an array that one rank has whole, on the GPU where it lies.
    ///
    /// # Errors
    /// T0099 for neighbouring elements that are apart, T1304 if the driver fails.
    pub fn to_array(&self) -> Result<DeviceArray, Diagnostic> {
        let ranges: Vec<(u64, u64)> = self.shape.iter().map(|extent| (0, *extent)).collect();
        let values = self.take_shard(Rank(0), self.values.device(), &ranges, CopyRule::IfNeeded)?;
        Ok(DeviceArray::from_whole(self.shape.clone(), 0, values))
    }

    fn take_shard(
        &self,
        rank: Rank,
        device: u32,
        ranges: &[(u64, u64)],
        rule: CopyRule,
    ) -> Result<GpuArray, Diagnostic> {
        let Some(runs) = plan_runs(&self.strides, ranges, 2) else {
            let what =
                format!("a tensor of strides {:?} has neighbouring elements that are apart", self.strides);
            return Err(Diagnostic::error(&T0099, what)
                .with_note("copies on a GPU move runs of neighbouring elements")
                .with_hint("make it contiguous first, such as by tensor.contiguous()"));
        };
        let here = self.values.device();
        match share_run(&self.values, &runs) {
            Some(shared) if device == here && rule != CopyRule::Always => Ok(shared),
            _ if rule == CopyRule::Never => {
                let why = match device == here {
                    true => "its elements are not contiguous".to_string(),
                    false => format!("it belongs on GPU {device}, and the tensor lies on GPU {here}"),
                };
                let what = format!("the shard of rank {rank} needs a copy: {why}");
                Err(Diagnostic::error(&T0099, what).with_hint("leave out copy=False"))
            }
            _ => self.stream.copy_runs(&self.values, &runs, device),
        }
    }
}

impl DeviceArray {
    /// Wraps an array that one rank has whole.
    ///
    /// # Panics
    /// If the number of values is not that of the shape.
    #[must_use]
    pub fn from_whole(shape: Vec<u64>, rank: u32, values: GpuArray) -> DeviceArray {
        let count: u64 = shape.iter().product();
        assert_eq!(values.len() as u64, count, "{} values in an array of shape {shape:?}", values.len());
        let ranges = shape.iter().map(|extent| (0, *extent)).collect();
        let place = ArrayShard { whole: shape.clone(), ranges };
        DeviceArray { shape, shards: BTreeMap::from([(rank, DeviceShard { place, values })]) }
    }

    /// Wraps the shards of one array, of which there is at least one.
    pub(super) fn from_shards(shards: Vec<(Rank, ArrayShard, GpuArray)>) -> DeviceArray {
        let shape = shards.first().map_or(Vec::new(), |(_, place, _)| place.whole.clone());
        let wrap =
            |(rank, place, values): (Rank, ArrayShard, GpuArray)| (rank.0, DeviceShard { place, values });
        DeviceArray { shape, shards: shards.into_iter().map(wrap).collect() }
    }

    /// Returns a part of the array that is a shard on a GPU.
    pub(super) fn find_part(&self, part: &ArrayShard, device: u32) -> Option<&GpuArray> {
        let mut shards = self.shards.values();
        shards.find(|s| s.place == *part && s.values.device() == device).map(|s| &s.values)
    }

    /// Returns the extents of the whole array, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns a rank's shard; `None` for a rank that has none.
    #[must_use]
    pub fn shard(&self, rank: u32) -> Option<&GpuArray> {
        self.shards.get(&rank).map(|shard| &shard.values)
    }

    /// Lists the shards that are the whole array.
    pub fn wholes(&self) -> impl Iterator<Item = &GpuArray> {
        let is_whole = |shard: &&DeviceShard| shard.place.shape() == self.shape;
        self.shards.values().filter(is_whole).map(|shard| &shard.values)
    }

    /// Returns whether two arrays are the same memory in the same shards.
    #[must_use]
    pub fn is_same(&self, other: &DeviceArray) -> bool {
        let places = |array: &DeviceArray| {
            let shards = array.shards.iter();
            shards.map(|(rank, s)| (*rank, s.place.clone(), s.values.address())).collect::<Vec<_>>()
        };
        self.shape == other.shape && places(self) == places(other)
    }

    /// Copies the shards to the host and assembles them.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub fn gather(&self) -> Result<HostArray, Diagnostic> {
        let mut whole = vec![0.0; self.shape.iter().product::<u64>() as usize];
        let mut gathered: Vec<&ArrayShard> = Vec::new();
        for DeviceShard { place, values } in self.shards.values() {
            // Replicas are equal, so one of them suffices.
            if !gathered.contains(&place) {
                place.copy_into(&mut whole, &values.copy_to_host()?);
                gathered.push(place);
            }
        }
        Ok(HostArray::from_vec(self.shape.clone(), whole))
    }
}

/// An array in host memory, or with its shards in GPU memory.
#[derive(Clone)]
pub enum ArrayValues {
    /// In the memory of this host.
    Host(HostArray),
    /// In the memory of GPUs.
    Device(DeviceArray),
}

impl ArrayValues {
    /// Returns the extents of the whole array, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        match self {
            ArrayValues::Host(array) => array.shape(),
            ArrayValues::Device(array) => array.shape(),
        }
    }

    /// Returns the array in host memory, to which those on GPUs are copied.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub fn gather(&self) -> Result<HostArray, Diagnostic> {
        match self {
            ArrayValues::Host(array) => Ok(array.clone()),
            ArrayValues::Device(array) => array.gather(),
        }
    }
}

impl fmt::Debug for ArrayValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "f32{:?}", self.shape())
    }
}

/// Wraps arrays in host memory.
pub(super) fn on_host(arrays: BTreeMap<String, HostArray>) -> BTreeMap<String, ArrayValues> {
    arrays.into_iter().map(|(name, array)| (name, ArrayValues::Host(array))).collect()
}

/// Returns the elements of one run, or of none, in the memory of the array; `None` for several runs.
fn share_run(values: &GpuArray, runs: &[RowRun]) -> Option<GpuArray> {
    match *runs {
        [] => values.slice(0, 0),
        [RowRun { first, rows: 1, len, .. }] => values.slice(first, len),
        _ => None,
    }
}

/// Returns the runs of neighbouring elements that hold a shard, in row-major order; `None` if the elements of
/// its innermost dim are no neighbours, or overlap. Of several runs, each has at least `shortest` elements.
fn plan_runs(strides: &[i64], ranges: &[(u64, u64)], shortest: usize) -> Option<Vec<RowRun>> {
    let first = strides.iter().zip(ranges).map(|(stride, (start, _))| stride * *start as i64).sum::<i64>();
    if ranges.iter().any(|(_, len)| *len == 0) {
        return Some(Vec::new());
    }
    // A dim of one element has any stride.
    let dims = strides.iter().zip(ranges).filter(|(_, (_, len))| *len > 1);
    let mut dims: Vec<(i64, u64)> = dims.map(|(stride, (_, len))| (*stride, *len)).collect();
    let mut len = 1;
    while let Some((_, extent)) = dims.pop_if(|(stride, _)| *stride == len as i64) {
        len *= extent;
    }
    let Some((pitch, rows)) = dims.pop() else {
        let run =
            RowRun { first: usize::try_from(first).ok()?, pitch: len as usize, rows: 1, len: len as usize };
        return Some(vec![run]);
    };
    if (len as usize) < shortest || pitch < len as i64 || dims.iter().any(|(stride, _)| *stride < 0) {
        return None;
    }
    let mut firsts = vec![usize::try_from(first).ok()?];
    for (stride, extent) in dims {
        let steps = (0..extent as usize).map(|i| i * stride as usize);
        let steps: Vec<usize> = steps.collect();
        firsts = firsts.iter().flat_map(|first| steps.iter().map(move |step| first + step)).collect();
    }
    let run = |first| RowRun { first, pitch: pitch as usize, rows: rows as usize, len: len as usize };
    Some(firsts.into_iter().map(run).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the elements of runs, in order.
    fn elements(runs: &[RowRun]) -> Vec<usize> {
        let rows =
            runs.iter().flat_map(|run| (0..run.rows).map(move |row| (run.first + row * run.pitch, run.len)));
        rows.flat_map(|(first, len)| first..first + len).collect()
    }

    #[test]
    fn runs_hold_the_elements_of_a_shard_in_order() {
        for ranges in [
            [(0, 3), (0, 5), (0, 7)],
            [(1, 2), (0, 5), (0, 7)],
            [(0, 3), (2, 2), (0, 7)],
            [(0, 3), (1, 3), (2, 4)],
            [(2, 1), (1, 3), (0, 7)],
            [(2, 1), (4, 1), (3, 2)],
        ] {
            // The tensor is a part of a larger one of [3, 6, 10].
            for strides in [[35, 7, 1], [60, 10, 1]] {
                let runs = plan_runs(&strides, &ranges, 2).unwrap();
                let index = |i: u64, j: u64, k: u64| {
                    [i, j, k].iter().zip(strides).map(|(i, s)| *i as usize * s as usize).sum::<usize>()
                };
                let [a, b, c] = ranges.map(|(start, len)| start..start + len);
                let all = a.flat_map(|i| {
                    b.clone().flat_map({
                        let c = c.clone();
                        move |j| c.clone().map(move |k| index(i, j, k))
                    })
                });
                assert_eq!(elements(&runs), all.collect::<Vec<_>>(), "{ranges:?} {strides:?}");
            }
        }
    }

    #[test]
    fn whole_tensors_and_their_rows_are_one_run() {
        let one = |first, len| Some(vec![RowRun { first, pitch: len, rows: 1, len }]);
        assert_eq!(plan_runs(&[7, 1], &[(0, 5), (0, 7)], 2), one(0, 35));
        assert_eq!(plan_runs(&[7, 1], &[(2, 3), (0, 7)], 2), one(14, 21));
        assert_eq!(plan_runs(&[7, 1], &[(4, 1), (2, 3)], 2), one(30, 3));
        assert_eq!(plan_runs(&[], &[], 2), one(0, 1));
        // A dim of one element may have any stride.
        assert_eq!(plan_runs(&[1, 99, 1], &[(0, 5), (0, 1), (0, 1)], 2), one(0, 5));
        assert_eq!(plan_runs(&[7, 1], &[(2, 0), (0, 7)], 2), Some(Vec::new()));
    }

    #[test]
    fn a_column_of_single_elements_is_copied_where_that_is_wanted() {
        let column = [RowRun { first: 1, pitch: 2, rows: 5, len: 1 }];
        assert_eq!(plan_runs(&[2, 1], &[(0, 5), (1, 1)], 1), Some(column.to_vec()));
        assert_eq!(plan_runs(&[2, 1], &[(0, 5), (1, 1)], 2), None);
    }

    #[test]
    fn transposed_and_repeated_elements_have_no_runs() {
        assert_eq!(plan_runs(&[1, 5], &[(0, 5), (0, 7)], 2), None);
        assert_eq!(plan_runs(&[0, 1], &[(0, 5), (0, 7)], 2), None);
        assert_eq!(plan_runs(&[3, 1], &[(0, 5), (0, 7)], 2), None);
        assert_eq!(plan_runs(&[7, -1], &[(0, 5), (0, 7)], 2), None);
    }
}

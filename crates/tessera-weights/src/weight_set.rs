//! Resolved weights: reading slices, and digests of the whole set.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use tessera_base::{Bytes, Diagnostic, closest_name};

use crate::byte_runs::{self, ByteRuns};
use crate::codes::{T0506, T0507, T0509};
use crate::dtype::FileDtype;
use crate::generator::{DEFINITION, Generator};
use crate::lora::Lora;
use crate::resolve::{ExpectedTensor, ResolvedTensors};
use crate::stored_tensor::StoredTensor;

/// Bytes sampled at each end of a tensor: one page.
const SAMPLE_BYTES: usize = 4096;

/// Bytes that one thread hashes at a time for [`WeightSet::content_digest`]. The value is part of
/// the digest's definition.
const BLOCK_BYTES: usize = 1 << 20;

/// Weights by canonical name. Reads copy out of memory maps, so opening is cheap and only the
/// requested slices are fetched from disk. Clones share the maps; many threads may read a set at
/// once.
#[derive(Debug, Clone)]
pub struct WeightSet {
    tensors: ResolvedTensors,
    /// Low-rank updates that are added to each tensor as it is read, in this order.
    loras: Vec<Arc<Lora>>,
}

impl WeightSet {
    pub(crate) fn new(tensors: ResolvedTensors) -> WeightSet {
        WeightSet { tensors, loras: Vec::new() }
    }

    /// Adds a low-rank update, so that every later read returns the changed weights, and the digests are
    /// those of the weights with the update.
    pub fn add_lora(&mut self, lora: Lora) {
        self.loras.push(Arc::new(lora));
    }

    /// Iterates over the digests of the low-rank updates with their strengths, in the order in which they
    /// are added.
    pub fn lora_digests(&self) -> impl Iterator<Item = [u8; 32]> {
        self.loras.iter().map(|lora| lora.digest())
    }

    /// Returns seeded f32 values for the expected tensors, under their canonical names.
    ///
    /// A tensor of two or more dims has a standard deviation of 1/√(fan-in), with all dims but the
    /// first as the fan-in, so activations keep their magnitude. The weights of norms are close to 1,
    /// and other vectors close to 0.
    #[must_use]
    pub fn synthetic(seed: u64, expected: &[ExpectedTensor]) -> WeightSet {
        let tensors = expected.iter().map(|e| {
            let generator = Generator::new(seed, &e.name, &e.shape);
            (e.name.clone(), (FileDtype::F32, StoredTensor::generated(generator, e.shape.clone())))
        });
        WeightSet::new(tensors.collect::<ResolvedTensors>())
    }

    /// Iterates over the canonical names in order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the extent of each dim of a tensor.
    #[must_use]
    pub fn tensor_shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(|(_, t)| t.shape.as_slice())
    }

    /// Returns the bytes of all resolved tensors, with their dtypes on disk.
    #[must_use]
    pub fn total_bytes(&self) -> Bytes {
        let bytes = |(dtype, t): &(FileDtype, StoredTensor)| {
            Bytes(t.shape.iter().product::<u64>().saturating_mul(dtype.byte_size()))
        };
        self.tensors.values().map(bytes).sum()
    }

    /// Reads one slice as f32, row-major; `ranges` has one half-open range per dim. The conversion
    /// is exact, except that an element with a scale is multiplied by it and rounded.
    ///
    /// # Errors
    /// T0507: the tensor does not exist, or the ranges do not fit its shape.
    pub fn read_f32(&self, name: &str, ranges: &[Range<u64>]) -> Result<Vec<f32>, Diagnostic> {
        let (dtype, t) = self.find_slice(name, ranges)?;
        if let Some(generator) = t.generator() {
            return Ok(generator.generate_slice(&t.shape, ranges));
        }
        let mut out = Vec::with_capacity(byte_runs::element_count(ranges) as usize);
        for run in ByteRuns::new(&t.shape, ranges, dtype.byte_size()) {
            dtype.widen_to_f32(&t.raw_bytes()[run], &mut out);
        }
        let rows = ranges.first().cloned().unwrap_or(0..1);
        let row_elements = out.len().checked_div((rows.end - rows.start) as usize).unwrap_or(0);
        t.apply_scales(&mut out, rows.start as usize, row_elements);
        self.loras.iter().for_each(|lora| lora.add_to_slice(name, ranges, &mut out));
        Ok(out)
    }

    /// Gives the memory in which a slice is mapped back to the operating system. A later read maps it again, from the
    /// system's cache of the file while it has room for it.
    ///
    /// # Errors
    /// T0507: the tensor does not exist, or the ranges do not fit its shape.
    pub fn release_slice(&self, name: &str, ranges: &[Range<u64>]) -> Result<(), Diagnostic> {
        let (dtype, t) = self.find_slice(name, ranges)?;
        let runs = ByteRuns::new(&t.shape, ranges, dtype.byte_size());
        let whole = runs.fold(None, |whole: Option<Range<usize>>, run| {
            Some(whole.map_or(run.clone(), |whole| whole.start..run.end))
        });
        whole.into_iter().for_each(|bytes| t.release(bytes));
        Ok(())
    }

    /// Checks that a slice can be read: after success, no read of this slice fails.
    ///
    /// # Errors
    /// T0507: the tensor does not exist, or the ranges do not fit its shape.
    pub fn check(&self, name: &str, ranges: &[Range<u64>]) -> Result<(), Diagnostic> {
        self.find_slice(name, ranges).map(drop)
    }

    /// Checks that another set has the same tensors with the same dtypes and shapes, so that it can
    /// replace this one.
    ///
    /// # Errors
    /// T0506 with a note per tensor that differs.
    pub fn check_replaceable_by(&self, other: &WeightSet) -> Result<(), Diagnostic> {
        let what = |set: &WeightSet, name: &str| match set.tensors.get(name) {
            Some((dtype, t)) => format!("{dtype}{:?}", t.shape),
            None => "missing".to_string(),
        };
        let names: BTreeSet<&str> = self.tensor_names().chain(other.tensor_names()).collect();
        let differ: Vec<String> = names
            .iter()
            .map(|name| (name, what(self, name), what(other, name)))
            .filter(|(_, here, there)| here != there)
            .map(|(name, here, there)| format!("{name}: {here} in use, {there} in the new weights"))
            .collect();
        if differ.is_empty() {
            return Ok(());
        }
        let mut d = Diagnostic::error(&T0506, "the new weights cannot replace the current ones")
            .with_label("in use", format!("{} tensors", self.tensors.len()))
            .with_label(
                "new weights",
                format!("{} of {} tensors differ in dtype or shape", differ.len(), names.len()),
            )
            .with_hint("end the stream and start another one with the new weights");
        d.notes = differ;
        Err(d)
    }

    /// Reads a whole tensor as f32, row-major.
    ///
    /// # Errors
    /// T0507: the tensor does not exist.
    pub fn read_whole_f32(&self, name: &str) -> Result<Vec<f32>, Diagnostic> {
        let ranges: Vec<Range<u64>> =
            self.tensor_shape(name).unwrap_or_default().iter().map(|n| 0..*n).collect();
        self.read_f32(name, &ranges)
    }

    /// Computes BLAKE3 over (canonical name, dtype, shape) of all tensors in name order. The digest
    /// depends neither on the files' naming style nor on their sharding. Reads no tensor.
    #[must_use]
    pub fn header_digest(&self) -> [u8; 32] {
        let mut hash = FramedHasher::new("tessera weight headers 1");
        hash.update_number(self.tensors.len() as u64);
        for (name, (dtype, t)) in &self.tensors {
            hash.update_text(name);
            hash.update_text(dtype.name());
            hash.update_number(t.shape.len() as u64);
            t.shape.iter().for_each(|n| hash.update_number(*n));
        }
        hash.finish()
    }

    /// Computes BLAKE3 over the headers and the first and last 4096 bytes of every tensor.
    /// The digest distinguishes checkpoints of the same shapes, but may miss a flipped bit in the
    /// middle of a tensor; fingerprints of the shards that ranks read detect that.
    #[must_use]
    pub fn sample_digest(&self) -> [u8; 32] {
        let mut hash = FramedHasher::new("tessera weight sample 1");
        hash.0.update(&self.header_digest());
        for (_, t) in self.tensors.values() {
            let raw = t.raw_bytes();
            hash.0.update(&raw[..raw.len().min(SAMPLE_BYTES)]);
            hash.0.update(&raw[raw.len().saturating_sub(SAMPLE_BYTES)..]);
        }
        self.update_with_seeds(&mut hash);
        self.include_loras(hash.finish())
    }

    /// Computes BLAKE3 over the headers and, in name order, over the BLAKE3 of every block of 1 MiB
    /// of every tensor: a digest of all elements that depends neither on the files' naming style or
    /// sharding nor on `threads`, the number of threads that read the blocks.
    #[must_use]
    pub fn content_digest(&self, threads: usize) -> [u8; 32] {
        let blocks: Vec<&[u8]> =
            self.tensors.values().flat_map(|(_, t)| t.raw_bytes().chunks(BLOCK_BYTES)).collect();
        let mut digests = vec![[0; 32]; blocks.len()];
        let total: usize = blocks.iter().map(|b| b.len()).sum();
        // To start a thread takes about as long as to hash a block.
        let threads = threads.clamp(1, 1 + total / BLOCK_BYTES);
        let share = blocks.len().div_ceil(threads).max(1);
        let hash_blocks = |blocks: &[&[u8]], digests: &mut [[u8; 32]]| {
            for (block, digest) in blocks.iter().zip(digests) {
                *digest = *blake3::hash(block).as_bytes();
            }
        };
        std::thread::scope(|s| {
            let mut parts = blocks.chunks(share).zip(digests.chunks_mut(share));
            let own = parts.next();
            for (blocks, digests) in parts {
                s.spawn(|| hash_blocks(blocks, digests));
            }
            own.into_iter().for_each(|(blocks, digests)| hash_blocks(blocks, digests));
        });
        let mut hash = FramedHasher::new("tessera weight content 1");
        hash.0.update(&self.header_digest());
        hash.0.update(digests.as_flattened());
        for (name, (_, t)) in self.tensors.iter().filter(|(_, (_, t))| !t.scales().is_empty()) {
            hash.update_text(name);
            hash.update_number(t.scales().len() as u64);
            t.scales().iter().for_each(|s| hash.update_number(s.to_bits().into()));
        }
        self.update_with_seeds(&mut hash);
        self.include_loras(hash.finish())
    }

    /// Returns the digest of weights with the low-rank updates; `digest` itself if there are none.
    fn include_loras(&self, digest: [u8; 32]) -> [u8; 32] {
        self.loras.iter().fold(digest, |digest, lora| {
            let mut hash = FramedHasher::new("tessera weights with a low-rank update 1");
            hash.0.update(&digest).update(&lora.digest());
            hash.finish()
        })
    }

    /// Adds the definition and seed of each tensor that is computed: together with the headers they
    /// determine its elements, so its elements need not be hashed.
    fn update_with_seeds(&self, hash: &mut FramedHasher) {
        for generator in self.tensors.values().filter_map(|(_, t)| t.generator()) {
            hash.update_text(DEFINITION);
            hash.update_number(generator.seed);
        }
    }

    /// Checks that every element of a tensor is finite.
    ///
    /// # Errors
    /// T0509 with the file and the index of the first element that is not; T0507 if the tensor does
    /// not exist.
    pub fn check_finite(&self, name: &str) -> Result<(), Diagnostic> {
        let whole: Vec<Range<u64>> =
            self.tensor_shape(name).unwrap_or_default().iter().map(|n| 0..*n).collect();
        let (dtype, t) = self.find_slice(name, &whole)?;
        let Some((at, value)) = dtype.find_nonfinite(t.raw_bytes()) else { return Ok(()) };
        let mut rest = at as u64;
        let mut index: Vec<u64> = t
            .shape
            .iter()
            .rev()
            .map(|n| {
                let i = rest % n;
                rest /= n;
                i
            })
            .collect();
        index.reverse();
        Err(Diagnostic::error(&T0509, format!("`{name}` is {value} at {index:?}"))
            .with_label(t.file.to_string(), format!("{dtype}{:?} with {value} at {index:?}", t.shape))
            .with_hint("compare the file's hash with the publisher's, and fetch it again if they differ"))
    }

    fn find_slice(
        &self,
        name: &str,
        ranges: &[Range<u64>],
    ) -> Result<(FileDtype, &StoredTensor), Diagnostic> {
        let Some((dtype, t)) = self.tensors.get(name) else {
            let d = Diagnostic::error(&T0507, "no such weight")
                .with_label(format!("weight {name}"), format!("not one of {}", self.tensors.len()));
            return Err(match closest_name(name, self.tensor_names()) {
                Some(near) => d.with_hint(format!("the nearest name is {near}")),
                None => d,
            });
        };
        match byte_runs::range_mismatch(&t.shape, ranges) {
            None => Ok((*dtype, t)),
            Some(why) => Err(Diagnostic::error(&T0507, "a slice does not fit its weight")
                .with_label(format!("weight {name}"), format!("has shape {:?}", t.shape))
                .with_label("the slice", why)
                .with_hint("plan again with the config that belongs to these weights")),
        }
    }
}

/// BLAKE3 with length-prefixed fields, so that different inputs cannot concatenate to the same
/// bytes.
struct FramedHasher(blake3::Hasher);

impl FramedHasher {
    fn new(domain: &str) -> FramedHasher {
        let mut hash = FramedHasher(blake3::Hasher::new());
        hash.update_text(domain);
        hash
    }
    fn update_text(&mut self, s: &str) {
        self.update_number(s.len() as u64);
        self.0.update(s.as_bytes());
    }
    fn update_number(&mut self, n: u64) {
        self.0.update(&n.to_le_bytes());
    }
    fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

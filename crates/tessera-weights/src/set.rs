//! Resolved weights: reading slices, fingerprints of slices, and a digest of what the whole set is.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use tessera_base::{Bytes, Code, Diagnostic, nearest};

use crate::dtype::FileDtype;
use crate::files::Stored;
use crate::resolve::{Resolved, T0506};
use crate::slice::{self, Runs};

/// Bytes sampled at each end of a tensor: a page.
pub const SAMPLE_BYTES: usize = 4096;

/// Weights by canonical name. Reads copy out of memory maps, so opening is cheap and only slices that are asked
/// for are fetched from disk. Cloning shares the maps; a set may be read from many threads.
#[derive(Debug, Clone)]
pub struct WeightSet {
    tensors: Resolved,
}

impl WeightSet {
    pub(crate) fn new(tensors: Resolved) -> WeightSet {
        WeightSet { tensors }
    }

    /// Canonical names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Extent of each dim of a tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(|(_, t)| t.shape.as_slice())
    }

    /// Element type of a tensor on disk.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<FileDtype> {
        self.tensors.get(name).map(|(dtype, _)| *dtype)
    }

    /// Bytes of all tensors on disk.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.tensors.values().map(|(_, t)| Bytes(t.raw().len() as u64)).sum()
    }

    /// One slice as f32, row-major; `ranges` has one half-open range per dim. The conversion is exact.
    ///
    /// # Errors
    /// T0507: no such tensor, or ranges that do not fit its shape.
    pub fn read_f32(&self, name: &str, ranges: &[Range<u64>]) -> Result<Vec<f32>, Diagnostic> {
        let (dtype, t) = self.slice(name, ranges)?;
        let mut out = Vec::with_capacity(slice::elements(ranges) as usize);
        for run in Runs::new(&t.shape, ranges, dtype.bytes()) {
            dtype.widen(&t.raw()[run], &mut out);
        }
        Ok(out)
    }

    /// Whether a slice can be read: where this is granted, no read of it fails.
    ///
    /// # Errors
    /// T0507: no such tensor, or ranges that do not fit its shape.
    pub fn check(&self, name: &str, ranges: &[Range<u64>]) -> Result<(), Diagnostic> {
        self.slice(name, ranges).map(drop)
    }

    /// Whether another set has the same tensors with the same dtypes and shapes, so that it may take this one's place.
    ///
    /// # Errors
    /// T0506 with a note per tensor that differs.
    pub fn may_become(&self, other: &WeightSet) -> Result<(), Diagnostic> {
        let what = |set: &WeightSet, name: &str| match set.tensors.get(name) {
            Some((dtype, t)) => format!("{dtype}{:?}", t.shape),
            None => "missing".to_string(),
        };
        let names: BTreeSet<&str> = self.names().chain(other.names()).collect();
        let differ: Vec<String> = names
            .iter()
            .map(|name| (name, what(self, name), what(other, name)))
            .filter(|(_, here, there)| here != there)
            .map(|(name, here, there)| format!("{name}: {here} in use, {there} in the new weights"))
            .collect();
        if differ.is_empty() {
            return Ok(());
        }
        let mut d = Diagnostic::error(&T0506, "the new weights cannot take the place of those in use")
            .at("in use", format!("{} tensors", self.tensors.len()))
            .at(
                "new weights",
                format!("{} of {} tensors differ in dtype or shape", differ.len(), names.len()),
            )
            .hint("end the stream and start another one with the new weights");
        d.notes = differ;
        Err(d)
    }

    /// A whole tensor as f32, row-major.
    ///
    /// # Errors
    /// T0507: no such tensor.
    pub fn read_whole_f32(&self, name: &str) -> Result<Vec<f32>, Diagnostic> {
        let ranges: Vec<Range<u64>> = self.shape(name).unwrap_or_default().iter().map(|n| 0..*n).collect();
        self.read_f32(name, &ranges)
    }

    /// One slice in the dtype it has on disk, little-endian and row-major; borrowed where it is contiguous there.
    ///
    /// # Errors
    /// T0507: no such tensor, or ranges that do not fit its shape.
    pub fn read_raw(&self, name: &str, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, Diagnostic> {
        let (dtype, t) = self.slice(name, ranges)?;
        let mut runs = Runs::new(&t.shape, ranges, dtype.bytes());
        if runs.left() <= 1 {
            return Ok(Cow::Borrowed(runs.next().map_or(&[], |run| &t.raw()[run])));
        }
        let mut out = Vec::with_capacity((slice::elements(ranges) * dtype.bytes()) as usize);
        runs.for_each(|run| out.extend_from_slice(&t.raw()[run]));
        Ok(Cow::Owned(out))
    }

    /// BLAKE3 over name, dtype, ranges and the slice's bytes on disk: ranks that should hold the same shard compare
    /// these. It reads the whole slice.
    ///
    /// # Errors
    /// T0507: no such tensor, or ranges that do not fit its shape.
    pub fn fingerprint(&self, name: &str, ranges: &[Range<u64>]) -> Result<[u8; 32], Diagnostic> {
        let (dtype, t) = self.slice(name, ranges)?;
        let mut hash = Digest::new("tessera weight slice 1");
        hash.text(name);
        hash.text(dtype.name());
        hash.number(ranges.len() as u64);
        for r in ranges {
            hash.number(r.start);
            hash.number(r.end);
        }
        for run in Runs::new(&t.shape, ranges, dtype.bytes()) {
            hash.0.update(&t.raw()[run]);
        }
        Ok(hash.finish())
    }

    /// BLAKE3 over (canonical name, dtype, shape) of all tensors in order of name. It depends neither on the files'
    /// naming style nor on how they are sharded, and reads no tensor.
    #[must_use]
    pub fn header_digest(&self) -> [u8; 32] {
        let mut hash = Digest::new("tessera weight headers 1");
        hash.number(self.tensors.len() as u64);
        for (name, (dtype, t)) in &self.tensors {
            hash.text(name);
            hash.text(dtype.name());
            hash.number(t.shape.len() as u64);
            t.shape.iter().for_each(|n| hash.number(*n));
        }
        hash.finish()
    }

    /// BLAKE3 over the headers and the first and last [`SAMPLE_BYTES`] of every tensor. Another checkpoint of the same
    /// shapes shows; a flipped bit in the middle of a tensor need not: that takes [`Self::fingerprint`] of what was read.
    #[must_use]
    pub fn sample_digest(&self) -> [u8; 32] {
        let mut hash = Digest::new("tessera weight sample 1");
        hash.0.update(&self.header_digest());
        for (_, t) in self.tensors.values() {
            let raw = t.raw();
            hash.0.update(&raw[..raw.len().min(SAMPLE_BYTES)]);
            hash.0.update(&raw[raw.len().saturating_sub(SAMPLE_BYTES)..]);
        }
        hash.finish()
    }

    fn slice(&self, name: &str, ranges: &[Range<u64>]) -> Result<(FileDtype, &Stored), Diagnostic> {
        let Some((dtype, t)) = self.tensors.get(name) else {
            let d = Diagnostic::error(&T0507, "no such weight")
                .at(format!("weight {name}"), format!("not one of {}", self.tensors.len()));
            return Err(match nearest(name, self.names()) {
                Some(near) => d.hint(format!("the nearest name is {near}")),
                None => d,
            });
        };
        match slice::misfit(&t.shape, ranges) {
            None => Ok((*dtype, t)),
            Some(why) => Err(Diagnostic::error(&T0507, "a slice does not fit its weight")
                .at(format!("weight {name}"), format!("has shape {:?}", t.shape))
                .at("the slice", why)
                .hint("plan again for the config that these weights belong to")),
        }
    }
}

/// BLAKE3 with every field framed, so that no two inputs run together.
struct Digest(blake3::Hasher);

impl Digest {
    fn new(domain: &str) -> Digest {
        let mut hash = Digest(blake3::Hasher::new());
        hash.text(domain);
        hash
    }
    fn text(&mut self, s: &str) {
        self.number(s.len() as u64);
        self.0.update(s.as_bytes());
    }
    fn number(&mut self, n: u64) {
        self.0.update(&n.to_le_bytes());
    }
    fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

pub(crate) static T0507: Code = Code {
    id: "T0507",
    title: "a weight slice does not exist",
    page: "A rank asked for a weight that is not in the set, or for a range outside its shape. The names and shapes \
come from the model's config, the ranges from the plan, so the two were made for different models.\n\n\
Plan again with the config beside the weights. If plan and config agree, this is a defect: report it with the plan \
and with the weight's name and shape from the message.",
};

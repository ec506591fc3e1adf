//! Finds, maps and lists weight files. All file-system access is in this module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};
use serde::Deserialize;
use tessera_base::{Bytes, Diagnostic, Diagnostics, format_choices};

use crate::codes::{T0501, T0505, T0508};
use crate::header::{self, MAX_HEADER_BYTES};
use crate::resolve::{self, ExpectedTensor};
use crate::stored_tensor::StoredTensor;
use crate::torch_file;
use crate::weight_set::WeightSet;

/// The tensors of one model's files, under the names in the files. Clones share the maps.
#[derive(Debug, Clone)]
pub struct WeightFiles {
    source: String,
    /// The part of the names in the files that [`WeightFiles::select`] removed.
    prefix: String,
    tensors: BTreeMap<String, StoredTensor>,
}

/// The description of one tensor in a file's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name of the tensor as the file spells it, before aliases and prefixes are resolved.
    pub name: &'a str,
    /// safetensors dtype name, possibly of an unreadable dtype.
    pub dtype: &'a str,
    /// Extent of each dim.
    pub shape: &'a [u64],
}

impl WeightFiles {
    /// Opens the weights of a folder: `model.safetensors`, or the shards listed in
    /// `model.safetensors.index.json`, or the same two with the stem `diffusion_pytorch_model`,
    /// else the only `*.safetensors` file except `text_encoder.safetensors` and
    /// `text_embeddings.safetensors`. A path to a file opens that file, or the shards that it lists if it
    /// is an index.
    ///
    /// # Errors
    /// One diagnostic per bad file: no candidate, several candidates or missing shards (T0501),
    /// truncated (T0502), not safetensors (T0503), inconsistent (T0504), contradicts its index
    /// (T0505), unreadable (T0508).
    pub fn open(dir: &Path) -> Result<WeightFiles, Diagnostics> {
        if dir.is_file() && dir.to_string_lossy().ends_with(INDEX_SUFFIX) {
            return open_index(dir.parent().unwrap_or(Path::new("")), dir);
        }
        if dir.is_file() {
            return WeightFiles::open_file(dir).map_err(|d| vec![d]);
        }
        for stem in FILE_STEMS {
            let single = dir.join(format!("{stem}.safetensors"));
            if single.exists() {
                return WeightFiles::open_file(&single).map_err(|d| vec![d]);
            }
            let index = dir.join(format!("{stem}.safetensors.index.json"));
            if index.exists() {
                return open_index(dir, &index);
            }
        }
        only_candidate(dir).and_then(|path| WeightFiles::open_file(&path)).map_err(|d| vec![d])
    }

    /// Opens a single safetensors file, or a checkpoint that `torch.save` wrote.
    ///
    /// # Errors
    /// T0502, T0503, T0504 or T0508, as for [`WeightFiles::open`]; T0510, T0511 or T0512 for a
    /// PyTorch checkpoint; T0513 for a pointer of Git LFS.
    pub fn open_file(path: &Path) -> Result<WeightFiles, Diagnostic> {
        let source = path.display().to_string();
        Ok(WeightFiles { source, prefix: String::new(), tensors: read_file(path)? })
    }

    /// Keeps the tensors whose names begin with `prefix`, and removes it from the names. Messages
    /// still show it. The name parts in `infixes`, such as those of a wrapper around each block, are
    /// removed too.
    #[must_use]
    pub fn select(self, prefix: &str, infixes: &[&str]) -> WeightFiles {
        let rename = |name: &str| infixes.iter().fold(name.to_string(), |n, infix| n.replace(infix, ""));
        let tensors = self
            .tensors
            .into_iter()
            .filter_map(|(name, t)| Some((rename(name.strip_prefix(prefix)?), t)))
            .collect();
        WeightFiles { prefix: self.prefix + prefix, tensors, ..self }
    }

    /// Iterates over all tensors in name order.
    pub fn iter_tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.tensors.iter().map(|(name, t)| TensorInfo { name, dtype: &t.dtype, shape: &t.shape })
    }

    /// Lists the files that hold the tensors.
    #[must_use]
    pub fn list_files(&self) -> BTreeSet<&str> {
        self.tensors.values().map(|t| &*t.file).collect()
    }

    /// Returns the bytes of all tensors in the files, without the files' headers.
    #[must_use]
    pub fn total_bytes(&self) -> Bytes {
        self.tensors.values().map(|t| Bytes(t.raw_bytes().len() as u64)).sum()
    }

    /// Locates each expected tensor in the files and rejects everything else.
    ///
    /// The i-th aliases of all tensors form one naming style. The style that finds the most tensors
    /// is used; a tensor that it does not find is looked up under its other names. A leading
    /// `model.`, `generator.`, `diffusion_model.` or `module.` is stripped, repeatedly, if all names in
    /// the files have it and no expected name does. A tensor in FP8 needs its scales beside it.
    ///
    /// # Errors
    /// T0506: one diagnostic with a note per problem: missing, extra, wrong shape, unsupported
    /// dtype.
    pub fn resolve(&self, expected: &[ExpectedTensor]) -> Result<WeightSet, Diagnostics> {
        resolve::resolve_tensors(&self.source, &self.prefix, &self.tensors, expected)
            .map(WeightSet::new)
            .map_err(|d| vec![d])
    }

    /// Takes every tensor under the file's own name, for files without a model description.
    ///
    /// # Errors
    /// T0506 if a dtype is unreadable.
    pub fn resolve_as_is(&self) -> Result<WeightSet, Diagnostics> {
        let own = |t: TensorInfo<'_>| ExpectedTensor {
            name: t.name.to_string(),
            aliases: Vec::new(),
            shape: t.shape.to_vec(),
        };
        self.resolve(&self.iter_tensors().map(own).collect::<Vec<_>>())
    }
}

/// End of the name of a file that lists shards.
const INDEX_SUFFIX: &str = ".index.json";

const FILE_STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];

/// These files have the same extension as the model's weights but belong to the text encoder.
const TEXT_FILES: [&str; 2] = ["text_encoder.safetensors", "text_embeddings.safetensors"];

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

fn read_file(path: &Path) -> Result<BTreeMap<String, StoredTensor>, Diagnostic> {
    let at = path.display().to_string();
    let map = Arc::new(map_file(path).map_err(|e| read_error(&at, &e))?);
    let entries = if torch_file::is_zip(&map) {
        torch_file::parse(&at, &map)?
    } else if torch_file::is_legacy(&map) {
        return Err(torch_file::legacy_error(&at));
    } else {
        header::parse(&at, &map)?
    };
    let file = Arc::from(at);
    Ok(entries.into_iter().map(|(name, t)| (name, StoredTensor::new(&file, &map, t))).collect())
}

/// Maps a regular file; any other kind of file could block or change its length.
#[allow(unsafe_code)]
fn map_file(path: &Path) -> io::Result<Mmap> {
    let not_regular = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    if !fs::metadata(path)?.is_file() {
        return Err(not_regular());
    }
    let file = File::open(path)?;
    // SAFETY: the map is private and read-only, every offset is checked against its length, and any
    // bit pattern is a valid byte. The remaining hazard is another process that changes the file
    // while it is mapped. The page of T0508 requires replacing weights by rename, which leaves this
    // inode unchanged; a file changed in place yields other values, which the fingerprint
    // comparison detects, and a truncated one ends the process with SIGBUS.
    unsafe { MmapOptions::new().map_copy_read_only(&file) }
}

fn open_index(dir: &Path, index_path: &Path) -> Result<WeightFiles, Diagnostics> {
    let at = index_path.display().to_string();
    let index = read_index(&at, index_path).map_err(|d| vec![d])?;
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &index.weight_map {
        shards.entry(shard).or_default().push(tensor);
    }
    // A shard is a file beside its index: no weights tool writes a name that points elsewhere.
    if let Some(shard) = shards.keys().find(|s| Path::new(s).file_name().is_none_or(|f| f != **s)) {
        let says = format!("names the shard {shard:?}");
        return Err(vec![
            Diagnostic::error(&T0505, "an index may only name files in its own folder")
                .with_label(at, says)
                .with_hint("use the index that was published with the shards"),
        ]);
    }

    let (present, missing): (Vec<&str>, Vec<&str>) = shards.keys().partition(|s| dir.join(s).exists());
    let mut problems = Vec::new();
    if !missing.is_empty() {
        let mut d =
            Diagnostic::error(&T0501, format!("{} of {} shards are missing", missing.len(), shards.len()))
                .with_label(&at, format!("names {} shards", shards.len()))
                .with_label(dir.display().to_string(), format!("contains {} of them", present.len()))
                .with_hint("fetch the missing shards into the same folder");
        d.notes = missing.iter().map(|s| format!("missing: {s} ({} tensors)", shards[*s].len())).collect();
        problems.push(d);
    }

    let mut all = WeightFiles { source: at.clone(), prefix: String::new(), tensors: BTreeMap::new() };
    let mut disagree = Vec::new();
    for shard in present {
        let tensors = match read_file(&dir.join(shard)) {
            Ok(tensors) => tensors,
            Err(d) => {
                problems.push(d);
                continue;
            }
        };
        for name in &shards[shard] {
            if !tensors.contains_key(*name) {
                disagree.push(format!("{name}: the index assigns it to {shard}, which does not contain it"));
            }
        }
        for (name, t) in tensors {
            match index.weight_map.get(&name) {
                Some(place) if place == shard => {
                    all.tensors.insert(name, t);
                }
                Some(place) => {
                    disagree.push(format!("{name}: in {shard}, but the index assigns it to {place}"));
                }
                None => disagree.push(format!("{name}: in {shard}, but not in the index")),
            }
        }
    }
    if !disagree.is_empty() {
        let mut d = Diagnostic::error(&T0505, "the index and the shards disagree")
            .with_label(&at, format!("{} tensors in {} shards", index.weight_map.len(), shards.len()))
            .with_label(dir.display().to_string(), format!("{} tensors differ", disagree.len()))
            .with_hint("fetch index and shards again from the same revision of the model");
        d.notes = disagree;
        problems.push(d);
    }
    if problems.is_empty() { Ok(all) } else { Err(problems) }
}

fn read_index(at: &str, path: &Path) -> Result<ShardIndex, Diagnostic> {
    let found = fs::metadata(path).map_err(|e| read_error(at, &e))?;
    if !found.is_file() || found.len() > MAX_HEADER_BYTES {
        let says = format!("{} bytes; expected a regular file of at most {MAX_HEADER_BYTES}", found.len());
        return Err(
            Diagnostic::error(&T0505, "the index is too large or not a regular file").with_label(at, says)
        );
    }
    let text = fs::read(path).map_err(|e| read_error(at, &e))?;
    serde_json::from_slice(&text).map_err(|e| {
        Diagnostic::error(&T0505, "the index is malformed")
            .with_label(at, format!("in {} bytes of JSON: {e}", text.len()))
            .with_hint(
                "fetch the index again; it must contain an object `weight_map` from tensor to file name",
            )
    })
}

/// Returns the only weight file of a folder without any standard file name.
fn only_candidate(dir: &Path) -> Result<PathBuf, Diagnostic> {
    let at = dir.display().to_string();
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| read_error(&at, &e))? {
        let name = entry.map_err(|e| read_error(&at, &e))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") && !TEXT_FILES.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.sort();
    let usual: Vec<String> = FILE_STEMS
        .iter()
        .flat_map(|s| [format!("{s}.safetensors"), format!("{s}.safetensors.index.json")])
        .collect();
    match names.as_slice() {
        [one] => Ok(dir.join(one)),
        [] => Err(Diagnostic::error(&T0501, "no weights found")
            .with_label(at, format!("expected {}; found 0 files named *.safetensors", format_choices(&usual)))
            .with_hint("pass the folder that contains the model's config and weights")),
        several => {
            let mut d = Diagnostic::error(&T0501, "several files could be the weights")
                .with_label(
                    at,
                    format!("{} files, none of them is {}", several.len(), format_choices(&usual)),
                )
                .with_hint("pass one file, or fetch the index that belongs to the shards");
            d.notes = several.iter().map(|n| format!("found: {n}")).collect();
            Err(d)
        }
    }
}

fn read_error(at: &str, e: &io::Error) -> Diagnostic {
    Diagnostic::error(&T0508, "cannot read the file")
        .with_label(at, e.to_string())
        .with_hint("check the path and its permissions on this host")
}

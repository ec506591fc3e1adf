//! Reads the directory of a PyTorch checkpoint: a zip archive whose entry `data.pkl` describes the
//! tensors and whose entries below `data/` hold their elements, uncompressed.
//!
//! The archive is read with `rawzip`, which returns byte ranges and copies nothing: a tensor is a
//! range of the mapped file, as in safetensors. Checksums of entries are not compared, because that
//! would read every byte at open; the fingerprints of shards do that.

mod pickle;

use std::collections::BTreeMap;
use std::ops::Range;

use rawzip::{CompressionMethod, ZipArchive};
use tessera_base::Diagnostic;

use crate::codes::{T0502, T0510, T0511, T0512};
use crate::dtype;
use crate::header::TensorEntry;
use pickle::{PickleProblem, TensorRef, Value, ValueId, Values, read_pickle};

/// Maximum size of the pickle; that of a model of 14 billion parameters has 200 kB.
const MAX_PICKLE_BYTES: usize = 256 << 20;
/// Maximum entries of the archive.
const MAX_ENTRIES: usize = 1 << 20;
/// Maximum nesting of the dicts that hold tensors.
const MAX_DEPTH: usize = 16;
/// Maximum values that are visited. Shared dicts inside shared dicts would otherwise multiply.
const MAX_VISITS: usize = 1 << 21;
/// Maximum bytes of a tensor's name with the names of all dicts around it.
const MAX_NAME_BYTES: usize = 4096;
/// Tensors that a diagnostic lists before it only counts.
const LISTED_TENSORS: usize = 20;

/// Returns whether a file begins as a zip archive does.
pub(crate) fn is_zip(file: &[u8]) -> bool {
    file.starts_with(b"PK\x03\x04")
}

/// Returns whether a file begins as `torch.save` wrote before PyTorch 1.6: a bare pickle.
pub(crate) fn is_legacy(file: &[u8]) -> bool {
    matches!(file, [0x80, 2..=5, rest @ ..] if rest.starts_with(b"\x8a\x0a"))
}

/// Builds the diagnostic for a file from before PyTorch 1.6.
pub(crate) fn legacy_error(at: &str) -> Diagnostic {
    Diagnostic::error(&T0511, "a PyTorch file in the format before version 1.6")
        .with_label(at, "begins with a bare pickle instead of a zip archive")
        .with_hint(
            "write it again: `python -c \"import torch; torch.save(torch.load('IN.pt', map_location='cpu', \
             weights_only=True), 'OUT.pt')\"`",
        )
}

/// Parses `file`, the complete content of the checkpoint named `at`. Returns its tensors by name; the
/// names of nested dicts are joined by dots.
pub(crate) fn parse(at: &str, file: &[u8]) -> Result<BTreeMap<String, TensorEntry>, Diagnostic> {
    let archive = ArchiveEntries::read(at, file)?;
    let (values, root) = read_pickle(&file[archive.pickle.clone()]).map_err(|p| pickle_error(at, &p))?;
    let mut found = BTreeMap::new();
    let mut visits = 0;
    collect_tensors(&values, root, &mut Vec::new(), &mut visits, &mut found)
        .map_err(|why| damaged(at, &why))?;
    let mut out = BTreeMap::new();
    let mut strided = Vec::new();
    for (name, tensor) in found {
        if !is_contiguous(tensor) {
            strided.push(format!("{name}: shape {:?} with strides {:?}", tensor.shape, tensor.strides));
            continue;
        }
        let entry = archive.locate(tensor).map_err(|why| damaged(at, &format!("{name}: {why}")))?;
        out.insert(name, entry);
    }
    if strided.is_empty() { Ok(out) } else { Err(strided_error(at, strided, out.len())) }
}

/// The byte ranges of the entries that matter.
struct ArchiveEntries {
    pickle: Range<usize>,
    /// By the name below `data/`.
    storages: BTreeMap<Box<str>, Range<usize>>,
}

impl ArchiveEntries {
    fn read(at: &str, file: &[u8]) -> Result<ArchiveEntries, Diagnostic> {
        let archive = ZipArchive::from_slice(file).map_err(|e| {
            Diagnostic::error(&T0502, "the weight file is truncated")
                .with_label(at, format!("{} bytes, without the zip directory at the end: {e}", file.len()))
                .with_hint("compare its size with the publisher's; fetch or copy it again")
        })?;
        let mut pickles = Vec::new();
        let mut storages = BTreeMap::new();
        let mut count = 0;
        let mut entries = archive.entries();
        while let Some(entry) = entries.next_entry().map_err(|e| damaged(at, &e.to_string()))? {
            count += 1;
            if count > MAX_ENTRIES {
                return Err(damaged(at, &format!("more than {MAX_ENTRIES} entries")));
            }
            let path = entry.file_path();
            let Ok(path) = std::str::from_utf8(path.as_ref()) else { continue };
            // The first folder has the name under which the file was saved.
            let Some((root, inner)) = path.split_once('/') else { continue };
            if inner.starts_with("code/") || inner == "constants.pkl" {
                return Err(torchscript_error(at, path));
            }
            let is_storage = inner.starts_with("data/");
            if !is_storage && !matches!(inner, "data.pkl" | "byteorder") {
                continue;
            }
            if entry.compression_method() != CompressionMethod::STORE {
                let why = format!("the entry {path} is compressed, which torch.save never does");
                return Err(damaged(at, &why));
            }
            let local = archive.get_entry(entry.wayfinder()).map_err(|e| damaged(at, &e.to_string()))?;
            let (start, end) = local.compressed_data_range();
            let range = start as usize..end as usize;
            let Some(bytes) = file.get(range.clone()) else {
                return Err(damaged(at, &format!("the entry {path} ends after the file")));
            };
            match inner.strip_prefix("data/") {
                Some(key) if storages.insert(key.into(), range.clone()).is_some() => {
                    return Err(damaged(at, &format!("two entries {path}")));
                }
                Some(_) => {}
                None if inner == "byteorder" && bytes != b"little" => {
                    return Err(big_endian_error(at));
                }
                None if inner == "data.pkl" => pickles.push((root.to_string(), range)),
                None => {}
            }
        }
        match pickles.as_slice() {
            [(_, pickle)] if pickle.len() <= MAX_PICKLE_BYTES => {
                Ok(ArchiveEntries { pickle: pickle.clone(), storages })
            }
            [(root, pickle)] => Err(damaged(
                at,
                &format!("{root}/data.pkl has {} bytes; the limit is {MAX_PICKLE_BYTES}", pickle.len()),
            )),
            other => Err(Diagnostic::error(&T0511, "a zip archive that is no PyTorch checkpoint")
                .with_label(at, format!("{count} entries, {} of them data.pkl; expected one", other.len()))
                .with_hint("pass the checkpoint itself; an archive of several files must be unpacked first")),
        }
    }

    fn locate(&self, t: &TensorRef) -> Result<TensorEntry, String> {
        let item = dtype::bit_size(t.dtype).unwrap_or(8) / 8;
        let Some(storage) = self.storages.get(&t.storage) else {
            return Err(format!("the archive has no entry data/{}", t.storage));
        };
        let bytes = t.shape.iter().try_fold(item, |n, d| n.checked_mul(*d));
        let start = t.offset.checked_mul(item);
        let end = bytes.and_then(|bytes| start?.checked_add(bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= storage.len() as u64 => Ok(TensorEntry {
                dtype: t.dtype.to_string(),
                shape: t.shape.clone(),
                start: storage.start + start as usize,
                end: storage.start + end as usize,
            }),
            _ => Err(format!(
                "{} {:?} from element {} needs more than the {} bytes of data/{}",
                t.dtype,
                t.shape,
                t.offset,
                storage.len(),
                t.storage
            )),
        }
    }
}

/// Collects the tensors below a value by their names.
fn collect_tensors<'a>(
    values: &'a Values,
    id: ValueId,
    path: &mut Vec<String>,
    visits: &mut usize,
    found: &mut BTreeMap<String, &'a TensorRef>,
) -> Result<(), String> {
    *visits += 1;
    if *visits > MAX_VISITS {
        return Err(format!("more than {MAX_VISITS} values, counted as often as they occur"));
    }
    if path.len() > MAX_DEPTH || path.iter().map(String::len).sum::<usize>() > MAX_NAME_BYTES {
        return Err(format!("names nested more than {MAX_DEPTH} deep or longer than {MAX_NAME_BYTES} bytes"));
    }
    let mut visit = |key: String, value: ValueId, path: &mut Vec<String>| {
        path.push(key);
        let result = collect_tensors(values, value, path, visits, found);
        path.pop();
        result
    };
    match values.get(id) {
        Value::Dict(pairs) => {
            for (key, value) in pairs {
                match values.get(*key) {
                    Value::Text(key) => visit(key.to_string(), *value, path)?,
                    Value::Int(key) => visit(key.to_string(), *value, path)?,
                    _ => {}
                }
            }
        }
        Value::Sequence(items) => {
            for (i, item) in items.iter().enumerate() {
                visit(i.to_string(), *item, path)?;
            }
        }
        Value::Tensor(tensor) => {
            let name = path.join(".");
            if found.insert(name.clone(), tensor).is_some() {
                return Err(format!("two tensors have the name {name}"));
            }
        }
        _ => {}
    }
    Ok(())
}

/// Returns whether the elements lie one after another in row-major order.
fn is_contiguous(t: &TensorRef) -> bool {
    if t.shape.contains(&0) {
        return true;
    }
    let mut expected: u64 = 1;
    t.shape.iter().zip(&t.strides).rev().all(|(extent, stride)| {
        // The stride of a dim of one element is never used.
        let fits = *extent == 1 || *stride == expected;
        expected = expected.saturating_mul(*extent);
        fits
    })
}

fn pickle_error(at: &str, problem: &PickleProblem) -> Diagnostic {
    match problem {
        PickleProblem::Imports(name, byte) => {
            Diagnostic::error(&T0510, format!("the checkpoint would import `{name}`"))
                .with_label(at, format!("in data.pkl at byte {byte}; nothing was executed"))
                .with_hint(
                    "if you trust its source, convert it on a machine without secrets: load it with \
                     weights_only=False, keep the tensors alone, and save them as safetensors",
                )
        }
        PickleProblem::Executes(opcode, byte) => {
            Diagnostic::error(&T0510, format!("the checkpoint would build or call an object ({opcode})"))
                .with_label(at, format!("in data.pkl at byte {byte}; nothing was executed"))
                .with_hint("use a checkpoint that holds tensors alone, as safetensors files do")
        }
        PickleProblem::Malformed(why, byte) => damaged(at, &format!("data.pkl, byte {byte}: {why}")),
    }
}

fn damaged(at: &str, why: &str) -> Diagnostic {
    Diagnostic::error(&T0511, "the PyTorch checkpoint is damaged or of an unknown kind")
        .with_label(at, why)
        .with_hint("compare the file's size and hash with the publisher's, and fetch it again if they differ")
}

fn torchscript_error(at: &str, path: &str) -> Diagnostic {
    Diagnostic::error(&T0511, "a TorchScript program instead of a checkpoint")
        .with_label(at, format!("contains {path}"))
        .with_hint("use the state dict of the model: torch.save(module.state_dict(), 'OUT.pt')")
}

fn big_endian_error(at: &str) -> Diagnostic {
    Diagnostic::error(&T0511, "the checkpoint was written on a big-endian machine")
        .with_label(at, "its entry byteorder is not `little`")
        .with_hint("write it again on a little-endian machine, such as any x86-64 or ARM host")
}

fn strided_error(at: &str, mut strided: Vec<String>, sound: usize) -> Diagnostic {
    let total = strided.len() + sound;
    let mut d = Diagnostic::error(&T0512, format!("{} of {total} tensors are not contiguous", strided.len()))
        .with_label(at, format!("the first is {}", strided[0]))
        .with_hint("save the tensors as `tensor.contiguous()`");
    let more = strided.len().saturating_sub(LISTED_TENSORS);
    strided.truncate(LISTED_TENSORS);
    d.notes = strided;
    if more > 0 { d.with_note(format!("and {more} more")) } else { d }
}

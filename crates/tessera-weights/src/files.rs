//! Finding, mapping and listing weight files. Everything that touches the file system is here.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};
use serde::Deserialize;
use tessera_base::{Bytes, Code, Diagnostic, Diagnostics, choices};

use crate::header::{self, MAX_HEADER_BYTES};
use crate::resolve::{self, Expected};
use crate::set::WeightSet;

/// The tensors of one model's files, under the names that the files give them. Cloning shares the maps.
#[derive(Debug, Clone)]
pub struct WeightFiles {
    at: String,
    tensors: BTreeMap<String, Stored>,
    metadata: BTreeMap<String, String>,
}

/// What a file says of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// safetensors dtype name; it may be one that cannot be read.
    pub dtype: &'a str,
    /// Extent of each dim.
    pub shape: &'a [u64],
}

impl WeightFiles {
    /// Opens the weights of a folder: `model.safetensors`, or the shards that `model.safetensors.index.json`
    /// names, or the same two under the stem `diffusion_pytorch_model`, or else the only `*.safetensors` there
    /// besides `text_encoder.safetensors`. A path to a file opens that file.
    ///
    /// # Errors
    /// One diagnostic per bad file: none or several candidates or missing shards (T0501), short (T0502),
    /// not safetensors (T0503), inconsistent (T0504), an index that disagrees (T0505), not readable (T0508).
    pub fn open(dir: &Path) -> Result<WeightFiles, Diagnostics> {
        if dir.is_file() {
            return WeightFiles::open_file(dir).map_err(|d| vec![d]);
        }
        for stem in STEMS {
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

    /// Opens a single safetensors file.
    ///
    /// # Errors
    /// T0502, T0503, T0504 or T0508, as for [`WeightFiles::open`].
    pub fn open_file(path: &Path) -> Result<WeightFiles, Diagnostic> {
        let (tensors, metadata) = read_file(path)?;
        Ok(WeightFiles { at: path.display().to_string(), tensors, metadata })
    }

    /// Every tensor, in order of name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.tensors.iter().map(|(name, t)| TensorInfo { name, dtype: &t.dtype, shape: &t.shape })
    }

    /// The free-form strings of the header; of shards, those of the first shard that has each key.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.tensors.values().map(|t| Bytes((t.end - t.start) as u64)).sum()
    }

    /// Gives each expected tensor its place in the files and refuses everything else.
    ///
    /// The i-th aliases of all tensors are taken to form one naming style. The style that finds most tensors is
    /// used; a tensor that it does not find is looked up under its other names. A leading `model.` or
    /// `generator.` that all names of the files share, and no expected name has, is left out, repeatedly.
    ///
    /// # Errors
    /// T0506: one diagnostic with a note per problem: missing, extra, misshapen, unsupported dtype.
    pub fn resolve(&self, expected: &[Expected]) -> Result<WeightSet, Diagnostics> {
        resolve::resolve(&self.at, &self.tensors, expected).map(WeightSet::new).map_err(|d| vec![d])
    }

    /// Takes every tensor under the file's own name, for files that no model describes.
    ///
    /// # Errors
    /// T0506 where a dtype cannot be read.
    pub fn resolve_as_is(&self) -> Result<WeightSet, Diagnostics> {
        let own = |t: TensorInfo<'_>| Expected {
            name: t.name.to_string(),
            aliases: Vec::new(),
            shape: t.shape.to_vec(),
        };
        self.resolve(&self.tensors().map(own).collect::<Vec<_>>())
    }
}

/// One tensor's place in a mapped file. The offsets were checked against the map's length.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    map: Arc<Mmap>,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    start: usize,
    end: usize,
}

impl Stored {
    /// All bytes, row-major and little-endian.
    pub(crate) fn raw(&self) -> &[u8] {
        &self.map[self.start..self.end]
    }
}

const STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];

/// Ends in `.safetensors` like the model's weights, but belongs to the text encoder.
const NOT_THE_MODEL: &str = "text_encoder.safetensors";

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

type Contents = (BTreeMap<String, Stored>, BTreeMap<String, String>);

fn read_file(path: &Path) -> Result<Contents, Diagnostic> {
    let at = path.display().to_string();
    let map = Arc::new(map(path).map_err(|e| unreadable(&at, &e))?);
    let header = header::parse(&at, &map)?;
    let stored = |t: header::Entry| Stored {
        map: Arc::clone(&map),
        dtype: t.dtype,
        shape: t.shape,
        start: t.start,
        end: t.end,
    };
    Ok((header.tensors.into_iter().map(|(name, t)| (name, stored(t))).collect(), header.metadata))
}

/// Maps a regular file; anything else could block or change its length.
#[allow(unsafe_code)]
fn map(path: &Path) -> io::Result<Mmap> {
    let not_regular = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    if !fs::metadata(path)?.is_file() {
        return Err(not_regular());
    }
    let file = File::open(path)?;
    // SAFETY: the map is private and read-only, every offset is checked against its length, and any bit pattern is
    // a valid byte. What remains is another process changing the file while it is mapped. Page T0508 asks to
    // replace weights by rename, which leaves this inode alone; a file changed in place yields other numbers, which
    // comparing fingerprints shows, and a shortened one ends the process by SIGBUS.
    unsafe { MmapOptions::new().map_copy_read_only(&file) }
}

fn open_index(dir: &Path, index_path: &Path) -> Result<WeightFiles, Diagnostics> {
    let at = index_path.display().to_string();
    let index = read_index(&at, index_path).map_err(|d| vec![d])?;
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &index.weight_map {
        shards.entry(shard).or_default().push(tensor);
    }
    // A shard is a file beside its index: a name that leads elsewhere was not written by a weights tool.
    if let Some(shard) = shards.keys().find(|s| Path::new(s).file_name().is_none_or(|f| f != **s)) {
        let says = format!("names the shard {shard:?}");
        return Err(vec![
            Diagnostic::error(&T0505, "an index may only name files beside it")
                .at(at, says)
                .hint("take the index that was published with the shards"),
        ]);
    }

    let (present, missing): (Vec<&str>, Vec<&str>) = shards.keys().partition(|s| dir.join(s).exists());
    let mut problems = Vec::new();
    if !missing.is_empty() {
        let mut d =
            Diagnostic::error(&T0501, format!("{} of {} shards are missing", missing.len(), shards.len()))
                .at(&at, format!("names {} shards", shards.len()))
                .at(dir.display().to_string(), format!("holds {} of them", present.len()))
                .hint("fetch the missing shards into the same folder");
        d.notes = missing.iter().map(|s| format!("missing: {s} ({} tensors)", shards[*s].len())).collect();
        problems.push(d);
    }

    let mut all = WeightFiles { at: at.clone(), tensors: BTreeMap::new(), metadata: BTreeMap::new() };
    let mut disagree = Vec::new();
    for shard in present {
        let (tensors, metadata) = match read_file(&dir.join(shard)) {
            Ok(contents) => contents,
            Err(d) => {
                problems.push(d);
                continue;
            }
        };
        for name in &shards[shard] {
            if !tensors.contains_key(*name) {
                disagree.push(format!("{name}: the index places it in {shard}, which lacks it"));
            }
        }
        for (name, t) in tensors {
            match index.weight_map.get(&name) {
                Some(place) if place == shard => {
                    all.tensors.insert(name, t);
                }
                Some(place) => {
                    disagree.push(format!("{name}: in {shard}, but the index places it in {place}"));
                }
                None => disagree.push(format!("{name}: in {shard}, but not in the index")),
            }
        }
        for (key, value) in metadata {
            all.metadata.entry(key).or_insert(value);
        }
    }
    if !disagree.is_empty() {
        let mut d = Diagnostic::error(&T0505, "the index and the shards disagree")
            .at(&at, format!("{} tensors in {} shards", index.weight_map.len(), shards.len()))
            .at(dir.display().to_string(), format!("{} tensors differ", disagree.len()))
            .hint("fetch index and shards again from one revision of the model");
        d.notes = disagree;
        problems.push(d);
    }
    if problems.is_empty() { Ok(all) } else { Err(problems) }
}

fn read_index(at: &str, path: &Path) -> Result<Index, Diagnostic> {
    let found = fs::metadata(path).map_err(|e| unreadable(at, &e))?;
    if !found.is_file() || found.len() > MAX_HEADER_BYTES {
        let says = format!("{} bytes, the limit is {MAX_HEADER_BYTES}, of a regular file", found.len());
        return Err(Diagnostic::error(&T0505, "the index is too large or no file").at(at, says));
    }
    let text = fs::read(path).map_err(|e| unreadable(at, &e))?;
    serde_json::from_slice(&text).map_err(|e| {
        Diagnostic::error(&T0505, "the index is not what the format asks for")
            .at(at, format!("in {} bytes of JSON: {e}", text.len()))
            .hint("fetch the index again; it holds an object `weight_map` from tensor to file name")
    })
}

/// The only weight file of a folder that has none of the usual names.
fn only_candidate(dir: &Path) -> Result<PathBuf, Diagnostic> {
    let at = dir.display().to_string();
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| unreadable(&at, &e))? {
        let name = entry.map_err(|e| unreadable(&at, &e))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") && name != NOT_THE_MODEL {
            names.push(name);
        }
    }
    names.sort();
    let usual: Vec<String> = STEMS
        .iter()
        .flat_map(|s| [format!("{s}.safetensors"), format!("{s}.safetensors.index.json")])
        .collect();
    match names.as_slice() {
        [one] => Ok(dir.join(one)),
        [] => Err(Diagnostic::error(&T0501, "no weights here")
            .at(at, format!("expected {}; found 0 files named *.safetensors", choices(&usual)))
            .hint("name the folder that holds the model's config and weights")),
        several => {
            let mut d = Diagnostic::error(&T0501, "more than one file could be the weights")
                .at(at, format!("{} files, none is {}", several.len(), choices(&usual)))
                .hint("name one file, or fetch the index that belongs to the shards");
            d.notes = several.iter().map(|n| format!("found: {n}")).collect();
            Err(d)
        }
    }
}

fn unreadable(at: &str, e: &io::Error) -> Diagnostic {
    Diagnostic::error(&T0508, "cannot be read")
        .at(at, e.to_string())
        .hint("check the path and its permissions on this host")
}

pub(crate) static T0501: Code = Code {
    id: "T0501",
    title: "weights not found",
    page: "A model's folder holds its weights as `model.safetensors`, or as shards named by \
`model.safetensors.index.json`, or under the same two names beginning with `diffusion_pytorch_model`. Failing these, \
a single other *.safetensors file is taken; `text_encoder.safetensors` never counts.\n\n\
With none of them, the path is probably one folder too high or too low (diffusers keeps a model's weights in \
`transformer/`). With several, nothing is guessed: a folder often holds two precisions of one model. Name the file \
itself. Shards whose index is absent cannot be told from a partial download: fetch the index too. Missing shards are \
all listed at once.",
};

pub(crate) static T0505: Code = Code {
    id: "T0505",
    title: "an index and its shards disagree",
    page: "`*.safetensors.index.json` says which shard holds which tensor. Each tensor must be in that shard, in no \
other, and no shard may hold a tensor that the index does not name.\n\n\
A disagreement usually means that index and shards come from two revisions of a model, or that one download was \
resumed after an update. Mixed revisions load without complaint elsewhere and give wrong output; here they are \
refused. Fetch everything again from one revision. An index may not name files outside its own folder.",
};

pub(crate) static T0508: Code = Code {
    id: "T0508",
    title: "a weight file cannot be read",
    page: "The operating system refused to open or map the file; its own words are in the message. Look at the path, \
at the permissions of each folder on the way, and, for network file systems, at whether this host has them mounted. \
A pipe or device is refused: weights must be a regular file.\n\n\
Weights are mapped, not copied, so a file must not change while a run uses it. Replace weights by writing a new file \
and renaming it over the old one. A file that is shortened in place under a run ends that run with SIGBUS.",
};

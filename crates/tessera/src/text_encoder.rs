//! The text encoder of a model: where its files lie, and what the leader reads of them.

use std::path::{Path, PathBuf};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::Type;
use tessera_models::{TextEncoder, Umt5Config, VideoModel, WordEncoder, umt5_weights};
use tessera_text::PromptTokenizer;
use tessera_weights::{ExpectedTensor, WeightFiles, WeightSet};

use crate::checkpoint::{CheckpointFolder, Part};
use crate::codes::{T0010, T0016, T0058};
use crate::files::read_text_file;
use crate::weights_origin::WeightsBase;

/// Name of the file with the word table of a word encoder.
const WORD_TABLE_FILE: &str = "text_encoder.safetensors";

/// Name of the file with the words of a word encoder.
const WORD_LIST_FILE: &str = "vocab.txt";

/// The files of a UMT5 text encoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextFiles {
    /// File or index of the weights.
    weights: PathBuf,
    /// Folder with `tokenizer.json` or `spiece.model`.
    tokenizer: PathBuf,
}

impl TextFiles {
    /// Finds the files in a model folder or a published checkpoint.
    ///
    /// # Errors
    /// T0070 or T0071 if it lacks one of them.
    pub(crate) fn find(checkpoint: &CheckpointFolder) -> Result<TextFiles, Diagnostic> {
        Ok(TextFiles {
            weights: checkpoint.require(Part::TextEncoder)?.source.clone(),
            tokenizer: checkpoint.require(Part::Tokenizer)?.source.clone(),
        })
    }

    /// Reads the dimensions of the encoder, and names the file that states them. Weights without a
    /// `config.json` in a folder of their own are UMT5-XXL, as in the original checkpoints of Wan.
    ///
    /// # Errors
    /// T0010 if the file cannot be read, and what is wrong with the dimensions.
    pub(crate) fn read_config(&self) -> Result<(String, Umt5Config), Diagnostics> {
        let folder = self.weights.parent().unwrap_or(Path::new(""));
        let path = folder.join("config.json");
        if !folder.ends_with("text_encoder") || !path.exists() {
            return Ok((self.weights.display().to_string(), Umt5Config::xxl()));
        }
        let file = path.display().to_string();
        let text = read_text_file(&path).map_err(|e| vec![unreadable(&path, &e)])?;
        let config = Umt5Config::parse(&file, &text)?;
        Ok((file, config))
    }

    /// Returns the file of the tokenizer, which is read in this order of preference: the reference
    /// pipelines read `tokenizer.json`.
    fn tokenizer_file(&self) -> Result<PathBuf, Diagnostic> {
        let files = ["tokenizer.json", "spiece.model"].map(|name| self.tokenizer.join(name));
        files.into_iter().find(|file| file.exists()).ok_or_else(|| {
            Diagnostic::error(
                &T0010,
                format!("{} holds neither tokenizer.json nor spiece.model", self.tokenizer.display()),
            )
            .with_hint("fetch the folder of the tokenizer that was published with the model")
        })
    }
}

/// Opens the weights of an encoder under the names of its program.
fn open_umt5_weights(checkpoint: &CheckpointFolder, config: &Umt5Config) -> Result<WeightSet, Diagnostics> {
    let expected: Vec<ExpectedTensor> = umt5_weights(config)
        .into_iter()
        .map(|w| ExpectedTensor { name: w.name, aliases: w.aliases, shape: w.shape })
        .collect();
    checkpoint.open_part(Part::TextEncoder, &expected)
}

fn unreadable(path: &Path, e: &impl std::fmt::Display) -> Diagnostic {
    Diagnostic::error(&T0010, format!("{} cannot be read: {e}", path.display()))
}

/// What the leader needs to encode prompts.
#[derive(Debug)]
pub enum PromptEncoder {
    /// A table with one row per word.
    Words(WordEncoder),
    /// A tokenizer, and the weights of the sealed program that encodes its ids.
    Umt5(Box<Umt5Files>),
    /// The rows of each prompt, from a file.
    File(EncodedPrompts),
}

/// The opened files of a UMT5 text encoder.
#[derive(Debug)]
pub struct Umt5Files {
    tokenizer: PromptTokenizer,
    weights: WeightSet,
    text_len: u64,
}

impl PromptEncoder {
    /// Opens the text encoder of a model.
    ///
    /// # Errors
    /// Returns T0016 if the model has none, or what is wrong with its files.
    pub(crate) fn open(
        name: &str,
        dir: &Path,
        video: &VideoModel,
        base: WeightsBase,
    ) -> Result<PromptEncoder, Diagnostics> {
        let wan = &video.wan;
        if let WeightsBase::Synthetic(seed) = base {
            return Ok(PromptEncoder::Words(WordEncoder::synthetic(seed, wan.text_dim, wan.text_len)));
        }
        Ok(match (video.stream.text, &video.text_encoder) {
            (TextEncoder::Words, _) => {
                let vocab = dir.join(WORD_LIST_FILE);
                let words = read_text_file(&vocab).map_err(|e| vec![unreadable(&vocab, &e)])?;
                let set = open_word_table(dir)?;
                set.check_finite("words.weight").map_err(|d| vec![d])?;
                let table = set.read_whole_f32("words.weight").map_err(|d| vec![d])?;
                let encoder = WordEncoder::new(&words, table, wan.text_dim, wan.text_len);
                PromptEncoder::Words(encoder.map_err(|d| vec![*d])?)
            }
            (TextEncoder::Umt5, Some(config)) => {
                let checkpoint = CheckpointFolder::recognise(dir).map_err(|d| vec![d])?;
                let files = TextFiles::find(&checkpoint).map_err(|d| vec![d])?;
                let tokenizer = open_tokenizer(&files, config).map_err(|d| vec![d]);
                let weights = open_umt5_weights(&checkpoint, config);
                let (tokenizer, weights) = match (tokenizer, weights) {
                    (Ok(tokenizer), Ok(weights)) => (tokenizer, weights),
                    (t, w) => return Err([t.err(), w.err()].into_iter().flatten().flatten().collect()),
                };
                PromptEncoder::Umt5(Box::new(Umt5Files { tokenizer, weights, text_len: wan.text_len }))
            }
            (TextEncoder::File, _) => {
                let path = dir.join(&video.stream.text_file);
                let set = WeightFiles::open_file(&path).map_err(|d| vec![d])?.resolve_as_is()?;
                let file = path.display().to_string();
                PromptEncoder::File(EncodedPrompts {
                    file,
                    set,
                    text_len: wan.text_len,
                    text_dim: wan.text_dim,
                })
            }
            (TextEncoder::None, _) | (TextEncoder::Umt5, None) => {
                return Err(vec![
                    Diagnostic::error(&T0016, format!("{name} has no text encoder")).with_label(
                        dir.join("stream.toml").display().to_string(),
                        format!("[text] encoder = \"{}\"", video.stream.text.name()),
                    ),
                ]);
            }
        })
    }

    /// Returns the digests of everything that determines the rows of a prompt: the tensors of the
    /// encoder, then the tokenizer's file.
    ///
    /// # Errors
    /// What is wrong with the files.
    pub(crate) fn digest_files(
        dir: &Path,
        video: &VideoModel,
        base: WeightsBase,
        threads: usize,
    ) -> Result<Vec<[u8; 32]>, Diagnostics> {
        // A synthetic text encoder has a row for any word, by definition of its seed.
        if base != WeightsBase::Files {
            return Ok(Vec::new());
        }
        Ok(match (video.stream.text, &video.text_encoder) {
            (TextEncoder::Words, _) => vec![open_word_table(dir)?.content_digest(threads)],
            (TextEncoder::Umt5, Some(config)) => {
                let checkpoint = CheckpointFolder::recognise(dir).map_err(|d| vec![d])?;
                let weights = open_umt5_weights(&checkpoint, config)?.content_digest(threads);
                let files = TextFiles::find(&checkpoint).map_err(|d| vec![d])?;
                let path = files.tokenizer_file().map_err(|d| vec![d])?;
                let bytes = std::fs::read(&path).map_err(|e| vec![unreadable(&path, &e)])?;
                vec![weights, *blake3::hash(&bytes).as_bytes()]
            }
            (TextEncoder::File, _) => {
                let path = dir.join(&video.stream.text_file);
                let set = WeightFiles::open_file(&path).map_err(|d| vec![d])?.resolve_as_is()?;
                vec![set.content_digest(threads)]
            }
            (TextEncoder::None, _) | (TextEncoder::Umt5, None) => Vec::new(),
        })
    }

    /// Returns the file of the tokenizer, or of the word list of a word encoder; `None` for a model without
    /// one, and for a folder that lacks it: only the leader needs the file.
    pub(crate) fn find_tokenizer(dir: &Path, video: &VideoModel, base: WeightsBase) -> Option<PathBuf> {
        if base != WeightsBase::Files {
            return None;
        }
        match video.stream.text {
            TextEncoder::Words => Some(dir.join(WORD_LIST_FILE)).filter(|path| path.exists()),
            TextEncoder::Umt5 => {
                let checkpoint = CheckpointFolder::recognise(dir).ok()?;
                TextFiles::find(&checkpoint).ok()?.tokenizer_file().ok()
            }
            TextEncoder::File | TextEncoder::None => None,
        }
    }

    /// Returns the rows [text_len, text_dim] of a prompt from a table or a file.
    ///
    /// # Errors
    /// Why there are none: T0016 for a UMT5 encoder, whose program returns them.
    pub(crate) fn look_up_rows(&self, prompt: &str) -> Result<Vec<f32>, Diagnostic> {
        match self {
            PromptEncoder::Words(words) => words.encode(prompt).map_err(|d| *d),
            PromptEncoder::File(prompts) => prompts.read_rows(prompt),
            PromptEncoder::Umt5(_) => Err(Diagnostic::error(&T0016, "a UMT5 encoder needs its program")),
        }
    }

    /// Checks, without the encoder's program, that a prompt can be encoded.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_prompt(&self, prompt: &str) -> Result<(), Diagnostic> {
        match self {
            PromptEncoder::Words(words) => words.encode(prompt).map(drop).map_err(|d| *d),
            PromptEncoder::Umt5(files) => files.tokenize(prompt).map(drop),
            PromptEncoder::File(prompts) => prompts.read_rows(prompt).map(drop),
        }
    }

    /// Checks, without the encoder's program, that a negative prompt can be encoded.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_negative_prompt(&self, prompt: &str) -> Result<(), Diagnostic> {
        match self {
            PromptEncoder::Words(words) => words.encode_negative(prompt).map(drop).map_err(|d| *d),
            PromptEncoder::Umt5(_) | PromptEncoder::File(_) => self.check_prompt(prompt),
        }
    }
}

impl Umt5Files {
    /// Returns the ids of a prompt with its end, at least one and at most as many as the encoder
    /// reads.
    pub(crate) fn tokenize(&self, prompt: &str) -> Result<Vec<u32>, Diagnostic> {
        self.tokenizer.encode_prompt(prompt, self.text_len as usize)
    }

    /// Returns where the first weight lies that is NaN or infinite, if there is one.
    pub(crate) fn find_nonfinite_weight(&self) -> Option<Diagnostic> {
        self.weights.tensor_names().find_map(|name| self.weights.check_finite(name).err())
    }
}

impl WeightSource for Umt5Files {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        self.weights.read_whole_f32(name)
    }

    fn check_finite(&mut self, name: &str) -> Result<(), Diagnostic> {
        self.weights.check_finite(name)
    }
}

/// The rows of prompts that another program encoded: a safetensors file whose tensors are named by
/// their prompts.
#[derive(Debug)]
pub struct EncodedPrompts {
    file: String,
    set: WeightSet,
    text_len: u64,
    text_dim: u64,
}

impl EncodedPrompts {
    /// Returns the rows [text_len, text_dim] of a prompt, padded with zeros.
    ///
    /// # Errors
    /// T0058 if the file lacks the prompt, or its rows do not fit the DiT.
    pub(crate) fn read_rows(&self, prompt: &str) -> Result<Vec<f32>, Diagnostic> {
        let fits = |shape: &[u64]| matches!(*shape, [rows, columns] if (1..=self.text_len).contains(&rows) && columns == self.text_dim);
        match self.set.tensor_shape(prompt) {
            None => Err(Diagnostic::error(&T0058, format!("no rows for the prompt `{prompt}`"))
                .with_label(&self.file, self.list_prompts())
                .with_hint("add a tensor whose name is the prompt, letter by letter")),
            Some(shape) if !fits(shape) => {
                Err(Diagnostic::error(&T0058, format!("the rows of the prompt `{prompt}` do not fit"))
                    .with_label(&self.file, format!("a tensor {shape:?}"))
                    .with_label(
                        "config.json",
                        format!("the DiT reads 1 to {} rows of {} columns", self.text_len, self.text_dim),
                    )
                    .with_hint("encode the prompt with the text encoder of this model"))
            }
            Some(_) => {
                self.set.check_finite(prompt)?;
                let mut rows = self.set.read_whole_f32(prompt)?;
                rows.resize((self.text_len * self.text_dim) as usize, 0.0);
                Ok(rows)
            }
        }
    }

    /// Returns the number of prompts and the first of them, as text.
    fn list_prompts(&self) -> String {
        let names: Vec<&str> = self.set.tensor_names().collect();
        let some: Vec<String> = names.iter().take(5).map(|name| format!("`{name}`")).collect();
        format!("holds {} prompts: {}", names.len(), some.join(", "))
    }
}

fn open_tokenizer(files: &TextFiles, config: &Umt5Config) -> Result<PromptTokenizer, Diagnostic> {
    let path = files.tokenizer_file()?;
    let file = path.display().to_string();
    let bytes = std::fs::read(&path).map_err(|e| unreadable(&path, &e))?;
    let is_json = path.extension().is_some_and(|e| e == "json");
    let read = if is_json { PromptTokenizer::from_json } else { PromptTokenizer::from_spiece };
    let tokenizer = read(&file, &bytes)?;
    tokenizer.check_vocabulary(&file, config.vocab_size)?;
    Ok(tokenizer)
}

fn open_word_table(dir: &Path) -> Result<WeightSet, Diagnostics> {
    WeightFiles::open_file(&dir.join(WORD_TABLE_FILE)).map_err(|d| vec![d])?.resolve_as_is()
}

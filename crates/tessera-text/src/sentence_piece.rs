//! Encoding with a SentencePiece model, by its own rules.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tokenizers::models::unigram::Unigram;

use crate::charsmap::Charsmap;
use crate::codes::T0451;
use crate::spiece_file::{Piece, PieceKind, SpieceFile};

/// The character that stands for a space in pieces.
const SPACE: char = '\u{2581}';

/// A unigram model with its normalization.
pub(crate) struct SentencePieceModel {
    file: SpieceFile,
    charsmap: Charsmap,
    unigram: Unigram,
    /// Id of each piece that text can contain.
    ids: BTreeMap<String, u32>,
    /// Id of each byte, if unknown text falls back to bytes.
    bytes: Option<Vec<u32>>,
}

impl SentencePieceModel {
    /// Reads a `spiece.model`. `name` appears only in diagnostics.
    ///
    /// # Errors
    /// T0451 with what is wrong with the file.
    pub(crate) fn parse(name: &str, bytes: &[u8]) -> Result<SentencePieceModel, Diagnostic> {
        let refuse = |why: String| {
            Diagnostic::error(&T0451, "the SentencePiece model cannot be used")
                .with_label(name, why)
                .with_hint("fetch the file again from the publisher of the model")
        };
        let file = SpieceFile::parse(name, bytes)?;
        let charsmap = Charsmap::parse(&file.charsmap).ok_or_else(|| {
            refuse(format!("the character map of {} bytes is damaged", file.charsmap.len()))
        })?;
        let unigram = Unigram::from(scored_pieces(&file.pieces), Some(file.unknown_id), false)
            .map_err(|e| refuse(e.to_string()))?;
        let is_text = |p: &Piece| matches!(p.kind, PieceKind::Normal | PieceKind::UserDefined);
        let texts = (0u32..).zip(&file.pieces).filter(|(_, p)| is_text(p));
        let ids = texts.map(|(id, p)| (p.text.clone(), id)).collect();
        let bytes = if file.byte_fallback {
            Some(byte_ids(&file.pieces).map_err(|byte| refuse(format!("no piece for byte {byte:#04X}")))?)
        } else {
            None
        };
        Ok(SentencePieceModel { file, charsmap, unigram, ids, bytes })
    }

    /// Encodes a text, without the end of the prompt.
    ///
    /// # Errors
    /// T0451 if the model has no piece for a text and no unknown piece.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, Diagnostic> {
        let normalized = self.normalize(text);
        let pieces = self.unigram.encode(&normalized).map_err(|e| {
            Diagnostic::error(&T0451, "the prompt cannot be tokenized")
                .with_label("the tokenizer", e.to_string())
        })?;
        let mut out = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match (self.ids.get(&piece), &self.bytes) {
                (Some(id), _) => out.push(*id),
                (None, Some(bytes)) => out.extend(piece.bytes().map(|b| bytes[usize::from(b)])),
                (None, None) => out.push(self.file.unknown_id as u32),
            }
        }
        Ok(out)
    }

    /// Returns the number of ids.
    pub(crate) fn vocabulary_size(&self) -> usize {
        self.file.pieces.len()
    }

    fn normalize(&self, text: &str) -> String {
        let file = &self.file;
        let mut text = self.charsmap.normalize(text);
        if file.removes_extra_spaces {
            text = text.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
        }
        if file.adds_prefix && !text.is_empty() {
            text.insert(0, ' ');
        }
        if !file.escapes_spaces {
            return text;
        }
        let escaped = text.replace(' ', &SPACE.to_string());
        // A text may hold the escape character itself, which at its end counts as a space.
        match file.removes_extra_spaces {
            true => escaped.trim_end_matches(SPACE).to_string(),
            false => escaped,
        }
    }
}

/// Returns the pieces with the scores by which the best segmentation is found. Text can contain
/// neither symbols nor the names of bytes, so these get names that no cleaned text has.
fn scored_pieces(pieces: &[Piece]) -> Vec<(String, f64)> {
    let normal = pieces.iter().filter(|p| p.kind == PieceKind::Normal).map(|p| p.score);
    let best = normal.fold(f32::NEG_INFINITY, f32::max).max(f32::MIN);
    let scored = |(id, p): (usize, &Piece)| match p.kind {
        PieceKind::Normal => (p.text.clone(), f64::from(p.score)),
        // A declared piece beats every segmentation of its text.
        PieceKind::UserDefined => (p.text.clone(), f64::from(p.text.len() as f32 * best - 0.1)),
        PieceKind::Symbol | PieceKind::Byte => (format!("\0{id}"), 0.0),
    };
    pieces.iter().enumerate().map(scored).collect()
}

/// Returns the id of each byte, or the byte that has none.
fn byte_ids(pieces: &[Piece]) -> Result<Vec<u32>, u8> {
    let named: BTreeMap<&str, u32> = (0u32..)
        .zip(pieces)
        .filter(|(_, p)| p.kind == PieceKind::Byte)
        .map(|(id, p)| (p.text.as_str(), id))
        .collect();
    (0..=u8::MAX).map(|b| named.get(format!("<0x{b:02X}>").as_str()).copied().ok_or(b)).collect()
}

//! The word-table text encoder, with one row per word. It is a placeholder for a language-model
//! encoder.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, fill_normals};
use tessera_base::{Diagnostic, closest_name};

use crate::codes::{T0420, T0421, T0422};

/// Text encoder that looks up one `text_dim`-wide table row per word of a closed vocabulary.
#[derive(Debug, Clone)]
pub struct WordEncoder {
    rows: BTreeMap<String, usize>,
    table: Vec<f32>,
    dim: usize,
    text_len: usize,
    /// Seed of the rows of words outside the vocabulary; `None` if such words are errors.
    seed: Option<u64>,
}

impl WordEncoder {
    /// Creates an encoder that knows every word: its row holds standard normals that are a function of
    /// the seed and the word.
    #[must_use]
    pub fn synthetic(seed: u64, dim: u64, text_len: u64) -> WordEncoder {
        let (dim, text_len) = (dim as usize, text_len as usize);
        WordEncoder { rows: BTreeMap::new(), table: Vec::new(), dim, text_len, seed: Some(seed) }
    }

    /// Creates the encoder from the lines of a vocabulary and a table [words, dim], row-major.
    ///
    /// # Errors
    /// T0422 if the two do not match or a word occurs twice.
    pub fn new(
        vocabulary: &str,
        table: Vec<f32>,
        dim: u64,
        text_len: u64,
    ) -> Result<WordEncoder, Box<Diagnostic>> {
        let mut rows = BTreeMap::new();
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(vocabulary.lines()).filter(|(_, l)| !l.trim().is_empty()) {
            if let Some(first) = rows.insert(line.trim().to_lowercase(), lines.len()) {
                let (at, word): (usize, &str) = lines[first];
                return Err(Box::new(
                    Diagnostic::error(&T0422, format!("`{}` occurs twice in the vocabulary", line.trim()))
                        .with_label(format!("line {at}"), word)
                        .with_label(format!("line {number}"), line.trim())
                        .with_hint("letter case is ignored; remove the line and its row of the table"),
                ));
            }
            lines.push((number, line.trim()));
        }
        let (dim, text_len) = (dim as usize, text_len as usize);
        if lines.len().checked_mul(dim) != Some(table.len()) {
            return Err(Box::new(Diagnostic::error(
                &T0422,
                format!(
                    "{} words of {dim} numbers need {}, the table has {}",
                    lines.len(),
                    lines.len().saturating_mul(dim),
                    table.len()
                ),
            )));
        }
        Ok(WordEncoder { rows, table, dim, text_len, seed: None })
    }

    /// Encodes a negative prompt, which may be empty: zero rows alone.
    ///
    /// # Errors
    /// As [`WordEncoder::encode`], without T0420.
    pub fn encode_negative(&self, prompt: &str) -> Result<Vec<f32>, Box<Diagnostic>> {
        if prompt.trim().is_empty() { Ok(vec![0.0; self.text_len * self.dim]) } else { self.encode(prompt) }
    }

    /// Encodes a prompt as [text_len, text_dim], padded with zero rows.
    ///
    /// # Errors
    /// T0420 for a prompt without words, T0421 for unknown words (all are listed), T0422 for too
    /// many words.
    pub fn encode(&self, prompt: &str) -> Result<Vec<f32>, Box<Diagnostic>> {
        let words: Vec<String> = prompt.split_whitespace().map(str::to_lowercase).collect();
        if words.is_empty() {
            return Err(Box::new(
                Diagnostic::error(&T0420, "the prompt has no words")
                    .with_hint(format!("known words: {}", self.known_words())),
            ));
        }
        let is_known = |w: &String| self.seed.is_some() || self.rows.contains_key(w);
        let unknown: Vec<&String> = words.iter().filter(|w| !is_known(w)).collect();
        if !unknown.is_empty() {
            let mut d = Diagnostic::error(&T0421, format!("unknown word in the prompt `{prompt}`"));
            for w in unknown {
                let near = closest_name(w, self.rows.keys().map(String::as_str));
                d = d.with_label(
                    format!("`{w}`"),
                    near.map_or("no similar word".to_string(), |n| format!("did you mean `{n}`?")),
                );
            }
            return Err(Box::new(d.with_hint(format!("known words: {}", self.known_words()))));
        }
        if words.len() > self.text_len {
            return Err(Box::new(Diagnostic::error(
                &T0422,
                format!("the prompt has {} words, the model reads {}", words.len(), self.text_len),
            )));
        }
        let mut out = vec![0.0; self.text_len * self.dim];
        for (w, row) in words.iter().zip(out.chunks_exact_mut(self.dim)) {
            if let Some(i) = self.rows.get(w) {
                row.copy_from_slice(&self.table[i * self.dim..(i + 1) * self.dim]);
            } else if let Some(seed) = self.seed {
                let key = DrawKey { seed: seed ^ hash_word(w), chunk: 0, draw: 0 };
                fill_normals(key, 0, row);
            }
        }
        Ok(out)
    }

    /// Returns the known words in alphabetical order, separated by spaces.
    #[must_use]
    pub fn known_words(&self) -> String {
        self.rows.keys().cloned().collect::<Vec<_>>().join(" ")
    }
}

/// Hashes a word by FNV-1a.
fn hash_word(word: &str) -> u64 {
    let step = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
    word.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_encoder() -> WordEncoder {
        WordEncoder::new("a\nred\ncircle\n", (0..6).map(|i| i as f32).collect(), 2, 4).unwrap()
    }

    #[test]
    fn a_prompt_is_its_rows_and_padding() {
        assert_eq!(test_encoder().encode("A circle").unwrap(), [0.0, 1.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_synthetic_encoder_knows_every_word_by_its_seed() {
        let encode = |seed, prompt| WordEncoder::synthetic(seed, 3, 4).encode(prompt).unwrap();
        let [one, two] = [1, 2].map(|seed| encode(seed, "Zebra crossing"));
        assert_ne!(one, two);
        assert_eq!(one[6..], [0.0; 6]);
        assert_eq!(encode(1, "crossing zebra"), [&one[3..6], &one[..3], &one[6..]].concat());
        assert_eq!(WordEncoder::synthetic(1, 3, 4).encode("a b c d e").unwrap_err().code.id, "T0422");
    }

    #[test]
    fn duplicate_words_are_rejected() {
        let d = WordEncoder::new("a\nRed\n\nred\n", vec![0.0; 6], 2, 4).unwrap_err();
        let places: Vec<&str> = d.labels.iter().map(|p| p.location.as_str()).collect();
        assert_eq!((d.code.id, places), ("T0422", vec!["line 2", "line 4"]));
        assert_eq!(WordEncoder::new("a\nred\n", vec![0.0; 6], 2, 4).unwrap_err().code.id, "T0422");
    }

    #[test]
    fn refusals_name_the_words() {
        assert_eq!(test_encoder().encode("  ").unwrap_err().code.id, "T0420");
        let d = test_encoder().encode("a cirle dog").unwrap_err();
        assert_eq!((d.code.id, d.labels.len()), ("T0421", 2));
        assert!(d.labels[0].message.contains("circle"));
        assert_eq!(test_encoder().encode("a a a a a").unwrap_err().code.id, "T0422");
    }
}

//! The word-table text encoder: one row per word. It stands where a language model's encoder will.

use std::collections::BTreeMap;

use tessera_base::{Code, Diagnostic, nearest};

/// Nothing to show.
pub static T0420: Code = Code {
    id: "T0420",
    title: "prompt is empty",
    page: "A prompt needs at least one word; an empty one would condition the model on padding alone. For the demo \
model try `a red circle moves right`.",
};
/// A word without a row.
pub static T0421: Code = Code {
    id: "T0421",
    title: "word is not in the model's vocabulary",
    page: "The model's text encoder is a table with one row per word, listed in vocab.txt in its folder. A word that \
has no row has no meaning to it, so the prompt is refused rather than shown without the word.",
};
/// Too many words, or a table that does not fit.
pub static T0422: Code = Code {
    id: "T0422",
    title: "text does not fit the model",
    page: "A prompt may have at most text_len words (config.json), and the word table must have one row of text_dim \
numbers per line of vocab.txt. A word may stand there once, whatever its letters' case: a second row would never be \
read, and every row after it would be another word's.",
};

/// A word table.
#[derive(Debug, Clone)]
pub struct Words {
    rows: BTreeMap<String, usize>,
    table: Vec<f32>,
    dim: usize,
    text_len: usize,
}

impl Words {
    /// From the lines of a vocabulary and a table [words, dim], row-major.
    ///
    /// # Errors
    /// T0422 when the two do not fit or a word stands twice.
    pub fn new(vocabulary: &str, table: Vec<f32>, dim: u64, text_len: u64) -> Result<Words, Box<Diagnostic>> {
        let mut rows = BTreeMap::new();
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(vocabulary.lines()).filter(|(_, l)| !l.trim().is_empty()) {
            if let Some(first) = rows.insert(line.trim().to_lowercase(), lines.len()) {
                let (at, word): (usize, &str) = lines[first];
                return Err(Box::new(
                    Diagnostic::error(&T0422, format!("`{}` stands twice in the vocabulary", line.trim()))
                        .at(format!("line {at}"), word)
                        .at(format!("line {number}"), line.trim())
                        .hint("upper and lower case are one word; remove the line and its row of the table"),
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
        Ok(Words { rows, table, dim, text_len })
    }

    /// Rows of a prompt, padded with zero rows to text_len: [text_len, text_dim].
    ///
    /// # Errors
    /// T0420 for no word, T0421 for unknown words (all of them), T0422 for too many.
    pub fn encode(&self, prompt: &str) -> Result<Vec<f32>, Box<Diagnostic>> {
        let words: Vec<String> = prompt.split_whitespace().map(str::to_lowercase).collect();
        if words.is_empty() {
            return Err(Box::new(
                Diagnostic::error(&T0420, "the prompt has no word")
                    .hint(format!("known words: {}", self.vocabulary())),
            ));
        }
        let unknown: Vec<&String> = words.iter().filter(|w| !self.rows.contains_key(*w)).collect();
        if !unknown.is_empty() {
            let mut d = Diagnostic::error(&T0421, format!("unknown word in the prompt `{prompt}`"));
            for w in unknown {
                let near = nearest(w, self.rows.keys().map(String::as_str));
                d = d.at(
                    format!("`{w}`"),
                    near.map_or("no similar word".to_string(), |n| format!("did you mean `{n}`?")),
                );
            }
            return Err(Box::new(d.hint(format!("known words: {}", self.vocabulary()))));
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
            }
        }
        Ok(out)
    }

    /// Known words, in order of the alphabet.
    #[must_use]
    pub fn vocabulary(&self) -> String {
        self.rows.keys().cloned().collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Words {
        Words::new("a\nred\ncircle\n", (0..6).map(|i| i as f32).collect(), 2, 4).unwrap()
    }

    #[test]
    fn a_prompt_is_its_rows_and_padding() {
        assert_eq!(words().encode("A circle").unwrap(), [0.0, 1.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_word_stands_once() {
        let d = Words::new("a\nRed\n\nred\n", vec![0.0; 6], 2, 4).unwrap_err();
        let places: Vec<&str> = d.places.iter().map(|p| p.at.as_str()).collect();
        assert_eq!((d.code.id, places), ("T0422", vec!["line 2", "line 4"]));
        assert_eq!(Words::new("a\nred\n", vec![0.0; 6], 2, 4).unwrap_err().code.id, "T0422");
    }

    #[test]
    fn refusals_name_the_words() {
        assert_eq!(words().encode("  ").unwrap_err().code.id, "T0420");
        let d = words().encode("a cirle dog").unwrap_err();
        assert_eq!((d.code.id, d.places.len()), ("T0421", 2));
        assert!(d.places[0].says.contains("circle"));
        assert_eq!(words().encode("a a a a a").unwrap_err().code.id, "T0422");
    }
}

//! The normalization of characters inside a SentencePiece model: a trie of replacements.
//!
//! The bytes are the length of the trie, the trie as an array of u32 units, and the replacements,
//! each ended by a zero byte. In the array, the children of a node share an offset: the unit of a
//! child stands at the node's offset XOR the child's byte, which is the low part of the unit. A node
//! that ends a key has a value at its offset, and the value is the start of the replacement.

/// A trie of replacements.
#[derive(Debug, Clone, Default)]
pub(crate) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

/// The bit of a unit that marks a value.
const VALUE_BIT: u32 = 1 << 31;

impl Charsmap {
    /// Reads the map; `None` if the bytes are none. Empty bytes replace nothing.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Charsmap> {
        if bytes.is_empty() {
            return Some(Charsmap::default());
        }
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        if len > rest.len() || !len.is_multiple_of(4) {
            return None;
        }
        let (units, replacements) = rest.split_at(len);
        let (words, _) = units.as_chunks::<4>();
        Some(Charsmap {
            units: words.iter().map(|word| u32::from_le_bytes(*word)).collect(),
            replacements: String::from_utf8(replacements.to_vec()).ok()?,
        })
    }

    /// Replaces, from left to right, the longest text that the map knows.
    pub(crate) fn normalize(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let taken = match self.find_longest(rest) {
                Some((len, replacement)) => {
                    out.push_str(replacement);
                    len
                }
                None => {
                    out.push(first);
                    first.len_utf8()
                }
            };
            rest = &rest[taken..];
        }
        out
    }

    /// Returns the length of the longest key at the start of the text, and its replacement.
    fn find_longest(&self, text: &str) -> Option<(usize, &str)> {
        let mut longest = None;
        let mut node = unit_offset(*self.units.first()?);
        for (i, byte) in text.bytes().enumerate() {
            node ^= usize::from(byte);
            let Some(unit) = self.units.get(node).filter(|u| **u & (VALUE_BIT | 0xff) == u32::from(byte))
            else {
                break;
            };
            node ^= unit_offset(*unit);
            if unit >> 8 & 1 == 1 {
                longest = self.units.get(node).map(|value| (i + 1, value & !VALUE_BIT));
            }
        }
        let (len, start) = longest.filter(|(len, _)| text.is_char_boundary(*len))?;
        let replacement = self.replacements.get(usize::try_from(start).ok()?..)?;
        Some((len, replacement.split('\0').next().unwrap_or_default()))
    }
}

/// Returns the offset of a node's children. Large offsets are stored in units of 256.
fn unit_offset(unit: u32) -> usize {
    let scale = if unit & (1 << 9) == 0 { 0 } else { 8 };
    ((unit >> 10) as usize) << scale
}

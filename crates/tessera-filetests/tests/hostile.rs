//! Hostile input from a fixed seed: what fuzzers look for at length, in a few seconds of every test run.

mod common;

use tessera_base::random::philox4x32;
use tessera_filetests::hostile::{self, Seeds};

/// Bytes that are the same on every machine.
struct Draws {
    seed: u32,
    drawn: u32,
}

impl Draws {
    fn number(&mut self) -> usize {
        self.drawn += 1;
        philox4x32([self.drawn, 0, 0, 0], [self.seed, 0])[0] as usize
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.number() % most).map(|_| self.number() as u8).collect()
    }

    /// A text with some of its bytes changed, some of its lines moved, or a part of another text in it.
    fn bent(&mut self, text: &str, other: &str) -> Vec<u8> {
        const WORDS: [&str; 12] = [
            "%x",
            "@compute",
            "}",
            "{",
            "shard(9)",
            "-1",
            "18446744073709551615",
            "\"",
            "after(",
            "é",
            "partial(sum)",
            "program",
        ];
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..1 + self.number() % 4 {
            let at = self.number() % (bytes.len() + 1);
            let end = (at + self.number() % 40).min(bytes.len());
            match self.number() % 6 {
                0 => bytes.truncate(at),
                1 => drop(bytes.splice(at..end, [])),
                2 => drop(bytes.splice(at..at, WORDS[self.number() % WORDS.len()].bytes())),
                3 => {
                    let from = self.number() % other.len().max(1);
                    let piece = &other.as_bytes()[from..(from + self.number() % 200).min(other.len())];
                    bytes.splice(at..end, piece.iter().copied());
                }
                4 => {
                    let mut lines: Vec<&[u8]> = bytes.split(|b| *b == b'\n').collect();
                    let (a, b) = (self.number() % lines.len(), self.number() % lines.len());
                    lines.swap(a, b);
                    bytes = lines.join(&b'\n');
                }
                _ => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << (self.drawn % 8)),
            }
        }
        bytes
    }
}

#[test]
fn bent_texts_are_read_or_refused() {
    let texts = common::texts();
    let mut draws = Draws { seed: 1, drawn: 0 };
    for (i, (_, text)) in texts.iter().enumerate() {
        hostile::text(text.as_bytes());
        for _ in 0..10 {
            let other = &texts[(i + draws.number()) % texts.len()].1;
            hostile::text(&draws.bent(text, other));
        }
    }
}

#[test]
fn bent_plans_are_sealed_or_refused() {
    let seeds = Seeds::of(common::texts().into_iter().map(|(_, text)| text));
    let mut draws = Draws { seed: 2, drawn: 0 };
    for _ in 0..3000 {
        hostile::plan(&draws.bytes(60), &seeds);
    }
}

#[test]
fn any_traces_are_judged() {
    let mut draws = Draws { seed: 3, drawn: 0 };
    for _ in 0..4000 {
        hostile::traces(&draws.bytes(120));
    }
}

#[test]
fn bent_frames_are_read_or_refused() {
    let mut draws = Draws { seed: 4, drawn: 0 };
    for i in 0..4000 {
        let mut bytes = draws.bytes(200);
        // The kinds are few; what is beneath them is what is asked about.
        if let Some(kind) = bytes.first_mut().filter(|_| i % 4 != 0) {
            *kind %= 52;
        }
        if let Some(cut) = bytes.get_mut(1).filter(|_| i % 8 != 0) {
            *cut = 255;
        }
        hostile::wire(&bytes);
    }
}

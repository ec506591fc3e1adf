//! Hostile input from a fixed seed: a few seconds of fuzzing in every test run.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod common;

use tessera_base::random::philox4x32;
use tessera_filetests::hostile::{self, SeedCorpus};

/// Pseudo-random bytes that are the same on every machine.
struct RandomBytes {
    seed: u32,
    drawn: u32,
}

impl RandomBytes {
    fn next_number(&mut self) -> usize {
        self.drawn += 1;
        philox4x32([self.drawn, 0, 0, 0], [self.seed, 0])[0] as usize
    }

    fn next_bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.next_number() % most).map(|_| self.next_number() as u8).collect()
    }

    /// Returns a text with some bytes changed, some lines moved, or a part of another text
    /// inserted.
    fn mutate_text(&mut self, text: &str, other: &str) -> Vec<u8> {
        self.mutate_bytes(text.as_bytes(), other.as_bytes())
    }

    fn mutate_bytes(&mut self, text: &[u8], other: &[u8]) -> Vec<u8> {
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
        let mut bytes = text.to_vec();
        for _ in 0..1 + self.next_number() % 4 {
            let at = self.next_number() % (bytes.len() + 1);
            let end = (at + self.next_number() % 40).min(bytes.len());
            match self.next_number() % 6 {
                0 => bytes.truncate(at),
                1 => drop(bytes.splice(at..end, [])),
                2 => drop(bytes.splice(at..at, WORDS[self.next_number() % WORDS.len()].bytes())),
                3 => {
                    let from = self.next_number() % other.len().max(1);
                    let piece = &other[from..(from + self.next_number() % 200).min(other.len())];
                    bytes.splice(at..end, piece.iter().copied());
                }
                4 => {
                    let mut lines: Vec<&[u8]> = bytes.split(|b| *b == b'\n').collect();
                    let (a, b) = (self.next_number() % lines.len(), self.next_number() % lines.len());
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
fn mutated_texts_parse_or_are_rejected() {
    let texts = common::read_files();
    let mut draws = RandomBytes { seed: 1, drawn: 0 };
    for (i, (_, text)) in texts.iter().enumerate() {
        hostile::fuzz_text(text.as_bytes());
        for _ in 0..10 {
            let other = &texts[(i + draws.next_number()) % texts.len()].1;
            hostile::fuzz_text(&draws.mutate_text(text, other));
        }
    }
}

#[test]
fn mutated_plans_are_sealed_or_rejected() {
    let seeds = SeedCorpus::from_texts(common::read_files().into_iter().map(|(_, text)| text));
    let mut draws = RandomBytes { seed: 2, drawn: 0 };
    for _ in 0..3000 {
        hostile::fuzz_plan(&draws.next_bytes(60), &seeds);
    }
}

#[test]
fn arbitrary_traces_are_checked() {
    let mut draws = RandomBytes { seed: 3, drawn: 0 };
    for _ in 0..4000 {
        hostile::fuzz_traces(&draws.next_bytes(120));
    }
}

#[test]
fn mutated_frames_decode_or_are_rejected() {
    let mut draws = RandomBytes { seed: 4, drawn: 0 };
    for i in 0..4000 {
        let mut bytes = draws.next_bytes(200);
        // Only small kind numbers are valid; the test aims at the contents behind them.
        if let Some(kind) = bytes.first_mut().filter(|_| i % 4 != 0) {
            *kind %= 52;
        }
        if let Some(cut) = bytes.get_mut(1).filter(|_| i % 8 != 0) {
            *cut = 255;
        }
        hostile::fuzz_wire(&bytes);
    }
}

#[test]
fn mutated_messages_of_a_stream_are_read_or_rejected() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/stream-protocol.md");
    let page = std::fs::read_to_string(page).unwrap();
    let examples = page.lines().filter(|line| line.starts_with("{\"type\":"));
    let mut messages: Vec<Vec<u8>> = examples.map(|line| line.as_bytes().to_vec()).collect();
    assert!(messages.len() >= 3, "the page of the protocol has lost its examples");
    let others = [
        r#"{"type":"control","action":{"hand_over":3}}"#,
        r#"{"type":"change","id":18446744073709551615,"change":{"seed":7}}"#,
        r#"{"type":"change","id":2,"change":"flush"}"#,
    ];
    messages.extend(others.map(|message| message.as_bytes().to_vec()));
    // Frames of two pixels, of the stream and of an input video.
    messages.push([&b"TSF1\x01\x03"[..], &[0; 34], &[2, 0, 1, 0, 6, 0, 0, 0], b"pixels"].concat());
    messages.push([&b"TSV1\x01\0\0\0"[..], &[2, 0, 1, 0, 6, 0, 0, 0], b"pixels"].concat());
    messages.iter().for_each(|bytes| hostile::fuzz_stream_protocol(bytes));
    let mut draws = RandomBytes { seed: 8, drawn: 0 };
    for i in 0..6000 {
        let (message, other) = (&messages[i % messages.len()], &messages[(i / 7) % messages.len()]);
        hostile::fuzz_stream_protocol(&draws.mutate_bytes(message, other));
    }
}

#[test]
fn mutated_compile_traces_are_read_or_rejected() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tessera-torch/tests/traces");
    let mut logs = Vec::new();
    for case in std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        let files = std::fs::read_dir(case).unwrap().map(|e| e.unwrap().path());
        logs.extend(files.filter(|f| f.extension().is_some_and(|e| e == "log")));
    }
    logs.sort();
    let logs: Vec<String> = logs.iter().map(|f| std::fs::read_to_string(f).unwrap()).collect();
    assert!(logs.len() > 20);
    let mut draws = RandomBytes { seed: 5, drawn: 0 };
    for i in 0..600 {
        let (log, other) = (&logs[i % logs.len()], &logs[draws.next_number() % logs.len()]);
        let mut bytes = draws.mutate_text(log, other);
        bytes.push(0xff);
        bytes.extend_from_slice(log.as_bytes());
        hostile::fuzz_compile_traces(&bytes);
    }
}

#[test]
fn mutated_checkpoints_are_read_or_rejected() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/torch-checkpoints");
    let mut files: Vec<_> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let files: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).unwrap()).collect();
    assert!(files.len() >= 9);
    files.iter().for_each(|bytes| hostile::fuzz_checkpoint(bytes));
    let mut draws = RandomBytes { seed: 7, drawn: 0 };
    for i in 0..500 {
        let (file, other) = (&files[i % files.len()], &files[(i + 1) % files.len()]);
        hostile::fuzz_checkpoint(&draws.mutate_bytes(file, other));
    }
}

#[test]
fn mutated_flight_dumps_are_read_or_rejected() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tessera-torch/tests/flight");
    let mut files = Vec::new();
    for case in std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        let ranks = std::fs::read_dir(case).unwrap().map(|e| e.unwrap().path());
        files.extend(
            ranks.filter(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with("rank_"))),
        );
    }
    files.sort();
    let dumps: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).unwrap()).collect();
    assert!(dumps.len() > 80);
    let mut draws = RandomBytes { seed: 6, drawn: 0 };
    for i in 0..1000 {
        let (dump, other) = (&dumps[i % dumps.len()], &dumps[(i + 1) % dumps.len()]);
        let mut bytes = draws.mutate_bytes(dump, other);
        bytes.extend(other);
        hostile::fuzz_flight_dumps(&bytes);
    }
}

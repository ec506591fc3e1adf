//! What a person sees while a stream runs: a bar on a terminal, a line now and then elsewhere; and during a search.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tessera::stream::{ChunkProgress, StreamEvent};

/// Lines of a stream that is not on a terminal, if it is not long.
const LINES: u32 = 10;
/// Most chunks without a line.
const CHUNKS_A_LINE: u32 = 25;
/// Phases that take less are not named.
const WORTH_NAMING_NS: u64 = 50_000;
/// Phases named with their time.
const PHASES_SHOWN: usize = 4;

/// Shows progress on standard error.
#[derive(Clone)]
pub enum Progress {
    /// Nothing.
    Silent,
    /// A line each so many chunks.
    Lines(u32),
    /// A bar; clones are handles of the same one.
    Bar(ProgressBar),
}

impl Progress {
    /// For a stream of so many chunks.
    pub fn new(quiet: bool, chunks: u32) -> Progress {
        if quiet {
            return Progress::Silent;
        }
        if !std::io::stderr().is_terminal() {
            return Progress::Lines(chunks.div_ceil(LINES).clamp(1, CHUNKS_A_LINE));
        }
        let bar = ProgressBar::with_draw_target(Some(u64::from(chunks)), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:24} chunk {pos}/{len}  {wide_msg}") {
            bar.set_style(style);
        }
        Progress::Bar(bar)
    }

    /// Something happened.
    pub fn on(&self, event: &StreamEvent) {
        match (self, event) {
            (Progress::Silent, _) | (_, StreamEvent::Gone) => {}
            (Progress::Lines(_), StreamEvent::Started { pids }) => eprintln!("{}", started(pids)),
            (Progress::Lines(each), StreamEvent::Chunk(c)) => {
                if (c.chunk + 1).is_multiple_of(*each) || c.chunk + 1 == c.chunks {
                    eprintln!("chunk {}/{}  {}", c.chunk + 1, c.chunks, line(c));
                }
            }
            (Progress::Bar(bar), StreamEvent::Started { pids }) => {
                bar.tick();
                bar.set_message(format!("{}, loading", started(pids)));
            }
            (Progress::Bar(bar), StreamEvent::Chunk(c)) => {
                bar.set_message(line(c));
                bar.set_position(u64::from(c.chunk) + 1);
            }
        }
    }

    /// A word that must not be lost in a bar.
    pub fn say(&self, text: &str) {
        match self {
            Progress::Bar(bar) => bar.suspend(|| eprintln!("{text}")),
            _ => eprintln!("{text}"),
        }
    }

    /// Removes the bar: what follows says the same and more.
    pub fn end(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Meshes of a search on a terminal; elsewhere nothing, since it takes seconds at most.
pub struct Searching(ProgressBar);

impl Searching {
    /// A search that has not begun.
    pub fn new() -> Searching {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:24} mesh {pos}/{len}") {
            bar.set_style(style);
        }
        Searching(bar)
    }

    /// So many meshes of so many have been looked at.
    pub fn tell(&self, done: usize, all: usize) {
        self.0.set_length(all as u64);
        self.0.set_position(done as u64);
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.0.finish_and_clear();
    }
}

fn started(pids: &[u32]) -> String {
    match pids {
        [one] => format!("1 rank started (process {one})"),
        _ => format!("{} ranks started", pids.len()),
    }
}

/// `23.4 frames/s  denoise 31.0 ms, clean 8.1 ms  waiting: 1 in, 0 out`.
fn line(c: &ChunkProgress) -> String {
    let mut sums: Vec<(&str, u64)> = Vec::new();
    for (name, ns) in &c.phases {
        // Fill levels are variants of one phase to a person.
        let name = name.split('.').next().unwrap_or(name);
        match sums.iter_mut().find(|(n, _)| *n == name) {
            Some((_, sum)) => *sum += ns,
            None => sums.push((name, *ns)),
        }
    }
    sums.retain(|(_, ns)| *ns >= WORTH_NAMING_NS);
    sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    let times: Vec<String> = sums
        .iter()
        .take(PHASES_SHOWN)
        .map(|(name, ns)| format!("{name} {:.1} ms", *ns as f64 / 1e6))
        .collect();
    let speed = if c.frames > 0 { format!("{:.1} frames/s  ", c.fps) } else { String::new() };
    format!("{speed}{}  waiting: {} in, {} out", times.join(", "), c.queued_in, c.queued_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_of_a_phase_are_added_up() {
        let phases = [
            ("emit", 40_000),
            ("text", 500_000),
            ("denoise.fill3", 2_000_000),
            ("clean.fill3", 900_000),
            ("denoise.fill3", 2_500_000),
        ];
        let c = ChunkProgress {
            chunk: 1,
            chunks: 8,
            frames: 24,
            fps: 23.44,
            phases: phases.map(|(n, ns)| (n.to_string(), ns)).to_vec(),
            queued_in: 1,
            queued_out: 0,
        };
        assert_eq!(
            line(&c),
            "23.4 frames/s  denoise 4.5 ms, clean 0.9 ms, text 0.5 ms  waiting: 1 in, 0 out"
        );
    }
}

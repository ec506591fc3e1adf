//! What a person sees and does while the binary works: progress of a stream (a bar on a terminal,
//! otherwise a line every few chunks) and of a mapping search, and interrupts.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tessera::StopHandle;
use tessera::stream_options::{ChunkProgress, StreamEvent};
use tessera::terminal::print_stderr_line;

/// Number of progress lines of a short stream whose standard error is not a terminal.
const MAX_LINES: u32 = 10;
/// Maximum number of chunks per progress line.
const MAX_CHUNKS_PER_LINE: u32 = 25;
/// Shorter phases are left out of progress lines.
const MIN_PHASE_NS: u64 = 50_000;
/// Maximum number of phases in a progress line.
const MAX_PHASES_SHOWN: usize = 4;

/// Time within which a stop request that another process passes on repeats the one that came directly.
const PASSED_ON_WITHIN: Duration = Duration::from_secs(1);

/// Exit status after a stop request.
pub const EXIT_INTERRUPTED: u8 = 130;
/// The message for the first stop request while ranks stream.
pub const STOPPING_MESSAGE: &str = "stopping after the current chunk; interrupt again to kill the ranks";

/// Shows the progress of a stream on standard error.
#[derive(Clone)]
pub enum Progress {
    /// Prints nothing to standard error.
    Silent,
    /// One line per this number of chunks.
    Lines(u32),
    /// A progress bar; clones are handles of the same bar.
    Bar(ProgressBar),
}

impl Progress {
    /// Creates the display of a stream: none if `quiet` is set, a bar on a terminal, and otherwise
    /// one line for every few chunks.
    pub fn new(quiet: bool, chunks: u32) -> Progress {
        if quiet {
            return Progress::Silent;
        }
        if !std::io::stderr().is_terminal() {
            return Progress::Lines(chunks.div_ceil(MAX_LINES).clamp(1, MAX_CHUNKS_PER_LINE));
        }
        let bar = ProgressBar::with_draw_target(Some(u64::from(chunks)), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:24} chunk {pos}/{len}  {wide_msg}") {
            bar.set_style(style);
        }
        Progress::Bar(bar)
    }

    /// Moves the bar, or prints a line at the start and every few chunks; does nothing if silent.
    pub fn show_event(&self, event: &StreamEvent) {
        match (self, event) {
            (Progress::Silent, _) | (_, StreamEvent::Exited) => {}
            (_, StreamEvent::Note(d)) => self.print_line(&format!("{} ({})", d.message, d.code.id)),
            (Progress::Lines(_), StreamEvent::Started { pids }) => print_stderr_line(&started_line(pids)),
            (Progress::Lines(each), StreamEvent::Chunk(c)) => {
                if (c.chunk + 1).is_multiple_of(*each) || c.chunk + 1 == c.chunks {
                    print_stderr_line(&format!("chunk {}/{}  {}", c.chunk + 1, c.chunks, chunk_line(c)));
                }
            }
            (Progress::Bar(bar), StreamEvent::Started { pids }) => {
                bar.tick();
                bar.set_message(format!("{}, loading", started_line(pids)));
            }
            (Progress::Bar(bar), StreamEvent::Chunk(c)) => {
                bar.set_message(chunk_line(c));
                bar.set_position(u64::from(c.chunk) + 1);
            }
        }
    }

    /// Prints a line that the bar must not overwrite.
    pub fn print_line(&self, text: &str) {
        match self {
            Progress::Bar(bar) => bar.suspend(|| print_stderr_line(text)),
            _ => print_stderr_line(text),
        }
    }

    /// Removes the bar, because the report that follows contains the same information.
    pub fn clear_bar(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Runs a stream while its progress is shown and interrupts become stop requests.
pub fn run_watched<T>(
    quiet: bool,
    chunks: u32,
    run: impl FnOnce(&StopHandle, &mut dyn FnMut(StreamEvent)) -> T,
) -> T {
    let progress = Progress::new(quiet, chunks);
    let interrupt = StopHandle::default();
    let listener = handle_signals(&interrupt, &progress, || STOPPING_MESSAGE);
    let outcome = run(&interrupt, &mut |event| progress.show_event(&event));
    if let Some(listener) = listener {
        listener.close();
    }
    progress.clear_bar();
    outcome
}

/// Runs something while interrupts become stop requests, and shows no progress of its own.
pub fn stop_on_signals<T>(first_message: &'static str, run: impl FnOnce(&StopHandle) -> T) -> T {
    let (progress, interrupt) = (Progress::new(true, 0), StopHandle::default());
    let listener = handle_signals(&interrupt, &progress, move || first_message);
    let outcome = run(&interrupt);
    if let Some(listener) = listener {
        listener.close();
    }
    outcome
}

/// Turns SIGINT and SIGTERM into stop requests; otherwise they would end the launcher at once, and
/// the ranks with it. `first_message` returns the message for the first request.
pub fn handle_signals(
    interrupt: &StopHandle,
    progress: &Progress,
    first_message: impl Fn() -> &'static str + Send + 'static,
) -> Option<signal_hook::iterator::Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).ok()?;
    let handle = signals.handle();
    let (interrupt, progress) = (interrupt.clone(), progress.clone());
    let run_listener = move || {
        let mut requests = StopRequests::new();
        for _ in signals.forever() {
            let Some(count) = requests.count_signal(Instant::now()) else { continue };
            interrupt.request_stop();
            match count {
                1 => progress.print_line(first_message()),
                2 => progress.print_line("killing the ranks"),
                // The ranks die with their launcher.
                _ => std::process::exit(EXIT_INTERRUPTED.into()),
            }
        }
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(run_listener).ok()?;
    Some(handle)
}

/// Counts the stop requests of a process.
///
/// A rank that the process of its host started may get one request twice: Slurm signals all processes
/// of a step, and the process of the host passes its signal on. Two signals within a second are one
/// request there; otherwise the second one would kill the ranks.
pub struct StopRequests {
    count: u32,
    last: Option<Instant>,
    merged_within: Duration,
}

impl StopRequests {
    /// Creates a counter that merges signals if the process of this host started this one.
    pub fn new() -> StopRequests {
        let is_passed_on = std::env::var_os(tessera::HOST_PROCESS_VARIABLE).is_some();
        StopRequests::merging(if is_passed_on { PASSED_ON_WITHIN } else { Duration::ZERO })
    }

    fn merging(merged_within: Duration) -> StopRequests {
        StopRequests { count: 0, last: None, merged_within }
    }

    /// Returns the number of the request that a signal at this time makes; `None` if it repeats the
    /// last one.
    pub fn count_signal(&mut self, now: Instant) -> Option<u32> {
        let repeats = self.last.is_some_and(|last| now.saturating_duration_since(last) < self.merged_within);
        if repeats {
            return None;
        }
        (self.last, self.count) = (Some(now), self.count + 1);
        Some(self.count)
    }
}

/// Shows how many meshes a search has estimated, on a terminal only: a search takes seconds at
/// most.
pub struct SearchProgress(ProgressBar);

impl SearchProgress {
    /// Returns the display of a search that has not started.
    pub fn new() -> SearchProgress {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:24} mesh {pos}/{len}") {
            bar.set_style(style);
        }
        SearchProgress(bar)
    }

    /// Shows that `done` of `all` meshes are estimated.
    pub fn set_position(&self, done: usize, all: usize) {
        self.0.set_length(all as u64);
        self.0.set_position(done as u64);
    }

    /// Ends the progress bar and erases it from the terminal.
    pub fn clear_bar(&self) {
        self.0.finish_and_clear();
    }
}

fn started_line(pids: &[u32]) -> String {
    match pids {
        [one] => format!("1 rank started (process {one})"),
        _ => format!("{} ranks started", pids.len()),
    }
}

/// Formats a progress line: `23.4 frames/s  denoise 31.0 ms, clean 8.1 ms  waiting: 1 in, 0 out`.
fn chunk_line(c: &ChunkProgress) -> String {
    let mut sums: Vec<(&str, u64)> = Vec::new();
    for (name, ns) in &c.phases {
        // The variants of a phase for each cache fill level are added up.
        let name = name.split('.').next().unwrap_or(name);
        match sums.iter_mut().find(|(n, _)| *n == name) {
            Some((_, sum)) => *sum += ns,
            None => sums.push((name, *ns)),
        }
    }
    sums.retain(|(_, ns)| *ns >= MIN_PHASE_NS);
    sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    let times: Vec<String> = sums
        .iter()
        .take(MAX_PHASES_SHOWN)
        .map(|(name, ns)| format!("{name} {:.1} ms", *ns as f64 / 1e6))
        .collect();
    let speed = if c.frames > 0 { format!("{:.1} frames/s  ", c.fps) } else { String::new() };
    format!("{speed}{}  waiting: {} in, {} out", times.join(", "), c.queued_in, c.queued_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_passed_on_counts_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut ordinary = StopRequests::merging(Duration::ZERO);
        assert_eq!([0, 1].map(|ms| ordinary.count_signal(at(ms))), [Some(1), Some(2)]);
        let mut passed_on = StopRequests::merging(PASSED_ON_WITHIN);
        let counts = [0, 20, 1_500, 1_510, 4_000].map(|ms| passed_on.count_signal(at(ms)));
        assert_eq!(counts, [Some(1), None, Some(2), None, Some(3)]);
    }

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
            request: 1,
            epoch: 1,
            chunks: 8,
            frames: 24,
            fps: 23.44,
            phases: phases.map(|(n, ns)| (n.to_string(), ns)).to_vec(),
            queued_in: 1,
            queued_out: 0,
            call_ns: 5_500_000,
        };
        assert_eq!(
            chunk_line(&c),
            "23.4 frames/s  denoise 4.5 ms, clean 0.9 ms, text 0.5 ms  waiting: 1 in, 0 out"
        );
    }
}

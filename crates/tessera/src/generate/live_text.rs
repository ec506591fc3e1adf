//! Texts that go to the process that started the run piece by piece, while the ranks generate the next ones.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::driver::StopHandle;
use tessera_runtime::wire::{FinishReason, TokenEvent};

use super::language_plan::LanguagePlan;
use super::launch::{GenerateEvent, GenerateOptions, GenerateReport, run};
use super::text_model::TextModel;
use crate::codes::{T0017, T0094};
use crate::files::RunFolder;
use crate::run_failure::failure_diagnostic;

/// What one id adds to a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPiece {
    /// Index of the text, in the order of the requests.
    pub text: usize,
    /// The id.
    pub id: u32,
    /// What it adds; empty until a character that several ids form is whole.
    pub piece: String,
    /// Why the text ends with this id; `None` if it continues.
    pub finish: Option<FinishReason>,
}

/// A run of texts. The queue of pieces has room for every id of the run, so a caller that takes none slows nothing.
///
/// Dropping the value kills the ranks and waits for their end.
#[derive(Debug)]
pub struct LiveText {
    pieces: Mutex<Receiver<TextPiece>>,
    stop: StopHandle,
    run: Mutex<RunState>,
    pids: Vec<u32>,
}

#[derive(Debug)]
enum RunState {
    /// The thread that launched the ranks; it returns after the last process.
    Running(JoinHandle<Result<LiveTextEnd, Diagnostics>>),
    Ended(Result<LiveTextEnd, Diagnostics>),
}

/// How a run of texts ended.
#[derive(Debug, Clone)]
struct LiveTextEnd {
    report: Arc<GenerateReport>,
    texts: Vec<String>,
    /// Folder of the run.
    out: PathBuf,
}

impl LiveText {
    /// Starts the ranks. The run writes to `folder`, whose path replaces that of the options. `argv` is the command line
    /// of a rank's process, which must call [`crate::rank_main`].
    ///
    /// # Errors
    /// Returns what is wrong before anything was started.
    pub fn start(
        model: TextModel,
        plan: Arc<LanguagePlan>,
        options: GenerateOptions,
        argv: Vec<String>,
        folder: RunFolder,
    ) -> Result<LiveText, Diagnostics> {
        let stop = StopHandle::default();
        let requests = stop.clone();
        let options = GenerateOptions { out: folder.path().to_path_buf(), ..options };
        let room = options.requests.iter().map(|request| request.max_ids).sum();
        let (sender, pieces) = sync_channel(room);
        let (started, pids) = sync_channel(1);
        // The kernel ties the ranks to the thread that spawns them, and this thread waits for them.
        let launch = std::thread::Builder::new()
            .name("text launch".into())
            .spawn(move || {
                launch_and_show(&model, (&plan, &options), argv, &requests, (&started, &sender), folder)
            })
            .map_err(|e| vec![Diagnostic::error(&T0017, format!("the thread that launches ranks: {e}"))])?;
        let started = pids.recv();
        let mut live = LiveText {
            pieces: Mutex::new(pieces),
            stop,
            run: Mutex::new(RunState::Running(launch)),
            pids: Vec::new(),
        };
        match started {
            Ok(pids) => live.pids = pids,
            // The launch ended before it started a process.
            Err(_) => live.wait_for_end().map(drop)?,
        }
        Ok(live)
    }

    /// Returns the process ids of the ranks, in rank order.
    #[must_use]
    pub fn process_ids(&self) -> &[u32] {
        &self.pids
    }

    /// Waits for the next piece; `None` after the last one.
    ///
    /// # Errors
    /// The failure that ended the run, after the pieces of the ids before it.
    pub fn next_piece(&self) -> Result<Option<TextPiece>, Diagnostics> {
        let received = self.pieces.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match received {
            Ok(piece) => Ok(Some(piece)),
            Err(_) => self.wait_for_end().map(|_| None),
        }
    }

    /// Returns the texts as far as they were generated, once the run has ended.
    #[must_use]
    pub fn texts(&self) -> Option<Vec<String>> {
        self.end().map(|end| end.texts)
    }

    /// Returns how the run ended, once it has.
    #[must_use]
    pub fn report(&self) -> Option<Arc<GenerateReport>> {
        self.end().map(|end| end.report)
    }

    /// Ends the run after the call that is under way, and waits for the last process.
    ///
    /// # Errors
    /// The failure that ended the run.
    pub fn close(&self) -> Result<(), Diagnostics> {
        self.stop.request_stop();
        self.wait_for_end().map(drop)
    }

    /// Kills the ranks. A call that waits returns soon.
    pub fn kill(&self) {
        self.stop.request_stop();
        self.stop.request_stop();
    }

    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) -> Option<LiveTextEnd> {
        match &*self.lock() {
            RunState::Ended(Ok(end)) => Some(end.clone()),
            RunState::Ended(Err(_)) | RunState::Running(_) => None,
        }
    }

    /// Waits for the last process, and returns the failure that ended the run.
    fn wait_for_end(&self) -> Result<LiveTextEnd, Diagnostics> {
        let mut state = self.lock();
        let panicked = || Err(vec![Diagnostic::error(&T0094, "the thread that launched the ranks panicked")]);
        let launched = std::mem::replace(&mut *state, RunState::Ended(panicked()));
        let outcome = match launched {
            RunState::Running(launch) => launch.join().unwrap_or_else(|_| panicked()),
            RunState::Ended(outcome) => outcome,
        };
        *state = RunState::Ended(outcome.clone());
        let end = outcome?;
        match &end.report.failure {
            Some(failure) => {
                let where_it_is = format!("the run is in {}", end.out.display());
                Err(vec![failure_diagnostic(failure, &T0094).with_note(where_it_is)])
            }
            None => Ok(end),
        }
    }
}

impl Drop for LiveText {
    fn drop(&mut self) {
        self.kill();
        // Nobody is left whom a failure concerns.
        let _ = self.wait_for_end();
    }
}

/// Runs the ranks and sends what each id adds to its text.
fn launch_and_show(
    model: &TextModel,
    (plan, options): (&Arc<LanguagePlan>, &GenerateOptions),
    argv: Vec<String>,
    stop: &StopHandle,
    (started, sender): (&SyncSender<Vec<u32>>, &SyncSender<TextPiece>),
    folder: RunFolder,
) -> Result<LiveTextEnd, Diagnostics> {
    let mut show_next: Vec<_> = options.requests.iter().map(|_| model.show_one_by_one()).collect();
    let mut unshown = None;
    let outcome = run(plan, options, argv, stop, &mut |event| match event {
        GenerateEvent::Started { pids } => drop(started.try_send(pids)),
        GenerateEvent::Id(TokenEvent { text, id, finish }) => {
            let text = text as usize;
            match show_next.get_mut(text).map(|show| show(id)) {
                Some(Ok(piece)) => {
                    let sent = sender.try_send(TextPiece { text, id, piece, finish });
                    // The queue has room for all ids that were requested; no caller is left if it is closed.
                    debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "more ids than requested");
                }
                Some(Err(d)) => unshown = unshown.take().or(Some(d)),
                None => {}
            }
        }
        GenerateEvent::Exited => {}
    });
    folder.close(outcome.as_ref().is_ok_and(|report| report.failure.is_some()));
    let report = outcome?;
    let shown = report.texts.iter().map(|text| model.show_ids(&text.ids)).collect::<Result<Vec<_>, _>>();
    match (unshown, shown) {
        (None, Ok(texts)) => Ok(LiveTextEnd { report: Arc::new(report), texts, out: options.out.clone() }),
        (Some(d), _) | (None, Err(d)) => Err(vec![d]),
    }
}

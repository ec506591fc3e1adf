//! Generates texts on ranks that are processes of this host, under a leader.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::TokenBucket;
use tessera_report::record::{RecordLine, RunDevice, RunKind, RunOutput, RunStart, ScheduledPrompt};
use tessera_runtime::driver::{LaunchEvent, LaunchSpec, StopHandle, launch_ranks};
use tessera_runtime::tripwire::T0765;
use tessera_runtime::wire::{FinishReason, Progress, TokenEvent};
use tessera_runtime::{Failure, FailureClass};

use super::LanguagePlan;
use super::generate_config::GenerateConfig;
use super::language_weights::{LanguagePlace, LanguageWeights};
use super::prompt_calls::{PromptShape, TextRows, group_prompts};
use super::run_outputs::TEXTS_FILE;
use super::scheduler::{CallTimes, GeneratedText, TextRequest, TokenScheduler};
use crate::codes::T0018;
use crate::communicators;
use crate::cuda;
use crate::faults::DrillConfig;
use crate::files::{StagedFolder, write_error};
use crate::host_memory::check_host_memory;
use crate::plan_folder::folder_name;
use crate::rank::RankPlan;
use crate::rank_config::checks_output;
use crate::rank_launch::{
    choose_threads, exit_status, launcher_limits, new_session_id, prepare_device, settle_launch,
    start_without_video,
};
use crate::rank_orders::RankOrders;
use crate::record::RECORD_FILE;
use crate::run_dir_writer::close_record;

/// What a run generates, and where.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Where the weights of the model are.
    pub weights: LanguagePlace,
    /// Device of the ranks: CPUs or GPUs.
    pub device: RunDevice,
    /// The texts to continue.
    pub requests: Vec<TextRequest>,
    /// The prompt of each request in words, or its ids, for the record; none leaves them out.
    pub prompts: Vec<String>,
    /// Folder for the plan, the record and the flight records; it must not exist, or be empty.
    pub out: PathBuf,
    /// Threads of each rank; by default the cores of this host, divided among the ranks.
    pub threads: Option<usize>,
    /// Whether more ranks than cores are wanted.
    pub oversubscribe: bool,
    /// Whether each rank writes the messages that it sends to a file.
    pub wire_dump: bool,
    /// The drill of this run.
    pub drill: Option<DrillConfig>,
    /// Command line, for the record.
    pub command: Vec<String>,
}

/// What happens while ranks generate texts.
#[derive(Debug)]
pub enum GenerateEvent {
    /// Every rank was spawned; process ids in rank order.
    Started {
        /// Process ids.
        pids: Vec<u32>,
    },
    /// The leader reported an id.
    Id(TokenEvent),
    /// No process is left.
    Exited,
}

/// The result of a run whose processes have all ended.
#[derive(Debug)]
pub struct GenerateReport {
    /// Exit status of the command.
    pub exit_code: u8,
    /// The failure that ended the run, if any.
    pub failure: Option<Failure>,
    /// Whether a stop was requested.
    pub interrupted: bool,
    /// The texts, as far as they were generated.
    pub texts: Vec<GeneratedText>,
    /// Times of the calls that read prompts.
    pub prefill: CallTimes,
    /// Times of the calls that decode ids of every text.
    pub decode: CallTimes,
}

/// Runs a plan and blocks until no process is left. `argv` is the command line of a rank's process,
/// which must call [`crate::rank_main`].
///
/// # Errors
/// Returns what is wrong before anything was started. Later failures are in the report.
pub fn run(
    plan: &Arc<LanguagePlan>,
    options: &GenerateOptions,
    argv: Vec<String>,
    interrupt: &StopHandle,
    on_event: &mut dyn FnMut(GenerateEvent),
) -> Result<GenerateReport, Diagnostics> {
    let one = |d: Diagnostic| vec![d];
    let ranks = plan.sealed.mesh().world_size();
    let is_bound = options.device == RunDevice::Cpu && !options.oversubscribe;
    let threads = choose_threads(plan.sealed.mesh(), options.threads, is_bound).map_err(one)?;
    let gpus = prepare_device(&plan.sealed, options.device, ranks)?;
    let uses_gpus = gpus.is_some();
    if !uses_gpus {
        // The leader holds texts and no tensors.
        check_host_memory(&plan.sealed, 0).map_err(one)?;
    }
    // The leader would find an impossible request too, but later and in another process.
    TokenScheduler::new(plan, &plan.model.end_ids).open(&options.requests).map_err(one)?;
    // Every rank would find a missing file too, but only after all have started.
    LanguageWeights::open(&options.weights, plan)?;
    let absolute = |p: &Path| std::path::absolute(p).map_err(|e| vec![write_error(p, &e)]);
    let out = absolute(&options.out)?;
    let config = GenerateConfig {
        plan: out.join("plan"),
        digest: plan.sealed.digest_hex(),
        weights: LanguagePlace { dir: absolute(&options.weights.dir)?, base: options.weights.base },
        out,
        threads,
        requests: options.requests.clone(),
        end_ids: plan.model.end_ids.clone(),
        wire_dump: options.wire_dump,
        gpus,
        drill: options.drill.clone(),
    };
    write_run_dir(plan, &config, options).map_err(one)?;
    // GPU ranks communicate on the GPUs and need no CPU communicators.
    let specs = if uses_gpus { Vec::new() } else { communicators::communicator_specs(&plan.sealed) };
    let payload = serde_json::to_vec(&RankOrders::Generate(Box::new(config))).map_err(|e| {
        vec![Diagnostic::error(&T0018, format!("the rank configuration cannot be serialised: {e}"))]
    })?;
    let (limits, tripwires) = launcher_limits(options.drill.as_ref());
    let spec = LaunchSpec {
        argv,
        rank_count: ranks,
        topology: plan.control_topology(),
        session: new_session_id(&plan.sealed),
        extra_fds: communicators::create_arenas_of_ranks(&specs, ranks).map_err(one)?,
        payload,
        env: if uses_gpus { cuda::missing_env() } else { Vec::new() },
        limits,
        tripwires,
    };
    let mut tally = TextTally::new(plan.prefill, &options.requests);
    let launched = launch_ranks(&spec, interrupt, &mut |event| match event {
        LaunchEvent::Started(pids) => on_event(GenerateEvent::Started { pids: pids.to_vec() }),
        LaunchEvent::Progress(progress) => {
            tally.count_call(progress);
            progress.ids.iter().for_each(|id| on_event(GenerateEvent::Id(*id)));
        }
    });
    on_event(GenerateEvent::Exited);
    let (failure, interrupted) = settle_launch(launched, &options.out);
    let (_, written) = close_record(&options.out, failure.as_ref());
    let written = written.err().filter(|d| d.code != &T0765 || checks_output(options.drill.as_ref()));
    let failure = failure.or_else(|| Some(Failure::from_diagnostic(FailureClass::Output, None, &written?)));
    Ok(tally.into_report(failure, interrupted))
}

/// Writes the run directory with its plan and the first line of its record, atomically.
fn write_run_dir(
    plan: &LanguagePlan,
    config: &GenerateConfig,
    options: &GenerateOptions,
) -> Result<(), Diagnostic> {
    let texts = options.prompts.iter().zip(&options.requests);
    let what = (folder_name(&config.weights.dir), RunKind::Text, "pages");
    let start = RunStart {
        seed: options.requests.first().map_or(0, |r| u64::from(r.sampling.seed)),
        prompts: texts
            .map(|(text, request)| ScheduledPrompt {
                chunk: 0,
                text: text.clone(),
                kind: request.kind.clone(),
            })
            .collect(),
        outputs: vec![RunOutput { kind: "text".into(), to: TEXTS_FILE.into() }],
        ..start_without_video(plan, what, options.device, &options.command)
    };
    let mut folder = StagedFolder::create_over(&options.out)?;
    folder.write(RECORD_FILE, RecordLine::Start(Box::new(start)).to_json().as_bytes())?;
    plan.write_into(&mut folder, "plan/", &config.weights.dir)?;
    folder.commit()
}

/// The texts and times that the leader has reported.
struct TextTally {
    texts: Vec<GeneratedText>,
    /// Rows of the calls that read prompts and have not been reported, in the order of the calls.
    unread: VecDeque<u64>,
    prefill: CallTimes,
    decode: CallTimes,
}

impl TextTally {
    fn new(prefill: TokenBucket, requests: &[TextRequest]) -> TextTally {
        let empty = GeneratedText { ids: Vec::new(), finish: FinishReason::Length };
        let shapes: Vec<PromptShape> = requests.iter().map(TextRequest::shape).collect();
        let count_rows =
            |call: &Vec<Option<TextRows>>| call.iter().flatten().map(|rows| rows.count as u64).sum();
        TextTally {
            texts: vec![empty; requests.len()],
            unread: group_prompts(&shapes, prefill).iter().map(count_rows).collect(),
            prefill: CallTimes::default(),
            decode: CallTimes::default(),
        }
    }

    fn count_call(&mut self, progress: &Progress) {
        let time = Duration::from_nanos(progress.call_ns);
        match self.unread.pop_front() {
            Some(rows) => self.prefill.add_call(rows, time),
            None => self.decode.add_call(progress.ids.len() as u64, time),
        }
        for event in &progress.ids {
            if let Some(text) = self.texts.get_mut(event.text as usize) {
                text.ids.push(event.id);
                text.finish = event.finish.unwrap_or(text.finish);
            }
        }
    }

    fn into_report(self, failure: Option<Failure>, interrupted: bool) -> GenerateReport {
        let exit_code = exit_status(failure.as_ref(), interrupted);
        let TextTally { texts, prefill, decode, .. } = self;
        GenerateReport { exit_code, failure, interrupted, texts, prefill, decode }
    }
}

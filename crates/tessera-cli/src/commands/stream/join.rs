//! `tessera stream` as one process of a run that a launcher started: the place of the process, which
//! is read from the environment, and the options for authentication.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use tessera::codes::T0034;
use tessera::environment::process_environment;
use tessera::join::{JoinEvent, JoinOptions, JoinReport, TlsFiles, joint_failure_class};
use tessera::launchers::{self, Launcher, LauncherPlacement, RankShare};
use tessera::stream_options::{RunDevice, StreamEvent, StreamOptions};
use tessera::terminal::{print_stderr, print_stderr_line};
use tessera::{Model, Plan, StopHandle};
use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics, render_all};

use super::report::{ReportPlace, print_report};
use crate::flags::{AppliesTo, flag_set};
use crate::output::{CliError, CliResult, OutputFormat, print_failure};
use crate::progress::{
    EXIT_INTERRUPTED, Progress, STOPPING_MESSAGE, StopRequests, handle_signals, stop_on_signals,
};

const JOIN_HEADING: &str = "Ranks that torchrun, srun, mpirun, LeaderWorkerSet or a script started";
/// Default time limit for the other ranks to join.
const DEFAULT_JOIN_TIMEOUT_S: u64 = 300;
/// Names the file with the secret where no option can: in the template of a job. The secret itself
/// is no variable, because schedulers store the environment of jobs and show it.
const SECRET_FILE_VARIABLE: &str = "TESSERA_SECRET_FILE";

flag_set! {
    /// Options of a rank that joins a distributed run.
    JoinArgs by AppliesTo {
        [JoinedRanks]
        /// File with the shared secret of the run, the same on every rank; at least 32 bytes
        /// [default: the file that TESSERA_SECRET_FILE names]
        #[arg(long, value_name = "FILE", help_heading = JOIN_HEADING)]
        secret: Option<PathBuf>,

        [JoinedRanks]
        /// TLS certificate of this rank (PEM); enables TLS between ranks
        #[arg(long, value_name = "FILE", help_heading = JOIN_HEADING)]
        tls_cert: Option<PathBuf>,

        [JoinedRanks]
        /// Private key of this rank's certificate (PEM)
        #[arg(long, value_name = "FILE", help_heading = JOIN_HEADING)]
        tls_key: Option<PathBuf>,

        [JoinedRanks]
        /// Certificates of the authority that signs the ranks' certificates (PEM)
        #[arg(long, value_name = "FILE", help_heading = JOIN_HEADING)]
        tls_ca: Option<PathBuf>,

        [JoinedRanks]
        /// Local address on which to listen for other ranks [default: MASTER_ADDR on rank 0, on
        /// other ranks the address that reaches rank 0]
        #[arg(long, value_name = "ADDRESS", help_heading = JOIN_HEADING)]
        bind: Option<IpAddr>,

        [JoinedRanks]
        /// Time limit for all ranks to join, in seconds [default: 300]
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400), help_heading = JOIN_HEADING)]
        join_timeout: Option<u64>,

        [JoinedRanks]
        /// Port at which rank 0 listens, the same on every rank [default: MASTER_PORT, the port after it
        /// under torchrun, and 29500 if it is not set]
        #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..), help_heading = JOIN_HEADING)]
        leader_port: Option<u16>,
    }
}

impl JoinArgs {
    /// Returns the place of this process among those of the launcher that started it; `None` if no
    /// launcher did, or one that started a single process, which then starts all ranks itself.
    ///
    /// # Errors
    /// T0034 and T0067.
    pub fn find_placement(&self) -> Result<Option<LauncherPlacement>, CliError> {
        self.placement_from(&process_environment().collect()).map_err(CliError::from_usage_errors)
    }

    fn placement_from(
        &self,
        environment: &BTreeMap<String, String>,
    ) -> Result<Option<LauncherPlacement>, Diagnostics> {
        let placement = launchers::find_placement(environment, self.leader_port)?;
        let option = self.given_flags(&[AppliesTo::JoinedRanks]).into_iter().next();
        match (&placement, option) {
            (None, Some(option)) => Err(vec![
                join_error(format!(
                    "{option} requires RANK and WORLD_SIZE, or the variables of another launcher, and none are set"
                ))
                .with_hint(format!("start every rank with a launcher, or leave out {option}")),
            ]),
            // A script that sets WORLD_SIZE=1 asks for a rank that joins, alone as it is.
            _ => Ok(placement.filter(|p| p.processes != 1 || p.launcher == Launcher::Script)),
        }
    }

    /// Returns what this process needs to join as the only rank of its share.
    ///
    /// # Errors
    /// T0034 if only some of the TLS files are given.
    pub fn to_options(
        &self,
        placement: &LauncherPlacement,
        share: RankShare,
    ) -> Result<JoinOptions, CliError> {
        let tls = match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (Some(certificate), Some(key), Some(authority)) => Some(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: authority.clone(),
            }),
            (None, None, None) => None,
            _ => {
                return Err(CliError::usage(
                    join_error("only some of the TLS files are given".into())
                        .with_hint("give --tls-cert, --tls-key and --tls-ca together, or none of them"),
                ));
            }
        };
        let named = || read_variable(SECRET_FILE_VARIABLE).filter(|path| !path.is_empty());
        Ok(JoinOptions {
            rank: share.first,
            world: share.world,
            master: placement.leader.clone(),
            local_world: placement.local_processes.unwrap_or(1),
            local_rank: placement.local_process,
            cores: placement.cores,
            bind: self.bind,
            secret: self.secret.clone().or_else(|| named().map(PathBuf::from)),
            tls,
            timeout: Duration::from_secs(self.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT_S)),
        })
    }
}

fn join_error(message: String) -> Diagnostic {
    Diagnostic::error(&T0034, message)
}

/// Returns a variable of the environment. Bytes that are not UTF-8 are replaced, so that the value is
/// rejected and not taken as missing.
fn read_variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Runs this process as one rank of a stream whose other ranks are started externally.
pub fn run(
    plan: Plan,
    model: &Model,
    options: &StreamOptions,
    join_options: &JoinOptions,
    quiet: bool,
    (format, place): (OutputFormat, ReportPlace),
) -> CliResult {
    let is_leader = join_options.rank == 0;
    let progress = Progress::new(quiet || !is_leader, options.chunks);
    let interrupt = StopHandle::default();
    let all_joined = Arc::new(AtomicBool::new(false));
    let first_message = {
        let all_joined = Arc::clone(&all_joined);
        move || {
            if all_joined.load(Ordering::Relaxed) {
                STOPPING_MESSAGE
            } else {
                "stopping before all ranks have joined"
            }
        }
    };
    // Until all ranks have joined, a stop request to any other rank ends it at once, and rank 0
    // notices the closed connection.
    let mut listener = if is_leader { handle_signals(&interrupt, &progress, first_message) } else { None };
    let report = tessera::join::run(plan, model, options, join_options, &interrupt, &mut |e| match e {
        JoinEvent::Note(d) => print_stderr(&render_all(&[d], DiagnosticFormat::Text, &|_| None)),
        JoinEvent::Connected(addresses) => {
            all_joined.store(true, Ordering::Relaxed);
            if !is_leader {
                listener = leave_first_stop_to_leader(join_options.rank);
            } else if !quiet {
                progress.print_line(&format!(
                    "all {} ranks have joined at {}",
                    join_options.world,
                    addresses.join(", ")
                ));
            }
        }
        JoinEvent::Chunk(chunk) => progress.show_event(&StreamEvent::Chunk(chunk)),
        JoinEvent::Failed(failure) => print_failure(&failure),
    });
    if let Some(listener) = listener {
        listener.close();
    }
    progress.clear_bar();
    let report = report.map_err(|ds| to_cli_error(ds, &interrupt))?;
    match report {
        JoinReport::Leader(report) => print_report(&report, (format, place), report.failure.is_some()),
        JoinReport::Rank(None) => Ok(0),
        JoinReport::Interrupted => {
            print_stderr_line(&format!("rank {}: rank 0 received a second stop request", join_options.rank));
            tessera::exit_process(EXIT_INTERRUPTED.into())
        }
        JoinReport::Rank(Some(failure)) => {
            print_stderr_line(&format!("rank {}:", join_options.rank));
            print_failure(&failure);
            // The exit handlers of GPU libraries would wait for work that never ends.
            let leave = if options.device == RunDevice::Cuda {
                tessera::exit_without_handlers
            } else {
                tessera::exit_process
            };
            leave(failure.class.exit_code())
        }
    }
}

/// Meets all ranks of a launch with the ranks of this process, before rank 0 simulates the plan.
pub fn rehearse(
    plan: &Plan,
    options: &StreamOptions,
    join_options: &JoinOptions,
    share: RankShare,
    quiet: bool,
) -> Result<(), CliError> {
    let ranks: Vec<JoinOptions> = (share.first..share.first + share.count)
        .map(|rank| JoinOptions { rank, ..join_options.clone() })
        .collect();
    let meeting = stop_on_signals("stopping before all ranks have joined", |interrupt| {
        tessera::rehearsal::meet_ranks(plan, options, &ranks, interrupt)
            .map_err(|ds| to_cli_error(ds, interrupt))
    })?;
    print_stderr(&render_all(&meeting.notes, DiagnosticFormat::Text, &|_| None));
    if share.first == 0 && !quiet {
        print_stderr_line(&format!(
            "all {} ranks have joined at {}; rank 0 simulates the plan, the others end",
            share.world,
            meeting.addresses.join(", ")
        ));
    }
    Ok(())
}

fn to_cli_error(ds: Diagnostics, interrupt: &StopHandle) -> CliError {
    match joint_failure_class(&ds) {
        None if interrupt.is_stop_requested() => CliError::with_status(ds, EXIT_INTERRUPTED),
        _ => CliError::from_join(ds),
    }
}

/// Leaves the first stop request to rank 0. A request that reaches every rank is answered by rank
/// 0, which drains the stream and ends the other ranks. A second request ends this rank at once.
fn leave_first_stop_to_leader(rank: u32) -> Option<Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).ok()?;
    let handle = signals.handle();
    let listen = move || {
        let mut requests = StopRequests::new();
        for _ in signals.forever() {
            match requests.count_signal(Instant::now()) {
                None => {}
                Some(1) => print_stderr_line(&format!(
                    "rank {rank}: waiting for rank 0 to stop all ranks; interrupt again to exit at once"
                )),
                Some(_) => tessera::exit_process(EXIT_INTERRUPTED.into()),
            }
        }
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(listen).ok()?;
    Some(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join_args() -> JoinArgs {
        JoinArgs {
            secret: None,
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            bind: None,
            join_timeout: None,
            leader_port: None,
        }
    }

    fn find(args: &JoinArgs, set: &[(&str, &str)]) -> Result<Option<LauncherPlacement>, Diagnostics> {
        args.placement_from(&set.iter().map(|(n, v)| ((*n).to_string(), (*v).to_string())).collect())
    }

    #[test]
    fn an_option_of_joined_ranks_needs_a_launcher() {
        assert_eq!(find(&join_args(), &[]), Ok(None));
        let timeout = JoinArgs { join_timeout: Some(5), ..join_args() };
        let refused = find(&timeout, &[]).unwrap_err();
        assert!(refused[0].message.starts_with("--join-timeout requires RANK and WORLD_SIZE"), "{refused:?}");
        assert_eq!(refused[0].code, &T0034);
    }

    #[test]
    fn a_launcher_with_one_process_leaves_the_start_of_ranks_to_it() {
        let alone = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1"), ("MASTER_ADDR", "a")];
        assert_eq!(find(&join_args(), &alone), Ok(None));
        let script = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert!(find(&join_args(), &script).unwrap().is_some());
    }
}

//! `tessera stream` as one rank of a distributed run whose ranks are started externally: reads the
//! rank's place from the environment, and the options for authentication.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use tessera::codes::T0034;
use tessera::join::{JoinEvent, JoinOptions, JoinReport, TlsFiles};
use tessera::stream_options::{RunDevice, StreamEvent, StreamOptions};
use tessera::terminal::{print_stderr, print_stderr_line};
use tessera::{Model, Plan, StopHandle};
use tessera_base::{Diagnostic, DiagnosticFormat, render_all};

use super::report::{ReportPlace, print_report};
use crate::flags::{AppliesTo, flag_set};
use crate::output::{CliError, CliResult, OutputFormat, print_failure};
use crate::progress::{EXIT_INTERRUPTED, Progress, STOPPING_MESSAGE, handle_signals};

const JOIN_HEADING: &str = "Ranks on several hosts (requires RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)";
/// Default time limit for the other ranks to join.
const DEFAULT_JOIN_TIMEOUT_S: u64 = 300;
const REQUIRED_VARIABLES: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

flag_set! {
    /// Options of a rank that joins a distributed run.
    JoinArgs by AppliesTo {
        [JoinedRanks]
        /// File with the shared secret of the run, the same on every rank; at least 32 bytes
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
    }
}

impl JoinArgs {
    /// Returns the rank's place from the environment.
    ///
    /// # Errors
    /// T0034.
    pub fn options_from_env(&self) -> Result<JoinOptions, CliError> {
        self.options_from(&read_variable).map_err(|d| CliError::usage(*d))
    }

    fn options_from(&self, env: &dyn Fn(&str) -> Option<String>) -> Result<JoinOptions, Box<Diagnostic>> {
        let join_error = |message: String| Diagnostic::error(&T0034, message);
        let set = |name: &str| env(name).filter(|v| !v.trim().is_empty());
        if set("RANK").is_none()
            && set("WORLD_SIZE").is_none()
            && let Some(option) = self.given_flags(&[AppliesTo::JoinedRanks]).first()
        {
            return Err(Box::new(
                join_error(format!("{option} requires RANK and WORLD_SIZE, which are not set")).with_hint(
                    format!("set {} on every rank, or leave out {option}", REQUIRED_VARIABLES.join(", ")),
                ),
            ));
        }
        let missing: Vec<&str> = REQUIRED_VARIABLES.into_iter().filter(|n| set(n).is_none()).collect();
        if !missing.is_empty() {
            let present: Vec<&str> = REQUIRED_VARIABLES.into_iter().filter(|n| set(n).is_some()).collect();
            return Err(Box::new(
                join_error(format!("{} is set and {} is not", present.join(" and "), missing.join(" and ")))
                    .with_hint("set all four to join other ranks, or none to start all ranks on this host"),
            ));
        }
        let number = |name: &str, most: u32| -> Result<u32, Box<Diagnostic>> {
            let text = set(name).unwrap_or_default();
            let read = text.trim().parse::<u32>().ok().filter(|n| *n <= most);
            read.ok_or_else(|| {
                Box::new(
                    join_error(format!("{name} is not a whole number from 0 to {most}"))
                        .with_label(name, format!("`{text}`")),
                )
            })
        };
        let tls = match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (Some(certificate), Some(key), Some(authority)) => Some(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: authority.clone(),
            }),
            (None, None, None) => None,
            _ => {
                return Err(Box::new(
                    join_error("only some of the TLS files are given".into())
                        .with_hint("give --tls-cert, --tls-key and --tls-ca together, or none of them"),
                ));
            }
        };
        let local_world = match set("LOCAL_WORLD_SIZE") {
            Some(_) => number("LOCAL_WORLD_SIZE", u32::MAX)?,
            None => 1,
        };
        let local_rank = set("LOCAL_RANK").map(|_| number("LOCAL_RANK", u32::MAX)).transpose()?;
        let port = number("MASTER_PORT", u32::from(u16::MAX))?;
        Ok(JoinOptions {
            rank: number("RANK", u32::MAX)?,
            world: number("WORLD_SIZE", u32::MAX)?,
            master: (set("MASTER_ADDR").unwrap_or_default().trim().to_string(), port as u16),
            local_world,
            local_rank,
            bind: self.bind,
            secret: self.secret.clone(),
            tls,
            timeout: Duration::from_secs(self.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT_S)),
        })
    }
}

/// Returns a variable of the environment. Bytes that are not UTF-8 are replaced, so that the value is
/// rejected and not taken as missing.
pub fn read_variable(name: &str) -> Option<String> {
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
    let report = report.map_err(|ds| match tessera::join::joint_failure_class(&ds) {
        Some(class) => CliError::with_status(ds, u8::try_from(class.exit_code()).unwrap_or(1)),
        None if interrupt.is_stop_requested() => CliError::with_status(ds, EXIT_INTERRUPTED),
        None => ds.into(),
    })?;
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

/// Leaves the first stop request to rank 0. A request that reaches every rank is answered by rank
/// 0, which drains the stream and ends the other ranks. A second request ends this rank at once.
fn leave_first_stop_to_leader(rank: u32) -> Option<Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).ok()?;
    let handle = signals.handle();
    let listen = move || {
        let mut signals = signals.forever();
        if signals.next().is_some() {
            print_stderr_line(&format!(
                "rank {rank}: waiting for rank 0 to stop all ranks; interrupt again to exit at once"
            ));
        }
        if signals.next().is_some() {
            tessera::exit_process(EXIT_INTERRUPTED.into());
        }
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(listen).ok()?;
    Some(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join_options(env: &[(&str, &str)]) -> Result<JoinOptions, String> {
        let joining = JoinArgs {
            secret: Some("secret".into()),
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            bind: None,
            join_timeout: Some(5),
        };
        let get = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string());
        joining.options_from(&get).map_err(|d| {
            assert_eq!(d.code, &T0034);
            d.message
        })
    }

    #[test]
    fn the_environment_is_complete_or_rejected() {
        let whole =
            [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "head.example"), ("MASTER_PORT", "29500")];
        let p = join_options(&whole).unwrap();
        assert_eq!((p.rank, p.world, p.master, p.local_world), (1, 2, ("head.example".into(), 29500), 1));
        assert!(
            join_options(&whole[..2])
                .unwrap_err()
                .contains("RANK and WORLD_SIZE is set and MASTER_ADDR and MASTER_PORT")
        );
        assert_eq!(p.local_rank, None);
        let local = [&whole[..], &[("LOCAL_RANK", "3")]].concat();
        assert_eq!(join_options(&local).unwrap().local_rank, Some(3));
        assert!(join_options(&[]).unwrap_err().contains("--secret requires RANK and WORLD_SIZE"));
        let timeout = JoinArgs {
            secret: None,
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            bind: None,
            join_timeout: Some(5),
        };
        let refused = timeout.options_from(&|_| None).unwrap_err();
        assert!(refused.message.contains("--join-timeout requires RANK and WORLD_SIZE"), "{refused:?}");
        let port = [&whole[..3], &[("MASTER_PORT", "65536")]].concat();
        assert!(
            join_options(&port).unwrap_err().contains("MASTER_PORT is not a whole number from 0 to 65535")
        );
        let rank = [&[("RANK", "-1")], &whole[1..]].concat();
        assert!(join_options(&rank).unwrap_err().contains("RANK is not a whole number"));
    }
}

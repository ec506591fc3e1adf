//! Faults between four hosts: each host is a network namespace with one rank, all on one bridge. The
//! table shows what every side said, because an operator sees one terminal at a time.

mod network;
mod outcome;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use crate::BenchResult;
use crate::namespaces::{PORT, join_variables, skip_benchmark, write_secret};
use crate::process_list::{find_tagged, new_run_tag, wait_until_gone};
use crate::stream_process::{StreamArgs, StreamProcess, StreamTarget};
use network::{BridgedHosts, HOSTS};
use outcome::{HostOutcome, find_defects};
use rustix::process::Signal;

/// Inject faults between four hosts (network namespaces) and compare what every side says
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: StreamTarget,

    /// Faults; may be repeated [default: all]
    #[arg(long = "fault", value_enum)]
    faults: Vec<HostFault>,

    /// Time after which a living process counts as left behind
    #[arg(long, value_name = "SECONDS", default_value_t = 40)]
    limit_s: u64,
}

/// Number of chunks on disk before a fault.
const CHUNKS_BEFORE: u64 = 3;
/// Number of chunks of a run that must complete.
const FINITE_CHUNKS: u32 = 12;
/// Chunks of a run with a slow host: some seconds, in which the host stands still many times.
const SLOW_CHUNKS: u32 = 60;
/// Model of this run. The ops of the smallest models end between two stops.
const SLOW_MODEL: &str = "models/demo";
const ENDLESS_CHUNKS: u32 = 1_000_000;
/// Maximum time in seconds until all ranks have met.
const JOIN_TIMEOUT_S: &str = "30";
/// A slow host alternates between standing still and running, as a host does whose processor time is limited. Each signal
/// comes with the time until the next one, so that the host runs at a fifth of its speed.
const SLOW_STEPS: [(Signal, Duration); 2] =
    [(Signal::STOP, Duration::from_millis(16)), (Signal::CONT, Duration::from_millis(4))];
/// Number of such turns between two looks at the processes.
const SLOW_TURNS: usize = 8;
/// Offset of the clock of a host since its start, in seconds: about eleven days.
const CLOCK_OFFSET_S: &str = "1000000";

/// A fault between hosts, and whom it concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum HostFault {
    /// The network device of host 2 goes down
    HostCut,
    /// Hosts 2 and 3 lose each other's packets, and both still reach the others
    DataLinkCut,
    /// Host 2 disappears: its processes are killed and its link drops all packets
    HostGone,
    /// Host 2 runs at a fifth of its speed; the run must complete and name it
    HostSlow,
    /// The clocks of host 2 are eleven days ahead; the run must complete
    WrongClock,
    /// Host 2 has another build
    WrongBinary,
    /// Host 2 has another secret
    WrongSecret,
}

impl HostFault {
    const ALL: [HostFault; 7] = [
        HostFault::HostCut,
        HostFault::DataLinkCut,
        HostFault::HostGone,
        HostFault::HostSlow,
        HostFault::WrongClock,
        HostFault::WrongBinary,
        HostFault::WrongSecret,
    ];

    fn name(self) -> &'static str {
        match self {
            HostFault::HostCut => "host cut",
            HostFault::DataLinkCut => "data link cut",
            HostFault::HostGone => "host gone",
            HostFault::HostSlow => "host slow",
            HostFault::WrongClock => "wrong clock",
            HostFault::WrongBinary => "wrong binary",
            HostFault::WrongSecret => "wrong secret",
        }
    }

    /// Returns whether the run must complete despite the fault.
    fn is_harmless(self) -> bool {
        matches!(self, HostFault::HostSlow | HostFault::WrongClock)
    }

    /// Returns whether the fault exists before the ranks meet.
    fn is_present_at_start(self) -> bool {
        matches!(self, HostFault::WrongClock | HostFault::WrongBinary | HostFault::WrongSecret)
    }
}

/// The host at which most faults are injected.
const VICTIM: usize = 2;
/// The host that loses the victim if their link is cut.
const OTHER_END: usize = 3;

/// A run with a fault, after all of its processes ended or the limit has passed.
struct FaultedRun {
    fault: HostFault,
    seconds: f64,
    left_behind: usize,
    hosts: Vec<HostOutcome>,
    defects: Vec<String>,
}

/// Injects each fault once and returns the table of what every side said.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    if let Err(why) = BridgedHosts::new("probe") {
        return Ok(skip_benchmark("hosts", &why));
    }
    let faults = if args.faults.is_empty() { &HostFault::ALL[..] } else { &args.faults };
    let mut runs = Vec::new();
    for fault in faults {
        let run = run_fault(args, *fault).with_context(|| fault.name().to_string())?;
        eprintln!("{}: {} defects", fault.name(), run.defects.len());
        runs.push(run);
    }
    Ok(summarize_runs(args, &runs))
}

fn run_fault(args: &Args, fault: HostFault) -> anyhow::Result<FaultedRun> {
    let network = BridgedHosts::new(&(fault as u8).to_string())?;
    let dir = tempfile::tempdir()?;
    let tag = new_run_tag();
    let mut processes = start_ranks(args, fault, &network, dir.path(), &tag)?;
    let from = if fault.is_present_at_start() {
        Instant::now()
    } else {
        let mut tail = processes[0].open_record();
        let begun = processes[0].wait_for_chunks(&mut tail, CHUNKS_BEFORE);
        begun.with_context(|| processes.iter().map(StreamProcess::output_text).collect::<String>())?;
        inject_fault(fault, &network, &processes)?;
        Instant::now()
    };
    let mut processes_left = find_tagged(&tag);
    processes_left.retain(|p| p.is_alive());
    let victim = processes[VICTIM].launcher_process();
    let (took, left) =
        wait_until_gone(&tag, &processes_left, from, Duration::from_secs(args.limit_s), || {
            if fault == HostFault::HostSlow
                && let Some(victim) = victim
            {
                for (signal, time) in [SLOW_STEPS; SLOW_TURNS].into_iter().flatten() {
                    victim.send_signal(signal);
                    std::thread::sleep(time);
                }
            }
            processes.iter_mut().for_each(|p| {
                p.try_reap();
            });
        });
    if left.is_empty() {
        processes.iter_mut().for_each(StreamProcess::wait);
    }
    let hosts: Vec<HostOutcome> = processes.iter_mut().map(HostOutcome::from_process).collect();
    let defects = find_defects(fault, &hosts, left.len());
    Ok(FaultedRun { fault, seconds: took.as_secs_f64(), left_behind: left.len(), hosts, defects })
}

fn start_ranks(
    args: &Args,
    fault: HostFault,
    network: &BridgedHosts,
    dir: &Path,
    tag: &str,
) -> anyhow::Result<Vec<StreamProcess>> {
    let (secret, other_secret) = (dir.join("secret"), dir.join("other-secret"));
    write_secret(&secret)?;
    write_secret(&other_secret)?;
    let mut processes = Vec::new();
    for rank in 0..HOSTS {
        let folder = dir.join(format!("rank-{rank}"));
        fs::create_dir(&folder)?;
        let is_victim = rank == VICTIM;
        let chunks = match fault {
            HostFault::HostSlow => SLOW_CHUNKS,
            _ if fault.is_harmless() => FINITE_CHUNKS,
            _ => ENDLESS_CHUNKS,
        };
        let (mesh, topology) = ("tp=2,pp=2".to_string(), "mesh".to_string());
        let mut target = args.target.clone();
        if fault == HostFault::HostSlow {
            target.model = SLOW_MODEL.into();
        }
        let stream = StreamArgs { target, mesh, topology, chunks };
        let mut command = stream.command_line(&folder)?;
        if is_victim && fault == HostFault::WrongBinary {
            command[0] = change_binary(Path::new(&command[0]), dir)?;
        }
        let mut argv = network.command_prefix(rank);
        if is_victim && fault == HostFault::WrongClock {
            let shift = ["unshare", "--time", "--monotonic", CLOCK_OFFSET_S, "--boottime", CLOCK_OFFSET_S];
            argv.extend(shift.map(String::from));
        }
        argv.extend(command);
        let secret = if is_victim && fault == HostFault::WrongSecret { &other_secret } else { &secret };
        argv.extend(["--secret".into(), secret.display().to_string()]);
        argv.extend(["--join-timeout".into(), JOIN_TIMEOUT_S.into()]);
        let variables = join_variables(rank, HOSTS, (&network::address_of(0), PORT));
        processes.push(StreamProcess::start(&argv, &folder, tag, &variables)?);
    }
    Ok(processes)
}

fn inject_fault(fault: HostFault, network: &BridgedHosts, processes: &[StreamProcess]) -> anyhow::Result<()> {
    match fault {
        HostFault::HostCut => network.take_down(VICTIM),
        HostFault::DataLinkCut => network.cut_link_between(VICTIM, OTHER_END),
        HostFault::HostGone => {
            (0..HOSTS).filter(|h| *h != VICTIM).try_for_each(|h| network.cut_link_between(VICTIM, h))?;
            let killed = processes[VICTIM].launcher_process().is_some_and(|p| p.send_signal(Signal::KILL));
            ensure!(killed, "the rank ended before it was killed");
            Ok(())
        }
        HostFault::HostSlow | HostFault::WrongClock | HostFault::WrongBinary | HostFault::WrongSecret => {
            Ok(())
        }
    }
}

/// Copies the binary with one more byte at its end, which makes it another build.
fn change_binary(binary: &Path, dir: &Path) -> anyhow::Result<String> {
    let mut bytes = fs::read(binary)?;
    bytes.push(0);
    let path = dir.join("tessera");
    fs::write(&path, bytes)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path.display().to_string())
}

fn summarize_runs(args: &Args, runs: &[FaultedRun]) -> BenchResult {
    let mut text = String::new();
    let mut rows = Vec::new();
    for run in runs {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{}: all gone after {:.1} s, {} left behind",
            run.fault.name(),
            run.seconds,
            run.left_behind
        );
        for (host, outcome) in run.hosts.iter().enumerate() {
            let _ = writeln!(text, "  host {host}  {:<10}  {}", outcome.end, outcome.said);
        }
        for defect in &run.defects {
            let _ = writeln!(text, "  defect: {defect}");
        }
        let said: Vec<_> =
            run.hosts.iter().map(|h| json!({"end": h.end, "code": h.code, "said": h.said})).collect();
        rows.push(json!({
            "fault": run.fault.name(), "seconds": run.seconds, "left_behind": run.left_behind,
            "hosts": said, "defects": run.defects,
        }));
    }
    let defects: usize = runs.iter().map(|r| r.defects.len()).sum();
    let left: usize = runs.iter().map(|r| r.left_behind).sum();
    let _ = write!(text, "{} faults, {defects} defects, {left} processes left behind", runs.len());
    let numbers = json!({
        "bench": "hosts", "model": args.target.model, "defects": defects, "orphans": left, "faults": rows,
    });
    BenchResult { text, numbers }
}

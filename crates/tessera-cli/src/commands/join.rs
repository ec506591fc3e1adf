//! `tessera join`: one rank of array programs whose calls a process on another host makes.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tessera::arrays::{ArrayRankOptions, ArrayRendezvous, run_joined_rank};
use tessera::stream_options::RunDevice;
use tessera::terminal::print_stderr_line;

use crate::flags::named_values;
use crate::output::{CliError, CliResult, print_failure};
use crate::parse::invalid_argument;

const EXAMPLES: &str = "\
Examples:
  tessera join my-plan --weights my-function/weights.safetensors --rank 1 --rendezvous head.example:29500 --secret secret
  python -m tessera join my-plan --rank 3 --rendezvous 10.0.0.7:29500 --secret secret     a plan without weights
  tessera join my-plan --rank 1 --device cuda --local-rank 1 --rendezvous 127.0.0.1:29500 --secret secret     the second GPU of a host

In Python, `plan.save(\"my-plan\")` writes the plan and `graph.save(\"my-function\")` the weights. Rank 0 is the session
that makes the calls: runtime.open_session(plan, ranks=\"joined\", rendezvous=\"head.example:29500\", secret=\"secret\").

Exit status: 0 the session was closed, 1 diagnostics, 2 usage error, 10-29 the run failed (one status per failure class).";

/// Run one rank of array programs; the other ranks, and the Python session that calls them, run elsewhere
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of the plan, the same plan on every rank
    #[arg(value_name = "PLAN")]
    plan: PathBuf,

    /// Safetensors file with the weights of the plan, the same on every rank
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,

    /// Number of this rank; rank 0 is the session
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rank: u32,

    /// Where rank 0 listens
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: String,

    /// File with the shared secret of the run, the same on every rank; at least 32 bytes
    #[arg(long, value_name = "FILE")]
    secret: PathBuf,

    /// Local address on which to listen for other ranks [default: the address that reaches rank 0]
    #[arg(long, value_name = "ADDRESS")]
    bind: Option<IpAddr>,

    /// Time limit for all ranks to join, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    join_timeout: u64,

    /// Device of this rank, the same on every rank
    #[arg(long, value_parser = named_values(ARRAY_DEVICES), default_value = "cpu")]
    device: RunDevice,

    /// Number of this rank among those of its host, which selects its GPU unless the mesh of the plan names one
    #[arg(long, value_name = "N", default_value_t = 0)]
    local_rank: u32,

    /// CPU threads of this rank [default: the cores of this host divided among all ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,

    /// Folder for the flight record of this rank [default: a temporary one, which stays if the run fails]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Values of `--device`, each with its help text.
const ARRAY_DEVICES: &[(&str, RunDevice, &str)] =
    &[("cpu", RunDevice::Cpu, "Run on the CPU"), ("cuda", RunDevice::Cuda, "Run on a GPU")];

/// Runs the rank until its session ends.
pub fn run(args: &Args) -> CliResult {
    let master = ArrayRendezvous::parse_master(&args.rendezvous).ok_or_else(|| {
        let why = "it is no host and port";
        CliError::usage(invalid_argument(
            "--rendezvous",
            &args.rendezvous,
            why,
            "--rendezvous head.example:29500",
        ))
    })?;
    let options = ArrayRankOptions {
        plan: args.plan.clone(),
        weights: args.weights.clone(),
        rank: args.rank,
        rendezvous: ArrayRendezvous {
            master,
            bind: args.bind,
            secret: args.secret.clone(),
            timeout: Duration::from_secs(args.join_timeout),
        },
        device: args.device,
        local_rank: args.local_rank,
        threads: args.threads.map(|n| n as usize),
        out: args.out.clone(),
    };
    let failure = run_joined_rank(&options).map_err(CliError::from_join)?;
    let Some(failure) = failure else { return Ok(0) };
    print_stderr_line(&format!("rank {}:", args.rank));
    print_failure(&failure);
    tessera::exit_process(failure.class.exit_code())
}

//! `tessera record`: checks the record of a run, and computes its gates.

use std::path::{Path, PathBuf};

use tessera::files;
use tessera::record::{RECORD_FILE, StartupMemory};
use tessera::run_dir::read_flight_records;
use tessera_base::{Bytes, Diagnostic, GateStatus};
use tessera_tools::codes::T0036;
use tessera_tools::gate_record::{GateRecord, RecordedGate};
use tessera_tools::record_check::{check_record, run_gates};

use crate::output::{
    CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, format_pairs, format_table, print_diagnostics,
    write_stdout,
};

const EXAMPLES: &str = "\
Examples:
  tessera record check out/demo-1                every line of record.jsonl against the schema
  tessera record startup out/demo-1              role, effective settings, watchdogs and armed tripwires of each rank
  tessera record gates out/demo-1                the gates of the manual's pages, with value and limit
  tessera record gates out/demo-1 --format json  for scripts
  tessera record gates out/demo-1 --gate-record gates.json   for `tessera stream --performance`

The gates need record.jsonl, and flight/ for refusals and collectives. A gate without a subject, such as refusals in a run that
refused nothing, is `n/a`. A gate for which the run is too short is `not measured`; it does not pass, and it fails nothing.

Exit status: 0 the record is valid or no gate fails, 1 it is not or one fails, 2 the folder holds no record.";

/// Check the record of a run against its schema, or compute its gates
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Validate every line of the record against the schema, and the lines against each other
    Check(RunArgs),
    /// Print what each rank reported at its start: effective settings, watchdogs, armed tripwires
    Startup(RunArgs),
    /// Compute the gates of the manual and compare each with its limit
    Gates(GatesArgs),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Run folder
    #[arg(value_name = "RUN")]
    dir: PathBuf,

    /// Format of the result and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    format: OutputFormat,
}

#[derive(Debug, clap::Args)]
struct GatesArgs {
    #[command(flatten)]
    run: RunArgs,

    /// Also write the gates with the run's plan, build and machine to this file, for `tessera stream
    /// --performance`
    #[arg(long, value_name = "FILE")]
    gate_record: Option<PathBuf>,
}

impl Args {
    /// Returns the format of the result and of diagnostics.
    pub fn format(&self) -> OutputFormat {
        match &self.action {
            Action::Check(run) | Action::Startup(run) => run.format,
            Action::Gates(gates) => gates.run.format,
        }
    }
}

/// Checks a record or computes its gates.
pub fn run(args: &Args) -> CliResult {
    match &args.action {
        Action::Check(run) => check(run),
        Action::Startup(run) => print_startups(run),
        Action::Gates(gates) => compute_gates(&gates.run, gates.gate_record.as_deref()),
    }
}

fn read_record_file(dir: &Path) -> Result<Vec<u8>, CliError> {
    let path = dir.join(RECORD_FILE);
    files::read_file(&path, u64::MAX).map_err(|why| {
        CliError::usage(
            Diagnostic::error(&T0036, format!("{} holds no {RECORD_FILE}", dir.display()))
                .with_label(path.display().to_string(), why.to_string())
                .with_hint("name the folder that `tessera stream --out` wrote"),
        )
    })
}

fn check(args: &RunArgs) -> CliResult {
    let (record, found) = check_record(&read_record_file(&args.dir)?);
    print_diagnostics(&found, args.format.into(), &|_| None);
    let valid = !found.iter().any(Diagnostic::is_error);
    let (chunks, events) = record.map_or((0, 0), |r| (r.chunk_count(), r.events.len()));
    write_stdout(&match args.format {
        OutputFormat::Json => {
            format!("{}\n", serde_json::json!({"valid": valid, "chunks": chunks, "events": events}))
        }
        OutputFormat::Text => {
            let verdict = if valid { "valid" } else { "invalid" };
            format!("{}: {verdict}, {chunks} chunks, {events} events\n", args.dir.display())
        }
    })?;
    Ok(if valid { 0 } else { EXIT_DIAGNOSTICS })
}

fn print_startups(args: &RunArgs) -> CliResult {
    let (record, found) = check_record(&read_record_file(&args.dir)?);
    let Some(record) = record else { return Err(found.into()) };
    let mut out = String::new();
    for s in record.events.iter().filter_map(|e| e.startup.as_ref()) {
        // The leader writes the memory of a rank after the warm-up, in an event of its own.
        let memory = record.events.iter().filter_map(|e| e.memory.as_ref()).find(|m| m.rank == s.rank);
        match args.format {
            OutputFormat::Json => {
                let mut report = serde_json::to_value(s).unwrap_or_default();
                report["memory"] = serde_json::to_value(memory).unwrap_or_default();
                out += &format!("{report}\n");
            }
            OutputFormat::Text => {
                out += &format!("rank {}, role {}\n", s.rank, s.role);
                let tripwires = ("tripwires armed".to_string(), s.tripwires.join(" "));
                let memory = memory.into_iter().flat_map(memory_pairs);
                out += &format_pairs(s.keys.iter().cloned().chain([tripwires]).chain(memory));
            }
        }
    }
    write_stdout(&out)?;
    Ok(0)
}

/// Describes the memory of a rank after the warm-up, and the temporaries of each of its phases.
fn memory_pairs(report: &StartupMemory) -> Vec<(String, String)> {
    let m = &report.memory;
    let [planned, allocated, workspace] =
        [m.planned_bytes, m.allocated_bytes, m.workspace_bytes].map(|b| Bytes(b).to_string());
    let total = format!(
        "{allocated} allocated, {planned} planned ({:+.1} %); {workspace} of workspaces beside the plan",
        m.deviation_percent()
    );
    let phases = report.phases.iter().map(|p| {
        let [written, planned] = [p.written_bytes, p.planned_bytes].map(|b| Bytes(b).to_string());
        (format!("memory: {}", p.phase), format!("{written} of temporaries written, {planned} planned"))
    });
    [("memory".to_string(), total)].into_iter().chain(phases).collect()
}

fn compute_gates(args: &RunArgs, gate_record: Option<&Path>) -> CliResult {
    let (record, found) = check_record(&read_record_file(&args.dir)?);
    let Some(record) = record.filter(|_| !found.iter().any(Diagnostic::is_error)) else {
        return Err(found.into());
    };
    let last_rank = record.start.ranks.iter().map(|r| r.rank).max().unwrap_or(0);
    let gates = run_gates(&record, &read_flight_records(&args.dir, last_rank + 1));
    if let Some(path) = gate_record {
        let recorded = gates.iter().map(|g| RecordedGate {
            gate: g.name.to_string(),
            value: g.value.clone(),
            verdict: g.verdict.name().to_string(),
        });
        GateRecord::from_runs("record gates", std::slice::from_ref(&args.dir), recorded.collect())?
            .write(path)?;
    }
    write_stdout(&match args.format {
        OutputFormat::Json => {
            let gates = gates.iter().map(|g| {
                let verdict = g.verdict.name();
                serde_json::json!({"gate": g.name, "value": g.value, "limit": g.limit, "verdict": verdict})
            });
            format!("{}\n", serde_json::json!({"gates": gates.collect::<Vec<_>>()}))
        }
        OutputFormat::Text => format_table(
            gates.iter().map(|g| [g.verdict.name(), g.name, &g.value, g.limit].map(String::from)),
            [false; 4],
        ),
    })?;
    let fails = gates.iter().any(|g| g.verdict == GateStatus::Fail);
    Ok(if fails { EXIT_DIAGNOSTICS } else { 0 })
}

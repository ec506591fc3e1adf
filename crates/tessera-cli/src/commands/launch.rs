//! `tessera launch`: shows where the ranks of a plan would run, or prints the commands that start
//! them. It starts nothing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};
use tessera::Plan;
use tessera::environment::process_environment;
use tessera::files::read_text;
use tessera::launchers::DEFAULT_PORT;
use tessera::stream_options::RunDevice;
use tessera_base::Bytes;
use tessera_tools::codes::T0065;
use tessera_tools::launch::{
    LaunchPlan, LaunchRequest, LocalHost, RankPlace, VariableSource, parse_host_file, parse_host_list,
    plan_launch,
};

use crate::flags::named_values;
use crate::output::{CliError, CliResult, OutputFormat, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera launch --dry-run my-plan --hosts node[01-18]                 the ranks of each host, equally many
  tessera launch --dry-run my-plan --hosts head:1,node[01-02]:4        a leader outside the mesh on a host of its own
  tessera launch --dry-run my-plan --hostfile hosts --device cuda      GPUs and hints for NCCL
  tessera launch my-plan --hosts a,b --secret secret                   one command for each rank

Launch starts nothing: the first table shows the place of each rank, the second one the groups that communicate, and the last
list the variables of the ranks. What only another host knows is `unknown until the host is asked`. Variables that are set in
this shell keep their values. Without --dry-run, launch prints the command that starts each rank, for a script or a person to
run; torchrun, srun, mpirun and LeaderWorkerSet set the variables themselves (docs/guides/launchers.md).

Exit status: 0 success, 1 the hosts do not fit the plan, 2 usage error.";

/// Values of `--device`, each with its help text.
const DEVICES: &[(&str, RunDevice, &str)] =
    &[("cpu", RunDevice::Cpu, "Processes on CPUs"), ("cuda", RunDevice::Cuda, "NVIDIA GPUs, one per rank")];

/// Show the place, the variables and the traffic of each rank on named hosts, or print the commands
/// that start the ranks
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of the plan (from `tessera plan --out`)
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,

    /// Hosts in the order in which they get ranks, each with a number of ranks or none
    #[arg(long, value_name = "HOST[:N],...", required_unless_present = "hostfile")]
    pub hosts: Option<String>,

    /// File with a host per line: `node01 slots=4` or `node01:4`
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    pub hostfile: Option<PathBuf>,

    /// Device of the ranks
    #[arg(long, value_parser = named_values(DEVICES), default_value = "cpu")]
    pub device: RunDevice,

    /// Show tables instead of commands
    #[arg(long)]
    pub dry_run: bool,

    /// Port at which rank 0 listens
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub leader_port: u16,

    /// File with the run's secret, at this path on every host
    #[arg(long, value_name = "FILE")]
    pub secret: Option<PathBuf>,

    /// Format of the tables and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Works out the launch and prints it.
pub fn run(args: &Args) -> CliResult {
    let hosts = match (&args.hosts, &args.hostfile) {
        (Some(list), _) => parse_host_list(list),
        (None, Some(file)) => parse_host_file(&file.display().to_string(), &read_text(file, &T0065)?),
        (None, None) => parse_host_list(""),
    };
    let plan = Plan::read(&args.plan)?;
    let request = LaunchRequest {
        plan: &plan,
        hosts: hosts.map_err(CliError::usage)?,
        device: args.device,
        leader_port: args.leader_port,
        secret: args.secret.clone(),
        environment: process_environment().collect(),
    };
    let launch = plan_launch(&request, &LocalHost::read(args.device == RunDevice::Cuda))?;
    let text = match (args.format, args.dry_run) {
        (OutputFormat::Json, _) => format!("{}\n", to_json(&plan, &launch)),
        (OutputFormat::Text, true) => describe(&plan, &launch),
        (OutputFormat::Text, false) => list_commands(args, &launch),
    };
    write_stdout(&text)?;
    Ok(0)
}

fn describe(plan: &Plan, launch: &LaunchPlan) -> String {
    let mut out = format!("plan {}, mesh {}\n\n", &plan.sealed.digest_hex()[..16], plan.sealed.mesh());
    let heading =
        ["rank", "coordinates", "host", "local", "device", "numa", "cores", "network"].map(str::to_string);
    let rows = launch.ranks.iter().map(|r| {
        let (rank, local) = (r.rank.to_string(), r.local_rank.to_string());
        let texts = [&r.coordinates, &r.host, &local, &r.device, &r.numa_node, &r.cores, &r.network];
        let [a, b, c, d, e, f, g] = texts.map(String::clone);
        [rank, a, b, c, d, e, f, g]
    });
    let right = [true, false, false, true, false, false, false, false];
    out += &format_table(std::iter::once(heading).chain(rows), right);
    if !launch.groups.is_empty() {
        let heading = ["program", "op", "groups", "ops", "on several hosts", "path", "between hosts"];
        let rows = launch.groups.iter().map(|g| {
            [
                g.phase.clone(),
                g.op.to_string(),
                g.groups.clone(),
                g.ops.to_string(),
                g.spanning.to_string(),
                g.path.name().to_string(),
                Bytes(g.bytes_between_hosts).to_string(),
            ]
        });
        let right = [false, false, false, true, true, false, true];
        out.push('\n');
        out += &format_table(std::iter::once(heading.map(str::to_string)).chain(rows), right);
        out += "  Bytes of all groups in one run of the program, with a ring in rank order.\n";
    }
    out += "\nvariables\n";
    out += &describe_variables(&launch.ranks);
    if let Some(conflict) = &launch.algorithm_conflict {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {conflict}.");
    }
    out
}

/// Lists the variables once if all ranks have the same value, and with the values of the first ranks
/// otherwise.
fn describe_variables(ranks: &[RankPlace]) -> String {
    let mut values: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for v in ranks.iter().flat_map(|r| &r.variables) {
        values.entry(v.name).or_default().push(&v.value);
    }
    let Some(first) = ranks.first() else { return String::new() };
    let rows = first.variables.iter().map(|v| {
        let all = &values[v.name];
        let value = match (v.source, all.iter().all(|value| *value == v.value)) {
            (VariableSource::Kept, _) => format!("{}  (kept: user's value)", v.value),
            (VariableSource::Open, true) => "not set".to_string(),
            (_, true) => v.value.clone(),
            (_, false) => {
                let shown: Vec<&str> = all.iter().take(4).copied().collect();
                format!("{}{} by rank", shown.join(", "), if all.len() > 4 { ", …" } else { "" })
            }
        };
        [v.name.to_string(), value, v.reason.to_string()]
    });
    format_table(rows, [false; 3])
}

fn list_commands(args: &Args, launch: &LaunchPlan) -> String {
    let mut out = String::from(
        "# Nothing was started. Run each command on its host; the plan and the secret must be there too.\n",
    );
    for rank in &launch.ranks {
        // A value that is kept is set in this shell alone, and another host does not have it.
        let set = rank.variables.iter().filter(|v| v.source != VariableSource::Open);
        let set: Vec<String> = set.map(|v| format!("{}={}", v.name, quote(&v.value))).collect();
        let device = if args.device == RunDevice::Cuda { " --device cuda" } else { "" };
        let plan = quote(&args.plan.display().to_string());
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "\n# {}, rank {}\nenv {} tessera stream --plan {plan}{device}",
            rank.host,
            rank.rank,
            set.join(" ")
        );
    }
    out
}

/// Quotes a word for a POSIX shell if it needs that.
fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_string();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn to_json(plan: &Plan, launch: &LaunchPlan) -> Value {
    let ranks = launch.ranks.iter().map(|r| {
        let variables = r.variables.iter().map(|v| {
            let source = match v.source {
                VariableSource::Set => "set",
                VariableSource::Kept => "kept",
                VariableSource::Open => "open",
            };
            json!({"name": v.name, "value": v.value, "source": source, "reason": v.reason})
        });
        json!({
            "rank": r.rank, "coordinates": r.coordinates, "host": r.host, "local_rank": r.local_rank,
            "device": r.device, "numa_node": r.numa_node, "cores": r.cores, "network": r.network,
            "variables": variables.collect::<Vec<_>>(),
        })
    });
    let groups = launch.groups.iter().map(|g| {
        json!({
            "program": g.phase, "op": g.op, "groups": g.groups, "ops": g.ops,
            "on_several_hosts": g.spanning, "path": g.path.name(),
            "bytes_between_hosts": g.bytes_between_hosts,
        })
    });
    json!({
        "plan": plan.sealed.digest_hex(),
        "mesh": plan.sealed.mesh().to_string(),
        "ranks": ranks.collect::<Vec<_>>(),
        "groups": groups.collect::<Vec<_>>(),
        "algorithm_conflict": launch.algorithm_conflict,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_with_special_characters_is_quoted_for_the_shell() {
        assert_eq!([quote("a/b:1"), quote(""), quote("it's")], ["a/b:1", "''", "'it'\\''s'"]);
    }
}

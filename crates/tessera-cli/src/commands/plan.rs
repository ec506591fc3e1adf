//! `tessera plan`: plans and verifies a model under a mapping, and prints a summary of the plan.

mod search;
mod text;

use std::collections::BTreeMap;
use std::path::PathBuf;

use tessera::gpu_placement::launch_table;
use tessera::gpus::GpuDiscovery;
use tessera::group_traffic::{GroupPathSummary, describe_groups};
use tessera::summary::{PhaseSummary, PlanSummary, RankSummary};
use tessera::{BudgetRow, DtypePolicy, Mapping, memory_budget};
use tessera_base::{Bytes, Diagnostic, Flops};

use crate::codes::T0030;
use crate::flags::mapping::{MappingArgs, Planned};
use crate::flags::search::SearchArgs;
use crate::output::{CliError, CliResult, OutputFormat, format_pairs, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera plan models/demo --mesh tp=2
  tessera plan models/demo --mesh tp=2,pp=2 --strategy megatron --out my-plan
  tessera plan models/demo --mesh tp=2 --topology pp1
  tessera plan models/demo --mesh tp=2,pp=2 --hosts 2        state which ranks share a host, and the path of every group
  tessera plan models/demo --mapping my-plan/mapping.toml --mesh tp=4
  tessera plan models/demo --mesh tp=2 --pin-weights --out my-plan   run with the weights of models/demo alone
  tessera plan models/demo --budget 1,2,4          planned memory of a rank for each size of tp
  tessera plan models/demo --mesh tp=2 --format json | jq .ranks[0].total_bytes
  tessera plan models/tales --mesh tp=2 --out text-plan    a language model: its estimate, its memory, and a plan
  tessera plan models/wan2.1-14b --cluster hgx-h200 --devices 8      search for the best mapping on 8 GPUs
  tessera plan --model deepseek-v3 --why tp=8,pp=1                   estimate one mapping of a language model

A plan uses exactly the mapping that --mapping and the options under 'Mapping' and 'Queue depths' give. With any option under
'Mapping search', such as --cluster, tessera instead estimates every legal mapping on the cluster and takes the best. The
options under 'Mapping' then restrict the search; for a language model, only --mesh may be given.

A video model is a folder with stream.toml. For a video model, --out writes a plan, with or without a search. The programs in
the plan are verified and sealed, and `tessera stream --plan DIR` runs them. The folder of a language
model is planned too, for the texts that the options from --sequences to --ids-per-call describe: the summary gives the estimated
time of a call that reads a part of a prompt and of one that decodes, and --out writes the plan. With --model, --recipe, a
config.json or a search, tessera only estimates a language model: --out writes a report without programs.

A digest identifies the plan, and does not depend on the machine. Before the first call of a run, every rank reports the digest
of the plan that it holds; if the digests differ, the run ends.

Exit status:
  0  a plan, or with --why a legal mapping; a gate that only warns does not change the status
  1  a gate of the report fails, and the report and --out are complete; or no mapping is legal or
     meets the deadline, a recipe does not fit the devices, or a file could not be used or written
  2  the command line is wrong, or it names a file, a model, a recipe or a knob that does not exist";

/// Maximum number of ranks listed as text. JSON lists all ranks.
const MAX_RANKS_SHOWN: usize = 32;

/// Plan how a model is sharded over ranks, and verify that the ranks cannot deadlock or diverge
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Model folder, for example models/demo
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub mapping_args: MappingArgs,

    #[command(flatten)]
    pub search_args: SearchArgs,

    /// Mapping file (TOML), such as the mapping.toml of a plan folder; other options override it
    #[arg(long, value_name = "FILE")]
    pub mapping: Option<PathBuf>,

    /// Put a digest of all weights into the seal, so that the plan runs with these weights alone
    #[arg(long)]
    pub pin_weights: bool,

    /// Texts that are generated at once, for a language model [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub sequences: Option<u64>,

    /// Positions of the longest text with its prompt, for a language model [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub positions: Option<u64>,

    /// Ids of a prompt that one call reads, for a language model [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub prompt_rows: Option<u64>,

    /// Most prompts that calls read together, a part of each, for a language model [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub prompts_per_call: Option<u64>,

    /// Most ids of each text that one call decodes, for a language model [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    pub ids_per_call: Option<u64>,

    /// Write the plan to this new folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Print the GPU, PCI bus id, NUMA node and port of each rank on this host, as tab-separated text, instead of the summary
    #[arg(long)]
    pub launch_table: bool,

    /// Print the planned memory of the fullest rank for each of these sizes of tp, such as 1,2,4,8, instead of the summary
    ///
    /// The columns are the weights, the KV caches, the histories of a VAE, inputs, temporaries, the memory of
    /// exchanges between ranks, what a driver and its libraries reserve, and the leader's own programs. A plan in
    /// f32 is taken for ranks on CPUs.
    #[arg(long, value_name = "TP,…", value_delimiter = ',', conflicts_with = "launch_table", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub budget: Vec<u32>,

    /// Format of the summary or report, and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Plans and verifies a model under a mapping, and prints a summary of the plan.
pub fn run(args: &Args) -> CliResult {
    plan_or_search(args).map_err(CliError::into_usage_if_invalid)
}

fn plan_or_search(args: &Args) -> CliResult {
    if args.search_args.is_requested() {
        if args.mapping.is_some() {
            let message = "--mapping fixes what a mapping search would choose";
            let d = Diagnostic::error(&T0030, message)
                .with_hint("leave out --mapping, or the options of the mapping search");
            return Err(CliError::usage(d));
        }
        if args.pin_weights {
            let d = Diagnostic::error(&T0030, "--pin-weights does not go with a mapping search").with_hint(
                "write the best plan with --out DIR, then plan with --mapping DIR/mapping.toml --pin-weights",
            );
            return Err(CliError::usage(d));
        }
        return search::run(
            &args.search_args,
            args.model.as_deref(),
            &args.mapping_args,
            args.out.as_deref(),
            args.format,
        );
    }
    if let Some(folder) = args.model.as_deref().filter(|folder| text::is_language_model(folder)) {
        return text::run(args, folder);
    }
    let of_texts = [
        ("--sequences", args.sequences),
        ("--positions", args.positions),
        ("--prompt-rows", args.prompt_rows),
        ("--prompts-per-call", args.prompts_per_call),
        ("--ids-per-call", args.ids_per_call),
    ];
    if let Some((flag, _)) = of_texts.iter().find(|(_, given)| given.is_some()) {
        let d = Diagnostic::error(&T0030, format!("{flag} applies to the folder of a language model alone"));
        return Err(CliError::usage(d.with_hint("leave it out")));
    }
    let Planned { model, plan, pixels } =
        args.mapping_args.open_and_plan(args.model.as_deref(), args.mapping.as_deref(), false)?;
    let plan = if args.pin_weights { model.pin_weights(&plan)? } else { plan };
    if let Some(folder) = &args.out {
        plan.write(folder)?;
    }
    if args.launch_table {
        let gpus = GpuDiscovery::discover().devices.map(|d| d.gpus).unwrap_or_default();
        write_stdout(&launch_table(&gpus, plan.sealed.mesh(), plan.sealed.rank_map()))?;
        return Ok(0);
    }
    if !args.budget.is_empty() {
        let on_gpus = plan.mapping.dtype != DtypePolicy::F32;
        let rows = memory_budget(&model.video, &plan.mapping, &args.budget, on_gpus)?;
        write_stdout(&match args.format {
            OutputFormat::Json => serde_json::to_string(&rows).unwrap_or_default() + "\n",
            OutputFormat::Text => render_budget(&plan.mapping, &rows),
        })?;
        return Ok(0);
    }
    let summary = PlanSummary::from_plan(&plan);
    write_stdout(&match args.format {
        OutputFormat::Json => serde_json::to_string(&summary).unwrap_or_default() + "\n",
        OutputFormat::Text => {
            render_summary(&summary, pixels, args.out.as_ref().map(|f| f.display().to_string()))
        }
    })?;
    Ok(0)
}

fn render_summary(s: &PlanSummary, pixels: Option<String>, folder: Option<String>) -> String {
    let list = |v: &[f64]| v.iter().map(f64::to_string).collect::<Vec<_>>().join(" ");
    let blocks: Vec<String> = s.blocks_per_stage.iter().map(u64::to_string).collect();
    let ranks = if s.ranks.len() == 1 { "1 rank".to_string() } else { format!("{} ranks", s.ranks.len()) };
    let row_chunks = match s.overlap_chunks {
        0 | 1 => String::new(),
        n => format!(" with {n} row chunks"),
    };
    let numbers = format!("{} numerics in {}", s.numerics, s.dtype);
    let mut facts = vec![
        ("mesh", format!("{}: {ranks}, {} strategy{row_chunks}, {numbers}", s.mesh, s.strategy)),
        ("topology", format!("{}: {}", s.topology, describe_topology(s.topology))),
        (
            "stream",
            format!(
                "{}x{} at {} frames per second, {} frames per chunk, {} cache, steps {}",
                s.picture[0],
                s.picture[1],
                s.fps,
                s.frames_per_chunk,
                s.cache,
                list(&s.steps)
            ),
        ),
        ("blocks", format!("{} per pipeline stage", blocks.join(", "))),
    ];
    if let Some(call) = s.steady_call() {
        facts.push((
            "chunk",
            format!(
                "{} phases, {} and {} collectives on the busiest ranks, operands of {} on all ranks ({})",
                call.phases.len(),
                Flops(call.flops),
                call.collectives,
                Bytes(call.bytes),
                call.name
            ),
        ));
    }
    facts.extend(pixels.map(|text| ("pixels", text)));
    facts.extend(s.hosts.clone().map(|h| ("hosts", h.text)));
    facts.push(("digest", s.digest.clone()));
    facts.extend(s.weights.clone().map(|digest| ("weights", format!("{digest} alone"))));
    if let Some(folder) = folder {
        facts.push(("folder", folder));
    }
    let mut out = format!("plan of {}, verified\n{}", s.model, format_pairs(facts));
    out += "\nranks and their memory\n";
    out += &ranks_table(&s.ranks);
    if s.leader.total_bytes() > 0 {
        let [weights, buffers, temporaries, total] =
            [s.leader.weights, s.leader.buffers, s.leader.temporaries, s.leader.total_bytes()].map(Bytes);
        out += &format!(
            "beside them, the leader's own programs: weights {weights}, buffers {buffers}, temporaries {temporaries}, total {total}\n"
        );
    }
    out += &groups_table(&s.groups);
    out += "\nphases: FLOPs of the busiest rank; bytes of the operands of collectives, on the busiest rank and on all ranks\n";
    out += &phases_table(&s.phases);
    out
}

/// Returns which ranks lead, encode, decode and generate, given the name of a topology.
fn describe_topology(topology: &str) -> &'static str {
    match topology {
        "pp0" => "rank 0 leads, encodes and decodes outside the mesh; rank 1 generates",
        "pp1" => {
            "rank 0 leads, encodes and decodes outside the mesh; rank 1 relays to the other ranks; ranks 1 and up generate"
        }
        _ => "rank 0 leads, encodes, decodes, and generates with the other ranks",
    }
}

/// Returns the table of the planned memory of the fullest rank by tp.
fn render_budget(mapping: &Mapping, rows: &[BudgetRow]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let heading = ["tp", "rank"]
        .into_iter()
        .chain(first.list_memory_uses().map(|(name, _)| name))
        .chain(["total", "leader"]);
    let mut table: Vec<[String; 11]> = vec![std::array::from_fn({
        let names: Vec<String> = heading.map(String::from).collect();
        move |i| names.get(i).cloned().unwrap_or_default()
    })];
    table.extend(rows.iter().map(|row| {
        let [weights, caches, histories, inputs, temporaries, exchange, libraries] =
            row.list_memory_uses().map(|(_, bytes)| bytes.to_string());
        let [total, leader] = [row.total_bytes, row.leader_bytes].map(|b| Bytes(b).to_string());
        let (tp, rank) = (row.tp.to_string(), row.rank.to_string());
        [tp, rank, weights, caches, histories, inputs, temporaries, exchange, libraries, total, leader]
    }));
    format!(
        "planned memory of the fullest rank, {} strategy in {}, phases of pixels: {}\n{}",
        mapping.strategy.name(),
        mapping.dtype.name(),
        mapping.media.name(),
        format_table(table, [true; 11])
    )
}

fn ranks_table(ranks: &[RankSummary]) -> String {
    let heading =
        ["rank", "position", "role", "device", "weights", "buffers", "inputs", "temporaries", "total"];
    let mut rows = vec![heading.map(String::from)];
    rows.extend(ranks.iter().take(MAX_RANKS_SHOWN).map(|r| {
        let bytes = [r.weights_bytes, r.buffers_bytes, r.inputs_bytes, r.temporaries_bytes, r.total_bytes];
        let [weights, buffers, inputs, temporaries, total] = bytes.map(|b| Bytes(b).to_string());
        let place = if r.coordinates.is_empty() { "alone".to_string() } else { r.coordinates.clone() };
        let (rank, role, device) = (r.rank.to_string(), r.role.clone(), r.device.clone());
        [rank, place, role, device, weights, buffers, inputs, temporaries, total]
    }));
    let mut out = format_table(rows, [true, false, false, false, true, true, true, true, true]);
    if ranks.len() > MAX_RANKS_SHOWN {
        out += &format!("  and {} more (--format json lists all)\n", ranks.len() - MAX_RANKS_SHOWN);
    }
    out
}

/// Returns the table of the paths of groups, one row for the groups of one kind and path; empty for a
/// plan without hosts.
pub(crate) fn groups_table(groups: &[GroupPathSummary]) -> String {
    let mut sums: BTreeMap<(&str, bool, &str, &str), (usize, u64)> = BTreeMap::new();
    for g in groups {
        let sum = sums.entry((&g.group, g.is_transfer, g.path, g.gpu_transport)).or_default();
        *sum = (sum.0 + 1, sum.1 + g.bytes_between_hosts);
    }
    if sums.is_empty() {
        return String::new();
    }
    let mut rows = vec![["groups", "path", "between GPUs", "between hosts"].map(String::from)];
    rows.extend(sums.into_iter().map(|((group, is_transfer, path, transport), (count, bytes))| {
        [
            describe_groups(count, is_transfer, group),
            path.to_string(),
            transport.to_string(),
            Bytes(bytes).to_string(),
        ]
    }));
    let table = format_table(rows, [false, false, false, true]);
    format!("\ngroups: path of their data, and bytes of all groups from host to host in one call\n{table}")
}

fn phases_table(phases: &[PhaseSummary]) -> String {
    let heading = ["phase", "work", "collective", "axis", "count", "one rank", "all ranks"];
    let mut rows = vec![heading.map(String::from)];
    for p in phases {
        let (name, work) = (p.name.clone(), Flops(p.flops).to_string());
        if p.collectives.is_empty() {
            let [op, axis, count, one, all] = ["none", "", "", "", ""].map(String::from);
            rows.push([name, work, op, axis, count, one, all]);
            continue;
        }
        for (i, c) in p.collectives.iter().enumerate() {
            let (name, work) = if i == 0 { (name.clone(), work.clone()) } else { Default::default() };
            let [one, all] = [c.rank_bytes, c.all_bytes].map(|b| Bytes(b).to_string());
            rows.push([name, work, c.op.clone(), c.axis.clone(), c.count.to_string(), one, all]);
        }
    }
    format_table(rows, [false, true, false, false, true, true, true])
}

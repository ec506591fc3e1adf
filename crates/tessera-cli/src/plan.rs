//! `tessera plan`: plans and seals a model under a mapping, and says what the plan comes to.

use std::path::PathBuf;

use tessera::summary::{PhaseSummary, RankSummary, Summary};
use tessera_base::{Bytes, Diagnostic, Flops};

use crate::estimate::Search;
use crate::options::Planning;
use crate::say::{Outcome, Refusal, Shape, out, table};
use crate::values::T0030;

const EXAMPLES: &str = "\
Examples:
  tessera plan models/demo --mesh tp=2
  tessera plan models/demo --mesh tp=2,pp=2 --strategy megatron --out my-plan
  tessera plan models/demo --mesh tp=2 --topology pp1
  tessera plan models/demo --mapping my-plan/mapping.toml --mesh tp=4
  tessera plan models/demo --mesh tp=2 --format json | jq .ranks[0].total_bytes

The digest names the plan: it is the same on every machine, and every rank of a run proves that it holds it.

Exit status:
  0  a plan, or with --why a legal mapping; gates that warn or fail change nothing here
  1  the question stands and the answer is no: nothing legal, a recipe that does not fit,
     a deadline missed, a file whose content is refused, a folder that cannot be written
  2  the question is not understood: an option, a name, a pin or a file that is not known";

/// Ranks listed for a person; JSON has all.
const RANKS_SHOWN: usize = 32;

/// Lay a model out over ranks and prove that they cannot hang or drift
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of the model, for example models/demo
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub planning: Planning,

    #[command(flatten)]
    pub search: Search,

    /// A mapping in TOML, such as the mapping.toml of a plan's folder; other options change it
    #[arg(long, value_name = "FILE")]
    pub mapping: Option<PathBuf>,

    /// Keep the plan in this new folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    made(args).map_err(Refusal::of_question)
}

fn made(args: &Args) -> Outcome {
    if args.search.wanted() {
        if args.mapping.is_some() {
            let says = "--mapping fixes what a search would choose";
            let d = Diagnostic::error(&T0030, says)
                .hint("leave out --mapping, or the options of planning by estimate");
            return Err(Refusal::usage(vec![d]));
        }
        return args.search.run(args.model.as_deref(), &args.planning, args.out.as_deref(), args.format);
    }
    let (_, plan) = args.planning.plan(args.model.as_deref(), args.mapping.as_deref())?;
    if let Some(folder) = &args.out {
        plan.write(folder)?;
    }
    let summary = Summary::of(&plan);
    out(&match args.format {
        Shape::Json => serde_json::to_string(&summary).unwrap_or_default() + "\n",
        Shape::Text => text(&summary, args.out.as_ref().map(|f| f.display().to_string())),
    })?;
    Ok(0)
}

fn text(s: &Summary, folder: Option<String>) -> String {
    let list = |v: &[f64]| v.iter().map(f64::to_string).collect::<Vec<_>>().join(" ");
    let blocks: Vec<String> = s.blocks_per_stage.iter().map(u64::to_string).collect();
    let ranks = if s.ranks.len() == 1 { "1 rank".to_string() } else { format!("{} ranks", s.ranks.len()) };
    let pieces = if s.pieces > 1 { format!(" in {} pieces", s.pieces) } else { String::new() };
    let numbers = format!("{} numerics in {}", s.numerics, s.dtype);
    let mut facts = vec![
        ("mesh", format!("{}: {ranks}, {} strategy{pieces}, {numbers}", s.mesh, s.strategy)),
        ("topology", format!("{}: {}", s.topology, stands(s.topology))),
        (
            "stream",
            format!(
                "{}x{} at {} frames per second, {} frames a chunk, {} cache, steps {}",
                s.picture[0],
                s.picture[1],
                s.fps,
                s.frames_per_chunk,
                s.cache,
                list(&s.steps)
            ),
        ),
        ("blocks", format!("{} on each stage in turn", blocks.join(", "))),
    ];
    if let Some(call) = s.steady_call() {
        facts.push((
            "chunk",
            format!(
                "{} phases, {} on the busiest ranks, {} collectives, {} over links ({})",
                call.phases.len(),
                Flops(call.flops),
                call.collectives,
                Bytes(call.bytes),
                call.name
            ),
        ));
    }
    facts.push(("digest", s.digest.clone()));
    if let Some(folder) = folder {
        facts.push(("folder", folder));
    }
    let facts: Vec<Vec<String>> = facts.into_iter().map(|(k, v)| vec![k.to_string(), v]).collect();
    let mut out = format!("plan of {}, verified\n{}", s.model, table(&facts, &[false, false]));
    out += "\nranks and their memory\n";
    out += &ranks_table(&s.ranks);
    out += "\nphases: work and bytes of the busiest rank, bytes of all ranks\n";
    out += &phases_table(&s.phases);
    out
}

/// Where the leader of a topology stands.
fn stands(topology: &str) -> &'static str {
    match topology {
        "pp0" => "rank 0 leads, encodes and decodes outside the mesh; rank 1 generates",
        "pp1" => {
            "rank 0 leads, encodes and decodes outside the mesh; rank 1 relays to the others, and all generate"
        }
        _ => "rank 0 leads, encodes and decodes, and generates with the others",
    }
}

fn ranks_table(ranks: &[RankSummary]) -> String {
    let heading = ["rank", "place", "role", "device", "weights", "buffers", "inputs", "temporaries", "total"];
    let mut rows = vec![heading.map(str::to_string).to_vec()];
    rows.extend(ranks.iter().take(RANKS_SHOWN).map(|r| {
        let bytes = [r.weights_bytes, r.buffers_bytes, r.inputs_bytes, r.temporaries_bytes, r.total_bytes];
        let place = if r.coordinates.is_empty() { "alone".to_string() } else { r.coordinates.clone() };
        let mut row = vec![r.rank.to_string(), place, r.role.clone(), r.device.clone()];
        row.extend(bytes.map(|b| Bytes(b).to_string()));
        row
    }));
    let mut out = table(&rows, &[true, false, false, false, true, true, true, true, true]);
    if ranks.len() > RANKS_SHOWN {
        out += &format!("  and {} more (--format json has all)\n", ranks.len() - RANKS_SHOWN);
    }
    out
}

fn phases_table(phases: &[PhaseSummary]) -> String {
    let heading = ["phase", "work", "collective", "axis", "times", "one rank", "all ranks"];
    let mut rows = vec![heading.map(str::to_string).to_vec()];
    for p in phases {
        let (name, work) = (p.name.clone(), Flops(p.flops).to_string());
        if p.collectives.is_empty() {
            rows.push(vec![name, work, "none".to_string()]);
            continue;
        }
        for (i, c) in p.collectives.iter().enumerate() {
            let (name, work) = if i == 0 { (name.clone(), work.clone()) } else { Default::default() };
            let bytes = [c.rank_bytes, c.all_bytes].map(|b| Bytes(b).to_string());
            let [one, all] = bytes;
            rows.push(vec![name, work, c.op.clone(), c.axis.clone(), c.count.to_string(), one, all]);
        }
    }
    table(&rows, &[false, true, false, false, true, true, true])
}

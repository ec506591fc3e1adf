//! `tessera plan FOLDER` for a language model: plans its calls under a mapping and prints their estimate.

use std::path::Path;

use serde_json::json;
use tessera::Mapping;
use tessera::generate::{LanguagePlan, LanguageSettings, TextModel, TokenOutput};
use tessera::group_traffic::{GroupPathSummary, summarize_group_paths};
use tessera::opened_run::EstimateComparison;
use tessera_base::{Bytes, Diagnostic, Nanoseconds};
use tessera_estimate::usual_machine;

use super::Args;
use crate::codes::T0030;
use crate::flags::mapping::{MappingUse, parse_mesh, read_mapping};
use crate::output::{CliError, CliResult, OutputFormat, format_pairs, format_table, write_stdout};

/// Extents of a plan whose options name none: those of `tessera generate`, and a cache of a few pages.
const DEFAULT_POSITIONS: u64 = 512;
const DEFAULT_PROMPT_ROWS: u64 = 64;

/// Returns whether a folder holds a language model as Hugging Face publishes it.
pub fn is_language_model(folder: &Path) -> bool {
    folder.join("config.json").is_file()
        && !folder.join("stream.toml").exists()
        && TextModel::open(folder).is_ok()
}

/// Plans a language model and prints what the plan costs.
pub fn run(args: &Args, folder: &Path) -> CliResult {
    let model = TextModel::open(folder)?;
    let unused = args.mapping_args.given_flags(&[MappingUse::Searched, MappingUse::OfModel]);
    if let Some(flag) = unused.first() {
        return Err(CliError::usage(
            Diagnostic::error(&T0030, format!("{flag} does not apply to a language model"))
                .with_hint("leave it out"),
        ));
    }
    let mut mapping = match &args.mapping {
        Some(file) => read_mapping(file)?,
        None => Mapping::default(),
    };
    if let Some(mesh) = &args.mapping_args.mesh {
        mapping.mesh = parse_mesh(mesh).map_err(CliError::usage)?;
    }
    args.mapping_args.apply_options(&mut mapping, &[MappingUse::Fixed]);
    args.mapping_args.apply_hosts(&mut mapping)?;
    let positions = args.positions.unwrap_or(DEFAULT_POSITIONS.min(model.decoder.max_positions));
    let settings = LanguageSettings {
        sequences: args.sequences.unwrap_or(1),
        positions,
        prompt_rows: args.prompt_rows.unwrap_or(DEFAULT_PROMPT_ROWS).min(positions),
        prompts_per_call: args.prompts_per_call.unwrap_or(1),
        ids_per_call: args.ids_per_call.unwrap_or(1),
        output: TokenOutput::Next,
    };
    let plan = LanguagePlan::new(&model.decoder, &mapping, settings)?;
    if let Some(out) = &args.out {
        plan.write(out, folder)?;
    }
    let estimate = plan.estimate_calls(&usual_machine(&mapping, false)?)?;
    write_stdout(&match args.format {
        OutputFormat::Json => to_json(&plan, &estimate).to_string() + "\n",
        OutputFormat::Text => render(args, folder, &plan, &estimate),
    })?;
    Ok(0)
}

/// Returns the ids per second of decoding that an estimate predicts.
fn ids_per_second(estimate: &EstimateComparison) -> Option<f64> {
    let decoding = estimate.calls.last()?;
    Some(decoding.rows as f64 * 1e9 / decoding.estimated_ns?)
}

fn to_json(plan: &LanguagePlan, estimate: &EstimateComparison) -> serde_json::Value {
    let ranks = plan.rank_bytes().into_iter().enumerate().map(|(rank, bytes)| {
        let [weights, caches, inputs, temporaries] = bytes;
        json!({"rank": rank, "weights_bytes": weights, "caches_bytes": caches, "inputs_bytes": inputs,
               "temporaries_bytes": temporaries, "total_bytes": weights + caches + inputs + temporaries})
    });
    json!({
        "digest": plan.sealed.digest_hex(),
        "mesh": plan.sealed.mesh().to_string(),
        "dtype": plan.mapping.dtype.name(),
        "ranks": ranks.collect::<Vec<_>>(),
        "groups": list_groups(plan),
        "ids_per_second": ids_per_second(estimate),
        "estimate": estimate,
    })
}

/// Returns the groups with their paths, and the bytes of a call that decodes.
fn list_groups(plan: &LanguagePlan) -> Vec<GroupPathSummary> {
    let decoding = plan.sealed.calls().last().map_or(&[][..], |(_, phases)| phases);
    summarize_group_paths(&plan.sealed, decoding)
}

fn render(args: &Args, folder: &Path, plan: &LanguagePlan, estimate: &EstimateComparison) -> String {
    let s = plan.settings;
    let time =
        |ns: Option<f64>| ns.map_or("–".to_string(), |ns| Nanoseconds(ns.round() as u64).to_string());
    let mut facts = vec![
        (
            "mesh",
            format!(
                "{}, {} numerics in {}",
                plan.sealed.mesh(),
                plan.mapping.numerics.name(),
                plan.mapping.dtype.name()
            ),
        ),
        (
            "texts",
            format!("{} of {} positions, prompts in parts of {}", s.sequences, s.positions, s.prompt_rows),
        ),
    ];
    for call in &estimate.calls {
        facts.push(("estimate", format!("{} of {} rows: {}", call.name, call.rows, time(call.estimated_ns))));
    }
    facts.extend(ids_per_second(estimate).map(|rate| ("decoding", format!("{rate:.1} ids/s"))));
    facts.push(("estimated on", estimate.machine.clone()));
    facts.extend(plan.sealed.hosts().map(|stated| ("hosts", stated.hosts.describe())));
    facts.push(("digest", plan.sealed.digest_hex()));
    let mut out = format!("plan of {}, verified\n{}", folder.display(), format_pairs(facts));
    out += &super::groups_table(&list_groups(plan));
    out += "\nmemory of each rank\n";
    let mut rows = vec![["rank", "weights", "KV caches", "inputs", "temporaries", "total"].map(String::from)];
    rows.extend(plan.rank_bytes().into_iter().take(super::MAX_RANKS_SHOWN).enumerate().map(
        |(rank, bytes)| {
            let [weights, caches, inputs, temporaries] = bytes.map(|b| Bytes(b).to_string());
            [rank.to_string(), weights, caches, inputs, temporaries, Bytes(bytes.iter().sum()).to_string()]
        },
    ));
    out += &format_table(rows, [true; 6]);
    for call in &estimate.calls {
        out += &format!("\n{} of {} rows, time of a rank by class of op\n", call.name, call.rows);
        let rows = call.classes.iter().map(|c| [c.class.clone(), time(c.estimated_ns)]);
        out += &format_table(rows, [false, true]);
    }
    if let Some(out_folder) = &args.out {
        let dir = out_folder.display();
        out += &format!(
            "\n{dir} holds the plan; estimate it on another machine: tessera doctor {dir} --cluster NAME\n"
        );
    }
    out
}

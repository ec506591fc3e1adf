//! `tessera plan --cluster`, `--model` and `--recipe`: the mapping search, which estimates mappings
//! on a cluster.

use std::path::Path;

use tessera::checkpoint::{CheckpointFolder, Form};
use tessera::{DtypePolicy, Model, Plan, plan};
use tessera_base::Diagnostic;
use tessera_estimate::{
    DEFAULT_HOST, DEFAULT_RACK, EstimateReport, MachineModel, ModelSource, Pins, VideoQuery,
    explain_language, explain_video, load_machine, parse_video_pins, search_language, search_video,
};

use crate::codes::T0030;
use crate::flags::AppliesTo;
use crate::flags::mapping::{MappingArgs, MappingUse};
use crate::flags::search::{
    SearchArgs, command_line, no_model_error, parse_objective, several_models_error, usage_error,
};
use crate::output::{CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, write_stdout};
use crate::parse::{merge_pins, parse_milliseconds};
use crate::progress::SearchProgress;

/// Maximum number of devices for a video model: the search simulates a call of every mesh.
const MAX_VIDEO_DEVICES: u32 = 1024;

/// Searches the mappings of the chosen model on the cluster and prints the estimates.
pub fn run(
    args: &SearchArgs,
    dir: Option<&Path>,
    planning: &MappingArgs,
    folder: Option<&Path>,
    format: OutputFormat,
) -> CliResult {
    if folder.is_some() && args.why.is_some() {
        return Err(usage_error("--why prints an explanation and writes no folder", "leave out --out"));
    }
    if args.why.as_ref().is_some_and(|why| why.split([',', ' ']).all(str::is_empty)) {
        return Err(usage_error(
            "--why needs at least one knob",
            "give some knobs, for example --why tp=8,pp=1",
        ));
    }
    if dir.is_some() && (args.recipe.is_some() || args.zoo.is_some()) {
        return Err(several_models_error());
    }
    let default_cluster =
        if args.recipe.is_some() || args.zoo.is_some() { DEFAULT_RACK } else { DEFAULT_HOST };
    let machine = load_machine(
        args.cluster.as_deref().unwrap_or(default_cluster),
        args.profile.as_deref(),
        args.devices,
    )?;
    // A mesh on the command line acts as a pin.
    let pins = merge_pins(&[planning.mesh.clone(), args.pin.clone()]).map_err(CliError::usage)?;
    if let Some(dir) = dir.filter(|d| is_video_model(d, planning)) {
        return search_for_video(args, dir, planning, machine, &pins, folder, format);
    }
    let subject = match (&args.recipe, &args.zoo, dir) {
        (Some(recipe), None, None) => ModelSource::Recipe(recipe.clone()),
        (None, Some(name), None) => ModelSource::Zoo(name.clone()),
        (None, None, Some(dir)) if dir.is_dir() => ModelSource::Config(dir.join("config.json")),
        (None, None, Some(file)) => ModelSource::Config(file.to_path_buf()),
        (None, None, None) => return Err(no_model_error()),
        _ => return Err(several_models_error()),
    };
    reject_given("a language model", args.given_flags(&[AppliesTo::VideoModels]))?;
    reject_given("a language model", planning.given_flags(&MappingUse::OF_STREAMS))?;
    let query = args.build_query(subject, machine, &pins)?;
    if let Some(why) = &args.why {
        return print_explanation(explain_language(&query, &Pins::parse(why)?)?, format);
    }
    let sheet = search_language(&query)?;
    if let Some(folder) = folder {
        sheet.write(folder)?;
    }
    print_report(&sheet, folder, format, None)
}

fn search_for_video(
    args: &SearchArgs,
    dir: &Path,
    planning: &MappingArgs,
    machine: MachineModel,
    pins: &str,
    folder: Option<&Path>,
    format: OutputFormat,
) -> CliResult {
    reject_given("a video model", args.given_flags(&[AppliesTo::LanguageModels]))?;
    reject_given("a mapping search, whose cluster has hosts", planning.given_flags(&[MappingUse::Hosts]))?;
    let max_devices = Some(MAX_VIDEO_DEVICES);
    if args.devices > max_devices {
        return Err(usage_error(
            "a video model can be planned over at most 1,024 devices",
            "give fewer --devices",
        ));
    }
    let overrides = planning.parse_overrides().map_err(CliError::usage)?;
    let ns = |option, text: &Option<String>| {
        let ns = text.as_deref().map(|t| parse_milliseconds(option, t)).transpose();
        ns.map(|ns| ns.map(|ns| ns as f64)).map_err(CliError::usage)
    };
    let (decode_ns, encode_ns) = (ns("--decode-ms", &args.decode_ms)?, ns("--encode-ms", &args.encode_ms)?);
    let model = Model::open(dir, &overrides)?;
    let query = VideoQuery {
        model: &model,
        machine,
        devices: args.devices,
        objective: args.objective.as_deref().map(parse_objective).transpose()?,
        dtype: planning.dtype,
        pins: parse_video_pins(&planning.merge_video_pins(pins)?)?,
        decode_ns,
        encode_ns,
        whole_decode: args.whole_decode,
        command: command_line(),
    };
    let searching = SearchProgress::new();
    let on_progress = &mut |done, all| searching.set_position(done, all);
    if let Some(why) = &args.why {
        let explanation = explain_video(&query, &parse_video_pins(why)?, on_progress);
        searching.clear_bar();
        return print_explanation(explanation?, format);
    }
    let found = search_video(&query, on_progress);
    searching.clear_bar();
    let (sheet, mapping) = found?;
    let Some(mut mapping) = mapping else {
        if let Some(folder) = folder {
            sheet.write(folder)?;
        }
        return print_report(&sheet, folder, format, None);
    };
    planning.apply_options(&mut mapping, &[MappingUse::Fixed]);
    if let Some(folder) = folder {
        let plan: Plan = plan::plan_model(&model.video, &model.name, &dir.display().to_string(), &mapping)?;
        sheet.write_with_plan(&plan, folder)?;
    }
    print_report(&sheet, folder, format, Some((&query.machine.cluster.name, mapping.dtype)))
}

/// Returns whether a path is a video model: one with stream settings, or a published release of one.
fn is_video_model(path: &Path, planning: &MappingArgs) -> bool {
    if path.join("stream.toml").exists() || planning.preset.is_some() || planning.stream.is_some() {
        return true;
    }
    let form = CheckpointFolder::recognise(path).map(|checkpoint| checkpoint.form);
    matches!(form, Ok(Form::OriginalWan | Form::DiffusersPipeline | Form::DiffusersTransformer))
}

/// Rejects flags that would have no effect.
fn reject_given(subject: &str, given: Vec<String>) -> Result<(), CliError> {
    match given.first() {
        None => Ok(()),
        Some(flag) => Err(CliError::usage(
            Diagnostic::error(&T0030, format!("{flag} does not apply to {subject}"))
                .with_hint("leave it out"),
        )),
    }
}

fn print_explanation((legal, text): (bool, String), format: OutputFormat) -> CliResult {
    write_stdout(&match format {
        OutputFormat::Text => text,
        OutputFormat::Json => {
            format!("{}\n", serde_json::json!({"legal": legal, "message": text.lines().collect::<Vec<_>>()}))
        }
    })?;
    Ok(if legal { 0 } else { EXIT_DIAGNOSTICS })
}

/// Prints the report of a search, and returns the exit status: a failed gate is a failed check, although
/// the report and its folder are complete. `streamed` is the cluster and the dtype of a plan that can be
/// streamed.
fn print_report(
    report: &EstimateReport,
    folder: Option<&Path>,
    format: OutputFormat,
    streamed: Option<(&str, DtypePolicy)>,
) -> CliResult {
    let mut text = match format {
        OutputFormat::Json => format!("{}\n", report.json),
        OutputFormat::Text => report.to_text(),
    };
    if let (Some(folder), OutputFormat::Text) = (folder, format) {
        let dir = folder.display();
        text += &format!("\n  {dir}/report.html    this report, for a browser\n");
        if report.is_feasible() {
            text += &format!(
                "  {dir}/timeline.json  a timeline for ui.perfetto.dev\n  {dir}/ranks.txt      the device of each rank\n  {dir}/env.sh         suggested environment variables for the ranks\n"
            );
        }
        if let Some((cluster, dtype)) = streamed {
            // CPUs run bf16 and fp8 as well, but slower than f32: such a mapping is meant for GPUs.
            let device = if dtype == DtypePolicy::F32 { "" } else { " --device cuda" };
            text += &format!(
                "run it: tessera stream --plan {dir}{device}, or on a simulated cluster: tessera stream --plan {dir} --device sim --cluster {cluster}\n"
            );
        }
    }
    write_stdout(&text)?;
    Ok(if report.is_feasible() && !report.has_failed_gate() { 0 } else { EXIT_DIAGNOSTICS })
}

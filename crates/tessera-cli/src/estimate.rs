//! `tessera plan --cluster`, `--model`, `--recipe`: planning by estimate.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use tessera::search::{
    Asked, HOST, JobKind, Machine, RACK, Sheet, Subject, VideoAsked, job, machine, rows, rows_why,
    thresholds, video, video_pins, video_why,
};
use tessera::{Model, Overrides, Plan, plan};
use tessera_base::{Diagnostic, Nanoseconds};

use crate::options::{CacheName, Planning, T0031};
use crate::progress::Searching;
use crate::say::{DIAGNOSED, Outcome, Refusal, Shape, out};
use crate::values;

/// What to search for, and where.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Planning by estimate")]
pub struct Search {
    /// Machine: a name of the catalog (gb200-nvl72, hgx-h200, laptop…) or a file of `tessera measure`
    #[arg(long, value_name = "NAME|FILE")]
    pub cluster: Option<String>,

    /// Language model of the zoo, such as deepseek-v3, in place of a folder
    #[arg(long = "model", value_name = "NAME")]
    pub zoo: Option<String>,

    /// Recipe of the 72-GPU guide: A, B, C, sr-moe, long-context or throughput-training
    #[arg(long, value_name = "NAME")]
    pub recipe: Option<String>,

    /// Whose curves: a name (torch-2.11, tessera, megatron, ideal) or a file [default: the cluster's]
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,

    /// Devices to use; more than a rack has takes several racks [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub devices: Option<u32>,

    /// What the ranks do: train, prefill or decode [default: decode, or the recipe's]
    #[arg(long)]
    pub job: Option<JobName>,

    /// Sequences at once, over all replicas
    #[arg(long, value_name = "N", requires = "job", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub batch: Option<u64>,

    /// Tokens of a sequence, or already in its cache
    #[arg(long, value_name = "N", requires = "job", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub sequence: Option<u64>,

    /// What is wanted: throughput, latency, memory, or a deadline per step or chunk such as deadline=40ms
    #[arg(long, value_name = "WHAT")]
    pub objective: Option<String>,

    /// Knobs that are decided, such as tp=8,scheme=ulysses
    #[arg(long, value_name = "KNOB=VALUE,…")]
    pub pin: Option<String>,

    /// Answer for one mapping: why it is refused, or what it costs against the best
    #[arg(long, value_name = "KNOB=VALUE,…")]
    pub why: Option<String>,

    /// How tokens choose experts: balanced, random, power:1.2, w0 to w7 [default: random]
    #[arg(long, value_name = "NAME")]
    pub routing: Option<String>,

    /// Share of the experts on the host that a predictor names a layer ahead, 0 to 1 [default: 0]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    pub forecast: Option<f64>,

    /// Refuse pieces that differ by one unit
    #[arg(long)]
    pub strict: bool,

    /// File of limits for the gates
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,

    /// Decode of one chunk on one device, in milliseconds, where the model has no decoder of its own
    #[arg(long, value_name = "MS")]
    pub decode_ms: Option<String>,

    /// Encode of the anchor, likewise
    #[arg(long, value_name = "MS")]
    pub encode_ms: Option<String>,

    /// One rank decodes and encodes whole chunks; otherwise ranks may share them
    #[arg(long)]
    pub whole_decode: bool,
}

/// `--job`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum JobName {
    /// Steps of training
    Train,
    /// Prompts in, first token out
    Prefill,
    /// One token for each of many sequences
    Decode,
}

/// Most devices a video model is planned over: a call of every mesh of them is played.
const VIDEO_DEVICES_MAX: u32 = 1024;

impl Search {
    /// Whether any option asks for an estimate.
    pub fn wanted(&self) -> bool {
        self.cluster.is_some()
            || self.zoo.is_some()
            || self.recipe.is_some()
            || self.profile.is_some()
            || self.why.is_some()
            || self.pin.is_some()
            || self.devices.is_some()
            || self.objective.is_some()
            || self.for_video().iter().chain(&self.for_rows()).any(|(_, given)| *given)
    }

    /// Runs the search.
    pub fn run(
        &self,
        dir: Option<&Path>,
        planning: &Planning,
        folder: Option<&Path>,
        format: Shape,
    ) -> Outcome {
        if folder.is_some() && self.why.is_some() {
            return Err(usage("--why answers in words and leaves no folder", "leave --out out"));
        }
        if self.why.as_ref().is_some_and(|why| why.split([',', ' ']).all(str::is_empty)) {
            return Err(usage("--why names no mapping", "give some of its knobs, such as --why tp=8,pp=1"));
        }
        if dir.is_some() && (self.recipe.is_some() || self.zoo.is_some()) {
            return Err(one_model());
        }
        let usual = if self.recipe.is_some() || self.zoo.is_some() { RACK } else { HOST };
        let machine =
            machine(self.cluster.as_deref().unwrap_or(usual), self.profile.as_deref(), self.devices)?;
        // The mesh of the command line is a pin like any other.
        let pins = joined(&[planning.mesh.clone(), self.pin.clone()])?;
        if let Some(dir) = dir.filter(|d| d.join("stream.toml").exists()) {
            return self.video(dir, planning, machine, &pins, folder, format);
        }
        let subject = match (&self.recipe, &self.zoo, dir) {
            (Some(recipe), None, None) => Subject::Recipe(recipe.clone()),
            (None, Some(name), None) => Subject::Zoo(name.clone()),
            (None, None, Some(dir)) if dir.is_dir() => Subject::Config(dir.join("config.json")),
            (None, None, Some(file)) => Subject::Config(file.to_path_buf()),
            (None, None, None) => return Err(nothing_named()),
            _ => return Err(one_model()),
        };
        self.only("a language model", &self.for_video())?;
        self.only("a language model", &planning.for_streams())?;
        let asked = self.asked(subject, machine, &pins)?;
        if let Some(why) = &self.why {
            return answer(rows_why(&asked, &tessera::search::row_pins(why)?)?, format);
        }
        let sheet = rows(&asked)?;
        if let Some(folder) = folder {
            sheet.write(folder)?;
        }
        say(&sheet, folder, format, None)
    }

    /// The question about a model of the zoo or a recipe.
    pub fn named(&self) -> Result<Asked, Refusal> {
        let subject = match (&self.recipe, &self.zoo) {
            (Some(recipe), None) => Subject::Recipe(recipe.clone()),
            (None, Some(name)) => Subject::Zoo(name.clone()),
            (None, None) => return Err(nothing_named()),
            (Some(_), Some(_)) => return Err(one_model()),
        };
        let cluster = self.cluster.as_deref().unwrap_or(RACK);
        let machine = machine(cluster, self.profile.as_deref(), self.devices)?;
        self.asked(subject, machine, self.pin.as_deref().unwrap_or_default())
    }

    fn asked(&self, subject: Subject, machine: Machine, pins: &str) -> Result<Asked, Refusal> {
        let kind = self.job.map(JobKind::from);
        Ok(Asked {
            job: kind.map(|k| job(k, self.batch, self.sequence, &machine, self.devices)),
            subject,
            machine,
            devices: self.devices,
            objective: self.objective.as_deref().map(objective).transpose()?,
            pins: tessera::search::row_pins(pins)?,
            routing: self.routing.as_deref().map(routing).transpose()?,
            forecast: self.forecast,
            strict: self.strict,
            limits: thresholds(self.gates.as_deref())?,
            command: command(),
        })
    }

    /// Options that a video model alone has a use for, and whether they were given.
    fn for_video(&self) -> [(&'static str, bool); 3] {
        [
            ("--decode-ms", self.decode_ms.is_some()),
            ("--encode-ms", self.encode_ms.is_some()),
            ("--whole-decode", self.whole_decode),
        ]
    }

    /// Options that a language model alone has a use for.
    fn for_rows(&self) -> [(&'static str, bool); 5] {
        [
            ("--job", self.job.is_some()),
            ("--routing", self.routing.is_some()),
            ("--forecast", self.forecast.is_some()),
            ("--strict", self.strict),
            ("--gates", self.gates.is_some()),
        ]
    }

    /// Refuses options that would be passed over.
    fn only(&self, what: &str, others: &[(&'static str, bool)]) -> Result<(), Refusal> {
        match others.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((option, _)) => Err(Refusal::usage(vec![
                Diagnostic::error(&values::T0030, format!("{option} says nothing about {what}"))
                    .hint("leave it out"),
            ])),
        }
    }

    fn video(
        &self,
        dir: &Path,
        planning: &Planning,
        machine: Machine,
        pins: &str,
        folder: Option<&Path>,
        format: Shape,
    ) -> Outcome {
        self.only("a video model", &self.for_rows())?;
        let most = Some(VIDEO_DEVICES_MAX);
        if self.devices > most {
            return Err(usage("video models are planned over 1,024 devices at most", "give fewer --devices"));
        }
        let slip = |d: Diagnostic| Refusal::usage(vec![d]);
        let recompute = planning.cache.map(|c| c == CacheName::Recompute);
        let steps = planning.steps.as_deref().map(values::steps).transpose().map_err(slip)?;
        let ns = |option, text: &Option<String>| {
            let ns = text.as_deref().map(|t| values::milliseconds(option, t)).transpose();
            ns.map(|ns| ns.map(|ns| ns as f64)).map_err(slip)
        };
        let (decode_ns, encode_ns) =
            (ns("--decode-ms", &self.decode_ms)?, ns("--encode-ms", &self.encode_ms)?);
        let model = Model::open(dir, &Overrides { recompute, steps })?;
        let asked = VideoAsked {
            model: &model,
            machine,
            devices: self.devices,
            objective: self.objective.as_deref().map(objective).transpose()?,
            dtype: planning.dtype.map_or_else(Default::default, Into::into),
            pins: video_pins(&planning.pins(pins)?)?,
            decode_ns,
            encode_ns,
            whole_decode: self.whole_decode,
            command: command(),
        };
        let searching = Searching::new();
        let tell = &mut |done, all| searching.tell(done, all);
        if let Some(why) = &self.why {
            let said = video_why(&asked, &video_pins(why)?, tell);
            searching.end();
            return answer(said?, format);
        }
        let found = video(&asked, tell);
        searching.end();
        let (sheet, mapping) = found?;
        let Some(mut mapping) = mapping else {
            if let Some(folder) = folder {
                sheet.write(folder)?;
            }
            return say(&sheet, folder, format, None);
        };
        planning.shape(&mut mapping);
        if let Some(folder) = folder {
            let plan: Plan = plan::make(&model.video, &model.name, &dir.display().to_string(), &mapping)?;
            sheet.write_with(&plan, folder)?;
        }
        say(&sheet, folder, format, Some(&asked.machine.cluster.name))
    }
}

impl From<JobName> for JobKind {
    fn from(name: JobName) -> JobKind {
        match name {
            JobName::Train => JobKind::Train,
            JobName::Prefill => JobKind::Prefill,
            JobName::Decode => JobKind::Decode,
        }
    }
}

fn command() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

fn nothing_named() -> Refusal {
    let hint = "name one: --recipe sr-moe, --model deepseek-v3, or the folder of a model such as models/demo";
    Refusal::usage(vec![Diagnostic::error(&T0031, "no model named").hint(hint)])
}

fn one_model() -> Refusal {
    let says = "a folder, --model and --recipe each name a model; give one of them";
    Refusal::usage(vec![Diagnostic::error(&values::T0030, says)])
}

fn answer((legal, text): (bool, String), format: Shape) -> Outcome {
    out(&match format {
        Shape::Text => text,
        Shape::Json => {
            format!("{}\n", serde_json::json!({"legal": legal, "says": text.lines().collect::<Vec<_>>()}))
        }
    })?;
    Ok(if legal { 0 } else { DIAGNOSED })
}

fn usage(says: &str, hint: &str) -> Refusal {
    Refusal::usage(vec![Diagnostic::error(&values::T0030, says.to_string()).hint(hint)])
}

/// Pins from several options as one list; a knob that two of them set to different values is refused.
pub fn joined(parts: &[Option<String>]) -> Result<String, Refusal> {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for item in parts.iter().flatten().flat_map(|p| p.split(',')).map(str::trim).filter(|i| !i.is_empty()) {
        let (knob, value) = item.split_once('=').unwrap_or((item, ""));
        match seen.iter().find(|(k, _)| *k == knob) {
            Some((_, other)) if *other != value => {
                let says = format!("{knob} is given as {other} and as {value}");
                return Err(usage(&says, "say it once"));
            }
            Some(_) => {}
            None => seen.push((knob, value)),
        }
    }
    Ok(seen.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","))
}

/// `on`: the cluster of a plan that a stream runs.
fn say(sheet: &Sheet, folder: Option<&Path>, format: Shape, on: Option<&str>) -> Outcome {
    let mut text = match format {
        Shape::Json => format!("{}\n", sheet.json),
        Shape::Text => sheet.text(),
    };
    if let (Some(folder), Shape::Text) = (folder, format) {
        let at = folder.display();
        text += &format!("\n  {at}/report.html    the same, for a browser\n");
        if sheet.fits() {
            text += &format!(
                "  {at}/timeline.json  for ui.perfetto.dev\n  {at}/ranks.txt      which rank sits on which device\n  {at}/env.sh         hints for the ranks' environment\n"
            );
        }
        if let Some(cluster) = on {
            text += &format!(
                "run it: tessera stream --plan {at}, or on a modelled machine: tessera stream --plan {at} --device sim --cluster {cluster}\n"
            );
        }
    }
    out(&text)?;
    Ok(if sheet.fits() { 0 } else { DIAGNOSED })
}

fn objective(word: &str) -> Result<tessera::search::Objective, Refusal> {
    use tessera::search::Objective;
    let deadline =
        word.strip_prefix("deadline=").and_then(|t| t.strip_suffix("ms")).and_then(|t| t.parse::<f64>().ok());
    match (word, deadline) {
        ("throughput", _) => Ok(Objective::Throughput),
        ("latency", _) => Ok(Objective::Latency),
        ("memory", _) => Ok(Objective::Memory),
        (_, Some(ms)) if ms.is_finite() && ms > 0.0 => {
            Ok(Objective::Deadline(Nanoseconds((ms * 1e6) as u64)))
        }
        _ => Err(Refusal::usage(vec![
            Diagnostic::error(&values::T0030, format!("--objective {word} is not understood"))
                .hint("throughput, latency, memory, or a deadline such as deadline=40ms"),
        ])),
    }
}

fn routing(word: &str) -> Result<tessera::search::Routing, Refusal> {
    tessera::search::Routing::named(word).ok_or_else(|| {
        Refusal::usage(vec![
            Diagnostic::error(&values::T0030, format!("--routing {word} is not understood"))
                .hint("balanced, random, power:1.2, or w0 to w7"),
        ])
    })
}

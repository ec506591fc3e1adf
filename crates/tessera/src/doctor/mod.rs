//! A doctor for plans and runs: what this machine is, which of four ways to fail a plan or a run shows, and what each
//! remedy would bring by a new estimate. What was not recorded is said, never filled in.

mod asked;
mod estimates;
mod runs;

pub use estimates::{kept, rows};
pub use runs::{Patient, open, video};

pub(crate) use asked::{asked_json, machine_json, machine_of};

use std::path::Path;

use tessera_base::{Code, Diagnostic};
use tessera_cost::Profile;
use tessera_cpu::kernels::vector_unit;
use tessera_mesh::clusters;
use tessera_models::zoo;
use tessera_plan::search::recipe;
use tessera_plan::search::remedy::Mode;

use crate::cuda::verdict;
use crate::gpus::Gpus;
use crate::measure::Host;
use crate::record::RECORD;

/// A folder that no question can be read from.
pub static T0051: Code = Code {
    id: "T0051",
    title: "folder holds nothing to examine",
    page: "The doctor looks at three kinds of folders: one of `tessera stream --out` with record.jsonl and the plan that ran, \
a sealed plan with seal.json, and one of `tessera plan --out` whose estimate.json holds what was asked. This one is none of \
them, or what it holds cannot be read. An estimate.json of an older build lacks what was asked: plan again.",
};
/// A plan that fails for other reasons than memory.
pub static T0052: Code = Code {
    id: "T0052",
    title: "plan cannot be estimated",
    page: "The doctor estimates the plan as it is before it changes anything. None of the arrangements that the question \
leaves can run, and not because of memory alone: axes, heads, experts or batch do not fit. `tessera plan --why` gives the \
arithmetic and the legal neighbours; a plan that exists again can be examined.",
};
/// Folders that do not belong together.
pub static T0053: Code = Code {
    id: "T0053",
    title: "these cannot be examined together",
    page: "Several runs are compared with each other, so all of them are folders of `tessera stream --out`. A plan or an \
estimate is examined by itself. --overflows and the other signs say what a run elsewhere showed, and go with a recipe, a \
model or an estimate.",
};

/// What kind of folder it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A run.
    Run,
    /// A sealed plan.
    Plan,
    /// An estimate from op rows.
    Estimate,
}

impl Kind {
    /// Looks at a folder.
    ///
    /// # Errors
    /// T0051.
    pub fn of(folder: &Path) -> Result<Kind, Diagnostic> {
        let has = |name: &str| folder.join(name).is_file();
        if has(RECORD) {
            Ok(Kind::Run)
        } else if has("seal.json") {
            Ok(Kind::Plan)
        } else if has("estimate.json") {
            Ok(Kind::Estimate)
        } else {
            Err(Diagnostic::error(&T0051, format!("{} holds nothing to examine", folder.display()))
                .at(folder.display().to_string(), format!("no {RECORD}, no seal.json, no estimate.json"))
                .hint("name what `tessera stream --out` or `tessera plan --out` made"))
        }
    }
}

/// Signs that a run elsewhere showed; absent is not known.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Shown {
    /// Bandwidth of the exchange of experts in bursts, as a share of what the links carry at best.
    pub a2a_rate: Option<f64>,
    /// Most bytes held on one device.
    pub peak_bytes: Option<f64>,
    /// Infinities or NaN while fp8 was in use.
    pub overflows: Option<u64>,
    /// Reruns whose digest differs from the first one's.
    pub drifted: Option<u64>,
}

impl Shown {
    /// Whether any is given.
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Shown::default()
    }
}

/// A way to fail that was recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Code with a page about it.
    pub code: &'static Code,
    /// The sign, with its numbers.
    pub sign: String,
    /// The plan as it is, in numbers.
    pub before: String,
    /// What may be done.
    pub remedies: Vec<Action>,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// What.
    pub action: String,
    /// What that is here.
    pub how: String,
    /// The numbers it would give; none where it cannot be or changes none.
    pub after: Option<String>,
}

/// What an examination came to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checkup {
    /// What was examined.
    pub title: String,
    /// What was seen, by name.
    pub seen: Vec<(String, String)>,
    /// Ways to fail that were recognised.
    pub found: Vec<Found>,
    /// Signs that nothing tells.
    pub unknown: Vec<String>,
}

/// The four ways to fail, in the order in which they are listed.
pub const MODES: [Mode; 4] = [Mode::Congestion, Mode::Memory, Mode::Fp8, Mode::Drift];

/// What this machine has and what this build knows, by name.
#[must_use]
pub fn machine_at_hand() -> Vec<(String, String)> {
    let host = Host::look();
    let list = |names: Vec<&str>| names.join(", ");
    let memory = host
        .memory_bytes
        .map_or("the system does not say".to_string(), |b| format!("{:.1} GB", b as f64 / 1e9));
    let fact = |name: &str, text: String| (name.to_string(), text);
    let mut out = vec![
        fact("processor", host.cpu),
        fact("cores", host.cores.to_string()),
        fact("memory", memory),
        fact("kernels", format!("{}, the same bits on every vector unit", vector_unit())),
    ];
    let gpus = Gpus::look();
    out.extend(gpus.facts());
    out.push(fact("--device cuda", verdict(&gpus)));
    let (version, arch, os) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS);
    out.extend([
        fact("tessera", format!("{version} for {arch} on {os}")),
        fact("clusters", list(clusters::names().collect())),
        fact("profiles", list(Profile::names().collect())),
        fact("models", list(zoo::names().into_iter().collect())),
        fact("recipes", list(recipe::names())),
    ]);
    out
}

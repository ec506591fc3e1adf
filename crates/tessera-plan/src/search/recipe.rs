//! Named recipes: the mappings that the mapping guide for 72 devices prescribes, completed where it
//! leaves choices open, and checked against a given cluster.
//!
//! The guide's axes are those of one mesh: tp · ep · pp · dp ranks, with each expert's inner width
//! sharded over tp. Three of its six recipes do not fit as printed. Shards that differ by one unit
//! are legal here: the slowest rank determines the time, and the check reports the loss. `strict`
//! rejects them and lists the neighbours that divide evenly.

use tessera_base::{Code, Diagnostic, Diagnostics, closest_name};
use tessera_cost::MachineModel;
use tessera_cost::moe::Routing;
use tessera_ir::analytic_model::{AnalyticModel, LayerOpKind};
use tessera_mesh::{Cluster, Mesh};

use super::placement::check_placement;
use super::{Job, Objective, Pins, SearchQuery, SearchSpace};
pub use crate::codes::T1229;
use crate::codes::{T1220, T1221, T1222};

/// A model, a job and pins under one name, from the mapping guide for 72 devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// Name that `tessera plan --recipe` takes, such as `long-context`, in upper or lower case.
    pub name: &'static str,
    /// Heading of the recipe in reports.
    pub title: &'static str,
    /// Name of the model in the zoo.
    pub model: &'static str,
    /// Name of the cluster in the catalog.
    pub cluster: &'static str,
    /// The axes tp, ep, pp, dp as the guide prints them.
    pub axes: [u32; 4],
    /// Other knobs that the guide fixes, in the format of [`Pins::parse`].
    pub knobs: &'static str,
    /// Training, prefill or decode, with the batch and sequence sizes to plan for.
    pub job: Job,
    /// The quantity that a search for this recipe optimises.
    pub objective: Objective,
    /// The mesh and other settings that the guide prescribes, as reports quote them.
    pub guide_text: &'static str,
    /// The choices that the guide leaves open and this planner makes.
    pub our_choices: &'static str,
}

macro_rules! fp8 {
    ($rest:literal) => {
        concat!("precision=fp8,wire=fp8,capacity_pct=125", $rest)
    };
}

/// What most recipes share: SR-MoE on one rack, for throughput, with the numerics of the guide's own
/// code (e4m3 with f32 accumulation, fp8 dispatch, a capacity factor of 1.25).
const COMMON: Recipe = Recipe {
    name: "",
    title: "",
    model: "sr-moe",
    cluster: "gb200-nvl72",
    axes: [8, 9, 1, 1],
    knobs: fp8!(""),
    job: Job::Prefill { batch: 144, sequence: 4096 },
    objective: Objective::Throughput,
    guide_text: "",
    our_choices: "",
};

const RECIPES: &[Recipe] = &[
    Recipe {
        name: "A",
        title: "Recipe A, attention-heavy",
        model: "sr-moe-wide",
        axes: [12, 6, 1, 1],
        job: Job::Train { batch: 96, sequence: 8192 },
        guide_text: "tp=12, ep=6, pp=1, dp=1; its code example has 128 heads of size 128, 4,096 experts, two per token, a capacity \
factor of 1.25, e4m3 with f32 accumulation and fp8 dispatch.",
        our_choices: "96 sequences of 8,192 tokens per step; the search chooses schedule, recomputation and optimizer.",
        ..COMMON
    },
    Recipe {
        name: "B",
        title: "Recipe B, expert-heavy",
        guide_text: "tp=8, ep=9, pp=1, dp=1.",
        our_choices: "144 prompts of 4,096 tokens; numerics as in the guide's code example.",
        ..COMMON
    },
    Recipe {
        name: "C",
        title: "Recipe C, pipeline-friendly",
        axes: [8, 6, 3, 1],
        job: Job::Train { batch: 144, sequence: 4096 },
        guide_text: "tp=8, ep=6, pp=3, dp=1, which are 144 ranks; two or three stages and micro-batches to fill bubbles.",
        our_choices: "144 sequences of 4,096 tokens per step; the search chooses the micro-batch size.",
        ..COMMON
    },
    Recipe {
        name: "sr-moe",
        title: "SR-MoE, balanced",
        job: Job::Decode { batch: 1152, context: 4096 },
        guide_text: "tp=8, ep=9, pp=1, dp=1; 4,096 experts, 128 heads, hidden size 8,192 and a capacity factor of 1.25. The head \
size is 8,192 / 128 = 64; with the 128 of the guide's code example attention is twice as wide as the hidden size (model \
sr-moe-wide).",
        our_choices: "1,152 sequences with 4,096 cached tokens each.",
        ..COMMON
    },
    Recipe {
        name: "long-context",
        title: "Long context, much cache",
        axes: [12, 6, 1, 1],
        knobs: fp8!(",scheme=striped,ring=3,cache_at=window,window=32768"),
        job: Job::Prefill { batch: 12, sequence: 262_144 },
        guide_text: "tp=12, ep=6, pp=1, dp=1; contexts split over subgroups of tp; an aggressive window over old keys and \
values.",
        our_choices: "12 prompts of 262,144 tokens; a window of 32,768 tokens; rings of 3, so that heads are sharded over 12 / 3 = 4 \
ranks, which divides 128; striped attention, so that a causal mask is balanced.",
        ..COMMON
    },
    Recipe {
        name: "throughput-training",
        title: "Throughput training",
        axes: [8, 6, 3, 1],
        knobs: fp8!(",micro_batch=1,experts_at=hbm"),
        job: Job::Train { batch: 144, sequence: 4096 },
        guide_text: "tp=8, ep=6, pp=3, dp=1, which are 144 ranks; small micro-batches to fill bubbles; experts pinned.",
        our_choices: "144 sequences of 4,096 tokens per step in micro-batches of one; experts stay in device memory.",
        ..COMMON
    },
];

/// Returns the names of all recipes, in the guide's order.
#[must_use]
pub fn recipe_names() -> Vec<&'static str> {
    RECIPES.iter().map(|r| r.name).collect()
}

/// Returns the recipe of that name, ignoring case.
#[must_use]
pub fn find_recipe(name: &str) -> Option<Recipe> {
    RECIPES.iter().copied().find(|r| r.name.eq_ignore_ascii_case(name))
}

/// Returns the recipe of that name, or a diagnostic.
///
/// # Errors
/// T1229 with the known names.
pub fn require_recipe(name: &str) -> Result<Recipe, Box<Diagnostic>> {
    find_recipe(name).ok_or_else(|| {
        let d = Diagnostic::error(&T1229, format!("unknown recipe `{name}`"))
            .with_label("recipe", format!("recipes are {}", recipe_names().join(", ")));
        Box::new(match closest_name(name, recipe_names()) {
            Some(n) => d.with_hint(format!("did you mean `{n}`?")),
            None => d,
        })
    })
}

impl Recipe {
    /// Returns the axes and knobs as pins.
    #[must_use]
    pub fn to_pins(&self) -> Pins {
        let [tp, ep, pp, dp] = self.axes.map(Some);
        let knobs = Pins::parse(self.knobs).unwrap_or_default();
        Pins { tp, ep, pp, dp, ..knobs }
    }

    /// Returns the number of ranks, to which the axes multiply.
    #[must_use]
    pub fn rank_count(&self) -> u64 {
        self.axes.iter().map(|a| u64::from(*a)).product()
    }

    /// Returns the search query of the recipe on a machine, under the guide's rule that model
    /// replicas stay in one rack. Devices beyond the recipe's ranks stay idle.
    #[must_use]
    pub fn to_query(
        &self,
        work: AnalyticModel,
        machine: MachineModel,
        routing: Routing,
        strict: bool,
    ) -> SearchQuery {
        let mut space = SearchSpace::for_job(&work, self.job, &machine.cluster);
        space.devices = u32::try_from(self.rank_count()).unwrap_or(u32::MAX).min(space.devices);
        space.even_only = strict;
        space.replica_in_rack = true;
        SearchQuery {
            work,
            job: self.job,
            objective: self.objective,
            machine,
            routing,
            pins: self.to_pins(),
            space,
        }
    }

    /// Checks the recipe for a model on a cluster: the number of ranks, uneven heads and
    /// experts, and groups that leave a domain. An error rejects the recipe; a warning states a
    /// cost.
    #[must_use]
    pub fn check(
        &self,
        work: &AnalyticModel,
        cluster: &Cluster,
        devices: Option<u32>,
        strict: bool,
    ) -> Diagnostics {
        let mut ds = Vec::new();
        let recipe_label = format!("recipe {}", self.name);
        let experts = work.routed_experts().map_or(0, |(e, _)| e);
        let devices = devices.unwrap_or(u32::MAX).min(cluster.device_count());
        if self.rank_count() > u64::from(devices) {
            let [tp, ep, pp, dp] = self.axes;
            let racks = self.rank_count().div_ceil(u64::from(cluster.devices_per_rack().max(1)));
            ds.push(
                Diagnostic::error(
                    &T1220,
                    format!(
                        "tp·ep·pp·dp = {tp}·{ep}·{pp}·{dp} = {} ranks, {devices} devices",
                        self.rank_count()
                    ),
                )
                .with_label(recipe_label.clone(), format!("{} ranks", self.rank_count()))
                .with_label(format!("cluster {}", cluster.name), format!("{devices} devices"))
                .with_note(format!(
                    "{racks} {} room for the recipe as printed",
                    if racks == 1 { "rack has" } else { "racks have" }
                ))
                .with_hint(describe_meshes(
                    &self.axes,
                    &neighbour_meshes(devices, self.axes, work.heads, experts, strict),
                )),
            );
        } else if let Ok(mesh) = Mesh::new(self.axes) {
            let devices_in_order: Vec<u32> = (0..mesh.world_size()).collect();
            ds.extend(check_placement(&mesh, &devices_in_order, cluster, false));
        }
        let world = u32::try_from(self.rank_count()).unwrap_or(u32::MAX).min(devices);
        let even_meshes =
            || describe_meshes(&self.axes, &neighbour_meshes(world, self.axes, work.heads, experts, true));
        ds.extend(self.check_heads(work, strict, &recipe_label).map(|d| d.with_hint(even_meshes())));
        ds.extend(self.check_experts(work, strict, &recipe_label).map(|d| d.with_hint(even_meshes())));
        ds
    }

    fn check_heads(&self, work: &AnalyticModel, strict: bool, what: &str) -> Option<Diagnostic> {
        let ring = self.to_pins().ring.unwrap_or(1).max(1);
        let tp = self.axes[0] / ring;
        let inner = work.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match (r.name, r.kind) {
            ("mlp.down" | "shared.down", LayerOpKind::Matmul { k, .. }) => Some(k),
            _ => None,
        });
        let columns = work.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match r.kind {
            LayerOpKind::Attention { v, .. } => Some(v),
            _ => None,
        });
        let d = check_even(&T1221, work.heads, tp, "tp", "head", strict)?;
        let (most, v) = (work.heads.div_ceil(u64::from(tp)), columns.unwrap_or(1));
        let mut note = format!("columns follow the heads: {} and {} per rank", most * v, (most - 1) * v);
        if let Some(inner) = inner.filter(|n| !n.is_multiple_of(u64::from(tp))) {
            let up = inner.div_ceil(u64::from(tp));
            note += &format!("; the inner width {inner} is sharded into {up} and {}", up - 1);
        }
        Some(
            d.with_label(what, format!("tp={tp}"))
                .with_label(format!("model {}", work.name), format!("{} heads", work.heads))
                .with_note(note),
        )
    }

    fn check_experts(&self, work: &AnalyticModel, strict: bool, what: &str) -> Option<Diagnostic> {
        let (experts, _) = work.routed_experts()?;
        let ep = self.axes[1];
        let d = check_even(&T1222, experts, ep, "ep", "expert", strict)?;
        Some(
            d.with_label(what, format!("ep={ep}"))
                .with_label(format!("model {}", work.name), format!("{experts} experts")),
        )
    }
}

/// Reports `units` that do not divide over `parts`: a warning with the loss, or an error if
/// `strict` is set or some rank would have none.
fn check_even(
    code: &'static Code,
    units: u64,
    parts: u32,
    axis: &str,
    unit: &str,
    strict: bool,
) -> Option<Diagnostic> {
    let n = u64::from(parts);
    if units == 0 || units.is_multiple_of(n) {
        return None;
    }
    let each = units as f64 / n as f64;
    if units < n {
        let message = format!("{units} {unit}s over {axis}={parts}: {} ranks would have none", n - units);
        return Some(Diagnostic::error(code, message));
    }
    let (most, full) = (units.div_ceil(n), units % n);
    let loss = 100.0 * (most * n) as f64 / units as f64 - 100.0;
    let ranks_have =
        |ranks: u64| if ranks == 1 { "1 rank has".to_string() } else { format!("{ranks} ranks have") };
    let message = format!(
        "{units} {unit}s over {axis}={parts} are {each:.2} each: {} {most}, {} {}, and the slowest takes {loss:.2} % \
longer than with even shards",
        ranks_have(full),
        ranks_have(n - full),
        most - 1
    );
    Some(if strict { Diagnostic::error(code, message) } else { Diagnostic::warning(code, message) })
}

/// Returns meshes of exactly `world` ranks near `axes` (tp, ep, pp, dp) in which every rank has a
/// head and an expert; with `strict`, every rank has equally many. Meshes that keep the most axes
/// come first, then those whose other axes change least.
#[must_use]
pub fn neighbour_meshes(world: u32, axes: [u32; 4], heads: u64, experts: u64, strict: bool) -> Vec<[u32; 4]> {
    let is_allowed = |units: u64, parts: u32| {
        let parts = u64::from(parts);
        if units == 0 { parts == 1 } else { parts <= units && (!strict || units.is_multiple_of(parts)) }
    };
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut found = Vec::new();
    for tp in divisors(world).filter(|tp| heads == 0 || is_allowed(heads, *tp)) {
        for ep in divisors(world / tp).filter(|ep| is_allowed(experts, *ep)) {
            for pp in divisors(world / tp / ep) {
                let mesh = [tp, ep, pp, world / tp / ep / pp];
                if kept_axes(&axes, &mesh) > 0 && mesh != axes {
                    found.push(mesh);
                }
            }
        }
    }
    // Ratios compare like differences of logarithms, and multiplying them is exact.
    let distance = |mesh: &[u32; 4]| -> f64 {
        axes.iter().zip(mesh).map(|(a, b)| f64::from(*a.max(b)) / f64::from(*a.min(b).max(&1))).product()
    };
    found.sort_by(|a, b| {
        kept_axes(&axes, b).cmp(&kept_axes(&axes, a)).then(distance(a).total_cmp(&distance(b))).then(b.cmp(a))
    });
    found
}

const AXES: [&str; 4] = ["tp", "ep", "pp", "dp"];

fn kept_axes(axes: &[u32; 4], mesh: &[u32; 4]) -> usize {
    axes.iter().zip(mesh).filter(|(a, b)| a == b).count()
}

/// Formats neighbours grouped by the axes that they keep, at most three per group and five groups.
fn describe_meshes(axes: &[u32; 4], meshes: &[[u32; 4]]) -> String {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for mesh in meshes {
        let keeps: Vec<&str> = (0..4).filter(|i| axes[*i] == mesh[*i]).map(|i| AXES[i]).collect();
        let keeps = keeps.join(", ");
        let [tp, ep, pp, dp] = mesh;
        let mesh = format!("({tp},{ep},{pp},{dp})");
        match groups.iter_mut().find(|g| g.0 == keeps) {
            Some(g) => g.1.push(mesh),
            None => groups.push((keeps, vec![mesh])),
        }
    }
    if groups.is_empty() {
        return "no mesh of that size keeps any of these axes".to_string();
    }
    let each =
        groups.iter().take(5).map(|(keeps, m)| format!("{} keeps {keeps}", m[..m.len().min(3)].join(" ")));
    format!("legal (tp,ep,pp,dp): {}", each.collect::<Vec<_>>().join("; "))
}

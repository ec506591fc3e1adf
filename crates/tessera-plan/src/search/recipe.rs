//! Recipes by name: what the mapping guide for 72 devices prescribes, completed where it leaves something open, and what
//! its arithmetic comes to on a given machine.
//!
//! The guide's axes are those of one mesh: tp · ep · pp · dp ranks, each expert's inner width cut over tp. Three of its
//! six recipes do not fit as printed. Pieces that differ by one unit are legal here: the slowest rank counts, and
//! the loss is named. `strict` refuses them, with the neighbours that divide.

use tessera_base::{Code, Diagnostic, Diagnostics, nearest};
use tessera_cost::Machine;
use tessera_cost::moe::Routing;
use tessera_ir::work::{RowOp, Work};
use tessera_mesh::{Cluster, Mesh};

use super::placement::placement;
use super::{Job, Objective, Pins, Question, Space};

/// The axes do not make the ranks.
pub static T1220: Code = Code {
    id: "T1220",
    title: "recipe's axes multiply to more ranks than there are devices",
    page: "Every rank needs a device, and the axes of one mesh multiply: tp=8, ep=6, pp=3, dp=1 are 144 ranks, not 72. \
The mapping guide prints exactly that as Recipe C and as its recipe for training; on one rack of 72 it cannot be built, \
on two racks it can.\n\n\
The hint lists meshes of the right size, those that keep most axes first. Which of them is best for a model is what \
`tessera plan` answers when the axes are left to it.",
};

/// Heads do not divide.
pub static T1221: Code = Code {
    id: "T1221",
    title: "heads do not divide over tp",
    page: "128 heads over tp=12 are 10.67 each. A head is never cut, so eight ranks get 11 and four get 10; every \
collective then waits for those with 11, and attention takes 11 · 12 / 128 = 1.031 times as long as an even cut would. \
Columns of the products around attention follow the heads; the feed-forward's inner width is cut by itself.\n\n\
That is legal: uneven pieces differ by one unit, and the estimate counts the slowest rank. The memory of the ranks \
with one head more is larger too. Ask for `strict` to have such meshes refused, with the nearest that divide.",
};

/// Experts do not divide.
pub static T1222: Code = Code {
    id: "T1222",
    title: "experts do not divide over ep",
    page: "4,096 experts over ep=9 are 455.11 each: one rank holds 456, the others 455. Whole experts are dealt, so \
this costs memory for one expert and, under an even routing, 456 · 9 / 4096 = 1.002 times the time. What routing does to \
the slowest rank is far more.\n\n\
That is legal. Ask for `strict` to have it refused, with the nearest ep that divide.",
};

/// No such recipe.
pub static T1229: Code = Code {
    id: "T1229",
    title: "no recipe of that name",
    page: "Recipes are the six mappings that the guide for 72 devices names. The message lists them. A recipe is a \
model, a job and some pins; `tessera plan --model NAME --mesh tp=8,ep=9` is the way to anything else.",
};

/// One mapping of the guide.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// Name to ask for it by.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// Model of the zoo.
    pub model: &'static str,
    /// Cluster of the catalog.
    pub cluster: &'static str,
    /// tp, ep, pp, dp as the guide prints them.
    pub axes: [u32; 4],
    /// Other knobs that the guide decides, as [`Pins::parse`] reads them.
    pub knobs: &'static str,
    /// What the ranks are to do.
    pub job: Job,
    /// What is wanted.
    pub objective: Objective,
    /// What the guide says.
    pub says: &'static str,
    /// What it leaves open and we chose.
    pub ours: &'static str,
}

/// Numerics of the guide's own code: e4m3 with f32 sums, fp8 on the wire, a capacity of 1.25.
macro_rules! fp8 {
    ($rest:literal) => {
        concat!("precision=fp8,wire=fp8,capacity_pct=125", $rest)
    };
}

const RECIPES: &[Recipe] = &[
    Recipe {
        name: "A",
        title: "Recipe A, attention-heavy",
        model: "sr-moe-wide",
        cluster: "gb200-nvl72",
        axes: [12, 6, 1, 1],
        knobs: fp8!(""),
        job: Job::Train { batch: 96, sequence: 8192 },
        objective: Objective::Throughput,
        says: "tp=12, ep=6, pp=1, dp=1; its code example has 128 heads of 128, 4,096 experts, two per token, a capacity \
factor of 1.25, e4m3 with f32 sums and fp8 on the wire.",
        ours: "96 sequences of 8,192 tokens a step; schedule, recomputation and optimizer are left to the search.",
    },
    Recipe {
        name: "B",
        title: "Recipe B, expert-heavy",
        model: "sr-moe",
        cluster: "gb200-nvl72",
        axes: [8, 9, 1, 1],
        knobs: fp8!(""),
        job: Job::Prefill { batch: 144, sequence: 4096 },
        objective: Objective::Throughput,
        says: "tp=8, ep=9, pp=1, dp=1.",
        ours: "144 prompts of 4,096 tokens; the numerics of the guide's code example.",
    },
    Recipe {
        name: "C",
        title: "Recipe C, pipeline-friendly",
        model: "sr-moe",
        cluster: "gb200-nvl72",
        axes: [8, 6, 3, 1],
        knobs: fp8!(""),
        job: Job::Train { batch: 144, sequence: 4096 },
        objective: Objective::Throughput,
        says: "tp=8, ep=6, pp=3, dp=1, which are 144 ranks; two or three stages and micro-batches to fill bubbles.",
        ours: "144 sequences of 4,096 tokens a step; the size of a micro-batch is left to the search.",
    },
    Recipe {
        name: "sr-moe",
        title: "SR-MoE, balanced",
        model: "sr-moe",
        cluster: "gb200-nvl72",
        axes: [8, 9, 1, 1],
        knobs: fp8!(""),
        job: Job::Decode { batch: 1152, context: 4096 },
        objective: Objective::Throughput,
        says: "tp=8, ep=9, pp=1, dp=1; 4,096 experts, 128 heads, a width of 8,192 and a capacity factor of 1.25. Heads of \
8,192 / 128 = 64 numbers; with the 128 of the guide's code example attention is twice as wide as the stream (model \
sr-moe-wide).",
        ours: "1,152 sequences with 4,096 tokens each in the cache.",
    },
    Recipe {
        name: "long-context",
        title: "Long context, much cache",
        model: "sr-moe",
        cluster: "gb200-nvl72",
        axes: [12, 6, 1, 1],
        knobs: fp8!(",scheme=striped,ring=3,cache_at=window,window=32768"),
        job: Job::Prefill { batch: 12, sequence: 262_144 },
        objective: Objective::Throughput,
        says: "tp=12, ep=6, pp=1, dp=1; contexts split over sub-groups of tp; an aggressive window over old keys and \
values.",
        ours: "12 prompts of 262,144 tokens; a window of 32,768 of them; rings of 3, so that heads are cut over 12 / 3 = 4 ranks, which divides 128; \
tokens dealt out in turn (striped), so that a causal mask is even.",
    },
    Recipe {
        name: "throughput-training",
        title: "Throughput training",
        model: "sr-moe",
        cluster: "gb200-nvl72",
        axes: [8, 6, 3, 1],
        knobs: fp8!(",micro_batch=1,experts_at=hbm"),
        job: Job::Train { batch: 144, sequence: 4096 },
        objective: Objective::Throughput,
        says: "tp=8, ep=6, pp=3, dp=1, which are 144 ranks; small micro-batches to fill bubbles; experts pinned.",
        ours: "144 sequences of 4,096 tokens a step in micro-batches of one; experts stay in device memory.",
    },
];

/// Names of all recipes, in the guide's order.
#[must_use]
pub fn names() -> Vec<&'static str> {
    RECIPES.iter().map(|r| r.name).collect()
}

/// The recipe of that name, upper or lower case.
#[must_use]
pub fn named(name: &str) -> Option<Recipe> {
    RECIPES.iter().copied().find(|r| r.name.eq_ignore_ascii_case(name))
}

/// The recipe of that name, or what to say where there is none.
///
/// # Errors
/// T1229 with the names.
pub fn find(name: &str) -> Result<Recipe, Box<Diagnostic>> {
    named(name).ok_or_else(|| {
        let d = Diagnostic::error(&T1229, format!("no recipe is named `{name}`"))
            .at("recipe", format!("recipes are {}", names().join(", ")));
        Box::new(match nearest(name, names()) {
            Some(n) => d.hint(format!("did you mean `{n}`?")),
            None => d,
        })
    })
}

impl Recipe {
    /// The same over another mesh.
    #[must_use]
    pub fn with_axes(self, axes: [u32; 4]) -> Recipe {
        Recipe { axes, ..self }
    }

    /// Its axes and knobs as pins.
    #[must_use]
    pub fn pins(&self) -> Pins {
        let [tp, ep, pp, dp] = self.axes.map(Some);
        let knobs = Pins::parse(self.knobs).unwrap_or_default();
        Pins { tp, ep, pp, dp, ..knobs }
    }

    /// Ranks that its axes multiply to.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        self.axes.iter().map(|a| u64::from(*a)).product()
    }

    /// The question it puts to a machine, with the rules of the guide: copies of the model stay in a rack. Devices beyond
    /// its ranks stay idle.
    #[must_use]
    pub fn question(&self, work: Work, machine: Machine, routing: Routing, strict: bool) -> Question {
        let mut space = Space::of(&work, self.job, &machine.cluster);
        space.devices = u32::try_from(self.ranks()).unwrap_or(u32::MAX).min(space.devices);
        space.strict = strict;
        space.replica_in_rack = true;
        Question {
            work,
            job: self.job,
            objective: self.objective,
            machine,
            routing,
            pins: self.pins(),
            space,
        }
    }

    /// What its arithmetic comes to for a model on a cluster: the product of the axes, uneven heads and experts, and
    /// which groups leave a domain. An error refuses it; warnings are prices that it pays.
    #[must_use]
    pub fn check(&self, work: &Work, cluster: &Cluster, devices: Option<u32>, strict: bool) -> Diagnostics {
        let mut ds = Vec::new();
        let what = format!("recipe {}", self.name);
        let experts = work.experts().map_or(0, |(e, _)| e);
        let devices = devices.unwrap_or(u32::MAX).min(cluster.devices());
        if self.ranks() > u64::from(devices) {
            let [tp, ep, pp, dp] = self.axes;
            let racks = self.ranks().div_ceil(u64::from((devices / cluster.racks.max(1)).max(1)));
            ds.push(
                Diagnostic::error(
                    &T1220,
                    format!("tp·ep·pp·dp = {tp}·{ep}·{pp}·{dp} = {} ranks, {devices} devices", self.ranks()),
                )
                .at(what.clone(), format!("{} ranks", self.ranks()))
                .at(format!("cluster {}", cluster.name), format!("{devices} devices"))
                .note(format!("{racks} racks of it have room for the recipe as printed"))
                .hint(in_words(&self.axes, &neighbours(devices, self.axes, work.heads, experts, strict))),
            );
        } else if let Ok(mesh) = Mesh::new(self.axes) {
            let seats: Vec<u32> = (0..mesh.ranks()).collect();
            ds.extend(placement(&mesh, &seats, cluster, false));
        }
        let world = u32::try_from(self.ranks()).unwrap_or(u32::MAX).min(devices);
        let even = || in_words(&self.axes, &neighbours(world, self.axes, work.heads, experts, true));
        ds.extend(self.heads(work, strict, &what).map(|d| d.hint(even())));
        ds.extend(self.experts(work, strict, &what).map(|d| d.hint(even())));
        ds
    }

    fn heads(&self, work: &Work, strict: bool, what: &str) -> Option<Diagnostic> {
        let ring = self.pins().ring.unwrap_or(1).max(1);
        let tp = self.axes[0] / ring;
        let inner = work.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match (r.name, r.op) {
            ("mlp.down" | "shared.down", RowOp::Matmul { k, .. }) => Some(k),
            _ => None,
        });
        let columns = work.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match r.op {
            RowOp::Attention { v, .. } => Some(v),
            _ => None,
        });
        let d = uneven(&T1221, work.heads, tp, "tp", "head", strict)?;
        let (most, v) = (work.heads.div_ceil(u64::from(tp)), columns.unwrap_or(1));
        let mut note = format!("columns follow heads: {} and {} per rank", most * v, (most - 1) * v);
        if let Some(inner) = inner.filter(|n| !n.is_multiple_of(u64::from(tp))) {
            let up = inner.div_ceil(u64::from(tp));
            note += &format!("; the inner width {inner} is cut into {up} and {}", up - 1);
        }
        Some(
            d.at(what, format!("tp={tp}"))
                .at(format!("model {}", work.name), format!("{} heads", work.heads))
                .note(note),
        )
    }

    fn experts(&self, work: &Work, strict: bool, what: &str) -> Option<Diagnostic> {
        let (experts, _) = work.experts()?;
        let ep = self.axes[1];
        let d = uneven(&T1222, experts, ep, "ep", "expert", strict)?;
        Some(d.at(what, format!("ep={ep}")).at(format!("model {}", work.name), format!("{experts} experts")))
    }
}

/// A finding where `units` do not divide over `parts`: a warning with its price, or an error if that is not wanted or
/// if some rank would have nothing.
fn uneven(
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
    let have = |ranks: u64| if ranks == 1 { "1 rank has".to_string() } else { format!("{ranks} ranks have") };
    let message = format!(
        "{units} {unit}s over {axis}={parts} are {each:.2} each: {} {most}, {} {}, and the slowest takes {loss:.2} % \
longer than an even cut",
        have(full),
        have(n - full),
        most - 1
    );
    Some(if strict { Diagnostic::error(code, message) } else { Diagnostic::warning(code, message) })
}

/// Meshes of exactly `world` ranks near `axes` (tp, ep, pp, dp) in which every rank has a head and an expert; with
/// `strict`, as many as any other. Those that keep most axes come first, then those whose other axes change least.
#[must_use]
pub fn neighbours(world: u32, axes: [u32; 4], heads: u64, experts: u64, strict: bool) -> Vec<[u32; 4]> {
    let fits = |units: u64, parts: u32| {
        let parts = u64::from(parts);
        if units == 0 { parts == 1 } else { parts <= units && (!strict || units.is_multiple_of(parts)) }
    };
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut found = Vec::new();
    for tp in divisors(world).filter(|tp| heads == 0 || fits(heads, *tp)) {
        for ep in divisors(world / tp).filter(|ep| fits(experts, *ep)) {
            for pp in divisors(world / tp / ep) {
                let mesh = [tp, ep, pp, world / tp / ep / pp];
                if kept(&axes, &mesh) > 0 && mesh != axes {
                    found.push(mesh);
                }
            }
        }
    }
    // Products compare like sums of logarithms, and exactly.
    let far = |mesh: &[u32; 4]| -> f64 {
        axes.iter().zip(mesh).map(|(a, b)| f64::from(*a.max(b)) / f64::from(*a.min(b).max(&1))).product()
    };
    found.sort_by(|a, b| kept(&axes, b).cmp(&kept(&axes, a)).then(far(a).total_cmp(&far(b))).then(b.cmp(a)));
    found
}

const AXES: [&str; 4] = ["tp", "ep", "pp", "dp"];

fn kept(axes: &[u32; 4], mesh: &[u32; 4]) -> usize {
    axes.iter().zip(mesh).filter(|(a, b)| a == b).count()
}

/// Neighbours grouped by the axes they keep, at most three of each and five groups.
fn in_words(axes: &[u32; 4], meshes: &[[u32; 4]]) -> String {
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

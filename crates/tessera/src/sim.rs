//! Runs a sealed plan on a modelled machine: the real leader, mesh leader and workers over modelled devices, in one process
//! and as fast as the arithmetic goes.
//!
//! Every envelope, ready, commit and done is a real message between the real machines, every rank's caches move as in a real
//! run, and every rank's collectives are folded into the trace that the seal holds of it. What is modelled is time: of ops
//! and transfers by [`Prices`], of control messages by [`HOP_NS`]. No number of the model is computed: latents are digests of
//! what a rank was told, prompts and contexts are placeholders of the right shape, and weights are not read.
//!
//! The leader decodes and encodes on rank 0's device. Where that is one of the mesh, decode and phases take turns on it and the
//! other ranks wait in their next collective, as in the planner's estimate.

mod ops;
mod prices;
mod rack;
mod seat;

pub use prices::{ClusterPrices, bundle};

use std::path::{Path, PathBuf};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_device::Prices;
use tessera_mesh::Rank;
use tessera_report::record::{Device, Start};
use tessera_runtime::decide::ChunkRequest;
use tessera_runtime::driver::Interrupt;
use tessera_runtime::sim::{Blow, Ending, Facts, Setup, Sim};
use tessera_runtime::{Digest, Failure, FailureClass, Parity, Tripwires};

use crate::engine::census;
use crate::files::refuse_existing;
use crate::model::T0016;
use crate::plan::Plan;
use crate::rank::{Orders, build, limits, silent, stream_spec};
use crate::record::RecordWriter;
use crate::stream::{self, StreamEvent, StreamOptions, StreamReport};
use crate::{Model, engine};

use rack::Rack;

/// Options that a modelled run has no use for.
pub static T0040: Code = Code {
    id: "T0040",
    title: "option does not go with the device",
    page: "With --device sim a plan runs on a modelled machine: time passes, nothing is computed. So there are no frames to \
write as PNGs, no weights to load and no other processes to join, and times of the generator come from the machine rather \
than from the command line. On real devices, in turn, there is no machine to choose: --cluster and --profile go with \
--device sim. The message names the option and what it contradicts; leave one of the two out.",
};

/// What one control message takes between two processes, in nanoseconds. A process tells itself at once.
pub const HOP_NS: u64 = 50_000;
/// Modelled time between two looks at a request to stop, in nanoseconds.
const SLICE_NS: u64 = 1_000_000_000;

/// A machine to model.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// What ops take there.
    pub prices: &'a dyn Prices,
    /// What it is called, for the record: `gb200-nvl72, profile torch-2.11`.
    pub name: &'a str,
}

/// The machine that a command line names by the catalog or by files; else the one that the plan in `folder` was made for by
/// estimate; else the usual one for so many ranks: one host of eight, or racks of 72. It has as many racks as the ranks need.
///
/// # Errors
/// T1104 or T1105 for a name that is in no catalog, T0046 and what is wrong with a file for a file.
pub fn machine(
    cluster: Option<&str>,
    profile: Option<&str>,
    folder: Option<&Path>,
    ranks: u32,
) -> Result<tessera_cost::Machine, Diagnostics> {
    if let (None, None, Some(planned)) = (cluster, profile, folder.and_then(planned_for)) {
        return planned;
    }
    let usual = if ranks <= 8 { "hgx-h200" } else { "gb200-nvl72" };
    crate::search::machine(cluster.unwrap_or(usual), profile, Some(ranks))
}

/// The machine that stands in a plan's estimate, where it has one.
fn planned_for(folder: &Path) -> Option<Result<tessera_cost::Machine, Diagnostics>> {
    let path = folder.join("estimate.json");
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).ok()?).ok()?;
    Some(crate::doctor::machine_of(&path.display().to_string(), &json["asked"]["machine"]))
}

/// Runs a plan on a modelled machine and leaves the folder of a run: record, trace and page. There is no clip. The plan
/// alone is needed: neither weights nor the model's folder are looked at.
///
/// # Errors
/// What is wrong before anything was written. What goes wrong later is in the report.
pub fn run(
    plan: &Plan,
    options: &StreamOptions,
    machine: Machine<'_>,
    interrupt: &Interrupt,
    on: &mut dyn FnMut(StreamEvent),
) -> Result<StreamReport, Diagnostics> {
    check(plan, options)?;
    // Nobody opens it.
    let model = Model { name: plan.model.clone(), dir: PathBuf::from("."), video: plan.video.clone() };
    let orders = stream::orders(plan, &model, options, 1).map_err(|d| vec![d])?;
    let start = Start {
        // A modelled run begins at no instant: the same run gives the same bytes.
        started_at: "on a modelled clock".into(),
        device: Device::Sim,
        machine: Some(machine.name.to_string()),
        ..stream::start(plan, &orders, options)
    };
    stream::write_begun(plan, options, start).map_err(|d| vec![d])?;
    let record =
        RecordWriter::modelled(&options.out, plan.sealed.mesh().outside() == 0).map_err(|d| vec![d])?;
    let rack = Rack::new(plan, &orders, machine.prices, record, on).map_err(|d| vec![d])?;
    let mut sim = Sim::new(setup(plan, &orders), rack)?;
    let (ending, stopped) = play(&mut sim, interrupt);
    let (failure, ops) = sim.world.finish(&ending, options.chunks);
    on(StreamEvent::Gone);
    let interrupted = stopped && failure.is_none();
    Ok(stream::close_with(plan, options, failure, interrupted, ops))
}

/// Everything that can be known to be wrong before anything is written.
fn check(plan: &Plan, options: &StreamOptions) -> Result<(), Diagnostics> {
    let mut ds = stream::check_options(options);
    let mut senseless = |option: &str, why: &str| {
        ds.push(
            Diagnostic::error(&T0040, format!("{option} does not go with --device sim"))
                .at("--device sim", why)
                .hint(format!("leave {option} out")),
        );
    };
    if options.png {
        senseless("--png", "no pixel is computed");
    }
    if !options.weights_at.is_empty() {
        senseless("--weights-at", "no weights are loaded");
    }
    if options.modelled.generate_ns.is_some() {
        senseless("--model-generate", "passes take what the machine takes for them");
    }
    if options.drill.is_some() {
        senseless("a drill", "there are no processes to break");
    }
    let unknown = plan.sealed.program("encode", Rank(0)).is_none() && options.modelled.studio.is_none();
    if plan.video.stream.recompute && unknown {
        ds.push(
            Diagnostic::error(&T0016, "the recompute regime needs a decoder for its anchor")
                .hint("use --cache resident, or say what decode and encode take: --model-decode"),
        );
    }
    ds.extend(refuse_existing(&options.out).err());
    ds.extend(stream_spec(plan).check());
    if ds.is_empty() { Ok(()) } else { Err(ds) }
}

/// The machines of a plan's ranks, and what is asked of them.
fn setup(plan: &Plan, orders: &Orders) -> Setup {
    let limits = limits(plan);
    let digest = plan.sealed.digest();
    let prompt = |chunk: u32| orders.prompts.iter().rposition(|(at, _)| *at == chunk);
    let request = |chunk: u32| {
        let prompt = prompt(chunk).and_then(|n| u32::try_from(n).ok());
        let seed = orders.asked(u64::from(chunk)).seed;
        (ChunkRequest { prompt_change: prompt.is_some(), seed, cut: orders.cut(chunk) }, prompt)
    };
    Setup {
        ranks: plan.sealed.mesh().inside(),
        outside: plan.sealed.mesh().outside() > 0,
        launcher: false,
        facts: Facts {
            plan: Digest(digest),
            // Two runs of a plan are one run: nothing keeps their messages apart.
            session: digest.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b)),
            build: build(),
            parity: Parity::default()
                .set("backend", "sim")
                .set("numerics", plan.mapping.numerics.name())
                .set("topology", plan.mapping.topology.name()),
            census: census(&plan.sealed).into(),
            stream: stream_spec(plan),
            silent: silent(plan),
        },
        // The machines' own waits are counted in heartbeats.
        tick_ns: limits.heartbeat_ns,
        limits,
        tripwires: Tripwires::default(),
        requests: (0..orders.chunks).map(request).collect(),
        blows: Vec::new(),
    }
}

/// Runs to the end, and says whether it was asked to stop before.
fn play(sim: &mut Sim<Rack<'_>>, interrupt: &Interrupt) -> (Ending, bool) {
    let mut stopped = false;
    loop {
        let ending = sim.run(sim.now_ns().saturating_add(SLICE_NS));
        if ending.left.is_empty() {
            return (ending, stopped);
        }
        if interrupt.asked() && !stopped {
            stopped = true;
            sim.strikes(Blow::Interrupt);
        }
    }
}

/// A diagnostic of this process as the failure of a run.
fn broken(d: &Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Output, None, d)
}

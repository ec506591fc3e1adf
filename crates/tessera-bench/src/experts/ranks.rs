//! Runs layers of experts on CPU ranks, and times the grouped matmuls of each rank while the others wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use tessera::communicators::{
    EndpointSources, JoinOrder, attach_endpoints, communicator_specs, create_arenas_of_ranks,
};
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::Observer;
use tessera_filetests::BackendFactory;
use tessera_filetests::experts::{Layer, RankResult, run_calls};
use tessera_ir::{Bundle, Opcode, Program};
use tessera_mesh::Mesh;
use tessera_verify::{DeviceLimits, seal};

use crate::diagnostics_error;
use crate::stats::{min_value, round_to_millis, thread_seconds};

/// Maximum wait in one collective: a rank waits until the others have had their turns.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// Experts of a layer, and the ranks that share them in order.
#[derive(Debug, Clone, Copy)]
pub struct LayerShape {
    pub experts: usize,
    pub ranks: usize,
}

/// What the experts of a rank compute in a step, and the shortest of the times that they take.
#[derive(Debug, Clone, Copy, Default)]
pub struct RankWork {
    pub rows: f64,
    /// Experts with at least one row.
    pub experts: f64,
    pub ns: f64,
}

impl RankWork {
    pub fn mean(all: impl Iterator<Item = RankWork>) -> RankWork {
        let all: Vec<RankWork> = all.collect();
        let mean = |of: fn(&RankWork) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        RankWork { rows: mean(|w| w.rows), experts: mean(|w| w.experts), ns: mean(|w| w.ns) }
    }

    pub fn to_json(self) -> serde_json::Value {
        serde_json::json!({
            "rows": round_to_millis(self.rows),
            "experts": round_to_millis(self.experts),
            "ms": round_to_millis(self.ns / 1e6),
        })
    }
}

/// Times each layer on every rank: a list of ranks for each layer. The layers differ in their logits alone.
pub fn time_layers(layers: &[Layer], shape: LayerShape, rounds: usize) -> anyhow::Result<Vec<Vec<RankWork>>> {
    let first = layers.first().context("no layer to time")?;
    let mapping =
        format!("[mesh]\nep = {}\n[experts]\ntokens = \"sharded\"\nstatistics = true\n", shape.ranks);
    let bundle = first.plan(&mapping);
    let calls: Vec<_> = layers.iter().map(Layer::inputs).collect();
    let turns = Turns::default();
    let observe = |program: &Arc<Program>| ExpertClock::new(program, &turns);
    let open = |mesh: &Mesh, _: &[Vec<Arc<Program>>]| open_ranks(&bundle, mesh);
    // The first round touches the memory for the first time.
    let ranks = run_calls(&open, &bundle, &first.weights(), (&calls, 1 + rounds), &observe);
    let work = |layer: usize| -> anyhow::Result<Vec<RankWork>> {
        let of_rank = |(rank, result): (usize, &RankResult<ExpertClock<'_>>)| -> anyhow::Result<RankWork> {
            let times: Vec<f64> = result
                .observer
                .seconds
                .iter()
                .skip(calls.len() + layer)
                .step_by(calls.len())
                .copied()
                .collect();
            let (rows, experts) = count_work(&result.outputs[layer], shape, rank)?;
            Ok(RankWork { rows, experts, ns: min_value(&times) * 1e9 })
        };
        ranks.iter().enumerate().map(of_rank).collect()
    };
    (0..layers.len()).map(work).collect()
}

/// Returns the rows of a rank's experts, and how many of them have any.
fn count_work(
    outputs: &BTreeMap<String, Vec<f32>>,
    shape: LayerShape,
    rank: usize,
) -> anyhow::Result<(f64, f64)> {
    let counts = outputs.get("experts.0").context("the plan returns no counts of experts")?;
    let own = shape.experts / shape.ranks;
    let rows =
        counts.chunks(4).skip(rank * own).take(own).map(|of_expert| f64::from(of_expert[1] + of_expert[2]));
    Ok((rows.clone().sum(), rows.filter(|rows| *rows > 0.0).count() as f64))
}

/// Returns the factories of the CPU backends of all ranks, which share the arenas of the plan.
fn open_ranks(bundle: &Bundle, mesh: &Mesh) -> Result<Vec<BackendFactory<CpuBackend>>, String> {
    let open = || -> anyhow::Result<Vec<BackendFactory<CpuBackend>>> {
        let plan = seal(bundle.clone(), &DeviceLimits::default()).map_err(diagnostics_error)?;
        let one = |d| diagnostics_error(vec![d]);
        let arenas = create_arenas_of_ranks(&communicator_specs(&plan), mesh.world_size()).map_err(one)?;
        let mut factories: Vec<BackendFactory<CpuBackend>> = Vec::new();
        for (rank, arenas) in mesh.iter().zip(arenas) {
            let own = arenas.iter().map(|fd| fd.try_clone()).collect::<Result<Vec<_>, _>>()?;
            let ends = attach_endpoints(&plan, rank, EndpointSources::Arenas(own), JoinOrder::OfPlan);
            let ends = ends.map_err(one)?;
            factories.push(Box::new(move |seat| {
                Ok(CpuBackend::new(seat, Pool::single_thread(), ends, PEER_TIMEOUT))
            }));
        }
        Ok(factories)
    };
    open().map_err(|e| format!("{e:#}"))
}

/// Lets one rank at a time compute.
#[derive(Default)]
struct Turns {
    is_taken: Mutex<bool>,
    ended: Condvar,
}

impl Turns {
    fn wait_for_turn(&self) -> Turn<'_> {
        let mut is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            is_taken = self.ended.wait(is_taken).unwrap_or_else(PoisonError::into_inner);
        }
        *is_taken = true;
        Turn(self)
    }
}

/// The turn of a rank, which ends when it is dropped.
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.ended.notify_one();
    }
}

/// Adds up the CPU time of a rank's grouped matmuls, call by call.
struct ExpertClock<'a> {
    turns: &'a Turns,
    is_expert_matmul: Vec<bool>,
    /// The turn of the matmul that runs, and the CPU time at which it began.
    running: Option<(Turn<'a>, f64)>,
    /// Seconds of each call.
    seconds: Vec<f64>,
}

impl<'a> ExpertClock<'a> {
    fn new(program: &Program, turns: &'a Turns) -> ExpertClock<'a> {
        let is_expert_matmul = program.ops.iter().map(|op| op.opcode == Opcode::GroupedMatmul).collect();
        ExpertClock { turns, is_expert_matmul, running: None, seconds: Vec::new() }
    }
}

impl Observer for ExpertClock<'_> {
    fn on_issued(&mut self, _: usize) {}

    /// The op with the number `ops` begins, so the one before it has ended.
    fn on_progress(&mut self, ops: u32) {
        if ops == 0 {
            self.seconds.push(0.0);
        }
        if let (Some((_turn, begun)), Some(call)) = (self.running.take(), self.seconds.last_mut()) {
            *call += thread_seconds() - begun;
        }
        if self.is_expert_matmul.get(ops as usize) == Some(&true) {
            let turn = self.turns.wait_for_turn();
            self.running = Some((turn, thread_seconds()));
        }
    }
}

//! Finds the best mapping for a number of devices, and counts why the other candidates are
//! rejected.

use std::collections::BTreeMap;

use tessera_base::{Bytes, Diagnostic, Diagnostics, Nanoseconds};
use tessera_cost::intervals::IntervalKind;
use tessera_mesh::{Axis, Mesh};

use super::call::{self, CallEstimate, estimate_call};
use super::lowering_cache::{LoweringCache, TpSplit};
use super::memory::{RankMemory, memory_by_role};
use super::period::{DecodePlacement, MediaCosts, MediaTimes, StreamPeriod, stream_period};
use super::pixels::{PixelPrices, RankPixels};
use super::query::MappingQuery;
use crate::codes::{T0605, T1230, T1231, T1232};
use crate::search::Objective;
use crate::stages::StageCosts;
use crate::{DtypePolicy, LogicalModel, Mapping, MediaPlacement, Strategy, Topology, lower};

/// A mapping that fits in memory and meets the deadline of the search, if there is one, with its
/// estimates.
#[derive(Debug, Clone, PartialEq)]
pub struct RankedMapping {
    /// The mapping, as a stream would run it.
    pub mapping: Mapping,
    /// Which ranks decode, and when.
    pub decode: DecodePlacement,
    /// Number of devices in use: one for each rank of the mesh and each rank outside it.
    pub devices: u32,
    /// Times of the phases of pixels where they run.
    pub pixels: MediaTimes,
    /// Estimate of one call, without phases of pixels. A search keeps intervals for the best result alone.
    pub call: CallEstimate,
    /// Period and latency of a steady stream, and the load of its ranks; the latency leaves out
    /// calls already sent.
    pub period: StreamPeriod,
    /// Time from the last moment at which an input can enter a call to the last pixel of its chunk,
    /// in nanoseconds; includes the calls already sent.
    pub latency_ns: f64,
    /// Pixel frames per second of a steady stream: frames of a chunk divided by the period.
    pub fps: f64,
    /// Memory of the fullest rank of the mesh.
    pub memory: RankMemory,
    /// Mean number of ranks that compute at the same time during the call, which determines power
    /// draw.
    pub computing_ranks: f64,
}

/// Candidates rejected for one reason.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectedMappings {
    /// Number of candidate mappings rejected for this reason.
    pub count: u64,
    /// A description of one of them.
    pub example: String,
    /// The first reason for which the example was rejected.
    pub diagnostic: Diagnostic,
}

/// The best mappings of a search, and the number of candidates rejected for each reason.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoSearchResult {
    /// Number of candidates, legal and rejected: each mesh with each strategy, number of row
    /// chunks, topology, decode placement and number of outstanding calls.
    pub considered: u64,
    /// Number of candidates that can run and meet the query.
    pub legal: u64,
    /// Rejected candidates, by the code of their first reason.
    pub rejected: BTreeMap<&'static str, RejectedMappings>,
    /// The legal mappings that rank first by the objective, best first; at most
    /// [`MappingQuery::max_results`].
    pub best: Vec<RankedMapping>,
}

/// Evaluates every mapping of the devices. Every rejected candidate is counted under a reason.
#[must_use]
pub fn search_mappings(q: &MappingQuery<'_>) -> VideoSearchResult {
    search_with_progress(q, &mut |_, _| ())
}

/// Does the same as [`search_mappings`] and reports progress to `tell`: meshes done, and all
/// meshes.
#[must_use]
pub fn search_with_progress(
    q: &MappingQuery<'_>,
    progress: &mut dyn FnMut(usize, usize),
) -> VideoSearchResult {
    let mut out = VideoSearchResult { considered: 0, legal: 0, rejected: BTreeMap::new(), best: Vec::new() };
    let needed = find_call(q).map(|(_, phases)| without_unused_phases(q.logical, phases));
    let mut simulator = Simulator::new(q, needed.as_ref().ok());
    let meshes = candidate_meshes(q);
    for (done, (tp, pp, cut)) in meshes.iter().copied().enumerate() {
        progress(done, meshes.len());
        // The ranks outside the mesh affect neither its programs nor its memory.
        simulator.meshes.clear();
        for (topology, decode, outstanding) in candidate_placements(q, tp * pp) {
            out.considered += 1;
            let mapping = match build_mapping(tp, pp, cut, topology, outstanding, q.dtype) {
                Ok(m) => Mapping { media: media_key(q, decode), ..m },
                Err(d) => {
                    out.add_rejection(format!("tp={tp},pp={pp}"), *d);
                    continue;
                }
            };
            match simulator.rank(&mapping, decode) {
                Ok(ranked) => {
                    out.legal += 1;
                    out.best.push(ranked);
                    out.best.sort_by(|a, b| compare_mappings(q, a, b));
                    out.best.truncate(q.max_results.max(1));
                }
                Err(ds) => {
                    if let Some(first) = ds.into_iter().next() {
                        out.add_rejection(describe_candidate(&mapping, decode), first);
                    }
                }
            }
        }
    }
    if let Some(best) = out.best.first_mut() {
        name_intervals(q, best);
    }
    progress(meshes.len(), meshes.len());
    out
}

/// Estimates one mapping, with names for every interval.
///
/// # Errors
/// Returns every reason why the mapping does not fit the model, or the first reason why it does not
/// fit the machine or the query.
pub fn estimate_mapping(
    q: &MappingQuery<'_>,
    mapping: &Mapping,
    decode: DecodePlacement,
) -> Result<RankedMapping, Diagnostics> {
    let needed = find_call(q).map(|(_, phases)| without_unused_phases(q.logical, phases))?;
    // The cache covers the mappings of a search alone.
    let mut simulator = Simulator { cache: None, ..Simulator::new(q, Some(&needed)) };
    let mut ranked = simulator.rank(mapping, decode)?;
    name_intervals(q, &mut ranked);
    Ok(ranked)
}

/// Estimates a mapping with the phases of pixels in every place, the shortest period first; with equal
/// periods, the earlier of [`DecodePlacement::ALL`]. A place is missing if it does not fit the devices'
/// memory or needs more devices than the query has. Empty for a model whose phases of pixels are no
/// programs of the plan.
///
/// # Errors
/// Returns why the mapping fits no place.
pub fn compare_places(q: &MappingQuery<'_>, mapping: &Mapping) -> Result<Vec<RankedMapping>, Diagnostics> {
    if q.pixels.is_none() {
        return Ok(Vec::new());
    }
    let (_, phases) = find_call(q)?;
    let needed = without_unused_phases(q.logical, phases);
    let mut simulator = Simulator { cache: None, ..Simulator::new(q, Some(&needed)) };
    let (mut out, mut problems): (Vec<RankedMapping>, Diagnostics) = (Vec::new(), Vec::new());
    for decode in DecodePlacement::ALL {
        let devices = mapping.mesh.mesh_size() + decode.outside_ranks();
        if !decode.is_valid_for(&q.media) || devices > q.devices {
            continue;
        }
        let placed = Mapping { media: media_key(q, decode), ..mapping.clone() };
        match simulator.rank(&placed, decode) {
            Ok(ranked) => out.push(ranked),
            // A mapping that does not fit the model fits in no place, for the same reasons.
            Err(ds) if problems.is_empty() => problems = ds,
            Err(_) => {}
        }
    }
    out.sort_by(|a, b| a.period.ns.total_cmp(&b.period.ns));
    if out.is_empty() { Err(problems) } else { Ok(out) }
}

/// Returns the mapping's key for a placement. Without programs of pixels the key has no effect.
fn media_key(q: &MappingQuery<'_>, decode: DecodePlacement) -> MediaPlacement {
    match q.pixels {
        Some(_) => decode.media().unwrap_or_default(),
        None => MediaPlacement::Leader,
    }
}

/// Maximum number of row chunks unless pinned: more of them hide little more time, and matmuls with
/// fewer rows are slower.
const MAX_OVERLAP_CHUNKS: u32 = 2;

/// Returns the candidate mesh sizes with strategies over them, and row chunks for strategies with
/// an all-reduce.
fn candidate_meshes(q: &MappingQuery<'_>) -> Vec<(u32, u32, TpSplit)> {
    let mut out = Vec::new();
    let free = |pin: Option<u32>| pin.map_or(1..=q.devices, |n| n..=n);
    for pp in free(q.pins.pp) {
        for tp in free(q.pins.tp) {
            if u64::from(tp) * u64::from(pp) > u64::from(q.devices) {
                continue;
            }
            for strategy in [Strategy::Ulysses, Strategy::Megatron] {
                // On one rank both strategies are equal.
                let same = tp == 1 && strategy == Strategy::Megatron && q.pins.strategy.is_none();
                if same || q.pins.strategy.is_some_and(|s| s != strategy) {
                    continue;
                }
                let most = if tp > 1 && strategy == Strategy::Megatron { MAX_OVERLAP_CHUNKS } else { 1 };
                let pieces = q.pins.overlap_chunks.map_or(1..=most, |n| n..=n);
                out.extend(pieces.map(|n| (tp, pp, (strategy, n))));
            }
        }
    }
    out
}

/// Returns the candidate leader placements, decode placements and numbers of outstanding calls for
/// a mesh of `ranks`.
fn candidate_placements(q: &MappingQuery<'_>, ranks: u32) -> Vec<(Topology, DecodePlacement, u32)> {
    let mut out = Vec::new();
    let outside = if ranks == 1 { Topology::Pp0 } else { Topology::Pp1 };
    let topologies = match q.pins.topology {
        Some(t) => vec![t],
        None => vec![Topology::Mesh, outside],
    };
    for topology in topologies {
        for decode in DecodePlacement::ALL {
            // Unless the user wants it there, a leader that runs no phases of pixels needs no device.
            let is_outside_pinned = q.pixels.is_some() && q.pins.media == Some(MediaPlacement::Outside);
            let placed = decode.outside_ranks() == topology.outside_ranks()
                || is_outside_pinned
                || q.pins.topology.is_some() && decode.fits_topology(&q.media, topology);
            let devices = ranks + topology.outside_ranks().max(decode.outside_ranks());
            let fits = (q.min_devices..=q.devices).contains(&devices);
            let offered = decode.is_valid_for(&q.media) && placed;
            let is_pinned = q.pins.media.is_none_or(|m| q.pixels.is_none() || decode.media() == Some(m));
            if fits && is_pinned && q.pins.decode.map_or(offered, |d| d == decode) {
                for outstanding in q.pins.outstanding.map_or(1..=2, |n| n..=n) {
                    out.push((topology, decode, outstanding));
                }
            }
        }
    }
    out
}

fn build_mapping(
    tp: u32,
    pp: u32,
    (strategy, pieces): TpSplit,
    topology: Topology,
    outstanding: u32,
    dtype: DtypePolicy,
) -> Result<Mapping, Box<Diagnostic>> {
    let mut sizes = [1; 4];
    (sizes[Axis::Tp as usize], sizes[Axis::Pp as usize]) = (tp, pp);
    let mesh = Mesh::new(sizes)?;
    // A prepared call waits in the queue before the mesh, so the queue depth equals the number of
    // calls that are prepared ahead.
    Ok(Mapping {
        topology,
        mesh,
        strategy,
        overlap_chunks: pieces,
        dtype,
        d_in: outstanding,
        max_outstanding: outstanding,
        ..Mapping::default()
    })
}

/// The simulated call of a mesh and the memory of its fullest rank, without the ranks outside the
/// mesh.
struct SimulatedMesh {
    blocks: Vec<u64>,
    call: CallEstimate,
    memory: RankMemory,
    computing_ranks: f64,
}

impl SimulatedMesh {
    fn new(blocks: Vec<u64>, call: CallEstimate, bytes: Vec<RankMemory>) -> SimulatedMesh {
        let fullest = bytes.into_iter().max_by_key(|b| b.total_bytes());
        let computing_ranks = mean_computing_ranks(&call);
        // A search would keep thousands of unnamed intervals for each mapping and never show them.
        let call = CallEstimate { intervals: Vec::new(), ..call };
        SimulatedMesh { blocks, computing_ranks, call, memory: fullest.unwrap_or_default() }
    }
}

/// Simulates the generator of meshes, and prices what runs around it.
struct Simulator<'a> {
    q: &'a MappingQuery<'a>,
    cache: Option<LoweringCache<'a>>,
    pixels: Option<PixelPrices<'a>>,
    stage_costs: Option<StageCosts>,
    /// Simulated meshes by the blocks of their stages, for one mesh and strategy.
    meshes: BTreeMap<Vec<u64>, Result<SimulatedMesh, Diagnostics>>,
}

impl<'a> Simulator<'a> {
    /// Creates a simulator. With the model of the call alone it simulates from cached lowerings.
    fn new(q: &'a MappingQuery<'a>, needed: Option<&'a LogicalModel>) -> Simulator<'a> {
        Simulator {
            q,
            cache: needed.map(|l| LoweringCache::new(l, q.dtype, q.machine)),
            pixels: q.pixels.map(|model| PixelPrices::new(model, q.machine, q.dtype)),
            stage_costs: needed.map(StageCosts::from_model),
            meshes: BTreeMap::new(),
        }
    }

    /// Estimates a mapping with a placement of its phases of pixels.
    fn rank(&mut self, mapping: &Mapping, decode: DecodePlacement) -> Result<RankedMapping, Diagnostics> {
        let q = self.q;
        let problems = mapping.check_fit(&q.logical.model_extents());
        if !problems.is_empty() {
            return Err(problems);
        }
        // A leader inside the mesh can use a GPU outside of it.
        let fits = q.pixels.is_some() || decode.fits_topology(&q.media, mapping.topology);
        if !decode.is_valid_for(&q.media) || !fits {
            return Err(vec![invalid_placement(q, mapping, decode)]);
        }
        let (tp, pp) = (mapping.mesh.axis_size(Axis::Tp), mapping.mesh.axis_size(Axis::Pp));
        let placed = match &mut self.pixels {
            Some(prices) if mapping.media.is_in_calls() => prices.price_ranks(tp, mapping.media)?,
            _ => {
                RankPixels { times: q.media.shared_times(mapping.mesh.mesh_size()), ..RankPixels::default() }
            }
        };
        let mut mapping = mapping.clone();
        if let (true, Some(costs)) = (mapping.blocks.is_empty(), self.stage_costs) {
            let pixels = self.pixels.as_ref().map_or(0, |p| p.flops_per_pass(tp, mapping.media));
            mapping.blocks = costs.with_pixels(pixels).split_blocks(u64::from(pp));
        }
        if !self.meshes.contains_key(&mapping.blocks) {
            let simulated = simulate_cached(q, &mapping, self.cache.as_mut());
            self.meshes.insert(mapping.blocks.clone(), simulated);
        }
        match self.meshes.get(&mapping.blocks) {
            Some(Ok(mesh)) => rank_mapping(q, &mapping, decode, mesh, &placed),
            Some(Err(ds)) => Err(ds.clone()),
            None => Err(Vec::new()),
        }
    }
}

/// Does the same as [`simulate_mapping`], from a few cached lowerings if possible.
fn simulate_cached(
    q: &MappingQuery<'_>,
    mapping: &Mapping,
    cache: Option<&mut LoweringCache<'_>>,
) -> Result<SimulatedMesh, Diagnostics> {
    let (call, phases) = find_call(q)?;
    let split = (mapping.strategy, mapping.overlap_chunks);
    if let Some(scored) = cache.and_then(|s| s.mesh_schedule(mapping.mesh, split, &mapping.blocks))
        // If the simulation of the cached schedule fails, that of the whole program gives the
        // diagnostic.
        && let Ok(estimate) = call::simulate_call(&scored.schedule, call, phases, q.machine)
    {
        return Ok(SimulatedMesh::new(mapping.blocks.clone(), estimate, scored.role_memory));
    }
    simulate_mapping(q, mapping)
}

fn simulate_mapping(q: &MappingQuery<'_>, mapping: &Mapping) -> Result<SimulatedMesh, Diagnostics> {
    let (call, phases) = find_call(q)?;
    let mut mapping = generator_alone(mapping);
    let bundle = lower(&without_unused_phases(q.logical, phases), &mut mapping)?;
    let estimate = estimate_call(&bundle, call, phases, q.machine, false).map_err(|d| vec![*d])?;
    Ok(SimulatedMesh::new(mapping.blocks, estimate, memory_by_role(&bundle)))
}

/// Returns the mapping of the mesh alone, without a leader outside of it and without phases of pixels.
fn generator_alone(mapping: &Mapping) -> Mapping {
    Mapping {
        topology: Topology::Mesh,
        media: MediaPlacement::Leader,
        devices: Vec::new(),
        ..mapping.clone()
    }
}

fn find_call<'a>(q: &'a MappingQuery<'_>) -> Result<(&'a str, &'a [String]), Diagnostics> {
    let found = q.logical.calls.iter().find(|(name, _)| name == q.call);
    found.map(|(name, phases)| (name.as_str(), phases.as_slice())).ok_or_else(|| {
        let names: Vec<&str> = q.logical.calls.iter().map(|c| c.0.as_str()).collect();
        vec![
            Diagnostic::error(&T0605, format!("the model has no call `{}`", q.call))
                .with_hint(format!("the model's calls: {}", names.join(", "))),
        ]
    })
}

/// Returns the model without the phases that the call does not run, except `text`, whose weights
/// ranks hold anyway.
fn without_unused_phases(l: &LogicalModel, phases: &[String]) -> LogicalModel {
    let wanted = |name: &String| phases.contains(name) || name == "text";
    LogicalModel {
        phases: l.phases.iter().filter(|p| wanted(&p.name)).cloned().collect(),
        calls: Vec::new(),
        heads: l.heads,
        head_dim: l.head_dim,
        hidden_size: l.hidden_size,
        ffn_size: l.ffn_size,
        tokens: l.tokens,
        blocks: l.blocks,
        experts: l.experts,
        decoder: l.decoder,
    }
}

fn rank_mapping(
    q: &MappingQuery<'_>,
    mapping: &Mapping,
    decode: DecodePlacement,
    p: &SimulatedMesh,
    placed: &RankPixels,
) -> Result<RankedMapping, Diagnostics> {
    let memory = p.memory.with_phases(&placed.memory);
    let kept = memory.total_bytes().0 as f64 + q.machine.reserved_bytes();
    let has = q.machine.cluster.device.memory_bytes.value;
    if kept > has {
        return Err(vec![insufficient_memory(q, mapping, &memory)]);
    }
    // Commit follows done; the messages before it are hidden if a second call is in flight and
    // waits for no context.
    let messages = if mapping.max_outstanding > 1 && !q.media.coupled { 2.0 } else { 4.0 };
    let ranks = mapping.mesh.mesh_size();
    // Replicas have prices of their own where the phases are programs of the plan.
    let media = match decode {
        DecodePlacement::Replicas => MediaCosts { device: placed.times, ..q.media },
        _ => q.media,
    };
    let pace = stream_period(p.call.ns + messages * q.message_ns, &media, &placed.times, decode);
    if let Objective::Deadline(Nanoseconds(deadline)) = q.objective
        && pace.ns > deadline as f64
    {
        return Err(vec![missed_deadline(pace.ns, Nanoseconds(deadline))]);
    }
    let ahead = f64::from(mapping.max_outstanding.saturating_sub(1)) * pace.ns;
    Ok(RankedMapping {
        mapping: Mapping { blocks: p.blocks.clone(), ..mapping.clone() },
        decode,
        devices: ranks + mapping.topology.outside_ranks().max(decode.outside_ranks()),
        pixels: match decode {
            DecodePlacement::AllRanks | DecodePlacement::AnchorShared | DecodePlacement::Replicas => {
                placed.times
            }
            DecodePlacement::LeaderCpu => q.media.leader.map_or(q.media.device, |l| l.times),
            DecodePlacement::OnMesh
            | DecodePlacement::Serial
            | DecodePlacement::AnchorFirst
            | DecodePlacement::Overlapped => q.media.device,
        },
        call: p.call.clone(),
        period: pace,
        latency_ns: pace.latency_ns + ahead,
        fps: q.frames as f64 / (pace.ns * 1e-9),
        memory,
        computing_ranks: p.computing_ranks,
    })
}

fn invalid_placement(q: &MappingQuery<'_>, mapping: &Mapping, decode: DecodePlacement) -> Diagnostic {
    let fitting: Vec<&str> = DecodePlacement::ALL
        .into_iter()
        .filter(|d| d.is_valid_for(&q.media) && d.fits_topology(&q.media, mapping.topology))
        .map(DecodePlacement::name)
        .collect();
    let chunks = if q.media.coupled { "coupled" } else { "not coupled" };
    let shared = if q.media.shardable.is_some() { "can be shared" } else { "cannot be shared" };
    let d = Diagnostic::error(
        &T1232,
        format!("{decode} under topology {}: chunks are {chunks}, decode {shared}", mapping.topology.name()),
    );
    if fitting.is_empty() { d } else { d.with_hint(format!("possible placements: {}", fitting.join(", "))) }
}

fn insufficient_memory(q: &MappingQuery<'_>, mapping: &Mapping, m: &RankMemory) -> Diagnostic {
    let has = Bytes(q.machine.cluster.device.memory_bytes.value as u64);
    Diagnostic::error(
        &T1230,
        format!(
            "the fullest rank would need {} of {has}: weights {}, caches {}, inputs {}, temporaries {}, executor {}",
            Bytes(m.total_bytes().0 + q.machine.reserved_bytes() as u64),
            m.weights,
            m.buffers,
            m.inputs,
            m.temporaries,
            Bytes(q.machine.reserved_bytes() as u64),
        ),
    )
    .with_label("mesh", mapping.mesh.to_string())
    .with_label("strategy", mapping.strategy.name())
    .with_label("device", q.machine.cluster.device.name.clone())
    .with_hint(match mapping.strategy {
        Strategy::Ulysses => "more stages divide weights; megatron also shards them over tp",
        Strategy::Megatron => "more ranks over tp or more stages divide weights and caches",
    })
}

fn missed_deadline(period_ns: f64, deadline: Nanoseconds) -> Diagnostic {
    Diagnostic::error(
        &T1231,
        format!("the period is {} per chunk; the deadline is {deadline}", Nanoseconds(period_ns as u64)),
    )
    .with_hint("the objective `throughput` shows the shortest possible period")
}

/// Orders the best mapping first. Ties go to fewer devices, then to fewer outstanding calls, then
/// to the earlier candidate.
fn compare_mappings(q: &MappingQuery<'_>, a: &RankedMapping, b: &RankedMapping) -> std::cmp::Ordering {
    let fps = b.fps.total_cmp(&a.fps);
    let latency = a.latency_ns.total_cmp(&b.latency_ns);
    let devices = a.devices.cmp(&b.devices);
    let outstanding = a.mapping.max_outstanding.cmp(&b.mapping.max_outstanding);
    match q.objective {
        Objective::Latency => latency.then(fps).then(devices),
        Objective::Throughput => fps.then(latency).then(devices),
        Objective::Memory => {
            a.memory.total_bytes().cmp(&b.memory.total_bytes()).then(fps).then(latency).then(devices)
        }
        Objective::Deadline(_) => devices.then(latency).then(fps),
    }
    .then(outstanding)
}

fn describe_candidate(m: &Mapping, decode: DecodePlacement) -> String {
    format!("{} {} {} {decode}", m.mesh, m.strategy_label(), m.topology.name())
}

/// Returns the mean number of ranks that compute at the same time.
fn mean_computing_ranks(call: &CallEstimate) -> f64 {
    let member_counts: BTreeMap<u32, usize> =
        call.rank_classes.iter().map(|p| (p.representative.0, p.members.len())).collect();
    let busy = call.intervals.iter().filter(|b| b.kind == IntervalKind::Compute);
    let all: f64 =
        busy.map(|b| b.duration_ns() * member_counts.get(&b.rank).map_or(0.0, |n| *n as f64)).sum();
    if call.ns > 0.0 { all / call.ns } else { 0.0 }
}

/// Repeats the simulation with names, for a chart.
fn name_intervals(q: &MappingQuery<'_>, ranked: &mut RankedMapping) {
    let Ok((call, phases)) = find_call(q) else { return };
    let mut inside = generator_alone(&ranked.mapping);
    let bundle = lower(&without_unused_phases(q.logical, phases), &mut inside);
    if let Ok(named) =
        bundle.and_then(|b| estimate_call(&b, call, phases, q.machine, true).map_err(|d| vec![*d]))
    {
        ranked.call = named;
    }
}

impl VideoSearchResult {
    fn add_rejection(&mut self, example: String, diagnostic: Diagnostic) {
        let entry = self.rejected.entry(diagnostic.code.id).or_insert(RejectedMappings {
            count: 0,
            example,
            diagnostic,
        });
        entry.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use tessera_cost::{MachineModel, Profile};
    use tessera_mesh::catalog;
    use tessera_models::{MediaPhases, VideoModel, build_phases, list_calls};

    use super::*;

    fn logical(layers: u64, heads: u64, cache: &str) -> LogicalModel {
        let config = format!(
            r#"{{"dim":{},"ffn_dim":104,"num_heads":{heads},"num_layers":{layers},"in_dim":4,"out_dim":4,"text_len":7,
            "text_dim":20,"freq_dim":32}}"#,
            heads * 12
        );
        let stream = format!("[video]\nwidth = 80\nheight = 48\n[cache]\nmode = \"{cache}\"\n");
        let m = VideoModel::parse(("config.json", &config), ("stream.toml", &stream)).unwrap();
        LogicalModel {
            phases: build_phases(&m, MediaPhases::BesideCalls),
            calls: list_calls(&m, MediaPhases::BesideCalls),
            heads: m.wan.heads,
            head_dim: m.wan.head_dim(),
            hidden_size: m.wan.dim,
            ffn_size: m.wan.ffn_dim,
            tokens: m.chunk_tokens(),
            blocks: m.wan.layers,
            experts: 0,
            decoder: crate::DecoderPrecision::Exact,
        }
    }

    /// Compares, for every mesh, the cached and the whole lowering, which must agree to the last
    /// bit; returns how many meshes the cache covered.
    fn compare_lowerings(
        l: &LogicalModel,
        dtype: DtypePolicy,
        machine: &MachineModel,
        meshes: &[(u32, u32)],
    ) -> usize {
        let call = l.calls.iter().find(|c| c.0 == "chunk.fill3").unwrap();
        let l = &without_unused_phases(l, &call.1);
        let mut shelf = LoweringCache::new(l, dtype, machine);
        let mut fast = 0;
        for &(tp, pp) in meshes {
            for cut in [(Strategy::Ulysses, 1), (Strategy::Megatron, 1), (Strategy::Megatron, 2)] {
                let mut mapping = build_mapping(tp, pp, cut, Topology::Mesh, 2, dtype).unwrap();
                if !mapping.check_fit(&l.model_extents()).is_empty() {
                    continue;
                }
                let words = format!("{} {} of {} blocks", mapping.mesh, mapping.strategy_label(), l.blocks);
                let bundle = lower(l, &mut mapping).unwrap();
                let estimate = estimate_call(&bundle, &call.0, &call.1, machine, false).unwrap();
                let bytes = memory_by_role(&bundle);
                let blocks = StageCosts::from_model(l).split_blocks(u64::from(pp));
                let Some(scored) = shelf.mesh_schedule(mapping.mesh, cut, &blocks) else { continue };
                fast += 1;
                assert_eq!(blocks, mapping.blocks, "{words}");
                assert_eq!(scored.role_memory, bytes, "{words}");
                let ranks: Vec<_> = bundle.roles.iter().map(|r| r.ranks.clone()).collect();
                assert_eq!(scored.schedule.roles, ranks, "{words}");
                let quick = call::simulate_call(&scored.schedule, &call.0, &call.1, machine).unwrap();
                assert!(quick == estimate, "{words}: {} for {}", quick.ns, estimate.ns);
            }
        }
        fast
    }

    fn machine(cluster: &str, profile: &str) -> MachineModel {
        MachineModel::new(catalog::get(cluster).unwrap(), Profile::builtin(profile).unwrap())
    }

    #[test]
    fn cached_stages_equal_those_of_the_whole_model() {
        // Heads, columns and tokens that tp does not divide; stages with unequal numbers of blocks,
        // some with one block.
        let meshes: Vec<(u32, u32)> = (1..=5)
            .flat_map(|tp| [1, 2, 3, 5, 7].map(|pp| (tp, pp)))
            .chain([(2, 4), (3, 9), (2, 11), (1, 14)])
            .collect();
        for cache in ["resident", "recompute"] {
            let l = logical(14, 5, cache);
            for (cluster, profile) in [("gb200-nvl72", "torch-2.11"), ("hgx-h200", "tessera")] {
                let fast = compare_lowerings(&l, DtypePolicy::F32, &machine(cluster, profile), &meshes);
                // Row chunks exist only with an all-reduce.
                let sums = meshes.iter().filter(|(tp, _)| *tp > 1).count();
                assert_eq!(fast, 2 * meshes.len() + sums, "{cache} {profile}: the cache covers every mesh");
            }
            for dtype in [DtypePolicy::Bf16, DtypePolicy::Fp8] {
                let fast = compare_lowerings(&l, dtype, &machine("hgx-h200", "torch-2.11"), &meshes[..10]);
                assert_eq!(fast, 25, "{cache} {}", dtype.name());
            }
        }
    }
}

//! Which mapping, of all that a number of devices allows, and why not the others.

use std::collections::BTreeMap;

use tessera_base::{Bytes, Code, Diagnostic, Diagnostics, Nanoseconds};
use tessera_cost::Machine;
use tessera_cost::bars::Kind;
use tessera_mesh::{Axis, Mesh};

use super::call::{self, CallEstimate, estimate_call};
use super::memory::{RankBytes, bytes_of_roles};
use super::period::{Decode, Period, Studio, period};
use super::shelf::{Cut, Shelf};
use crate::search::Objective;
use crate::{DtypePolicy, Logical, Mapping, Strategy, Topology, lower};

/// More memory than a device has.
pub static T1230: Code = Code {
    id: "T1230",
    title: "mapping needs more memory than a device has",
    page: "A rank keeps its weights, its caches, what calls bring and the slots of its largest phase, and the executor \
keeps some memory for itself. The fullest rank of this mapping would need more than its device has. More stages (pp) divide \
weights and caches; megatron divides weights over tp where ulysses keeps all of them on every rank.",
};
/// Too slow for a deadline.
pub static T1231: Code = Code {
    id: "T1231",
    title: "mapping misses the deadline",
    page: "The objective is a deadline per chunk: the time from one chunk to the next. This mapping's period is estimated to \
be longer. The message shows both. More devices, another strategy, a decoder that ranks share, fewer denoising steps or a \
smaller picture shorten it; a deadline that no mapping meets is better known now than on air.",
};
/// A way of decoding that does not fit.
pub static T1232: Code = Code {
    id: "T1232",
    title: "way of decoding does not fit the stream",
    page: "Where the next chunk's context needs pixels of this one, nothing can be decoded beside the next chunk; where it \
does not, nothing has to wait for an anchor. Ranks can share decode and encode only where the decoder is said to be \
shardable. A decoder on a rank of its own needs topology pp0 or pp1, one on the mesh needs topology mesh.",
};

/// What is asked.
#[derive(Debug, Clone)]
pub struct Question<'a> {
    /// The model.
    pub logical: &'a Logical,
    /// The call of a chunk in the middle of a stream, by its name in [`Logical::calls`].
    pub call: &'a str,
    /// Pixel frames of a chunk.
    pub frames: u64,
    /// The machine.
    pub machine: &'a Machine,
    /// Devices that may be used.
    pub devices: u32,
    /// Fewest devices that are to be used; 1 for any number.
    pub at_least: u32,
    /// What is wanted: the shortest time to a chunk's last pixel, the most frames per second, the least memory, or the
    /// fewest devices whose period is no longer than a deadline.
    pub objective: Objective,
    /// What surrounds the generator.
    pub studio: Studio,
    /// Time of one message between leader and workers, in nanoseconds.
    pub message_ns: f64,
    /// What programs compute in.
    pub dtype: DtypePolicy,
    /// What is fixed.
    pub pins: Pins,
    /// How many of the best are told.
    pub keep: usize,
}

/// What is fixed; the rest is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pins {
    /// Ranks of tp.
    pub tp: Option<u32>,
    /// Stages.
    pub pp: Option<u32>,
    /// How tp cuts a block.
    pub strategy: Option<Strategy>,
    /// Pieces that rows are cut into.
    pub pieces: Option<u32>,
    /// Where the leader stands.
    pub topology: Option<Topology>,
    /// Who decodes, and when.
    pub decode: Option<Decode>,
    /// Calls sent and not done.
    pub outstanding: Option<u32>,
}

/// What one mapping comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranked {
    /// The mapping: what a stream runs.
    pub mapping: Mapping,
    /// Who decodes, and when.
    pub decode: Decode,
    /// Devices in use.
    pub devices: u32,
    /// One call. A search keeps bars of the best alone.
    pub call: CallEstimate,
    /// The pace of the stream.
    pub period: Period,
    /// From when an input can last enter a call to the last pixel of its chunk, in nanoseconds: calls already sent come
    /// first.
    pub latency_ns: f64,
    /// Frames per second.
    pub fps: f64,
    /// The fullest rank of the mesh.
    pub memory: RankBytes,
    /// Ranks that compute at once, on the mean over the call: what heats the machine.
    pub computing: f64,
}

/// Candidates refused for one reason.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// How many.
    pub count: u64,
    /// One of them, in words.
    pub example: String,
    /// Why it was.
    pub says: Diagnostic,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Candidates looked at.
    pub considered: u64,
    /// Of them, those that can run and keep what was asked.
    pub legal: u64,
    /// The others, by the code of the first reason.
    pub refused: BTreeMap<&'static str, Refused>,
    /// The best, best first.
    pub best: Vec<Ranked>,
}

/// Tries every mapping of the devices. No candidate is dropped without being counted under a reason.
#[must_use]
pub fn search(q: &Question<'_>) -> Outcome {
    search_telling(q, &mut |_, _| ())
}

/// The same, and tells how many meshes of how many are done.
#[must_use]
pub fn search_telling(q: &Question<'_>, tell: &mut dyn FnMut(usize, usize)) -> Outcome {
    let mut out = Outcome { considered: 0, legal: 0, refused: BTreeMap::new(), best: Vec::new() };
    let needed = steady(q).map(|(_, phases)| needed(q.logical, phases));
    let mut shelf = needed.as_ref().ok().map(|l| Shelf::new(l, q.dtype, q.machine));
    let meshes = meshes(q);
    for (done, (tp, pp, cut)) in meshes.iter().copied().enumerate() {
        tell(done, meshes.len());
        // What lies outside the mesh changes neither its programs nor its memory.
        let mut played: Option<Result<Played, Diagnostics>> = None;
        for (topology, decode, outstanding) in surroundings(q, tp * pp) {
            out.considered += 1;
            let mapping = match mapping(tp, pp, cut, topology, outstanding, q.dtype) {
                Ok(m) => m,
                Err(d) => {
                    out.refuse(format!("tp={tp},pp={pp}"), *d);
                    continue;
                }
            };
            let wrong = mapping.misfits(&q.logical.extents());
            let ranked = if wrong.is_empty() {
                match played.get_or_insert_with(|| play_shortly(q, &mapping, shelf.as_mut())) {
                    Ok(p) => finish(q, &mapping, decode, p),
                    Err(ds) => Err(ds.clone()),
                }
            } else {
                Err(wrong)
            };
            match ranked {
                Ok(ranked) => {
                    out.legal += 1;
                    out.best.push(ranked);
                    out.best.sort_by(|a, b| better(q, a, b));
                    out.best.truncate(q.keep.max(1));
                }
                Err(ds) => {
                    if let Some(first) = ds.into_iter().next() {
                        out.refuse(words(&mapping, decode), first);
                    }
                }
            }
        }
    }
    if let Some(best) = out.best.first_mut() {
        name_bars(q, best);
    }
    tell(meshes.len(), meshes.len());
    out
}

/// What one mapping comes to, with every bar named.
///
/// # Errors
/// Every reason why it does not fit the model, or the first why it does not fit the machine or the question.
pub fn estimate(q: &Question<'_>, mapping: &Mapping, decode: Decode) -> Result<Ranked, Diagnostics> {
    let wrong = mapping.misfits(&q.logical.extents());
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let mut ranked = play(q, mapping).and_then(|p| finish(q, mapping, decode, &p))?;
    name_bars(q, &mut ranked);
    Ok(ranked)
}

/// Most pieces that rows are cut into where nobody says: more of them hide little more, and products of fewer rows are slower.
const PIECES: u32 = 2;

/// Sizes of the mesh, strategies over it, and pieces where a strategy sums.
fn meshes(q: &Question<'_>) -> Vec<(u32, u32, Cut)> {
    let mut out = Vec::new();
    let free = |pin: Option<u32>| pin.map_or(1..=q.devices, |n| n..=n);
    for pp in free(q.pins.pp) {
        for tp in free(q.pins.tp) {
            if u64::from(tp) * u64::from(pp) > u64::from(q.devices) {
                continue;
            }
            for strategy in [Strategy::Ulysses, Strategy::Megatron] {
                // On one rank there is nothing to cut.
                let same = tp == 1 && strategy == Strategy::Megatron && q.pins.strategy.is_none();
                if same || q.pins.strategy.is_some_and(|s| s != strategy) {
                    continue;
                }
                let most = if tp > 1 && strategy == Strategy::Megatron { PIECES } else { 1 };
                let pieces = q.pins.pieces.map_or(1..=most, |n| n..=n);
                out.extend(pieces.map(|n| (tp, pp, (strategy, n))));
            }
        }
    }
    out
}

/// Where the leader stands, who decodes, and how many calls are under way, for a mesh of so many ranks.
fn surroundings(q: &Question<'_>, ranks: u32) -> Vec<(Topology, Decode, u32)> {
    let mut out = Vec::new();
    let outside = if ranks == 1 { Topology::Pp0 } else { Topology::Pp1 };
    let topologies = match q.pins.topology {
        Some(t) => vec![t],
        None => vec![Topology::Mesh, outside],
    };
    for topology in topologies {
        let used = ranks + topology.outside();
        if used > q.devices || used < q.at_least {
            continue;
        }
        for decode in Decode::ALL {
            let offered = decode.fits(&q.studio) && decode.outside() == topology.outside();
            if q.pins.decode.map_or(offered, |d| d == decode) {
                for outstanding in q.pins.outstanding.map_or(1..=2, |n| n..=n) {
                    out.push((topology, decode, outstanding));
                }
            }
        }
    }
    out
}

fn mapping(
    tp: u32,
    pp: u32,
    (strategy, pieces): Cut,
    topology: Topology,
    outstanding: u32,
    dtype: DtypePolicy,
) -> Result<Mapping, Box<Diagnostic>> {
    let mut sizes = [1; 4];
    (sizes[Axis::Tp as usize], sizes[Axis::Pp as usize]) = (tp, pp);
    let mesh = Mesh::new(sizes)?;
    // A prepared call waits in the queue before the mesh, so the queue is as deep as calls are ahead.
    Ok(Mapping {
        topology,
        mesh,
        strategy,
        pieces,
        dtype,
        d_in: outstanding,
        max_outstanding: outstanding,
        ..Mapping::default()
    })
}

/// What a mesh does, whatever stands outside it.
struct Played {
    blocks: Vec<u64>,
    call: CallEstimate,
    memory: RankBytes,
    computing: f64,
}

impl Played {
    fn of(blocks: Vec<u64>, call: CallEstimate, bytes: Vec<RankBytes>) -> Played {
        let fullest = bytes.into_iter().max_by_key(|b| b.total());
        let computing = computing(&call);
        // Thousands of bars without names would be kept for each mapping, and nobody looks at them.
        let call = CallEstimate { bars: Vec::new(), ..call };
        Played { blocks, computing, call, memory: fullest.unwrap_or_default() }
    }
}

/// The same as [`play`], from few lowerings where that can be.
fn play_shortly(
    q: &Question<'_>,
    mapping: &Mapping,
    shelf: Option<&mut Shelf<'_>>,
) -> Result<Played, Diagnostics> {
    let (call, phases) = steady(q)?;
    if let Some(scored) = shelf.and_then(|s| s.score(mapping.mesh, (mapping.strategy, mapping.pieces)))
        // Where a score does not come to its end, the whole program says why.
        && let Ok(estimate) = call::play(&scored.score, call, phases, q.machine)
    {
        return Ok(Played::of(scored.blocks, estimate, scored.bytes));
    }
    play(q, mapping)
}

fn play(q: &Question<'_>, mapping: &Mapping) -> Result<Played, Diagnostics> {
    let (call, phases) = steady(q)?;
    let inside = Topology::Mesh;
    let mut mapping = Mapping { topology: inside, devices: Vec::new(), ..mapping.clone() };
    let bundle = lower(&needed(q.logical, phases), &mut mapping)?;
    let estimate = estimate_call(&bundle, call, phases, q.machine, false).map_err(|d| vec![*d])?;
    let precision = q.machine.profile.habits.precision;
    let dtype = mapping.dtype;
    Ok(Played::of(mapping.blocks, estimate, bytes_of_roles(&bundle, dtype, precision)))
}

fn steady<'a>(q: &'a Question<'_>) -> Result<(&'a str, &'a [String]), Diagnostics> {
    let found = q.logical.calls.iter().find(|(name, _)| name == q.call);
    found.map(|(name, phases)| (name.as_str(), phases.as_slice())).ok_or_else(|| {
        let names: Vec<&str> = q.logical.calls.iter().map(|c| c.0.as_str()).collect();
        vec![
            Diagnostic::error(&crate::mapping::T0605, format!("the model has no call `{}`", q.call))
                .hint(format!("its calls: {}", names.join(", "))),
        ]
    })
}

/// The model without the phases that neither the call runs nor any rank keeps weights for besides.
fn needed(l: &Logical, phases: &[String]) -> Logical {
    let wanted = |name: &String| phases.contains(name) || name == "text";
    Logical {
        phases: l.phases.iter().filter(|p| wanted(&p.name)).cloned().collect(),
        calls: Vec::new(),
        heads: l.heads,
        dim: l.dim,
        ffn: l.ffn,
        tokens: l.tokens,
        blocks: l.blocks,
    }
}

fn finish(q: &Question<'_>, mapping: &Mapping, decode: Decode, p: &Played) -> Result<Ranked, Diagnostics> {
    if !decode.fits(&q.studio) || decode.outside() != mapping.topology.outside() {
        return Err(vec![misplaced(q, mapping, decode)]);
    }
    let kept = p.memory.total().0 as f64 + q.machine.reserved_bytes();
    let has = q.machine.cluster.device.memory_bytes.value;
    if kept > has {
        return Err(vec![too_full(q, mapping, p)]);
    }
    // Commit follows done; what comes before it is hidden where a second call is under way and waits for no context.
    let messages = if mapping.max_outstanding > 1 && !q.studio.coupled { 2.0 } else { 4.0 };
    let ranks = mapping.mesh.inside();
    let pace = period(p.call.ns + messages * q.message_ns, ranks, &q.studio, decode);
    if let Objective::Deadline(Nanoseconds(deadline)) = q.objective
        && pace.ns > deadline as f64
    {
        return Err(vec![late(pace.ns, Nanoseconds(deadline))]);
    }
    let ahead = f64::from(mapping.max_outstanding.saturating_sub(1)) * pace.ns;
    Ok(Ranked {
        mapping: Mapping { blocks: p.blocks.clone(), ..mapping.clone() },
        decode,
        devices: ranks + mapping.topology.outside(),
        call: p.call.clone(),
        period: pace,
        latency_ns: pace.latency_ns + ahead,
        fps: q.frames as f64 / (pace.ns * 1e-9),
        memory: p.memory,
        computing: p.computing,
    })
}

fn misplaced(q: &Question<'_>, mapping: &Mapping, decode: Decode) -> Diagnostic {
    let fitting: Vec<&str> = Decode::ALL
        .into_iter()
        .filter(|d| d.fits(&q.studio) && d.outside() == mapping.topology.outside())
        .map(Decode::name)
        .collect();
    let chunks = if q.studio.coupled { "coupled" } else { "not coupled" };
    let shared = if q.studio.shardable.is_some() { "can be shared" } else { "cannot be shared" };
    let d = Diagnostic::error(
        &T1232,
        format!("{decode} with topology {}: chunks are {chunks}, decode {shared}", mapping.topology.name()),
    );
    if fitting.is_empty() { d } else { d.hint(format!("here: {}", fitting.join(", "))) }
}

fn too_full(q: &Question<'_>, mapping: &Mapping, p: &Played) -> Diagnostic {
    let has = Bytes(q.machine.cluster.device.memory_bytes.value as u64);
    let m = &p.memory;
    Diagnostic::error(
        &T1230,
        format!(
            "the fullest rank would keep {} of {has}: weights {}, caches {}, inputs {}, temporaries {}, executor {}",
            Bytes(m.total().0 + q.machine.reserved_bytes() as u64),
            m.weights,
            m.buffers,
            m.inputs,
            m.temporaries,
            Bytes(q.machine.reserved_bytes() as u64),
        ),
    )
    .at("mesh", mapping.mesh.to_string())
    .at("strategy", mapping.strategy.name())
    .at("device", q.machine.cluster.device.name.clone())
    .hint(match mapping.strategy {
        Strategy::Ulysses => "more stages divide weights; megatron divides them over tp too",
        Strategy::Megatron => "more ranks of tp or more stages divide weights and caches",
    })
}

fn late(period_ns: f64, deadline: Nanoseconds) -> Diagnostic {
    Diagnostic::error(
        &T1231,
        format!("a chunk every {}, not every {deadline}", Nanoseconds(period_ns as u64)),
    )
    .hint("the objective `throughput` shows what can be had")
}

/// Best first. Ties go to fewer devices, then to fewer calls under way, then to the earlier candidate.
fn better(q: &Question<'_>, a: &Ranked, b: &Ranked) -> std::cmp::Ordering {
    let fps = b.fps.total_cmp(&a.fps);
    let latency = a.latency_ns.total_cmp(&b.latency_ns);
    let devices = a.devices.cmp(&b.devices);
    let calm = a.mapping.max_outstanding.cmp(&b.mapping.max_outstanding);
    match q.objective {
        Objective::Latency => latency.then(fps).then(devices),
        Objective::Throughput => fps.then(latency).then(devices),
        Objective::Memory => a.memory.total().cmp(&b.memory.total()).then(fps).then(latency).then(devices),
        Objective::Deadline(_) => devices.then(latency).then(fps),
    }
    .then(calm)
}

fn words(m: &Mapping, decode: Decode) -> String {
    format!("{} {} {} {decode}", m.mesh, m.cut(), m.topology.name())
}

/// Ranks that compute at once, on the mean.
fn computing(call: &CallEstimate) -> f64 {
    let people: BTreeMap<u32, usize> = call.players.iter().map(|p| (p.rank.0, p.stands_for.len())).collect();
    let busy = call.bars.iter().filter(|b| b.kind == Kind::Compute);
    let all: f64 = busy.map(|b| b.ns() * people.get(&b.rank).map_or(0.0, |n| *n as f64)).sum();
    if call.ns > 0.0 { all / call.ns } else { 0.0 }
}

/// Plays the call once more for a chart that people read.
fn name_bars(q: &Question<'_>, ranked: &mut Ranked) {
    let Ok((call, phases)) = steady(q) else { return };
    let mut inside = Mapping { topology: Topology::Mesh, devices: Vec::new(), ..ranked.mapping.clone() };
    let bundle = lower(&needed(q.logical, phases), &mut inside);
    if let Ok(named) =
        bundle.and_then(|b| estimate_call(&b, call, phases, q.machine, true).map_err(|d| vec![*d]))
    {
        ranked.call = named;
    }
}

impl Outcome {
    fn refuse(&mut self, example: String, says: Diagnostic) {
        let entry = self.refused.entry(says.code.id).or_insert(Refused { count: 0, example, says });
        entry.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use tessera_cost::Profile;
    use tessera_mesh::clusters;
    use tessera_models::{VideoModel, calls, phases};

    use super::*;

    fn logical(layers: u64, heads: u64, cache: &str) -> Logical {
        let config = format!(
            r#"{{"dim":{},"ffn_dim":104,"num_heads":{heads},"num_layers":{layers},"in_dim":4,"out_dim":4,"text_len":7,
            "text_dim":20,"freq_dim":32}}"#,
            heads * 12
        );
        let stream = format!("[video]\nwidth = 80\nheight = 48\n[cache]\nmode = \"{cache}\"\n");
        let m = VideoModel::parse(("config.json", &config), ("stream.toml", &stream)).unwrap();
        Logical {
            phases: phases(&m),
            calls: calls(&m),
            heads: m.wan.heads,
            dim: m.wan.dim,
            ffn: m.wan.ffn_dim,
            tokens: m.chunk_tokens(),
            blocks: m.wan.layers,
        }
    }

    /// Every mesh of a question by both ways, which must agree to the last bit; how many came off the shelf.
    fn compare(l: &Logical, dtype: DtypePolicy, machine: &Machine, meshes: &[(u32, u32)]) -> usize {
        let call = l.calls.iter().find(|c| c.0 == "chunk.fill3").unwrap();
        let l = &needed(l, &call.1);
        let mut shelf = Shelf::new(l, dtype, machine);
        let mut fast = 0;
        for &(tp, pp) in meshes {
            for cut in [(Strategy::Ulysses, 1), (Strategy::Megatron, 1), (Strategy::Megatron, 2)] {
                let mut mapping = mapping(tp, pp, cut, Topology::Mesh, 2, dtype).unwrap();
                if !mapping.misfits(&l.extents()).is_empty() {
                    continue;
                }
                let words = format!("{} {} of {} blocks", mapping.mesh, mapping.cut(), l.blocks);
                let bundle = lower(l, &mut mapping).unwrap();
                let estimate = estimate_call(&bundle, &call.0, &call.1, machine, false).unwrap();
                let bytes = bytes_of_roles(&bundle, dtype, machine.profile.habits.precision);
                let Some(scored) = shelf.score(mapping.mesh, cut) else { continue };
                fast += 1;
                assert_eq!(scored.blocks, mapping.blocks, "{words}");
                assert_eq!(scored.bytes, bytes, "{words}");
                let ranks: Vec<_> = bundle.roles.iter().map(|r| r.ranks.clone()).collect();
                assert_eq!(scored.score.roles, ranks, "{words}");
                let quick = call::play(&scored.score, &call.0, &call.1, machine).unwrap();
                assert!(quick == estimate, "{words}: {} for {}", quick.ns, estimate.ns);
            }
        }
        fast
    }

    fn machine(cluster: &str, profile: &str) -> Machine {
        Machine::new(clusters::named(cluster).unwrap(), Profile::named(profile).unwrap())
    }

    #[test]
    fn stages_off_the_shelf_are_those_of_the_whole_model() {
        // Heads, columns and tokens that do not divide; stages of unequal numbers of blocks, one block among them.
        let meshes: Vec<(u32, u32)> = (1..=5)
            .flat_map(|tp| [1, 2, 3, 5, 7].map(|pp| (tp, pp)))
            .chain([(2, 4), (3, 9), (2, 11), (1, 14)])
            .collect();
        for cache in ["resident", "recompute"] {
            let l = logical(14, 5, cache);
            for (cluster, profile) in [("gb200-nvl72", "torch-2.11"), ("hgx-h200", "tessera")] {
                let fast = compare(&l, DtypePolicy::F32, &machine(cluster, profile), &meshes);
                // Without a sum there are no pieces.
                let sums = meshes.iter().filter(|(tp, _)| *tp > 1).count();
                assert_eq!(fast, 2 * meshes.len() + sums, "{cache} {profile}: none needed the whole model");
            }
            for dtype in [DtypePolicy::Bf16, DtypePolicy::Fp8] {
                let fast = compare(&l, dtype, &machine("hgx-h200", "torch-2.11"), &meshes[..10]);
                assert_eq!(fast, 25, "{cache} {}", dtype.name());
            }
        }
    }
}

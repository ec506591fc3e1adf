//! What a rank's process does: join, judge the plan again, load, run, close the record.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics, Format, render_all};
use tessera_cpu::{Cpu, Pool};
use tessera_device::Seat;
use tessera_ir::Program;
use tessera_mesh::{Axis, Rank};
use tessera_models::steps;
use tessera_runtime::cache::{CacheSpec, Regime};
use tessera_runtime::census::Census;
use tessera_runtime::decide::{Cut, Step, StreamSpec};
use tessera_runtime::driver::{
    EngineFactory, Interrupt, Joined, LeaderParts, MeshLeaderParts, RecordEntry, StreamRequest, Tap,
    Topology, WorkerParts, exit, exit_at_once, join, run_leader, run_mesh_leader, run_worker,
};
use tessera_runtime::engine::{Engine, Studio, T0737};
use tessera_runtime::flight::{Mark, Sink};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::tripwire::T0751;
use tessera_runtime::wire::{Progress, Reload};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{Digest, Failure, FailureClass, Limits, Parity, Place, Tripwires};

use crate::comm::Lanes;
use crate::cuda::OnGpus;
use crate::drill::{Arming, Hand};
use crate::engine::{Held, MeshEngine, census, mesh_phases};
use crate::flight::FlightRecord;
use crate::modelled::{Modelled, ModelledEngine};
use crate::parity::{groups_among, shown};
use crate::plan::Plan;
use crate::record::{Asked, RecordWriter};
use crate::shards::opener;
use crate::studio::{Reel, lock};
use crate::{Model, comm};

/// Longest wait inside one collective. The lockstep decides what is a stall, by marks and learned limits; this only
/// ends a wait that nobody watches any more.
const COLLECTIVE_PATIENCE: Duration = Duration::from_secs(3600);

/// What the launcher tells every rank. Decisions of the stream are the leader's; workers read paths and digests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Folder of the sealed plan.
    pub(crate) plan: PathBuf,
    /// Its digest.
    pub(crate) digest: String,
    /// Folder of the model.
    pub(crate) model: PathBuf,
    /// Folder of the run.
    pub(crate) out: PathBuf,
    /// Threads of each rank.
    pub(crate) threads: usize,
    /// Chunks wanted.
    pub(crate) chunks: u32,
    /// Prompts by the chunk from which they hold; the first is of chunk 0.
    pub(crate) prompts: Vec<(u32, String)>,
    /// Seeds likewise.
    pub(crate) seeds: Vec<(u32, u64)>,
    /// Chunks before which the scene is cut.
    pub(crate) cuts: Vec<u32>,
    /// Chunks before which the scene is cut without waiting.
    pub(crate) flushes: Vec<u32>,
    /// Folders of weights to load before a chunk, and what their digest must be.
    pub(crate) weights: Vec<(u32, String, Digest)>,
    /// Whether to write every frame as a PNG.
    pub(crate) png: bool,
    /// Times that stand for work.
    pub(crate) modelled: Modelled,
    /// What ranks of the mesh need on GPUs; none where all are on processors.
    pub(crate) gpus: Option<OnGpus>,
    /// A fault that is armed on purpose.
    pub(crate) drill: Option<Arming>,
}

impl Orders {
    /// Threads of a rank's own kernels; none where a GPU computes.
    fn threads(&self) -> Option<usize> {
        self.gpus.is_none().then_some(self.threads)
    }

    /// What was asked of a request, counted from 0: of a chunk, as the command line counts them.
    pub(crate) fn asked(&self, request: u64) -> Asked {
        let chunk = u32::try_from(request).unwrap_or(u32::MAX);
        Asked {
            prompt: in_force(&self.prompts, chunk).cloned().unwrap_or_default(),
            seed: in_force(&self.seeds, chunk).copied().unwrap_or(0),
            cut: self.cut(chunk).is_cut() || self.reload(chunk).is_some(),
        }
    }

    fn request(&self, chunk: u32) -> StreamRequest {
        let prompt = self.prompts.iter().rev().find(|(c, _)| *c == chunk).map(|(_, p)| p.clone());
        let seed = self.asked(u64::from(chunk)).seed;
        StreamRequest { prompt, seed, cut: self.cut(chunk), reload: self.reload(chunk) }
    }

    pub(crate) fn cut(&self, chunk: u32) -> Cut {
        match (self.flushes.contains(&chunk), self.cuts.contains(&chunk)) {
            (true, _) => Cut::Flush,
            (_, true) => Cut::Ordered,
            _ => Cut::None,
        }
    }

    fn reload(&self, chunk: u32) -> Option<Reload> {
        let found = self.weights.iter().find(|(c, ..)| *c == chunk);
        found.map(|(_, source, weights)| Reload { source: source.clone(), weights: *weights })
    }
}

/// The value that holds at a chunk: the last one given at or before it.
fn in_force<T>(changes: &[(u32, T)], chunk: u32) -> Option<&T> {
    changes.iter().filter(|(c, _)| *c <= chunk).max_by_key(|(c, _)| *c).map(|(_, v)| v)
}

/// Runs one rank to its end; the exit status of its process. `met` is called once the rank holds its links: from then on
/// a first request to stop is the launcher's to answer.
#[must_use]
pub fn rank_main(met: impl FnOnce()) -> i32 {
    let joined = match join() {
        Ok(j) => j,
        Err(d) => return report(&[d]),
    };
    met();
    let orders: Orders = match serde_json::from_slice(&joined.welcome.payload) {
        Ok(o) => o,
        Err(e) => {
            eprintln!("tessera rank: the launcher's orders cannot be read: {e}");
            return FailureClass::Parity.exit_code();
        }
    };
    let rank = Rank(joined.welcome.rank);
    let outcome = match Arrival::launched(joined, &orders) {
        Ok(arrival) if rank.0 == 0 => lead(|| Ok(arrival), &orders),
        Ok(arrival) => follow(|| Ok(arrival), &orders, rank),
        Err(refused) => refused.map(Some),
    };
    // Handlers of a GPU's libraries would wait for work that does not end.
    let leave = if orders.gpus.is_some() { exit_at_once } else { exit };
    match outcome {
        // With a device they may still take their time.
        Ok(None) if orders.gpus.is_some() => exit(0),
        Ok(None) => 0,
        // The launcher prints the cause, once. Only when it is gone does the leader speak.
        Ok(Some(f)) => {
            if rank.0 == 0 && f.class == FailureClass::LauncherGone {
                eprintln!("tessera: {}: {} ({})", f.class.words(), f.text, f.code);
            }
            leave(f.class.exit_code())
        }
        Err(ds) => report(&ds),
    }
}

fn report(ds: &[Diagnostic]) -> i32 {
    eprint!("{}", render_all(ds, Format::Text, &|_| None));
    FailureClass::Preflight.exit_code()
}

/// How a rank came into its run.
pub(crate) struct Arrival {
    /// Who it is, with its links.
    pub(crate) joined: Joined,
    /// Its ends of collectives.
    pub(crate) lanes: Lanes,
    /// Its plan.
    pub(crate) common: Common,
    /// Stops a leader that nobody launched.
    pub(crate) interrupt: Option<Interrupt>,
    /// Told by a leader that nobody launched what a launcher would hear.
    pub(crate) tell: Option<Tell>,
}

/// Hears of a leader, in its own thread.
pub(crate) type Tell = Box<dyn FnMut(Told<'_>)>;

/// What a launcher would hear of a leader.
pub(crate) enum Told<'a> {
    /// A chunk was delivered.
    Chunk(&'a Progress),
    /// The run failed.
    Failed(&'a Failure),
}

impl Arrival {
    /// A failure where the launcher or the leader was told why this rank does not begin.
    fn launched(mut joined: Joined, orders: &Orders) -> Result<Arrival, Result<Failure, Diagnostics>> {
        let plan = load_plan(orders).map_err(|ds| refuse(&mut joined, ds))?;
        let common = Common::new(plan, orders.modelled);
        let lanes = std::mem::take(&mut joined.extras).into();
        Ok(Arrival { joined, lanes, common, interrupt: None, tell: None })
    }
}

/// What this rank found before it could begin, as a failure of the run where somebody waits to be told of it.
fn refuse(joined: &mut Joined, ds: Diagnostics) -> Result<Failure, Diagnostics> {
    let Some(d) = ds.first() else { return Err(ds) };
    let rank = joined.welcome.rank;
    let place = if rank == 0 { Place::Leader } else { Place::Init };
    let failure = Failure::from_diagnostic(FailureClass::Preflight, Some(rank), d).at(place);
    if joined.refuse(&failure) { Ok(failure) } else { Err(ds) }
}

/// The plan as this rank judges it, which must be the one that was ordered.
fn load_plan(orders: &Orders) -> Result<Arc<Plan>, Diagnostics> {
    let plan = Plan::read(&orders.plan)?;
    let found = plan.sealed.digest_hex();
    if found != orders.digest {
        return Err(vec![
            Diagnostic::error(&crate::plan::T0012, "this rank reads another plan than the launcher")
                .at("launcher", format!("digest {}", orders.digest))
                .at(orders.plan.display().to_string(), format!("digest {found}")),
        ]);
    }
    Ok(Arc::new(plan))
}

/// Settings that leader and workers take from the seal alone.
pub(crate) struct Common {
    plan: Arc<Plan>,
    digest: Digest,
    pub(crate) census: Arc<Census>,
    pub(crate) stream: StreamSpec,
    limits: Limits,
    build: String,
    modelled: Modelled,
    /// Who speaks with whom.
    links: Topology,
    /// What is not checked.
    tripwires: Tripwires,
    /// Of a rank that is a process of its own.
    flight: Option<Arc<FlightRecord>>,
    /// Digest of who is where, among ranks that joined.
    peers: Option<Digest>,
    /// Where ranks of the mesh are on GPUs.
    gpus: Option<OnGpus>,
    /// Breaks things on purpose.
    drill: Option<Hand>,
}

impl Common {
    pub(crate) fn new(plan: Arc<Plan>, modelled: Modelled) -> Common {
        Common {
            digest: Digest(plan.sealed.digest()),
            census: Arc::new(census(&plan.sealed)),
            stream: stream_spec(&plan),
            limits: limits(&plan),
            build: build(),
            modelled,
            links: links(&plan),
            tripwires: Tripwires::default(),
            flight: None,
            peers: None,
            gpus: None,
            drill: None,
            plan,
        }
    }

    /// Among peers that found each other.
    pub(crate) fn among(self, peers: Digest) -> Common {
        Common { peers: Some(peers), ..self }
    }

    /// Takes over where this rank runs, and what a drill says to it.
    fn arm(&mut self, orders: &Orders, rank: Rank) {
        self.gpus.clone_from(&orders.gpus);
        let Some(arming) = &orders.drill else { return };
        let hand = Hand::new(arming, rank, &orders.out);
        let Limits { d_in, d_out, max_outstanding, .. } = self.limits;
        self.limits = Limits { d_in, d_out, max_outstanding, ..hand.limits().clone() };
        self.tripwires = hand.off().clone();
        self.drill = Some(hand);
    }

    fn shows(&self, parity: Parity) -> Parity {
        self.drill.iter().fold(parity, |parity, hand| hand.shows(parity))
    }

    fn tap(&self) -> Option<Tap> {
        self.drill.as_ref().and_then(Hand::tap)
    }

    /// Begins this process's flight record.
    fn begin_flight(&mut self, orders: &Orders, session: u64, rank: Rank) {
        self.flight = FlightRecord::open(&orders.out, session, &self.plan.sealed, rank).map(Arc::new);
        self.mark(Mark::Joined);
    }

    fn sink(&self) -> Option<Arc<dyn Sink>> {
        self.flight.clone().map(|f| f as Arc<dyn Sink>)
    }

    fn mark(&self, mark: Mark<'_>) {
        if let Some(flight) = &self.flight {
            flight.mark(mark);
        }
    }

    /// Marks how this process is about to end.
    fn end_flight(&self, outcome: &Result<Option<Failure>, Diagnostics>) {
        let failure = match outcome {
            Ok(failure) => failure.clone(),
            Err(ds) => ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, None, d)),
        };
        if let Some(f) = &failure {
            self.mark(Mark::failed(f));
        }
        self.mark(Mark::Exit { status: failure.map_or(0, |f| f.class.exit_code()) });
    }

    fn worker(&self, rank: Rank) -> WorkerConfig {
        WorkerConfig {
            rank: rank.0,
            above: self.links.leads(rank.0).unwrap_or(0),
            plan: self.drill.iter().fold(self.digest, |plan, hand| hand.plan(plan)),
            build: self.build.clone(),
            parity: Parity::default(),
            census: Arc::clone(&self.census),
            cache: self.stream.cache,
            limits: self.limits.clone(),
            delivers: self.plan.mesh_ranks().next() == Some(rank),
            tripwires: self.tripwires.clone(),
        }
    }

    fn mesh_leader(&self, rank: Rank) -> MeshLeaderConfig {
        MeshLeaderConfig {
            rank: rank.0,
            members: self.plan.mesh_ranks().filter(|r| *r != rank).map(|r| r.0).collect(),
            plan: self.digest,
            census: Arc::clone(&self.census),
            cache: self.stream.cache,
            limits: self.limits.clone(),
            tripwires: self.tripwires.clone(),
        }
    }

    /// Loads programs and weights on the engine's thread.
    pub(crate) fn engine(
        &self,
        rank: Rank,
        model: &Path,
        threads: usize,
        lanes: impl Into<Lanes>,
    ) -> EngineFactory {
        let (lanes, peers) = (lanes.into(), self.peers);
        let (plan, model) = (Arc::clone(&self.plan), model.to_path_buf());
        let (flight, tripwires) = (self.flight.clone(), self.tripwires.clone());
        let (modelled, passes) = (self.modelled, self.stream.steps.len() as u64 + 1);
        let (drill, census, gpus) = (self.drill.clone(), Arc::clone(&self.census), self.gpus.clone());
        Box::new(move || {
            let mut weights = Model::under(&model, &plan)?.weights().map_err(first)?;
            let (backend, device) = match &gpus {
                None => (on_processors(&plan, rank, threads, lanes)?, Vec::new()),
                Some(on) => {
                    let (cuda, device) = on.open(&plan.sealed, rank, COLLECTIVE_PATIENCE)?;
                    // Its end would wait for peers and for the device; the process ends with it.
                    (Held::Kept(Box::leak(Box::new(cuda))), device)
                }
            };
            let engine = match &drill {
                None => MeshEngine::load(&plan.sealed, rank, backend, &mut weights)?,
                Some(hand) => {
                    let mut source = hand.source(&mut weights, *plan.sealed.mesh());
                    let change = |p: &mut Program| hand.program(p);
                    MeshEngine::load_changed(&plan.sealed, rank, backend, &mut *source, &change)?
                }
            };
            let weights_digest = weights.digest();
            let mut engine = engine.reloads(opener(Arc::clone(&plan), weights));
            engine.record(flight);
            engine.guard(tripwires.armed(&T0751));
            engine.guard_reload(tripwires.armed(&T0737));
            let threads = gpus.is_none().then_some(threads);
            let at = (gpus.is_some(), threads);
            let parity = shown(&plan, weights_digest, &modelled, engine.program_names(), at);
            let parity = device.into_iter().fold(parity, |parity, (key, value)| parity.set(key, value));
            let parity = groups_among(parity, &plan, peers);
            let parity = drill.iter().fold(parity, |parity, hand| hand.shows(parity));
            let engine: Box<dyn Engine> = match &drill {
                None => Box::new(engine),
                Some(hand) => hand.engine(engine, &census),
            };
            let engine = match modelled.generate_ns {
                // A steady chunk's passes: each step, and the one that makes or keeps the context.
                Some(ns) => Box::new(ModelledEngine::new(engine, ns, passes)),
                None => engine,
            };
            Ok((engine, parity))
        })
    }
}

/// A rank's backend on this host's processors.
fn on_processors(plan: &Plan, rank: Rank, threads: usize, lanes: Lanes) -> Result<Held, Diagnostic> {
    let ends = comm::attach_lanes(&plan.sealed, rank, lanes)?;
    let pool = Pool::new(threads)
        .map_err(|e| Diagnostic::error(&comm::T0017, format!("threads of rank {rank}: {e}")))?;
    let seat = Seat { mesh: *plan.sealed.mesh(), rank };
    Ok(Box::new(Cpu::new(seat, pool, ends, COLLECTIVE_PATIENCE)).into())
}

/// The build that every rank shows.
pub(crate) fn build() -> String {
    format!("tessera {}", env!("CARGO_PKG_VERSION"))
}

/// Control links of a plan's ranks.
pub(crate) fn links(plan: &Plan) -> Topology {
    if plan.mapping.topology.outside() == 0 { Topology::Mesh } else { Topology::Outside }
}

/// Bounds of a run of a plan.
pub(crate) fn limits(plan: &Plan) -> Limits {
    Limits {
        d_in: plan.mapping.d_in,
        d_out: plan.mapping.d_out,
        max_outstanding: plan.mapping.max_outstanding,
        ..Limits::default()
    }
}

pub(crate) fn stream_spec(plan: &Plan) -> StreamSpec {
    let (s, wan) = (&plan.video.stream, &plan.video.wan);
    StreamSpec {
        cache: CacheSpec {
            regime: if s.recompute { Regime::Recompute } else { Regime::Resident },
            chunk_frames: s.chunk_frames as u32,
            window_frames: s.window_frames as u32,
            table_frames: wan.rope_frames as u32,
            tokens_per_frame: plan.video.frame_tokens() as u32,
        },
        bias: s.bias as f32,
        steps: steps(s).into_iter().map(|s| Step { timestep: s.timestep, sigma: s.sigma }).collect(),
    }
}

/// A rank other than the leader.
pub(crate) fn follow(
    arrive: impl FnOnce() -> Result<Arrival, Diagnostics>,
    orders: &Orders,
    rank: Rank,
) -> Result<Option<Failure>, Diagnostics> {
    let Arrival { joined, lanes, mut common, .. } = arrive()?;
    common.arm(orders, rank);
    common.begin_flight(orders, joined.welcome.session, rank);
    let engine = common.engine(rank, &orders.model, orders.threads, lanes);
    let (config, flight, tap) = (common.worker(rank), common.sink(), common.tap());
    // The first rank of a mesh whose leader stands outside speaks for the others.
    let outcome = if common.links == Topology::Outside && common.plan.mesh_ranks().next() == Some(rank) {
        let (relay, engine) = (common.mesh_leader(rank), (config, engine));
        run_mesh_leader(joined, MeshLeaderParts { config: relay, engine, flight, tap })
    } else {
        run_worker(joined, WorkerParts { config, engine, topology: common.links, flight, tap })
    };
    common.end_flight(&outcome);
    outcome
}

/// The leader, which keeps the record.
pub(crate) fn lead(
    arrive: impl FnOnce() -> Result<Arrival, Diagnostics>,
    orders: &Orders,
) -> Result<Option<Failure>, Diagnostics> {
    let record = Arc::new(Mutex::new(RecordWriter::open(&orders.out).map_err(|d| vec![d])?));
    let led = arrive().map(|arrival| {
        let Arrival { joined, lanes, mut common, interrupt, tell } = arrival;
        let session = joined.welcome.session;
        common.arm(orders, Rank(0));
        common.begin_flight(orders, session, Rank(0));
        let parts = lead_with(session, lanes, orders, &common, &record, tell);
        (joined, common, parts.map(|parts| LeaderParts { interrupt, ..parts }))
    });
    let outcome = match led {
        Ok((joined, common, Ok(parts))) => {
            let outcome = run_leader(joined, parts);
            common.end_flight(&outcome);
            outcome
        }
        Ok((mut joined, common, Err(ds))) => {
            let outcome = refuse(&mut joined, ds).map(Some);
            common.end_flight(&outcome);
            outcome
        }
        Err(ds) => Err(ds),
    };
    let failure = match &outcome {
        Ok(f) => f.clone(),
        Err(ds) => ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, Some(0), d)),
    };
    let mut record = lock(&record);
    let complete = record.settled() == orders.chunks;
    // A clean end was written when the output was closed. A record that cannot be closed here is closed by the
    // launcher, which finds it without an end.
    let _ = record.end(failure.as_ref(), complete);
    outcome
}

/// Ranks that put out no latents: those behind the first stage.
pub(crate) fn silent(plan: &Plan) -> Vec<u32> {
    let mesh = plan.sealed.mesh();
    plan.mesh_ranks().filter(|r| mesh.coord_of(*r).on(Axis::Pp) > 0).map(|r| r.0).collect()
}

fn lead_with(
    session: u64,
    lanes: Lanes,
    orders: &Orders,
    common: &Common,
    record: &Arc<Mutex<RecordWriter>>,
    mut tell: Option<Tell>,
) -> Result<LeaderParts, Diagnostics> {
    lock(record).census(&common.plan.sealed);
    let ranks: Vec<Rank> = common.plan.mesh_ranks().collect();
    let parity = shown(
        &common.plan,
        Model::under(&orders.model, &common.plan).map_err(|d| vec![d])?.weights()?.digest(),
        &orders.modelled,
        mesh_phases(&common.plan.sealed),
        (orders.gpus.is_some(), orders.threads().filter(|_| ranks.contains(&Rank(0)))),
    );
    let config = LeaderConfig {
        ranks: ranks.iter().map(|r| r.0).collect(),
        plan: common.digest,
        session,
        build: common.build.clone(),
        silent: silent(&common.plan),
        parity: common.shows(groups_among(parity, &common.plan, common.peers)),
        census: Arc::clone(&common.census),
        stream: common.stream.clone(),
        limits: common.drill.iter().fold(common.limits.clone(), |limits, hand| hand.leader_limits(limits)),
        tripwires: common.tripwires.clone(),
    };
    let own = ranks.contains(&Rank(0)).then(|| {
        let engine = common.engine(Rank(0), &orders.model, orders.threads, lanes);
        (common.worker(Rank(0)), engine)
    });
    let studio = {
        let (plan, orders, record) = (Arc::clone(&common.plan), orders.clone(), Arc::clone(record));
        let drill = common.drill.clone();
        Box::new(move || {
            let words = Model::under(&orders.model, &plan)?.words().map_err(first)?;
            let reel = Reel::new(&plan, words, &orders, record)?;
            let reel: Box<dyn Studio> = Box::new(reel);
            Ok(drill.iter().fold(reel, |reel, hand| hand.studio(reel)))
        })
    };
    let requests = {
        let chunks = orders.chunks;
        let (orders, drill) = (orders.clone(), common.drill.clone());
        let asked = move |c| drill.iter().fold(orders.request(c), |asked, hand| hand.request(c, asked));
        Box::new((0..chunks).map(asked))
    };
    let entries = {
        let (orders, record) = (orders.clone(), Arc::clone(record));
        Box::new(move |entry: RecordEntry<'_>| {
            if let Some(tell) = &mut tell {
                match &entry {
                    RecordEntry::Progress(p) => tell(Told::Chunk(p)),
                    RecordEntry::Failed(f) => tell(Told::Failed(f)),
                    _ => {}
                }
            }
            let mut record = lock(&record);
            // What cannot be written here cannot be delivered either: the studio reports it.
            let _ = match entry {
                RecordEntry::Call(call) => {
                    let asked = call.request.filter(|_| !call.discarded).map(|r| orders.asked(r));
                    record.call(call, asked.as_ref(), None);
                    Ok(())
                }
                // The studio tells the record itself.
                RecordEntry::Progress(_) => Ok(()),
                RecordEntry::Note(note) => record.event("note", note),
                RecordEntry::Failed(f) => record.event("failed", &f.text),
                RecordEntry::Dropped { request, epoch, why, .. } => record.dropped(request, epoch, why),
                RecordEntry::Lost { call_id, chunk, epoch, ready, done } => record.event(
                    "lost",
                    &format!("call {call_id}, chunk {chunk}, epoch {epoch}: ready {ready:?}, done {done:?}"),
                ),
            };
        })
    };
    Ok(LeaderParts {
        config,
        engine: own,
        topology: common.links,
        studio,
        requests,
        record: entries,
        interrupt: None,
        flight: common.sink(),
        tap: common.tap(),
    })
}

/// The first of many: a thread that loads something reports one.
pub(crate) fn first(ds: Diagnostics) -> Diagnostic {
    ds.into_iter()
        .next()
        .unwrap_or_else(|| Diagnostic::error(&crate::model::T0010, "nothing was said about it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_that_cannot_begin_marks_it() {
        let dir = tempfile::tempdir().unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &crate::Overrides::default()).unwrap();
        let plan = crate::plan::make(&model.video, &model.name, "", &crate::Mapping::default()).unwrap();
        let options = crate::stream::StreamOptions {
            chunks: 1,
            out: dir.path().join("out"),
            ..crate::stream::StreamOptions::default()
        };
        let mut orders = crate::stream::orders(&plan, &model, &options, 1).unwrap();
        crate::stream::write_folder(&plan, &orders, &options).unwrap();
        // The model's folder is gone once the ranks have met.
        orders.model = dir.path().join("gone");
        let welcome = tessera_runtime::wire::Welcome {
            rank: 0,
            world: 1,
            session: 7,
            sockets: 0,
            extras: 0,
            payload: Vec::new(),
        };
        let arrival = Arrival {
            joined: Joined::over(welcome, Vec::new(), Vec::new()),
            lanes: Vec::new().into(),
            common: Common::new(Arc::new(plan), orders.modelled),
            interrupt: None,
            tell: None,
        };
        let refused = lead(|| Ok(arrival), &orders).unwrap_err();
        assert_eq!(refused[0].code.id, "T0010");
        let flight = std::fs::read_to_string(options.out.join("flight/rank-0.jsonl")).unwrap();
        assert!(flight.contains("failed") && flight.contains("T0010") && flight.contains("exit"), "{flight}");
    }

    #[test]
    fn orders_reach_a_rank_as_they_were_given() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &crate::Overrides::default()).unwrap();
        let plan = crate::plan::make(&model.video, &model.name, "", &crate::Mapping::default()).unwrap();
        let options = crate::stream::StreamOptions {
            chunks: 3,
            seed: 7,
            out: "run".into(),
            ..crate::stream::StreamOptions::default()
        };
        let orders = crate::stream::orders(&plan, &model, &options, 2).unwrap();
        assert_eq!(orders.threads(), Some(2));
        let on = OnGpus { lanes: vec!["ab".repeat(128), String::new()], first: 0 };
        let orders = Orders { gpus: Some(on.clone()), ..orders };
        let payload = serde_json::to_vec(&orders).unwrap();
        let read: Orders = serde_json::from_slice(&payload).unwrap();
        assert_eq!((read.gpus.as_ref(), read.threads()), (Some(&on), None));
        assert_eq!(serde_json::to_vec(&read).unwrap(), payload);
    }

    #[test]
    fn changes_hold_from_their_chunk_on() {
        let changes = [(0, "a"), (4, "b"), (2, "c")];
        let at = |c| in_force(&changes, c).copied();
        assert_eq!(
            [at(0), at(1), at(2), at(3), at(4), at(99)].map(Option::unwrap),
            ["a", "a", "c", "c", "b", "b"]
        );
    }
}

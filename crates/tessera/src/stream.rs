//! Runs a sealed plan as processes on this host and leaves a folder a person can read.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cpu::Cpu;
use tessera_cuda::Cuda;
use tessera_mesh::Rank;
use tessera_models::Decoder;
use tessera_report::overlap::Overlap;
pub use tessera_report::record::Device;
use tessera_report::record::{End, Line, PromptAt, RankRole, Reader, Record, SCHEMA, Start, Status};
use tessera_report::timeline::Span;
use tessera_runtime::driver::{Interrupt, LaunchEvent, LaunchSpec, launch};
use tessera_runtime::{Failure, FailureClass, Limits};

use crate::cuda::{self, OnGpus};
use crate::drill::Arming;
use crate::engine::LEADER_PHASES;
use crate::files::{Folder, refuse_existing, unwritable};
use crate::gpus::Gpus;
use crate::model::T0016;
use crate::modelled::Modelled;
use crate::plan::Plan;
use crate::rank::{Orders, first, links, stream_spec};
use crate::record::{DROPPED, RECORD, cause};
use crate::studio::clip;
use crate::{DtypePolicy, Model, comm, flight, page, preflight_reload};

/// More ranks than cores.
pub static T0015: Code = Code {
    id: "T0015",
    title: "mesh is larger than this machine",
    page: "Each rank is a process that computes; more ranks than cores take turns and run slower than fewer would. \
A leader outside the mesh only encodes and decodes and is not counted. Use a smaller mesh, or --oversubscribe if you want it so, for instance to try a plan for another machine.",
};
/// Options that contradict each other.
pub static T0018: Code = Code {
    id: "T0018",
    title: "stream options contradict each other",
    page: "The options ask for something that cannot be: no chunks at all, a chunk that is cut in two ways, or a change at a chunk that the stream never \
reaches. Chunks are counted from 0; a change at chunk N takes effect when chunk N begins.",
};

/// Chunks of a run that its page and its trace look at: the first and the last of them.
const KEPT_CHUNKS: usize = 1_000;
/// Longest line of a record that is read as one: the ranks of the largest mesh take a tenth of it.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// What to stream.
#[derive(Debug, Clone, Default)]
pub struct StreamOptions {
    /// Chunks.
    pub chunks: u32,
    /// First prompt.
    pub prompt: String,
    /// First seed.
    pub seed: u64,
    /// Later prompts by chunk.
    pub prompts_at: Vec<(u32, String)>,
    /// Later seeds by chunk.
    pub seeds_at: Vec<(u32, u64)>,
    /// Chunks before which the scene is cut.
    pub cuts_at: Vec<u32>,
    /// Chunks before which the scene is cut at once: what was asked for before and is not delivered is discarded.
    pub flushes_at: Vec<u32>,
    /// Folders of weights that every rank loads before a chunk, which opens a scene.
    pub weights_at: Vec<(u32, PathBuf)>,
    /// Folder of the run; must not exist.
    pub out: PathBuf,
    /// Whether to write every frame as a PNG too.
    pub png: bool,
    /// Whether to run more ranks than cores.
    pub oversubscribe: bool,
    /// Times that stand for work, to measure overlap.
    pub modelled: Modelled,
    /// What the ranks of the mesh compute on: processors or GPUs. A modelled run does not look at it.
    pub device: Device,
    /// A fault that is armed on purpose.
    pub drill: Option<Arming>,
    /// The command line, for the record.
    pub command: Vec<String>,
}

/// What happens while it runs.
#[derive(Debug, Clone)]
pub enum StreamEvent {
    /// All ranks were started.
    Started {
        /// Process ids in order of rank.
        pids: Vec<u32>,
    },
    /// A chunk is on disk.
    Chunk(ChunkProgress),
    /// No process of it is left; the folder is closed now.
    Gone,
}

/// A delivered chunk.
#[derive(Debug, Clone)]
pub struct ChunkProgress {
    /// The chunk, from 0.
    pub chunk: u32,
    /// Chunks asked for.
    pub chunks: u32,
    /// Frames on disk so far.
    pub frames: u64,
    /// Frames per second since the first chunk was delivered; of the first chunk, since the ranks started.
    pub fps: f64,
    /// Name and duration in nanoseconds of each phase on the first rank.
    pub phases: Vec<(String, u64)>,
    /// Requests waiting at the leader.
    pub queued_in: u32,
    /// Finished chunks waiting for delivery.
    pub queued_out: u32,
}

/// How a stream ended.
#[derive(Debug, Clone)]
pub struct StreamReport {
    /// Exit status that says so.
    pub exit_code: u8,
    /// The one failure, if it failed.
    pub failure: Option<Failure>,
    /// Whether it was asked to stop.
    pub interrupted: bool,
    /// Chunks on disk.
    pub chunks: u32,
    /// Chunks that were asked for and given up for a cut.
    pub dropped: u32,
    /// Frames on disk.
    pub frames: u64,
    /// Frames per second from the first call to the last delivery.
    pub fps: f64,
    /// Hash of all latents, if any chunk was delivered.
    pub golden: Option<String>,
    /// How its stages overlapped; none for a run of one chunk.
    pub overlap: Option<Overlap>,
    /// The machine whose times were modelled, in words; none where ranks ran here.
    pub machine: Option<String>,
    /// The run's folder.
    pub out: PathBuf,
}

/// Runs a plan. `argv` is the command line of a rank's process, which must call [`crate::rank_main`]. Blocks until
/// no process is left.
///
/// # Errors
/// What is wrong before anything was started or written. What goes wrong later is in the report.
pub fn run(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    argv: Vec<String>,
    interrupt: &Interrupt,
    on: &mut dyn FnMut(StreamEvent),
) -> Result<StreamReport, Diagnostics> {
    let ranks = plan.sealed.mesh().ranks();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let computing = plan.sealed.mesh().inside();
    let gpus = gpus(plan, options, computing as usize)?;
    check(plan, model, options, computing, cores)?;
    let on_gpus = gpus.as_ref().map(|g| cuda::lane_ids(g, &plan.sealed)).transpose().map_err(|d| vec![d])?;
    let on_gpus = on_gpus.map(|lanes| OnGpus { lanes, first: 0 });
    // Ranks on GPUs meet there.
    let specs = if on_gpus.is_some() { Vec::new() } else { comm::groups(&plan.sealed) };
    let arenas: Vec<Arc<OwnedFd>> =
        comm::create(&specs).map_err(|d| vec![d])?.into_iter().map(Arc::new).collect();
    let threads = (cores / computing as usize).max(1);
    let orders = orders(plan, model, options, threads).map_err(|d| vec![d])?;
    let orders = Orders { gpus: on_gpus, ..orders };
    let payload = serde_json::to_vec(&orders)
        .map_err(|e| vec![Diagnostic::error(&T0018, format!("the orders cannot be written down: {e}"))])?;
    write_folder(plan, &orders, options).map_err(|d| vec![d])?;
    let spec = LaunchSpec {
        argv,
        ranks,
        topology: links(plan),
        session: session(plan),
        extras: (0..ranks)
            .map(|r| comm::of_rank(&specs, Rank(r)).map(|i| Arc::clone(&arenas[i])).collect())
            .collect(),
        payload,
        env: if gpus.is_some() { cuda::environment() } else { Vec::new() },
        limits: options.drill.as_ref().map_or_else(Limits::default, |d| d.limits.clone()),
    };
    let mut tally = Tally::new(options.chunks);
    let launched = launch(&spec, interrupt, &mut |event| match event {
        LaunchEvent::Started(pids) => on(StreamEvent::Started { pids: pids.to_vec() }),
        LaunchEvent::Progress(p) => on(StreamEvent::Chunk(tally.chunk(p))),
    });
    on(StreamEvent::Gone);
    let (failure, interrupted) = match launched {
        Ok(report) => {
            flight::write_exits(&options.out, &report.exits);
            (report.failure, report.interrupted)
        }
        Err(ds) => {
            let d =
                ds.into_iter().next().unwrap_or_else(|| Diagnostic::error(&T0018, "the launch was refused"));
            (Some(Failure::from_diagnostic(FailureClass::Preflight, None, &d)), false)
        }
    };
    Ok(close(plan, options, failure, interrupted))
}

pub(crate) struct Tally {
    begun: Instant,
    /// When the first chunk was delivered, and its frames.
    first: Option<(Instant, u64)>,
    frames: u64,
    chunks: u32,
}

impl Tally {
    pub(crate) fn new(chunks: u32) -> Tally {
        Tally { begun: Instant::now(), first: None, frames: 0, chunks }
    }

    pub(crate) fn chunk(&mut self, p: &tessera_runtime::wire::Progress) -> ChunkProgress {
        self.frames += u64::from(p.frames);
        let now = Instant::now();
        let (since, before) = self.first.map_or((self.begun, 0), |f| f);
        self.first.get_or_insert((now, self.frames));
        let seconds = now.duration_since(since).as_secs_f64();
        ChunkProgress {
            chunk: p.chunk,
            chunks: self.chunks,
            frames: self.frames,
            fps: if seconds > 0.0 { (self.frames - before) as f64 / seconds } else { 0.0 },
            phases: p.phases.clone(),
            queued_in: p.queued_in,
            queued_out: p.queued_out,
        }
    }
}

/// The GPUs of this host, where `options` want them for so many of its ranks.
///
/// # Errors
/// The one thing that is missing.
pub(crate) fn gpus(plan: &Plan, options: &StreamOptions, ranks: usize) -> Result<Option<Gpus>, Diagnostics> {
    if options.device != Device::Cuda {
        return Ok(None);
    }
    let gpus = Gpus::look();
    cuda::check_plan(&gpus, &plan.sealed, ranks)?;
    Ok(Some(gpus))
}

/// Everything that can be known to be wrong before anything is written.
pub(crate) fn check(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    ranks: u32,
    cores: usize,
) -> Result<(), Diagnostics> {
    let mut ds = Vec::new();
    let on_gpus = options.device == Device::Cuda;
    if ranks as usize > cores && !options.oversubscribe && !on_gpus {
        ds.push(
            Diagnostic::error(&T0015, format!("{ranks} ranks on {cores} cores"))
                .at("mesh", plan.sealed.mesh().to_string())
                .hint(format!("use a mesh of at most {cores} ranks, or --oversubscribe")),
        );
    }
    ds.extend(check_options(options));
    ds.extend(beyond_the_kernels(plan, on_gpus));
    if plan.video.stream.recompute && plan.sealed.program("encode", Rank(0)).is_none() {
        ds.push(
            Diagnostic::error(&T0016, "the recompute regime needs a decoder for its anchor")
                .hint("use --cache resident"),
        );
    }
    ds.extend(refuse_existing(&options.out).err());
    let model = Model::under(&model.dir, plan).map_err(|d| vec![d])?;
    match model.words() {
        Ok(words) => {
            let prompts = std::iter::once(&options.prompt).chain(options.prompts_at.iter().map(|(_, p)| p));
            ds.extend(prompts.filter_map(|p| words.encode(p).err()).map(|d| *d));
        }
        Err(e) => ds.extend(e),
    }
    ds.extend(model.weights().err().into_iter().flatten());
    for (_, folder) in &options.weights_at {
        ds.extend(preflight_reload(plan, &model.dir, folder).err().into_iter().flatten());
    }
    ds.extend(stream_spec(plan).check());
    if plan.video.stream.decoder == Decoder::SpaceTimeDepth {
        ds.extend(clip(&plan.video).err());
    }
    if ds.is_empty() { Ok(()) } else { Err(ds) }
}

/// The first op of a plan that those who run it have no kernel for: every rank would refuse it after the start. What the
/// leader runs beside the mesh, processors run.
fn beyond_the_kernels(plan: &Plan, on_gpus: bool) -> Option<Diagnostic> {
    let firsts = plan.sealed.roles().iter().filter_map(|role| role.ranks.first());
    let mut programs = firsts.flat_map(|rank| {
        plan.sealed.phases().iter().filter_map(move |phase| plan.sealed.program(phase, *rank))
    });
    let refused = programs.find_map(|p| {
        let beside = LEADER_PHASES.contains(&p.name.as_str());
        if on_gpus && !beside { Cuda::refusal(p) } else { Cpu::refusal(p) }
    })?;
    if on_gpus {
        return Some(refused);
    }
    Some(match plan.mapping.dtype {
        DtypePolicy::F32 => refused,
        other => refused.at("plan", format!("dtype = \"{}\"", other.name())).hint(
            "plan it with --dtype f32, or run it on another device: cuda, or sim, which takes any dtype and computes no numbers",
        ),
    })
}

/// What is wrong with the options by themselves.
pub(crate) fn check_options(options: &StreamOptions) -> Diagnostics {
    let mut ds = Vec::new();
    let changes = options.prompts_at.iter().map(|(c, _)| *c).chain(options.seeds_at.iter().map(|(c, _)| *c));
    let cuts = options.cuts_at.iter().chain(&options.flushes_at).copied();
    for c in changes.chain(cuts).chain(options.weights_at.iter().map(|(c, _)| *c)) {
        if c >= options.chunks {
            ds.push(Diagnostic::error(
                &T0018,
                format!("a change at chunk {c} of a stream of {}", options.chunks),
            ));
        }
    }
    for c in options.flushes_at.iter().filter(|c| options.cuts_at.contains(c)) {
        ds.push(
            Diagnostic::error(&T0018, format!("chunk {c} is cut in two ways"))
                .hint("a flush is a cut that waits for nothing: name the chunk in one of the two"),
        );
    }
    if options.chunks == 0 {
        ds.push(Diagnostic::error(&T0018, "a stream of no chunks"));
    }
    ds
}

/// What every rank is told.
pub(crate) fn orders(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    threads: usize,
) -> Result<Orders, Diagnostic> {
    let mut prompts = vec![(0, options.prompt.clone())];
    prompts.extend(options.prompts_at.iter().cloned());
    let mut seeds = vec![(0, options.seed)];
    seeds.extend(options.seeds_at.iter().copied());
    let absolute = |p: &Path| std::path::absolute(p).map_err(|e| unwritable(p, &e));
    let out = absolute(&options.out)?;
    let weights = options.weights_at.iter().map(|(chunk, folder)| {
        let digest = preflight_reload(plan, &model.dir, folder).map_err(first)?;
        Ok((*chunk, absolute(folder)?.display().to_string(), digest))
    });
    let weights = weights.collect::<Result<Vec<_>, Diagnostic>>()?;
    Ok(Orders {
        plan: out.join("plan"),
        digest: plan.sealed.digest_hex(),
        model: absolute(&model.dir)?,
        out,
        threads,
        chunks: options.chunks,
        prompts,
        seeds,
        cuts: options.cuts_at.clone(),
        flushes: options.flushes_at.clone(),
        weights,
        png: options.png,
        modelled: options.modelled,
        gpus: None,
        drill: options.drill.clone(),
    })
}

/// The run's folder with its plan and the first line of its record; it appears whole.
pub(crate) fn write_folder(plan: &Plan, orders: &Orders, options: &StreamOptions) -> Result<(), Diagnostic> {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    write_begun(plan, options, Start { started_at: utc(started), ..start(plan, orders, options) })
}

/// The same with a first line at hand.
pub(crate) fn write_begun(plan: &Plan, options: &StreamOptions, start: Start) -> Result<(), Diagnostic> {
    let mut folder = Folder::create(&options.out)?;
    folder.write(RECORD, Line::Start(start).to_json().as_bytes())?;
    plan.write_into(&mut folder, "plan/")?;
    folder.finish()
}

/// The first line of a record, of no instant.
pub(crate) fn start(plan: &Plan, orders: &Orders, options: &StreamOptions) -> Start {
    let stream = &plan.video.stream;
    let sealed = &plan.sealed;
    Start {
        schema: SCHEMA,
        tessera: env!("CARGO_PKG_VERSION").into(),
        plan: sealed.digest_hex(),
        model: plan.model.clone(),
        mesh: sealed.mesh().to_string(),
        strategy: plan.mapping.cut(),
        numerics: plan.mapping.numerics.name().into(),
        dtype: plan.mapping.dtype.name().into(),
        cache: if stream.recompute { "recompute" } else { "resident" }.into(),
        topology: plan.mapping.topology.name().into(),
        seed: options.seed,
        prompts: orders
            .prompts
            .iter()
            .map(|(chunk, text)| PromptAt { chunk: *chunk, text: text.clone() })
            .collect(),
        chunks: Some(options.chunks),
        fps: stream.fps,
        width: stream.width as u32,
        height: stream.height as u32,
        steps: stream.steps.len() as u32,
        command: options.command.clone(),
        started_at: String::new(),
        status: Status::Running,
        ranks: sealed
            .roles()
            .iter()
            .flat_map(|r| r.ranks.iter().map(|rank| RankRole { rank: rank.0, role: r.role.clone() }))
            .collect(),
        device: options.device,
        machine: None,
    }
}

/// A session id: the plan and the moment. It only keeps two runs' messages apart.
pub(crate) fn session(plan: &Plan) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let digest = plan.sealed.digest();
    let head = digest.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
    head ^ now ^ (u64::from(std::process::id()) << 32)
}

/// Closes the record if the leader could not, and writes what is made from it.
pub(crate) fn close(
    plan: &Plan,
    options: &StreamOptions,
    failure: Option<Failure>,
    interrupted: bool,
) -> StreamReport {
    close_with(plan, options, failure, interrupted, Vec::new())
}

/// The same with ops to show in the trace.
pub(crate) fn close_with(
    plan: &Plan,
    options: &StreamOptions,
    failure: Option<Failure>,
    interrupted: bool,
    ops: Vec<Span>,
) -> StreamReport {
    let path = options.out.join(RECORD);
    let mut record = read(&path).and_then(Result::ok);
    if let Some(record) = &mut record
        && record.end.is_none()
    {
        let end = ending(record, failure.as_ref());
        append(&path, record.truncated, &Line::End(end.clone()));
        record.end = Some(end);
    }
    if let Some(record) = &record {
        page::write(plan, record, &options.out, ops);
    }
    let events = record.as_ref().map_or(&[][..], |r| &r.events);
    let dropped = events.iter().filter(|e| e.what == DROPPED).count() as u32;
    let overlap = record.as_ref().and_then(|r| Overlap::of(&r.chunks));
    let machine = record.as_ref().and_then(|r| r.start.machine.clone());
    let end = record.and_then(|r| r.end);
    let (chunks, frames, fps) = end.as_ref().map_or((0, 0, 0.0), |e| (e.chunks, e.frames, e.fps));
    let exit_code = match (&failure, interrupted) {
        (Some(f), _) => u8::try_from(f.class.exit_code()).unwrap_or(1),
        (None, true) => 130,
        (None, false) => 0,
    };
    let golden = end.filter(|e| !e.golden.is_empty() && e.chunks > 0).map(|e| e.golden);
    let out = options.out.clone();
    StreamReport {
        exit_code,
        failure,
        interrupted,
        chunks,
        dropped,
        frames,
        fps,
        golden,
        overlap,
        machine,
        out,
    }
}

/// A run's record, or what is wrong with it; nothing where there is no such file. Of a long run its beginning and its
/// end are kept, so that reading it takes no more memory than running.
pub(crate) fn read(path: &Path) -> Option<Result<Record, Diagnostic>> {
    // A pipe of that name would never end.
    std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let mut file = BufReader::new(std::fs::File::open(path).ok()?);
    let mut reader = Reader::new(KEPT_CHUNKS);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).ok()? == 0 {
            return Some(reader.end());
        }
        if let Err(d) = reader.line(&line) {
            return Some(Err(d));
        }
    }
}

/// The end of a record whose leader wrote none.
fn ending(record: &Record, failure: Option<&Failure>) -> End {
    let (chunks, frames) = (record.chunk_count(), record.frame_count());
    let begun = record.chunks.first().map_or(0, |c| c.start_ns);
    let ended = record.chunks.last().map_or(0, |c| c.start_ns + c.wall_ns);
    let wall_ns = ended.saturating_sub(begun);
    End {
        status: if failure.is_some() { Status::Failed } else { Status::Interrupted },
        cause: failure.map(cause),
        chunks,
        frames,
        wall_ns,
        fps: if wall_ns == 0 { 0.0 } else { frames as f64 / (wall_ns as f64 / 1e9) },
        output_complete: false,
        // The leader took the hash with it.
        golden: String::new(),
    }
}

/// Appends a line; after a cut line on a line of its own. A record that cannot be written to is left as it is:
/// the failure is told on the terminal all the same.
fn append(path: &Path, truncated: bool, line: &Line) {
    let text = if truncated { format!("\n{}", line.to_json()) } else { line.to_json() };
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::OpenOptions::new().append(true).open(path)?;
        std::io::Write::write_all(&mut file, text.as_bytes())
    };
    let _ = write();
}

/// `2026-11-20T23:51:00Z` from seconds since 1970.
#[must_use]
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to a civil date, by eras of 400 years beginning on 1 March.
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn instants_read_as_dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_219_200), "2026-11-21T00:00:00Z");
    }
}

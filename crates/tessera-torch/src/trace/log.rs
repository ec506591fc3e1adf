//! Reads the compile trace of one rank.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;

use serde_json::Value;
use tessera_base::Diagnostic;

use super::compile_id::CompileId;
use super::graph::{Direction, Graph, GraphReader, is_user_file};
use super::reasons::{GraphBreak, Recompile, read_break, read_recompile};
use super::records::{Header, LineReader, TraceLine, quote_line};
use crate::codes::T1410;

/// Maximum number of compiles of a log; later ones mark the log as cut.
const MAX_COMPILES: usize = 1 << 16;
/// Maximum number of collectives of a log, over all graphs; graphs beyond mark the log as cut.
const MAX_CALLS: usize = 1 << 20;
/// Maximum number of interned file names.
const MAX_STRINGS: usize = 1 << 16;
/// Maximum number of breaks, recompiles or cache events that are kept per compile.
const MAX_EVENTS: usize = 1 << 10;
/// Maximum bytes kept of a payload that is read as text.
const MAX_TEXT_BYTES: usize = 1 << 16;
/// PyTorch's own default of `torch._dynamo.config.recompile_limit`.
const DEFAULT_RECOMPILE_LIMIT: u32 = 8;

/// When a graph is recorded, from the first to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// What Dynamo traced: no backward yet. A cache hit records nothing later.
    Traced,
    /// Forward and backward as AOTAutograd separated them.
    Separated,
    /// What Inductor compiles.
    Compiled,
}

impl Stage {
    /// Name of the record that holds a graph of this stage.
    #[must_use]
    pub fn record_name(self) -> &'static str {
        match self {
            Stage::Traced => "dynamo_output_graph",
            Stage::Separated => "aot graphs",
            Stage::Compiled => "inductor_post_grad_graph",
        }
    }
}

/// The log of one rank.
#[derive(Debug, Clone)]
pub struct RankLog {
    /// Name of the file in reports.
    pub name: String,
    /// Rank, from the file name or the records; `None` if neither names one.
    pub rank: Option<u32>,
    /// Other ranks that records name.
    pub other_ranks: BTreeSet<u32>,
    /// Compiles in the order of their start.
    pub compiles: Vec<Compile>,
    /// Whether the log ends within a record, or holds more than the analysis keeps.
    pub is_cut: bool,
    /// Lines that are neither a header nor a payload.
    pub strange_lines: usize,
    /// Seconds from the first to the last record.
    pub span_s: f64,
    /// Compiles of one frame after which PyTorch runs it eagerly.
    pub recompile_limit: u32,
}

/// One compile of a frame.
#[derive(Debug, Clone, Default)]
pub struct Compile {
    /// Number.
    pub id: CompileId,
    /// Name of the compiled function.
    pub function: String,
    /// File and first line of the function.
    pub site: Option<String>,
    /// Lines that called it, the innermost last.
    pub stack: Vec<String>,
    /// Seconds from the first record of the log to the start of the compile.
    pub at_s: f64,
    /// Last attempt; PyTorch restarts a compile at a graph break.
    pub attempt: u32,
    /// Whether the log holds the end of the compile.
    pub is_finished: bool,
    /// Why the frame runs eagerly instead.
    pub failure: Option<String>,
    /// Number of ops that were traced; 0 if the log does not say.
    pub ops: u64,
    /// Graph breaks.
    pub breaks: Vec<GraphBreak>,
    /// Why an earlier compile of the frame did not fit.
    pub recompile: Option<Recompile>,
    /// Lookups in caches: the cache, and `hit`, `miss` or `bypass`.
    pub lookups: Vec<(String, String)>,
    /// Why the compile has no CUDA graph, if it was to have one.
    pub cudagraph_skip: Option<String>,
    /// Recordings of CUDA graphs, by direction: forward, backward.
    pub recordings: [u32; 2],
    /// Graphs by stage.
    pub graphs: BTreeMap<Stage, Vec<Graph>>,
}

impl Compile {
    /// Returns the latest stage of which the log holds a graph of this direction.
    #[must_use]
    pub fn last_stage(&self, direction: Direction) -> Option<Stage> {
        let has = |graphs: &[Graph]| graphs.iter().any(|g| g.direction == direction);
        self.graphs.iter().rev().find(|(_, graphs)| has(graphs)).map(|(stage, _)| *stage)
    }
}

/// What the lines of a payload are read as.
enum Payload {
    Graph(Stage, Box<GraphReader>),
    Break(String),
    Recompile(String),
    /// A timing event: whether it is the start of a CUDA graph's recording.
    Event {
        is_recording: bool,
        is_start: bool,
        is_backward: bool,
        id: Option<CompileId>,
    },
    Skipped,
}

struct LogReader {
    log: RankLog,
    index: BTreeMap<CompileId, usize>,
    strings: BTreeMap<u64, String>,
    payload: Payload,
    /// The compile that the payload belongs to.
    current: Option<usize>,
    records: usize,
    calls: usize,
    first_s: Option<f64>,
}

/// Reads the log of one rank. A log that ends within a record gives what it holds, marked as cut.
///
/// # Errors
/// T1410 if the log holds no record, or reading fails.
pub fn read_log(name: &str, rank: Option<u32>, reader: impl BufRead) -> Result<RankLog, Diagnostic> {
    let log = RankLog {
        name: name.to_string(),
        rank,
        other_ranks: BTreeSet::new(),
        compiles: Vec::new(),
        is_cut: false,
        strange_lines: 0,
        span_s: 0.0,
        recompile_limit: DEFAULT_RECOMPILE_LIMIT,
    };
    let mut out = LogReader {
        log,
        index: BTreeMap::new(),
        strings: BTreeMap::new(),
        payload: Payload::Skipped,
        current: None,
        records: 0,
        calls: 0,
        first_s: None,
    };
    let mut lines = LineReader::new(reader);
    let refuse = |why: String| {
        Diagnostic::error(&T1410, format!("{name} is no compile trace"))
            .with_label(name, why)
            .with_hint("record with TORCH_TRACE=DIR, and name DIR")
    };
    while let Some(line) = lines.read_line().map_err(|e| refuse(e.to_string()))? {
        match line {
            TraceLine::Header(header) => {
                out.finish_payload();
                out.push_header(&header);
            }
            TraceLine::Payload(text) => out.push_payload(text),
            TraceLine::Strange => out.log.strange_lines += 1,
        }
    }
    out.finish_payload();
    out.log.is_cut |= lines.is_cut;
    if out.records == 0 {
        return Err(refuse(
            "it holds no record of the form V1123 22:11:05.888000 968 file.py:25] {…}".into(),
        ));
    }
    Ok(out.log)
}

impl LogReader {
    fn push_header(&mut self, header: &Header) {
        self.records += 1;
        let first = *self.first_s.get_or_insert(header.seconds);
        let mut at_s = header.seconds - first;
        if at_s < -180.0 * 86400.0 {
            // A run over New Year: the times have no year.
            at_s += 365.0 * 86400.0;
        }
        self.log.span_s = self.log.span_s.max(at_s);
        if let Some(rank) = header.number("rank")
            && *self.log.rank.get_or_insert(rank) != rank
        {
            self.log.other_ranks.insert(rank);
        }
        if let Some([Value::String(text), id]) =
            header.get("str").and_then(Value::as_array).map(Vec::as_slice)
            && let Some(id) = id.as_u64().filter(|_| self.strings.len() < MAX_STRINGS)
        {
            self.strings.insert(id, quote_line(text));
        }
        if let Some(start) = header.get("dynamo_start")
            && let Some(at) = header.compile_id().and_then(|id| self.find_compile(id, at_s))
        {
            self.push_start(at, start, header.number("attempt").unwrap_or(0));
        }
        for key in ["compilation_metrics", "bwd_compilation_metrics"] {
            if let Some(metrics) = header.get(key) {
                self.push_metrics(header, metrics, at_s);
            }
        }
        self.open_payload(header, at_s);
    }

    /// Returns the compile with this number, new at its first record.
    fn find_compile(&mut self, id: CompileId, at_s: f64) -> Option<usize> {
        if let Some(at) = self.index.get(&id) {
            return Some(*at);
        }
        if self.log.compiles.len() >= MAX_COMPILES {
            self.log.is_cut = true;
            return None;
        }
        self.log.compiles.push(Compile { id, at_s, ..Compile::default() });
        self.index.insert(id, self.log.compiles.len() - 1);
        Some(self.log.compiles.len() - 1)
    }

    fn push_start(&mut self, at: usize, start: &Value, attempt: u32) {
        let frames = start.get("stack").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let lines: Vec<(String, String)> = frames.iter().map(|f| self.describe_frame(f)).collect();
        let compile = &mut self.log.compiles[at];
        if attempt > compile.attempt {
            // What an abandoned attempt recorded is not what runs.
            compile.graphs.clear();
            compile.attempt = attempt;
        }
        if let Some(((site, function), callers)) = lines.split_last() {
            compile.function.clone_from(function);
            compile.site = Some(site.clone());
            compile.stack = callers.iter().map(|(site, function)| format!("{site} in {function}")).collect();
        }
    }

    /// Returns `FILE:LINE` and the function of a frame of a stack.
    fn describe_frame(&self, frame: &Value) -> (String, String) {
        let file = match frame.get("filename") {
            Some(Value::String(text)) => quote_line(text),
            Some(id) => id.as_u64().and_then(|id| self.strings.get(&id).cloned()).unwrap_or_default(),
            None => String::new(),
        };
        let line = frame.get("line").and_then(Value::as_u64).unwrap_or(0);
        let function = frame.get("name").and_then(Value::as_str).unwrap_or("?");
        (format!("{file}:{line}"), quote_line(function))
    }

    fn push_metrics(&mut self, header: &Header, metrics: &Value, at_s: f64) {
        let text = |key: &str| metrics.get(key).and_then(Value::as_str);
        let id = header.compile_id().or_else(|| CompileId::from_text(text("compile_id")?));
        let Some(at) = id.and_then(|id| self.find_compile(id, at_s)) else { return };
        let compile = &mut self.log.compiles[at];
        compile.is_finished = true;
        if let Some(failure) = text("fail_type") {
            let reason = text("fail_reason").and_then(|r| r.lines().next()).unwrap_or("");
            compile.failure = Some(quote_line(&format!("{failure}: {reason}")));
        }
        compile.ops = compile.ops.max(metrics.get("graph_op_count").and_then(Value::as_u64).unwrap_or(0));
        if compile.function.is_empty() {
            compile.function = text("co_name").map_or(String::new(), quote_line);
        }
        if let Some(reason) = text("cudagraph_skip_reason") {
            compile.cudagraph_skip = Some(quote_line(reason));
        }
        if let Some(reason) = text("recompile_reason").filter(|_| compile.recompile.is_none()) {
            compile.recompile = Some(read_recompile(reason));
        }
        let limit = text("dynamo_config").and_then(|c| c.split_once("\"recompile_limit\": "));
        let digits = limit.map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or(""));
        if let Some(limit) = digits.and_then(|d| d.parse().ok()) {
            self.log.recompile_limit = limit;
        }
    }

    /// Decides how the lines of the record's payload are read.
    fn open_payload(&mut self, header: &Header, at_s: f64) {
        self.payload = Payload::Skipped;
        self.current = None;
        if header.get("chromium_event").is_some() {
            self.payload =
                Payload::Event { is_recording: false, is_start: false, is_backward: false, id: None };
            return;
        }
        let Some(id) = header.compile_id() else { return };
        let artifact = header.get("artifact").and_then(|a| a.get("name")).and_then(Value::as_str);
        let Some((kind, cache)) = artifact
            .or_else(|| header.keys().find(|k| payload_of(k).is_some()))
            .map(|name| (payload_of(name), read_lookup(name)))
        else {
            return;
        };
        if kind.is_none() && cache.is_none() {
            return;
        }
        let Some(at) = self.find_compile(id, at_s) else { return };
        self.current = Some(at);
        let lookups = &mut self.log.compiles[at].lookups;
        lookups.extend(cache.filter(|_| lookups.len() < MAX_EVENTS));
        self.payload = kind.unwrap_or(Payload::Skipped);
    }

    fn push_payload(&mut self, line: &str) {
        match &mut self.payload {
            Payload::Graph(_, graph) => graph.push_line(line),
            Payload::Break(text) | Payload::Recompile(text) => {
                if text.len() + line.len() < MAX_TEXT_BYTES {
                    text.push_str(line);
                    text.push('\n');
                }
            }
            Payload::Event { is_recording, is_start, is_backward, id } => match line.trim_end_matches(',') {
                "\"name\": \"CUDAGraphNode.record\"" => *is_recording = true,
                "\"ph\": \"B\"" => *is_start = true,
                "\"is_backward\": true" => *is_backward = true,
                line => {
                    if let Some(text) = line.strip_prefix("\"compile_id\": \"") {
                        *id = CompileId::from_text(text.trim_end_matches('"'));
                    }
                }
            },
            Payload::Skipped => {}
        }
    }

    fn finish_payload(&mut self) {
        let payload = std::mem::replace(&mut self.payload, Payload::Skipped);
        if let Payload::Event { is_recording: true, is_start: true, is_backward, id: Some(id) } = payload {
            let known = self.index.get(&id).map(|at| &mut self.log.compiles[*at]);
            if let Some(compile) = known {
                compile.recordings[usize::from(is_backward)] += 1;
            }
            return;
        }
        let Some(compile) = self.current.take().map(|at| &mut self.log.compiles[at]) else { return };
        match payload {
            Payload::Graph(stage, graph) => {
                let graph = graph.finish();
                self.calls += graph.calls.len();
                self.log.is_cut |= graph.is_cut || self.calls > MAX_CALLS;
                if self.calls > MAX_CALLS {
                    return;
                }
                compile.graphs.entry(stage).or_default().push(graph);
            }
            Payload::Break(text) if compile.breaks.len() < MAX_EVENTS => {
                compile.breaks.push(read_break(&text));
            }
            Payload::Recompile(text) => compile.recompile = Some(read_recompile(&text)),
            _ => {}
        }
    }
}

/// Returns how the payload of a record or an artifact of this name is read.
fn payload_of(name: &str) -> Option<Payload> {
    let graph = |stage, direction| Some(Payload::Graph(stage, Box::new(GraphReader::new(direction))));
    match name {
        "dynamo_output_graph" => graph(Stage::Traced, Direction::Forward),
        "aot_forward_graph" | "aot_inference_graph" => graph(Stage::Separated, Direction::Forward),
        "aot_backward_graph" => graph(Stage::Separated, Direction::Backward),
        "inductor_post_grad_graph" => graph(Stage::Compiled, Direction::Forward),
        "dynamo_graph_break_reason" => Some(Payload::Break(String::new())),
        "recompile_reasons" => Some(Payload::Recompile(String::new())),
        _ => None,
    }
}

/// Reads `fx_graph_cache_hit` as the cache and the outcome.
fn read_lookup(name: &str) -> Option<(String, String)> {
    let (cache, outcome) = name.rsplit_once('_')?;
    let is_cache = matches!(cache, "fx_graph_cache" | "aotautograd_cache");
    (is_cache && matches!(outcome, "hit" | "miss" | "bypass"))
        .then(|| (cache.to_string(), outcome.to_string()))
}

impl Compile {
    /// Returns the innermost line of the user's program that led to the compile.
    #[must_use]
    pub fn user_site(&self) -> Option<&str> {
        let own = self.site.iter().filter(|s| is_user_file(s));
        own.chain(self.stack.iter().rev().filter(|s| is_user_file(s))).map(String::as_str).next()
    }
}

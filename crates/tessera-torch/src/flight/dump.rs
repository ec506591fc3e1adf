//! The Flight Recorder dump of one rank.

mod json;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufRead;
use std::sync::Arc;

use tessera_base::Diagnostic;

use super::node::Node;
use super::pickle::{PickleProblem, PickleValue, read_pickle};
use crate::codes::{T1400, T1401, T1402, T1403};

/// Number of entries that are kept of a dump, from its end. PyTorch's own ring holds 2,000.
const MAX_ENTRIES: usize = 1 << 16;
/// Number of frames that are kept of a stack, from its innermost one.
const MAX_FRAMES: usize = 256;
/// Maximum bytes of texts, stacks and shapes that are kept of a dump.
const MAX_KEPT_BYTES: usize = 1 << 30;
/// Maximum number of members of a group. Ranks beyond it are no members.
const MAX_MEMBERS: usize = 1 << 17;

/// The progress of a collective on its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryState {
    /// The host enqueued the collective.
    Scheduled,
    /// The device started it. Known only with `TORCH_NCCL_ENABLE_TIMING=1`.
    Started,
    /// The device completed it.
    Completed,
}

/// A line of the Python or C++ stack at which a collective was issued.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StackFrame {
    /// Function.
    pub function: Arc<str>,
    /// Source file.
    pub file: Arc<str>,
    /// Line, from 1.
    pub line: u32,
}

/// A collective, or one send or receive, of a dump.
#[derive(Debug, Clone)]
pub struct FlightEntry {
    /// Index in the rank's own ring of all that it issued.
    pub record_id: u64,
    /// Name of the process group.
    pub group: Arc<str>,
    /// Sequence number of the collective in its group, from 1. One launch of several collectives has
    /// one number.
    pub sequence: u64,
    /// Numbers of its launch in the group, of collectives and of sends and receives. The parts of a
    /// coalesced launch have those of the entry that ends it.
    pub launch: (u64, u64),
    /// Whether it is a send or a receive.
    pub is_p2p: bool,
    /// Operation without the backend, such as `all_reduce` or `send 0->1`.
    pub op: Arc<str>,
    /// Shapes of the inputs, in elements.
    pub input_shapes: Arc<[Vec<u64>]>,
    /// Shapes of the outputs, in elements.
    pub output_shapes: Arc<[Vec<u64>]>,
    /// Dtypes of the inputs, as PyTorch names them: `Float`, `BFloat16`.
    pub input_dtypes: Arc<[Arc<str>]>,
    /// Progress at the time of the dump. The collectives of a coalesced launch have that of the launch.
    pub state: EntryState,
    /// Whether the watchdog took the collective off its list, which it does within a second of the end.
    pub retired: bool,
    /// When the host issued it, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Stack of the call, innermost first; empty if it was not recorded.
    pub frames: Arc<[StackFrame]>,
    /// Hash of the functions, file names and lines of the stack, without the folders, in which hosts may
    /// differ; 0 without a stack.
    pub stack_hash: u64,
}

/// A process group as a rank knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlightGroup {
    /// Description, such as `default_pg`.
    pub description: String,
    /// Members by global rank, in the order of their group ranks.
    pub ranks: Vec<u32>,
}

/// The dump of one rank.
#[derive(Debug, Clone, Default)]
pub struct FlightDump {
    /// Rank, from the name of the file.
    pub rank: u32,
    /// Version of the format: major and minor.
    pub version: (u32, u32),
    /// Groups by name.
    pub groups: BTreeMap<String, FlightGroup>,
    /// Number of the last collective that the rank enqueued, by name of the group, where the dump has it.
    /// A ring that lost all entries of a group still has this.
    pub last_enqueued: BTreeMap<String, u64>,
    /// The last entries, oldest first.
    pub entries: Vec<FlightEntry>,
    /// Whether the ring, or this reader, lost entries before the first one.
    pub lost_head: bool,
}

/// Reads a dump in either form.
///
/// # Errors
/// T1400 to T1403, each with the file's name.
pub fn read_dump(name: &str, rank: u32, mut reader: impl BufRead) -> Result<FlightDump, Diagnostic> {
    let first = reader.fill_buf().ok().and_then(|b| b.first().copied());
    let mut builder = DumpBuilder::default();
    let header = match first {
        Some(b'{') => read_json(name, reader, &mut builder)?,
        Some(0x80) => {
            let take = &mut |entry: PickleValue| builder.add_entry(&entry);
            let value =
                read_pickle(reader, "entries", take).map_err(|e| pickle_error(name, &e.problem, e.byte))?;
            Header::from_node(&value)
        }
        _ => return Err(unreadable(name, "it begins neither as a pickle nor as JSON".to_string())),
    };
    builder.finish(name, rank, header)
}

fn unreadable(name: &str, why: String) -> Diagnostic {
    Diagnostic::error(&T1400, format!("{name} is no readable Flight Recorder dump"))
        .with_label(name, why)
        .with_hint("leave the file out of the folder: its rank then counts as one without a dump")
}

fn pickle_error(name: &str, problem: &PickleProblem, byte: u64) -> Diagnostic {
    match problem {
        PickleProblem::Executes(opcode) => {
            Diagnostic::error(&T1401, format!("{name} would run code: opcode {opcode} at byte {byte}"))
                .with_label(name, "nothing was run")
        }
        PickleProblem::Unknown(opcode) => {
            unreadable(name, format!("unknown opcode {opcode:#04x} at byte {byte}"))
        }
        PickleProblem::Malformed(why) | PickleProblem::TooLarge(why) => {
            unreadable(name, format!("{why}, at byte {byte}"))
        }
    }
}

/// What a dump states about itself and its groups.
#[derive(Debug, Default)]
struct Header {
    version: String,
    groups: BTreeMap<String, FlightGroup>,
    /// Number of the last enqueued collective, by the rank's own number of the group.
    last_enqueued: BTreeMap<u64, u64>,
}

impl Header {
    fn from_node(node: &impl Node) -> Header {
        let mut groups = BTreeMap::new();
        for (name, config) in node.field("pg_config").map(|c| c.fields()).unwrap_or_default() {
            let text = |key: &str| config.field(key).and_then(|v| v.text()).unwrap_or_default();
            // PyTorch writes the members as the text of a list: "[0, 1]".
            let ranks = text("ranks");
            let ranks = ranks.trim_matches(['[', ']']).split(',').filter_map(|r| r.trim().parse().ok());
            let (description, ranks) = (text("desc").to_string(), ranks.take(MAX_MEMBERS).collect());
            groups.insert(name, FlightGroup { description, ranks });
        }
        let mut last_enqueued = BTreeMap::new();
        for (number, status) in node.field("pg_status").map(|s| s.fields()).unwrap_or_default() {
            let last = status.field("last_enqueued_collective").and_then(|v| read_number(&v));
            if let (Ok(number), Some(last)) = (number.parse(), last) {
                // -1 stands for none.
                last_enqueued.insert(number, u64::try_from(last).unwrap_or(0));
            }
        }
        let version = node.field("version").and_then(|v| v.text()).unwrap_or_default();
        Header { version: version.to_string(), groups, last_enqueued }
    }
}

/// Reads a number, which the JSON form writes as text in some places.
fn read_number(node: &impl Node) -> Option<i64> {
    node.int().or_else(|| node.text()?.parse().ok())
}

/// Reads the JSON form entry by entry.
fn read_json(name: &str, reader: impl BufRead, builder: &mut DumpBuilder) -> Result<Header, Diagnostic> {
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let header = serde::de::DeserializeSeed::deserialize(json::TopLevel(builder), &mut deserializer)
        .map_err(|e| unreadable(name, e.to_string()))?;
    Ok(Header::from_node(&header))
}

/// Collects entries, each text and stack once.
#[derive(Default)]
struct DumpBuilder {
    entries: VecDeque<FlightEntry>,
    /// The rank's own number of each group that an entry names.
    group_numbers: BTreeMap<Arc<str>, u64>,
    lost_head: bool,
    texts: HashMap<String, Arc<str>>,
    stacks: HashMap<Arc<[StackFrame]>, u64>,
    /// Bytes of the texts and stacks, and of the shapes of the entries.
    kept_bytes: usize,
    is_gloo: bool,
}

impl DumpBuilder {
    fn add_entry(&mut self, node: &impl Node) -> Result<(), String> {
        let number = |key: &str| node.field(key).and_then(|v| v.int()).unwrap_or(-1);
        let record_id = u64::try_from(number("record_id")).map_err(|_| "an entry without record_id")?;
        let name =
            node.field("profiling_name").and_then(|v| v.text()).ok_or("an entry without profiling_name")?;
        let (backend, op) = name.split_once(':').unwrap_or(("nccl", &name));
        self.is_gloo |= backend == "gloo";
        let group = node.field("process_group").and_then(|g| g.items().first()?.text()).unwrap_or_default();
        let group = self.intern(&group);
        if let Ok(number) = u64::try_from(number("pg_id")) {
            self.group_numbers.insert(group.clone(), number);
        }
        let is_p2p = node.field("is_p2p").is_some_and(|v| v.flag());
        let sequence = |key: &str| u64::try_from(number(key)).unwrap_or(0);
        let launch = (sequence("collective_seq_id"), sequence("p2p_seq_id"));
        let state = match node.field("state").and_then(|v| v.text()).as_deref() {
            Some("completed") => EntryState::Completed,
            Some("started") => EntryState::Started,
            _ => EntryState::Scheduled,
        };
        let ((frames, stack_hash), input_dtypes) = (self.read_frames(node), node.field("input_dtypes"));
        let input_dtypes = input_dtypes.map(|d| d.items()).unwrap_or_default();
        let entry = FlightEntry {
            record_id,
            group,
            sequence: if is_p2p { launch.1 } else { launch.0 },
            launch,
            is_p2p,
            op: self.intern(op),
            input_shapes: read_shapes(node, "input_sizes"),
            output_shapes: read_shapes(node, "output_sizes"),
            input_dtypes: input_dtypes.iter().map(|d| self.intern(&d.text().unwrap_or_default())).collect(),
            state,
            retired: node.field("retired").is_some_and(|v| v.flag()),
            created_ns: u64::try_from(number("time_created_ns")).unwrap_or(0),
            frames,
            stack_hash,
        };
        if self.entries.len() == MAX_ENTRIES
            && let Some(oldest) = self.entries.pop_front()
        {
            self.kept_bytes -= count_shape_bytes(&oldest);
            self.lost_head = true;
        }
        self.kept_bytes += count_shape_bytes(&entry);
        self.entries.push_back(entry);
        if self.kept_bytes > MAX_KEPT_BYTES {
            return Err(format!("more than {} MiB of texts, stacks and shapes", MAX_KEPT_BYTES >> 20));
        }
        Ok(())
    }

    fn read_frames(&mut self, node: &impl Node) -> (Arc<[StackFrame]>, u64) {
        let mut frames = Vec::new();
        let stack = node.field("frames").map(|f| f.items()).unwrap_or_default();
        for f in stack.iter().take(MAX_FRAMES) {
            let text = |key: &str| f.field(key).and_then(|v| v.text()).unwrap_or_default();
            let line = f.field("line").and_then(|v| v.int()).unwrap_or(0);
            frames.push(StackFrame {
                function: self.intern(&text("name")),
                file: self.intern(&text("filename")),
                line: u32::try_from(line).unwrap_or(0),
            });
        }
        let frames: Arc<[StackFrame]> = frames.into();
        if let Some((known, hash)) = self.stacks.get_key_value(&frames) {
            return (known.clone(), *hash);
        }
        let hash = hash_stack(&frames);
        self.kept_bytes += size_of_val(&*frames);
        if self.stacks.len() < MAX_ENTRIES {
            self.stacks.insert(frames.clone(), hash);
        }
        (frames, hash)
    }

    fn intern(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return known.clone();
        }
        let new: Arc<str> = text.into();
        self.kept_bytes += text.len();
        if self.texts.len() < MAX_ENTRIES {
            self.texts.insert(text.to_string(), new.clone());
        }
        new
    }

    fn finish(self, name: &str, rank: u32, header: Header) -> Result<FlightDump, Diagnostic> {
        if self.is_gloo {
            return Err(Diagnostic::error(&T1403, format!("{name} is a dump of the gloo backend"))
                .with_label(name, "its groups and states do not say which member is where"));
        }
        let parts =
            header.version.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let Some(version @ (2, _)) = parts else {
            let found = if header.version.is_empty() { "none" } else { &header.version };
            return Err(Diagnostic::error(&T1402, format!("{name} has format version {found}"))
                .with_label(name, "known are the versions 2.0 to 2.10"));
        };
        // The ring numbers what it records from 0, so a later first number shows what it lost.
        let lost_head = self.lost_head || self.entries.front().is_some_and(|e| e.record_id > 0);
        let last_enqueued = self.name_groups(&header);
        let mut entries: Vec<FlightEntry> = self.entries.into();
        complete_coalesced_parts(&mut entries);
        Ok(FlightDump { rank, version, groups: header.groups, last_enqueued, entries, lost_head })
    }
}

impl DumpBuilder {
    /// Returns the numbers of the header by name of the group. A rank numbers its groups in the order of
    /// their names, which are numbers too, so a group without an entry still has its place.
    fn name_groups(&self, header: &Header) -> BTreeMap<String, u64> {
        let mut numbers: BTreeMap<u64, String> =
            self.group_numbers.iter().map(|(name, number)| (*number, name.to_string())).collect();
        let mut names: Vec<(u64, &String)> =
            header.groups.keys().filter_map(|name| Some((name.parse().ok()?, name))).collect();
        names.sort_unstable();
        let in_order = || header.last_enqueued.keys().copied().zip(names.iter().map(|(_, name)| *name));
        let agrees = |(number, name): (u64, &String)| numbers.get(&number).is_none_or(|n| n == name);
        if names.len() == header.last_enqueued.len() && in_order().all(agrees) {
            numbers = in_order().map(|(number, name)| (number, name.clone())).collect();
        }
        let known = header.last_enqueued.iter();
        known.filter_map(|(number, last)| Some((numbers.get(number)?.clone(), *last))).collect()
    }
}

/// Name of the entry that PyTorch adds at the end of a coalesced launch.
pub(super) const COALESCED_LAUNCH: &str = "coalesced";

/// Gives the parts of a coalesced launch, which never complete by themselves, the state of the entry that
/// ends the launch.
fn complete_coalesced_parts(entries: &mut [FlightEntry]) {
    let mut launches: HashMap<Arc<str>, FlightEntry> = HashMap::new();
    for entry in entries.iter_mut().rev() {
        if &*entry.op == COALESCED_LAUNCH {
            launches.insert(entry.group.clone(), entry.clone());
        } else if let Some(launch) = launches.get(&entry.group)
            && launch.launch == entry.launch
        {
            entry.state = entry.state.max(launch.state);
            entry.retired |= launch.retired;
        }
    }
}

fn hash_stack(frames: &[StackFrame]) -> u64 {
    if frames.is_empty() {
        return 0;
    }
    let mut hasher = DefaultHasher::new();
    for frame in frames {
        let file = frame.file.rsplit('/').next();
        (&frame.function, file, frame.line).hash(&mut hasher);
    }
    hasher.finish().max(1)
}

fn count_shape_bytes(entry: &FlightEntry) -> usize {
    let shapes = entry.input_shapes.iter().chain(&*entry.output_shapes);
    shapes.map(|shape| size_of_val(shape) + size_of_val(&**shape)).sum::<usize>()
        + size_of_val(&*entry.input_dtypes)
}

fn read_shapes<N: Node>(node: &N, key: &str) -> Arc<[Vec<u64>]> {
    let shapes = node.field(key).map(|s| s.items()).unwrap_or_default();
    let extents = |shape: &N| shape.items().iter().filter_map(|n| u64::try_from(n.int()?).ok()).collect();
    shapes.iter().map(extents).collect()
}

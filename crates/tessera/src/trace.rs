//! Traces of collectives that ranks of any program launched, one file of JSON lines per rank, and their judgement.
//!
//! The format is described in `docs/guides/trace-door.md`. Files are read line by line and never held as a whole; who
//! renders a diagnostic reads the file again with [`text`].

mod line;
mod lines;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_base::{Code, Diagnostic, Diagnostics, Span};
use tessera_verify::{GroupId, Traces, check_traces};

use self::line::{Launch, Said};
use self::lines::{Line, Lines};

/// A trace that is not there.
pub static T0020: Code = Code {
    id: "T0020",
    title: "trace cannot be read",
    page: "A trace is one file of JSON lines per rank, named .jsonl, or a folder of such files. One of them cannot be opened, \
stopped being readable, or holds nothing at all. A file without a line is refused because it may be one that was never \
flushed: a rank that launched nothing says so with the one line {\"rank\": 3}.",
};
/// A line that is no JSON object.
pub static T0021: Code = Code {
    id: "T0021",
    title: "line of a trace is not a JSON object",
    page: "Each line of a trace is one JSON object in UTF-8. The message says at which byte this one stops being one, or \
which limit it exceeds. A last line that is cut off comes from a writer that was killed: remove it, and what came before \
is judged.\n\nThe ranks are compared only when every line can be read, because a line that is left out would look \
like a launch that never happened.",
};
/// A line that does not say what a line can say.
pub static T0022: Code = Code {
    id: "T0022",
    title: "field of a trace is wrong",
    page: "A line declares a rank ({\"rank\": 0}), declares a group ({\"group\": \"tp0\", \"ranks\": [0, 1]}), or is a launch with \
group, op, dtype and count. Here a key is unknown, missing, or holds something else than it can. Unknown keys are refused \
because a slip in an optional key would switch off the comparison that it stands for. The keys are listed in \
docs/guides/trace-door.md.",
};
/// A group that is not declared.
pub static T0023: Code = Code {
    id: "T0023",
    title: "group of a trace is not declared",
    page: "A launch names a group whose members its file has not told before. Each rank's file declares the groups that it uses, \
at or before the first use, as the rank itself built them: {\"group\": \"tp0\", \"ranks\": [0, 1]}, or with ranks on the \
line of the launch. Only `world` goes without; it is all ranks of the trace. Members are never taken from another \
rank's file, since ranks that built different groups are one of the failures to be found.",
};
/// Ranks that built different groups.
pub static T0024: Code = Code {
    id: "T0024",
    title: "ranks built different groups under one name",
    page: "Two declarations of one group name share a rank and differ in their members. If the program did what they say, these \
ranks sit in different communicators that they take for the same one, and their first collective hangs. Look for \
ranks that build groups from lists that differ (a stale world size, a node list in another order) or in another \
order.\n\nGroups of one name that share no rank are taken for instances of one kind, such as the tp groups of two \
pipeline stages, and are fine.",
};
/// Files that are not one per rank.
pub static T0028: Code = Code {
    id: "T0028",
    title: "files of a trace are not one per rank",
    page: "Every rank has one file. Its number is the last one in the file's name (rank-03.jsonl, trace_3.jsonl), or stands on \
the first line as {\"rank\": 3}; where both are there they agree. {\"rank\": 3, \"world_size\": 8} also says how many there are, \
so that a file that is missing is noticed even if no group names its rank. Here a file has no number or two, two files have the \
same one, or a rank that a group names has no file. In the last case the ranks that are there are compared all the same, but \
whether everyone gets through is not known: the rank that leaves no trace is often the one that hung or died first.",
};

/// Longest line of a trace, in bytes. A declaration of the largest group fits.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Largest number of ranks: a rank is below it.
pub const MAX_RANKS: u32 = 65_536;
/// Most launches of a trace, all ranks together.
pub const MAX_LAUNCHES: usize = 100_000_000;
/// A file with more wrong lines is not read to its end.
pub const MAX_FINDINGS: usize = 50;

/// What was found in a trace.
#[derive(Debug, Clone, Default)]
pub struct Judged {
    /// What the reader and the judge say. No error means that nothing in the trace hangs or differs.
    pub diagnostics: Diagnostics,
    /// Ranks with a file.
    pub ranks: usize,
    /// Launches that were read.
    pub launches: usize,
    /// Groups, by name and members.
    pub groups: usize,
}

impl Judged {
    /// Whether the judge accepts what was seen.
    #[must_use]
    pub fn verified(&self) -> bool {
        !self.diagnostics.iter().any(Diagnostic::is_error)
    }
}

/// Reads one file per rank as one trace and judges it. Whatever is wrong is in the result; a file is named as its path
/// is given.
#[must_use]
pub fn check_trace(files: &[PathBuf]) -> Judged {
    if files.is_empty() {
        let d =
            Diagnostic::error(&T0020, "neither a plan nor a trace: there is no seal.json and no .jsonl file");
        let d =
            d.hint("a trace is one .jsonl file per rank; a plan's folder is made by `tessera plan --out`");
        return Judged { diagnostics: vec![d], ranks: 0, launches: 0, groups: 0 };
    }
    let (mut ranks, mut diagnostics) = assign(files);
    ranks.sort_by_key(|r| r.rank);
    let mut reader = Reader {
        traces: Traces::new(),
        world: ranks.iter().map(|r| r.rank).collect(),
        groups: BTreeMap::new(),
        launches: 0,
        found: Vec::new(),
    };
    for r in &ranks {
        reader.file(r);
    }
    diagnostics.append(&mut reader.found);
    diagnostics.extend(reader.disagreements());
    diagnostics.extend(sizes(&ranks));
    let readable = !diagnostics.iter().any(Diagnostic::is_error);
    let missing = reader.missing(ranks.iter().find(|r| r.world_size.is_some()));
    if readable {
        let mut judged = check_traces(&reader.traces);
        if missing.iter().any(Diagnostic::is_error) {
            // The same is said here with the line that names the rank.
            judged.retain(|d| d.code.id != "T0341");
        }
        diagnostics.extend(missing);
        diagnostics.extend(judged);
    } else {
        diagnostics.extend(missing);
        if let Some(last) = diagnostics.last_mut() {
            last.notes.push("the ranks were not compared: first the trace must be readable".to_string());
        }
    }
    let groups = reader.groups.values().map(Vec::len).sum();
    Judged { diagnostics, ranks: ranks.len(), launches: reader.launches, groups }
}

/// The `.jsonl` files of a folder, by name, but for the record of a run.
///
/// # Errors
/// T0020 when the folder cannot be read.
pub fn files_of(folder: &Path) -> Result<Vec<PathBuf>, Diagnostic> {
    let bad = |e: std::io::Error| unreadable(&folder.display().to_string(), &e);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(bad)? {
        let path = entry.map_err(bad)?.path();
        // A run's record is no trace.
        if is_trace(&path) && !path.ends_with(crate::record::RECORD) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a path is named like a trace.
#[must_use]
pub fn is_trace(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "jsonl")
}

/// The text of a file for the places of diagnostics. Bytes that are not UTF-8 become question marks, so that positions
/// hold.
#[must_use]
pub fn text(file: &str) -> Option<String> {
    let bytes = std::fs::read(file).ok()?;
    String::from_utf8(bytes).map_or_else(
        |e| {
            let mut out = String::with_capacity(e.as_bytes().len());
            for chunk in e.as_bytes().utf8_chunks() {
                out.push_str(chunk.valid());
                chunk.invalid().iter().for_each(|_| out.push('?'));
            }
            Some(out)
        },
        Some,
    )
}

/// A file and the rank that wrote it.
struct File {
    path: PathBuf,
    name: String,
    rank: u32,
    /// How many ranks there are, by its own account, and where it says so.
    world_size: Option<(u32, Span)>,
}

/// A declaration of a group, in the file of a rank.
struct Declared {
    members: Arc<[u32]>,
    file: String,
    rank: u32,
    span: Span,
    /// `world` without a declaration; the place is its first use.
    implied: bool,
}

/// Gives every file its rank.
fn assign(files: &[PathBuf]) -> (Vec<File>, Diagnostics) {
    let mut out: Vec<File> = Vec::new();
    let mut found = Vec::new();
    let mut taken: HashMap<u32, String> = HashMap::new();
    for path in files {
        let name = path.display().to_string();
        let declared = match declared_rank(path) {
            Ok(declared) => declared,
            Err(e) => {
                found.push(unreadable(&name, &e));
                continue;
            }
        };
        let named = path.file_stem().and_then(|s| last_number(&s.to_string_lossy()));
        let refuse = |message: String| Diagnostic::error(&T0028, message);
        let rank = match (declared, named) {
            (Some((rank, ..)), None) => u64::from(rank),
            (None, Some(rank)) => rank,
            (Some((rank, ..)), Some(of_name)) if u64::from(rank) == of_name => of_name,
            (Some((rank, span, _)), Some(of_name)) => {
                found.push(
                    refuse(format!("{name} says it is of rank {rank}, its name {of_name}"))
                        .at_span(&name, format!("rank {rank}"), span)
                        .hint("the last number in the name of a file is its rank; rename the file or correct the line"),
                );
                continue;
            }
            (None, None) => {
                found.push(
                    refuse(format!("{name} does not say its rank"))
                        .at(&name, "no number in the name, and no rank on the first line")
                        .hint("name the file rank-3.jsonl, or begin it with {\"rank\": 3}"),
                );
                continue;
            }
        };
        let Some(rank) = u32::try_from(rank).ok().filter(|r| *r < MAX_RANKS) else {
            let message = format!("{name} is of rank {rank}; the last rank that can be is {}", MAX_RANKS - 1);
            found.push(refuse(message).at(&name, "this file"));
            continue;
        };
        if let Some(first) = taken.get(&rank) {
            found.push(
                refuse(format!("two files are of rank {rank}"))
                    .at(first, "the first")
                    .at(&name, "the second")
                    .hint("a rank has one file; remove the one of an earlier run"),
            );
            continue;
        }
        taken.insert(rank, name.clone());
        let world_size = declared.and_then(|(_, span, size)| Some((size?, span)));
        out.push(File { path: path.clone(), name, rank, world_size });
    }
    (out, found)
}

/// Files that do not agree about the size of the world.
fn sizes(files: &[File]) -> Option<Diagnostic> {
    let mut said = files.iter().filter_map(|f| Some((f, f.world_size?)));
    let (first, (size, span)) = said.next()?;
    let (other, (theirs, there)) = said.find(|(_, (n, _))| *n != size)?;
    let d = Diagnostic::error(
        &T0028,
        format!("world_size is {size} for rank {} and {theirs} for rank {}", first.rank, other.rank),
    );
    Some(d.at_span(&first.name, format!("{size} ranks"), span).at_span(
        &other.name,
        format!("{theirs} ranks"),
        there,
    ))
}

/// The rank on the first line, if it is one that declares it.
fn declared_rank(path: &Path) -> std::io::Result<Option<(u32, Span, Option<u32>)>> {
    let mut lines = Lines::open(path)?;
    while let Some(line) = lines.next()? {
        if let Line::Whole { bytes, span } = line {
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            if let Ok(Said::Rank(rank, size)) = line::read(bytes) {
                return Ok(Some((rank, span, size)));
            }
        }
        break;
    }
    Ok(None)
}

/// `rank-03` is 3, `node1_rank2` is 2.
fn last_number(stem: &str) -> Option<u64> {
    let end = stem.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = stem[..end]
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + stem[i..].chars().next().map_or(1, char::len_utf8));
    // More digits than a number has are no rank either.
    Some(stem[start..end].parse().unwrap_or(u64::MAX))
}

struct Reader {
    traces: Traces,
    /// All ranks, ascending.
    world: Arc<[u32]>,
    /// Per name, one declaration for each list of members.
    groups: BTreeMap<String, Vec<Declared>>,
    launches: usize,
    found: Diagnostics,
}

/// Groups as one file knows them.
type Known = HashMap<String, (GroupId, Arc<[u32]>, Span)>;

impl Reader {
    fn file(&mut self, f: &File) {
        let before = self.found.len();
        let mut lines = match Lines::open(&f.path) {
            Ok(lines) => lines,
            Err(e) => return self.found.push(unreadable(&f.name, &e)),
        };
        let trace = self.traces.rank(f.rank, &f.name);
        let mut known = Known::new();
        let mut read = 0usize;
        loop {
            if self.found.len() - before >= MAX_FINDINGS {
                if let Some(last) = self.found.last_mut() {
                    last.notes.push(format!("{} was not read further", f.name));
                }
                return;
            }
            let (bytes, span) = match lines.next() {
                Ok(None) => break,
                Ok(Some(Line::Whole { bytes, span })) => (bytes, span),
                Ok(Some(Line::TooLong { start, length })) => {
                    read += 1;
                    let message = format!("a line of {length} bytes; a line has at most {MAX_LINE_BYTES}");
                    let span = Span { start, end: start + 1 };
                    self.found.push(Diagnostic::error(&T0021, message).at_span(&f.name, "this line", span));
                    continue;
                }
                Err(e) => return self.found.push(unreadable(&f.name, &e)),
            };
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            read += 1;
            match line::read(bytes) {
                Err(faults) => self.found.extend(faults.into_iter().map(|x| {
                    let place = within(span, x.bytes);
                    let d = Diagnostic::error(x.code, x.message).at_span(&f.name, "this line", place);
                    Diagnostic { hint: x.hint, ..d }
                })),
                Ok(Said::Rank(..)) if read == 1 => {}
                Ok(Said::Rank(rank, _)) => self.found.push(
                    Diagnostic::error(&T0022, format!("rank {rank} is declared after other lines"))
                        .at_span(&f.name, "this line", span)
                        .hint("a file is of one rank; it may say so on its first line only"),
                ),
                Ok(Said::Group(name, ranks)) => {
                    let span = within(span, line::find(bytes, "ranks"));
                    self.declare(f, &mut known, &name, &ranks, span);
                }
                Ok(Said::Call(launch)) => {
                    let span = within(span, line::find(bytes, "op"));
                    if !self.launch(f, &mut known, *launch, trace, span) {
                        return;
                    }
                }
            }
        }
        if read == 0 {
            self.found.push(
                Diagnostic::error(&T0020, format!("{} is empty", f.name))
                    .at(&f.name, "no line")
                    .hint(format!("if rank {0} launched nothing, write the line {{\"rank\": {0}}}", f.rank)),
            );
        }
    }

    /// Adds a launch; false when the trace takes no more.
    fn launch(&mut self, f: &File, known: &mut Known, l: Launch<'_>, trace: usize, span: Span) -> bool {
        let group = match (&l.ranks, known.get(&*l.group)) {
            (None, Some((id, _, _))) => Some(*id),
            (Some(ranks), _) => self.declare(f, known, &l.group, ranks, span),
            (None, None) if l.group == "world" => {
                let world = self.world.clone();
                Some(self.enter(f, known, "world", world, span, true))
            }
            (None, None) => {
                // Told once; what follows on this group is left out.
                let hint = format!(
                    "declare it before: {{\"group\": \"{}\", \"ranks\": […]}}, with its members",
                    l.group
                );
                self.found.push(
                    Diagnostic::error(&T0023, format!("group {} is not declared", l.group))
                        .at_span(&f.name, format!("rank {} uses it here first", f.rank), span)
                        .hint(hint),
                );
                let id = self.traces.group(&l.group, &[]);
                known.insert(l.group.to_string(), (id, Arc::new([]), span));
                None
            }
        };
        let Some(group) = group else { return true };
        if self.launches == MAX_LAUNCHES {
            self.found.push(
                Diagnostic::error(&T0020, format!("more than {MAX_LAUNCHES} launches"))
                    .at_span(&f.name, "one too many", span)
                    .hint("judge a part of the run: the same steps of every rank"),
            );
            return false;
        }
        self.launches += 1;
        self.traces.push(trace, group, l.call, &l.stream, l.batch, span);
        true
    }

    /// A group with the members that a line gives.
    fn declare(
        &mut self,
        f: &File,
        known: &mut Known,
        name: &str,
        ranks: &[u32],
        span: Span,
    ) -> Option<GroupId> {
        match known.get(name) {
            Some((id, members, _)) if **members == *ranks => Some(*id),
            // Used before, which was told then.
            Some((_, members, _)) if members.is_empty() => None,
            Some((_, members, first)) => {
                let message = format!("rank {} declares group {name} twice, with other members", f.rank);
                self.found.push(
                    Diagnostic::error(&T0024, message)
                        .at_span(&f.name, format!("{name} is {}", numbers(members)), *first)
                        .at_span(&f.name, format!("{name} is {}", numbers(ranks)), span)
                        .hint("give each group of a rank a name of its own"),
                );
                None
            }
            None => Some(self.enter(f, known, name, ranks.into(), span, false)),
        }
    }

    fn enter(
        &mut self,
        f: &File,
        known: &mut Known,
        name: &str,
        members: Arc<[u32]>,
        span: Span,
        implied: bool,
    ) -> GroupId {
        let id = self.traces.group(name, &members);
        let all = self.groups.entry(name.to_string()).or_default();
        if !all.iter().any(|d| *d.members == *members) {
            let members = members.clone();
            all.push(Declared { members, file: f.name.clone(), rank: f.rank, span, implied });
        }
        known.insert(name.to_string(), (id, members, span));
        id
    }

    /// Groups of one name that share a rank and differ.
    fn disagreements(&self) -> Diagnostics {
        let mut out = Vec::new();
        for (name, all) in &self.groups {
            let mut claimed: HashMap<u32, usize> = HashMap::new();
            for (i, d) in all.iter().enumerate() {
                let other = d.members.iter().find_map(|r| claimed.get(r).map(|o| (*r, *o)));
                if let Some((shared, o)) = other {
                    let says = |d: &Declared| {
                        let how =
                            if d.implied { "not declared, so all ranks of the trace" } else { "declared" };
                        format!("{how}: {}", numbers(&d.members))
                    };
                    let first = &all[o];
                    out.push(
                        Diagnostic::error(
                            &T0024,
                            format!(
                                "ranks {} and {} built different groups named {name}",
                                first.rank, d.rank
                            ),
                        )
                        .at_span(&first.file, says(first), first.span)
                        .at_span(&d.file, says(d), d.span)
                        .note(format!("both lists have rank {shared}"))
                        .hint("build the group on all of its ranks from the same list"),
                    );
                }
                for r in &*d.members {
                    claimed.entry(*r).or_insert(i);
                }
            }
        }
        out
    }

    /// Ranks that a group or the world's size names and that have no file; a world that nobody declares.
    fn missing(&self, sized: Option<&File>) -> Diagnostics {
        let mut out = Vec::new();
        let mut told = std::collections::BTreeSet::new();
        for (name, all) in &self.groups {
            for d in all {
                let gone = d.members.iter().filter(|r| self.world.binary_search(r).is_err());
                let gone: Vec<u32> = gone.copied().filter(|r| told.insert(*r)).collect();
                if !gone.is_empty() {
                    out.push(
                        Diagnostic::error(&T0028, format!("group {name} names {}, of which there is no file", numbers(&gone)))
                            .at_span(&d.file, format!("{name} is {}", numbers(&d.members)), d.span)
                            .at("files", numbers(&self.world))
                            .hint("add the files that are missing; a rank that launched nothing has the one line {\"rank\": …}"),
                    );
                }
            }
        }
        if let Some((file, (size, span))) = sized.and_then(|f| Some((f, f.world_size?))) {
            let gone: Vec<u32> = (0..size).filter(|r| self.world.binary_search(r).is_err()).collect();
            if !gone.is_empty() && gone.iter().any(|r| !told.contains(r)) {
                out.push(
                    Diagnostic::error(&T0028, format!("no file of {}", numbers(&gone)))
                        .at_span(&file.name, format!("a world of {size}"), span)
                        .at("files", numbers(&self.world))
                        .hint("add the files that are missing; a rank that launched nothing has the one line {\"rank\": …}"),
                );
            }
            return out;
        }
        let implied = self.groups.get("world").and_then(|all| all.iter().find(|d| d.implied));
        if let (Some(world), true) = (implied, told.is_empty()) {
            out.push(
                Diagnostic::warning(&T0028, format!("world is taken to be {}, which have a file", numbers(&self.world)))
                    .at_span(&world.file, "world is used here first", world.span)
                    .hint("say how many ranks there are on the first line of a file: {\"rank\": 0, \"world_size\": 4}"),
            );
        }
        out
    }
}

/// A part of a line, as a part of the file.
fn within(line: Span, part: (usize, usize)) -> Span {
    Span { start: line.start + part.0, end: line.start + part.1 }
}

/// `ranks 0, 1`, shortened where there are many.
fn numbers(ranks: &[u32]) -> String {
    const SHOWN: usize = 12;
    let names: Vec<String> = ranks.iter().take(SHOWN).map(u32::to_string).collect();
    match ranks {
        [] => "no ranks".to_string(),
        [one] => format!("rank {one}"),
        _ if ranks.len() > SHOWN => format!("ranks {}, … ({} ranks)", names.join(", "), ranks.len()),
        _ => format!("ranks {}", names.join(", ")),
    }
}

fn unreadable(name: &str, e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0020, format!("{name} cannot be read: {e}"))
}

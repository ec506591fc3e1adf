//! Reads collective traces of any program, one file of JSON lines per rank, and verifies them.
//!
//! `docs/guides/trace-import.md` describes the format. Files are read line by line and never loaded
//! as a whole; code that renders a diagnostic reads the file again with [`read_lossy`].

mod line_parser;
mod line_reader;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::files::{MAX_TEXT_BYTES, read_file};
use tessera_base::{Diagnostic, Diagnostics, Span};
use tessera_verify::{GroupId, Traces, check_traces};

use self::line_parser::{TraceEntry, TraceLaunch};
use self::line_reader::{LineReader, TraceLine};
use crate::codes::{T0020, T0021, T0022, T0023, T0024, T0028};

/// Maximum length of a line of a trace, in bytes. A declaration of the largest group fits.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Exclusive upper bound of rank numbers.
pub const MAX_RANKS: u32 = 65_536;
/// Maximum number of launches in a trace, over all ranks.
pub const MAX_LAUNCHES: usize = 100_000_000;
/// Maximum number of diagnostics per file; the rest of the file is not read.
pub const MAX_FINDINGS: usize = 50;

/// The diagnostics of a trace, with counts of the ranks, launches and groups that were read.
#[derive(Debug, Clone, Default)]
pub struct TraceCheck {
    /// Diagnostics of the reader and the verifier. Without an error, no collective of the trace
    /// hangs or differs between ranks.
    pub diagnostics: Diagnostics,
    /// Number of ranks with a file.
    pub ranks: usize,
    /// Number of launches read, over all ranks.
    pub launches: usize,
    /// Number of groups that differ in name or members.
    pub groups: usize,
}

impl TraceCheck {
    /// Returns whether the verifier accepts the trace.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        !self.diagnostics.iter().any(Diagnostic::is_error)
    }
}

/// Reads one file per rank as one trace and verifies it. All problems are reported in the result,
/// under the given file paths.
#[must_use]
pub fn check_trace(files: &[PathBuf]) -> TraceCheck {
    if files.is_empty() {
        let d =
            Diagnostic::error(&T0020, "neither a plan nor a trace: there is no seal.json and no .jsonl file");
        let d = d.with_hint("a trace is one .jsonl file per rank; `tessera plan --out` writes a plan folder");
        return TraceCheck { diagnostics: vec![d], ranks: 0, launches: 0, groups: 0 };
    }
    let (mut ranks, mut diagnostics) = assign_file_ranks(files);
    ranks.sort_by_key(|r| r.rank);
    let mut reader = TraceReader {
        traces: Traces::new(),
        world: ranks.iter().map(|r| r.rank).collect(),
        groups: BTreeMap::new(),
        launches: 0,
        diagnostics: Vec::new(),
    };
    for r in &ranks {
        reader.read_file(r);
    }
    diagnostics.append(&mut reader.diagnostics);
    diagnostics.extend(reader.conflicting_groups());
    diagnostics.extend(check_world_sizes(&ranks));
    let readable = !diagnostics.iter().any(Diagnostic::is_error);
    let missing = reader.missing_ranks(ranks.iter().find(|r| r.world_size.is_some()));
    if readable {
        let mut verifier_diagnostics = check_traces(&reader.traces);
        if missing.iter().any(Diagnostic::is_error) {
            // The reader's diagnostic of a missing file replaces the verifier's, since it also
            // shows the line that names the rank.
            verifier_diagnostics.retain(|d| d.code.id != "T0341");
        }
        diagnostics.extend(missing);
        diagnostics.extend(verifier_diagnostics);
    } else {
        diagnostics.extend(missing);
        if let Some(last) = diagnostics.last_mut() {
            last.notes
                .push("the ranks were not compared, because parts of the trace cannot be read".to_string());
        }
    }
    let groups = reader.groups.values().map(Vec::len).sum();
    TraceCheck { diagnostics, ranks: ranks.len(), launches: reader.launches, groups }
}

/// Lists the `.jsonl` files of a folder by name, except the record of a run.
///
/// # Errors
/// T0020 if the folder cannot be read.
pub fn trace_files(folder: &Path) -> Result<Vec<PathBuf>, Diagnostic> {
    let bad = |e: std::io::Error| unreadable_trace(&folder.display().to_string(), &e);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(bad)? {
        let path = entry.map_err(bad)?.path();
        // The record of a run has the same extension but is not a trace.
        if is_trace(&path) && !path.ends_with(tessera::record::RECORD_FILE) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns whether a path has the extension of a trace.
#[must_use]
pub fn is_trace(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "jsonl")
}

/// Reads the text of a file for rendering diagnostics. Each byte of invalid UTF-8 becomes a
/// question mark, so that byte positions stay valid.
#[must_use]
pub fn read_lossy(file: &str) -> Option<String> {
    let bytes = read_file(Path::new(file), MAX_TEXT_BYTES).ok()?;
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

/// A trace file with the rank that its name or its first line states.
struct RankFile {
    path: PathBuf,
    name: String,
    rank: u32,
    /// World size that the first line declares, if it does, and the span of that line.
    world_size: Option<(u32, Span)>,
}

/// A group declaration in the file of a rank.
struct GroupDeclaration {
    members: Arc<[u32]>,
    file: String,
    rank: u32,
    span: Span,
    /// Whether the group is the undeclared `world`; the span is then its first use.
    implied: bool,
}

/// Determines the rank of every file, and leaves out the files that the diagnostics report.
fn assign_file_ranks(files: &[PathBuf]) -> (Vec<RankFile>, Diagnostics) {
    let mut out: Vec<RankFile> = Vec::new();
    let mut diagnostics = Vec::new();
    let mut taken: HashMap<u32, String> = HashMap::new();
    for path in files {
        let name = path.display().to_string();
        let declared = match declared_rank(path) {
            Ok(declared) => declared,
            Err(e) => {
                diagnostics.push(unreadable_trace(&name, &e));
                continue;
            }
        };
        let rank_in_name = path.file_stem().and_then(|s| last_number(&s.to_string_lossy()));
        let refuse = |message: String| Diagnostic::error(&T0028, message);
        let rank = match (declared, rank_in_name) {
            (Some((rank, ..)), None) => u64::from(rank),
            (None, Some(rank)) => rank,
            (Some((rank, ..)), Some(of_name)) if u64::from(rank) == of_name => of_name,
            (Some((rank, span, _)), Some(of_name)) => {
                diagnostics.push(
                    refuse(format!("{name} declares rank {rank}, but its name has rank {of_name}"))
                        .with_span_label(&name, format!("rank {rank}"), span)
                        .with_hint(
                            "the last number in a file name is its rank; rename the file or correct the line",
                        ),
                );
                continue;
            }
            (None, None) => {
                diagnostics.push(
                    refuse(format!("{name} has no rank number"))
                        .with_label(&name, "no number in the name, and no rank on the first line")
                        .with_hint("name the file rank-3.jsonl, or write {\"rank\": 3} on its first line"),
                );
                continue;
            }
        };
        let Some(rank) = u32::try_from(rank).ok().filter(|r| *r < MAX_RANKS) else {
            let message = format!("{name} has rank {rank}; the maximum is {}", MAX_RANKS - 1);
            diagnostics.push(refuse(message).with_label(&name, "this file"));
            continue;
        };
        if let Some(first) = taken.get(&rank) {
            diagnostics.push(
                refuse(format!("two files have rank {rank}"))
                    .with_label(first, "the first")
                    .with_label(&name, "the second")
                    .with_hint("each rank has one file; remove the file of the earlier run"),
            );
            continue;
        }
        taken.insert(rank, name.clone());
        let world_size = declared.and_then(|(_, span, size)| Some((size?, span)));
        out.push(RankFile { path: path.clone(), name, rank, world_size });
    }
    (out, diagnostics)
}

/// Reports files that declare different world sizes.
fn check_world_sizes(files: &[RankFile]) -> Option<Diagnostic> {
    let mut declared = files.iter().filter_map(|f| Some((f, f.world_size?)));
    let (first, (size, span)) = declared.next()?;
    let (other, (other_size, other_span)) = declared.find(|(_, (n, _))| *n != size)?;
    let d = Diagnostic::error(
        &T0028,
        format!("world_size is {size} for rank {} and {other_size} for rank {}", first.rank, other.rank),
    );
    Some(d.with_span_label(&first.name, format!("{size} ranks"), span).with_span_label(
        &other.name,
        format!("{other_size} ranks"),
        other_span,
    ))
}

/// Returns the rank that the first line declares, with the span of the line and the world size if
/// it states one.
fn declared_rank(path: &Path) -> std::io::Result<Option<(u32, Span, Option<u32>)>> {
    let mut lines = LineReader::open(path)?;
    while let Some(line) = lines.next()? {
        if let TraceLine::Whole { bytes, span } = line {
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            if let Ok(TraceEntry::Rank(rank, size)) = line_parser::parse_line(bytes) {
                return Ok(Some((rank, span, size)));
            }
        }
        break;
    }
    Ok(None)
}

/// Parses the last number of a file stem: 3 for `rank-03`, 2 for `node1_rank2`.
fn last_number(stem: &str) -> Option<u64> {
    let end = stem.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = stem[..end]
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + stem[i..].chars().next().map_or(1, char::len_utf8));
    // A number that overflows u64 becomes too large for a rank.
    Some(stem[start..end].parse().unwrap_or(u64::MAX))
}

struct TraceReader {
    traces: Traces,
    /// Ranks of all files, ascending.
    world: Arc<[u32]>,
    /// For each name, one declaration per distinct member list.
    groups: BTreeMap<String, Vec<GroupDeclaration>>,
    launches: usize,
    diagnostics: Diagnostics,
}

/// For each group name in one file so far: its id, its members, and where it first occurs. A group
/// that is used without a declaration has no members.
type KnownGroups = HashMap<String, (GroupId, Arc<[u32]>, Span)>;

impl TraceReader {
    fn read_file(&mut self, f: &RankFile) {
        let before = self.diagnostics.len();
        let mut lines = match LineReader::open(&f.path) {
            Ok(lines) => lines,
            Err(e) => return self.diagnostics.push(unreadable_trace(&f.name, &e)),
        };
        let trace = self.traces.add_rank(f.rank, &f.name);
        let mut known = KnownGroups::new();
        let mut read = 0usize;
        loop {
            if self.diagnostics.len() - before >= MAX_FINDINGS {
                if let Some(last) = self.diagnostics.last_mut() {
                    last.notes.push(format!("{} was not read further", f.name));
                }
                return;
            }
            let (bytes, span) = match lines.next() {
                Ok(None) => break,
                Ok(Some(TraceLine::Whole { bytes, span })) => (bytes, span),
                Ok(Some(TraceLine::TooLong { start, length })) => {
                    read += 1;
                    let message = format!("a line of {length} bytes; the maximum is {MAX_LINE_BYTES}");
                    let span = Span { start, end: start + 1 };
                    self.diagnostics.push(Diagnostic::error(&T0021, message).with_span_label(
                        &f.name,
                        "this line",
                        span,
                    ));
                    continue;
                }
                Err(e) => return self.diagnostics.push(unreadable_trace(&f.name, &e)),
            };
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            read += 1;
            match line_parser::parse_line(bytes) {
                Err(faults) => self.diagnostics.extend(faults.into_iter().map(|fault| {
                    let place = span_within(span, fault.bytes);
                    let d = Diagnostic::error(fault.code, fault.message).with_span_label(
                        &f.name,
                        "this line",
                        place,
                    );
                    Diagnostic { hint: fault.hint, ..d }
                })),
                Ok(TraceEntry::Rank(..)) if read == 1 => {}
                Ok(TraceEntry::Rank(rank, _)) => self.diagnostics.push(
                    Diagnostic::error(&T0022, format!("rank {rank} is declared after other lines"))
                        .with_span_label(&f.name, "this line", span)
                        .with_hint("a file belongs to one rank and may declare it on its first line only"),
                ),
                Ok(TraceEntry::Group(name, ranks)) => {
                    let span = span_within(span, line_parser::key_range(bytes, "ranks"));
                    self.declare_group(f, &mut known, &name, &ranks, span);
                }
                Ok(TraceEntry::Launch(launch)) => {
                    let span = span_within(span, line_parser::key_range(bytes, "op"));
                    if !self.add_launch(f, &mut known, *launch, trace, span) {
                        return;
                    }
                }
            }
        }
        if read == 0 {
            self.diagnostics.push(
                Diagnostic::error(&T0020, format!("{} is empty", f.name))
                    .with_label(&f.name, "no line")
                    .with_hint(format!(
                        "if rank {0} launched nothing, write the line {{\"rank\": {0}}}",
                        f.rank
                    )),
            );
        }
    }

    /// Adds a launch; returns false if the trace has reached its maximum.
    fn add_launch(
        &mut self,
        f: &RankFile,
        known: &mut KnownGroups,
        l: TraceLaunch<'_>,
        trace: usize,
        span: Span,
    ) -> bool {
        let group = match (&l.ranks, known.get(&*l.group)) {
            (None, Some((id, _, _))) => Some(*id),
            (Some(ranks), _) => self.declare_group(f, known, &l.group, ranks, span),
            (None, None) if l.group == "world" => {
                let world = self.world.clone();
                Some(self.register_group(f, known, "world", world, span, true))
            }
            (None, None) => {
                // The group is reported once; its further launches are skipped.
                let hint = format!(
                    "declare it first: {{\"group\": \"{}\", \"ranks\": […]}}, with its members",
                    l.group
                );
                self.diagnostics.push(
                    Diagnostic::error(&T0023, format!("group {} is not declared", l.group))
                        .with_span_label(&f.name, format!("rank {} first uses it here", f.rank), span)
                        .with_hint(hint),
                );
                let id = self.traces.add_group(&l.group, &[]);
                known.insert(l.group.to_string(), (id, Arc::new([]), span));
                None
            }
        };
        let Some(group) = group else { return true };
        if self.launches == MAX_LAUNCHES {
            self.diagnostics.push(
                Diagnostic::error(&T0020, format!("more than {MAX_LAUNCHES} launches"))
                    .with_span_label(&f.name, "this launch exceeds the maximum", span)
                    .with_hint("check a part of the run: the same steps of every rank"),
            );
            return false;
        }
        self.launches += 1;
        self.traces.push_launch(trace, group, l.call, &l.stream, l.batch, span);
        true
    }

    /// Looks up or declares a group with the members that a line lists. Returns `None` if they
    /// contradict an earlier declaration.
    fn declare_group(
        &mut self,
        f: &RankFile,
        known: &mut KnownGroups,
        name: &str,
        ranks: &[u32],
        span: Span,
    ) -> Option<GroupId> {
        match known.get(name) {
            Some((id, members, _)) if **members == *ranks => Some(*id),
            // An earlier line used the group without a declaration, which is already reported.
            Some((_, members, _)) if members.is_empty() => None,
            Some((_, members, first)) => {
                let message = format!("rank {} declares group {name} twice, with different members", f.rank);
                self.diagnostics.push(
                    Diagnostic::error(&T0024, message)
                        .with_span_label(&f.name, format!("{name} is {}", list_ranks(members)), *first)
                        .with_span_label(&f.name, format!("{name} is {}", list_ranks(ranks)), span)
                        .with_hint("give each group of a rank its own name"),
                );
                None
            }
            None => Some(self.register_group(f, known, name, ranks.into(), span, false)),
        }
    }

    fn register_group(
        &mut self,
        f: &RankFile,
        known: &mut KnownGroups,
        name: &str,
        members: Arc<[u32]>,
        span: Span,
        implied: bool,
    ) -> GroupId {
        let id = self.traces.add_group(name, &members);
        let all = self.groups.entry(name.to_string()).or_default();
        if !all.iter().any(|d| *d.members == *members) {
            let members = members.clone();
            all.push(GroupDeclaration { members, file: f.name.clone(), rank: f.rank, span, implied });
        }
        known.insert(name.to_string(), (id, members, span));
        id
    }

    /// Reports groups of one name that share a rank but have different members.
    fn conflicting_groups(&self) -> Diagnostics {
        let mut out = Vec::new();
        for (name, all) in &self.groups {
            let mut claimed: HashMap<u32, usize> = HashMap::new();
            for (i, d) in all.iter().enumerate() {
                let other = d.members.iter().find_map(|r| claimed.get(r).map(|o| (*r, *o)));
                if let Some((shared, o)) = other {
                    let describe = |d: &GroupDeclaration| {
                        let how = if d.implied {
                            "not declared, therefore all ranks of the trace"
                        } else {
                            "declared"
                        };
                        format!("{how}: {}", list_ranks(&d.members))
                    };
                    let first = &all[o];
                    out.push(
                        Diagnostic::error(
                            &T0024,
                            format!(
                                "ranks {} and {} created different groups named {name}",
                                first.rank, d.rank
                            ),
                        )
                        .with_span_label(&first.file, describe(first), first.span)
                        .with_span_label(&d.file, describe(d), d.span)
                        .with_note(format!("both groups contain rank {shared}"))
                        .with_hint("create the group on all of its ranks from the same list"),
                    );
                }
                for r in &*d.members {
                    claimed.entry(*r).or_insert(i);
                }
            }
        }
        out
    }

    /// Reports ranks without a file that a group or the world size names, and warns if the world
    /// size is only implied.
    fn missing_ranks(&self, sized: Option<&RankFile>) -> Diagnostics {
        let mut out = Vec::new();
        let mut reported = std::collections::BTreeSet::new();
        for (name, all) in &self.groups {
            for d in all {
                let absent = d.members.iter().filter(|r| self.world.binary_search(r).is_err());
                let absent: Vec<u32> = absent.copied().filter(|r| reported.insert(*r)).collect();
                if !absent.is_empty() {
                    out.push(
                        Diagnostic::error(&T0028, format!("group {name} names {}, but there is no file for them", list_ranks(&absent)))
                            .with_span_label(&d.file, format!("{name} is {}", list_ranks(&d.members)), d.span)
                            .with_label("files", list_ranks(&self.world))
                            .with_hint("add the missing files; for a rank that launched nothing, write the single line {\"rank\": …}"),
                    );
                }
            }
        }
        if let Some((file, (size, span))) = sized.and_then(|f| Some((f, f.world_size?))) {
            let absent: Vec<u32> = (0..size).filter(|r| self.world.binary_search(r).is_err()).collect();
            if !absent.is_empty() && absent.iter().any(|r| !reported.contains(r)) {
                out.push(
                    Diagnostic::error(&T0028, format!("there is no file for {}", list_ranks(&absent)))
                        .with_span_label(&file.name, format!("the world has {size} ranks"), span)
                        .with_label("files", list_ranks(&self.world))
                        .with_hint("add the missing files; for a rank that launched nothing, write the single line {\"rank\": …}"),
                );
            }
            return out;
        }
        let implied = self.groups.get("world").and_then(|all| all.iter().find(|d| d.implied));
        if let (Some(world), true) = (implied, reported.is_empty()) {
            out.push(
                Diagnostic::warning(
                    &T0028,
                    format!("world is assumed to be {}, the ranks with a file", list_ranks(&self.world)),
                )
                .with_span_label(&world.file, "world is first used here", world.span)
                .with_hint(
                    "declare the world size on the first line of a file: {\"rank\": 0, \"world_size\": 4}",
                ),
            );
        }
        out
    }
}

/// Converts a byte range of a line to a span of the file.
fn span_within(line: Span, part: (usize, usize)) -> Span {
    Span { start: line.start + part.0, end: line.start + part.1 }
}

/// Formats a list of ranks, for example `ranks 0, 1`, truncated if it is long.
fn list_ranks(ranks: &[u32]) -> String {
    const SHOWN: usize = 12;
    let names: Vec<String> = ranks.iter().take(SHOWN).map(u32::to_string).collect();
    match ranks {
        [] => "no ranks".to_string(),
        [one] => format!("rank {one}"),
        _ if ranks.len() > SHOWN => format!("ranks {}, … ({} ranks)", names.join(", "), ranks.len()),
        _ => format!("ranks {}", names.join(", ")),
    }
}

fn unreadable_trace(name: &str, e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0020, format!("{name} cannot be read: {e}"))
}

//! Reads a folder of PyTorch Flight Recorder dumps, one file per rank.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use rayon::iter::{IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};
use tessera::files::{open_regular_file, write_error, write_file};
use tessera::record::RECORD_FILE;
use tessera_base::Diagnostic;
use tessera_report::{WaitGraphDrawing, WaitGraphRow, draw_wait_graph};
use tessera_torch::codes::{T1400, T1404};
use tessera_torch::flight::{
    FaultKind, FlightDump, FlightFinding, FlightReport, examine_dumps, list_ranks, read_dump,
};

/// Lists the dumps of a folder by rank, or `None` if it holds none, or a run of Tessera. A dump has a name that ends in the
/// rank, with no extension or that of its form, and begins as a pickle or as a JSON object.
///
/// # Errors
/// T1404 if two files are of one rank.
pub fn find_dumps(dir: &Path) -> Result<Option<BTreeMap<u32, PathBuf>>, Diagnostic> {
    if dir.join(RECORD_FILE).exists() || dir.join("flight").is_dir() {
        return Ok(None);
    }
    let mut found: BTreeMap<u32, PathBuf> = BTreeMap::new();
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).collect();
    paths.sort();
    for path in paths {
        let Some(rank) = path.file_name().and_then(|n| rank_of_name(n.to_str()?)) else { continue };
        if !matches!(first_byte(&path), Some(0x80 | b'{')) {
            continue;
        }
        if let Some(other) = found.insert(rank, path.clone()) {
            let message = format!("two dumps are of rank {rank}");
            return Err(Diagnostic::error(&T1404, message)
                .with_label(other.display().to_string(), "this one")
                .with_label(path.display().to_string(), "and this one"));
        }
    }
    Ok((!found.is_empty()).then_some(found))
}

/// Examines the dumps of a run. Files are read in parallel, and of each the last entries are kept, so
/// memory does not grow with the size of the files.
///
/// # Errors
/// T1401 to T1403, and T1400 if no dump can be read. Beside others, a dump that is cut off counts as missing,
/// and a note says so.
pub fn examine_flight_dumps(files: &BTreeMap<u32, PathBuf>) -> Result<FlightReport, Diagnostic> {
    let read: Vec<(u32, Result<FlightDump, Diagnostic>)> =
        files.par_iter().map(|(rank, path)| (*rank, read_dump_file(*rank, path))).collect();
    let mut dumps: BTreeMap<u32, FlightDump> = BTreeMap::new();
    let mut unreadable: Vec<Diagnostic> = Vec::new();
    for (rank, dump) in read {
        match dump {
            Ok(dump) => drop(dumps.insert(rank, dump)),
            Err(d) if d.code == &T1400 => unreadable.push(d),
            Err(d) => return Err(d),
        }
    }
    if dumps.is_empty()
        && let Some(first) = unreadable.first()
    {
        return Err(first.clone());
    }
    let mut report = examine_dumps(&dumps);
    // A thousand dumps hold millions of entries; one thread needs half a second to free them.
    dumps.into_par_iter().for_each(drop);
    report.notes.extend(unreadable.iter().map(|d| {
        let why = d.labels.first().map_or(String::new(), |l| format!(": {}", l.message));
        format!("{}{why}", d.message)
    }));
    Ok(report)
}

fn read_dump_file(rank: u32, path: &Path) -> Result<FlightDump, Diagnostic> {
    let name = path.display().to_string();
    let file = open_regular_file(path).map_err(|e| {
        Diagnostic::error(&T1400, format!("{name} cannot be read")).with_label(name.clone(), e.to_string())
    })?;
    read_dump(&name, rank, BufReader::with_capacity(1 << 16, file))
}

/// Draws what the ranks issued where they departed, and which ranks wait for which, as `flight.svg` in a
/// folder. Returns the path, or `None` if there is nothing to draw.
///
/// # Errors
/// T0014 if the file cannot be written.
pub fn draw_flight_report(report: &FlightReport, folder: &Path) -> Result<Option<PathBuf>, Diagnostic> {
    let Some(finding) = report.findings.first() else { return Ok(None) };
    let rows = list_rows(report, finding);
    let has_arrows = rows.iter().any(|row| !row.awaited_rows.is_empty());
    let arrows = if has_arrows { "; an arrow leads to the ranks that are waited for" } else { "" };
    let subtitle = format!("{}{arrows}", finding.certainty.name());
    let drawing = WaitGraphDrawing { title: finding.summarise(), subtitle, rows };
    std::fs::create_dir_all(folder).map_err(|e| write_error(folder, &e))?;
    let path = folder.join("flight.svg");
    write_file(&path, draw_wait_graph(&drawing).as_bytes())?;
    Ok(Some(path))
}

/// Ranks that do the same, while rows are collected.
struct RankGroup {
    ranks: BTreeSet<u32>,
    /// Ranks for which they wait.
    awaited: BTreeSet<u32>,
    action: String,
    details: String,
}

/// Lists ranks that do the same: those that wait in one collective, the sides of a departure, and the
/// ranks for which others wait.
fn list_rows(report: &FlightReport, finding: &FlightFinding) -> Vec<WaitGraphRow> {
    let groups = group_ranks(report, finding);
    let find_rows = |awaited: &BTreeSet<u32>| -> Vec<usize> {
        let hit = groups.iter().enumerate().filter(|(_, other)| !other.ranks.is_disjoint(awaited));
        hit.map(|(at, _)| at).collect()
    };
    let is_cycle = finding.kind == FaultKind::WaitCycle && finding.ranks.len() > 1;
    let mark = if is_cycle { "in the cycle" } else { "at fault" };
    let to_row = |group: &RankGroup| {
        let ranks: Vec<u32> = group.ranks.iter().copied().collect();
        WaitGraphRow {
            ranks: list_ranks(&ranks),
            action: group.action.clone(),
            details: group.details.clone(),
            mark: if ranks.iter().all(|r| finding.ranks.contains(r)) { mark } else { "" },
            awaited_rows: find_rows(&group.awaited),
        }
    };
    groups.iter().map(to_row).collect()
}

fn group_ranks(report: &FlightReport, finding: &FlightFinding) -> Vec<RankGroup> {
    let mut groups: Vec<RankGroup> = Vec::new();
    let join_details = |group: &str, site: &Option<String>| match site {
        Some(site) => format!("{group} · {site}"),
        None => group.to_string(),
    };
    for w in report.waits.iter().filter(|w| !w.awaited.is_empty()) {
        let (awaited, action) = (w.awaited.iter().copied().collect(), format!("inside {}", w.call));
        let details = join_details(&w.group, &w.site);
        let same = |g: &&mut RankGroup| g.awaited == awaited && g.action == action && g.details == details;
        match groups.iter_mut().find(same) {
            Some(group) => drop(group.ranks.insert(w.rank)),
            None => groups.push(RankGroup { ranks: BTreeSet::from([w.rank]), awaited, action, details }),
        }
    }
    for side in &finding.sides {
        let ranks: BTreeSet<u32> = side.ranks.iter().copied().collect();
        if !ranks.is_empty() && groups.iter().all(|g| g.ranks.is_disjoint(&ranks)) {
            let details = join_details(&side.group, &side.site);
            let action = format!("issued {}", side.call);
            groups.push(RankGroup { ranks, awaited: BTreeSet::new(), action, details });
        }
    }
    let awaited: BTreeSet<u32> = groups.iter().flat_map(|g| g.awaited.iter().copied()).collect();
    let rest = awaited.into_iter().filter(|r| groups.iter().all(|g| !g.ranks.contains(r)));
    let (at_fault, others): (BTreeSet<u32>, BTreeSet<u32>) = rest.partition(|r| finding.ranks.contains(r));
    for (ranks, action) in [(at_fault, finding.kind.name()), (others, "issued nothing more")] {
        if !ranks.is_empty() {
            let (action, details) = (action.to_string(), String::new());
            groups.push(RankGroup { ranks, awaited: BTreeSet::new(), action, details });
        }
    }
    groups
}

/// Returns the number at the end of a name such as `rank_3`, `nccl_trace_rank_12` or `rank_3.json`.
fn rank_of_name(name: &str) -> Option<u32> {
    let stem = [".json", ".pickle", ".pkl"].iter().find_map(|e| name.strip_suffix(e)).unwrap_or(name);
    let digits = stem.len() - stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    stem[stem.len() - digits..].parse().ok()
}

fn first_byte(path: &Path) -> Option<u8> {
    let mut byte = [0u8];
    open_regular_file(path).ok()?.read_exact(&mut byte).ok()?;
    Some(byte[0])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_the_number_at_the_end() {
        assert_eq!(rank_of_name("rank_12"), Some(12));
        assert_eq!(rank_of_name("nccl_trace_rank_0"), Some(0));
        assert_eq!(rank_of_name("3"), Some(3));
        assert_eq!(rank_of_name("rank_7.json"), Some(7));
        assert_eq!(rank_of_name("case.json"), None);
        assert_eq!(rank_of_name("rank_3.log"), None);
    }

    #[test]
    fn two_files_of_one_rank_are_refused_and_other_files_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("notes_1"), "text").unwrap();
        assert!(find_dumps(dir.path()).unwrap().is_none());
        std::fs::write(dir.path().join("rank_1"), b"\x80\x02N.").unwrap();
        assert_eq!(find_dumps(dir.path()).unwrap().unwrap().len(), 1);
        std::fs::write(dir.path().join("old_rank_1"), b"{}").unwrap();
        assert_eq!(find_dumps(dir.path()).unwrap_err().code, &T1404);
    }
}

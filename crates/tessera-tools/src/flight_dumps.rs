//! Reads a folder of PyTorch Flight Recorder dumps, one file per rank.

use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use tessera::files::open_regular_file;
use tessera_base::Diagnostic;
use tessera_torch::codes::{T1400, T1404};
use tessera_torch::flight::{FlightDump, FlightReport, examine_dumps, read_dump};

/// Lists the dumps of a folder by rank, or `None` if it holds none. A dump has a name that ends in the
/// rank and no extension, and begins as a pickle or as a JSON object.
///
/// # Errors
/// T1404 if two files are of one rank.
pub fn find_dumps(dir: &Path) -> Result<Option<BTreeMap<u32, PathBuf>>, Diagnostic> {
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

/// Examines the dumps of a run.
///
/// # Errors
/// T1401 to T1403. A dump that is cut off counts as missing, and a note says so.
pub fn examine_flight_dumps(files: &BTreeMap<u32, PathBuf>) -> Result<FlightReport, Diagnostic> {
    let mut dumps: BTreeMap<u32, FlightDump> = BTreeMap::new();
    let mut notes = Vec::new();
    for (rank, path) in files {
        let name = path.display().to_string();
        let file = open_regular_file(path).map_err(|e| {
            Diagnostic::error(&T1400, format!("{name} cannot be read"))
                .with_label(name.clone(), e.to_string())
        })?;
        match read_dump(&name, *rank, BufReader::with_capacity(1 << 16, file)) {
            Ok(dump) => drop(dumps.insert(*rank, dump)),
            Err(d) if d.code == &T1400 => {
                let why = d.labels.first().map_or(String::new(), |l| l.message.clone());
                notes.push(format!("{name} cannot be read: {why}"));
            }
            Err(d) => return Err(d),
        }
    }
    let mut report = examine_dumps(&dumps);
    report.notes.extend(notes);
    Ok(report)
}

/// Returns the number at the end of a name such as `rank_3` or `nccl_trace_rank_12`.
fn rank_of_name(name: &str) -> Option<u32> {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
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
        assert_eq!(rank_of_name("case.json"), None);
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

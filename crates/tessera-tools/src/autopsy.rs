//! Reads a run directory, also while the run is in progress, and hands its contents to the autopsy
//! analysis.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tessera::clock::monotonic_ns;
use tessera::files::{read_file, write_error, write_file};
use tessera::flight::{EXITS_FILE, FLIGHT_DIR, MAX_FLIGHT_BYTES, process_vitals};
use tessera::opened_run::RunPlan;
use tessera::record::RECORD_FILE;
use tessera::run_dir::read_record;
use tessera_base::Diagnostic;
use tessera_mesh::Rank;
use tessera_report::autopsy::{Autopsy, AutopsyEvidence, ProcessVitals, diagnose_run};
use tessera_report::draw_counterexample;
use tessera_report::flight::{FlightEntry, FlightLog};
use tessera_verify::collective_lines;

use crate::codes::T0036;

/// Examines a run directory.
///
/// # Errors
/// T0036 if the folder has neither a record nor flight records.
pub fn examine_run(dir: &Path) -> Result<Autopsy, Diagnostic> {
    let mut evidence = AutopsyEvidence { record: None, ..AutopsyEvidence::default() };
    let record = read_record(&dir.join(RECORD_FILE));
    let recorded = record.is_some();
    match record {
        Some(Ok(record)) => evidence.record = Some(record),
        Some(Err(d)) => evidence.notes.push(format!("{RECORD_FILE}: {}", format_note(&d))),
        None => evidence.notes.push(format!("there is no {RECORD_FILE}")),
    }
    let flight_dir = dir.join(FLIGHT_DIR);
    let folder = if flight_dir.is_dir() { flight_dir } else { dir.to_path_buf() };
    let (files, older) = rank_files(&folder);
    if files.is_empty() && !recorded {
        return Err(Diagnostic::error(&T0036, format!("{} is not a run directory", dir.display()))
            .with_label(
                dir.display().to_string(),
                format!("no {RECORD_FILE} and no {FLIGHT_DIR}/rank-N.jsonl"),
            )
            .with_hint("name the folder that `tessera stream --out` or `tessera generate --out` wrote"));
    }
    if !older.is_empty() {
        evidence.notes.push(format!(
            "skipped flight records of earlier runs: {}; to examine one of those runs, copy the records of its session to a \
             separate folder and name them rank-N.jsonl",
            older.join(", ")
        ));
    }
    for path in files {
        let name = path.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
        let Some(bytes) = read_limited(&path, MAX_FLIGHT_BYTES) else {
            evidence.notes.push(format!("{name} cannot be read or is too long"));
            continue;
        };
        match FlightLog::parse(&name, &bytes) {
            Ok(flight) => evidence.flight_records.push(flight),
            Err(d) => evidence.notes.push(format_note(&d)),
        }
    }
    for f in &evidence.flight_records {
        if let Some(v) = process_vitals(&f.header) {
            // The file of an earlier run names a process that is gone.
            let known = evidence.vitals.entry(f.header.rank).or_insert(v);
            if v != ProcessVitals::Gone {
                *known = v;
            }
        }
    }
    evidence.now_ns = estimate_now_ns(&evidence);
    let exits = read_limited(&folder.join(EXITS_FILE), MAX_FLIGHT_BYTES);
    if exits.is_none() && evidence.now_ns.is_none() && !evidence.flight_records.is_empty() {
        evidence
            .notes
            .push(format!("there is no {EXITS_FILE}: the launcher died too, or these ranks had no launcher"));
    }
    let exits = exits.unwrap_or_default();
    let lines = exits.split(|b| *b == b'\n');
    evidence.process_ends = lines.filter_map(|l| serde_json::from_slice(l).ok()).collect();
    add_planned_collectives(dir, &mut evidence);
    Ok(diagnose_run(&evidence))
}

/// Formats a diagnostic about a file as one line.
fn format_note(d: &Diagnostic) -> String {
    let labels = d.labels.iter().enumerate().map(|(i, l)| match i {
        // The message already names the file of the first label.
        0 => l.message.clone(),
        _ => format!("{} {}", l.location, l.message),
    });
    let details: Vec<String> = labels.chain(d.notes.iter().cloned()).collect();
    if details.is_empty() { d.message.clone() } else { format!("{}: {}", d.message, details.join("; ")) }
}

/// Draws the counterexample of each finding that has one, and returns the paths of the drawings.
///
/// # Errors
/// T0014 if a file cannot be written.
pub fn draw_findings(autopsy: &Autopsy, folder: &Path) -> Result<Vec<PathBuf>, Diagnostic> {
    std::fs::create_dir_all(folder).map_err(|e| write_error(folder, &e))?;
    let mut written = Vec::new();
    for (n, f) in autopsy.findings.iter().enumerate() {
        let Some(proof) = &f.counterexample else { continue };
        let path = folder.join(format!("{}-{}.svg", f.class.name(), n + 1));
        write_file(&path, draw_counterexample(proof, &f.summary).as_bytes())?;
        written.push(path);
    }
    Ok(written)
}

/// Lists the files named `rank-N.jsonl` in rank order, and the names of the records that a later
/// run set aside.
fn rank_files(folder: &Path) -> (Vec<PathBuf>, Vec<String>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let (mut files, mut set_aside): (Vec<(u32, PathBuf)>, Vec<String>) = Default::default();
    for path in entries.map(|e| e.path()) {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let Some(stem) = name.strip_prefix("rank-").and_then(|n| n.strip_suffix(".jsonl")) else { continue };
        match stem.split_once('.') {
            None => files.extend(stem.parse().ok().map(|rank| (rank, path.clone()))),
            Some((rank, _)) if rank.parse::<u32>().is_ok() => set_aside.push(name.to_string()),
            Some(_) => {}
        }
    }
    files.sort();
    set_aside.sort();
    (files.into_iter().map(|(_, path)| path).collect(), set_aside)
}

fn read_limited(path: &Path, max_bytes: u64) -> Option<Vec<u8>> {
    read_file(path, max_bytes).ok()
}

/// Estimates the current time on the records' wall clock, from a process that still runs on this
/// host; `None` if no process does.
fn estimate_now_ns(evidence: &AutopsyEvidence) -> Option<u64> {
    let live_flights = evidence.flight_records.iter().filter(|f| {
        evidence.vitals.get(&f.header.rank).is_some_and(|v| *v != ProcessVitals::Gone)
            && process_vitals(&f.header).is_some()
    });
    let now = monotonic_ns();
    live_flights.map(|f| f.header.wall_ns.saturating_add(now.saturating_sub(f.header.mono_ns))).max()
}

/// Adds the planned collectives of each rank's last phase, and the members of the groups that they
/// name.
fn add_planned_collectives(dir: &Path, evidence: &mut AutopsyEvidence) {
    let plan = match RunPlan::read(&dir.join("plan")) {
        Ok(plan) => plan,
        Err(ds) => {
            let why = ds.first().map_or("there is none".to_string(), |d| d.message.clone());
            evidence.notes.push(format!("the plan cannot be read: {why}"));
            return;
        }
    };
    let sealed = plan.sealed();
    let last_phase = |f: &FlightLog| {
        f.lines.iter().rev().find_map(|l| match &l.entry {
            FlightEntry::Phase(p) => Some(p.phase.clone()),
            _ => None,
        })
    };
    let phases: BTreeSet<String> = evidence.flight_records.iter().filter_map(last_phase).collect();
    let mut groups: BTreeMap<String, BTreeSet<Vec<u32>>> = BTreeMap::new();
    for rank in sealed.mesh().iter() {
        for phase in &phases {
            let Some(program) = sealed.rank_program(phase, rank) else { continue };
            let lines = collective_lines(program).into_iter().map(|(_, line)| line).collect();
            evidence.plan.insert((phase.clone(), rank.0), lines);
            for group in program.collective_ops().filter_map(|(_, op)| op.comm_group()) {
                let members: Vec<u32> =
                    sealed.mesh().group_members(rank, group).iter().map(|r: &Rank| r.0).collect();
                groups.entry(group.to_string()).or_default().insert(members);
            }
        }
    }
    evidence.groups = groups.into_iter().map(|(name, of)| (name, of.into_iter().collect())).collect();
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_report::flight::{FlightHeader, SCHEMA};

    use super::*;

    #[test]
    fn a_folder_without_run_files_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("rank-x.jsonl"), "{}").unwrap();
        assert_eq!(examine_run(dir.path()).unwrap_err().code, &T0036);
        assert_eq!(examine_run(&dir.path().join("nowhere")).unwrap_err().code, &T0036);
    }

    #[test]
    fn set_aside_records_are_listed_but_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let header =
            FlightHeader { schema: SCHEMA, kind: "flight".into(), world_size: 1, ..FlightHeader::default() };
        let now = FlightHeader { session: "2".into(), ..header.clone() };
        std::fs::write(dir.path().join("rank-0.jsonl"), now.encode_line()).unwrap();
        let before = FlightHeader { session: "1".into(), rank: 7, world_size: 9, ..header };
        std::fs::write(dir.path().join("rank-7.0000000000000001.jsonl"), before.encode_line()).unwrap();
        let a = examine_run(dir.path()).unwrap();
        assert_eq!(a.ranks.len(), 1);
        assert!(a.notes.iter().any(|n| n.contains("rank-7.0000000000000001.jsonl")), "{:?}", a.notes);
    }

    #[test]
    fn a_long_record_is_read_line_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(RECORD_FILE);
        let start = r#"{"kind":"start","schema":2,"tessera":"0","plan":"p","model":"m","mesh":"tp=2","strategy":"s","numerics":"n","cache":"c","topology":"mesh","seed":0,"prompts":[],"chunks":null,"fps":1.0,"width":1,"height":1,"steps":1,"command":[],"started_at":"","status":"running"}"#;
        let chunk = |n: u32| {
            format!(
                "{{\"kind\":\"chunk\",\"chunk\":{n},\"call_id\":{n},\"cache_epoch\":0,\"start_frame\":0,\"prompt\":\"\",\"seed\":0,\"cut\":false,\"latents_digest\":\"\",\"frames\":3,\"start_ns\":{n},\"wall_ns\":1,\"queue_in\":0,\"queue_out\":0,\"ranks\":[]}}\n"
            )
        };
        let chunks: String = (0..3000).map(chunk).collect();
        std::fs::write(&path, format!("{start}\n{chunks}")).unwrap();
        let record = read_record(&path).unwrap().unwrap();
        assert_eq!((record.chunks.len(), record.chunk_count(), record.frame_count()), (1000, 3000, 9000));
        assert!(examine_run(dir.path()).unwrap().record_comparison.contains("no end line"));
        assert!(read_record(dir.path()).is_none());
    }

    #[test]
    fn broken_files_are_noted_and_the_rest_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let flight = dir.path().join(FLIGHT_DIR);
        std::fs::create_dir(&flight).unwrap();
        std::fs::write(flight.join("rank-0.jsonl"), "").unwrap();
        std::fs::write(flight.join("rank-1.jsonl"), [0xff; 2000]).unwrap();
        std::fs::write(dir.path().join(RECORD_FILE), "{\"kind\":").unwrap();
        let a = examine_run(dir.path()).unwrap();
        assert!(a.culprits().is_empty() && a.has_problem());
        assert!(a.notes.len() >= 4, "{:?}", a.notes);
    }

    #[test]
    fn files_of_an_older_version_are_noted_with_both_versions() {
        let dir = tempfile::tempdir().unwrap();
        let flight = dir.path().join(FLIGHT_DIR);
        std::fs::create_dir(&flight).unwrap();
        let old = "{\"schema\":1,\"kind\":\"flight\",\"rank\":0,\"x\":\"01234567\"}\n";
        std::fs::write(flight.join("rank-0.jsonl"), old).unwrap();
        std::fs::write(dir.path().join(RECORD_FILE), "{\"kind\":\"start\",\"schema\":1}\n").unwrap();
        let notes = examine_run(dir.path()).unwrap().notes;
        let old_files = notes.iter().filter(|n| n.contains("schema 1; this build reads schema 2"));
        assert_eq!(old_files.count(), 2, "{notes:?}");
    }
}

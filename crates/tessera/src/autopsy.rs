//! What became of a run: reads its folder, also while the run goes on, and hands it to the analysis.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tessera_base::{Code, Diagnostic};
use tessera_mesh::Rank;
use tessera_report::autopsy::{Autopsy, Evidence, Vitals, autopsy};
use tessera_report::counterexample;
use tessera_report::flight::{Entry, Flight};
use tessera_verify::collective_lines;

use crate::files::{unwritable, write_file};
use crate::flight::{EXITS, FLIGHT, MAX_FILE_BYTES, now_ns, vitals};
use crate::plan::Plan;
use crate::record::RECORD;
use crate::stream;

/// Nothing to examine.
pub static T0036: Code = Code {
    id: "T0036",
    title: "folder is not a run's",
    page: "An autopsy reads the folder of a run: record.jsonl, flight/rank-N.jsonl and plan. Here is none of the first two. A \
folder of flight records alone does too, as when they were gathered from several hosts: name them rank-0.jsonl and so on.\n\n\
Files that are missing, cut, or of another run are no hindrance: they are noted, and the rest is read.",
};

/// Examines a run's folder.
///
/// # Errors
/// T0036 where nothing in it is of a run.
pub fn examine(dir: &Path) -> Result<Autopsy, Diagnostic> {
    let mut evidence = Evidence { record: None, ..Evidence::default() };
    let record = stream::read(&dir.join(RECORD));
    let recorded = record.is_some();
    match record {
        Some(Ok(record)) => evidence.record = Some(record),
        Some(Err(d)) => evidence.notes.push(format!("{RECORD}: {}", d.message)),
        None => evidence.notes.push(format!("there is no {RECORD}")),
    }
    let inside = dir.join(FLIGHT);
    let folder = if inside.is_dir() { inside } else { dir.to_path_buf() };
    let (files, older) = rank_files(&folder);
    if files.is_empty() && !recorded {
        return Err(Diagnostic::error(&T0036, format!("{} is not the folder of a run", dir.display()))
            .at(dir.display().to_string(), format!("no {RECORD} and no {FLIGHT}/rank-N.jsonl"))
            .hint("name the folder that `tessera stream --out` made"));
    }
    if !older.is_empty() {
        evidence.notes.push(format!(
            "left out, of earlier runs: {}; to examine one, name those of its session rank-N.jsonl in a folder of their own",
            older.join(", ")
        ));
    }
    for path in files {
        let name = path.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
        let Some(bytes) = read(&path, MAX_FILE_BYTES) else {
            evidence.notes.push(format!("{name} cannot be read or is too long"));
            continue;
        };
        match Flight::parse(&name, &bytes) {
            Ok(flight) => evidence.flights.push(flight),
            Err(d) => evidence
                .notes
                .push(d.places.first().map_or(d.message.clone(), |p| format!("{}: {}", d.message, p.says))),
        }
    }
    for f in &evidence.flights {
        if let Some(v) = vitals(&f.header) {
            // A file of another run speaks of a process that is gone.
            let known = evidence.vitals.entry(f.header.rank).or_insert(v);
            if v != Vitals::Gone {
                *known = v;
            }
        }
    }
    evidence.now_ns = now(&evidence);
    let exits = read(&folder.join(EXITS), MAX_FILE_BYTES);
    if exits.is_none() && evidence.now_ns.is_none() && !evidence.flights.is_empty() {
        evidence.notes.push(format!("there is no {EXITS}: the launcher died too, or these ranks had none"));
    }
    let exits = exits.unwrap_or_default();
    let lines = exits.split(|b| *b == b'\n');
    evidence.ends = lines.filter_map(|l| serde_json::from_slice(l).ok()).collect();
    plan(dir, &mut evidence);
    Ok(autopsy(&evidence))
}

/// Draws what can be drawn of it, and gives the files.
///
/// # Errors
/// T0014.
pub fn draw(autopsy: &Autopsy, folder: &Path) -> Result<Vec<PathBuf>, Diagnostic> {
    std::fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e))?;
    let mut written = Vec::new();
    for (n, f) in autopsy.findings.iter().enumerate() {
        let Some(proof) = &f.proof else { continue };
        let path = folder.join(format!("{}-{}.svg", f.class.name(), n + 1));
        write_file(&path, counterexample(proof, &f.says).as_bytes())?;
        written.push(path);
    }
    Ok(written)
}

/// Files named `rank-N.jsonl` in order of rank, and names of those that a later run put aside.
fn rank_files(folder: &Path) -> (Vec<PathBuf>, Vec<String>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let (mut files, mut older): (Vec<(u32, PathBuf)>, Vec<String>) = Default::default();
    for path in entries.map(|e| e.path()) {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let Some(stem) = name.strip_prefix("rank-").and_then(|n| n.strip_suffix(".jsonl")) else { continue };
        match stem.split_once('.') {
            None => files.extend(stem.parse().ok().map(|rank| (rank, path.clone()))),
            Some((rank, _)) if rank.parse::<u32>().is_ok() => older.push(name.to_string()),
            Some(_) => {}
        }
    }
    files.sort();
    older.sort();
    (files.into_iter().map(|(_, path)| path).collect(), older)
}

fn read(path: &Path, most: u64) -> Option<Vec<u8>> {
    let length = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?.len();
    if length > most { None } else { std::fs::read(path).ok() }
}

/// Now on the clock of the records, where a process of this host still is.
fn now(evidence: &Evidence) -> Option<u64> {
    let here = evidence.flights.iter().filter(|f| {
        evidence.vitals.get(&f.header.rank).is_some_and(|v| *v != Vitals::Gone) && vitals(&f.header).is_some()
    });
    let now = now_ns();
    here.map(|f| f.header.wall_ns.saturating_add(now.saturating_sub(f.header.mono_ns))).max()
}

/// What the plan holds of the phases that ranks were in at last, and who is in its groups.
fn plan(dir: &Path, evidence: &mut Evidence) {
    let sealed = match Plan::read(&dir.join("plan")) {
        Ok(plan) => plan.sealed,
        Err(ds) => {
            let why = ds.first().map_or("it is not there".to_string(), |d| d.message.clone());
            evidence.notes.push(format!("the plan cannot be read: {why}"));
            return;
        }
    };
    let last = |f: &Flight| {
        f.lines.iter().rev().find_map(|l| match &l.entry {
            Entry::Phase(p) => Some(p.phase.clone()),
            _ => None,
        })
    };
    let phases: BTreeSet<String> = evidence.flights.iter().filter_map(last).collect();
    let mut groups: BTreeMap<String, BTreeSet<Vec<u32>>> = BTreeMap::new();
    for rank in sealed.mesh().iter() {
        for phase in &phases {
            let Some(program) = sealed.program(phase, rank) else { continue };
            let lines = collective_lines(program).into_iter().map(|(_, line)| line).collect();
            evidence.plan.insert((phase.clone(), rank.0), lines);
            for group in program.collectives().filter_map(|(_, op)| op.group()) {
                let members: Vec<u32> =
                    sealed.mesh().members(rank, group).iter().map(|r: &Rank| r.0).collect();
                groups.entry(group.to_string()).or_default().insert(members);
            }
        }
    }
    evidence.groups = groups.into_iter().map(|(name, of)| (name, of.into_iter().collect())).collect();
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_report::flight::{Header, SCHEMA};

    use super::*;

    #[test]
    fn a_folder_of_anything_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("rank-x.jsonl"), "{}").unwrap();
        assert_eq!(examine(dir.path()).unwrap_err().code, &T0036);
        assert_eq!(examine(&dir.path().join("nowhere")).unwrap_err().code, &T0036);
    }

    #[test]
    fn records_that_were_put_aside_are_named_and_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let header = Header { schema: SCHEMA, kind: "flight".into(), world: 1, ..Header::default() };
        let now = Header { session: "2".into(), ..header.clone() };
        std::fs::write(dir.path().join("rank-0.jsonl"), now.to_bytes()).unwrap();
        let before = Header { session: "1".into(), rank: 7, world: 9, ..header };
        std::fs::write(dir.path().join("rank-7.0000000000000001.jsonl"), before.to_bytes()).unwrap();
        let a = examine(dir.path()).unwrap();
        assert_eq!(a.ranks.len(), 1);
        assert!(a.notes.iter().any(|n| n.contains("rank-7.0000000000000001.jsonl")), "{:?}", a.notes);
    }

    #[test]
    fn a_long_record_is_read_by_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(RECORD);
        let start = r#"{"kind":"start","schema":1,"tessera":"0","plan":"p","model":"m","mesh":"tp=2","strategy":"s","numerics":"n","cache":"c","topology":"mesh","seed":0,"prompts":[],"chunks":null,"fps":1.0,"width":1,"height":1,"steps":1,"command":[],"started_at":"","status":"running"}"#;
        let chunk = |n: u32| {
            format!(
                "{{\"kind\":\"chunk\",\"chunk\":{n},\"call_id\":{n},\"cache_epoch\":0,\"start_frame\":0,\"prompt\":\"\",\"seed\":0,\"cut\":false,\"latents_digest\":\"\",\"frames\":3,\"start_ns\":{n},\"wall_ns\":1,\"queue_in\":0,\"queue_out\":0,\"ranks\":[]}}\n"
            )
        };
        let chunks: String = (0..3000).map(chunk).collect();
        std::fs::write(&path, format!("{start}\n{chunks}")).unwrap();
        let record = stream::read(&path).unwrap().unwrap();
        assert_eq!((record.chunks.len(), record.chunk_count(), record.frame_count()), (1000, 3000, 9000));
        assert!(examine(dir.path()).unwrap().record_says.contains("no end line"));
        assert!(stream::read(dir.path()).is_none());
    }

    #[test]
    fn broken_files_are_noted_and_the_rest_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let flight = dir.path().join(FLIGHT);
        std::fs::create_dir(&flight).unwrap();
        std::fs::write(flight.join("rank-0.jsonl"), "").unwrap();
        std::fs::write(flight.join("rank-1.jsonl"), [0xff; 2000]).unwrap();
        std::fs::write(dir.path().join(RECORD), "{\"kind\":").unwrap();
        let a = examine(dir.path()).unwrap();
        assert!(a.culprits().is_empty() && a.is_wrong());
        assert!(a.notes.len() >= 4, "{:?}", a.notes);
    }
}

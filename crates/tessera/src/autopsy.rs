//! What became of a run: reads its folder, also while the run goes on, and hands it to the analysis.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tessera_base::{Code, Diagnostic};
use tessera_mesh::Rank;
use tessera_report::autopsy::{Autopsy, Evidence, Vitals, autopsy};
use tessera_report::counterexample;
use tessera_report::flight::{Entry, Flight};
use tessera_report::record::Record;
use tessera_verify::collective_lines;

use crate::files::{unwritable, write_file};
use crate::flight::{EXITS, FLIGHT, MAX_FILE_BYTES, now_ns, vitals};
use crate::plan::Plan;
use crate::record::RECORD;

/// Nothing to examine.
pub static T0036: Code = Code {
    id: "T0036",
    title: "folder is not a run's",
    page: "An autopsy reads the folder of a run: record.jsonl, flight/rank-N.jsonl and plan. Here is none of the first two. A \
folder of flight records alone does too, as when they were gathered from several hosts: name them rank-0.jsonl and so on.\n\n\
Files that are missing, cut, or of another run are no hindrance: they are noted, and the rest is read.",
};

/// Longest record that is read.
const MAX_RECORD_BYTES: u64 = 1 << 30;

/// Examines a run's folder.
///
/// # Errors
/// T0036 where nothing in it is of a run.
pub fn examine(dir: &Path) -> Result<Autopsy, Diagnostic> {
    let mut evidence = Evidence { record: None, ..Evidence::default() };
    let record = read(&dir.join(RECORD), MAX_RECORD_BYTES);
    match record.as_deref().map(Record::parse) {
        Some(Ok(record)) => evidence.record = Some(record),
        Some(Err(d)) => evidence.notes.push(format!("{RECORD}: {}", d.message)),
        None => evidence.notes.push(format!("there is no {RECORD}")),
    }
    let inside = dir.join(FLIGHT);
    let folder = if inside.is_dir() { inside } else { dir.to_path_buf() };
    let files = rank_files(&folder);
    if files.is_empty() && record.is_none() {
        return Err(Diagnostic::error(&T0036, format!("{} is not the folder of a run", dir.display()))
            .at(dir.display().to_string(), format!("no {RECORD} and no {FLIGHT}/rank-N.jsonl"))
            .hint("name the folder that `tessera stream --out` made"));
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

/// Files named `rank-N.jsonl`, by name.
fn rank_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let rank = |p: &Path| {
        let name = p.file_name()?.to_str()?;
        name.strip_prefix("rank-")?.strip_suffix(".jsonl")?.parse::<u32>().ok()
    };
    let mut files: Vec<(u32, PathBuf)> = entries.filter_map(|e| Some((rank(&e.path())?, e.path()))).collect();
    files.sort();
    files.into_iter().map(|(_, path)| path).collect()
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
    use super::*;

    #[test]
    fn a_folder_of_anything_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("rank-x.jsonl"), "{}").unwrap();
        assert_eq!(examine(dir.path()).unwrap_err().code, &T0036);
        assert_eq!(examine(&dir.path().join("nowhere")).unwrap_err().code, &T0036);
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

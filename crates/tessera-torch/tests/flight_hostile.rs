//! Dumps with numbers and sizes that no run has: an answer within a second, and no panic.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;

use tessera_torch::flight::{FlightDump, FlightReport, examine_dumps, read_dump};

fn read(rank: u32, text: &str) -> FlightDump {
    read_dump("dump", rank, text.as_bytes()).map_err(|d| format!("{d:?}")).unwrap()
}

/// Returns a dump in the JSON form with one pending collective per group.
fn write_dump(groups: &[(&str, &str, u64)]) -> String {
    let configs = groups.iter().map(|(name, ranks, _)| format!(r#""{name}": {{"ranks": "[{ranks}]"}}"#));
    let entries = groups.iter().enumerate().map(|(at, (name, _, sequence))| {
        format!(
            r#"{{"record_id": {at}, "process_group": ["{name}", ""], "profiling_name": "nccl:all_reduce",
                "collective_seq_id": {sequence}, "state": "scheduled",
                "input_sizes": [[18446744073709551615, 4294967296, 9223372036854775807, 3]], "input_dtypes": ["Float"]}}"#
        )
    });
    let (configs, entries): (Vec<String>, Vec<String>) = (configs.collect(), entries.collect());
    format!(
        r#"{{"version": "2.10", "pg_config": {{{}}}, "entries": [{}]}}"#,
        configs.join(", "),
        entries.join(", ")
    )
}

fn examine(dumps: Vec<FlightDump>) -> FlightReport {
    let report = examine_dumps(&dumps.into_iter().map(|d| (d.rank, d)).collect::<BTreeMap<u32, _>>());
    assert!(!report.to_text("run").is_empty() && report.to_json().is_object());
    report
}

#[test]
fn numbers_at_their_limits_are_examined() {
    let text = write_dump(&[("0", "0, 1", u64::MAX), ("1", "0, 1", i64::MAX as u64)]);
    let mut dumps = vec![read(0, &text), read(1, &text)];
    examine(dumps.clone());
    for entry in dumps.iter_mut().flat_map(|d| &mut d.entries) {
        (entry.sequence, entry.record_id, entry.launch) = (u64::MAX, u64::MAX, (u64::MAX, u64::MAX));
        entry.created_ns = u64::MAX;
    }
    examine(dumps.clone());
    dumps[1].entries[0].op = "all_gather".into();
    examine(dumps.clone());
    dumps[1].entries.clear();
    dumps[1].last_enqueued.insert("0".to_string(), u64::MAX);
    examine(dumps);
}

#[test]
fn the_last_rank_of_32_bits_is_a_rank() {
    let one = read(0, &write_dump(&[("1", "0, 4294967295", 1)]));
    let mut two = read(u32::MAX, &write_dump(&[("2", "0, 4294967295", 1)]));
    two.groups
        .clone_from(&read(0, &write_dump(&[("1", "0, 4294967295", 1), ("2", "0, 4294967295", 1)])).groups);
    let mut one = one;
    one.groups.clone_from(&two.groups);
    let report = examine(vec![one, two]);
    assert!(report.accuses());
}

/// A text of many members, each once and all the same one.
#[test]
fn groups_of_many_members_take_no_time() {
    let many: Vec<String> = (0..200_000).map(|r| r.to_string()).collect();
    let report = examine(vec![read(0, &write_dump(&[("0", &many.join(","), 1)]))]);
    assert_eq!(report.findings.len(), 1);
    examine(vec![read(0, &write_dump(&[("0", &vec!["1"; 1_000_000].join(","), 1)]))]);
}

/// The ranks of a large run wait for one another in one group.
#[test]
fn a_group_with_thousands_of_dumps_takes_no_time() {
    let ranks: Vec<String> = (0..4000).map(|r| r.to_string()).collect();
    let ranks = ranks.join(",");
    let (waiting, silent) = (write_dump(&[("0", &ranks, 1)]), write_dump(&[]));
    let silent =
        silent.replace("{}, \"entries\"", &format!("{{\"0\": {{\"ranks\": \"[{ranks}]\"}}}}, \"entries\""));
    let dumps = (0..4000).map(|rank| read(rank, if rank % 3 == 0 { &silent } else { &waiting }));
    examine(dumps.collect());
}

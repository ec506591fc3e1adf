//! Forms and versions of dumps: what is read, and what is refused with which code.
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use serde_json::{Value, json};
use tessera_base::Diagnostic;
use tessera_torch::flight::{EntryState, FlightDump, read_dump};

fn read(bytes: &[u8]) -> Result<FlightDump, Diagnostic> {
    read_dump("rank_0", 0, bytes)
}

fn read_json(dump: &Value) -> Result<FlightDump, Diagnostic> {
    read(dump.to_string().as_bytes())
}

/// A dump with one entry, as the version's recorder writes it.
fn make_dump(version: &str) -> Value {
    let minor: u32 = version.split('.').nth(1).unwrap().parse().unwrap();
    let mut dump = json!({
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": 1, "last_started_collective": -1, "last_completed_collective": 0}},
        "entries": [{
            "record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
            "op_id": 1, "profiling_name": "nccl:all_reduce", "time_created_ns": 5, "input_sizes": [[4, 8]],
            "input_dtypes": ["Float"], "output_sizes": [[4, 8]], "output_dtypes": ["Float"], "state": "scheduled",
            "time_discovered_started_ns": null, "time_discovered_completed_ns": null, "retired": false,
            "timeout_ms": 600000, "is_p2p": false,
        }],
    });
    dump[if minor >= 10 { "comm_lib_version" } else { "nccl_version" }] = json!("2.28.9");
    if minor >= 5 {
        dump["entries"][0]["thread_id"] = json!("140476345069888");
        dump["entries"][0]["thread_name"] = json!("python");
    }
    dump
}

#[test]
fn the_minor_versions_are_read_alike() {
    for version in ["2.4", "2.5", "2.7", "2.9", "2.10"] {
        let dump = read_json(&make_dump(version)).unwrap();
        assert_eq!(dump.groups["0"].ranks, [0, 1], "{version}");
        assert_eq!(dump.last_enqueued["0"], 1, "{version}");
        let [entry] = &dump.entries[..] else { panic!("{version}") };
        assert_eq!((&*entry.op, entry.sequence, entry.state), ("all_reduce", 1, EntryState::Scheduled));
        assert_eq!(entry.input_shapes[..], [vec![4, 8]]);
        assert!(!dump.lost_head);
    }
}

#[test]
fn a_dump_without_collectives_is_empty() {
    let mut dump = make_dump("2.10");
    dump.as_object_mut().unwrap().remove("entries");
    assert!(read_json(&dump).unwrap().entries.is_empty());
}

#[test]
fn a_first_entry_with_a_later_number_shows_what_the_ring_lost() {
    let mut dump = make_dump("2.10");
    dump["entries"][0]["record_id"] = json!(7);
    assert!(read_json(&dump).unwrap().lost_head);
}

#[test]
fn other_files_are_refused_with_the_reason() {
    let code = |dump: &Value| read_json(dump).unwrap_err().code.id;
    let mut dump = make_dump("3.0");
    assert_eq!(code(&dump), "T1402");
    dump.as_object_mut().unwrap().remove("version");
    assert_eq!(code(&dump), "T1402");
    let mut gloo = make_dump("2.10");
    gloo["entries"][0]["profiling_name"] = json!("gloo:all_reduce");
    assert_eq!(code(&gloo), "T1403");
    let text = make_dump("2.10").to_string();
    for bytes in [&text.as_bytes()[..text.len() / 2], b"", b"PK\x03\x04", b"\x80\x02}("] {
        assert_eq!(read(bytes).unwrap_err().code.id, "T1400", "{bytes:?}");
    }
    // `os.system("true")`, as a hostile pickle begins.
    let hostile = read(b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.").unwrap_err();
    assert_eq!(hostile.code.id, "T1401");
    assert!(hostile.message.contains("GLOBAL at byte 2"), "{}", hostile.message);
}

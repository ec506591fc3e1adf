//! Opcodes that are read, and files that are rejected.

use super::*;

fn read(bytes: &[u8]) -> Result<PickleValue, PickleError> {
    read_pickle(bytes, "entries", &mut |_| Ok(()))
}

#[test]
fn values_of_every_kind_are_read() {
    // pickle.dumps({'a': [1, -2, 300, 70000, 2**40, None, True, 0.5, ('x', 'x')]}, protocol=2)
    let bytes = b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01N\x88G?\xe0\x00\x00\x00\x00\x00\x00X\x01\x00\x00\x00xq\x03h\x03\x86q\x04es.";
    let value = read(bytes).unwrap();
    let items = value.get("a").unwrap().items().unwrap();
    let ints: Vec<i64> = items.iter().filter_map(PickleValue::as_int).collect();
    assert_eq!(ints, [1, -2, 300, 70000, 1 << 40]);
    assert_eq!(items[6].as_bool(), Some(true));
    let pair = items[8].items().unwrap();
    assert_eq!(pair.iter().map(|t| t.as_text().unwrap().to_string()).collect::<Vec<_>>(), ["x", "x"]);
}

#[test]
fn an_opcode_that_calls_is_rejected_by_name() {
    // pickle.dumps of an object whose __reduce__ returns (os.system, ("touch /tmp/x",))
    let bytes = b"\x80\x02cposix\nsystem\nq\x00X\x0c\x00\x00\x00touch /tmp/xq\x01\x85q\x02Rq\x03.";
    let error = read(bytes).unwrap_err();
    assert_eq!(error, PickleError { byte: 2, problem: PickleProblem::Executes("GLOBAL") });
    for (opcode, name) in
        [(b'R', "REDUCE"), (b'b', "BUILD"), (0x81, "NEWOBJ"), (0x93, "STACK_GLOBAL"), (b'i', "INST")]
    {
        let error = read(&[0x80, 2, opcode, b'.']).unwrap_err();
        assert_eq!(error.problem, PickleProblem::Executes(name));
    }
}

#[test]
fn nesting_and_sizes_are_bounded() {
    let mut deep = vec![0x80, 2];
    deep.extend([b']'; 100]);
    deep.extend([b'a'; 99]);
    deep.push(b'.');
    assert!(matches!(read(&deep).unwrap_err().problem, PickleProblem::TooLarge(_)));
    let long = [&b"\x80\x02X"[..], &u32::MAX.to_le_bytes()].concat();
    assert!(matches!(read(&long).unwrap_err().problem, PickleProblem::TooLarge(_)));
    let marks = vec![b'('; MAX_STACK + 2];
    assert!(matches!(read(&marks).unwrap_err().problem, PickleProblem::TooLarge(_)));
}

#[test]
fn a_file_that_is_cut_anywhere_is_an_error_and_never_a_panic() {
    let bytes = b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffes.";
    read(bytes).unwrap();
    for n in 0..bytes.len() {
        assert!(read(&bytes[..n]).is_err(), "{n}");
    }
}

#[test]
fn entries_are_taken_one_by_one_in_both_ways_of_building_a_list() {
    // {'v': 1, 'entries': [{'k': 1}, {'k': 2}]} with one APPENDS, and with two APPENDs.
    let one = b"\x80\x02}(X\x01\x00\x00\x00vK\x01X\x07\x00\x00\x00entries](}(X\x01\x00\x00\x00kK\x01u}(X\x01\x00\x00\x00kK\x02ueu.";
    let two = b"\x80\x02}(X\x01\x00\x00\x00vK\x01X\x07\x00\x00\x00entries]}X\x01\x00\x00\x00kK\x01sa}X\x01\x00\x00\x00kK\x02sau.";
    for bytes in [&one[..], two] {
        let mut seen = Vec::new();
        let value = read_pickle(bytes, "entries", &mut |e| {
            seen.push(e.get("k").and_then(|k| k.as_int()));
            Ok(())
        });
        assert_eq!(seen, [Some(1), Some(2)]);
        assert!(value.unwrap().get("entries").unwrap().items().unwrap().is_empty());
    }
}

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
}

/// Every byte is an opcode of data, an opcode that is rejected by name because it imports, builds or calls,
/// or unknown.
#[test]
fn each_opcode_that_is_not_of_data_is_rejected() {
    let executing = [
        (b'c', "GLOBAL"),
        (0x93, "STACK_GLOBAL"),
        (b'R', "REDUCE"),
        (b'b', "BUILD"),
        (b'i', "INST"),
        (b'o', "OBJ"),
        (0x81, "NEWOBJ"),
        (0x92, "NEWOBJ_EX"),
        (b'P', "PERSID"),
        (b'Q', "BINPERSID"),
        (0x82, "EXT"),
        (0x83, "EXT"),
        (0x84, "EXT"),
    ];
    let data = b".N\x88\x89KMJ\x8a\x8bGX\x8c}])\x85\x86\x87thj\x80\x95(qr\x94aesu";
    for opcode in 0..=u8::MAX {
        let result = read(&[&[0x80, 2, opcode][..], &[0; 16]].concat());
        let problem = result.err().map(|e| (e.byte, e.problem));
        if let Some((_, name)) = executing.iter().find(|(o, _)| *o == opcode) {
            assert_eq!(problem, Some((2, PickleProblem::Executes(name))), "{opcode:#x}");
        } else if !data.contains(&opcode) {
            assert_eq!(problem, Some((2, PickleProblem::Unknown(opcode))), "{opcode:#x}");
        } else {
            let is_rejected = |p: &PickleProblem| {
                matches!(p, PickleProblem::Executes(_)) || *p == PickleProblem::Unknown(opcode)
            };
            assert!(problem.is_none_or(|(_, p)| !is_rejected(&p)), "{opcode:#x}");
        }
    }
}

#[track_caller]
fn assert_too_large(bytes: &[u8]) {
    let problem = read(bytes).map(|_| "read").unwrap_err().problem;
    assert!(matches!(problem, PickleProblem::TooLarge(_)), "{problem:?}");
}

#[test]
fn a_container_cannot_contain_itself() {
    let own: [&[u8]; 3] = [b"\x80\x02]q\0h\0a.", b"\x80\x02}q\0K\0h\0s.", b"\x80\x02]q\0]q\x01h\0aa."];
    for bytes in own {
        let problem = read(bytes).map(|_| "read").unwrap_err().problem;
        assert!(matches!(problem, PickleProblem::Malformed(_)), "{problem:?}");
    }
    // One list twice in another is no cycle.
    let value = read(b"\x80\x02]](K\x01eq\0ah\0a.").unwrap();
    assert_eq!(value.items().unwrap().len(), 2);
}

/// A list of ten times the list before it, 16 times over, has 10^16 items for whoever walks through it.
#[test]
fn values_that_repeat_one_another_do_not_grow_exponentially() {
    let mut bomb = b"\x80\x02]q\0".to_vec();
    for level in 0..16u8 {
        bomb.extend(b"]q");
        bomb.push(level + 1);
        bomb.push(b'(');
        (0..10).for_each(|_| bomb.extend([b'h', level]));
        bomb.push(b'e');
    }
    bomb.push(b'.');
    assert_too_large(&bomb);
    // A text of 1 MiB as the names of a million frames.
    let text = [&b"\x80\x02X\0\0\x10\0"[..], &vec![b'x'; 1 << 20], b"q\0](", &b"h\0".repeat(1 << 19), b"e."];
    assert_too_large(&text.concat());
}

#[test]
fn what_the_file_asks_to_keep_is_bounded() {
    let list = [&b"]("[..], &b"N".repeat(1 << 16), b"eq\0"].concat();
    let kept = [&b"\x80\x02("[..], &list.repeat(128), b"t."].concat();
    assert_too_large(&kept);
    let filled_later = [&b"]q\0("[..], &b"N".repeat(1 << 16), b"e"].concat();
    assert_too_large(&[&b"\x80\x02("[..], &filled_later.repeat(128), b"t."].concat());
    let long = [
        &b"\x80\x02("[..],
        &b"X\0\0\x10\0".iter().copied().chain(vec![b'x'; 1 << 20]).collect::<Vec<u8>>().repeat(20),
        b"t.",
    ];
    assert_too_large(&long.concat());
}

/// Each opcode of an entry looks at the stack, and the values before the list must not make that slow.
#[test]
fn a_long_header_does_not_make_each_entry_slow() {
    let header = b"NN".repeat(100_000);
    let entries = b"}K\x01K\x01sa".repeat(100_000);
    let bytes = [&b"\x80\x02}("[..], &header, b"X\x07\0\0\0entries]", &entries, b"u."].concat();
    read(&bytes).unwrap();
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

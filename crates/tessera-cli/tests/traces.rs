//! Tests `tessera check` on traces: valid ones, every kind of malformed one, output formats and
//! drawings.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn tessera_in(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tessera")).current_dir(dir).args(args).output().unwrap()
}

fn stdout(o: &Output) -> String {
    String::from_utf8(o.stdout.clone()).unwrap()
}

fn stderr(o: &Output) -> String {
    String::from_utf8(o.stderr.clone()).unwrap()
}

/// Creates a folder `t` with these files.
fn write_trace(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("t")).unwrap();
    for (name, text) in files {
        fs::write(dir.path().join("t").join(name), text).unwrap();
    }
    dir
}

/// Checks that the trace is rejected with all these words, and returns standard error.
#[track_caller]
fn assert_rejected(files: &[(&str, &[u8])], words: &[&str]) -> String {
    let dir = write_trace(files);
    let o = tessera_in(dir.path(), &["check", "t"]);
    let text = stderr(&o);
    assert_eq!(o.status.code(), Some(1), "{text}");
    for w in words {
        assert!(text.contains(w), "no `{w}` in:\n{text}");
    }
    assert!(!text.contains("panicked") && stdout(&o).is_empty(), "{text}");
    text
}

const DECLARED: &str = "{\"group\":\"tp0\",\"ranks\":[0,1]}\n";
const REDUCE: &str = "{\"group\":\"tp0\",\"op\":\"all_reduce\",\"dtype\":\"bf16\",\"count\":64,\"reduction\":\"sum\",\"stream\":\"7\"}\n";

fn good_trace() -> String {
    format!("{DECLARED}{REDUCE}{REDUCE}")
}

/// Adds a valid file of rank 1, so that only rank 0 is at fault.
fn with_good_rank_1<'a>(name: &'a str, text: &'a [u8], other: &'a str) -> Vec<(&'a str, &'a [u8])> {
    vec![(name, text), ("rank-1.jsonl", other.as_bytes())]
}

/// Returns the files of the guide: each is a name in backticks, followed by a code block.
fn guide_files() -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides/trace-import.md");
    let text = fs::read_to_string(path).unwrap();
    let mut files = Vec::new();
    for part in text.split("\n`rank-").skip(1) {
        let Some((name, rest)) = part.split_once("`\n\n```json\n") else { continue };
        files.push((format!("rank-{name}"), rest.split("```").next().unwrap().to_string()));
    }
    files
}

#[test]
fn the_example_of_the_guide_is_valid() {
    let files = guide_files();
    assert_eq!(files.len(), 2);
    let files: Vec<(&str, &[u8])> = files.iter().map(|(n, t)| (n.as_str(), t.as_bytes())).collect();
    let dir = write_trace(&files);
    let o = tessera_in(dir.path(), &["check", "t/"]);
    let said = "t/: 2 ranks, 10 collectives, 2 groups: no hang or mismatch in the trace\n";
    assert_eq!((o.status.code(), stdout(&o).as_str()), (Some(0), said), "{}", stderr(&o));
}

#[test]
fn files_named_together_are_one_trace() {
    let text = good_trace();
    let dir = write_trace(&[("rank-1.jsonl", text.as_bytes()), ("trace_0.jsonl", text.as_bytes())]);
    let args = ["check", "--format", "json", "t/rank-1.jsonl", "t/trace_0.jsonl"];
    let o = tessera_in(dir.path(), &args);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
    assert_eq!(
        stdout(&o),
        "{\"collectives\":4,\"groups\":1,\"path\":\"t/rank-1.jsonl and 1 more\",\"ranks\":2,\"verified\":true}\n"
    );
    // A byte order mark, CRLF line ends, empty lines and the record of a run are all accepted.
    let odd = format!("\u{feff}{}\r\n\r\n", good_trace().replace('\n', "\r\n"));
    fs::write(dir.path().join("t/rank-1.jsonl"), odd).unwrap();
    fs::write(dir.path().join("t/record.jsonl"), "{}").unwrap();
    assert_eq!(tessera_in(dir.path(), &["check", "t"]).status.code(), Some(0));
    // A trace folder, a plan file and a missing path together: all are checked.
    let o = tessera_in(dir.path(), &["check", "none", "t", "none.tir", "t/none-2.jsonl"]);
    let text = stderr(&o);
    assert!(o.status.code() == Some(1) && stdout(&o).starts_with("t: 2 ranks"), "{text}");
    for words in ["none cannot be read", "T0025", "error[T0020]: t/none-2.jsonl cannot be read"] {
        assert!(text.contains(words), "no `{words}` in:\n{text}");
    }
}

#[test]
fn malformed_lines_are_reported_with_file_and_line() {
    let other = good_trace();
    let one = |line: &str, words: &[&str]| {
        let text = format!("{DECLARED}{line}\n{REDUCE}");
        let words = [&["--> t/rank-0.jsonl:2:"], words].concat();
        assert_rejected(&with_good_rank_1("rank-0.jsonl", text.as_bytes(), &other), &words)
    };
    one(
        "{\"group\":\"tp0\",\"op\":\"x\",\"dtpye\":\"f32\",\"count\":1}",
        &["T0022", "dtpye", "did you mean `dtype`?"],
    );
    one("{\"group\":\"tp0\",", &["T0021", "not JSON"]);
    one("[]", &["T0021", "not an object"]);
    one("{\"group\":\"tp0\",\"op\":\"x\",\"dtype\":\"f32\",\"count\":-1}", &["T0022", "count is -1"]);
    one(
        "{\"group\":\"tp0\",\"op\":\"send\",\"dtype\":\"f32\",\"count\":1,\"peer\":65536}",
        &["T0022", "peer names rank 65536", "65535"],
    );
    one("{\"group\":\"tp0\",\"op\":\"x\",\"dtype\":7,\"count\":1}", &["T0022", "dtype is 7", "a string"]);
    one("{\"group\":\"g\",\"ranks\":[1,0]}", &["T0022", "1 comes before 0"]);
    one("{\"group\":\"g\",\"ranks\":[0,0]}", &["T0022", "0 comes before 0"]);
    one(
        "{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f32\",\"count\":1}",
        &["T0023", "group g is not declared"],
    );
    one("{\"rank\":0}", &["T0022", "declared after other lines"]);
    one("{\"group\":\"tp0\",\"ranks\":[0,1,2]}", &["T0024", "twice", "ranks 0, 1, 2"]);
    // Nesting beyond the parser's limit; the ranks are then not compared.
    let text = one(&"[".repeat(100_000), &["T0021", "the ranks were not compared"]);
    assert!(text.len() < 2000, "{text}");
}

#[test]
fn all_errors_are_reported_at_once_up_to_a_limit() {
    let bad = "{\"grp\":\"tp0\"}\n".repeat(100);
    let other = "{\"rank\":2}\n".to_string();
    let text = assert_rejected(
        &with_good_rank_1("rank-0.jsonl", bad.as_bytes(), &other),
        &["T0028", "declares rank 2, but its name has rank 1", "t/rank-0.jsonl was not read further"],
    );
    assert_eq!(text.matches("error[T0022]").count(), 50);
}

#[test]
fn invalid_utf8_and_endless_lines_are_reported() {
    let other = good_trace();
    let mut bytes = good_trace().into_bytes();
    bytes.extend(b"{\"group\":\"\xff\xfe\"}\n");
    bytes.extend(vec![b'x'; (1 << 20) + 1]);
    bytes.extend(b"\n{}\n");
    let words = [
        "t/rank-0.jsonl:4:11",
        "not UTF-8",
        "t/rank-0.jsonl:5:1",
        "1048577 bytes",
        "the maximum is 1048576",
        "t/rank-0.jsonl:6:",
    ];
    let text = assert_rejected(&with_good_rank_1("rank-0.jsonl", &bytes, &other), &words);
    assert!(text.len() < 4000, "{}", text.len());
    assert_rejected(
        &with_good_rank_1("rank-0.jsonl", b"", &other),
        &["T0020", "t/rank-0.jsonl is empty", "{\"rank\": 0}"],
    );
    assert_rejected(
        &with_good_rank_1("rank-0.jsonl", b"\n \r\n", &other),
        &["T0020", "t/rank-0.jsonl is empty"],
    );
    let noise: Vec<u8> = (0..10_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    assert_rejected(&with_good_rank_1("rank-0.jsonl", &noise, &other), &["T0021"]);
}

#[test]
fn files_are_one_per_rank() {
    let text = good_trace();
    assert_rejected(
        &with_good_rank_1("a.jsonl", text.as_bytes(), &text),
        &["T0028", "t/a.jsonl has no rank number", "rank-3.jsonl"],
    );
    assert_rejected(
        &with_good_rank_1("again-1.jsonl", text.as_bytes(), &text),
        &["T0028", "two files have rank 1", "t/rank-1.jsonl"],
    );
    assert_rejected(
        &with_good_rank_1("rank-70000.jsonl", text.as_bytes(), &text),
        &["T0028", "rank 70000", "65535"],
    );
    let huge = "rank-99999999999999999999999.jsonl";
    assert_rejected(&with_good_rank_1(huge, text.as_bytes(), &text), &["T0028", "65535"]);
    let named = format!("{{\"rank\":0}}\n{text}");
    let dir = write_trace(&with_good_rank_1("a.jsonl", named.as_bytes(), &text));
    assert_eq!(tessera_in(dir.path(), &["check", "t"]).status.code(), Some(0));

    let three = text.replace("[0,1]", "[0,1,2]");
    assert_rejected(
        &with_good_rank_1("rank-0.jsonl", three.as_bytes(), &three),
        &["T0028", "group tp0 names rank 2", "--> t/rank-0.jsonl:1:1", "ranks 0, 1, 2"],
    );
}

#[test]
fn groups_of_one_name_must_be_equal_if_they_share_ranks() {
    let (a, b) = (good_trace(), good_trace().replace("[0,1]", "[1,2]"));
    let files: [(&str, &[u8]); 3] =
        [("r0.jsonl", a.as_bytes()), ("r1.jsonl", b.as_bytes()), ("r2.jsonl", b.as_bytes())];
    assert_rejected(
        &files,
        &[
            "T0024",
            "ranks 0 and 1 created different groups named tp0",
            "t/r0.jsonl:1:1",
            "t/r1.jsonl:1:1",
            "ranks 1, 2",
        ],
    );
    // Disjoint groups of one name are two groups of one kind.
    let c = good_trace().replace("[0,1]", "[2,3]");
    let dir = write_trace(&[
        ("r0.jsonl", a.as_bytes()),
        ("r1.jsonl", a.as_bytes()),
        ("r2.jsonl", c.as_bytes()),
        ("r3.jsonl", c.as_bytes()),
    ]);
    let o = tessera_in(dir.path(), &["check", "t"]);
    assert!(stdout(&o).contains("4 ranks, 8 collectives, 2 groups"), "{}", stderr(&o));
    // The world contains all ranks of the trace unless a rank declares otherwise.
    let world = "{\"group\":\"world\",\"op\":\"barrier\"}\n";
    let said = "{\"group\":\"world\",\"op\":\"barrier\",\"ranks\":[0]}\n";
    assert_rejected(
        &with_good_rank_1("rank-0.jsonl", said.as_bytes(), world),
        &["T0024", "not declared, therefore all ranks of the trace"],
    );
}

/// Returns one rank's trace of a ring: a send to the next rank and a receive from the previous one.
fn ring_trace(rank: usize, of: usize) -> String {
    let call = |op: &str, peer: usize| {
        format!("{{\"group\":\"world\",\"op\":\"{op}\",\"dtype\":\"bf16\",\"count\":7,\"peer\":{peer}}}\n")
    };
    call("send", (rank + 1) % of) + &call("recv", (rank + of - 1) % of)
}

#[test]
fn a_ring_of_sends_is_rejected_and_drawn() {
    let texts: Vec<(String, String)> =
        (0..3).map(|r| (format!("rank-{r}.jsonl"), ring_trace(r, 3))).collect();
    let files: Vec<(&str, &[u8])> = texts.iter().map(|(n, t)| (n.as_str(), t.as_bytes())).collect();
    let dir = write_trace(&files);
    let o = tessera_in(dir.path(), &["check", "t"]);
    assert_eq!(o.status.code(), Some(1));
    let words = [
        "error[T0311]",
        "wait for each other",
        "t/rank-2.jsonl:1:18",
        "tessera explain T0311",
        "0 → 1 → 2 → 0",
    ];
    assert!(words.iter().all(|w| stderr(&o).contains(w)) && !stderr(&o).contains("wrote"), "{}", stderr(&o));
    let dir = write_trace(&files);
    let o = tessera_in(dir.path(), &["check", "t", "--format", "json", "--svg", "why"]);
    // The first line warns that no rank declares the world.
    let line = stdout(&o).lines().last().unwrap().to_string();
    let proof = serde_json::from_str::<serde_json::Value>(&line).unwrap()["counterexample"].clone();
    assert_eq!(
        (proof["kind"].as_str(), proof["edges"].as_array().map(Vec::len)),
        (Some("wait_cycle"), Some(3))
    );
    for edge in proof["edges"].as_array().unwrap() {
        let (rank, blocked_in, not_reached) = (&edge["rank"], &edge["blocked_in"], &edge["not_reached"]);
        assert_eq!(blocked_in["file"], format!("t/rank-{rank}.jsonl"));
        assert_eq!((&blocked_in["line"], &not_reached["line"]), (&1.into(), &2.into()));
        assert_eq!((&blocked_in["op"], &not_reached["op"]), (&"send".into(), &"recv".into()));
    }
    assert_eq!(stderr(&o), "wrote why/T0311-1.svg\n");
    let svg = fs::read_to_string(dir.path().join("why/T0311-1.svg")).unwrap();
    assert!(svg.contains("rank 0 waits for rank") && svg.contains("op 1, line 2"), "{svg}");
    // In a group the send and the receive are one launch, and no rank waits.
    let grouped: Vec<(String, String)> =
        texts.iter().map(|(n, t)| (n.clone(), t.replace("\"count\"", "\"batch\":1,\"count\""))).collect();
    let files: Vec<(&str, &[u8])> = grouped.iter().map(|(n, t)| (n.as_str(), t.as_bytes())).collect();
    let o = tessera_in(write_trace(&files).path(), &["check", "t"]);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
}

#[test]
fn mismatched_collectives_are_reported_with_both_lines() {
    let other = good_trace().replacen("bf16", "f32", 2).replacen("f32", "bf16", 1);
    let text = good_trace();
    let files = with_good_rank_1("rank-0.jsonl", text.as_bytes(), &other);
    assert_rejected(
        &files,
        &["error[T0303]", "position 1", "t/rank-0.jsonl:3:", "t/rank-1.jsonl:3:", "bf16", "f32"],
    );
    let dir = write_trace(&files);
    let o = tessera_in(dir.path(), &["check", "--format", "json", "t", "--svg", "."]);
    let proof = serde_json::from_str::<serde_json::Value>(&stdout(&o)).unwrap()["counterexample"].clone();
    assert_eq!(
        (proof["field"].as_str(), proof["sides"][1]["collective"]["line"].as_u64()),
        (Some("dtype"), Some(3))
    );
    assert!(dir.path().join("T0303-1.svg").exists());
    // Rank 2 has no file. The other two are compared nevertheless, and no error is reported twice.
    let (a, b) = (text.replace("[0,1]", "[0,1,2]"), other.replace("[0,1]", "[0,1,2]"));
    let told = assert_rejected(
        &with_good_rank_1("rank-0.jsonl", a.as_bytes(), &b),
        &["error[T0028]", "error[T0303]"],
    );
    assert!(!told.contains("T0341"), "{told}");
}

#[test]
fn an_undeclared_world_is_a_warning_and_one_with_missing_ranks_is_rejected() {
    let world: &[u8] = b"{\"group\":\"world\",\"op\":\"barrier\"}\n";
    let dir = write_trace(&[("rank-0.jsonl", world), ("rank-2.jsonl", world)]);
    let o = tessera_in(dir.path(), &["check", "t"]);
    assert_eq!(o.status.code(), Some(0));
    assert!(stderr(&o).contains("warning[T0028]: world is assumed to be ranks 0, 2"), "{}", stderr(&o));
    assert!(stdout(&o).contains("2 ranks, 2 collectives, 1 group: no hang"), "{}", stdout(&o));
    let sized = |rank: usize, size: usize| {
        format!("{{\"rank\":{rank},\"world_size\":{size}}}\n")
            .into_bytes()
            .into_iter()
            .chain(world.to_vec())
            .collect::<Vec<u8>>()
    };
    let (a, c) = (sized(0, 3), sized(2, 3));
    assert_rejected(
        &[("rank-0.jsonl", &a), ("rank-2.jsonl", &c)],
        &["T0028", "there is no file for rank 1", "the world has 3 ranks"],
    );
    let c = sized(2, 4);
    assert_rejected(
        &[("rank-0.jsonl", &a), ("rank-2.jsonl", &c)],
        &["T0028", "world_size is 3 for rank 0 and 4 for rank 2"],
    );
    assert_rejected(&[("rank-2.jsonl", &sized(2, 2))], &["T0022", "rank 2 in a world of 2"]);
}

#[test]
fn formats_print_lines_and_drawings_go_to_a_folder() {
    let text = format!("{DECLARED}{{\"op\":1}}\n");
    let other = good_trace();
    let dir = write_trace(&with_good_rank_1("rank-0.jsonl", text.as_bytes(), &other));
    let o = tessera_in(dir.path(), &["check", "t", "--format", "github", "--svg", "why/there"]);
    assert_eq!(o.status.code(), Some(1));
    assert!(
        stdout(&o).starts_with("::error file=t/rank-0.jsonl,line=2,col=2,title=T0022::"),
        "{}",
        stdout(&o)
    );
    assert_eq!(fs::read_dir(dir.path().join("why/there")).unwrap().count(), 0);
    let o = tessera_in(dir.path(), &["check", "t", "--format", "json"]);
    let line = stdout(&o);
    assert!(line.contains("\"line\":2,\"column\":2") && line.contains("\"counterexample\":null}"), "{line}");
    let o = tessera_in(dir.path(), &["check", "t", "--svg", "t/rank-0.jsonl/x"]);
    assert!(o.status.code() == Some(1) && stderr(&o).contains("T0014"), "{}", stderr(&o));
}

#[test]
fn a_broken_program_of_a_plan_is_named_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("plan");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let o =
        tessera_in(&root, &["plan", "fixtures/wan-odd", "--mesh", "tp=2", "--out", plan.to_str().unwrap()]);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
    let mut files: Vec<PathBuf> =
        fs::read_dir(plan.join("programs")).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let text = |p: &PathBuf| fs::read_to_string(p).unwrap();
    let waits = |l: &&str| l.contains("ttile.collective.wait");
    let file = files.iter().find(|p| text(p).lines().any(|l| waits(&l))).unwrap();
    let name = format!("plan/programs/{}", file.file_name().unwrap().to_str().unwrap());

    // A ticket is waited for twice. The verifier rejects the op and does not know its line in the
    // file.
    let good = text(file);
    let at = good.lines().position(|l| waits(&l)).unwrap();
    let again = good.lines().nth(at).unwrap().replacen(" = ", "_again = ", 1);
    let mut lines: Vec<&str> = good.lines().collect();
    lines.insert(at + 1, &again);
    fs::write(file, lines.join("\n") + "\n").unwrap();
    let o = tessera_in(dir.path(), &["check", "plan"]);
    let said = stderr(&o);
    assert!(o.status.code() == Some(1) && said.contains("error[T03"), "{said}");
    assert!(said.contains(&format!("--> {name}:{}:", at + 2)), "{said}");
    let o = tessera_in(dir.path(), &["check", "plan", "--format", "github"]);
    assert!(stdout(&o).starts_with(&format!("::error file={name},line=")), "{}", stdout(&o));
}

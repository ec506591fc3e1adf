//! `tessera check` on traces: good ones, every way in which one can be malformed, formats and drawings.

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

/// A folder `t` with these files.
fn trace(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("t")).unwrap();
    for (name, text) in files {
        fs::write(dir.path().join("t").join(name), text).unwrap();
    }
    dir
}

/// The trace is refused, with all these words.
#[track_caller]
fn refused(files: &[(&str, &[u8])], words: &[&str]) -> String {
    let dir = trace(files);
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

fn good() -> String {
    format!("{DECLARED}{REDUCE}{REDUCE}")
}

/// A good file of rank 1, so that only rank 0 is at fault.
fn beside<'a>(name: &'a str, text: &'a [u8], other: &'a str) -> Vec<(&'a str, &'a [u8])> {
    vec![(name, text), ("rank-1.jsonl", other.as_bytes())]
}

/// Files of the guide: a name in backticks, then a block.
fn guide() -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides/trace-door.md");
    let text = fs::read_to_string(path).unwrap();
    let mut files = Vec::new();
    for part in text.split("\n`rank-").skip(1) {
        let Some((name, rest)) = part.split_once("`\n\n```json\n") else { continue };
        files.push((format!("rank-{name}"), rest.split("```").next().unwrap().to_string()));
    }
    files
}

#[test]
fn the_example_of_the_guide_is_fine() {
    let files = guide();
    assert_eq!(files.len(), 2);
    let files: Vec<(&str, &[u8])> = files.iter().map(|(n, t)| (n.as_str(), t.as_bytes())).collect();
    let dir = trace(&files);
    let o = tessera_in(dir.path(), &["check", "t/"]);
    let said = "t/: 2 ranks, 10 collectives, 2 groups: no hang or mismatch in what was seen\n";
    assert_eq!((o.status.code(), stdout(&o).as_str()), (Some(0), said), "{}", stderr(&o));
}

#[test]
fn files_named_together_are_one_trace() {
    let text = good();
    let dir = trace(&[("rank-1.jsonl", text.as_bytes()), ("trace_0.jsonl", text.as_bytes())]);
    let args = ["check", "--format", "json", "t/rank-1.jsonl", "t/trace_0.jsonl"];
    let o = tessera_in(dir.path(), &args);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
    assert_eq!(
        stdout(&o),
        "{\"collectives\":4,\"groups\":1,\"path\":\"t/rank-1.jsonl and 1 more\",\"ranks\":2,\"verified\":true}\n"
    );
    // Neither a byte order mark nor Windows line ends nor empty lines nor the record of a run matter.
    let odd = format!("\u{feff}{}\r\n\r\n", good().replace('\n', "\r\n"));
    fs::write(dir.path().join("t/rank-1.jsonl"), odd).unwrap();
    fs::write(dir.path().join("t/record.jsonl"), "{}").unwrap();
    assert_eq!(tessera_in(dir.path(), &["check", "t"]).status.code(), Some(0));
    // A folder beside a plan file and one that is not there: all are judged.
    let o = tessera_in(dir.path(), &["check", "none", "t", "none.tir", "t/none-2.jsonl"]);
    let text = stderr(&o);
    assert!(o.status.code() == Some(1) && stdout(&o).starts_with("t: 2 ranks"), "{text}");
    for words in ["none cannot be read", "T0025", "error[T0020]: t/none-2.jsonl cannot be read"] {
        assert!(text.contains(words), "no `{words}` in:\n{text}");
    }
}

#[test]
fn malformed_lines_are_told_with_file_and_line() {
    let other = good();
    let one = |line: &str, words: &[&str]| {
        let text = format!("{DECLARED}{line}\n{REDUCE}");
        let words = [&["--> t/rank-0.jsonl:2:"], words].concat();
        refused(&beside("rank-0.jsonl", text.as_bytes(), &other), &words)
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
    one("{\"group\":\"tp0\",\"op\":\"x\",\"dtype\":7,\"count\":1}", &["T0022", "dtype is 7", "a text"]);
    one("{\"group\":\"g\",\"ranks\":[1,0]}", &["T0022", "1 stands before 0"]);
    one("{\"group\":\"g\",\"ranks\":[0,0]}", &["T0022", "0 stands before 0"]);
    one(
        "{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f32\",\"count\":1}",
        &["T0023", "group g is not declared"],
    );
    one("{\"rank\":0}", &["T0022", "declared after other lines"]);
    one("{\"group\":\"tp0\",\"ranks\":[0,1,2]}", &["T0024", "twice", "ranks 0, 1, 2"]);
    // Deeper than anything is parsed, and the ranks are then not compared.
    let text = one(&"[".repeat(100_000), &["T0021", "the ranks were not compared"]);
    assert!(text.len() < 2000, "{text}");
}

#[test]
fn every_mistake_is_told_at_once_up_to_a_limit() {
    let bad = "{\"grp\":\"tp0\"}\n".repeat(100);
    let other = "{\"rank\":2}\n".to_string();
    let text = refused(
        &beside("rank-0.jsonl", bad.as_bytes(), &other),
        &["T0028", "says it is of rank 2, its name 1", "t/rank-0.jsonl was not read further"],
    );
    assert_eq!(text.matches("error[T0022]").count(), 50);
}

#[test]
fn bytes_that_are_no_text_and_lines_without_end_are_told() {
    let other = good();
    let mut bytes = good().into_bytes();
    bytes.extend(b"{\"group\":\"\xff\xfe\"}\n");
    bytes.extend(vec![b'x'; (1 << 20) + 1]);
    bytes.extend(b"\n{}\n");
    let words = [
        "t/rank-0.jsonl:4:11",
        "not UTF-8",
        "t/rank-0.jsonl:5:1",
        "1048577 bytes",
        "at most 1048576",
        "t/rank-0.jsonl:6:",
    ];
    let text = refused(&beside("rank-0.jsonl", &bytes, &other), &words);
    assert!(text.len() < 4000, "{}", text.len());
    refused(&beside("rank-0.jsonl", b"", &other), &["T0020", "t/rank-0.jsonl is empty", "{\"rank\": 0}"]);
    refused(&beside("rank-0.jsonl", b"\n \r\n", &other), &["T0020", "t/rank-0.jsonl is empty"]);
    let noise: Vec<u8> = (0..10_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    refused(&beside("rank-0.jsonl", &noise, &other), &["T0021"]);
}

#[test]
fn files_are_one_per_rank() {
    let text = good();
    refused(
        &beside("a.jsonl", text.as_bytes(), &text),
        &["T0028", "t/a.jsonl does not say its rank", "rank-3.jsonl"],
    );
    refused(
        &beside("again-1.jsonl", text.as_bytes(), &text),
        &["T0028", "two files are of rank 1", "t/rank-1.jsonl"],
    );
    refused(&beside("rank-70000.jsonl", text.as_bytes(), &text), &["T0028", "rank 70000", "65535"]);
    let huge = "rank-99999999999999999999999.jsonl";
    refused(&beside(huge, text.as_bytes(), &text), &["T0028", "65535"]);
    let named = format!("{{\"rank\":0}}\n{text}");
    let dir = trace(&beside("a.jsonl", named.as_bytes(), &text));
    assert_eq!(tessera_in(dir.path(), &["check", "t"]).status.code(), Some(0));

    let three = text.replace("[0,1]", "[0,1,2]");
    refused(
        &beside("rank-0.jsonl", three.as_bytes(), &three),
        &["T0028", "group tp0 names rank 2", "--> t/rank-0.jsonl:1:1", "ranks 0, 1, 2"],
    );
}

#[test]
fn groups_of_one_name_must_be_one_where_they_meet() {
    let (a, b) = (good(), good().replace("[0,1]", "[1,2]"));
    let files: [(&str, &[u8]); 3] =
        [("r0.jsonl", a.as_bytes()), ("r1.jsonl", b.as_bytes()), ("r2.jsonl", b.as_bytes())];
    refused(
        &files,
        &[
            "T0024",
            "ranks 0 and 1 built different groups named tp0",
            "t/r0.jsonl:1:1",
            "t/r1.jsonl:1:1",
            "ranks 1, 2",
        ],
    );
    // Groups that do not meet are two of one kind.
    let c = good().replace("[0,1]", "[2,3]");
    let dir = trace(&[
        ("r0.jsonl", a.as_bytes()),
        ("r1.jsonl", a.as_bytes()),
        ("r2.jsonl", c.as_bytes()),
        ("r3.jsonl", c.as_bytes()),
    ]);
    let o = tessera_in(dir.path(), &["check", "t"]);
    assert!(stdout(&o).contains("4 ranks, 8 collectives, 2 groups"), "{}", stderr(&o));
    // World is everyone who is there, unless a rank says otherwise.
    let world = "{\"group\":\"world\",\"op\":\"barrier\"}\n";
    let said = "{\"group\":\"world\",\"op\":\"barrier\",\"ranks\":[0]}\n";
    refused(
        &beside("rank-0.jsonl", said.as_bytes(), world),
        &["T0024", "not declared, so all ranks of the trace"],
    );
}

/// A send to the next rank of a ring, and a receive from the one before.
fn ring(rank: usize, of: usize) -> String {
    let call = |op: &str, peer: usize| {
        format!("{{\"group\":\"world\",\"op\":\"{op}\",\"dtype\":\"bf16\",\"count\":7,\"peer\":{peer}}}\n")
    };
    call("send", (rank + 1) % of) + &call("recv", (rank + of - 1) % of)
}

#[test]
fn a_ring_of_sends_is_refused_and_drawn() {
    let texts: Vec<(String, String)> = (0..3).map(|r| (format!("rank-{r}.jsonl"), ring(r, 3))).collect();
    let files: Vec<(&str, &[u8])> = texts.iter().map(|(n, t)| (n.as_str(), t.as_bytes())).collect();
    let dir = trace(&files);
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
    let dir = trace(&files);
    let o = tessera_in(dir.path(), &["check", "t", "--format", "json", "--svg", "why"]);
    // The first line warns that nobody declares the world.
    let line = stdout(&o).lines().last().unwrap().to_string();
    let proof = serde_json::from_str::<serde_json::Value>(&line).unwrap()["counterexample"].clone();
    assert_eq!((proof["kind"].as_str(), proof["links"].as_array().map(Vec::len)), (Some("circle"), Some(3)));
    for link in proof["links"].as_array().unwrap() {
        let (rank, holds, wants) = (&link["rank"], &link["holds"], &link["wants"]);
        assert_eq!(holds["file"], format!("t/rank-{rank}.jsonl"));
        assert_eq!((&holds["line"], &wants["line"]), (&1.into(), &2.into()));
        assert_eq!((&holds["op"], &wants["op"]), (&"send".into(), &"recv".into()));
    }
    assert_eq!(stderr(&o), "wrote why/T0311-1.svg\n");
    let svg = fs::read_to_string(dir.path().join("why/T0311-1.svg")).unwrap();
    assert!(svg.contains("rank 0 waits for rank") && svg.contains("op 1, line 2"), "{svg}");
    // Grouped, they are one launch each, and nobody waits.
    let grouped: Vec<(String, String)> =
        texts.iter().map(|(n, t)| (n.clone(), t.replace("\"count\"", "\"batch\":1,\"count\""))).collect();
    let files: Vec<(&str, &[u8])> = grouped.iter().map(|(n, t)| (n.as_str(), t.as_bytes())).collect();
    let o = tessera_in(trace(&files).path(), &["check", "t"]);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
}

#[test]
fn calls_that_differ_are_told_with_both_lines() {
    let other = good().replacen("bf16", "f32", 2).replacen("f32", "bf16", 1);
    let text = good();
    let files = beside("rank-0.jsonl", text.as_bytes(), &other);
    refused(&files, &["error[T0303]", "position 1", "t/rank-0.jsonl:3:", "t/rank-1.jsonl:3:", "bf16", "f32"]);
    let dir = trace(&files);
    let o = tessera_in(dir.path(), &["check", "--format", "json", "t", "--svg", "."]);
    let proof = serde_json::from_str::<serde_json::Value>(&stdout(&o)).unwrap()["counterexample"].clone();
    assert_eq!(
        (proof["field"].as_str(), proof["sides"][1]["call"]["line"].as_u64()),
        (Some("dtype"), Some(3))
    );
    assert!(dir.path().join("T0303-1.svg").exists());
    // Rank 2 has no file; the two that are there are compared all the same, and nothing is told twice.
    let (a, b) = (text.replace("[0,1]", "[0,1,2]"), other.replace("[0,1]", "[0,1,2]"));
    let told = refused(&beside("rank-0.jsonl", a.as_bytes(), &b), &["error[T0028]", "error[T0303]"]);
    assert!(!told.contains("T0341"), "{told}");
}

#[test]
fn a_world_that_nobody_declares_is_a_warning_and_one_with_holes_is_refused() {
    let world: &[u8] = b"{\"group\":\"world\",\"op\":\"barrier\"}\n";
    let dir = trace(&[("rank-0.jsonl", world), ("rank-2.jsonl", world)]);
    let o = tessera_in(dir.path(), &["check", "t"]);
    assert_eq!(o.status.code(), Some(0));
    assert!(stderr(&o).contains("warning[T0028]: world is taken to be ranks 0, 2"), "{}", stderr(&o));
    assert!(stdout(&o).contains("2 ranks, 2 collectives, 1 group: no hang"), "{}", stdout(&o));
    let sized = |rank: usize, size: usize| {
        format!("{{\"rank\":{rank},\"world_size\":{size}}}\n")
            .into_bytes()
            .into_iter()
            .chain(world.to_vec())
            .collect::<Vec<u8>>()
    };
    let (a, c) = (sized(0, 3), sized(2, 3));
    refused(&[("rank-0.jsonl", &a), ("rank-2.jsonl", &c)], &["T0028", "no file of rank 1", "a world of 3"]);
    let c = sized(2, 4);
    refused(
        &[("rank-0.jsonl", &a), ("rank-2.jsonl", &c)],
        &["T0028", "world_size is 3 for rank 0 and 4 for rank 2"],
    );
    refused(&[("rank-2.jsonl", &sized(2, 2))], &["T0022", "rank 2 of a world of 2"]);
}

#[test]
fn formats_give_lines_and_drawings_have_a_folder() {
    let text = format!("{DECLARED}{{\"op\":1}}\n");
    let other = good();
    let dir = trace(&beside("rank-0.jsonl", text.as_bytes(), &other));
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

    // Waited twice: the judge refuses it, and knows ops only.
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

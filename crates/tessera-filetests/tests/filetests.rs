//! Runs every file of `filetests/`. `TESSERA_BLESS=1` rewrites expected outputs first.

use std::path::{Path, PathBuf};

use tessera_filetests::{bless, run};

fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).expect("filetests/ is there").map(|e| e.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files(&path, out);
        } else if path.extension().is_some_and(|e| e == "tir") {
            out.push(path);
        }
    }
}

#[test]
fn every_file_does_what_it_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let mut paths = Vec::new();
    files(&root, &mut paths);
    assert!(paths.len() > 40, "only {} files found", paths.len());
    let blessing = std::env::var_os("TESSERA_BLESS").is_some();
    let mut failed = Vec::new();
    for path in paths {
        let name = path.strip_prefix(&root).expect("below the root").display().to_string();
        let mut text = std::fs::read_to_string(&path).expect("text");
        if blessing && let Some(blessed) = bless(&text, &name) {
            if blessed != text {
                std::fs::write(&path, &blessed).expect("writable");
            }
            text = blessed;
        }
        failed.extend(run(&text, &name).into_iter().map(|why| format!("{name}: {why}")));
    }
    assert!(failed.is_empty(), "\n{}\n", failed.join("\n"));
}

#[test]
fn a_wrong_expectation_fails() {
    let text = "// test: eval\n// input x: [2] = 1 2\nprogram @p { %x = input : f32[2] output \"y\", %x }\n\n// expect:\n";
    assert_eq!(run(&format!("{text}// whole y [2] 1 2\n"), "t"), Vec::<String>::new());
    assert_eq!(run(&format!("{text}// whole y [2] 1 3\n"), "t").len(), 1);
    assert_eq!(run(text, "t").len(), 1);
    assert_eq!(bless(text, "t"), Some(format!("{text}// whole y [2] 1 2\n")));
    let refused = "// test: parse\nprogram @p {\n  output \"y\", %x // error: T0204\n}\n";
    assert!(run(refused, "t").is_empty());
    assert_eq!(run(&refused.replace("T0204", "T0203"), "t").len(), 2);
}

#[test]
fn every_op_and_every_code_has_a_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let mut paths = Vec::new();
    files(&root, &mut paths);
    let texts: Vec<(PathBuf, String)> =
        paths.into_iter().map(|p| (p.clone(), std::fs::read_to_string(p).expect("text"))).collect();
    for code in tessera_ir::CODES {
        let mark = format!("// error: {}", code.id);
        assert!(texts.iter().any(|(_, t)| t.contains(&mark)), "no file is refused with {}", code.id);
    }
    for test in ["print", "eval"] {
        let mut seen = std::collections::BTreeSet::new();
        for (path, text) in texts.iter().filter(|(_, t)| t.starts_with(&format!("// test: {test}\n"))) {
            let programs = tessera_ir::parse_all(text, &path.display().to_string()).expect("it can be read");
            seen.extend(programs.iter().flat_map(|p| &p.ops).map(|op| op.opcode));
        }
        for row in tessera_ir::TABLE {
            assert!(seen.contains(&row.opcode), "no {test} file has {}", row.name);
        }
    }
}

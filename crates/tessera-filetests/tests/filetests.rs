//! Runs every file of `filetests/`. `TESSERA_BLESS=1` rewrites expected outputs first.

mod common;

use tessera_filetests::{bless, run};

#[test]
fn every_file_meets_its_expectations() {
    let files = common::list_files();
    assert!(files.len() > 40, "only {} files found", files.len());
    let blessing = std::env::var_os("TESSERA_BLESS").is_some();
    let mut failed = Vec::new();
    for (name, path) in files {
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
    assert_eq!(run(&format!("{text}// logical y [2] 1 2\n"), "t"), Vec::<String>::new());
    assert_eq!(run(&format!("{text}// logical y [2] 1 3\n"), "t").len(), 1);
    assert_eq!(run(text, "t").len(), 1);
    assert_eq!(bless(text, "t"), Some(format!("{text}// logical y [2] 1 2\n")));
    let refused = "// test: parse\nprogram @p {\n  output \"y\", %x // error: T0204\n}\n";
    assert!(run(refused, "t").is_empty());
    assert_eq!(run(&refused.replace("T0204", "T0203"), "t").len(), 2);
}

#[test]
fn an_evaluation_reports_stream_races() {
    let text = |after: &str| {
        format!(
            "// test: eval\n// input x: [2] = 1 2\nprogram @p role(r) mesh(tp=1) streams(compute, io) {{ %x = input : f32[2] \
             %y = ttile.add %x, %x %e = event.record %z = ttile.add %y, %x @io{after} %f = event.record @io \
             output \"z\", %z after(%f) }}\n\n// expect:\n// rank 0 z [2] 3 6\n"
        )
    };
    assert_eq!(run(&text(" after(%e)"), "t"), Vec::<String>::new());
    let wrong = run(&text(""), "t");
    assert!(wrong.len() == 1 && wrong[0].starts_with("T0316: %y is read on stream io"), "{wrong:?}");
}

#[test]
fn every_op_and_every_code_has_a_file() {
    let texts = common::read_files();
    // The parser rejects such programs before the verifier sees them; the verifier's own tests
    // build them. The last three codes are about recorded traces.
    let not_in_text = ["T0315", "T0319", "T0320", "T0322", "T0338", "T0341", "T0342"];
    for code in tessera_ir::CODES.iter().chain(tessera_verify::CODES) {
        let marks = ["error", "error-anywhere"].map(|mark| format!("// {mark}: {}", code.id));
        let fires = texts.iter().any(|(_, t)| marks.iter().any(|m| t.contains(m)));
        assert_eq!(fires, !not_in_text.contains(&code.id), "files rejected with {}", code.id);
    }
    for test in ["print", "eval"] {
        let mut seen = std::collections::BTreeSet::new();
        for (name, text) in texts.iter().filter(|(_, t)| t.starts_with(&format!("// test: {test}\n"))) {
            let programs = tessera_ir::parse_all(text, name).expect("the file parses");
            seen.extend(programs.iter().flat_map(|p| &p.ops).map(|op| op.opcode));
        }
        for row in tessera_ir::OP_TABLE {
            assert!(seen.contains(&row.opcode), "no {test} file has {}", row.name);
        }
    }
}

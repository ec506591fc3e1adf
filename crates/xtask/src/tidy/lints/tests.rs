//! Negative controls: settings that tidy must refuse, and code that Clippy must refuse under the
//! settings of the pure crates and of the library crates.

use std::path::Path;
use std::process::Command;

use super::super::source::parse_sources;
use super::*;

const ROOT: &str = "allow-unwrap-in-tests = true\n";
const LIBRARY_ROOT: &str =
    "//! a\n#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]\n";

fn row(name: &str, pure: bool) -> CrateRow {
    CrateRow { name: name.into(), kind: CrateKind::Library, may_use: None, pure, line: 1 }
}

/// A pure file that keeps all promises.
fn pure_settings() -> String {
    let names: Vec<String> =
        PURE_PROMISES.iter().flat_map(|(_, names)| names.iter().map(|n| format!("\"{n}\""))).collect();
    format!("{ROOT}disallowed-methods = [{}]\n", names.join(", "))
}

fn setting_problems(files: &[(&str, &str)]) -> Vec<String> {
    let rows = [row("pure", true), row("equal", true), row("io", false)];
    let mut found = Vec::new();
    check_settings(&Tree::from_files(files), &rows, &mut found);
    found.iter().map(Problem::to_string).collect()
}

#[test]
fn pure_crates_have_equal_settings_that_keep_the_promises() {
    let pure = pure_settings();
    let io: String = format!(
        "{ROOT}disallowed-methods = [{}]\n",
        "\"std::env::var\", \"std::env::args\", \"std::option_env\", \"std::fs::File\", \"std::fs::read\""
    );
    let problems = |pure: &str, equal: &str, io: &str| {
        setting_problems(&[
            ("clippy.toml", ROOT),
            ("crates/pure/clippy.toml", pure),
            ("crates/equal/clippy.toml", equal),
            ("crates/io/clippy.toml", io),
        ])
    };
    assert_eq!(problems(&pure, &pure, &io), Vec::<String>::new());
    let assert_one = |found: Vec<String>, part: &str| {
        assert!(found.len() == 1 && found[0].contains(part), "{part}: {found:?}");
    };
    assert_one(problems(&pure, &format!("{pure}\n"), &io), "`equal` is pure: copy");
    assert_one(problems(&pure, &pure, &io.replace("\"std::env::var\", ", "")), "ban `std::env::var`");
    let without_clock = pure.replace("\"std::time::Instant::now\", ", "");
    assert_one(problems(&without_clock, &without_clock, &io), "a pure crate uses no clock");
    assert_one(problems(&pure, &pure, io.trim_start_matches(ROOT)), "write `allow-unwrap-in-tests = true`");
}

#[test]
fn a_library_crate_raises_its_lints_and_switches_none_off() {
    let problems = |text: &str| {
        let tree = Tree::from_files(&[("crates/a/src/lib.rs", text)]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check_library_lints(&sources[0], &mut found);
        check_allowed_lints(&sources[0], &mut found);
        found.iter().map(Problem::to_string).collect::<Vec<_>>()
    };
    assert_eq!(problems(LIBRARY_ROOT), Vec::<String>::new());
    assert!(problems("//! a\n#![warn(clippy::expect_used)]\n")[0].contains("write `#![warn("));
    let in_tests =
        "#[cfg(test)]\n#[allow(clippy::disallowed_methods)]\nmod tests { #![allow(clippy::print_stdout)] }\n";
    assert_eq!(problems(&format!("{LIBRARY_ROOT}{in_tests}")), Vec::<String>::new());
    let found = problems(&format!(
        "{LIBRARY_ROOT}#[allow(dead_code, clippy::disallowed_methods)]\nfn a() {{ #[expect(clippy::expect_used)] b(); }}\n"
    ));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("lib.rs:3") && found[1].contains("lib.rs:4"), "{found:?}");
}

#[test]
fn a_workspace_lint_that_is_switched_off_is_reported() {
    let manifest = "[workspace.lints.rust]\nunsafe_code = \"deny\"\n[workspace.lints.clippy]\nunwrap_used = \"allow\"\n\
dbg_macro = \"deny\"\nmissing_safety_doc = \"deny\"\ntodo = \"deny\"\nundocumented_unsafe_blocks = \"deny\"\n";
    let mut found = Vec::new();
    check_workspace_lints(&Tree::from_files(&[("Cargo.toml", manifest)]), &mut found);
    let text = found.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n");
    assert!(found.len() == 2 && text.contains("unimplemented") && text.contains("unwrap_used"), "{text}");
}

/// One statement per kind of ban, and the name of it that Clippy must print.
const IMPURE_STATEMENTS: &[(&str, &str)] = &[
    ("let _ = std::fs::read(\"a\");", "std::fs::read"),
    ("let _ = std::fs::File::open(\"a\");", "std::fs::File"),
    ("let _ = std::env::var(\"A\");", "std::env::var"),
    ("let _ = std::env::args();", "std::env::args"),
    ("let _ = option_env!(\"A\");", "std::option_env"),
    ("let _ = std::path::Path::new(\"a\").exists();", "std::path::Path::exists"),
    ("let _ = std::net::TcpStream::connect(\"a:1\");", "std::net::TcpStream"),
    ("use std::{collections::BTreeMap as _, time::Instant};", "std::time::Instant"),
    ("let _ = std::time::Instant::now();", "std::time::Instant::now"),
    ("let _ = std::time::SystemTime::now();", "std::time::SystemTime::now"),
    ("let _ = std::thread::spawn(|| ());", "std::thread::spawn"),
    ("std::thread::sleep(std::time::Duration::ZERO);", "std::thread::sleep"),
    ("let _ = std::process::Command::new(\"a\");", "std::process::Command"),
    ("std::process::exit(1);", "std::process::exit"),
    ("let _ = std::io::stdout();", "std::io::stdout"),
];
/// Statements that the lints of all library crates refuse, and the lint.
const LIBRARY_STATEMENTS: &[(&str, &str)] = &[
    ("let _ = \"1\".parse::<u8>().unwrap();", "`unwrap()`"),
    ("let _ = \"1\".parse::<u8>().expect(\"a\");", "`expect()`"),
    ("println!(\"a\");", "`println!`"),
    ("eprint!(\"a\");", "`eprint!`"),
    ("todo!();", "`todo`"),
    ("unimplemented!();", "`unimplemented`"),
    ("dbg!(1);", "`dbg!`"),
    ("let a = 1_u8; let _ = unsafe { *std::ptr::from_ref(&a) };", "unsafe block missing a safety comment"),
    ("#[allow(dead_code)] unsafe fn a() {}", "missing a `# Safety` section"),
];

#[test]
fn clippy_refuses_each_ban_of_the_pure_crates() {
    check_refusals("crates/tessera-base", IMPURE_STATEMENTS);
}

#[test]
fn clippy_refuses_files_and_the_environment_in_library_crates() {
    check_refusals("crates/tessera-runtime", &IMPURE_STATEMENTS[..5]);
    check_refusals("crates/tessera-weights", &IMPURE_STATEMENTS[2..5]);
}

#[test]
fn clippy_refuses_panics_prints_and_undocumented_unsafe_code_in_library_crates() {
    check_refusals("crates/tessera-base", LIBRARY_STATEMENTS);
}

/// Runs Clippy over a source with one statement per line, under the settings of a crate, and checks
/// that every line is refused by name.
fn check_refusals(settings: &str, statements: &[(&str, &str)]) {
    let mut text = format!("{LIBRARY_ROOT}#![allow(unreachable_code, unused)]\n");
    for (i, (statement, _)) in statements.iter().enumerate() {
        text.push_str(&format!("pub fn f{i}() {{ {statement} }}\n"));
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("refused.rs");
    std::fs::write(&source, text).unwrap();
    let root = crate::workspace_root();
    let lint_flags = WORKSPACE_LINTS.iter().filter(|(tool, _)| *tool == "clippy");
    let out = Command::new("clippy-driver")
        .env("CLIPPY_CONF_DIR", root.join(settings))
        .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "--out-dir"])
        .args([folder.path(), Path::new("--error-format=short")])
        .args(lint_flags.map(|(_, lint)| format!("-Wclippy::{lint}")))
        .arg(&source)
        .output()
        .unwrap();
    let printed = String::from_utf8(out.stderr).unwrap();
    for (i, (statement, name)) in statements.iter().enumerate() {
        let line = format!("refused.rs:{}:", i + 4);
        let is_refused = printed.lines().any(|l| l.contains(&line) && l.contains(name));
        assert!(is_refused, "{settings}: `{statement}` was not refused:\n{printed}");
    }
}

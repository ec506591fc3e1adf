//! The project's automation: `cargo xtask tidy`, `cargo xtask bless`, `cargo xtask ci`.

mod ci;
mod tidy;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask <task>

  tidy   run the checks that the compiler cannot: crate dependencies, purity, unsafe, codes, links
  bless  run the filetests and rewrite their expected output
  ci     run everything that must pass: fmt, tidy, clippy, all tests";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let task = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => ci::run_tidy,
        ["bless"] => ci::bless_filetests,
        ["ci"] => ci::run_all,
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match task(&workspace_root()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the root folder of the workspace, two levels above this crate.
fn workspace_root() -> PathBuf {
    let crate_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).map_or(crate_dir.clone(), PathBuf::from)
}

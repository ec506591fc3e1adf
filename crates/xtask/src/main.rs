//! The project's automation: `cargo xtask tidy`, `bless`, `library`, `kernels`, `page`, `mp4`, `python`, `macos` and `ci`.

#![forbid(unsafe_code)]

mod ci;
mod page;
mod python;
mod tidy;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask <task>

  tidy     run the checks that neither the compiler nor Clippy makes: dependencies, unsafe, codes, links
  bless    run the filetests and rewrite their expected output
  library  write the generated pages of the library, the data of `tessera explain`, and the list of embedded pages
  kernels  compile every CUDA kernel with the compiler of a Python wheel; needs no GPU
  page     test the page of `tessera serve` in a browser; needs Node.js
  mp4      test the format mp4 of `tessera serve`, and the page with it; needs a C++ compiler
  python   build the wheel, and test it in a fresh virtual environment
  macos    check that the Python package compiles for macOS; needs rustup, and no Mac
  ci       run everything that must pass: fmt, tidy, clippy, kernels, all tests";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let task = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => ci::run_tidy,
        ["bless"] => ci::bless_filetests,
        ["library"] => ci::write_library,
        ["kernels"] => ci::compile_kernels,
        ["page"] => page::check_page,
        ["mp4"] => page::check_mp4,
        ["python"] => python::check_package,
        ["macos"] => ci::check_macos,
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

//! The binary `tessera`; the library of this crate is the program.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(tessera_cli::run(std::env::args_os().collect(), tessera_cli::current_binary()))
}

//! The tasks. Each prints the commands that it runs, so that a developer can repeat them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::tidy;
use crate::tree::Tree;

/// Runs everything that must pass.
///
/// The cheap checks run first and the tests last, so that the test summary ends the log.
pub(crate) fn run_all(root: &Path) -> Result<()> {
    run_cargo(root, &["fmt", "--all", "--", "--check"], &[]).context("run `cargo fmt --all`")?;
    run_tidy(root)?;
    run_cargo(root, &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
    run_cargo(root, &["test", "--workspace", "--no-fail-fast"], &[])
}

/// Runs all tidy checks and prints each problem on its own line.
pub(crate) fn run_tidy(root: &Path) -> Result<()> {
    println!("+ cargo xtask tidy");
    let tree = Tree::read(root)?;
    let problems = tidy::find_problems(&tree);
    for p in &problems {
        eprintln!("{p}");
    }
    if !problems.is_empty() {
        bail!("tidy: {} problem(s) found", problems.len());
    }
    println!("tidy: checked {} files and {} crates, no problems", tree.files.len(), tree.members.len());
    Ok(())
}

/// Runs the filetests in the mode that rewrites their expected output. Review the diff before you
/// commit it.
pub(crate) fn bless_filetests(root: &Path) -> Result<()> {
    run_cargo(root, &["test", "--package", "tessera-filetests"], &[("TESSERA_BLESS", "1")])
}

/// Prints and runs one cargo command with extra environment variables.
fn run_cargo(root: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Result<()> {
    let assignments: String = variables.iter().map(|(k, v)| format!("{k}={v} ")).collect();
    let command_line = format!("{assignments}cargo {}", arguments.join(" "));
    println!("+ {command_line}");
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(program)
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(root)
        .status()
        .with_context(|| format!("cannot start `{command_line}`"))?;
    if !status.success() {
        bail!("`{command_line}` failed ({status})");
    }
    Ok(())
}

//! The tasks themselves: each prints the command that it runs, so that a person can run the same by hand.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::tidy;
use crate::tree::Tree;

/// Everything that must pass. The cheap checks come first, the tests last, so that their summary ends the log.
pub(crate) fn all(root: &Path) -> Result<()> {
    cargo(root, &["fmt", "--all", "--", "--check"], &[]).context("run `cargo fmt --all`")?;
    tidy(root)?;
    cargo(root, &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
    cargo(root, &["test", "--workspace", "--no-fail-fast"], &[])
}

/// `tidy`, with every finding on a line of its own.
pub(crate) fn tidy(root: &Path) -> Result<()> {
    println!("+ cargo xtask tidy");
    let tree = Tree::read(root)?;
    let problems = tidy::problems(&tree);
    for p in &problems {
        eprintln!("{p}");
    }
    if !problems.is_empty() {
        bail!("tidy: {} to put right", problems.len());
    }
    println!("tidy: {} files, {} crates in order", tree.files.len(), tree.members.len());
    Ok(())
}

/// Runs the filetests so that they rewrite what they expect. Look at the difference before keeping it.
pub(crate) fn bless(root: &Path) -> Result<()> {
    cargo(root, &["test", "--package", "tessera-filetests"], &[("TESSERA_BLESS", "1")])
}

fn cargo(root: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Result<()> {
    let set: String = variables.iter().map(|(k, v)| format!("{k}={v} ")).collect();
    let shown = format!("{set}cargo {}", arguments.join(" "));
    println!("+ {shown}");
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(program)
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(root)
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

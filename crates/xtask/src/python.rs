//! The checks of the Python package: its wheel, its tests in a fresh virtual environment, and its types.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Folder of the package.
const PACKAGE: &str = "crates/tessera-py";

/// What builds a wheel, and what its tests need.
const BUILDER: &str = "maturin>=1.9,<2";
const TEST_TOOLS: [&str; 4] = ["numpy>=1.26", "pytest>=8", "mypy>=1.11", "pyright[nodejs]>=1.1.380"];

/// Builds the wheel, installs it into a fresh virtual environment, and runs the tests and both type checkers there.
///
/// The wheel is built in the profile of the tests, so that it shares what they have compiled.
pub(crate) fn check_package(root: &Path) -> Result<()> {
    let wheel = build_wheel(root)?;
    let python = create_environment(&root.join("target/python/test"), true)?;
    install(&python, &[&wheel.to_string_lossy()])?;
    install(&python, &TEST_TOOLS)?;
    let package = root.join(PACKAGE);
    let run = |arguments: &[&str]| run_command(Command::new(&python).args(arguments).current_dir(&package));
    run(&["-m", "pytest", "-q", "tests"])?;
    for example in list_examples(root)? {
        run_command(Command::new(&python).arg(&example).current_dir(root))?;
    }
    run(&["-m", "mypy", "--strict", "tests"])?;
    // Pyright looks for packages beside the Python that it is told of, not the one that runs it.
    let interpreter = python.to_string_lossy();
    run(&["-m", "pyright", "--pythonpath", &interpreter, "--project", "pyproject.toml", "tests", "python"])
}

/// Returns the example programs, in order of name.
fn list_examples(root: &Path) -> Result<Vec<PathBuf>> {
    let folder = root.join("examples");
    let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|path| path.extension().is_some_and(|extension| extension == "py"));
    found.sort();
    Ok(found)
}

/// Builds the wheel and returns its path.
fn build_wheel(root: &Path) -> Result<PathBuf> {
    let python = create_environment(&root.join("target/python/build"), false)?;
    install(&python, &[BUILDER])?;
    let wheels = root.join("target/python/wheels");
    // A wheel of an earlier build has the same name, and nothing else may be taken for it.
    if wheels.exists() {
        std::fs::remove_dir_all(&wheels).with_context(|| format!("cannot remove {}", wheels.display()))?;
    }
    let arguments = ["-m", "maturin", "build", "--profile", "dev", "--out"];
    run_command(Command::new(&python).args(arguments).arg(&wheels).current_dir(root.join(PACKAGE)))?;
    let mut found =
        std::fs::read_dir(&wheels).with_context(|| format!("no wheel in {}", wheels.display()))?;
    match found.next() {
        Some(wheel) => Ok(wheel?.path()),
        None => bail!("no wheel in {}", wheels.display()),
    }
}

/// Creates a virtual environment, unless it is there, and returns its interpreter.
pub(crate) fn create_environment(folder: &Path, must_be_fresh: bool) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    if must_be_fresh && folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    if !python.is_file() {
        run_command(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    }
    Ok(python)
}

/// Installs packages into an environment.
pub(crate) fn install(python: &Path, packages: &[&str]) -> Result<()> {
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    run_command(Command::new(python).args(pip).args(packages))
}

/// Prints and runs a command.
fn run_command(command: &mut Command) -> Result<()> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
    println!("+ {line}");
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

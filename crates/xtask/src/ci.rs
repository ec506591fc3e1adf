//! The tasks. Each prints the commands that it runs, so that a developer can repeat them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::tree::Tree;
use crate::{page, python, tidy};

/// Runs everything that must pass.
///
/// The cheap checks run first and the tests last, so that the test summaries end the log. The tests
/// compile the CUDA kernels too, so they get the compiler's folder.
pub(crate) fn run_all(root: &Path) -> Result<()> {
    run_cargo(root, &["fmt", "--all", "--", "--check"], &[]).context("run `cargo fmt --all`")?;
    run_tidy(root)?;
    run_cargo(root, &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
    let folders = find_or_install_nvrtc(root)?;
    let tested =
        run_cargo(root, &["test", "--workspace", "--no-fail-fast"], &kernel_variables(folders.as_deref()));
    // A developer sees the failures of all three.
    let page = page::check_built_page(root);
    python::check_package(root).and(page).and(tested)
}

/// The wheel with the kernel compiler of CUDA 13.0, to which the bindings are pinned.
const NVRTC_WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";

/// Compiles every CUDA kernel for every architecture that it declares. The compiler comes from a
/// Python wheel, so this needs no GPU.
pub(crate) fn compile_kernels(root: &Path) -> Result<()> {
    let folders = find_or_install_nvrtc(root)?;
    let arguments = ["test", "--package", "tessera-cuda", "--lib", "--quiet", "compile_check"];
    run_cargo(root, &arguments, &kernel_variables(folders.as_deref()))
}

/// The target of Macs with Apple's processors.
const MACOS_TARGET: &str = "aarch64-apple-darwin";

/// Checks that the Python package and the command line compile for macOS, without a warning. Nothing is linked or run.
///
/// The check needs no compiler for C: programs that do nothing stand in for one, because the C code of dependencies is
/// linked and never read by Rust.
pub(crate) fn check_macos(root: &Path) -> Result<()> {
    println!("+ rustup target add {MACOS_TARGET}");
    let status = Command::new("rustup").args(["target", "add", MACOS_TARGET]).current_dir(root).status();
    if !status.context("cannot start rustup")?.success() {
        bail!("the standard library of {MACOS_TARGET} cannot be installed");
    }
    let variables = [
        ("CC_aarch64_apple_darwin", "true"),
        ("CXX_aarch64_apple_darwin", "true"),
        ("AR_aarch64_apple_darwin", "true"),
        // Build scripts search Apple's SDK otherwise.
        ("SDKROOT", "/"),
        // The stable ABI is the same for every interpreter, so none of a Mac is needed.
        ("PYO3_NO_PYTHON", "1"),
    ];
    let packages =
        ["clippy", "--target", MACOS_TARGET, "--package", "tessera-py", "--package", "tessera-cli"];
    run_cargo(root, &[&packages[..], &["--", "-D", "warnings"]].concat(), &variables)
}

/// Returns the environment variables of tests that compile kernels. Without a compiler there are
/// none, so that those tests say what they skip.
fn kernel_variables(folders: Option<&str>) -> Vec<(&'static str, &str)> {
    match folders {
        Some(folders) => vec![("TESSERA_CUDA_LIBS", folders), ("TESSERA_REQUIRE_NVRTC", "1")],
        None => vec![],
    }
}

/// Returns the library folders with the kernel compiler among them, or `None` where the wheel cannot
/// be had. The latter is an error only if TESSERA_REQUIRE_NVRTC is 1.
fn find_or_install_nvrtc(root: &Path) -> Result<Option<String>> {
    let folder = match install_nvrtc(&root.join("target/nvrtc")) {
        Ok(folder) => folder,
        Err(why) if std::env::var_os("TESSERA_REQUIRE_NVRTC").is_some_and(|v| v == "1") => return Err(why),
        Err(why) => {
            println!("SKIPPED: CUDA kernels are not compiled: {why:#}");
            return Ok(None);
        }
    };
    // A developer's own folders come first: they may hold the other CUDA libraries.
    let own = std::env::var_os("TESSERA_CUDA_LIBS").unwrap_or_default();
    let folders = std::env::split_paths(&own).filter(|f| !f.as_os_str().is_empty()).chain([folder]);
    let joined = std::env::join_paths(folders).context("a folder of libraries contains the separator")?;
    Ok(Some(joined.into_string().ok().context("the path of the workspace is not UTF-8")?))
}

/// Installs the compiler into a virtual environment, unless it is there, and returns the folder of
/// its library.
fn install_nvrtc(venv: &Path) -> Result<PathBuf> {
    if let Some(folder) = find_nvrtc(venv) {
        return Ok(folder);
    }
    let python = venv.join("bin/python");
    let steps: [(&Path, &[&str]); 2] = [
        (Path::new("python3"), &["-m", "venv", &venv.to_string_lossy()]),
        (&python, &["-m", "pip", "install", "--quiet", "--disable-pip-version-check", NVRTC_WHEEL]),
    ];
    for (program, arguments) in steps {
        println!("+ {} {}", program.display(), arguments.join(" "));
        let status = Command::new(program).args(arguments).status();
        let status = status.with_context(|| format!("cannot start {}", program.display()))?;
        if !status.success() {
            bail!("`{} {}` failed ({status})", program.display(), arguments.join(" "));
        }
    }
    find_nvrtc(venv).with_context(|| format!("{NVRTC_WHEEL} contains no libnvrtc.so.13"))
}

/// Returns the folder of libnvrtc.so.13 in a virtual environment.
fn find_nvrtc(venv: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(venv.join("lib")).ok()?;
    let folders = versions.flatten().map(|v| v.path().join("site-packages/nvidia/cu13/lib"));
    folders.into_iter().find(|f| f.join("libnvrtc.so.13").is_file())
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

/// Writes the generated files of the library, which tidy compares.
pub(crate) fn write_library(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    for (path, text) in tidy::generated_files(&tree) {
        std::fs::write(root.join(path), text).with_context(|| format!("cannot write {path}"))?;
        println!("wrote {path}");
    }
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

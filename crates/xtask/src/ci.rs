//! The tasks. Each prints the commands that it runs, so that a developer can repeat them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
    let tested = run_tests(root, &kernel_variables(folders.as_deref()));
    // A developer sees the failures of all three.
    let page = page::check_built_page(root);
    python::check_package(root).and(page).and(tested)
}

/// Runs all Rust tests. The error names the binaries that failed and repeats what their tests said: it ends the log, and
/// thousands of lines lie between a failure and the end.
fn run_tests(root: &Path, variables: &[(&str, &str)]) -> Result<()> {
    let (mut command, command_line) =
        cargo_command(root, &["test", "--workspace", "--no-fail-fast"], variables);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{command_line}`"))?;
    let output = child.stdout.take().context("the tests have no output")?;
    let errors = child.stderr.take().context("cargo has no standard error")?;
    let (mut failures, mut failed_binaries) = (FailedTests::default(), FailedBinaries::default());
    std::thread::scope(|threads| {
        let reader = threads.spawn(|| {
            read_lines(errors, |line| {
                eprintln!("{line}");
                failed_binaries.read_line(line);
            })
        });
        let read = read_lines(output, |line| {
            println!("{line}");
            failures.read_line(line);
        });
        read.and(reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    let status = child.wait()?;
    if !status.success() {
        let found = [failed_binaries.lines, failures.lines].concat();
        bail!("`{command_line}` failed ({status})\n{}", describe_failures(&found));
    }
    Ok(())
}

/// Passes on each line until its writers have ended.
fn read_lines(pipe: impl Read, mut pass_on: impl FnMut(&str)) -> std::io::Result<()> {
    for line in BufReader::new(pipe).split(b'\n') {
        pass_on(&String::from_utf8_lossy(&line?));
    }
    Ok(())
}

/// What tests said that failed, on standard output.
#[derive(Debug, Default)]
struct FailedTests {
    lines: Vec<String>,
    /// Whether the lines of a test binary are those about its failures.
    in_failures: bool,
}

/// What cargo said of test binaries that failed, on standard error. It alone says which signal ended one.
#[derive(Debug, Default)]
struct FailedBinaries {
    lines: Vec<String>,
    /// Whether the lines are those of an error.
    in_error: bool,
}

/// The lines about failures that an error repeats at most.
const FAILURE_LINES: usize = 300;

impl FailedTests {
    fn read_line(&mut self, line: &str) {
        self.in_failures = match line {
            "failures:" => true,
            _ if line.starts_with("test result:") => false,
            _ => self.in_failures,
        };
        // A binary that dies after a failure prints no more than this line.
        if self.in_failures || line.ends_with("... FAILED") {
            self.lines.push(line.to_string());
        }
    }
}

impl FailedBinaries {
    fn read_line(&mut self, line: &str) {
        // Tests print errors of their own, which begin with `error[T`.
        let begins = ["error: test failed", "error: could not compile", "error[E", "Caused by:"];
        let lists = line.starts_with("error: ") && line.ends_with(" failed:");
        self.in_error = lists || begins.iter().any(|b| line.starts_with(b)) || self.in_error;
        self.in_error &=
            !line.is_empty() && !line.starts_with("     Running") && !line.starts_with("   Doc-tests");
        if self.in_error {
            self.lines.push(line.to_string());
        }
    }
}

/// Joins the lines about failures, within the limit.
fn describe_failures(lines: &[String]) -> String {
    let left_out = lines.len().saturating_sub(FAILURE_LINES);
    let mut text = lines.iter().take(FAILURE_LINES).cloned().collect::<Vec<_>>().join("\n");
    if left_out > 0 {
        text += &format!("\nand {left_out} more lines");
    }
    text
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
    let (mut command, command_line) = cargo_command(root, arguments, variables);
    let status = command.status().with_context(|| format!("cannot start `{command_line}`"))?;
    if !status.success() {
        bail!("`{command_line}` failed ({status})");
    }
    Ok(())
}

/// Prints one cargo command with extra environment variables, and returns it with its text.
fn cargo_command(root: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> (Command, String) {
    let assignments: String = variables.iter().map(|(k, v)| format!("{k}={v} ")).collect();
    let command_line = format!("{assignments}cargo {}", arguments.join(" "));
    println!("+ {command_line}");
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments).envs(variables.iter().copied()).current_dir(root);
    (command, command_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_repeats_the_failures_of_every_test_binary() {
        let log = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\n\
                   thread 'b' panicked at x.rs:1:2:\nleft != right\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed\n\
                   running 1 test\ntest c ... ok\ntest result: ok. 1 passed\ntest d ... FAILED";
        let mut found = FailedTests::default();
        log.lines().for_each(|line| found.read_line(line));
        let text = describe_failures(&found.lines);
        for part in ["test b ... FAILED", "left != right", "test d ... FAILED"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(
            !text.contains("test a") && !text.contains("test result") && !text.contains("test c"),
            "{text}"
        );
        found.lines = vec!["x".to_string(); FAILURE_LINES + 2];
        assert!(describe_failures(&found.lines).ends_with("and 2 more lines"));
    }

    #[test]
    fn an_error_names_the_binaries_that_failed_and_the_signals_that_ended_them() {
        let log = "     Running tests/a.rs (target/debug/deps/a-1)\nthread 'main' panicked at a.rs:1:2:\n\
                   error[T0701]: a rank printed this\n\
                   error: test failed, to rerun pass `-p one --test a`\n     Running tests/b.rs (target/debug/deps/b-1)\n\
                   error: test failed, to rerun pass `-p two --test b`\n\nCaused by:\n  \
                   process didn't exit successfully: `b-1` (signal: 6, SIGABRT: process abort signal)\n     \
                   Running tests/c.rs (target/debug/deps/c-1)\nerror: 2 targets failed:\n    `-p one --test a`\n    \
                   `-p two --test b`";
        let mut found = FailedBinaries::default();
        log.lines().for_each(|line| found.read_line(line));
        let text = describe_failures(&found.lines);
        for part in
            ["to rerun pass `-p one --test a`", "(signal: 6", "2 targets failed:\n    `-p one --test a`"]
        {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("panicked") && !text.contains("T0701") && !text.contains("Running"), "{text}");
    }
}

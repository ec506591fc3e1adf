//! The tests of the page of `tessera serve`: the rule by which it shows frames, and the page in a browser.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::python::{create_environment, install};

/// The tests, and the files of the project that they run.
const FILES: [&str; 9] = [
    "crates/tessera-serve/tests/page/package.json",
    "crates/tessera-serve/tests/page/package-lock.json",
    "crates/tessera-serve/tests/page/page.test.mjs",
    "crates/tessera-serve/tests/page/play_out.test.mjs",
    "crates/tessera-serve/tests/page/play_out.json",
    "crates/tessera-serve/page/stream.js",
    "examples/clients/send_video.py",
    "examples/clients/watch.mjs",
    "examples/clients/watch.py",
];
/// What the clients in Python import; the test sends no pictures of files.
const PYTHON_PACKAGES: [&str; 2] = ["websockets>=13,<17", "numpy>=1.26,<3"];
/// Names under which a machine may have the browser.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Runs the tests of the rule by which frames are shown. Then installs the test tools from the npm registry, and runs the
/// tests with a browser of this machine, or else with one from that registry. Pictures of the page are left in
/// target/page/screenshots.
///
/// What needs Node.js or the registry is skipped with a line that says so, unless TESSERA_REQUIRE_PAGE is 1.
pub(crate) fn check_page(root: &Path) -> Result<()> {
    check_page_with(root, Some(&[]))
}

/// As [`check_page`], with the program that the tests of the workspace have built. A build of its package alone uses other
/// features of some libraries, and so compiles half of the workspace again.
pub(crate) fn check_built_page(root: &Path) -> Result<()> {
    check_page_with(root, None)
}

/// Tests the format `mp4` of `tessera serve`, whose encoder needs a C++ compiler, in Rust and in a browser.
pub(crate) fn check_mp4(root: &Path) -> Result<()> {
    const FEATURE: [&str; 2] = ["--features", "h264"];
    run(Command::new("cargo").args(["test", "--package", "tessera-serve"]).args(FEATURE).current_dir(root))?;
    check_page_with(root, Some(&FEATURE))
}

/// Tests the page of a program, which is built with these arguments first; `None` for one that is there.
fn check_page_with(root: &Path, built_with: Option<&[&str]>) -> Result<()> {
    let folder = copy_tests(root)?;
    if let Err(why) = run(Command::new("node").arg("--version")) {
        return skip("the page is not tested", &why);
    }
    run(Command::new("node")
        .args(["--test", "--test-reporter=spec", "play_out.test.mjs"])
        .current_dir(&folder))?;
    match install_tools(&folder) {
        Ok(()) => run_tests(root, &folder, built_with),
        Err(why) => skip("the page is not tested in a browser", &why),
    }
}

/// Copies the tests to a folder of their own, because Node.js looks for packages beside the file that imports them.
fn copy_tests(root: &Path) -> Result<PathBuf> {
    let folder = root.join("target/page");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for file in FILES {
        let from = root.join(file);
        let name = from.file_name().context("a file has a name")?;
        std::fs::copy(&from, folder.join(name)).with_context(|| format!("cannot copy {file}"))?;
    }
    Ok(folder)
}

fn install_tools(folder: &Path) -> Result<()> {
    let mut npm = Command::new("npm");
    npm.args(["ci", "--silent", "--no-audit", "--no-fund"]).current_dir(folder);
    if find_browser().is_some() {
        npm.arg("--omit=optional");
    }
    run(&mut npm)
}

/// Says what is skipped and why.
fn skip(what: &str, why: &anyhow::Error) -> Result<()> {
    if std::env::var_os("TESSERA_REQUIRE_PAGE").is_some_and(|v| v == "1") {
        bail!("{what}: {why:#}");
    }
    println!("SKIPPED: {what}: {why:#}");
    Ok(())
}

fn run_tests(root: &Path, folder: &Path, built_with: Option<&[&str]>) -> Result<()> {
    if let Some(features) = built_with {
        let build = ["build", "--package", "tessera-cli"];
        run(Command::new("cargo").args(build).args(features).current_dir(root))?;
    }
    let has_mp4 = built_with.is_some_and(|features| !features.is_empty());
    let mut node = Command::new("node");
    node.args(["--test", "--test-reporter=spec", "page.test.mjs"])
        .current_dir(folder)
        .env("TESSERA", root.join("target/debug/tessera"))
        .env("MODEL", root.join("models/demo"))
        .env("FIXTURES", root.join("fixtures"))
        .env("MP4", if has_mp4 { "1" } else { "0" })
        .env("SCREENSHOTS", folder.join("screenshots"));
    if let Some(browser) = find_browser() {
        node.env("CHROMIUM", browser);
    }
    match install_python_client(folder) {
        Ok(python) => {
            node.env("PYTHON", python);
        }
        Err(why) => skip("the clients in Python are not tested", &why)?,
    }
    run(&mut node)
}

/// Returns a Python that has what the clients of the examples import.
fn install_python_client(folder: &Path) -> Result<PathBuf> {
    let python = create_environment(&folder.join("python"), false)?;
    install(&python, &PYTHON_PACKAGES)?;
    Ok(python)
}

fn find_browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    BROWSERS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|p| p.is_file())
}

fn run(command: &mut Command) -> Result<()> {
    println!("+ {command:?}");
    let status = command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{command:?} failed ({status})");
    }
    Ok(())
}

//! Tests of the files in `deploy`: each has the syntax of its kind, and each command line of
//! `tessera` in them is one that this binary understands.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use serde_json::Value;

use super::{Cli, CliCommand};

fn repo_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repo_file(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Parses the words after `tessera`, as the binary does.
fn parse_command(words: &[&str]) -> CliCommand {
    let cli = Cli::try_parse_from([&["tessera"][..], words].concat());
    cli.unwrap_or_else(|e| panic!("tessera {}: {e}", words.join(" "))).command
}

/// Returns the command lines of a shell text, without continuations, comments and quotes.
fn shell_commands(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim).filter(|l| !l.starts_with('#'));
    let words = |line: &str| line.split_whitespace().map(|w| w.trim_matches('"').to_string()).collect();
    lines.map(words).collect()
}

/// Returns the arguments of each `tessera` in a shell text.
fn tessera_arguments(text: &str) -> Vec<Vec<String>> {
    let commands = shell_commands(text).into_iter();
    let after = |words: Vec<String>| {
        let at = words.iter().position(|w| w == "tessera" || w.ends_with("/tessera"))?;
        let end = words.iter().position(|w| w == "&").unwrap_or(words.len());
        Some(words[at + 1..end].to_vec())
    };
    commands.filter_map(after).collect()
}

fn parse_all(commands: &[Vec<String>]) -> Vec<CliCommand> {
    commands.iter().map(|c| parse_command(&c.iter().map(String::as_str).collect::<Vec<_>>())).collect()
}

#[test]
fn the_slurm_script_starts_a_stream() {
    let path = "deploy/slurm/stream.sbatch";
    let checked = Command::new("bash").arg("-n").arg(repo_file(path)).output().expect("bash runs");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let commands = parse_all(&tessera_arguments(&read(path)));
    assert!(matches!(commands[..], [CliCommand::Stream(_)]), "{commands:?}");
}

#[test]
fn the_manifest_starts_a_stream_in_each_pod() {
    let manifest: Value =
        serde_json::from_str(&read("deploy/kubernetes/leader-worker-set.json")).expect("JSON");
    assert_eq!(manifest["kind"], "LeaderWorkerSet");
    let pod = &manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"];
    let container = &pod["containers"][0];
    let arguments: Vec<String> = serde_json::from_value(container["args"].clone()).expect("arguments");
    // The kubelet replaces the variable by the address of the pod.
    let arguments: Vec<String> = arguments.iter().map(|a| a.replace("$(POD_IP)", "10.0.0.7")).collect();
    let commands = parse_all(&[arguments]);
    assert!(matches!(commands[..], [CliCommand::Stream(_)]), "{commands:?}");
    // Every mounted volume exists, and the secret is where the variable says.
    let names = |list: &Value| -> Vec<String> {
        list.as_array().expect("a list").iter().map(|v| v["name"].as_str().expect("a name").into()).collect()
    };
    let volumes = names(&pod["volumes"]);
    assert!(names(&container["volumeMounts"]).iter().all(|m| volumes.contains(m)), "{volumes:?}");
    let named = |list: &Value, name: &str| {
        list.as_array().expect("a list").iter().find(|v| v["name"] == name).cloned().expect("a name")
    };
    let secret = named(&container["env"], "TESSERA_SECRET_FILE")["value"].clone();
    let mount = named(&container["volumeMounts"], "secret")["mountPath"].clone();
    assert_eq!(secret, format!("{}/secret", mount.as_str().expect("a path")));
    let mode = named(&pod["volumes"], "secret")["secret"]["defaultMode"].as_u64().expect("a mode");
    assert_eq!(mode & 0o007, 0, "every user could read the secret");
}

#[test]
fn the_unit_starts_a_server() {
    let text = read("deploy/systemd/tessera-serve.service");
    let mut sections: Vec<(String, Vec<(String, String)>)> = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        match line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            Some(section) => sections.push((section.to_string(), Vec::new())),
            None => {
                let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("no key: {line}"));
                let section = &mut sections.last_mut().expect("a section before the first key").1;
                section.push((key.to_string(), value.to_string()));
            }
        }
    }
    let names: Vec<&str> = sections.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["Unit", "Service", "Install"]);
    let value = |key: &str| sections[1].1.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str());
    let start = value("ExecStart").expect("ExecStart");
    assert!(start.starts_with('/'), "systemd wants an absolute path: {start}");
    let commands = parse_all(&tessera_arguments(start));
    assert!(matches!(commands[..], [CliCommand::Serve(_)]), "{commands:?}");
    // The token of the command line is the credential that the unit loads.
    let (credential, _) = value("LoadCredential").and_then(|v| v.split_once(':')).expect("a credential");
    assert!(start.contains(&format!("${{CREDENTIALS_DIRECTORY}}/{credential}")), "{start}");
}

#[test]
fn the_containerfile_builds_the_binary_that_it_copies() {
    let text = read("deploy/container/Containerfile").replace("\\\n", " ");
    let steps: Vec<(&str, &str)> = text
        .lines()
        .filter(|l| !l.trim().is_empty() && !l.starts_with('#'))
        .map(|l| l.split_once(' ').unwrap_or_else(|| panic!("no argument: {l}")))
        .collect();
    let known = ["FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"];
    assert!(steps.iter().all(|(step, _)| known.contains(step)), "{steps:?}");
    let all = |name: &str| steps.iter().filter(|(s, _)| *s == name).map(|(_, a)| *a).collect::<Vec<_>>();
    let toolchain = read("rust-toolchain.toml");
    let version =
        toolchain.split("channel = \"").nth(1).and_then(|t| t.split('"').next()).expect("a version");
    let image = all("FROM")[0];
    let tag = image.split("rust:").nth(1).and_then(|t| t.split('-').next()).expect("a tag");
    assert!(version.starts_with(tag), "{image} does not build {version}");
    let build = all("RUN")[0];
    assert!(build.contains("--package tessera-cli --bin tessera"), "{build}");
    let copied = all("COPY")[1].split_whitespace().nth(2).expect("where to");
    let entry: Vec<String> = serde_json::from_str(all("ENTRYPOINT")[0]).expect("a JSON list");
    assert_eq!(entry, [copied]);
    let command: Vec<String> = serde_json::from_str(all("CMD")[0]).expect("a JSON list");
    assert!(matches!(parse_all(&[command])[..], [CliCommand::Doctor(_)]));
}

#[test]
fn the_command_lines_of_the_guide_are_understood() {
    let guide = read("docs/guides/launchers.md");
    let block =
        guide.split("```sh\n").nth(1).and_then(|t| t.split("```").next()).expect("a block of commands");
    let commands = parse_all(&tessera_arguments(block));
    assert_eq!(commands.len(), 4, "{commands:?}");
    assert!(commands.iter().all(|c| matches!(c, CliCommand::Stream(_))), "{commands:?}");
    for file in guide.split("](../../deploy/").skip(1).filter_map(|t| t.split(')').next()) {
        assert!(repo_file("deploy").join(file).is_file(), "{file}");
    }
}

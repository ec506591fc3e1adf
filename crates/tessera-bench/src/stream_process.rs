//! Runs `tessera stream` as a child process: starts it with a tag in its environment, follows its
//! record, and reports how it ended.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use tempfile::TempDir;

use crate::process_list::{Process, RUN_TAG_VARIABLE, find_ranks, find_tagged, new_run_tag};
use rustix::process::Signal;

/// Maximum wait until a run has written the expected chunks.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval at which a wait for chunks reads the new lines of the record.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The `tessera` binary and the model to stream.
#[derive(Debug, Clone, clap::Args)]
pub struct StreamTarget {
    /// The tessera binary [default: next to this binary]
    #[arg(long, value_name = "FILE")]
    pub tessera: Option<PathBuf>,

    /// Folder of a video model: config.json, stream.toml and weights
    #[arg(long, value_name = "DIR", default_value = "fixtures/wan-odd")]
    pub model: PathBuf,

    /// Text prompt of all chunks
    #[arg(long, value_name = "TEXT", default_value = "red")]
    pub prompt: String,
}

impl StreamTarget {
    /// Returns the path of the binary, or an error if the file does not exist.
    pub fn binary_path(&self) -> anyhow::Result<PathBuf> {
        let path = match &self.tessera {
            Some(path) => path.clone(),
            None => std::env::current_exe()?.with_file_name("tessera"),
        };
        if !path.is_file() {
            bail!(
                "{} does not exist: build tessera-cli with the same profile, or pass --tessera",
                path.display()
            );
        }
        Ok(std::path::absolute(path)?)
    }
}

/// A stream of some length.
#[derive(Debug, Clone, clap::Args)]
pub struct StreamArgs {
    #[command(flatten)]
    pub target: StreamTarget,

    /// Mesh of the stream, such as tp=2
    #[arg(long, default_value = "tp=2")]
    pub mesh: String,

    /// Placement of the leader: mesh, pp0 or pp1
    #[arg(long, default_value = "mesh")]
    pub topology: String,

    /// Number of chunks to stream
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub chunks: u32,
}

impl StreamArgs {
    /// Builds the command line of the stream, which writes into the new folder `run` of `dir`.
    pub fn command_line(&self, dir: &Path) -> anyhow::Result<Vec<String>> {
        let text = |p: PathBuf| p.to_str().map(str::to_string).context("the path is not UTF-8");
        let (binary, model) =
            (text(self.target.binary_path()?)?, text(std::path::absolute(&self.target.model)?)?);
        let mut argv = vec![binary, "stream".into(), model];
        argv.extend(["--oversubscribe", "--quiet", "--format", "json"].map(String::from));
        argv.extend(["--mesh", &self.mesh, "--topology", &self.topology].map(String::from));
        argv.extend(
            ["--prompt", &self.target.prompt, "--chunks", &self.chunks.to_string()].map(String::from),
        );
        argv.extend(["--out".into(), text(dir.join("run"))?]);
        Ok(argv)
    }

    /// Starts the stream in a new temporary folder with a new tag.
    pub fn start(&self, more: &[String]) -> anyhow::Result<(TempDir, StreamProcess)> {
        let dir = tempfile::tempdir()?;
        let argv = [&self.command_line(dir.path())?, more].concat();
        let stream = StreamProcess::start(&argv, dir.path(), &new_run_tag(), &[])?;
        Ok((dir, stream))
    }
}

/// A `tessera stream` that runs or has ended. Dropping the value kills every process of the run.
pub struct StreamProcess {
    child: Child,
    /// Value of [`RUN_TAG_VARIABLE`] in the environment of every process of the run.
    pub tag: String,
    /// Working folder, with the folder `run` and the output files.
    pub dir: PathBuf,
    status: Option<ExitStatus>,
}

impl StreamProcess {
    /// Starts a command with a tag. Its output goes to files in `dir`, so that the process never
    /// blocks on a pipe.
    pub fn start(
        argv: &[String],
        dir: &Path,
        tag: &str,
        variables: &[(&str, String)],
    ) -> anyhow::Result<StreamProcess> {
        let (program, args) = argv.split_first().context("the command is empty")?;
        let file = |name: &str| File::create(dir.join(name));
        let child = Command::new(program)
            .args(args)
            .env(RUN_TAG_VARIABLE, tag)
            .envs(variables.iter().map(|(k, v)| (*k, v.as_str())))
            .stdin(Stdio::null())
            .stdout(file("stdout")?)
            .stderr(file("stderr")?)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        Ok(StreamProcess { child, tag: tag.to_string(), dir: dir.to_path_buf(), status: None })
    }

    /// Returns the process that launched the ranks, under this name, and its ranks.
    pub fn list_processes(&self, launcher: &str) -> Vec<(String, Process)> {
        let own = self.launcher_process().map(|p| (launcher.to_string(), p));
        let ranks = find_ranks(self.launcher_pid(), &self.tag);
        own.into_iter().chain(ranks.into_iter().map(|(rank, p)| (format!("rank {rank}"), p))).collect()
    }

    /// Returns the launcher with its start time, or `None` after it was reaped.
    pub fn launcher_process(&self) -> Option<Process> {
        Process::from_pid(self.child.id())
    }

    /// Returns the process id of the launcher, which is the parent of the ranks that it starts.
    pub fn launcher_pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns a reader at the start of `run/record.jsonl`, which need not exist yet.
    pub fn open_record(&self) -> JsonTail {
        JsonTail::new(self.dir.join("run/record.jsonl"))
    }

    /// Reaps the launcher if it has ended, and returns its status.
    pub fn try_reap(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Waits for the launcher to end and reaps it.
    pub fn wait(&mut self) {
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }

    /// Waits until the record contains `chunks` chunks.
    pub fn wait_for_chunks(&mut self, tail: &mut JsonTail, chunks: u64) -> anyhow::Result<()> {
        let since = Instant::now();
        let mut seen_chunks = 0;
        loop {
            seen_chunks += tail.read()?.iter().filter(|l| l["kind"] == "chunk").count() as u64;
            if seen_chunks >= chunks {
                return Ok(());
            }
            if let Some(status) = self.try_reap() {
                bail!("the stream ended early ({status}): {}", self.output_text());
            }
            if since.elapsed() > START_TIMEOUT {
                bail!(
                    "only {seen_chunks} chunks after {} s: {}",
                    START_TIMEOUT.as_secs(),
                    self.output_text()
                );
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the JSON on the last line that the launcher has printed, or `None` if that line is
    /// not JSON.
    pub fn printed_result(&self) -> Option<Value> {
        let text = std::fs::read_to_string(self.dir.join("stdout")).ok()?;
        serde_json::from_str(text.lines().last()?).ok()
    }

    /// Returns the code and rank of the reported failure. They come from the result or, for a rank
    /// that joined, from standard error.
    pub fn reported_failure(&self) -> (Option<String>, Option<u64>) {
        if let Some(result) = self.printed_result() {
            let failure = &result["failure"];
            return (failure["code"].as_str().map(str::to_string), failure["rank"].as_u64());
        }
        parse_failure_line(&std::fs::read_to_string(self.dir.join("stderr")).unwrap_or_default())
    }

    /// Returns all output of the process, for people.
    pub fn output_text(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        format!("{}{}", read("stdout"), read("stderr"))
    }

    /// Describes briefly how the launcher ended.
    pub fn describe_end(&self) -> String {
        use std::os::unix::process::ExitStatusExt;
        match self.status {
            None => "runs".to_string(),
            Some(s) => match (s.code(), s.signal()) {
                (Some(code), _) => format!("exit {code}"),
                (None, Some(signal)) => format!("signal {signal}"),
                _ => s.to_string(),
            },
        }
    }
}

/// Parses code and rank from a line such as `failed[T0743]: a rank stalled, rank 1`.
fn parse_failure_line(text: &str) -> (Option<String>, Option<u64>) {
    let Some(line) = text.lines().find_map(|l| l.strip_prefix("failed[")) else { return (None, None) };
    let code = line.split(']').next().map(str::to_string);
    (code, line.rsplit_once(", rank ").and_then(|(_, r)| r.trim().parse().ok()))
}

impl Drop for StreamProcess {
    /// Kills every process of the run, so that none outlives the benchmark even after an error.
    fn drop(&mut self) {
        for p in find_tagged(&self.tag) {
            p.send_signal(Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a file of JSON lines while it grows.
pub struct JsonTail {
    path: PathBuf,
    offset: u64,
    partial_line: Vec<u8>,
}

impl JsonTail {
    /// Starts at the beginning of the file, which need not exist yet.
    pub fn new(path: PathBuf) -> JsonTail {
        JsonTail { path, offset: 0, partial_line: Vec::new() }
    }

    /// Returns the complete lines since the last call.
    pub fn read(&mut self) -> anyhow::Result<Vec<Value>> {
        let Ok(mut file) = OpenOptions::new().read(true).open(&self.path) else { return Ok(Vec::new()) };
        file.seek(SeekFrom::Start(self.offset))?;
        self.offset += file.read_to_end(&mut self.partial_line)? as u64;
        let Some(end) = self.partial_line.iter().rposition(|b| *b == b'\n') else { return Ok(Vec::new()) };
        let lines: Vec<u8> = self.partial_line.drain(..=end).collect();
        let lines = lines.split(|b| *b == b'\n').filter(|l| !l.is_empty());
        lines
            .map(|l| serde_json::from_slice(l).context("the record contains a line that is not JSON"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_failure_is_read_from_its_line() {
        let text = "rank 1:\nfailed[T0743]: a rank stalled, rank 0\n  no sign of life\n";
        assert_eq!(parse_failure_line(text), (Some("T0743".to_string()), Some(0)));
        let text = "failed[T0749]: the launching process is gone\n";
        assert_eq!(parse_failure_line(text), (Some("T0749".to_string()), None));
        assert_eq!(parse_failure_line("chunk 1/5"), (None, None));
    }

    #[test]
    fn a_line_is_read_once_and_completely() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("record.jsonl");
        let mut tail = JsonTail::new(path.clone());
        assert!(tail.read().expect("nothing").is_empty(), "the file does not exist yet");
        let mut file = File::create(&path).expect("made");
        file.write_all(b"{\"a\":1}\n{\"a\":").expect("written");
        assert_eq!(tail.read().expect("read"), [serde_json::json!({"a": 1})]);
        assert!(tail.read().expect("read").is_empty());
        file.write_all(b"2}\n{\"a\":3}\n").expect("written");
        let rest = tail.read().expect("read");
        assert_eq!(rest, [serde_json::json!({"a": 2}), serde_json::json!({"a": 3})]);
    }
}

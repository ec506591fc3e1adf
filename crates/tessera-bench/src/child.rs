//! `tessera stream` as a child process: started with a mark, followed through its record, asked how it ended.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use tempfile::TempDir;

use crate::procs::{MARK, Process, marked, nonce};
use rustix::process::Signal;

/// Longest wait for a run to come to where it is looked at.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How often the record is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Which `tessera`, and what it streams.
#[derive(Debug, Clone, clap::Args)]
pub struct Target {
    /// The binary; without it the one beside this one
    #[arg(long, value_name = "FILE")]
    pub tessera: Option<PathBuf>,

    /// Folder of the model
    #[arg(long, value_name = "DIR", default_value = "fixtures/wan-odd")]
    pub model: PathBuf,

    /// What to show
    #[arg(long, value_name = "TEXT", default_value = "red")]
    pub prompt: String,
}

impl Target {
    /// The binary that is run.
    pub fn binary(&self) -> anyhow::Result<PathBuf> {
        let path = match &self.tessera {
            Some(path) => path.clone(),
            None => std::env::current_exe()?.with_file_name("tessera"),
        };
        if !path.is_file() {
            bail!(
                "{} is not there: build tessera-cli with the same profile, or name --tessera",
                path.display()
            );
        }
        Ok(std::path::absolute(path)?)
    }

    /// A command line for a stream of so many chunks into a new folder `run` of `dir`.
    pub fn command(
        &self,
        dir: &Path,
        mesh: &str,
        topology: &str,
        chunks: u32,
    ) -> anyhow::Result<Vec<String>> {
        let text = |p: PathBuf| p.to_str().map(str::to_string).context("a path is not UTF-8");
        let mut words =
            vec![text(self.binary()?)?, "stream".into(), text(std::path::absolute(&self.model)?)?];
        words.extend(["--mesh", mesh, "--oversubscribe", "--quiet", "--format", "json"].map(String::from));
        words.extend(["--prompt".into(), self.prompt.clone(), "--chunks".into(), chunks.to_string()]);
        // Ranks that form the mesh themselves are the default, which needs no word.
        if topology != "mesh" {
            words.extend(["--topology".into(), topology.into()]);
        }
        words.extend(["--out".into(), text(dir.join("run"))?]);
        Ok(words)
    }
}

/// A stream that runs, or ran.
pub struct Stream {
    child: Child,
    /// The value of its mark.
    pub nonce: String,
    /// Its own folder, with `run` and what it printed.
    pub dir: PathBuf,
    status: Option<ExitStatus>,
}

impl Stream {
    /// Starts a command with a mark. What it prints goes into files of `dir`, so that nobody waits for a reader.
    pub fn start(
        words: &[String],
        dir: &Path,
        mark: &str,
        variables: &[(&str, String)],
    ) -> anyhow::Result<Stream> {
        let (program, args) = words.split_first().context("no command")?;
        let file = |name: &str| File::create(dir.join(name));
        let child = Command::new(program)
            .args(args)
            .env(MARK, mark)
            .envs(variables.iter().map(|(k, v)| (*k, v.as_str())))
            .stdin(Stdio::null())
            .stdout(file("stdout")?)
            .stderr(file("stderr")?)
            .spawn()
            .with_context(|| format!("{program} cannot be started"))?;
        Ok(Stream { child, nonce: mark.to_string(), dir: dir.to_path_buf(), status: None })
    }

    /// Starts it in a new temporary folder, with a mark of its own.
    pub fn fresh(
        target: &Target,
        mesh: &str,
        topology: &str,
        chunks: u32,
    ) -> anyhow::Result<(TempDir, Stream)> {
        let dir = tempfile::tempdir()?;
        let words = target.command(dir.path(), mesh, topology, chunks)?;
        let stream = Stream::start(&words, dir.path(), &nonce(), &[])?;
        Ok((dir, stream))
    }

    /// The launcher.
    pub fn launcher(&self) -> Option<Process> {
        Process::of(self.child.id())
    }

    /// Id of the launcher.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its record, from the beginning.
    pub fn record(&self) -> Tail {
        Tail::new(self.dir.join("run/record.jsonl"))
    }

    /// Collects the launcher if it ended; its status once it has.
    pub fn collect(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Collects the launcher, which has ended or is about to.
    pub fn wait(&mut self) {
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }

    /// Waits until so many chunks are in the record.
    pub fn until_chunks(&mut self, tail: &mut Tail, chunks: u64) -> anyhow::Result<()> {
        let since = Instant::now();
        let mut there = 0;
        loop {
            there += tail.read()?.iter().filter(|l| l["kind"] == "chunk").count() as u64;
            if there >= chunks {
                return Ok(());
            }
            if let Some(status) = self.collect() {
                bail!("the stream ended early ({status}): {}", self.said());
            }
            if since.elapsed() > START_LIMIT {
                bail!("{there} chunks after {} s: {}", START_LIMIT.as_secs(), self.said());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The result that the launcher printed, if it did.
    pub fn result(&self) -> Option<Value> {
        let text = std::fs::read_to_string(self.dir.join("stdout")).ok()?;
        serde_json::from_str(text.lines().last()?).ok()
    }

    /// Code and rank of the failure that it told: in its result, or of a rank that joined on its standard error.
    pub fn failure(&self) -> (Option<String>, Option<u64>) {
        if let Some(result) = self.result() {
            let failure = &result["failure"];
            return (failure["code"].as_str().map(str::to_string), failure["rank"].as_u64());
        }
        told(&std::fs::read_to_string(self.dir.join("stderr")).unwrap_or_default())
    }

    /// All that it printed, for a person.
    pub fn said(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        format!("{}{}", read("stdout"), read("stderr"))
    }

    /// How the launcher ended, in a few words.
    pub fn ended(&self) -> String {
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

/// Code and rank of a line such as `failed[T0743]: a rank stalled, rank 1`.
fn told(text: &str) -> (Option<String>, Option<u64>) {
    let Some(line) = text.lines().find_map(|l| l.strip_prefix("failed[")) else { return (None, None) };
    let code = line.split(']').next().map(str::to_string);
    (code, line.rsplit_once(", rank ").and_then(|(_, r)| r.trim().parse().ok()))
}

impl Drop for Stream {
    /// Nobody outlives the benchmark, whatever went wrong in it.
    fn drop(&mut self) {
        for p in marked(&self.nonce) {
            p.signal(Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a file of JSON lines as it grows.
pub struct Tail {
    path: PathBuf,
    at: u64,
    rest: Vec<u8>,
}

impl Tail {
    /// From its beginning; it need not be there yet.
    pub fn new(path: PathBuf) -> Tail {
        Tail { path, at: 0, rest: Vec::new() }
    }

    /// The whole lines since last time.
    pub fn read(&mut self) -> anyhow::Result<Vec<Value>> {
        let Ok(mut file) = OpenOptions::new().read(true).open(&self.path) else { return Ok(Vec::new()) };
        file.seek(SeekFrom::Start(self.at))?;
        self.at += file.read_to_end(&mut self.rest)? as u64;
        let Some(end) = self.rest.iter().rposition(|b| *b == b'\n') else { return Ok(Vec::new()) };
        let lines: Vec<u8> = self.rest.drain(..=end).collect();
        let lines = lines.split(|b| *b == b'\n').filter(|l| !l.is_empty());
        lines.map(|l| serde_json::from_slice(l).context("a line of the record is not JSON")).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_failure_is_read_from_its_line() {
        let text = "rank 1:\nfailed[T0743]: a rank stalled, rank 0\n  no sign of life\n";
        assert_eq!(told(text), (Some("T0743".to_string()), Some(0)));
        let text = "failed[T0749]: the launching process is gone\n";
        assert_eq!(told(text), (Some("T0749".to_string()), None));
        assert_eq!(told("chunk 1/5"), (None, None));
    }

    #[test]
    fn a_line_is_read_once_and_whole() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("record.jsonl");
        let mut tail = Tail::new(path.clone());
        assert!(tail.read().expect("nothing").is_empty(), "it is not there yet");
        let mut file = File::create(&path).expect("made");
        file.write_all(b"{\"a\":1}\n{\"a\":").expect("written");
        assert_eq!(tail.read().expect("read"), [serde_json::json!({"a": 1})]);
        assert!(tail.read().expect("read").is_empty());
        file.write_all(b"2}\n{\"a\":3}\n").expect("written");
        let rest = tail.read().expect("read");
        assert_eq!(rest, [serde_json::json!({"a": 2}), serde_json::json!({"a": 3})]);
    }
}

//! How fast two hosts that lose each other are both rid of a run: two network namespaces with one rank each, a link
//! between them, and the link cut while chunks flow.
//!
//! The link is cut in two ways. *Down*: an end of the link is taken down, as when a cable is pulled. *Silent*: both
//! ends stay up and what they send goes nowhere, as behind a switch that fails; only a clock can find that.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::json;

use crate::child::{Stream, Target};
use crate::procs::{marked, nonce, until_gone};
use crate::stats::{most, quantile, spread};
use crate::{Measured, Output};

/// Cut the link between two hosts of a run, as network namespaces: how soon both are rid of it
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: Target,

    /// How the link is cut; may be repeated
    #[arg(long = "cut", value_enum, default_values_t = [Cut::Down, Cut::Silent])]
    cuts: Vec<Cut>,

    /// How often each
    #[arg(long, value_name = "N", default_value_t = 50)]
    repetitions: u32,

    /// Whoever lives so long after the cut counts as left behind
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    limit_s: u64,

    #[command(flatten)]
    pub output: Output,
}

/// Everything is gone by then, in seconds.
const BAR_S: f64 = 10.0;
/// Chunks on disk before the cut.
const CHUNKS_BEFORE: u64 = 3;
const ENDLESS: u32 = 1_000_000;
/// Where ranks meet.
const PORT: u16 = 29_500;
/// Addresses of the two ends.
const ENDS: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// An address of hardware that nobody has.
const NOBODY: &str = "02:00:00:00:00:99";

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Cut {
    /// One end is taken down
    Down,
    /// Both ends stay up, and nothing arrives
    Silent,
}

impl Cut {
    fn name(self) -> &'static str {
        match self {
            Cut::Down => "down",
            Cut::Silent => "silent",
        }
    }
}

struct Case {
    cut: Cut,
    took_s: Vec<f64>,
    left: usize,
    /// Sides that named the other one.
    right: u32,
    /// What each side said, and how often.
    said: BTreeMap<String, u32>,
}

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.repetitions > 0, "--repetitions 0: nothing to measure");
    if let Err(why) = Hosts::make("probe") {
        let why = format!("{why:#}");
        let numbers = json!({"bench": "partition", "skipped": why});
        return Ok(Measured {
            text: format!("skipped: this machine makes no network namespaces: {why}"),
            numbers,
        });
    }
    let case = |cut: &Cut| Case { cut: *cut, took_s: Vec::new(), left: 0, right: 0, said: BTreeMap::new() };
    let mut cases: Vec<Case> = args.cuts.iter().map(case).collect();
    for repetition in 0..args.repetitions {
        for case in &mut cases {
            once(args, case, repetition)
                .with_context(|| format!("cut {}, repetition {repetition}", case.cut.name()))?;
        }
        eprintln!("repetition {} of {}", repetition + 1, args.repetitions);
    }
    Ok(told(args, &cases))
}

fn once(args: &Args, case: &mut Case, repetition: u32) -> anyhow::Result<()> {
    let hosts = Hosts::make(&format!("{repetition}{}", case.cut.name()))?;
    let dir = tempfile::tempdir()?;
    let secret = dir.path().join("secret");
    write_secret(&secret)?;
    let mark = nonce();
    let mut sides = Vec::new();
    for rank in 0..ENDS.len() {
        let folder = dir.path().join(format!("rank-{rank}"));
        std::fs::create_dir(&folder)?;
        let mut words = hosts.inside(rank);
        words.extend(args.target.command(&folder, &format!("tp={}", ENDS.len()), "mesh", ENDLESS)?);
        words.extend(["--secret".into(), secret.display().to_string()]);
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", ENDS.len().to_string()),
            ("MASTER_ADDR", ENDS[0].to_string()),
            ("MASTER_PORT", PORT.to_string()),
        ];
        sides.push(Stream::start(&words, &folder, &mark, &variables)?);
    }
    let mut tail = sides[0].record();
    let begun = sides[0].until_chunks(&mut tail, CHUNKS_BEFORE);
    begun.with_context(|| format!("the other side: {}", sides[1].said()))?;
    let all = marked(&mark);
    let from = Instant::now();
    hosts.cut(case.cut)?;
    let (took, left) = until_gone(&mark, &all, from, Duration::from_secs(args.limit_s), || {
        for side in &mut sides {
            side.collect();
        }
    });
    case.took_s.push(took.as_secs_f64());
    case.left += left.len();
    for (rank, side) in sides.iter_mut().enumerate() {
        if left.is_empty() {
            side.wait();
        }
        let (code, named) = side.failure();
        case.right += u32::from(named == Some(1 - rank as u64));
        let named = named.map_or("no rank".to_string(), |r| format!("rank {r}"));
        let code = code.as_deref().unwrap_or("no code");
        *case.said.entry(format!("rank {rank}: {}, {code}, {named}", side.ended())).or_default() += 1;
        if !left.is_empty() {
            eprintln!("{} left; rank {rank} said: {}", left.len(), side.said());
        }
    }
    Ok(())
}

fn told(args: &Args, cases: &[Case]) -> Measured {
    let mut text = format!(
        "{:<12} {:>4} {:>8} {:>8} {:>8}  left  sides that named the other\n",
        "gone after", "n", "p50 s", "p99 s", "max s"
    );
    let mut rows = Vec::new();
    for c in cases {
        let (p50, p99, max) = (quantile(&c.took_s, 0.5), quantile(&c.took_s, 0.99), most(&c.took_s));
        let n = c.took_s.len();
        let _ = writeln!(
            text,
            "{:<12} {n:>4} {p50:>8.3} {p99:>8.3} {max:>8.3}  {:>4}  {} of {}",
            c.cut.name(),
            c.left,
            c.right,
            2 * n
        );
        for (said, times) in &c.said {
            let _ = writeln!(text, "    {times:>4} x {said}");
        }
        rows.push(json!({
            "cut": c.cut.name(),
            "seconds": spread(&c.took_s),
            "bar_s": BAR_S,
            "within_bar": max <= BAR_S,
            "orphans": c.left,
            "sides_named_right": c.right,
            "said": c.said,
        }));
    }
    let orphans: usize = cases.iter().map(|c| c.left).sum();
    let _ = write!(text, "{orphans} processes left behind");
    let numbers = json!({
        "bench": "partition",
        "model": args.target.model,
        "repetitions": args.repetitions,
        "orphans": orphans,
        "cases": rows,
    });
    Measured { text, numbers }
}

/// Two namespaces and the link between them, gone with this.
struct Hosts {
    names: [String; 2],
    devices: [String; 2],
}

impl Hosts {
    fn make(tag: &str) -> anyhow::Result<Hosts> {
        let id = std::process::id();
        let hosts = Hosts {
            names: ["a", "b"].map(|side| format!("tessera-{id}-{tag}-{side}")),
            // A name of a device has 15 characters at most.
            devices: ["a", "b"].map(|side| format!("ts{id}{side}")),
        };
        for name in &hosts.names {
            ip(&["netns", "add", name])?;
        }
        let ([a, b], [left, right]) = (&hosts.names, &hosts.devices);
        ip(&["link", "add", left, "netns", a, "type", "veth", "peer", "name", right, "netns", b])?;
        for ((name, device), address) in hosts.names.iter().zip(&hosts.devices).zip(ENDS) {
            ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", device])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", device, "up"])?;
        }
        Ok(hosts)
    }

    /// What begins a command that runs at one end.
    fn inside(&self, end: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.names[end]].map(String::from).to_vec()
    }

    fn cut(&self, cut: Cut) -> anyhow::Result<()> {
        match cut {
            Cut::Down => ip(&["-n", &self.names[1], "link", "set", &self.devices[1], "down"]),
            Cut::Silent => (0..2).try_for_each(|end| {
                let (name, device, other) = (&self.names[end], &self.devices[end], ENDS[1 - end]);
                let to = ["lladdr", NOBODY, "dev", device, "nud", "permanent"];
                ip(&[&["-n", name, "neighbour", "replace", other][..], &to].concat())
            }),
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // One that was never made cannot be deleted.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(args: &[&str]) -> anyhow::Result<()> {
    let o = Command::new("ip").args(args).output().context("`ip` cannot be run")?;
    if !o.status.success() {
        bail!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&o.stderr).trim());
    }
    Ok(())
}

/// A secret that only this user can read.
fn write_secret(path: &Path) -> anyhow::Result<()> {
    use std::io::{Read, Write as _};
    use std::os::unix::fs::OpenOptionsExt;
    let mut random = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    let text: String = random.iter().map(|b| format!("{b:02x}")).collect();
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(file.write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only where the machine lets this user make namespaces.
    #[test]
    fn a_cut_link_carries_nothing() {
        for cut in [Cut::Down, Cut::Silent] {
            let Ok(hosts) = Hosts::make(&format!("test{}", cut.name())) else { return };
            let reaches = || {
                let mut words = hosts.inside(0);
                let connect = format!("exec 3<>/dev/tcp/{}/{PORT}", ENDS[1]);
                words.extend(["timeout", "1", "bash", "-c", &connect].map(String::from));
                let o = Command::new(&words[0]).args(&words[1..]).output().expect("run");
                String::from_utf8_lossy(&o.stderr).contains("refused")
            };
            // Nobody listens: a refusal is an answer of the other end.
            assert!(reaches(), "the link does not carry");
            hosts.cut(cut).expect("cut");
            assert!(!reaches(), "{} is not cut", cut.name());
        }
    }
}

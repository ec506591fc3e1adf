//! Network partition: how soon both hosts end a run when they lose each other. Two network
//! namespaces with one rank each are connected by a link that is cut while chunks are streamed.
//!
//! There are two ways to cut the link. *Down* takes one end of the link down, as when a cable is
//! pulled. *Silent* keeps both ends up and drops all packets, as a failed switch does; only a
//! timeout can detect that.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use crate::BenchResult;
use crate::endings::RunEndings;
use crate::namespaces::{NetworkNamespace, PORT, join_variables, run_ip, skip_benchmark, write_secret};
use crate::process_list::{find_tagged, new_run_tag, wait_until_gone};
use crate::stream_process::{StreamArgs, StreamProcess, StreamTarget};

/// Cut the link between two hosts of a run (network namespaces); measure when both have ended it
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: StreamTarget,

    /// Ways to cut the link; may be repeated
    #[arg(long = "cut", value_enum, default_values_t = [LinkCut::Down, LinkCut::Silent])]
    cuts: Vec<LinkCut>,

    /// Number of repetitions of each case
    #[arg(long, value_name = "N", default_value_t = 50)]
    repetitions: u32,

    /// Time after the cut at which a living process counts as left behind
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    limit_s: u64,
}

/// Width of the column with the name of a case, in characters.
const NAME_WIDTH: usize = 15;
/// Longest allowed time from the cut until all processes at both ends are gone, in seconds.
const LIMIT_S: f64 = 10.0;
/// Number of chunks on disk before the cut.
const CHUNKS_BEFORE: u64 = 3;
const ENDLESS_CHUNKS: u32 = 1_000_000;
/// Addresses of the ends of the link, by rank, in one /24 network.
pub const END_ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LinkCut {
    /// Take one end down
    Down,
    /// Keep both ends up and drop all packets
    Silent,
}

impl LinkCut {
    fn name(self) -> &'static str {
        match self {
            LinkCut::Down => "down",
            LinkCut::Silent => "silent",
        }
    }
}

/// Cuts the link between two hosts during a stream and measures how soon both end the run.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.repetitions > 0, "--repetitions 0: nothing to measure");
    if let Err(why) = NetnsPair::new("probe") {
        return Ok(skip_benchmark("partition", &why));
    }
    let mut cases: Vec<(LinkCut, RunEndings)> =
        args.cuts.iter().map(|cut| (*cut, RunEndings::default())).collect();
    for repetition in 0..args.repetitions {
        for (cut, endings) in &mut cases {
            run_once(args, *cut, endings, repetition)
                .with_context(|| format!("cut {}, repetition {repetition}", cut.name()))?;
        }
        eprintln!("repetition {} of {}", repetition + 1, args.repetitions);
    }
    Ok(summarize_cases(args, &cases))
}

fn run_once(args: &Args, cut: LinkCut, endings: &mut RunEndings, repetition: u32) -> anyhow::Result<()> {
    let hosts = NetnsPair::new(&format!("{repetition}{}", cut.name()))?;
    let dir = tempfile::tempdir()?;
    let secret = dir.path().join("secret");
    write_secret(&secret)?;
    let tag = new_run_tag();
    let mut sides = Vec::new();
    for rank in 0..END_ADDRESSES.len() {
        let folder = dir.path().join(format!("rank-{rank}"));
        std::fs::create_dir(&folder)?;
        let mut argv = hosts.command_prefix(rank);
        let stream = StreamArgs {
            target: args.target.clone(),
            mesh: format!("tp={}", END_ADDRESSES.len()),
            topology: "mesh".to_string(),
            chunks: ENDLESS_CHUNKS,
        };
        argv.extend(stream.command_line(&folder)?);
        argv.extend(["--secret".into(), secret.display().to_string()]);
        let variables = join_variables(rank, END_ADDRESSES.len(), (END_ADDRESSES[0], PORT));
        sides.push(StreamProcess::start(&argv, &folder, &tag, &variables)?);
    }
    let mut tail = sides[0].open_record();
    let begun = sides[0].wait_for_chunks(&mut tail, CHUNKS_BEFORE);
    begun.with_context(|| format!("the other side: {}", sides[1].output_text()))?;
    let all = find_tagged(&tag);
    let from = Instant::now();
    hosts.cut_link(cut)?;
    let (took, left) = wait_until_gone(&tag, &all, from, Duration::from_secs(args.limit_s), || {
        for side in &mut sides {
            side.try_reap();
        }
    });
    endings.add_run(took, left.len());
    for (rank, side) in sides.iter_mut().enumerate() {
        if left.is_empty() {
            side.wait();
        }
        let (code, named_rank) = side.reported_failure();
        let end = format!("rank {rank}: {}", side.describe_end());
        // The failure must name the rank at the other end of the link.
        endings.add_report(&end, code.as_deref(), named_rank, named_rank == Some(1 - rank as u64));
        if !left.is_empty() {
            eprintln!("{} processes left; output of rank {rank}: {}", left.len(), side.output_text());
        }
    }
    Ok(())
}

fn summarize_cases(args: &Args, cases: &[(LinkCut, RunEndings)]) -> BenchResult {
    let mut text = RunEndings::heading(NAME_WIDTH, "sides that named the other");
    let mut rows = Vec::new();
    for (cut, endings) in cases {
        endings.write_lines(cut.name(), NAME_WIDTH, END_ADDRESSES.len(), &mut text);
        let mut row = endings.to_json(LIMIT_S);
        row.insert("cut".into(), cut.name().into());
        row.insert("sides_named_correctly".into(), endings.named_correctly.into());
        rows.push(row);
    }
    let orphans: usize = cases.iter().map(|(_, endings)| endings.left_behind).sum();
    let _ = write!(text, "{orphans} processes left behind");
    let numbers = json!({
        "bench": "partition",
        "model": args.target.model,
        "repetitions": args.repetitions,
        "orphans": orphans,
        "cases": rows,
    });
    BenchResult { text, numbers }
}

/// Two hosts and the link between them.
pub struct NetnsPair {
    hosts: [NetworkNamespace; 2],
    devices: [String; 2],
}

impl NetnsPair {
    pub fn new(tag: &str) -> anyhow::Result<NetnsPair> {
        let id = std::process::id();
        let create = |side: &str| NetworkNamespace::new(format!("tessera-{id}-{tag}-{side}"));
        let hosts = [create("a")?, create("b")?];
        // The name of a network device has at most 15 characters.
        let devices = ["a", "b"].map(|side| format!("ts{id}{side}"));
        let ([a, b], [left, right]) = (&hosts, &devices);
        let pair = ["link", "add", left, "netns", &a.name, "type", "veth", "peer", "name", right];
        run_ip(&[&pair[..], &["netns", &b.name]].concat())?;
        for ((host, device), address) in hosts.iter().zip(&devices).zip(END_ADDRESSES) {
            host.bring_up(device, address)?;
        }
        Ok(NetnsPair { hosts, devices })
    }

    /// Returns the prefix of a command that runs at one end.
    pub fn command_prefix(&self, end: usize) -> Vec<String> {
        self.hosts[end].command_prefix()
    }

    pub fn cut_link(&self, cut: LinkCut) -> anyhow::Result<()> {
        match cut {
            LinkCut::Down => self.hosts[1].take_down(&self.devices[1]),
            LinkCut::Silent => (0..2).try_for_each(|end| {
                self.hosts[end].lose_packets_to(END_ADDRESSES[1 - end], &self.devices[end])
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test passes without a check on machines where this user cannot create namespaces.
    #[test]
    fn a_cut_link_carries_nothing() {
        for cut in [LinkCut::Down, LinkCut::Silent] {
            let Ok(hosts) = NetnsPair::new(&format!("test{}", cut.name())) else { return };
            let reaches = || hosts.hosts[0].reaches(END_ADDRESSES[1]);
            assert!(reaches(), "the link does not work");
            hosts.cut_link(cut).expect("cut");
            assert!(!reaches(), "{} is not cut", cut.name());
        }
    }
}
